"""The cells of the slow-network bench, run one by one: contestants, workers, rates, and what each cell measured."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweep.bench.network import Link, Network
from sweep.bench.processes import HostFailed, tail, until_death
from sweep.bench.worker import Spec

PORT = 29500
PROJECT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method of this project by its overrides, or a peer: torch's DDP with AdamW and a hook."""

    name: str
    overrides: tuple[str, ...] = ()
    peer: str | None = None
    rank: int = 0


EARLY = ("comm.overlap=true", "comm.bucket_mib=25")
LATE = ("comm.overlap=false", *EARLY[1:])
# Cores are small: buckets of DDP's size would hold all of them, and leave when backward is over.
EARLY_CORES = ("comm.overlap=true", "comm.bucket_mib=4")
LATE_CORES = ("comm.overlap=false", *EARLY_CORES[1:])
LOW_RANK_HEAD = ("optimizer=tsr", "rank.head=64")
SLIM = (*LOW_RANK_HEAD, "refresh.head=100", "refresh.embedding=100", "comm.dtype=bf16")

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(name="adamw", overrides=("optimizer=adamw", *EARLY)),
        Contestant(name="adamw_late", overrides=("optimizer=adamw", *LATE)),
        Contestant(name="galore", overrides=("optimizer=galore", *EARLY)),
        Contestant(name="one_sided", overrides=("optimizer=one_sided", *EARLY)),
        Contestant(name="tsr", overrides=("optimizer=tsr", *EARLY_CORES)),
        Contestant(name="tsr_late", overrides=("optimizer=tsr", *LATE_CORES)),
        Contestant(name="tsr_head", overrides=(*LOW_RANK_HEAD, *EARLY_CORES)),
        Contestant(name="tsr_bf16", overrides=(*SLIM, *EARLY_CORES)),
        Contestant(name="ddp_adamw", peer="none"),
        Contestant(name="ddp_bf16", peer="bf16"),
        Contestant(name="ddp_powersgd", peer="powersgd", rank=4),
    )
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every cell of a bench has in common; ``overrides`` choose the model and ranks, ``more`` wins over all."""

    overrides: tuple[str, ...]
    more: tuple[str, ...] = ()
    rows: int
    length: int
    passes: int
    repeats: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell: seconds and bytes of a step, weighed by the method's schedule, the first step left out.

    Medians over the repeats of a kind, of the slowest worker each. ``collectives`` are all-reduces a step;
    ``overlapped``: they begin while backward goes on. ``wire_ratio`` is the bytes that a worker's interface (or its
    sockets) sent over its ledger's times 2 (N - 1) / N, ``goodput_mbit`` what a large all-reduce reached in the same
    run, ``cores`` those that all workers shared.
    """

    method: str
    workers: int
    rate_mbit: float | None
    tokens: int
    step_s: float
    compute_s: float
    communication_s: float
    optimizer_s: float
    payload: float
    peak_payload: int
    first_payload: int
    collectives: float
    overlapped: bool
    wire_ratio: float | None
    goodput_mbit: float
    dropped: int
    cores: int


class Loopback:
    """Workers of this machine without hosts of their own, for those who are not root: no rate is limited."""

    interface = None
    link = Link(rate_mbit=None)

    def __init__(self, hosts: int) -> None:
        self.hosts = hosts


def overrides(work: Work, contestant: Contestant) -> list[str]:
    """Of the configuration: the experiment's, the contestant's, and last what was asked for."""
    return [*work.overrides, *contestant.overrides, *work.more]


def run_cell(place: Network | Loopback, contestant: Contestant, work: Work, folder: Path) -> Row:
    """Run a contestant on the hosts of a network as it stands, or on loopback."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = Spec(
        overrides=overrides(work, contestant),
        peer=contestant.peer,
        rank=contestant.rank,
        rows=work.rows,
        length=work.length,
        passes=work.passes,
        repeats=work.repeats,
        interface=place.interface,
        out=str(folder),
    )
    path = folder / "spec.json"
    path.write_text(json.dumps(asdict(spec)), encoding="utf-8")
    before = _dropped(place)
    launch(place, ["-m", "sweep.bench.worker", str(path)], log_dir=folder)
    results = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(place.hosts)]
    return summarise(
        results,
        method=contestant.name,
        rate_mbit=place.link.rate_mbit,
        tokens=work.rows * work.length * work.passes,
        overlapped=contestant.peer in ("none", "bf16") or EARLY[0] in contestant.overrides,
        dropped=_dropped(place) - before,
    )


def launch(place: Network | Loopback, program: Sequence[str], *, log_dir: Path) -> None:
    """Run a Python program by torchrun, one worker a host, exactly as across machines.

    Raises:
        HostFailed, TimeoutError: As `Network.run`.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    if isinstance(place, Network):
        master = ["--master-addr", place.addresses[0], "--master-port", str(PORT)]

        def command(host: int) -> list[str]:
            rank = ["--nnodes", str(place.hosts), "--node-rank", str(host), "--nproc-per-node", "1"]
            return [*torchrun, *rank, *master, *program]

        env["GLOO_SOCKET_IFNAME"] = place.interface
        place.run(command, log_dir=log_dir, timeout_s=TIMEOUT_S, env=env)
        return
    log = log_dir / "workers.log"
    local = [*until_death(), *torchrun, "--standalone", "--nproc-per-node", str(place.hosts), *program]
    with (
        log.open("wb") as output,
        subprocess.Popen(local, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **env}) as process,
    ):
        try:
            process.wait(TIMEOUT_S)
        except BaseException:
            process.terminate()  # torchrun ends its workers
            raise
    if process.returncode:
        raise HostFailed(f"torchrun ended with {process.returncode};{tail(log)}")


def _dropped(place: Network | Loopback) -> int:
    return sum(place.dropped()) if isinstance(place, Network) else 0


def summarise(
    results: Sequence[Mapping[str, Any]],
    *,
    method: str,
    rate_mbit: float | None,
    tokens: int,
    overlapped: bool,
    dropped: int,
) -> Row:
    """One row from what each worker wrote."""
    workers = len(results)
    kinds: Sequence[Mapping[str, int]] = results[0]["kinds"]
    steps = list(slowest(results))
    total = sum(kind["count"] for kind in kinds)

    def mean(of_kind: Callable[[Mapping[str, int]], float]) -> float:
        return sum(of_kind(kind) * kind["count"] for kind in kinds) / total

    def weighed(key: str) -> float:
        return mean(lambda kind: statistics.median(s[key] for s in steps if s["number"] == kind["number"]))

    sent = sum(step["payload"] for step in results[0]["steps"]) * 2 * (workers - 1) / workers
    return Row(
        method=method,
        workers=workers,
        rate_mbit=rate_mbit,
        tokens=tokens,
        step_s=weighed("step"),
        compute_s=weighed("compute"),
        communication_s=weighed("communication"),
        optimizer_s=weighed("optimizer"),
        payload=mean(lambda kind: kind["payload"]),
        peak_payload=max(kind["payload"] for kind in kinds),
        first_payload=results[0]["first"],
        collectives=mean(lambda kind: kind["collectives"]),
        overlapped=overlapped,
        wire_ratio=statistics.mean(result["wire"] for result in results) / sent if sent else None,
        goodput_mbit=min(result["goodput"] for result in results) * 8 / 1e6,
        dropped=dropped,
        cores=len(os.sched_getaffinity(0)),
    )


def slowest(results: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Of each step the record of the worker that took longest."""
    for records in zip(*(result["steps"] for result in results), strict=True):
        yield max(records, key=lambda record: record["step"])

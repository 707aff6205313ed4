"""The cells of the slow-network bench, run one by one: contestants, workers, rates, and what each cell measured."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweep.bench.network import Network
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


CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(name="adamw", overrides=("optimizer=adamw",)),
        Contestant(name="galore", overrides=("optimizer=galore",)),
        Contestant(name="one_sided", overrides=("optimizer=one_sided",)),
        Contestant(name="tsr", overrides=("optimizer=tsr",)),
        Contestant(name="tsr_head", overrides=("optimizer=tsr", "rank.head=64")),
        Contestant(
            name="tsr_bf16",
            overrides=("optimizer=tsr", "rank.head=64", "refresh.head=100", "refresh.embedding=100", "comm.dtype=bf16"),
        ),
        Contestant(name="ddp_adamw", peer="none"),
        Contestant(name="ddp_bf16", peer="bf16"),
        Contestant(name="ddp_powersgd", peer="powersgd", rank=4),
    )
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every cell of a bench has in common; ``overrides`` choose the model and ranks."""

    overrides: tuple[str, ...]
    rows: int
    length: int
    passes: int
    repeats: int
    interval: int = 100


@dataclass(frozen=True, kw_only=True)
class Row:
    """A cell: seconds and bytes of a step, weighed over the kinds of steps of one interval, the first step left out.

    Medians over the repeats of a kind, of the slowest worker each; ``wire_ratio`` is the interface's bytes over the
    ledger's times 2 (N - 1) / N, ``goodput`` what a large all-reduce reached in the same run, in Mbit/s.
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
    wire_ratio: float | None
    goodput_mbit: float
    dropped: int


def run_cell(network: Network, contestant: Contestant, work: Work, folder: Path) -> Row:
    """Run a contestant on the hosts of a network as it stands."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = Spec(
        overrides=[*work.overrides, *contestant.overrides],
        peer=contestant.peer,
        rank=contestant.rank,
        rows=work.rows,
        length=work.length,
        passes=work.passes,
        repeats=work.repeats,
        interval=work.interval,
        interface=network.interface,
        out=str(folder),
    )
    path = folder / "spec.json"
    path.write_text(json.dumps(asdict(spec)), encoding="utf-8")

    def command(host: int) -> list[str]:
        place = ["--nnodes", str(network.hosts), "--node-rank", str(host), "--nproc-per-node", "1"]
        master = ["--master-addr", network.addresses[0], "--master-port", str(PORT)]
        return [sys.executable, "-m", "torch.distributed.run", *place, *master, "-m", "sweep.bench.worker", str(path)]

    before = sum(network.dropped())
    network.run(
        command,
        log_dir=folder,
        timeout_s=TIMEOUT_S,
        env={"GLOO_SOCKET_IFNAME": network.interface, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)},
    )
    results = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(network.hosts)]
    return summarise(
        results,
        method=contestant.name,
        rate_mbit=network.link.rate_mbit,
        tokens=work.rows * work.length * work.passes,
        dropped=sum(network.dropped()) - before,
    )


def summarise(
    results: Sequence[Mapping[str, Any]], *, method: str, rate_mbit: float | None, tokens: int, dropped: int
) -> Row:
    """One row from what each worker wrote."""
    workers = len(results)
    weights: Mapping[str, int] = results[0]["weights"]
    steps = list(slowest(results))
    total = sum(weights.values())

    def weighed(key: str) -> float:
        medians = {kind: statistics.median(s[key] for s in steps if s["kind"] == kind) for kind in weights}
        return sum(medians[kind] * count for kind, count in weights.items()) / total

    sent = sum(step["payload"] for step in results[0]["steps"]) * 2 * (workers - 1) / workers
    wire = [result["wire"] for result in results if result["wire"] is not None]
    return Row(
        method=method,
        workers=workers,
        rate_mbit=rate_mbit,
        tokens=tokens,
        step_s=weighed("step"),
        compute_s=weighed("compute"),
        communication_s=weighed("communication"),
        optimizer_s=weighed("optimizer"),
        payload=weighed("payload"),
        peak_payload=max(step["payload"] for step in steps),
        first_payload=results[0]["first"]["payload"],
        wire_ratio=statistics.mean(wire) / sent if wire and sent else None,
        goodput_mbit=min(result["goodput"] for result in results) * 8 / 1e6,
        dropped=dropped,
    )


def slowest(results: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Of each step the record of the worker that took longest."""
    for records in zip(*(result["steps"] for result in results), strict=True):
        yield max(records, key=lambda record: record["step"])

"""`python -m sweep.bench.loss --out DIR --target LOSS`: how long training takes to a stated loss on a slow network.

Every cell (method, rate) is a whole run of `train.py` on real text, its workers on hosts of their own as across
machines. The time is that of all steps up to the first evaluation whose loss is at most the target; what evaluations
take is not in it. AdamW sends its buckets while backward goes on, as torch's DDP does.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from sweep.bench.cells import launch
from sweep.bench.network import Link, Network, why_not
from sweep.bench.processes import HostFailed, NetworkUnavailable
from sweep.bench.rows import check_folder, read_rows, write_rows
from sweep.cells import compose
from sweep.report import check_place, put
from sweep.tables import Table
from train import check
from tsr.harness.hydra_hooks import explain
from tsr.harness.settings import config_hash

BASELINE = "adamw"
RESULTS = "loss.csv"
SMALL_BUCKETS = ("comm.overlap=true", "comm.bucket_mib=1")  # for models of a few MB
METHODS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("optimizer=adamw", *SMALL_BUCKETS),
    "tsr": ("optimizer=tsr", *SMALL_BUCKETS),
    "tsr_bf16": ("optimizer=tsr", "comm.dtype=bf16", *SMALL_BUCKETS),
}


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A run: ``steps``, ``seconds`` and ``payload`` (bytes of a worker) until the target; None if it never was.

    ``step_s`` is the median step, ``lowest`` the lowest loss of an evaluation.
    """

    method: str
    workers: int
    rate_mbit: float | None
    target: float
    steps: int | None
    seconds: float | None
    payload: int | None
    step_s: float
    lowest: float


def reached(rows: Sequence[Mapping[str, Any]], target: float) -> tuple[int, float, int] | None:
    """Steps, seconds and bytes up to the first evaluation with a loss of at most ``target``, of a run's metrics."""
    seconds = 0.0
    for row in rows:
        seconds += row["time/step_s"]
        if row.get("eval/loss", float("inf")) <= target:
            return row["step"], seconds, row["comm/total_bytes"]
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweep.bench.loss", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where runs and results go")
    add("--target", type=float, required=True, metavar="LOSS", help="evaluation loss, in nats")
    add("--workers", type=int, default=2, help="hosts")
    add("--rates", default="1000,100,10", help="Mbit/s of every link")
    add("--methods", default="adamw,tsr_bf16", help=f"of {', '.join(METHODS)}")
    add("--experiment", default="slow_link", help="what is trained")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more of the configuration, as in trainer.steps=100")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put the table between FILE's <!-- begin/end NAME -->, too")
    options = parser.parse_args(arguments)
    try:
        check_place(options.readme)
        check_folder(options.out)
        rates = [link_of(rate) for rate in options.rates.split(",")]
        if unknown := [name for name in options.methods.split(",") if name not in METHODS]:
            raise ValueError(f"--methods: each must be one of {', '.join(METHODS)}, got {unknown[0]!r}")
        if not 0 < options.target < math.inf:
            raise ValueError(f"--target must be a positive loss, in nats, got {options.target}")
        if options.workers < 2:
            raise ValueError(f"--workers must be a whole number from 2, got {options.workers}")
        common = (
            f"experiment={options.experiment}",
            "logger=none",
            "results=null",
            f"nproc={options.workers}",
            "device=cpu",
        )
        jobs = {name: (*common, *METHODS[name], *options.set) for name in options.methods.split(",")}
        try:
            for job in jobs.values():
                check(compose(*job))
        except (ValueError, OSError, InstantiationException) as error:
            raise ValueError(f"--experiment or --set: {explain(error, OmegaConf.create())}") from None
        if reason := why_not():
            print(f"skipped: {reason}", file=sys.stderr)
            return 1
        done = read_rows(options.out / RESULTS, Reached)
        with Network(hosts=options.workers, link=rates[0]) as network:
            for link in rates:
                network.set_link(link)
                for name, job in jobs.items():
                    print(f"{name}, {options.workers} workers, {link.rate_mbit:g} Mbit/s: begins", flush=True)
                    found = run(network, name, job, target=options.target, out=options.out)
                    done = [row for row in done if _key(row) != _key(found)] + [found]
                    write_rows(options.out / RESULTS, done)
                    print(_line(found), flush=True)
        text = table(done).markdown()
        (options.out / "loss.md").write_text(text, encoding="utf-8")
        put(options.readme, text)
    except (HostFailed, TimeoutError, NetworkUnavailable, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def link_of(rate: str) -> Link:
    """A link of so many Mbit/s."""
    try:
        return Link(rate_mbit=float(rate))
    except ValueError:
        raise ValueError(f"--rates: each must be Mbit/s between 0.1 and 100000, got {rate!r}") from None


def run(network: Network, name: str, job: Sequence[str], *, target: float, out: Path) -> Reached:
    """Train on the network as it stands; a run that was killed goes on, one that is done is read."""
    rate = network.link.rate_mbit
    runs = out / "runs" / f"{network.hosts}x{rate:g}" / name / config_hash(compose(*job))
    runs.mkdir(parents=True, exist_ok=True)
    launch(network, ["train.py", *job, f"runs_dir={runs.resolve()}"], log_dir=runs)
    (metrics,) = runs.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps, seconds, payload = reached(rows, target) or (None, None, None)
    times = sorted(row["time/step_s"] for row in rows)
    return Reached(
        method=name,
        workers=network.hosts,
        rate_mbit=rate,
        target=target,
        steps=steps,
        seconds=seconds,
        payload=payload,
        step_s=times[len(times) // 2],
        lowest=min(row["eval/loss"] for row in rows if "eval/loss" in row),
    )


def table(rows: Sequence[Reached]) -> Table:
    """One row a run; the last column is AdamW's time over the method's."""
    columns = (
        *("workers", "Mbit/s", "target", "method", "steps to target", "seconds", "payload (MB)", "median step (s)"),
        *("lowest loss", f"{BASELINE}'s time ×"),
    )
    baseline = {(row.workers, row.rate_mbit, row.target): row for row in rows if row.method == BASELINE}
    lines = []
    for row in rows:
        other = baseline.get((row.workers, row.rate_mbit, row.target))
        ratio = other.seconds / row.seconds if other and other.seconds and row.seconds else None
        lines.append(
            (
                str(row.workers),
                f"{row.rate_mbit:g}",
                f"{row.target:g}",
                row.method,
                "never" if row.steps is None else str(row.steps),
                "-" if row.seconds is None else f"{row.seconds:.1f}",
                "-" if row.payload is None else f"{row.payload / 1e6:.1f}",
                f"{row.step_s:.3f}",
                f"{row.lowest:.3f}",
                "-" if ratio is None else f"{ratio:.2f}",
            )
        )
    note = "Steps, seconds and bytes of a worker up to the first evaluation at the target; evaluations are not timed."
    return Table("Time to an evaluation loss", columns, tuple(lines), (note,))


def _key(row: Reached) -> tuple[object, ...]:
    return row.method, row.workers, row.rate_mbit, row.target


def _line(row: Reached) -> str:
    when = "never at the target" if row.seconds is None else f"target at step {row.steps}, after {row.seconds:.1f} s"
    return f"{row.method}, {row.workers} workers, {row.rate_mbit:g} Mbit/s: {when}; {row.step_s:.3f} s a step"


if __name__ == "__main__":
    sys.exit(main())

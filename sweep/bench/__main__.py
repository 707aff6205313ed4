"""`python -m sweep.bench --out DIR`: what a step costs on a slow network, for every method, side by side.

Hosts are network namespaces joined by links of the chosen rates (see `sweep.bench.network`), so root is needed; with
`--loopback` it is not: workers are plain processes, no rate is limited, and the bytes are those of their own sockets.
Each cell (method, workers, rate) becomes a row of `bench.csv` as soon as it is measured; a bench that is started again
goes on with what is missing. A rate of `none` is a link without a limit. At the end come `bench.md`, the table, and a
figure. The time to a stated loss is `python -m sweep.bench.loss`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweep.bench.cells import CONTESTANTS, Contestant, Loopback, Row, Work, overrides, run_cell
from sweep.bench.network import MAX_HOSTS, Link, Network, why_not
from sweep.bench.processes import HostFailed, NetworkUnavailable
from sweep.bench.report import write
from sweep.bench.rows import check_folder, read_rows, write_rows
from sweep.cells import compose
from sweep.report import check_place
from train import count

RESULTS = "bench.csv"
WORK = "work.json"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cells of a bench."""

    workers: Sequence[int]
    rates: Sequence[float | None]
    contestants: Sequence[Contestant]
    work: Work
    loopback: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweep.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    add("--workers", default="2,4", help="hosts, as in 2,4")
    add("--rates", default="none,1000,100", help="Mbit/s of every link, as in none,1000,100")
    usual = [name for name in CONTESTANTS if not name.endswith("_late")]
    add("--methods", default=",".join(usual), help=f"contestants, of {', '.join(CONTESTANTS)}")
    add("--experiment", default="table3", help="whose ranks and intervals are taken")
    add("--model", default="llama_60m", help="a model of the experiment")
    add("--rows", type=int, default=1, help="rows of a worker's micro-batch")
    add("--length", type=int, default=16, help="tokens of a row")
    add("--passes", type=int, default=1, help="micro-batches of a step")
    add("--repeats", type=int, default=5, help="measured steps of each kind")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more of the configuration, as in rank.linear=128")
    add("--loopback", action="store_true", help="without root: no hosts, no rates, bytes of the workers' sockets")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put the table between FILE's <!-- begin/end NAME -->, too")
    options = parser.parse_args(arguments)
    try:
        plan = _plan(options)
        check_place(options.readme)
        check_folder(options.out)
        if not plan.loopback and (reason := why_not()):
            print(f"skipped: {reason}; --loopback needs neither root nor ip", file=sys.stderr)
            return 1
        options.out.mkdir(parents=True, exist_ok=True)
        _keep(plan, options.out / WORK)
        results = options.out / RESULTS
        _measure(plan, results, options.out / "cells")
        order = {name: index for index, name in enumerate(CONTESTANTS)}
        rows = sorted(
            read_rows(results, Row), key=lambda row: (row.workers, -(row.rate_mbit or 1e9), order[row.method])
        )
        judge = "workers' own TCP sockets" if plan.loopback else "hosts' interfaces"
        title = f"{options.model}, {plan.work.rows} × {plan.work.length} tokens × {plan.work.passes} a worker and step"
        write(rows, options.out, title=title, judge_name=judge, readme=options.readme)
    except (HostFailed, TimeoutError, subprocess.TimeoutExpired, NetworkUnavailable, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    """What to measure; every mistake shows here, before a worker is started."""
    workers = _listed("--workers", options.workers, _whole)
    rates = _listed("--rates", options.rates, _rate)
    contestants = _listed("--methods", options.methods, _contestant)
    for name in ("rows", "length", "passes", "repeats"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be a whole number from 1, got {getattr(options, name)}")
    if options.loopback and rates != [None]:
        raise ValueError(f"--loopback limits no rate: --rates must be none, got {options.rates}")
    work = Work(
        overrides=(f"experiment={options.experiment}", f"model={options.model}", "model.dtype=fp32"),
        more=tuple(options.set),
        rows=options.rows,
        length=options.length,
        passes=options.passes,
        repeats=options.repeats,
    )
    for contestant in contestants:
        try:
            count(compose(*overrides(work, contestant), "dry_run=true", "world_size=2"))
        except ValueError as error:
            raise ValueError(f"--experiment, --model or --set: {error}") from None
    return Plan(workers=workers, rates=rates, contestants=contestants, work=work, loopback=options.loopback)


def _keep(plan: Plan, path: Path) -> None:
    """Write what a step is and where it runs, or see that it is the same as in the cells that are there."""
    contestants = {name: contestant.overrides for name, contestant in CONTESTANTS.items()}
    same = {"work": asdict(plan.work), "loopback": plan.loopback, "contestants": contestants}
    text = json.dumps(same, indent=2) + "\n"
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ValueError(f"--out: {path} is of another bench; give another folder, or remove it")
    path.write_text(text, encoding="utf-8")


def _listed(key: str, text: str, read: Callable[[str], Any]) -> list[Any]:
    try:
        return list(dict.fromkeys(read(part.strip()) for part in text.split(",")))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _whole(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= MAX_HOSTS:
        raise ValueError(f"each must be a whole number from 2 to {MAX_HOSTS}, got {text!r}")
    return int(text)


def _rate(text: str) -> float | None:
    if text == "none":
        return None
    try:
        return Link(rate_mbit=float(text)).rate_mbit
    except ValueError:
        raise ValueError(f"each must be none or Mbit/s between 0.1 and 100000, got {text!r}") from None


def _contestant(text: str) -> Contestant:
    if text not in CONTESTANTS:
        raise ValueError(f"each must be one of {', '.join(CONTESTANTS)}, got {text!r}")
    return CONTESTANTS[text]


def _measure(plan: Plan, results: Path, cells: Path) -> None:
    done = {(row.method, row.workers, row.rate_mbit) for row in read_rows(results, Row)}
    for workers in plan.workers:
        with _place(workers, loopback=plan.loopback) as place:
            for rate in plan.rates:
                if isinstance(place, Network):
                    place.set_link(Link(rate_mbit=rate))
                for contestant in plan.contestants:
                    name = f"{contestant.name}-{workers}-{'none' if rate is None else f'{rate:g}'}"
                    if (contestant.name, workers, rate) in done:
                        print(f"{name}: measured before")
                        continue
                    print(f"{name}: begins", flush=True)
                    row = run_cell(place, contestant, plan.work, cells / name)
                    write_rows(results, [*read_rows(results, Row), row])
                    print(f"{name}: {row.step_s:.3f} s a step, {row.payload / 1e6:.3f} MB", flush=True)


@contextmanager
def _place(workers: int, *, loopback: bool) -> Iterator[Network | Loopback]:
    if loopback:
        yield Loopback(workers)
        return
    with Network(hosts=workers, link=Link(rate_mbit=None)) as network:
        yield network


if __name__ == "__main__":
    sys.exit(main())

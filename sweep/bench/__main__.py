"""`python -m sweep.bench --out DIR`: what a step costs on a slow network, for every method, side by side.

Hosts are network namespaces joined by links of the chosen rates (see `sweep.bench.network`), so root is needed. Each
cell (method, workers, rate) becomes a row of `bench.csv` as soon as it is measured; a bench that is started again goes
on with what is missing. Rates always include `none`, an unlimited link, which the lower bound takes its compute from.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from sweep.bench.cells import CONTESTANTS, Row, Work, run_cell
from sweep.bench.network import HostFailed, Link, Network, NetworkUnavailable, why_not

RESULTS = "bench.csv"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sweep.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where the results go")
    add("--workers", default="2,4", help="hosts, as in 2,4")
    add("--rates", default="none,1000,100", help="Mbit/s of every link, as in none,1000,100")
    add("--methods", default=",".join(CONTESTANTS), help="contestants")
    add("--model", default="llama_60m", help="model and ranks, of experiment=table3")
    add("--rows", type=int, default=1, help="rows of a worker's micro-batch")
    add("--length", type=int, default=64, help="tokens of a row")
    add("--passes", type=int, default=1, help="micro-batches of a step")
    add("--repeats", type=int, default=5, help="measured steps of each kind")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more of the configuration, as in comm.overlap=true")
    options = parser.parse_args(arguments)
    try:
        workers = [int(number) for number in options.workers.split(",")]
        rates = [None if rate == "none" else float(rate) for rate in options.rates.split(",")]
        methods = [CONTESTANTS[name] for name in options.methods.split(",")]
    except (ValueError, KeyError) as error:
        print(f"error: {error}; methods are {', '.join(CONTESTANTS)}", file=sys.stderr)
        return 1
    if reason := why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        return 1
    work = Work(
        overrides=("experiment=table3", f"model={options.model}", "model.dtype=fp32", *options.set),
        rows=options.rows,
        length=options.length,
        passes=options.passes,
        repeats=options.repeats,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / RESULTS
    done = {(row["method"], row["workers"], row["rate_mbit"]) for row in _read(results)}
    try:
        for size in workers:
            with Network(hosts=size, link=Link(rate_mbit=None)) as network:
                for rate in dict.fromkeys([None, *rates]):
                    network.set_link(Link(rate_mbit=rate))
                    for contestant in methods:
                        name = f"{contestant.name}-{size}-{rate or 'none'}"
                        if (contestant.name, str(size), "" if rate is None else str(rate)) in done:
                            print(f"done already: {name}")
                            continue
                        row = run_cell(network, contestant, work, options.out / "cells" / name)
                        _append(results, row)
                        print(f"{name}: {row.step_s:.3f} s a step, {row.payload / 1e6:.3f} MB", flush=True)
    except (HostFailed, TimeoutError, NetworkUnavailable, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _append(path: Path, row: Row) -> None:
    new = not path.is_file()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        if new:
            writer.writeheader()
        writer.writerow(asdict(row))


if __name__ == "__main__":
    sys.exit(main())

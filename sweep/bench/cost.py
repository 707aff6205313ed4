"""`python -m sweep.bench.cost BENCH.csv --out DIR`: a model of a step's time, fitted on a bench, and forecasts.

It prints, and writes into DIR, the errors on cells that a fit has not seen (holdout.csv), step times (predictions.csv),
the bandwidths below which methods pay (crossovers.csv), all of it as cost.md, and the figure `speedup`. The model is in
`sweep.bench.cost_model`; what is extrapolated is in `sweep.bench.forecast`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.bench.cells import CONTESTANTS, Row
from sweep.bench.cost_model import CostModel, Held, Place, fit, hold_out
from sweep.bench.forecast import (
    BANDWIDTHS_MBIT,
    Crossover,
    Forecast,
    Prediction,
    bandwidths,
    crossover,
    forecast,
    job,
    predictions,
)
from sweep.bench.report import BASELINE
from sweep.bench.rows import check_folder, read_rows, write_rows
from sweep.report import check_place, put
from sweep.style import RC, Drawn, add_legend, format_bytes, legend_rows, method_style, new_figure, save
from sweep.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST = {"workers": 2, "cores": 1, "rate_mbit": 0.1, "step_s": 1e-6} | dict.fromkeys(
    ("compute_s", "communication_s", "optimizer_s", "payload", "collectives"), 0
)
RULE = "Each cell is predicted by a model that has not seen it: all of its number of workers and rate are held out."
EXTRAPOLATED = (
    "Extrapolated: workers on machines of their own, a ring all-reduce of 2 (N − 1) hops of {latency_ms:g} ms each, "
    "every link at its rate at once; seconds of optimizer and of sending software from the bench's machine, so a link "
    "faster than that software gains nothing."
)


def read_cells(path: Path) -> list[Row]:
    """The rows of a bench.

    Raises:
        ValueError: If there is no such file, no row, no such column, or a value that makes no sense.
    """
    rows = read_rows(path, Row)
    if not rows:
        raise ValueError(f"{path}: no cells; it must be the bench.csv of `python -m sweep.bench`")
    for number, row in enumerate(rows, 2):
        if row.method not in CONTESTANTS:
            raise ValueError(f"{path}, row {number}: method must be of {', '.join(CONTESTANTS)}, got {row.method!r}")
        for name, least in LEAST.items():
            value = getattr(row, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"{path}, row {number}: {name} must be {least:g} or more, got {value}")
    return rows


def parameters_table(model: CostModel) -> Table:
    """What was fitted, each with its unit."""
    efficiency = f"{1 / model.inverse_efficiency:.3f}" if model.inverse_efficiency else "-"
    rows = (
        ("compute", f"{model.compute_s:.4g}", "s a step"),
        ("latency of a hop, busy cores", f"{1e6 * model.latency_s:.4g}", "µs"),
        ("efficiency of the link", efficiency, "payload bits for a bit of rate"),
        ("transfer", f"{1e9 * model.transfer_s:.4g}", "ns a byte sent"),
        ("packing", f"{1e9 * model.packing_s:.4g}", "ns a byte of payload"),
        *((f"optimizer, {method}", f"{seconds:.4g}", "s a step") for method, seconds in model.optimizer_s.items()),
        *((f"hook, {method}", f"{seconds:.4g}", "s a step") for method, seconds in model.hook_s.items()),
    )
    return Table("Cost model, fitted on all cells", ("parameter", "value", "unit"), rows)


def error_line(held: Sequence[Held]) -> str:
    """The median and the worst error."""
    errors = [100 * abs(cell.error) for cell in held]
    return f"Step time of held-out cells: median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %"


def holdout_table(held: Sequence[Held]) -> Table:
    """Every held-out cell."""
    rows = tuple(
        (
            cell.method,
            str(cell.workers),
            "none" if cell.rate_mbit is None else f"{cell.rate_mbit:g}",
            f"{cell.measured_s:.4g}",
            f"{cell.predicted_s:.4g}",
            f"{100 * cell.error:+.1f}".replace("-", "−"),
        )
        for cell in held
    )
    columns = ("method", "workers", "Mbit/s", "measured (s)", "predicted (s)", "error (%)")
    return Table(error_line(held), columns, rows, (RULE,))


def predictions_table(rows: Sequence[Prediction]) -> Table:
    """Predicted step times."""
    shown = tuple(
        (
            row.method,
            str(row.workers),
            f"{row.rate_mbit:g}",
            *(f"{value:.4g}" for value in (row.payload / 1e6, row.collectives)),
            *(f"{value:.4g}" for value in (row.compute_s, row.communication_s, row.optimizer_s, row.step_s)),
            f"{row.speedup:.2f}",
        )
        for row in rows
    )
    columns = (
        *("method", "workers", "Mbit/s", "payload (MB)", "all-reduces"),
        *("compute (s)", "communication (s)", "optimizer (s)", "step (s)", f"speed-up over {BASELINE}"),
    )
    return Table(f"Predicted step time, {rows[0].model}", columns, shown)


def crossovers_table(crossovers: Sequence[Crossover], *, of: str, compute_s: float, latency_ms: float) -> Table:
    """A row a method, a column a number of workers."""
    sizes = dict.fromkeys(point.workers for point in crossovers)
    points = {(point.method, point.workers): point.bandwidth_mbit for point in crossovers}
    methods = dict.fromkeys(point.method for point in crossovers)

    def show(bandwidth: float | str) -> str:
        return bandwidth if isinstance(bandwidth, str) else f"{float(f'{bandwidth:.3g}'):g}"

    rows = tuple((method, *(show(points[method, size]) for size in sizes)) for method in methods)
    low, high = BANDWIDTHS_MBIT
    return Table(
        f"Bandwidth (Mbit/s) below which a step takes less time than {BASELINE}'s, {of}, {compute_s:.3g} s of compute",
        ("method", *(f"{size} workers" for size in sizes)),
        rows,
        (
            f"Looked for from {low:g} to {high:g} Mbit/s: always or never is within these.",
            EXTRAPOLATED.format(latency_ms=latency_ms),
        ),
    )


def speedup_figure(found: Forecast, places: Sequence[Place], crossovers: Sequence[Crossover]) -> Figure:
    """Speed-up over the baseline against bandwidth, a line a method, a panel a number of workers.

    Where a line crosses 1, its method's marker stands. DDP's lines are dashed.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    methods = [method for method in found.messages if method != BASELINE]
    styles: dict[str, dict[str, Any]] = {
        method: dict(zip(("color", "marker"), method_style(method), strict=True)) for method in methods
    }
    dashes = {method: "--" if CONTESTANTS[method].peer else "-" for method in methods}
    handles = [Line2D([], [], label=m, ls=dashes[m], ms=4, lw=1, **style) for m, style in styles.items()]
    figure = new_figure(panels=len(places), rows=legend_rows(methods))
    panels = figure.subplots(len(places), sharex=True, squeeze=False)[:, 0]
    rates = bandwidths()
    for panel, place in zip(panels, places, strict=True):
        panel.axhline(1, color="0.4", lw=0.6)
        for method, style in styles.items():
            heights = [found.speedup(method, replace(place, rate_mbit=rate)) for rate in rates]
            line = {"color": style["color"], "ls": dashes[method], "lw": 1, "label": method}
            panel.plot([rate * 1e6 for rate in rates], heights, **line)
        for point in crossovers:
            if point.workers == place.workers and not isinstance(point.bandwidth_mbit, str):
                panel.plot([point.bandwidth_mbit * 1e6], [1], ms=4, ls="", label="_crossover", **styles[point.method])
        panel.set(xscale="log", yscale="log", title=f"{place.workers} workers", ylabel=f"speed-up over {BASELINE}")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    panels[-1].set_xlabel("bandwidth of each worker's link (bit/s)")
    format_bytes(panels[-1].xaxis)
    add_legend(figure, handles)
    return figure


def draw(found: Forecast, places: Sequence[Place], crossovers: Sequence[Crossover], out: Path, *, of: str) -> Drawn:
    """Draw `speedup_figure` into ``out``; ``of`` names the model."""
    import matplotlib as mpl

    fitted = found.model
    goodput = f"{8 / fitted.transfer_s / 1e6:.0f} Mbit/s" if fitted.transfer_s else "any rate"
    caption = (
        f"Predicted speed-up of a step over {BASELINE}, {of}, {fitted.compute_s:.3g} s of compute, ring all-reduce, "
        "each worker on a machine of its own; a marker is the bandwidth below which the method pays. "
        f"A hop takes {places[0].latency_ms:g} ms. Where a worker's software is slower than the link, beyond "
        f"{goodput}, bandwidth changes nothing."
    )
    with mpl.rc_context(RC):
        return save(speedup_figure(found, places, crossovers), out, "speedup", caption)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason on stderr, if nothing can be fitted or predicted."""
    options = _parser().parse_args(arguments)
    try:
        check_place(options.readme)
        check_folder(options.out)
        cells = read_cells(options.bench)
        methods = _methods(options.methods, cells)
        sizes = _listed("--workers", options.workers, int)
        if min(sizes) < 2:
            raise ValueError(f"--workers: each must be a whole number from 2, got {options.workers!r}")
        rates = _listed("--rate", options.rate, float)
        if not 0 < options.speed < math.inf:
            raise ValueError(f"--speed must be a positive number, got {options.speed}")
        for key, seconds in (("--latency-ms", options.latency_ms), ("--compute-s", options.compute_s)):
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"{key} must be a number of 0 or more, got {seconds}")
        held = hold_out(cells)
        wanted = job(options.model, *options.set)
        found = forecast(cells, methods, wanted, compute_s=options.compute_s, speed=options.speed)
        places = [Place(workers=size, rate_mbit=None, latency_ms=options.latency_ms) for size in sizes]
        _report(cells, held, found, places, rates, options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _report(
    cells: Sequence[Row],
    held: Sequence[Held],
    found: Forecast,
    places: Sequence[Place],
    rates: Sequence[float],
    options: argparse.Namespace,
) -> None:
    """Draw, write and print what was fitted and what is predicted."""
    out, of = options.out, options.model
    methods = [method for method in found.messages if method != BASELINE]
    crossovers = [crossover(found, method, place) for place in places for method in methods]
    predicted = predictions(found, [replace(place, rate_mbit=rate) for place in places for rate in rates], of=of)
    seconds = found.model.compute_s
    points = crossovers_table(crossovers, of=of, compute_s=seconds, latency_ms=options.latency_ms)
    tables = (parameters_table(fit(cells)), holdout_table(held), predictions_table(predicted), points)
    text = "\n".join(table.markdown() for table in tables)
    short = f"{error_line(held)}. {RULE}\n\n{points.markdown()}"
    drawn = draw(found, places, crossovers, out, of=of)
    write_rows(out / "holdout.csv", held)
    write_rows(out / "predictions.csv", predicted)
    write_rows(out / "crossovers.csv", crossovers)
    (out / "cost.md").write_text(text, encoding="utf-8")
    put(options.readme, short)
    print(text)
    print(f"{drawn.png}: {drawn.caption}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sweep.bench.cost", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("bench", type=Path, metavar="BENCH.csv", help="what `python -m sweep.bench` wrote")
    add("--out", type=Path, required=True, metavar="DIR", help="where the tables and the figure go")
    add("--model", default="llama_60m", help="model to predict, of experiment=table3")
    add("--methods", help="contestants to predict; by default all that were measured")
    add("--workers", default="4,64,1024", help="numbers of workers to predict")
    add("--rate", default="10,100,1000", help="Mbit/s of every link")
    add("--latency-ms", type=float, default=0.1, help="of a hop, link and software")
    add("--compute-s", type=float, help="of a worker's forward and backward; by default the bench's, by parameters")
    add("--speed", type=float, default=1.0, help="of a worker's machine over the bench's: divides all other seconds")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more of the configuration, as in rank.linear=128")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put errors and crossovers between FILE's comments, too")
    return parser


def _methods(text: str | None, cells: Sequence[Row]) -> list[str]:
    measured = {cell.method for cell in cells}
    methods = text.split(",") if text else [name for name in CONTESTANTS if name in measured]
    if unknown := [name for name in methods if name not in CONTESTANTS]:
        raise ValueError(f"--methods: each must be one of {', '.join(CONTESTANTS)}, got {unknown[0]!r}")
    if set(methods) == {BASELINE}:
        raise ValueError(f"--methods must name one besides {BASELINE}, which it is compared with")
    return methods


def _listed(key: str, text: str, read: Callable[[str], Any]) -> list[Any]:
    try:
        values = [read(part) for part in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 < value < math.inf for value in values):
        whole = "whole " if read is int else ""
        raise ValueError(f"{key}: each must be a positive {whole}number, as in 10,100, got {text!r}")
    return values


if __name__ == "__main__":
    sys.exit(main())

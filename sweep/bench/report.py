"""The table and the figure of a bench: every cell beside its lower bound and beside torch's DDP with AdamW.

No step can be shorter than its forward and backward, and none shorter than its bytes take:

    bound = max(compute, payload * 2 (N - 1) / N / goodput)

compute is forward and backward of all N workers at once (they share this machine's cores) with nothing on the link,
measured in the run that the cell is of; goodput the best that a large all-reduce reached in any cell on the same links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.bench.cells import Row
from sweep.report import put
from sweep.style import Drawn, add_legend, legend_rows, new_figure, save
from sweep.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "ddp_adamw"
HALF = "ddp_bf16"
FIGURE = "bench"
PARTS = {"compute_s": "forward, backward", "optimizer_s": "optimizer", "communication_s": "communication (waited for)"}
COLOURS = ("#56B4E9", "#E69F00", "#999999")
BAR_PANELS = 0.15  # of a panel's height, for a bar
TITLE_BARS = 1  # what a panel has above and below its bars, in bars
NOTE = (
    "Seconds and bytes of a step, medians weighed by the method's schedule, the first step left out. "
    "Payload: what a worker hands over. Wire: bytes of the {judge} over payload × 2(N−1)/N. "
    "Bound: the larger of compute (forward and backward of all workers at once, with nothing on the link) and "
    "payload × 2(N−1)/N ÷ the best goodput of these links."
)
COMPARED = {  # columns of ratios, by the field of `Judged` that has the peer
    "baseline": {"payload ×": "payload", "communication ×": "communication_s", "step ×": "step_s"},
    "half": {"payload × bf16": "payload", "communication × bf16": "communication_s"},
}
COMPARED_NOTE = f"The last columns are {BASELINE}'s figure over the method's, and with {HALF} in its place."


@dataclass(frozen=True)
class Judged:
    """A cell with its lower bound in seconds, and the peers on its network; None where these were not measured."""

    row: Row
    bound: float
    baseline: Row | None
    half: Row | None


def judge(rows: Sequence[Row]) -> list[Judged]:
    """Every row with its lower bound and its peers."""
    cells = {(row.method, row.workers, row.rate_mbit): row for row in rows}
    goodput: dict[tuple[int, float | None], float] = {}
    for row in rows:
        links = row.workers, row.rate_mbit
        goodput[links] = max(goodput.get(links, 0.0), row.goodput_mbit)
    return [
        Judged(
            row,
            _bound(row, goodput[row.workers, row.rate_mbit]),
            cells.get((BASELINE, row.workers, row.rate_mbit)),
            cells.get((HALF, row.workers, row.rate_mbit)),
        )
        for row in rows
    ]


def _bound(row: Row, goodput_mbit: float) -> float:
    wire = row.payload * 2 * (row.workers - 1) / row.workers * 8
    return max(row.compute_s, wire / (goodput_mbit * 1e6))


def slowest_link(cells: Sequence[Judged]) -> list[Judged]:
    """Of the cells those with the most workers, on the slowest of their links."""
    workers = max(cell.row.workers for cell in cells)
    rates = [cell.row.rate_mbit for cell in cells if cell.row.workers == workers]
    slowest = min(rates, key=lambda rate: rate or math.inf)
    return [cell for cell in cells if (cell.row.workers, cell.row.rate_mbit) == (workers, slowest)]


def table(cells: Sequence[Judged], *, title: str, notes: Sequence[str]) -> Table:
    """One row a cell, with the ratios to those peers that are there."""
    ratios = [
        (peer, *ratio)
        for peer, columns in COMPARED.items()
        if any(getattr(cell, peer) for cell in cells)
        for ratio in columns.items()
    ]
    columns = (
        *("workers", "Mbit/s", "goodput", "method", "step (s)", "compute", "optimizer", "communication"),
        *("payload (MB)", "wire", "bound (s)", "step ÷ bound"),
        *(column for _, column, _ in ratios),
    )
    lines = []
    for judged in cells:
        row = judged.row
        lines.append(
            (
                str(row.workers),
                "none" if row.rate_mbit is None else f"{row.rate_mbit:g}",
                f"{row.goodput_mbit:.0f}",
                row.method,
                f"{row.step_s:.3f}",
                f"{row.compute_s:.3f}",
                f"{row.optimizer_s:.3f}",
                f"{row.communication_s:.3f}",
                f"{row.payload / 1e6:.3f}",
                "-" if row.wire_ratio is None else f"{row.wire_ratio:.4f}",
                f"{judged.bound:.3f}",
                f"{row.step_s / judged.bound:.3f}",
                *(_ratio(getattr(judged, peer), row, key) for peer, _, key in ratios),
            )
        )
    return Table(title, columns, tuple(lines), tuple(notes))


def _ratio(of: Row | None, row: Row, key: str) -> str:
    below = getattr(row, key)
    return "-" if of is None or not below else f"{getattr(of, key) / below:.2f}"


def draw(rows: Sequence[Row], out: Path) -> Drawn:
    """Bars of a step's parts, a panel a limited link, with the lower bound of each as a mark."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    judged = judge(rows)
    limited = [one for one in judged if one.row.rate_mbit is not None] or judged
    panels = sorted({(one.row.workers, one.row.rate_mbit or 0.0) for one in limited})
    bars = [sum((one.row.workers, one.row.rate_mbit or 0.0) == panel for one in limited) for panel in panels]
    patches = [Patch(color=colour, label=label) for label, colour in zip(PARTS.values(), COLOURS, strict=True)]
    bound = Line2D([], [], color="black", marker="|", ls="", label="lower bound")
    handles = [*patches, bound]
    figure = new_figure(
        panels=max(len(panels), round(sum(bars) * BAR_PANELS)), rows=legend_rows([str(h.get_label()) for h in handles])
    )
    heights = [number + TITLE_BARS for number in bars]
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (workers, rate) in zip(axes, panels, strict=True):
        _bars(axis, [one for one in limited if (one.row.workers, one.row.rate_mbit or 0.0) == (workers, rate)])
        axis.set_title(f"{workers} workers, {f'{rate:g} Mbit/s' if rate else 'unlimited link'}")
    axes[-1].set_xlabel("seconds a step")
    add_legend(figure, handles)
    return save(figure, out, FIGURE, "Step time by its parts, and its lower bound, for every method, workers and link.")


def _bars(axis: Axes, cells: Sequence[Judged]) -> None:
    names = [cell.row.method for cell in cells]
    left = [0.0] * len(cells)
    for key, colour in zip(PARTS, COLOURS, strict=True):
        widths = [getattr(cell.row, key) for cell in cells]
        axis.barh(names, widths, left=left, color=colour, height=0.7)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for index, cell in enumerate(cells):
        axis.plot([cell.bound], [index], color="black", marker="|", ms=8, ls="")
    axis.invert_yaxis()


def write(rows: Sequence[Row], out: Path, *, title: str, judge_name: str, readme: tuple[str, str] | None) -> str:
    """Write bench.md and the figure into ``out``, and the cells of the slowest link into ``readme`` (file, name).

    Returns:
        The text of bench.md.
    """
    cells, note = judge(rows), NOTE.format(judge=judge_name)
    if any(cell.baseline for cell in cells):
        note += f" {COMPARED_NOTE}"
    text = table(cells, title=title, notes=[note]).markdown()
    (out / "bench.md").write_text(text, encoding="utf-8")
    draw(rows, out)
    put(readme, table(slowest_link(cells), title=title, notes=[note, wire_note(rows, judge_name)]).markdown())
    return text


def wire_note(rows: Sequence[Row], judge_name: str) -> str:
    """How far the bytes of all cells are from the ledger's, at most."""
    ratios = [row.wire_ratio for row in rows if row.wire_ratio is not None]
    count = len({row.method for row in rows})
    methods = "1 method" if count == 1 else f"{count} methods"
    sizes = " and ".join(str(size) for size in sorted({row.workers for row in rows}))
    return (
        f"Over all {len(ratios)} cells of this bench ({methods}, {sizes} workers) the {judge_name} sent "
        f"{min(ratios):.4f} to {max(ratios):.4f} times what the ledger says."
    )

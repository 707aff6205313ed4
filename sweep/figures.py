"""Draw figures from the tables of `sweep.runs`. A method has the same colour in every figure of the project."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, which people with any common colour blindness can tell apart.
STYLES = {
    "adamw": ("#000000", "o"),
    "galore": ("#E69F00", "s"),
    "one_sided": ("#56B4E9", "^"),
    "tsr": ("#D55E00", "D"),
    "tsr_paper": ("#009E73", "v"),
    "tsr_svd": ("#CC79A7", "P"),
}
# For every other method, from the "muted" scheme of Paul Tol, which is made for the same readers.
OTHER_COLOURS = ("#332288", "#117733", "#999933", "#882255", "#AA4499", "#44AA99")
OTHER_MARKERS = ("X", "p", "h", "<", ">", "*", "d")

LINES = ("-", "--", ":", "-.")  # the groups of one method

COLUMN_WIDTH = 3.3  # inches
LINE_LENGTH = 48  # characters of a legend that fit into it
FONT = {"font.size": 7.5, "axes.labelsize": 7.5, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7}
SPINES = {"axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6}
RC: dict[Any, Any] = {**FONT, **SPINES, "pdf.fonttype": 42, "savefig.dpi": 300}  # 42: text in the PDF stays text


@dataclass(frozen=True)
class Axis:
    """A cost to draw the loss against: a key of metrics.jsonl."""

    key: str
    label: str
    scale: str


AXES = {
    "bytes": Axis("comm/total_bytes", "communicated per worker (bytes)", "log"),
    "tokens": Axis("tokens", "training data (tokens)", "linear"),
}


def method_style(method: str) -> tuple[str, str]:
    """(colour, marker) of a method: from its name alone, so that it never depends on which other runs there are."""
    rest, colour = divmod(crc32(method.encode()), len(OTHER_COLOURS))
    return STYLES.get(method, (OTHER_COLOURS[colour], OTHER_MARKERS[rest % len(OTHER_MARKERS)]))


def draw_loss(
    runs: pd.DataFrame, curves: pd.DataFrame, out: Path, *, x: Sequence[str] = ("bytes", "tokens")
) -> list[Path]:
    """Draw the loss of every run against its costs, a panel for each of `x` (keys of `AXES`), at column width.

    Points are evaluations, thin lines the smoothed training loss. Every run has its own curve; those of one `label`,
    a column of `runs`, look the same. Writes `loss_vs_{x[0]}.png` and `.pdf` into `out` and returns their paths.

    Raises:
        ValueError: a run has no such curve.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(RC):
        handles = _legend(runs)
        ncols = max(1, min(3, LINE_LENGTH // max(len(handle.get_label()) for handle in handles)))
        height = 0.1 + 0.15 * math.ceil(len(handles) / ncols) + 1.75 * len(x)
        figure = Figure(figsize=(COLUMN_WIDTH, height), layout="constrained")
        panels = figure.subplots(len(x), squeeze=False)[:, 0]
        for panel, name in zip(panels, x, strict=True):
            _draw_panel(panel, runs, curves, axis=AXES[name])
        figure.legend(handles=handles, loc="outside upper center", ncols=ncols, frameon=False, handlelength=2.2)
        files = [out / f"loss_vs_{x[0]}.png", out / f"loss_vs_{x[0]}.pdf"]
        figure.savefig(files[0])
        figure.savefig(files[1], metadata={"CreationDate": None})  # the same runs give the same file
    return files


def _draw_panel(panel: Axes, runs: pd.DataFrame, curves: pd.DataFrame, *, axis: Axis) -> None:
    from matplotlib.ticker import EngFormatter, NullFormatter

    for run, style in zip(runs["run"], _styles(runs), strict=True):
        curve = curves[curves["run"] == run]
        cost, train = _curve(curve, axis.key, "train/loss", run=run)
        # A fiftieth of the run: short against any trend, long against the noise from batch to batch.
        panel.plot(cost, train.ewm(span=max(1, len(train) / 50)).mean(), color=style["color"], lw=0.6, alpha=0.5)
        cost, evaluated = _curve(curve, axis.key, "eval/loss", run=run)
        panel.plot(cost, evaluated, **style)
    panel.set(xlabel=axis.label, ylabel="loss (nats per token)", xscale=axis.scale)
    panel.xaxis.set_major_formatter(EngFormatter(sep=""))  # 10M and 1G, the units of the tables
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.grid(alpha=0.25, lw=0.4)


def _curve(curve: pd.DataFrame, x: str, y: str, *, run: str) -> tuple[pd.Series, pd.Series]:
    points = curve.reindex(columns=[x, y]).dropna()
    if points.empty:
        raise ValueError(f"{run}/metrics.jsonl: no step has both '{x}' and '{y}', so this curve cannot be drawn")
    return points[x], points[y]


def _styles(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """How to draw the evaluations of each run: colour and marker by method, dashes by group within the method."""
    lines: dict[tuple[str, str], str] = {}
    for method, groups in runs.groupby("method", sort=False)["label"]:
        lines |= {(method, label): line for label, line in zip(groups.unique(), cycle(LINES), strict=False)}
    styles = []
    for method, label in zip(runs["method"], runs["label"], strict=True):
        colour, marker = method_style(method)
        styles.append({"color": colour, "marker": marker, "ls": lines[method, label], "lw": 1.1, "ms": 3, "mew": 0})
    return styles


def _legend(runs: pd.DataFrame) -> list[Any]:
    from matplotlib.lines import Line2D

    handles = {
        label: Line2D([], [], label=label, **style) for label, style in zip(runs["label"], _styles(runs), strict=True)
    }
    train = Line2D([], [], label="train, smoothed", color="0.4", lw=0.6, alpha=0.7)
    return [*handles.values(), train]

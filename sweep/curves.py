"""Loss against what it cost: bytes, tokens or seconds. Seeds of one group are one line with a band."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweep.style import add_legend, format_bytes, legend_rows, method_style, new_figure, variant_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN = "train, smoothed"
MARKERS = 12  # at most about this many on a line


@dataclass(frozen=True)
class Cost:
    """A cost to draw the loss against: a key of metrics.jsonl, summed up over the steps where it is `per_step`."""

    key: str
    label: str
    caption: str
    scale: str = "linear"
    per_step: bool = False


COSTS = {
    "bytes": Cost(
        "comm/total_bytes",
        "communicated by one worker (bytes)",
        "the bytes that one worker has communicated, every synchronised tensor counted",
        scale="log",
    ),
    "tokens": Cost("tokens", "training data (tokens)", "the tokens trained on"),
    "seconds": Cost(
        "time/step_s",
        "training time (s)",
        "the time of the training steps on the machine of these runs, evaluation left out",
        per_step=True,
    ),
}


@dataclass(frozen=True)
class Line:
    """One line of a figure: its name, the runs (seeds) that it is the mean of, and how it is drawn."""

    label: str
    runs: tuple[str, ...]
    style: dict[str, Any]


def names(runs: pd.DataFrame) -> list[str]:
    """A name for each run's group: its method where that is enough, else its `label`."""
    groups = runs.groupby("method")["label"].transform("nunique")
    enough = (groups == 1) & (runs["mixed"].nunique() == 1)
    return list(runs["method"].where(enough, runs["label"]))


def lines_by_label(runs: pd.DataFrame) -> list[Line]:
    """A line for each `label` of `runs`: colour and marker by method, dashes by setting within the method."""
    lines = []
    for method, of_method in runs.assign(name=names(runs)).groupby("method", sort=False):
        colour, marker = method_style(method)
        for index, (name, group) in enumerate(of_method.groupby("name", sort=False)):
            style = {"color": colour, "marker": marker, **variant_style(index)}
            lines.append(Line(name, tuple(group["run"]), style))
    return lines


def loss_figure(lines: Sequence[Line], curves: pd.DataFrame, cost: Cost, *, title: str | None = None) -> Figure:
    """Evaluation loss (markers) and smoothed training loss (thin) of `lines` against `cost`; `title` of the legend.

    Raises:
        ValueError: a run has no such curve, or the seeds of a line have no step in common.
    """
    from matplotlib.lines import Line2D

    by_run = dict(iter(curves.groupby("run", sort=False)))
    labels = [*(line.label for line in lines), TRAIN]
    figure = new_figure(rows=legend_rows(labels) + (title is not None))
    panel = figure.subplots()
    for line in lines:
        _draw_line(panel, line, by_run, cost=cost)
    panel.set(xlabel=cost.label, ylabel="loss (nats per token)", xscale=cost.scale)
    format_bytes(panel.xaxis)
    handles, _ = panel.get_legend_handles_labels()
    train = Line2D([], [], label=TRAIN, color="0.4", lw=0.6, alpha=0.7)
    add_legend(figure, [*handles, train], title=title)
    return figure


def loss_caption(lines: Sequence[Line], cost: Cost) -> str:
    """What `loss_figure` shows, with the number of seeds behind every mean."""
    band = " with the range from the lowest to the highest" if any(len(line.runs) > 1 for line in lines) else ""
    counts = seeds({line.label: len(line.runs) for line in lines})
    return (
        f"Loss against {cost.caption}. Lines with markers are the evaluation loss, thin lines the training loss, "
        f"smoothed; mean over the seeds{band} ({counts})."
    )


def seeds(counts: dict[str, int]) -> str:
    """How many seeds there are: `n = 3`, and `n = 3, but 1 for tsr` where a label has another number than most."""
    usual, *others = (count for count, _ in Counter(counts.values()).most_common())
    labels = {other: "; ".join(label for label, count in counts.items() if count == other) for other in others}
    return ", but ".join([f"n = {usual}", *(f"{other} for {label}" for other, label in labels.items())])


def _draw_line(panel: Axes, line: Line, curves: dict[str, pd.DataFrame], *, cost: Cost) -> None:
    train = _mean(line, curves, cost=cost, y="train/loss")
    panel.plot(train["x"], train["mean"], color=line.style["color"], lw=0.6, alpha=0.5)
    evaluated = _mean(line, curves, cost=cost, y="eval/loss")
    if len(line.runs) > 1:
        band = {"color": line.style["color"], "alpha": 0.2, "lw": 0}
        panel.fill_between(evaluated["x"], evaluated["low"], evaluated["high"], **band)
    every = math.ceil(len(evaluated) / MARKERS)
    panel.plot(
        evaluated["x"], evaluated["mean"], label=line.label, lw=1.1, ms=3, mew=0.6, markevery=every, **line.style
    )


def _mean(line: Line, curves: dict[str, pd.DataFrame], *, cost: Cost, y: str) -> pd.DataFrame:
    """`x`, and `mean`, `low` and `high` of `y`, by step, over the runs of a line; only steps that all of them have."""
    import pandas as pd

    points = {run: _points(curves.get(run), run, cost=cost, y=y) for run in line.runs}
    table = pd.concat(points, axis="columns", join="inner")
    if table.empty:
        raise ValueError(f"no step with '{y}' is common to the seeds of {line.label}: {', '.join(line.runs)}")
    x, values = table.xs("x", axis="columns", level=1), table.xs("y", axis="columns", level=1)
    by_step = {"x": x.mean(axis=1), "mean": values.mean(axis=1), "low": values.min(axis=1), "high": values.max(axis=1)}
    return pd.DataFrame(by_step)


def _points(curve: pd.DataFrame | None, run: str, *, cost: Cost, y: str) -> pd.DataFrame:
    """Columns `x` and `y` of one run by step, where it has both; the training loss is smoothed."""
    import pandas as pd

    if curve is None:
        raise ValueError(f"{run}/metrics.jsonl: this run has no curve, so no '{y}' can be drawn")
    columns = curve.set_index("step").reindex(columns=[cost.key, y])
    x = columns[cost.key]
    if cost.per_step:
        if x.isna().any():
            raise ValueError(f"{run}/metrics.jsonl: step {x.index[x.isna()][0]} lacks '{cost.key}', so no sum is known")
        x = x.cumsum()
    points = pd.DataFrame({"x": x, "y": columns[y]}).dropna()
    if points.empty:
        raise ValueError(f"{run}/metrics.jsonl: no step has both '{cost.key}' and '{y}', so this curve cannot be drawn")
    if y == "train/loss":
        # A fiftieth of the run: short against any trend, long against the noise from batch to batch.
        points["y"] = points["y"].ewm(span=max(1, len(points) / 50)).mean()
    return points

"""Loss against what it cost: bytes, tokens or seconds. Seeds of one group are one line with a band."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sweep.runs import METRIC
from sweep.style import COLUMN_WIDTH, add_legend, format_bytes, legend_rows, method_style, new_figure, variant_style

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN = "train, smoothed"
SMOOTHED = 50  # a training loss is smoothed over this part of a run: short against any trend, long against the noise
FINETUNING_SMOOTHED = 10  # of a fine-tuning, which has few steps, and few examples in each
EXAMPLE_LOSS = "loss (mean over examples)"
STACKED = 3  # more panels than this stand in two columns
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
    return _lines(runs.assign(name=names(runs)))


def lines_by_task(tasks: Mapping[str, pd.DataFrame]) -> dict[str, list[Line]]:
    """The lines of `lines_by_label` for each task; what has the same name in several tasks is drawn alike."""
    import pandas as pd

    lines = _lines(pd.concat([runs.assign(name=names(runs)) for runs in tasks.values()]))
    found = {}
    for task, runs in tasks.items():
        own = [replace(line, runs=tuple(run for run in line.runs if run in set(runs["run"]))) for line in lines]
        found[task] = [line for line in own if line.runs]
    return found


def _lines(runs: pd.DataFrame) -> list[Line]:
    """A line for each `name` within a method, over all its runs."""
    lines = []
    for method, of_method in runs.groupby("method", sort=False):
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
    label = EXAMPLE_LOSS if METRIC in curves else "loss (nats per token)"
    panel.set(xlabel=cost.label, ylabel=label, xscale=cost.scale)
    format_bytes(panel.xaxis)
    handles, _ = panel.get_legend_handles_labels()
    train = Line2D([], [], label=TRAIN, color="0.4", lw=0.6, alpha=0.7)
    add_legend(figure, [*handles, train], title=title)
    return figure


def task_figure(tasks: Mapping[str, Sequence[Line]], curves: pd.DataFrame, cost: Cost) -> Figure:
    """Training loss of `tasks` (see `lines_by_task`) against `cost`, a panel a task (Figure 6 of the paper).

    Seeds are one line, smoothed each and then averaged, with a band from the lowest to the highest; a marker is their
    mean evaluation loss, wherever they were evaluated.

    Raises:
        ValueError: a run has no such curve, or the seeds of a line have no step in common.
    """
    from matplotlib.lines import Line2D

    by_run = dict(iter(curves.groupby("run", sort=False)))
    styles = {line.label: line.style for lines in tasks.values() for line in lines}
    columns = 2 if len(tasks) > STACKED else 1
    figure = new_figure(panels=math.ceil(len(tasks) / columns), rows=legend_rows(list(styles)))
    figure.set_figwidth(columns * COLUMN_WIDTH)
    panels = list(figure.subplots(math.ceil(len(tasks) / columns), columns, squeeze=False).flat)
    for panel, (task, lines) in zip(panels, tasks.items(), strict=False):
        for line in lines:
            _draw_training(panel, line, by_run, cost=cost)
        panel.set(title=task, xlabel=cost.label, ylabel=EXAMPLE_LOSS, xscale=cost.scale)
        format_bytes(panel.xaxis)
    for panel in panels[len(tasks) :]:
        panel.remove()
    add_legend(figure, [Line2D([], [], label=label, lw=1.0, ms=4, **style) for label, style in styles.items()])
    return figure


def task_caption(tasks: Mapping[str, Sequence[Line]], cost: Cost) -> str:
    """What `task_figure` shows, with the number of seeds behind every mean."""
    several = any(len(line.runs) > 1 for lines in tasks.values() for line in lines)
    band = " with the range from the lowest to the highest" if several else ""
    counts = "; ".join(
        f"{task}: {seeds({line.label: len(line.runs) for line in lines})}" for task, lines in tasks.items()
    )
    return (
        f"Training loss against {cost.caption}, a panel a task; the scale is logarithmic. Each run is smoothed by an "
        f"exponential average over a span of 1/{FINETUNING_SMOOTHED} of its steps; a line is the mean over the seeds"
        f"{band} ({counts}). Markers are the mean evaluation loss. Losses are cross-entropies in nats; where a task's "
        "label is a score, squared errors."
    )


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


def _draw_training(panel: Axes, line: Line, curves: dict[str, pd.DataFrame], *, cost: Cost) -> None:
    train = _mean(line, curves, cost=cost, y="train/loss", smoothed=FINETUNING_SMOOTHED)
    colour, dashes = line.style["color"], line.style["ls"]
    if len(line.runs) > 1:
        panel.fill_between(train["x"], train["low"], train["high"], color=colour, alpha=0.15, lw=0)
    panel.plot(train["x"], train["mean"], label=line.label, color=colour, ls=dashes, lw=0.9)
    evaluated = _mean(line, curves, cost=cost, y="eval/loss")
    marker = {"marker": line.style["marker"], "fillstyle": line.style["fillstyle"]}
    panel.plot(evaluated["x"], evaluated["mean"], color=colour, ls="", ms=4, mew=0.6, zorder=3, **marker)


def _mean(line: Line, curves: dict[str, pd.DataFrame], *, cost: Cost, y: str, smoothed: int = SMOOTHED) -> pd.DataFrame:
    """`x`, and `mean`, `low` and `high` of `y`, by step, over the runs of a line; only steps that all of them have."""
    import pandas as pd

    points = {run: _points(curves.get(run), run, cost=cost, y=y, smoothed=smoothed) for run in line.runs}
    table = pd.concat(points, axis="columns", join="inner")
    if table.empty:
        raise ValueError(f"no step with '{y}' is common to the seeds of {line.label}: {', '.join(line.runs)}")
    x, values = table.xs("x", axis="columns", level=1), table.xs("y", axis="columns", level=1)
    by_step = {"x": x.mean(axis=1), "mean": values.mean(axis=1), "low": values.min(axis=1), "high": values.max(axis=1)}
    return pd.DataFrame(by_step)


def _points(curve: pd.DataFrame | None, run: str, *, cost: Cost, y: str, smoothed: int) -> pd.DataFrame:
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
        points["y"] = points["y"].ewm(span=max(1, len(points) / smoothed)).mean()
    return points

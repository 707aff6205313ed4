"""Figures of whole runs, which need no curve: final loss against bytes a step (Figure 4 of the paper), and the kinds of
parameters that the bytes are of (Figure 5a)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sweep.curves import names, seeds
from sweep.runs import KIND_BYTES, KINDS
from sweep.style import DASHES, LINE_HEIGHT, add_legend, format_bytes, legend_rows, method_style, new_figure, wrap

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS = "eval/loss"
PER_STEP = "communicated by one worker per step (bytes)"
ACCOUNTINGS = {"comm/bytes_per_step": "every synchronised tensor", "paper/comm/bytes_per_step": "paper's accounting"}
FRONT_FILLS = ("full", "none", "left", "bottom", "right", "top")
# Told apart by lightness and hatch, and by no colour that is a method's.
KIND_FILLS = dict(zip(KINDS, (("0.4", ""), ("0.65", "////"), ("0.85", "...."), ("1.0", "xxxx")), strict=True))
POINT: dict[str, Any] = {"ms": 4, "mew": 0.6, "elinewidth": 0.8, "capsize": 2, "zorder": 3}
BAR_HEIGHT = 0.16  # inches
BAR_PITCH = 0.26  # inches, without the name, which stands above the bar


def pareto_figure(runs: pd.DataFrame) -> Figure:
    """Final evaluation loss against bytes/step, a point a setting, a panel an accounting, with the Pareto fronts.

    Only settings that compare (the same `mixed`) share a front; fronts differ in dashes, their points in the filling.

    Raises:
        ValueError: a run lacks its loss or its bytes.
    """
    from matplotlib.lines import Line2D

    _require(runs, [LOSS, *ACCOUNTINGS])
    fronts = list(dict.fromkeys(runs["mixed"]))
    handles = []
    for method in runs["method"].unique():
        colour, marker = method_style(method)
        handles.append(Line2D([], [], label=method, color=colour, marker=marker, ms=4, ls=""))
    for index, mixed in enumerate(fronts):
        name = " ".join(filter(None, ("Pareto front", mixed)))
        style = _front_style(index) | ({"marker": "o", "ms": 4, "fillstyle": _fill(index)} if len(fronts) > 1 else {})
        handles.append(Line2D([], [], label=name, **style))
    figure = new_figure(panels=len(ACCOUNTINGS), rows=legend_rows([str(handle.get_label()) for handle in handles]))
    panels = figure.subplots(len(ACCOUNTINGS), sharex=True, sharey=True)
    for panel, (key, title) in zip(panels, ACCOUNTINGS.items(), strict=True):
        panel.set(title=title, ylabel="final loss (nats per token)", xscale="log")
        for index, mixed in enumerate(fronts):
            _draw_front(panel, runs[runs["mixed"] == mixed], key=key, index=index)
    panels[-1].margins(0.08)
    panels[-1].set_xlabel(PER_STEP)
    format_bytes(panels[-1].xaxis)
    add_legend(figure, handles)
    return figure


def pareto_caption(runs: pd.DataFrame) -> str:
    """What `pareto_figure` shows, with the number of seeds behind every mean."""
    counts = runs.assign(name=names(runs)).groupby("name", sort=False).size()
    return (
        "Final evaluation loss against the bytes that one worker communicates per step. A point is a setting: mean ± "
        f"sample standard deviation over the seeds ({seeds(dict(counts))}). Above, every synchronised tensor counts; "
        "below, what the paper counts. The line joins the settings that no other equals in one and beats in the other."
    )


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of the (cost, loss) `points` that no other beats in one and equals or beats in the other, by cost."""
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def split_figure(runs: pd.DataFrame) -> Figure:
    """Bytes/step by kind of parameter, a bar a setting, every synchronised tensor counted.

    Raises:
        ValueError: a run lacks the bytes of its kinds, or they do not add up to its bytes/step.
    """
    from matplotlib.patches import Patch
    from matplotlib.ticker import EngFormatter

    table = _bytes_by_kind(runs)
    labels = [wrap(label) for label in table.index]
    pitches = [BAR_PITCH + LINE_HEIGHT * (label.count("\n") + 1) for label in labels]
    places = list(accumulate(pitches))  # inches from the top to the middle of a bar
    patches = [Patch(label=kind, **_kind_style(kind)) for kind in KINDS if table[kind].any()]
    figure = new_figure(panels=0, rows=legend_rows([str(patch.get_label()) for patch in patches]))
    figure.set_figheight(figure.get_figheight() + 0.5 + sum(pitches))
    panel = figure.subplots()
    ends = table.cumsum(axis="columns")
    for kind in KINDS:
        panel.barh(places, table[kind], left=ends[kind] - table[kind], height=BAR_HEIGHT, **_kind_style(kind))
    for place, label, total in zip(places, labels, ends[KINDS[-1]], strict=True):
        number = EngFormatter(places=2, sep="")(total)
        panel.annotate(label, (0, place - BAR_HEIGHT / 2), (2, 2), textcoords="offset points")
        panel.annotate(number, (total, place), (2, -0.5), textcoords="offset points", va="center")
    panel.set(xlabel=PER_STEP, xlim=(0, ends.max(axis=None) * 1.2), ylim=(0, places[-1] + BAR_HEIGHT), yticks=[])
    panel.invert_yaxis()
    format_bytes(panel.xaxis)
    add_legend(figure, patches)
    return figure


SPLIT_CAPTION = (
    "Bytes that one worker communicates per step, refresh steps included, by the kind of parameter they are of; every "
    "synchronised tensor counted. Vectors are the gains of norms, and biases."
)


def _bytes_by_kind(runs: pd.DataFrame) -> pd.DataFrame:
    """Bytes/step, a row a setting, a column a kind: 0 where a model has nothing of it."""
    columns = [KIND_BYTES + kind for kind in KINDS]
    parts = runs[columns].astype(float)
    for run, known, total in zip(
        runs["run"], parts.sum(axis=1), runs["comm/bytes_per_step"].astype(float), strict=True
    ):
        if not math.isclose(known, total, rel_tol=1e-6):
            raise ValueError(f"{run}: {', '.join(columns)} are missing, or add up to {known:g} instead of {total:g}")
    table = parts.set_axis(KINDS, axis="columns").fillna(0.0)
    return table.groupby(names(runs), sort=False).mean()


def _draw_front(panel: Axes, runs: pd.DataFrame, *, key: str, index: int) -> None:
    points = []
    for _, group in runs.groupby("label", sort=False):
        colour, marker = method_style(group["method"].iloc[0])
        losses = group[LOSS].astype(float)
        point = float(group[key].astype(float).mean()), float(losses.mean())
        points.append(point)
        panel.errorbar(
            *point,
            losses.std() if len(group) > 1 else None,
            color=colour,
            marker=marker,
            fillstyle=_fill(index),
            **POINT,
        )
    costs, lowest = zip(*pareto_front(points), strict=True)
    panel.plot(costs, lowest, drawstyle="steps-post", label="_front", **_front_style(index))


def _front_style(index: int) -> dict[str, Any]:
    return {"color": "0.5", "lw": 0.8, "ls": DASHES[(index + 1) % len(DASHES)]}


def _fill(index: int) -> Any:
    return FRONT_FILLS[index % len(FRONT_FILLS)]


def _kind_style(kind: str) -> dict[str, Any]:
    grey, hatch = KIND_FILLS[kind]
    return {"facecolor": grey, "hatch": hatch, "edgecolor": "black", "linewidth": 0.5}


def _require(runs: pd.DataFrame, columns: Iterable[str]) -> None:
    for column in columns:
        lacking = runs.loc[runs[column].isna(), "run"]
        if len(lacking):
            raise ValueError(f"{lacking.iloc[0]}: no '{column}', so this run cannot be drawn")

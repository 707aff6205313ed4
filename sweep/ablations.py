"""Ablations: groups of runs that agree in every setting but the one in question (Figures 3 and 5b of the paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sweep.curves import Line
from sweep.runs import describe, is_setting, varying
from sweep.style import DASHES

if TYPE_CHECKING:
    import pandas as pd

MARKERS = ("o", "s", "^", "D", "v")


@dataclass(frozen=True)
class Ablation:
    """What is varied: `keys` of the configuration, all at the same value.

    `among` are the values that count (any if empty), `against` is one that must be there, and `follows` are keys that
    may change with the value.
    """

    title: str
    keys: tuple[str, ...]
    among: tuple[str, ...] = ()
    against: str | None = None
    follows: tuple[str, ...] = ()


FACTOR = ("lr_factor.embedding",)  # may depend on the subspace, so that updates have one size

ABLATIONS = {
    "ablation_sided": Ablation(
        "subspace of linears and embedding",
        ("subspace.linear", "subspace.embedding"),
        among=("one_sided", "two_sided"),
        follows=FACTOR,
    ),
    "ablation_refresh": Ablation("refresh (svd is exact)", ("refresh.method",)),
    "ablation_interval": Ablation("refresh interval of the linears (steps)", ("refresh.linear",)),
    "ablation_rank": Ablation("rank of the linears", ("rank.linear",)),
    "ablation_embedding": Ablation(
        "subspace of the embedding", ("subspace.embedding",), against="dense", follows=FACTOR
    ),
}


def find_ablation(runs: pd.DataFrame, ablation: Ablation) -> list[pd.DataFrame]:
    """The groups of `runs` that show `ablation`, each with the column `value`, sorted by it.

    The runs of a group agree in all other settings, in model, data, tokens and world size; seeds may differ.
    """
    columns = [f"config/{key}" for key in ablation.keys]
    if not set(columns) <= set(runs):
        return []
    rows = runs[columns].to_numpy(dtype=object)
    runs = runs.assign(value=runs[columns[0]])[[len(set(row)) == 1 for row in rows]]
    runs = runs[runs["value"].isin(ablation.among)] if ablation.among else runs.dropna(subset="value")
    free = {*columns, *(f"config/{key}" for key in ablation.follows)}
    others = varying(runs, [column for column in _compared(runs) if column not in free])
    groups = [group for _, group in runs.groupby(others, sort=False, dropna=False)] if others else [runs]
    return [
        # One that was run under two names is no further seed.
        group.drop_duplicates(["value", "seed", "data_seed"]).sort_values(["value", "seed"])
        for group in groups
        if group["value"].nunique() > 1 and (ablation.against is None or ablation.against in set(group["value"]))
    ]


def missing_runs(runs: pd.DataFrame, name: str) -> str:
    """Why there is no ablation `name` among `runs`, and which would make one."""
    ablation = ABLATIONS[name]
    columns = [f"config/{key}" for key in ablation.keys if f"config/{key}" in runs]
    have = "; ".join(dict.fromkeys(describe(runs, columns))) if columns else "none of these keys"
    values = f" with the values {' and '.join(ablation.among)}" if ablation.among else ""
    values += f", one of them {ablation.against}" if ablation.against else ""
    return (
        f"{name}: needs runs that differ in {' and '.join(ablation.keys)}{values} and in no other setting but "
        f"the seeds; these have {have}"
    )


def ablation_lines(group: pd.DataFrame) -> list[Line]:
    """A line for each value in a group of `find_ablation`: dark to light in their order."""
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    names = dict(zip(group["value"], describe(group, ["value"]), strict=True))
    lines = []
    for index, (value, name) in enumerate(names.items()):
        # Perceptually uniform, and alike with and without colour blindness; its light end would not show on white.
        colour = to_hex(mpl.colormaps["cividis"](0.85 * index / max(1, len(names) - 1)))
        style = {"color": colour, "marker": MARKERS[index % len(MARKERS)], "ls": DASHES[index % len(DASHES)]}
        runs = tuple(group.loc[group["value"] == value, "run"])
        lines.append(Line(name.removeprefix("value="), runs, style))
    return lines


def name_group(group: pd.DataFrame, runs: pd.DataFrame) -> str:
    """What a group of `find_ablation` shows: its methods, and what sets it apart from their other `runs`."""
    runs = runs[runs["method"].isin(group["method"])]
    shared = [column for column in varying(runs, _compared(runs)) if not varying(group, [column])]
    methods = ", ".join(group["method"].unique())
    return f"{methods} ({describe(group.head(1), shared)[0]})" if shared else methods


def _compared(runs: pd.DataFrame) -> list[str]:
    """The columns that tell what was computed; for the name of the optimizer stand all its settings."""
    return ["mixed", "world_size", *(name for name in runs if is_setting(name) and name != "config/optimizer.name")]

"""Draw figures: `python -m sweep.figures RUNS… --out DIR` draws all that the runs allow, each as PNG and PDF.

Loss against bytes, tokens and seconds and the ablations need curves, which only run directories have. For final loss
against bytes a step and for the split of the bytes a CSV of results will do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.ablations import ABLATIONS, ablation_lines, find_ablation, missing_runs, name_group
from sweep.compare import best, comparable
from sweep.curves import (
    COSTS,
    EXAMPLE_LOSS,
    lines_by_label,
    lines_by_task,
    loss_caption,
    loss_figure,
    task_caption,
    task_figure,
)
from sweep.runs import KIND_BYTES, KINDS, METRIC, find_runs, is_results, read_curves, read_runs
from sweep.style import RC, Drawn, save
from sweep.totals import SPLIT_CAPTION, pareto_caption, pareto_figure, split_figure

if TYPE_CHECKING:
    import pandas as pd

LOSSES = {f"loss_vs_{name}": cost for name, cost in COSTS.items()}
PARETO, SPLIT = "loss_vs_bytes_per_step", "bytes_by_kind"
BY_TASK = "loss_vs_bytes"
NAMES = (*LOSSES, PARETO, SPLIT, *ABLATIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason on stderr, if a figure cannot be drawn."""
    parser = argparse.ArgumentParser(prog="python -m sweep.figures", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="run directories, folders of some, or CSVs")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the figures go")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"only these of {', '.join(NAMES)}")
    parser.add_argument("--best", action="store_true", help="only the best setting of each method")
    parser.add_argument("--allow-edge", action="store_true", help="let the best be at the edge of what was tried")
    parser.add_argument("--allow-mixed", action="store_true", help="draw runs of different models, data or tokens")
    options = parser.parse_args(arguments)
    try:
        paths = find_runs(options.runs)
        done = comparable(read_runs(paths), allow_mixed=options.allow_mixed)
        done = best(done, allow_edge=options.allow_edge) if options.best else done
        curves = None if any(map(is_results, paths)) else read_curves(done)
        for drawn in draw_report(done, curves, options.out, only=options.only):
            print(f"{drawn.png}: {drawn.caption}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def draw_report(
    runs: pd.DataFrame, curves: pd.DataFrame | None, out: Path, *, only: Sequence[str] | None = None
) -> list[Drawn]:
    """Draw into `out` every figure that `runs` (see `sweep.compare.comparable`) allow, or `only` some of `NAMES`.

    Without `curves`, those that need none. An ablation is drawn where there is one.

    Raises:
        ValueError: a run lacks a value or a curve that a figure needs, or one of `only` cannot be drawn at all.
    """
    import matplotlib as mpl

    drawn: list[Drawn] = []
    with mpl.rc_context(RC):
        for name in NAMES if only is None else only:
            if name == PARETO:
                figure = pareto_figure(runs)
                for panel in figure.axes if runs[METRIC].notna().any() else ():
                    panel.set_ylabel(f"final {EXAMPLE_LOSS}")
                drawn.append(save(figure, out, name, pareto_caption(runs)))
            elif name == SPLIT:
                folded, note = _fold_kinds(runs)
                drawn.append(save(split_figure(folded), out, name, SPLIT_CAPTION + note))
            elif curves is not None:
                found = _draw_curves(name, runs, curves, out)
                if only is not None and not found:
                    raise ValueError(missing_runs(runs, name))
                drawn += found
            elif only is not None:
                raise ValueError(f"{name}: needs curves, which rows of a CSV do not have; give the run directories")
    return drawn


def draw_tasks(tasks: Mapping[str, pd.DataFrame], curves: pd.DataFrame, out: Path) -> Drawn:
    """Draw into `out` the training loss of fine-tuning runs against the bytes, a panel a task (`task_figure`).

    Raises:
        ValueError: a run lacks its curve.
    """
    import matplotlib as mpl

    lines, cost = lines_by_task(tasks), COSTS["bytes"]
    with mpl.rc_context(RC):
        return save(task_figure(lines, curves, cost), out, BY_TASK, task_caption(lines, cost))


def _fold_kinds(runs: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """`runs` with the bytes of a further kind, as `other_embedding`, in the kind it is one of, and a sentence on it."""
    parts = {
        kind: [column for column in runs if column.startswith(KIND_BYTES) and column.endswith(f"_{kind}")]
        for kind in KINDS
    }
    folded = {KIND_BYTES + kind: [KIND_BYTES + kind, *more] for kind, more in parts.items() if more}
    sums = {kind: runs[columns].astype(float).sum(axis="columns", min_count=1) for kind, columns in folded.items()}
    note = "".join(
        f" {', '.join(column.removeprefix(KIND_BYTES) for column in more)} counts as {kind}."
        for kind, more in parts.items()
        if more
    )
    return runs.assign(**sums), note


def _draw_curves(name: str, runs: pd.DataFrame, curves: pd.DataFrame, out: Path) -> list[Drawn]:
    """One of the figures that need curves: an ablation once for each group of runs that shows it, the others once."""
    if name in LOSSES:
        lines, cost = lines_by_label(runs), LOSSES[name]
        return [save(loss_figure(lines, curves, cost), out, name, loss_caption(lines, cost))]
    drawn = []
    groups = find_ablation(runs, ABLATIONS[name])
    for number, group in enumerate(groups, 1):
        file = name if len(groups) == 1 else f"{name}_{number}"
        lines, title = ablation_lines(group), ABLATIONS[name].title
        caption = f"{name_group(group, runs)}, by {title}. {loss_caption(lines, COSTS['bytes'])}"
        drawn.append(save(loss_figure(lines, curves, COSTS["bytes"], title=title), out, file, caption))
    return drawn


if __name__ == "__main__":
    sys.exit(main())

"""Compare runs: `python -m sweep.report RUNS_DIR… --out DIR` writes table.md, table.csv and the loss figure into DIR.

`table.md` has one row a group of runs that differ only in their seeds, `table.csv` one row a run with every value as it
was recorded. Runs that are not done stand below the table (and in the CSV) with their error. A table compares like with
like: runs of another model, data or number of tokens are refused unless `--allow-mixed`, and then a column names them.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.figures import AXES, draw_loss
from sweep.runs import COLUMNS as RUN_COLUMNS
from sweep.runs import DATA_HASHES, describe, find_runs, read_curves, read_runs, varying

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "adamw"
RATIO = {key: f"{key}/{BASELINE}" for key in ("comm/bytes_per_step", "paper/comm/bytes_per_step")}
NOTHING = "-"

NOTES = (
    f"Bytes are one worker's payload, accounting `all` unless the header says `paper`; ÷ {BASELINE} is the ratio of "
    f"bytes/step to {BASELINE}'s on the same model (- without exactly one such value). M = 1e6, G = 1e9. "
    "Mean ± sample standard deviation over n seeds; no ± where all seeds agree."
)


@dataclass(frozen=True)
class Column:
    """A measured column of table.md, shown to `digits` significant digits, and in M or G of its unit where `scaled`."""

    key: str
    title: str
    unit: str = ""
    digits: int = 4
    scaled: bool = False


TABLE = (
    Column("eval/loss", "eval loss"),
    Column("eval/perplexity", "perplexity"),
    Column("tokens", "tokens", scaled=True),
    Column("comm/bytes_per_step", "bytes/step", unit="B", scaled=True),
    Column(RATIO["comm/bytes_per_step"], f"÷ {BASELINE}", digits=3),
    Column("comm/peak_bytes", "peak bytes", unit="B", scaled=True),
    Column("comm/total_bytes", "total bytes", unit="B", scaled=True),
    Column("paper/comm/bytes_per_step", "bytes/step, paper", unit="B", scaled=True),
    Column(RATIO["paper/comm/bytes_per_step"], f"÷ {BASELINE}, paper", digits=3),
    Column("memory/optimizer_state_bytes", "optimizer state", unit="B", scaled=True),
    Column("duration_s", "duration", unit="s"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason on stderr, if nothing is done or a table is refused."""
    parser = argparse.ArgumentParser(prog="python -m sweep.report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUNS_DIR", help="a run directory or a folder of some")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    parser.add_argument("--figure-x", nargs="+", choices=AXES, default=list(AXES), help="the figure's panels, in order")
    parser.add_argument("--allow-mixed", action="store_true", help="compare runs of different models, data or tokens")
    options = parser.parse_args(arguments)
    try:
        print(report(options.runs, options.out, figure_x=options.figure_x, allow_mixed=options.allow_mixed))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def report(
    roots: Sequence[Path], out: Path, *, figure_x: Sequence[str] = tuple(AXES), allow_mixed: bool = False
) -> str:
    """Write the report on the runs in `roots` into `out`; returns the text of table.md.

    Raises:
        ValueError: no run is done, the runs cannot stand in one table (see `comparable`), or a curve is missing.
    """
    runs = read_runs(find_runs(roots))
    done = with_ratios(comparable(runs, allow_mixed=allow_mixed))
    curves = read_curves(done)
    text = markdown(done, runs[runs["status"] != "done"])

    out.mkdir(parents=True, exist_ok=True)
    draw_loss(done, curves, out, x=figure_x)
    (out / "table.md").write_text(text, encoding="utf-8")
    columns = [*RUN_COLUMNS, *RATIO.values()]
    runs.join(done[list(RATIO.values())]).to_csv(out / "table.csv", columns=columns, index=False)
    return text


def comparable(runs: pd.DataFrame, *, allow_mixed: bool) -> pd.DataFrame:
    """The done runs with two more columns.

    `mixed` names what should be the same in all runs but is not, and `label` the group of a run.

    Raises:
        ValueError: no run is done; a run has no losses, as it was a dry run; two runs are repeats, which are no further
            seed; or model, tokens or data differ and `allow_mixed` is false.
    """
    done = runs[runs["status"] == "done"].copy()
    if done.empty:
        listed = "; ".join(f"{run.run}: {run.status}, {_last_line(run.error)}" for run in runs.itertuples())
        raise ValueError(f"none of {len(runs)} runs is done: {listed}")
    dry = done.loc[done["dry_run"].astype(bool), "run"]
    if len(dry):
        raise ValueError(f"dry runs have no loss to compare; leave them out: {', '.join(dry)}")

    columns = varying(done, ["model", "tokens", *DATA_HASHES])
    columns += [
        column for column in _model_columns(done) if any(varying(one, [column]) for _, one in done.groupby("model"))
    ]
    done["mixed"] = describe(done, columns)
    if columns and not allow_mixed:
        kinds = done.groupby("mixed", sort=False)["run"].agg(["size", "first"])
        listed = "; ".join(f"{kind} ({row['size']} runs, e.g. {row['first']})" for kind, row in kinds.iterrows())
        raise ValueError(f"these runs do not compare (use --allow-mixed to put them in one table anyway): {listed}")

    labels = zip(done["method"], done["settings"], done["mixed"], strict=True)
    done["label"] = [" ".join(filter(None, label)) for label in labels]
    repeats = done.loc[done.duplicated(["label", "seed", "data_seed"], keep=False), "run"]
    if len(repeats):
        raise ValueError(f"runs with the same configuration and seeds; a repeat is not a sample: {', '.join(repeats)}")
    return done


def with_ratios(done: pd.DataFrame) -> pd.DataFrame:
    """`done` with the columns of `RATIO`: bytes/step over the one of the baseline on that model, else NaN."""
    done = done.assign(**dict.fromkeys(RATIO.values(), math.nan))
    for _, runs in done.groupby(_model_columns(done), dropna=False, sort=False):
        for key, ratio in RATIO.items():
            baseline = runs.loc[runs["method"] == BASELINE, key].unique()
            if len(baseline) == 1:
                done.loc[runs.index, ratio] = runs[key].astype(float) / baseline[0]
    return done


def markdown(done: pd.DataFrame, others: pd.DataFrame) -> str:
    """The table of the groups in `done`, what is common to them, and below it the runs that are not done."""
    groups = [group for _, group in done.groupby("label", sort=False)]
    columns = {"method": [group["method"].iloc[0] for group in groups]}
    for name in ("settings", "mixed"):
        if done[name].any():
            columns[name] = [group[name].iloc[0] or NOTHING for group in groups]
    columns["n"] = [str(len(group)) for group in groups]
    columns["lr"] = [_number(group["lr"].iloc[0]) for group in groups]
    for column in TABLE:
        title, unit = _unit(column, largest=done[column.key].astype(float).max())
        columns[title] = [_cell(group[column.key].astype(float) / unit, digits=column.digits) for group in groups]

    common = [name for name in ("model", *DATA_HASHES) if not varying(done, [name])]
    text = f"{describe(done.head(1), common)[0]}\n\n{_pipe_table(columns)}\n\n{NOTES}\n"
    if len(others):
        shown = [name for name in ("run", "method", "settings", "status") if others[name].any()]
        fields = {name: list(others[name].fillna(NOTHING)) for name in shown}
        fields["error"] = [_last_line(error) for error in others["error"]]
        text += f"\nNot in the table:\n\n{_pipe_table(fields)}\n"
    return text


def _unit(column: Column, *, largest: float) -> tuple[str, float]:
    """The header of a column and what to divide its values by: one unit for all, so that they compare at a glance."""
    if not column.scaled:
        return f"{column.title} ({column.unit})" if column.unit else column.title, 1.0
    prefix, unit = ("G", 1e9) if largest >= 1e9 else ("M", 1e6)
    return f"{column.title} ({prefix}{column.unit})", unit


def _cell(values: pd.Series, *, digits: int) -> str:
    """Mean ± sample standard deviation; a seed without a number is never skipped, but leaves no mean."""
    mean = values.mean(skipna=False)
    if math.isnan(mean):
        return NOTHING
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(mean)))) if mean and math.isfinite(mean) else 0
    spread = f" ± {values.std():.{decimals}f}" if values.nunique() > 1 else ""
    return f"{mean:.{decimals}f}{spread}"


def _number(value: float | None) -> str:
    import pandas as pd

    return NOTHING if pd.isna(value) else f"{value:g}"


def _last_line(error: str) -> str:
    """The line of a traceback that names the error."""
    return error.strip().splitlines()[-1]


def _pipe_table(columns: dict[str, list[str]]) -> str:
    """A markdown table, padded so that it reads well in a terminal too; columns of numbers are right-aligned."""
    escaped = [[cell.replace("|", "\\|") for cell in (title, *cells)] for title, cells in columns.items()]
    aligned = []
    for title, *cells in escaped:
        width = max(3, *map(len, (title, *cells)))
        right = all(re.match(r"\d|-$", cell) for cell in cells)
        rule = "-" * (width - 1) + ":" if right else "-" * width
        aligned.append([text.rjust(width) if right else text.ljust(width) for text in (title, rule, *cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*aligned, strict=True))


def _model_columns(runs: pd.DataFrame) -> list[str]:
    return [column for column in runs if column.startswith("config/model.")]


if __name__ == "__main__":
    sys.exit(main())

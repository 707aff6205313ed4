"""Compare runs: `python -m sweep.report RUNS… --out DIR` writes tables, figures and one HTML page with both into DIR.

The table has one row a group of runs that differ only in their seeds (fine-tuning runs are of one task, and have their
scores in it; for several tasks there is `sweep.glue`): `table.md`, `table.tex` (booktabs) and, above the
figures, `report.html`. `table.csv` has one row a run with every value as it was recorded. Runs that are not done stand
below the table (and in the CSV) with their error. A table compares like with like: runs of another model, data, number
of tokens or commit are refused unless `--allow-mixed`, and then a column names them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.compare import (
    BASELINE,
    RATIO,
    SAME,
    Sample,
    best,
    chosen_from,
    clearly_lowest,
    comparable,
    difference,
    last_line,
    missing_seeds,
    with_ratios,
)
from sweep.figures import draw_report
from sweep.page import Figure, Section, page
from sweep.runs import COLUMNS as RUN_COLUMNS
from sweep.runs import METRIC, SCORES, describe, find_runs, is_results, metrics, read_curves, read_runs, varying
from sweep.tables import Cell, Table

if TYPE_CHECKING:
    import pandas as pd

NOTHING = "-"
PERPLEXITY = "eval/perplexity"
GAP = f"gap to {BASELINE} (nats)"
SCORE_GAP = f"gap to {BASELINE} (points)"
POINTS = 100.0  # of a score of 1

BOLD_NOTE = (
    "Mean ± sample standard deviation over n seeds; no ± where all seeds agree. A {what} every other in the column (of "
    "the same model, data, tokens and code) by more than the larger of the two standard deviations; so nothing is bold "
    "beside a row with a single seed, nor in a row that lacks seeds."
)
LOWER = "loss is bold where it is lower than"
GAP_NOTE = (
    f"The gap is the difference of the mean {{what}} ± its standard error. ÷ {BASELINE} is the ratio of bytes/step to "
    f"{BASELINE}'s on the same model. Both are {NOTHING} without exactly one {BASELINE} to compare with."
)
BYTES_NOTE = "Bytes are one worker's payload, accounting `all` unless the header says `paper`. M = 1e6, G = 1e9."
NOTES = (BOLD_NOTE.format(what=LOWER), GAP_NOTE.format(what="losses"), BYTES_NOTE)
SCORE_NOTES = (
    BOLD_NOTE.format(what=f"{LOWER}, and a score where it is higher than,"),
    GAP_NOTE.format(what="scores (by the first metric in the table)"),
    BYTES_NOTE,
)


@dataclass(frozen=True)
class Column:
    """A measured column of the table: to `digits` significant digits, in M or G of its unit where `scaled`.

    The lowest value of a `loss` stands out, and the highest of a `score`, which is shown in points.
    """

    key: str
    title: str
    unit: str = ""
    digits: int = 4
    scaled: bool = False
    loss: bool = False
    score: bool = False


TABLE = (
    Column("eval/loss", "eval loss", loss=True),
    Column(PERPLEXITY, "perplexity", loss=True),
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
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="a run directory, a folder of some, or a CSV of results")
    add("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    add("--allow-mixed", action="store_true", help="compare runs of different models, data, tokens or commits")
    add("--best", action="store_true", help="of each method, only the setting that did best at the tuning seed")
    add("--allow-edge", action="store_true", help="with --best: even if it is at the edge of the values tried")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put the table between FILE's <!-- begin/end NAME -->, too")
    options = parser.parse_args(arguments)
    try:
        choice = {"only_best": options.best, "allow_edge": options.allow_edge}
        text = report(options.runs, options.out, allow_mixed=options.allow_mixed, readme=options.readme, **choice)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def report(
    roots: Sequence[Path],
    out: Path,
    *,
    allow_mixed: bool = False,
    only_best: bool = False,
    allow_edge: bool = False,
    readme: tuple[str, str] | None = None,
) -> str:
    """Write the report on the runs in `roots` into `out`, and the table into `readme`; returns the text of table.md.

    Raises:
        ValueError: no run is done, the runs cannot stand in one table (see `comparable`), the best is at an edge (see
            `best`), a curve is missing, or `readme` has no place for the table.
    """
    paths = find_runs(roots)
    runs = read_runs(paths)
    done, notes = comparable(runs, allow_mixed=allow_mixed), []
    if only_best:
        notes = chosen_from(done)
        done = best(done, allow_edge=allow_edge)
    done = with_ratios(done)
    others = runs[runs["status"] != "done"]
    curves = None if any(map(is_results, paths)) else read_curves(done)
    table = table_of(done, missing_seeds(runs, done), notes=notes)
    below = [not_done(others)] if len(others) else []
    text = "\n".join(part.markdown() for part in (table, *below))
    filled = fill(Path(readme[0]), readme[1], table.markdown()) if readme else ""

    out.mkdir(parents=True, exist_ok=True)
    figures = tuple(Figure(drawn.png, drawn.caption) for drawn in draw_report(done, curves, out))
    sections = [Section("Comparison", (table,)), Section("Figures", figures=figures)]
    sections += [Section("Runs that are not done", (rest,)) for rest in below]
    title = f"Optimizers compared on {', '.join(done['model'].unique())}"
    (out / "report.html").write_text(page(title, sections), encoding="utf-8")
    (out / "table.md").write_text(text, encoding="utf-8")
    (out / "table.tex").write_text(table.latex(), encoding="utf-8")
    shown = runs.join(done[list(RATIO.values())]).loc[sorted({*done.index, *others.index})]
    shown.to_csv(out / "table.csv", columns=[*RUN_COLUMNS, *score_columns(done), *RATIO.values()], index=False)
    if readme:
        Path(readme[0]).write_text(filled, encoding="utf-8")
    return text


def table_of(done: pd.DataFrame, missing: dict[str, dict[str, str]], *, notes: Sequence[str] = ()) -> Table:
    """The table of the groups in `done`; `missing` are the seeds that each label lacks, and `notes` stand first."""
    groups = [group for _, group in done.groupby("label", sort=False)]
    lacking = [missing[group["label"].iloc[0]] for group in groups]
    columns: dict[str, list[str | Cell]] = {"method": [group["method"].iloc[0] for group in groups]}
    done = done.assign(settings=settings_without_rate(done))
    for name in ("settings", "mixed"):
        if done[name].any():
            columns[name] = [done.at[group.index[0], name] or NOTHING for group in groups]
    columns["n"] = [count(group, seeds) for group, seeds in zip(groups, lacking, strict=True)]
    columns["lr"] = [number(group["lr"].iloc[0]) for group in groups]
    table = _columns(done)
    gap_of = next((column.key for column in table if column.score), "eval/loss")
    for column in table:
        title, unit = unit_of(column, largest=done[column.key].astype(float).max())
        samples = [Sample.of(group[column.key].astype(float) / unit) for group in groups]
        bold = best_rows(groups, samples, lacking, highest=column.score) if column.loss or column.score else set()
        columns[title] = [Cell(cell_text(one, column), row in bold) for row, one in enumerate(samples)]
        if column.key == gap_of:
            decimals = 2 if column.score else 3
            columns[SCORE_GAP if column.score else GAP] = list(gaps(groups, samples, decimals=decimals))

    common = [name for name in SAME if name != "tokens" and not varying(done, [name])]
    rows = tuple(zip(*columns.values(), strict=True))
    below = SCORE_NOTES if gap_of != "eval/loss" else NOTES
    return Table(describe(done.head(1), common)[0], tuple(columns), rows, (*notes, *gone(groups, lacking), *below))


def _columns(done: pd.DataFrame) -> list[Column]:
    """`TABLE`; where runs have scores, these in the place of the perplexity, which means nothing there."""
    scores = [Column(f"eval/{metric}", f"{metric} (×100)", score=True) for metric in metrics(done)]
    at = [column.key for column in TABLE].index(PERPLEXITY)
    return [*TABLE[:at], *scores, *TABLE[at + 1 :]] if scores else list(TABLE)


def score_columns(done: pd.DataFrame) -> list[str]:
    """The columns of a CSV with what runs scored; none where there are no scores."""
    return [*SCORES, *(f"eval/{metric}" for metric in metrics(done))] if done[METRIC].notna().any() else []


def settings_without_rate(done: pd.DataFrame) -> pd.Series:
    """The column `settings` without the learning rate, which has a column of its own."""
    return done["settings"].str.replace(r"(, )?\boptimizer\.lr=[^,]*", "", regex=True).str.removeprefix(", ")


def count(group: pd.DataFrame, lacking: dict[str, str]) -> str:
    """How many runs a group has, and of how many if it lacks some."""
    return f"{len(group)} of {len(group) + len(lacking)}" if lacking else str(len(group))


def gone(groups: list[pd.DataFrame], lacking: list[dict[str, str]]) -> list[str]:
    """A sentence for each group that lacks seeds."""
    return [
        f"{group['label'].iloc[0]}: {'; '.join(f'{seed} missing ({why})' for seed, why in seeds.items())}."
        for group, seeds in zip(groups, lacking, strict=True)
        if seeds
    ]


def best_rows(
    groups: list[pd.DataFrame], samples: list[Sample], lacking: list[dict[str, str]], *, highest: bool = False
) -> set[int]:
    """The rows to set in bold: of each kind of comparable groups the clearly lowest, or highest, unless it lacks seeds.

    A mean of the seeds that came through says nothing of those that did not.
    """
    if highest:
        samples = [replace(sample, mean=-sample.mean) for sample in samples]
    lowest = set()
    for rows in _by_kind(groups).values():
        index = clearly_lowest([samples[row] for row in rows])
        if index is not None and not lacking[rows[index]]:
            lowest.add(rows[index])
    return lowest


def gaps(groups: list[pd.DataFrame], samples: list[Sample], *, decimals: int) -> list[str]:
    """For each group its mean minus that of the one group of the baseline that it compares with."""
    found = [NOTHING] * len(groups)
    for rows in _by_kind(groups).values():
        baselines = [row for row in rows if groups[row]["method"].iloc[0] == BASELINE]
        for row in rows if len(baselines) == 1 else ():
            gap, error = difference(samples[row], samples[baselines[0]])
            if row != baselines[0] and math.isfinite(gap):
                spread = f" ± {error:.{decimals}f}" if math.isfinite(error) else ""
                found[row] = f"{gap:+.{decimals}f}{spread}".replace("-", "−")
    return found


def _by_kind(groups: list[pd.DataFrame]) -> dict[str, list[int]]:
    """The rows of the groups that are comparable, by what they have in common."""
    kinds: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        kinds.setdefault(group["mixed"].iloc[0], []).append(row)
    return kinds


def not_done(others: pd.DataFrame) -> Table:
    """The runs that are not done, with their errors."""
    shown = [name for name in ("run", "method", "settings", "status") if others[name].any()]
    columns = {name: list(others[name].fillna(NOTHING)) for name in shown}
    columns["error"] = [last_line(error) for error in others["error"]]
    return Table("Not in the table:", tuple(columns), tuple(zip(*columns.values(), strict=True)))


def fill(file: Path, name: str, text: str) -> str:
    """The text of `file` with `text` between its comments `begin NAME` and `end NAME`, in the place of what is there.

    Raises:
        ValueError: There is no `file`, or it lacks one of them, or has it twice.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if not file.is_file():
        raise ValueError(f"--readme must begin with a file that exists, got '{file}'")
    content = file.read_text(encoding="utf-8")
    before, _, rest = content.partition(begin)
    _, _, after = rest.partition(end)
    if content.count(begin) != 1 or content.count(end) != 1 or end not in rest:
        raise ValueError(f"--readme: '{file}' needs one line {begin} and, below it, one line {end}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def check_place(readme: Sequence[str] | None) -> None:
    """Raise as `fill` does, before anything is measured, if ``readme`` (file, name) is no place for a table."""
    if readme:
        fill(Path(readme[0]), readme[1], "")


def put(readme: Sequence[str] | None, text: str) -> None:
    """Write ``text`` into its place in ``readme`` (file, name), if there is to be one."""
    if readme:
        path = Path(readme[0])
        path.write_text(fill(path, readme[1], text), encoding="utf-8")


def unit_of(column: Column, *, largest: float) -> tuple[str, float]:
    """The header of a column and what to divide its values by: one unit for all, so that they compare at a glance."""
    if column.score:
        return column.title, 1 / POINTS
    if not column.scaled:
        return f"{column.title} ({column.unit})" if column.unit else column.title, 1.0
    prefix, unit = ("G", 1e9) if largest >= 1e9 else ("M", 1e6)
    return f"{column.title} ({prefix}{column.unit})", unit


def cell_text(sample: Sample, column: Column) -> str:
    """Mean ± deviation, to the digits of `column`; a score always to hundredths of a point."""
    if math.isnan(sample.mean):
        return NOTHING
    mean = abs(sample.mean)
    decimals = max(0, column.digits - 1 - math.floor(math.log10(mean))) if mean and math.isfinite(mean) else 0
    decimals = 2 if column.score else decimals
    spread = f" ± {sample.std:.{decimals}f}" if sample.std > 0 else ""
    return f"{sample.mean:.{decimals}f}{spread}"


def number(value: float | None) -> str:
    import pandas as pd

    return NOTHING if pd.isna(value) else f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())

"""Compare fine-tuning runs: `python -m sweep.glue RUNS… --out DIR` writes tables, a figure and one HTML page into DIR.

The first table has a row a task and method (or setting), over its seeds: its score, its gap, its bytes. The second has
the shape of the paper's Table 4, with what is printed there beside it. `glue.md`, `glue.tex` (booktabs) and `glue.html`
hold both; `glue.csv` has one row a run. With run directories there is a figure, too: the loss against the bytes, a
panel a task. Runs of one task must be comparable; different tasks are of one model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.glue import TASKS
from sweep.cells import UNITS, AnalyticCell, Count, PrintedTable, cells_of, counter, published
from sweep.compare import (
    BASELINE,
    RATIO,
    SEEDS,
    Sample,
    best,
    chosen_from,
    comparable,
    missing_seeds,
    with_ratios,
)
from sweep.figures import draw_tasks
from sweep.page import Figure, Section, page
from sweep.paper import OTHER_NOTE
from sweep.report import (
    NOTHING,
    POINTS,
    SCORE_GAP,
    TABLE,
    Column,
    best_rows,
    cell_text,
    count,
    fill,
    gaps,
    gone,
    not_done,
    number,
    score_columns,
    settings_without_rate,
    unit_of,
)
from sweep.runs import (
    COLUMNS,
    EPOCHS,
    METRIC,
    SCORE,
    SPLIT,
    TASK,
    describe,
    find_runs,
    is_results,
    metrics,
    read_curves,
    read_runs,
    varying,
)
from sweep.tables import Cell, Table

if TYPE_CHECKING:
    import pandas as pd

PAPER_TABLE = "table4"
PAPER_MODEL = "roberta_base"
AVERAGE = "average"
SKETCHED = "recomputed, p = 5"
SENT = "paper/comm/bytes_per_step"

LOSS = "eval/loss"
MEASURED = {column.key: column for column in TABLE if column.key.endswith(("bytes_per_step", BASELINE))}

MEAN_NOTE = (
    "Mean ± sample standard deviation over n seeds; no ± where all seeds agree. A score is bold where it is higher "
    "than every other of the task by more than the larger of the two standard deviations; so nothing is bold beside a "
    "row with a single seed, nor in a row that lacks seeds. The gap is the difference of the mean scores ± its "
    "standard error."
)
MEDIAN_NOTE = (
    "Median over n seeds, and the range from the lowest to the highest. A median is bold where even the lowest score "
    "is above every other's highest; so nothing is bold beside a row with a single seed, nor in a row that lacks seeds."
    " The gap is the difference of the medians."
)
BYTES_NOTE = (
    f"÷ {BASELINE} is the ratio of bytes/step to {BASELINE}'s on the same task; it and the gap are {NOTHING} without "
    f"exactly one {BASELINE} to compare with. Bytes are one worker's payload, every synchronised tensor counted unless "
    "the header says `paper`. M = 1e6, G = 1e9."
)


@dataclass(frozen=True)
class TaskRuns:
    """The runs of one task: all of them, and those `done` that are shown (see `comparable`); `notes` are on these."""

    task: str
    runs: pd.DataFrame
    done: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> list[pd.DataFrame]:
        """The rows of the table: runs that differ in nothing but their seeds."""
        return [group for _, group in self.done.groupby("label", sort=False)]

    @property
    def metric(self) -> str:
        return str(self.done[METRIC].iloc[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason in one line on stderr, if nothing can be compared."""
    parser = argparse.ArgumentParser(prog="python -m sweep.glue", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUNS", help="a run directory, a folder of some, or a CSV of results")
    add("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    add("--best", action="store_true", help="of each method, only the setting of the highest score at the tuning seed")
    add("--allow-edge", action="store_true", help="with --best: even if it is at the edge of the values tried")
    add("--median", action="store_true", help="the median and the range over the seeds instead of mean ± deviation")
    add("--readme", nargs=2, metavar=("FILE", "NAME"), help="put the first table between FILE's comments of that name")
    options = parser.parse_args(arguments)
    try:
        choice = {"only_best": options.best, "allow_edge": options.allow_edge, "median": options.median}
        text = report(options.runs, options.out, readme=options.readme, **choice)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(text)
    return 0


def report(
    roots: Sequence[Path],
    out: Path,
    *,
    only_best: bool = False,
    allow_edge: bool = False,
    median: bool = False,
    readme: tuple[str, str] | None = None,
) -> str:
    """Write the report on the runs in `roots` into `out`, and its first table into `readme`; returns glue.md's text.

    Raises:
        ValueError: no run is done, one is no fine-tuning run or has no metric, runs of a task do not compare, tasks are
            of several models, the best is at an edge, a curve is missing, or `readme` has no place for the table.
    """
    import pandas as pd

    paths = find_runs(roots)
    runs = read_runs(paths)
    tasks = by_task(runs, only_best=only_best, allow_edge=allow_edge, median=median)
    done = pd.concat([task.done for task in tasks])
    others = runs[runs["status"] != "done"]
    curves = None if any(map(is_results, paths)) else read_curves(done)
    scores, beside = score_table(tasks, median=median), beside_printed(tasks, counter(), median=median)
    below = [not_done(others)] if len(others) else []
    text = "\n".join(table.markdown() for table in (scores, beside, *below))
    filled = fill(Path(readme[0]), readme[1], scores.markdown()) if readme else ""

    out.mkdir(parents=True, exist_ok=True)
    drawn = [] if curves is None else [draw_tasks({task.task: task.done for task in tasks}, curves, out)]
    sections = [Section("Scores", (scores,)), Section("Beside the paper", (beside,))]
    sections += [Section("Figures", figures=tuple(Figure(one.png, one.caption) for one in drawn))] if drawn else []
    sections += [Section("Runs that are not done", (rest,)) for rest in below]
    title = f"GLUE: optimizers compared on {done['model'].iloc[0]}"
    (out / "glue.html").write_text(page(title, sections), encoding="utf-8")
    (out / "glue.md").write_text(text, encoding="utf-8")
    (out / "glue.tex").write_text(f"{scores.latex()}\n{beside.latex()}", encoding="utf-8")
    shown = runs.join(done[list(RATIO.values())]).loc[sorted({*done.index, *others.index})]
    columns = [*COLUMNS, *score_columns(done), *({EPOCHS} & set(shown)), *RATIO.values()]
    shown.to_csv(out / "glue.csv", columns=columns, index=False)
    if readme:
        Path(readme[0]).write_text(filled, encoding="utf-8")
    return text


def by_task(runs: pd.DataFrame, *, only_best: bool, allow_edge: bool, median: bool) -> list[TaskRuns]:
    """The tasks of which a run is done, in the order of `data.glue.TASKS`.

    Raises:
        ValueError: as `report` does.
    """
    done = runs[runs["status"] == "done"]
    if done.empty:
        comparable(runs, allow_mixed=False)  # raises: none is done
    for run in done[done[TASK].isna()]["run"]:
        raise ValueError(
            f"{run}: no fine-tuning run, for it has no data.task; `python -m sweep.report` compares others"
        )
    if varying(done, ["model"]):
        examples = "; ".join(f"{model}, e.g. {group['run'].iloc[0]}" for model, group in done.groupby("model"))
        raise ValueError(f"these runs are of several models; give those of one: {examples}")
    order = [*TASKS, *sorted(set(done[TASK]) - set(TASKS))]
    tasks = [task for task in order if task in set(done[TASK])]
    return [
        _task(task, runs[runs[TASK] == task], only_best=only_best, allow_edge=allow_edge, median=median)
        for task in tasks
    ]


def _task(task: str, runs: pd.DataFrame, *, only_best: bool, allow_edge: bool, median: bool) -> TaskRuns:
    notes: list[str] = []
    try:
        done = comparable(runs, allow_mixed=False, hint="")
        for run in done[done[METRIC].isna()]["run"]:
            raise ValueError(f"{run} has no eval/metric: it was recorded before scores were; give its run directory")
        if only_best:
            notes = chosen_from(done, average="median" if median else "mean")
            done = best(done, allow_edge=allow_edge)
    except ValueError as error:
        raise ValueError(f"{task}: {error}") from error
    return TaskRuns(task, runs, with_ratios(done), tuple(f"{task}, {note}" for note in notes))


def score_table(tasks: Sequence[TaskRuns], *, median: bool) -> Table:
    """A row a task and group of seeds."""
    import pandas as pd

    done = pd.concat([task.done for task in tasks])
    largest = done[list(MEASURED)].astype(float).max()
    units = {key: unit_of(column, largest=largest[key]) for key, column in MEASURED.items()}
    lines = [line for task in tasks for line in _lines(task, units, median=median)]
    empty = {name for name in ("settings", "other metrics") if all(line[name] == NOTHING for line in lines)}
    columns = [name for name in lines[0] if name not in empty]
    rows = tuple(tuple(line[name] for name in columns) for line in lines)
    common = [name for name in ("model", "tokenizer_sha256", "git_commit") if not varying(done, [name])]
    return Table(describe(done.head(1), common)[0], tuple(columns), rows, tuple(_notes(tasks, median=median)))


def _lines(task: TaskRuns, units: dict[str, tuple[str, float]], *, median: bool) -> Iterator[dict[str, str | Cell]]:
    """The rows of one task, each as cells by the title of their column."""
    groups, column = task.groups, Column(SCORE, "", score=True)
    missing = missing_seeds(task.runs, task.done)
    lacking = [missing[group["label"].iloc[0]] for group in groups]
    unit = unit_of(column, largest=1.0)[1]
    samples = [_average(group[SCORE].astype(float) / unit, median=median) for group in groups]
    bold = _separate(groups, lacking) if median else best_rows(groups, samples, lacking, highest=True)
    distances = gaps(groups, samples, decimals=2)
    settings = settings_without_rate(task.done)
    of = "median " if median else ""
    for row, group in enumerate(groups):
        yield {
            "task": task.task,
            "metric": task.metric,
            "method": group["method"].iloc[0],
            "settings": settings.at[group.index[0]] or NOTHING,
            "n": count(group, lacking[row]),
            "lr": number(group["lr"].iloc[0]),
            f"{of}score (×100)": Cell(cell_text(samples[row], column), row in bold),
            **({"range (×100)": _range(group)} if median else {}),
            SCORE_GAP: distances[row],
            "other metrics": _other_metrics(group, median=median),
            f"{of}eval loss": cell_text(_average(group[LOSS].astype(float), median=median), Column(LOSS, "")),
            **{
                title: cell_text(_average(group[key].astype(float) / scale, median=median), MEASURED[key])
                for key, (title, scale) in units.items()
            },
            "epochs": number(group[EPOCHS].iloc[0]) if EPOCHS in group else NOTHING,
        }


def _average(values: pd.Series, *, median: bool) -> Sample:
    """What a table shows of the seeds; a median has no deviation. A value that is missing leaves neither."""
    sample = Sample.of(values)
    if not median:
        return sample
    return Sample(statistics.median(values) if math.isfinite(sample.mean) else math.nan, math.nan, sample.n)


def _range(group: pd.DataFrame) -> str:
    scores = POINTS * group[SCORE].astype(float)
    return NOTHING if scores.isna().any() else f"{scores.min():.2f}–{scores.max():.2f}"


def _other_metrics(group: pd.DataFrame, *, median: bool) -> str:
    """The task's metrics besides the one that tables show, by name."""
    column = Column("", "", score=True)
    texts = []
    for metric in metrics(group)[1:]:
        sample = _average(POINTS * group[f"eval/{metric}"].astype(float), median=median)
        texts.append(f"{metric} {cell_text(sample, column)}")
    return ", ".join(texts) or NOTHING


def _separate(groups: Sequence[pd.DataFrame], lacking: Sequence[dict[str, str]]) -> set[int]:
    """The row whose lowest score is above every other's highest; none if one has a single seed or no defined score."""
    scores = [group[SCORE].astype(float) for group in groups]
    if len(scores) < 2 or any(len(one) < 2 or one.isna().any() for one in scores):
        return set()
    first, *rest = sorted(range(len(scores)), key=lambda row: -scores[row].min())
    clear = all(scores[row].max() < scores[first].min() for row in rest)
    return {first} if clear and not lacking[first] else set()


def _notes(tasks: Sequence[TaskRuns], *, median: bool) -> Iterator[str]:
    import pandas as pd

    done = pd.concat([task.done for task in tasks])
    for task in tasks:
        yield from task.notes
        missing = missing_seeds(task.runs, task.done)
        yield from (
            f"{task.task}, {note}" for note in gone(task.groups, [missing[g["label"].iloc[0]] for g in task.groups])
        )
        for group in task.groups:
            undefined = group[group[SCORE].isna()]
            if len(undefined):
                named = ", ".join(describe(undefined, varying(group, SEEDS) or SEEDS[:1]))
                yield f"{task.task}, {group['label'].iloc[0]}: {task.metric} is undefined ({named})."
    yield MEDIAN_NOTE if median else MEAN_NOTE
    yield BYTES_NOTE
    splits = sorted(done[SPLIT].dropna().unique())
    of = f" are of the {' and '.join(splits)} split" if splits else ""
    hashes = "; ".join(f"{task.task} {describe(task.done.head(1), ['corpus_sha256'])[0]}" for task in tasks)
    yield f"Scores{of}; data: {hashes}." if of else f"Data: {hashes}."
    if varying(done, ["git_commit"]):
        commits = "; ".join(f"{task.task} {describe(task.done.head(1), ['git_commit'])[0]}" for task in tasks)
        yield f"The tasks were run by different commits, the methods of each by one: {commits}."


def beside_printed(tasks: Sequence[TaskRuns], counted: Count, *, median: bool) -> Table:
    """The paper's Table 4 with our scores and bytes beside the printed ones; `counted` makes its dry runs.

    A method of the paper that has two readings here has a row for each that ran; methods not in the paper follow.
    """
    facts = published()
    table = next(table for table in facts.tables if table.name == PAPER_TABLE)
    scores = _scores(tasks, median=median)
    ran = list(dict.fromkeys(method for task in tasks for method in task.done["method"]))
    lines, notes = [], []
    for row in table.rows:
        method = facts.methods[row.method]
        (cell,) = cells_of(table, row, method, counted)
        lines.append(_beside(table, tasks, scores, cell=cell, optimizer=method.optimizer))
        if method.other is not None and method.other in ran:
            lines.append(_beside(table, tasks, scores, cell=cell, optimizer=method.other, second=True))
            notes.append(OTHER_NOTE.format(method=row.method, optimizer=method.optimizer, other=method.other))
    known = {line["here"] for line in lines}
    lines += [_beside(table, tasks, scores, cell=None, optimizer=method) for method in ran if method not in known]
    optional = {f"{AVERAGE}, here", SKETCHED}
    empty = {name for name in lines[0] if name in optional and all(line[name] == NOTHING for line in lines)}
    columns = [name for name in lines[0] if name not in empty]
    rows = tuple(tuple(line[name] for name in columns) for line in lines)
    title = f"{table.title}, scores ×100 and bytes/step by the paper's count, printed and here"
    return Table(title, tuple(columns), rows, (*notes, *_notes_beside(tasks, table, median=median)))


@dataclass(frozen=True)
class Score:
    """What a method has on a task: its score over `n` seeds, and `sent` bytes per step in the paper's accounting."""

    value: float
    n: int
    sent: float


def _scores(tasks: Sequence[TaskRuns], *, median: bool) -> dict[tuple[str, str], Score]:
    """By method and task, where a method has one setting: of several none is its score."""
    found = {}
    for task in tasks:
        for method, groups in task.done.groupby("method", sort=False):
            if groups["label"].nunique() == 1:
                value = _average(POINTS * groups[SCORE].astype(float), median=median).mean
                found[str(method), task.task] = Score(value, len(groups), float(groups[SENT].astype(float).mean()))
    return found


def _beside(
    table: PrintedTable,
    tasks: Sequence[TaskRuns],
    scores: dict[tuple[str, str], Score],
    *,
    cell: AnalyticCell | None,
    optimizer: str,
    second: bool = False,
) -> dict[str, str]:
    """A row: `cell` has what is printed, if anything is; `second` takes its second reading."""
    mine = {task.task: scores[optimizer, task.task] for task in tasks if (optimizer, task.task) in scores}
    titles = list(table.rows[0].metrics)
    line = {"paper": cell.row.name if cell else NOTHING, "here": optimizer}
    line["n"] = _spread([float(score.n) for score in mine.values()], decimals=0)
    for title in titles:
        line[title] = cell.row.metrics[title] if cell else NOTHING
        for task in tasks:
            if task.task == _task_of(title):
                line[f"{title} ({task.metric}), here"] = _points(mine.get(task.task))
    every = [mine[_task_of(title)].value for title in titles if _task_of(title) in mine]
    complete = len(every) == len(titles) - 1
    line[f"{AVERAGE}, here"] = _points(Score(statistics.fmean(every), 0, 0.0)) if complete else NOTHING
    unit = f"({table.unit}B)"
    recomputed = (cell.other if second else cell.by_definition) if cell else None
    measured = [score.sent / UNITS[table.unit] for score in mine.values()] if _model(tasks) == PAPER_MODEL else []
    return line | {
        f"bytes/step, printed {unit}": cell.printed if cell else NOTHING,
        f"recomputed {unit}": cell.show(recomputed) if cell else NOTHING,
        SKETCHED: cell.show(cell.oversampled) if cell and not second else NOTHING,
        f"measured {unit}": _spread(measured, decimals=2),
    }


def _task_of(title: str) -> str:
    """The task of a column of the paper's table: `stsb` of STS-B."""
    return title.replace("-", "").lower()


def _model(tasks: Sequence[TaskRuns]) -> str:
    return str(tasks[0].done["model"].iloc[0])


def _points(score: Score | None) -> str:
    return NOTHING if score is None or math.isnan(score.value) else f"{score.value:.2f}"


def _spread(values: Sequence[float], *, decimals: int) -> str:
    """The values of several tasks: one if they agree, else from the lowest to the highest."""
    texts = [f"{value:.{decimals}f}" for value in sorted(values)]
    return "–".join(dict.fromkeys([texts[0], texts[-1]])) if texts else NOTHING


def _notes_beside(tasks: Sequence[TaskRuns], table: PrintedTable, *, median: bool) -> Iterator[str]:
    several = [
        f"{method} on {task.task}"
        for task in tasks
        for method, runs in task.done.groupby("method", sort=False)
        if runs["label"].nunique() > 1
    ]
    if several:
        yield f"No score here where a method has several settings, of which --best takes one: {', '.join(several)}."
    wanted = [_task_of(title) for title in table.rows[0].metrics if title != AVERAGE]
    absent = [task for task in wanted if task not in {each.task for each in tasks}]
    yield (
        f"`here` is the {'median' if median else 'mean'} over n seeds of {_model(tasks)}"
        + (f"; not run: {', '.join(absent)}, so there is no average." if absent else ".")
    )
    yield (
        "Recomputed: dry runs of the paper's model, without oversampling, and with the scripts' p = 5 where there are "
        "sketches; `python -m sweep.paper` says how these cells compare."
    )
    if _model(tasks) == PAPER_MODEL:
        yield "Measured: what the runs sent, at their own settings; a range where it differs between tasks."
    else:
        yield (
            f"Measured is {NOTHING}, for the runs are of {_model(tasks)}, which has other shapes than the paper's "
            f"{PAPER_MODEL}; what they sent is in the first table."
        )
    if table.note:
        yield table.note


if __name__ == "__main__":
    sys.exit(main())

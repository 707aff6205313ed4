"""What may be compared, and what a difference is worth: from runs (see `sweep.runs`) to groups of seeds.

A *group* is the runs of one `label`, which differ in nothing but their seeds. Groups of the same `mixed` are
comparable: they trained the same model on the same tokens with the same code.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweep.runs import DATA_HASHES, EPOCHS, METRIC, SCORE, SPLIT, TASK, describe, is_setting, varying

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "adamw"
RATIO = {key: f"{key}/{BASELINE}" for key in ("comm/bytes_per_step", "paper/comm/bytes_per_step")}

SAME = ("model", "tokens", *DATA_HASHES, "git_commit")
"""The columns in which runs of one table agree, besides the model's configuration."""

SEEDS = ["seed", "data_seed"]

ADAPTERS = "config/model.lora."
"""What a method trains beside a model's weights: it is part of the method, and leaves the model the same."""

MIXED_HINT = " (use --allow-mixed to put them in one table anyway)"


def comparable(runs: pd.DataFrame, *, allow_mixed: bool, hint: str = MIXED_HINT) -> pd.DataFrame:
    """The done runs with two more columns.

    `mixed` names what should be the same in all runs but is not, and `label` the group of a run. `hint` is part of the
    error for such runs.

    Raises:
        ValueError: no run is done; a run has no losses, as it was a dry run; two runs are repeats, which are no further
            seed; or model, tokens, data, task, metric or commit differ and `allow_mixed` is false.
    """
    done = runs[runs["status"] == "done"].copy()
    if done.empty:
        listed = "; ".join(f"{run.run}: {run.status}, {last_line(run.error)}" for run in runs.itertuples())
        raise ValueError(f"none of {len(runs)} runs is done: {listed}")
    dry = done.loc[done["dry_run"].astype(bool), "run"]
    if len(dry):
        raise ValueError(f"dry runs have no loss to compare; leave them out: {', '.join(dry)}")

    columns = varying(done, [*SAME, TASK, METRIC, SPLIT, *({EPOCHS} & set(done))])
    columns += [
        column for column in _model_columns(done) if any(varying(one, [column]) for _, one in done.groupby("model"))
    ]
    done["mixed"] = describe(done, columns)
    if columns and not allow_mixed:
        kinds = done.groupby("mixed", sort=False)["run"].agg(["size", "first"])
        listed = "; ".join(f"{kind} ({row['size']} runs, e.g. {row['first']})" for kind, row in kinds.iterrows())
        raise ValueError(f"these runs do not compare{hint}: {listed}")

    labels = zip(done["method"], done["settings"], done["mixed"], strict=True)
    done["label"] = [" ".join(filter(None, label)) for label in labels]
    repeats = done.loc[done.duplicated(["label", *SEEDS], keep=False), "run"]
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


def best(done: pd.DataFrame, *, allow_edge: bool = False) -> pd.DataFrame:
    """For each method the runs, of all seeds, of the one setting with the lowest evaluation loss at the tuning seed.

    Where runs have a score it is the highest score instead; of equal ones, and if none is defined, the lowest loss.
    `done` comes from `comparable`; settings compete where `mixed` is the same. The tuning seed is the one that most
    settings of the method have (the lowest of such), and a setting without it is not chosen.

    Raises:
        ValueError: a number that was tuned is the lowest or highest of those tried, so that the best may lie beyond,
            and `allow_edge` is false.
    """
    kept: list[pd.DataFrame] = []
    edges: list[str] = []
    for _, runs in done.groupby(["method", "mixed"], sort=False):
        tried = _tried(runs)
        chosen = tried.loc[_order_of_merit(tried)[0]]
        kept.append(runs[runs["label"] == chosen["label"]])
        edges += [
            f"{chosen['method']}: {_key(column)}={chosen[column]:g} is at the edge of {_values(tried, column)}"
            for column in _tuned(tried)
            if _is_edge(chosen[column], tried[column].dropna().infer_objects())
        ]
    if edges and not allow_edge:
        raise ValueError(
            f"--best: the {'highest score' if _scored(done) else 'lowest loss'} is at the edge of what was tried, so a "
            f"{'higher' if _scored(done) else 'lower'} one may lie beyond; widen the grid, or use --allow-edge: "
            f"{'; '.join(edges)}"
        )
    return done.loc[sorted(index for runs in kept for index in runs.index)]


def chosen_from(done: pd.DataFrame, *, average: str = "mean") -> list[str]:
    """Sentences that say what `best` had to choose from in `done`, one for all methods that had the same choice.

    `average` is what the table shows over the seeds.
    """
    choices: dict[str, list[str]] = {}
    for (method, mixed), runs in done.groupby(["method", "mixed"], sort=False):
        tried = _tried(runs)
        if len(tried) > 1:
            grid = " × ".join(f"{_key(column)} ∈ {_values(tried, column)}" for column in _tuned(tried))
            seed = _name(_seeds(tried)[0], runs)
            choice = f"chosen from {grid}, {len(tried)} settings, by the {_merit(tried)} of {seed}"
            choices.setdefault(choice, []).append(f"{method} ({mixed})" if mixed else method)
    return [f"{', '.join(methods)}: {choice}, which is in the {average}, too." for choice, methods in choices.items()]


def missing_seeds(runs: pd.DataFrame, done: pd.DataFrame) -> dict[str, dict[str, str]]:
    """For each label in `done` the seeds that it lacks, and why: a comparable group has them, or their run is not done.

    `runs` holds all runs, those that are not done included.
    """
    runs = runs.dropna(subset=SEEDS)
    others = runs[runs["status"] != "done"]
    missing: dict[str, dict[str, str]] = {}
    for _, rivals in done.groupby("mixed", sort=False):
        groups = dict(list(rivals.groupby("label", sort=False)))
        begun = {label: _begun(others, group) for label, group in groups.items()}
        wanted = set(_seeds(rivals)).union(*begun.values())
        for label, group in groups.items():
            lacking = sorted(wanted.difference(_seeds(group)))
            missing[label] = {_name(seeds, runs): begun[label].get(seeds, "not run") for seeds in lacking}
    return missing


@dataclass(frozen=True)
class Sample:
    """`n` values by their mean and sample standard deviation, which is NaN where there is none: below two values."""

    mean: float
    std: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Sample:
        """A value that is missing is never skipped, but leaves no mean."""
        numbers = [float(value) for value in values]
        known = len(numbers) > 1 and all(map(math.isfinite, numbers))
        return cls(statistics.fmean(numbers), statistics.stdev(numbers) if known else math.nan, len(numbers))


def difference(one: Sample, other: Sample) -> tuple[float, float]:
    """The difference of two independent means and its standard error, which is NaN where a deviation is."""
    return one.mean - other.mean, math.sqrt(one.std**2 / one.n + other.std**2 / other.n)


def clearly_lowest(samples: Sequence[Sample]) -> int | None:
    """The index of the sample whose mean is below every other by more than the larger standard deviation of the two.

    None where there is no such sample: nothing to compare with, a difference inside one standard deviation, or a
    deviation that is not known, as of a single value.
    """
    if len(samples) < 2 or not all(math.isfinite(sample.mean) and math.isfinite(sample.std) for sample in samples):
        return None
    first, *rest = sorted(range(len(samples)), key=lambda index: samples[index].mean)
    lowest = samples[first]
    clear = all(samples[index].mean - lowest.mean > max(lowest.std, samples[index].std) for index in rest)
    return first if clear else None


def last_line(error: str) -> str:
    """The line of a traceback that names the error."""
    return error.strip().splitlines()[-1]


def _model_columns(runs: pd.DataFrame) -> list[str]:
    """What makes a model; adapters beside its weights do not."""
    return [column for column in runs if column.startswith("config/model.") and not column.startswith(ADAPTERS)]


def _scored(runs: pd.DataFrame) -> bool:
    return bool(runs[METRIC].notna().any())


def _order_of_merit(tried: pd.DataFrame) -> list[Any]:
    """The index of the settings tried, best first: by score, if there are scores, then by loss."""
    import pandas as pd

    scores = tried[SCORE].astype(float).fillna(-math.inf)
    losses = tried["eval/loss"].astype(float).fillna(math.inf)
    return list(pd.DataFrame({"score": -scores, "loss": losses}).sort_values(["score", "loss"], kind="stable").index)


def _merit(tried: pd.DataFrame) -> str:
    """What `_order_of_merit` goes by, in words."""
    if not _scored(tried):
        return "evaluation loss"
    return f"{tried[METRIC].dropna().iloc[0]} (of equal ones, the evaluation loss)"


def _known(keys: pd.DataFrame) -> pd.DataFrame:
    """`keys` where a missing value, as the task of a pretraining, equals another."""
    return keys.astype(object).where(keys.notna(), "")


def _tried(runs: pd.DataFrame) -> pd.DataFrame:
    """One run a setting: those of the seed that most settings have, the lowest of such."""
    settings = Counter(_seeds(runs))
    tuning = min(settings, key=lambda seeds: (-settings[seeds], seeds))
    return runs[[seeds == tuning for seeds in _seeds(runs)]]


def _tuned(tried: pd.DataFrame) -> list[str]:
    return varying(tried, [name for name in tried if is_setting(name)])


def _is_edge(value: Any, tried: pd.Series) -> bool:
    """Whether a number is the lowest or highest of those tried; what is no number has no edge."""
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    return is_numeric_dtype(tried) and not is_bool_dtype(tried) and value in (tried.min(), tried.max())


def _key(column: str) -> str:
    return column.removeprefix("config/")


def _values(tried: pd.DataFrame, column: str) -> str:
    """The values of a column as a set, numbers in their order."""
    texts = describe(tried.sort_values(column, key=_order), [column])
    return f"{{{', '.join(dict.fromkeys(text.partition('=')[2] for text in texts))}}}"


def _order(values: pd.Series) -> pd.Series:
    import pandas as pd

    return values if pd.api.types.is_numeric_dtype(values) else values.astype(str)


def _begun(others: pd.DataFrame, group: pd.DataFrame) -> dict[tuple[int, ...], str]:
    """The seeds of the runs in `others` that would belong to `group`, and what became of them."""
    keys = ["method", "model", TASK, "settings"]
    same = others[(_known(others[keys]) == _known(group[keys]).iloc[0]).all(axis=1)]
    reasons = [f"{run.status}: {last_line(run.error)}" for run in same.itertuples()]
    return dict(zip(_seeds(same), reasons, strict=True))


def _seeds(runs: pd.DataFrame) -> list[tuple[int, ...]]:
    return [tuple(int(seed) for seed in pair) for pair in runs[SEEDS].to_numpy()]


def _name(seeds: tuple[int, ...], runs: pd.DataFrame) -> str:
    """A run's seeds in words; the second one, of the data's order, only where it tells runs apart."""
    shown = SEEDS if varying(runs, SEEDS[1:]) else SEEDS[:1]
    return ", ".join(f"{key} {value}" for key, value in zip(shown, seeds, strict=False))

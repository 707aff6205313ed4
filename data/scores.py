"""What a model's answers on a GLUE task are worth, by scikit-learn and scipy, and the answers in GLUE's own format."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.examples import Examples
from data.glue import TASKS

# The file of each part of a task in a submission to gluebenchmark.com; by default the task's folder names it.
SUBMISSIONS = {"validation_matched": "MNLI-m", "validation_mismatched": "MNLI-mm"}


class Scores:
    """The metrics of a task on its whole validation split.

    Args:
        task: One of `data.glue.TASKS`.
        examples: The validation split.
        outputs: Of the classifier for each example: classes, or 1 for a score.
    """

    def __init__(self, task: str, examples: Examples, *, outputs: int) -> None:
        self.task, self.outputs = task, outputs
        self._examples = examples
        self.shape = (len(examples), outputs)

    def __call__(self, answers: NDArray[np.float64]) -> dict[str, Any]:
        """`answers` are the classifier's outputs, [N, outputs].

        Returns what an evaluation records: each metric as `eval/METRIC` (MNLI: `eval/accuracy_matched`, …), None where
        it is undefined, as a correlation with a constant is; `eval/metric` and `eval/score`, the name and value of the
        one that tables show; `eval/split` and `eval/examples`, what they are of.
        """
        values: dict[str, float | None] = {}
        parts = list(self._parts(answers))
        for name, labels, predictions in parts:
            suffix = name.removeprefix("validation") if len(parts) > 1 else ""
            for metric in TASKS[self.task].metrics:
                value = METRICS[metric](labels, predictions)
                values[metric + suffix] = value if math.isfinite(value) else None
        shown = next(iter(values))
        record = {f"eval/{metric}": value for metric, value in values.items()}
        return {
            **record,
            **{"eval/metric": shown, "eval/score": values[shown]},
            **{"eval/split": "validation", "eval/examples": len(answers)},
        }

    def write(self, folder: Path, answers: NDArray[np.float64]) -> None:
        """Write the predictions as TSV, `index` and `prediction`, in the file that a submission to GLUE has for them.

        A score is written with all its digits, a class as its task's files spell it.
        """
        facts = TASKS[self.task]
        folder.mkdir(exist_ok=True)
        for name, _, predictions in self._parts(answers):
            text = io.StringIO()
            writer = csv.writer(text, delimiter="\t", lineterminator="\n")
            writer.writerow(("index", "prediction"))
            for index, value in enumerate(predictions.tolist()):
                writer.writerow((index, facts.spellings[value] if facts.labels else repr(value)))
            (folder / f"{SUBMISSIONS.get(name, facts.folder)}.tsv").write_text(text.getvalue(), encoding="utf-8")

    def _parts(self, answers: NDArray[np.float64]) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
        """Name, labels and predictions of each part of the split."""
        predictions = answers.argmax(1) if TASKS[self.task].labels else answers[:, 0]
        start = 0
        for name, count in self._examples.splits.items():
            end = start + count
            yield name, np.asarray(self._examples.labels[start:end]), predictions[start:end]
            start = end


def _accuracy(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, predictions))


def _f1(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, predictions, zero_division=0.0))


def _matthews(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(labels, predictions))


def _pearson(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    from scipy.stats import pearsonr

    return _correlation(pearsonr, labels, predictions)


def _spearman(labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    from scipy.stats import spearmanr

    return _correlation(spearmanr, labels, predictions)


def _correlation(function: Callable[..., Any], labels: NDArray[Any], predictions: NDArray[Any]) -> float:
    """NaN where one of both is constant, without scipy's warning."""
    if len(labels) < 2 or np.ptp(labels) == 0 or np.ptp(predictions) == 0:
        return math.nan
    return float(function(labels.astype(np.float64), predictions).statistic)


METRICS: dict[str, Callable[[NDArray[Any], NDArray[Any]], float]] = {
    "accuracy": _accuracy,
    "f1": _f1,
    "matthews": _matthews,
    "pearson": _pearson,
    "spearman": _spearman,
}
"""By the names of `data.glue.Task.metrics`: labels [N], predictions [N] -> value in [-1, 1]."""

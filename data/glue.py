"""GLUE: the eight tasks of the paper's Table 4, from the benchmark's TSV files or from the Hugging Face Hub.

Notation::

    task      ``data.task``: cola, stsb, mrpc, rte, sst2, mnli, qnli, qqp
    split     train and validation; MNLI has validation_matched and validation_mismatched
    sentence  one of the one or two texts that an example is about
    label     a class as its number, 0 to C - 1, or (STS-B) a score from 0 to 5 in single precision

Both sources give the same sentences, labels and split names, so that one content has one hash.

Sources: Wang et al., GLUE (arXiv 1804.07461) for tasks and metrics; the headers of the files as gluebenchmark.com
distributes them; `transformers`' ``data/processors/glue.py`` for CoLA's columns; the card of ``nyu-mll/glue`` for the
names and numbers of the labels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.corpora import http_error

REPOSITORY = "nyu-mll/glue"
REVISION = "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"
HIGHEST_SCORE = 5


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled example: ``index`` is its position in its split, from 0; one or two ``sentences``."""

    index: int
    sentences: tuple[str, ...]
    label: int | float


Splits = dict[str, list[Example]]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is known about a task.

    Args:
        folder: its folder in the GLUE archive.
        files: the file of each split in this folder.
        header: the columns of a TSV without a header line; None: its first line names them.
        sentences, label: the TSV's columns that hold them.
        labels: names of the classes by number; none, if the label is a score from 0 to 5 (regression).
        spellings: the classes as the TSV writes them, by number.
        hub_sentences: the columns of ``nyu-mll/glue`` that hold the sentences; the label's is ``label``, and the
            configuration has the task's name.
        metrics: what GLUE scores the task by; the first is the one that tables show. QQP's is accuracy, since the
            figures of Table 4 are in its range and not in that of F1.
    """

    folder: str
    files: Mapping[str, str] = field(default_factory=lambda: {"train": "train.tsv", "validation": "dev.tsv"})
    header: tuple[str, ...] | None = None
    sentences: tuple[str, ...]
    label: str = "label"
    labels: tuple[str, ...]
    spellings: tuple[str, ...]
    hub_sentences: tuple[str, ...]
    metrics: tuple[str, ...]


NUMBERS = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")

TASKS: dict[str, Task] = {
    "cola": Task(
        folder="CoLA",
        header=("source", "label", "mark", "sentence"),
        sentences=("sentence",),
        labels=("unacceptable", "acceptable"),
        spellings=NUMBERS,
        hub_sentences=("sentence",),
        metrics=("matthews",),
    ),
    "stsb": Task(
        folder="STS-B",
        sentences=PAIR,
        label="score",
        labels=(),
        spellings=(),
        hub_sentences=PAIR,
        metrics=("pearson", "spearman"),
    ),
    "mrpc": Task(
        folder="MRPC",
        sentences=("#1 String", "#2 String"),
        label="Quality",
        labels=("not_equivalent", "equivalent"),
        spellings=NUMBERS,
        hub_sentences=PAIR,
        metrics=("f1", "accuracy"),
    ),
    "rte": Task(
        folder="RTE",
        sentences=PAIR,
        labels=ENTAILMENT,
        spellings=ENTAILMENT,
        hub_sentences=PAIR,
        metrics=("accuracy",),
    ),
    "sst2": Task(
        folder="SST-2",
        sentences=("sentence",),
        labels=("negative", "positive"),
        spellings=NUMBERS,
        hub_sentences=("sentence",),
        metrics=("accuracy",),
    ),
    "mnli": Task(
        folder="MNLI",
        files={
            "train": "train.tsv",
            "validation_matched": "dev_matched.tsv",
            "validation_mismatched": "dev_mismatched.tsv",
        },
        sentences=PAIR,
        label="gold_label",
        labels=("entailment", "neutral", "contradiction"),
        spellings=("entailment", "neutral", "contradiction"),
        hub_sentences=("premise", "hypothesis"),
        metrics=("accuracy",),
    ),
    "qnli": Task(
        folder="QNLI",
        sentences=("question", "sentence"),
        labels=ENTAILMENT,
        spellings=ENTAILMENT,
        hub_sentences=("question", "sentence"),
        metrics=("accuracy",),
    ),
    "qqp": Task(
        folder="QQP",
        sentences=("question1", "question2"),
        label="is_duplicate",
        labels=("not_duplicate", "duplicate"),
        spellings=NUMBERS,
        hub_sentences=("question1", "question2"),
        metrics=("accuracy", "f1"),
    ),
}


def find_task(task: str) -> Task:
    """The facts about ``task``.

    Raises:
        ValueError: if there is no such task, naming those that there are.
    """
    if task not in tuple(TASKS):
        raise ValueError(f"data.task must be one of {', '.join(TASKS)}, got {task!r}")
    return TASKS[task]


def load(task: str, path: str | Path | None) -> Splits:
    """The examples of ``task`` by split, in order, from the GLUE folder ``path`` (see :func:`read_tsv`) or, if it is
    None, from ``nyu-mll/glue`` on the Hub.

    Raises:
        ValueError: for an unknown task or anything wrong with the files.
        ConnectionError: if the Hub is needed and cannot be reached.
    """
    return _load_hub(task) if path is None else read_tsv(path, task)


def content_sha256(splits: Mapping[str, Sequence[Example]]) -> str:
    """sha256 over every split's name and each of its examples in order, for the run record."""
    digest = hashlib.sha256()
    for split in sorted(splits):
        for example in splits[split]:
            line = json.dumps([split, example.index, example.sentences, example.label])
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def _load_hub(task: str) -> Splits:
    from datasets import load_dataset

    facts = find_task(task)
    splits: Splits = {}
    for split in facts.files:
        try:
            columns = load_dataset(REPOSITORY, task, split=split, revision=REVISION)[:]
        except (OSError, ValueError, http_error()) as error:
            raise ConnectionError(
                f"data.task={task}: cannot read {REPOSITORY} ({type(error).__name__}: {' '.join(str(error).split())}). "
                "Without a network, set data.path to a folder of GLUE TSV files "
                f"(one that holds {facts.folder}/{facts.files['train']})"
            ) from error
        sentences = zip(*(columns[name] for name in facts.hub_sentences), strict=True)
        splits[split] = [
            Example(index, texts, label)
            for index, (texts, label) in enumerate(zip(sentences, columns["label"], strict=True))
        ]
    return splits


def read_tsv(folder: str | Path, task: str) -> Splits:
    """The examples of ``task`` by split, in the order of the files in ``folder``, that of the GLUE archive.

    A line is a row and a tab ends a column; a quote is a character like any other. A byte order mark, CRLF and empty
    lines are ignored; spaces in a sentence, and a sentence without any character, are as in the file.

    The first archive of QQP has rows that line breaks in a question have torn apart (issue 5 of
    nyu-mll/GLUE-baselines); they are refused like any other wrong row.

    Raises:
        ValueError: for an unknown task (``data.task``), a folder or file that is missing, columns that are not the
            task's, or a row that is wrong, by file and line (``data.path``).
    """
    facts, root = find_task(task), Path(folder)
    if not root.is_dir():
        raise ValueError(
            f"data.path: '{root}' is not a folder; give the folder of GLUE TSV files, "
            f"one that holds {facts.folder}/{facts.files['train']}"
        )
    names = {split: f"{facts.folder}/{file}" for split, file in facts.files.items()}
    if missing := [name for name in names.values() if not (root / name).is_file()]:
        raise ValueError(
            f"data.path: '{root}' has no file {', '.join(missing)}; data.task={task} needs {', '.join(names.values())}"
        )
    return {split: _read_file(root / name, task) for split, name in names.items()}


def _read_file(path: Path, task: str) -> list[Example]:
    facts = TASKS[task]
    lines = _lines(path)
    header = facts.header or tuple(next(lines, (0, ""))[1].split("\t"))
    if lacking := [name for name in (*facts.sentences, facts.label) if name not in header]:
        raise ValueError(
            f"data.path: the header of '{path}' has no column {', '.join(lacking)}; data.task={task} needs "
            f"{', '.join((*facts.sentences, facts.label))}, found {', '.join(header)[:200]!r}"
        )
    sentences, label = [header.index(name) for name in facts.sentences], header.index(facts.label)
    examples: list[Example] = []
    for number, line in lines:
        cells = line.split("\t")
        try:
            if len(cells) != len(header):
                raise ValueError(f"has {len(cells)} columns; it must have {len(header)}: {', '.join(header)}")
            texts = tuple(cells[column] for column in sentences)
            examples.append(Example(len(examples), texts, _label(cells[label], task)))
        except ValueError as error:
            raise ValueError(f"data.path: line {number} of '{path}' {error}; correct or remove it") from None
    if not examples:
        raise ValueError(f"data.path: '{path}' has no examples; data.task={task} needs at least one")
    return examples


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line that is not empty. Only a line feed ends a line: a sentence may hold
    what else Unicode takes for one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"data.path: line {number} of '{path}' is not UTF-8 ({error}); convert it") from error
            if text.strip(" "):
                yield number, text


def _label(text: str, task: str) -> int | float:
    facts = TASKS[task]
    if facts.labels:
        if text not in facts.spellings:
            raise ValueError(f"has the label {text!r}; those of {task} are {', '.join(facts.spellings)}")
        return facts.spellings.index(text)
    try:
        score = float(text)
    except ValueError:
        score = float("nan")
    if not 0 <= score <= HIGHEST_SCORE:
        raise ValueError(f"has the score {text!r}; those of {task} are numbers from 0 to {HIGHEST_SCORE}")
    return float(np.float32(score))  # as the Hub stores it

"""GLUE: eight layouts of TSV, the real files, the Hub, and the messages when something is wrong."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import glue
from data.glue import TASKS, Example, content_sha256, load, read_tsv

REAL = Path(__file__).parents[2] / "shared" / "data" / "glue"
needs_real_files = pytest.mark.skipif(not REAL.is_dir(), reason="the GLUE files of shared/data are not here")

MNLI_COLUMNS = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
    "\tsentence1\tsentence2\tlabel1"
)
MNLI_START = "0\t31193\t31193n\tgovernment\t( A b )\t( C d )\t(ROOT (A b))\t(ROOT (C d))"
STSB_COLUMNS = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
STSB_START = "0\tmain-news\theadlines\t2016\t1492\tnone\tnone"

# Of each task: the lines of its files as GLUE lays them out, and what they mean.
LAYOUTS: dict[str, tuple[dict[str, list[str]], dict[str, list[tuple[tuple[str, ...], float]]]]] = {
    "cola": (
        {
            "CoLA/train.tsv": ["gj04\t1\t\tThey left.", 'gj04\t0\t*\t"They'],
            "CoLA/dev.tsv": ["cj99\t0\t??\tThey to left."],
        },
        {"train": [(("They left.",), 1), (('"They',), 0)], "validation": [(("They to left.",), 0)]},
    ),
    "stsb": (
        {
            "STS-B/train.tsv": [STSB_COLUMNS, f'{STSB_START}\tA "plane\tA jet\t3.80', f"{STSB_START}\tOne\tTwo\t0"],
            "STS-B/dev.tsv": [STSB_COLUMNS, f"{STSB_START}\tOne\tTwo\t2.33333333333333"],
        },
        {
            "train": [(('A "plane', "A jet"), float(np.float32(3.8))), (("One", "Two"), 0.0)],
            "validation": [(("One", "Two"), float(np.float32(7 / 3)))],
        },
    ),
    "mrpc": (
        {
            "MRPC/train.tsv": [
                "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
                '1\t702876\t702977\t" A , he said\tA .',
                "0\t1\t2\tOne\u2028two \x85\tThree",
            ],
            "MRPC/dev.tsv": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", '0\t3\t4\tB "\t" C'],
        },
        {
            "train": [(('" A , he said', "A ."), 1), (("One\u2028two \x85", "Three"), 0)],
            "validation": [(('B "', '" C'), 0)],
        },
    ),
    "rte": (
        {
            "RTE/train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tA b\tC\tnot_entailment", "1\tD\tE\tentailment"],
            "RTE/dev.tsv": ["index\tsentence1\tsentence2\tlabel", "0\tF\tG\tentailment"],
        },
        {"train": [(("A b", "C"), 1), (("D", "E"), 0)], "validation": [(("F", "G"), 0)]},
    ),
    "sst2": (
        {
            "SST-2/train.tsv": ["sentence\tlabel", "hide new secretions \t0", "warm , na\u00efve\t1"],
            "SST-2/dev.tsv": ["sentence\tlabel", "a journey . \t1"],
        },
        {
            "train": [(("hide new secretions ",), 0), (("warm , na\u00efve",), 1)],
            "validation": [(("a journey . ",), 1)],
        },
    ),
    "mnli": (
        {
            "MNLI/train.tsv": [
                f"{MNLI_COLUMNS}\tgold_label",
                f"{MNLI_START}\tA b\tC d\tneutral\tneutral",
                f"{MNLI_START}\tE\tF\tcontradiction\tcontradiction",
            ],
            "MNLI/dev_matched.tsv": [
                f"{MNLI_COLUMNS}\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
                f"{MNLI_START}\tG\tH\tneutral\tentailment\tneutral\tentailment\tentailment\tentailment",
            ],
            "MNLI/dev_mismatched.tsv": [
                f"{MNLI_COLUMNS}\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label",
                f"{MNLI_START}\tI\tJ\tneutral\tneutral\tneutral\tneutral\tcontradiction\tneutral",
            ],
        },
        {
            "train": [(("A b", "C d"), 1), (("E", "F"), 2)],
            "validation_matched": [(("G", "H"), 0)],
            "validation_mismatched": [(("I", "J"), 1)],
        },
    ),
    "qnli": (
        {
            "QNLI/train.tsv": ["index\tquestion\tsentence\tlabel", '0\tWho?\tA "b" c\tentailment'],
            "QNLI/dev.tsv": ["index\tquestion\tsentence\tlabel", "0\tWhen?\tD\tnot_entailment"],
        },
        {"train": [(("Who?", 'A "b" c'), 0)], "validation": [(("When?", "D"), 1)]},
    ),
    "qqp": (
        {
            "QQP/train.tsv": [
                "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                "133273\t213221\t213222\tHow?\tWhy?\t0",
                "402555\t536040\t536041\tWhat?\t\t1",
            ],
            "QQP/dev.tsv": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\tA?\tB?\t1"],
        },
        {"train": [(("How?", "Why?"), 0), (("What?", ""), 1)], "validation": [(("A?", "B?"), 1)]},
    ),
}


def write(root: Path, files: dict[str, list[str]], *, before: str = "", end: str = "\n") -> None:
    for name, lines in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes((before + "".join(line + end for line in lines)).encode())


def expected(task: str) -> dict[str, list[Example]]:
    splits = LAYOUTS[task][1]
    return {split: [Example(index, *row) for index, row in enumerate(rows)] for split, rows in splits.items()}


# Files


def test_there_are_the_eight_tasks_of_the_table() -> None:
    assert set(TASKS) == set(LAYOUTS) == {"cola", "stsb", "mrpc", "rte", "sst2", "mnli", "qnli", "qqp"}
    assert {task: facts.metrics for task, facts in TASKS.items()} == {
        "cola": ("matthews",),
        "stsb": ("pearson", "spearman"),
        "mrpc": ("f1", "accuracy"),
        "qqp": ("accuracy", "f1"),
        **dict.fromkeys(("rte", "sst2", "mnli", "qnli"), ("accuracy",)),
    }
    assert {task: facts.labels for task, facts in TASKS.items()} == {  # as the card of nyu-mll/glue numbers them
        "cola": ("unacceptable", "acceptable"),
        "stsb": (),
        "mrpc": ("not_equivalent", "equivalent"),
        "rte": ("entailment", "not_entailment"),
        "sst2": ("negative", "positive"),
        "mnli": ("entailment", "neutral", "contradiction"),
        "qnli": ("entailment", "not_entailment"),
        "qqp": ("not_duplicate", "duplicate"),
    }


@pytest.mark.parametrize("task", LAYOUTS)
@pytest.mark.parametrize(
    ("before", "end"),
    [("", "\n"), ("\ufeff", "\n"), ("", "\r\n"), ("\ufeff\r\n", "\r\n\r\n"), ("\n  \n", "\n \n")],
    ids=["plain", "mark", "crlf", "mark and empty lines, crlf", "empty lines"],
)
def test_layouts(tmp_path: Path, task: str, before: str, end: str) -> None:
    write(tmp_path, LAYOUTS[task][0], before=before, end=end)
    assert read_tsv(tmp_path, task) == expected(task)
    assert load(task, str(tmp_path)) == expected(task)


def test_only_the_first_character_of_a_file_is_a_mark(tmp_path: Path) -> None:
    files = {f"SST-2/{name}.tsv": ["sentence\tlabel", "\ufeffa\t1"] for name in ("train", "dev")}
    write(tmp_path, files, before="\ufeff")
    assert read_tsv(tmp_path, "sst2")["train"] == [Example(0, ("\ufeffa",), 1)]


def test_a_last_line_needs_no_line_feed(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["cola"][0])
    path = tmp_path / "CoLA" / "train.tsv"
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert read_tsv(tmp_path, "cola") == expected("cola")


@needs_real_files
@pytest.mark.parametrize(
    ("task", "train", "validation", "classes"),
    [
        # 3,668 lines are the header and 3,667 rows; the Hub has 3,668 rows. Honouring quotes would leave 3,570.
        ("mrpc", 3667, 408, {0: 1194, 1: 2473}),
        ("stsb", 5749, 1500, None),  # honouring quotes would leave 5,711
        ("cola", 8551, 1043, {0: 2528, 1: 6023}),
        ("sst2", 67349, 872, {0: 29780, 1: 37569}),
    ],
)
def test_real_files(task: str, train: int, validation: int, classes: dict[int, int] | None) -> None:
    splits = read_tsv(REAL, task)
    assert {split: len(examples) for split, examples in splits.items()} == {"train": train, "validation": validation}
    assert [example.index for example in splits["train"]] == list(range(train))
    if classes is not None:
        assert Counter(example.label for example in splits["train"]) == classes
    else:
        scores = [example.label for example in splits["train"]]
        assert (min(scores), max(scores)) == (0, 5) and round(float(np.mean(scores)), 3) == 2.701


@needs_real_files
def test_real_sentences() -> None:
    first = {task: read_tsv(REAL, task)["train"][0] for task in ("mrpc", "sst2")}
    assert first["mrpc"].sentences[0].startswith('Amrozi accused his brother , whom he called " the witness " , of')
    assert first["sst2"] == Example(0, ("hide new secretions from the parental units ",), 0)


# The hash


def test_the_hash_depends_on_all_that_was_read_and_on_nothing_else() -> None:
    splits = expected("mrpc")
    digest = content_sha256(splits)
    lines = (
        '["train", 0, ["\\" A , he said", "A ."], 1]\n'
        '["train", 1, ["One\\u2028two \\u0085", "Three"], 0]\n'
        '["validation", 0, ["B \\"", "\\" C"], 0]\n'
    )
    assert digest == hashlib.sha256(lines.encode()).hexdigest()
    assert content_sha256(dict(reversed(splits.items()))) == digest
    train = splits["train"]
    changed = [
        {**splits, "train": train[::-1]},
        {**splits, "train": train[:1]},
        {**splits, "train": [Example(0, train[0].sentences, 0), train[1]]},
        {**splits, "train": [Example(0, train[0].sentences[::-1], 1), train[1]]},
        {**splits, "train": [Example(0, ("\t".join(train[0].sentences),), 1), train[1]]},
        {**splits, "train": [Example(7, train[0].sentences, 1), train[1]]},
        {"train": train, "validation_matched": splits["validation"]},
        {"train": splits["validation"], "validation": train},
    ]
    assert len({digest, *map(content_sha256, changed)}) == 1 + len(changed)


# The Hub


@pytest.mark.parametrize("task", LAYOUTS)
def test_the_hub_gives_what_the_files_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str) -> None:
    """A folder laid out like the repository on the Hub, read by the real `datasets`."""
    import datasets

    columns = {"mnli": ("premise", "hypothesis"), "qqp": ("question1", "question2"), "qnli": ("question", "sentence")}
    names = columns.get(task, ("sentence",) if task in ("cola", "sst2") else ("sentence1", "sentence2"))
    features = datasets.Features(
        {name: datasets.Value("string") for name in names}
        | {"label": datasets.Value("float32" if task == "stsb" else "int64"), "idx": datasets.Value("int32")}
    )
    files = []
    for split, rows in LAYOUTS[task][1].items():
        records = [dict(zip(names, texts, strict=True)) | {"label": label, "idx": 77} for texts, label in rows]
        path = tmp_path / "hub" / task / f"{split}.parquet"
        datasets.Dataset.from_list(records, features=features).to_parquet(path)
        files.append({"split": split, "path": f"{task}/{split}.parquet"})
    card = {"configs": [{"config_name": task, "data_files": files}]}
    (tmp_path / "hub" / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    monkeypatch.setattr(glue, "REPOSITORY", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "files", LAYOUTS[task][0])
    splits = load(task, None)
    assert splits == read_tsv(tmp_path / "files", task)
    assert content_sha256(splits) == content_sha256(load(task, tmp_path / "files"))


def test_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"premise": ["a"], "hypothesis": ["b"], "label": [2], "idx": [5]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    splits = load("mnli", None)
    assert splits["validation_mismatched"] == [Example(0, ("a", "b"), 2)]
    assert asked == [
        (("nyu-mll/glue", "mnli"), {"split": split, "revision": "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c"})
        for split in ("train", "validation_matched", "validation_mismatched")
    ]


def http_error() -> Exception:
    from huggingface_hub.errors import HfHubHTTPError

    base = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    return base("Server disconnected")


@pytest.mark.parametrize(
    "error", [ConnectionError("Couldn't reach\nthe Hub"), ValueError("Couldn't find cache"), http_error()]
)
def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import datasets

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ConnectionError) as caught:
        load("sst2", None)
    assert str(caught.value) == (
        f"data.task=sst2: cannot read nyu-mll/glue ({type(error).__name__}: {' '.join(str(error).split())}). "
        "Without a network, set data.path to a folder of GLUE TSV files (one that holds SST-2/train.tsv)"
    )
    assert "\n" not in str(caught.value)


# What is said when something is wrong


@pytest.mark.parametrize("task", ["wnli", "MRPC", "", None, ["mrpc"]])
@pytest.mark.parametrize("path", [None, "."])
def test_an_unknown_task(task: Any, path: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        load(task, path)
    assert str(caught.value) == (f"data.task must be one of cola, stsb, mrpc, rte, sst2, mnli, qnli, qqp, got {task!r}")


def test_a_missing_folder_or_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        read_tsv(tmp_path / "none", "mrpc")
    assert str(caught.value) == (
        f"data.path: '{tmp_path / 'none'}' is not a folder; "
        "give the folder of GLUE TSV files, one that holds MRPC/train.tsv"
    )
    write(tmp_path, LAYOUTS["mnli"][0])
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    (tmp_path / "MNLI" / "train.tsv").unlink()
    with pytest.raises(ValueError) as caught:
        read_tsv(tmp_path, "mnli")
    assert str(caught.value) == (
        f"data.path: '{tmp_path}' has no file MNLI/train.tsv, MNLI/dev_mismatched.tsv; "
        "data.task=mnli needs MNLI/train.tsv, MNLI/dev_matched.tsv, MNLI/dev_mismatched.tsv"
    )


@pytest.mark.parametrize(
    ("task", "name", "number", "line", "message"),
    [
        ("mrpc", "MRPC/train.tsv", 3, "1\t1\t2\tA", "has 4 columns; it must have 5: Quality, #1 ID, #2 ID, #1 String"),
        ("mrpc", "MRPC/dev.tsv", 2, "1\t1\t2\tA\tB\tC", "has 6 columns; it must have 5"),
        (
            "mrpc",
            "MRPC/train.tsv",
            2,
            "2\t1\t2\tA\tB",
            "has the label '2'; those of mrpc are 0, 1; correct or remove it",
        ),
        ("sst2", "SST-2/dev.tsv", 2, "A\t", "has the label ''; those of sst2 are 0, 1"),
        ("cola", "CoLA/train.tsv", 1, "A sentence", "has 1 columns; it must have 4: source, label, mark, sentence"),
        ("cola", "CoLA/train.tsv", 1, "source\tlabel\tmark\tsentence", "has the label 'label'; those of cola are 0, 1"),
        ("rte", "RTE/train.tsv", 3, "1\tA\tB\t1", "has the label '1'; those of rte are entailment, not_entailment"),
        (
            "mnli",
            "MNLI/train.tsv",
            2,
            f"{MNLI_START}\tA\tB\tneutral\t-",
            "has the label '-'; those of mnli are entailment, neutral, contradiction",
        ),
        ("qqp", "QQP/train.tsv", 3, '"\tWas it so?\t0', "has 3 columns; it must have 6: id, qid1"),
        *(
            (
                "stsb",
                "STS-B/train.tsv",
                2,
                f"{STSB_START}\tA\tB\t{score}",
                f"has the score '{score}'; those of stsb are ",
            )
            for score in ("5.001", "-0.1", "nan", "inf", "high", "")
        ),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, task: str, name: str, number: int, line: str, message: str) -> None:
    files = {file: list(lines) for file, lines in LAYOUTS[task][0].items()}
    files[name][number - 1] = line
    write(tmp_path, files, before="\n\n")
    with pytest.raises(ValueError) as caught:
        read_tsv(tmp_path, task)
    assert str(caught.value).startswith(f"data.path: line {number + 2} of '{tmp_path / name}' {message}")
    assert str(caught.value).endswith("; correct or remove it")


def test_columns_of_another_task(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["rte"][0])
    (tmp_path / "RTE").rename(tmp_path / "QNLI")
    with pytest.raises(ValueError) as caught:
        read_tsv(tmp_path, "qnli")
    path = tmp_path / "QNLI" / "train.tsv"
    assert str(caught.value) == (
        f"data.path: the header of '{path}' has no column question, sentence; data.task=qnli "
        "needs question, sentence, label, found 'index, sentence1, sentence2, label'"
    )


@pytest.mark.parametrize("task", ["cola", "sst2"])
def test_a_file_without_examples(tmp_path: Path, task: str) -> None:
    files = {
        file: [line for line in lines if line.startswith("sentence\t")] for file, lines in LAYOUTS[task][0].items()
    }
    write(tmp_path, files)
    with pytest.raises(
        ValueError, match=rf"data.path: '.*train.tsv' has no examples; data.task={task} needs at least one"
    ):
        read_tsv(tmp_path, task)


def test_a_file_that_is_empty_has_no_header(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["sst2"][0] | {"SST-2/dev.tsv": []})
    with pytest.raises(ValueError, match=r"the header of '.*dev.tsv' has no column sentence, label"):
        read_tsv(tmp_path, "sst2")


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["cola"][0])
    path = tmp_path / "CoLA" / "train.tsv"
    path.write_bytes(path.read_bytes() + b"gj04\t1\t\tna\xefve\n")
    with pytest.raises(ValueError, match=r"data.path: line 3 of '.*CoLA/train.tsv' is not UTF-8 \(.*\); convert it"):
        read_tsv(tmp_path, "cola")

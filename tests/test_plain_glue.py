"""The plain transformers run: tiny files and a tiny random BERT, with every figure computed a second time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.utils import logging

from data.glue import Example, Splits
from sweep.plain_glue import PACKAGE, main, scores

metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is in the extra glue")
pytest.importorskip("accelerate", reason="transformers' Trainer needs it")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
MRPC = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
STSB = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
# 16 examples whose labels the words foretell only in part, so that no metric is 0 or 1.
PAIRS = [("a b", "b a", 1), ("c", "d c a", 0), ("b a", "a", 1), ("d", "c", 1)] * 4
LABELS = [label for _, _, label in PAIRS]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What the command sets for its process, as it was."""
    level, bars, threads = logging.get_verbosity(), logging.is_progress_bar_enabled(), torch.get_num_threads()
    yield
    logging.set_verbosity(level)
    torch.set_num_threads(threads)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The folder of a BERT of one layer with random weights, and its tokenizer."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout_prob": 0.2}
    config = transformers.BertConfig(vocab_size=len(WORDS), hidden_size=16, max_position_embeddings=16, **sizes)
    folder = tmp_path / "bert"
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizer({word: index for index, word in enumerate(WORDS)}).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def glue(tmp_path: Path) -> str:
    files = {
        "MRPC": [MRPC, *(f"{label}\t1\t2\t{one}\t{two}" for one, two, label in PAIRS)],
        "STS-B": [STSB, *(f"0\tg\tf\t1\t0\tn\tn\t{one}\t{two}\t{len(two) + label}" for one, two, label in PAIRS)],
    }
    for task, lines in files.items():
        (tmp_path / "glue" / task).mkdir(parents=True)
        for split in ("train", "dev"):
            (tmp_path / "glue" / task / f"{split}.tsv").write_text("\n".join(lines))
    return str(tmp_path / "glue")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The trainer of the run and the outputs of its model, once it has run."""
    record: dict[str, Any] = {}
    predict = transformers.Trainer.predict

    def spy(trainer: Any, *arguments: Any, **options: Any) -> Any:
        answers = predict(trainer, *arguments, **options)
        record.update(trainer=trainer, outputs=torch.tensor(answers.predictions))
        return answers

    monkeypatch.setattr(transformers.Trainer, "predict", spy)
    return record


def run(capsys: pytest.CaptureFixture[str], **options: object) -> dict[str, Any]:
    """The one line that the command prints."""
    settings = {"lr": 0.01, "epochs": 3, "batch": 4, **options}
    assert main([part for name, value in settings.items() for part in (f"--{name}", str(value))]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_classes(
    tmp_path: Path, model: str, glue: str, seen: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "line.json"
    options = {"task": "mrpc", "path": glue, "model": model}
    record = run(capsys, **options, json=file)
    labels, guesses = torch.tensor(LABELS), seen["outputs"].argmax(1)
    assert list(record) == ["task", "model", "lr", "epochs", "batch", "seed", "steps", "eval_loss", "f1", "accuracy"]
    assert list(record.values())[:7] == ["mrpc", model, 0.01, 3, 4, 0, 12]
    assert record["eval_loss"] == pytest.approx(torch.nn.functional.cross_entropy(seen["outputs"], labels).item())
    assert record["f1"] == metrics.f1_score(labels, guesses)
    assert record["accuracy"] == metrics.accuracy_score(labels, guesses)
    assert 0.5 < record["accuracy"] < 1 and record["accuracy"] != record["f1"]
    assert json.loads(file.read_text()) == record

    assert run(capsys, **options) == record
    untrained = [run(capsys, **{**options, "lr": 1e-30, "epochs": 1, "seed": seed})["eval_loss"] for seed in (0, 1)]
    assert (
        untrained[0] != untrained[1] and seen["trainer"].args.seed == 1
    )  # the classifier's; the order's and dropout's
    assert run(capsys, **options, **{"max-length": 4})["eval_loss"] != record["eval_loss"]


def test_a_score(model: str, glue: str, seen: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    record = run(capsys, task="stsb", path=glue, model=model)
    truth, outputs = torch.tensor([float(len(two) + label) for _, two, label in PAIRS]), seen["outputs"][:, 0]
    assert seen["outputs"].shape == (16, 1)
    assert record["eval_loss"] == pytest.approx(torch.nn.functional.mse_loss(outputs, truth).item())
    assert record["pearson"] == pytest.approx(np.corrcoef(truth, outputs)[0, 1])
    assert {"pearson", "spearman"} < set(record)

    diverged = run(capsys, task="stsb", path=glue, model=model, lr=1e30)
    assert (diverged["eval_loss"], diverged["pearson"], diverged["spearman"]) == (None, None, None)


def test_the_optimizer(
    model: str, glue: str, seen: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    step = torch.optim.AdamW.step

    def spy(optimizer: Any, *arguments: Any, **options: Any) -> Any:
        rates.append(optimizer.param_groups[0]["lr"])
        return step(optimizer, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    run(capsys, task="mrpc", path=glue, model=model, epochs=1, **{"weight-decay": 0.5})
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025])
    groups = seen["trainer"].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]
    assert seen["trainer"].args.max_grad_norm == 0
    parts = dict(seen["trainer"].model.named_modules())
    assert (parts["dropout"].p, parts["bert.encoder.layer.0.attention.self.dropout"].p) == (0.2, 0.1)


def test_each_part_of_mnli_and_every_metric() -> None:
    def examples(*labels: float) -> list[Example]:
        return [Example(index, ("a",), label) for index, label in enumerate(labels)]

    def of(task: str, outputs: list[list[float]], **splits: list[Example]) -> dict[str, float]:
        parts: Splits = {"train": examples(0), **splits}
        return scores(task, parts, np.array(outputs))

    one, two = [1.0, 0.0], [0.0, 1.0]
    parts = {"validation_matched": examples(0, 1, 2, 0), "validation_mismatched": examples(1, 0)}
    outputs = [[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 1.0], [0, 1.0, 0], [1.0, 0, 0]]
    assert of("mnli", outputs, **parts) == {"accuracy_matched": 0.75, "accuracy_mismatched": 1.0}
    assert of("cola", [one, two, two, two], validation=examples(0, 0, 1, 1)) == {"matthews": pytest.approx(3**-0.5)}
    assert of("qqp", [one, two, two, two], validation=examples(0, 0, 1, 1)) == {"accuracy": 0.75, "f1": 0.8}
    found = of("stsb", [[0.0], [1.0], [8.0]], validation=examples(0, 1, 2))
    assert found == {"pearson": pytest.approx(np.corrcoef([0, 1, 2], [0, 1, 8])[0, 1]), "spearman": pytest.approx(1)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"task": "nope"}, "data.task must be one of cola, stsb"),
        ({"path": "/no/such"}, "'/no/such' is not a folder"),
        ({"model": "/no/such"}, "--model: '/no/such' is not a folder"),
        ({"batch": 0}, "--batch must be at least 1, got 0"),
    ],
)
def test_bad_input_is_one_line(
    wrong: dict[str, object], message: str, glue: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"task": "mrpc", "path": glue, "lr": 0.01, **wrong}
    assert main([part for name, value in settings.items() for part in (f"--{name}", str(value))]) == 1
    out, error = capsys.readouterr()
    assert out == "" and len(error.splitlines()) == 1 and error.startswith("error: ") and message in error


def test_missing_package(glue: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.plain_glue.find_spec", lambda name: None)
    assert main(["--task", "mrpc", "--path", glue, "--lr", "1"]) == 1
    assert f"--model: the package {PACKAGE} is not installed" in capsys.readouterr().err

"""Fine-tuning: every example once an epoch, the same run for any layout, scores, predictions, and resuming."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import sklearn.metrics
import torch
from scipy import stats
from torch import nn

import data
import train
from data.batches import evaluation_batches, training_steps
from data.glue import TASKS as GLUE_TASKS
from data.tasks import TASKS
from sweep.runs import read_run
from tests.distributed import run
from tests.finetuning import BATCH, TRAIN, VALIDATION, job
from tests.jobs import (
    Config,
    Stopped,
    altered_model,
    assert_same_run,
    read_record,
    run_job,
    stopping_before,
    without_times,
)
from tsr import AdamW
from tsr.harness.loop import dropout_seed

Jobs = list[tuple[Config, Path, "data.Prepared[data.Examples]"]]
FINETUNE = TASKS["finetune"]
STEPS = 6  # two epochs of batches of 8, 8 and 5
SEED = 5
METRICS = {
    "cola": {"matthews": sklearn.metrics.matthews_corrcoef},
    "mrpc": {"f1": sklearn.metrics.f1_score, "accuracy": sklearn.metrics.accuracy_score},
    "rte": {"accuracy": sklearn.metrics.accuracy_score},
    "stsb": {
        "pearson": lambda one, two: stats.pearsonr(one, two)[0],
        "spearman": lambda one, two: stats.spearmanr(one, two)[0],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetuning")


def prepare(config: Config) -> data.Prepared[data.Examples]:
    return FINETUNE.prepare(config)


def exact(folder: Path, method: str, *overrides: str) -> Config:
    """In float64 and without dropout, where the layout of a batch is only rounding."""
    return job(folder, f"optimizer={method}", "model.dtype=fp64", "comm.dtype=fp64", "model.dropout=0.0", *overrides)


# Serving


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_epoch_holds_every_example_once_and_ends_with_what_is_left(world_size: int, folder: Path) -> None:
    examples = prepare(job(folder)).train
    served: dict[int, list[int]] = {}
    for rank in range(world_size):
        for step in training_steps(
            examples,
            data_seed=0,
            global_batch=BATCH,
            micro_batch=3,
            rank=rank,
            world_size=world_size,
            first_step=1,
            last_step=2 * 3,
        ):
            assert step.loss_tokens == (BATCH if step.step % 3 else TRAIN % BATCH)
            assert all(1 <= len(batch.index) <= 3 for batch in step.micro_batches)
            lengths = [int(length) for batch in step.micro_batches for length in batch.lengths]
            assert lengths == sorted(lengths)  # rows of like length share a micro-batch, which saves padding
            served.setdefault(step.step, []).extend(int(i) for batch in step.micro_batches for i in batch.index)
    assert {step: len(indices) for step, indices in served.items()} == {1: 8, 2: 8, 3: 5, 4: 8, 5: 8, 6: 5}
    first, second = [[i for step in epoch for i in served[step]] for epoch in ((1, 2, 3), (4, 5, 6))]
    assert sorted(first) == sorted(second) == list(range(TRAIN))
    assert set(served[1]) != set(served[4])  # each epoch in an order of its own


@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
def test_every_validation_example_is_evaluated_once(world_size: int, folder: Path) -> None:
    validation = prepare(job(folder, "data.task=mnli")).validation
    found = [
        int(index)
        for rank in range(world_size)
        for batch in evaluation_batches(validation, micro_batch=4, rank=rank, world_size=world_size)
        for index in batch.index
    ]
    assert sorted(found) == list(range(VALIDATION + VALIDATION - 4))


def test_a_row_is_what_the_tokenizer_makes_of_its_sentences(folder: Path) -> None:
    from transformers import AutoTokenizer

    from models import locate

    config = job(folder, "data.sequence_length=9")
    examples = prepare(config).train
    tokenizer = AutoTokenizer.from_pretrained(locate(config["data"]["tokenizer"], None))
    batch = examples.collate(range(TRAIN))
    lines = (folder / "glue/MRPC/train.tsv").read_text().splitlines()[1:]
    assert batch.tokens.shape[1] == 9 and batch.lengths.min() < 9  # some are cut, some are padded
    for line, tokens, types, length, label in zip(
        lines, batch.tokens, batch.types, batch.lengths, batch.labels, strict=True
    ):
        quality, _, _, one, two = line.split("\t")
        row = tokenizer(one, two, truncation=True, max_length=9)
        assert tokens[:length].tolist() == row["input_ids"]
        assert types[:length].tolist() == row["token_type_ids"]
        assert tokens[length:].tolist() == [tokenizer.pad_token_id] * (9 - int(length))
        assert int(label) == int(quality)


# The objective


@pytest.mark.parametrize("task", ["mrpc", "stsb", "mnli"])
def test_the_loss_is_that_of_transformers(task: str, folder: Path) -> None:
    config = job(folder, f"data.task={task}")
    model = train.build_model(config, "cpu").eval()
    batch = prepare(config).train.collate([0, 3, 5, 7])
    losses, answers = FINETUNE.objective(model, batch)
    mask = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    network = model.get_submodule("network")
    expected = network(
        input_ids=batch.tokens, attention_mask=mask.long(), token_type_ids=batch.types, labels=batch.labels
    )
    torch.testing.assert_close(losses.mean(), expected.loss)
    torch.testing.assert_close(answers, expected.logits)


# Layouts


def run_layouts(jobs: Sequence[tuple[str, Path, Path]], nproc: int) -> None:
    for method, folder, directory in jobs:
        config = exact(folder, method, "data.task=stsb", f"nproc={nproc}")
        run_job(config, directory, prepare(config))


@pytest.mark.distributed
def test_two_workers_train_what_one_does(folder: Path, tmp_path: Path) -> None:
    """Also the last batch of an epoch, of which one worker has two rows and the other three."""
    methods = ("adamw", "galore", "one_sided", "tsr")
    jobs = {nproc: [(method, folder, tmp_path / f"{method}-{nproc}") for method in methods] for nproc in (1, 2)}
    run_layouts(jobs[1], 1)
    run(2, run_layouts, jobs[2], 2)
    for method in methods:
        one, two = (read_record(tmp_path / f"{method}-{nproc}") for nproc in (1, 2))
        start = train.build_model(exact(folder, method, "data.task=stsb"), "cpu").state_dict()
        moved = sum(float((value - start[name]).norm() ** 2) for name, value in one.weights.items()) ** 0.5
        apart = sum(float((value - two.weights[name]).norm() ** 2) for name, value in one.weights.items()) ** 0.5
        assert moved > 0.1 and apart <= 1e-6 * moved, method
        assert len(one.rows) == len(two.rows) == STEPS
        for row, other in zip(one.rows, two.rows, strict=True):
            assert row["loss_tokens"] == other["loss_tokens"]
            assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-9)
        assert one.summary["eval/loss"] == pytest.approx(two.summary["eval/loss"], rel=1e-9)
        answers = [
            [float(text) for text in predictions(tmp_path / f"{method}-{nproc}/predictions/STS-B.tsv")]
            for nproc in (1, 2)
        ]
        assert answers[0] == pytest.approx(answers[1], rel=1e-9) and len(set(answers[0])) == VALIDATION


def test_the_gradient_is_that_of_the_mean_over_the_examples_there_are(folder: Path, tmp_path: Path) -> None:
    """Also where the batch is not full: here of 21 examples where it takes 32."""
    config = exact(folder, "adamw", "trainer.epochs=1", "trainer.global_batch=32")
    prepared = prepare(config)
    run_job(config, tmp_path, prepared)
    (row,) = read_record(tmp_path).rows
    model = train.build_model(config, "cpu")
    FINETUNE.objective(model, prepared.train.collate(range(TRAIN)))[0].mean().backward()
    norms = [value.grad.norm() for value in model.parameters() if value.grad is not None]
    assert row["train/grad_norm"] == pytest.approx(float(torch.stack(norms).norm()), rel=1e-9)


@pytest.mark.distributed
def test_with_dropout_a_layout_is_reproducible_and_resumable(folder: Path, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, after a checkpoint of step 2, and in the next one, after that of step 4."""
    places = run(2, straight_and_resumed, folder, tmp_path)
    assert places == [[(SEED, step, rank, 0) for step in range(1, STEPS + 1)] for rank in (0, 1)]
    assert_same_run(tmp_path / "straight", tmp_path / "again")
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")
    assert (tmp_path / "straight/predictions/MRPC.tsv").read_bytes() == (
        tmp_path / "resumed/predictions/MRPC.tsv"
    ).read_bytes()


def straight_and_resumed(folder: Path, directory: Path) -> list[tuple[int, ...]]:
    """Returns what the seeds of the masks were drawn for."""
    config = job(folder, "optimizer=tsr", "model.dropout=0.3", "nproc=2", "trainer.micro_batch=8", f"seed={SEED}")
    prepared = prepare(config)
    run_job(config, directory / "straight", prepared)
    with mock.patch("tsr.harness.loop.dropout_seed", side_effect=dropout_seed) as drawn:
        run_job(config, directory / "again", prepared)
    for _ in range(2):
        with stopping_before(2), pytest.raises(Stopped):
            run_job(config, directory / "resumed", prepared)
    run_job(config, directory / "resumed", prepared)
    return [call.args for call in drawn.call_args_list]


def test_dropout_acts_and_follows_the_seed(folder: Path, tmp_path: Path) -> None:
    """Its masks come from the seed of the run, whatever the global generator holds."""
    losses: dict[str, list[float]] = {}
    for name, overrides, state in (("on", [], 1), ("again", [], 2), ("off", ["model.dropout=0.0"], 1)):
        torch.manual_seed(state)
        config = job(folder, "trainer.epochs=1", *overrides)
        run_job(config, tmp_path / name, prepare(config))
        losses[name] = [row["train/loss"] for row in read_record(tmp_path / name).rows]
    assert losses["on"] == losses["again"] != losses["off"]


def test_seeds_of_dropout_differ_in_step_rank_and_micro_batch() -> None:
    places = list(itertools.product(range(2), range(1, 40), range(8), range(4)))
    assert len({dropout_seed(*place) for place in places}) == len(places)


def test_micro_batches_draw_masks_of_their_own(folder: Path, tmp_path: Path) -> None:
    """The rows of a batch, one by one: the masks before the classifier do not all drop the same number."""
    config = job(folder, "trainer.micro_batch=1", "trainer.epochs=1", "model.dropout=0.5", f"seed={SEED}")
    prepared, seen = prepare(config), []

    def note(module: nn.Module, arguments: Any, output: torch.Tensor) -> None:
        if module.training:
            seen.append((output == 0).sum().item())

    def hook(model: nn.Module) -> None:
        model.get_submodule("network.dropout").register_forward_hook(note)

    with altered_model(hook), mock.patch("tsr.harness.loop.dropout_seed", side_effect=dropout_seed) as drawn:
        run_job(config, tmp_path, prepared)
    assert len(seen) == TRAIN and len(set(seen[:BATCH])) > 1
    sizes = (BATCH, BATCH, TRAIN % BATCH)
    assert [call.args for call in drawn.call_args_list] == [
        (SEED, step, 0, number) for step, size in enumerate(sizes, 1) for number in range(size)
    ]


# Scores


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of each task."""
    runs = tmp_path_factory.mktemp("runs")
    for task in (*METRICS, "mnli"):
        config = job(folder, f"data.task={task}", "trainer.epochs=1", "optimizer=adamw")
        run_job(config, runs / task, prepare(config))
    return runs


def predictions(path: Path) -> list[str]:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["index"] for row in rows] == [str(index) for index in range(len(rows))]
    return [row["prediction"] for row in rows]


def truth(path: Path) -> list[str]:
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    column = {"CoLA": 1, "MRPC": 0}.get(path.parent.name, -1)
    return [line[column] for line in (lines if path.parent.name == "CoLA" else lines[1:])]


@pytest.mark.parametrize(("task", "name"), [("cola", "CoLA"), ("mrpc", "MRPC"), ("rte", "RTE"), ("stsb", "STS-B")])
def test_the_metric_is_that_of_the_saved_predictions(task: str, name: str, finished: Path, folder: Path) -> None:
    summary = json.loads((finished / task / "summary.json").read_text())
    answers, labels = (
        predictions(finished / task / f"predictions/{name}.tsv"),
        truth(folder / "glue" / name / "dev.tsv"),
    )
    assert len(answers) == len(labels) == summary["eval/examples"] == VALIDATION
    convert = (
        np.float32
        if task == "stsb"
        else (lambda text: {"entailment": 0, "not_entailment": 1}.get(text) or int(text == "1"))
    )
    for metric, function in METRICS[task].items():
        expected = function(
            [convert(label) for label in labels], [float(a) if task == "stsb" else convert(a) for a in answers]
        )
        assert summary[f"eval/{metric}"] == pytest.approx(float(expected), abs=1e-12)
    shown = next(iter(METRICS[task]))
    assert (summary["eval/metric"], summary["eval/split"]) == (shown, "validation")
    assert summary["eval/score"] == summary[f"eval/{shown}"]


def test_mnli_has_two_validation_splits(finished: Path, folder: Path) -> None:
    summary = json.loads((finished / "mnli/summary.json").read_text())
    for part, name in (("matched", "MNLI-m"), ("mismatched", "MNLI-mm")):
        answers = predictions(finished / f"mnli/predictions/{name}.tsv")
        labels = truth(folder / f"glue/MNLI/dev_{part}.tsv")
        right = [answer == label for answer, label in zip(answers, labels, strict=True)]
        assert summary[f"eval/accuracy_{part}"] == pytest.approx(sum(right) / len(right))
    assert summary["eval/examples"] == VALIDATION + VALIDATION - 4
    assert summary["eval/metric"] == "accuracy_matched"


@pytest.mark.parametrize("task", [*METRICS, "mnli"])
def test_the_metrics_of_answers_that_vary(task: str, folder: Path) -> None:
    """The little models above may well give every example the same answer."""
    validation = prepare(job(folder, f"data.task={task}")).validation
    facts = GLUE_TASKS[task]
    answers = np.random.default_rng(1).normal(size=(len(validation), max(1, len(facts.labels))))
    record = data.Scores(task, validation, outputs=answers.shape[1])(answers)
    parts = {"": "dev"} if task != "mnli" else {"_matched": "dev_matched", "_mismatched": "dev_mismatched"}
    start, found = 0, set()
    for suffix, name in parts.items():
        labels = truth(folder / "glue" / facts.folder / f"{name}.tsv")
        own = answers[start : start + len(labels)]
        start += len(labels)
        known = [float(label) if task == "stsb" else facts.spellings.index(label) for label in labels]
        given = own[:, 0] if task == "stsb" else own.argmax(1)
        assert len(set(given)) > 1
        for metric, function in METRICS.get(task, {"accuracy": sklearn.metrics.accuracy_score}).items():
            assert record[f"eval/{metric}{suffix}"] == pytest.approx(float(function(known, given)), abs=1e-7)
            found.add(record[f"eval/{metric}{suffix}"])
    assert start == len(validation) and len(found) == (1 if task in ("cola", "rte") else 2)


def test_a_correlation_with_a_constant_is_undefined(folder: Path) -> None:
    validation = prepare(job(folder, "data.task=stsb")).validation
    scores = data.Scores("stsb", validation, outputs=1)
    assert scores(np.full((VALIDATION, 1), 2.5))["eval/score"] is None
    with np.errstate(all="raise"):
        assert scores(np.asarray(validation.labels, np.float64)[:, None])["eval/pearson"] == pytest.approx(1.0)


def test_a_score_is_written_with_all_its_digits(folder: Path, tmp_path: Path) -> None:
    validation = prepare(job(folder, "data.task=stsb")).validation
    answers = np.linspace(0, 5, VALIDATION)[:, None] / 3
    data.Scores("stsb", validation, outputs=1).write(tmp_path, answers)
    assert [float(text) for text in predictions(tmp_path / "STS-B.tsv")] == answers[:, 0].tolist()


def test_predictions_are_the_answers_of_the_saved_model_in_order(finished: Path, folder: Path) -> None:
    config = job(folder, "data.task=stsb")
    model = train.build_model(config, "cpu").eval()
    model.load_state_dict(read_record(finished / "stsb").weights)
    with torch.no_grad():
        answers = FINETUNE.objective(model, prepare(config).validation.collate(range(VALIDATION)))[1]
    assert answers is not None
    found = [float(text) for text in predictions(finished / "stsb/predictions/STS-B.tsv")]
    assert found == pytest.approx(answers[:, 0].tolist(), rel=1e-4) and len(set(found)) == VALIDATION


def test_the_record_of_a_run(finished: Path) -> None:
    record = read_record(finished / "mrpc")
    assert [row["loss_tokens"] for row in record.rows] == [8, 16, 21]
    assert record.summary["steps"] == 3 and record.rows[-1]["eval/f1"] == record.summary["eval/f1"]
    facts = without_times(record.summary)["data"]
    assert (facts["task"], facts["train"]["rows"], facts["splits"]) == ("mrpc", TRAIN, {"validation": VALIDATION})


def test_a_run_that_fails_before_its_first_step_is_reported_with_its_error(folder: Path, tmp_path: Path) -> None:
    def fail(model: nn.Module) -> None:
        raise MemoryError("of the model")

    config = job(folder)
    with altered_model(fail), pytest.raises(MemoryError):
        run_job(config, tmp_path, prepare(config))
    row = read_run(tmp_path)
    assert (row["status"], row["method"]) == ("failed", "tsr") and row["error"].startswith("MemoryError: of the model")


# Weight decay


def test_biases_and_norms_are_spared_from_weight_decay_whatever_the_method(folder: Path) -> None:
    config = job(folder)
    model = train.build_model(config, "cpu")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    AdamW(model, lr=0.5, weight_decay=0.1, no_decay=["vector"]).step()  # without gradients nothing else moves
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name, value in model.named_parameters() if value.ndim == 2}
    with pytest.raises(
        ValueError, match=r"optimizer.no_decay must be a list of roles \(linear, .*\), or null, got \['bias'\]"
    ):
        AdamW(model, no_decay=["bias"])


# LoRA


def test_lora_trains_and_sends_its_adapters_and_the_head_alone(folder: Path, tmp_path: Path) -> None:
    config = job(folder, "optimizer=lora", "model.lora.rank=3")
    before = train.build_model(config, "cpu")
    trained = {name: value for name, value in before.named_parameters() if value.requires_grad}
    adapters = 3 * 2 * (4 * (16 + 16) + 2 * (16 + 24))  # A and B at six linears of two layers
    assert sum(value.numel() for value in trained.values()) == adapters + (16 * 16 + 16) + (2 * 16 + 2)
    run_job(config, tmp_path, prepare(config))
    record = read_record(tmp_path)
    assert {row["comm/bytes"] for row in record.rows} == {4 * sum(value.numel() for value in trained.values())}
    moved = {name for name, value in before.state_dict().items() if not torch.equal(value, record.weights[name])}
    assert moved == set(trained)
    assert record.summary["params"]["linear"] == adapters


def test_the_adapters_add_their_product_scaled_by_alpha_over_rank(folder: Path) -> None:
    model = train.build_model(job(folder, "optimizer=lora", "model.lora.rank=3", "model.lora.alpha=12"), "cpu").eval()
    layer: Any = model.get_submodule("network.bert.encoder.layer.0.attention.self.query")
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    rows = torch.randn(5, 16)
    torch.testing.assert_close(layer(rows), layer.base_layer(rows))
    with torch.no_grad():
        b.normal_()
        torch.testing.assert_close(layer(rows), layer.base_layer(rows) + 12 / 3 * rows @ a.mT @ b.mT)

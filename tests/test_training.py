"""Whole jobs: one result for any number of workers, its metrics and summary, evaluation, and failures."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import data
import train
from data.batches import step_rows
from data.tasks import TASKS
from tests.distributed import run
from tests.jobs import (
    LENGTH,
    METHODS,
    PROJECT,
    Config,
    Record,
    altered_model,
    altered_optimizer,
    assert_same_run,
    compose,
    make_rows,
    read_record,
    run_job,
    run_jobs,
    this_rank,
)
from tsr import AdamW, Communicator, LowRankAdam
from tsr.harness.loop import NonFiniteGradient, NonFiniteParameter, Objective, ReplicasDiffer, Trainer
from tsr.harness.rundir import RunDirectory
from tsr.harness.settings import Schedule, TrainerSettings, config_hash

STEPS, BATCH, WARMUP, FLOOR = 20, 8, 0.25, 0.1
DTYPES = ("fp64", "fp32")
# How one global batch is spread: (workers, rows at once on one of them). "four" makes the same parts as "accumulated".
SPREADS = {"whole": (1, None), "accumulated": (1, 2), "two": (2, None), "four": (4, None)}
# tsr_paper averages the workers' own bases, and what it does depends on their number: its mean of local Q_i is no
# function of the mean gradient. Accumulation on one worker changes nothing for it.
OVER_WORKERS = tuple(method for method in METHODS if method != "tsr_paper")


def job(method: str, dtype: str, spread: str) -> Config:
    workers, micro_batch = SPREADS[spread]
    return compose(
        method,
        {
            "nproc": workers,
            "model.num_layers": 1,
            "model.dtype": dtype,
            "comm.dtype": dtype,
            "schedule.warmup": WARMUP,
            "schedule.floor": FLOOR,
            "trainer.steps": STEPS,
            "trainer.micro_batch": micro_batch,
            "trainer.eval_every": 8,
            "trainer.checkpoint_every": STEPS,
            "trainer.checksum_every": 5,
        },
    )


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> data.Prepared:
    """40 padded rows: an epoch is 5 steps."""
    return make_rows(tmp_path_factory.mktemp("data") / "padded", padded=True)


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory, padded: data.Prepared) -> Callable[[str, str, str], Path]:
    """Every method in every dtype and spread, each world started once; gives the run directory of one of them."""
    folder = tmp_path_factory.mktemp("runs")

    def directory(method: str, dtype: str, spread: str) -> Path:
        return folder / f"{method}-{dtype}-{spread}"

    for spread, (workers, _) in SPREADS.items():
        methods = METHODS if workers == 1 else OVER_WORKERS
        jobs = [
            (job(method, dtype, spread), directory(method, dtype, spread), padded)
            for method, dtype in itertools.product(methods, DTYPES)
        ]
        if workers == 1:
            run_jobs(jobs)
        else:
            run(workers, run_jobs, jobs)
    return directory


@pytest.fixture(scope="module")
def record_of(directory_of: Callable[[str, str, str], Path]) -> Callable[[str, str, str], Record]:
    return lambda method, dtype, spread: read_record(directory_of(method, dtype, spread))


def distance(one: Record, other: Record, start: dict[str, Tensor]) -> float:
    """Largest over the parameters of ||W - W'|| / ||W - W0||."""
    return max(
        float((one.weights[name] - other.weights[name]).norm() / (one.weights[name] - start[name]).norm())
        for name in start
    )


def start_of(config: Config) -> dict[str, Tensor]:
    return train.build_model(config, "cpu").state_dict()


SAME_BATCH = [(method, "accumulated") for method in METHODS]
SAME_BATCH += [(method, spread) for spread in ("two", "four") for method in OVER_WORKERS]


@pytest.mark.distributed
@pytest.mark.parametrize(("method", "spread"), SAME_BATCH)
def test_the_same_global_batch_is_the_same_run(
    record_of: Callable[[str, str, str], Record], method: str, spread: str
) -> None:
    """Unequal rows included. In float64; see the next test for what float32 can show."""
    whole, spread_out = record_of(method, "fp64", "whole"), record_of(method, "fp64", spread)
    assert distance(whole, spread_out, start_of(job(method, "fp64", "whole"))) < 1e-6
    for expected, found in zip(whole.rows, spread_out.rows, strict=True):
        for key in ("train/loss", "train/grad_norm", *(("eval/loss",) if "eval/loss" in expected else ())):
            assert found[key] == pytest.approx(expected[key], rel=1e-9), key
        for key in ("step", "tokens", "positions", "loss_tokens", "lr", "comm/bytes", "comm/total_bytes"):
            assert found[key] == expected[key], key


@pytest.mark.distributed
@pytest.mark.parametrize(("method", "spread"), SAME_BATCH)
def test_the_same_global_batch_in_float32(
    record_of: Callable[[str, str, str], Record], method: str, spread: str
) -> None:
    """Dense AdamW agrees in its parameters. Low-rank methods agree in what they reach alone: right after a refresh the
    core is diagonal, so Adam makes full-sized steps of the rounding errors off the diagonal."""
    whole, spread_out = record_of(method, "fp32", "whole"), record_of(method, "fp32", spread)
    if method == "adamw":
        assert distance(whole, spread_out, start_of(job(method, "fp32", "whole"))) < 1e-5
    assert spread_out.summary["eval/loss"] == pytest.approx(whole.summary["eval/loss"], rel=0.02)
    assert whole.summary["eval/loss"] < 0.97 * whole.rows[0]["train/loss"]  # it did learn something


def test_the_spread_has_refreshes_and_unequal_workers(
    record_of: Callable[[str, str, str], Record], padded: data.Prepared
) -> None:
    """What makes the tests above worth something."""
    refreshed = [row["step"] for row in record_of("tsr", "fp64", "whole").rows if row["comm/sketch"]]
    assert refreshed == [1, 7, 9, 13, 17, 19]
    first = padded.train.lengths[step_rows(1, rows=40, data_seed=0, global_batch=BATCH)]
    assert len({int(part.sum()) for part in np.split(first, 4)}) == 4


@pytest.mark.distributed
@pytest.mark.parametrize("spread", SPREADS)
def test_lr_is_the_schedule_of_the_update_clock(record_of: Callable[[str, str, str], Record], spread: str) -> None:
    lr, warmup = 0.003, 5
    expected = [lr * (k + 1) / warmup for k in range(warmup)]
    for k in range(warmup, STEPS):
        left = (1 + math.cos(math.pi * (k + 1 - warmup) / (STEPS - warmup))) / 2
        expected.append(lr * (FLOOR + (1 - FLOOR) * left))
    found = [row["lr"] for row in record_of("adamw", "fp64", spread).rows]
    assert found == pytest.approx(expected, rel=1e-12)
    assert found[0] > 0 and found[-1] == pytest.approx(FLOOR * lr)


def test_the_optimizer_steps_at_the_rate_that_is_recorded(padded: data.Prepared, tmp_path: Path) -> None:
    config = compose("tsr", {"trainer.steps": 6, "lr_factor.linear": 0.5, "lr_factor.vector": 3.0})
    used: list[dict[str, float]] = []

    def watch(optimizer: Optimizer) -> None:
        def note(*_: Any) -> None:
            used.append({group["role"]: group["lr"] for group in optimizer.param_groups})

        optimizer.register_step_pre_hook(note)

    with altered_optimizer(watch):
        run_job(config, tmp_path, padded)
    rates = [row["lr"] for row in read_record(tmp_path).rows]
    assert len(set(rates)) == 6
    for role, factor in {"linear": 0.5, "embedding": 1.0, "head": 1.0, "vector": 3.0}.items():
        assert [rate[role] for rate in used] == pytest.approx([factor * rate for rate in rates], rel=1e-12)


STEP_KEYS = {
    *("step", "tokens", "train/loss", "train/perplexity", "train/grad_norm", "lr", "tokens_per_s"),
    *("comm/bytes", "comm/total_bytes", "comm/core", "comm/sketch", "comm/dense"),
    *("time/step_s", "time/comm_s", "time/optimizer_s"),
}
EVALUATION_KEYS = {"eval/loss", "eval/perplexity", "eval/tokens"}
SUMMARY_KEYS = {
    *("status", "steps", "tokens", "world_size", "eval/loss", "eval/perplexity", "params", "duration_s"),
    *("comm/bytes_per_step", "comm/peak_bytes", "comm/total_bytes"),
    *("paper/comm/bytes_per_step", "paper/comm/peak_bytes", "paper/comm/total_bytes"),
    *("memory/optimizer_state_bytes", "memory/weight_bytes", "paper/memory_bytes"),
    *("versions", "git_commit", "config_hash"),
}


@pytest.mark.distributed
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("method", ["adamw", "tsr", "tsr_svd"])
def test_metrics_and_summary_add_up(
    record_of: Callable[[str, str, str], Record], padded: data.Prepared, method: str, spread: str
) -> None:
    record = record_of(method, "fp64", spread)
    rows, summary = record.rows, record.summary
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    sent, lengths = 0, []
    for row in rows:
        assert row.keys() >= STEP_KEYS
        sent += row["comm/bytes"]
        assert row["comm/core"] + row["comm/sketch"] + row["comm/dense"] == row["comm/bytes"] > 0
        assert row["comm/total_bytes"] == sent
        lengths += padded.train.lengths[step_rows(row["step"], rows=40, data_seed=0, global_batch=BATCH)].tolist()
        assert row["tokens"] == sum(lengths)
        assert row["positions"] == len(lengths) * LENGTH
        assert row["loss_tokens"] == sum(lengths) - len(lengths)
        assert row["train/perplexity"] == pytest.approx(math.exp(row["train/loss"]))
        assert (row.keys() >= EVALUATION_KEYS) == (row["step"] in (8, 16, 20))
    assert rows[4]["tokens"] == padded.record["train"]["tokens"]  # an epoch

    assert summary.keys() >= SUMMARY_KEYS
    assert summary["status"] == "done" and summary["world_size"] == SPREADS[spread][0] and summary["steps"] == STEPS
    for key in ("tokens", "positions", "loss_tokens", "comm/total_bytes", *EVALUATION_KEYS):
        assert summary[key] == rows[-1][key], key
    assert summary["eval/tokens"] == padded.record["validation"]["loss_tokens"]
    assert summary["eval/perplexity"] == pytest.approx(math.exp(summary["eval/loss"]))
    assert summary["comm/bytes_per_step"] == pytest.approx(sent / STEPS)
    assert summary["comm/peak_bytes"] == max(row["comm/bytes"] for row in rows)
    assert sum(count for kinds in summary["comm/by_role"].values() for count in kinds.values()) == sent
    elements = sum(weight.numel() for weight in record.weights.values())
    assert summary["params"]["total"] == elements == sum(summary["params"].values()) - summary["params"]["total"]
    assert summary["memory/weight_bytes"] == 8 * elements
    assert summary["config_hash"] == config_hash(job(method, "fp64", spread))


@pytest.mark.distributed
def test_run_directories_pass_the_check_of_the_contract(directory_of: Callable[[str, str, str], Path]) -> None:
    script = PROJECT.parent / "shared" / "tools" / "check_run.py"
    if not script.is_file():
        pytest.skip("the checker of the contract is not part of this project, and is not beside it")
    directories = [directory_of(method, "fp32", "two") for method in OVER_WORKERS]
    found = subprocess.run([sys.executable, script, *directories], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout


CONSTANT = 2.75  # sums of it are exact


def constant_losses(model: nn.Module, batch: data.Batch) -> tuple[Tensor, None]:
    """`CONSTANT` for each loss token of [B, T] rows, and 0 elsewhere: [B, T - 1]."""
    return CONSTANT * (torch.arange(1, batch.tokens.shape[1]) < batch.lengths[:, None]), None


def evaluate(
    prepared: data.Prepared,
    objective: Objective,
    model: nn.Module,
    *,
    micro_batch: int,
    max_rows: int | None,
) -> dict[str, Any]:
    communicator = Communicator()
    place = {"rank": communicator.rank, "world_size": communicator.world_size}
    batches = partial(data.evaluation_batches, prepared.validation, micro_batch=micro_batch, max_rows=max_rows, **place)
    trainer = Trainer(
        model,
        AdamW(model, communicator=communicator),
        objective,
        steps=lambda step: (),
        evaluation=batches,
        last=1,
        settings=TrainerSettings(**compose("adamw")["trainer"]),
        schedule=Schedule(shape="constant", warmup=0.0, floor=1.0, steps=1),
        lr=1.0,
        seed=0,
        text={},
        run=RunDirectory("nowhere", {}),
    )
    return trainer.evaluate()


Evaluations = dict[tuple[int, int | None], tuple[dict[str, Any], dict[str, Any]]]


def evaluate_all(prepared: data.Prepared) -> Evaluations:
    """By batch size and rows: with the constant loss, and with a real model."""
    model = train.build_model(compose("adamw", {"model.dtype": "fp64"}), "cpu")
    return {
        (micro_batch, max_rows): (
            evaluate(prepared, constant_losses, model, micro_batch=micro_batch, max_rows=max_rows),
            evaluate(prepared, TASKS["pretrain"].objective, model, micro_batch=micro_batch, max_rows=max_rows),
        )
        for micro_batch in (1, 3, 8)
        for max_rows in (None, 1, 7)
    }


def check_evaluations(evaluations: Evaluations, prepared: data.Prepared) -> None:
    model = train.build_model(compose("adamw", {"model.dtype": "fp64"}), "cpu")
    for (_, max_rows), (constant, real) in evaluations.items():
        tokens = prepared.validation.lengths[:max_rows] - 1
        assert constant == {
            "eval/loss": CONSTANT,
            "eval/perplexity": math.exp(CONSTANT),
            "eval/tokens": int(tokens.sum()),
        }
        total = 0.0
        for row in range(len(tokens)):
            ids, length = prepared.validation[row]
            with torch.no_grad():
                logits = model(ids[None, :length])[0, :-1]  # the row without its padding
            total += float(nn.functional.cross_entropy(logits, ids[1:length], reduction="sum"))
        assert real["eval/loss"] == pytest.approx(total / tokens.sum(), rel=1e-12)


def test_evaluation_is_the_mean_over_loss_tokens(padded: data.Prepared) -> None:
    """A constant loss comes out exactly, for any batch size and number of rows."""
    check_evaluations(evaluate_all(padded), padded)


class Failure(NamedTuple):
    """What one worker sees of a job that fails."""

    message: str
    weights: dict[str, Tensor]
    summary: dict[str, Any]


POISONED, POISONED_STEP = "model.layers.1.mlp.up_proj.weight", 5


def poison(model: nn.Module, *, value: float) -> None:
    """On the second worker, spoil one element of one gradient at one step."""
    calls = itertools.count(1)

    def spoil(gradient: Tensor) -> Tensor:
        if next(calls) == POISONED_STEP:
            gradient = gradient.clone()
            gradient[3, 2] = value
        return gradient

    if this_rank() == 1:
        model.get_parameter(POISONED).register_hook(spoil)


def disturb(model: nn.Module) -> None:
    """On the second worker, flip the last bit of one element before the forward pass of step 4."""
    calls = itertools.count(1)

    def flip(module: nn.Module, inputs: Any) -> None:
        if next(calls) == 4:
            module.get_parameter(POISONED).data.view(torch.int32)[3, 2] ^= 1

    if this_rank() == 1:
        model.register_forward_pre_hook(flip)


def fail(sabotage: Callable[[nn.Module], None], config: Config, directory: Path, prepared: data.Prepared) -> Failure:
    models: list[nn.Module] = []

    def alter(model: nn.Module) -> None:
        models.append(model)
        sabotage(model)

    with altered_model(alter), pytest.raises((NonFiniteGradient, ReplicasDiffer)) as caught:
        run_job(config, directory, prepared)
    (model,) = models
    weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    message = f"{type(caught.value).__name__}: {caught.value}"
    return Failure(message, weights, json.loads((directory / "summary.json").read_text()))


def failing_job(**trainer: int) -> Config:
    changes = {"steps": 8, "checkpoint_every": 1, "checksum_every": 2, **trainer}
    return compose("tsr", {"nproc": 2, **{f"trainer.{key}": value for key, value in changes.items()}})


def two_workers(folder: Path, prepared: data.Prepared) -> tuple[Evaluations, dict[str, Failure]]:
    """All that needs a world of two, in one."""
    failures = {
        "nan": fail(partial(poison, value=math.nan), failing_job(), folder / "nan", prepared),
        "inf": fail(partial(poison, value=math.inf), failing_job(), folder / "inf", prepared),
        "disturbed": fail(disturb, failing_job(), folder / "disturbed", prepared),
        "seen late": fail(disturb, failing_job(checksum_every=100), folder / "late", prepared),
    }
    run_job(failing_job(), folder / "nan", prepared)  # the same again, without the fault
    run_job(failing_job(), folder / "sound", prepared)
    return evaluate_all(prepared), failures


Pair = tuple[Path, list[tuple[Evaluations, dict[str, Failure]]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, padded: data.Prepared) -> Pair:
    """The folder of the jobs that `two_workers` runs, and what each of the two returns."""
    folder = tmp_path_factory.mktemp("pair")
    return folder, run(2, two_workers, folder, padded)


@pytest.mark.distributed
def test_evaluation_on_two_workers_one_of_which_may_have_no_row(pair: Pair, padded: data.Prepared) -> None:
    for evaluations, _ in pair[1]:
        check_evaluations(evaluations, padded)


@pytest.mark.distributed
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_gradient_that_is_not_finite_stops_all_workers_before_the_update(pair: Pair, value: str) -> None:
    folder, results = pair
    failures = [failures[value] for _, failures in results]
    for failure in failures:
        assert failure.message.startswith(
            f"NonFiniteGradient: step {POISONED_STEP}: the gradient of {POISONED} on rank 1 is not finite"
        )
        assert failure.summary["status"] == "failed" and failure.summary["error"] == failure.message
        for name, weight in failures[0].weights.items():
            assert torch.equal(failure.weights[name], weight), name
    if value == "inf":  # the other was taken up again
        saved = folder / "inf" / "checkpoints" / f"step_{POISONED_STEP - 1:08d}" / "state.pt"
        for name, weight in torch.load(saved, weights_only=True)["model"].items():
            assert torch.equal(failures[0].weights[name], weight), name


@pytest.mark.distributed
def test_the_checkpoint_before_a_failure_is_good(pair: Pair) -> None:
    assert_same_run(pair[0] / "sound", pair[0] / "nan")


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "step"), [("disturbed", 5), ("seen late", 8)])
def test_workers_that_differ_in_one_bit_are_found(pair: Pair, kind: str, step: int) -> None:
    """At the next comparison, and at the end in any case."""
    for _, failures in pair[1]:
        failure = failures[kind]
        assert failure.message == f"ReplicasDiffer: step {step}: parameters of ranks [1] differ from those of rank 0"
        assert failure.summary["error"] == failure.message and failure.summary["status"] == "failed"


def test_a_single_worker_stops_too(tmp_path: Path, padded: data.Prepared) -> None:
    def spoil(model: nn.Module) -> None:
        model.get_parameter("lm_head.weight").register_hook(lambda gradient: gradient * math.nan)

    failure = fail(spoil, compose("adamw", {"trainer.steps": 2}), tmp_path, padded)
    assert failure.message.startswith("NonFiniteGradient: step 1: the gradient of lm_head.weight on rank 0")


def fail_alone(folder: Path, prepared: data.Prepared) -> str:
    """The second worker fails by itself; the first one notices when the other's end of the connection is gone."""

    objective = TASKS["pretrain"].objective

    def failing(model: nn.Module, batch: data.Batch) -> tuple[Tensor, Tensor | None]:
        if dist.get_rank() == 1:
            raise MemoryError("of the second worker")
        return objective(model, batch)

    with mock.patch.object(TASKS["pretrain"], "objective", failing):
        try:
            run_job(failing_job(), folder, prepared)
        except (MemoryError, RuntimeError):
            return json.loads((folder / "summary.json").read_text())["error"]
    return "did not fail"


@pytest.mark.distributed
def test_the_record_names_the_worker_that_failed_and_not_those_that_noticed(
    padded: data.Prepared, tmp_path: Path
) -> None:
    assert run(2, fail_alone, tmp_path, padded) == ["MemoryError: of the second worker"] * 2


def test_parameters_that_ran_away_are_not_saved(padded: data.Prepared, tmp_path: Path) -> None:
    def run_away(optimizer: Optimizer) -> None:
        @torch.no_grad()
        def overflow(*_: Any) -> None:
            optimizer.param_groups[0]["params"][0][3, 1] = math.inf

        optimizer.register_step_post_hook(overflow)

    config = compose("adamw", {"trainer.steps": 3, "trainer.checkpoint_every": 1})
    message = r"step 1: the update made model.embed_tokens.weight infinite or NaN; it was not saved"
    with altered_optimizer(run_away), pytest.raises(NonFiniteParameter, match=message):
        run_job(config, tmp_path, padded)
    assert not list(tmp_path.glob("checkpoints/step_*"))


def test_a_step_that_the_optimizer_calls_not_finite_stops_the_run(padded: data.Prepared, tmp_path: Path) -> None:
    """Also where local gradients and the norm of the averaged messages show nothing, as a sketch that overflowed."""

    def overflow(optimizer: Optimizer) -> None:
        def call_it_so(*_: Any) -> None:
            assert isinstance(optimizer, LowRankAdam)
            if optimizer.updates == 2:
                optimizer.finite = torch.zeros((), dtype=torch.bool)

        optimizer.register_step_post_hook(call_it_so)

    config = compose("tsr", {"trainer.steps": 4, "trainer.checkpoint_every": 1})
    with altered_optimizer(overflow), pytest.raises(NonFiniteGradient, match=r"^step 2: "):
        run_job(config, tmp_path, padded)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step_*")) == ["step_00000001"]

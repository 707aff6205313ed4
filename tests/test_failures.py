"""Jobs that evaluate and jobs that fail, on one worker and on two: the mean, and what stops, says why and is kept."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import data
import train
from data.tasks import TASKS
from tests.distributed import run
from tests.jobs import (
    Config,
    altered_model,
    altered_optimizer,
    assert_same_run,
    compose,
    run_job,
    this_rank,
)
from tsr import AdamW, Communicator, LowRankAdam
from tsr.harness.loop import NonFiniteGradient, NonFiniteParameter, Objective, ReplicasDiffer, Trainer
from tsr.harness.rundir import RunDirectory
from tsr.harness.settings import Schedule, TrainerSettings

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

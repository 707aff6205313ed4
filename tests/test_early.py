"""Jobs whose steps work ahead: nothing of their record changes, and they resume."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

import data
from tests.distributed import run
from tests.jobs import (
    Stopped,
    altered_model,
    assert_same_run,
    compose,
    make_rows,
    read_record,
    run_job,
    stopping_before,
    without_times,
)
from tsr.harness.loop import NonFiniteGradient, steps_ahead

STEPS = {"trainer.steps": 9, "trainer.checkpoint_every": 4, "trainer.eval_every": 3, "trainer.micro_batch": 2}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> data.Prepared:
    return make_rows(tmp_path_factory.mktemp("data") / "rows", padded=True)


def test_reading_a_step_late_changes_nothing_of_the_record(tmp_path: Path, prepared: data.Prepared) -> None:
    assert steps_ahead(torch.device("cpu")) == 0 < steps_ahead(torch.device("cuda"))
    run_job(compose("tsr", STEPS), tmp_path / "at once", prepared)
    with mock.patch("tsr.harness.loop.steps_ahead", return_value=1):
        run_job(compose("tsr", STEPS), tmp_path / "late", prepared)
        assert_same_run(tmp_path / "at once", tmp_path / "late")
        with stopping_before(24), pytest.raises(Stopped):  # four micro-batches a step: in the seventh
            run_job(compose("tsr", STEPS), tmp_path / "stopped", prepared)
        run_job(compose("tsr", STEPS), tmp_path / "stopped", prepared)
    assert_same_run(tmp_path / "at once", tmp_path / "stopped")


def test_a_step_that_is_read_late_is_named_rightly(tmp_path: Path, prepared: data.Prepared) -> None:
    calls = iter(range(100))

    def spoil(model: torch.nn.Module) -> None:
        def poison(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * float("nan") if next(calls) == 4 else gradient

        model.get_parameter("lm_head.weight").register_hook(poison)

    steps = {"trainer.steps": 9, "trainer.eval_every": None}
    late, message = mock.patch("tsr.harness.loop.steps_ahead", return_value=1), r"step 5: .* lm_head.weight on rank 0"
    with late, altered_model(spoil), pytest.raises(NonFiniteGradient, match=message):
        run_job(compose("tsr", steps), tmp_path, prepared)
    assert [row["step"] for row in read_record(tmp_path).rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("refresh", ["sketch", "one_pass"])
def test_accumulating_cores_trains_the_same_model_and_resumes(
    refresh: str, tmp_path: Path, prepared: data.Prepared
) -> None:
    wide = {**STEPS, "model.dtype": "fp64", "comm.dtype": "fp64", "refresh.method": refresh}
    run_job(compose("tsr", wide), tmp_path / "gradients", prepared)
    config = compose("tsr", {**wide, "optimizer.accumulate": "core"})
    run_job(config, tmp_path / "cores", prepared)
    one, two = read_record(tmp_path / "gradients"), read_record(tmp_path / "cores")
    for name, weight in one.weights.items():
        torch.testing.assert_close(two.weights[name], weight, rtol=1e-6, atol=1e-9)
    assert [row["comm/bytes"] for row in one.rows] == [row["comm/bytes"] for row in two.rows]
    with stopping_before(24), pytest.raises(Stopped):
        run_job(config, tmp_path / "resumed", prepared)
    run_job(config, tmp_path / "resumed", prepared)
    assert_same_run(tmp_path / "cores", tmp_path / "resumed")


def overlapping(folder: Path, prepared: data.Prepared) -> None:
    for method in ("adamw", "tsr"):
        for overlap in (None, True):
            changes = {**STEPS, "comm.bucket_mib": 0.01, "comm.overlap": overlap, "nproc": 2}
            run_job(compose(method, changes), folder / f"{method}-{overlap}", prepared)


@pytest.mark.distributed
def test_overlap_changes_no_bit_of_a_run(tmp_path: Path, prepared: data.Prepared) -> None:
    run(2, overlapping, tmp_path, prepared)
    for method in ("adamw", "tsr"):
        one, two = read_record(tmp_path / f"{method}-None"), read_record(tmp_path / f"{method}-True")
        assert [without_times(row) for row in one.rows] == [without_times(row) for row in two.rows]
        assert all(torch.equal(weight, two.weights[name]) for name, weight in one.weights.items())

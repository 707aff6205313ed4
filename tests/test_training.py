"""Whole jobs: one result for any number of workers, its metrics and its summary."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor
from torch.optim import Optimizer

import data
import train
from data.batches import step_rows
from tests.distributed import run
from tests.jobs import (
    LENGTH,
    METHODS,
    PROJECT,
    Config,
    Record,
    altered_optimizer,
    compose,
    read_record,
    run_job,
    run_jobs,
)
from tsr.harness.settings import config_hash

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

"""A run that was ended and taken up again is the run that was not, bit for bit; and checkpoints that do not fit."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

import data
from tests.distributed import run
from tests.jobs import (
    METHODS,
    PROJECT,
    SMALL,
    Config,
    Stopped,
    altered_optimizer,
    assert_same_run,
    compose,
    read_record,
    run_job,
    stopping_before,
)
from tsr import TSR, AdamW
from tsr.harness import checkpoint
from tsr.harness.rundir import LOGGER, read_rows

# Checkpoints at 3, 6, 9. The refreshes, at 1, 5, 9 and at 1, 4, 7, fall between them and right after.
EVERY, STEPS, STOP_AFTER = 3, 9, 4


def job(method: str, dtype: str = "fp32", **top: Any) -> Config:
    return compose(
        method,
        {
            "model.dtype": dtype,
            "comm.dtype": dtype,
            "refresh.linear": 4,
            "refresh.embedding": 3,
            "trainer.steps": STEPS,
            "trainer.micro_batch": 4,
            "trainer.eval_every": 2,
            "trainer.checkpoint_every": EVERY,
            "trainer.keep_checkpoints": 3,
            **top,
        },
    )


def straight_and_resumed_twice(
    config: Config, straight: Path, resumed: Path, prepared: data.Prepared, micro_batches: int
) -> None:
    """Run a job to its end in one directory. In the other it fails in step 5, then, resumed from 3, in step 8."""
    run_job(config, straight, prepared)
    for step in (EVERY, 2 * EVERY):
        with stopping_before(STOP_AFTER * micro_batches), pytest.raises(Stopped):
            run_job(config, resumed, prepared)
        assert checkpoint.list_checkpoints(resumed / "checkpoints")[-1] == saved(resumed, step)
    run_job(config, resumed, prepared)


def saved(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step_{step:08d}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_resumed_twice_is_the_run_that_was_not(method: str, dtype: str, padded: data.Prepared, tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    straight_and_resumed_twice(job(method, dtype), straight, resumed, padded, micro_batches=2)
    assert_same_run(straight, resumed)
    assert [row["step"] for row in read_rows(resumed / "metrics.jsonl")] == list(range(1, STEPS + 1))


@pytest.mark.distributed
def test_resumed_twice_on_two_workers(padded: data.Prepared, tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run(2, straight_and_resumed_twice, job("tsr", "bf16", nproc=2), straight, resumed, padded, 1)
    assert_same_run(straight, resumed)


@pytest.fixture(scope="module")
def finished(padded: data.Prepared, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with all of its checkpoints; tests copy it and do not touch it."""
    directory = tmp_path_factory.mktemp("runs") / "finished"
    run_job(job("tsr"), directory, padded)
    return directory


@pytest.mark.parametrize("path", ["checkpoints/step_00000006", "."])
def test_resume_by_path_into_a_new_directory_keeps_the_earlier_rows(
    path: str, finished: Path, padded: data.Prepared, tmp_path: Path
) -> None:
    """From a checkpoint, or the newest of a run, which is that of its last step: nothing is left to do there but to
    evaluate."""
    run_job(job("tsr", resume=str(finished / path)), tmp_path, padded)
    there, here = read_record(finished), read_record(tmp_path)
    assert here.rows[:6] == there.rows[:6]
    assert [row["step"] for row in here.rows] == list(range(1, STEPS + 1))
    assert here.summary["eval/loss"] == there.summary["eval/loss"]
    if path != ".":
        assert_same_run(finished, tmp_path)


def test_a_truncated_newest_checkpoint_is_passed_over_with_a_warning(
    finished: Path,
    padded: data.Prepared,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    truncate(saved(directory, 9) / "state.pt")
    monkeypatch.setattr(LOGGER, "propagate", True)
    steps: list[int] = []
    with mock.patch.object(checkpoint, "save", side_effect=note_step(steps)):
        run_job(job("tsr"), directory, padded)
    assert steps == [9]  # made anew from 6
    assert_same_run(finished, directory)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(r"step_00000009: the checkpoint is damaged .*; use an older one", warning.getMessage())


def note_step(steps: list[int]) -> Callable[..., Path]:
    save = checkpoint.save

    def noting(folder: Path, step: int, *args: Any, **options: Any) -> Path:
        steps.append(step)
        return save(folder, step, *args, **options)

    return noting


@pytest.mark.parametrize(("resume", "start"), [(None, 0), ("step_00000003", 3)])
def test_a_run_that_goes_back_forgets_what_came_after(
    resume: str | None, start: int, finished: Path, padded: data.Prepared, tmp_path: Path
) -> None:
    """Else a later checkpoint of the earlier attempt would be resumed from, with rows missing before it."""
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    config = job("tsr", resume=resume and str(directory / "checkpoints" / resume))
    with stopping_before(2 * 2), pytest.raises(Stopped):
        run_job(config, directory, padded)
    assert checkpoint.list_checkpoints(directory / "checkpoints") == [saved(directory, 3)] * (start == 3)
    assert [row["step"] for row in read_rows(directory / "metrics.jsonl")] == list(range(1, start + 3))
    run_job(job("tsr"), directory, padded)
    assert_same_run(finished, directory)


def job_command(directory: Path, folder: Path) -> list[str | Path]:
    return [
        *(sys.executable, PROJECT / "train.py", *SMALL, "optimizer=tsr", "nproc=2", "model.vocab_size=512"),
        *(
            "data=text",
            "data.rows=document",
            f"data.paths=[{folder / 'corpus.txt'}]",
            f"data.cache_dir={folder / 'cache'}",
        ),
        *(
            "trainer.steps=150",
            "trainer.checkpoint_every=20",
            "trainer.checksum_every=10",
            f"hydra.run.dir={directory}",
        ),
    ]


@pytest.mark.distributed
def test_a_killed_job_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """The whole job, parent and workers, is killed with SIGKILL; the same command again finishes it.

    It is compared with the same job in workers of the tests' own, for each process of the command line takes seconds.
    """
    shutil.copy(PROJECT / "LICENSE", tmp_path / "corpus.txt")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            job_command(killed, tmp_path),
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until(lambda: len(read_rows(killed / "metrics.jsonl")) > 45, process, output=tmp_path / "output")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (killed / "summary.json").exists(), "the job was done before it could be killed: give it more steps"
    assert saved(killed, 40).exists()

    again = subprocess.run(job_command(killed, tmp_path), env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "resuming from" in (killed / "train.log").read_text()
    assert [row["step"] for row in read_rows(killed / "metrics.jsonl")] == list(range(1, 151))

    config = OmegaConf.to_container(OmegaConf.load(killed / "config.yaml"))
    assert isinstance(config, dict)
    prepared = data.prepare(instantiate(config["data"]), vocab_size=config["model"]["vocab_size"])
    run(2, run_job, config, straight, prepared)
    assert_same_run(straight, killed)


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], *, output: Path, seconds: float = 300
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"the job ended by itself:\n{output.read_text()}"
        assert time.monotonic() < deadline, f"the job made no progress:\n{output.read_text()}"
        time.sleep(0.02)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


Saved = tuple[nn.Module, torch.optim.Optimizer]


def make_model(*, width: int = 12, method: Callable[..., torch.optim.Optimizer] = AdamW, **choices: Any) -> Saved:
    model = nn.Sequential(nn.Embedding(9, width), nn.Linear(width, 10))
    return model, method(model, **choices)


TEXT = {"corpus_sha256": "c", "tokenizer_sha256": "t"}


def find(*arguments: Any, text: dict[str, str] = TEXT, steps: int = 100) -> checkpoint.Checkpoint | None:
    return checkpoint.find(*arguments, text=text, steps=steps)


def low_rank(rank: int) -> Saved:
    return make_model(method=TSR, rank={"linear": rank, "embedding": None})


def save(folder: Path, step: int, made: Saved, *, keep: int = 2) -> Path:
    return checkpoint.save(folder, step, *made, {"step": step}, text=TEXT, keep=keep)


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(folder)]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_so_many_of_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    made = make_model()
    for step in (8, 9, 10, 11):
        save(tmp_path, step, made, keep=keep)
    assert names(tmp_path) == ["step_00000009", "step_00000010", "step_00000011"][-keep:]


def test_a_checkpoint_that_was_cut_short_is_none(tmp_path: Path) -> None:
    """Whatever was written of it is no checkpoint, and does not stand in the way of the next attempt."""
    made = make_model()
    save(tmp_path, 1, made)
    with mock.patch.object(torch, "save", side_effect=write_a_part), pytest.raises(OSError, match="disk full"):
        save(tmp_path, 2, made)
    assert names(tmp_path) == ["step_00000001"]
    found = find("auto", tmp_path, checkpoint.signature(*made))
    assert found is not None and found.step == 1
    save(tmp_path, 2, made)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert [path.name for path in tmp_path.iterdir() if path.name not in names(tmp_path)] == []


def write_a_part(value: object, file: Any) -> None:
    file.write(b"PK")
    raise OSError("disk full")


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    save(tmp_path, 1, make_model())
    made = make_model()
    path = save(tmp_path, 1, made)
    state = torch.load(path / "state.pt", weights_only=True)["model"]
    assert torch.equal(state["1.weight"], made[0].get_parameter("1.weight"))


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    expected = checkpoint.signature(*make_model())
    assert find("auto", tmp_path / "checkpoints", expected) is None
    path = save(tmp_path, 1, make_model())
    assert find(None, tmp_path, expected) is None
    assert find(str(path), tmp_path / "elsewhere", expected) == checkpoint.Checkpoint(path, 1)


def edit_meta(path: Path, **changes: Any) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({key: value for key, value in {**meta, **changes}.items() if value}))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "gone": (shutil.rmtree, "no checkpoint is there; give a folder .*/step_XXXXXXXX or auto"),
    "no meta": (lambda path: (path / "meta.json").unlink(), "no checkpoint is there"),
    "no state": (lambda path: (path / "state.pt").unlink(), r"the checkpoint is damaged \(FileNotFoundError\)"),
    "truncated state": (lambda path: truncate(path / "state.pt"), "the checkpoint is damaged .*; use an older one"),
    "truncated meta": (lambda path: truncate(path / "meta.json"), r"the checkpoint is damaged \(JSONDecodeError\)"),
    "empty meta": (lambda path: edit_meta(path, signature=None), r"the checkpoint is damaged \(KeyError\)"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_checkpoint_is_refused_by_path_and_passed_over_by_auto(tmp_path: Path, kind: str) -> None:
    made, (damage, message) = make_model(), BROKEN[kind]
    older, path = save(tmp_path, 1, made), save(tmp_path, 2, made)
    damage(path)
    with pytest.raises(ValueError, match=f"^resume={re.escape(str(path))}: {message}"):
        find(str(path), tmp_path, checkpoint.signature(*made))
    assert find("auto", tmp_path, checkpoint.signature(*made)) == checkpoint.Checkpoint(older, 1)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (make_model(width=11), r"(0|1).weight( \(exp_avg(_sq)?\))? is (9|10)x12 float32 there and (9|10)x11 float32"),
        (low_rank(4), r"1.weight \(\w+\) is (absent|scalar float32|\w+ float32) there and .* here"),
    ],
    ids=["other width", "other method"],
)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path, made: Saved, message: str) -> None:
    path = save(tmp_path, 1, make_model())
    expected = checkpoint.signature(*made)
    with pytest.raises(ValueError, match=f"the checkpoint is of another model or optimizer: {message}"):
        find(str(path), tmp_path, expected)


def test_a_checkpoint_of_another_rank_or_dtype_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1, low_rank(4))
    with pytest.raises(ValueError, match=r"1.weight \(\w+\) is \d+x4 float32 there and \d+x5 float32 here"):
        find(str(path), tmp_path, checkpoint.signature(*low_rank(5)))
    model, _ = make_model()
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 there and .* bfloat16 here"):
        find(
            str(path),
            tmp_path,
            checkpoint.signature(model, TSR(model, rank={"linear": 4, "embedding": None})),
        )


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=f"^resume={re.escape(str(tmp_path))}: this run has no checkpoint yet"):
        find(str(tmp_path), tmp_path / "own", {})


def test_the_newest_checkpoint_of_a_run_is_taken(tmp_path: Path) -> None:
    made = make_model()
    for step in (9, 10):
        save(tmp_path / "checkpoints", step, made)
    found = find(str(tmp_path), tmp_path / "own", checkpoint.signature(*made))
    assert found is not None and found.step == 10


@pytest.mark.parametrize("made", [make_model(), low_rank(4)], ids=["dense", "low-rank"])
def test_a_signature_names_all_there_is(made: Saved) -> None:
    model, optimizer = made
    entries = checkpoint.signature(model, optimizer)
    tensors = list(itertools.chain(model.parameters(), *(state.values() for state in optimizer.state.values())))
    assert len(entries) == len(tensors)


def test_a_checkpoint_of_another_text_is_refused_and_kept(tmp_path: Path) -> None:
    made = make_model()
    path = save(tmp_path, 1, made)
    for resume in ("auto", str(path)):
        with pytest.raises(ValueError, match=r"resume=.*trained on another text .*start afresh with resume=null"):
            find(resume, tmp_path, checkpoint.signature(*made), text={**TEXT, "corpus_sha256": "d"})
    assert checkpoint.list_checkpoints(tmp_path) == [path]


def test_checkpoints_that_are_all_damaged_are_not_thrown_away(tmp_path: Path) -> None:
    made = make_model()
    paths = [save(tmp_path, step, made) for step in (1, 2)]
    for path in paths:
        truncate(path / "state.pt")
    with pytest.raises(ValueError, match=r"damaged .* no other is left, so start afresh with resume=null"):
        find("auto", tmp_path, checkpoint.signature(*made))
    assert checkpoint.list_checkpoints(tmp_path) == paths


def test_a_checkpoint_past_the_end_is_refused(tmp_path: Path) -> None:
    made = make_model()
    path = save(tmp_path, 6, made)
    with pytest.raises(ValueError, match=r"of step 6, past trainer.steps=5; raise that one"):
        find(str(path), tmp_path / "own", checkpoint.signature(*made), steps=5)


def test_rates_are_the_configurations_and_not_the_checkpoints(padded: data.Prepared, tmp_path: Path) -> None:
    run_job(compose("tsr", {"trainer.steps": 4, "trainer.checkpoint_every": 2}), tmp_path / "first", padded)
    source = str(tmp_path / "first" / "checkpoints" / "step_00000002")
    changes = {"trainer.steps": 4, "optimizer.lr": 0.5, "optimizer.weight_decay": 0.25, "resume": source}
    used: list[Any] = []

    def watch(optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(
            lambda *_: used.extend((g["lr"], g["weight_decay"]) for g in optimizer.param_groups)
        )

    with altered_optimizer(watch):
        run_job(compose("tsr", changes), tmp_path / "second", padded)
    recorded = [row["lr"] for row in read_rows(tmp_path / "second" / "metrics.jsonl")][2:]
    assert len(recorded) == 2 and min(recorded) > 0.01
    assert used == [(pytest.approx(lr), 0.25) for lr in recorded for _ in range(4)]

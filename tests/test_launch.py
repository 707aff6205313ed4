"""Workers: started here or by torchrun, one directory and one log; and what is left when they are stopped or killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli import Outcome, call, finish, only_run, read_metrics, read_summary, run, start, tiny_job
from tsr.harness.launch import World, start_workers

pytestmark = pytest.mark.distributed

STEPS = 4000  # of the job that is stopped: it must not end before
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def local(folder: Path) -> tuple[Outcome, Path]:
    """A job with two local workers."""
    outcome = run(*tiny_job(folder), "nproc=2")
    assert outcome.status == 0, outcome.text
    return outcome, only_run(folder / "runs")


def test_two_local_workers_leave_one_directory_and_one_log(local: tuple[Outcome, Path]) -> None:
    outcome, directory = local
    assert {path.name for path in directory.iterdir()} == {
        ".lock", "checkpoints", "config.yaml", "metrics.jsonl", "summary.json", "train.log",
    }  # fmt: skip
    summary = read_summary(directory)
    assert (summary["status"], summary["world_size"]) == ("done", 2)
    log = (directory / "train.log").read_text().splitlines()
    assert log and all(" rank 0: " in line for line in log)
    assert f"run directory: {directory}" in outcome.text and "Warning" not in outcome.text


def test_torchrun_gives_the_same_run(local: tuple[Outcome, Path], folder: Path) -> None:
    job = [part for part in tiny_job(folder) if not part.startswith("runs_dir=")]
    outcome = run(*job, f"runs_dir={folder / 'torchrun'}", torchrun=2)
    assert outcome.status == 0, outcome.text
    directory = only_run(folder / "torchrun")
    summary = read_summary(directory)
    assert (summary["status"], summary["world_size"]) == ("done", 2)
    assert directory.name == local[1].name
    timed = ("time/", "tokens_per_s")
    rows, expected = (
        [{key: value for key, value in row.items() if not key.startswith(timed)} for row in read_metrics(path)]
        for path in (directory, local[1])
    )
    assert rows == expected
    assert all(" rank 0: " in line for line in (directory / "train.log").read_text().splitlines())


def test_a_number_of_workers_other_than_torchruns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    outcome = call(*tiny_job(tmp_path), "nproc=4")
    assert outcome == Outcome(1, "error: nproc=4, but the launcher started 2 workers; leave nproc out\n")
    assert not list((tmp_path / "runs").iterdir())


def notify_itself(world: World, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    (folder / f"worker{world.rank}").touch()


def test_a_notice_of_a_time_limit_is_not_for_the_workers(tmp_path: Path) -> None:
    start_workers(notify_itself, (tmp_path,), nproc=2)
    assert {path.name for path in tmp_path.iterdir()} == {"worker0", "worker1"}


def start_and_wait(folder: Path) -> tuple[subprocess.Popen[str], Path, list[int]]:
    """Start a long job with two workers, the same each time, and wait for some steps; its directory and workers.

    However the job was stopped before, it must go on from its last checkpoint.
    """
    runs = folder / "long"
    saved = max((path.name for path in runs.glob("*/checkpoints/step_*")), default=None)
    logged = len(read_log(runs))
    job = [part for part in tiny_job(folder) if not part.startswith("runs_dir=")]
    process = start(*job, f"runs_dir={runs}", "nproc=2", f"trainer.steps={STEPS}", "trainer.eval_every=null")
    deadline = time.monotonic() + DEADLINE_S
    first = int(saved.removeprefix("step_")) if saved else 0
    while not (read_log(runs)[logged:] and len(read_metrics(only_run(runs))) > first + 5):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no step was made: {finish(process).text}")
        time.sleep(0.02)
    directory = only_run(runs)
    begun = f"resuming from {directory / 'checkpoints' / saved}" if saved else "starting afresh"
    assert begun in read_log(runs)[logged]
    assert [row["step"] for row in read_metrics(directory)][: first + 5] == list(range(1, first + 6))
    return process, directory, workers_of(process.pid)


def read_log(runs: Path) -> list[str]:
    return [line for path in runs.glob("*/train.log") for line in path.read_text().splitlines()]


def workers_of(parent: int) -> list[int]:
    """The workers that a process has started, less multiprocessing's own helper."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def assert_gone(processes: list[int]) -> None:
    assert len(processes) == 2
    deadline = time.monotonic() + 30
    while any(is_alive(process) for process in processes):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.1)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_job_says_so(number: signal.Signals, folder: Path) -> None:
    process, directory, workers = start_and_wait(folder)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    sent = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - sent < 30
    assert_gone(workers)
    assert outcome.status not in (0, None)
    assert "Traceback" not in outcome.text, outcome.text
    assert "interrupted; with resume=auto the same command goes on from its last checkpoint" in outcome.text
    summary = read_summary(directory)
    assert (summary["status"], summary["error"]) == ("failed", f"interrupted: {number.name}")


def test_a_killed_worker_ends_the_job(folder: Path) -> None:
    process, directory, workers = start_and_wait(folder)
    os.kill(workers[1], signal.SIGKILL)
    outcome = finish(process)
    assert_gone(workers)
    assert outcome.status == 1 and "\nerror: " in outcome.text
    summary = read_summary(directory)
    assert summary["status"] == "failed" and summary["error"].endswith("terminated with signal SIGKILL")


def test_workers_end_with_a_killed_parent(folder: Path) -> None:
    process, _, workers = start_and_wait(folder)
    process.kill()
    process.wait()
    assert_gone(workers)
    finish(process)

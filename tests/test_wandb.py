"""The mirror in W&B: one run with the whole record, also after a resume, and no harm where W&B fails."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli import CHECKER, only_run, read_metrics, read_summary, run, tiny_job

pytestmark = pytest.mark.distributed

EVALUATED = [2, 4, 6]


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a job with two workers that lost its last steps and was resumed."""
    folder = tmp_path_factory.mktemp("wandb")
    job = [*tiny_job(folder), "optimizer=adamw", "logger=wandb", "nproc=2"]
    outcome = run(*job, WANDB_MODE="offline")
    assert outcome.status == 0, outcome.text
    directory = only_run(folder / "runs")
    (directory / "summary.json").unlink()
    shutil.rmtree(directory / "checkpoints" / "step_00000006")
    outcome = run(*job, WANDB_MODE="offline")
    assert outcome.status == 0 and "W&B is off" not in outcome.text, outcome.text
    assert "resuming from" in outcome.text
    return directory


def read_history(run_folder: Path) -> list[dict[str, Any]]:
    """What W&B's own reader finds logged in an offline run."""
    command = [str(Path(sys.executable).parent / "wandb"), "leet", "inspect", "--json", str(run_folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def test_one_offline_run_holds_every_evaluation(mirrored: Path) -> None:
    (offline,) = (mirrored / "wandb").glob("offline-run-*")
    assert not list((mirrored / "wandb").glob("run-*"))
    history = read_history(offline)
    evaluations = [row for row in history if "eval/loss" in row]
    expected = [row for row in read_metrics(mirrored) if "eval/loss" in row]
    assert [row["step"] for row in expected] == EVALUATED
    keys = ("step", "tokens", "comm/total_bytes", "comm/bytes", "train/loss", "eval/loss")
    assert [[row[key] for key in keys] for row in evaluations] == [[row[key] for key in keys] for row in expected]
    assert [row["step"] for row in history if "step" in row] == [1, 2, 3, 4, 5, 6]


def test_the_table_of_bytes_is_there(mirrored: Path) -> None:
    (path,) = mirrored.glob("wandb/offline-run-*/files/media/table/comm/by_role_*.table.json")
    table = json.loads(path.read_text())
    rows = [(role, kind, count) for role, kinds in read_summary(mirrored)["comm/by_role"].items()
            for kind, count in kinds.items()]  # fmt: skip
    assert table["columns"] == ["message", "block", "bytes"]
    assert [tuple(row) for row in table["data"]] == rows and sum(row[2] for row in rows) > 0


@pytest.mark.skipif(not CHECKER.is_file(), reason="shared/tools/check_run.py is not there")
def test_a_resumed_record_keeps_the_contract(mirrored: Path) -> None:
    checked = subprocess.run([sys.executable, str(CHECKER), str(mirrored)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("trouble", ["cannot write", "cannot connect"])
def test_a_run_ends_well_though_wandb_fails(trouble: str, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    environment: dict[str, Any] = {"WANDB_MODE": "offline"}
    if trouble == "cannot write":
        directory.mkdir()
        (directory / "wandb").write_text("in the way")
    else:
        environment = {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    start = time.monotonic()
    outcome = run(*tiny_job(tmp_path), "logger=wandb", f"hydra.run.dir={directory}", **environment)
    assert outcome.status == 0, outcome.text
    assert time.monotonic() - start < 180  # of which the job itself takes some
    assert read_summary(directory)["status"] == "done"
    assert [row["step"] for row in read_metrics(directory)] == [1, 2, 3, 4, 5, 6]
    assert "W&B is off for this run: " in (directory / "train.log").read_text()
    assert outcome.text.count("W&B is off for this run") == 1 and "Traceback" not in outcome.text, outcome.text

"""Dry runs by the command line: the bytes of the paper's Table 3, and the closed form at every step."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli import CHECKER, call, only_run, read_summary, tiny_job
from tests.jobs import METHODS
from train import build_model, build_optimizer
from tsr import Communicator
from tsr.accounting import step_elements

MODELS = ("llama_60m", "llama_130m", "llama_350m", "llama_1b")
# GB per step as Table 3 of arXiv 2602.08007 prints them, to its digits; one_sided is what GaLore would send if it
# projected before the reduction, by the formulas of its section 3.4.
PUBLISHED = {
    "adamw": ("0.1667", "0.4380", "1.3406", "5.0938"),
    "tsr": ("0.01966", "0.05856", "0.11479", "0.21298"),
    "galore": ("0.1667",),
    "one_sided": ("0.0913", "0.2132", "0.4395", "1.4942"),
}
CELLS = [(method, *cell) for method, row in PUBLISHED.items() for cell in zip(MODELS, row, strict=False)]
BYTES = ("comm/bytes_per_step", "comm/peak_bytes", "comm/total_bytes")
KEYS = {
    *("status", "steps", "tokens", "world_size", "duration_s", "params", "versions", "git_commit", "config_hash"),
    *(*BYTES, *(f"paper/{key}" for key in BYTES)),
    *("memory/optimizer_state_bytes", "memory/weight_bytes", "paper/memory_bytes"),
}


def dry_run(runs: Path, *arguments: str) -> dict[str, Any]:
    """The summary of a dry run, the only one in ``runs``."""
    status, text = call(f"runs_dir={runs}", "dry_run=true", *arguments)
    assert status == 0, text
    return read_summary(only_run(runs))


@pytest.mark.parametrize(("method", "model", "published"), CELLS)
def test_bytes_of_table_3(method: str, model: str, published: str, tmp_path: Path) -> None:
    cell = ["experiment=table3", f"model={model}", f"optimizer={method}", "refresh.oversampling=0", "world_size=8"]
    summary = dry_run(tmp_path, *cell)
    digits = len(published.split(".")[1])
    assert f"{summary['paper/comm/bytes_per_step'] / 1e9:.{digits}f}" == published


@pytest.mark.parametrize("method", [*METHODS, "tsr refresh.method=one_pass", "one_sided refresh.method=one_pass"])
def test_the_ledger_is_the_closed_form_of_all_steps(method: str, tmp_path: Path) -> None:
    """Intervals that differ by role and divide nothing: every kind of step is there."""
    job = [
        *tiny_job(tmp_path),
        *f"optimizer={method}".split(),
        "rank.head=12",
        "refresh.linear=3",
        "refresh.embedding=4",
        "refresh.head=5",
        "trainer.steps=50",
    ]
    summary = dry_run(tmp_path / "dry", *job[1:])
    config = yaml.safe_load((only_run(tmp_path / "dry") / "config.yaml").read_text())
    optimizer = build_optimizer(config, build_model(config, "meta"), Communicator())
    expected: Counter[tuple[str, str]] = Counter()
    peak = 0
    for step in range(1, 51):
        elements = step_elements(optimizer.blocks, step, reduce=optimizer.options.reduce, refresh=optimizer.refresh)
        expected += elements
        peak = max(peak, 4 * elements.total())
    found = {(role, kind): count for role, kinds in summary["comm/by_role"].items() for kind, count in kinds.items()}
    assert found == {key: 4 * count for key, count in expected.items()}
    assert summary["comm/total_bytes"] == 4 * expected.total() == 50 * summary["comm/bytes_per_step"]
    assert summary["comm/peak_bytes"] == peak


def test_world_size_changes_no_byte_and_every_key_is_there(tmp_path: Path) -> None:
    changing = {"world_size", "duration_s", "config_hash"}
    job = tiny_job(tmp_path)[1:]
    one = dry_run(tmp_path / "one", *job, "world_size=1")
    many = dry_run(tmp_path / "many", *job, "world_size=4")
    assert (one["world_size"], many["world_size"]) == (1, 4)
    assert {k: v for k, v in one.items() if k not in changing} == {k: v for k, v in many.items() if k not in changing}
    assert one.keys() >= KEYS and one["status"] == "done"
    assert one["tokens"] == 6 * 4 * 32


@pytest.mark.skipif(not CHECKER.is_file(), reason="shared/tools/check_run.py is not there")
def test_the_record_keeps_the_contract(tmp_path: Path) -> None:
    dry_run(tmp_path, "optimizer=tsr", "world_size=2")
    checked = subprocess.run([sys.executable, str(CHECKER), str(only_run(tmp_path))], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout

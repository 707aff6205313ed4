"""Golden losses: what each method computes does not change unnoticed.

`golden/METHOD.txt` holds a line ``step loss`` for each of 20 steps of llama_tiny on fixed rows, in float64 on one
worker. After a change that is meant to change them, write the files anew with

    TSR_WRITE_GOLDEN=1 python -m pytest tests/test_golden.py

and look at the difference. The tolerance leaves room for another processor's rounding, which low-rank methods amplify.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import data
from tests.jobs import METHODS, compose, make_rows, read_record, run_job

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("TSR_WRITE_GOLDEN") == "1"
CHANGES = {
    "model.hidden_size": 64,  # llama_tiny as it is, with a small vocabulary
    "model.intermediate_size": 176,
    "model.dtype": "fp64",
    "comm.dtype": "fp64",
    "trainer.steps": 20,
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> data.Prepared:
    return make_rows(tmp_path_factory.mktemp("data") / "packed", padded=False)


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_the_golden_ones(method: str, rows: data.Prepared, tmp_path: Path) -> None:
    run_job(compose(method, CHANGES), tmp_path, rows)
    losses = {row["step"]: row["train/loss"] for row in read_record(tmp_path).rows}
    assert losses[20] < losses[1] - 0.2  # it learns, so the losses say something about the updates
    file = GOLDEN / f"{method}.txt"
    if WRITE:
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(f"{step} {loss:.12f}\n" for step, loss in losses.items()))
    golden = dict(line.split() for line in file.read_text().splitlines())
    assert losses == pytest.approx({int(step): float(loss) for step, loss in golden.items()}, rel=1e-6, abs=0)

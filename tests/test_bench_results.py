"""The committed bench: every method's bytes are the ledger's, and the page shows the rows that are kept."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sweep.bench import cost, loss, memory, steps
from sweep.bench.cells import CONTESTANTS, Row
from sweep.bench.cost_model import hold_out
from sweep.bench.report import write
from sweep.bench.rows import read_rows
from sweep.report import put
from sweep.tables import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "sweep/results/bench"
WIRE_TOLERANCE = 0.03
COST_TOLERANCE = 0.15


def rows_of(name: str) -> list[Row]:
    return read_rows(RESULTS / name, Row)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("method", [name for name in CONTESTANTS if not name.endswith("_late")])
def test_interfaces_sent_what_the_ledger_says(method: str, workers: int) -> None:
    cells = [row for row in rows_of("bench.csv") if (row.method, row.workers) == (method, workers)]
    assert cells
    for cell in cells:
        assert cell.wire_ratio == pytest.approx(1, abs=WIRE_TOLERANCE)


@pytest.mark.parametrize(
    ("name", "marker", "title"),
    [
        ("bench.csv", "bench", "llama_60m, 1 × 16 tokens × 1 a worker and step"),
        ("work.csv", "bench-work", "llama_60m, 16 × 256 tokens × 1 a worker and step"),
        ("overlap.csv", "bench-overlap", "llama_60m, 1 × 256 tokens × 1 a worker and step"),
    ],
)
def test_the_page_shows_the_cells(name: str, marker: str, title: str, tmp_path: Path) -> None:
    page = copied_page(tmp_path)
    write(rows_of(name), tmp_path, title=title, judge_name="hosts' interfaces", readme=(str(page), marker))
    assert page.read_text() == (ROOT / "README.md").read_text()


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def read_loss(path: Path) -> list[loss.Reached]:
    return read_rows(path, loss.Reached)


@pytest.mark.parametrize(
    ("name", "marker", "read", "table"),
    [
        ("loss.csv", "bench-loss", read_loss, loss.table),
        ("steps-llama_60m.json", "bench-steps", read_json, steps.table),
        ("memory.json", "bench-memory", read_json, memory.table),
        ("steps-llama_350m.json", "bench-steps-350m", read_json, steps.table),
    ],
)
def test_the_page_shows_the_results(
    name: str, marker: str, read: Callable[[Path], Any], table: Callable[[Any], Table], tmp_path: Path
) -> None:
    page = copied_page(tmp_path)
    put((str(page), marker), table(read(RESULTS / name)).markdown())
    assert page.read_text() == (ROOT / "README.md").read_text()


def test_the_page_shows_what_the_cost_model_says(tmp_path: Path) -> None:
    page = copied_page(tmp_path)
    assert cost.main([str(RESULTS / "bench.csv"), "--out", str(tmp_path), "--readme", str(page), "bench-cost"]) == 0
    assert page.read_text() == (ROOT / "README.md").read_text()
    assert (tmp_path / "cost.md").read_text() == (RESULTS / "cost.md").read_text()


def test_the_cost_model_predicts_cells_that_it_has_not_seen() -> None:
    errors = [abs(cell.error) for cell in hold_out(rows_of("bench.csv"))]
    assert statistics.median(errors) <= COST_TOLERANCE


def copied_page(folder: Path) -> Path:
    return Path(shutil.copy(ROOT / "README.md", folder))

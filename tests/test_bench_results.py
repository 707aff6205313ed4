"""The committed bench: every method's bytes are the ledger's, and the page shows the rows that are kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sweep.bench.cells import CONTESTANTS, Row
from sweep.bench.report import write
from sweep.bench.rows import read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "sweep/results/bench"
WIRE_TOLERANCE = 0.03


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
        ("work.csv", "bench-work", "llama_60m, 12 × 256 tokens × 1 a worker and step"),
    ],
)
def test_the_page_shows_the_rows(name: str, marker: str, title: str, tmp_path: Path) -> None:
    page = Path(shutil.copy(ROOT / "README.md", tmp_path))
    write(rows_of(name), tmp_path, title=title, judge_name="hosts' interfaces", readme=(str(page), marker))
    assert page.read_text() == (ROOT / "README.md").read_text()

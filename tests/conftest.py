"""Settings of the whole suite: one thread a process, since workers share few cores."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, so before it is

import pytest
import torch

if TYPE_CHECKING:
    from data import Prepared

torch.set_num_threads(1)


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a report's tables alone: drawing takes most of its time."""
    monkeypatch.setattr("sweep.report.draw_report", lambda *_, **__: [])


@pytest.fixture(scope="session")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """40 padded rows: with 8 a step, an epoch is 5 steps."""
    from tests.jobs import make_rows

    return make_rows(tmp_path_factory.mktemp("data") / "padded", padded=True)

"""Settings of the whole suite: one thread a process, since workers share few cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, so before it is

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a report's tables alone: drawing takes most of its time."""
    monkeypatch.setattr("sweep.report.draw_report", lambda *_, **__: [])

"""Time, on the clock of the device that does the work; on a GPU measured without waiting for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = float | torch.cuda.Event


def mark(device: torch.device) -> Mark:
    """Now: on a GPU, the moment at which its current stream comes here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to a later one of the same device; waits for the later one."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


@dataclass(frozen=True)
class Lap:
    """Stretches of time, to be added up when the work is over."""

    stretches: tuple[tuple[Mark, Mark], ...]

    @property
    def seconds(self) -> float:
        """Their sum; waits for the end of the last."""
        return sum((seconds_between(start, end) for start, end in self.stretches), 0.0)

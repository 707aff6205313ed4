"""A dry run: the very optimizer code on meta tensors and a fake process group.

It yields the ledger and the state's size at any model and world size in seconds. Each distinct kind of step (which
blocks refresh) is executed once and counted as often as the schedule has it; this is sound because a step never
branches on the value of a tensor.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from tsr.communicator import Communicator
from tsr.ledger import Ledger


class DryRunnable(Protocol):
    """What an optimizer must offer for a dry run."""

    communicator: Communicator
    updates: int
    param_groups: list[dict[str, object]]

    def step_kind(self, step: int) -> Hashable: ...

    def step(self) -> object: ...


@contextlib.contextmanager
def fake_workers(world_size: int) -> Iterator[None]:
    """A process group of ``world_size`` workers of which only this one exists; collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def count_bytes(optimizer: DryRunnable, *, steps: int) -> Ledger:
    """The ledger of ``steps`` steps of an optimizer over meta parameters."""
    kinds: dict[Hashable, int] = {}
    times: Counter[Hashable] = Counter()
    for step in range(1, steps + 1):
        kind = optimizer.step_kind(step)
        kinds.setdefault(kind, step)
        times[kind] += 1
    ledger = Ledger()
    for kind, step in kinds.items():
        for group in optimizer.param_groups:
            for parameter in group["params"]:  # type: ignore[attr-defined]  # a param group's values are untyped
                parameter.grad = torch.empty_like(parameter)
        optimizer.updates = step - 1
        optimizer.step()
        ledger.add(optimizer.communicator.ledger.last, times=times[kind])
    return ledger

"""Serving: which row is where in which global batch, and each rank's part of it.

Global batch ``step`` (from 1) of B rows holds the positions (step - 1) B to step B - 1 of one endless sequence of rows:
epoch after epoch, each in its own random order. Where epochs are whole, as for labelled examples, a batch does not
reach into the next epoch: the last one holds what is left. A rank takes a contiguous slice of the batch. So the content
of a step depends on (data seed, step) alone, not on the ranks, the loader's workers, or where the run was started, and
there is no loader state to save.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset


class Source(Dataset[Any], ABC):
    """Rows to serve: `data.rows.Rows` or `data.examples.Examples`.

    ``whole_epochs``: a batch never holds rows of two epochs. ``by_length``: rows have no common length, so that those
    of like length are put into one micro-batch.
    """

    whole_epochs: bool
    by_length: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def lengths(self) -> NDArray[Any]:
        """Real tokens of each row, [N]."""

    @abstractmethod
    def collate(self, rows: Sequence[Any]) -> Any:
        """Rows as one batch."""

    @abstractmethod
    def count(self, indices: NDArray[np.int64]) -> tuple[int, int, int]:
        """Real tokens, positions and loss tokens of these rows."""


@dataclass(frozen=True)
class GlobalStep:
    """One global batch as a rank sees it: its own rows in ``micro_batches`` (none, if there are fewer rows than ranks),
    and the real tokens, positions and loss tokens of the whole batch, over all ranks."""

    step: int
    micro_batches: list[Any]
    tokens: int
    positions: int
    loss_tokens: int


@lru_cache(maxsize=2)  # a batch, or the loader's read-ahead, may span two epochs
def permutation(rows: int, *, data_seed: int, epoch: int) -> NDArray[Any]:
    """The order of ``rows`` rows in an epoch, [rows], in the smallest type that holds it (184 MB for 46 million)."""
    order = np.arange(rows, dtype=np.min_scalar_type(rows - 1))
    np.random.Generator(np.random.PCG64(np.random.SeedSequence([data_seed, epoch]))).shuffle(order)
    order.setflags(write=False)
    return order


def step_rows(
    step: int, *, rows: int, data_seed: int, global_batch: int, whole_epochs: bool = False
) -> NDArray[np.int64]:
    """The rows of global batch ``step`` (from 1), in order: [global_batch], or fewer at the end of a whole epoch."""
    if whole_epochs:
        epoch, place = divmod(step - 1, steps_of_epoch(rows, global_batch=global_batch))
        order = permutation(rows, data_seed=data_seed, epoch=epoch)
        return order[place * global_batch : (place + 1) * global_batch].astype(np.int64)
    positions = np.arange((step - 1) * global_batch, step * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(positions, rows)
    parts = [
        permutation(rows, data_seed=data_seed, epoch=int(epoch))[offsets[epochs == epoch]]
        for epoch in np.unique(epochs)
    ]
    return np.concatenate(parts).astype(np.int64)


def steps_of_epoch(rows: int, *, global_batch: int) -> int:
    """Batches that hold every row once; the last one may be smaller."""
    return math.ceil(rows / global_batch)


def rank_slice(count: int, *, rank: int, world_size: int) -> range:
    """A rank's part of ``count`` things; parts differ by one at most, and with too few things some ranks get none."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def _own(source: Source, indices: NDArray[np.int64], size: int, *, rank: int, world_size: int) -> list[list[int]]:
    """A rank's part of ``indices``, in micro-batches of ``size`` rows, the last one of what is left."""
    part = rank_slice(len(indices), rank=rank, world_size=world_size)
    own = indices[part.start : part.stop]
    if source.by_length:
        own = own[np.argsort(source.lengths[own], kind="stable")]
    return [own[start : start + size].tolist() for start in range(0, len(own), size)]


def training_steps(
    source: Source,
    *,
    data_seed: int,
    global_batch: int,
    micro_batch: int,
    rank: int,
    world_size: int,
    first_step: int,
    last_step: int,
    num_workers: int = 0,
) -> Iterator[GlobalStep]:
    """The steps ``first_step`` to ``last_step``, both included, with this rank's rows in micro-batches.

    Starting in the middle costs nothing. ``num_workers`` processes read ahead; the sequence is the same for any number.
    """
    assert first_step >= 1 and global_batch >= 1 and micro_batch >= 1 and 0 <= rank < world_size

    def whole_batch(step: int) -> NDArray[np.int64]:
        return step_rows(
            step,
            rows=len(source),
            data_seed=data_seed,
            global_batch=global_batch,
            whole_epochs=source.whole_epochs,
        )

    own = partial(_own, source, size=micro_batch, rank=rank, world_size=world_size)
    steps = range(first_step, last_step + 1)
    loader: DataLoader[Any] = DataLoader(
        source,
        batch_sampler=(indices for step in steps for indices in own(whole_batch(step))),
        collate_fn=source.collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # the loader draws a seed for its workers: not from the global generator
    )
    batches = iter(loader)
    for step in steps:
        indices = whole_batch(step)
        tokens, positions, loss_tokens = source.count(indices)
        yield GlobalStep(
            step=step,
            micro_batches=[next(batches) for _ in own(indices)],
            tokens=tokens,
            positions=positions,
            loss_tokens=loss_tokens,
        )


def evaluation_batches(
    source: Source, *, micro_batch: int, rank: int, world_size: int, max_rows: int | None = None
) -> Iterator[Any]:
    """This rank's part of the first ``max_rows`` rows (None: all); over all ranks, every row exactly once."""
    count = len(source) if max_rows is None else min(max_rows, len(source))
    for part in _own(source, np.arange(count), micro_batch, rank=rank, world_size=world_size):
        yield source.collate([source[index] for index in part])

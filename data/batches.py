"""Serving: which row is where in which global batch, and each rank's part of it.

Global batch ``step`` (from 1) of B rows holds the positions (step - 1) B to step B - 1 of one endless sequence of rows:
epoch after epoch, each in its own random order. A rank takes a contiguous slice of the batch. So the content of a step
depends on (data seed, step) alone, not on the ranks, the loader's workers, or where the run was started, and there is
no loader state to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

from data.rows import Rows


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass: ``tokens`` int64 [b, T]; the first ``lengths`` (int64 [b]) of each row are real."""

    tokens: torch.Tensor
    lengths: torch.Tensor

    @property
    def loss_tokens(self) -> int:
        """Positions that have a next token to predict."""
        return int(self.lengths.sum()) - len(self.lengths)

    def to(self, device: torch.device) -> Batch:
        """The same rows on ``device``."""
        return Batch(self.tokens.to(device), self.lengths.to(device))


@dataclass(frozen=True)
class GlobalStep:
    """One global batch as a rank sees it: its own rows in ``micro_batches`` (none, if there are fewer rows than ranks),
    and the real tokens, positions and loss tokens of the whole batch, over all ranks."""

    step: int
    micro_batches: list[Batch]
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


def step_rows(step: int, *, rows: int, data_seed: int, global_batch: int) -> NDArray[np.int64]:
    """The rows of global batch ``step`` (from 1), in order, [global_batch]."""
    positions = np.arange((step - 1) * global_batch, step * global_batch, dtype=np.int64)
    epochs, offsets = np.divmod(positions, rows)
    parts = [
        permutation(rows, data_seed=data_seed, epoch=int(epoch))[offsets[epochs == epoch]]
        for epoch in np.unique(epochs)
    ]
    return np.concatenate(parts).astype(np.int64)


def rank_slice(count: int, *, rank: int, world_size: int) -> range:
    """A rank's part of ``count`` things; parts differ by one at most, and with too few things some ranks get none."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def _chunks(indices: list[int], size: int) -> Iterator[list[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


def _collate(samples: list[tuple[torch.Tensor, int]]) -> Batch:
    tokens, lengths = zip(*samples, strict=True)
    return Batch(torch.stack(tokens), torch.tensor(lengths, dtype=torch.int64))


def training_steps(
    rows: Rows,
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
    mine = rank_slice(global_batch, rank=rank, world_size=world_size)

    def whole_batch(step: int) -> NDArray[np.int64]:
        return step_rows(step, rows=len(rows), data_seed=data_seed, global_batch=global_batch)

    def micro_batches(step: int) -> Iterator[list[int]]:
        return _chunks(whole_batch(step)[mine.start : mine.stop].tolist(), micro_batch)

    steps = range(first_step, last_step + 1)
    loader = DataLoader(
        rows,
        batch_sampler=(indices for step in steps for indices in micro_batches(step)),
        collate_fn=_collate,
        num_workers=num_workers,
        generator=torch.Generator(),  # the loader draws a seed for its workers: not from the global generator
    )
    batches = iter(loader)
    for step in steps:
        lengths = rows.lengths[whole_batch(step)]
        tokens = int(lengths.sum(dtype=np.int64))
        yield GlobalStep(
            step=step,
            micro_batches=[next(batches) for _ in range(0, len(mine), micro_batch)],
            tokens=tokens,
            positions=global_batch * rows.sequence_length,
            loss_tokens=tokens - global_batch,
        )


def evaluation_batches(
    rows: Rows, *, micro_batch: int, rank: int, world_size: int, max_rows: int | None = None
) -> Iterator[Batch]:
    """This rank's part of the first ``max_rows`` rows (None: all); over all ranks, every row exactly once."""
    count = len(rows) if max_rows is None else min(max_rows, len(rows))
    for indices in _chunks(list(rank_slice(count, rank=rank, world_size=world_size)), micro_batch):
        yield _collate([rows[index] for index in indices])

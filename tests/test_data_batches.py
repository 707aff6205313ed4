"""Serving rows: every row once, and the same sequence for any world size, any number of workers and any start."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from data.batches import evaluation_batches, permutation, rank_slice, step_rows, training_steps
from data.rows import Rows

T = 4


def make_rows(folder: Path, count: int) -> Rows:
    """Row i holds i everywhere and has 1 + i % T real tokens."""
    folder.mkdir(exist_ok=True)
    np.repeat(np.arange(count, dtype=np.uint16), T).tofile(folder / "train.tokens")
    (1 + np.arange(count) % T).astype(np.uint32).tofile(folder / "train.lengths")
    (folder / "meta.json").write_text(json.dumps({"sequence_length": T, "dtype": "uint16", "train": {"rows": count}}))
    return Rows(folder, "train")


def served(rows: Rows, **overrides: int) -> list[list[int]]:
    """The row numbers of each step, micro-batches joined."""
    arguments = dict(data_seed=3, global_batch=5, micro_batch=2, rank=0, world_size=1, first_step=1, last_step=9)
    steps = training_steps(rows, **(arguments | overrides))
    return [[i for batch in step.micro_batches for i in batch.tokens[:, 0].tolist()] for step in steps]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("count", [7, 8])
def test_an_epoch_over_all_ranks_and_workers_is_the_data_set(
    tmp_path: Path, count: int, world_size: int, workers: int
) -> None:
    rows = make_rows(tmp_path, count)
    ranks = [
        served(rows, global_batch=count, last_step=2, rank=rank, world_size=world_size, num_workers=workers)
        for rank in range(world_size)
    ]
    epochs = [[i for part in step for i in part] for step in zip(*ranks, strict=True)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 2
    assert epochs[0] != epochs[1]
    assert epochs == served(rows, global_batch=count, last_step=2)


def test_batches_span_epochs_without_loss(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, 7)
    sequence = [i for step in served(rows, global_batch=5, last_step=7) for i in step]
    assert [sorted(sequence[start : start + 7]) for start in range(0, 35, 7)] == [list(range(7))] * 5
    assert sorted(step_rows(1, rows=2, data_seed=0, global_batch=6)) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_start_in_the_middle_needs_no_replay(tmp_path: Path, workers: int) -> None:
    rows = make_rows(tmp_path, 7)
    assert served(rows, first_step=5, num_workers=workers) == served(rows)[4:]


def test_the_data_seed_alone_sets_the_order() -> None:
    first = permutation(100, data_seed=0, epoch=0)
    assert (first == permutation(100, data_seed=0, epoch=0)).all()
    assert (first != permutation(100, data_seed=1, epoch=0)).any()
    assert first.dtype == np.uint8


def test_the_global_generator_is_left_alone(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    served(make_rows(tmp_path, 7))
    assert torch.equal(state, torch.get_rng_state())


def test_micro_batches_and_global_counts(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, 8)
    whole = {i: 1 + i % T for i in range(8)}
    for rank in range(2):
        (step,) = training_steps(
            rows, data_seed=0, global_batch=8, micro_batch=3, rank=rank, world_size=2, first_step=1, last_step=1
        )
        assert [len(batch.tokens) for batch in step.micro_batches] == [3, 1]
        assert (step.step, step.tokens, step.positions, step.loss_tokens) == (1, sum(whole.values()), 32, 12)
        for batch in step.micro_batches:
            assert batch.tokens.dtype == batch.lengths.dtype == torch.int64
            assert batch.lengths.tolist() == [whole[i] for i in batch.tokens[:, 0].tolist()]


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    ranks = [served(make_rows(tmp_path, 7), global_batch=2, last_step=3, rank=r, world_size=4) for r in range(4)]
    assert [sum(len(step[i]) for step in ranks) for i in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("world_size", [1, 2, 4, 9])
@pytest.mark.parametrize("max_rows", [None, 5])
def test_evaluation_sees_every_row_once(tmp_path: Path, world_size: int, max_rows: int | None) -> None:
    rows = make_rows(tmp_path, 7)
    seen = [
        i
        for rank in range(world_size)
        for batch in evaluation_batches(rows, micro_batch=2, rank=rank, world_size=world_size, max_rows=max_rows)
        for i in batch.tokens[:, 0].tolist()
    ]
    assert seen == list(range(max_rows or 7))


def test_slices_are_even_at_64_ranks_and_46_million_rows() -> None:
    slices = [rank_slice(46_000_001, rank=rank, world_size=64) for rank in range(64)]
    assert slices[0].start == 0 and slices[-1].stop == 46_000_001
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    assert {len(part) for part in slices} == {718_750, 718_751}


def test_rows_travel_to_other_processes_without_their_data(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, 8)
    tokens, length = rows[6]
    assert (tokens.tolist(), length) == ([6] * T, 3)
    copy = pickle.loads(pickle.dumps(rows))
    assert copy._tokens is None and torch.equal(copy[6][0], tokens)

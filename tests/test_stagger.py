"""Refreshes spread over the steps: no peak, the same bytes, every block as often as before."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from sweep.cells import compose
from tests.distributed import CHOICES, make_optimizer, make_toy
from train import build_model, build_optimizer
from tsr import Block, Communicator, LowRankAdam, RefreshRule
from tsr.accounting import step_elements
from tsr.harness.dryrun import count_bytes
from tsr.refresh import staggered


def blocks(*shapes: tuple[int, int, int, int]) -> list[Block]:
    """Two-sided blocks of (m, n, r, K)."""
    return [
        Block(f"w{i}", nn.Parameter(torch.empty(m, n, device="meta")), "linear", "two_sided", rank, interval)
        for i, (m, n, rank, interval) in enumerate(shapes)
    ]


def load(members: list[Block], rule: RefreshRule, step: int) -> int:
    """Elements of the sketches of a step."""
    return sum(
        count for (role, _), count in step_elements(members, step, reduce="projected", refresh=rule).items()
        if role == "sketch"
    )  # fmt: skip


def test_for_an_svd_a_block_weighs_its_gradient() -> None:
    # By gradients (64 x 64 = 4096 and twice 1000 x 2) the square block is apart from both others; by sketches it is the
    # lightest, and would share a step with the second.
    wanted = blocks((1000, 2, 1, 2), (1000, 2, 1, 2), (64, 64, 1, 2))
    tall, other, square = (block.offset for block in staggered(wanted, RefreshRule(method="svd", oversampling=0)))
    assert tall == other != square
    tall, other, square = (block.offset for block in staggered(wanted, RefreshRule(oversampling=0)))
    assert tall != other


@pytest.mark.parametrize("phase", [0, 1])
def test_every_block_refreshes_at_the_first_step_and_then_once_an_interval(phase: int) -> None:
    rule = RefreshRule(phase=phase)
    members = staggered(blocks((64, 32, 4, 6), (32, 64, 4, 6), (500, 32, 4, 3), (16, 16, 4, 12)), rule)
    for block in members:
        due = [step for step in range(1, 100) if rule.due(step, block.interval, block.offset)]
        assert due[0] == 1
        assert {later - earlier for earlier, later in itertools.pairwise(due[1:])} == {block.interval}
        for step in range(1, 100):
            assert rule.age(step, block.interval, block.offset) == step - max(d for d in due if d <= step) + 1


def test_the_heaviest_blocks_do_not_meet_and_the_load_is_level() -> None:
    rule = RefreshRule()
    members = staggered(
        blocks((32000, 512, 64, 2), (32000, 512, 64, 100), *[(512, 512, 256, 100)] * 32, *[(1376, 512, 256, 100)] * 24),
        rule,
    )
    steps = range(101, 301)
    for step in steps:
        assert sum(rule.due(step, block.interval, block.offset) for block in members[:2]) <= 1
    refreshed = Counter(step for step in steps for block in members[2:] if rule.due(step, block.interval, block.offset))
    assert max(refreshed.values()) == 2  # 56 blocks, and of 100 steps the embedding has 50
    together = max(load(blocks((32000, 512, 64, 2)), rule, 101), 0)
    assert max(load(members, rule, step) for step in steps) < 1.2 * together


def test_intervals_that_never_meet_again_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"refresh.stagger=true needs intervals .* got 997, 1009"):
        staggered(blocks((9, 9, 4, 997), (9, 9, 4, 1009)), RefreshRule())
    with pytest.raises(ValueError, match=r"refresh.stagger must be true, or false or null"):
        make_optimizer("tsr", make_toy(), refresh={"stagger": "yes"})


def test_after_the_first_interval_the_peak_of_table_3_is_near_the_mean() -> None:
    """The 60M setting with a low-rank head: 14.7 MB of cores a step, embedding and head of 9.0 MB a sketch."""
    peaks = {}
    for stagger in ("null", "true"):
        config = compose(
            *("experiment=table3", "model=llama_60m", "optimizer=tsr", "rank.head=64", f"refresh.stagger={stagger}")
        )
        optimizer: LowRankAdam = build_optimizer(config, build_model(config, "meta"), Communicator())
        first = 1 + max(optimizer.refresh.phase, config["refresh"]["linear"])
        sizes = [
            4 * sum(step_elements(optimizer.blocks, step, reduce="projected", refresh=optimizer.refresh).values())
            for step in range(1, 4 * config["refresh"]["linear"] + 1)
        ]
        later = sizes[first:]
        peaks[stagger] = max(later) / (sum(later) / len(later))
        assert sizes[0] == max(sizes)
    assert peaks["true"] <= 1.3 < peaks["null"]


def test_a_dry_run_counts_what_steps_send() -> None:
    """Each kind of step once, as often as the schedule has it."""
    choices = {**CHOICES, "refresh": {"linear": 4, "embedding": 6, "stagger": True}}
    counted = make_optimizer("tsr", make_toy().to("meta"), refresh=choices["refresh"])
    stepped = make_optimizer("tsr", make_toy().to("meta"), refresh=choices["refresh"])
    assert len({block.offset for block in counted.blocks if block.is_low_rank}) > 2
    ledger = count_bytes(counted, steps=30)
    for step in range(1, 31):
        for block in stepped.blocks:
            block.parameter.grad = torch.empty_like(block.parameter)
        stepped.step()
        assert stepped.communicator.ledger.last.elements == step_elements(
            stepped.blocks, step, reduce="projected", refresh=stepped.refresh
        )
    assert ledger.summary() == stepped.communicator.ledger.summary()

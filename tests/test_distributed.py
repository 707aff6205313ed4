"""What must hold over workers: the bytes, the equality of ranks, and the run itself, whatever the number of workers.

Three counts of the bytes are made independently: the closed form from shapes, the ledger where messages are packed, and
an oracle on the dispatcher that sees the collectives.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed import (
    CHOICES,
    METHODS,
    ROWS,
    VARIANTS,
    CollectiveOracle,
    Toy,
    backward,
    global_batch,
    make_optimizer,
    make_toy,
    run,
)
from tsr import Communicator, LowRankAdam
from tsr.accounting import step_elements

WIRES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"dtype": "bf16"}, "buckets": {"bucket_mib": 1 / 1024}}
COMBINATIONS = [(variant, "fp32") for variant in VARIANTS]
COMBINATIONS += [(method, wire) for method in ("galore", "tsr") for wire in ("bf16", "buckets")]
INVARIANT = [*METHODS, "previous", "rotate", "reset", "one_pass", "one_pass_previous", "one_pass_one_sided"]
STEPS = 5  # with intervals 2 and 3: every combination of refreshes

Elements = dict[tuple[str, str], int]


class Count(NamedTuple):
    """One step: what the ledger and what the oracle say."""

    elements: Elements
    bytes: Elements
    paper: int
    dispatched: int
    calls: int


def count_steps(variant: str, wire: str) -> list[Count]:
    model = make_toy()
    communicator = Communicator(**WIRES[wire])
    optimizer = make_optimizer(variant, model, communicator=communicator)
    counts = []
    for step in range(1, STEPS + 1):
        backward(model, step, rank=communicator.rank, world_size=communicator.world_size)
        with CollectiveOracle() as oracle:
            optimizer.step()
        last = communicator.ledger.last
        counts.append(Count(dict(last.elements), dict(last.bytes), last.paper, oracle.total, oracle.calls.total()))
        with CollectiveOracle() as oracle:
            communicator.total([1.0, 2.0], purpose="evaluation")
        assert oracle.total == (16 if dist.is_initialized() else 0)
    assert communicator.ledger.other == {"evaluation": 16 * STEPS}
    assert communicator.ledger.total_bytes == sum(sum(count.bytes.values()) for count in counts)
    return counts


def count_all() -> dict[tuple[str, str], list[Count]]:
    return {(variant, wire): count_steps(variant, wire) for variant, wire in COMBINATIONS}


@functools.cache
def counts_of_a_world(world_size: int) -> list[dict[tuple[str, str], list[Count]]]:
    return run(world_size, count_all)


def closed_form(optimizer: LowRankAdam, step: int) -> Elements:
    return dict(step_elements(optimizer.blocks, step, reduce=optimizer.options.reduce, refresh=optimizer.refresh))


def check_counts(counts: dict[tuple[str, str], list[Count]], *, connected: bool) -> None:
    for (variant, wire), steps in counts.items():
        optimizer = make_optimizer(variant, make_toy())
        itemsize = 2 if wire == "bf16" else 4
        for step, count in enumerate(steps, start=1):
            expected = closed_form(optimizer, step)
            where = f"{variant} on {wire}, step {step}"
            assert count.elements == expected, where
            assert count.bytes == {key: number * itemsize for key, number in expected.items()}, where
            assert count.dispatched == (sum(expected.values()) * itemsize if connected else 0), where
            seen = sum(number for (_, kind), number in expected.items() if kind in ("linear", "embedding"))
            assert count.paper == 4 * seen, where


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_ledger_dispatcher_and_closed_form_agree_to_the_byte(world_size: int) -> None:
    for counts in counts_of_a_world(world_size):
        check_counts(counts, connected=True)


def test_ledger_needs_no_process_group() -> None:
    check_counts(count_all(), connected=False)


def test_closed_form_by_hand() -> None:
    """The numbers themselves, so that a mistake common to all counts shows."""
    optimizer = make_optimizer("tsr", make_toy())
    dense = {("dense", "head"): 40 * 12, ("dense", "vector"): 12, ("dense", "linear"): 3 * 12}
    core = {("core", "embedding"): 3 * 3, ("core", "linear"): 4 * 4 * 4}
    linear = (20 + 12) * 9 + (12 + 20) * 9 + (12 + 12) * 9 + (9 + 12) * 9  # k = r + p = 4 + 5
    embedding = (40 + 12) * 8
    of_linear, of_embedding = {("sketch", "linear"): linear}, {("sketch", "embedding"): embedding}
    assert closed_form(optimizer, 1) == dense | core | of_linear | of_embedding
    assert closed_form(optimizer, 2) == dense | core
    assert closed_form(optimizer, 3) == dense | core | of_linear
    assert closed_form(optimizer, 4) == dense | core | of_embedding

    once = make_optimizer("one_pass", make_toy())
    linear = (20 * 9 + 19 * 12) + (12 * 9 + 12 * 20) + (12 * 9 + 12 * 12) + (9 * 9 + 9 * 12)  # l = min(2 k + 1, m)
    embedding = 40 * 8 + 17 * 12
    of_linear, of_embedding = {("sketch", "linear"): linear}, {("sketch", "embedding"): embedding}
    core_of_linear, core_of_embedding = ({("core", kind): core["core", kind]} for kind in ("linear", "embedding"))
    assert closed_form(once, 1) == dense | of_linear | of_embedding
    assert closed_form(once, 2) == dense | core
    assert closed_form(once, 3) == dense | of_linear | core_of_embedding
    assert closed_form(once, 4) == dense | core_of_linear | of_embedding


@pytest.mark.distributed
def test_a_step_is_one_all_reduce_and_a_refresh_two_more() -> None:
    counts = counts_of_a_world(2)[0]

    def calls(variant: str) -> list[int]:
        return [count.calls for count in counts[variant, "fp32"]]

    assert calls("adamw") == calls("galore") == [1, 1, 1, 1, 1]
    assert calls("one_sided") == [2, 1, 2, 1, 2]  # linear blocks refresh at 1, 3, 5
    assert calls("tsr_svd") == [2, 1, 2, 2, 2]  # and the embedding at 1, 4
    assert calls("tsr") == [3, 1, 3, 3, 3]
    assert calls("tsr_paper") == [2, 2, 2, 2, 1]  # Q and B travel together; phase 0: linear 1, 2, 4, embedding 1, 3
    assert calls("one_pass") == [2, 1, 2, 2, 2]  # Y and W travel together
    assert calls("power") == [7, 1, 7, 7, 7]
    assert sum(count.calls for count in counts["tsr", "buckets"]) > sum(calls("tsr"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_dry_run_sends_what_a_run_sends(variant: str) -> None:
    """Meta tensors and a fake group of 8: the optimizer's own code, without data or memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with torch.device("meta"):
            model = Toy(width=300)
        optimizer = make_optimizer(variant, model)
        assert optimizer.communicator.world_size == 8
        for step in range(1, STEPS + 1):
            with CollectiveOracle() as oracle:
                optimizer.step()
            expected = closed_form(optimizer, step)
            assert optimizer.communicator.ledger.last.elements == expected
            assert oracle.total == 4 * sum(expected.values())
    finally:
        dist.destroy_process_group()


def flatten(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(variant: str, steps: int, accumulation: int = 1) -> tuple[Tensor, list[float]]:
    """Parameters and global losses of a run in float64, whatever the number of workers."""
    model = make_toy(torch.float64)
    communicator = Communicator(dtype="fp64")
    optimizer = make_optimizer(variant, model, communicator=communicator)
    losses = []
    for step in range(1, steps + 1):
        share = backward(
            model, step, rank=communicator.rank, world_size=communicator.world_size, accumulation=accumulation
        )
        losses.append(communicator.total([share], purpose="logging")[0] / communicator.world_size)
        optimizer.step()
    return flatten(model), losses


def train_all(steps: int, accumulation: int = 1) -> dict[str, tuple[Tensor, list[float]]]:
    return {variant: train(variant, steps, accumulation) for variant in INVARIANT}


def deviation(ours: Tensor, reference: Tensor) -> float:
    start = flatten(make_toy(torch.float64))
    return float((ours - reference).norm() / (reference - start).norm())


def test_rows_of_a_batch_differ_in_loss_tokens() -> None:
    """Or else means of means would pass for the mean below."""
    counts = (global_batch(1)[1] >= 0).sum(1)
    assert len(counts.unique()) == ROWS


@pytest.mark.distributed
def test_the_run_does_not_depend_on_how_the_global_batch_is_split() -> None:
    """By workers, and by micro-batches; in float64, for a refresh amplifies rounding in float32."""
    steps = 20
    reference = train_all(steps)
    splits = {
        "2 workers": run(2, train_all, steps),
        "4 workers": run(4, train_all, steps),
        "4 micro-batches": [train_all(steps, 4)],
    }
    for split, ranks in splits.items():
        for variant in INVARIANT:
            parameters, losses = ranks[0][variant]
            if variant == "tsr_paper" and "workers" in split:
                continue
            assert deviation(parameters, reference[variant][0]) <= 1e-6, f"{variant}, {split}"
            assert losses == pytest.approx(reference[variant][1], rel=1e-6), f"{variant}, {split}"

    # To the letter, Algorithm 1 averages the workers' own bases, and the mean of orthonormal matrices is shorter than
    # they are: its result depends on the number of workers.
    assert deviation(splits["2 workers"][0]["tsr_paper"][0], reference["tsr_paper"][0]) > 1e-2
    assert deviation(splits["4 workers"][0]["tsr_paper"][0], splits["2 workers"][0]["tsr_paper"][0]) > 1e-2


def digest(optimizer: LowRankAdam) -> str:
    """Of every bit of parameters, state and gradient norm."""
    tensors = [block.parameter.detach() for block in optimizer.blocks]
    tensors += [value for block in optimizer.blocks for value in optimizer.state[block.parameter].values()]
    tensors.append(optimizer.grad_norm)
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def digests() -> dict[tuple[str, str, torch.dtype], list[str]]:
    seen: dict[tuple[str, str, torch.dtype], list[str]] = {}
    for (variant, wire), dtype in itertools.product(COMBINATIONS, (torch.float32, torch.bfloat16)):
        model = make_toy(dtype)
        communicator = Communicator(**WIRES[wire])
        optimizer = make_optimizer(variant, model, communicator=communicator)
        for step in range(1, STEPS + 1):
            backward(model, step, rank=communicator.rank, world_size=communicator.world_size)
            optimizer.step()
            seen.setdefault((variant, wire, dtype), []).append(digest(optimizer))
    return seen


@pytest.mark.distributed
def test_parameters_and_state_are_bitwise_equal_on_all_ranks_after_every_step() -> None:
    """Among them the norm that clipping uses. Three workers: a mean that no power of two makes exact."""
    first, *others = run(3, digests)
    for other in others:
        assert other == first
    for steps in first.values():
        assert len(set(steps)) == STEPS  # or else nothing was trained


def dense_twins() -> list[list[bool]]:
    """Whether AdamW's parameters equal those of torch's own, which gets the mean gradient by hand, step by step."""
    model, twin = make_toy(), make_toy()
    communicator = Communicator()
    choices = {**CHOICES, "weight_decay": 0.1, "lr_factor": {"embedding": 0.5}}
    optimizer = METHODS["adamw"](model, communicator=communicator, **choices)
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in twin.named_parameters() if not name.startswith("embedding")]},
        {"params": [twin.embedding.weight], "lr": 0.005},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True)
    equal = []
    for step in range(1, STEPS + 1):
        backward(model, step, rank=communicator.rank, world_size=communicator.world_size)
        optimizer.step()
        optimizer.zero_grad()
        sums = [torch.zeros_like(parameter) for parameter in twin.parameters()]
        for rank in range(communicator.world_size):
            twin.zero_grad()
            backward(twin, step, rank=rank, world_size=communicator.world_size)
            for total, parameter in zip(sums, twin.parameters(), strict=True):
                total += 0 if parameter.grad is None else parameter.grad
        for total, parameter in zip(sums, twin.parameters(), strict=True):
            parameter.grad = total / communicator.world_size
        reference.step()
        equal.append([torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)])
    return equal


@pytest.mark.distributed
def test_adamw_is_torch_adamw_on_the_mean_gradient_bit_for_bit() -> None:
    for equal in [dense_twins(), *run(2, dense_twins)]:
        assert all(all(step) for step in equal)


def clip_norms() -> tuple[float, float, float]:
    """The norm recorded, the norm recomputed from all workers' messages, the norm of what was left after clipping."""
    model = make_toy(torch.float64)
    communicator = Communicator(dtype="fp64")
    optimizer = make_optimizer("clipped", model, communicator=communicator)
    backward(model, 1, rank=communicator.rank, world_size=communicator.world_size)
    optimizer.step()  # the first step makes the bases
    mean = make_toy(torch.float64)
    mean.load_state_dict(model.state_dict())
    backward(mean, 2)
    model.zero_grad()
    backward(model, 2, rank=communicator.rank, world_size=communicator.world_size)
    before = {
        block.name: optimizer.state[block.parameter]["core_exp_avg"].clone()
        for block in optimizer.blocks
        if block.is_low_rank
    }
    optimizer.step()
    squares, left_over = [], []
    gradients = dict(mean.named_parameters())
    for block in optimizer.blocks:
        gradient = gradients[block.name].grad
        if gradient is None:
            continue
        if not block.is_low_rank:
            squares.append(gradient.square().sum())
            assert block.parameter.grad is not None
            left_over.append(block.parameter.grad.square().sum())
            continue
        state = optimizer.state[block.parameter]
        squares.append((state["left"].T @ gradient @ state["right"]).square().sum())
        left_over.append(((state["core_exp_avg"] - 0.9 * before[block.name]) / 0.1).square().sum())
    return float(optimizer.grad_norm), float(sum(squares)) ** 0.5, float(sum(left_over)) ** 0.5


@pytest.mark.distributed
def test_clipping_uses_the_norm_of_the_averaged_messages() -> None:
    """Never a worker's own norm; step 2 refreshes nothing, so that its cores can be recomputed."""
    alone = clip_norms()
    for norm, expected, left_over in [alone, *run(2, clip_norms)]:
        assert norm == pytest.approx(expected)
        assert norm > 0.01  # so clipping was needed
        assert left_over == pytest.approx(0.01, rel=1e-3)
        assert norm == pytest.approx(alone[0])

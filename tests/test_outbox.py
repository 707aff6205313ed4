"""While backward goes on: cores that accumulate, buckets that leave early; and steps that must change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import VARIANTS, Toy, backward, make_optimizer, make_toy, run
from tsr import TSR, Communicator, LowRankAdam
from tsr.communicator import Round

STEPS = 7  # all kinds of steps: the intervals are 2 and 3
CORES = [name for name in VARIANTS if name not in ("adamw", "galore")]  # others send whole gradients
PASSES = 3


def train_step(model: Toy, optimizer: LowRankAdam, step: int, *, passes: int = 1, announce: bool = True) -> None:
    communicator = optimizer.communicator
    if announce:
        optimizer.begin(passes)
    backward(model, step, rank=communicator.rank, world_size=communicator.world_size, accumulation=passes)
    optimizer.step()
    optimizer.zero_grad()


def bits(model: nn.Module, optimizer: LowRankAdam) -> list[Tensor]:
    """Copies of parameters and state."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
    return [tensor.clone() for tensor in tensors]


# Accumulation in the core


@pytest.mark.parametrize("variant", CORES)
def test_accumulated_cores_train_what_accumulated_gradients_do(variant: str) -> None:
    model, other = make_toy(torch.float64), make_toy(torch.float64)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    dense = make_optimizer(variant, model, communicator=Communicator(dtype="fp64"))
    core = make_optimizer(variant, other, communicator=Communicator(dtype="fp64"), accumulate="core")
    for step in range(1, STEPS + 1):
        train_step(model, dense, step, passes=2)
        train_step(other, core, step, passes=2)
        assert dense.communicator.ledger.last == core.communicator.ledger.last
        for expected, found in zip(model.parameters(), other.parameters(), strict=True):
            assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert any(not torch.equal(before, after) for before, after in zip(start, model.parameters(), strict=True))


def test_between_refreshes_one_gradient_of_a_low_rank_block_is_alive_at_a_time() -> None:
    model = make_toy()
    optimizer = make_optimizer("low_rank_head", model, accumulate="core")
    counts = most_alive(model, optimizer)
    low_rank = sum(block.is_low_rank for block in optimizer.blocks)
    assert counts[1] == low_rank - 1  # all but the one that is never used
    assert counts[2] == counts[6] == 0
    assert 0 < counts[3] < counts[1]  # without the embedding, which is not due


@pytest.mark.parametrize("variant", ["one_pass", "one_pass_previous", "one_pass_one_sided"])
def test_with_a_one_pass_refresh_so_it_is_on_all_steps(variant: str) -> None:
    model = make_toy()
    optimizer = make_optimizer(variant, model, accumulate="core")
    assert set(most_alive(model, optimizer).values()) == {0}


def most_alive(model: Toy, optimizer: LowRankAdam) -> dict[int, int]:
    """By step, the most gradients of low-rank blocks that there are after the optimizer's own hook has run."""
    alive: list[int] = []
    low_rank = [block.parameter for block in optimizer.blocks if block.is_low_rank]

    def note(parameter: Tensor) -> None:
        alive.append(sum(other.grad is not None for other in low_rank))

    for parameter in low_rank:
        parameter.register_post_accumulate_grad_hook(note)
    counts = {}
    for step in range(1, STEPS + 1):
        train_step(model, optimizer, step, passes=2)
        counts[step] = max(alive)
        alive.clear()
    return counts


def test_the_norm_and_the_local_gradients_are_those_of_the_cores() -> None:
    model = make_toy(torch.float64)
    optimizer = make_optimizer("tsr", model, communicator=Communicator(dtype="fp64"), accumulate="core")
    train_step(model, optimizer, 1)
    optimizer.begin(1)
    backward(model, 2)
    gradients = optimizer.local_gradients()
    for block, gradient in zip(optimizer.blocks, gradients, strict=True):
        if block.is_low_rank:
            assert block.parameter.grad is None
            assert gradient is not None and gradient.shape == (block.rank, block.rank)
    norm = torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
    optimizer.step()
    assert float(optimizer.grad_norm) == pytest.approx(float(norm))


@pytest.mark.parametrize("block", ["tall", "square", "embedding"])
def test_the_local_gradients_of_a_one_pass_refresh_are_its_samples(block: str) -> None:
    """m k + l n of them, with k = r + 5; one that is not finite shows in those of its own block alone."""
    model = make_toy()
    optimizer = make_optimizer("one_pass", model, accumulate="core")
    handle = model.get_parameter(f"{block}.weight").register_hook(lambda gradient: gradient * float("nan"))
    optimizer.begin(2)
    backward(model, 1, accumulation=2)
    handle.remove()
    found = {b.name: g for b, g in zip(optimizer.blocks, optimizer.local_gradients(), strict=True)}
    sizes = {"tall": 20 * 9 + 19 * 12, "square": 12 * 9 + 12 * 12, "embedding": 40 * 8 + 17 * 12}
    for name, size in sizes.items():
        samples = found[f"{name}.weight"]
        assert samples is not None and samples.shape == (size,)
        assert bool(samples.isfinite().all()) == (name != block)
    before = bits(model, optimizer)
    optimizer.step()
    assert not optimizer.finite
    assert all(torch.equal(*pair) for pair in zip(before, bits(model, optimizer), strict=True))


# Overlap


def overlapped(variant: str, passes: int) -> tuple[list[list[Tensor]], list[int]]:
    """Parameters and state, after training with buckets that leave in backward and after it; buckets sent by then."""
    results, early = [], []
    for overlap in (False, True):
        model = make_toy()
        optimizer = make_optimizer(variant, model, communicator=Communicator(bucket_mib=100 / 2**20, overlap=overlap))
        for step in range(1, STEPS + 1):
            optimizer.begin(passes)
            rank, size = optimizer.communicator.rank, optimizer.communicator.world_size
            sent: list[int] = []
            with counting_buckets(sent):
                backward(model, step, rank=rank, world_size=size, accumulation=passes)
                early.append(len(sent))
            optimizer.step()
            optimizer.zero_grad()
        results.append(bits(model, optimizer))
    return results, early


@contextmanager
def counting_buckets(sent: list[int]) -> Iterator[None]:
    original = Round._send

    def send(self: Round, bucket: list[int]) -> None:
        sent.append(len(bucket))
        original(self, bucket)

    with mock.patch.object(Round, "_send", send):
        yield


def overlap_all() -> dict[tuple[str, int], tuple[list[list[Tensor]], list[int]]]:
    return {(variant, passes): overlapped(variant, passes) for variant in VARIANTS for passes in (1, 2)}


@pytest.mark.distributed
def test_buckets_that_leave_early_change_no_bit() -> None:
    """Four workers have two rows each: one or two passes."""
    for seen in run(4, overlap_all):
        for place, ((after, during), early) in seen.items():
            assert all(torch.equal(*pair) for pair in zip(after, during, strict=True)), place
            assert not any(early[:STEPS]), place
            assert all(early[STEPS:]), place  # what comes before the block that is never used


def uneven() -> list[Tensor]:
    """The second worker has no rows, the first two passes."""
    model = make_toy(torch.float64)
    optimizer = make_optimizer("tsr", model, communicator=Communicator(dtype="fp64", overlap=True), accumulate="core")
    for step in range(1, STEPS + 1):
        if dist.get_rank() == 0:
            optimizer.begin(2)
            backward(model, step, accumulation=2)
        else:
            optimizer.begin(0)
        optimizer.step()
        optimizer.zero_grad()
    return bits(model, optimizer)


@pytest.mark.distributed
def test_a_worker_without_rows_takes_part() -> None:
    first, second = run(2, uneven)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert sum(float(tensor.abs().sum()) for tensor in first) > 0


@pytest.mark.parametrize("variant", ["adamw", "tsr"])
def test_a_wrong_number_of_passes_is_an_error(variant: str) -> None:
    model = make_toy()
    optimizer = make_optimizer(variant, model, communicator=Communicator(overlap=True))
    optimizer.begin(1)
    with pytest.raises(RuntimeError, match=r"begin\(\) announced 1 passes"):
        backward(model, 1, accumulation=2)
    with pytest.raises(RuntimeError, match="a step is under way already"):
        optimizer.begin(1)


# Steps that must change nothing


@pytest.mark.parametrize("announce", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gradient_that_is_not_finite_changes_no_bit(variant: str, value: float, announce: bool) -> None:
    """On ordinary and refresh steps, whichever block it is in; then training goes on as if nothing had been."""
    model = make_toy()
    optimizer = make_optimizer(variant, model)
    train_step(model, optimizer, 1)
    for step in range(2, STEPS + 1):
        before = bits(model, optimizer)
        for poisoned in (model.square, model.embedding, model.head):
            if announce:
                optimizer.begin(1)
            backward(model, step)
            assert poisoned.weight.grad is not None
            poisoned.weight.grad[1, 2] = value
            clock = [group["updates"] for group in optimizer.param_groups]
            optimizer.step()
            assert not optimizer.finite
            assert all(torch.equal(*pair) for pair in zip(before, bits(model, optimizer), strict=True))
            for group, updates in zip(optimizer.param_groups, clock, strict=True):
                group["updates"] = updates
            optimizer.zero_grad()
        train_step(model, optimizer, step)
        assert optimizer.finite
        assert not all(torch.equal(*pair) for pair in zip(before, bits(model, optimizer), strict=True))


class NoWaiting(TorchDispatchMode):
    """Raises where Python reads a value of a tensor, for which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor is read"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_ordinary_step_reads_no_tensor(variant: str) -> None:
    with pytest.raises(AssertionError, match="a tensor is read"), NoWaiting():
        float(torch.ones(()) + 1)
    model = make_toy()
    optimizer = make_optimizer(variant, model)
    for step in range(1, STEPS + 1):
        optimizer.begin(1)
        backward(model, step)
        with NoWaiting():
            optimizer.step()
        optimizer.zero_grad()


def test_equal_blocks_give_the_same_bits_one_by_one_and_stacked() -> None:
    """With overlap each is projected when its gradient is there, without it a stack at once."""
    trained = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(5)))
        optimizer = TSR(
            model,
            roles={"linear": [name for name, _ in model.named_parameters()]},
            rank={"linear": 24},
            refresh={"linear": 3},
            communicator=Communicator(overlap=overlap, bucket_mib=0.005),
        )
        assert len(optimizer._stacks) == 1
        for step in range(5):
            optimizer.zero_grad()
            optimizer.begin(1)
            model(torch.randn(32, 96, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
        trained.append(model.state_dict())
    for name, plain in trained[0].items():
        assert torch.equal(plain, trained[1][name]), name

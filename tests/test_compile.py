"""`optimizer.compile`: the fused update of the cores is the same update."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.distributed import backward, make_optimizer, make_toy

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler on a CPU"
)
STEPS = 6
SHAPES = ["tall", "wide", "square", "embedding"]  # whose cores may differ in shape


def trained(variant: str, *, compiled: bool) -> Sequence[Tensor]:
    """Parameters and state after some steps, refreshes among them; the last one has a gradient that is not finite."""
    model = make_toy(torch.float64)  # in float32, Adam amplifies rounding beside a refreshed core's diagonal
    optimizer = make_optimizer(variant, model, compile=compiled)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        backward(model, step)
        if step == STEPS:
            assert model.tall.weight.grad is not None
            model.tall.weight.grad.fill_(torch.inf)
        optimizer.step()
    state = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach() for parameter in model.parameters()), *state]


@pytest.mark.parametrize("variant", ["galore", "reset"])
def test_a_compiled_update_is_the_same_to_rounding_and_compiled_once_a_shape(variant: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    plain = trained(variant, compiled=False)
    assert not counters["stats"]["unique_graphs"]
    compiled = trained(variant, compiled=True)
    assert 0 < counters["stats"]["unique_graphs"] <= len(SHAPES), "a step must not compile anew"
    for ours, expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)

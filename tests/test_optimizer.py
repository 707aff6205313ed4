"""The step: against torch's AdamW where they must agree, against written formulas elsewhere; options; state."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.distributed import METHODS, VARIANTS, backward, make_optimizer, make_toy
from tsr import TSR, AdamOptions, AdamW, Block, Communicator, LowRankAdam, RefreshRule
from tsr.accounting import paper_memory_bytes, state_bytes
from tsr.adam import adam_direction, corrections
from tsr.refresh import gaussian
from tsr.subspace import Basis, lift, project

NEVER = 10**9
SHAPES = [(6, 6), (8, 5), (5, 8)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def single(
    weight: Tensor,
    subspace: str,
    rank: int,
    *,
    interval: int = NEVER,
    refresh: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[nn.Parameter, LowRankAdam]:
    """One matrix in float64 and its optimizer, built from a block: `plan_blocks` would keep full rank dense."""
    parameter = nn.Parameter(weight.clone())
    optimizer = LowRankAdam(
        [Block("w", parameter, "linear", subspace, rank, interval)],
        AdamOptions(**{"lr": 0.01, **options}),
        refresh=RefreshRule(**(refresh or {})),
        communicator=Communicator(dtype="fp64"),
    )
    return parameter, optimizer


def basis_of(optimizer: LowRankAdam) -> Basis:
    (state,) = optimizer.state.values()
    return Basis(state.get("left"), state.get("right"))


def step_with(parameter: nn.Parameter, optimizer: LowRankAdam, gradient: Tensor) -> None:
    parameter.grad = gradient.to(parameter.dtype, copy=True)
    optimizer.step()


def regression(shape: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """A smooth loss of an m x n matrix, not quadratic."""
    inputs, targets = random(shape[1], 30, seed=1), random(shape[0], 30, seed=2)
    return lambda weight: (torch.tanh(weight @ inputs) - targets).square().mean()


@pytest.mark.parametrize("moments", ["keep", "rotate", "reset"])
@pytest.mark.parametrize(("subspace", "shape"), [("two_sided", (6, 6)), *(("one_sided", shape) for shape in SHAPES)])
def test_full_rank_is_torch_adamw_in_the_rotated_basis(subspace: str, shape: tuple[int, int], moments: str) -> None:
    """W' = U^T W V with loss(U W' V^T): scale 1, one basis for good."""
    start, loss = random(*shape), regression(shape)
    method = "sketch" if subspace == "two_sided" else "svd"
    choices: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    ours, optimizer = single(start, subspace, min(shape), refresh={"method": method}, moments=moments, **choices)
    loss(ours).backward()
    optimizer.step()
    basis = basis_of(optimizer)
    rotated = nn.Parameter(project(start, basis))
    reference = torch.optim.AdamW([rotated], **choices)
    for step in range(20):
        if step > 0:
            loss(ours).backward()
            optimizer.step()
        reference.zero_grad()
        loss(lift(rotated, basis)).backward()
        reference.step()
        assert_close(ours.detach(), lift(rotated.detach(), basis), rtol=1e-9, atol=1e-9)
    assert float((ours.detach() - start).norm()) > 0.1


def test_a_rank_r_problem_is_solved_by_rank_r() -> None:
    """A gradient within the subspace loses nothing: the lifted first moment is the dense one."""
    gradient = random(9, 2, seed=3) @ random(2, 7, seed=4)
    parameter, optimizer = single(random(9, 7), "two_sided", 2)
    for step in range(1, 4):
        step_with(parameter, optimizer, step * gradient)
    state = optimizer.state[parameter]
    expected = 0.1 * (0.81 * 1 + 0.9 * 2 + 3) * gradient
    assert_close(lift(state["core_exp_avg"], basis_of(optimizer)), expected)


@pytest.mark.parametrize("eps_mode", ["corrected", "raw"])
def test_direction_is_the_written_formula(eps_mode: str) -> None:
    """``raw`` is GaLore's step: root plus eps first, then the corrections as a factor of the step size."""
    beta1, beta2, eps, lr = 0.8, 0.95, 1e-2, 1.0
    parameter = nn.Parameter(random(4, 3))
    reference = torch.optim.AdamW([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=0)
    first = second = torch.zeros(4, 3, dtype=torch.float64)
    for step in range(1, 6):
        before = parameter.detach().clone()
        gradient = random(4, 3, seed=step)
        parameter.grad = gradient.clone()
        reference.step()
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        correction = corrections([step], betas=(beta1, beta2), like=first)
        ours = adam_direction(first, second, correction, eps=eps, eps_mode=eps_mode)
        if eps_mode == "raw":
            step_size = lr * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
            assert_close(ours, step_size * first / (second.sqrt() + eps))
            assert not torch.allclose(before - ours, parameter)
        else:
            assert_close(before - ours, parameter.detach())


def test_galore_is_its_formula_written_out() -> None:
    """Projector on the smaller side, from the SVD of the gradient every K steps; moments kept; scale; raw eps."""
    shape, rank, interval, lr, scale, eps, decay = (5, 8), 2, 3, 0.02, 0.25, 1e-6, 0.1
    parameter, optimizer = single(
        random(*shape), "one_sided", rank, interval=interval, refresh={"method": "svd"}, reduce="dense",
        lr=lr, scale=scale, eps=eps, eps_mode="raw", weight_decay=decay,
    )  # fmt: skip
    weight = parameter.detach().clone()
    first = second = torch.zeros(rank, shape[1], dtype=torch.float64)
    for step in range(1, 8):
        gradient = random(*shape, seed=step)
        step_with(parameter, optimizer, gradient)
        if (step - 1) % interval == 0:
            projector = torch.linalg.svd(gradient)[0][:, :rank]
            # The formula leaves the signs open; kept moments feel them.
            projector = projector * projector.gather(0, projector.abs().argmax(0, keepdim=True)).sign()
        core = projector.T @ gradient
        first = 0.9 * first + 0.1 * core
        second = 0.999 * second + 0.001 * core**2
        factor = math.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weight = weight * (1 - lr * decay) - lr * scale * projector @ (factor * first / (second.sqrt() + eps))
        assert_close(parameter.detach(), weight)


def first_moments(moments: str, steps: int) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The lifted first moment of a full-rank block that refreshes every 3 steps, and all gradients so far."""
    parameter, optimizer = single(random(6, 6), "two_sided", 6, interval=3, moments=moments)
    gradients: list[Tensor] = []
    for step in range(1, steps + 1):
        gradients.append(random(6, 6, seed=step))
        step_with(parameter, optimizer, gradients[-1])
        yield lift(optimizer.state[parameter]["core_exp_avg"], basis_of(optimizer)), gradients


def average(gradients: list[Tensor]) -> Tensor:
    total = torch.zeros_like(gradients[0])
    for gradient in gradients:
        total = 0.9 * total + 0.1 * gradient
    return total


def test_rotated_moments_do_not_notice_a_change_of_basis() -> None:
    for lifted, gradients in first_moments("rotate", 8):
        assert_close(lifted, average(gradients))


def test_reset_moments_start_again_at_a_refresh_with_their_bias_correction() -> None:
    for lifted, gradients in first_moments("reset", 8):
        since = (len(gradients) - 1) // 3 * 3
        assert_close(lifted, average(gradients[since:]))
    parameter, optimizer = single(random(6, 6), "two_sided", 6, interval=3, moments="reset", eps=1e-12)
    for step in range(1, 5):
        before = parameter.detach().clone()
        step_with(parameter, optimizer, random(6, 6, seed=step))
    # A first update of Adam has entries of size lr: here at step 4, right after a refresh. The core in a fresh basis is
    # diagonal.
    change = project(before - parameter.detach(), basis_of(optimizer))
    assert_close(change.diag().abs(), torch.full((6,), 0.01, dtype=torch.float64), rtol=1e-6, atol=0)


def test_kept_moments_keep_their_numbers_across_a_refresh() -> None:
    parameter, optimizer = single(random(6, 6), "two_sided", 6, interval=3)
    for step in range(1, 5):
        state = optimizer.state[parameter]
        before = {key: value.clone() for key, value in state.items()}
        gradient = random(6, 6, seed=step)
        step_with(parameter, optimizer, gradient)
        core = project(gradient, basis_of(optimizer))
        assert_close(state["core_exp_avg"], 0.9 * before["core_exp_avg"] + 0.1 * core)
        assert_close(state["core_exp_avg_sq"], 0.999 * before["core_exp_avg_sq"] + 0.001 * core**2)
        assert torch.equal(state["left"], before["left"]) == (step not in (1, 4))


def test_decay_lr_factor_and_scale() -> None:
    """Scale acts on the lifted update alone; the factor of a role on update and decay, dense blocks included."""

    def change(decay: float = 0.0, factor: float = 1.0, scale: float = 1.0) -> dict[str, Tensor]:
        model = make_toy(torch.float64)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        factors = {"linear": factor, "head": factor}
        optimizer = TSR(
            model, lr=0.01, rank={"linear": 4, "embedding": 3}, weight_decay=decay, lr_factor=factors, scale=scale
        )
        backward(model, 1)
        optimizer.step()
        return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}

    start = dict(make_toy(torch.float64).named_parameters())
    plain, decayed, faster, scaled, both = (
        change(), change(decay=0.1), change(factor=3.0), change(scale=0.25), change(decay=0.1, factor=3.0, scale=0.25)
    )  # fmt: skip
    for name, parameter in start.items():
        low_rank = name.split(".")[0] in ("embedding", "tall", "wide", "square", "idle")
        factor = 3.0 if name.split(".")[0] in ("tall", "wide", "square", "small", "idle", "head") else 1.0
        scale = 0.25 if low_rank else 1.0
        assert_close(decayed[name] - plain[name], -0.01 * 0.1 * parameter.detach())
        assert_close(faster[name], factor * plain[name])
        assert_close(scaled[name], scale * plain[name])
        assert_close(both[name], factor * (scale * plain[name] - 0.01 * 0.1 * parameter.detach()))
    assert start["idle.weight"].detach().norm() > 0 and plain["idle.weight"].norm() == 0  # no gradient, no update


def test_clipping_scales_every_message_by_one_coefficient() -> None:
    """For projected cores and, as in GaLore, for dense gradients that are projected afterwards."""
    for method in ("tsr", "galore"):
        moments = []
        for clip_norm in (None, 0.01, 1e6):
            model = make_toy(torch.float64)
            choices = {"rank": {"linear": 4, "embedding": 3}, "clip_norm": clip_norm}
            optimizer = METHODS[method](model, communicator=Communicator(dtype="fp64"), **choices)
            backward(model, 1)
            optimizer.step()
            norm = float(optimizer.grad_norm)
            moments.append(
                {
                    block.name: optimizer.state[block.parameter]["core_exp_avg" if block.is_low_rank else "exp_avg"]
                    for block in optimizer.blocks
                }
            )
        coefficient = 0.01 / (norm + 1e-6)
        assert coefficient < 1
        for name, free in moments[0].items():
            assert_close(moments[1][name], coefficient * free)
            assert torch.equal(moments[2][name], free)


def test_start_previous_carries_the_right_basis_into_the_sketch() -> None:
    """With no oversampling the start is the basis alone: V is that of one power step from the last V."""
    parameter, optimizer = single(
        random(9, 7), "two_sided", 2, interval=1, refresh={"start": "previous", "oversampling": 0}
    )
    for step in range(1, 4):
        right = basis_of(optimizer).right
        assert right is not None
        right = right.clone()
        gradient = random(9, 7, seed=step)
        step_with(parameter, optimizer, gradient)
        left = basis_of(optimizer).left
        assert left is not None
        if step > 1:
            q = torch.linalg.qr(gradient @ right)[0]
            assert_close(left @ left.T, q @ q.T)


@pytest.mark.parametrize(
    ("subspace", "shape"), [("two_sided", (30, 20)), ("one_sided", (30, 20)), ("one_sided", (20, 30))]
)
def test_the_core_of_a_one_pass_refresh_is_derived_from_what_was_sent(subspace: str, shape: tuple[int, int]) -> None:
    """Exact for a gradient of the rank, near for a gradient that nearly is; its singular values are the truncated ones
    of what was sent."""
    signal = random(shape[0], 2, seed=3) @ random(2, shape[1], seed=4)
    for noise in (0.0, 0.1):
        gradient = signal + noise * random(*shape, seed=5)
        parameter, optimizer = single(random(*shape), subspace, 2, refresh={"method": "one_pass"})
        step_with(parameter, optimizer, gradient)
        core = 10 * optimizer.state[parameter]["core_exp_avg"]
        exact = project(gradient, basis_of(optimizer))
        error = float((core - exact).norm() / exact.norm())
        assert error < 1e-9 if noise == 0 else 1e-3 < error < 0.1
        assert float(optimizer.grad_norm) == pytest.approx(float(core.norm()))
        gram = core.T @ core if core.shape[1] == 2 else core @ core.T
        assert_close(gram, gram.diag().diag())  # U and V are singular vectors
        assert optimizer.communicator.ledger.last.by_role().keys() == {"sketch"}


def test_the_two_sides_of_a_one_pass_sketch_are_independent() -> None:
    """Of G = 1 they are Omega and Psi^T themselves."""
    parameter, optimizer = single(random(60, 60), "two_sided", 15, refresh={"method": "one_pass"})
    parameter.grad = torch.eye(60, dtype=torch.float64)
    sent: list[Tensor] = []
    with mock.patch.object(optimizer.communicator, "mean", lambda messages: sent.extend(m.tensor for m in messages)):
        optimizer.step()
    omega, psi = sent[0][: 60 * 20].view(60, 20), sent[0][60 * 20 :].view(41, 60).T
    assert float((omega.T @ psi).norm()) == pytest.approx((60 * 20 * 41) ** 0.5, rel=0.1)
    assert abs(float(torch.corrcoef(torch.stack([omega.flatten(), psi.flatten()[: 60 * 20]]))[0, 1])) < 0.1
    assert torch.equal(omega, gaussian((60, 20), seed=0, step=1, name="w", like=omega))


def test_closure_and_learning_rate_schedule_work_as_in_torch() -> None:
    model = make_toy()
    optimizer = make_optimizer("tsr", model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> float:
        optimizer.zero_grad()
        return backward(model, 1)

    assert optimizer.step(closure) == pytest.approx(backward(make_toy(), 1))
    schedule.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.005}


def test_gradients_after_a_step() -> None:
    model = make_toy()
    optimizer = make_optimizer("tsr", model)
    backward(model, 1)
    optimizer.step()
    for block in optimizer.blocks:
        assert (block.parameter.grad is None) == block.is_low_rank


def keys(optimizer: LowRankAdam) -> dict[str, list[tuple[str, torch.Size, torch.dtype]]]:
    return {
        block.name: [(key, value.shape, value.dtype) for key, value in optimizer.state[block.parameter].items()]
        for block in optimizer.blocks
    }


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_made_at_construction_and_keeps_its_shape(variant: str, dtype: torch.dtype) -> None:
    model = make_toy(dtype)
    optimizer = make_optimizer(variant, model)
    made = keys(optimizer)
    for block in optimizer.blocks:
        for key, _, kept in made[block.name]:
            assert kept == torch.float32, key
    for step in range(1, 5):
        backward(model, step)
        optimizer.step()
        assert keys(optimizer) == made


def saved(optimizer: LowRankAdam, model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    return file


def proceed(optimizer: LowRankAdam, model: nn.Module, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumed_twice_is_the_run_bit_for_bit(variant: str, dtype: torch.dtype) -> None:
    """2 + 2 + 3 steps: the second part starts on a refresh of the linear blocks, the third between two."""
    straight = make_toy(dtype)
    uninterrupted = make_optimizer(variant, straight)
    proceed(uninterrupted, straight, range(1, 8))
    model = make_toy(dtype)
    optimizer = make_optimizer(variant, model)
    proceed(optimizer, model, range(1, 3))
    for part in (range(3, 5), range(5, 8)):
        file = saved(optimizer, model)
        proceed(optimizer, model, range(1, 3))  # goes on elsewhere: what was saved must be a copy
        model = make_toy(dtype)
        optimizer = make_optimizer(variant, model)
        checkpoint = torch.load(file, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        assert optimizer.updates == part.start - 1
        proceed(optimizer, model, part)
    assert keys(optimizer) == keys(uninterrupted)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), straight.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        for key, value in uninterrupted.state[theirs].items():
            assert torch.equal(optimizer.state[ours][key], value), (name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_state_is_the_optimizers_own(dtype: torch.dtype) -> None:
    """Training on must not write into the state dict that was loaded."""
    model = make_toy(dtype)
    optimizer = make_optimizer("tsr", model)
    proceed(optimizer, model, range(1, 3))
    checkpoint = torch.load(saved(optimizer, model), weights_only=True)["optimizer"]
    again = torch.load(saved(optimizer, model), weights_only=True)["optimizer"]
    optimizer.load_state_dict(checkpoint)
    proceed(optimizer, model, range(3, 5))
    for index, state in again["state"].items():
        for key, value in state.items():
            assert torch.equal(checkpoint["state"][index][key], value)


def test_moving_the_clock_moves_the_refreshes() -> None:
    """What a dry run does to execute each kind of step once."""
    optimizer = make_optimizer("tsr", make_toy())
    assert [optimizer.step_kind(step) for step in range(1, 6)] == [
        (True, True), (False, False), (True, False), (False, True), (True, False)
    ]  # fmt: skip
    optimizer.updates = 1
    optimizer.step()
    assert "sketch" not in optimizer.communicator.ledger.last.by_role()
    assert optimizer.updates == 2


def test_memory_of_state_and_of_the_papers_table() -> None:
    optimizer = make_optimizer("tsr", make_toy())
    core = 4 * 2 * 4 * 4 + 4 * (20 + 12 + 12 + 20 + 12 + 12 + 9 + 12) + 2 * 9 + 3 * (40 + 12)
    dense = 2 * (40 * 12 + 12 + 3 * 12) + 3  # two moments and the count of steps
    assert state_bytes(optimizer) == 4 * (core + dense)
    weights = 40 * 12 + 2 * 20 * 12 + 12 * 12 + 9 * 12
    assert paper_memory_bytes(optimizer.blocks) == 2 * (weights + core + 3 * 3 * 12)
    linears = 2 * 20 * 12 + 12 * 12 + 3 * 12 + 9 * 12
    assert paper_memory_bytes(make_optimizer("adamw", make_toy()).blocks) == 2 * (4 * 40 * 12 + 3 * linears)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_method_learns(variant: str, dtype: torch.dtype) -> None:
    model = make_toy(dtype)
    optimizer = make_optimizer(variant, model)
    for group in optimizer.param_groups:
        group["lr"] *= 3
    losses = []
    for _ in range(40):
        losses.append(backward(model, 1))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.7 * losses[0]


def test_works_with_any_module_in_a_plain_loop() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    inputs, targets = torch.randn(64, 16), torch.randn(64, 8)
    optimizer = TSR(model, lr=0.02, rank={"linear": 4}, refresh={"linear": 10})
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_step_hooks_run_once() -> None:
    """Also once torch has patched its own AdamW, whose step this one's calls."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    optimizer = AdamW(make_toy())
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]


def test_the_schedule_has_every_kind_of_step_until_it_repeats() -> None:
    optimizer = make_optimizer("low_rank_head", make_toy(), refresh={"linear": 6, "embedding": 4, "head": 3})
    # Steps 2 to 13: linears at 7 and 13, the embedding at 5, 9 and 13, the head at 4, 7, 10 and 13.
    assert optimizer.schedule() == {2: 6, 4: 2, 5: 2, 7: 1, 13: 1}
    assert make_optimizer("adamw", make_toy()).schedule() == {2: 1}

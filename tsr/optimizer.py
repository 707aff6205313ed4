"""`LowRankAdam`: one step for every method, as a row of choices over shared parts.

    messages = project(local gradients) -> communicator.mean(messages) -> Adam on what came back -> lift -> update

The gradients in ``.grad`` are each worker's own; `LowRankAdam.step` averages what the method needs and nothing else.
Dense blocks are updated by torch's own AdamW. Equality of parameters and state on all workers holds after every step,
since every worker applies the same update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tsr.blocks import ROLES, Block
from tsr.checks import is_number
from tsr.communicator import Communicator, Message
from tsr.refresh import METHODS, Average, RefreshRule, RefreshTask, gaussian
from tsr.subspace import Basis, core_shape, lift, project, rotate, sides

REDUCTIONS = ("dense", "projected")
MOMENTS = ("keep", "rotate", "reset")
EPS_MODES = ("corrected", "raw")

# Keys of the optimizer state of a low-rank block. All state is at least fp32 whatever the parameter's dtype, and so is
# the arithmetic of an update, which rounds the weights once.
FIRST_MOMENT, SECOND_MOMENT, LEFT, RIGHT = "core_exp_avg", "core_exp_avg_sq", "left", "right"


@dataclass(frozen=True, kw_only=True)
class AdamOptions:
    """The choices of a method that are no matter of a block or of the refresh.

    Args:
        lr: Learning rate before the factor of each role.
        scale: Factor of the lifted update of low-rank blocks (not of weight decay); "alpha" in GaLore.
        betas, eps: As in Adam.
        weight_decay: Decoupled: W is multiplied by 1 - lr * weight_decay before the update, as torch.optim.AdamW does.
        no_decay: Roles without weight decay, whatever the method; fine-tuning leaves out ``vector`` by custom.
        eps_mode: ``corrected`` adds eps to the bias-corrected root (Algorithm 1, torch); ``raw`` adds it to the raw
            root and then corrects, as GaLore's code does. For low-rank blocks; dense ones follow torch.
        moments: What becomes of a core's moments when its basis changes: ``keep`` (Algorithm 1), ``rotate`` them into
            the new basis, or ``reset`` them and their bias correction.
        reduce: What is averaged: ``projected`` cores, or the ``dense`` gradients, projected afterwards.
        clip_norm: Upper bound of the global norm of the averaged messages (cores and dense gradients), or ``None``.
    """

    lr: float
    scale: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: Sequence[str] | None = None
    eps_mode: str = "corrected"
    moments: str = "keep"
    reduce: str = "projected"
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        for name, number in (("lr", self.lr), ("scale", self.scale), ("eps", self.eps)):
            if not (is_number(number) and number > 0):
                raise ValueError(f"optimizer.{name} must be a positive number, got {number!r}")
        if (
            not isinstance(self.betas, tuple)
            or len(self.betas) != 2
            or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas)
        ):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), got {self.betas!r}")
        if not (is_number(self.weight_decay) and self.weight_decay >= 0):
            raise ValueError(f"optimizer.weight_decay must be a number of 0 or more, got {self.weight_decay!r}")
        spared = () if self.no_decay is None else self.no_decay
        if not isinstance(spared, Sequence) or any(role not in ROLES for role in spared):
            raise ValueError(
                f"optimizer.no_decay must be a list of roles ({', '.join(ROLES)}), or null, got {self.no_decay!r}"
            )
        if self.clip_norm is not None and not (is_number(self.clip_norm) and self.clip_norm > 0):
            raise ValueError(
                f"optimizer.clip_norm must be a positive number, or null for no clipping, got {self.clip_norm!r}"
            )
        for name, value, allowed in (
            ("eps_mode", self.eps_mode, EPS_MODES),
            ("moments", self.moments, MOMENTS),
            ("reduce", self.reduce, REDUCTIONS),
        ):
            if value not in allowed:
                raise ValueError(f"optimizer.{name} must be one of {', '.join(allowed)}, got {value!r}")


class LowRankAdam(torch.optim.Optimizer):
    """Adam whose messages, moments and updates live in per-block subspaces.

    All state is made here, for every block, also for those that never get a gradient: state dicts have the same keys
    on every worker at any time. A missing gradient counts as zero, so that all workers always send the same messages.

    Args:
        blocks: Every trainable parameter once, in the same order on all workers; see `tsr.blocks.plan_blocks`.
        options: See `AdamOptions`.
        refresh: How and at which steps low-rank blocks get new bases.
        communicator: Averages and counts; by default one over the global process group, or a single worker.
        lr_factors: Factor of the learning rate by role (1 where absent), for dense and low-rank blocks alike.

    After a step, gradients of low-rank blocks are released (``None``) and those of dense blocks hold the average.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        options: AdamOptions,
        *,
        refresh: RefreshRule | None = None,
        communicator: Communicator | None = None,
        lr_factors: dict[str, float] | None = None,
    ) -> None:
        self.blocks = list(blocks)
        self.options = options
        self.refresh = refresh or RefreshRule()
        self.communicator = communicator or Communicator()
        self.grad_norm = torch.zeros(())  # of the last step's averaged messages, before clipping
        self._intervals = sorted({block.interval for block in self.blocks if block.is_low_rank})
        factors = lr_factors or {}
        groups: list[dict[str, Any]] = [
            {
                "params": [block.parameter for block in self.blocks if block.role == role],
                "lr": options.lr * factors.get(role, 1.0),
                "role": role,
                "weight_decay": 0.0 if role in (options.no_decay or ()) else options.weight_decay,
                "updates": 0,
            }
            for role in dict.fromkeys(block.role for block in self.blocks)
        ]
        super().__init__(groups, {"lr": options.lr, "betas": options.betas, "eps": options.eps})
        one_sided = [b.name for b in self.blocks if b.is_low_rank and b.subspace != "two_sided"]
        if self.refresh.start == "previous" and one_sided:
            raise ValueError(f"refresh.start=previous needs two-sided blocks, but {one_sided[0]} is one-sided")
        for block in self.blocks:
            self.state[block.parameter] = _low_rank_state(block) if block.is_low_rank else _dense_state(block)

    @property
    def updates(self) -> int:
        """Updates made so far: the clock of refreshes and bias correction. Setting it moves the clock (dry runs)."""
        return int(self.param_groups[0]["updates"])

    @updates.setter
    def updates(self, value: int) -> None:
        for group in self.param_groups:
            group["updates"] = value

    def step_kind(self, step: int) -> Hashable:
        """What distinguishes the messages of ``step`` (from 1): which refresh intervals fall due."""
        return tuple(self.refresh.due(step, interval) for interval in self._intervals)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Synchronise and update; ``closure``, if given, recomputes loss and gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = self.updates + 1
        for block in self.blocks:
            if block.parameter.grad is None:
                block.parameter.grad = torch.zeros_like(block.parameter)
        low_rank = [block for block in self.blocks if block.is_low_rank]
        dense = [block for block in self.blocks if not block.is_low_rank]

        if self.options.reduce == "dense":
            # Whole gradients are averaged; what follows for low-rank blocks is local, and the same on every worker.
            averaged = [_gradient(block) for block in self.blocks]
            self._mean(self.blocks, averaged, "dense")
            self._refresh(low_rank, step, local=True)
            cores = [self._project(block) for block in low_rank]
            self._clip(averaged, also=cores)
        else:
            self._refresh(low_rank, step, local=False)
            cores = [self._project(block) for block in low_rank]
            averaged = [*cores, *(_gradient(block) for block in dense)]
            self.communicator.mean(
                [Message(core, "core", block.kind) for core, block in zip(cores, low_rank, strict=True)]
                + [Message(_gradient(block), "dense", block.kind) for block in dense]
            )
            self._clip(averaged)

        for block in low_rank:
            block.parameter.grad = None
        groups = {group["role"]: group for group in self.param_groups}
        for role, group in groups.items():
            self._update_dense([block for block in dense if block.role == role], group)
        for block, core in zip(low_rank, cores, strict=True):
            self._update(block, core, groups[block.role], step)
        self.updates = step
        self.communicator.ledger.close_step()
        return loss

    def _mean(self, blocks: Sequence[Block], tensors: Sequence[Tensor], role: str) -> None:
        self.communicator.mean(
            [Message(tensor, role, block.kind) for tensor, block in zip(tensors, blocks, strict=True)]
        )

    def _basis(self, block: Block) -> Basis:
        state = self.state[block.parameter]
        return Basis(state.get(LEFT), state.get(RIGHT))

    def _project(self, block: Block) -> Tensor:
        state = self.state[block.parameter]
        return project(_gradient(block).to(state[FIRST_MOMENT].dtype), self._basis(block))

    def _refresh(self, blocks: Sequence[Block], step: int, *, local: bool) -> None:
        """Give the blocks that are due a new basis, and carry or drop their moments."""
        due = [block for block in blocks if self.refresh.due(step, block.interval)]
        if not due:
            return

        def synchronise(tensors: Sequence[Tensor], role: str) -> Sequence[Tensor]:
            # Blocks are matched to tensors in order; a method may send several tensors a block in one round.
            self._mean(due * (len(tensors) // len(due)), tensors, role)
            return tensors

        average: Average = (lambda tensors, role: tensors) if local else synchronise
        bases = METHODS[self.refresh.method]([self._task(block, step) for block in due], self.refresh, average)
        for block, basis in zip(due, bases, strict=True):
            self._change_basis(block, basis)

    def _task(self, block: Block, step: int) -> RefreshTask:
        state = self.state[block.parameter]
        dtype = state[FIRST_MOMENT].dtype
        # A method may average this in place (`svd` does): projecting the mean later gives the same core as the mean of
        # projections, so no copy is kept.
        gradient = _gradient(block).to(dtype)
        width = self.refresh.width(block.rank, block.shape)
        kept = []
        if self.refresh.start == "previous" and step > 1:
            kept = [state[RIGHT]]
            width -= block.rank
        shape = (block.shape[1], width)

        def draw() -> Tensor:
            drawn = gaussian(shape, seed=self.refresh.seed, step=step, name=block.name, like=gradient)
            return torch.cat([*kept, drawn], dim=1)

        return RefreshTask(gradient, block.rank, draw)

    def _change_basis(self, block: Block, basis: Basis) -> None:
        state = self.state[block.parameter]
        left, right = sides(block.subspace, block.shape)
        new = Basis(basis.left if left else None, basis.right if right else None)
        if self.options.moments == "rotate":
            old = self._basis(block)
            state[FIRST_MOMENT].copy_(rotate(state[FIRST_MOMENT], old, new))
            state[SECOND_MOMENT].copy_(rotate(state[SECOND_MOMENT], old, new, squared=True))
        elif self.options.moments == "reset":
            state[FIRST_MOMENT].zero_()
            state[SECOND_MOMENT].zero_()
        for key, side in zip((LEFT, RIGHT), new, strict=True):
            if side is not None:
                state[key].copy_(side)

    def _clip(self, averaged: Sequence[Tensor], *, also: Sequence[Tensor] = ()) -> None:
        """Record the norm of the averaged messages and, if asked for, scale them (and what was made of them) down."""
        # In at least fp32: the norm of a bf16 tensor would have three digits.
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in averaged]
        norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor, dtype in zip(averaged, wide, strict=True)]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        if self.options.clip_norm is not None:
            factor = (self.options.clip_norm / (self.grad_norm + 1e-6)).clamp(max=1.0)
            for tensor in (*averaged, *also):
                tensor.mul_(factor.to(tensor.dtype))

    def _update_dense(self, blocks: Sequence[Block], group: dict[str, Any]) -> None:
        # The function and not the class: as a base class, AdamW runs step hooks twice and cannot load cores.
        states = [self.state[block.parameter] for block in blocks]
        wide = [block.parameter.to(state["exp_avg"].dtype) for block, state in zip(blocks, states, strict=True)]
        beta1, beta2 = group["betas"]
        adamw(
            wide,
            [_gradient(block).to(parameter.dtype) for block, parameter in zip(blocks, wide, strict=True)],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        _narrow(wide, blocks)

    def _update(self, block: Block, core: Tensor, group: dict[str, Any], step: int) -> None:
        state = self.state[block.parameter]
        beta1, beta2 = group["betas"]
        first, second = state[FIRST_MOMENT], state[SECOND_MOMENT]
        first.lerp_(core, 1 - beta1)
        second.mul_(beta2).addcmul_(core, core, value=1 - beta2)
        age = self.refresh.age(step, block.interval) if self.options.moments == "reset" else step
        direction = adam_direction(
            first, second, age, betas=group["betas"], eps=group["eps"], eps_mode=self.options.eps_mode
        )
        wide = block.parameter.to(first.dtype)
        wide.mul_(1 - group["lr"] * group["weight_decay"])
        wide.add_(lift(direction, self._basis(block)), alpha=-group["lr"] * self.options.scale)
        _narrow([wide], [block])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over saved state, every tensor at the dtype it was saved in (torch would cast it to the parameter's)."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            for key, value in state_dict["state"][index].items():
                device = value.device if key == "step" else parameter.device
                self.state[parameter][key] = value.detach().to(device, copy=True)


def adam_direction(
    first: Tensor, second: Tensor, step: int, *, betas: tuple[float, float], eps: float, eps_mode: str
) -> Tensor:
    """Adam's direction from its moments after ``step`` updates (from 1); TSR Algorithm 1, Kingma and Ba 2015.

    ``corrected``: m^ / (sqrt(v^) + eps). ``raw``: sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).
    """
    correction1 = 1 - betas[0] ** step
    correction2 = math.sqrt(1 - betas[1] ** step)
    if eps_mode == "raw":
        return (first / (second.sqrt() + eps)) * (correction2 / correction1)
    return (first / correction1) / (second.sqrt() / correction2 + eps)


def _gradient(block: Block) -> Tensor:
    gradient = block.parameter.grad
    assert gradient is not None
    return gradient


def _narrow(wide: Sequence[Tensor], blocks: Sequence[Block]) -> None:
    """Round updated weights to the parameters' dtype, once; weights that are of it already are the parameters."""
    for weights, block in zip(wide, blocks, strict=True):
        if weights is not block.parameter:
            block.parameter.copy_(weights)


def _dense_state(block: Block) -> dict[str, Tensor]:
    """What torch.optim.AdamW would make at its first step, but at least fp32: in bf16, beta2 = 0.999 decays nothing."""
    dtype = torch.promote_types(block.parameter.dtype, torch.float32)
    return {
        "step": torch.zeros((), dtype=torch.float32),
        "exp_avg": torch.zeros_like(block.parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(block.parameter, dtype=dtype),
    }


def _low_rank_state(block: Block) -> dict[str, Tensor]:
    dtype = torch.promote_types(block.parameter.dtype, torch.float32)
    device = block.parameter.device
    shape = core_shape(block.subspace, block.shape, block.rank)
    state = {key: torch.zeros(shape, dtype=dtype, device=device) for key in (FIRST_MOMENT, SECOND_MOMENT)}
    for key, side, length in zip((LEFT, RIGHT), sides(block.subspace, block.shape), block.shape, strict=True):
        if side:
            state[key] = torch.zeros(length, block.rank, dtype=dtype, device=device)
    return state

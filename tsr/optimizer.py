"""`LowRankAdam`: one step for every method, as a row of choices over shared parts.

    messages = project(local gradients) -> communicator.mean(messages) -> Adam on what came back -> lift -> update

The gradients in ``.grad`` are each worker's own; `LowRankAdam.step` averages what the method needs and nothing else.
Dense blocks are updated by torch's own AdamW. Equality of parameters and state on all workers holds after every step,
since every worker applies the same update.

A step that refreshes nothing never waits for the device: an update whose messages are not finite is masked, not
branched around, and `LowRankAdam.finite` says so when it is read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tsr.adam import adam, corrections
from tsr.blocks import ROLES, Block
from tsr.checks import is_number
from tsr.communicator import Communicator, Message
from tsr.outbox import Outbox, project
from tsr.refresh import METHODS, ONE_PASS, Average, Decomposition, RefreshRule, RefreshTask, Samples, gaussian
from tsr.stacks import FIRST_MOMENT, RIGHT, SECOND_MOMENT, Stack, make_stacks, parts
from tsr.subspace import Basis, are_finite, lift, rotate, sides

REDUCTIONS = ("dense", "projected")
MOMENTS = ("keep", "rotate", "reset")
EPS_MODES = ("corrected", "raw")


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
        accumulate: What the backward passes of a step leave: gradients (``None``), or ``core``: unless it refreshes, a
            low-rank block's gradient is projected, added to its core and freed as soon as it is there, so that
            gradients take the memory of the largest block; with a one-pass refresh also then. See `LowRankAdam.begin`.
        compile: Let torch.compile fuse the update of the cores (at the first step, which takes a C++ compiler and
            seconds); the result is the same to rounding. ``None`` and false: do not.
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
    accumulate: str | None = None
    compile: bool | None = None

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
        if self.compile not in (True, False, None):
            raise ValueError(f"optimizer.compile must be true, or false or null, got {self.compile!r}")
        if self.accumulate not in (None, "core"):
            raise ValueError(f"optimizer.accumulate must be core, or null for gradients, got {self.accumulate!r}")
        if self.accumulate == "core" and self.reduce == "dense":
            raise ValueError(
                "optimizer.accumulate=core needs optimizer.reduce=projected: with dense, whole gradients are averaged"
            )


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
        self.finite = torch.ones((), dtype=torch.bool)  # whether they were; if not, the step changed its number alone
        self._intervals = sorted({(block.interval, block.offset) for block in self.blocks if block.is_low_rank})
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
        if self.refresh.is_one_pass and options.reduce == "dense":
            raise ValueError(
                f"refresh.method={self.refresh.method} needs optimizer.reduce=projected: with dense, the mean gradient "
                f"is there whole; take svd or sketch"
            )
        self._stacks = make_stacks(self.blocks)
        self._places = {block: (stack, index) for stack in self._stacks for index, block in enumerate(stack.blocks)}
        self._dense = [block for block in self.blocks if not block.is_low_rank]
        for block in self.blocks:
            self.state[block.parameter] = self._state_of(block) if block.is_low_rank else _dense_state(block)
        self._adam = torch.compile(adam, dynamic=True) if options.compile else adam
        self._outbox = Outbox(
            self.blocks,
            self._places,
            self.communicator,
            whole=options.reduce == "dense",
            accumulate=options.accumulate == "core",
        )

    @property
    def updates(self) -> int:
        """Updates made so far: the clock of refreshes and bias correction. Setting it moves the clock (dry runs)."""
        return int(self.param_groups[0]["updates"])

    @updates.setter
    def updates(self, value: int) -> None:
        for group in self.param_groups:
            group["updates"] = value

    def step_kind(self, step: int) -> Hashable:
        """What distinguishes the messages of ``step`` (from 1): which refreshes fall due."""
        return tuple(self.refresh.due(step, *interval) for interval in self._intervals)

    def schedule(self) -> Counter[int]:
        """The kinds of steps from 2 on: a step of each, and how many of it there are until the schedule repeats."""
        period = math.lcm(*(interval for interval, _ in self._intervals))
        first: dict[Hashable, int] = {}
        return Counter(first.setdefault(self.step_kind(step), step) for step in range(2, 2 + period))

    def begin(self, passes: int) -> None:
        """Announce a step of ``passes`` backward passes, before the first of them; without it all waits for `step`.

        Projecting early (``accumulate="core"``) and sending early (``comm.overlap``) happen in these passes. A worker
        without rows announces 0.

        Raises:
            RuntimeError: If a step is under way already. More passes than were announced raise it, too.
        """
        if self._outbox.is_open:
            raise RuntimeError("a step is under way already: call step() before the next begin()")
        self._open(passes)

    def local_gradients(self) -> list[Tensor | None]:
        """This worker's own gradients before `step`, in the order of ``blocks``.

        Where no more is kept, the core, or the samples of a one-pass refresh in one tensor.
        """
        return [
            self._outbox.accumulated(block) if self._outbox.is_accumulated(block) else block.parameter.grad
            for block in self.blocks
        ]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Synchronise and update; ``closure``, if given, recomputes loss and gradients first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step = self.updates + 1
        due = self._due(step)
        if not self._outbox.is_open:
            self._open(None)
        for block in self.blocks:
            if block.parameter.grad is None and not self._outbox.is_accumulated(block):
                block.parameter.grad = torch.zeros_like(block.parameter)

        self.finite = torch.ones((), dtype=torch.bool, device=self.blocks[0].parameter.device)
        # At step 1 all of it is zeros, and most of what there ever is: no copy then.
        before: list[tuple[Tensor, Tensor | float]] = [
            (value, value.clone() if step > 1 else 0.0) for block in due for value in self._changed_by_refresh(block)
        ]
        self._outbox.send(refreshed=False)
        cores = [stack.core for stack in self._stacks]
        if self.options.reduce == "dense":
            # Whole gradients are averaged; what follows for low-rank blocks is local, and the same on every worker.
            self._outbox.finish()
            self._refresh(due, step, local=True)
            project(self._places, self._places)
            self._clip([_gradient(block) for block in self.blocks], also=cores)
        else:
            self._refresh(due, step, local=False)  # while what was sent is on its way
            self._outbox.send(refreshed=True)
            self._outbox.finish()
            self._clip([*cores, *(_gradient(block) for block in self._dense)])

        for value, old in before:  # that the refresh has changed
            value.copy_(torch.where(self.finite, value, old))
        del before
        for block in self._places:
            block.parameter.grad = None
        for group in self.param_groups:
            for blocks in parts([block for block in self._dense if block.role == group["role"]]):
                self._update_dense(blocks, group)
            for stack in self._stacks:
                if stack.role == group["role"]:
                    self._update(stack, group, step)
        self.updates = step
        self.communicator.ledger.close_step()
        return loss

    def _due(self, step: int) -> list[Block]:
        return [block for block in self._places if self.refresh.due(step, block.interval, block.offset)]

    def _open(self, passes: int | None) -> None:
        step = self.updates + 1
        due = self._due(step)
        samples = {block: self._samples_of(block, step) for block in due} if self.refresh.is_one_pass else {}
        self._outbox.open(due, samples=samples, passes=passes)

    def _state_of(self, block: Block) -> dict[str, Tensor]:
        stack, index = self._places[block]
        return stack.state(index)

    def _changed_by_refresh(self, block: Block) -> list[Tensor]:
        state = self._state_of(block)
        kept = (FIRST_MOMENT, SECOND_MOMENT) if self.options.moments == "keep" else ()
        return [value for key, value in state.items() if key not in kept]

    def _refresh(self, due: Sequence[Block], step: int, *, local: bool) -> None:
        """Give the blocks that are due a new basis, and carry or drop their moments."""
        if not due:
            return

        def synchronise(tensors: Sequence[Tensor], role: str) -> Sequence[Tensor]:
            # Blocks are matched to tensors in order; a method may send several tensors a block in one round.
            kinds = [block.kind for block in due] * (len(tensors) // len(due))
            self.communicator.mean([Message(tensor, role, kind) for tensor, kind in zip(tensors, kinds, strict=True)])
            return self._finite_or_zero(tensors)

        if self.refresh.is_one_pass:
            self._refresh_once(due, synchronise)
            return
        average: Average = (lambda tensors, role: self._finite_or_zero(tensors)) if local else synchronise
        bases = METHODS[self.refresh.method]([self._task(block, step) for block in due], self.refresh, average)
        for block, basis in zip(due, bases, strict=True):
            self._change_basis(block, basis)

    def _refresh_once(self, due: Sequence[Block], average: Average) -> None:
        """New bases from samples, and the cores that these give."""
        samples = [self._outbox.samples[block] for block in due]
        for block, sample in zip(due, samples, strict=True):
            if not self._outbox.is_accumulated(block):
                stack, index = self._places[block]
                sample.add(stack.gradient(index))
        found = ONE_PASS[self.refresh.method](samples, self.refresh, average)
        for block, decomposition in zip(due, found, strict=True):
            self._change_basis(block, decomposition.basis)
            self._derive_core(block, decomposition)

    def _finite_or_zero(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, or zeros if one is not finite: a factorisation of such values would raise, or wait."""
        self.finite = self.finite & are_finite(tensors).all()
        return [torch.where(self.finite, tensor, 0) for tensor in tensors]

    def _task(self, block: Block, step: int) -> RefreshTask:
        # A method may average the gradient in place (`svd` does): projecting the mean later gives the same core as the
        # mean of projections, so no copy is kept.
        return RefreshTask(_gradient(block), block.rank, lambda: self._start(block, step))

    def _samples_of(self, block: Block, step: int) -> Samples:
        stack, _ = self._places[block]
        name, seed = f"{block.name}/left", self.refresh.seed
        return Samples(
            block.shape,
            block.rank,
            self.refresh.width(block.rank, block.shape),
            right=lambda: self._start(block, step),
            left=lambda shape: gaussian(shape, seed=seed, step=step, name=name, like=stack.core),
            like=stack.core,
        )

    def _start(self, block: Block, step: int) -> Tensor:
        """What a sketch multiplies, n x k."""
        stack, _ = self._places[block]
        width = self.refresh.width(block.rank, block.shape)
        kept = []
        if self.refresh.start == "previous" and step > 1:
            kept = [self.state[block.parameter][RIGHT]]
            width -= block.rank
        shape = (block.shape[1], width)
        drawn = gaussian(shape, seed=self.refresh.seed, step=step, name=block.name, like=stack.core)
        return torch.cat([*kept, drawn], dim=1)

    def _change_basis(self, block: Block, basis: Basis) -> None:
        """Put a block's new basis in the place of the old one, and see to its moments."""
        stack, index = self._places[block]
        left, right = sides(block.subspace, block.shape)
        old, new = stack.basis_of(index), Basis(basis.left if left else None, basis.right if right else None)
        first, second = stack.first[index], stack.second[index]
        if self.options.moments == "rotate":
            first.copy_(rotate(first, old, new))
            second.copy_(rotate(second, old, new, squared=True))
        elif self.options.moments == "reset":
            first.zero_()
            second.zero_()
        for before, after in zip(old, new, strict=True):
            if before is not None and after is not None:
                before.copy_(after)

    def _derive_core(self, block: Block, decomposition: Decomposition) -> None:
        """The core of U S V^T: S, times U or V on a side without a basis."""
        stack, index = self._places[block]
        (left, right), values = decomposition
        kept_left, kept_right = sides(block.subspace, block.shape)
        outside = Basis(None if kept_left else left, None if kept_right else right)
        stack.core[index].copy_(lift(values.diag(), outside))

    def _clip(self, averaged: Sequence[Tensor], *, also: Sequence[Tensor] = ()) -> None:
        """Record the norm of the averaged messages and, if asked for, scale them (and what was made of them) down."""
        # In at least fp32: the norm of a bf16 tensor would have three digits.
        wide = [torch.promote_types(tensor.dtype, torch.float32) for tensor in averaged]
        norms = [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor, dtype in zip(averaged, wide, strict=True)]
        self.grad_norm = torch.linalg.vector_norm(torch.stack(norms))
        self.finite = self.finite & torch.isfinite(self.grad_norm)
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
            # The fused kernel alone can mask an update; meta tensors have none.
            fused=not wide[0].is_meta,
            found_inf=None if wide[0].is_meta else (~self.finite).float(),
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for weights, block in zip(wide, blocks, strict=True):
            if weights is not block.parameter:
                block.parameter.copy_(weights)  # rounded to the parameter's dtype, once

    def _update(self, stack: Stack, group: dict[str, Any], step: int) -> None:
        ages = [step]
        if self.options.moments == "reset":
            ages = [self.refresh.age(step, block.interval, block.offset) for block in stack.blocks]
        first, second, direction = self._adam(
            stack.first,
            stack.second,
            stack.core,
            self.finite,
            corrections(ages, betas=group["betas"], like=stack.core),
            betas=group["betas"],
            eps=group["eps"],
            eps_mode=self.options.eps_mode,
        )
        stack.first.copy_(first)
        stack.second.copy_(second)
        decay = None
        if group["weight_decay"]:
            decay = 1 - group["lr"] * group["weight_decay"] * self.finite.to(stack.dtype)
        stack.move(direction, lr=group["lr"] * self.options.scale, decay=decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over saved state into this optimizer's own tensors, whose dtypes are not the parameters'."""
        super().load_state_dict(state_dict)
        parameters = [p for group in self.param_groups for p in group["params"]]
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        blocks = {block.parameter: block for block in self.blocks}
        for index, parameter in zip(indices, parameters, strict=True):
            saved, block = state_dict["state"][index], blocks[parameter]
            own = self._state_of(block) if block.is_low_rank else _dense_state(block)
            for key, value in saved.items():
                own[key].copy_(value)
            self.state[parameter] = own


def _gradient(block: Block) -> Tensor:
    gradient = block.parameter.grad
    assert gradient is not None
    return gradient


def _dense_state(block: Block) -> dict[str, Tensor]:
    """What torch.optim.AdamW would make at its first step, but at least fp32: in bf16, beta2 = 0.999 decays nothing."""
    dtype = torch.promote_types(block.parameter.dtype, torch.float32)
    device = block.parameter.device
    return {
        "step": torch.zeros((), dtype=torch.float32, device="cpu" if device.type == "meta" else device),
        "exp_avg": torch.zeros_like(block.parameter, dtype=dtype),
        "exp_avg_sq": torch.zeros_like(block.parameter, dtype=dtype),
    }

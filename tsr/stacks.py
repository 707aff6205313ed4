"""Stacks: low-rank blocks that are treated alike, worked on together.

The state of a stack's B blocks lies in tensors with a leading dimension B, so that a step makes one projection, one
Adam and one lift a stack, however many matrices there are; each block's own state is a view of them. Same notation as
`tsr.subspace`, with [B, …] in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from tsr.blocks import Block
from tsr.subspace import Basis, core_shape, lift, project, sides

LIMIT = 2**24  # elements of all gradients of a stack: what a step needs beside them is so large, 64 MiB in fp32

# Keys of the optimizer state of a low-rank block. All state is at least fp32 whatever the parameter's dtype, and so is
# the arithmetic of an update, which rounds the weights once.
FIRST_MOMENT, SECOND_MOMENT, LEFT, RIGHT = "core_exp_avg", "core_exp_avg_sq", "left", "right"


class Stack:
    """Blocks of one role, shape, subspace, rank and interval, with their state.

    ``core`` [B, …] are the projected gradients of the step under way, ``first`` and ``second`` their moments, of the
    same shape; ``basis`` is [B, m, r] and [B, n, r].
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = list(blocks)
        one = blocks[0]
        self.role, self.interval = one.role, one.interval
        self.dtype = torch.promote_types(one.parameter.dtype, torch.float32)
        shape = core_shape(one.subspace, one.shape, one.rank)

        def zeros(*size: int) -> Tensor:
            return torch.zeros(len(self.blocks), *size, dtype=self.dtype, device=one.parameter.device)

        self.core, self.first, self.second = zeros(*shape), zeros(*shape), zeros(*shape)
        left, right = sides(one.subspace, one.shape)
        self.basis = Basis(
            zeros(one.shape[0], one.rank) if left else None, zeros(one.shape[1], one.rank) if right else None
        )

    def state(self, index: int) -> dict[str, Tensor]:
        """The state of one block, as views."""
        basis = self.basis_of(index)
        bases = {key: side for key, side in ((LEFT, basis.left), (RIGHT, basis.right)) if side is not None}
        return {FIRST_MOMENT: self.first[index], SECOND_MOMENT: self.second[index], **bases}

    def basis_of(self, index: int) -> Basis:
        """The basis of one block, as views."""
        left, right = self.basis
        return Basis(None if left is None else left[index], None if right is None else right[index])

    def gradient(self, index: int) -> Tensor:
        """The gradient of one block, m x n, at the dtype of the state."""
        gradient = self.blocks[index].parameter.grad
        assert gradient is not None
        return gradient.to(self.dtype)

    def project(self, indices: Sequence[int]) -> None:
        """Write the cores of these blocks' gradients into ``core``."""
        if len(indices) == len(self.blocks) > 1:
            gradients = torch.stack([self.gradient(index) for index in indices])
            self.core.copy_(project(gradients, self.basis))
            return
        for index in indices:
            self.core[index].copy_(project(self.gradient(index), self.basis_of(index)))

    def add_projected(self, index: int) -> None:
        """Add the core of one block's gradient to ``core``."""
        self.core[index].add_(project(self.gradient(index), self.basis_of(index)))

    def move(self, direction: Tensor, *, lr: float, decay: Tensor | None) -> None:
        """W <- W decay - lr U D V^T for every block; ``decay`` is a scalar tensor, or None for 1."""
        weights: list[Tensor] = [block.parameter for block in self.blocks]
        wide = [weight.to(self.dtype) for weight in weights]
        if decay is not None:
            torch._foreach_mul_(wide, decay)
        torch._foreach_add_(wide, list(lift(direction, self.basis).unbind()), alpha=-lr)
        if weights[0].dtype != self.dtype:
            torch._foreach_copy_(weights, wide)


def make_stacks(blocks: Iterable[Block]) -> list[Stack]:
    """Stacks of the low-rank ones among ``blocks``, each of `LIMIT` elements at most (or of one block)."""
    alike: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        if block.is_low_rank:
            parameter = block.parameter
            place = (parameter.dtype, parameter.device)
            alike.setdefault((block.role, block.shape, block.subspace, block.rank, block.interval, place), []).append(
                block
            )
    return [Stack(part) for members in alike.values() for part in parts(members)]


def parts(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """The blocks in runs of `LIMIT` elements at most each, or of one block."""
    run: list[Block] = []
    elements = 0
    for block in blocks:
        if run and elements + block.parameter.numel() > LIMIT:
            yield run
            run, elements = [], 0
        run.append(block)
        elements += block.parameter.numel()
    if run:
        yield run

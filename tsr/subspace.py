"""Subspaces: projecting a gradient onto a basis, lifting an update back, carrying moments from basis to basis.

Pure tensor algebra; nothing here knows of workers. A basis is a pair ``(left, right)``: ``left`` is U (m x r) or
``None`` for the identity, ``right`` is V (n x r) or ``None``. Two-sided blocks have both, one-sided blocks the one on
the smaller side, as GaLore's ``std`` does, so that the core is r x max(m, n).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SUBSPACES = ("dense", "one_sided", "two_sided")


class Basis(NamedTuple):
    """Orthonormal columns on the left (m x r) and on the right (n x r); ``None`` stands for the identity."""

    left: Tensor | None
    right: Tensor | None


def sides(subspace: str, shape: tuple[int, int]) -> tuple[bool, bool]:
    """Which sides of an m x n block carry a basis: ``(left, right)``."""
    assert subspace in SUBSPACES
    if subspace == "dense":
        return False, False
    if subspace == "two_sided":
        return True, True
    rows, columns = shape
    return rows < columns, rows >= columns


def core_shape(subspace: str, shape: tuple[int, int], rank: int) -> tuple[int, int]:
    """Shape of the projected gradient: r x r two-sided, r x max(m, n) (or its transpose) one-sided."""
    left, right = sides(subspace, shape)
    return (rank if left else shape[0]), (rank if right else shape[1])


def project(gradient: Tensor, basis: Basis) -> Tensor:
    """U^T G V (m x n -> core), the smaller product first; TSR paper, section 3.2."""
    core = gradient
    if basis.left is not None:
        core = basis.left.mT @ core
    if basis.right is not None:
        core = core @ basis.right
    return core


def lift(core: Tensor, basis: Basis) -> Tensor:
    """U C V^T (core -> m x n); TSR paper, equation 5."""
    update = core
    if basis.right is not None:
        update = update @ basis.right.mT
    if basis.left is not None:
        update = basis.left @ update
    return update


def rotate(core: Tensor, old: Basis, new: Basis, *, squared: bool = False) -> Tensor:
    """A core given in the old basis, expressed in the new one.

    The first moment goes by the overlaps: (U'^T U) m (V'^T V)^T. The second moment goes by their squares, which keeps
    it non-negative and is exact where the coordinates are uncorrelated (``squared=True``).
    """
    for side, (before, after) in enumerate(zip(old, new, strict=True)):
        if before is None or after is None:
            continue
        overlap = after.mT @ before
        if squared:
            overlap = overlap.square()
        core = overlap @ core if side == 0 else core @ overlap.mT
    return core


def fix_signs(left: Tensor, right: Tensor) -> Basis:
    """The same pairs of singular vectors, with the largest entry of each left one positive.

    A factorisation leaves the signs open and libraries differ; moments that outlive a basis would differ with them.
    """
    largest = left.gather(0, left.abs().argmax(dim=0, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(left.dtype)
    return Basis(left * signs, right * signs)


def orthonormalise(matrix: Tensor) -> Tensor:
    """Orthonormal columns spanning those of an m x k matrix (m >= k), by thin QR."""
    return torch.linalg.qr(matrix)[0]


def each(function: Callable[..., Sequence[Tensor]], *operands: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    """``function`` of each matrix, called once for all of a shape, with them stacked: [B, m, n].

    It returns several tensors, each with B in front; here every matrix gets its own of each. A function of several
    matrices takes a list of each, of equal lengths.
    """
    groups = list(zip(*operands, strict=True))
    results: list[tuple[Tensor, ...]] = [()] * len(groups)
    alike: dict[tuple[torch.Size, ...], list[int]] = {}
    for index, group in enumerate(groups):
        alike.setdefault(tuple(matrix.shape for matrix in group), []).append(index)
    for indices in alike.values():
        parts = function(*(torch.stack([matrices[index] for index in indices]) for matrices in operands))
        for index, own in zip(indices, zip(*(part.unbind() for part in parts), strict=True), strict=True):
            results[index] = own
    return results


def are_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor (not empty), whether all elements are finite: bool, as many as tensors; waits for no device.

    The extremes are NaN or infinite exactly if an element is. A norm could overflow, or takes ten times as long.
    """
    extremes = [torch.stack(tensor.aminmax()).double() for tensor in tensors]
    return torch.isfinite(torch.stack(extremes)).all(dim=1)

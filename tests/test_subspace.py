"""The algebra of bases: projecting, lifting, carrying moments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tsr.subspace import Basis, are_finite, core_shape, fix_signs, lift, orthonormalise, project, rotate, sides

SHAPES = [(7, 5), (5, 7), (6, 6)]
RANK = 3


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def random_basis(subspace: str, shape: tuple[int, int], rank: int = RANK) -> Basis:
    left, right = sides(subspace, shape)
    return Basis(
        orthonormalise(random(shape[0], rank)) if left else None,
        orthonormalise(random(shape[1], rank)) if right else None,
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_one_sided_basis_is_on_the_smaller_side() -> None:
    assert sides("one_sided", (5, 7)) == (True, False)
    assert sides("one_sided", (7, 5)) == (False, True)
    assert sides("one_sided", (6, 6)) == (False, True)  # as GaLore's "std" does
    assert sides("two_sided", (5, 7)) == (True, True)
    assert sides("dense", (5, 7)) == (False, False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("subspace", ["one_sided", "two_sided"])
def test_core_has_the_announced_shape_and_survives_the_way_up_and_down(subspace: str, shape: tuple[int, int]) -> None:
    basis = random_basis(subspace, shape)
    core = project(random(*shape), basis)
    assert core.shape == core_shape(subspace, shape, RANK)
    assert core.numel() == (RANK**2 if subspace == "two_sided" else RANK * max(shape))
    assert lift(core, basis).shape == shape
    assert_close(project(lift(core, basis), basis), core)


@pytest.mark.parametrize("shape", SHAPES)
def test_projection_is_the_written_formula_and_linear(shape: tuple[int, int]) -> None:
    basis = random_basis("two_sided", shape)
    u, v = basis
    assert u is not None and v is not None
    first, second = random(*shape), random(*shape)
    assert_close(project(first, basis), u.T @ first @ v)
    assert_close(lift(u.T @ first @ v, basis), u @ u.T @ first @ v @ v.T)
    assert_close(project((first + second) / 2, basis), (project(first, basis) + project(second, basis)) / 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("subspace", ["dense", "one_sided", "two_sided"])
def test_full_rank_loses_nothing(subspace: str, shape: tuple[int, int]) -> None:
    left, right = sides(subspace, shape)
    basis = Basis(
        orthonormalise(random(shape[0], shape[0])) if left else None,
        orthonormalise(random(shape[1], shape[1])) if right else None,
    )
    gradient = random(*shape)
    assert_close(lift(project(gradient, basis), basis), gradient)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("subspace", ["one_sided", "two_sided"])
def test_rotating_within_a_subspace_changes_no_lifted_moment(subspace: str, shape: tuple[int, int]) -> None:
    old = random_basis(subspace, shape)
    turn = orthonormalise(random(RANK, RANK))
    new = Basis(*(None if side is None else side @ turn for side in old))
    core = random(*core_shape(subspace, shape, RANK))
    assert_close(lift(rotate(core, old, new), new), lift(core, old))
    assert_close(rotate(rotate(core, old, new), new, old), core)


@pytest.mark.parametrize("subspace", ["one_sided", "two_sided"])
def test_rotating_into_another_subspace_is_projecting_what_was_lifted(subspace: str) -> None:
    shape = (7, 5)
    old, new = random_basis(subspace, shape), random_basis(subspace, shape)
    core = random(*core_shape(subspace, shape, RANK))
    assert_close(rotate(core, old, new), project(lift(core, old), new))


def test_second_moment_rotates_by_squared_overlaps() -> None:
    """Exact for the diagonal of a covariance: the variance of a sum of uncorrelated terms."""
    old, new = random_basis("two_sided", (7, 5)), random_basis("two_sided", (7, 5))
    variance = random(RANK, RANK).square()
    rotated = rotate(variance, old, new, squared=True)
    assert (rotated >= 0).all()
    expected = torch.zeros_like(variance)
    for i in range(RANK):
        for j in range(RANK):
            unit = torch.zeros_like(variance)
            unit[i, j] = variance[i, j].sqrt()
            expected += rotate(unit, old, new).square()
    assert_close(rotated, expected)


def test_rotating_into_the_same_basis_changes_nothing() -> None:
    basis = random_basis("two_sided", (7, 5))
    core = random(RANK, RANK)
    assert_close(rotate(core, basis, basis), core)
    assert_close(rotate(core.square(), basis, basis, squared=True), core.square())


def test_orthonormalise_keeps_the_span() -> None:
    matrix = random(9, 4)
    q = orthonormalise(matrix)
    assert_close(q.T @ q, torch.eye(4, dtype=torch.float64))
    assert_close(q @ (q.T @ matrix), matrix)


def test_signs_of_singular_vectors_do_not_depend_on_the_library() -> None:
    matrix = random(7, 5)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    flips = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=matrix.dtype)
    basis, flipped = fix_signs(left, right.mT), fix_signs(left * flips, right.mT * flips)
    assert basis.left is not None and basis.right is not None and flipped.left is not None
    assert flipped.right is not None and torch.equal(basis.left, flipped.left)
    assert torch.equal(basis.right, flipped.right)
    assert_close(basis.left * values @ basis.right.mT, matrix)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_are_finite_finds_every_such_element_and_no_large_one(dtype: torch.dtype, value: float) -> None:
    large = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)  # of which no norm is finite
    low, bad = torch.full((5,), torch.finfo(dtype).min, dtype=dtype), torch.zeros(70, dtype=dtype)
    assert are_finite([large, low, bad]).tolist() == [True, True, True]
    bad[66] = value
    assert are_finite([large, bad, low]).tolist() == [True, False, True]

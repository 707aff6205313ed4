"""Refresh: when a block gets a new basis, and how.

When is a pure function of the global step (`RefreshRule.due`), so all workers agree without a word. How is local
algebra between rounds of communication: each method takes the local gradients of all blocks that refresh and a function
``average(tensors, role)`` that returns the means over the workers, one round a call. Nothing here branches on the value
of a tensor, so the same code runs on meta tensors in a dry run.

Notation: G is m x n, r the rank, k = min(r + p, m, n) with oversampling p, q the number of power iterations,
l = min(2 k + 1, m).

| method | sends on a refresh | source |
|---|---|---|
| ``svd`` | G: m n | exact SVD of the mean gradient, as GaLore does |
| ``sketch`` | Y and B: (1 + q) (m + n) k | Algorithm 1 made sound: the sketch is averaged |
| ``local_sketch`` | Q and B: (m + n) k | Algorithm 1 of the TSR paper to the letter: local bases are averaged |
| ``one_pass`` | Y and W: m k + l n; no core | Tropp, Yurtsever, Udell, Cevher 2017: two sketches taken at once |

The first three look at the gradient itself, and the core follows in a message of its own. A one-pass method sees no
more of it than `Samples`, which are linear in it: they add up over micro-batches, are averaged in one round, and the
core is derived from them. It spares memory and a round, not bytes: l is about 2 k where B has k rows, and where 2 k + 1
reaches m, W is G itself.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tsr.blocks import Block
from tsr.checks import is_whole
from tsr.subspace import Basis, each, fix_signs, orthonormalise

LONGEST_PERIOD = 100_000  # steps

Average = Callable[[Sequence[Tensor], str], Sequence[Tensor]]
RefreshMethod = Callable[[Sequence["RefreshTask"], "RefreshRule", Average], list[Basis]]
OnePassMethod = Callable[[Sequence["Samples"], "RefreshRule", Average], list["Decomposition"]]


@dataclass(frozen=True)
class RefreshTask:
    """One block that is due: its local gradient (m x n, of any dtype) and its rank.

    ``gradient`` and ``start`` are made when a method asks for them, so that not all blocks have theirs at once.
    """

    local: Tensor
    rank: int
    draw: Callable[[], Tensor]

    @property
    def gradient(self) -> Tensor:
        """The local gradient in at least fp32; itself if it is that already."""
        return self.local.to(torch.promote_types(self.local.dtype, torch.float32))

    @property
    def start(self) -> Tensor:
        """What a sketch multiplies (n x k), the same on every worker."""
        return self.draw()


class Samples:
    """What a one-pass method gets to see of a block that is due: Y = G Omega (m x k) and W = Psi^T G (l x n).

    Both are sums over the gradients added so far and lie in one tensor, ``flat``. Omega (n x k) and Psi (m x l; the
    identity where l = m) are drawn again for each gradient rather than kept, for all blocks that are due would keep
    theirs at once, as large as Y and W.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        width: int,
        *,
        right: Callable[[], Tensor],
        left: Callable[[tuple[int, int]], Tensor],
        like: Tensor,
    ) -> None:
        """Nothing is added yet.

        Args:
            shape: (m, n) of the block.
            width: k.
            right: Omega, the same on every worker and whenever it is drawn.
            left: A Gaussian matrix of a shape, Psi, independent of Omega and the same in every other way.
            like: Dtype and device.
        """
        self.rank = rank
        self._shape, self._width, self._depth = shape, width, min(2 * width + 1, shape[0])
        self._right, self._left = right, left
        self.flat = like.new_zeros(shape[0] * width + self._depth * shape[1])

    def add(self, gradient: Tensor) -> None:
        """Add those of a gradient, m x n, of the dtype of the samples."""
        columns, rows = self.split(self.flat)
        columns.addmm_(gradient, self._right())
        rows.add_(self.see(gradient))

    def see(self, matrix: Tensor) -> Tensor:
        """Psi^T times a matrix of m rows."""
        rows = self._shape[0]
        return matrix if self._depth == rows else self._left((rows, self._depth)).mT @ matrix

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Y and W, as views of a tensor like ``flat``."""
        (rows, columns), width = self._shape, self._width
        return flat[: rows * width].view(rows, width), flat[rows * width :].view(self._depth, columns)


class Decomposition(NamedTuple):
    """U S V^T of rank r, which stands for the mean gradient: the basis and the values (r)."""

    basis: Basis
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class RefreshRule:
    """How bases are refreshed; the interval is each block's own.

    Args:
        method: A key of `METHODS` or `ONE_PASS`.
        oversampling: p, columns of the sketch beyond the rank.
        power_iterations: q; synchronised and counted in ``sketch``, local in ``local_sketch``, 0 in ``one_pass``.
        start: What the sketch multiplies: ``gaussian`` draws afresh, ``previous`` starts from the right basis in use
            (two-sided blocks only), filled up with Gaussian columns.
        phase: A block refreshes at step 1 and wherever ``(step - phase)`` is a multiple of its interval: 1 gives steps
            1, K+1, 2K+1, ..., 0 gives 1, K, 2K, ... as Algorithm 1 does.
        stagger: Spread the refreshes of blocks over the steps of their interval, so that the largest step after the
            first is close to the mean (see `staggered`); ``None`` and false: all of a role refresh at once.
        seed: Of the Gaussian matrices, which depend on (seed, step, block) alone.
    """

    method: str = "sketch"
    oversampling: int = 5
    power_iterations: int = 0
    start: str = "gaussian"
    phase: int = 1
    stagger: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        methods = (*METHODS, *ONE_PASS)
        if self.method not in methods:
            raise ValueError(f"refresh.method must be one of {', '.join(methods)}, got {self.method!r}")
        if not is_whole(self.oversampling, least=0):
            raise ValueError(
                f"refresh.oversampling must be a whole number of at least 0 columns, got {self.oversampling!r}"
            )
        if not is_whole(self.power_iterations, least=0):
            raise ValueError(
                f"refresh.power_iterations must be a whole number of at least 0, got {self.power_iterations!r}"
            )
        if self.is_one_pass and self.power_iterations:
            raise ValueError(
                f"refresh.power_iterations must be 0 with refresh.method={self.method}, which sees each gradient once, "
                f"got {self.power_iterations}"
            )
        if self.start not in ("gaussian", "previous"):
            raise ValueError(f"refresh.start must be gaussian or previous, got {self.start!r}")
        if self.phase not in (0, 1):
            raise ValueError(f"refresh.phase must be 0 (steps 1, K, 2K, ...) or 1 (1, K+1, ...), got {self.phase!r}")
        if self.stagger not in (True, False, None):
            raise ValueError(f"refresh.stagger must be true, or false or null (all at once), got {self.stagger!r}")

    @property
    def is_one_pass(self) -> bool:
        """Whether blocks that are due send samples of their gradients, and no core."""
        return self.method in ONE_PASS

    def due(self, step: int, interval: int, offset: int = 0) -> bool:
        """Whether a block of this interval and offset refreshes at ``step`` (from 1); at step 1 all do."""
        return step == 1 or (step - self.phase - offset) % interval == 0

    def age(self, step: int, interval: int, offset: int = 0) -> int:
        """Updates made with the basis in use, the one at ``step`` included."""
        since = (step - self.phase - offset) % interval + 1
        return min(since, step)

    def width(self, rank: int, shape: tuple[int, int]) -> int:
        """k, the columns of a sketch."""
        return min(rank + self.oversampling, *shape)


def gaussian(shape: tuple[int, int], *, seed: int, step: int, name: str, like: Tensor) -> Tensor:
    """A standard normal matrix that depends on (seed, step, name) alone: the same on every worker, device and dtype."""
    digest = hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(shape, generator=generator).to(device=like.device, dtype=like.dtype)


def staggered(blocks: Sequence[Block], rule: RefreshRule) -> list[Block]:
    """The blocks with offsets that spread their refreshes evenly.

    A refresh weighs what it sends: a sketch's (m + n) k, or the m n of the gradient for an SVD. The heaviest block
    chooses first, and each takes the offset at which the heaviest of its steps is lightest so far; so two heavy blocks
    never refresh together if it can be helped.
    """
    low_rank = [block for block in blocks if block.is_low_rank]
    period = math.lcm(*(block.interval for block in low_rank))
    if period > LONGEST_PERIOD:
        intervals = ", ".join(map(str, sorted({block.interval for block in low_rank})))
        raise ValueError(
            f"refresh.stagger=true needs intervals that fall together again within {LONGEST_PERIOD} steps, as "
            f"multiples do, got {intervals}"
        )
    weights = {
        block: math.prod(block.shape)
        if rule.method == "svd"
        else sum(block.shape) * rule.width(block.rank, block.shape)
        for block in low_rank
    }
    load = np.zeros(period, np.int64)
    offsets: dict[Block, int] = {}
    for block in sorted(low_rank, key=lambda block: -weights[block]):
        by_offset = load.reshape(-1, block.interval)
        offsets[block] = int(by_offset.max(axis=0).argmin())
        by_offset[:, offsets[block]] += weights[block]
    return [replace(block, offset=offsets.get(block, 0)) for block in blocks]


def svd(tasks: Sequence[RefreshTask], rule: RefreshRule, average: Average) -> list[Basis]:
    """Leading singular vectors of the mean gradient, which is synchronised whole."""
    means = average([task.gradient for task in tasks], "dense")
    factors = each(_svd, means)
    return [
        fix_signs(left[:, : task.rank], right[: task.rank].mT)
        for task, (left, _, right) in zip(tasks, factors, strict=True)
    ]


def sketch(tasks: Sequence[RefreshTask], rule: RefreshRule, average: Average) -> list[Basis]:
    """Randomised SVD of the mean gradient from synchronised sketches.

    Y = mean(G) Omega and B = Q^T mean(G) are exact, for sketching is linear: Q is orthonormal and the same everywhere.
    """
    sketches = average([task.gradient @ task.start for task in tasks], "sketch")
    for _ in range(rule.power_iterations):
        columns = _orthonormalise(sketches)
        rows = average([task.gradient.mT @ q for task, q in zip(tasks, columns, strict=True)], "sketch")
        starts = _orthonormalise(rows)
        sketches = average([task.gradient @ w for task, w in zip(tasks, starts, strict=True)], "sketch")
    ranges = _orthonormalise(sketches)
    del sketches  # as much as the left half of all bases
    reduced = average([q.mT @ task.gradient for task, q in zip(tasks, ranges, strict=True)], "sketch")
    return _bases_of(tasks, ranges, reduced)


def local_sketch(tasks: Sequence[RefreshTask], rule: RefreshRule, average: Average) -> list[Basis]:
    """Algorithm 1 of the TSR paper to the letter.

    Each worker makes its own Q_i; mean(Q_i) is not orthonormal and mean(Q_i^T G_i) is not mean(Q)^T mean(G) unless the
    workers' gradients agree. Kept to compare with the paper.
    """
    ranges = _orthonormalise([task.gradient @ task.start for task in tasks])
    for _ in range(rule.power_iterations):
        rows = _orthonormalise([task.gradient.mT @ q for task, q in zip(tasks, ranges, strict=True)])
        ranges = _orthonormalise([task.gradient @ w for task, w in zip(tasks, rows, strict=True)])
    reduced = [q.mT @ task.gradient for task, q in zip(tasks, ranges, strict=True)]
    means = average([*ranges, *reduced], "sketch")
    return _bases_of(tasks, means[: len(tasks)], means[len(tasks) :])


def one_pass(samples: Sequence[Samples], rule: RefreshRule, average: Average) -> list[Decomposition]:
    """Truncated SVD of Q B, with Q = orth(Y) and B the least-squares solution of Psi^T Q B = W; see `Samples`.

    Tropp, Yurtsever, Udell and Cevher, "Practical sketching algorithms for low-rank matrix approximation" (2017),
    section 4. B is Q^T mean(G) but for an error whose expected square is k / (l - k - 1) times that of Q: as much
    again, for l = 2 k + 1. With a flat spectrum this is much, and S comes out too large.
    """
    means = average([sample.flat for sample in samples], "sketch")
    columns, rows = zip(*(sample.split(mean) for sample, mean in zip(samples, means, strict=True)), strict=True)
    ranges = _orthonormalise(columns)
    seen = [sample.see(q) for sample, q in zip(samples, ranges, strict=True)]
    reduced = [b for (b,) in each(_least_squares, seen, rows)]
    return _decompose([sample.rank for sample in samples], ranges, reduced)


def _bases_of(tasks: Sequence[RefreshTask], ranges: Sequence[Tensor], reduced: Sequence[Tensor]) -> list[Basis]:
    return [basis for basis, _ in _decompose([task.rank for task in tasks], ranges, reduced)]


def _decompose(ranks: Sequence[int], ranges: Sequence[Tensor], reduced: Sequence[Tensor]) -> list[Decomposition]:
    """U = Q Ut[:, :r] and V = Vt[:, :r] from B = Ut S Vt^T (k x n), and S[:r], for each block."""
    factors = each(_svd, reduced)
    return [
        Decomposition(fix_signs(q @ left[:, :rank], right[:rank].mT), values[:rank])
        for rank, q, (left, values, right) in zip(ranks, ranges, factors, strict=True)
    ]


def _svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    return left, values, right


def _least_squares(matrices: Tensor, images: Tensor) -> tuple[Tensor]:
    """X (k x n) that minimises |A X - W|, for A (l x k) of full rank; `torch.linalg.lstsq` would check and wait."""
    q, r = torch.linalg.qr(matrices)
    return (torch.linalg.solve_triangular(r, q.mT @ images, upper=True),)


def _orthonormalise(matrices: Sequence[Tensor]) -> list[Tensor]:
    return [q for (q,) in each(lambda stacked: (orthonormalise(stacked),), matrices)]


METHODS: dict[str, RefreshMethod] = {"svd": svd, "sketch": sketch, "local_sketch": local_sketch}
ONE_PASS: dict[str, OnePassMethod] = {"one_pass": one_pass}

"""Conventions that printed figures fit though the paper's text does not state them, as formulas from shapes.

They explain; nothing is counted by them. Notation: a linear is m x n with rank r and refresh interval K, Σ runs over
the linears, the embedding is V x h with rank s, refreshed every 2 steps. A function takes the kinds of blocks of a
summary (`tsr.blocks.describe`) and returns bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Blocks = Sequence[Mapping[str, Any]]
WIRE = 4
"""Bytes of a sent element: what the printed bytes of AdamW show."""
KEPT = 2
"""Bytes of a kept element: what the printed memory of AdamW shows."""


@dataclass(frozen=True)
class Matrix:
    """A kind of matrix that occurs `count` times; a dense one has rank 0."""

    m: int
    n: int
    count: int
    rank: int
    interval: int


def _matrices(blocks: Blocks, role: str) -> list[Matrix]:
    matrices = []
    for block in blocks:
        sides = [int(side) for side in block["shape"].split("x")]
        if block["role"] == role and len(sides) == 2:
            matrices.append(Matrix(sides[0], sides[1], block["blocks"], block["rank"] or 0, block["refresh"] or 1))
    return matrices


def _dense(blocks: Blocks, role: str) -> int:
    return sum(x.count * x.m * x.n for x in _matrices(blocks, role))


def attention_cores_peak(blocks: Blocks) -> float:
    """4 [Σ ((m + n) r + a r²) + (V + h) s + s²], with a = 1 for square linears, those of attention, and else 0."""
    linears, embeddings = _matrices(blocks, "linear"), _matrices(blocks, "embedding")
    elements = sum(x.count * ((x.m + x.n) * x.rank + (x.rank**2 if x.m == x.n else 0)) for x in linears)
    elements += sum(x.count * ((x.m + x.n) * x.rank + x.rank**2) for x in embeddings)
    return WIRE * elements


def attention_cores_average(blocks: Blocks) -> float:
    """4 [Σ (r² + ((m + n) r − b r²) / K) + s² + (V + h) s / 2], with b = 0 for square linears and else 1."""
    linears, embeddings = _matrices(blocks, "linear"), _matrices(blocks, "embedding")
    elements = 0.0
    for x in linears:
        left_out = 0 if x.m == x.n else x.rank**2
        elements += x.count * (x.rank**2 + ((x.m + x.n) * x.rank - left_out) / x.interval)
    elements += sum(x.count * (x.rank**2 + (x.m + x.n) * x.rank / x.interval) for x in embeddings)
    return WIRE * elements


def half_gradient_peak(blocks: Blocks) -> float:
    """4 [V h + ½ Σ (m n + (m + n) r)]."""
    half = sum(x.count * (x.m * x.n + (x.m + x.n) * x.rank) for x in _matrices(blocks, "linear")) / 2
    return WIRE * (_dense(blocks, "embedding") + half)


def half_gradient_average(blocks: Blocks) -> float:
    """One step in K as `half_gradient_peak`, the others 4 [V h + Σ r max(m, n)]."""
    linears = _matrices(blocks, "linear")
    ordinary = WIRE * (_dense(blocks, "embedding") + sum(x.count * x.rank * max(x.m, x.n) for x in linears))
    interval = linears[0].interval
    return ordinary + (half_gradient_peak(blocks) - ordinary) / interval


def head_weight(blocks: Blocks) -> float:
    """2 [Σ (m n + (m + n) r + 2 r²) + V h + h V]: the embedding's weight, the head's, and no state of either."""
    linears = sum(x.count * (x.m * x.n + (x.m + x.n) * x.rank + 2 * x.rank**2) for x in _matrices(blocks, "linear"))
    return KEPT * (linears + _dense(blocks, "embedding") + _dense(blocks, "head"))


@dataclass(frozen=True)
class Fit:
    """A convention in a sentence, and the bytes that it gives."""

    value: Callable[[Blocks], float]
    text: str


FITS = {
    "attention_cores_peak": Fit(
        attention_cores_peak,
        "a refresh step counts the cores of a layer's four attention matrices and not those of its three MLP matrices: "
        "beside the sketches Σ (m + n) r it has 4 r² a layer, where the definition (cores on every step) has 7 r²",
    ),
    "attention_cores_average": Fit(
        attention_cores_average,
        "refresh steps are counted with 4 r² a layer instead of 7 r², as the peaks fit: the mean over the steps is "
        "then 4 × 3 r² / K bytes a layer lower",
    ),
    "half_gradient_peak": Fit(
        half_gradient_peak,
        "a refresh step sends the dense embedding and half of gradient and factors of each linear, "
        "4 V h + 2 Σ (m n + (m + n) r)",
    ),
    "half_gradient_average": Fit(
        half_gradient_average,
        "one step in K sends what the printed peaks fit, 4 V h + 2 Σ (m n + (m + n) r), instead of whole gradients and "
        "cores; the paper gives no reason for it",
    ),
    "head_weight": Fit(
        head_weight,
        "the weights of embedding and head count (2 V h elements) and the state of the low-rank embedding does not "
        "(V s + h s + 2 s² in Table 2): as though Table 2's second V h were the head's weight, whose state is counted "
        "nowhere",
    ),
}

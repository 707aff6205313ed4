"""Closed forms: bytes and memory of a method from shapes alone, independent of the code that sends and keeps.

`step_elements` is the first of three counts that must agree to the byte; the second is the ledger
(`tsr.ledger`), the third an oracle outside the code that is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from tsr.blocks import Block
from tsr.ledger import PAPER_KINDS
from tsr.refresh import RefreshRule

PAPER_MEMORY_ITEMSIZE = 2


def step_elements(blocks: Sequence[Block], step: int, *, reduce: str, refresh: RefreshRule) -> Counter[tuple[str, str]]:
    """Elements that one worker sends at ``step`` (from 1), by (role of the message, kind of the block).

    Dense: m n. Two-sided core: r^2; one-sided: r max(m, n); both on refresh steps too. Refresh, with
    k = min(r + p, m, n): a sketch sends (m + n) k, and as much again for each synchronised power iteration; an SVD
    sends m n. TSR paper, section 3.4 and Table 1. The one-pass sketch sends m k + min(2 k + 1, m) n and no core.
    """
    count: Counter[tuple[str, str]] = Counter()
    for block in blocks:
        if not block.is_low_rank or reduce == "dense":
            count["dense", block.kind] += block.parameter.numel()
            continue
        rows, columns = block.shape
        core = block.rank**2 if block.subspace == "two_sided" else block.rank * max(rows, columns)
        width = min(block.rank + refresh.oversampling, rows, columns)
        due = step == 1 or (step - refresh.phase - block.offset) % block.interval == 0
        if due and refresh.method == "one_pass":
            count["sketch", block.kind] += rows * width + min(2 * width + 1, rows) * columns
            continue
        count["core", block.kind] += core
        if due and refresh.method == "svd":
            count["dense", block.kind] += rows * columns
        elif due:
            rounds = 1 + (refresh.power_iterations if refresh.method == "sketch" else 0)
            count["sketch", block.kind] += rounds * (rows + columns) * width
    return count


def paper_memory_bytes(blocks: Sequence[Block]) -> int:
    """Weights and optimizer state by Table 2 of the TSR paper to the letter, at 2 bytes an element.

    Head and norms are left out, as there, and what a model names as uncounted.
    Low-rank embedding: V d + V r + d r + 2 r^2; dense embedding: 4 V d. Linear, with s <= l the sides: dense 3 s l,
    one-sided s l + s r + 2 l r, two-sided s l + s r + l r + 2 r^2.
    """
    elements = 0
    for block in blocks:
        if block.kind not in PAPER_KINDS:
            continue
        short, long = sorted(block.shape)
        rank = block.rank
        elements += short * long
        if block.subspace == "two_sided":
            elements += (short + long) * rank + 2 * rank**2
        elif block.subspace == "one_sided":
            elements += short * rank + 2 * long * rank
        else:
            elements += (2 if block.role == "linear" else 3) * short * long
    return PAPER_MEMORY_ITEMSIZE * elements


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the optimizer's state, as they are."""
    return sum(
        value.numel() * value.itemsize
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )

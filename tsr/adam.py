"""Adam on the cores of a stack: a pure function of tensors, so that torch.compile can fuse it into one loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def corrections(ages: Sequence[int], *, betas: tuple[float, float], like: Tensor) -> tuple[Tensor, Tensor]:
    """1 - beta1^t and sqrt(1 - beta2^t), for updates made so far (t, from 1): one for all, or one a block [B, 1, 1].

    They are made on the device that ``like`` is on, by kernels that nothing waits for, and are tensors so that no
    compiled function depends on the step.
    """
    first = [torch.full((), 1 - betas[0] ** age, dtype=like.dtype, device=like.device) for age in ages]
    second = [torch.full((), math.sqrt(1 - betas[1] ** age), dtype=like.dtype, device=like.device) for age in ages]
    if len(ages) == 1:
        return first[0], second[0]
    return torch.stack(first)[:, None, None], torch.stack(second)[:, None, None]


def adam_direction(
    first: Tensor, second: Tensor, correction: tuple[Tensor, Tensor], *, eps: float, eps_mode: str
) -> Tensor:
    """Adam's direction from its moments and their `corrections`; TSR Algorithm 1, Kingma and Ba 2015.

    ``corrected``: m^ / (sqrt(v^) + eps). ``raw``: sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + eps).
    """
    if eps_mode == "raw":
        return (first / (second.sqrt() + eps)) * (correction[1] / correction[0])
    return (first / correction[0]) / (second.sqrt() / correction[1] + eps)


def adam(
    first: Tensor,
    second: Tensor,
    core: Tensor,
    finite: Tensor,
    correction: tuple[Tensor, Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    eps_mode: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """New moments and the direction, all of the core's shape; not ``finite`` (bool, scalar): the old ones, and zero."""
    beta1, beta2 = betas
    new_first = torch.where(finite, first.lerp(core, 1 - beta1), first)
    new_second = torch.where(finite, (beta2 * second).addcmul(core, core, value=1 - beta2), second)
    direction = adam_direction(new_first, new_second, correction, eps=eps, eps_mode=eps_mode)
    return new_first, new_second, torch.where(finite, direction, 0)

"""Predicates for values that come from a configuration, where anything may stand."""

from __future__ import annotations

import math
from typing import TypeGuard


def is_whole(value: object, *, least: int) -> TypeGuard[int]:
    """Whether ``value`` is an integer (not a truth value) of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number (not a truth value)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)

"""The ledger: how many bytes one worker hands to training collectives, step by step.

A byte is counted where the message is packed (`tsr.communicator`), once per message, at the dtype that is really
sent; an all-reduce counts once, with no factor for the algorithm that carries it. Two accountings are kept side by
side:

* ``all``: every message, at its real dtype;
* ``paper``: what the tables of arXiv 2602.08007 count, namely the linear and token-embedding matrices at 4 bytes an
  element, without head and norms. Of an encoder's embeddings that is the word table alone: the kind of the others is
  ``other_embedding`` (`tsr.blocks.Block.kind`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PAPER_KINDS = ("linear", "embedding")
PAPER_ITEMSIZE = 4


@dataclass(frozen=True)
class Traffic:
    """What one step sent: elements and bytes by (role of the message, kind of the block)."""

    elements: Mapping[tuple[str, str], int] = field(default_factory=dict)
    bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes in the accounting ``all``."""
        return sum(self.bytes.values())

    @property
    def paper(self) -> int:
        """Bytes in the accounting ``paper``."""
        return PAPER_ITEMSIZE * sum(n for (_, kind), n in self.elements.items() if kind in PAPER_KINDS)

    def by_role(self) -> dict[str, int]:
        """Bytes by role of the message (``core``, ``sketch``, ``dense``, ...); they add up to `total`."""
        roles: Counter[str] = Counter()
        for (role, _), count in self.bytes.items():
            roles[role] += count
        return dict(roles)


class Ledger:
    """Sums of `Traffic` over steps: total, peak and split, in both accountings."""

    def __init__(self) -> None:
        self.steps = 0
        self.total_bytes = 0
        self.peak_bytes = 0
        self.paper_total_bytes = 0
        self.paper_peak_bytes = 0
        self.split: Counter[tuple[str, str]] = Counter()
        self.other: Counter[str] = Counter()  # bytes by purpose of what is not training traffic
        self.last = Traffic()
        self._elements: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def record(self, role: str, kind: str, *, elements: int, itemsize: int) -> None:
        """Count one training message of the step that is under way."""
        self._elements[role, kind] += elements
        self._bytes[role, kind] += elements * itemsize

    def record_other(self, purpose: str, count: int) -> None:
        """Note ``count`` bytes of an evaluation, logging or set-up collective: seen, but in neither accounting."""
        self.other[purpose] += count

    def close_step(self) -> Traffic:
        """End the step under way, add it to the sums and return what it sent."""
        self.last = Traffic(dict(self._elements), dict(self._bytes))
        self._elements.clear()
        self._bytes.clear()
        self.add(self.last)
        return self.last

    def add(self, traffic: Traffic, *, times: int = 1) -> None:
        """Add ``times`` steps that each sent ``traffic`` (a dry run executes each kind of step once)."""
        self.steps += times
        self.total_bytes += traffic.total * times
        self.peak_bytes = max(self.peak_bytes, traffic.total)
        self.paper_total_bytes += traffic.paper * times
        self.paper_peak_bytes = max(self.paper_peak_bytes, traffic.paper)
        for key, count in traffic.bytes.items():
            self.split[key] += count * times

    def summary(self) -> dict[str, float | int]:
        """Mean over all steps, largest step and sum, in bytes, in both accountings."""
        steps = max(self.steps, 1)
        return {
            "comm/bytes_per_step": self.total_bytes / steps,
            "comm/peak_bytes": self.peak_bytes,
            "comm/total_bytes": self.total_bytes,
            "paper/comm/bytes_per_step": self.paper_total_bytes / steps,
            "paper/comm/peak_bytes": self.paper_peak_bytes,
            "paper/comm/total_bytes": self.paper_total_bytes,
        }

    def table(self) -> dict[str, dict[str, int]]:
        """Total bytes by role of the message, then by kind of block."""
        rows: dict[str, dict[str, int]] = {}
        for (role, kind), count in sorted(self.split.items()):
            rows.setdefault(role, {})[kind] = count
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The sums as plain values, so that a resumed run goes on counting where it stopped."""
        return {
            "steps": self.steps,
            "total_bytes": self.total_bytes,
            "peak_bytes": self.peak_bytes,
            "paper_total_bytes": self.paper_total_bytes,
            "paper_peak_bytes": self.paper_peak_bytes,
            "split": [[role, kind, count] for (role, kind), count in sorted(self.split.items())],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the sums of `state_dict`."""
        values = dict(state)
        self.split = Counter({(role, kind): count for role, kind, count in values.pop("split")})
        for name, value in values.items():
            setattr(self, name, value)

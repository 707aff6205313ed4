"""What a run's summary holds whether it trained or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tsr.accounting import paper_memory_bytes, state_bytes
from tsr.blocks import describe
from tsr.harness.rundir import provenance
from tsr.harness.settings import config_hash
from tsr.ledger import Ledger


def summarise(
    config: Mapping[str, Any], optimizer: Any, model: nn.Module, ledger: Ledger, *, steps: int, world_size: int
) -> dict[str, Any]:
    """Bytes, memory (in bytes), parameters by role, dtypes and provenance of a run; ``optimizer`` has ``blocks``."""
    by_role: dict[str, int] = {}
    for block in optimizer.blocks:
        by_role[block.role] = by_role.get(block.role, 0) + block.parameter.numel()
    return {
        "steps": steps,
        "world_size": world_size,
        **ledger.summary(),
        "comm/by_role": ledger.table(),
        "memory/optimizer_state_bytes": state_bytes(optimizer),
        "memory/weight_bytes": sum(p.numel() * p.itemsize for p in model.parameters()),
        "paper/memory_bytes": paper_memory_bytes(optimizer.blocks),
        "params": {**by_role, "total": sum(by_role.values())},
        "blocks": describe(optimizer.blocks),
        "dtypes": {"parameters": config["model"]["dtype"], "wire": config["comm"]["dtype"]},
        **provenance(),
        "config_hash": config_hash(config),
    }

"""LoRA (Hu et al., arXiv 2106.09685, section 4) through peft: beside a frozen W [m, n], trainable A and B.

A layer then computes W x + (alpha / rank) B A x, with A [rank, n] random and B [m, rank] zero at the start, so that
training starts from the pretrained function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

# The linears of a layer of an encoder, by the names that `modules` takes, and where they are in the layer.
LINEARS = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention.output.dense": "attention.output.dense",
    "intermediate.dense": "intermediate.dense",
    "output.dense": "output.dense",
}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The keys of `model.lora`.

    Args:
        rank: Rows of A and columns of B.
        alpha: Scale of the adapters, as alpha / rank.
        dropout: Of the adapters' input while training.
        modules: Which of `LINEARS` get adapters; None is all.

    Raises `ValueError`, with the key named, where a value is out of range.
    """

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    modules: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"model.lora.rank: must be a whole number of at least 1, got {self.rank!r}")
        if type(self.alpha) is not int or self.alpha < 1:
            raise ValueError(f"model.lora.alpha: must be a whole number of at least 1, got {self.alpha!r}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"model.lora.dropout: must be a number from 0 up to but not including 1, got {self.dropout!r}"
            )
        modules = self.modules
        if modules is not None and (
            isinstance(modules, str) or not modules or any(name not in LINEARS for name in modules)
        ):
            shown = modules if isinstance(modules, str) else list(modules)
            raise ValueError(
                f"model.lora.modules: must be null, for all, or a list of some of {', '.join(LINEARS)}, got {shown!r}"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Lora:
        """From the values of the configuration; `ValueError` for a key that there is not."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise ValueError(f"model.lora.{key} is unknown; model.lora takes {', '.join(known)}")
        return cls(**given)


def add_adapters(network: nn.Module, lora: Lora, *, trainable: Sequence[str]) -> None:
    """Puts adapters beside the linears of `network`, in place, and freezes all else, save the modules `trainable`.

    A is drawn from the global generator. Raises `ValueError` if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model  # seconds
    except ModuleNotFoundError as error:
        raise ValueError(
            f"model.lora needs peft ({error}); pip install 'tsr-harness[glue]', or set model.lora=null"
        ) from error

    names = LINEARS if lora.modules is None else lora.modules
    places = "|".join(re.escape(LINEARS[name]) for name in names)
    inject_adapter_in_model(
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=rf".*\.layer\.\d+\.({places})",
        ),
        network,
    )
    for name in trainable:
        network.get_submodule(name).requires_grad_(True)

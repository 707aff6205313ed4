"""Encoders with a classifier on top, from transformers: RoBERTa (Liu et al., arXiv 1907.11692) and BERT (Devlin et al.,
arXiv 1810.04805).

The shape comes from `conf/model/*.yaml`, the code from transformers, the weights from a published checkpoint or a seed.
Notation (B, T) is that of the package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.llama import DTYPES
from models.lora import LINEARS, Lora, add_adapters
from models.pretrained import load, locate

__all__ = ["Encoder", "EncoderConfig", "build", "locate"]

NORM_EPS = {"roberta": 1e-5, "bert": 1e-12}  # of LayerNorm, by architecture; transformers' default is BERT's for both
HEADS = {"roberta": ("classifier",), "bert": ("classifier", "bert.pooler")}  # modules; RoBERTa's pooler is in the first


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of an encoder; the fields are keys of the configuration group `model`.

    Args:
        architecture: `roberta` or `bert`.
        vocab_size: Rows of the table of word embeddings.
        position_embeddings: Rows of the table of positions. RoBERTa's first position is `pad_token_id` + 1, BERT's 0.
        token_types: Rows of the table of token types.
        hidden_size, intermediate_size, num_layers, num_heads: Of the transformer.
        num_labels: Outputs of the classifier.
        max_positions: Most tokens of a row.
        pad_token_id: The token that fills rows up.
        dropout: Of hidden states and attention while training.

    Raises `ValueError`, with the key named, where a value makes no model.
    """

    architecture: str
    vocab_size: int
    position_embeddings: int
    token_types: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_labels: int
    max_positions: int
    pad_token_id: int
    dropout: float

    def __post_init__(self) -> None:
        if self.architecture not in NORM_EPS:
            raise ValueError(f"model.architecture: must be {' or '.join(NORM_EPS)}, got {self.architecture!r}")
        for key, value in asdict(self).items():
            least = 0 if key == "pad_token_id" else 1
            if key not in ("dropout", "architecture") and (type(value) is not int or value < least):
                raise ValueError(f"model.{key}: must be a whole number of at least {least}, got {value!r}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout: must be a number from 0 up to but not including 1, got {self.dropout!r}")
        if self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"model.pad_token_id: {self.pad_token_id} is no token of model.vocab_size, {self.vocab_size}"
            )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} is not divisible by model.num_heads, {self.num_heads}"
            )
        usable = self.position_embeddings - (self.pad_token_id + 1 if self.architecture == "roberta" else 0)
        if self.max_positions > usable:
            raise ValueError(
                f"model.max_positions: {self.max_positions} exceeds the {usable} positions that "
                f"model.position_embeddings={self.position_embeddings} has for tokens"
            )


class Encoder(nn.Module):
    """A classifier of rows of tokens around transformers' model for sequence classification, which is `network`.

    `ROLES` maps each role to glob patterns (`fnmatch`) over the names of trainable parameters. `UNCOUNTED` are those
    that the tables of arXiv 2602.08007 leave out although their role is one that they count: its GLUE figures are those
    of the linears and the word embedding alone. Both are made for each model, as architecture and LoRA decide which
    parameters there are.

    Args:
        config: The shape.
        folder: Of the weights (see `locate`); None draws all of them from the global generator.
        lora: Adapters; then they and the head (classifier and pooler) alone are trained.
    """

    def __init__(self, config: EncoderConfig, *, folder: Path | None = None, lora: Lora | None = None) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification  # seconds: only when it is asked for

        super().__init__()
        self.config = config
        shape = AutoConfig.for_model(
            config.architecture,
            vocab_size=config.vocab_size,
            max_position_embeddings=config.position_embeddings,
            type_vocab_size=config.token_types,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_labels=config.num_labels,
            pad_token_id=config.pad_token_id,
            hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout,
            layer_norm_eps=NORM_EPS[config.architecture],
        )
        if folder is None:
            self.network = AutoModelForSequenceClassification.from_config(shape)
        else:
            self.network = load(folder, shape, fresh=["classifier."])
        if lora is not None:
            add_adapters(self.network, lora, trainable=HEADS[config.architecture])
        self.ROLES = {
            role: kept for role, globs in self._roles().items() if (kept := tuple(filter(self._trains, globs)))
        }
        self.UNCOUNTED = tuple(filter(self._trains, ("*.position_embeddings.weight", "*.token_type_embeddings.weight")))

    def _roles(self) -> dict[str, tuple[str, ...]]:
        """Patterns by role of all parameters that an encoder may have."""
        return {
            "embedding": ("network.*.embeddings.*_embeddings.weight",),
            "head": ("network.classifier.*weight", "network.*.pooler.dense.weight"),
            "linear": (
                *(f"network.*.layer.*.{place}.weight" for place in LINEARS.values()),
                "*.lora_A.*",
                "*.lora_B.*",
            ),
            "vector": ("*.bias", "*.LayerNorm.weight"),
        }

    def _trains(self, pattern: str) -> bool:
        """Whether the pattern selects a trainable parameter."""
        return any(fnmatchcase(name, pattern) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """Logits [B, num_labels] of rows of tokens.

        Args:
            tokens: Integers [B, T], filled up with `pad_token_id` behind the real ones.
            lengths: Integers [B], the count of real tokens of each row; None: all are real.
            types: Integers [B, T], the token types; None: all are 0.
        """
        ends = tokens.shape[1] if lengths is None else lengths[:, None]
        mask = (torch.arange(tokens.shape[1], device=tokens.device) < ends).expand_as(tokens)
        logits: Tensor = self.network(input_ids=tokens, attention_mask=mask, token_type_ids=types).logits
        return logits


def build(
    *,
    name: str,
    dtype: str,
    seed: int,
    device: str | torch.device = "cpu",
    weights: str | None = None,
    revision: str | None = None,
    lora: Mapping[str, Any] | None = None,
    **shape: Any,
) -> Encoder:
    """The model of one `conf/model/*.yaml`: its remaining keys, `shape`, are the fields of `EncoderConfig`.

    As `models.llama.build`: `name` is only a label, `dtype` is fp32, bf16 or fp64. What `weights` and `revision` (see
    `locate`) do not bring, the classifier and the adapters or, with `weights=None`, everything, is drawn on the CPU in
    fp32 from `seed` alone, with the global generator left as it was. `lora` holds the fields of `models.lora.Lora`.
    `device="meta"` makes no weights and looks for none.

    Raises:
        ValueError: For an unknown dtype, what `EncoderConfig` or `Lora` rejects, weights that are not there and weights
            that do not fit the shape.
        ConnectionError: If the Hugging Face Hub is needed and does not deliver.
    """
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = EncoderConfig(**shape)
    adapters = None if lora is None else Lora.of(lora)
    meta = torch.device(device).type == "meta"
    folder = None if meta or weights is None else locate(weights, revision)
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        model = Encoder(config, folder=folder, lora=adapters)
    return model.to(device=device, dtype=DTYPES[dtype])

"""Encoders with a classifier on top, from transformers; so far RoBERTa (Liu et al., arXiv 1907.11692).

Only the shape comes from `conf/model/*.yaml`, the code from transformers, so that a published checkpoint fits. Notation
(B, T) is that of the package.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.llama import DTYPES


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape of an encoder; the fields are the keys of the configuration group `model`.

    Args:
        vocab_size: Rows of the table of word embeddings.
        position_embeddings: Rows of the table of positions. RoBERTa's first position is `pad_token_id` + 1.
        token_types: Rows of the table of token types.
        hidden_size, intermediate_size, num_layers, num_heads: Of the transformer.
        num_labels: Outputs of the classifier.
        max_positions: Most tokens of a row.
        pad_token_id: The token that fills rows up.
        dropout: Of hidden states and attention while training.

    Raises `ValueError`, with the key named, where a value makes no model.
    """

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
        for key, value in asdict(self).items():
            least = 0 if key == "pad_token_id" else 1
            if key != "dropout" and (type(value) is not int or value < least):
                raise ValueError(f"model.{key}: must be a whole number of at least {least}, got {value!r}")
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout: must be a number from 0 up to but not including 1, got {self.dropout!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} is not divisible by model.num_heads, {self.num_heads}"
            )
        usable = self.position_embeddings - self.pad_token_id - 1
        if self.max_positions > usable:
            raise ValueError(
                f"model.max_positions: {self.max_positions} exceeds the {usable} positions that "
                f"model.position_embeddings={self.position_embeddings} leaves above the padding's"
            )


class Encoder(nn.Module):
    """A classifier of rows of tokens around transformers' `RobertaForSequenceClassification`, which is `network`.

    `ROLES` maps each role to glob patterns (`fnmatch`) over parameter names. `UNCOUNTED` are the parameters that the
    tables of arXiv 2602.08007 leave out although their role is one that they count: its GLUE figures are those of the
    linears and the word embedding alone.
    """

    ROLES: ClassVar[dict[str, tuple[str, ...]]] = {
        "embedding": ("network.*.embeddings.*_embeddings.weight",),
        "head": ("network.classifier.*.weight",),
        "linear": tuple(
            f"network.*.layer.*.{module}.weight"
            for module in ("query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense")
        ),
        "vector": ("*.bias", "*.LayerNorm.weight"),
    }
    UNCOUNTED: ClassVar[tuple[str, ...]] = ("*.position_embeddings.weight", "*.token_type_embeddings.weight")

    def __init__(self, config: EncoderConfig) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification  # seconds: only when it is asked for

        super().__init__()
        self.config = config
        self.network = AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model(
                "roberta",
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
                layer_norm_eps=1e-5,  # RoBERTa's; transformers would take BERT's, 1e-12
            )
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Integer tokens [B, T], filled up with `pad_token_id` -> logits [B, num_labels]."""
        mask = tokens != self.config.pad_token_id
        logits: Tensor = self.network(input_ids=tokens, attention_mask=mask).logits
        return logits


def build(*, name: str, dtype: str, seed: int, device: str | torch.device = "cpu", **shape: Any) -> Encoder:
    """The model of one `conf/model/*.yaml`: its remaining keys, `shape`, are the fields of `EncoderConfig`.

    As `models.llama.build`: `name` is only a label, `dtype` is fp32, bf16 or fp64; the weights are transformers'
    initial ones, drawn on the CPU in fp32 from `seed` alone, with the global generator left as it was. `device="meta"`
    makes none.

    Raises `ValueError` for an unknown dtype and for what `EncoderConfig` rejects.
    """
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    config = EncoderConfig(**shape)
    meta = torch.device(device).type == "meta"
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        model = Encoder(config)
    return model.to(device=device, dtype=DTYPES[dtype])

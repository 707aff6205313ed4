"""Models trained by the harness.

What is here: `llama.py`, the LLaMA decoder in plain torch with its loss, its construction from `conf/model/*.yaml` and
its exchange of weights with transformers; `encoder.py`, transformers' encoders with a classifier, for fine-tuning, and
`pretrained.py`, which finds their weights.

Notation, used in every docstring of this package:

    B   rows (sequences) of a batch
    T   positions of a row, padding included
    V   vocabulary size
    H   hidden size
    N   attention heads, each of size D = H / N

A model carries `ROLES`, which says by parameter name what each parameter is (embedding, head, linear, vector):
the optimizer treats a parameter by its role, never by its shape.
"""

from __future__ import annotations

from models.encoder import Encoder, EncoderConfig
from models.llama import Llama, LlamaConfig, build, load_safetensors, next_token_losses, save_safetensors
from models.pretrained import locate, locate_tokenizer

__all__ = [
    "Encoder",
    "EncoderConfig",
    "Llama",
    "LlamaConfig",
    "build",
    "load_safetensors",
    "locate",
    "locate_tokenizer",
    "next_token_losses",
    "save_safetensors",
]

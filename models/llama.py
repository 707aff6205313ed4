"""LLaMA decoder (Touvron et al., arXiv 2302.13971) with an untied head and no biases.

Parameters bear the names that transformers' `LlamaForCausalLM` gives them, so state dicts map one to one. Notation
(B, T, V, H, N, D) is that of the package.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
IGNORED = -100  # target of a position that bears no loss

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and constants of a model; the fields are the keys of the configuration group `model`.

    Raises `ValueError`, with the key named, where a value makes no model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int = 1024
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions")
        for key in sizes:
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise ValueError(f"model.{key}: must be a positive integer, got {value!r}")
        for key in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, key)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ValueError(f"model.{key}: must be a positive number, got {value!r}")
        if type(self.activation_checkpointing) is not bool:
            raise ValueError(
                f"model.activation_checkpointing: must be true or false, got {self.activation_checkpointing!r}"
            )
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} is not divisible by model.num_heads, {self.num_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.hidden_size: {self.hidden_size} over model.num_heads, {self.num_heads}, gives heads of size "
                f"{self.head_dim}; the rotary embedding needs an even size"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def rotary_tables(
    positions: int, config: LlamaConfig, *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (Su et al., arXiv 2104.09864, section 3.2), each [T, D].

    The angles are made in fp32 for every dtype, so that a model is the same function in all of them up to rounding.
    """
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.outer(
        torch.arange(positions, device=device, dtype=torch.float32), 1.0 / config.rope_theta**exponents
    )
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, N, T, D]: coordinate i is paired with i + D/2 (not with i + 1)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention with rotary positions, [B, T, H] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = rotate(heads(self.q_proj(x)), cos, sin)
        key = rotate(heads(self.k_proj(x)), cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, heads(self.v_proj(x)), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202), [B, T, H] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual, [B, T, H] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything below the head, [B, T] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        # Around the initialisation of nn.Embedding: `Llama` draws the weights, and on meta its normal_ takes seconds.
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        # Made anew on each call: a buffer would lose digits in a cast of the model and its values on the meta device.
        cos, sin = rotary_tables(tokens.shape[1], self.config, device=x.device, dtype=x.dtype)
        for layer in self.layers:
            if self.config.activation_checkpointing:
                # Nothing in a layer is random, so there is no generator state to keep for the second forward pass.
                x = checkpoint(layer, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """LLaMA with a language-model head; matrices start normal(0, `initializer_range`), norms at 1.

    `ROLES` maps each role to glob patterns (`fnmatch`) over parameter names; every parameter matches exactly one role.
    """

    ROLES: ClassVar[dict[str, tuple[str, ...]]] = {
        "embedding": ("model.embed_tokens.weight",),
        "head": ("lm_head.weight",),
        "linear": ("model.layers.*.self_attn.*_proj.weight", "model.layers.*.mlp.*_proj.weight"),
        "vector": ("*norm.weight",),
    }

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the weights afresh, from `generator` or else from the global one; on meta there are none to draw."""
        for parameter in self.parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, self.config.initializer_range, generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        """Integer tokens [B, T] -> logits [B, T, V]. `ValueError` if T exceeds `max_positions`."""
        positions = tokens.shape[1]
        if positions > self.config.max_positions:
            raise ValueError(
                f"model.max_positions: {self.config.max_positions} is less than the {positions} positions of the "
                "input; raise it or shorten the rows"
            )
        return self.lm_head(self.model(tokens))


def build(*, name: str, dtype: str, seed: int, device: str | torch.device = "cpu", **shape: Any) -> Llama:
    """The model of one `conf/model/*.yaml`: its remaining keys, `shape`, are the fields of `LlamaConfig`.

    `name` labels the configuration in records and changes nothing here. `dtype` is fp32, bf16 or fp64. The weights are
    drawn on the CPU in fp32 from a generator of their own, seeded with `seed` alone, and cast afterwards: the same on
    every rank, device and dtype, and the global generator is left as it was. `device="meta"` makes no weights.

    Raises `ValueError` for an unknown dtype and for what `LlamaConfig` rejects.
    """
    if dtype not in DTYPES:
        raise ValueError(f"model.dtype: must be one of {', '.join(DTYPES)}, got {dtype!r}")
    with torch.device("meta"):  # torch's own initialisation of the layers neither runs nor draws random numbers
        model = Llama(LlamaConfig(**shape))
    if torch.device(device).type != "meta":
        # As `model.to_empty` would, which imports sympy for it: seconds in every worker process.
        empty = {key: torch.empty(parameter.shape) for key, parameter in model.named_parameters()}
        model.load_state_dict(empty, assign=True)
        model.reset_parameters(torch.Generator().manual_seed(seed))
    return model.to(device=device, dtype=DTYPES[dtype])


def next_token_losses(logits: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """Cross entropies in nats, [B, T-1]: entry (b, i) is that of predicting token i+1 of row b from tokens 0 to i.

    `logits` [B, T, V], `tokens` [B, T] and `lengths` [B], the count of real tokens of each row. Entries whose target is
    padding, i + 1 >= lengths[b], are exactly 0 and send no gradient, so row b has lengths[b] - 1 loss tokens. The
    result is fp32, or fp64 for fp64 logits.
    """
    rows, positions, _ = logits.shape
    target_index = torch.arange(1, positions + 1, device=tokens.device)
    # The last position gets an ignored target and is cut from the result: cutting the logits would copy them.
    targets = F.pad(tokens.long()[:, 1:], (0, 1), value=IGNORED).masked_fill(target_index >= lengths[:, None], IGNORED)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED)
    return losses.view(rows, positions)[:, :-1]


def save_safetensors(model: Llama, folder: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, for transformers' `LlamaForCausalLM.from_pretrained` to read."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    stored = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "initializer_range": config.initializer_range,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(model.lm_head.weight.dtype).removeprefix("torch."),
        # These belong to a tokenizer; left out, transformers would assume 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(stored, indent=2) + "\n")
    save_file(model.state_dict(), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_safetensors(model: Llama, folder: str | Path) -> None:
    """Fills `model`, in its own dtype and on its own device, from a folder that transformers' `save_pretrained` wrote.

    The weights may lie in one file or in shards with an index. `ValueError`, with the model left as it was, for a
    missing file, for constants in `config.json` that would make another function of the same weights, and for tensors
    that are missing, unexpected or of another shape.
    """
    folder = Path(folder)
    _check_constants(model.config, _existing(folder / CONFIG_FILE))
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        tensors |= load_file(file)
    parameters = model.state_dict()
    if missing := sorted(parameters.keys() - tensors.keys()):
        raise ValueError(f"'{folder}' lacks {_listing(missing)}")
    if unexpected := sorted(tensors.keys() - parameters.keys()):
        raise ValueError(f"'{folder}' has {_listing(unexpected)}, which the model has not")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            raise ValueError(
                f"'{folder}': {name} has shape {list(tensors[name].shape)}, the model needs {list(parameter.shape)}"
            )
    model.load_state_dict(tensors)


def _check_constants(config: LlamaConfig, path: Path) -> None:
    """Compares what shapes cannot show: the number of heads and the constants of norms, rotation and activation."""
    stored = json.loads(path.read_text())
    # transformers 5 keeps all of the rotation under `rope_parameters`; version 4 has `rope_theta` and `rope_scaling`.
    rope = stored.get("rope_parameters") or stored.get("rope_scaling") or {}
    rope_theta = rope.get("rope_theta", stored.get("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    for key, found, needed in (
        ("num_attention_heads", stored.get("num_attention_heads"), config.num_heads),
        ("rms_norm_eps", stored.get("rms_norm_eps"), config.rms_norm_eps),
        ("rope_theta", rope_theta, config.rope_theta),
        ("rope_type", rope_type, "default"),
        ("hidden_act", stored.get("hidden_act"), "silu"),
    ):
        if found != needed:
            raise ValueError(f"'{path}': {key} is {found!r}, the model has {needed!r}")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"'{folder}' has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    return [_existing(folder / name) for name in sorted(set(weight_map.values()))]


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"no file '{path}'")
    return path


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more tensors"

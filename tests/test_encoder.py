"""The encoder: its parameters and their roles, its weights, its function, and what the paper counts of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import train
from models import Encoder, EncoderConfig
from models.encoder import build
from sweep.cells import compose
from tsr import TSR, plan_blocks
from tsr.accounting import paper_memory_bytes, step_elements
from tsr.blocks import assign_roles, describe

TINY: dict[str, Any] = {
    **{
        "architecture": "roberta",
        "vocab_size": 61,
        "position_embeddings": 18,
        "token_types": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
    },
    **{"num_layers": 2, "num_heads": 2, "num_labels": 3, "max_positions": 16, "pad_token_id": 1, "dropout": 0.1},
}


def tiny(*, seed: int = 0, device: str = "cpu", dtype: str = "fp32", **changes: Any) -> Encoder:
    return build(name="tiny", dtype=dtype, seed=seed, device=device, **{**TINY, **changes})


@pytest.fixture(scope="module")
def roberta() -> nn.Module:
    """RoBERTa-base as its configuration has it, without weights."""
    return train.build_model(compose("experiment=table4"), "meta")


def test_roberta_base_has_its_published_size(roberta: nn.Module) -> None:
    # 124.06 M of the encoder that transformers loads, without pooler and head, and 0.59 M of the classifier.
    assert sum(parameter.numel() for parameter in roberta.parameters()) == 124_055_040 + 768 * 768 + 768 + 2 * 768 + 2
    assert all(parameter.is_meta for parameter in roberta.parameters())


def test_every_parameter_of_roberta_base_has_its_role(roberta: nn.Module) -> None:
    assert isinstance(roberta, Encoder)
    roles = assign_roles(roberta, roberta.ROLES)
    assert Counter(roles.values()) == {"linear": 6 * 12, "embedding": 3, "head": 2, "vector": 2 + 12 * 10 + 2}
    kinds: dict[str, set[tuple[int, ...]]] = {}
    for name, parameter in roberta.named_parameters():
        kinds.setdefault(roles[name], set()).add(tuple(parameter.shape))
    assert kinds["linear"] == {(768, 768), (3072, 768), (768, 3072)}
    assert kinds["embedding"] == {(50265, 768), (514, 768), (1, 768)}
    assert kinds["head"] == {(768, 768), (2, 768)}
    assert {len(shape) for shape in kinds["vector"]} == {1}


def test_positions_are_low_rank_and_uncounted_and_token_types_are_dense(roberta: nn.Module) -> None:
    rank = {"linear": 256, "embedding": 256}
    blocks = TSR(roberta, rank=rank, refresh={"linear": 200, "embedding": 200}).blocks
    notes = {
        str(row["shape"]): (row["subspace"], row["note"]) for row in describe(blocks) if row["role"] == "embedding"
    }
    assert notes == {
        "50265x768": ("two_sided", ""),
        "514x768": ("two_sided", "not in the paper's accounting"),
        "1x768": ("dense", "smaller side 1 ≤ rank 256; not in the paper's accounting"),
    }
    by_kind: Counter[str] = Counter()
    optimizer = TSR(tiny(), rank={"linear": 4, "embedding": 4})
    for (_, kind), elements in step_elements(
        optimizer.blocks, 2, reduce="projected", refresh=optimizer.refresh
    ).items():
        by_kind[kind] += elements
    vectors = 16 * (1 + 1) + 2 * (16 * 6 + 32 + 4 * 16 - 16 * 2 + 16) + 16 + 3
    assert by_kind == {
        "linear": 2 * 6 * 4**2,
        "embedding": 4**2,
        "other_embedding": 4**2 + 16,  # positions, token types
        "head": 16 * 16 + 3 * 16,
        "vector": vectors,
    }


def test_the_ledger_counts_what_the_paper_leaves_out_only_as_traffic() -> None:
    model = tiny()
    optimizer = TSR(model, rank={"linear": 4, "embedding": 4})
    model(torch.tensor([[5, 6, 7]])).sum().backward()
    optimizer.step()
    sent = optimizer.communicator.ledger.last
    expected = step_elements(optimizer.blocks, 1, reduce="projected", refresh=optimizer.refresh)
    assert sent.elements == expected
    assert ("sketch", "other_embedding") in sent.elements
    counted = {"linear": 2 * (4 * 32 + 2 * 48), "embedding": 61 + 16}
    assert sent.paper == 4 * (counted["linear"] * 9 + counted["embedding"] * 9 + 13 * 4**2)  # width 4 + 5, and cores


def test_memory_by_table_2_leaves_out_the_same_blocks() -> None:
    blocks = TSR(tiny(), rank={"linear": 4, "embedding": 4}).blocks
    square, tall, words = (m * n + (m + n) * 4 + 2 * 4**2 for m, n in ((16, 16), (32, 16), (61, 16)))
    assert paper_memory_bytes(blocks) == 2 * (2 * (4 * square + 2 * tall) + words)


def test_a_rule_that_leaves_out_nothing_is_an_error() -> None:
    model = tiny(device="meta")
    with pytest.raises(
        ValueError, match=r"uncounted: the rule '\*\.pooler\.\*' selects no parameter; names look like net"
    ):
        plan_blocks(model, model.ROLES, [], uncounted=["*.pooler.*"])


def test_weights_come_from_the_seed_alone_and_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first, again, other = tiny(), tiny(), tiny(seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)
    half = tiny(dtype="bf16")
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(first.parameters(), half.parameters(), strict=True))


def test_padding_changes_nothing() -> None:
    model = tiny().double().eval()
    short, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7, 1, 1], [9, 8, 7, 6, 5]])
    logits = model(padded, torch.tensor([3, 5]))
    assert logits.shape == (2, 3)
    torch.testing.assert_close(logits[:1], model(short))
    assert not torch.allclose(logits[1], logits[0])
    assert not torch.allclose(model(padded)[0], logits[0])  # without lengths, padding is taken for words


def test_bert_is_masked_by_lengths_and_tells_token_types_apart() -> None:
    model = tiny(architecture="bert", position_embeddings=16, token_types=2, pad_token_id=0).double().eval()
    tokens, lengths = torch.tensor([[5, 6, 0, 7, 9]]), torch.tensor([4])  # the token of padding may be a word, too
    types = torch.tensor([[0, 0, 1, 1, 0]])
    logits = model(tokens, lengths, types)
    torch.testing.assert_close(logits, model(tokens[:, :4], types=types[:, :4]))
    torch.testing.assert_close(logits, model(torch.tensor([[5, 6, 0, 7, 8]]), lengths, types))
    assert not torch.allclose(logits, model(tokens, lengths))
    assert not torch.allclose(logits, model(tokens[:, [0, 1, 3]], types=types[:, [0, 1, 3]]))


@pytest.mark.parametrize("architecture", ["roberta", "bert"])
def test_the_head_and_the_poolers_are_dense_and_every_rule_selects_something(architecture: str) -> None:
    model = tiny(device="meta", architecture=architecture)
    roles = assign_roles(model, model.ROLES)
    heads = {name.removeprefix("network.") for name, role in roles.items() if role == "head"}
    pooler = "classifier.dense" if architecture == "roberta" else "bert.pooler.dense"
    last = "classifier.out_proj" if architecture == "roberta" else "classifier"
    assert heads == {f"{pooler}.weight", f"{last}.weight"}
    assert Counter(roles.values())["linear"] == 2 * 6
    dense = {block.role for block in TSR(model, rank={"linear": 4, "embedding": 4}).blocks if not block.is_low_rank}
    assert dense == {"head", "vector", "embedding"}  # the embedding of token types alone, which has a single row


def test_bert_has_no_positions_that_serve_padding() -> None:
    assert EncoderConfig(**{**TINY, "architecture": "bert", "max_positions": 18}).max_positions == 18
    with pytest.raises(ValueError, match=r"model\.max_positions: 19 exceeds the 18 positions"):
        EncoderConfig(**{**TINY, "architecture": "bert", "max_positions": 19})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("architecture", "gpt2", r"model\.architecture: must be roberta or bert, got 'gpt2'"),
        ("vocab_size", 0, "model.vocab_size: must be a whole number of at least 1, got 0"),
        ("num_layers", True, "model.num_layers: must be a whole number of at least 1, got True"),
        ("dropout", 1.0, "model.dropout: must be a number from 0 up to but not including 1, got 1.0"),
        ("num_heads", 3, "model.hidden_size: 16 is not divisible by model.num_heads, 3"),
        ("max_positions", 17, "model.max_positions: 17 exceeds the 16 positions that model.position_embeddings=18"),
    ],
)
def test_what_makes_no_model_is_named(key: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EncoderConfig(**{**TINY, key: value})


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match=r"model\.dtype: must be one of fp32, bf16, fp64, got 'fp16'"):
        tiny(dtype="fp16")

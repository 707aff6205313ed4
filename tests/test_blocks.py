"""Which parameter is what, and whether mistakes are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import METHODS, Toy, make_toy
from tsr import TSR, AdamW, Block, Communicator, GaLore, OneSided, RefreshRule, RolePolicy, build, methods, plan_blocks
from tsr.blocks import assign_roles, describe, roles_by_module


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.body = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight


def plan(rank: int = 4) -> list[Block]:
    return plan_blocks(make_toy(), Toy.ROLES, [RolePolicy(role="linear", subspace="two_sided", rank=rank, interval=2)])


def test_every_parameter_is_one_block_in_the_order_of_the_model() -> None:
    assert [block.name for block in plan()] == [name for name, _ in make_toy().named_parameters()]


def test_a_block_too_small_for_its_rank_is_dense_and_says_so() -> None:
    small = {block.name: block for block in plan()}["small.weight"]
    assert not small.is_low_rank and small.rank == 0
    assert small.note == "smaller side 3 ≤ rank 4"
    row = next(row for row in describe(plan()) if row["first"] == "small.weight")
    assert (row["shape"], row["subspace"], row["rank"], row["note"]) == ("3x12", "dense", None, small.note)


def test_a_rank_equal_to_the_smaller_side_saves_nothing_and_is_dense() -> None:
    low_rank = [block.name for block in plan(rank=9) if block.is_low_rank]
    assert low_rank == ["tall.weight", "wide.weight", "square.weight"]  # idle is 9 x 12


def test_description_counts_every_parameter_once() -> None:
    rows = describe(plan())
    assert sum(int(str(row["parameters"])) for row in rows) == sum(p.numel() for p in make_toy().parameters())
    assert sum(int(str(row["blocks"])) for row in rows) == len(plan())


def test_tied_weights_are_one_block() -> None:
    model = Tied()
    roles = roles_by_module(model)
    assert roles == {
        "embedding": ["embedding.weight"],
        "linear": ["body.weight"],
        "vector": ["body.bias", "norm.weight", "norm.bias"],
    }
    assert len(plan_blocks(model, roles, [])) == 5
    assert roles_by_module(model, head="head")["head"] == ["embedding.weight"]


def test_roles_by_module_leaves_other_matrices_and_frozen_parameters_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad = False
    model.odd = nn.Parameter(torch.zeros(3, 3))
    assert roles_by_module(model) == {"linear": ["1.weight"], "vector": ["0.bias", "1.bias"]}
    with pytest.raises(ValueError, match=r"no rule gives odd a role \(1 parameters in all\); add one to roles"):
        AdamW(model)


def test_own_roles_of_a_model_come_before_its_module_types() -> None:
    assert {block.role for block in AdamW(make_toy()).blocks if block.name == "head.weight"} == {"head"}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({**Toy.ROLES, "head": ["lm_head.*"]}, r"roles.head: the rule 'lm_head.\*' selects no parameter; .*norm"),
        ({**Toy.ROLES, "head": []}, r"no rule gives head.weight a role"),
        ({**Toy.ROLES, "head": ["head.*", "tall.*"]}, r"roles.head: tall.weight already has the role 'linear'"),
        ({**Toy.ROLES, "tail": ["head.*"]}, r"unknown role 'tail'; roles are linear, embedding, head, vector"),
    ],
)
def test_mistaken_roles_are_named(roles: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign_roles(make_toy(), roles)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"rank": {"linear": 0}}, "rank.linear must be a whole number of at least 1, or null for a dense linear"),
        ({"rank": {"embedding": -1}}, "rank.embedding must be a whole number of at least 1, .* got -1"),
        ({"rank": {"linear": 12}}, "rank.linear=12 is too large: .* at most 11 is possible"),
        ({"rank": {"linears": 3}}, "rank.linears is unknown; rank takes linear, embedding, head, vector"),
        ({"rank": {"vector": 1}, "subspace": {"vector": "two_sided"}}, r"subspace.vector=two_sided .* shape \(12,\)"),
        ({"refresh": {"linear": 0}}, "refresh.linear must be a whole number of steps, at least 1, got 0"),
        ({"refresh": {"method": "qr"}}, "refresh.method must be one of svd, sketch, local_sketch, one_pass, got 'qr'"),
        ({"refresh": {"oversampling": -1}}, "refresh.oversampling must be a whole number of at least 0 col"),
        ({"refresh": {"power_iterations": -1}}, "refresh.power_iterations must be a whole number of at least 0"),
        ({"refresh": {"start": "zero"}}, "refresh.start must be gaussian or previous, got 'zero'"),
        ({"refresh": {"phase": 2}}, "refresh.phase must be 0 .* or 1 .*, got 2"),
        ({"refresh": {"every": 2}}, "refresh.every is unknown; refresh takes .*phase"),
        ({"subspace": {"linear": "both"}}, "subspace.linear must be one of dense, one_sided, two_sided, got 'both'"),
        ({"subspace": {"body": "dense"}}, "subspace.body is unknown; subspace takes linear"),
        ({"lr_factor": {"head": 0.0}}, "lr_factor.head must be a positive number, got 0"),
        ({"lr_factor": {"heads": 1.0}}, "lr_factor.heads is unknown; lr_factor takes linear"),
        ({"lr": -0.1}, "optimizer.lr must be a positive number, got -0.1"),
        ({"lr": float("nan")}, "optimizer.lr must be a positive number, got nan"),
        ({"scale": 0.0}, "optimizer.scale must be a positive number, got 0.0"),
        ({"eps": 0.0}, "optimizer.eps must be a positive number, got 0.0"),
        ({"betas": [0.9, 1.0]}, r"optimizer.betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay must be a number of 0 or more, got -1.0"),
        ({"clip_norm": 0.0}, "optimizer.clip_norm must be a positive number, or null for no clipping, got 0.0"),
        ({"moments": "drop"}, "optimizer.moments must be one of keep, rotate, reset, got 'drop'"),
        ({"eps_mode": "none"}, "optimizer.eps_mode must be one of corrected, raw, got 'none'"),
        ({"reduce": "some"}, "optimizer.reduce must be one of dense, projected, got 'some'"),
        ({"momentum": 0.9}, "optimizer.momentum is unknown; optimizer takes lr, scale"),
    ],
)
def test_mistaken_choices_are_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TSR(make_toy(), **{"rank": {"linear": 4, "embedding": 3}, **choices})


def test_mistakes_of_one_sided_blocks_and_of_the_wire_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"refresh.start=previous needs two-sided blocks, but tall.weight is one-sided"
    ):
        OneSided(make_toy(), rank={"linear": 4}, refresh={"start": "previous"})
    with pytest.raises(ValueError, match=r"refresh.method=one_pass needs optimizer.reduce=projected: .* svd or sketch"):
        GaLore(make_toy(), rank={"linear": 4}, refresh={"method": "one_pass"})
    with pytest.raises(ValueError, match=r"comm.dtype must be one of fp32, bf16, fp64, got 'fp8'"):
        Communicator(dtype="fp8")
    with pytest.raises(ValueError, match=r"comm.bucket_mib must be positive or null \(one buffer a round\), got 0"):
        Communicator(bucket_mib=0)
    with pytest.raises(ValueError, match="unknown role 'body'"):
        RolePolicy(role="body")


def test_each_method_is_the_row_that_its_documentation_shows() -> None:
    """The table in the docstring of `tsr.methods`, against what the factories build."""
    words = {
        "identity": "dense",
        "one-sided": "one_sided",
        "two-sided": "two_sided",
        "SVD of the mean gradient": "svd",
        "dense all-reduce and SVD": "svd",
        "synchronised sketch": "sketch",
        "Algorithm 1 to the letter": "local_sketch",
    }
    lines = [line for line in (methods.__doc__ or "").splitlines() if line.startswith("| `")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {cells[0].strip("`"): cells[1:] for cells in table}
    assert set(rows) == {factory.__name__ for factory in METHODS.values()}
    for factory in METHODS.values():
        reduce, subspace, refresh, embedding = rows[factory.__name__]
        optimizer = factory(make_toy(), rank={"linear": 4, "embedding": 3})
        blocks = {block.name: block for block in optimizer.blocks}
        assert blocks["tall.weight"].subspace == words[subspace]
        assert blocks["embedding.weight"].subspace == ("dense" if embedding == "dense" else words[subspace])
        assert not blocks["head.weight"].is_low_rank
        if words[subspace] != "dense":  # dense blocks reduce densely whatever the option
            assert optimizer.options.reduce == reduce
            assert optimizer.refresh.method == words[refresh]
    letter = METHODS["tsr_paper"](make_toy(), rank={"linear": 4, "embedding": 3}).refresh
    assert letter == RefreshRule(method="local_sketch", power_iterations=1, phase=0)


def test_choices_overlay_the_row_key_by_key() -> None:
    rank, refresh = {"head": 5, "linear": 4, "embedding": 3}, {"head": 7, "oversampling": 2}
    optimizer = TSR(make_toy(), rank=rank, refresh=refresh, scale=1.0)
    blocks = {block.name: block for block in optimizer.blocks}
    head = blocks["head.weight"]
    assert (head.subspace, head.rank, head.interval) == ("two_sided", 5, 7)
    assert blocks["tall.weight"].interval == methods.DEFAULT_INTERVAL["linear"]
    assert (optimizer.refresh.method, optimizer.refresh.oversampling) == ("sketch", 2)
    assert (optimizer.options.scale, optimizer.options.eps) == (1.0, 1e-6)


def test_build_without_choices_is_dense() -> None:
    assert not any(block.is_low_rank for block in build(make_toy(), lr=0.1).blocks)

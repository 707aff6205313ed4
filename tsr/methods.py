"""Methods: rows of choices over the shared parts, as functions that build an optimizer for a model.

| method | reduce | subspace | refresh | embedding |
|---|---|---|---|---|
| `AdamW` | dense | identity | - | dense |
| `GaLore` | dense | one-sided | SVD of the mean gradient | dense |
| `OneSided` | projected | one-sided | dense all-reduce and SVD | dense |
| `TSR` | projected | two-sided | synchronised sketch | own rank and interval |
| `TSRPaper` | projected | two-sided | Algorithm 1 to the letter | own rank and interval |
| `TSRSVD` | projected | two-sided | dense all-reduce and SVD | own rank and interval |

The head is dense in all of them until it is given a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from tsr.blocks import ROLES, RolePolicy, Roles, plan_blocks, roles_by_module
from tsr.communicator import Communicator
from tsr.optimizer import AdamOptions, LowRankAdam
from tsr.refresh import RefreshRule, staggered

DEFAULT_RANK = {"linear": 64, "embedding": 16, "head": None}
DEFAULT_INTERVAL = {"linear": 100, "embedding": 100, "head": 100}


def build(
    model: nn.Module,
    *,
    roles: Roles | None = None,
    communicator: Communicator | None = None,
    subspace: Mapping[str, str] | None = None,
    rank: Mapping[str, int | None] | None = None,
    refresh: Mapping[str, Any] | None = None,
    lr_factor: Mapping[str, float] | None = None,
    seed: int = 0,
    **options: Any,
) -> LowRankAdam:
    """An optimizer for ``model`` from plain values, as they stand in the configuration.

    Args:
        roles: Glob patterns of parameter names by role; by default the model's own ``ROLES``, else by module types
            (`tsr.blocks.roles_by_module`).
        communicator: See `LowRankAdam`.
        subspace: By role: ``dense`` (default), ``one_sided`` or ``two_sided``.
        rank: By role; absent or ``None`` is dense.
        refresh: The interval in steps by role, and the options of `RefreshRule`.
        lr_factor: Factor of the learning rate by role; 1 where absent.
        seed: Of the sketches.
        options: See `AdamOptions`.

    Raises:
        ValueError: Naming key, value and remedy.
    """
    if roles is None:
        roles = getattr(model, "ROLES", None) or roles_by_module(model)
    subspace, rank, lr_factor = subspace or {}, rank or {}, lr_factor or {}
    refresh = dict(refresh or {})
    intervals = {role: refresh.pop(role) for role in ROLES if role in refresh}
    _reject_unknown("subspace", subspace, ROLES)
    _reject_unknown("rank", rank, ROLES)
    _reject_unknown("lr_factor", lr_factor, ROLES)
    rule_keys = [field.name for field in fields(RefreshRule) if field.name != "seed"]
    _reject_unknown("refresh", refresh, [*ROLES, *rule_keys])
    _reject_unknown("optimizer", options, [field.name for field in fields(AdamOptions)])
    policies = [
        RolePolicy(
            role=role,
            subspace=subspace.get(role, "dense"),
            rank=rank.get(role),
            interval=intervals.get(role, DEFAULT_INTERVAL.get(role, 1)),
            lr_factor=lr_factor.get(role, 1.0),
        )
        for role in ROLES
    ]
    if isinstance(options.get("betas"), Sequence):
        options["betas"] = tuple(options["betas"])
    rule = RefreshRule(**refresh, seed=seed)
    blocks = plan_blocks(model, roles, policies, uncounted=getattr(model, "UNCOUNTED", ()))
    return LowRankAdam(
        staggered(blocks, rule) if rule.stagger else blocks,
        AdamOptions(**options),
        refresh=rule,
        communicator=communicator,
        lr_factors={policy.role: policy.lr_factor for policy in policies},
    )


def _reject_unknown(group: str, given: Mapping[str, Any], known: Any) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{group}.{key} is unknown; {group} takes {', '.join(known)}")


def AdamW(model: nn.Module, **choices: Any) -> LowRankAdam:
    """torch.optim.AdamW behind the communicator: dense gradients are averaged. ``choices``: see `build`."""
    return build(model, **{"lr": 1e-3, **choices})


def GaLore(model: nn.Module, **choices: Any) -> LowRankAdam:
    """GaLore (arXiv 2403.03507): dense gradients are averaged, then projected one-sided. ``choices``: see `build`."""
    return _low_rank(model, choices, "one_sided", "svd", reduce="dense", scale=0.25, eps=1e-6, eps_mode="raw")


def OneSided(model: nn.Module, **choices: Any) -> LowRankAdam:
    """GaLore's subspace, projected before the reduction: r max(m, n) elements a step. ``choices``: see `build`."""
    return _low_rank(model, choices, "one_sided", "svd", scale=0.25, eps=1e-6)


def TSR(model: nn.Module, **choices: Any) -> LowRankAdam:
    """TSR-Adam (arXiv 2602.08007) with a synchronised sketch: r^2 elements a step. ``choices``: see `build`."""
    return _low_rank(model, choices, "two_sided", "sketch", scale=0.75, eps=1e-6)


def TSRPaper(model: nn.Module, **choices: Any) -> LowRankAdam:
    """TSR-Adam as Algorithm 1 has it, the averaging of local bases included. ``choices``: see `build`."""
    letter = {"power_iterations": 1, "phase": 0}
    return _low_rank(model, choices, "two_sided", "local_sketch", refresh=letter, scale=0.75, eps=1e-6)


def TSRSVD(model: nn.Module, **choices: Any) -> LowRankAdam:
    """TSR with exact refreshes: the mean gradient is synchronised whole on them. ``choices``: see `build`."""
    return _low_rank(model, choices, "two_sided", "svd", scale=0.75, eps=1e-6)


def _low_rank(
    model: nn.Module,
    choices: Mapping[str, Any],
    subspace: str,
    method: str,
    *,
    refresh: Mapping[str, Any] | None = None,
    **row: Any,
) -> LowRankAdam:
    """Build a low-rank method: its row of choices, overlaid with the caller's (mappings are merged key by key)."""
    embedding = "dense" if subspace == "one_sided" else subspace
    defaults: dict[str, Any] = {
        "lr": 1e-2,
        "subspace": {"linear": subspace, "embedding": embedding, "head": subspace},
        "rank": DEFAULT_RANK,
        "refresh": {"method": method, **DEFAULT_INTERVAL, **(refresh or {})},
        **row,
    }
    merged = defaults | {
        key: {**defaults[key], **value} if isinstance(defaults.get(key), Mapping) else value
        for key, value in choices.items()
    }
    return build(model, **merged)

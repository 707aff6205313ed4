"""Blocks: which parameter is what, and what is done with it.

Every trainable parameter is one block with a role: ``linear``, ``embedding``, ``head`` or ``vector``. Roles are given
as glob patterns over parameter names, never guessed from shapes; a pattern that matches nothing and a parameter that no
pattern matches are errors. A role's policy (subspace, rank, refresh interval, learning-rate factor) then holds for all
its blocks; a block whose smaller side does not exceed the rank stays dense and is listed so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from tsr.checks import is_number, is_whole
from tsr.subspace import SUBSPACES

ROLES = ("linear", "embedding", "head", "vector")
Roles = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class RolePolicy:
    """What is done with the blocks of one role; ``rank=None`` is dense.

    Raises:
        ValueError: Naming the configuration key, if a value is out of range.
    """

    role: str
    subspace: str = "dense"
    rank: int | None = None
    interval: int = 1
    lr_factor: float = 1.0

    def __post_init__(self) -> None:
        role = self.role
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; roles are {', '.join(ROLES)}")
        if self.subspace not in tuple(SUBSPACES):
            raise ValueError(f"subspace.{role} must be one of {', '.join(SUBSPACES)}, got {self.subspace!r}")
        if self.rank is not None and not is_whole(self.rank, least=1):
            raise ValueError(
                f"rank.{role} must be a whole number of at least 1, or null for a dense {role}, got {self.rank!r}"
            )
        if not is_whole(self.interval, least=1):
            raise ValueError(f"refresh.{role} must be a whole number of steps, at least 1, got {self.interval!r}")
        if not (is_number(self.lr_factor) and self.lr_factor > 0):
            raise ValueError(f"lr_factor.{role} must be a positive number, got {self.lr_factor!r}")


@dataclass(frozen=True, eq=False)
class Block:
    """One parameter and what is done with it.

    ``rank`` is 0 for a dense block. Its bases are refreshed every ``interval`` steps, ``offset`` steps later than the
    rule says (`tsr.refresh.RefreshRule.due`). ``counted`` is whether the paper's tables count the block if they count
    its role.
    """

    name: str
    parameter: nn.Parameter
    role: str
    subspace: str = "dense"
    rank: int = 0
    interval: int = 1
    note: str = ""
    counted: bool = True
    offset: int = 0

    @property
    def kind(self) -> str:
        """Under which the ledger counts the block's messages: the role, save for blocks that the paper leaves out."""
        return self.role if self.counted else f"other_{self.role}"

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of a matrix."""
        rows, columns = self.parameter.shape
        return rows, columns

    @property
    def is_low_rank(self) -> bool:
        return self.subspace != "dense"


def assign_roles(model: nn.Module, roles: Roles) -> dict[str, str]:
    """Role of every trainable parameter of ``model`` (tied weights appear once), by name.

    Raises:
        ValueError: If a pattern matches nothing, or a parameter matches no pattern or two roles.
    """
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assigned: dict[str, str] = {}
    for role, patterns in roles.items():
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r}; roles are {', '.join(ROLES)}")
        for pattern in patterns:
            matched = [name for name in names if fnmatchcase(name, pattern)]
            if not matched:
                raise ValueError(f"roles.{role}: the rule {pattern!r} selects no parameter; names look like {names[0]}")
            for name in matched:
                if assigned.setdefault(name, role) != role:
                    raise ValueError(f"roles.{role}: {name} already has the role {assigned[name]!r}")
    missing = [name for name in names if name not in assigned]
    if missing:
        raise ValueError(f"no rule gives {missing[0]} a role ({len(missing)} parameters in all); add one to roles")
    return assigned


def roles_by_module(model: nn.Module, *, head: str | None = None) -> dict[str, list[str]]:
    """Rules for a model that brings none, from its module types.

    Weights of ``nn.Embedding`` are embeddings, weights of ``nn.Linear`` are linear, save those of the module named
    ``head``; whatever else is a vector or scalar is dense. Other matrices must be given a role by hand.
    """
    rules: dict[str, list[str]] = {}
    known = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def claim(role: str, parameter: Tensor) -> None:
        name = known.pop(id(parameter), None)
        if name is not None:
            rules.setdefault(role, []).append(name)

    if head is not None:
        claim("head", model.get_parameter(f"{head}.weight"))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            claim("embedding", module.weight)
        elif isinstance(module, nn.Linear):
            claim("linear", module.weight)
    for parameter in list(model.parameters()):
        if parameter.ndim < 2:
            claim("vector", parameter)
    return rules


def plan_blocks(
    model: nn.Module, roles: Roles, policies: Iterable[RolePolicy], *, uncounted: Sequence[str] = ()
) -> list[Block]:
    """The blocks of ``model``, in the order of its parameters.

    ``uncounted`` are glob patterns of parameters that the paper's accounting leaves out whatever their role.

    Raises:
        ValueError: As `assign_roles`; if a pattern of ``uncounted`` matches nothing; if a low-rank role holds a
            parameter that is no matrix, or has a rank that none of its blocks can take.
    """
    assigned = assign_roles(model, roles)
    by_role = {role: RolePolicy(role=role) for role in ROLES} | {policy.role: policy for policy in policies}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left_out: set[str] = set()
    for pattern in uncounted:
        matched = {name for name in parameters if fnmatchcase(name, pattern)}
        if not matched:
            first = next(iter(parameters))
            raise ValueError(f"uncounted: the rule {pattern!r} selects no parameter; names look like {first}")
        left_out |= matched
    blocks = [
        replace(_block(name, parameter, by_role[assigned[name]]), counted=name not in left_out)
        for name, parameter in parameters.items()
    ]
    for role, policy in by_role.items():
        members = [block for block in blocks if block.role == role]
        wants_low_rank = policy.subspace != "dense" and policy.rank is not None
        if members and wants_low_rank and not any(block.is_low_rank for block in members):
            largest = max(min(block.shape) for block in members) - 1
            raise ValueError(
                f"rank.{role}={policy.rank} is too large: no {role} block can take it; at most {largest} is possible"
            )
    return blocks


def _block(name: str, parameter: nn.Parameter, policy: RolePolicy) -> Block:
    if policy.subspace == "dense" or policy.rank is None:
        return Block(name, parameter, policy.role)
    if parameter.ndim != 2:
        raise ValueError(
            f"subspace.{policy.role}={policy.subspace} needs matrices, but {name} has shape {tuple(parameter.shape)}"
        )
    if min(parameter.shape) <= policy.rank:
        return Block(name, parameter, policy.role, note=f"smaller side {min(parameter.shape)} ≤ rank {policy.rank}")
    return Block(name, parameter, policy.role, policy.subspace, policy.rank, policy.interval)


def describe(blocks: Sequence[Block]) -> list[dict[str, object]]:
    """One row for each kind of block (role, shape, treatment): what the run record and the log show."""
    kinds: dict[tuple[object, ...], list[Block]] = {}
    for block in blocks:
        shape = "x".join(map(str, block.parameter.shape))
        note = "; ".join(filter(None, (block.note, "" if block.counted else "not in the paper's accounting")))
        kinds.setdefault((block.role, shape, block.subspace, block.rank, block.interval, note), []).append(block)
    return [
        {
            "role": role,
            "shape": shape,
            "blocks": len(members),
            "parameters": sum(block.parameter.numel() for block in members),
            "subspace": subspace,
            "rank": rank or None,
            "refresh": interval if rank else None,
            "note": note,
            "first": members[0].name,
        }
        for (role, shape, subspace, rank, interval, note), members in kinds.items()
    ]

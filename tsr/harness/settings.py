"""Settings of a training job: validated values, the identity of a run, the learning rate's schedule."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tsr.checks import is_number, is_whole

Made = TypeVar("Made")

GROUPS = (
    *("model", "task", "data", "rank", "refresh", "schedule", "optimizer", "logger"),  # folders of conf/
    *("trainer", "comm", "subspace", "lr_factor"),
)
# Keys that change where and how a run is kept, watched or continued, but not what it computes.
NOT_IDENTITY = {
    *("resume", "logger", "runs_dir", "results", "data.cache_dir", "data.num_workers"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.checksum_every"),
}


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The top-level keys that are no group.

    Args:
        nproc: Workers to start.
        world_size: Workers of a dry run; ``None`` is ``nproc``.
        seed: Of weights and sketches.
        data_seed: Of the order of the rows.
        dry_run: Count bytes and memory and train nothing.
        resume: ``auto``, the path of a checkpoint or run directory, or ``None`` to start afresh.
    """

    nproc: int
    world_size: int | None
    seed: int
    data_seed: int
    dry_run: bool
    resume: str | None

    def __post_init__(self) -> None:
        for name, least in (("nproc", 1), ("seed", 0), ("data_seed", 0)):
            if not is_whole(getattr(self, name), least=least):
                raise ValueError(f"{name} must be a whole number of at least {least}, got {getattr(self, name)!r}")
        if not isinstance(self.dry_run, bool):
            raise ValueError(f"dry_run must be true or false, got {self.dry_run!r}")
        if self.world_size is not None and not is_whole(self.world_size, least=1):
            raise ValueError(f"world_size must be a whole number of at least 1 or null, got {self.world_size!r}")
        if self.world_size is not None and not self.dry_run:
            raise ValueError(f"world_size={self.world_size} is for dry runs; start real workers with nproc")
        if self.resume is not None and not isinstance(self.resume, str):
            raise ValueError(f"resume must be auto, null or the path of a checkpoint or run, got {self.resume!r}")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> JobSettings:
        """The settings in a job's whole configuration, of which every group is there."""
        for group in GROUPS:
            if not isinstance(config.get(group), Mapping):
                raise ValueError(f"{group} must be a group of keys, got {config.get(group)!r}; leave it as it was")
        for group in ("model", "optimizer"):
            if not config[group].get("name"):
                raise ValueError(f"{group}.name is missing, so {group} is no choice by itself; choose one with a name")
        values: dict[str, Any] = {name: config.get(name) for name in inspect.signature(cls).parameters}
        return cls(**values)

    @property
    def workers(self) -> int:
        """How many workers the job has, or would have."""
        return self.world_size or self.nproc


def from_group(make: Callable[..., Made], config: Mapping[str, Any], group: str, **more: Any) -> Made:
    """What ``make`` makes of the keys of a group.

    Raises:
        ValueError: Naming the group, if ``make`` does not know a key or lacks one; or as ``make`` does.
    """
    takes = inspect.signature(make)
    try:
        takes.bind(**config[group], **more)
    except TypeError as error:
        keys = ", ".join(key for key in takes.parameters if key not in more)
        raise ValueError(f"{group}: {error}; it takes {keys}") from None
    return make(**config[group], **more)


@dataclass(frozen=True, kw_only=True)
class TrainerSettings:
    """The ``trainer`` keys.

    Args:
        steps: Updates in all; ``None`` if ``epochs`` says how many.
        epochs: Passes over the training examples of ``task=finetune``.
        global_batch: Rows of one update over all workers. An epoch of a fine-tuning ends with a batch of what is left.
        micro_batch: Most rows that one worker takes through the model at once; ``None`` is its whole share.
        eval_every: Steps between evaluations; ``None`` evaluates at the end alone. The last step is always evaluated.
        eval_rows: Rows of the validation split to evaluate on, from its start; ``None`` is all.
        checkpoint_every: Steps between checkpoints; ``None`` writes none.
        keep_checkpoints: How many of the newest are kept.
        checksum_every: Steps between comparisons of the parameters of all workers.
    """

    steps: int | None
    epochs: int | None = None
    global_batch: int
    micro_batch: int | None
    eval_every: int | None
    eval_rows: int | None
    checkpoint_every: int | None
    keep_checkpoints: int
    checksum_every: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            optional = name in ("steps", "epochs", "micro_batch", "eval_every", "eval_rows", "checkpoint_every")
            if value is None and optional:
                continue
            if not is_whole(value, least=1):
                or_null = " or null" if optional else ""
                raise ValueError(f"trainer.{name} must be a whole number of at least 1{or_null}, got {value!r}")
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"trainer.steps={self.steps} and trainer.epochs={self.epochs}: give one of them, and null for the other"
            )

    def count_steps(self, rows: int) -> int:
        """Updates in all, for so many training examples."""
        return self.steps or (self.epochs or 0) * math.ceil(rows / self.global_batch)

    def check_world(self, world_size: int) -> None:
        """Refuse a number of workers that does not divide the global batch."""
        if self.global_batch % world_size:
            raise ValueError(
                f"trainer.global_batch={self.global_batch} is not divisible by the number of workers, {world_size}; "
                f"try {self.global_batch // world_size * world_size or world_size}"
            )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Factor of the learning rate on the update clock: linear warm-up, then a decay to ``floor``.

    Args:
        shape: ``cosine``, ``linear`` or ``constant`` after warm-up.
        warmup: Part of all steps, from 0 up to but not including 1; the first update already has a positive rate.
        floor: Factor at the last step.
        steps: Updates in all.
    """

    shape: str
    warmup: float
    floor: float
    steps: int

    def __post_init__(self) -> None:
        if self.shape not in ("cosine", "linear", "constant"):
            raise ValueError(f"schedule.shape must be cosine, linear or constant, got {self.shape!r}")
        if not (is_number(self.warmup) and 0 <= self.warmup < 1):
            raise ValueError(f"schedule.warmup is a part of all steps and must be in [0, 1), got {self.warmup!r}")
        if not (is_number(self.floor) and 0 <= self.floor <= 1):
            raise ValueError(f"schedule.floor must be between 0 and 1, got {self.floor!r}")

    def __call__(self, done: int) -> float:
        """The factor of the update that follows ``done`` updates."""
        warmup = round(self.warmup * self.steps)
        if done < warmup:
            return (done + 1) / warmup
        if self.shape == "constant":
            return 1.0
        progress = min(1.0, (done + 1 - warmup) / max(1, self.steps - warmup))
        left = (1 + math.cos(math.pi * progress)) / 2 if self.shape == "cosine" else 1 - progress
        return self.floor + (1 - self.floor) * left


def config_hash(config: Mapping[str, Any]) -> str:
    """Identity of a run: a hash of the resolved configuration, less what does not change its result.

    Keys that no part of a job reads, such as the lookup tables of an experiment, are no part of it; nor is a null, so
    that a key that is added later, off by default, leaves the identity of earlier runs as it was.
    """
    read = {*GROUPS, *inspect.signature(JobSettings).parameters, "device"} - NOT_IDENTITY
    identity = {key: _without_nulls(config[key], key) for key in sorted(read & set(config)) if config[key] is not None}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _without_nulls(value: Any, key: str) -> Any:
    if not isinstance(value, Mapping):
        return value
    kept = {name: _without_nulls(part, f"{key}.{name}") for name, part in value.items() if part is not None}
    return {name: part for name, part in kept.items() if f"{key}.{name}" not in NOT_IDENTITY}


def run_name(config: Mapping[str, Any]) -> str:
    """Name of a run's directory: a function of the configuration, never of the clock."""
    return f"{config['model']['name']}-{config['optimizer']['name']}-{config_hash(config)[:10]}"

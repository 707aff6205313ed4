"""What Hydra needs of a job: resolvers for the names of runs, a check of the output directory, one-line failures."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from tsr.harness.launch import external_world
from tsr.harness.settings import run_name


def plain(config: DictConfig) -> dict[str, Any]:
    """The job's configuration, resolved, as plain values; Hydra's own node is left out."""
    keys = [str(key) for key in config if key != "hydra"]
    values = OmegaConf.to_container(OmegaConf.masked_copy(config, keys), resolve=True, throw_on_missing=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def register_resolvers() -> None:
    """``${run_name:}`` names a job's directory; ``${world_size:}`` is torchrun's number of workers, or 1;
    ``${project:}`` is the checkout."""

    def name(*, _root_: DictConfig) -> str:
        try:
            return run_name(plain(_root_))
        except (OmegaConfBaseException, KeyError, TypeError):
            return "invalid"  # the job itself says what is wrong with its configuration

    def world_size() -> int:
        world = external_world()
        return 1 if world is None else world.size

    OmegaConf.register_new_resolver("run_name", name, replace=True)
    OmegaConf.register_new_resolver("world_size", world_size, replace=True)
    OmegaConf.register_new_resolver("project", lambda: str(Path(__file__).parents[2]), replace=True)


class JobFailed(CompactHydraException):
    """A job of a sweep that did not end well. Hydra runs the others, and its exit status is 1 then."""


def explain(error: Exception, config: DictConfig) -> str:
    """The message of what a user did wrong, in a line of ours where Hydra or OmegaConf wrap it."""
    if isinstance(error, InterpolationKeyError) and (found := re.search("key '([^']+)' not found", str(error))):
        return _missing_entry(config, found[1], wanted=error.full_key or "")
    cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
    return str(cause).strip() or type(cause).__name__


def _missing_entry(config: DictConfig, key: str, *, wanted: str) -> str:
    """What a table of the configuration lacks, and what it has: `wanted` is looked up there at `key`."""
    node: Any = config
    for depth, part in enumerate(parts := key.split(".")):
        if not isinstance(node, DictConfig) or part not in node:
            known = ", ".join(map(str, node)) if isinstance(node, DictConfig) and depth else "no such table"
            return f"{wanted}: {'.'.join(parts[:depth]) or key} has no {part!r}; there is {known}"
        node = OmegaConf.select(config, ".".join(parts[: depth + 1]))
    return f"{wanted}: {key} is not set"


def remove_if_empty(directory: Path) -> None:
    """Hydra has made the directory; a job that is refused or skipped leaves no trace."""
    with suppress(OSError):  # not empty, or gone already
        directory.rmdir()


def give_up(message: str) -> None:
    """End the job with one message: a sweep shows it at once and goes on, and its exit status tells at the end."""
    world = external_world()
    if world is not None and world.rank > 0:
        sys.exit(1)  # the first worker says it
    if HydraConfig.get().mode == RunMode.RUN:
        print(message, file=sys.stderr)
        sys.exit(1)
    overrides = ", ".join(HydraConfig.get().overrides.task)
    message = f"job {HydraConfig.get().job.num} ({overrides}): {message}"
    print(message, file=sys.stderr, flush=True)
    raise JobFailed(message)


class CheckDirectory(Callback):
    """Refuse, in one line, an output directory that cannot be made."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check("hydra.run.dir", config)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._check("hydra.sweep.dir", config)

    def _check(self, key: str, config: DictConfig) -> None:
        directory = Path(str(OmegaConf.select(config, key))).absolute()
        try:
            directory.mkdir(parents=True, exist_ok=True)  # as Hydra is about to; a job that is refused removes it
        except OSError as error:
            sys.exit(f"error: {key}={directory}: no directory can be made there ({error.strerror}); give another")

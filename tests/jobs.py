"""Small training jobs without the command line: configuration, rows of tokens, one job on this worker, its record.

A job leaves a run directory, and that is what the tests read. Everything here can be called in the test's own process
(a world of one) or by every worker of `tests.distributed.run`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

import data
import train
from data.tasks import TASKS
from tsr.harness import checkpoint
from tsr.harness.hydra_hooks import plain
from tsr.harness.launch import World
from tsr.harness.loop import Objective
from tsr.harness.rundir import LOGGER, RunDirectory, read_rows
from tsr.harness.settings import TrainerSettings

Config = dict[str, Any]

PROJECT = Path(train.__file__).parent
METHODS = ("adamw", "galore", "one_sided", "tsr", "tsr_paper", "tsr_svd")
VOCABULARY, LENGTH = 256, 32
# Two layers; the intervals differ, so that all kinds of steps occur within a few.
SMALL = (
    "model=llama_tiny",
    f"model.vocab_size={VOCABULARY}",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    f"data.sequence_length={LENGTH}",
    "rank.linear=8",
    "rank.embedding=4",
    "refresh.linear=8",
    "refresh.embedding=6",
    "trainer.global_batch=8",
    "trainer.eval_rows=null",
    "trainer.checkpoint_every=null",
    "device=cpu",
    "logger=none",
)


@functools.cache
def _composed(method: str) -> Config:
    with hydra.initialize_config_dir(str(PROJECT / "conf"), version_base="1.3"):
        return plain(hydra.compose("config", [f"optimizer={method}", *SMALL]))


def compose(method: str, changes: Mapping[str, Any] | None = None) -> Config:
    """The configuration of ``python train.py optimizer=METHOD`` with `SMALL`, then ``changes`` by dotted key."""
    config = copy.deepcopy(_composed(method))
    for key, value in (changes or {}).items():
        *groups, name = key.split(".")
        node = functools.reduce(dict.__getitem__, groups, config)
        assert name in node, key
        node[name] = value
    return config


def random_integers(seed: int) -> Iterator[int]:
    """Integers in [0, 2^16), from plain arithmetic: the same whatever the versions of the libraries."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 48


def make_rows(folder: Path, *, padded: bool, train: int = 40, validation: int = 13) -> data.Prepared:
    """Rows in the format of `data.rows` that need no corpus and no tokenizer.

    There is something to learn: low token ids are frequent, and every other token follows from the one before. Padded
    rows have 1 to `LENGTH` tokens; a row of one token has no loss token.
    """
    folder.mkdir(parents=True)
    layout = "document" if padded else "packed"
    record: dict[str, Any] = {"name": "made", "rows": layout, "sequence_length": LENGTH}
    record |= {"corpus_sha256": f"made, {layout}", "tokenizer_sha256": "none"}
    for seed, (split, count) in enumerate((("train", train), ("validation", validation)), 1):
        integers = random_integers(seed)
        tokens = np.zeros((count, LENGTH), np.uint16)
        lengths = np.full(count, LENGTH, np.uint32)
        for row in range(count):
            if padded:
                lengths[row] = 1 + next(integers) % LENGTH
            for position in range(int(lengths[row])):
                if position % 2:
                    tokens[row, position] = (5 * int(tokens[row, position - 1]) + 7) % VOCABULARY
                else:
                    tokens[row, position] = next(integers) ** 2 * VOCABULARY >> 32
        tokens.tofile(folder / f"{split}.tokens")
        lengths.tofile(folder / f"{split}.lengths")
        real = int(lengths.sum())
        record[split] = {"rows": count, "tokens": real, "positions": count * LENGTH, "loss_tokens": real - count}
    (folder / "meta.json").write_text(json.dumps({**record, "dtype": "uint16"}))
    return data.Prepared(folder, data.Rows(folder, "train"), data.Rows(folder, "validation"), record)


class Member(World):
    """A place in a process group that exists already."""

    @contextlib.contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        yield


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run_job(config: Config, directory: Path, prepared: data.Prepared) -> None:
    """Run a job as `train.run_job` would, on this worker of the world there is.

    It leaves the signal handlers and the log of this process as they were.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if dist.is_initialized():
        dist.barrier()  # nobody is still writing the record of an earlier attempt
    directory.mkdir(parents=True, exist_ok=True)
    found = None
    if this_rank() == 0:  # the others learn it from the first
        folder = RunDirectory(directory, config).checkpoints
        last = TrainerSettings(**config["trainer"]).count_steps(len(prepared.train))
        found = checkpoint.find(config["resume"], folder, train.check(config), text=prepared.identity, steps=last)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    log = (list(LOGGER.handlers), LOGGER.level, LOGGER.propagate)
    try:
        train.work(Member(this_rank(), size, this_rank(), size, ""), config, directory, prepared, found)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for file in LOGGER.handlers:
            file.close()
        LOGGER.handlers[:], LOGGER.level, LOGGER.propagate = log


def run_jobs(jobs: Sequence[tuple[Config, Path, data.Prepared]]) -> None:
    """Several jobs in one world: starting worlds is what costs."""
    for job in jobs:
        run_job(*job)


@dataclass(frozen=True)
class Record:
    """What a finished job has left: its metrics, its summary and its last checkpoint, if it wrote any."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    state: dict[str, Any]

    @property
    def weights(self) -> dict[str, Tensor]:
        return dict(self.state["model"])


def read_record(directory: Path) -> Record:
    saved = checkpoint.list_checkpoints(directory / "checkpoints")
    state = torch.load(saved[-1] / "state.pt", weights_only=True) if saved else {}
    summary = json.loads((directory / "summary.json").read_text())
    return Record(read_rows(directory / "metrics.jsonl"), summary, state)


def without_times(values: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the metrics, or a summary, less what the clock decides."""
    return {
        key: value
        for key, value in values.items()
        if not key.startswith("time/") and key not in ("tokens_per_s", "duration_s", "seconds")
    }


def assert_same_run(one: Path, other: Path) -> None:
    """Same metrics, summary, parameters and optimizer state, bit for bit; the clock's figures apart."""
    first, second = read_record(one), read_record(other)
    assert [without_times(row) for row in first.rows] == [without_times(row) for row in second.rows]
    assert without_times(first.summary) == without_times(second.summary)
    states = []
    for record in (first, second):
        progress = without_times(record.state["progress"])
        states.append(tree_flatten_with_path({**record.state, "progress": progress})[0])
    assert len(states[0]) == len(states[1])
    for (path, expected), (other_path, found) in zip(*states, strict=True):
        assert path == other_path and type(expected) is type(found), path
        if isinstance(expected, Tensor):
            assert expected.dtype == found.dtype and torch.equal(expected, found), path
        else:
            assert expected == found, path


@contextlib.contextmanager
def altered_model(alter: Callable[[nn.Module], None]) -> Iterator[None]:
    """While this holds, every model that `train` makes goes through ``alter`` (hooks, mostly); meta models do not."""
    build = train.build_model

    def build_altered(config: Config, device: torch.device | str) -> nn.Module:
        model = build(config, device)
        if torch.device(device).type != "meta":
            alter(model)
        return model

    with mock.patch.object(train, "build_model", build_altered):
        yield


@contextlib.contextmanager
def altered_optimizer(alter: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """While this holds, every optimizer that `train` makes goes through ``alter``."""
    build = train.build_optimizer

    def build_altered(*args: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = build(*args)
        alter(optimizer)
        return optimizer

    with mock.patch.object(train, "build_optimizer", build_altered):
        yield


class Stopped(Exception):
    """Stands for whatever may end a job."""


@contextlib.contextmanager
def stopping_before(steps: int) -> Iterator[None]:
    """While this holds, a job ends with `Stopped` within the step after it has made so many, on all workers alike."""
    calls = itertools.count(1)

    def stopping(objective: Objective) -> Objective:
        def stopped(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor | None]:
            if model.training and next(calls) > steps:
                raise Stopped
            return objective(model, batch)

        return stopped

    with contextlib.ExitStack() as stack:
        for task in TASKS.values():
            stack.enter_context(mock.patch.object(task, "objective", stopping(task.objective)))
        yield

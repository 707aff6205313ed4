"""Worlds of local workers, an independent count of what they send, and a small model to give them work.

Workers are forked from a server process that has torch imported already, so that a world costs a fraction of a second.
It still pays to put many checks into one world.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from sweep.bench.oracle import CollectiveOracle as CollectiveOracle
from tsr import TSR, TSRSVD, AdamW, Communicator, GaLore, LowRankAdam, OneSided, TSRPaper

Result = TypeVar("Result")

TIMEOUT_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
# torch imports its `_dynamo` when the first optimizer or dispatch mode is made, which takes seconds.
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "tsr", "pytest"])


class WorkerError(RuntimeError):
    """A worker raised; the message is its traceback."""


def run(world_size: int, function: Callable[..., Result], *args: Any) -> list[Result]:
    """Call ``function(*args)`` on every worker of a gloo group; return the results by rank.

    ``function`` is a module-level function; arguments and results are pickled.

    Raises:
        WorkerError: If a worker raised or died; it carries the traceback of the first that did.
        TimeoutError: If they are not done after `TIMEOUT_S`.
    """
    with tempfile.TemporaryDirectory() as directory:
        pending: dict[Connection, int] = {}
        workers = []
        for rank in range(world_size):
            receiver, sender = _CONTEXT.Pipe(duplex=False)
            worker = _CONTEXT.Process(
                target=_work,
                args=(sender, f"file://{directory}/rendezvous", rank, world_size, function, args),
                daemon=True,
            )
            worker.start()
            sender.close()  # ours, so that a dead worker ends the stream
            pending[receiver] = rank
            workers.append(worker)
        try:
            results = _collect(pending)
            for worker in workers:
                worker.join(TIMEOUT_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return results


def _collect(pending: dict[Connection, int]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while pending:
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"workers {sorted(pending.values())} gave no result in {TIMEOUT_S:.0f} s")
        failures = []
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            try:
                failed_at, results[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                failed_at, results[rank] = 0.0, "died without a word"
            if failed_at is not None:
                failures.append((failed_at, rank))
        if failures:  # the first is the cause: its peers fail because it left
            _, rank = min(failures)
            raise WorkerError(f"worker {rank}: {results[rank]}")
    return [results[rank] for rank in sorted(results)]


def _work(
    sender: Connection, address: str, rank: int, world_size: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT_S)
        )
        # Not `Connection.send`, which would pass tensors through a file of a process that is about to end.
        answer = pickle.dumps((None, function(*args)))
    except BaseException:
        answer = pickle.dumps((time.monotonic(), traceback.format_exc()))
    sender.send_bytes(answer)  # before the group goes and makes the peers fail
    if dist.is_initialized():
        dist.destroy_process_group()


VOCABULARY, WIDTH, ROWS, LENGTH, IGNORED = 40, 12, 8, 10, -100


class Toy(nn.Module):
    """A language model of sorts with every sort of block: tall, wide, square, too small for its rank, never used."""

    ROLES = {  # noqa: RUF012
        "embedding": ["embedding.weight"],
        "linear": ["tall.weight", "wide.weight", "square.weight", "small.weight", "idle.weight"],
        "head": ["head.weight"],
        "vector": ["norm"],
    }

    def __init__(self, *, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.tall = nn.Linear(width, 20, bias=False)
        self.wide = nn.Linear(20, width, bias=False)
        self.square = nn.Linear(width, width, bias=False)
        self.small = nn.Linear(width, 3, bias=False)
        self.idle = nn.Linear(width, 9, bias=False)
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses of all targets that are not `IGNORED`; tokens and targets are rows x length."""
        hidden = self.embedding(tokens)
        hidden = hidden + self.square(hidden)
        hidden = (hidden + self.wide(torch.tanh(self.tall(hidden)))) * self.norm
        hidden = hidden * torch.sigmoid(self.small(hidden).sum(-1, keepdim=True))
        logits = self.head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")


def make_toy(dtype: torch.dtype = torch.float32) -> Toy:
    """The same `Toy` on every worker."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Toy().to(dtype)


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, `ROWS` x `LENGTH`; padding leaves row i ``LENGTH - i`` loss tokens."""
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    for row in range(ROWS):
        targets[row, LENGTH - row :] = IGNORED
    return tokens, targets


def backward(model: nn.Module, step: int, *, rank: int = 0, world_size: int = 1, accumulation: int = 1) -> float:
    """Gradients of this worker's rows of the global batch, such that their mean over the workers is that of the
    global mean loss; returns this worker's share of that loss, times the world size."""
    tokens, targets = global_batch(step)
    factor = world_size / int((targets != IGNORED).sum())
    mine = slice(rank, None, world_size)
    total = 0.0
    for part, wanted in zip(tokens[mine].chunk(accumulation), targets[mine].chunk(accumulation), strict=True):
        loss = model(part, wanted) * factor
        loss.backward()
        total += loss.item()
    return total


INTERVALS = {"linear": 2, "embedding": 3}
CHOICES: dict[str, Any] = {"lr": 0.01, "rank": {"linear": 4, "embedding": 3}, "refresh": INTERVALS}

METHODS: dict[str, Callable[..., LowRankAdam]] = {
    "adamw": AdamW,
    "galore": GaLore,
    "one_sided": OneSided,
    "tsr": TSR,
    "tsr_paper": TSRPaper,
    "tsr_svd": TSRSVD,
}
VARIANTS: dict[str, Callable[..., LowRankAdam]] = {
    **METHODS,
    "power": partial(TSR, refresh={**INTERVALS, "power_iterations": 2}),
    "previous": partial(TSR, refresh={**INTERVALS, "start": "previous"}),
    "late_phase": partial(TSR, refresh={**INTERVALS, "phase": 0}),
    "one_sided_embedding": partial(OneSided, subspace={"embedding": "one_sided"}),
    "one_pass": partial(TSR, refresh={**INTERVALS, "method": "one_pass"}),
    "one_pass_previous": partial(TSR, refresh={**INTERVALS, "method": "one_pass", "start": "previous"}),
    "one_pass_one_sided": partial(
        OneSided, subspace={"embedding": "one_sided"}, refresh={**INTERVALS, "method": "one_pass"}
    ),
    "low_rank_head": partial(TSR, rank={"linear": 4, "embedding": 3, "head": 5}, refresh={**INTERVALS, "head": 2}),
    "rotate": partial(TSR, moments="rotate"),
    "reset": partial(TSR, moments="reset"),
    "clipped": partial(TSR, clip_norm=0.01),
}


def make_optimizer(
    variant: str, model: nn.Module, *, communicator: Communicator | None = None, **choices: Any
) -> LowRankAdam:
    """One of `VARIANTS`, with small ranks and intervals, and ``choices``."""
    factory = VARIANTS[variant]
    given = factory.keywords if isinstance(factory, partial) else {}
    small = {key: value for key, value in CHOICES.items() if key not in given and key not in choices}
    return factory(model, communicator=communicator, **small, **choices)

"""One worker of the slow-network bench: `torchrun … -m sweep.bench.worker SPEC.json`, the same file on every host.

It trains on random tokens: steps of every kind that a method's schedule has (which blocks refresh), each several times,
and writes what each took and sent, as JSON, into the folder that the file names.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models import next_token_losses
from sweep.bench.network import interface_counters, socket_bytes
from sweep.bench.oracle import CollectiveOracle
from sweep.cells import compose
from train import build_model, build_optimizer
from tsr import Communicator

PROBE_BYTES = 16 * 2**20  # of the all-reduce that measures goodput
PROBES = 3
ONE_BUCKET_MIB = 2**14


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What the workers of one cell do.

    Args:
        overrides: Of the project's configuration; they choose model, method and wire.
        peer: Instead of the method, torch's DDP with AdamW and this hook: ``none``, ``bf16`` or ``powersgd``.
        rank: Of PowerSGD.
        rows, length: Tokens of one worker's micro-batch.
        passes: Micro-batches of a step.
        repeats: Measured steps of each kind.
        interface: Whose counters are read; ``None`` counts what the worker's own sockets send.
        out: Folder of the results.
    """

    overrides: list[str]
    peer: str | None
    rank: int
    rows: int
    length: int
    passes: int
    repeats: int
    interface: str | None
    out: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step: a step's number, how many there are until the schedule repeats, and the all-reduces of one."""

    number: int
    count: int
    payload: int
    collectives: int


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step of one worker, in seconds and bytes.

    ``compute`` is forward and backward as long as they take where nothing is sent, ``communication`` what was waited
    for (DDP waits inside backward: what backward takes longer than by itself), ``optimizer`` the rest: projections,
    refreshes, updates, and what sending beside backward costs a method of ours.
    """

    number: int
    step: float
    compute: float
    communication: float
    optimizer: float
    payload: int


class Ours:
    """A method of this project."""

    def __init__(self, spec: Spec, config: dict[str, Any]) -> None:
        self.communicator = Communicator(**config["comm"])
        self.model = build_model(config, "cpu")
        self.optimizer = build_optimizer(config, self.model, self.communicator)
        self._compute = 0.0

    def prepare(self, tokens: Tensor) -> tuple[int, list[Kind]]:
        """Make the first step and one of every kind of the later ones; returns the payload of the first."""
        first = self.step(1, tokens)
        kinds = []
        for number, count in self.optimizer.schedule().items():
            with CollectiveOracle() as oracle:
                times = self.step(number, tokens)
            if times.payload != oracle.total:
                raise RuntimeError(f"step {number}: the ledger has {times.payload} bytes, torch {oracle.total}")
            calls = oracle.calls.total()
            kinds.append(Kind(number=number, count=count, payload=times.payload, collectives=calls))
        return first.payload, kinds

    def time_compute(self, tokens: Tensor) -> None:
        """Time forward and backward where nothing is sent, for the steps until it is called again."""
        self.optimizer.zero_grad(set_to_none=True)
        # Without begin() nothing leaves before step().
        self._compute = undisturbed(lambda: [_loss(self.model, batch).backward() for batch in tokens])
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, number: int, tokens: Tensor) -> StepTimes:
        start = time.perf_counter()
        self.communicator.lap()
        self.optimizer.updates = number - 1
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.begin(len(tokens))
        for batch in tokens:
            _loss(self.model, batch).backward()
        self.optimizer.step()
        step, waited = time.perf_counter() - start, self.communicator.lap().seconds
        compute = min(self._compute, step - waited)
        return StepTimes(
            number=number,
            step=step,
            compute=compute,
            communication=waited,
            optimizer=step - waited - compute,
            payload=self.communicator.ledger.last.total,
        )


class Peer:
    """torch's own DDP with AdamW, plain or with a communication hook."""

    def __init__(self, spec: Spec, config: dict[str, Any]) -> None:
        # PowerSGD's hook sends again when a bucket is back: with several of them the workers' orders differ, which gloo
        # ends the process for. So it gets all in one.
        bucket_mib = ONE_BUCKET_MIB if spec.peer == "powersgd" else None
        self.model = DistributedDataParallel(
            build_model(config, "cpu"), gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self._compute = 0.0
        self._payload = 0
        self._has_hook = spec.peer != "none"
        self._settling = 1  # DDP's second step tells the workers about its final buckets
        if spec.peer == "bf16":
            # torch reads annotations of a hook, which are text here.
            self.model.register_comm_hook(None, lambda state, bucket: bf16_hook(bucket))
        elif spec.peer == "powersgd":
            from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

            state = powersgd.PowerSGDState(
                process_group=None, matrix_approximation_rank=spec.rank, start_powerSGD_iter=2, warm_start=True
            )
            self.model.register_comm_hook(state, powersgd.powerSGD_hook)
            self._settling = 3

    def prepare(self, tokens: Tensor) -> tuple[int, list[Kind]]:
        """Let the hook settle, and count what a step sends."""
        first, _ = self._counted(tokens)
        for _ in range(self._settling):
            self._step(tokens)
        self._payload, calls = self._counted(tokens)
        return first, [Kind(number=2, count=1, payload=self._payload, collectives=calls)]

    def time_compute(self, tokens: Tensor) -> None:
        """Time forward and backward where nothing is sent, for the steps until it is called again."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.model.no_sync():
            self._compute = undisturbed(lambda: [_loss(self.model, batch).backward() for batch in tokens])
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, number: int, tokens: Tensor) -> StepTimes:
        start, middle, end = self._step(tokens)
        return StepTimes(
            number=number,
            step=end - start,
            compute=min(self._compute, middle - start),
            communication=max(0.0, middle - start - self._compute),
            optimizer=end - middle,
            payload=self._payload,
        )

    def _counted(self, tokens: Tensor) -> tuple[int, int]:
        """Bytes and number of a step's all-reduces: DDP's own by torch's dispatcher, a hook's where it calls them."""
        if self._has_hook:
            with counted_calls() as calls:
                self._step(tokens)
            return sum(calls), len(calls)
        with CollectiveOracle() as oracle:
            self._step(tokens)
        return oracle.total, oracle.calls.total()

    def _step(self, tokens: Tensor) -> tuple[float, float, float]:
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        for number, batch in enumerate(tokens, start=1):
            with nullcontext() if number == len(tokens) else self.model.no_sync():
                _loss(self.model, batch).backward()
        middle = time.perf_counter()
        self.optimizer.step()
        return start, middle, time.perf_counter()


def undisturbed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes while all workers do it and none sends."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds


@contextmanager
def counted_calls() -> Iterator[list[int]]:
    """The bytes of each all-reduce meanwhile; of those, too, that futures make, in threads that no oracle sees."""
    calls: list[int] = []
    real = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> dist.Work | None:
        calls.append(tensor.numel() * tensor.itemsize)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield calls
    finally:
        dist.all_reduce = real


def bf16_hook(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Half the bytes of fp32; torch's own hook of this kind refuses gloo."""
    flat = bucket.buffer()
    half = flat.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    assert work is not None

    def widen(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return flat.copy_(done.value()[0])

    return work.get_future().then(widen)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return next_token_losses(model(tokens), tokens, lengths).mean()


def measure(spec: Spec) -> dict[str, Any]:
    """All steps of a cell, on this worker."""
    config = compose(*spec.overrides)
    contestant: Ours | Peer = Peer(spec, config) if spec.peer else Ours(spec, config)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (spec.passes, spec.rows, spec.length)
    tokens = torch.randint(config["model"]["vocab_size"], shape, generator=generator)
    goodput = measure_goodput()
    first, kinds = contestant.prepare(tokens)
    steps = []
    with counted_wire(spec.interface) as wire:
        for _ in range(spec.repeats):  # in turns, for the machine's speed drifts
            contestant.time_compute(tokens)
            steps += [contestant.step(kind.number, tokens) for kind in kinds]
    return {
        "goodput": goodput,
        "first": first,
        "kinds": [asdict(kind) for kind in kinds],
        "steps": [asdict(step) for step in steps],
        "wire": wire["bytes"],
    }


@contextmanager
def counted_wire(interface: str | None) -> Iterator[dict[str, int]]:
    """The bytes that this worker sends meanwhile: its host's interface, or the TCP sockets of its own process."""
    counted: dict[str, int] = {}

    def read() -> int:
        own = os.getpid()
        return socket_bytes([own])[own] if interface is None else interface_counters(interface).tx_bytes

    dist.barrier()
    before = read()
    yield counted
    dist.barrier()
    counted["bytes"] = read() - before


def measure_goodput() -> float:
    """Payload bytes a second of a large all-reduce, times the 2 (N - 1) / N that a ring sends of each.

    The fastest of some, for a lower bound is made of it.
    """
    flat = torch.zeros(PROBE_BYTES // 4)
    size = dist.get_world_size()
    times = []
    for _ in range(PROBES):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        times.append(time.perf_counter() - start)
    return PROBE_BYTES * 2 * (size - 1) / size / min(times)


def main() -> None:
    """What torchrun starts."""
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    result = measure(spec)
    path = Path(spec.out) / f"rank{dist.get_rank()}.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

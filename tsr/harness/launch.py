"""Starting workers: fresh local processes, or the ones that torchrun (or another launcher) has started already."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

STOP_SECONDS = 10.0
LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_received: list[str] = []  # signals, by name
LOOPBACK = {"linux": "lo", "darwin": "lo0"}
# glibc gives the pages of large buffers back to the system after every step otherwise, and takes them anew.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000", "MALLOC_TOP_PAD_": "268435456"}


class Interrupted(BaseException):
    """SIGTERM, raised where Python happens to be: no ``except Exception`` may swallow it."""


class WorkersFailed(Exception):
    """A worker ended with an error; the others were stopped."""


class WorkerKilled(WorkersFailed):
    """A worker ended without a word, so the others can only have recorded that it was gone."""


@dataclass(frozen=True)
class World:
    """This process among the workers."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    init_method: str

    @contextlib.contextmanager
    def joined(self, device: torch.device) -> Iterator[None]:
        """Be a member of the process group; a single worker needs none.

        A worker that fails leaves the group to the end of its process: the others notice only then, and by that time it
        has recorded the cause.
        """
        if self.size == 1 and self.init_method != "env://":
            yield
            return
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.set_device(device)  # NCCL's control messages go through the current one
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            init_method=self.init_method,
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(minutes=30),
            device_id=device if cuda else None,
        )
        yield
        dist.destroy_process_group()


def external_world() -> World | None:
    """This process's place if a launcher such as torchrun has started it, else ``None``."""
    if not all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return None
    rank = int(os.environ["RANK"])
    size = int(os.environ["WORLD_SIZE"])
    local_rank, local_size = (int(os.environ.get(name, value)) for name, value in zip(LOCAL, (rank, size), strict=True))
    return World(rank, size, local_rank, local_size, "env://")


def pick_device(name: str, *, local_rank: int, local_size: int) -> torch.device:
    """This worker's device: ``auto`` is a GPU if each worker of this machine can have one of its own, else the CPU."""
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and gpus < local_size:
        raise ValueError(f"device=cuda, but {local_size} workers here have {gpus} GPUs; lower nproc or use device=cpu")
    return torch.device("cuda", local_rank) if name != "cpu" and gpus >= local_size else torch.device("cpu")


def start_workers(function: Callable[..., None], arguments: tuple[Any, ...], *, nproc: int) -> None:
    """Run ``function(world, *arguments)`` in ``nproc`` fresh processes and wait for them.

    Raises:
        WorkersFailed: If one fails; the others are stopped first.
        Interrupted, KeyboardInterrupt: On SIGTERM and SIGINT, after all workers have ended.
    """
    with tempfile.TemporaryDirectory() as folder, _environment(nproc), raise_on_signals():
        store = f"file://{Path(folder) / 'store'}"
        context = multiprocessing.start_processes(
            _enter, (function, nproc, store, arguments), nprocs=nproc, join=False, start_method="spawn"
        )
        assert context is not None
        try:
            while not context.join(timeout=1.0, grace_period=STOP_SECONDS):
                pass
        except KeyboardInterrupt:
            # A terminal interrupts the workers too: they end by themselves, and know the reason.
            for process in context.processes:
                process.join(STOP_SECONDS / 4)
            raise
        except multiprocessing.ProcessRaisedException as error:
            raise WorkersFailed(str(error).strip()) from None
        except multiprocessing.ProcessExitedException as error:
            raise WorkerKilled(f"worker {error.error_index} ended without a word: {error}") from None
        finally:
            _stop(context.processes)


def _enter(rank: int, function: Callable[..., None], nproc: int, store: str, arguments: tuple[Any, ...]) -> None:
    if hasattr(signal, "SIGUSR2"):
        # Slurm's notice of a time limit reaches every process; submitit answers it in the one that started this worker.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        with raise_on_signals():
            function(World(rank, nproc, rank, nproc, store), *arguments)
    except (KeyboardInterrupt, Interrupted):
        # torch takes a KeyboardInterrupt for a clean end; the parent must see that this worker did not finish.
        raise RuntimeError("interrupted") from None


def _stop(processes: list[Any]) -> None:
    """End what still runs: politely, then by force."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raise on SIGINT and SIGTERM for a while, so that an interrupted or preempted job can say so in its record."""

    def handler(number: int, frame: object) -> None:
        _received.append(signal.Signals(number).name)
        raise KeyboardInterrupt if number == signal.SIGINT else Interrupted(_received[-1])

    _received.clear()
    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def reason(error: BaseException) -> str:
    """What ended a job. A signal is the reason even where torch has turned what was raised into an error of its own."""
    if _received:
        return f"interrupted: {_received[0]}"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _environment(nproc: int) -> Iterator[None]:
    """What workers inherit: a fair share of the cores, the loopback interface, an allocator that keeps its pages."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"OMP_NUM_THREADS": str(max(1, cores // nproc)), **ALLOCATOR}
    if sys.platform in LOOPBACK:
        wanted["GLOO_SOCKET_IFNAME"] = LOOPBACK[sys.platform]
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]

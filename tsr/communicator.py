"""The one place where training tensors meet a collective.

`Communicator.mean` packs the messages of one round into flat buffers of the wire's dtype, buckets, runs one all-reduce
over each and writes the ledger. `Communicator.open` does the same for messages that come one after the other: a bucket
leaves as soon as it and all before it are full, while backward goes on. What is in a bucket depends on the list of
messages alone, so that both ways give the same bits. Without a process group there is no collective, and the payload
that would have been sent is counted; messages that the wire's dtype would round are rounded, others left as they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tsr.checks import is_number
from tsr.clock import Lap, Mark, mark
from tsr.ledger import Ledger

WIRE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True)
class Message:
    """A tensor to be averaged over the workers.

    ``role`` says what it is (``core``, ``sketch``, ``dense``, ...), ``kind`` what sort of block it belongs to
    (``linear``, ``embedding``, ``head``, ``vector``; see `tsr.blocks.Block.kind`). All workers hand over the same list,
    in the same order.
    """

    tensor: Tensor
    role: str
    kind: str


@dataclass(frozen=True)
class Announced:
    """A message whose tensor is still to come: its size, and role and kind as in `Message`."""

    elements: int
    role: str
    kind: str


class Communicator:
    """Averages messages over the data-parallel workers and counts their bytes.

    Args:
        dtype: On the wire: ``"fp32"``, ``"bf16"`` (sums are rounded to bf16 on the way) or ``"fp64"``.
        bucket_mib: Upper bound of one all-reduce in MiB, so that the flat buffer of a large model stays small; a
            larger message travels alone. ``None`` sends each round as one buffer.
        overlap: Send messages while backward goes on, as soon as a bucket of them is there (see `tsr.outbox`). The
            result is the same to the bit.
        group: The process group of the workers; by default the global one if it is initialised, else none.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        *,
        dtype: str = "fp32",
        bucket_mib: float | None = None,
        overlap: bool | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if dtype not in tuple(WIRE_DTYPES):
            raise ValueError(f"comm.dtype must be one of {', '.join(WIRE_DTYPES)}, got {dtype!r}")
        if bucket_mib is not None and not (is_number(bucket_mib) and bucket_mib > 0):
            raise ValueError(f"comm.bucket_mib must be positive or null (one buffer a round), got {bucket_mib!r}")
        if overlap not in (True, False, None):
            raise ValueError(f"comm.overlap must be true, or false or null (send after backward), got {overlap!r}")
        self.dtype = WIRE_DTYPES[dtype]
        self.overlap = bool(overlap)
        self.ledger = Ledger()
        # Bounded, for nobody has to ask for them.
        self._stretches: deque[tuple[Mark, Mark]] = deque(maxlen=10_000)
        self._bucket_elements = None if bucket_mib is None else int(bucket_mib * 2**20) // self.dtype.itemsize
        self._group = group
        self._buffers: list[Tensor] = []  # that no round uses now
        self._connected = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(group) if self._connected else 1
        self.rank = dist.get_rank(group) if self._connected else 0

    def lap(self) -> Lap:
        """What rounds took from the caller since the last call: packing, waiting, unpacking."""
        lap = Lap(tuple(self._stretches))
        self._stretches.clear()
        return lap

    @torch.no_grad()
    def mean(self, messages: Sequence[Message]) -> None:
        """Replace each message's tensor by its mean over the workers, in place: one round of communication.

        Buckets go one by one through one buffer, so that no second copy of a large round is made.
        """
        announced = [Announced(message.tensor.numel(), message.role, message.kind) for message in messages]
        together = Round(self, announced, early=False)
        for index, message in enumerate(messages):
            together.put(index, message.tensor)
        together.finish()

    def open(self, announced: Sequence[Announced]) -> Round:
        """A round whose messages are put in one by one, in any order; all workers announce the same list."""
        return Round(self, announced, early=self.overlap)

    def _buckets(self, sizes: Sequence[int]) -> list[list[int]]:
        """Indices of the messages of each bucket: as many as fit, in order."""
        buckets: list[list[int]] = []
        elements = 0
        for index, size in enumerate(sizes):
            if not buckets or (self._bucket_elements is not None and elements + size > self._bucket_elements):
                buckets.append([])
                elements = 0
            buckets[-1].append(index)
            elements += size
        return buckets

    def _leaves_alone(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are their own mean, to the bit: there is no process group, and the wire rounds none of them."""
        return not self._connected and all(
            torch.promote_types(tensor.dtype, self.dtype) == self.dtype for tensor in tensors
        )

    def _take_buffer(self, elements: int, device: torch.device) -> Tensor:
        """A flat tensor of at least so many elements; `Round` gives it back, so that a step allocates none."""
        fitting = [buffer for buffer in self._buffers if buffer.numel() >= elements and buffer.device == device]
        if not fitting:
            self._buffers = self._buffers[1:]  # a larger one takes its place
            return torch.empty(elements, dtype=self.dtype, device=device)
        smallest = min(fitting, key=Tensor.numel)
        self._buffers = [buffer for buffer in self._buffers if buffer is not smallest]
        return smallest

    def total(self, values: Sequence[float], *, purpose: str) -> list[float]:
        """Sum float64 scalars over the workers, for evaluation or logging: in neither accounting."""
        return list(self.total_of(torch.tensor(values, dtype=torch.float64), purpose=purpose).tolist())

    def total_of(self, tensor: Tensor, *, purpose: str) -> Tensor:
        """As `total`, of a float64 tensor, without waiting for the device."""
        tensor = tensor.to(self._control_device(tensor.device))
        self.ledger.record_other(purpose, tensor.numel() * tensor.itemsize)
        if self._connected:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)
        return tensor

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Give every worker the first worker's values, in place (parameters and buffers, once, at the start)."""
        for tensor in tensors:
            self.ledger.record_other("setup", tensor.numel() * tensor.itemsize)
            if self._connected:
                dist.broadcast(tensor, group_src=0, group=self._group)

    def broadcast_object(self, value: Any) -> Any:
        """Return the first worker's ``value`` on every worker (a small picklable object, at set-up)."""
        if not self._connected:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self._group)
        return box[0]

    def barrier(self) -> None:
        """Wait until every worker has come here."""
        if self._connected:
            dist.barrier(group=self._group)

    def _control_device(self, wanted: torch.device) -> torch.device:
        # NCCL carries only CUDA tensors, gloo is surest with the CPU's.
        if not self._connected:
            return wanted
        cuda = dist.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class Round:
    """One round of communication; see `Communicator.open`.

    Buckets leave in order, on every worker alike. With ``early``, each leaves when all of its messages and all earlier
    buckets are there; else in `finish`, when the one before it has come back.
    """

    def __init__(self, communicator: Communicator, announced: Sequence[Announced], *, early: bool) -> None:
        self._communicator = communicator
        self._announced = announced
        self._early = early
        self._tensors: list[Tensor | None] = [None] * len(announced)
        self._buckets = communicator._buckets([message.elements for message in announced])
        self._sent: list[_Sent | None] = []  # in order; None where the messages are their own mean

    @torch.no_grad()
    def put(self, index: int, tensor: Tensor) -> None:
        """Message ``index`` is there; its tensor must not be changed until `finish` has put the mean into it."""
        assert tensor.numel() == self._announced[index].elements and self._tensors[index] is None
        self._tensors[index] = tensor
        while self._early and len(self._sent) < len(self._buckets) and self._is_there(len(self._sent)):
            self._send(self._buckets[len(self._sent)])

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and replace every tensor by its mean over the workers, in place; all messages must be there."""
        for number, bucket in enumerate(self._buckets):
            if number == len(self._sent):
                assert self._is_there(number)
                self._send(bucket)
            self._receive(self._sent[number])

    def _is_there(self, number: int) -> bool:
        return all(self._tensors[index] is not None for index in self._buckets[number])

    def _send(self, bucket: Sequence[int]) -> None:
        communicator = self._communicator
        for index in bucket:
            message = self._announced[index]
            communicator.ledger.record(
                message.role, message.kind, elements=message.elements, itemsize=communicator.dtype.itemsize
            )
        tensors = [tensor for index in bucket if (tensor := self._tensors[index]) is not None]
        if communicator._leaves_alone(tensors):
            self._sent.append(None)
            return
        start = mark(tensors[0].device)
        sizes = [tensor.numel() for tensor in tensors]
        buffer = communicator._take_buffer(sum(sizes), tensors[0].device)
        flat = buffer[: sum(sizes)]
        parts = [part.view_as(tensor) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
        torch._foreach_copy_(parts, tensors)
        work = None
        if communicator._connected:
            work = dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=communicator._group, async_op=True)
        self._sent.append(_Sent(tensors, flat, buffer, work))
        communicator._stretches.append((start, mark(flat.device)))

    def _receive(self, sent: _Sent | None) -> None:
        if sent is None:
            return
        start = mark(sent.flat.device)
        if sent.work is not None:
            sent.work.wait()
        # The division is done after widening, so that a half-precision wire rounds the sum and nothing else.
        wide = sent.flat.to(torch.promote_types(sent.flat.dtype, torch.float32))
        wide /= self._communicator.world_size
        parts = wide.split([tensor.numel() for tensor in sent.tensors])
        means = [part.view_as(tensor) for part, tensor in zip(parts, sent.tensors, strict=True)]
        torch._foreach_copy_(sent.tensors, means)
        self._communicator._buffers.append(sent.buffer)
        self._communicator._stretches.append((start, mark(sent.flat.device)))


@dataclass(frozen=True)
class _Sent:
    """A bucket on its way."""

    tensors: list[Tensor]
    flat: Tensor
    buffer: Tensor
    work: dist.Work | None

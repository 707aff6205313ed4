"""The one place where training tensors meet a collective.

`Communicator.mean` packs the messages of one round into a flat buffer of the wire's dtype, runs one all-reduce over it
(or one for each of a fixed list of buckets) and writes the ledger. Without a process group it takes the same path, less
the collective itself, and counts the payload that it would have sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tsr.checks import is_number
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


class Communicator:
    """Averages messages over the data-parallel workers and counts their bytes.

    Args:
        dtype: On the wire: ``"fp32"``, ``"bf16"`` (sums are rounded to bf16 on the way) or ``"fp64"``.
        bucket_mib: Upper bound of one all-reduce in MiB, so that the flat buffer of a large model stays small; a
            larger message travels alone. ``None`` sends each round as one buffer.
        group: The process group of the workers; by default the global one if it is initialised, else none.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self, *, dtype: str = "fp32", bucket_mib: float | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        if dtype not in tuple(WIRE_DTYPES):
            raise ValueError(f"comm.dtype must be one of {', '.join(WIRE_DTYPES)}, got {dtype!r}")
        if bucket_mib is not None and not (is_number(bucket_mib) and bucket_mib > 0):
            raise ValueError(f"comm.bucket_mib must be positive or null (one buffer a round), got {bucket_mib!r}")
        self.dtype = WIRE_DTYPES[dtype]
        self.ledger = Ledger()
        self.seconds = 0.0  # spent in `mean` since the start: packing, waiting, unpacking
        self._bucket_elements = None if bucket_mib is None else int(bucket_mib * 2**20) // self.dtype.itemsize
        self._group = group
        self._connected = dist.is_available() and dist.is_initialized()
        self.world_size = dist.get_world_size(group) if self._connected else 1
        self.rank = dist.get_rank(group) if self._connected else 0

    @torch.no_grad()
    def mean(self, messages: Sequence[Message]) -> None:
        """Replace each message's tensor by its mean over the workers, in place: one round of communication."""
        if not messages:
            return
        start = _now(messages[0].tensor)
        for bucket in self._buckets(messages):
            self._mean_of_bucket(bucket)
        self.seconds += _now(messages[0].tensor) - start

    def _mean_of_bucket(self, bucket: Sequence[Message]) -> None:
        sizes = [message.tensor.numel() for message in bucket]
        flat = torch.empty(sum(sizes), dtype=self.dtype, device=bucket[0].tensor.device)
        parts = flat.split(sizes)
        for part, message in zip(parts, bucket, strict=True):
            part.copy_(message.tensor.reshape(-1))
            self.ledger.record(
                message.role, message.kind, elements=message.tensor.numel(), itemsize=self.dtype.itemsize
            )
        if self._connected:
            dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=self._group)
        # The division is done after widening, so that a half-precision wire rounds the sum and nothing else.
        wide = torch.promote_types(self.dtype, torch.float32)
        for part, message in zip(parts, bucket, strict=True):
            message.tensor.copy_((part.to(wide) / self.world_size).view_as(message.tensor))

    def _buckets(self, messages: Sequence[Message]) -> Iterator[list[Message]]:
        bucket: list[Message] = []
        elements = 0
        for message in messages:
            size = message.tensor.numel()
            if bucket and self._bucket_elements is not None and elements + size > self._bucket_elements:
                yield bucket
                bucket, elements = [], 0
            bucket.append(message)
            elements += size
        yield bucket

    def total(self, values: Sequence[float], *, purpose: str) -> list[float]:
        """Sum float64 scalars over the workers, for evaluation or logging: in neither accounting."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self._control_device())
        self.ledger.record_other(purpose, tensor.numel() * tensor.itemsize)
        if self._connected:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self._group)
        return list(tensor.tolist())

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

    def _control_device(self) -> torch.device:
        # NCCL carries only CUDA tensors.
        cuda = self._connected and dist.get_backend(self._group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def _now(tensor: Tensor) -> float:
    """Seconds on a clock that has seen all work on the tensor's device finished."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()

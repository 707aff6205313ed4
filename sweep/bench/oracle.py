"""What torch's dispatcher sees of collectives: a count of payload that knows nothing of the ledger."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CollectiveOracle(TorchDispatchMode):
    """Counts the collectives that torch dispatches, with their payload: numel x itemsize of what a worker hands over.

    ``calls`` and ``bytes`` are by the name of the operator; one that it has no rule for is an error, not a zero.
    """

    _PAYLOAD_ARGUMENT: ClassVar[dict[str, int]] = {"allreduce_": 0, "broadcast_": 0}

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return self.bytes.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            name = func.__name__.split(".")[0]
            payload = tree_leaves(args[self._PAYLOAD_ARGUMENT[name]])
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.numel() * tensor.itemsize for tensor in payload)
        return func(*args, **(kwargs or {}))

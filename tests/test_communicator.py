"""Means, buckets and the ledger; among workers, and without a process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed import CollectiveOracle, WorkerError, run
from tsr import Communicator, Ledger, Message, Traffic


def messages(value: float, dtype: torch.dtype = torch.float32) -> list[Message]:
    return [
        Message(torch.full((4, 3), value, dtype=dtype), "core", "linear"),
        Message(torch.full((2, 5), 2 * value, dtype=dtype).T, "dense", "head"),  # not contiguous
        Message(torch.full((), 3 * value, dtype=dtype), "dense", "vector"),
    ]


def work() -> dict[str, object]:
    """One world for all checks: what each worker sees."""
    rank = dist.get_rank()
    seen: dict[str, object] = {}

    communicator = Communicator()
    sent = messages(float(rank + 1))
    with CollectiveOracle() as oracle:
        communicator.mean(sent)
    seen["mean"] = [message.tensor.unique().tolist() for message in sent]
    seen["calls"], seen["bytes"] = dict(oracle.calls), oracle.total
    seen["ledger"] = communicator.ledger.close_step().bytes

    for name, mib in (("buckets", 48 / 2**20), ("tiny buckets", 1 / 2**20), ("large bucket", 1.0)):
        bucketed = Communicator(bucket_mib=mib)
        sent = messages(float(rank + 1))
        with CollectiveOracle() as oracle:
            bucketed.mean(sent)
        assert bucketed.ledger.close_step().bytes == seen["ledger"]
        seen[name] = (oracle.calls["allreduce_"], oracle.total, [m.tensor.unique().tolist() for m in sent])

    half = Communicator(dtype="bf16")
    # On the wire 1/3 becomes its bf16 neighbour; the mean of three is divided in fp32.
    sent = [Message(torch.full((8,), 1 / 3), "core", "linear")]
    with CollectiveOracle() as oracle:
        half.mean(sent)
    seen["bf16 bytes"] = (oracle.total, half.ledger.close_step().total)
    seen["bf16"] = sent[0].tensor.tolist()

    with CollectiveOracle() as oracle:
        seen["total"] = communicator.total([1.0, rank], purpose="evaluation")
    seen["total bytes"] = (oracle.total, communicator.ledger.other["evaluation"])
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    with CollectiveOracle() as oracle:
        communicator.broadcast([parameter])
    seen["broadcast"] = (parameter.tolist(), oracle.bytes["broadcast_"], communicator.ledger.other["setup"])
    seen["object"] = communicator.broadcast_object({"from": rank})
    communicator.barrier()
    assert communicator.ledger.close_step().total == 0  # all of that is in neither accounting
    seen["place"] = (communicator.rank, communicator.world_size)
    return seen


@pytest.mark.distributed
def test_workers_average_and_the_ledger_is_what_was_dispatched() -> None:
    results = run(3, work)
    mean = [[2.0], [4.0], [6.0]]
    for rank, seen in enumerate(results):
        assert seen["mean"] == mean
        assert seen["calls"] == {"allreduce_": 1}
        assert seen["bytes"] == 4 * (12 + 10 + 1)
        assert seen["ledger"] == {("core", "linear"): 48, ("dense", "head"): 40, ("dense", "vector"): 4}
        assert seen["buckets"] == (2, 92, mean)  # 48 bytes, then 40 and 4
        assert seen["tiny buckets"] == (3, 92, mean)  # a message larger than a bucket travels alone
        assert seen["large bucket"] == (1, 92, mean)
        assert seen["bf16 bytes"] == (16, 16)
        assert seen["bf16"] == pytest.approx([1 / 3] * 8, rel=2**-8)
        assert seen["total"] == [3.0, 3.0]
        assert seen["total bytes"] == (16, 16)
        assert seen["broadcast"] == ([0.0] * 3, 12, 12)
        assert seen["object"] == {"from": 0}
        assert seen["place"] == (rank, 3)
    assert results[0]["bf16"] == results[1]["bf16"] == results[2]["bf16"]


def subgroups() -> tuple[float, int]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    communicator = Communicator(group=pairs[dist.get_rank() // 2])
    message = Message(torch.tensor([float(dist.get_rank())]), "core", "linear")
    communicator.mean([message])
    return message.tensor.item(), communicator.rank


@pytest.mark.distributed
def test_a_communicator_may_have_a_group_of_its_own() -> None:
    assert run(4, subgroups) == [(0.5, 0), (0.5, 1), (2.5, 0), (2.5, 1)]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise RuntimeError("the culprit")
    dist.all_reduce(torch.ones(1))


@pytest.mark.distributed
def test_a_failing_worker_is_the_one_that_is_reported() -> None:
    with pytest.raises(WorkerError, match="the culprit"):
        run(2, fail_on, 1)


def test_without_a_process_group_the_payload_is_counted_all_the_same() -> None:
    communicator = Communicator()
    sent = messages(1.0)
    with CollectiveOracle() as oracle:
        communicator.mean(sent)
        assert communicator.total([1.0, 2.0], purpose="evaluation") == [1.0, 2.0]
        assert communicator.broadcast_object("here") == "here"
    assert oracle.total == 0
    assert [message.tensor.unique().tolist() for message in sent] == [[1.0], [2.0], [3.0]]
    assert communicator.ledger.close_step().total == 92
    assert communicator.ledger.other == {"evaluation": 16}


@pytest.mark.parametrize(("wire", "dtype"), [("bf16", torch.float32), ("fp32", torch.float64)])
def test_a_lone_worker_rounds_to_the_wire_as_many_would(wire: str, dtype: torch.dtype) -> None:
    rounded = Message(torch.tensor([1 + 2 * torch.finfo(dtype).eps], dtype=dtype), "core", "linear")
    Communicator(dtype=wire).mean([Message(torch.zeros(1, dtype=torch.bfloat16), "core", "linear"), rounded])
    assert rounded.tensor.item() == 1.0


@pytest.mark.parametrize(
    ("wire", "dtype"), [("fp32", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.bfloat16)]
)
def test_a_lone_worker_does_not_copy_what_the_wire_would_not_round(wire: str, dtype: torch.dtype) -> None:
    communicator = Communicator(dtype=wire, bucket_mib=32 / 2**20)
    sent = messages(1.0, dtype)
    communicator.mean(sent)
    assert [message.tensor._version for message in sent] == [0, 0, 0]  # of writes into the tensor
    assert communicator.ledger.close_step().total == 23 * communicator.dtype.itemsize


def test_nothing_to_send_is_no_round() -> None:
    communicator = Communicator()
    communicator.mean([])
    assert communicator.ledger.close_step().total == 0


def test_ledger_keeps_both_accountings_apart() -> None:
    ledger = Ledger()
    ledger.record("core", "linear", elements=10, itemsize=2)
    ledger.record("dense", "head", elements=100, itemsize=2)
    ledger.record("dense", "embedding", elements=5, itemsize=2)
    traffic = ledger.close_step()
    assert (traffic.total, traffic.paper) == (230, 60)  # the paper's: 4 bytes, neither head nor norms
    assert traffic.by_role() == {"core": 20, "dense": 210}
    ledger.record("core", "linear", elements=10, itemsize=2)
    ledger.close_step()
    assert ledger.summary() == {
        "comm/bytes_per_step": 125.0,
        "comm/peak_bytes": 230,
        "comm/total_bytes": 250,
        "paper/comm/bytes_per_step": 50.0,
        "paper/comm/peak_bytes": 60,
        "paper/comm/total_bytes": 100,
    }
    assert ledger.table() == {"core": {"linear": 40}, "dense": {"embedding": 10, "head": 200}}


def test_ledger_can_add_a_step_many_times_and_go_on_after_a_resume() -> None:
    traffic = Traffic({("core", "linear"): 3}, {("core", "linear"): 12})
    once, often = Ledger(), Ledger()
    once.add(traffic, times=5)
    for _ in range(5):
        often.add(traffic)
    assert once.summary() == often.summary() and once.table() == often.table()
    resumed = Ledger()
    resumed.load_state_dict(once.state_dict())
    resumed.add(traffic)
    once.add(traffic)
    assert resumed.summary() == once.summary() and resumed.table() == once.table()

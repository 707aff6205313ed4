"""Settings: the schedule of the learning rate, and the identity of a run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.jobs import compose
from tsr.harness.settings import NOT_IDENTITY, Schedule, config_hash


@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize(("warmup", "first_after"), [(0.0, 0), (0.25, 5)])
def test_schedule_rises_to_one_and_falls_to_its_floor(shape: str, warmup: float, first_after: int) -> None:
    schedule = Schedule(shape=shape, warmup=warmup, floor=0.1, steps=20)
    factors = [schedule(done) for done in range(20)]
    assert factors[:first_after] == pytest.approx([(k + 1) / 5 for k in range(first_after)])
    assert all(one > other for one, other in itertools.pairwise(factors[max(0, first_after - 1) :]))
    assert 0 < factors[0] <= 1 and factors[19] == pytest.approx(0.1)
    assert schedule(20) == pytest.approx(0.1)  # asked for after the last update


def test_a_linear_schedule_is_linear() -> None:
    schedule = Schedule(shape="linear", warmup=0.0, floor=0.0, steps=4)
    assert [schedule(done) for done in range(4)] == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_a_constant_schedule_stays_at_one() -> None:
    schedule = Schedule(shape="constant", warmup=0.5, floor=0.0, steps=4)
    assert [schedule(done) for done in range(5)] == [0.5, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": "step"}, "schedule.shape must be cosine, linear or constant, got 'step'"),
        ({"warmup": 1.0}, r"schedule.warmup .* \[0, 1\), got 1.0"),
        ({"floor": -0.1}, "schedule.floor must be between 0 and 1, got -0.1"),
    ],
)
def test_schedule_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**{"shape": "cosine", "warmup": 0.1, "floor": 0.1, "steps": 10, **values})


def test_config_hash_changes_with_all_that_changes_a_result() -> None:
    def dotted(node: dict[str, Any], prefix: str = "") -> list[str]:
        parts = [
            dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
            for key, value in node.items()
        ]
        return [key for part in parts for key in part]

    config = compose("tsr")
    original = config_hash(config)
    keys = dotted(config)
    assert {"resume", "runs_dir", "logger.name", "seed", "trainer.steps", "optimizer.lr", "rank.head"} <= set(keys)
    for key in keys:
        changed = config_hash(compose("tsr", {key: "something else"})) != original
        assert changed == NOT_IDENTITY.isdisjoint({key, key.split(".")[0]}), key
    assert config_hash(dict(reversed(config.items()))) == original
    assert config_hash({**config, "lookup": {"lr": 1}}) == original, "no part of a job reads it"
    assert config_hash({**config, "rank": {**config["rank"], "later": None}}) == original, "off by default"
    assert {
        *("resume", "logger", "runs_dir", "results", "data.cache_dir", "data.num_workers"),
        *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.checksum_every"),
    } == NOT_IDENTITY

"""Step times that no bench has measured, from a cost model: what each method sends is counted by dry runs.

Extrapolated, and not measured, are: workers beyond those of the bench, each on a machine and a link of its own, all at
full rate at once; a ring all-reduce at any number of them, so that latency grows with its 2 (N - 1) hops, each of which
takes what is given, for those of the bench wait for busy cores; other models, with seconds of the optimizer, of
PowerSGD's hook and, unless given, of compute in proportion to parameters; other machines, by their speed. On links
faster than 1 / transfer, predictions show that software, not the link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Size, Tensor

from sweep.bench.cells import CONTESTANTS, Contestant, Row
from sweep.bench.cost_model import CostModel, Messages, Place, Times, fit
from sweep.bench.oracle import CollectiveOracle
from sweep.bench.report import BASELINE
from sweep.cells import compose
from train import build_model, build_optimizer
from tsr import Communicator
from tsr.harness.dryrun import fake_workers

DDP_BUCKETS_BYTES = (2**20, 25 * 2**20)  # the first, each other; DDP's defaults
POWERSGD_SAVES = 2  # times at least, or its hook sends a matrix whole; torch's default
BANDWIDTHS_MBIT = (1.0, 1e5)  # where a crossover is looked for
ALWAYS, NEVER = "always", "never"


def job(model: str, *more: str, key: str = "--model") -> tuple[str, ...]:
    """What the bench composes for a model of ``experiment=table3``; ``more`` are overrides, ``key`` asked for it.

    Raises:
        ValueError: If the experiment has no such model.
    """
    known = [name for name in compose("experiment=table3")["table3"] if name.startswith("llama_")]
    if model not in known:
        raise ValueError(f"{key} must be one of {', '.join(known)}, got {model!r}")
    return "experiment=table3", f"model={model}", "model.dtype=fp32", *more


def messages_of(contestant: Contestant, *overrides: str) -> tuple[Messages, int]:
    """What a mean step of a contestant sends, the first step left out, and the number of the model's parameters.

    ``overrides`` choose the model and ranks, as in the bench. Peers follow DDP's rules.

    Raises:
        ValueError: If an override makes no job.
    """
    config = compose(*overrides, *contestant.overrides)
    parameters = list(build_model(config, "meta").parameters())
    if contestant.peer is None:
        messages = _dry_run(config)
    elif contestant.peer == "powersgd":
        messages = powersgd_messages([parameter.shape for parameter in parameters], rank=contestant.rank)
    else:
        messages = ddp_messages(parameters, narrow=contestant.peer == "bf16")
    return messages, sum(parameter.numel() for parameter in parameters)


def _dry_run(config: dict[str, Any]) -> Messages:
    """Each kind of step once, on meta tensors, under the oracle that the bench counts by."""
    with fake_workers(2):
        model, communicator = build_model(config, "meta"), Communicator(**config["comm"])
        optimizer = build_optimizer(config, model, communicator)
        times = optimizer.schedule()
        payload = collectives = 0
        for step, count in times.items():
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer.updates = step - 1
            with CollectiveOracle() as oracle:
                optimizer.step()
            payload += oracle.total * count
            collectives += oracle.calls.total() * count
    return Messages(
        payload=payload / times.total(), collectives=collectives / times.total(), overlapped=communicator.overlap
    )


def ddp_messages(parameters: Sequence[Tensor], *, narrow: bool) -> Messages:
    """Of DDP, which sends whole gradients, in two bytes an element if ``narrow``, a bucket an all-reduce.

    Gradients fill buckets in the order in which backward has them, taken as the reverse of the parameters'; a bucket
    is closed as soon as it holds its size or more.
    """
    sizes = [parameter.numel() * parameter.itemsize for parameter in reversed(parameters)]
    buckets = held = 0
    for size in sizes:
        held += size
        if held >= DDP_BUCKETS_BYTES[min(buckets, 1)]:
            buckets, held = buckets + 1, 0
    elements = sum(parameter.numel() for parameter in parameters)
    return Messages(payload=2 * elements if narrow else sum(sizes), collectives=buckets + (held > 0), overlapped=True)


def powersgd_messages(shapes: Sequence[Size], *, rank: int) -> Messages:
    """Of DDP's PowerSGD hook in fp32, all in one bucket, which is full when backward is over.

    Of an m x n matrix (m + n) rank elements are sent, in two all-reduces for all of them, and in a third what that does
    not make small; Vogels et al. 2019, and torch's documentation of the hook.
    """
    factors = whole = 0
    for shape in shapes:
        elements = shape.numel()
        small = (shape[0] + elements // shape[0]) * rank
        if len(shape) > 1 and small * POWERSGD_SAVES < elements:
            factors += small
        else:
            whole += elements
    return Messages(payload=4 * (factors + whole), collectives=3, overlapped=False)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A fitted model and what each method sends, for one model of ``experiment=table3``."""

    model: CostModel
    messages: Mapping[str, Messages]

    def times(self, method: str, place: Place) -> Times:
        return self.model.times(method, self.messages[method], place)

    def speedup(self, method: str, place: Place) -> float:
        """How many times shorter than the baseline's a method's step is."""
        return self.times(BASELINE, place).step / self.times(method, place).step


def forecast(
    cells: Sequence[Row],
    methods: Sequence[str],
    overrides: Sequence[str],
    *,
    compute_s: float | None = None,
    speed: float = 1.0,
) -> Forecast:
    """Fit on all cells, and count what the methods and the baseline send by dry runs.

    Args:
        overrides: Of the configuration; they choose the model and ranks, see `job`.
        compute_s: Of a worker's forward and backward; by default the bench's, in proportion to parameters.
        speed: Of a worker's machine, over the bench's.

    Raises:
        ValueError: If the cells are too few or lack a method, or an override makes no job.
    """
    measured = {cell.method: cell for cell in cells}
    for method in (BASELINE, *methods):
        if method not in measured:
            raise ValueError(
                f"{method} was not measured, so its seconds are unknown; the bench has {', '.join(measured)}"
            )
    counted = {method: messages_of(CONTESTANTS[method], *overrides) for method in dict.fromkeys((*methods, BASELINE))}
    # The bench's own model is not in its rows, but DDP sends all of its parameters, in fp32.
    size = counted[BASELINE][1] / (measured[BASELINE].payload / 4)
    model = fit(cells).scaled(size=size, speed=speed, compute_s=compute_s)
    return Forecast(model=model, messages={method: messages for method, (messages, _) in counted.items()})


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A mean step of a method: seconds of its parts, bytes of a worker, and the baseline's seconds over its own."""

    model: str
    method: str
    workers: int
    rate_mbit: float | None
    latency_ms: float
    payload: float
    collectives: float
    compute_s: float
    communication_s: float
    optimizer_s: float
    step_s: float
    speedup: float


def predictions(found: Forecast, places: Sequence[Place], *, of: str) -> list[Prediction]:
    """Every method at every place; ``of`` names the model."""
    return [
        Prediction(
            model=of,
            method=method,
            workers=place.workers,
            rate_mbit=place.rate_mbit,
            latency_ms=place.latency_ms,
            payload=sent.payload,
            collectives=sent.collectives,
            compute_s=times.compute,
            communication_s=times.communication,
            optimizer_s=times.optimizer,
            step_s=times.step,
            speedup=found.speedup(method, place),
        )
        for place in places
        for method, sent in found.messages.items()
        for times in [found.times(method, place)]
    ]


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """The bandwidth below which a method's step takes less time than the baseline's, or `ALWAYS`, or `NEVER`."""

    method: str
    workers: int
    bandwidth_mbit: float | str


def crossover(found: Forecast, method: str, place: Place) -> Crossover:
    """Where ``method`` pays at this number of workers, whatever the rate of ``place``.

    Looked for within `BANDWIDTHS_MBIT`: always or never if it pays on all, or not on the slowest, of them.
    """

    def gain(logarithm: float) -> float:
        link = replace(place, rate_mbit=10**logarithm)
        return found.times(BASELINE, link).step - found.times(method, link).step

    grid = [math.log10(rate) for rate in bandwidths()]
    faster = next((index for index, logarithm in enumerate(grid) if gain(logarithm) <= 0), None)
    point: float | str
    if faster is None:
        point = ALWAYS
    elif faster == 0:
        point = NEVER
    else:
        point = float(10 ** brentq(gain, grid[faster - 1], grid[faster], xtol=1e-9))
    return Crossover(method=method, workers=place.workers, bandwidth_mbit=point)


def bandwidths() -> list[float]:
    """40 a decade, in Mbit/s."""
    low, high = (math.log10(rate) for rate in BANDWIDTHS_MBIT)
    points = 40 * round(high - low)
    return [10 ** (low + (high - low) * index / points) for index in range(points + 1)]

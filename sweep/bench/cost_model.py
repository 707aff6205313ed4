"""What a step's time is made of, as a function of few parameters, fitted on the cells of a bench. Of a step:

    compute        seconds of forward and backward, the same for all methods
    optimizer      seconds of the method
    communication  collectives x 2 (N - 1) x latency
                   + payload x 2 (N - 1) / N x the slower of link, 8 / (efficiency x rate), and transfer, seconds a byte
                   + payload x packing, seconds a byte, + what PowerSGD's hook computes
                   - what hides, if it is sent while backward goes on

Link and transfer are not added up, for the kernel copies the next packets while one is on the wire; copies before and
after that are packing. Work of cores (compute, optimizer, transfer, packing, hook) takes max(1, N / cores) times as
long where N workers share a machine's cores.

Backward is taken as 2/3 of compute, as of steps of one micro-batch, and no more than that hides. Of the time of hops
and bytes, all can hide where a core is idle, else what the cores wait for, hops and link less transfer; but not the
last all-reduce, whose gradients are there when backward is over: of c equal ones 1 / c stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from sweep.bench.cells import CONTESTANTS, Row

BACKWARD = 2 / 3  # of forward and backward: two products of matrices to forward's one
FIT_ROUNDS = 50


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What one worker hands over in a mean step: bytes, all-reduces, and whether they leave while backward goes on."""

    payload: float
    collectives: float
    overlapped: bool

    @classmethod
    def of(cls, row: Row) -> Messages:
        return cls(payload=row.payload, collectives=row.collectives, overlapped=row.overlapped)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs: workers, each worker's link (``rate_mbit=None``: unlimited), and the cores they share.

    ``cores=None``: a machine of its own for each worker. ``latency_ms``: of a hop, added to the cost model's.
    """

    workers: int
    rate_mbit: float | None
    latency_ms: float = 0.0
    cores: int | None = None

    @classmethod
    def of(cls, row: Row) -> Place:
        return cls(workers=row.workers, rate_mbit=row.rate_mbit, cores=row.cores)

    @property
    def sharing(self) -> float:
        """How much longer a worker's own work takes than if it had a core for itself."""
        return 1.0 if self.cores is None else max(1.0, self.workers / self.cores)

    @property
    def has_idle_core(self) -> bool:
        """Whether bytes are moved by a core that no worker computes on."""
        return self.cores is None or self.workers < self.cores

    def __str__(self) -> str:
        rate = "unlimited" if self.rate_mbit is None else f"{self.rate_mbit:g} Mbit/s"
        return f"{self.workers} workers, {rate}"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of a step; communication is what is not hidden."""

    compute: float
    communication: float
    optimizer: float

    @property
    def step(self) -> float:
        return self.compute + self.communication + self.optimizer


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The parameters of a step's time.

    Args:
        compute_s: Seconds of a worker's forward and backward, on a core of its own.
        optimizer_s: Seconds of each method's optimizer, likewise.
        latency_s: Seconds of one hop of a ring, of which an all-reduce has 2 (N - 1).
        inverse_efficiency: Bits on the link for a bit of payload sent, so that its inverse is goodput over rate.
        transfer_s: Seconds in which a worker's software sends, receives and adds one byte.
        packing_s: Seconds for copies of one byte of payload before and after.
        hook_s: Seconds that a hook computes in backward, by the methods that have such a one.
    """

    compute_s: float
    optimizer_s: Mapping[str, float]
    latency_s: float
    inverse_efficiency: float
    transfer_s: float
    packing_s: float
    hook_s: Mapping[str, float]

    def times(self, method: str, messages: Messages, place: Place) -> Times:
        """Seconds of a step of a method that was measured."""
        return Times(
            compute=self.compute_s * place.sharing,
            communication=_wire(self, method, messages, place).seconds(self),
            optimizer=self.optimizer_s[method] * place.sharing,
        )

    def scaled(self, *, size: float, speed: float, compute_s: float | None = None) -> CostModel:
        """For a model of ``size`` times the parameters, on machines of ``speed`` times the speed.

        A hop takes there what the place says alone: on the bench it waits for a core that others compute on.
        """
        return replace(
            self,
            compute_s=self.compute_s * size / speed if compute_s is None else compute_s,
            optimizer_s={method: seconds * size / speed for method, seconds in self.optimizer_s.items()},
            latency_s=0.0,
            transfer_s=self.transfer_s / speed,
            packing_s=self.packing_s / speed,
            hook_s={method: seconds * size / speed for method, seconds in self.hook_s.items()},
        )


@dataclass(frozen=True, kw_only=True)
class _Wire:
    """Seconds of communication as a linear function of the model's parameters, as long as the same things bound it."""

    hops: float
    link: float
    transfer: float
    packing: float
    hook: Mapping[str, float]
    constant: float

    def row(self, hooks: Iterable[str]) -> list[float]:
        """Factors of latency_s, inverse_efficiency, transfer_s, packing_s and each hook's seconds."""
        return [self.hops, self.link, self.transfer, self.packing, *(self.hook.get(method, 0.0) for method in hooks)]

    def seconds(self, model: CostModel) -> float:
        values = (model.latency_s, model.inverse_efficiency, model.transfer_s, model.packing_s, *model.hook_s.values())
        return self.constant + math.fsum(a * b for a, b in zip(self.row(model.hook_s), values, strict=True))


def _wire(model: CostModel, method: str, messages: Messages, place: Place) -> _Wire:
    """Communication of a step, near the parameters of ``model``: they say what bounds it, and what hides."""
    hops = 2.0 * (place.workers - 1)
    sent = messages.payload * hops / place.workers
    hops *= messages.collectives
    work = sent * place.sharing
    bits = 0.0 if place.rate_mbit is None else sent * 8 / (place.rate_mbit * 1e6)
    by_link = bits * model.inverse_efficiency, work * model.transfer_s
    link, transfer = (bits, 0.0) if by_link[0] > by_link[1] else (0.0, work)
    constant = hops * place.latency_ms / 1e3
    if messages.overlapped and messages.collectives > 1:
        last = 1 / messages.collectives
        room = BACKWARD * model.compute_s * place.sharing
        busy = 0.0 if place.has_idle_core else by_link[1]
        if (1 - last) * (constant + hops * model.latency_s + max(by_link) - busy) > room:
            constant -= room
        else:
            hops, link, transfer, constant = (last * part for part in (hops, link, transfer, constant))
            transfer += 0.0 if place.has_idle_core else (1 - last) * work
    return _Wire(
        hops=hops,
        link=link,
        transfer=transfer,
        packing=messages.payload * place.sharing,
        hook={method: place.sharing},
        constant=constant,
    )


def fit(cells: Sequence[Row]) -> CostModel:
    """The non-negative parameters of least squares, errors being relative to the cell's step.

    Compute, optimizer and communication are fitted to their own columns. What bounds communication, and what hides,
    depends on the parameters (at first all limited links bind), so the last fit is repeated until that is settled, or
    leaves some of them undetermined, and its best round taken.

    Raises:
        ValueError: If the cells do not determine the parameters.
    """
    if not cells:
        raise ValueError("no cells are left to fit on")
    weights = np.array([1 / cell.step_s for cell in cells])
    shares = np.array([[Place.of(cell).sharing] for cell in cells])
    (compute_s,) = _least_squares(shares, [cell.compute_s for cell in cells], weights)
    methods = sorted({cell.method for cell in cells})
    own = shares * np.array([[cell.method == method for method in methods] for cell in cells])
    optimizer = _least_squares(own, [cell.optimizer_s for cell in cells], weights)
    hooks = [method for method in methods if CONTESTANTS[method].rank]
    model = CostModel(
        compute_s=compute_s,
        optimizer_s=dict(zip(methods, optimizer, strict=True)),
        latency_s=0.0,
        inverse_efficiency=1.0,
        transfer_s=0.0,
        packing_s=0.0,
        hook_s=dict.fromkeys(hooks, 0.0),
    )
    rounds: list[tuple[float, CostModel]] = []
    wires: list[_Wire] = []
    for _ in range(FIT_ROUNDS):
        before, wires = wires, [_wire(model, cell.method, Messages.of(cell), Place.of(cell)) for cell in cells]
        errors = [wire.seconds(model) - cell.communication_s for wire, cell in zip(wires, cells, strict=True)]
        rounds.append((float(np.square(weights * errors).sum()), model))
        design = np.array([wire.row(hooks) for wire in wires])
        if wires == before or (before and not _determines(design, weights)):
            break
        rest = [cell.communication_s - wire.constant for cell, wire in zip(cells, wires, strict=True)]
        latency, inverse, transfer, packing, *seconds = _least_squares(design, rest, weights)
        model = replace(
            model,
            latency_s=latency,
            inverse_efficiency=inverse,
            transfer_s=transfer,
            packing_s=packing,
            hook_s=dict(zip(hooks, seconds, strict=True)),
        )
    return min(rounds[1:], key=lambda item: item[0])[1]


def _least_squares(design: np.ndarray, target: Sequence[float], weights: np.ndarray) -> list[float]:
    """Non-negative least squares of the weighted rows."""
    if not _determines(design, weights):
        raise ValueError(
            f"{len(target)} cells are too few to fit on: latency, efficiency, transfer and packing need methods of "
            "different payloads, links without a limit and with one that binds, and two limits or numbers of workers "
            "(--methods, --rates and --workers of the bench)"
        )
    rows = design * weights[:, None]
    size = np.linalg.norm(rows, axis=0)  # of columns, which are seconds, bytes and numbers
    values, _ = nnls(rows / size, np.array(target) * weights)
    return [float(value) for value in values / size]


def _determines(design: np.ndarray, weights: np.ndarray) -> bool:
    """Whether the weighted rows have but one solution, and not by rounding alone."""
    rows = design * weights[:, None]
    size = np.linalg.norm(rows, axis=0)
    return bool(size.all()) and int(np.linalg.matrix_rank(rows / size, tol=1e-6)) == rows.shape[1]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A cell's step in seconds, and as predicted by a model that has not seen it or any of its group."""

    method: str
    workers: int
    rate_mbit: float | None
    measured_s: float
    predicted_s: float
    error: float
    """Relative to what was measured."""


def hold_out(cells: Sequence[Row]) -> list[Held]:
    """Predict each group of cells of the same workers and rate by a model that is fitted to all other groups.

    Raises:
        ValueError: If the others do not determine the model, or have not the group's methods.
    """
    held = []
    for place in dict.fromkeys(Place.of(cell) for cell in cells):
        try:
            model = fit([cell for cell in cells if Place.of(cell) != place])
        except ValueError as error:
            raise ValueError(f"with {place} held out: {error}") from None
        for cell in (cell for cell in cells if Place.of(cell) == place):
            if cell.method not in model.optimizer_s:
                raise ValueError(f"with {place} held out, no cell is left of {cell.method}, to take its seconds from")
            predicted = model.times(cell.method, Messages.of(cell), place).step
            held.append(
                Held(
                    method=cell.method,
                    workers=cell.workers,
                    rate_mbit=cell.rate_mbit,
                    measured_s=cell.step_s,
                    predicted_s=predicted,
                    error=predicted / cell.step_s - 1,
                )
            )
    return held

"""`python -m sweep.bench.cost BENCH.csv --out DIR`: what a step's time is made of, fitted on a bench, and forecasts.

It prints, and writes into DIR, the errors on cells that a fit has not seen (holdout.csv), step times (predictions.csv),
the bandwidths below which methods pay (crossovers.csv), all of it as cost.md, and the figure `speedup`. Of a step:

    compute        seconds of forward and backward, the same for all methods
    optimizer      seconds of the method
    communication  collectives x 2 (N - 1) x latency
                   + payload x 2 (N - 1) / N x the slower of link, 8 / (efficiency x rate), and transfer, seconds a byte
                   + payload x packing, seconds a byte, + what PowerSGD's hook computes
                   - what hides, if it is sent while backward goes on

Link and transfer are not added up, for the kernel copies the next packets while one is on the wire; copies before and
after that are packing. Work of cores (compute, optimizer, transfer, packing, hook) takes max(1, N / cores) times as
long where N workers share a machine's cores. Backward is taken as 2/3 of compute, and no more than that hides: of the
time of hops and bytes, all of it where a core is idle, else what the cores wait for, hops and link less transfer.

Extrapolated, and not measured, are: workers beyond those of the bench, each on a machine and a link of its own, all at
full rate at once; a ring all-reduce at any number of them, so that latency grows with its 2 (N - 1) hops; other
models, with seconds of the optimizer, of PowerSGD's hook and, unless given, of compute in proportion to parameters;
other machines, as `--speed` says. On links faster than 1 / transfer, predictions show that software, not the link.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sweep.bench.cells import CONTESTANTS, Contestant
from sweep.style import RC, Drawn, add_legend, format_bytes, legend_rows, method_style, new_figure, save
from sweep.tables import Table

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import Size, Tensor

REFERENCE = "ddp_adamw"
BACKWARD = 2 / 3  # of forward and backward: two products of matrices to forward's one
FIT_ROUNDS = 50
NUMBERS = (
    "workers",
    "cores",
    "tokens",
    "step_s",
    "compute_s",
    "communication_s",
    "optimizer_s",
    "payload",
    "collectives",
)
COLUMNS = ("method", "rate_mbit", "overlapped", *NUMBERS)
BANDWIDTHS_MBIT = (1.0, 1e5)  # of the figure, and where a crossover is looked for
INTERVAL = 100  # steps that the kinds of steps are weighed by, from step 2 on, as in the bench
DDP_BUCKETS_BYTES = (2**20, 25 * 2**20)  # the first, each other; DDP's defaults
POWERSGD_SAVES = 2  # times at least, or its hook sends a matrix whole; torch's default
ALWAYS, NEVER = "always", "never"
NOTES = (
    "Extrapolated: workers on machines of their own, a ring all-reduce of 2 (N − 1) hops, every link at its rate at "
    "once; seconds of the optimizer from the bench's machine, in proportion to parameters.",
)


@dataclass(frozen=True, kw_only=True)
class Messages:
    """What one worker hands over in a mean step: bytes, all-reduces, and whether they leave while backward goes on."""

    payload: float
    collectives: float
    overlapped: bool


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs: workers, each worker's link (``rate_mbit=None``: unlimited), and the cores they share.

    ``cores=None``: a machine of its own for each worker. ``latency_ms``: of the link, added to the software's own.
    """

    workers: int
    rate_mbit: float | None
    latency_ms: float = 0.0
    cores: int | None = None

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
class Measured:
    """A row of the bench; ``step_s`` is a median of its own, so not quite the sum of ``times``."""

    method: str
    place: Place
    messages: Messages
    tokens: int
    step_s: float
    times: Times

    @property
    def group(self) -> tuple[int, float | None]:
        return self.place.workers, self.place.rate_mbit


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
        wire = _wire(self, method, messages, place)
        return Times(
            compute=self.compute_s * place.sharing,
            communication=wire.seconds(self),
            optimizer=self.optimizer_s[method] * place.sharing,
        )

    def scaled(self, *, size: float, speed: float, compute_s: float | None = None) -> CostModel:
        """For a model of ``size`` times the parameters, on machines of ``speed`` times the speed."""
        return replace(
            self,
            compute_s=self.compute_s * size / speed if compute_s is None else compute_s,
            optimizer_s={method: seconds * size / speed for method, seconds in self.optimizer_s.items()},
            latency_s=self.latency_s / speed,
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
    if messages.overlapped:
        room = BACKWARD * model.compute_s * place.sharing
        busy = 0.0 if place.has_idle_core else by_link[1]
        if constant + hops * model.latency_s + max(by_link) - busy > room:
            constant -= room
        else:
            hops, link, transfer, constant = 0.0, 0.0, 0.0 if place.has_idle_core else work, 0.0
    return _Wire(
        hops=hops,
        link=link,
        transfer=transfer,
        packing=messages.payload * place.sharing,
        hook={method: place.sharing},
        constant=constant,
    )


def fit(cells: Sequence[Measured]) -> CostModel:
    """The non-negative parameters of least squares, errors being relative to the cell's step.

    Compute, optimizer and communication are fitted to their own columns. What bounds communication, and what hides,
    depends on the parameters (at first all limited links bind), so the last fit is repeated until that is settled, or
    leaves some of them undetermined, and its best round taken.

    Raises:
        ValueError: If the cells do not determine the parameters.
    """
    import numpy as np

    if not cells:
        raise ValueError("no cells are left to fit on")
    scale = [1 / cell.step_s for cell in cells]
    shares = np.array([[cell.place.sharing] for cell in cells])
    (compute_s,) = _least_squares(shares, [cell.times.compute for cell in cells], scale)
    methods = sorted({cell.method for cell in cells})
    own = shares * np.array([[cell.method == method for method in methods] for cell in cells])
    optimizer = _least_squares(own, [cell.times.optimizer for cell in cells], scale)
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
        before, wires = wires, [_wire(model, cell.method, cell.messages, cell.place) for cell in cells]
        rounds.append((_squares(wires, cells, model), model))
        design = np.array([wire.row(hooks) for wire in wires])
        if wires == before or (before and not _determines(design, scale)):
            break
        rest = [cell.times.communication - wire.constant for cell, wire in zip(cells, wires, strict=True)]
        latency, inverse, transfer, packing, *seconds = _least_squares(design, rest, scale)
        model = replace(
            model,
            latency_s=latency,
            inverse_efficiency=inverse,
            transfer_s=transfer,
            packing_s=packing,
            hook_s=dict(zip(hooks, seconds, strict=True)),
        )
    return min(rounds[1:], key=lambda item: item[0])[1]


def _squares(wires: Sequence[_Wire], cells: Sequence[Measured], model: CostModel) -> float:
    errors = [
        (wire.seconds(model) - cell.times.communication) / cell.step_s for wire, cell in zip(wires, cells, strict=True)
    ]
    return math.fsum(error**2 for error in errors)


def _least_squares(design: np.ndarray, target: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Non-negative least squares of the rows times ``scale``."""
    import numpy as np
    from scipy.optimize import nnls

    if not _determines(design, scale):
        raise ValueError(
            f"{len(target)} cells are too few to fit on: latency, efficiency, transfer and packing need methods of "
            "different payloads, links without a limit and with one that binds, and two limits or numbers of workers "
            "(--methods, --rates and --workers of the bench)"
        )
    rows = design * np.array(scale)[:, None]
    size = np.linalg.norm(rows, axis=0)  # of columns, which are seconds, bytes and numbers
    values, _ = nnls(rows / size, np.array(target) * scale)
    return [float(value) for value in values / size]


def _determines(design: np.ndarray, scale: Sequence[float]) -> bool:
    """Whether the rows have but one solution, and not by rounding alone."""
    import numpy as np

    rows = design * np.array(scale)[:, None]
    size = np.linalg.norm(rows, axis=0)
    return bool(size.all()) and int(np.linalg.matrix_rank(rows / size, tol=1e-6)) == rows.shape[1]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A cell, and the step's time as predicted by a model that has not seen it or any of its group."""

    cell: Measured
    predicted: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.cell.step_s - 1


def hold_out(cells: Sequence[Measured], chosen: Mapping[str, str] | None = None) -> list[Held]:
    """Predict cells by models fitted without them: each group of (workers, rate) in turn, or those ``chosen`` alone.

    Args:
        chosen: By the column (workers, rate or method) the value, as in ``{"workers": "4", "rate": "none"}``.

    Raises:
        ValueError: If none are chosen, or the others do not determine the model, or have not their methods.
    """
    if chosen is None:
        groups = [[cell for cell in cells if cell.group == group] for group in dict.fromkeys(c.group for c in cells)]
    else:
        groups = [[cell for cell in cells if _is_chosen(cell, chosen)]]
        if not groups[0]:
            raise ValueError(f"--hold-out {_spell(chosen)}: no cell is so; they are {_spell_groups(cells)}")
    held = []
    for group in groups:
        rest = [cell for cell in cells if cell not in group]
        try:
            model = fit(rest)
        except ValueError as error:
            raise ValueError(f"with {group[0].place} held out: {error}") from None
        for cell in group:
            if cell.method not in model.optimizer_s:
                raise ValueError(
                    f"with {cell.place} held out, {cell.method} is in no other cell, so it has no optimizer seconds"
                )
            held.append(Held(cell=cell, predicted=model.times(cell.method, cell.messages, cell.place).step))
    return held


def _is_chosen(cell: Measured, chosen: Mapping[str, str]) -> bool:
    rate = cell.place.rate_mbit
    texts = {"workers": str(cell.place.workers), "rate": "none" if rate is None else f"{rate:g}", "method": cell.method}
    return all(texts[key] == value for key, value in chosen.items())


def _spell(chosen: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in chosen.items())


def _spell_groups(cells: Sequence[Measured]) -> str:
    return "; ".join(dict.fromkeys(str(cell.place) for cell in cells))


def read_cells(path: Path) -> list[Measured]:
    """The rows of a bench.

    Raises:
        ValueError: If there is no such file, no row, no such column, or a value that makes no sense.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names, rows = reader.fieldnames or (), list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read as the CSV of a bench: {error}") from error
    if missing := [name for name in COLUMNS if name not in names]:
        raise ValueError(f"{path}: no column {', '.join(missing)}; it must be the bench.csv of `python -m sweep.bench`")
    if not rows:
        raise ValueError(f"{path}: no cells, only the names of columns")
    cells = [_read_cell(row, f"{path}, row {number}") for number, row in enumerate(rows, 2)]
    for name, values in (("tokens", [cell.tokens for cell in cells]), ("cores", [cell.place.cores for cell in cells])):
        if len(different := dict.fromkeys(values)) > 1:
            raise ValueError(f"{path}: {name} must be the same in all cells, got {', '.join(map(str, different))}")
    return cells


def _read_cell(row: Mapping[str, str], where: str) -> Measured:
    method, rate, overlapped = row["method"], row["rate_mbit"], (row["overlapped"] or "").lower()
    if method not in CONTESTANTS:
        raise ValueError(f"{where}: method must be one of {', '.join(CONTESTANTS)}, got {method!r}")
    if overlapped not in ("true", "false"):
        raise ValueError(f"{where}: overlapped must be True or False, got {row['overlapped']!r}")
    values = {name: _number(row[name], name, where) for name in NUMBERS}
    workers, cores, tokens = (int(values[name]) for name in ("workers", "cores", "tokens"))
    if workers < 2 or cores < 1 or values["step_s"] == 0:
        raise ValueError(
            f"{where}: a cell has workers of 2 or more, cores of 1 or more and a step_s above 0, got "
            f"{row['workers']}, {row['cores']} and {row['step_s']}"
        )
    rate_mbit = _number(rate, "rate_mbit", where) if rate else None
    if rate_mbit == 0:
        raise ValueError(f"{where}: rate_mbit must be above 0, or empty for an unlimited link, got {rate}")
    return Measured(
        method=method,
        place=Place(workers=workers, rate_mbit=rate_mbit, cores=cores),
        messages=Messages(
            payload=values["payload"], collectives=values["collectives"], overlapped=overlapped == "true"
        ),
        tokens=tokens,
        step_s=values["step_s"],
        times=Times(
            compute=values["compute_s"], communication=values["communication_s"], optimizer=values["optimizer_s"]
        ),
    )


def _number(text: str | None, name: str, where: str) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where}: {name} must be a number of 0 or more, got {text!r}")
    return value


@cache
def messages_of(contestant: Contestant, *overrides: str) -> tuple[Messages, int]:
    """What a mean step of a contestant sends, the first step left out, and the number of the model's parameters.

    Methods of this project are run on meta tensors, each kind of step once, under the oracle that the bench's peers are
    counted by. Peers follow DDP's rules. ``overrides`` choose the model and ranks, as in the bench.

    Raises:
        ValueError: If an override makes no job.
    """
    from sweep.cells import compose
    from train import build_model

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
    import torch

    from sweep.bench.oracle import CollectiveOracle
    from train import build_model, build_optimizer
    from tsr import Communicator
    from tsr.harness.dryrun import fake_workers

    with fake_workers(2):
        model, communicator = build_model(config, "meta"), Communicator(**config["comm"])
        optimizer = build_optimizer(config, model, communicator)
        first: dict[Hashable, int] = {}
        times: Counter[int] = Counter()
        for step in range(2, 2 + INTERVAL):
            times[first.setdefault(optimizer.step_kind(step), step)] += 1
        payload = collectives = 0
        for step, count in times.items():
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter)
            optimizer.updates = step - 1
            with CollectiveOracle() as oracle:
                optimizer.step()
            payload += communicator.ledger.last.total * count
            collectives += oracle.calls["allreduce_"] * count
    return Messages(payload=payload / INTERVAL, collectives=collectives / INTERVAL, overlapped=communicator.overlap)


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
        """How many times shorter than the reference's a method's step is."""
        return self.times(REFERENCE, place).step / self.times(method, place).step


def forecast(
    cells: Sequence[Measured],
    methods: Sequence[str],
    overrides: Sequence[str],
    *,
    compute_s: float | None = None,
    speed: float = 1.0,
) -> Forecast:
    """Fit on all cells, and count what the methods and the reference send by dry runs.

    Args:
        overrides: Of the configuration; they choose the model and ranks.
        compute_s: Of a worker's forward and backward; by default the bench's, in proportion to parameters.
        speed: Of a worker's machine, over the bench's.

    Raises:
        ValueError: If the cells are too few or lack a method, or an override makes no job.
    """
    measured = {cell.method: cell for cell in cells}
    for method in (REFERENCE, *methods):
        if method not in measured:
            raise ValueError(
                f"{method} was not measured, so its seconds are unknown; the bench has {', '.join(measured)}"
            )
    counted = {method: messages_of(CONTESTANTS[method], *overrides) for method in dict.fromkeys((*methods, REFERENCE))}
    # The bench's own model is not in its rows, but DDP sends all of its parameters, in fp32.
    size = counted[REFERENCE][1] / (measured[REFERENCE].messages.payload / 4)
    model = fit(cells).scaled(size=size, speed=speed, compute_s=compute_s)
    return Forecast(model=model, messages={method: messages for method, (messages, _) in counted.items()})


def predict(
    cells: Sequence[Measured],
    method: str,
    *,
    model: str,
    workers: int,
    rate_mbit: float | None,
    latency_ms: float = 0.0,
    compute_s: float | None = None,
) -> Times:
    """Seconds of a step of ``method`` on ``workers`` machines, from a bench; see `forecast`.

    Args:
        model: One of ``experiment=table3``, as in ``llama_350m``.
        rate_mbit, latency_ms: Of each worker's link; ``None`` is an unlimited one.
        compute_s: Of a worker's forward and backward there.
    """
    place = Place(workers=workers, rate_mbit=rate_mbit, latency_ms=latency_ms)
    return forecast(cells, [method], _job(model), compute_s=compute_s).times(method, place)


def _job(model: str, *more: str) -> tuple[str, ...]:
    """What the bench composes for a model.

    Raises:
        ValueError: If the experiment has no such model.
    """
    from sweep.cells import compose

    known = [name for name in compose("experiment=table3")["table3"] if name.startswith("llama_")]
    if model not in known:
        raise ValueError(f"--model must be one of {', '.join(known)}, got {model!r}")
    return "experiment=table3", f"model={model}", "model.dtype=fp32", *more


def crossover(found: Forecast, method: str, place: Place) -> float | str:
    """The bandwidth in Mbit/s below which a step of ``method`` takes less time than the reference's.

    Looked for within `BANDWIDTHS_MBIT`: ``always`` or ``never`` if it pays on all, or not on the slowest, of them.
    """
    from scipy.optimize import brentq

    def gain(logarithm: float) -> float:
        link = replace(place, rate_mbit=10**logarithm)
        return found.times(REFERENCE, link).step - found.times(method, link).step

    grid = _logarithms()
    if gain(grid[0]) <= 0:
        return NEVER
    for slower, faster in pairwise(grid):
        if gain(faster) <= 0:
            return float(10 ** brentq(gain, slower, faster, xtol=1e-9))
    return ALWAYS


def _logarithms() -> list[float]:
    low, high = (math.log10(rate) for rate in BANDWIDTHS_MBIT)
    points = 40 * round(high - low)
    return [low + (high - low) * index / points for index in range(points + 1)]


def speedup_figure(
    found: Forecast, places: Sequence[Place], crossovers: Mapping[tuple[str, int], float | str]
) -> Figure:
    """Speed-up over the reference against bandwidth, a line a method, a panel a number of workers.

    Where a line crosses 1, its method's marker stands. DDP's lines are dashed.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    methods = [method for method in found.messages if method != REFERENCE]
    styles: dict[str, dict[str, Any]] = {
        method: dict(zip(("color", "marker"), method_style(method), strict=True)) for method in methods
    }
    dashes = {method: "--" if CONTESTANTS[method].peer else "-" for method in methods}
    handles = [Line2D([], [], label=m, ls=dashes[m], ms=4, lw=1, **style) for m, style in styles.items()]
    figure = new_figure(panels=len(places), rows=legend_rows(methods))
    panels = figure.subplots(len(places), sharex=True, squeeze=False)[:, 0]
    rates = [10**logarithm for logarithm in _logarithms()]
    for panel, place in zip(panels, places, strict=True):
        panel.axhline(1, color="0.4", lw=0.6)
        for method, style in styles.items():
            heights = [found.speedup(method, replace(place, rate_mbit=rate)) for rate in rates]
            panel.plot(
                [rate * 1e6 for rate in rates], heights, color=style["color"], ls=dashes[method], lw=1, label=method
            )
            if not isinstance(point := crossovers[method, place.workers], str):
                panel.plot([point * 1e6], [1], ms=4, ls="", label="_crossover", **style)
        panel.set(xscale="log", yscale="log", title=f"{place.workers} workers", ylabel=f"speed-up over {REFERENCE}")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    panels[-1].set_xlabel("bandwidth of each worker's link (bit/s)")
    format_bytes(panels[-1].xaxis)
    add_legend(figure, handles)
    return figure


def draw(
    found: Forecast, places: Sequence[Place], crossovers: Mapping[tuple[str, int], float | str], out: Path, *, of: str
) -> Drawn:
    """Draw `speedup_figure` into ``out``; ``of`` names the model."""
    import matplotlib as mpl

    fitted = found.model
    caption = (
        f"Predicted speed-up of a step over {REFERENCE}, {of}, {fitted.compute_s:.3g} s of compute, ring all-reduce, "
        "each worker on a machine of its own; a marker is the bandwidth below which the method pays. "
        f"Latency of a link {places[0].latency_ms:g} ms. Where a worker's software is slower than the link, beyond "
        f"{_goodput(fitted)}, bandwidth changes nothing."
    )
    with mpl.rc_context(RC):
        return save(speedup_figure(found, places, crossovers), out, "speedup", caption)


def _goodput(model: CostModel) -> str:
    """What a worker's software carries."""
    return f"{8 / model.transfer_s / 1e6:.0f} Mbit/s" if model.transfer_s else "any rate"


def parameters_table(model: CostModel) -> Table:
    """What was fitted, each with its unit."""
    efficiency = f"{1 / model.inverse_efficiency:.3f}" if model.inverse_efficiency else "-"
    rows = [
        ("compute", f"{model.compute_s:.4g}", "s a step"),
        ("latency of a hop", f"{1e6 * model.latency_s:.4g}", "µs"),
        ("efficiency of the link", efficiency, "payload bits for a bit of rate"),
        ("transfer", f"{1e9 * model.transfer_s:.4g}", "ns a byte sent"),
        ("packing", f"{1e9 * model.packing_s:.4g}", "ns a byte of payload"),
        *((f"optimizer, {method}", f"{seconds:.4g}", "s a step") for method, seconds in model.optimizer_s.items()),
        *((f"hook, {method}", f"{seconds:.4g}", "s a step") for method, seconds in model.hook_s.items()),
    ]
    return Table("Cost model, fitted on all cells", ("parameter", "value", "unit"), tuple(rows))


def holdout_table(held: Sequence[Held], rule: str) -> Table:
    """Every held-out cell, and the median and worst error."""
    worst = max(held, key=lambda item: abs(item.error))
    median = statistics.median(abs(item.error) for item in held)
    rows = tuple(
        (
            item.cell.method,
            str(item.cell.place.workers),
            "unlimited" if item.cell.place.rate_mbit is None else f"{item.cell.place.rate_mbit:g}",
            f"{item.cell.step_s:.4g}",
            f"{item.predicted:.4g}",
            f"{100 * item.error:+.1f}".replace("-", "−"),
        )
        for item in held
    )
    return Table(
        f"Step time of held-out cells: median error {100 * median:.1f} %, worst {100 * abs(worst.error):.1f} %",
        ("method", "workers", "rate (Mbit/s)", "measured (s)", "predicted (s)", "error (%)"),
        rows,
        (f"Each cell is predicted by a model that has not seen it: {rule}.",),
    )


def _predictions(found: Forecast, places: Sequence[Place], *, of: str) -> list[dict[str, Any]]:
    return [
        {
            "model": of,
            "method": method,
            "workers": place.workers,
            "rate_mbit": place.rate_mbit,
            "latency_ms": place.latency_ms,
            "payload": sent.payload,
            "collectives": sent.collectives,
            "compute_s": times.compute,
            "communication_s": times.communication,
            "optimizer_s": times.optimizer,
            "step_s": times.step,
            "speedup": found.speedup(method, place),
        }
        for place in places
        for method, sent in found.messages.items()
        for times in [found.times(method, place)]
    ]


def predictions_table(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> Table:
    """Predicted step times, as written to predictions.csv."""
    columns = {
        "method": "method",
        "workers": "workers",
        "rate_mbit": "rate (Mbit/s)",
        "payload": "payload (MB)",
        "collectives": "all-reduces",
        "compute_s": "compute (s)",
        "communication_s": "communication (s)",
        "optimizer_s": "optimizer (s)",
        "step_s": "step (s)",
        "speedup": f"speed-up over {REFERENCE}",
    }

    def show(row: Mapping[str, Any], key: str) -> str:
        value = row[key] / 1e6 if key == "payload" else row[key]
        return str(value) if isinstance(value, str | int) else f"{value:.4g}"

    shown = tuple(tuple(show(row, key) for key in columns) for row in rows)
    return Table(f"Predicted step time, {rows[0]['model']}", tuple(columns.values()), shown, tuple(notes))


def crossovers_table(crossovers: Mapping[tuple[str, int], float | str]) -> Table:
    """The bandwidth below which each method pays, by number of workers."""
    rows = tuple(
        (method, str(workers), point if isinstance(point, str) else f"{float(f'{point:.3g}'):g}")
        for (method, workers), point in crossovers.items()
    )
    low, high = BANDWIDTHS_MBIT
    return Table(
        f"Bandwidth below which a method's step takes less time than {REFERENCE}'s",
        ("method", "workers", "bandwidth (Mbit/s)"),
        rows,
        (f"Looked for from {low:g} to {high:g} Mbit/s: always or never is within these.",),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1, with the reason on stderr, if nothing can be fitted or predicted."""
    options = _parser().parse_args(arguments)
    try:
        cells = read_cells(options.bench)
        chosen = _parse_hold_out(options.hold_out) if options.hold_out else None
        held = hold_out(cells, chosen)
        measured = [name for name in CONTESTANTS if any(cell.method == name for cell in cells)]
        methods = _parse_methods(options.methods) if options.methods else measured
        if set(methods) == {REFERENCE}:
            raise ValueError(f"--methods must name one besides {REFERENCE}, which it is compared with")
        latency_ms = _number(options.latency_ms, "--latency-ms", "the command")
        workers = _positive(options.workers, "--workers", whole=True)
        places = [Place(workers=int(size), rate_mbit=None, latency_ms=latency_ms) for size in workers]
        rates = _positive(options.rate, "--rate")
        found = forecast(
            cells,
            methods,
            _job(options.model, *options.set),
            compute_s=_positive(options.compute_s, "--compute-s", single=True)[0] if options.compute_s else None,
            speed=_positive(options.speed, "--speed", single=True)[0],
        )
        rule = f"{_spell(chosen)} held out" if chosen else "all cells of its number of workers and rate are held out"
        tables = parameters_table(fit(cells)), holdout_table(held, rule)
        _report(found, places, rates, tables, options.out, of=options.model)
        _write(options.out / "holdout.csv", _held_rows(held))
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _report(
    found: Forecast, places: Sequence[Place], rates: Sequence[float], tables: Sequence[Table], out: Path, *, of: str
) -> None:
    """Draw, write and print what is predicted, the ``tables`` first."""
    crossovers = {
        (method, place.workers): crossover(found, method, place)
        for place in places
        for method in found.messages
        if method != REFERENCE
    }
    drawn = draw(found, places, crossovers, out, of=of)
    rows = _predictions(found, [replace(place, rate_mbit=rate) for place in places for rate in rates], of=of)
    _write(out / "predictions.csv", rows)
    _write(
        out / "crossovers.csv",
        [{"method": method, "workers": size, "bandwidth_mbit": point} for (method, size), point in crossovers.items()],
    )
    text = "\n".join(
        table.markdown() for table in (*tables, predictions_table(rows, NOTES), crossovers_table(crossovers))
    )
    (out / "cost.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"{drawn.png}: {drawn.caption}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sweep.bench.cost", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("bench", type=Path, metavar="BENCH.csv", help="what `python -m sweep.bench` wrote")
    add("--out", type=Path, required=True, metavar="DIR", help="where the tables and the figure go")
    add(
        "--hold-out",
        metavar="KEY=VALUE,…",
        help="cells to predict, by workers, rate or method, as in workers=4,rate=300",
    )
    add("--model", default="llama_60m", help="model to predict, of experiment=table3")
    add("--methods", help="contestants to predict; by default all that were measured")
    add("--workers", default="4,64,1024", help="numbers of workers to predict")
    add("--rate", default="10,100,1000", help="Mbit/s of every link")
    add("--latency-ms", default="0", help="of a link, beside the software's own")
    add("--compute-s", help="seconds of a worker's forward and backward; by default as in the bench, by parameters")
    add("--speed", default="1", help="of a worker's machine over the bench's: divides all seconds but those given")
    add("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more of the configuration, as in rank.linear=128")
    return parser


def _parse_hold_out(text: str) -> dict[str, str]:
    chosen = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in ("workers", "rate", "method") or not equals:
            raise ValueError(f"--hold-out must be like workers=4,rate=300, of workers, rate and method, got {text!r}")
        chosen[key] = value
    return chosen


def _parse_methods(text: str) -> list[str]:
    methods = text.split(",")
    for method in methods:
        if method not in CONTESTANTS:
            raise ValueError(f"--methods must be of {', '.join(CONTESTANTS)}, got {method!r}")
    return methods


def _positive(text: str, name: str, *, whole: bool = False, single: bool = False) -> list[float]:
    try:
        numbers = [float(int(part)) if whole else float(part) for part in ([text] if single else text.split(","))]
    except ValueError:
        numbers = [math.nan]
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        wanted = "a positive number, as in 1.5" if single else f"positive {'whole ' * whole}numbers, as in 10,100"
        raise ValueError(f"{name} must be {wanted}, got {text!r}")
    return numbers


def _held_rows(held: Sequence[Held]) -> list[dict[str, Any]]:
    return [
        {
            "method": item.cell.method,
            "workers": item.cell.place.workers,
            "rate_mbit": item.cell.place.rate_mbit,
            "measured_s": item.cell.step_s,
            "predicted_s": item.predicted,
            "error": item.error,
        }
        for item in held
    ]


def _write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())

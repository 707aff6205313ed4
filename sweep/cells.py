"""The analytic cells of the paper's tables: what is printed, what a dry run of this harness counts, and a verdict.

Values by definition and over all tensors come from dry runs of the optimizers' own code; `sweep/published.yaml` holds
what is printed and the jobs to count, `sweep.fits` the conventions that may explain a printed figure. The verdict is
computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

from sweep.fits import FITS

PUBLISHED = Path(__file__).with_name("published.yaml")
UNITS = {"M": 1e6, "G": 1e9}

MATCHES = "matches by definition"
FITTED = "matches only under a stated fit"
UNEXPLAINED = "unexplained"
STATUSES = (MATCHES, FITTED, UNEXPLAINED)

Summary = Mapping[str, Any]
Count = Callable[..., Summary]
"""Summary of the dry run of a job, given by its overrides."""


@dataclass(frozen=True)
class Quantity:
    """A column of the paper's tables: the key of a summary that its definition asks for, and those of all tensors."""

    title: str
    definition: str
    everything: tuple[str, ...]


QUANTITIES = {
    "bytes": Quantity("bytes/step", "paper/comm/bytes_per_step", ("comm/bytes_per_step",)),
    "peak": Quantity("peak bytes", "paper/comm/peak_bytes", ("comm/peak_bytes",)),
    "memory": Quantity("memory", "paper/memory_bytes", ("memory/weight_bytes", "memory/optimizer_state_bytes")),
}


@dataclass(frozen=True)
class Method:
    """How a method of the paper is counted; `other` is the optimizer of a second reading."""

    optimizer: str
    other: str | None = None
    fits: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A row of a printed table: its job, and its figures as texts; `metrics` are those that nothing here counts."""

    name: str
    method: str
    job: Sequence[str]
    rank: str
    interval: str
    metrics: Mapping[str, str]
    bytes: str
    peak: str | None = None
    memory: str | None = None

    @property
    def printed(self) -> dict[str, str]:
        """The figures that are checked, by key of `QUANTITIES`."""
        figures = {"bytes": self.bytes, "peak": self.peak, "memory": self.memory}
        return {key: figure for key, figure in figures.items() if figure is not None}


@dataclass(frozen=True)
class PrintedTable:
    """A table of the paper; `unit` is a key of `UNITS`, `note` a remark on how it is counted."""

    name: str
    title: str
    unit: str
    rows: tuple[Row, ...]
    note: str = ""


@dataclass(frozen=True)
class Published:
    """`published.yaml`; `head` names pairs of rows of table3."""

    methods: Mapping[str, Method]
    tables: tuple[PrintedTable, ...]
    head: Mapping[str, tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """What a printed figure is found to be; `fitted` are the bytes by the convention `fit`, a key of `FITS`."""

    status: str
    fit: str | None = None
    fitted: float | None = None
    explanation: str = ""


@dataclass(frozen=True)
class AnalyticCell:
    """One printed figure and what it is compared with, in bytes; None where there is no such reading.

    `oversampled` is the definition at the scripts' oversampling, `other` that of the method's second reading.
    """

    table: str
    row: Row
    column: str
    unit: str
    printed: str
    by_definition: float
    all_tensors: float
    oversampled: float | None
    other: float | None
    verdict: Verdict

    def show(self, value: float | None) -> str:
        """`value` in the cell's unit, with two decimals more than are printed."""
        return "-" if value is None else f"{value / UNITS[self.unit]:.{decimals(self.printed) + 2}f}"


def published(path: Path = PUBLISHED) -> Published:
    """The printed figures.

    Raises:
        TypeError: the file lacks a key, or has one that is not known.
    """
    import yaml

    facts = yaml.safe_load(path.read_text(encoding="utf-8"))
    rows = {
        name: tuple(Row(name=row, **values) for row, values in table.pop("rows").items())
        for name, table in facts["tables"].items()
    }
    tables = tuple(PrintedTable(name=name, rows=rows[name], **table) for name, table in facts["tables"].items())
    methods = {name: Method(**method) for name, method in facts["methods"].items()}
    return Published(methods, tables, {scale: (first, second) for scale, (first, second) in facts["head"].items()})


def compose(*overrides: str) -> dict[str, Any]:
    """The configuration of a job, given by its overrides, as plain values.

    Raises:
        ValueError: naming what is wrong with an override.
    """
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    import train
    from tsr.harness.hydra_hooks import plain

    try:
        with hydra.initialize_config_dir(str(Path(train.__file__).with_name("conf")), version_base="1.3"):
            return plain(hydra.compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(_one_line(str(error), overrides)) from error


def _one_line(message: str, overrides: Sequence[str]) -> str:
    """Hydra's message after the override that it is about, or after all of them where it names none."""
    message = " ".join(message.split())
    keys = {override: override.partition("=")[0].lstrip("+~") for override in overrides}
    named = [
        override
        for override, key in keys.items()
        if any(text in message for text in (f"'{override}'", f"'{key}'", f"'{key}/", f"full_key: {key} "))
    ]
    if unknown := re.match("Could not override '([^']+)'", message):
        message = f"the configuration has no {unknown[1]}"
    elif absent := re.search(
        "Could not find '([^']+)' Available options in '[^']+': (.+?)(?: Config search path|$)", message
    ):
        known = [name for name in absent[2].split() if not name.startswith("_")]
        message = f"the configuration has no {absent[1]}; there are {', '.join(known)}"
    return f"{' '.join(named or overrides)}: {message}"


def counter(*, world_size: int = 8, overrides: Sequence[str] = ()) -> Count:
    """Count jobs by dry runs in this process, each once; `overrides` apply to all of them.

    Raises:
        ValueError: when called, if a value makes no job.
    """
    import train

    @cache
    def count(*job: str) -> Summary:
        return train.count(compose(*job, "dry_run=true", f"world_size={world_size}", *overrides))

    return count


def analytic_cells(facts: Published, count: Count) -> list[AnalyticCell]:
    """Every cell of every table."""
    return [
        cell
        for table in facts.tables
        for row in table.rows
        for cell in cells_of(table, row, facts.methods[row.method], count)
    ]


def cells_of(table: PrintedTable, row: Row, method: Method, count: Count) -> list[AnalyticCell]:
    """The cells of one row, from up to three dry runs."""
    defined = count(*row.job, f"optimizer={method.optimizer}", "refresh.oversampling=0")
    sketches = "sketch" in defined["comm/by_role"]
    oversampled = count(*row.job, f"optimizer={method.optimizer}") if sketches else None
    other = count(*row.job, f"optimizer={method.other}", "refresh.oversampling=0") if method.other else None
    cells = []
    for key, printed in row.printed.items():
        quantity = QUANTITIES[key]
        sent = key != "memory"  # the other readings differ in what they send
        second = other[quantity.definition] if other and sent else None
        cells.append(
            AnalyticCell(
                table=table.name,
                row=row,
                column=quantity.title,
                unit=table.unit,
                printed=printed,
                by_definition=defined[quantity.definition],
                all_tensors=sum(defined[part] for part in quantity.everything),
                oversampled=oversampled[quantity.definition] if oversampled and sent else None,
                other=second,
                verdict=judge(printed, table.unit, defined, key, method=method, other=second),
            )
        )
    return cells


def judge(
    printed: str, unit: str, defined: Summary, key: str, *, method: Method, other: float | None = None
) -> Verdict:
    """Compare a printed figure of the quantity `key` with the summary by definition, then with the method's fit."""
    value, scale = defined[QUANTITIES[key].definition], UNITS[unit]
    if rounds_to(value / scale, printed):
        return Verdict(MATCHES)
    text = f"printed {_off(float(printed) * scale, value)} the definition"
    if name := method.fits.get(key):
        fitted = FITS[name].value(defined["blocks"])
        if rounds_to(fitted / scale, printed):
            return Verdict(FITTED, name, fitted, f"{text}; fits if {FITS[name].text}")
    if other is not None:
        text += f" and {_off(float(printed) * scale, other)} what `{method.other}` sends"
        if key == "peak" and float(printed) * scale < other:
            text += ", so below the dense size although its SVD refresh synchronises whole gradients"
    for fits, remark in ((method.fits, "not printed either"), (method.unsupported, "with no support in the paper")):
        if name := fits.get(key):
            fitted = FITS[name].value(defined["blocks"]) / scale
            text += f"; {fitted:.{decimals(printed) + 2}f}, {remark}, if {FITS[name].text}"
    return Verdict(UNEXPLAINED, explanation=text)


def _off(printed: float, value: float) -> str:
    return f"{abs(100 * (printed / value - 1)):.1f} % {'above' if printed > value else 'below'}"


def decimals(printed: str) -> int:
    """Decimals of a printed figure."""
    return len(printed.partition(".")[2])


def rounds_to(value: float, printed: str) -> bool:
    """Whether `value` is `printed` at its number of decimals, by ordinary rounding."""
    return Decimal(value).quantize(Decimal(printed), ROUND_HALF_UP) == Decimal(printed)


@dataclass(frozen=True)
class HeadRatio:
    """Bytes per step of the first row of a pair over the second's."""

    scale: str
    first: str
    second: str
    by_definition: float
    all_tensors: float


def head_ratios(facts: Published, cells: Sequence[AnalyticCell]) -> list[HeadRatio]:
    """What leaving the head out of the count does to the ratios of Table 3."""
    found = {(cell.table, cell.row.name): cell for cell in cells if cell.column == QUANTITIES["bytes"].title}
    ratios = []
    for scale, names in facts.head.items():
        first, second = (found["table3", name] for name in names)
        ratios.append(
            HeadRatio(scale, *names, first.by_definition / second.by_definition, first.all_tensors / second.all_tensors)
        )
    return ratios

"""Tables of a bench on disk: one CSV, a row a frozen dataclass whose fields are its columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tsr.harness.rundir import write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

_READ: dict[str, Callable[[str], Any]] = {
    **{"str": str, "int": int, "float": float, "bool": {"True": True, "False": False}.__getitem__},
    "int | None": lambda text: int(text) if text else None,
    "float | None": lambda text: float(text) if text else None,
}


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """The rows of a table; none if there is no file.

    Raises:
        ValueError: The file is no table of this kind.
    """
    if not path.is_file():
        return []
    columns = {field.name: _READ[str(field.type)] for field in fields(kind)}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
            raise ValueError(f"{path} is no table of this bench: it has no column {missing[0]}")
        try:
            return [kind(**{name: read(line[name]) for name, read in columns.items()}) for line in reader]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {reader.line_num}: {error} is no value of its column") from None


def check_folder(path: Path) -> None:
    """Raise before anything is measured if ``--out`` is no folder and none can be made there."""
    if not next(place for place in (path, *path.parents) if place.exists()).is_dir():
        raise ValueError(f"--out must be a folder, or a place for a new one, got {path}")


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Write rows of one kind, at least one; whoever reads meanwhile finds whole rows alone."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, rows))
    write_atomically(path, text.getvalue())

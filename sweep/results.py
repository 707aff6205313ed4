"""Results that outlive their run directories: one CSV, a row a finished run, with its whole configuration in columns.

`python train.py … results=FILE.csv` adds the run to FILE when it is done, and skips a job whose configuration hash is
in FILE already, whether its run directory is still there or not; dry runs, and runs that went on from another run's
checkpoint, are left out. A row has the columns of `sweep.runs.read_runs`, and `overrides`: what made the run, to stand
behind `python train.py` in a shell. Where things lay on the machine that ran it (`NOT_IDENTITY`) is in no column, so
that rows can be published.
"""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from sweep.runs import COLUMNS, is_setting, read_run
from tsr.harness.rundir import write_atomically
from tsr.harness.settings import NOT_IDENTITY

KEY = "config_hash"
STARTED = ("seed", "data_seed", "nproc", "device")  # what is no setting but makes the run what it is


class Results:
    """The results in one CSV; with ``path=None`` there are none, and nothing is written.

    Raises:
        ValueError: ``path`` is something else than a CSV of results, or in no folder that can be written.
    """

    def __init__(self, path: str | None) -> None:
        if path is not None and not (isinstance(path, str) and path.endswith(".csv")):
            raise ValueError(f"results must be the path of a .csv file, or null, got {path!r}")
        self.path = Path(path) if path else None
        if self.path:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"results={path}: no file can be made there ({error.strerror})") from error
            if not os.access(self.path.parent, os.W_OK):
                raise ValueError(f"results={path}: no file can be made there (not writable)")
        self._read()

    def has(self, config_hash: str) -> bool:
        """Whether a run of this configuration has a row."""
        return any(row[KEY] == config_hash for row in self._read())

    def add(self, run: Path, *, overrides: Sequence[str] = ()) -> None:
        """Add the finished run in the directory ``run``, in the place of an earlier one of the same configuration.

        Several processes may do so at once, and a reader, or a kill at any time, finds whole rows alone.

        Raises:
            ValueError: the directory holds no finished run, or lacks part of its record.
        """
        if self.path is None:
            return
        row = read_run(run)
        if row["status"] != "done":
            raise ValueError(
                f"results={self.path}: {run} is no finished run ({row['error']}); resume=null runs it again"
            )
        new = {key: _text(value) for key, value in row.items() if value is not None and not _is_local(key)}
        kept = [text for text in overrides if text.lstrip("+").partition("=")[0] not in NOT_IDENTITY]
        new |= {"run": run.name, "overrides": shlex.join(kept)}
        with FileLock(self.path.with_name(f".{self.path.name}.lock")):
            rows = [row for row in self._read() if row[KEY] != new[KEY]] + [new]
            known = dict.fromkeys(("overrides", *COLUMNS))
            columns = [*known, *sorted({key for row in rows for key in row} - set(known))]
            text = io.StringIO()
            writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            write_atomically(self.path, text.getvalue())

    def _read(self) -> list[dict[str, str]]:
        if self.path is None or not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file, strict=True)
                if KEY not in (reader.fieldnames or ()):
                    raise ValueError(f"it has no column {KEY}")
                rows = []
                for row in reader:
                    if None in row or not row[KEY]:
                        raise ValueError(f"line {reader.line_num} is no row of it")
                    rows.append({key: value for key, value in row.items() if value})
                return rows
        except (OSError, UnicodeError, csv.Error, ValueError) as error:
            raise ValueError(f"results={self.path}: not a CSV of results ({error}); give another file") from error


def _is_local(column: str) -> bool:
    """Whether a column tells how a run was kept and watched, or a table it was looked up in: of no use elsewhere."""
    return column.startswith("config/") and not (is_setting(column) or column.removeprefix("config/") in STARTED)


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)

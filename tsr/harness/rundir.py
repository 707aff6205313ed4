"""The run directory: configuration, metrics, summary, log and checkpoints of one job, whatever its number of workers.

`metrics.jsonl` and `summary.json` are the source of truth; anything else mirrors them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from tsr.harness.settings import config_hash

LOGGER = logging.getLogger("tsr")


class BriefFormatter(logging.Formatter):
    """Leaves tracebacks out."""

    def formatException(self, ei: object) -> str:
        return ""


class RunDirectory:
    """One job's directory. Making the object touches nothing; the first worker writes.

    Args:
        path: The directory.
        config: The resolved configuration as plain values.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.config = dict(config)
        self.config_hash = config_hash(config)
        self.metrics_path = self.path / "metrics.jsonl"
        self.summary_path = self.path / "summary.json"
        self.checkpoints = self.path / "checkpoints"

    def summary(self) -> dict[str, Any] | None:
        """The summary, if the run has ended."""
        if not self.summary_path.is_file():
            return None
        return dict(json.loads(self.summary_path.read_text()))

    def is_over(self) -> bool:
        """Whether the job is done already and not asked for anew; says so."""
        over = self.config["resume"] == "auto" and (self.summary() or {}).get("status") == "done"
        if over:
            print(f"done already, skipped: {self.path} (resume=null runs it again)")
        return over

    def check_owner(self) -> None:
        """Refuse a directory that holds a run of another configuration."""
        path = self.path / "config.yaml"
        if path.is_file():
            other = config_hash(_load_config(path))
            if other != self.config_hash:
                raise ValueError(
                    f"hydra.run.dir={self.path} holds a run of another configuration ({other}, this one is "
                    f"{self.config_hash}); choose another directory or remove that one"
                )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the directory, so that a job started twice at once runs once. Released by the system on any death."""
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(f"hydra.run.dir={self.path} is in use by another process that runs the same job") from None
        try:
            yield
        finally:
            lock.release()

    def begin(self, *, resumed_step: int, source: Path | None = None) -> None:
        """Write the configuration, forget an earlier failure, and drop metrics past the checkpoint resumed from.

        Args:
            resumed_step: Updates that the checkpoint holds; 0 starts afresh.
            source: The metrics file whose rows up to there are kept; by default this run's own.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.summary_path.unlink(missing_ok=True)
        self._write_config()
        kept = [json.dumps(row) for row in read_rows(source or self.metrics_path) if row["step"] <= resumed_step]
        write_atomically(self.metrics_path, "".join(f"{line}\n" for line in kept))

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to the metrics, flushed at once."""
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary of a run that is done."""
        write_atomically(self.summary_path, json.dumps({"status": "done", **summary}, indent=2) + "\n")

    def fail(self, error: str, **facts: Any) -> None:
        """Record a failure, unless the run already has a summary: the first worker to fail knows the cause."""
        record = {"status": "failed", "error": error, "config_hash": self.config_hash, **facts, **provenance()}
        # One short write into a file that must not exist yet: of workers that fail together, one gets its word in.
        with contextlib.suppress(FileExistsError), self.summary_path.open("x") as file:
            file.write(json.dumps(record, indent=2) + "\n")
        if not (self.path / "config.yaml").exists():  # it failed before it began: a report still names the job
            self._write_config()

    def _write_config(self) -> None:
        write_atomically(self.path / "config.yaml", OmegaConf.to_yaml(self.config))

    def log_to_file(self, *, rank: int) -> None:
        """Send the log to `train.log` and the terminal: all of it on the first worker, errors alone on the others."""
        level = logging.INFO if rank == 0 else logging.ERROR
        for old in list(LOGGER.handlers):
            LOGGER.removeHandler(old)
        # The terminal first: what it leaves out of a traceback, the file then formats in full.
        for handler, formatter in (
            (logging.StreamHandler(), BriefFormatter),
            (logging.FileHandler(self.path / "train.log"), logging.Formatter),
        ):
            handler.setLevel(level)
            handler.setFormatter(formatter(f"%(asctime)s rank {rank}: %(message)s", "%Y-%m-%d %H:%M:%S"))
            LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False


def _load_config(path: Path) -> dict[str, Any]:
    config = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics file; a last line cut short by a kill is left out."""
    rows = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def write_atomically(path: Path, text: str) -> None:
    """Replace a file so that a reader sees the old text or the new, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


@cache
def provenance() -> dict[str, Any]:
    """Versions, commit and machine that a run is made with, found out once."""
    names = ("torch", "numpy", "hydra-core", "omegaconf", "datasets", "sentencepiece", "wandb")
    versions = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"versions": versions, "git_commit": _git_commit(), "machine": _machine()}


def _machine() -> str:
    """Processor, cores, threads of one worker and GPU: what the seconds, and the last bits, of a run depend on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = next(iter(names), name)
    parts = [name, f"{os.cpu_count()} cores", f"{torch.get_num_threads()} threads"]
    return ", ".join(parts + ([torch.cuda.get_device_name()] if torch.cuda.is_available() else []))


def _git_commit() -> str | None:
    """The last commit that changed code, with ``-dirty`` if the code differs from it; ``None`` outside a checkout.

    Results and pages of text are no code: a sweep that adds to a committed CSV stays clean, and its commit changes
    nothing.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments, "--", ":/", ":!/sweep/results", ":!/*.md"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        commit = git("log", "-1", "--format=%H")
        return f"{commit}-dirty" if git("status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return None

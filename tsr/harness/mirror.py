"""A mirror of the run record in W&B. It follows `metrics.jsonl` and can never end a run."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from tsr.harness.rundir import LOGGER, RunDirectory, read_rows


class Mirror:
    """Copies rows and the summary to W&B, if asked to; any error turns it off with one warning.

    Offline (the default unless ``WANDB_MODE`` says otherwise), a resumed job starts its W&B run anew from the whole of
    `metrics.jsonl`, so that one job leaves one run with all of its history.

    Args:
        run: The run directory; W&B's files go below it.
        settings: The ``logger`` keys: ``name`` (``wandb`` or ``none``), ``project``, ``entity``, ``group``, ``tags``.
    """

    def __init__(self, run: RunDirectory, settings: Mapping[str, Any]) -> None:
        self._run = run
        self._settings = settings
        self._wandb: Any = None
        if settings["name"] == "wandb":
            self._guard(self._start)

    def log(self, row: Mapping[str, Any]) -> None:
        """Copy one row of the metrics."""
        if self._wandb is not None:
            self._guard(lambda: self._wandb.log(dict(row)))

    def finish(self, summary: Mapping[str, Any], bytes_by_role: Mapping[str, Mapping[str, int]]) -> None:
        """Copy the summary and the table of bytes, and end the W&B run."""
        if self._wandb is not None:
            self._guard(lambda: self._finish(summary, bytes_by_role))

    def _guard(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self._wandb = None
            LOGGER.warning("W&B is off for this run: %s: %s", type(error).__name__, error)

    def _start(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        mode: Any = os.environ.get("WANDB_MODE", "offline")
        import wandb

        if mode == "offline":
            shutil.rmtree(self._run.path / "wandb", ignore_errors=True)
        self._wandb = wandb.init(
            project=self._settings["project"],
            entity=self._settings["entity"],
            group=self._settings["group"],
            tags=self._settings["tags"],
            name=self._run.path.name,
            id=hashlib.sha256(f"{self._run.config_hash} {self._run.path.resolve()}".encode()).hexdigest()[:16],
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=self._run.path,
            config=self._run.config,
            settings=wandb.Settings(silent=True, init_timeout=30, console="off"),
        )
        for axis in ("step", "tokens", "comm/total_bytes"):
            self._wandb.define_metric(axis)
        self._wandb.define_metric("train/*", step_metric="tokens")
        self._wandb.define_metric("eval/*", step_metric="comm/total_bytes")
        if mode == "offline":
            for row in read_rows(self._run.metrics_path):
                self._wandb.log(row)

    def _finish(self, summary: Mapping[str, Any], bytes_by_role: Mapping[str, Mapping[str, int]]) -> None:
        import wandb

        table = wandb.Table(columns=["message", "block", "bytes"])
        for role, kinds in bytes_by_role.items():
            for kind, count in kinds.items():
                table.add_data(role, kind, count)
        self._wandb.log({"comm/by_role": table})
        self._wandb.summary.update(dict(summary))
        self._wandb.finish()

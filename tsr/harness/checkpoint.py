"""Checkpoints: everything that a run needs to go on, bit for bit.

`step_XXXXXXXX/` holds `state.pt` (parameters, optimizer state, progress) and `meta.json` (what it is the state of).
What depends on the step alone is not saved: data order, sketches and learning rate are functions of it. A checkpoint
appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tsr.harness.rundir import LOGGER, write_atomically


class Damaged(ValueError):
    """A checkpoint that is not there or cannot be read."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found to be whole and to fit."""

    path: Path
    step: int

    def load(self) -> dict[str, Any]:
        """``{"model", "optimizer", "progress"}``, mapped from the file until it is copied."""
        return dict(torch.load(self.path / "state.pt", map_location="cpu", mmap=True, weights_only=True))


def signature(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Names, shapes and dtypes of parameters and of their optimizer state: what must agree for a checkpoint to fit."""
    entries: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        entries[name] = [list(parameter.shape), str(parameter.dtype)]
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                entries[f"{name} ({key})"] = [list(value.shape), str(value.dtype)]
    return entries


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    *,
    text: Mapping[str, str],
    keep: int,
) -> Path:
    """Write the checkpoint of ``step`` and drop all but the ``keep`` newest; ``text`` identifies what is trained on."""
    path = folder / f"step_{step:08d}"
    partial = folder / f".partial_{path.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with (partial / "state.pt").open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}, file)
        file.flush()
        os.fsync(file.fileno())
    write_atomically(
        partial / "meta.json", json.dumps({"step": step, "signature": signature(model, optimizer), "text": dict(text)})
    )
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)
    for old in list_checkpoints(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(folder.glob("step_*"))


def drop_others(folder: Path, found: Checkpoint | None) -> None:
    """Drop what does not lie on the way to ``found``: a run that goes on from there makes its own."""
    own = found is not None and found.path.resolve().parent == folder.resolve()
    for path in list_checkpoints(folder):
        if found is None or not own or path.name > found.path.name:
            shutil.rmtree(path)


def find(
    resume: str | None, folder: Path, expected: dict[str, list[Any]], *, text: Mapping[str, str], steps: int
) -> Checkpoint | None:
    """The checkpoint to resume from.

    Args:
        resume: ``auto`` takes the newest sound one of ``folder``, if there is any; ``None`` starts afresh; otherwise
            the path of a checkpoint or of a run directory.
        folder: The run's own checkpoints.
        expected: `signature` of the model and optimizer that are to take it over.
        text: Hashes of the corpus and the tokenizer that training would go on with.
        steps: Where training is to end.

    Raises:
        ValueError: If it is of another model, optimizer or text, or past the end, so that going on would make another
            run of this one; if the one that was asked for by path is missing or damaged; if there are checkpoints but
            none is sound, for starting afresh would lose them.
    """
    if resume is None:
        return None
    if resume == "auto":
        damaged = None
        for path in reversed(list_checkpoints(folder)):
            try:
                return _open(path, expected, text, steps)
            except Damaged as error:
                LOGGER.warning("%s", error)
                damaged = error
        if damaged is not None:
            raise ValueError(f"{damaged}; no other is left, so start afresh with resume=null or remove {folder}")
        return None
    path = Path(resume)
    if (path / "checkpoints").is_dir():
        found = list_checkpoints(path / "checkpoints")
        if not found:
            raise ValueError(f"resume={resume}: this run has no checkpoint yet")
        path = found[-1]
    return _open(path, expected, text, steps)


def _open(path: Path, expected: dict[str, list[Any]], text: Mapping[str, str], steps: int) -> Checkpoint:
    if not (path / "meta.json").is_file():
        raise Damaged(f"resume={path}: no checkpoint is there; give a folder .../checkpoints/step_XXXXXXXX or auto")
    try:
        meta = json.loads((path / "meta.json").read_text())
        step, found, found_text = int(meta["step"]), meta["signature"], meta["text"]
        torch.load(path / "state.pt", map_location="cpu", mmap=True, weights_only=True)
    except PermissionError as error:
        raise ValueError(f"resume={path}: the checkpoint cannot be read ({error})") from None
    except Exception as error:  # torch reports damage in many ways
        raise Damaged(f"resume={path}: the checkpoint is damaged ({type(error).__name__}); use an older one") from None
    for name in expected.keys() | found.keys():
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"resume={path}: the checkpoint is of another model or optimizer: {name} is "
                f"{_shape(found.get(name))} there and {_shape(expected.get(name))} here; use the configuration it was "
                f"made with"
            )
    if found_text != text:
        raise ValueError(
            f"resume={path}: the checkpoint was trained on another text ({found_text}, here {dict(text)}), which may "
            f"have changed since; restore it, or start afresh with resume=null"
        )
    if step > steps:
        raise ValueError(f"resume={path}: the checkpoint is of step {step}, past trainer.steps={steps}; raise that one")
    return Checkpoint(path, step)


def _shape(entry: list[Any] | None) -> str:
    return (
        "absent" if entry is None else f"{'x'.join(map(str, entry[0])) or 'scalar'} {entry[1].removeprefix('torch.')}"
    )

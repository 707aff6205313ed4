"""`train.py` as a user calls it: in this process where no worker is to be started, else in one of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import train

PROJECT = Path(train.__file__).parent
CHECKER = PROJECT.parent / "shared" / "tools" / "check_run.py"
TIMEOUT_S = 240  # of a process; a lone one takes some seconds


class Outcome(NamedTuple):
    """How a command ended; ``text`` is what it printed, in order."""

    status: int
    text: str


def write_corpus(folder: Path) -> Path:
    """Some hundred lines of made-up words, the same each time."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 7))) for _ in range(100)]
    path = folder / "corpus.txt"
    path.write_text("".join(" ".join(draw.choices(words, k=12)) + "\n" for _ in range(600)))
    return path


def tiny_job(folder: Path) -> list[str]:
    """Overrides that make a job which takes a second: corpus, cache and runs lie in ``folder``."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        write_corpus(folder)
    return [
        f"runs_dir={folder / 'runs'}",
        "logger=none",
        "data=text",
        f"data.paths=[{corpus}]",
        f"data.cache_dir={folder / 'cache'}",
        "data.sequence_length=32",
        "model.vocab_size=300",
        "trainer.steps=6",
        "trainer.global_batch=4",
        "trainer.eval_every=2",
        "trainer.eval_rows=8",
        "trainer.checkpoint_every=2",
    ]


def call(*arguments: str) -> Outcome:
    """Run the command in this process; if it starts a worker, it fails with a traceback."""
    text = io.StringIO()
    forbidden = mock.Mock(side_effect=AssertionError("a worker was started"))
    with (
        mock.patch.object(sys, "argv", ["train.py", *arguments]),
        mock.patch.object(train, "start_workers", forbidden),
        mock.patch.object(train, "work", forbidden),
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
    ):
        try:
            train.main()
        except SystemExit as end:
            if isinstance(end.code, str):  # what the interpreter would do with it
                return Outcome(1, text.getvalue() + end.code + "\n")
            return Outcome(int(end.code or 0), text.getvalue())
    return Outcome(0, text.getvalue())


def start(*arguments: str, torchrun: int | None = None, **environment: str) -> subprocess.Popen[str]:
    """Start the command as a process group of its own, under torchrun if a number of workers is given."""
    launcher = [sys.executable]
    if torchrun is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(torchrun)]
    return subprocess.Popen(
        [*launcher, "train.py", *arguments],
        cwd=PROJECT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    """Wait for a process that `start` made."""
    text, _ = process.communicate(timeout=TIMEOUT_S)
    return Outcome(process.returncode, text)


def run(*arguments: str, torchrun: int | None = None, **environment: str) -> Outcome:
    """`start` and `finish`."""
    return finish(start(*arguments, torchrun=torchrun, **environment))


def only_run(runs: Path) -> Path:
    """The one run directory of ``runs``."""
    (directory,) = runs.iterdir()
    return directory


def read_summary(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "summary.json").read_text()))


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below ``folder`` with its time of change and content."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}

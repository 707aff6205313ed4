"""Processes on a network's hosts, and the tools that make these: started, watched, and ended, on signals too."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

STOP_SECONDS = 5.0
POLL_SECONDS = 0.05
TAIL_LINES = 15
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class NetworkUnavailable(RuntimeError):
    """No such network can be made on this machine; the message is the reason."""


class HostFailed(RuntimeError):
    """A process on a host ended with an error; all others were ended."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM, raised where Python happens to be: no ``except Exception`` may swallow it."""


class Signals:
    """SIGINT and SIGTERM while a network stands: the first one raises, and is repeated when all is removed."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._held = False
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take both signals from now on, unless they are ignored."""
        self._received, self._held = None, False
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # what is ignored stays ignored
                self._previous[number] = signal.signal(number, self._handle)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """For cleaning up: a signal raises only afterwards."""
        before = self._received
        self.hold()
        try:
            yield
        finally:
            self._held = False
        if before is None:
            self._raise()

    def hold(self) -> None:
        """From now on only note a signal."""
        self._held = True

    def restore(self) -> None:
        """Give the signals back, and repeat the first that came."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._received is not None:
            signal.raise_signal(self._received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:  # a second one, as `timeout` sends it, must not interrupt the cleaning up
            self._received = number
            if not self._held:
                self._raise()

    def _raise(self) -> None:
        if self._received is not None:
            raise Interrupted(signal.Signals(self._received).name)


def batch(program: str, lines: Sequence[str], *, namespace: str | None = None) -> None:
    """Let ``ip`` or ``tc`` do all of ``lines``: one process, where each costs a busy machine a time slice."""
    tool(program, *(["-n", namespace] if namespace else []), "-batch", "-", lines=lines)


def tool(*command: str, lines: Sequence[str] = (), check: bool = True) -> str:
    """The output of ``command``, given ``lines`` to read; no signal, to this process or to both, ends it half-way.

    Raises:
        NetworkUnavailable: If it fails and that is to be checked; says what it said.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # inherited
    try:
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if check and done.returncode != 0:
        asked = f" with `{'; '.join(lines)}`" if lines else ""
        raise NetworkUnavailable(f"`{' '.join(command)}`{asked} failed: {' '.join(done.stderr.split())}")
    return done.stdout


def kill(namespaces: Sequence[str]) -> None:
    """End every process in these namespaces, and wait until it has; one that the kernel does not let go stays."""
    deadline = time.monotonic() + STOP_SECONDS
    while time.monotonic() < deadline:
        pids = [pid for name in namespaces for pid in tool("ip", "netns", "pids", name, check=False).split()]
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def start(command: Sequence[str], *, namespace: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process on a host, in a group of its own. Where ``setpriv`` is, even a kill -9 of this process ends it."""
    with log.open("wb") as output:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, *until_death(), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            preexec_fn=os.setpgrp,  # no session: it would lose this one's share of the processors (autogroup)
        )


def end(processes: Sequence[subprocess.Popen[bytes]], namespaces: Sequence[str]) -> None:
    """End processes with their groups, politely, then by force, as all that they have started in the namespaces."""
    for process in processes:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        _signal_group(process, signal.SIGKILL)
    kill(namespaces)
    for process in processes:
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def raise_failures(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Raise `HostFailed` if one has failed: which, how, and the end of its log; both by host."""
    failed = [
        f"host {host} ended with {_status(process.returncode)};{tail(log)}"
        for host, (process, log) in enumerate(zip(processes, logs, strict=True))
        if process.returncode not in (None, 0)
    ]
    if failed:
        raise HostFailed("\n".join(failed))


def _status(returncode: int) -> str:
    return f"exit status {returncode}" if returncode > 0 else signal.Signals(-returncode).name


def until_death() -> list[str]:
    """What to put before a command so that it gets SIGTERM when this process dies, even by kill -9, if it can be."""
    return ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


def tail(log: Path) -> str:
    """The end of a log, for an error's message."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return f" {log} ends with:\n" + "\n".join(lines) if lines else f" {log} is empty"

"""Real, slow networks on one machine: hosts are network namespaces, joined by rate-limited links through a switch.

Every host has one interface (a veth) with an address of its own; the other end is a port of a bridge in a namespace of
its own, so nothing appears among the machine's own interfaces. A token bucket (tbf) at both ends limits what a host
sends and what it receives. Processes in a host use it exactly as they would use a machine.

What is counted. The rate is that of Ethernet: it includes the headers of every packet of 1500 bytes, so TCP's goodput
is 1448/1514 = 95.6 % of it. The interface counts what the kernel hands it: up to 16 KiB of payload under one header,
which makes its bytes 1.005 times the payload. Linux and root are needed, and ``ip`` and ``tc``; torch is not.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from sweep.bench.processes import (
    POLL_SECONDS,
    NetworkUnavailable,
    Signals,
    batch,
    end,
    kill,
    raise_failures,
    start,
    tail,
    tool,
)

INTERFACE = "eth0"
MAX_HOSTS = 254
# tbf splits packets larger than its bucket, and every part is counted with a header, so the bucket must hold them; and
# what it holds passes at once, which shows in short messages. Packets of 16 KiB allow a bucket of 32 KiB: 3 % of 1 MiB.
PACKET_BYTES = 16 * 1024
BURST_BYTES = 32 * 1024
BURST_SECONDS = 0.25e-3  # above 1 Gbit/s: as late as timers are
QUEUE_BYTES = 512 * 1024
QUEUE_SECONDS = 0.05
_PREFIX = "tsr-bench"
_OWNED = re.compile(rf"{_PREFIX}-(?P<pid>\d+)-(?P<started>\d+)-")
_serial = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins each host to the switch, in both directions.

    Attributes:
        rate_mbit: In 10⁶ bit/s, or ``None`` for no limit.
        delay_ms: What every packet waits on its way from one host to another; needs the kernel's netem.

    Raises:
        ValueError: If a value is out of its range.
    """

    rate_mbit: float | None
    delay_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.rate_mbit is not None and not _between(self.rate_mbit, 0.1, 100_000):
            raise ValueError(
                f"link.rate_mbit must be between 0.1 and 100000, or None for no limit, got {self.rate_mbit!r}"
            )
        if not _between(self.delay_ms, 0, 10_000):
            raise ValueError(f"link.delay_ms must be between 0 and 10000, got {self.delay_ms!r}")

    def bucket(self) -> str:
        """What ``tc`` calls the queue that limits the rate."""
        assert self.rate_mbit is not None
        bytes_per_second = self.rate_mbit * 1e6 / 8
        burst = max(BURST_BYTES, round(bytes_per_second * BURST_SECONDS))
        limit = max(QUEUE_BYTES, round(bytes_per_second * QUEUE_SECONDS))
        return f"tbf rate {self.rate_mbit * 1e6:.0f}bit burst {burst} limit {limit}"

    def delay(self) -> str:
        """What ``tc`` calls the queue that delays; 10⁵ packets on their way at once are 1.6 GB."""
        return f"netem delay {self.delay_ms:g}ms limit 100000"


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What an interface has sent and received, headers included, since it was made."""

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int

    def __sub__(self, earlier: Counters) -> Counters:
        names = [field.name for field in fields(self)]
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class Network:
    """Hosts that stand as long as the ``with`` block lasts, which must be in the main thread.

    Entering removes first what dead processes left behind, processes and namespaces. A first SIGINT or SIGTERM raises
    ``Interrupted``, another one nothing; after the block, the first has the consequence that it would have had outside.

    Attributes:
        hosts: Their number.
        link: What joins them now.
        addresses: The hosts' IPv4 addresses, by host.
        interface: The name of every host's interface.

    Raises:
        ValueError: If ``hosts`` is not between 1 and 254.
        NetworkUnavailable: On entering, if no such network can be made here; ``why_not`` tells before.
    """

    def __init__(self, *, hosts: int, link: Link) -> None:
        if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts must be an integer between 1 and {MAX_HOSTS}, got {hosts!r}")
        self.hosts = hosts
        self.link = link
        self.addresses = [f"10.77.0.{host + 1}" for host in range(hosts)]
        self.interface = INTERFACE
        self._prefix = ""
        self._signals = Signals()

    def __enter__(self) -> Network:
        _require_tools()
        self._signals.install()
        try:
            remove_leftovers()
            _require_delay(self.link)
            self._prefix = _new_prefix()
            self._make()
            self._shape(self.link)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def set_link(self, link: Link) -> None:
        """Replace every host's link; what waits in the queues is lost, so no process should be talking.

        Raises:
            NetworkUnavailable: If the kernel cannot delay packets and ``link`` does.
        """
        _require_delay(link)
        self._shape(link)
        self.link = link

    def counters(self) -> list[Counters]:
        """Each host's interface, by host; a process in the host reads its own by ``interface_counters``."""
        return [
            _parse_counters(tool("ip", "netns", "exec", self._host(host), "cat", "/proc/net/dev"), INTERFACE)
            for host in range(self.hosts)
        ]

    def dropped(self) -> list[int]:
        """Packets that the queues of each host dropped, on both ways, since its link was last changed."""
        return [
            sum(
                queue.get("drops", 0)
                for namespace, device in self._ends(host)
                for queue in json.loads(tool("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", device))
            )
            for host in range(self.hosts)
        ]

    def run(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        log_dir: Path,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> list[Path]:
        """Run one process on each host and wait for all of them.

        If one fails, what still runs in any host is ended: by SIGTERM, and what is left 5 s later by SIGKILL.

        Args:
            command: The program and its arguments, by host.
            log_dir: Gets what each process prints, as ``host<i>.log``.
            timeout_s: Seconds for all of them together.
            env: Variables besides those of this process.

        Returns:
            The logs, by host.

        Raises:
            HostFailed: If a process ends with another status than 0; names the host, the status and the end of the log.
            TimeoutError: If they have not all ended in time.
        """
        log_dir.mkdir(parents=True, exist_ok=True)
        logs = [log_dir / f"host{host}.log" for host in range(self.hosts)]
        deadline = time.monotonic() + timeout_s
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for host, log in enumerate(logs):
                processes.append(start(command(host), namespace=self._host(host), log=log, env=env or {}))
            while running := [host for host, process in enumerate(processes) if process.poll() is None]:
                raise_failures(processes, logs)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"after {timeout_s:g} s host {running[0]} still runs;{tail(logs[running[0]])}")
                time.sleep(POLL_SECONDS)
            raise_failures(processes, logs)
        except BaseException:
            with self._signals.held():
                end(processes, [self._host(host) for host in range(self.hosts)])
            raise
        return logs

    def _host(self, host: int) -> str:
        return f"{self._prefix}h{host}"

    def _ends(self, host: int) -> tuple[tuple[str, str], tuple[str, str]]:
        """Namespace and device of both ends of a host's link: its own, and the switch's port."""
        return (self._host(host), INTERFACE), (f"{self._prefix}switch", f"port{host}")

    def _make(self) -> None:
        switch = f"{self._prefix}switch"
        batch("ip", [f"netns add {name}" for name in (switch, *map(self._host, range(self.hosts)))])
        # Without multicast and IPv6 addresses nobody looks for neighbours: the counters hold the workers' bytes alone.
        quiet = "multicast off addrgenmode none"
        bridge = ["link add bridge type bridge mcast_snooping 0", f"link set bridge {quiet}", "link set bridge up"]
        batch("ip", bridge, namespace=switch)
        for host, address in enumerate(self.addresses):
            _, (_, port) = self._ends(host)
            lines = [
                "link set lo up",
                f"link add {INTERFACE} type veth peer name {port} netns {switch}",
                f"link set {INTERFACE} gso_max_size {PACKET_BYTES} {quiet}",
                f"link set {INTERFACE} up",
                f"address add {address}/24 dev {INTERFACE}",
            ]
            batch("ip", lines, namespace=self._host(host))
            lines = [f"link set {port} gso_max_size {PACKET_BYTES} {quiet}", f"link set {port} master bridge up"]
            batch("ip", lines, namespace=switch)

    def _shape(self, link: Link) -> None:
        """Put the queues of ``link`` at both ends of every host's link, in place of those that are there."""
        for host in range(self.hosts):
            for (namespace, device), delayed in zip(self._ends(host), (link.delay_ms > 0, False), strict=True):
                lines = [f"qdisc replace dev {device} root noqueue"]
                if delayed:
                    lines.append(f"qdisc replace dev {device} root handle 1: {link.delay()}")
                if link.rate_mbit is not None:
                    lines.append(f"qdisc replace dev {device} {'parent 1:1' if delayed else 'root'} {link.bucket()}")
                batch("tc", lines, namespace=namespace)

    def _close(self) -> None:
        self._signals.hold()
        try:
            _remove(name for name in _namespaces() if self._prefix and name.startswith(self._prefix))
        finally:
            self._signals.restore()


def why_not() -> str | None:
    """Why no network can be made here, in one sentence, or ``None``. Makes the smallest one, and removes it."""
    try:
        with Network(hosts=1, link=Link(rate_mbit=100)):
            return None
    except NetworkUnavailable as error:
        return str(error)


def remove_leftovers() -> None:
    """Remove the networks of processes that are dead, with every process that still runs in them."""
    _remove(name for name in _namespaces() if (owner := _OWNED.match(name)) and not _alive(**owner.groupdict()))


def interface_counters(interface: str = INTERFACE) -> Counters:
    """What an interface of the calling process's own host has sent and received."""
    return _parse_counters(Path("/proc/self/net/dev").read_text(), interface)


def socket_bytes(pids: Iterable[int]) -> dict[int, int]:
    """The bytes that each process's TCP sockets have sent so far, without headers: what is left to see without root.

    A socket that closes takes its count along, so this is read while the sockets are open; a process without any has 0.
    Only processes of this user (of any, for root) in this network namespace are seen. What was sent twice counts twice.

    Raises:
        NetworkUnavailable: If ``ss`` is missing.
    """
    if shutil.which("ss") is None:
        raise NetworkUnavailable("ss, which counts the bytes of TCP sockets, is not installed (package iproute2)")
    sent = dict.fromkeys(pids, 0)
    for line in tool("ss", "-tinpHO").splitlines():
        count = re.search(r"\bbytes_sent:(\d+)", line)
        owners = [int(pid) for pid in re.findall(r"\bpid=(\d+)", line)]
        owner = next((pid for pid in owners if pid in sent), None)  # a socket of several processes counts once
        if count and owner is not None:
            sent[owner] += int(count[1])
    return sent


def _between(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _require_tools() -> None:
    if sys.platform != "linux":
        raise NetworkUnavailable("a network of hosts on one machine needs Linux")
    if os.geteuid() != 0:
        raise NetworkUnavailable("a network of hosts on one machine needs root, as network namespaces do")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NetworkUnavailable(f"a network of hosts on one machine needs {' and '.join(missing)} (package iproute2)")


def _require_delay(link: Link) -> None:
    if not link.delay_ms:
        return
    probe = f"{_new_prefix()}probe"
    try:
        tool("ip", "netns", "add", probe)
        batch("tc", [f"qdisc add dev lo root {link.delay()}"], namespace=probe)
    except NetworkUnavailable as error:
        reason = f"link.delay_ms must be 0 here, got {link.delay_ms!r}: the kernel cannot delay packets; {error}"
        raise NetworkUnavailable(reason) from None
    finally:
        _remove([probe])


def _new_prefix() -> str:
    """What the names of a network's namespaces begin with: they tell whether its process still lives."""
    return f"{_PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_serial)}-"


def _start_time(pid: int) -> str | None:
    """When a process started, in ticks since the machine did: no other has the same pid and time. ``None``: dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *after = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if state in "ZX" else after[18]


def _alive(pid: str, started: str) -> bool:
    return _start_time(int(pid)) == started


def _namespaces() -> list[str]:
    return [line.split()[0] for line in tool("ip", "netns", "list").splitlines()]


def _remove(namespaces: Iterable[str]) -> None:
    """Remove namespaces, with all devices and queues in them, after whatever runs there.

    Another process may be removing the same leftovers: what is gone already is no error.
    """
    names = list(namespaces)
    kill(names)
    for name in names:
        tool("ip", "netns", "del", name, check=False)
    if left := set(names).intersection(_namespaces()):
        raise NetworkUnavailable(f"these namespaces cannot be removed: {', '.join(sorted(left))}")


def _parse_counters(net_dev: str, interface: str) -> Counters:
    """An interface's line of ``/proc/net/dev``: bytes and packets come first of the 8 numbers of each direction."""
    for line in net_dev.splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            values = [int(number) for number in numbers.split()]
            return Counters(rx_bytes=values[0], rx_packets=values[1], tx_bytes=values[8], tx_packets=values[9])
    raise ValueError(f"interface must be one of this host's, got {interface!r}")

"""Hosts in network namespaces: what their links let through, what is counted, and that nothing of them is left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sweep.bench.network import BURST_BYTES, PACKET_BYTES, Link, Network, remove_leftovers, socket_bytes, why_not
from sweep.bench.processes import HostFailed, NetworkUnavailable

ROOT = Path(__file__).parents[1]
LIGHT_PYTHON = [sys.executable, "-I", "-S"]
# The receiver confirms each message when it has all of it; the sender prints when it began and had the answer.
TRANSFER = """
import socket, sys, threading, time
host, address, direction, size, messages, others = int(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
def receive(connection):
    for _ in range(messages):
        left = size
        while left:
            left -= len(connection.recv(min(left, 1 << 20)))
        connection.sendall(b".")
def send(connection):
    for _ in range(messages):
        start = time.monotonic()
        connection.sendall(bytes(size))
        connection.recv(1)
        sys.stdout.write(f"{start} {time.monotonic()}\\n")
if host == 0:
    server = socket.create_server((address, 5000))
    for connection in [server.accept()[0] for _ in range(others)]:
        threading.Thread(target=receive if direction == "to 0" else send, args=(connection,)).start()
else:
    while True:
        try:
            connection = socket.create_connection((address, 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    (send if direction == "to 0" else receive)(connection)
"""
# A bench whose workers ignore SIGTERM, one of them a grandchild in a session of its own.
BENCH = """
import signal, sys
from pathlib import Path
from sweep.bench import network, processes
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background jobs ignore it
processes.STOP_SECONDS = 1.0
link = network.Link(rate_mbit=100)
with network.Network(hosts=2, link=link) as standing:
    worker = sys.argv[2]
    standing.run(lambda host: ["sh", "-c", worker], log_dir=Path(sys.argv[1]), timeout_s=600)
"""
STUBBORN = "trap '' TERM; setsid sleep 600 & echo $!; echo $$; wait"
POLITE = "sleep 600 & echo $!; echo $$; wait"

outliving = pytest.mark.skipif(
    shutil.which("setpriv") is None, reason="setpriv, which ends workers with their parent, is missing"
)


@pytest.fixture(scope="module")
def possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"tsr-bench-{pid}-")]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_until_gone(processes: list[int]) -> None:
    """They leave the namespace before they are gone, and a killed process needs the processor to go."""
    wait_until(lambda: not any(map(runs, processes)))


def pids(logs: list[Path]) -> list[int]:
    return [
        int(line)
        for log in logs
        if log.exists()
        for line in log.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


@contextmanager
def bench(logs: Path, *, worker: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with a network of two hosts, and the pids of the two processes on each."""
    files = [logs / f"host{host}.log" for host in range(2)]
    command = [sys.executable, "-c", BENCH, str(logs), worker]
    with subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE) as process:
        try:
            wait_until(lambda: len(pids(files)) == 4 or process.poll() is not None)
            assert process.poll() is None, process.communicate()[1]
            yield process, pids(files)
        finally:
            process.kill()
            process.communicate()
            remove_leftovers()


def transfer(
    network: Network, logs: Path, *, size: int, messages: int = 1, direction: str = "to 0"
) -> list[tuple[float, float]]:
    """When each message between host 0 and the others began and was answered, in seconds of one clock."""

    def command(host: int) -> list[str]:
        arguments = (host, network.addresses[0], direction, size, messages, network.hosts - 1)
        return [*LIGHT_PYTHON, "-c", TRANSFER, *map(str, arguments)]

    lines = [line for log in network.run(command, log_dir=logs, timeout_s=120) for line in log.read_text().splitlines()]
    return [(float(start), float(end)) for start, end in map(str.split, lines)]


def shortest(times: list[tuple[float, float]]) -> float:
    return min(end - start for start, end in times)


def physical(size: int, *, rate_mbit: float) -> float:
    """Seconds in which a message can get through at the earliest: what the bucket does not hold waits for the rate."""
    return (size - BURST_BYTES) * 8 / (rate_mbit * 1e6)


@pytest.mark.usefixtures("possible")
def test_the_interfaces_count_what_a_process_sends(tmp_path: Path) -> None:
    size = 3_000_000
    with Network(hosts=2, link=Link(rate_mbit=100)) as network:
        before = network.counters()
        transfer(network, tmp_path, size=size)
        after = network.counters()
        receiver, sender = (late - early for late, early in zip(after, before, strict=True))
        assert size < sender.tx_bytes < 1.015 * size  # a header for every 1448 bytes would make it 1.046
        assert receiver.rx_bytes == sender.tx_bytes
        assert 0 < receiver.tx_bytes == sender.rx_bytes < 0.03 * size  # acknowledgements
        assert size / PACKET_BYTES < sender.tx_packets == receiver.rx_packets < size / 1448
        assert network.dropped() == [0, 0]

        script = "from sweep.bench.network import interface_counters; print(interface_counters())"
        environment = {"PYTHONPATH": str(ROOT)}
        logs = network.run(lambda host: [sys.executable, "-c", script], log_dir=tmp_path, timeout_s=60, env=environment)
        assert [log.read_text().strip() for log in logs] == [str(counters) for counters in after]


@pytest.mark.usefixtures("possible")
def test_nothing_but_the_workers_bytes_is_counted() -> None:
    with Network(hosts=3, link=Link(rate_mbit=100)) as network:
        time.sleep(2)
        assert {host.tx_bytes + host.rx_bytes for host in network.counters()} == {0}


@pytest.mark.usefixtures("possible")
def test_a_link_lets_its_rate_through_and_no_more(tmp_path: Path) -> None:
    with Network(hosts=2, link=Link(rate_mbit=10)) as network:
        assert shortest(transfer(network, tmp_path, size=1_000_000)) >= physical(1_000_000, rate_mbit=10)
        network.set_link(Link(rate_mbit=None))
        assert network.link == Link(rate_mbit=None)
        assert shortest(transfer(network, tmp_path, size=1_000_000, messages=3)) < physical(1_000_000, rate_mbit=10)
        network.set_link(Link(rate_mbit=100))
        seconds = shortest(transfer(network, tmp_path, size=8_000_000, messages=3))
        assert seconds >= physical(8_000_000, rate_mbit=100)
        assert 8_000_000 * 8 / seconds > 80e6  # 95.6 where nothing else runs


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("direction", ["to 0", "from 0"])
def test_a_host_has_one_link_for_all_others(direction: str, tmp_path: Path) -> None:
    with Network(hosts=3, link=Link(rate_mbit=20)) as network:
        times = transfer(network, tmp_path, size=1_000_000, direction=direction)
    assert len(times) == 2
    assert max(end for _, end in times) - min(start for start, _ in times) >= physical(2_000_000, rate_mbit=20)


@pytest.mark.usefixtures("possible")
def test_a_packet_is_delayed_or_the_reason_given(tmp_path: Path) -> None:
    with ExitStack() as stack:
        try:
            network = stack.enter_context(Network(hosts=2, link=Link(rate_mbit=None, delay_ms=30)))
        except NetworkUnavailable as error:
            assert str(error).startswith("link.delay_ms must be 0 here, got 30: the kernel cannot delay packets")
            assert namespaces(os.getpid()) == []
            return
        assert shortest(transfer(network, tmp_path, size=1)) >= 0.06  # there and back


@pytest.mark.usefixtures("possible")
def test_a_failing_process_ends_the_others_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sweep.bench.processes.STOP_SECONDS", 1.0)
    others = f"[ -s {tmp_path}/host0.log ] && [ -s {tmp_path}/host2.log ]"
    failing = f"until {others}; do sleep 0.05; done; echo no such tensor; exit 3"
    scripts = [STUBBORN, failing, f"trap 'touch {tmp_path}/asked; exit' TERM; {POLITE}"]
    with Network(hosts=3, link=Link(rate_mbit=None)) as network:
        with pytest.raises(HostFailed, match="no such tensor") as caught:
            network.run(lambda host: ["sh", "-c", scripts[host]], log_dir=tmp_path, timeout_s=600)
        assert str(caught.value).startswith(f"host 1 ended with exit status 3; {tmp_path}/host1.log ends with:")
        assert "host 0" not in str(caught.value) and "host 2" not in str(caught.value)
        started = pids([tmp_path / "host0.log", tmp_path / "host2.log"])
        assert len(started) == 4
        wait_until_gone(started)
        assert (tmp_path / "asked").exists()
        # The network goes on.
        logs = network.run(
            lambda host: ["sh", "-c", f"echo $WORD {host}"], log_dir=tmp_path, timeout_s=60, env={"WORD": "host"}
        )
        assert [log.read_text() for log in logs] == ["host 0\n", "host 1\n", "host 2\n"]


@pytest.mark.usefixtures("possible")
def test_a_killed_process_is_named_with_its_signal(tmp_path: Path) -> None:
    with (
        Network(hosts=1, link=Link(rate_mbit=None)) as network,
        pytest.raises(HostFailed, match=rf"host 0 ended with SIGKILL; {tmp_path}/host0.log is empty"),
    ):
        network.run(lambda host: ["sh", "-c", "kill -9 $$"], log_dir=tmp_path, timeout_s=60)


@pytest.mark.usefixtures("possible")
def test_what_does_not_end_in_time_is_ended(tmp_path: Path) -> None:
    scripts = ["exit 0", POLITE]
    with Network(hosts=2, link=Link(rate_mbit=None)) as network:
        with pytest.raises(TimeoutError, match=r"after 1 s host 1 still runs"):
            network.run(lambda host: ["sh", "-c", scripts[host]], log_dir=tmp_path, timeout_s=1)
        wait_until_gone(pids([tmp_path / "host1.log"]))


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_and_has_its_usual_consequence(number: signal.Signals, tmp_path: Path) -> None:
    with bench(tmp_path, worker=STUBBORN) as (process, workers):
        assert len(namespaces(process.pid)) == 3
        process.send_signal(number)
        time.sleep(0.3)
        process.send_signal(number)  # while it cleans up
        assert process.wait(60) == -number
        assert namespaces(process.pid) == []
        wait_until_gone(workers)


@pytest.mark.usefixtures("possible")
def test_a_second_signal_interrupts_no_cleaning_up() -> None:
    script = (
        "import signal; from sweep.bench.network import Link, Network\n"
        "from sweep.bench.processes import Interrupted\n"
        "with Network(hosts=1, link=Link(rate_mbit=None)):\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    except Interrupted:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "        print('cleaned up', flush=True)\n"
        "print('not reached', flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == "cleaned up\n"
        assert process.returncode == -signal.SIGTERM
        assert namespaces(process.pid) == []


@pytest.mark.usefixtures("possible")
def test_a_start_removes_what_the_dead_left_and_nothing_of_the_living(tmp_path: Path) -> None:
    with (
        bench(tmp_path / "dead", worker=STUBBORN) as (dead, leftover),
        bench(tmp_path / "living", worker=POLITE) as (living, workers),
    ):
        dead.kill()
        wait_until(lambda: not runs(dead.pid))
        assert len(namespaces(dead.pid)) == 3
        assert all(map(runs, leftover))
        with Network(hosts=1, link=Link(rate_mbit=None)):
            assert namespaces(dead.pid) == []
            wait_until_gone(leftover)
            assert why_not() is None  # makes and removes a network of its own
            assert len(namespaces(os.getpid())) == 2
        assert len(namespaces(living.pid)) == 3
        assert all(map(runs, workers))


@pytest.mark.usefixtures("possible")
@outliving
def test_workers_end_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    with bench(tmp_path, worker="echo $$; exec sh -c 'echo $$; sleep 600 & wait'") as (process, workers):
        process.kill()
        wait_until_gone(workers)


@outliving
def test_workers_on_loopback_end_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_text(f'{os.getpid()}\\n')\n"
        "time.sleep(600)\n"
    )
    launcher = (
        "import sys; from pathlib import Path; from sweep.bench.cells import Loopback, launch; "
        "launch(Loopback(2), [sys.argv[1]], log_dir=Path(sys.argv[1]).parent)"
    )
    files = [tmp_path / rank for rank in "01"]
    with subprocess.Popen([sys.executable, "-c", launcher, str(script)], cwd=ROOT) as process:
        try:
            wait_until(lambda: len(pids(files)) == 2 or process.poll() is not None)
            assert process.poll() is None
        finally:
            process.kill()
        wait_until_gone(pids(files))


@pytest.mark.parametrize("value", [0, -1, 1e6, float("nan"), True, "100"])
def test_a_rate_must_be_a_rate(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"link.rate_mbit must be between 0.1 and 100000, or None.*got {value!r}"):
        Link(rate_mbit=value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), None])
def test_a_delay_must_be_a_delay(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"link.delay_ms must be between 0 and 10000, got {value!r}"):
        Link(rate_mbit=100, delay_ms=value)


@pytest.mark.parametrize("value", [0, 255, 2.0, True])
def test_hosts_must_be_some(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"hosts must be an integer between 1 and 254, got {value!r}"):
        Network(hosts=value, link=Link(rate_mbit=100))


def test_a_user_without_root_is_told() -> None:
    script = "import os; from sweep.bench.network import why_not; os.geteuid() or os.setuid(65534); print(why_not())"
    told = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told == "a network of hosts on one machine needs root, as network namespaces do\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="without root, that is the reason given")
def test_missing_tools_and_refusals_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "a network of hosts on one machine needs ip and tc (package iproute2)"
    for name in ("ip", "tc"):
        (tmp_path / name).write_text("#!/bin/sh\n[ $1 != -batch ] || { echo Operation not permitted >&2; exit 1; }\n")
        (tmp_path / name).chmod(0o755)
    told = why_not()
    assert told is not None
    assert told.startswith("`ip -batch -` with `netns add tsr-bench-")
    assert told.endswith("failed: Operation not permitted")


def test_importing_it_does_not_import_torch() -> None:
    script = "import sys, sweep.bench.network; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("ss") is None, reason="ss, which counts the bytes of sockets, is missing")
def test_the_bytes_of_a_process_s_sockets_are_counted() -> None:
    size = 1_000_000
    script = (
        "import socket, sys\n"
        "links = [socket.create_connection(('127.0.0.1', int(sys.argv[1]))) for _ in range(2)]\n"
        "for link in links: link.sendall(bytes(int(sys.argv[2])))\n"
        "sys.stdin.read()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [*LIGHT_PYTHON, "-c", script, str(server.getsockname()[1]), str(size)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as sender, ExitStack() as stack:
            for connection in [stack.enter_context(server.accept()[0]) for _ in range(2)]:
                left = size
                while left:
                    left -= len(connection.recv(left))
            sent = socket_bytes([sender.pid, 1])
            assert 2 * size <= sent[sender.pid] <= 1.03 * 2 * size  # more if some was sent twice
            assert sent.keys() == {sender.pid, 1}
            sender.communicate()
            assert socket_bytes([sender.pid]) == {sender.pid: 0}


def test_sockets_cannot_be_counted_without_ss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkUnavailable, match="ss, which counts the bytes of TCP sockets, is not installed"):
        socket_bytes([os.getpid()])

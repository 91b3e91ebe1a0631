"""What does steering cost, and does every connection arrive where it should?

  python -m benchmarks.steering --json      (root: it makes network namespaces with a veth between, and removes them)

"table_write_us": moving one group, that is `Nic.follow`, for each implementation that this machine has;
"port_search_us": the source ports of 128 groups. "cpu_ratio": CPU-seconds per GB of one TCP flow over veth through
the kernel's table / plain veth, alternating, the median of the pairs' ratios; the CPU time is the whole machine's, so
it must be quiet. "alignment": of an engine's connections with 4 producers, those that arrived on the core of their
group's worker, by the port they chose (target: 1.0).
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks import harness
from benchmarks.harness import Cores
from flexstream.errors import ConfigError
from flexstream.nic.contract import Nic, Steering
from flexstream.nic.ethtool import EthtoolNic
from flexstream.nic.kernel_table import KernelNic
from flexstream.nic.rss.ports import PortChooser, candidate_ports
from flexstream.nic.rss.toeplitz import DEFAULT_KEY
from flexstream.nic.user import UserNic
from tests.nic.netns import Pair, Process, heard, say, started_inside, veth_pair

GROUPS, PRODUCERS = 128, 4
METHODS = ("tcx", "xdp")
BUFFER = 1 << 18
TOKEN = "benchmark"
STREAM = fs.Stream("s", {"t": "timestamp[ms]", "k": "i32", "x": "i64"}, key="k", time="t")
SO_INCOMING_CPU = 49


def median_us(action: Callable[[int], object], times: int) -> float:
    taken = []
    for turn in range(times):
        began = time.perf_counter_ns()
        action(turn)
        taken.append((time.perf_counter_ns() - began) / 1e3)
    return harness.median(taken)


# -- the table


def moves(nic: Nic, times: int) -> float:
    placements = [[group % 2 for group in range(GROUPS)] for _ in range(2)]
    placements[1][7] = 0
    nic.follow(placements[0])
    return median_us(lambda turn: nic.follow(placements[1 - turn % 2]), times)


def table_writes(device: str, cores: Cores, times: int) -> tuple[dict[str, float | None], dict[str, str]]:
    """Runs inside the namespace. Microseconds per implementation, and why those without a number have none."""
    found: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    makers: dict[str, Callable[[], Nic]] = {
        "ethtool": lambda: EthtoolNic(device, groups=GROUPS),
        "kernel, tcx": lambda: KernelNic(device, groups=GROUPS, method="tcx"),
        "kernel, xdp": lambda: KernelNic(device, groups=GROUPS, method="xdp"),
        "user": lambda: UserNic(GROUPS, [cores.sender, cores.receiver]),
    }
    for name, make in makers.items():
        found[name] = None
        try:
            with contextlib.closing(make()) as nic, socket.create_server(("127.0.0.1", 0), reuse_port=True) as first:
                nic.require("write_table")
                nic.start([cores.sender, cores.receiver])
                more = nic.listeners(first) or []
                found[name] = moves(nic, times)
                for listener in more:
                    listener.close()
        except ConfigError as error:
            reasons[name] = error.message
    return found, reasons


def port_search(times: int) -> float:
    steering = Steering(DEFAULT_KEY, ("src_ip", "dst_ip", "src_port", "dst_port"), 128, GROUPS)
    groups = range(GROUPS)
    return median_us(lambda turn: candidate_ports(steering, f"10.0.{turn % 250}.2", ("10.9.0.1", 7400), groups), times)


# -- bytes


def busy_s() -> float:
    """CPU time of the whole machine so far, without idling."""
    with open("/proc/stat") as stat:
        ticks = [int(word) for word in stat.readline().split()[1:]]
    return float(sum(ticks[:3]) + sum(ticks[5:7])) / os.sysconf("SC_CLK_TCK")


def receive(pair: Pair, cores: Cores, folder: Path) -> None:
    """Runs inside the server's namespace: orders are (method or "plain", bytes)."""
    os.sched_setaffinity(0, {cores.receiver})
    buffer = bytearray(BUFFER)
    address = pair.server_addresses[0]
    while (order := heard()) is not None:
        method, size = order
        with socket.create_server((address, 0)) as listener, contextlib.ExitStack() as stack:
            steering: Steering | None = None
            if method != "plain":
                nic = KernelNic(pair.server_device, groups=2, method=method, journal_folder=folder)
                stack.callback(nic.close)
                nic.start([cores.sender, cores.receiver])
                nic.listeners(listener)
                nic.follow([0, 1])
                steering = nic.steering()
            say((address, listener.getsockname()[1], steering))
            connection, _ = listener.accept()
            stack.enter_context(connection)
            left, busy, began = size, busy_s(), time.perf_counter()
            while left and (received := connection.recv_into(buffer)):
                left -= received
            answer = {
                "cpu_s_per_gb": (busy_s() - busy) / size * 1e9,
                "gb_per_s": size / (time.perf_counter() - began) / 1e9,
                "core": connection.getsockopt(socket.SOL_SOCKET, SO_INCOMING_CPU),
            }
        say(answer)


def send(source: str, cores: Cores) -> None:
    """Runs inside the client's namespace: orders are (address, port, steering, bytes). The flow is of group 1."""
    os.sched_setaffinity(0, {cores.sender})
    data = bytes(BUFFER)
    while (order := heard()) is not None:
        address, port, steering, size = order
        with socket.socket() as connection:
            if steering is not None:
                PortChooser(steering, (source, 0), source, (address, port)).bind(connection, 1)
            connection.connect((address, port))
            for _ in range(size // BUFFER):
                connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)


@contextlib.contextmanager
def wire(pair: Pair, cores: Cores, folder: Path) -> Iterator[Callable[[str, int], dict[str, Any]]]:
    with (
        started_inside(pair.server, receive, pair, cores, folder) as receiver,
        started_inside(pair.client, send, pair.client_addresses[0], cores) as sender,
    ):

        def transfer(method: str, size: int) -> dict[str, Any]:
            receiver.channel.send((method, size))
            sender.channel.send((*receiver.said(), size))
            answer: dict[str, Any] = receiver.said()
            return answer

        yield transfer


def bytes_through(pair: Pair, cores: Cores, folder: Path, size: int, pairs: int, until: float) -> list[dict[str, Any]]:
    cases = []
    with wire(pair, cores, folder) as transfer:
        for method in METHODS:
            transfer("plain", size // 4)  # warm up
            measured = harness.alternate(
                pairs, partial(transfer, method, size), partial(transfer, "plain", size), until=until
            )
            ratios = [ours["cpu_s_per_gb"] / plain["cpu_s_per_gb"] for ours, plain in measured]
            case: dict[str, Any] = {"name": method, "cpu_ratio": harness.median(ratios)}
            case["spread"] = harness.spread(ratios)
            for key in ("cpu_s_per_gb", "gb_per_s"):
                case[key] = harness.median([ours[key] for ours, _ in measured])
                case[f"plain_{key}"] = harness.median([plain[key] for _, plain in measured])
            case["on_the_right_core"] = sum(ours["core"] == cores.receiver for ours, _ in measured) / len(measured)
            cases.append(case)
    return cases


# -- alignment


def serve(nic: str, listen: str, cores: Cores, folder: Path) -> dict[str, Any]:
    os.environ["FLEXSTREAM_NIC_DIR"] = str(folder)
    workers = sorted({cores.sender, cores.receiver})
    with fs.Engine(workers, groups=GROUPS, listen=listen, nic=nic, token=TOKEN, balance="off") as engine:
        engine.add(STREAM)
        say((engine.data_address or ("", 0))[1])
        heard()
        return engine.status()


def produce(address: str, producer: int) -> None:
    rows = np.zeros(100_000, STREAM.schema.dtype)
    rows["k"] = np.arange(len(rows)) + producer
    with fs.Producer(f"tcp://{address}", stream=STREAM, token=TOKEN, connect_timeout_s=30) as sender:
        sender.send(rows)
        sender.flush()
        say("sent")
        heard()


def alignment(pair: Pair, cores: Cores, folder: Path) -> dict[str, Any]:
    host = pair.server_addresses[0]
    with started_inside(pair.server, serve, f"kernel:{pair.server_device}", f"{host}:0", cores, folder) as engine:
        address = f"{host}:{engine.said()}"
        with contextlib.ExitStack() as stack:
            producers: list[Process] = [
                stack.enter_context(started_inside(pair.client, produce, address, producer))
                for producer in range(PRODUCERS)
            ]
            for producer in producers:
                producer.said()
            time.sleep(2.5)  # the engine compares arrivals with the table once a second
            engine.channel.send("status")
            status: dict[str, Any] = engine.result()
    connections = status["connections"]
    return {
        "alignment": connections["alignment"],
        "aligned": connections["aligned"],
        "misaligned": connections["misaligned"],
        "state": status["nic"]["state"],
    }


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=9)
    if os.geteuid() != 0:
        raise SystemExit("benchmarks.steering makes network namespaces: run it as root")
    until = harness.start("steering")
    cores = Cores.pick()
    times, size = (50, 1 << 28) if options.quick else (1000, 1 << 31)
    with tempfile.TemporaryDirectory() as folder, veth_pair() as pair:
        with started_inside(pair.server, table_writes, pair.server_device, cores, times) as process:
            writes, reasons = process.result()
        search_us = port_search(times)
        cases = bytes_through(pair, cores, Path(folder), size, options.pairs, until - 60)
        arrived = alignment(pair, cores, Path(folder))
    harness.print_table(
        ("table write", "us"), [[name, reasons.get(name, "-") if us is None else us] for name, us in writes.items()]
    )
    print(f"port search for {GROUPS} groups: {search_us:.0f} us")
    harness.print_table(
        ("veth through", "CPU-s/GB / plain", "quartiles", "CPU-s/GB", "plain", "GB/s", "plain", "right core"),
        [
            [c["name"], c["cpu_ratio"], c["spread"], c["cpu_s_per_gb"], c["plain_cpu_s_per_gb"], c["gb_per_s"],
             c["plain_gb_per_s"], c["on_the_right_core"]]
            for c in cases
        ],
    )  # fmt: skip
    print(f"{PRODUCERS} producers: {arrived['aligned']} aligned, {arrived['misaligned']} not; NIC {arrived['state']}")
    result = {
        "benchmark": "steering",
        "alignment": arrived["alignment"],
        "cpu_ratio": cases[0]["cpu_ratio"],
        "table_write_us": writes,
        "table_write_reasons": reasons,
        "port_search_us": search_us,
        "veth": cases,
        "arrivals": arrived,
    }
    harness.finish(result, as_json=options.json, target=("alignment", 1.0))


if __name__ == "__main__":
    main()

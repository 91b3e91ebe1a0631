"""The real engine behind a table in the kernel, fed by real producers from another namespace. Needs root, two cores."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.testing import run
from tests.nic.bad_wire import bad_wire
from tests.nic.netns import Pair, Process, heard, run_inside, say, started_inside, veth_pair
from tests.property.checks import FINISH_S, as_rows, assert_same_results
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.slow]

STREAM = fs.Stream("s", {"t": "timestamp[ms]", "k": "i32", "x": "i64"}, key="k", time="t")
QUERY = STREAM.query("q").window(fs.tumbling("1s")).agg(n=fs.count(), x=fs.sum("x"))
GROUPS = 64
PRODUCERS = 4
PATIENCE_S = 120.0  # four processes start, and lost packets are sent again after a second
TOKEN = "a token, because the address is not loopback's"


def rows_of(producer: int, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, producer])
    rows = np.zeros(count, STREAM.schema.dtype)
    rows["t"] = np.sort(rng.integers(0, 20_000, count))
    rows["k"] = rng.integers(0, 500, count)
    rows["x"] = rng.integers(-1000, 1000, count)
    return rows


def serve(nic: str, listen: str, folder: Path) -> dict[str, Any]:
    """An engine inside the namespace; answers orders until it is told to finish."""
    os.environ["FLEXSTREAM_NIC_DIR"] = str(folder)
    with fs.Engine(
        [0, 1], groups=GROUPS, listen=listen, nic=nic, token=TOKEN, expected_producers=PRODUCERS, balance="off"
    ) as engine:
        engine.add(STREAM)
        engine.submit(QUERY)
        assert engine.acceptor is not None
        say(engine.acceptor.address[1])
        while (order := heard()) != "finish":
            if order == "flip":  # every packet now arrives on the wrong core; the sockets stay with their workers
                table = engine.nic.nic.table()
                engine.nic.nic.set_table([1 - queue for queue in table])
            elif order == "back":
                engine.nic.follow(engine.placement())
            say(engine.status())
        engine.finish(timeout=FINISH_S * 2)
        return {"results": as_rows(engine.results("q")), "status": engine.status()}


def produce(address: str, producer: int, count: int, seed: int, pause_s: float, wait: bool) -> None:
    """Sends; with `wait`, it stays connected after most of it until it is told to go on."""
    *parts, last = np.array_split(rows_of(producer, count, seed), 20)
    with fs.Producer(f"tcp://{address}", stream=STREAM, token=TOKEN, connect_timeout_s=60) as sender:
        for part in parts:
            sender.send(part)
            time.sleep(pause_s)
        sender.flush()
        if wait:
            say("sent")
            heard()
        sender.send(last)


def status_of(engine: Process, order: str = "status") -> dict[str, Any]:
    engine.channel.send(order)
    status: dict[str, Any] = engine.said()
    return status


def assert_equals_the_oracle(outcome: dict[str, Any], count: int, seed: int) -> None:
    expected = run(QUERY, np.concatenate([rows_of(producer, count, seed) for producer in range(PRODUCERS)]))
    assert_same_results(QUERY, outcome["results"], expected.windows)
    ledger = outcome["status"]["streams"]["s"]["ledger"]
    assert ledger["received"] == ledger["accepted"] == PRODUCERS * count


def listen_address(pair: Pair, version: int) -> str:
    return pair.server_addresses[0] if version == 4 else f"[{pair.server_addresses[1]}]"


def go(pair: Pair, version: int, folder: Path, seed: int, *, count: int, disturb: bool) -> dict[str, Any]:
    host = listen_address(pair, version)
    spec = f"kernel:{pair.server_device}"
    with started_inside(pair.server, serve, spec, f"{host}:0", folder) as engine:
        address = f"{host}:{engine.said()}"
        with contextlib.ExitStack() as stack:
            senders = [
                stack.enter_context(
                    started_inside(pair.client, produce, address, producer, count, seed, 0.1 * disturb, True)
                )
                for producer in range(PRODUCERS)
            ]
            if disturb:
                wait_until(lambda: status_of(engine)["connections"]["open"] > GROUPS, "rows", seconds=PATIENCE_S)
                for order in ("flip", "back"):
                    status_of(engine, order)
                    time.sleep(0.3)
            for sender in senders:
                assert sender.said(timeout_s=PATIENCE_S) == "sent"
            if not disturb:
                wait_until(lambda: status_of(engine)["nic"]["state"] == "verified", "traffic to verify the table")
            for sender in senders:
                sender.channel.send("go on")
            for sender in senders:
                sender.result(timeout_s=PATIENCE_S)
        engine.channel.send("finish")
        outcome: dict[str, Any] = engine.result(timeout_s=PATIENCE_S)
    assert_equals_the_oracle(outcome, count, seed)
    return outcome


@pytest.mark.parametrize("version", [4, 6])
def test_every_connection_is_aligned_and_the_results_are_the_oracles(version: int, tmp_path: Path, seed: int) -> None:
    with veth_pair() as pair:
        outcome = go(pair, version, tmp_path, seed, count=20_000, disturb=False)
    connections, nic = outcome["status"]["connections"], outcome["status"]["nic"]
    assert connections["alignment"] == 1.0, connections
    assert connections["aligned"] >= PRODUCERS * GROUPS
    assert nic["kind"] == "kernel"
    assert nic["device"] == pair.server_device
    assert nic["passed_over"] == []
    assert nic["fallbacks"] == 0
    assert list(tmp_path.iterdir()) == [], "the journal is empty: everything was put back"


def test_a_table_rewritten_under_load_on_a_bad_wire_loses_nothing(tmp_path: Path, seed: int) -> None:
    with veth_pair() as pair, bad_wire(pair) as how:
        print("the wire:", how)
        go(pair, 4, tmp_path, seed, count=5_000, disturb=True)


def test_a_device_that_vanishes_costs_alignment_and_no_record(tmp_path: Path, seed: int) -> None:
    """The producers come by loopback: they outlive the device, and so must every row."""
    count = 5_000
    with veth_pair() as pair:
        spec = f"kernel:{pair.server_device}"
        with started_inside(pair.server, serve, spec, "0.0.0.0:0", tmp_path) as engine:
            address = f"127.0.0.1:{engine.said()}"
            assert status_of(engine)["nic"]["kind"] == "kernel"
            for producer in range(PRODUCERS):
                if producer == 2:
                    pair.server.ip("link", "del", pair.server_device)
                    wait_until(lambda: status_of(engine)["nic"]["kind"] != "kernel", "the engine to fall back")
                run_inside(pair.server, produce, address, producer, count, seed, 0.0, False)
            nic = status_of(engine)["nic"]
            engine.channel.send("finish")
            outcome = engine.result(timeout_s=PATIENCE_S)
    assert_equals_the_oracle(outcome, count, seed)
    assert nic["kind"] == "user"
    assert f"kernel:{pair.server_device}: gone" in nic["passed_over"][0]


def test_a_named_table_that_cannot_be_had_is_refused_with_the_reason(tmp_path: Path) -> None:
    with veth_pair() as pair:
        reason = run_inside(pair.server, refused, "kernel:nosuch0", f"{pair.server_addresses[0]}:0", tmp_path)
    assert "nosuch0" in reason
    assert pair.server_device in reason


def refused(nic: str, listen: str, folder: Path) -> str:
    os.environ["FLEXSTREAM_NIC_DIR"] = str(folder)
    with pytest.raises(fs.FlexStreamError) as caught:
        fs.Engine([0, 1], groups=GROUPS, listen=listen, nic=nic, token=TOKEN)
    return str(caught.value)


def automatic(listen: str, folder: Path) -> tuple[dict[str, Any], list[str]]:
    os.environ["FLEXSTREAM_NIC_DIR"] = str(folder)
    with fs.Engine([0, 1], groups=GROUPS, listen=listen, nic="auto", token=TOKEN, balance="off") as engine:
        return engine.status()["nic"], [str(change) for change in engine.nic.nic.changes()]


def test_auto_finds_the_table_in_the_kernel_and_says_what_it_passed_over(tmp_path: Path) -> None:
    with veth_pair() as pair:
        nic, changes = run_inside(pair.server, automatic, f"{pair.server_addresses[0]}:0", tmp_path)
    assert (nic["kind"], nic["device"]) == ("kernel", pair.server_device)
    assert len(nic["passed_over"]) == 1
    assert f"ethtool:{pair.server_device}" in nic["passed_over"][0]
    assert any("rps_cpus" in change for change in changes)

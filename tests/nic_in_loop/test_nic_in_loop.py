"""The NIC does the shuffle: every step of key -> group -> connection -> bucket -> queue -> core, on a real driver.

The tests run in order on one guest. What they compare is asked of the kernel (ethtool, /proc, the sockets), not of
FlexStream.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nic_in_loop import observed
from tests.nic_in_loop.machine import CACHE, DEVICE, PROJECT, QUEUES, Guest
from tests.nic_in_loop.network import HOST_IPV4, HOST_IPV6
from tests.nic_in_loop.served import GROUPS, WORKERS, Command, Daemon, flexstream, serve
from tests.nic_in_loop.traffic import QUERY, Sender, check_results, next_offset, sending, wait_until

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.time_limit(1800)]

ROUNDS = 4
STRAY_PACKETS, STRAY_PACKETS_PER_S = 8, 2  # the control connection and neighbour discovery go where they like
PEERS = {"IPv4": HOST_IPV4, "IPv6": HOST_IPV6}
ALL = range(GROUPS)
GROUP = 37  # the one that moves
SAID = CACHE / "said"


@pytest.fixture(scope="module")
def before(guest: Guest) -> dict[str, str | None]:
    """The device's settings before FlexStream touched it: unusual ones."""
    observed.make_unusual(guest)
    return observed.settings(guest)


@pytest.fixture(scope="module")
def daemon(guest: Guest, before: dict[str, str | None]) -> Iterator[Daemon]:
    served = serve(guest)
    served.post("/v1/queries", QUERY.to_dict())
    yield served
    served.kill()


@pytest.fixture(scope="module")
def napi_of_queue() -> dict[int, int]:
    """Queue -> NAPI id, as first seen; it stays the same for the life of the device."""
    return {}


def test_the_daemon_pins_interrupts_and_workers_and_writes_the_table(
    guest: Guest, daemon: Daemon, before: dict[str, str | None]
) -> None:
    status = daemon.get("/v1/status")
    assert status["nic"]["kind"] == "ethtool"
    assert status["nic"]["device"] == DEVICE
    cores = [worker["cpu"] for worker in status["workers"]]
    assert cores == list(range(WORKERS))
    assert observed.queue_cores(guest) == cores
    for worker in status["workers"]:
        assert observed.thread_cores(guest, daemon.pid, worker["thread_id"]) == str(worker["cpu"])
    table = observed.table(guest)
    assert table == [status["placement"][entry % GROUPS] for entry in range(len(table))]
    assert len(observed.differences(before, observed.settings(guest))) > 1


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_every_group_arrives_on_its_queue_and_is_processed_on_that_core(
    guest: Guest, daemon: Daemon, napi_of_queue: dict[int, int], facts: list[str], family: str
) -> None:
    table, key = observed.table(guest), observed.key(guest)
    with sending(daemon, family) as sender:
        sender.send(ALL)
        for queue in range(QUEUES):
            groups = [group for group in ALL if table[group] == queue]
            packets, rows = _deltas(guest, daemon, sender, groups, ROUNDS, queue)
            assert rows == [2 * ROUNDS * len(groups) if worker == queue else 0 for worker in range(WORKERS)]
            facts.append(f"{family}: rows of the {len(groups)} groups of queue {queue}: packets {packets}, rows {rows}")
        arrived = _arrived(guest, daemon, family, key, table)
        assert len(arrived) == GROUPS + 1, "a connection for each group, and the control connection"
        assert {connection["bucket"] for connection in arrived} == set(range(len(table)))
        _check_napi_and_core(guest, arrived, napi_of_queue)
    seen = daemon.get("/v1/status")
    assert seen["connections"]["alignment"] == 1.0
    assert wait_until(lambda: daemon.get("/v1/nic")["nic"]["state"] == "verified", "a verified device")
    facts.append(f"{family}: {len(arrived)} connections: NAPI ids of queues {napi_of_queue}, alignment 1.0, verified")


def _deltas(
    guest: Guest, daemon: Daemon, sender: Sender, groups: list[int], rounds: int, queue: int
) -> tuple[list[int], list[int]]:
    """Packets per queue and rows per worker that these groups' rows caused; the packets must be on this queue."""
    began = time.monotonic()
    packets, rows = observed.queue_packets(guest), daemon.worker_rows()
    sent = sender.send(groups, rounds)
    wait_until(lambda: sum(daemon.worker_rows()) >= sum(rows) + sent, "the workers to have the rows")
    arrived = [new - old for old, new in zip(packets, observed.queue_packets(guest), strict=True)]
    elsewhere = sum(arrived) - arrived[queue]
    assert arrived[queue] >= rounds * len(groups), arrived
    assert elsewhere <= STRAY_PACKETS + STRAY_PACKETS_PER_S * (time.monotonic() - began), arrived
    return arrived, [new - old for old, new in zip(rows, daemon.worker_rows(), strict=True)]


def _arrived(guest: Guest, daemon: Daemon, family: str, key: bytes, table: list[int]) -> list[dict[str, Any]]:
    """The daemon's connections, each with its bucket and predicted queue."""
    found = [connection for connection in daemon.connections() if connection["peer"][0] == PEERS[family]]
    for connection in found:
        connection["bucket"] = observed.bucket(key, len(table), connection)
        connection["queue"] = table[connection["bucket"]]
    return found


def _check_napi_and_core(guest: Guest, arrived: list[dict[str, Any]], napi_of_queue: dict[int, int]) -> None:
    """Each connection's last packet came over the predicted queue: its NAPI id, and the core it is pinned to."""
    cores = observed.queue_cores(guest)
    for connection in arrived:
        queue = connection["queue"]
        assert connection["napi"] == napi_of_queue.setdefault(queue, connection["napi"]), connection
        assert connection["cpu"] == cores[queue], connection
    assert len(set(napi_of_queue.values())) == len(napi_of_queue)


def test_a_foreign_write_of_one_entry_moves_the_live_group_and_is_noticed(
    guest: Guest, daemon: Daemon, napi_of_queue: dict[int, int], facts: list[str]
) -> None:
    table, key = observed.table(guest), observed.key(guest)
    old = table[GROUP]
    worker = daemon.get("/v1/status")["placement"][GROUP]
    with sending(daemon) as sender:
        sender.send([GROUP])
        moved = list(table)
        try:
            for new in ((old + step) % QUEUES for step in (1, 2)):
                moved[GROUP] = new
                guest.call("set_table", DEVICE, moved)
                packets, rows = _deltas(guest, daemon, sender, [GROUP], 20, new)
                assert rows == [40 if index == worker else 0 for index in range(WORKERS)], "placement is the truth"
                here = [c for c in _arrived(guest, daemon, "IPv4", key, moved) if c["bucket"] == GROUP]
                assert napi_of_queue[new] in {connection["napi"] for connection in here}
                facts.append(f"entry {GROUP} rewritten from queue {old} to {new}: packets {packets}, rows {rows}")
            noticed = wait_until(lambda: daemon.get("/v1/nic")["nic"]["drift"], "the daemon to notice the table")
            assert "table" in " ".join(noticed)
            assert "nic_changed_by_somebody_else" in guest.call("read", daemon.log)
        finally:
            guest.call("set_table", DEVICE, table)
        wait_until(lambda: not daemon.get("/v1/nic")["nic"]["drift"], "the drift to end")
        sender.send(ALL)
    facts.append(f"the foreign change was noticed: {noticed}")


def test_moving_a_live_group_moves_its_queue_and_its_worker(
    guest: Guest, daemon: Daemon, napi_of_queue: dict[int, int], facts: list[str]
) -> None:
    key = observed.key(guest)
    with sending(daemon) as sender:
        sender.send(ALL)
        home = daemon.get("/v1/status")["placement"][GROUP]
        for target in [*((home + step) % WORKERS for step in (1, 2, 3)), home]:
            daemon.post("/v1/rebalance/move", {"group": GROUP, "worker": target})
            sender.send([GROUP], 3)  # on the way
            wait_until(lambda to=target: daemon.get("/v1/status")["placement"][GROUP] == to, "the new placement")
            wait_until(lambda to=target: observed.table(guest)[GROUP] == to, "the table to follow")
            sender.send([GROUP])
            packets, rows = _deltas(guest, daemon, sender, [GROUP], 20, target)
            assert rows == [40 if index == target else 0 for index in range(WORKERS)]
            arrived = _arrived(guest, daemon, "IPv4", key, observed.table(guest))
            here = [c for c in arrived if c["bucket"] == GROUP]
            assert napi_of_queue[target] in {connection["napi"] for connection in here}
            facts.append(f"group {GROUP} moved to worker {target}: packets {packets}, rows {rows}")
        sender.send(ALL)
    assert daemon.get("/v1/nic")["nic"]["drift"] == []


def test_a_new_key_is_survived_and_reaches_the_next_producer(guest: Guest, daemon: Daemon, facts: list[str]) -> None:
    old = observed.key(guest)
    new = bytes((byte * 5 + 17) % 256 for byte in old)
    offset = next_offset(daemon)
    with Sender("IPv4") as first:
        first.send(ALL)
        try:
            guest.run("ethtool", "-X", DEVICE, "hkey", new.hex(":"))
            assert observed.key(guest) == new
            first.send(ALL, 2)
            noticed = wait_until(lambda: daemon.get("/v1/nic")["nic"]["drift"], "the daemon to notice the key")
            assert "key" in " ".join(noticed)
            wait_until(lambda: daemon.get("/v1/nic")["nic"]["steering"]["key"] == new.hex(), "the daemon to tell it")
            ports = {connection["peer"][1] for connection in daemon.connections()}
            with Sender("IPv4") as second:
                second.send(ALL, 2)
                arrived = _arrived(guest, daemon, "IPv4", new, observed.table(guest))
            buckets = Counter(connection["bucket"] for connection in arrived if connection["peer"][1] not in ports)
            assert set(buckets) == set(ALL), "each group of the second producer is in its bucket of the new key"
            assert buckets.total() == GROUPS + 1
            first.send(ALL)
        finally:
            guest.run("ethtool", "-X", DEVICE, "hkey", old.hex(":"))
        first.send(ALL)
    check_results(daemon, offset, first, second)
    wait_until(lambda: not daemon.get("/v1/nic")["nic"]["drift"], "the drift to end")
    facts.append(f"a new key was noticed and used by the next producer: {noticed}")


def test_doctor_and_nic_show_say_what_the_kernel_says(guest: Guest, daemon: Daemon) -> None:
    said = {
        "show.json": flexstream(guest, "nic", "show", DEVICE, "--json"),
        "show.txt": flexstream(guest, "nic", "show", DEVICE),
        "doctor.txt": Command(guest, "doctor").said(check=False).out,
    }
    for name, text in said.items():
        (SAID / name).parent.mkdir(parents=True, exist_ok=True)
        (SAID / name).write_text(text)  # docs/nic.md shows them
    shown = json.loads(said["show.json"])
    irqs, cores = observed.queue_interrupts(guest), observed.queue_cores(guest)
    assert shown["table"] == observed.table(guest)
    assert shown["key"] == observed.key(guest).hex(":")
    assert shown["queue_irq"] == {str(queue): irq for queue, irq in irqs.items()}
    assert shown["queue_cpus"] == {str(queue): [core] for queue, core in enumerate(cores)}
    assert (shown["driver"], shown["queues"], shown["up"], shown["hash"]) == ("virtio_net", QUEUES, True, "toeplitz")
    assert shown["aligned"] is True
    assert shown["held_by"] == daemon.pid
    assert sum(shown["queue_packets"]) > 0
    assert all(then <= now for then, now in zip(shown["queue_packets"], observed.queue_packets(guest), strict=True))
    assert shown["rss_by"]["read"] == shown["rss_by"]["write"] == "ioctl", "Linux 6.1 has no RSS over netlink"
    for text in (said["show.txt"], said["doctor.txt"]):
        assert DEVICE in text
        assert "virtio_net" in text
    assert observed.key(guest).hex(":") in said["show.txt"]
    assert f"{len(shown['table'])} entries over {QUEUES} queues" in said["doctor.txt"]
    assert f"{QUEUES} of {QUEUES} queues pinned to one core" in said["doctor.txt"]
    _check_page(said["show.txt"] + said["doctor.txt"])


def _check_page(said: str) -> None:
    """docs/nic.md shows what the guest says today, but for numbers."""
    page = (PROJECT / "docs" / "nic.md").read_text()
    block = next(block for block in page.split("```")[1::2] if "in use by the flexstream daemon" in block)
    shown = {line for line in map(_without_numbers, block.splitlines()) if line and not line.startswith(("$", "..."))}
    assert shown <= {_without_numbers(line) for line in said.splitlines()}


def _without_numbers(line: str) -> str:
    return " ".join(re.sub(r"\d+", "N", re.sub(r"[0-9a-f]{2}(:[0-9a-f]{2}){4,}", "KEY", line)).split())


def test_a_clean_stop_puts_everything_back(guest: Guest, daemon: Daemon, before: dict[str, str | None]) -> None:
    assert daemon.stop() == 0
    assert observed.differences(before, observed.settings(guest)) == []


def test_undo_after_kill_9_puts_everything_back(guest: Guest, before: dict[str, str | None], facts: list[str]) -> None:
    killed = serve(guest)
    changed = observed.differences(before, observed.settings(guest))
    assert killed.kill() == -9
    assert observed.differences(before, observed.settings(guest)) == changed != []
    flexstream(guest, "nic", "undo")
    assert observed.differences(before, observed.settings(guest)) == []
    facts.append(f"{len(changed)} settings put back after a clean stop, and after kill -9 and undo")


def test_fewer_channels_underneath_and_a_link_that_goes_down_cost_no_row(guest: Guest, facts: list[str]) -> None:
    daemon = serve(guest, data_dir="/run/tmp/bad-days")
    try:
        daemon.post("/v1/queries", QUERY.to_dict())
        with sending(daemon) as sender:
            sender.send(ALL)
            guest.run("ethtool", "-X", DEVICE, "default")  # the driver keeps queues that a table names
            guest.run("ethtool", "-L", DEVICE, "combined", "2")  # and drops its table with the channels, silently
            wait_until(lambda: "channels: 4 -> 2" in guest.call("read", daemon.log), "the daemon to notice")

            def settled() -> Any:
                sender.send(ALL)
                nic = daemon.get("/v1/nic")["nic"]
                return nic if nic["fallbacks"] or (nic["state"] == "verified" and not nic["drift"]) else None

            nic = wait_until(settled, "a table that is obeyed, or another implementation")
            assert nic["kind"] == "ethtool" or any("disobeyed" in why for why in nic["passed_over"]), nic
            guest.run("ip", "link", "set", DEVICE, "down")
            wait_until(lambda: f"{DEVICE} is down" in json.dumps(daemon.get("/v1/nic")), "the daemon to notice")
            guest.run("ip", "link", "set", DEVICE, "up")
            sender.send(ALL, 2)
        facts.append(f"channels 4 -> 2: {nic['kind']} after {nic['passed_over']}; link down and up: no row lost")
    finally:
        daemon.kill()
        guest.run("ethtool", "-L", DEVICE, "combined", str(QUEUES))


def test_a_table_that_two_queues_cannot_hold_keeps_neither_undo_nor_serve_from_working(
    guest: Guest, facts: list[str]
) -> None:
    observed.make_unusual(guest)  # queues 0 to 2
    try:
        killed = serve(guest, data_dir="/run/tmp/fewer")
        guest.run("ethtool", "-X", DEVICE, "default")
        guest.run("ethtool", "-L", DEVICE, "combined", "2")
        assert killed.kill() == -9
        said = flexstream(guest, "nic", "undo")
        assert "the old table names queue 2, but the device now has 2 receive queues" in said
        assert set(observed.table(guest)) == {0, 1}
        again = serve(guest, data_dir="/run/tmp/fewer")
        assert again.get("/v1/nic")["nic"]["kind"] == "ethtool"
        assert again.stop() == 0
        facts.append(f"4 channels -> 2 under the daemon, then undo: {said.splitlines()[-1]}")
    finally:
        guest.run("ethtool", "-L", DEVICE, "combined", str(QUEUES))


def test_offloads_that_generic_xdp_switches_off_come_back(guest: Guest, facts: list[str]) -> None:
    """Linux 6.1 has no tcx: the kernel's table is generic XDP there."""
    before = observed.settings(guest)
    assert re.search(r"rx-gro-hw: on", str(before["ethtool -k"]))
    for ended in ("stop", "kill"):
        daemon = Daemon(guest, "--nic", f"kernel:{DEVICE}", data_dir="/run/tmp/xdp")
        assert re.search(r"rx-gro-hw: off", str(observed.settings(guest)["ethtool -k"]))
        getattr(daemon, ended)()
        if ended == "kill":
            assert "feature rx-gro-hw: off -> on" in flexstream(guest, "nic", "undo")
        assert observed.differences(before, observed.settings(guest)) == []
    facts.append("rx-gro-hw is off under generic XDP, and on again after a stop, and after kill -9 and undo")

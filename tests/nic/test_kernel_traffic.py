"""The table in the kernel obeys, shown with real connections over veth and loopback. Needs root and two cores."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from flexstream.nic.contract import Verdict
from tests.nic.bad_wire import bad_wire, retransmissions
from tests.nic.flows import eventually_arrives_on, rig
from tests.nic.netns import Pair, run_inside, veth_pair

pytestmark = pytest.mark.root

WAYS = [(device, method, family) for device in ("veth", "lo") for method in ("tcx", "xdp") for family in (4, 6)]
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


def name_of(way: tuple[str, str, int]) -> str:
    return f"{way[0]}-{way[1]}-ipv{way[2]}"


@pytest.fixture(params=WAYS, ids=name_of)
def way(request: pytest.FixtureRequest) -> tuple[str, str, int]:
    found: tuple[str, str, int] = request.param
    return found


def device_of(pair: Pair, device: str) -> str:
    return pair.server_device if device == "veth" else "lo"


def every_group_on_its_core(pair: Pair, way: tuple[str, str, int], folder: Path) -> None:
    device, method, family = way
    with rig(pair, device_of(pair, device), folder, method=method, family=FAMILIES[family]) as here:
        assert here.nic.health().state == "unverified"
        for group in range(128):
            here.connect(group).send(5000)
        for flow in here.flows:
            assert flow.bucket % 128 == flow.group
            assert flow.core == flow.group % 2, f"group {flow.group}"
        found = here.nic.verify([flow.connection() for flow in here.flows])
        assert found.verdict is Verdict.VERIFIED, found
        assert found.checked == 128
        assert here.nic.health().state == "verified"
        assert here.nic.disobeyed_packets() == 0
        counters = here.nic.bucket_counters()
        assert all(counters[flow.bucket] >= 3 for flow in here.flows), counters  # SYN, ACK, data


def test_every_group_arrives_on_the_predicted_core(way: tuple[str, str, int], tmp_path: Path) -> None:
    with veth_pair() as pair:
        run_inside(pair.server, every_group_on_its_core, pair, way, tmp_path)


def rewritten_entries_move_live_flows(pair: Pair, way: tuple[str, str, int], folder: Path, seed: int) -> None:
    device, method, family = way
    rng = random.Random(seed)
    with rig(pair, device_of(pair, device), folder, method=method, family=FAMILIES[family], groups=16) as here:
        flows = [here.connect(group) for group in range(16)]
        placement = [group % 2 for group in range(16)]
        for _ in range(12):
            moved = rng.randrange(16)
            placement[moved] = 1 - placement[moved]
            here.nic.follow(placement)
            for flow in flows:
                eventually_arrives_on(flow, placement[flow.group])
        table = here.nic.table()
        assert all(table[entry] == placement[entry % 16] for entry in range(128))


def test_a_rewritten_entry_moves_a_live_flow_and_no_other(way: tuple[str, str, int], tmp_path: Path, seed: int) -> None:
    with veth_pair() as pair:
        run_inside(pair.server, rewritten_entries_move_live_flows, pair, way, tmp_path, seed)


def counters_are_the_packets_of_the_bucket(pair: Pair, device: str, method: str, folder: Path) -> None:
    with rig(pair, device, folder, method=method) as here:
        flow = here.connect(5)
        flow.send(100)
        before = here.nic.bucket_counters()
        for _ in range(50):
            flow.send(100)
        after = here.nic.bucket_counters()
        moved = {bucket: after[bucket] - before[bucket] for bucket in range(128) if after[bucket] != before[bucket]}
        assert list(moved) == [flow.bucket]
        assert 50 <= moved[flow.bucket] <= 200  # each send is a packet, acknowledgements may be packets of their own
        with socket.create_server((here.address, 0)) as other:  # a port that is not ours
            with pair.client_socket(socket.AF_INET) as client:
                client.connect(other.getsockname())
                client.sendall(b"not ours")
            other.accept()[0].close()
        assert sum(here.nic.bucket_counters()) == sum(after)


@pytest.mark.parametrize("method", ["tcx", "xdp"])
def test_counters_count_the_packets_of_the_data_port(method: str, tmp_path: Path) -> None:
    with veth_pair() as pair:
        run_inside(pair.server, counters_are_the_packets_of_the_bucket, pair, pair.server_device, method, tmp_path)


def survives_a_bad_wire(pair: Pair, method: str, folder: Path) -> None:
    with rig(pair, pair.server_device, folder, method=method, groups=8) as here:
        flows = [here.connect(group) for group in range(8)]
        placement = [group % 2 for group in range(8)]
        for _ in range(3):
            placement = [1 - worker for worker in placement]
            here.nic.follow(placement)
            for flow in flows:
                flow.send(100_000)
                eventually_arrives_on(flow, placement[flow.group])
        assert here.nic.verify([flow.connection() for flow in flows]).verdict is Verdict.VERIFIED


@pytest.mark.time_limit(150)
@pytest.mark.parametrize("method", ["tcx", "xdp"])
def test_delay_and_loss_change_nothing(method: str, tmp_path: Path) -> None:
    with veth_pair() as pair, bad_wire(pair) as how:
        print("the wire:", how)
        run_inside(pair.server, survives_a_bad_wire, pair, method, tmp_path)
        assert retransmissions(pair.client) > 0, "nothing was lost: the wire was not bad"


def pinning_moves_a_queue(pair: Pair, method: str, folder: Path) -> None:
    with rig(pair, pair.server_device, folder, method=method, groups=4) as here:
        flows = [here.connect(group) for group in range(4)]
        here.nic.pin(0, 1)
        assert here.nic.queue_cpu() == (1, 1)
        for flow in flows:
            eventually_arrives_on(flow, 1)
        here.nic.pin(0, 0)
        here.nic.pin(1, 0)
        for flow in flows:
            eventually_arrives_on(flow, 0)
        with pytest.raises(Exception, match="online"):
            here.nic.pin(0, 4095)
        assert here.nic.queue_cpu() == (0, 0)
        for flow in flows:
            eventually_arrives_on(flow, 0)


@pytest.mark.parametrize("method", ["tcx", "xdp"])
def test_a_queue_can_be_pinned_to_another_core(method: str, tmp_path: Path) -> None:
    with veth_pair() as pair:
        run_inside(pair.server, pinning_moves_a_queue, pair, method, tmp_path)

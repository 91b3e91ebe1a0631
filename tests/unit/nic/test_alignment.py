"""What is said and counted about connections: real sockets, a promise, and what became of it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import pytest

from flexstream.nic.alignment import Alignment, Arrival, observed_bucket
from flexstream.nic.contract import FOUR_TUPLE, Steering, entries_for
from flexstream.nic.rss.ports import Promise
from flexstream.nic.rss.toeplitz import DEFAULT_KEY, bucket_of

STEERING = Steering(DEFAULT_KEY, FOUR_TUPLE, 128, 128)
PLACEMENT = [group % 4 for group in range(128)]
TABLE = entries_for(PLACEMENT, 128, 4)
LOCAL = ("10.0.0.1", 7400)


def arrival(
    port: int = 40000, *, host: str = "10.0.0.2", promise: Promise | None = None, home: str | None = None, **more: int
) -> Arrival:
    peer = (host, port)
    group = more.pop("group", bucket_of(DEFAULT_KEY, peer, LOCAL, 128))
    return Arrival(peer, LOCAL, group, PLACEMENT[group], promise=promise, home=home, **more)


def test_a_connection_in_its_groups_bucket_is_aligned() -> None:
    seen = Alignment()
    assert seen.ratio is None
    assert seen.counts()["alignment"] is None
    assert seen.arrived(3, arrival(), STEERING, TABLE) == (True, False)
    right = arrival()
    assert seen.arrived(4, arrival(group=(right.group + 1) % 128), STEERING, TABLE) == (False, False)
    assert (seen.aligned, seen.misaligned, seen.ratio) == (1, 1, 0.5)


def test_another_bucket_that_leads_to_the_same_worker_is_aligned_too() -> None:
    seen = Alignment()
    group = arrival().group
    assert seen.arrived(3, arrival(group=(group + 4) % 128), STEERING, TABLE)[0]


def test_without_a_table_or_steering_nothing_is_aligned() -> None:
    seen = Alignment()
    assert not seen.arrived(3, arrival(), STEERING, None)[0]
    assert not seen.arrived(4, arrival(), None, None)[0]
    six = Arrival(("fd00::2", 1), ("fd00::1", 2), 0, 0)
    short = Steering(DEFAULT_KEY[:16], FOUR_TUPLE, 128, 128)
    assert observed_bucket(short, six) is None, "a key for IPv4 only"
    assert not seen.arrived(5, six, short, TABLE)[0]


def test_a_listener_decides_where_each_worker_has_one() -> None:
    seen = Alignment()
    right = arrival()
    assert seen.arrived(3, arrival(listener=right.owner), None, None)[0]
    assert not seen.arrived(4, arrival(listener=(right.owner + 1) % 4), STEERING, TABLE)[0]


def test_nat_is_said_once_per_peer(caplog: pytest.LogCaptureFixture) -> None:
    seen = Alignment()
    with caplog.at_level(logging.INFO, "flexstream.nic"):
        for port in (40001, 40002, 40003):
            broken = Promise(1234, (arrival(port).group + 1) % 128)
            assert seen.arrived(port, arrival(port, promise=broken), STEERING, TABLE)[1] is False
        seen.arrived(9, arrival(40001, host="10.0.0.3", promise=Promise(77, 200)), STEERING, TABLE)
    said = [record.fields["peer"] for record in caplog.records if record.message == "behind_nat"]  # type: ignore[attr-defined]
    assert said == ["10.0.0.2", "10.0.0.3"]
    assert seen.counts()["behind_nat"] == 4


def test_a_kept_port_in_another_bucket_is_old_steering_not_nat() -> None:
    seen = Alignment()
    group = arrival(40001).group
    assert seen.arrived(3, arrival(40001, promise=Promise(40001, (group + 1) % 128)), STEERING, TABLE)[1]
    assert seen.counts()["steered_by_old_table"] == 1
    assert seen.counts()["behind_nat"] == 0
    assert seen.arrived(4, arrival(40001, promise=Promise(40001, group)), STEERING, TABLE) == (True, False)


def test_another_address_with_the_port_kept_is_nat_not_old_steering(caplog: pytest.LogCaptureFixture) -> None:
    """A pool of addresses: the control connection went out by one, data connections by others, all ports kept."""
    seen = Alignment()
    with caplog.at_level(logging.INFO, "flexstream.nic"):
        for number in (3, 4):
            came = arrival(40001, host=f"10.0.0.{number}", promise=Promise(40001, 200), home="10.0.0.2")
            assert seen.arrived(number, came, STEERING, TABLE)[1] is False, "its steering is fine: no new one helps"
    assert (seen.counts()["behind_nat"], seen.counts()["steered_by_old_table"]) == (2, 0)
    [said] = [record.fields for record in caplog.records if record.message == "behind_nat"]  # type: ignore[attr-defined]
    assert (said["seen_address"], said["control_address"]) == ("10.0.0.3", "10.0.0.2")
    assert "address" in said["why"]
    lucky = arrival(40002, host="10.0.0.5", home="10.0.0.2")
    lucky = arrival(40002, host="10.0.0.5", home="10.0.0.2", promise=Promise(40002, lucky.group))
    assert seen.arrived(5, lucky, STEERING, TABLE) == (True, False)
    assert seen.counts()["behind_nat"] == 2


def test_open_connections_are_judged_again_and_those_of_listeners_are_not() -> None:
    seen = Alignment()
    seen.arrived(3, arrival(), STEERING, TABLE)
    seen.arrived(4, arrival(40001, listener=arrival(40001).owner), STEERING, TABLE)
    assert seen.ratio == 1.0
    seen.judge_again(STEERING, [9] * 128, PLACEMENT, "eth0")
    assert seen.ratio == 0.5
    seen.judge_again(None, None, PLACEMENT, "eth0")
    assert seen.ratio == 0.5
    seen.judge_again(STEERING, TABLE, PLACEMENT, "eth0")
    assert seen.ratio == 1.0
    seen.judge_again(STEERING, [9] * 128, PLACEMENT, "eth0")
    seen.forget(4)
    assert seen.ratio == 0.0
    seen.forget(3)
    assert seen.ratio == 1.0, "none is open: how they came"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted = server.accept()[0]
        with accepted:
            yield client, accepted


def test_samples_are_live_connections_with_data_since_the_last_change(pair) -> None:
    client, accepted = pair
    seen = Alignment()
    began = time.monotonic()
    here = Arrival(client.getsockname(), accepted.getsockname(), 5, 1, listener=1)
    seen.arrived(accepted.fileno(), here, STEERING, TABLE)
    client.sendall(b"x")
    accepted.recv(1)
    [found] = seen.sample(PLACEMENT, began - 10)
    assert (found.peer, found.group, found.worker, found.listener) == (client.getsockname(), 5, PLACEMENT[5], 1)
    assert found.incoming_cpu is not None
    assert found.napi_id is None, "loopback has no NAPI"
    assert seen.sample(PLACEMENT, time.monotonic() + 5) == [], "no data since the table was written"
    assert accepted.fileno() >= 0
    client.sendall(b"y")
    assert accepted.recv(1) == b"y", "sampling leaves the socket alone"
    seen.forget(accepted.fileno())
    seen.forget(accepted.fileno())
    assert seen.sample(PLACEMENT, 0.0) == []


def test_a_descriptor_that_is_no_socket_is_no_sample() -> None:
    seen = Alignment()
    with open("/dev/null") as other:
        seen.arrived(other.fileno(), arrival(), STEERING, TABLE)
        assert seen.sample(PLACEMENT, 0.0) == []

"""Does the device obey? Judged from live connections only; loopback and unpinned queues prove nothing."""

from __future__ import annotations

import pytest

from flexstream.nic.contract import FOUR_TUPLE, Connection, Steering, Verdict
from flexstream.nic.rss.toeplitz import DEFAULT_KEY, bucket_of
from flexstream.nic.verification import judge, judge_spread

TABLE = [entry % 4 for entry in range(128)]
STEERING = Steering(DEFAULT_KEY, FOUR_TUPLE, 128, 128)
LOCAL = ("192.0.2.1", 7400)
CORES = [10, 11, 12, 13]


def queue_of(port: int) -> int:
    return TABLE[bucket_of(DEFAULT_KEY, ("192.0.2.9", port), LOCAL, 128)]


def connection(port: int, *, queue: int | None = None, cpu: int | None = None, napi: int | None = None) -> Connection:
    where = queue_of(port) if queue is None else queue
    return Connection(
        ("192.0.2.9", port), LOCAL, 0, None, CORES[where] if cpu is None else cpu, 500 + where if napi is None else napi
    )


PORTS = range(50000, 50032)


def test_where_the_table_says_is_verified_with_the_number_of_connections() -> None:
    found = judge([connection(port) for port in PORTS], STEERING, TABLE, CORES, device="eth0")
    assert (found.verdict, found.checked) == (Verdict.VERIFIED, 32)


def test_all_on_queue_0_is_disobeyed_as_with_receive_hashing_off() -> None:
    found = judge([connection(port, queue=0) for port in PORTS], STEERING, TABLE, CORES, device="eth0")
    assert found.verdict is Verdict.DISOBEYED
    assert "arrived on core 10" in found.reason


def test_one_late_packet_among_many_is_tolerated() -> None:
    late = next(port for port in PORTS if queue_of(port) != 0)
    found = judge(
        [connection(port, queue=0 if port == late else None) for port in PORTS], STEERING, TABLE, CORES, device="eth0"
    )
    assert found.verdict is Verdict.VERIFIED


def test_one_connection_alone_does_not_condemn_a_device() -> None:
    port = next(port for port in PORTS if queue_of(port) != 0)
    found = judge([connection(port, queue=0)], STEERING, TABLE, CORES, device="eth0")
    assert found.verdict is Verdict.UNVERIFIED


@pytest.mark.parametrize("napi", [0])
def test_connections_that_came_by_no_queue_say_nothing(napi: int) -> None:
    found = judge([connection(port, cpu=0, napi=napi) for port in PORTS], STEERING, TABLE, CORES, device="eth0")
    assert (found.verdict, found.checked) == (Verdict.UNVERIFIED, 0)
    assert "NAPI" in found.reason
    assert judge([], STEERING, TABLE, CORES, device="eth0").verdict is Verdict.UNVERIFIED


def test_unpinned_queues_are_judged_by_napi_ids_alone() -> None:
    cores = [None] * 4
    good = judge([connection(port, cpu=1) for port in PORTS], STEERING, TABLE, cores, device="eth0")
    assert good.verdict is Verdict.VERIFIED
    bad = judge([connection(port, cpu=1, napi=500) for port in PORTS], STEERING, TABLE, cores, device="eth0")
    assert bad.verdict is Verdict.DISOBEYED
    mixed = judge(
        [connection(port, cpu=1, napi=500 + index % 4) for index, port in enumerate(PORTS)],
        STEERING,
        TABLE,
        cores,
        device="eth0",
    )
    assert mixed.verdict is Verdict.DISOBEYED


def test_one_unpinned_queue_cannot_be_compared_unless_the_kernel_names_its_napi() -> None:
    ports = [port for port in PORTS if queue_of(port) == 2]
    assert len(ports) > 2
    seen = [connection(port, cpu=1) for port in ports]
    cores = [None] * 4
    assert judge(seen, STEERING, TABLE, cores, device="eth0").verdict is Verdict.UNVERIFIED
    told = {0: 500, 1: 501, 2: 502, 3: 503}
    assert judge(seen, STEERING, TABLE, cores, device="eth0", queue_napi=told).verdict is Verdict.VERIFIED
    crossed = {0: 502, 1: 501, 2: 500, 3: 503}
    assert judge(seen, STEERING, TABLE, cores, device="eth0", queue_napi=crossed).verdict is Verdict.DISOBEYED


def test_ipv6_connections_count_too() -> None:
    local = ("2001:db8::1", 7400)
    seen = []
    for port in PORTS:
        queue = TABLE[bucket_of(DEFAULT_KEY, ("2001:db8::9", port), local, 128)]
        seen.append(Connection(("2001:db8::9", port), local, 0, None, CORES[queue], 500 + queue))
    assert judge(seen, STEERING, TABLE, CORES, device="eth0").verdict is Verdict.VERIFIED


# -- without a key: what is seen is all there is

WHY = "no alignment: driver vmxnet3 does not show its RSS key"


def spread(connections: list[Connection], table: list[int] = TABLE, cores: list[int | None] = CORES) -> Verdict:  # type: ignore[assignment]
    found = judge_spread(connections, table, cores, why=WHY)
    if found.verdict is Verdict.UNVERIFIED:
        assert WHY in found.reason
    return found.verdict


@pytest.mark.parametrize("napi", [None, 500])
def test_all_on_one_core_under_a_table_of_four_is_seen_through_without_a_key(napi: int | None) -> None:
    seen = [Connection(("192.0.2.9", port), LOCAL, 0, None, 10, napi) for port in PORTS]
    found = judge_spread(seen, TABLE, CORES, why=WHY)
    assert found.verdict is Verdict.DISOBEYED
    assert "32 of 32 connections arrived on core 10, but the table spreads them over 4 queues" in found.reason
    assert spread(seen[:5]) is Verdict.UNVERIFIED, "five may be an accident"


def test_several_cores_may_be_obedience_and_prove_nothing() -> None:
    assert spread([connection(port) for port in PORTS]) is Verdict.UNVERIFIED
    assert spread([]) is Verdict.UNVERIFIED


def test_a_table_of_one_queue_is_no_test() -> None:
    assert spread([connection(port, queue=2) for port in PORTS], [2] * 128) is Verdict.UNVERIFIED


def test_queues_that_are_not_pinned_are_told_apart_by_napi_ids_only() -> None:
    unpinned: list[int | None] = [None] * 4
    assert spread([connection(port, cpu=1, napi=500) for port in PORTS], TABLE, unpinned) is Verdict.DISOBEYED
    assert spread([connection(port, cpu=1) for port in PORTS], TABLE, unpinned) is Verdict.UNVERIFIED
    without = [Connection(("192.0.2.9", port), LOCAL, 0, None, 1, None) for port in PORTS]
    assert spread(without, TABLE, unpinned) is Verdict.UNVERIFIED, "one core may serve all interrupts"


def test_queues_that_share_a_core_count_as_one_place() -> None:
    seen = [Connection(("192.0.2.9", port), LOCAL, 0, None, 10, 500) for port in PORTS]
    assert spread(seen, TABLE, [10, 10, 10, 10]) is Verdict.UNVERIFIED


def test_cores_that_serve_no_queue_of_the_table_are_no_obedience() -> None:
    seen = [Connection(("192.0.2.9", port), LOCAL, 0, None, 20 + port % 3, None) for port in PORTS]
    assert spread(seen) is Verdict.DISOBEYED

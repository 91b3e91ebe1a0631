"""Does the device obey? Judged from live connections only; loopback and unpinned queues prove nothing."""

from __future__ import annotations

import pytest

from flexstream.nic.contract import FOUR_TUPLE, Connection, Steering, Verdict
from flexstream.nic.toeplitz import DEFAULT_KEY, bucket_of
from flexstream.nic.verification import judge

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

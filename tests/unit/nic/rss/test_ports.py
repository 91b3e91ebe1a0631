"""Ports for buckets: every candidate hashes to its group's bucket, and taken ports are passed over."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from flexstream.nic.contract import FOUR_TUPLE, TWO_TUPLE, Steering
from flexstream.nic.rss import ports as ports_module
from flexstream.nic.rss.ports import MOST_TRIES, PortChooser, Promise, candidate_ports, eligible_ports, local_port_range
from flexstream.nic.rss.toeplitz import DEFAULT_KEY, bucket_of


def steering(entries: int = 128, groups: int = 128, key: bytes = DEFAULT_KEY) -> Steering:
    return Steering(key, FOUR_TUPLE, entries, groups)


@pytest.mark.parametrize(
    ("entries", "groups"), [(128, 128), (128, 100), (128, 4), (64, 128), (1024, 16), (32, 100), (1, 5)]
)
@pytest.mark.parametrize(
    ("source", "destination"), [("127.0.0.1", ("127.0.0.1", 7400)), ("fd00::5", ("fd00::1", 7400))]
)
def test_every_candidate_lands_in_a_bucket_of_its_group(
    entries: int, groups: int, source: str, destination: tuple[str, int]
) -> None:
    known = steering(entries, groups)
    found = candidate_ports(known, source, destination, range(groups))
    rng = random.Random(1)
    for group, ports in found.items():
        assert len(ports), f"no port for group {group}"
        assert list(ports) == sorted(set(ports))
        for port in rng.sample(list(ports), min(5, len(ports))):
            assert bucket_of(known.key, (source, int(port)), destination, entries) in known.buckets_of(group)


def test_groups_have_disjoint_ports_that_together_are_all() -> None:
    found = candidate_ports(steering(), "10.0.0.1", ("10.0.0.2", 7400), range(128))
    together = np.concatenate(list(found.values()))
    assert sorted(together) == list(eligible_ports())


def test_the_destinations_own_port_is_left_out_so_that_no_socket_meets_itself() -> None:
    found = candidate_ports(steering(), "127.0.0.1", ("127.0.0.1", 45000), range(128))
    assert 45000 in eligible_ports()
    assert 45000 not in np.concatenate(list(found.values()))


def test_the_range_and_the_reserved_ports_are_the_kernels(tmp_path, monkeypatch) -> None:
    assert local_port_range()[0] < local_port_range()[1]
    (tmp_path / "range").write_text("40000\t40010\n")
    (tmp_path / "reserved").write_text("40001,40005-40007\n")
    monkeypatch.setattr(ports_module, "_RANGE_FILE", tmp_path / "range")
    monkeypatch.setattr(ports_module, "_RESERVED_FILE", tmp_path / "reserved")
    assert list(eligible_ports()) == [40000, 40002, 40003, 40004, 40008, 40009, 40010]
    (tmp_path / "reserved").write_text("\n")
    assert len(eligible_ports()) == 11
    (tmp_path / "range").write_text("nonsense")
    assert local_port_range() == (32768, 60999)


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.socket() as one:
        yield one


def chooser(**options: object) -> PortChooser:
    known = options.pop("known", steering())
    return PortChooser(known, ("127.0.0.1", 0), "127.0.0.1", ("127.0.0.1", 7400), **options)  # type: ignore[arg-type]


def test_a_bound_port_is_the_promised_one(sock: socket.socket) -> None:
    promise = chooser().bind(sock, 17)
    assert promise is not None
    assert sock.getsockname() == ("127.0.0.1", promise.port)
    assert promise.bucket == 17 == bucket_of(DEFAULT_KEY, ("127.0.0.1", promise.port), ("127.0.0.1", 7400), 128)


def test_a_port_in_use_is_passed_over_for_the_next_of_the_bucket(sock: socket.socket) -> None:
    first, second = chooser(rng=random.Random(5)), chooser(rng=random.Random(5))
    taken = first.bind(sock, 3)
    with socket.socket() as other:
        promise = second.bind(other, 3)
    assert taken is not None
    assert promise is not None
    assert promise.port != taken.port
    assert promise.bucket == taken.bucket == 3


def test_a_port_in_time_wait_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = chooser(rng=random.Random(9))
        client = socket.socket()
        promise = one.bind(client, 8)
        client.connect(server.getsockname())
        accepted = server.accept()[0]
        client.shutdown(socket.SHUT_WR)  # closes first: TIME_WAIT is the client's
        assert accepted.recv(1) == b""
        accepted.close()
        assert client.recv(1) == b""
        client.close()
        with socket.socket() as again:
            retried = chooser(rng=random.Random(9)).bind(again, 8)
    assert promise is not None
    assert retried is not None
    assert retried.port != promise.port


def test_it_gives_up_after_bounded_tries_and_leaves_the_socket_unbound() -> None:
    holders = []
    ports = candidate_ports(steering(), "127.0.0.1", ("127.0.0.1", 7400), [5])[5][:6]
    try:
        for port in ports:
            holder = socket.socket()
            holders.append(holder)
            try:
                holder.bind(("127.0.0.1", int(port)))
            except OSError as error:
                assert error.errno == errno.EADDRINUSE  # noqa: PT017 - somebody else has it: as good
        few = chooser(ports=ports, tries=4)
        with socket.socket() as sock:
            assert few.bind(sock, 5) is None
            assert sock.getsockname()[1] == 0
            sock.bind(("127.0.0.1", 0))
        with socket.socket() as sock:
            assert chooser(ports=ports, tries=MOST_TRIES).bind(sock, 4) is None  # no candidate at all
    finally:
        for holder in holders:
            holder.close()


def test_an_address_that_is_not_ours_gives_up_alignment_not_the_connection(sock: socket.socket) -> None:
    foreign = PortChooser(steering(), ("192.0.2.77", 0), "192.0.2.77", ("127.0.0.1", 7400))
    assert foreign.bind(sock, 1) is None
    sock.bind(("127.0.0.1", 0))


def test_a_seen_address_behind_nat_is_the_one_that_is_hashed(sock: socket.socket) -> None:
    natted = PortChooser(steering(), ("127.0.0.1", 0), "203.0.113.9", ("198.51.100.1", 7400))
    promise = natted.bind(sock, 70)
    assert promise is not None
    assert sock.getsockname()[0] == "127.0.0.1"
    assert bucket_of(DEFAULT_KEY, ("203.0.113.9", promise.port), ("198.51.100.1", 7400), 128) == 70


def test_ipv6_is_bound_and_hashed() -> None:
    with socket.socket(socket.AF_INET6) as sock:
        one = PortChooser(steering(), ("::1", 0, 0, 0), "::1", ("::1", 7400))
        promise = one.bind(sock, 99)
        assert promise is not None
        assert sock.getsockname()[:2] == ("::1", promise.port)
        assert bucket_of(DEFAULT_KEY, ("::1", promise.port), ("::1", 7400), 128) == 99


def test_a_key_that_reaches_few_buckets_aligns_what_it_can_and_says_so(sock: socket.socket) -> None:
    poor = chooser(known=steering(key=bytes(39) + b"\1"))
    assert "no source port reaches" in (poor.reason or "")
    lucky = [group for group in range(128) if len(poor.candidates(group))]
    assert len(lucky) == 1
    assert isinstance(poor.bind(sock, lucky[0]), Promise)
    with socket.socket() as other:
        assert poor.bind(other, (lucky[0] + 1) % 128) is None


def test_two_producers_of_all_groups_on_one_host_do_not_collide_for_long() -> None:
    sockets, promises = [], []
    try:
        for _ in range(2):
            one = chooser()
            for group in range(128):
                sock = socket.socket()
                sockets.append(sock)
                promises.append(one.bind(sock, group))
    finally:
        for sock in sockets:
            sock.close()
    assert all(promise is not None for promise in promises)
    assert len({promise.port for promise in promises if promise}) == 256


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"entries": 96}, "not a power of two"),
        ({"fields": TWO_TUPLE}, "src_ip, dst_ip, not"),
        ({"fields": ()}, "reads nothing"),
        ({"key": b"short"}, "5 bytes"),
        ({"groups": 0}, "0 groups"),
    ],
)
def test_steering_that_cannot_be_computed_is_refused(change: dict[str, object], words: str) -> None:
    values: dict[str, object] = {"key": DEFAULT_KEY, "fields": FOUR_TUPLE, "entries": 128, "groups": 128}
    with pytest.raises(ValueError, match=words):
        Steering(**(values | change))  # type: ignore[arg-type]


def test_steering_survives_the_wire_and_nonsense_is_refused() -> None:
    known = steering(256, 100)
    assert Steering.from_dict(known.to_dict()) == known
    for nonsense in (None, {}, [], "x", known.to_dict() | {"key": "zz"}, known.to_dict() | {"entries": "256"},
                     known.to_dict() | {"hash": "xor"}, known.to_dict() | {"groups": True}):  # fmt: skip
        with pytest.raises(ValueError):  # noqa: PT011 - the words differ, the kind is what callers rely on
            Steering.from_dict(nonsense)


def test_buckets_of_groups_are_every_entry_once() -> None:
    known = steering(128, 100)
    assert known.buckets_of(3) == (3, 103)
    assert known.buckets_of(50) == (50,)
    assert sorted(e for g in range(100) for e in known.buckets_of(g)) == list(range(128))
    assert all(known.group_of(e) == g for g in range(100) for e in known.buckets_of(g))
    small = steering(32, 100)
    assert small.buckets_of(3) == small.buckets_of(35) == (3,)
    with pytest.raises(ValueError, match="group 100"):
        known.buckets_of(100)

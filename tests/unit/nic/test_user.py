"""The user-space NIC: placement as a table, and honest words on what it cannot do."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from flexstream.errors import ConfigError
from flexstream.nic import Capability, Change, Connection, NicState, UserNic, Verdict, entries_for
from flexstream.nic.bpf import reuseport
from flexstream.nic.rss.toeplitz import DEFAULT_KEY, bucket_of


def connection(group: int, worker: int | None, port: int = 0) -> Connection:
    return Connection(("127.0.0.1", port or 40000 + group), ("127.0.0.1", 7400), group, worker)


def test_groups_are_dealt_out_in_turn_and_the_table_repeats_them() -> None:
    nic = UserNic(groups=16, cpus=[0, 1])
    assert nic.placement() == (0, 1) * 8
    assert nic.queues() == 2
    assert len(nic.table()) == 128
    assert all(nic.table()[entry] == nic.owner(entry % 16) for entry in range(128))


def test_a_table_that_groups_do_not_divide_still_maps_entry_e_to_group_e_mod_g() -> None:
    nic = UserNic(groups=100, cpus=[0, 1, 2], placement=[group % 3 for group in range(100)])
    assert [nic.table()[entry] for entry in (0, 99, 100, 127)] == [0, 0, 0, 0]
    assert nic.table()[101] == nic.owner(1) == 1


def test_more_groups_than_usual_get_a_larger_table() -> None:
    assert len(UserNic(groups=512, cpus=[0]).table()) == 512
    assert len(UserNic(groups=130, cpus=[0]).table()) == 256


def test_writing_the_table_moves_groups_and_can_be_undone() -> None:
    nic = UserNic(groups=4, cpus=[0, 1], entries=8)
    before = nic.table()
    nic.set_table([1, 1, 0, 1] * 2)
    assert nic.placement() == (1, 1, 0, 1)
    assert nic.changes() == (Change("group 0", "worker 0", "worker 1"),)
    assert str(nic.changes()[0]) == "group 0: worker 0 -> worker 1"
    nic.undo()
    assert nic.table() == before
    assert nic.changes() == ()


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([0] * 7, "this table has 8"),
        ([0, 1, 0, 2] * 2, "workers are 0 to 1"),
        ([0, 1, 0, -1] * 2, "workers are 0 to 1"),
        ([0, 1, 0, 1, 0, 0, 0, 1], "a group has one worker"),
    ],
)
def test_a_wrong_table_is_refused_and_changes_nothing(entries: list[int], says: str) -> None:
    nic = UserNic(groups=4, cpus=[0, 1], entries=8)
    before = nic.table()
    with pytest.raises(ConfigError, match=says):
        nic.set_table(entries)
    assert nic.table() == before
    assert nic.changes() == ()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"groups": 0, "cpus": [0]}, "at least one group"),
        ({"groups": 4, "cpus": []}, "at least one worker"),
        ({"groups": 16, "cpus": [0], "entries": 8}, "at least 16"),
        ({"groups": 2, "cpus": [0], "placement": [0]}, "2 groups"),
        ({"groups": 2, "cpus": [0], "placement": [0, 1]}, "workers are 0 to 0"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        UserNic(**arguments)  # type: ignore[arg-type]


def test_every_absent_capability_gives_its_reason() -> None:
    absent = [capability for capability in UserNic(4, [0]).capabilities() if not capability.present]
    assert {capability.name for capability in absent} >= {
        "hardware_table",
        "alignment",
        "rss_key",
        "pin_interrupt",
    }
    assert all(capability.reason for capability in absent)
    with pytest.raises(ValueError, match="no reason"):
        Capability("x", False)


def test_there_is_no_rss_key_and_nothing_is_hashed() -> None:
    nic = UserNic(4, [0])
    with pytest.raises(ConfigError, match="rss_key"):
        nic.key()
    assert nic.hash_fields() == ()


def test_it_says_that_it_is_not_aligned_and_why() -> None:
    described = UserNic(4, [0]).describe()
    assert described["kind"] == "user"
    assert described["aligned"] is False
    assert "no hardware table" in described["reason"]


def test_bucket_counters_are_the_rows_of_the_groups() -> None:
    rows = [5, 0, 7, 1]
    nic = UserNic(4, [0], entries=8, group_rows=lambda: rows)
    assert nic.bucket_counters() == (5, 0, 7, 1, 0, 0, 0, 0)
    rows[1] = 9
    assert sum(nic.bucket_counters()) == 22


def test_bucket_counters_without_an_engine_say_why() -> None:
    with pytest.raises(ConfigError, match="group_rows was not given"):
        UserNic(4, [0]).bucket_counters()


def test_counters_of_the_wrong_number_of_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 groups"):
        UserNic(4, [0], group_rows=lambda: [1, 2]).bucket_counters()


def test_pinning_moves_the_worker_thread_only() -> None:
    moved: list[tuple[int, int]] = []
    nic = UserNic(4, [0, 1], pin_worker=lambda worker, cpu: moved.append((worker, cpu)))
    nic.pin(1, 3)
    nic.pin(1, 3)
    assert moved == [(1, 3)]
    assert nic.queue_cpu() == (0, 3)
    nic.undo()
    assert moved == [(1, 3), (1, 1)]
    assert nic.queue_cpu() == (0, 1)


def test_a_failed_pin_is_not_noted() -> None:
    def refuse(worker: int, cpu: int) -> None:
        raise ConfigError("no such core", code="cpu", hint=None)

    nic = UserNic(4, [0], pin_worker=refuse)
    with pytest.raises(ConfigError, match="no such core"):
        nic.pin(0, 99)
    assert nic.queue_cpu() == (0,)
    assert nic.changes() == ()


def test_pinning_without_an_engine_or_of_an_unknown_queue_is_refused() -> None:
    with pytest.raises(ConfigError, match="pin_worker was not given"):
        UserNic(4, [0]).pin(0, 1)
    with pytest.raises(ConfigError, match="queue 2"):
        UserNic(4, [0]).pin(2, 1)


def test_a_worker_that_was_not_pinned_cannot_be_unpinned() -> None:
    nic = UserNic(4, [None], pin_worker=lambda worker, cpu: None)
    nic.pin(0, 1)
    with pytest.raises(ConfigError, match="stays pinned"):
        nic.undo()
    assert len(nic.changes()) == 1


def test_verification_checks_the_hand_over() -> None:
    nic = UserNic(4, [0, 1])
    assert nic.verify([]).verdict is Verdict.UNVERIFIED
    assert nic.verify([connection(0, None)]).verdict is Verdict.UNVERIFIED
    assert nic.verify([connection(0, 0), connection(1, 1)]).verdict is Verdict.VERIFIED
    wrong = nic.verify([connection(0, 0), connection(1, 0)])
    assert wrong.verdict is Verdict.DISOBEYED
    assert "group 1 is on worker 0, but its owner is worker 1" in str(wrong)


def test_an_unknown_group_has_no_owner() -> None:
    with pytest.raises(ConfigError, match="groups are 0 to 3"):
        UserNic(4, [0]).owner(4)


# -- one listener per worker


@contextlib.contextmanager
def listening(nic: UserNic, host: str = "127.0.0.1", family: int = socket.AF_INET) -> Iterator[list[socket.socket]]:
    first = socket.socket(family)
    first.bind((host, 0))
    first.listen(64)
    found = nic.listeners(first) or [first]
    try:
        yield found
    finally:
        for sock in found:
            sock.close()


def arrivals(listeners: list[socket.socket], to: str, entries: int, count: int) -> list[tuple[int, int]]:
    """(bucket, listener) of new connections."""
    found = []
    for _ in range(count):
        with socket.create_connection((to, listeners[0].getsockname()[1])):
            [ready], _, _ = select.select(listeners, [], [], 30)
            accepted, peer = ready.accept()
            with accepted:
                local = accepted.getsockname()
                bucket = bucket_of(DEFAULT_KEY, peer[:2], local[:2], entries)
            found.append((bucket, listeners.index(ready)))
    return found


@pytest.mark.parametrize(
    ("host", "to", "family"),
    [
        ("127.0.0.1", "127.0.0.1", socket.AF_INET),
        ("::1", "::1", socket.AF_INET6),
        ("::", "::1", socket.AF_INET6),
        ("::", "127.0.0.1", socket.AF_INET6),
    ],
)
def test_new_connections_come_to_the_listener_that_the_table_names(host: str, to: str, family: int) -> None:
    nic = UserNic(128, [None] * 3)
    with listening(nic, host, family) as listeners:
        assert len(listeners) == 3
        assert nic.steering() is not None
        assert nic.key() == DEFAULT_KEY
        table = nic.table()
        assert all(listener == table[bucket] for bucket, listener in arrivals(listeners, to, 128, 30))
        nic.follow([(group + 1) % 3 for group in range(128)])
        assert nic.table() != table
        table = nic.table()
        assert all(listener == table[bucket] for bucket, listener in arrivals(listeners, to, 128, 30))
        assert nic.changes() == (), "the placement is the engine's: there is nothing on the machine to undo"


@pytest.mark.parametrize(("groups", "entries"), [(1, 128), (100, 128), (200, 256), (5000, 1024)])
def test_the_table_fits_its_program_for_few_and_for_many_groups(groups: int, entries: int) -> None:
    nic = UserNic(groups, [None] * 4)
    with listening(nic) as listeners:
        steering = nic.steering()
        assert steering is not None
        assert (steering.entries, steering.groups) == (entries, groups)
        table = entries_for([group % 4 for group in range(groups)], entries, 4)
        assert all(listener == table[bucket] for bucket, listener in arrivals(listeners, "127.0.0.1", entries, 20))


def test_a_second_daemon_on_the_port_is_still_refused() -> None:
    with listening(UserNic(8, [None] * 2)) as listeners, socket.socket() as second:
        second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            second.bind(listeners[0].getsockname())


def test_without_the_kernels_help_there_is_one_listener_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(reuseport, "attach_table", refuse)
    nic = UserNic(8, [None] * 2)
    with listening(nic) as listeners:
        assert len(listeners) == 1
        assert nic.steering() is None
        assert "Operation not permitted" in str(nic.describe()["reason"])
        with socket.create_connection(listeners[0].getsockname()):
            assert select.select(listeners, [], [], 30)[0]
        nic.follow([1] * 8)
        assert nic.owner(3) == 1


def test_one_worker_has_nothing_to_align() -> None:
    nic = UserNic(8, [None])
    with listening(nic) as listeners:
        assert len(listeners) == 1
        assert "nothing to align" in str(nic.describe()["reason"])


def test_listeners_that_are_not_obeyed_are_noticed() -> None:
    nic = UserNic(128, [None] * 2)
    with listening(nic):
        peers = [connection(0, 0, port=port) for port in range(40000, 40040)]
        table = nic.table()

        def through(shift: int) -> list[Connection]:
            buckets = [bucket_of(nic.key(), c.peer, c.local, 128) for c in peers]
            return [replace(c, listener=(table[b] + shift) % 2) for b, c in zip(buckets, peers, strict=True)]

        assert nic.verify(through(0)).verdict is Verdict.VERIFIED
        assert nic.health().state is NicState.VERIFIED
        wrong = nic.verify(through(1))
        assert wrong.verdict is Verdict.DISOBEYED
        assert "40 of 40" in wrong.reason
        assert nic.health().state is NicState.DISOBEYED

"""EthtoolNic on a played device: it says what it cannot do, follows the placement, and leaves no trace."""

from __future__ import annotations

import errno
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flexstream.errors import ConfigError
from flexstream.nic import ethtool
from flexstream.nic.contract import Connection, NicState, Verdict
from flexstream.nic.device import journal
from flexstream.nic.device.journal import DeviceLock, Journal, left_behind
from flexstream.nic.ethtool import EthtoolNic
from flexstream.nic.rss.ioctl import EthtoolIoctl
from flexstream.nic.rss.toeplitz import bucket_of
from flexstream.nic.rss.transport import RssTransport
from tests.unit.nic.played_device import PlayedDevice, machine_of

GROUPS = 128
Make = Callable[..., tuple[EthtoolNic, PlayedDevice]]


@pytest.fixture
def name(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of its own for each test: the lock is the machine's. The journal sees it as a device that is there."""
    monkeypatch.setattr(journal, "device_index", lambda device: 7)
    return f"fs{secrets.token_hex(4)}"


@pytest.fixture
def make(name: str, tmp_path: Path) -> Iterator[Make]:
    opened: list[EthtoolNic] = []

    def one(groups: int = GROUPS, *, privileged: bool = True, **played: object) -> tuple[EthtoolNic, PlayedDevice]:
        device = PlayedDevice(name=name, **played)  # type: ignore[arg-type]
        root = tmp_path / "root"
        if not root.exists():
            machine_of(device, root, privileged=privileged)
        nic = EthtoolNic(name, groups=groups, **where(tmp_path), transport=transport(device))
        opened.append(nic)
        return nic, device

    yield one
    for nic in opened:
        nic._lock.release()


def where(tmp_path: Path) -> dict[str, Path]:
    return {"root": tmp_path / "root", "journal_folder": tmp_path / "journal"}


def transport(device: PlayedDevice) -> RssTransport:
    return RssTransport(device.name, ioctl=EthtoolIoctl(device.name, device.ioctl), way="ioctl")


def cpus_of(tmp_path: Path) -> list[str]:
    return [(tmp_path / f"root/proc/irq/{irq}/smp_affinity_list").read_text().strip() for irq in (25, 27, 29, 31)]


def test_everything_a_producer_needs_is_in_the_steering(make: Make) -> None:
    nic, played = make()
    steering = nic.steering()
    assert steering is not None
    assert (steering.key, steering.entries, steering.groups) == (played.key, 128, GROUPS)
    assert nic.hash_fields() == ("src_ip", "dst_ip", "src_port", "dst_port")
    assert all(c.present for c in nic.capabilities() if c.name not in ("bucket_counters", "pin_worker"))
    assert nic.describe()["queue_irq"] == [25, 27, 29, 31]
    assert nic.describe()["numa_node"] == 0


def test_start_pins_queues_to_workers_and_writes_the_table_though_it_is_unchanged(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    before = list(played.table)
    nic.start([3, 2, 1, 0])
    assert cpus_of(tmp_path) == ["3", "2", "1", "0"]
    assert nic.queue_cpu() == (3, 2, 1, 0)
    assert 0x47 in played.calls
    assert played.table == before
    assert (tmp_path / f"root/sys/class/net/{nic.device}/queues/tx-0/xps_cpus").read_text() == "8"
    assert nic.notes == []


def test_the_table_follows_the_placement_in_one_write(make: Make) -> None:
    nic, played = make()
    nic.start([0, 1, 2, 3])
    played.calls.clear()
    placement = [3] * GROUPS
    placement[5] = 1
    nic.follow(placement)
    assert played.table == placement
    assert sum(call in (0x47, 0x39) for call in played.calls) <= 2  # the second try is for kernels before 6.8
    assert nic.drift() == []


def test_close_puts_everything_back_and_leaves_no_journal(make: Make, tmp_path: Path) -> None:
    nic, played = make(hashed={1: 0x30, 5: 0xF0})
    before = list(played.table)
    nic.start([0, 1, 2, 3])
    nic.follow([2] * GROUPS)
    assert played.hashed[1] == 0xF0
    assert {change.where for change in nic.changes()} >= {
        f"{nic.device} table",
        f"{nic.device} hash tcp4",
        "irq 25 cpus",
    }
    assert len(left_behind(nic.device, tmp_path / "journal")) == 1
    nic.close()
    assert played.table == before
    assert played.hashed[1] == 0x30
    assert cpus_of(tmp_path) == ["0-3"] * 4
    assert left_behind(nic.device, tmp_path / "journal") == []
    assert nic.changes() == ()
    nic.close()


def test_a_table_written_many_times_is_one_change_from_the_first_value_to_the_latest(make: Make) -> None:
    nic, played = make()
    first = ",".join(map(str, played.table))
    nic.start([0, 1, 2, 3])
    for queue in (1, 2, 3):
        nic.follow([queue] * GROUPS)
    [change] = [change for change in nic.changes() if change.where == f"{nic.device} table"]
    assert (change.old, change.new) == (first, ",".join(["3"] * 128))
    nic.close()


def test_a_table_that_was_not_the_default_comes_back_entry_by_entry(make: Make) -> None:
    old = [3, 1] * 64
    nic, played = make(table=list(old))
    nic.start([0, 1, 2, 3])
    nic.follow([0] * GROUPS)
    nic.close()
    assert played.table == old


def test_the_next_start_puts_back_what_a_killed_daemon_left(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    nic.start([3, 2, 1, 0])
    nic.follow([1] * GROUPS)
    nic._lock.release()  # killed: nothing was undone, the kernel took the lock back
    again = EthtoolNic(nic.device, groups=GROUPS, **where(tmp_path), transport=transport(played))
    again.start([None, None, None, None])
    assert cpus_of(tmp_path) == ["0-3"] * 4
    assert played.table == [entry % 4 for entry in range(128)]
    again.close()


@pytest.mark.parametrize("killed", [False, True])
def test_a_table_that_fewer_channels_cannot_hold_ends_neither_the_stop_nor_the_next_start(
    make: Make, tmp_path: Path, killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nic, played = make(table=[3, 2, 1, 0] * 32)
    nic.start([0, 1, 2, 3])
    nic.follow([0] * GROUPS)
    EthtoolIoctl(nic.device, played.ioctl).set_channels(combined=2)  # somebody's `ethtool -L`
    if killed:
        nic._lock.release()
    else:
        nic.close()
        assert left_behind(nic.device, tmp_path / "journal") == []
        assert played.table == [0, 1] * 64
    again = EthtoolNic(nic.device, groups=GROUPS, **where(tmp_path), transport=transport(played))
    again.start([0, 1, 2, 3])
    again.close()
    assert played.table == [0, 1] * 64
    assert "names queue 3, but the device now has 2 receive queues" in caplog.text


def test_a_journal_of_another_boot_is_dropped_not_applied(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nic, played = make()
    nic.start([3, 2, 1, 0])
    nic._lock.release()
    monkeypatch.setattr(journal, "boot_id", lambda: "another boot")
    again = EthtoolNic(nic.device, groups=GROUPS, **where(tmp_path), transport=transport(played))
    again.start([None] * 4)
    assert cpus_of(tmp_path) == ["3", "2", "1", "0"]
    again.close()
    assert cpus_of(tmp_path) == ["3", "2", "1", "0"]


def test_two_daemons_on_one_device_the_second_is_told_who_has_it(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    holder = (
        "import sys, time; from flexstream.nic.device.journal import DeviceLock; "
        f"lock = DeviceLock({nic.device!r}); lock.take(); print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        for _ in range(3):  # asking who has it must not use up anything
            with pytest.raises(ConfigError, match=f"process {child.pid}") as seen:
                nic.start([0, 1, 2, 3])
            assert seen.value.code == "nic_busy"
        assert played.table == [entry % 4 for entry in range(128)]
        assert cpus_of(tmp_path) == ["0-3"] * 4
    finally:
        child.kill()
        child.wait()
    nic.start([0, 1, 2, 3])
    nic.close()


def test_a_lock_answers_more_questions_than_its_queue_holds() -> None:
    name = f"fs{secrets.token_hex(4)}"
    lock = DeviceLock(name)
    lock.take()
    for _ in range(300):
        assert DeviceLock(name).holder() is not None
        lock.answer()
    lock.release()
    assert DeviceLock(name).holder() is None


@pytest.mark.parametrize(
    ("played", "reason"),
    [
        (
            {"refuse": {0x46: errno.EOPNOTSUPP, 0x38: errno.EOPNOTSUPP}, "driver": "veth"},
            "driver veth answered EOPNOTSUPP",
        ),
        ({"table": []}, "a table of 0 entries"),
    ],
)
def test_a_device_without_a_table_says_what_its_driver_answered(
    make: Make, played: dict[str, object], reason: str
) -> None:
    nic, _ = make(**played)
    assert nic.steering() is None
    assert reason in nic.capability("hardware_table").reason
    assert reason in nic.capability("alignment").reason
    with pytest.raises(ConfigError, match=reason):
        nic.start([0, 1])
    with pytest.raises(ConfigError, match=reason):
        nic.table()
    assert nic.changes() == ()


@pytest.mark.parametrize(
    ("played", "reason"),
    [
        ({"table": [0] * 100}, "100 entries, which is not a power of two"),
        ({"function": 2}, "xor, not toeplitz"),
        ({"transform": 1, "before_6_8": False}, "symmetric"),
        ({"hashed": {1: 0x30, 5: 0x30}}, "src_ip, dst_ip"),
        ({"key": b""}, "does not show its RSS key"),
        ({"key": b"1234567890"}, "key has 10 bytes"),
    ],
)
def test_what_cannot_be_aligned_still_follows_the_placement(make: Make, played: dict[str, object], reason: str) -> None:
    nic, device = make(refuse={0x2A: errno.EOPNOTSUPP}, **played)
    assert nic.steering() is None
    assert reason in nic.capability("alignment").reason
    assert nic.describe()["aligned"] is False
    nic.start([0, 1, 2, 3])
    nic.follow([2] * GROUPS)
    assert set(device.table) == {2}
    assert nic.verify([]).verdict is Verdict.UNVERIFIED
    nic.close()


def test_a_card_without_a_key_that_keeps_to_one_queue_is_seen_through(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ethtool, "is_own_address", lambda address: address == "127.0.0.1")
    nic, _ = make(key=b"")
    nic.start([3, 2, 1, 0])
    nic.follow([group % 4 for group in range(GROUPS)])
    local = ("192.0.2.1", 7400)
    seen = [Connection(("192.0.2.2", port), local, 0, None, 3, None) for port in range(40000, 40064)]
    assert nic.verify(seen).verdict is Verdict.DISOBEYED
    assert nic.health().state is NicState.DISOBEYED
    own = [Connection(("127.0.0.1", port), local, 0, None, 3, None) for port in range(40000, 40064)]
    assert nic.verify(own).verdict is Verdict.UNVERIFIED, "packets to oneself pass no device"


def test_what_a_start_can_mend_is_no_reason_to_pass_a_device_over(make: Make) -> None:
    nic, _ = make(hashed={1: 0x30, 5: 0x30})
    assert nic.cannot_align() is None
    nic.start([0, 1, 2, 3])
    assert nic.cannot_align() is None
    nic.close()
    refusing, _ = make(hashed={1: 0x30, 5: 0x30}, refuse={0x2A: errno.EOPNOTSUPP})
    assert refusing.cannot_align() is None
    refusing.start([0, 1, 2, 3])
    assert "src_ip, dst_ip" in str(refusing.cannot_align())
    refusing.close()
    assert "RSS key" in str(make(key=b"")[0].cannot_align())


def test_in_a_table_smaller_than_g_groups_share_entries_and_move_together(make: Make) -> None:
    nic, played = make(table=[entry % 4 for entry in range(32)])
    nic.start([0, 1, 2, 3])
    placement = [group % 4 for group in range(GROUPS)]
    for group in (7, 39, 71):  # three of the four groups that share entry 7
        placement[group] = 0
    nic.follow(placement)
    assert played.table[7] == 0
    assert played.table[8] == placement[8]
    steering = nic.steering()
    assert steering is not None
    assert steering.buckets_of(39) == (7,)
    nic.close()


def test_a_larger_table_has_several_entries_per_group(make: Make) -> None:
    nic, played = make(table=[0] * 512)
    nic.start([0, 1, 2, 3])
    placement = [0] * GROUPS
    placement[3] = 2
    nic.follow(placement)
    assert [entry for entry, queue in enumerate(played.table) if queue == 2] == [3, 131, 259, 387]
    nic.close()


def test_fewer_queues_than_workers_share(make: Make) -> None:
    nic, played = make(queues=2, max_queues=2, table=[0, 1] * 64)
    nic.start([0, 1, 2, 3])
    nic.follow([group % 4 for group in range(GROUPS)])
    assert played.table == [0, 1] * 64
    nic.close()


def test_without_privilege_it_reads_and_explains_and_refuses_to_change(make: Make) -> None:
    nic, _ = make(privileged=False)
    assert len(nic.table()) == 128
    assert "CAP_NET_ADMIN" in nic.capability("write_table").reason
    with pytest.raises(ConfigError, match="CAP_NET_ADMIN"):
        nic.start([0])
    assert nic.changes() == ()
    nic._lock.take()  # start gave it back
    nic._lock.release()


def test_a_table_that_the_driver_refuses_changes_nothing(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    played.refuse = {0x47: errno.EBUSY, 0x39: errno.EBUSY}
    with pytest.raises(ConfigError, match="EBUSY"):
        nic.start([3, 2, 1, 0])
    assert cpus_of(tmp_path) == ["0-3"] * 4


def test_interrupts_that_cannot_be_pinned_are_a_note_not_a_failure(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    for irq in (25, 27, 29, 31):  # gone between the reading and the writing
        folder = tmp_path / f"root/proc/irq/{irq}"
        (folder / "smp_affinity_list").unlink()
        (folder / "smp_affinity_list").mkdir()
    nic.start([3, 2, 1, 0])
    nic.follow([1] * GROUPS)
    assert set(played.table) == {1}
    assert "pin_interrupt" in {c.name for c in nic.capabilities()}
    nic.close()


def test_receive_hashing_is_switched_on_and_where_it_is_fixed_that_is_a_note(make: Make) -> None:
    nic, played = make(flags=0)
    nic.start([0, 1, 2, 3])
    assert played.flags == 1 << 28
    nic.close()
    assert played.flags == 0
    played.fixed_flags = 1 << 28
    again = EthtoolNic(nic.device, groups=GROUPS, transport=transport(played), root=nic._root,
                       journal_folder=nic._journal_folder)  # fmt: skip
    again.start([0, 1, 2, 3])
    assert any("the driver does not let it change" in note for note in again.notes)
    again.close()


def test_what_others_change_is_noticed(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    nic.start([0, 1, 2, 3])
    nic.follow([group % 4 for group in range(GROUPS)])
    assert nic.drift() == []
    played.table[9] = 3
    assert nic.drift() == ["table: 1 of 128 entries changed, the first is entry 9: queue 1 -> 3"]
    played.key = bytes(40)
    played.flags = 0
    played.hashed[1] = 0x30
    (tmp_path / "root/proc/irq/25/smp_affinity_list").write_text("2\n")
    (tmp_path / f"root/sys/class/net/{nic.device}/flags").write_text("0x1002\n")
    words = "\n".join(nic.drift())
    for part in ("key:", "receive hashing", "hash fields of tcp4", "interrupt 25 of queue 0", "is down", "table:"):
        assert part in words
    assert nic.health().reason == f"{nic.device} is down"
    steering = nic.steering()
    assert steering is None or steering.key == bytes(40)


def test_our_own_next_write_ends_the_drift_and_has_the_new_key(make: Make) -> None:
    nic, played = make()
    nic.start([0, 1, 2, 3])
    played.key = bytes(range(40))
    played.table[0] = 2
    assert len(nic.drift()) == 2
    nic.follow([1] * GROUPS)
    assert nic.drift() == []
    steering = nic.steering()
    assert steering is not None
    assert steering.key == bytes(range(40))


def test_a_channel_change_is_noticed_and_the_next_follow_uses_the_queues_that_are_left(make: Make) -> None:
    nic, played = make()
    nic.start([0, 1, 2, 3])
    nic.follow([group % 4 for group in range(GROUPS)])
    EthtoolIoctl(nic.device, played.ioctl).set_channels(combined=2)
    assert any("4 -> 2 receive queues" in line for line in nic.drift())
    nic.follow([group % 4 for group in range(GROUPS)])
    assert nic.queues() == 2
    assert set(played.table) == {0, 1}
    assert nic.drift() == []


def test_a_device_that_takes_a_table_and_keeps_another_shows_up_as_drift(make: Make) -> None:
    nic, _ = make(ignores_table=True)
    nic.start([0, 1, 2, 3])
    nic.follow([3] * GROUPS)
    assert any(line.startswith("table: 96 of 128") for line in nic.drift())


def test_a_device_that_vanishes_is_gone_and_closing_it_is_no_error(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    nic.start([0, 1, 2, 3])
    played.name = "elsewhere"
    (tmp_path / f"root/sys/class/net/{nic.device}").unlink()
    for irq in (25, 27, 29, 31):
        (tmp_path / f"root/proc/irq/{irq}/smp_affinity_list").unlink()
    assert nic.health().state is NicState.GONE
    assert nic.drift() == [f"{nic.device} is gone"]
    assert nic.steering() is None
    with pytest.raises(ConfigError):
        nic.follow([0] * GROUPS)
    nic.close()
    assert left_behind(nic.device, tmp_path / "journal") == []


def test_a_device_that_is_renamed_is_the_same_and_is_put_back_under_its_new_name(make: Make, tmp_path: Path) -> None:
    nic, played = make(table=[3, 1] * 64)
    nic.start([0, 1, 2, 3])
    nic.follow([2] * GROUPS)
    net = tmp_path / "root/sys/class/net"
    (net / nic.device).rename(net / "lan0")
    played.name = "lan0"
    assert nic.health().state is not NicState.GONE
    assert nic.device == "lan0"
    assert nic.drift() == []
    nic.follow([1] * GROUPS)
    assert set(played.table) == {1}
    assert {change.where.split()[0] for change in nic.changes()} == {"lan0", "irq"}
    assert [found.origin.device for found in left_behind("lan0", tmp_path / "journal")] == ["lan0"]
    nic.close()
    assert played.table == [3, 1] * 64
    assert cpus_of(tmp_path) == ["0-3"] * 4
    assert list((tmp_path / "journal").iterdir()) == []


def test_another_device_of_the_old_name_is_not_touched(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    old = nic.device
    nic.start([0, 1, 2, 3])
    net = tmp_path / "root/sys/class/net"
    (net / old).rename(net / "lan0")
    other = net / old
    other.mkdir()
    (other / "ifindex").write_text("8")
    (other / "flags").write_text("0x1003")
    played.name = "lan0"
    assert nic.health().state is not NicState.GONE
    assert nic.device == "lan0"
    (net / "lan0").unlink()
    assert nic.health().state is NicState.GONE


def test_wrong_tables_and_queues_are_refused_with_the_range(make: Make) -> None:
    nic, _ = make()
    for wrong, why in (([0] * 127, "127 entries"), ([4] * 128, "queues are 0 to 3"), ([-1] * 128, "queue -1")):
        with pytest.raises(ConfigError, match=why):
            nic.set_table(wrong)
    with pytest.raises(ConfigError, match="the placement has 3 groups"):
        nic.follow([0, 0, 0])
    with pytest.raises(ConfigError, match="queue 4"):
        nic.pin(4, 0)


def test_pin_moves_one_queue_and_undo_puts_it_back(make: Make, tmp_path: Path) -> None:
    nic, _ = make()
    nic.pin(2, 1)
    assert cpus_of(tmp_path) == ["0-3", "0-3", "1", "0-3"]
    assert [str(change) for change in nic.changes()] == ["irq 29 cpus: 0-3 -> 1"]
    nic.undo()
    assert cpus_of(tmp_path) == ["0-3"] * 4


def test_no_journal_no_change(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    (tmp_path / "journal").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match="nothing is changed"):
        nic.start([3, 2, 1, 0])
    assert cpus_of(tmp_path) == ["0-3"] * 4
    assert 0x47 not in played.calls


def test_queue_counters_are_the_driver_s_or_none(make: Make) -> None:
    nic, played = make(statistics={f"rx_queue_{queue}_packets": 10 * queue for queue in range(4)})
    assert nic.queue_counters() == (0, 10, 20, 30)
    for name in ("rx-{}.packets", "rx{}_packets", "queue_{}_rx_cnt", "rx_queue_{}_packets"):
        played.statistics = {name.format(queue): queue for queue in range(4)} | {"tx_queue_0_packets": 9}
        assert nic.queue_counters() == (0, 1, 2, 3), name
    played.statistics = {"rx0_kicks": 4}
    assert nic.queue_counters() is None


def test_rows_per_bucket_are_counted_where_the_engine_gives_them(name: str, tmp_path: Path) -> None:
    played = PlayedDevice(name=name, table=[0] * 32)
    machine_of(played, tmp_path / "root")
    rows = [1] * GROUPS
    nic = EthtoolNic(name, groups=GROUPS, group_rows=lambda: rows, **where(tmp_path), transport=transport(played))
    assert nic.bucket_counters() == (4,) * 32


def arrivals(nic: EthtoolNic, count: int, *, wrong: int = 0, cores: bool = True) -> list[Connection]:
    """Connections that arrived as the table says, but for the first `wrong`, which all arrived on queue 0."""
    found, local = [], ("10.0.0.1", 7400)
    for port in range(40000, 40000 + count):
        queue = nic.table()[bucket_of(nic.key(), ("10.0.0.2", port), local, 128)]
        if port - 40000 < wrong:
            queue = (queue + 1) % 4
        cpu = [3, 2, 1, 0][queue] if cores else None
        found.append(Connection(("10.0.0.2", port), local, port % GROUPS, None, cpu, 8193 + queue))
    return found


def test_traffic_makes_a_device_verified_or_disobeyed(make: Make) -> None:
    nic, _ = make()
    nic.start([3, 2, 1, 0])
    assert nic.health().state is NicState.UNVERIFIED
    assert nic.verify(arrivals(nic, 20)).verdict is Verdict.VERIFIED
    assert nic.health().state is NicState.VERIFIED
    verdict = nic.verify(arrivals(nic, 40, wrong=6))
    assert verdict.verdict is Verdict.DISOBEYED
    assert "of 40 connections did not arrive where the table says" in verdict.reason
    assert nic.health().state is NicState.DISOBEYED


def test_there_is_no_device_of_that_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no device nosuch"):
        EthtoolNic("nosuch", groups=4)
    assert EthtoolNic.probe("nosuch") == "there is no device nosuch"
    assert "loopback answered EOPNOTSUPP" in str(EthtoolNic.probe("lo"))


def test_a_journal_that_cannot_be_read_stops_the_start_and_says_what_to_do(make: Make, tmp_path: Path) -> None:
    nic, played = make()
    made = Journal.create(nic.device, "daemon", tmp_path / "journal")
    made.path.write_text("not json\n")
    with pytest.raises(ConfigError, match="cannot read the journal"):
        nic.start([0, 1, 2, 3])
    assert 0x47 not in played.calls

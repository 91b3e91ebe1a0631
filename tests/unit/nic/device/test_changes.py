"""Plans: desired against actual, in an order that can be applied; as a diff, a script, and taken back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.contract import Change
from flexstream.nic.device import journal
from flexstream.nic.device.changes import Applied, Wish, needed, plan, script, undo, undo_journal
from flexstream.nic.device.facts import Facts, read_facts
from flexstream.nic.device.journal import Journal, left_behind
from flexstream.nic.device.settings import Settings, parse_table
from flexstream.nic.drift import differences, put_back
from flexstream.nic.rss.ioctl import EthtoolIoctl
from flexstream.nic.rss.transport import RssTransport
from tests.unit.nic.played_device import PlayedDevice, machine_of


def transport(device: PlayedDevice) -> RssTransport:
    return RssTransport(device.name, ioctl=EthtoolIoctl(device.name, device.ioctl), way="ioctl")


def read(device: PlayedDevice, root: Path) -> Facts:
    if not root.exists():
        machine_of(device, root)
    return read_facts(device.name, root=root, transport=transport(device))


def settings_of(device: PlayedDevice, root: Path) -> Settings:
    def opened(name: str) -> RssTransport:
        return RssTransport(name, ioctl=EthtoolIoctl(name, device.ioctl), way="ioctl")

    return Settings(root, open_rss=opened)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def test_channels_come_first_and_the_table_last_even_when_it_is_as_wanted(root: Path) -> None:
    device = PlayedDevice(queues=2, table=[0, 1] * 64, hashed={1: 0x30, 5: 0xF0}, flags=0)
    machine_of(device, root)
    (root / "sys/class/net/eth0/queues/rx-1/rps_cpus").write_text("3\n")
    (root / "sys/class/net/eth0/queues/rx-1/rps_flow_cnt").write_text("4096\n")
    changes = plan(read(device, root), Wish((0, 1, 2, 3), channels=4, without_rps=True), root=root)
    assert [change.where for change in changes] == [
        "eth0 channels combined",
        "eth0 flag rxhash",
        "eth0 hash tcp4",
        "eth0 rx-1 rps_cpus",
        "eth0 rx-1 rps_flow_cnt",
        "irq 25 cpus",
        "irq 27 cpus",
        "eth0 tx-0 xps_cpus",
        "eth0 tx-1 xps_cpus",
        "eth0 tx-2 xps_cpus",
        "eth0 tx-3 xps_cpus",
        "eth0 table",
    ]
    assert changes[0] == Change("eth0 channels combined", "2", "4")
    assert changes[3] == Change("eth0 rx-1 rps_cpus", "0-1", "")


def test_a_device_that_is_as_wanted_differs_in_nothing(root: Path) -> None:
    device = PlayedDevice()
    facts = read(device, root)
    wish = Wish((0, 1, 2, 3), channels=4, without_rps=True)
    settings = settings_of(device, root)
    for change in plan(facts, wish, root=root):
        settings.write(change.where, change.new)
    again = plan(read(device, root), wish, root=root)
    assert needed(again) == []
    assert [change.where for change in again] == ["eth0 table"]


def test_more_channels_than_the_device_has_are_not_asked_for(root: Path) -> None:
    changes = plan(read(PlayedDevice(queues=2, max_queues=4), root), Wish((0,) * 16, channels=16), root=root)
    assert changes[0] == Change("eth0 channels combined", "2", "4")


def test_no_device_no_plan() -> None:
    with pytest.raises(ConfigError, match="no device nosuch"):
        plan(read_facts("nosuch"), Wish((0,)))


def test_a_device_without_a_table_is_left_alone(root: Path) -> None:
    assert plan(read(PlayedDevice(table=[]), root), Wish((0, 1)), root=root) == []


def test_the_script_is_shell_and_says_how_to_take_it_back(root: Path) -> None:
    device = PlayedDevice(queues=2, table=[0, 1] * 64, flags=0)
    changes = plan(read(device, root), Wish((3, 2), channels=4), root=root)
    text = script(changes, settings_of(device, root), "eth0")
    assert "ethtool -L eth0 combined 4" in text
    assert "ethtool -K eth0 rxhash on" in text
    assert "echo 3 > /proc/irq/25/smp_affinity_list" in text
    assert "echo 8 > /sys/class/net/eth0/queues/tx-0/xps_cpus" in text
    assert "ethtool -X eth0 equal 2" in text
    assert "#   ethtool -L eth0 combined 2" in text
    subprocess.run(["sh", "-n"], input=text, text=True, check=True, timeout=20)


def test_every_setting_has_a_shell_form() -> None:
    settings = Settings()
    shells = {
        ("eth0 table", "0,0,1,1"): "flexstream nic set 'eth0 table' 0,0,1,1",
        ("eth0 table", "0,1,0,1"): "ethtool -X eth0 equal 2",
        ("eth0 key", "6d:5a"): "ethtool -X eth0 hkey 6d:5a",
        ("eth0 hash tcp6", "src_ip,dst_ip,src_port,dst_port"): "ethtool -N eth0 rx-flow-hash tcp6 sdfn",
        ("eth0 hash tcp4", "src_ip,dst_ip"): "ethtool -N eth0 rx-flow-hash tcp4 sd",
        ("eth0 ring rx", "512"): "ethtool -G eth0 rx 512",
        ("eth0 coalesce rx_usecs", "8"): "ethtool -C eth0 rx-usecs 8",
        ("eth0 feature rx-gro", "off"): "ethtool -K eth0 rx-gro off",
        ("eth0 rx-0 rps_cpus", ""): "echo 0 > /sys/class/net/eth0/queues/rx-0/rps_cpus",
        ("eth0 rx-0 rps_flow_cnt", "0"): "echo 0 > /sys/class/net/eth0/queues/rx-0/rps_flow_cnt",
        ("irq 7 cpus", "0-1"): "echo 0-1 > /proc/irq/7/smp_affinity_list",
    }
    assert {key: settings.shell(*key) for key in shells} == shells


@pytest.mark.parametrize(
    "where",
    ["", "eth0", "eth0 tables", "irq x cpus", "eth0 rx-0 ../../x", "eth0 channels more", "a b c d", "irq 5 cpus "],
)
def test_what_is_no_setting_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="does not know a setting"):
        Settings().read(where)


@pytest.mark.parametrize(
    ("where", "value", "expected"),
    [
        ("lo table", "", "0,1,0,1"),
        ("lo table", "0,-1", "0,1,0,1"),
        ("lo key", "6d5", "hexadecimal"),
        ("lo channels combined", "many", "a number"),
        ("lo channels rx", "-1", "a number"),
        ("lo hash tcp4", "src_ip,colour", "src_ip"),
        ("lo flag rxhash", "yes", "on or off"),
        ("lo feature rx-gro", "1", "on or off"),
        ("lo ring rx", "1k", "a number"),
        ("lo rx-0 rps_cpus", "0-", "cores"),
        ("lo rx-0 rps_cpus", "3-1", "cores"),
        ("lo rx-0 rps_flow_cnt", "", "a number"),
        ("irq 1 cpus", "", "cores"),
        ("irq 1 cpus", "0x3", "cores"),
    ],
)
def test_set_looks_at_the_value_before_it_notes_or_writes_anything(
    where: str, value: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from flexstream.cli import main

    monkeypatch.setenv("FLEXSTREAM_NIC_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["nic", "set", "--", where, value])
    assert ended.value.code == 1
    assert expected in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a table"):
        parse_table("0,x")


def test_what_was_applied_is_undone_newest_first_from_the_journal_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "device_index", lambda name: 7 if name == "eth0" else 0)
    device = PlayedDevice(queues=2, table=[1, 0] * 64, flags=0)
    before = read(device, root)
    settings = settings_of(device, root)
    applied = Applied(settings, Journal.create("eth0", "apply", tmp_path))
    for change in plan(before, Wish((3, 2, 1, 0), channels=4), root=root):
        applied.change(change)
    assert (device.queues, device.flags) == (4, 1 << 28)
    left = Journal.read(next(tmp_path.glob("eth0.*.jsonl")))
    undone = undo_journal(left, settings)
    assert undone.left == ()
    assert undone.problems == ()
    after = read(device, root)
    assert differences(before, after) == []
    assert (after.table, after.channels) == (before.table, before.channels)
    assert list(tmp_path.glob("eth0.*.jsonl")) == []


class NotedSettings(Settings):
    """Notes what is written, and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def read(self, where: str) -> str:
        return "neither"

    def write(self, where: str, value: str) -> None:
        self.written.append(where)


def test_the_newest_change_is_undone_first() -> None:
    settings = NotedSettings()
    undo([Change(f"irq {number} cpus", "0", "1") for number in (1, 2, 3)], settings)
    assert settings.written == ["irq 3 cpus", "irq 2 cpus", "irq 1 cpus"]


def test_a_crash_in_the_middle_of_a_change_leaves_it_in_the_journal(tmp_path: Path) -> None:
    class Dying(NotedSettings):
        def write(self, where: str, value: str) -> None:
            raise KeyboardInterrupt

    applied = Applied(Dying(), Journal.create("lo", "daemon", tmp_path))
    with pytest.raises(KeyboardInterrupt):
        applied.change(Change("irq 1 cpus", "0-3", "1"))
    [left] = left_behind("lo", tmp_path)
    assert left.changes == [Change("irq 1 cpus", "0-3", "1")]


def test_what_cannot_be_undone_stays_and_is_told(root: Path) -> None:
    device = PlayedDevice()
    machine_of(device, root)
    settings = settings_of(device, root)
    old = ",".join(["0", "0"] * 64)
    changes = [Change("irq 25 cpus", "2", "1"), Change("eth0 table", old, ",".join(["3"] * 128))]
    device.refuse = {0x47: 16, 0x39: 16}
    left, problems, _, undone = undo(changes, settings)
    assert undone == [changes[0]]
    assert left == [changes[1]]
    assert "EBUSY" in problems[0]
    assert (root / "proc/irq/25/smp_affinity_list").read_text() == "2"


def test_what_is_gone_needs_no_undoing(root: Path) -> None:
    settings = settings_of(PlayedDevice(name="other"), root)
    left, problems, dropped, undone = undo([Change("irq 99 cpus", "0", "1"), Change("eth0 key", "00", "01")], settings)
    assert (left, problems, undone) == ([], [], [])
    assert dropped == ["eth0 key is gone: nothing to put back", "irq 99 cpus is gone: nothing to put back"]


def test_channels_that_were_made_fewer_come_back_with_their_table(root: Path) -> None:
    """Seen as EINVAL before: the old table names queues that are there only after the channels are back."""
    device = PlayedDevice(table=[3, 1] * 64)
    machine_of(device, root)
    settings = settings_of(device, root)
    changes = [Change("eth0 channels combined", "4", "2"), Change("eth0 table", ",".join(["3", "1"] * 64), "0,1")]
    EthtoolIoctl("eth0", device.ioctl).set_channels(combined=2)
    assert undo(changes, settings) == ([], [], [], changes)
    assert (device.queues, device.table) == (4, [3, 1] * 64)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            Change("eth0 table", ",".join(["3", "1"] * 64), "0"),
            "now has the driver's default: the old table names queue 3, but",
        ),
        (
            Change("eth0 table", ",".join("0123" * 32), "0"),
            "now has the driver's default: the old table names queue 3, but",
        ),
        (Change("eth0 table", "0,1", "0"), "the old table has 2 entries, but the device's has 128"),
        (Change("eth0 key", "6d:5a", "00"), "the old key has 2 bytes, but the device's key has 40"),
        (Change("eth0 channels combined", "9", "2"), "it was 9, but the device now has no more than 4"),
        (Change("irq 25 cpus", "6-7", "2"), "no core of 6-7 is online"),
    ],
)
def test_what_the_device_can_no_longer_hold_is_dropped_and_said(root: Path, change: Change, said: str) -> None:
    device = PlayedDevice()
    machine_of(device, root)
    (root / "sys/devices/system/cpu").mkdir(parents=True)
    (root / "sys/devices/system/cpu/online").write_text("0-3\n")
    EthtoolIoctl("eth0", device.ioctl).set_channels(combined=2)
    device.table = [1] * 128  # ours
    left, problems, [dropped], undone = undo([change], settings_of(device, root), "eth0")
    assert (left, problems, undone) == ([], [], []), "what is dropped is not called undone"
    assert said in dropped
    assert device.table == ([0, 1] * 64 if change.where == "eth0 table" else [1] * 128)


def test_putting_back_ends_with_the_table_whatever_was_changed(root: Path) -> None:
    device = PlayedDevice()
    then = read(device, root)
    device.key = bytes(40)
    device.flags = 0
    (root / "proc/irq/27/smp_affinity_list").write_text("1\n")
    EthtoolIoctl("eth0", device.ioctl).set_channels(combined=2)
    changes = put_back(then, read(device, root))
    assert [change.where for change in changes] == [
        "eth0 channels combined",
        "eth0 flag rxhash",
        "irq 27 cpus",
        "eth0 key",
        "eth0 table",
    ]
    settings = settings_of(device, root)
    for change in changes:
        settings.write(change.where, change.new)
    assert differences(then, read(device, root)) == []
    assert put_back(then, read(device, root)) == []

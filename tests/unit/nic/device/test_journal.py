"""The journal: on disk before the change, readable after a crash, never applied to another boot or device."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flexstream.nic.contract import Change
from flexstream.nic.device import journal as journal_module
from flexstream.nic.device import trust
from flexstream.nic.device.changes import undo_journal
from flexstream.nic.device.journal import (
    Journal,
    JournalError,
    Origin,
    devices_with_journals,
    folders,
    foreign_journals,
    left_behind,
)
from flexstream.nic.device.settings import Settings

TABLE = Change("lo table", "0,1", "1,1")
PIN = Change("irq 25 cpus", "0-3", "2")


def test_a_change_is_on_disk_when_record_returns(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    made.record(TABLE)
    made.record(PIN)
    [found] = left_behind("lo", tmp_path)
    assert found.changes == [TABLE, PIN]
    assert (found.owner, found.pid, found.origin) == ("daemon", os.getpid(), Origin.here("lo"))
    assert not found.is_stale()


def test_only_the_first_value_of_a_setting_is_kept(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    made.record(TABLE)
    made.record(Change("lo table", "1,1", "0,0"))
    assert left_behind("lo", tmp_path)[0].changes == [TABLE]


def test_record_is_flushed_to_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(journal_module.os, "fsync", sync)
    made.record(TABLE)
    assert synced == [str(made.path)]


def test_a_line_cut_short_by_a_crash_was_never_applied(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    made.record(TABLE)
    with made.path.open("a") as file:
        file.write('{"where": "irq 25 cpus", "ol')
    assert left_behind("lo", tmp_path)[0].changes == [TABLE]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense\n",
        "{}\n",
        "[]\n",
        '{"version": 1}\n',
        '{"version": 3}\n',
        '{"version": 2, "device": "lo"}\n',
        "\0\0\n",
    ],
)
def test_a_journal_that_is_none_says_where_it_is_and_what_to_do(tmp_path: Path, text: str) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    made.path.write_text(text)
    with pytest.raises(JournalError, match=str(made.path)) as seen:
        left_behind("lo", tmp_path)
    assert "nic show" in str(seen.value.hint)


def test_what_is_left_is_rewritten_and_nothing_left_removes_the_file(tmp_path: Path) -> None:
    made = Journal.create("lo", "apply", tmp_path)
    made.record(TABLE)
    made.record(PIN)
    made.keep([PIN])
    assert left_behind("lo", tmp_path)[0].changes == [PIN]
    made.keep([])
    assert left_behind("lo", tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_reboot_and_a_new_device_of_the_same_name_make_it_stale() -> None:
    here = Origin.here("lo")
    assert here.stale_reason(here) is None
    assert "reboot" in str(Origin("lo", "other", here.netns, here.ifindex).stale_reason(here))
    assert "another device" in str(Origin("lo", here.boot_id, here.netns, 99).stale_reason(here))
    gone = Origin.here("nosuchdevice")
    assert gone.ifindex == 0
    assert "is gone" in str(Origin("nosuchdevice", here.boot_id, here.netns, 5).stale_reason(gone))


def test_the_daemon_s_journal_comes_before_that_of_apply(tmp_path: Path) -> None:
    for owner in ("apply", "daemon"):
        Journal.create("lo", owner, tmp_path).record(TABLE)
    assert [found.owner for found in left_behind("lo", tmp_path)] == ["daemon", "apply"]
    assert [found.owner for found in left_behind("lo", tmp_path, owner="apply")] == ["apply"]
    assert devices_with_journals(tmp_path) == ["lo"]


def test_another_namespace_s_journal_is_not_ours(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    netns = journal_module.namespace_cookie()
    made.path.rename(tmp_path / made.path.name.replace(f".{netns}.", f".{netns + 1}."))
    assert left_behind("lo", tmp_path) == []
    assert devices_with_journals(tmp_path) == []


def test_the_namespace_in_the_header_counts_whatever_the_file_is_called(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    made.record(Change("lo rx-0 rps_cpus", "", "0"))
    text = made.path.read_text()
    made.path.write_text(text.replace(f'"netns": {made.origin.netns}', f'"netns": {made.origin.netns + 1}', 1))
    [found] = left_behind("lo", tmp_path)
    undone = undo_journal(found, Settings(tmp_path / "no machine"))
    assert "another network namespace" in str(undone.stale)
    assert list(tmp_path.iterdir()) == []


def test_where_journals_are_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLEXSTREAM_NIC_DIR", raising=False)
    usual = ["/var/lib/flexstream/nic", "/run/flexstream/nic"]
    monkeypatch.setattr(journal_module.os, "geteuid", lambda: 1000)
    assert [str(place) for place in folders()] == usual
    monkeypatch.setattr(journal_module.os, "geteuid", lambda: 0)
    assert [str(place) for place in folders()] == usual[::-1], "the first one is the service's"
    monkeypatch.undo()
    monkeypatch.setenv("FLEXSTREAM_NIC_DIR", str(tmp_path))
    assert folders() == (tmp_path,)
    made = Journal.create("lo", "daemon")
    assert made.path.parent == tmp_path
    assert json.loads(made.path.read_text())["device"] == "lo"


def test_no_folder_to_write_is_an_error_before_any_change(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(JournalError, match="nothing is changed") as seen:
        Journal.create("lo", "daemon", blocked / "nic")
    assert "FLEXSTREAM_NIC_DIR" in str(seen.value.hint)


def test_a_journal_that_vanished_is_an_error_and_the_change_is_not_remembered(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path / "nic")
    made.path.unlink()
    (tmp_path / "nic").rmdir()
    with pytest.raises(JournalError, match="stays as it is"):
        made.record(TABLE)
    assert made.changes == []


def test_a_folder_that_may_not_be_read_is_said_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(journal_module.os, "listdir", refuse)  # root may read everything, so the kernel is played
    with pytest.raises(JournalError, match="this user may not read"):
        devices_with_journals(tmp_path)


# -- a journal makes its reader write to the machine: whom it believes, and what may be in it


def undo_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """`flexstream nic undo` over this folder: its exit code."""
    from flexstream.cli import main

    monkeypatch.setenv("FLEXSTREAM_NIC_DIR", str(folder))
    with pytest.raises(SystemExit) as ended:
        main(["nic", "undo"])
    return int(ended.value.code or 0)


def somebody_else_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's: chowned by root; for others, root is played, who is somebody else than they are."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)


def bait(tmp_path: Path) -> tuple[Path, Change]:
    """A file, and a change whose "device" leads there."""
    target = tmp_path / "etc-shadow"
    target.write_text("12")
    queue = tmp_path / "evil/queues/rx-0"
    queue.mkdir(parents=True)
    (queue / "rps_cpus").symlink_to(target)
    return target, Change(f"../../..{tmp_path}/evil rx-0 rps_cpus", "0-2", "")


def test_a_crafted_line_writes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, crafted = bait(tmp_path)
    made = Journal.create("lo", "daemon", tmp_path / "nic")
    made.record(crafted)
    assert undo_command(tmp_path / "nic", monkeypatch) == 1
    assert target.read_text() == "12"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Change("../x rx-0 rps_cpus", "", "0"), "does not know a setting"),
        (Change(".. rx-0 rps_cpus", "", "0"), "does not know a setting"),
        (Change("lo rx-0/../../x rps_cpus", "", "0"), "does not know a setting"),
        (Change("lo rx-0 ../rps_cpus", "", "0"), "does not know a setting"),
        (Change("lo feature ../x", "on", "off"), "does not know a setting"),
        (Change("eth9 table", "0,1", "1,1"), "not a setting of lo"),
        (Change("lo table", "0,1;x", "1,1"), "lo table"),
        (Change("lo rx-0 rps_cpus", "0-99999999", "0"), "rps_cpus"),
        (Change("lo rx-0 rps_flow_cnt", "4096\n1", "0"), "rps_flow_cnt"),
        (Change("irq 26 cpus", "", "2"), "irq 26 cpus"),
        (Change("lo flag rxhash", "perhaps", "on"), "on or off|rxhash"),
    ],
)
def test_a_line_that_is_no_setting_of_this_device_is_not_read(tmp_path: Path, change: Change, why: str) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    made.record(PIN)
    made.record(change)
    with pytest.raises(JournalError, match=why):
        left_behind("lo", tmp_path)


def test_an_interrupt_that_is_not_the_device_s_is_left_alone(tmp_path: Path) -> None:
    affinity = tmp_path / "root/proc/irq/25/smp_affinity_list"
    affinity.parent.mkdir(parents=True)
    affinity.write_text("3")
    (tmp_path / "root/proc/interrupts").write_text("      CPU0\n 25:   9   PCI-MSI 1-edge   nvme0q1\n")
    made = Journal.create("lo", "daemon", tmp_path / "nic")
    made.record(PIN)
    undone = undo_journal(made, Settings(tmp_path / "root"))
    assert affinity.read_text() == "3"
    assert (undone.left, undone.undone, undone.dropped) == ((), (), ("irq 25 cpus does not belong to lo: left alone",))


def test_what_somebody_else_may_write_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nic"
    made = Journal.create("lo", "daemon", folder)
    made.record(Change("lo rx-0 rps_cpus", "0", ""))
    somebody_else_has(folder, monkeypatch)
    assert left_behind("lo", folder) == []
    assert devices_with_journals(folder) == []
    [(path, why)] = foreign_journals(folder)
    assert path == made.path
    assert "belongs to user" in why
    assert undo_command(folder, monkeypatch) == 1
    assert made.path.exists()
    with pytest.raises(JournalError, match="belongs to user"):
        Journal.create("lo", "apply", folder)


def test_a_file_of_somebody_else_in_a_good_folder_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    somebody_else_has(made.path, monkeypatch)
    monkeypatch.setattr(trust, "check_folder", lambda folder: None)
    with pytest.raises(JournalError, match="not trusted"):
        Journal.read(made.path)


def test_a_link_or_a_folder_that_all_may_write_is_not_believed(tmp_path: Path) -> None:
    made = Journal.create("lo", "daemon", tmp_path)
    real = tmp_path / "real"
    made.path.rename(real)
    made.path.symlink_to(real)
    with pytest.raises(JournalError, match="cannot read the journal"):
        Journal.read(made.path)
    made.path.unlink()
    real.rename(made.path)
    tmp_path.chmod(0o777)
    with pytest.raises(JournalError, match="others may write"):
        Journal.read(made.path)
    assert foreign_journals(tmp_path)


def test_a_renamed_device_has_its_journal_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"eth0": 7}
    monkeypatch.setattr(journal_module, "device_index", lambda name: names.get(name, 0))
    monkeypatch.setattr(journal_module, "device_name", lambda index: {7: next(iter(names), None)}.get(index))
    made = Journal.create("eth0", "daemon", tmp_path)
    made.record(Change("eth0 rx-0 rps_cpus", "", "0"))
    names.pop("eth0")
    names["lan0"] = 7
    assert devices_with_journals(tmp_path) == ["lan0"]
    mask = tmp_path / "root/sys/class/net/lan0/queues/rx-0/rps_cpus"
    mask.parent.mkdir(parents=True)
    mask.write_text("1")
    for name in ("eth0", "lan0"):  # by what it was called too, while nothing else is called so
        assert [found.origin.ifindex for found in left_behind(name, tmp_path)] == [7]
    undone = undo_journal(left_behind("lan0", tmp_path)[0], Settings(tmp_path / "root"))
    assert [str(change) for change in undone.undone] == ["lan0 rx-0 rps_cpus:  -> 0"]
    assert mask.read_text() == "0"
    assert not list(tmp_path.glob("*.jsonl"))

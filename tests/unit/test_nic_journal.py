"""The journal: on disk before the change, readable after a crash, never applied to another boot or device."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from flexstream.nic import journal as journal_module
from flexstream.nic.contract import Change
from flexstream.nic.journal import Journal, JournalError, Origin, devices_with_journals, folders, left_behind

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
        '{"version": 2}\n',
        '{"version": 1, "device": "lo"}\n',
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
    netns = os.stat("/proc/self/ns/net").st_ino
    made.path.rename(tmp_path / made.path.name.replace(str(netns), str(netns + 1)))
    assert left_behind("lo", tmp_path) == []
    assert devices_with_journals(tmp_path) == []


def test_where_journals_are_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLEXSTREAM_NIC_DIR", raising=False)
    assert [str(place) for place in folders()] == ["/var/lib/flexstream/nic", "/run/flexstream/nic"]
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
    with pytest.raises(JournalError, match="may not be read"):
        devices_with_journals(tmp_path)

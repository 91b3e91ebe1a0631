"""KernelNic comes, goes and dies without a trace, and says what is wrong when something is. Needs root."""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from flexstream.errors import ConfigError
from flexstream.nic.bpf.loader import CAP_BPF, CAP_NET_ADMIN, AttachType, attached_programs
from flexstream.nic.bpf.programs import Place
from flexstream.nic.contract import Change
from flexstream.nic.device import grant as grants
from flexstream.nic.device import receive_steering
from flexstream.nic.device.changes import undo_journal
from flexstream.nic.device.journal import Journal, devices_with_journals, foreign_journals, left_behind
from flexstream.nic.device.settings import Settings
from flexstream.nic.kernel_table import KernelNic
from tests.nic.flows import eventually_arrives_on, rig
from tests.nic.netns import (
    Namespace,
    Pair,
    heard,
    namespace,
    read_sys,
    run_inside,
    say,
    started_inside,
    veth_pair,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.root

METHODS = ["tcx", "xdp"]
PR_SET_KEEPCAPS = 8
SERVICE = 65534  # user and group


def programs_on(where: Namespace, device: str) -> int:
    """How many programs are attached there: tcx ingress and egress, and XDP."""
    with where.entered():
        index = socket.if_nametoindex(device)
        tcx = sum(len(attached_programs(index, kind)) for kind in (AttachType.TCX_INGRESS, AttachType.TCX_EGRESS))
    return tcx + where.execute("ip", "-details", "link", "show", device).count("prog/xdp")


def rps_of(where: Namespace, device: str) -> str:
    return read_sys(where, f"class/net/{device}/queues/rx-0/rps_cpus").lstrip("0,")


# -- it leaves nothing behind


def stay_started(device: str, method: str, folder: Path) -> None:
    nic = KernelNic(device, groups=16, method=method, journal_folder=folder)
    nic.start([0, 1])
    say([str(change) for change in nic.changes()])
    heard()
    nic.close()
    assert nic.changes() == ()
    nic.close()


@pytest.mark.parametrize("device", ["veth", "lo"])
@pytest.mark.parametrize("method", METHODS)
def test_closing_takes_everything_back(method: str, device: str, tmp_path: Path) -> None:
    with veth_pair() as pair:
        name = pair.server_device if device == "veth" else "lo"
        with started_inside(pair.server, stay_started, name, method, tmp_path) as process:
            changes = process.said()
            assert any("fs_steer" in change for change in changes)
            assert programs_on(pair.server, name) == 1
            assert rps_of(pair.server, name) == ("3" if method == "tcx" else "")
            process.channel.send("close")
            process.result()
        assert programs_on(pair.server, name) == 0
        assert rps_of(pair.server, name) == ""
        assert list(tmp_path.iterdir()) == []


def undo_what_is_left(device: str, folder: Path) -> list[str]:
    return [
        str(change) for journal in left_behind(device, folder) for change in undo_journal(journal, Settings()).undone
    ]


@pytest.mark.parametrize("method", METHODS)
def test_kill_9_detaches_the_program_and_undo_restores_rps(method: str, tmp_path: Path) -> None:
    with veth_pair() as pair:
        with started_inside(pair.server, stay_started, pair.server_device, method, tmp_path) as process:
            process.said()
            assert programs_on(pair.server, pair.server_device) == 1
            process.kill()
        wait_until(lambda: programs_on(pair.server, pair.server_device) == 0, "the program to be gone")
        if method == "tcx":
            assert rps_of(pair.server, pair.server_device) == "3"
        undone = run_inside(pair.server, undo_what_is_left, pair.server_device, tmp_path)
        assert len(undone) == (1 if method == "tcx" else 0)
        assert rps_of(pair.server, pair.server_device) == ""
        assert list(tmp_path.iterdir()) == []


def start_again(device: str, folder: Path) -> None:
    nic = KernelNic(device, groups=16, method="tcx", journal_folder=folder)
    nic.start([0])
    assert (nic.changes()[0].old, nic.changes()[0].new) == ("", "0")
    nic.close()


def test_the_next_start_after_kill_9_knows_the_value_from_before(tmp_path: Path) -> None:
    with veth_pair() as pair:
        with started_inside(pair.server, stay_started, pair.server_device, "tcx", tmp_path) as process:
            process.said()
            process.kill()
        run_inside(pair.server, start_again, pair.server_device, tmp_path)
        assert rps_of(pair.server, pair.server_device) == ""
        assert list(tmp_path.iterdir()) == []


def fail_to_start(device: str, folder: Path) -> None:
    nic = KernelNic(device, groups=16, method="tcx", journal_folder=folder)
    with pytest.raises(ConfigError, match=r"core 4095 for queue 1.*online"):
        nic.start([0, 4095])
    assert nic.changes() == ()
    nic.start([1])  # it was released: another try may succeed
    assert nic.table() == (0,) * 128
    with pytest.raises(ConfigError, match="already started"):
        nic.start([1])
    nic.close()
    with pytest.raises(ConfigError, match="closed"):
        nic.start([0])


def test_a_start_that_fails_leaves_the_device_as_it_was(tmp_path: Path) -> None:
    with veth_pair() as pair:
        run_inside(pair.server, fail_to_start, pair.server_device, tmp_path)
        assert rps_of(pair.server, pair.server_device) == ""


# -- it says what is wrong


def keep_only(capabilities: tuple[int, ...], uid: int) -> None:
    """Become this user with these capabilities and no others, as a service does."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    low = sum(1 << bit for bit in capabilities if bit < 32)
    high = sum(1 << bit - 32 for bit in capabilities if bit >= 32)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)  # effective, permitted, inheritable, twice
    assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())


def without_privilege(device: str, folder: Path, uid: int) -> tuple[str, str, str]:
    keep_only((), uid)
    nic = KernelNic(device, groups=16, journal_folder=folder)
    assert nic.steering() is None
    assert nic.describe()["aligned"] is False
    with pytest.raises(ConfigError) as caught:
        nic.start([0, 1])
    with pytest.raises(ConfigError):
        nic.table()
    probed = KernelNic.probe(device)
    assert probed is not None
    reason = nic.capability("write_table").reason
    nic.close()
    return reason, caught.value.message, probed


@pytest.mark.parametrize("uid", [0, 65534], ids=["root-without-capabilities", "nobody"])
def test_missing_privilege_is_explained(uid: int, tmp_path: Path) -> None:
    with veth_pair() as pair:
        reason, raised, probed = run_inside(pair.server, without_privilege, pair.server_device, tmp_path, uid)
        assert "CAP_BPF and CAP_NET_ADMIN" in reason
        assert "run as root" in reason
        assert reason in raised
        assert probed == reason
        assert programs_on(pair.server, pair.server_device) == 0


class Stocked(Pair):
    """Has its sockets from before: entering a namespace needs more privilege than a NIC does."""

    stock: ClassVar[list[socket.socket]] = []

    def client_socket(self, family: socket.AddressFamily) -> socket.socket:
        return self.stock.pop()


def with_the_least_privilege(pair: Pair, folder: Path, uid: int) -> str | None:
    Stocked.stock = [pair.client_socket(socket.AF_INET) for _ in range(8)]
    os.chown(folder, uid, uid)
    keep_only((CAP_NET_ADMIN, CAP_BPF), uid)
    stocked = Stocked(pair.server, pair.client, pair.server_device, pair.client_device)
    with rig(stocked, pair.server_device, folder, groups=8) as here:
        for group in range(8):
            here.connect(group).send(3000)
        assert [flow.core for flow in here.flows] == [0, 1] * 4
        here.nic.follow([1] * 8)
        for flow in here.flows:
            eventually_arrives_on(flow, 1)
        assert sum(here.nic.bucket_counters()) > 0
        assert here.nic.health().state == "unverified"
        return here.nic.method


@pytest.mark.parametrize(("uid", "method"), [(0, Place.TCX_INGRESS), (65534, Place.XDP)], ids=["root", "service"])
def test_two_capabilities_are_enough(uid: int, method: Place) -> None:
    """Without being root the RPS files cannot be written: then it is XDP, which needs none."""
    with veth_pair() as pair, tempfile.TemporaryDirectory() as folder:
        assert run_inside(pair.server, with_the_least_privilege, pair, Path(folder), uid) == method
        os.chown(folder, 0, 0)
        assert os.listdir(folder) == []


def grant_files(device: str, group: int) -> list[str]:
    return [str(path) for path in grants.grant(device, group).files]


def take_files_back(group: int) -> int:
    return len(grants.take_back(group).files)


def test_with_a_grant_the_service_writes_rps_without_reading_everybody_s_files() -> None:
    """As in the unit's drop-in: root hands the device's files over, two capabilities do the rest."""
    with veth_pair() as pair, tempfile.TemporaryDirectory() as folder:
        granted = run_inside(pair.server, grant_files, pair.server_device, SERVICE)
        assert granted
        assert all(f"/{pair.server_device}/" in path for path in granted)
        assert run_inside(pair.server, with_the_least_privilege, pair, Path(folder), SERVICE) == Place.TCX_INGRESS
        assert rps_of(pair.server, pair.server_device) == ""
        assert run_inside(pair.server, take_files_back, SERVICE) == len(granted)
        mask = f"/sys/class/net/{pair.server_device}/queues/rx-0/rps_cpus"
        assert pair.server.execute("stat", "-c", "%u %g %a", mask).split() == ["0", "0", "644"]


def in_a_foreign_sysfs(path: str) -> str:
    """Started in the other namespace; goes to `path` without a /sys of its own."""
    Namespace(Path(path).name).enter_for_good()
    nic = KernelNic("lo", groups=16, method="tcx")
    reason = nic.capability("write_table").reason
    nic.close()
    return reason


def test_a_sysfs_of_another_namespace_is_not_written(tmp_path: Path) -> None:
    with veth_pair() as pair, namespace() as other:
        reason = run_inside(pair.server, in_a_foreign_sysfs, other.path)
        assert "/sys does not show the network namespace of this process" in reason
        assert rps_of(pair.server, "lo") == ""


def journals_of_others(folder: Path, uid: int) -> tuple[int, list[str], list[str]]:
    keep_only((), uid)
    return len(left_behind("lo", folder)), devices_with_journals(folder), [why for _, why in foreign_journals(folder)]


@pytest.mark.parametrize(("mode", "why"), [(0o750, "this user may not read"), (0o755, "this user may not change")])
def test_what_root_left_is_not_the_service_s_to_undo_and_not_in_its_way(mode: int, why: str) -> None:
    with namespace() as where, tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        place = Path(folder) / "nic"
        run_inside(where, leave_a_journal, place)
        place.chmod(mode)
        left, devices, [reason] = run_inside(where, journals_of_others, place, SERVICE)
        assert (left, devices) == (0, [])
        assert why in reason
        assert run_inside(where, undo_what_is_left, "lo", place) == ["lo rx-0 rps_cpus:  -> "]


def leave_a_journal(folder: Path) -> None:
    Journal.create("lo", "daemon", folder).record(Change("lo rx-0 rps_cpus", "", ""))


def wrong_arguments(device: str) -> None:
    for arguments, words in (
        ({"device": "nosuch0", "groups": 4}, "there is no device 'nosuch0'"),
        ({"device": device, "groups": 0}, "at least one"),
        ({"device": device, "groups": 4, "method": "magic"}, "auto, tcx, xdp"),
    ):
        with pytest.raises(ConfigError, match=words):
            KernelNic(**arguments)  # type: ignore[arg-type]
    assert "there is no device" in (KernelNic.probe("nosuch0") or "")
    assert KernelNic.probe(device) is None
    nic = KernelNic(device, groups=4)
    before = nic.table()
    for table, words in (([0] * 127, "127 entries"), ([0] * 127 + [99], "queue 99"), ([-1] * 128, "queue -1")):
        with pytest.raises(ConfigError, match=words):
            nic.set_table(table)
    with pytest.raises(ConfigError, match="queue 99"):
        nic.pin(99, 0)
    assert nic.table() == before
    nic.close()


def test_wrong_arguments_are_refused_with_what_is_allowed() -> None:
    with veth_pair() as pair:
        run_inside(pair.server, wrong_arguments, pair.server_device)


def second_daemon(device: str, folder: Path, method: str) -> str:
    nic = KernelNic(device, groups=16, method=method, journal_folder=folder)
    with pytest.raises(ConfigError) as caught:
        nic.start([0])
    nic.close()
    return caught.value.message


@pytest.mark.parametrize("method", METHODS)
def test_two_daemons_on_one_device_do_not_disturb_each_other(method: str, tmp_path: Path) -> None:
    with (
        veth_pair() as pair,
        started_inside(pair.server, stay_started, pair.server_device, method, tmp_path) as first,
    ):
        first.said()
        message = run_inside(pair.server, second_daemon, pair.server_device, tmp_path, method)
        assert f"in use by another flexstream (process {first.pid})" in message
        assert programs_on(pair.server, pair.server_device) == 1
        assert rps_of(pair.server, pair.server_device) == ("3" if method == "tcx" else "")
        first.channel.send("close")
        first.result()


# -- the device changes under it


def device_deleted(pair: Pair, method: str, folder: Path) -> None:
    with rig(pair, pair.server_device, folder, method=method, groups=4) as here:
        flows = [here.connect(group) for group in range(4)]
        for flow in flows:
            flow.send(1000)
        assert here.nic.verify([flow.connection() for flow in flows]).verdict == "verified"
        say("started")
        heard()
        health = here.nic.health()
        assert health.state == "gone", health
        assert pair.server_device in health.reason
        assert here.nic.drift() == []
        with pytest.raises(ConfigError, match="gone"):
            here.nic.follow([1, 1, 1, 1])
        assert len(here.nic.bucket_counters()) == 128
        here.nic.verify([])
        assert here.nic.health().state == "gone"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "made-anew"])
@pytest.mark.parametrize("method", METHODS)
def test_a_device_that_vanishes_is_gone_and_nothing_crashes(method: str, again: bool, tmp_path: Path) -> None:
    with veth_pair() as pair, started_inside(pair.server, device_deleted, pair, method, tmp_path) as process:
        assert process.said() == "started"
        pair.server.ip("link", "del", pair.server_device)
        if again:
            pair.server.ip("link", "add", pair.server_device, "type", "veth", "peer", "name", "other")
        process.channel.send("deleted")
        process.result()


def device_renamed(pair: Pair, method: str, folder: Path) -> None:
    with rig(pair, pair.server_device, folder, method=method, groups=4) as here:
        flows = [here.connect(group) for group in range(4)]
        say("started")
        heard()
        assert here.nic.health().state == "unverified", here.nic.health()
        assert here.nic.device == "lan0"
        assert here.nic.drift() == []
        here.nic.follow([1, 1, 1, 1])
        for flow in flows:
            eventually_arrives_on(flow, 1)
        assert here.nic.verify([flow.connection() for flow in flows]).verdict == "verified"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_renamed_device_is_still_steered_and_put_back(method: str, tmp_path: Path) -> None:
    with veth_pair() as pair, started_inside(pair.server, device_renamed, pair, method, tmp_path) as process:
        assert process.said() == "started"
        pair.server.ip("link", "set", pair.server_device, "name", "lan0")
        process.channel.send("renamed")
        process.result()
        assert rps_of(pair.server, "lan0") == ""


def test_kill_9_and_another_name_undo_restores_rps(tmp_path: Path) -> None:
    with veth_pair() as pair:
        with started_inside(pair.server, stay_started, pair.server_device, "tcx", tmp_path) as process:
            process.said()
            process.kill()
        pair.server.ip("link", "set", pair.server_device, "name", "lan0")
        assert rps_of(pair.server, "lan0") == "3"
        assert len(run_inside(pair.server, undo_what_is_left, "lan0", tmp_path)) == 1
        assert rps_of(pair.server, "lan0") == ""
        assert list(tmp_path.iterdir()) == []


def test_a_journal_of_a_namespace_that_is_gone_is_not_applied_to_another(tmp_path: Path) -> None:
    """The same names and numbers of devices, perhaps the same inode: the cookie tells them apart."""
    with veth_pair() as pair, started_inside(pair.server, stay_started, "lo", "tcx", tmp_path) as process:
        process.said()
        process.kill()
        [left] = tmp_path.iterdir()
        with namespace() as other:
            assert run_inside(other, undo_what_is_left, "lo", tmp_path) == []
        assert left.exists()
        assert run_inside(pair.server, undo_what_is_left, "lo", tmp_path)


def somebody_else_changes_it(pair: Pair, folder: Path) -> None:
    with rig(pair, pair.server_device, folder, method="tcx", groups=4) as here:
        flows = [here.connect(group) for group in range(4)]
        assert here.nic.drift() == []
        say("started")
        heard()  # RPS is off now
        assert here.nic.drift() == [f"{pair.server_device} rx-0 rps_cpus: it is 0, but FlexStream had set 0-1"]
        assert "rps_cpus" in here.nic.health().reason
        for flow in flows:
            eventually_arrives_on(flow, 0)
        found = here.nic.verify([flow.connection() for flow in flows])
        assert found.verdict == "disobeyed", found
        assert "did not arrive where the table says" in found.reason
        assert here.nic.disobeyed_packets() > 0
        here.nic.reapply()
        assert here.nic.drift() == []
        for flow in flows:
            eventually_arrives_on(flow, flow.group % 2)
        say("put back")
        heard()  # the device is down now
        assert here.nic.drift() == [f"{pair.server_device} is down"]
        assert here.nic.health().state == "unverified"
        here.nic.follow([0, 0, 0, 0])
        say("moved while it was down")
        heard()
        for flow in flows:
            eventually_arrives_on(flow, 0)
        assert here.nic.drift() == []


def test_what_somebody_else_changes_is_noticed_and_can_be_put_back(tmp_path: Path) -> None:
    with veth_pair() as pair, started_inside(pair.server, somebody_else_changes_it, pair, tmp_path) as process:
        process.said()
        pair.server.execute("sh", "-c", f"echo 1 > /sys/class/net/{pair.server_device}/queues/rx-0/rps_cpus")
        process.channel.send("changed")
        assert process.said() == "put back"
        pair.client.ip("link", "set", pair.client_device, "down")
        pair.server.ip("link", "set", pair.server_device, "down")
        process.channel.send("down")
        process.said()
        for inside, device, address in (
            (pair.client, pair.client_device, pair.client_addresses[0]),
            (pair.server, pair.server_device, pair.server_addresses[0]),
        ):
            inside.ip("link", "set", device, "up")
            inside.ip("addr", "replace", f"{address}/24", "dev", device)
        process.channel.send("up")
        process.result()
        assert rps_of(pair.server, pair.server_device) == ""


# -- which way it takes


def with_a_read_only_sysfs(device: str) -> tuple[str | None, str]:
    assert os.system("mount -o remount,ro /sys") == 0
    nic, only_tcx = KernelNic(device, groups=4), KernelNic(device, groups=4, method="tcx")
    nic.start([0, 1])
    found = nic.method, only_tcx.capability("write_table").reason
    only_tcx.close()
    nic.close()
    return found


def test_auto_takes_xdp_where_rps_cannot_be_written() -> None:
    with veth_pair() as pair:
        method, reason = run_inside(pair.server, with_a_read_only_sysfs, pair.server_device)
        assert method == Place.XDP
        assert "cannot be written" in reason


def test_auto_takes_tcx_here() -> None:
    assert receive_steering.sysfs_shows_this_namespace()
    nic = KernelNic("lo", groups=1000)
    assert nic.method == Place.TCX_EGRESS
    assert len(nic.table()) == 1024
    assert nic.changes() == ()
    nic.close()

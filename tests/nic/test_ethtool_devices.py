"""What `flexstream nic` and `doctor` say of real devices is what ethtool(8), ip(8) and the kernel say. Needs root.

Devices are veth and multi-queue tap in namespaces of their own, and the machine's own device, which is only read. They
have no RSS table: that is what must be said of them. The table itself is tested in the guest of tests/nic_in_loop.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexstream.nic.device.facts import read_facts
from flexstream.nic.device.interrupts import pinning_obstacle, set_affinity
from flexstream.nic.ethtool import EthtoolNic
from flexstream.nic.probe import default_device
from tests.nic.netns import (
    Namespace,
    Process,
    command,
    heard,
    namespace,
    run_inside,
    say,
    started_inside,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.root, pytest.mark.time_limit(180)]

CLI = [sys.executable, "-m", "flexstream.cli"]
ONE_AFTER_THE_OTHER = """
import dataclasses, json, sys
from tests.nic.test_ethtool_devices import run_command
print(json.dumps([dataclasses.astuple(run_command(arguments)) for arguments in json.loads(sys.argv[1])]))
"""


def program(name: str) -> str:
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        pytest.fail(f"{name} is missing, so nothing can be compared with it: apt-get install ethtool iproute2")
    return found


def ethtool(*arguments: str) -> str:
    done = subprocess.run([program("ethtool"), *arguments], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def tool_channels(where: Namespace, device: str) -> dict[str, int]:
    """`ethtool -l`: maximums and current values; n/a is 0."""
    text = where.execute(program("ethtool"), "-l", device)
    values = re.findall(r"^(RX|TX|Other|Combined):\s+(\S+)$", text, re.MULTILINE)
    assert len(values) == 8, text
    numbers = [0 if value == "n/a" else int(value) for _, value in values]
    names = ("max_rx", "max_tx", "max_other", "max_combined", "rx", "tx", "other", "combined")
    return dict(zip(names, numbers, strict=True))


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def run_commands(journal: str) -> None:
    """Inside: run command lines, one after the other, until the test ends. Starting Python for each takes too long."""
    os.environ["FLEXSTREAM_NIC_DIR"] = journal
    while True:
        say(run_command(heard()))


def run_command(arguments: list[str]) -> Ended:
    from flexstream.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())


class Machine:
    """A namespace with a veth of four queues, and the command line inside it."""

    def __init__(self, where: Namespace, inside: Process, journal: Path) -> None:
        self.where = where
        self.journal = journal
        self._inside = inside

    def add_veth(self) -> None:
        queues = "numrxqueues 4 numtxqueues 4"
        self.where.ip(*f"link add va {queues} type veth peer name vb {queues}".split())
        self.where.ip("link", "set", "va", "up")
        self.where.ip("link", "set", "vb", "up")

    def run(self, *arguments: str) -> Ended:
        self._inside.channel.send(list(arguments))
        ended: Ended = self._inside.said()
        return ended

    def json(self, *arguments: str) -> Any:
        done = self.run(*arguments, "--json")
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def tool(self, name: str, *arguments: str) -> str:
        return self.where.execute(program(name), *arguments)


@contextlib.contextmanager
def machine_inside(journal: Path) -> Iterator[Machine]:
    with namespace() as where, started_inside(where, run_commands, str(journal)) as inside:
        made = Machine(where, inside, journal)
        made.add_veth()
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine_inside(tmp_path_factory.mktemp("nic") / "journal") as made:
        yield made


@pytest.fixture
def machine(shared: Machine) -> Machine:
    """With devices and a journal folder as new."""
    for device in ("va", "tq"):
        with contextlib.suppress(RuntimeError):
            shared.where.ip("link", "del", device)
    shutil.rmtree(shared.journal, ignore_errors=True)
    shared.add_veth()
    return shared


def test_show_says_of_a_veth_what_the_tools_say(machine: Machine) -> None:
    shown = machine.json("nic", "show", "va")
    assert shown["driver"] == re.search(r"driver: (\S+)", machine.tool("ethtool", "-i", "va"))[1] == "veth"  # type: ignore[index]
    assert shown["channels"] == tool_channels(machine.where, "va")
    assert shown["queues"] == 4
    [link] = json.loads(machine.tool("ip", "-j", "link", "show", "va"))
    assert shown["up"] == ("UP" in link["flags"])
    assert shown["link"]["link"]["mtu"] == link["mtu"]
    assert shown["link"]["link"]["address"] == link["address"]
    assert shown["link"]["by"].startswith("pyroute2 ")
    features = machine.tool("ethtool", "-k", "va")
    assert shown["flags"]["rxhash"] == ("receive-hashing: on" in features)
    assert shown["flags"]["ntuple"] == ("ntuple-filters: on" in features)
    assert shown["table"] == []
    assert shown["reasons"]["table"] == "no table: driver veth answered EOPNOTSUPP"
    assert shown["aligned"] is False
    assert shown["held_by"] is None


def test_show_as_text_has_the_reason_and_the_way_out(machine: Machine) -> None:
    done = machine.run("nic", "show", "va")
    assert done.returncode == 0
    assert "no table: driver veth answered EOPNOTSUPP" in done.stdout
    assert "--nic kernel" in done.stdout
    assert machine.run("nic", "show", "nosuch").returncode == 1


def test_a_tap_of_many_queues_is_read_as_the_tools_read_it(machine: Machine) -> None:
    machine.tool("ip", "tuntap", "add", "dev", "tq", "mode", "tap", "multi_queue")
    shown = machine.json("nic", "show", "tq")
    assert shown["driver"] == "tun"
    assert shown["channels"] == tool_channels(machine.where, "tq")
    assert shown["channels"]["max_combined"] == 256
    assert shown["up"] is False
    assert any(finding["what"] == "tq is down" for finding in shown["findings"])


def own_device_facts(device: str) -> dict[str, Any]:
    return read_facts(device).to_dict()


def test_the_machine_s_own_device_is_shown_as_the_tools_see_it(machine: Machine) -> None:
    device = default_device()
    if device is None:  # a machine without a network: the veth, inside
        facts = run_inside(machine.where, own_device_facts, "va")
        assert facts["driver"] == "veth"
        return
    done = subprocess.run([*CLI, "nic", "show", device, "--json"], capture_output=True, text=True, timeout=120)
    shown = json.loads(done.stdout)
    driver = re.search(r"driver: (\S+)", ethtool("-i", device))
    assert driver is not None
    assert shown["driver"] == driver[1]
    table = re.findall(r"^\s+\d+:\s+([\d\s]+)$", ethtool("-x", device), re.MULTILINE)
    assert shown["table"] == [int(queue) for row in table for queue in row.split()]
    for queue, irq in shown["queue_irq"].items():
        cores = Path(f"/proc/irq/{irq}/smp_affinity_list").read_text().strip()
        assert shown["queue_cpus"][queue] == list(_cores(cores))
    if not shown["table"]:
        assert EthtoolNic.probe(device) is not None


def _cores(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def test_doctor_says_the_same_of_every_device_as_show(machine: Machine) -> None:
    done = machine.run("doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    tables = {check["found"] for check in checks if check["name"] == "nic table"}
    assert {"va: no table: driver veth answered EOPNOTSUPP", "vb: no table: driver veth answered EOPNOTSUPP"} <= tables
    told = next(check["found"] for check in checks if check["name"] == "nic facts")
    assert "ethtool" in told
    assert not any("lo:" in table for table in tables)


def test_plan_apply_and_undo_change_and_restore_channels(machine: Machine) -> None:
    machine.tool("ethtool", "-L", "va", "rx", "1", "tx", "1")
    before = tool_channels(machine.where, "va")
    planned = machine.json("nic", "plan", "va", "--workers", "1", "--channels", "3")
    assert [change["where"] for change in planned["changes"]] == ["va channels rx"]
    assert tool_channels(machine.where, "va") == before
    assert "ethtool -L va rx 3" in machine.run("nic", "plan", "va", "--channels", "3", "--script").stdout
    done = machine.run("nic", "apply", "va", "--workers", "1", "--channels", "3")
    assert done.returncode == 0, done.stderr
    assert tool_channels(machine.where, "va")["rx"] == 3
    doctor = json.loads(machine.run("doctor", "--json").stdout)["checks"]
    assert any(check["name"] == "nic journal" and "nic undo va" in check["advice"] for check in doctor)
    undone = machine.json("nic", "undo")
    assert undone["devices"]["va"][0]["undone"] == [{"where": "va channels rx", "old": "1", "new": "3"}]
    assert tool_channels(machine.where, "va") == before
    assert machine.run("nic", "undo").stdout == "nothing to undo\n"
    assert list(machine.journal.iterdir()) == []


def test_the_script_does_what_apply_does(machine: Machine) -> None:
    machine.tool("ethtool", "-L", "va", "rx", "1", "tx", "1")
    text = machine.run("nic", "plan", "va", "--workers", "1", "--channels", "2", "--script").stdout
    machine.tool("sh", "-c", text)
    assert tool_channels(machine.where, "va")["rx"] == 2
    assert machine.json("nic", "plan", "va", "--workers", "1", "--channels", "2")["different"] == 0


def test_several_applies_are_undone_to_the_first_value(machine: Machine) -> None:
    for cores in ("0", "0-1", "1"):
        assert machine.run("nic", "set", "va rx-0 rps_cpus", cores).returncode == 0
    assert machine.tool("cat", "/sys/class/net/va/queues/rx-0/rps_cpus").strip().strip("0,") == "2"
    assert machine.run("nic", "undo", "va").returncode == 0
    assert machine.tool("cat", "/sys/class/net/va/queues/rx-0/rps_cpus").strip().strip("0,") == ""


def test_a_refused_setting_is_told_and_leaves_no_journal(machine: Machine) -> None:
    done = machine.run("nic", "set", "va channels rx", "99")
    assert done.returncode == 1
    assert "EINVAL" in done.stderr
    assert machine.run("nic", "undo").stdout == "nothing to undo\n"
    assert "does not know a setting" in machine.run("nic", "set", "va nonsense", "1").stderr


def test_watch_notices_a_foreign_change_and_puts_it_back(machine: Machine) -> None:
    # The first look finds nothing; then somebody changes the channels.
    child = subprocess.Popen(
        [
            "ip",
            "netns",
            "exec",
            machine.where.name,
            *CLI,
            "nic",
            "watch",
            "va",
            "--put-back",
            "--interval",
            "0.2",
            "--json",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["drift"] == []
        machine.tool("ethtool", "-L", "va", "rx", "2")
        look: dict[str, Any] = {"drift": []}
        while not look["drift"]:
            look = json.loads(child.stdout.readline())
        assert any("4 -> 2 receive queues" in line for line in look["drift"])
        assert look["put_back"][0] == {"where": "va channels rx", "old": "2", "new": "4"}
        wait_until(lambda: tool_channels(machine.where, "va")["rx"] == 4, "the channels to be put back")
        machine.where.ip("link", "del", "va")
        while not any("va is gone" in line for line in look["drift"]):
            look = json.loads(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130


def test_watch_with_a_count_exits_by_what_it_saw(machine: Machine) -> None:
    assert machine.run("nic", "watch", "va", "--count", "1").returncode == 0
    assert machine.run("nic", "watch", "nosuch", "--count", "1").returncode == 1


def hold(device: str) -> None:
    from flexstream.nic.device.journal import DeviceLock

    lock = DeviceLock(device)
    lock.take()
    say(os.getpid())
    signal.pause()


def holder_of(device: str) -> int | None:
    from flexstream.nic.device.journal import DeviceLock

    return DeviceLock(device).holder()


def test_a_device_in_use_is_named_with_its_process_and_only_in_its_own_namespace(machine: Machine) -> None:
    with started_inside(machine.where, hold, "va") as holder:
        pid = holder.said()
        done = machine.run("nic", "apply", "va", "--channels", "2")
        assert done.returncode == 1
        assert f"process {pid}" in done.stderr
        assert machine.json("nic", "show", "va")["held_by"] == pid
        assert f"process id {pid}" in machine.run("nic", "watch", "va", "--put-back", "--count", "1").stderr
        with namespace() as other:
            assert run_inside(other, holder_of, "va") is None
        holder.kill()
    assert machine.run("nic", "apply", "va", "--workers", "1", "--channels", "2").returncode == 0
    assert machine.run("nic", "undo").returncode == 0


def test_watch_puts_nothing_back_behind_a_daemon_that_came_later(machine: Machine) -> None:
    watching = ["nic", "watch", "va", "--put-back", "--interval", "0.1"]
    child = subprocess.Popen(
        ["ip", "netns", "exec", machine.where.name, *CLI, *watching, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline())["drift"] == []
        with started_inside(machine.where, hold, "va") as holder:
            holder.said()
            machine.tool("ethtool", "-L", "va", "rx", "2")
            look: dict[str, Any] = {"drift": []}
            while not look["drift"]:
                look = json.loads(child.stdout.readline())
            assert look["put_back"] == []
            assert tool_channels(machine.where, "va")["rx"] == 2
            holder.kill()
        while not look["put_back"]:
            look = json.loads(child.stdout.readline())
        wait_until(lambda: tool_channels(machine.where, "va")["rx"] == 4, "the channels to be put back")
    finally:
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=30)
    assert "nothing was put back: va is in use by another flexstream" in said


def change_and_die(device: str) -> None:
    from flexstream.nic.contract import Change
    from flexstream.nic.device.changes import Applied
    from flexstream.nic.device.journal import DeviceLock, Journal
    from flexstream.nic.device.settings import Settings

    lock = DeviceLock(device)
    lock.take()
    applied = Applied(Settings(), Journal.create(device, "daemon"))
    applied.change(Change(f"{device} channels rx", "4", "2"))
    applied.change(Change(f"{device} rx-0 rps_cpus", "", "0"))
    say("changed")
    signal.pause()


def test_after_kill_9_undo_puts_everything_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXSTREAM_NIC_DIR", str(machine.journal))
    with started_inside(machine.where, change_and_die, "va") as daemon:
        assert daemon.said() == "changed"
        assert "in use" in machine.run("nic", "undo").stderr
        daemon.kill()
    assert tool_channels(machine.where, "va")["rx"] == 2
    doctor = json.loads(machine.run("doctor", "--json").stdout)["checks"]
    assert any(check["name"] == "nic journal" and check["state"] == "warn" for check in doctor)
    done = machine.run("nic", "undo")
    assert (done.returncode, done.stderr) == (0, "")
    assert tool_channels(machine.where, "va")["rx"] == 4
    assert machine.tool("cat", "/sys/class/net/va/queues/rx-0/rps_cpus").strip().strip("0,") == ""


def test_a_journal_of_a_device_that_was_made_anew_is_dropped(machine: Machine) -> None:
    assert machine.run("nic", "set", "va rx-0 rps_cpus", "0").returncode == 0
    machine.where.ip("link", "del", "va")
    machine.add_veth()
    done = machine.run("nic", "undo")
    assert done.returncode == 0
    assert "stale" in done.stdout
    assert machine.run("nic", "undo").stdout == "nothing to undo\n"


def pin_read_only() -> tuple[str, str]:
    command("mount", "--bind", "/proc/irq", "/proc/irq")
    command("mount", "-o", "remount,ro,bind", "/proc/irq")
    interrupt = next(int(name) for name in os.listdir("/proc/irq") if name.isdecimal())
    try:
        set_affinity(interrupt, (0,))
        failure = "none"
    except Exception as error:
        failure = str(error)
    return str(pinning_obstacle(interrupt)), failure


def test_a_read_only_proc_irq_is_a_clear_state(machine: Machine) -> None:
    obstacle, failure = run_inside(machine.where, pin_read_only)
    assert "read-only, as in containers" in obstacle
    assert "EROFS" in failure
    assert "on the host" in failure


def test_without_privilege_every_command_still_explains(machine: Machine) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.fail("setpriv is missing, so privilege cannot be dropped: apt-get install util-linux")
    commands = [
        ["nic", "show", "va", "--json"],
        ["nic", "plan", "va", "--workers", "1", "--channels", "2"],
        ["nic", "apply", "va", "--workers", "1", "--channels", "2"],
        ["nic", "undo"],
        ["nic", "watch", "va", "--count", "1"],
    ]
    drop = [setpriv, "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run(
        [
            "ip",
            "netns",
            "exec",
            machine.where.name,
            *drop,
            sys.executable,
            "-c",
            ONE_AFTER_THE_OTHER,
            json.dumps(commands),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "FLEXSTREAM_NIC_DIR": str(machine.journal)},
    )
    assert done.returncode == 0, done.stderr
    shown, planned, applied, undone, watched = (Ended(*ended) for ended in json.loads(done.stdout))
    facts = json.loads(shown.stdout)
    assert facts["may_write"] is False
    assert facts["channels"] == tool_channels(machine.where, "va")
    assert planned.returncode == 0
    assert "CAP_NET_ADMIN" in planned.stderr
    assert applied.returncode == 1
    assert "EPERM" in applied.stderr
    assert "CAP_NET_ADMIN" in applied.stderr
    assert undone.stdout == "nothing to undo\n"
    assert watched.returncode == 0


def probe_of(device: str) -> str | None:
    return EthtoolNic.probe(device)


def test_the_ethtool_nic_passes_a_veth_over_with_its_answer(machine: Machine) -> None:
    assert run_inside(machine.where, probe_of, "va") == "no table: driver veth answered EOPNOTSUPP"
    assert run_inside(machine.where, probe_of, "nosuch") == "there is no device nosuch"

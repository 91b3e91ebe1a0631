"""The unit: systemd accepts it, it asks for nothing it does not need, and the daemon keeps its side."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flexstream.daemon.config import SETTINGS, resolve
from flexstream.daemon.notify import notify, watchdog_interval_s


@pytest.fixture
def unit(project: Path, tmp_path: Path) -> Path:
    """The unit with a program that exists: the installed place is the packager's."""
    text = (project / "packaging" / "flexstream.service").read_text()
    program = tmp_path / "flexstream"
    program.symlink_to(sys.executable)
    copy = tmp_path / "flexstream.service"
    copy.write_text(text.replace("/usr/bin/flexstream", str(program)))
    return copy


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.fail("systemd-analyze is missing, so the unit cannot be checked: apt-get install systemd")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=50, check=False)


def test_systemd_accepts_the_unit(unit: Path) -> None:
    done = analyze("verify", "--man=no", str(unit))
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.fixture
def nic_unit(project: Path, unit: Path) -> Path:
    """The unit with the NIC's drop-in beside it."""
    folder = unit.with_name(unit.name + ".d")
    folder.mkdir()
    text = (project / "packaging" / "flexstream-nic.conf").read_text()
    (folder / "nic.conf").write_text(text.replace("/usr/bin/flexstream", str(unit.with_name("flexstream"))))
    return unit


def test_systemd_accepts_the_unit_with_the_drop_in_for_the_nic(nic_unit: Path) -> None:
    done = analyze("verify", "--man=no", str(nic_unit))
    assert (done.returncode, done.stderr.strip()) == (0, "")


def drop_in(project: Path) -> dict[str, list[str]]:
    """Its settings, each with all that it was given."""
    found: dict[str, list[str]] = {}
    for line in (project / "packaging" / "flexstream-nic.conf").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def test_the_drop_in_for_the_nic_opens_no_file_but_the_device_s(project: Path) -> None:
    settings = drop_in(project)
    for name in ("CapabilityBoundingSet", "AmbientCapabilities"):
        assert settings[name] == ["CAP_NET_ADMIN CAP_BPF"], "no capability that reads or writes files of others"


def test_root_s_helper_in_the_drop_in_is_a_command_that_there_is(project: Path) -> None:
    from flexstream.cli import main

    settings = drop_in(project)
    for line in settings["ExecStartPre"] + settings["ExecStopPost"]:
        prefix, program, *arguments = re.fullmatch(r"([+-]*)(\S+) (.*)", line).expand(r"\1 \2 \3").split()  # type: ignore[union-attr]
        assert (set(prefix), program) == (set("+-"), "/usr/bin/flexstream")
        with pytest.raises(SystemExit) as ended:
            main([*arguments, "--help"])
        assert not ended.value.code


def test_the_unit_is_little_exposed(unit: Path) -> None:
    done = analyze("security", "--offline=true", "--no-pager", str(unit))
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd has no offline security analysis (it came with version 250)")
    level = re.search(r"Overall exposure level.*?: ([0-9.]+)", done.stdout)
    assert level is not None, done.stdout + done.stderr
    assert float(level[1]) < 2.0


def test_the_unit_is_a_watched_notify_service_without_capabilities(project: Path) -> None:
    lines = (project / "packaging" / "flexstream.service").read_text().splitlines()
    for wanted in (
        "Type=notify",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "StateDirectory=flexstream",
        "User=flexstream",
    ):
        assert wanted in lines, wanted
    assert any(line.startswith("WatchdogSec=") for line in lines)
    assert any(line.startswith("LimitNOFILE=") for line in lines)


def test_the_packaged_settings_are_the_defaults_and_name_every_setting(project: Path) -> None:
    file = project / "packaging" / "flexstream.toml"
    environ = {"HOME": "/home/x"}
    packaged, default = resolve({}, environ, file), resolve({}, environ, Path("/dev/null"))
    assert packaged.problems == []
    assert packaged.config() == default.config()
    named = set(re.findall(r"^(?:# )?([a-z_]+) = ", file.read_text(), re.MULTILINE))
    assert named == set(SETTINGS)


def test_the_sysusers_file_makes_the_user_of_the_unit(project: Path) -> None:
    lines = (project / "packaging" / "flexstream.sysusers").read_text().splitlines()
    assert any(line.split()[:2] == ["u", "flexstream"] for line in lines)


def test_notify_sends_one_datagram_to_a_path_or_an_abstract_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    for address, name in ((path, path), (f"\0flexstream-{os.getpid()}", f"@flexstream-{os.getpid()}")):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
            receiver.bind(address)
            receiver.settimeout(60)
            assert notify("READY=1", "STATUS=2 streams", environ={"NOTIFY_SOCKET": name})
            assert receiver.recv(1000) == b"READY=1\nSTATUS=2 streams"


def test_notify_without_a_listener_is_no_error(tmp_path: Path) -> None:
    assert notify("READY=1", environ={}) is False
    assert notify("READY=1", environ={"NOTIFY_SOCKET": str(tmp_path / "gone")}) is False
    assert notify("READY=1", environ={"NOTIFY_SOCKET": "vsock:2:1"}) is False


def test_the_watchdog_is_pinged_twice_as_often_as_asked() -> None:
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000"}) == 15.0
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}) == 15.0
    assert watchdog_interval_s({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_interval_s({}) is None

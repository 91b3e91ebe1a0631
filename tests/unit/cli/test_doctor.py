"""The doctor names what a machine lacks, and what to do about it."""

from __future__ import annotations

import http.server
import json
import resource
import socket
import threading
from pathlib import Path

import pytest

import flexstream as fs
from flexstream.cli import machine, main
from tests.ports import quiet_port


def machine_with(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path


def test_cores_that_may_not_be_used_are_seen() -> None:
    assert machine.cores(4, {0, 1, 2, 3}).state == "ok"
    assert machine.cores(4, {0, 1, 3}).found == "3 of 4 cores are available (0-1,3)"
    assert machine.cores(4, {2}).state == "warn"


def test_the_limit_of_open_files_is_judged() -> None:
    assert machine.open_files(1 << 20, 1 << 20).state == "ok"
    assert machine.open_files(resource.RLIM_INFINITY, resource.RLIM_INFINITY).state == "ok"
    few = machine.open_files(1024, 4096)
    assert few.state == "warn"
    assert "ulimit -n" in few.advice
    assert machine.open_files(64, 64).state == "fail"


def test_a_port_that_another_program_has_is_named_with_the_way_to_find_it() -> None:
    number = quiet_port()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", number))
        taken.listen()
        check = machine.port("data port", number)
        assert check.state == "fail"
        assert f"sport = :{number}" in check.advice
    assert machine.port("data port", number).state == "ok"


def test_a_port_of_a_running_daemon_is_told_from_one_that_another_program_has() -> None:
    """Asked is who has the port, and not whether there is a daemon somewhere."""
    with fs.Engine(pin=False, listen="127.0.0.1:0") as engine, socket.socket() as taken:
        assert engine.data_address is not None
        assert "running flexstream daemon" in machine.port("data port", engine.data_address[1]).found
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert machine.port("data port", taken.getsockname()[1]).state == "fail"


@pytest.mark.parametrize(
    ("status", "body", "state"),
    [
        (200, b'{"status": "ok", "engine": "running"}', "ok"),
        (401, b'{"error": {"code": "bad_token", "message": "", "hint": ""}}', "ok"),
        (200, b"<html>It works!</html>", "fail"),
    ],
)
def test_a_control_port_is_told_by_what_it_answers(status: int, body: bytes, state: str) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert machine.port("control port", server.server_address[1]).state == state
        finally:
            server.shutdown()
            thread.join()


def test_small_kernel_limits_come_with_their_sysctl(tmp_path: Path) -> None:
    root = machine_with(
        tmp_path, {"proc/sys/net/core/somaxconn": "128", "proc/sys/net/core/rmem_max": "212992"}
    )
    assert "sysctl -w net.core.somaxconn=" in machine.somaxconn(root).advice
    assert "sysctl -w net.core.rmem_max=" in machine.buffer(root, "rmem_max", "receive").advice
    assert machine.buffer(root, "wmem_max", "send").state == "info"


def test_a_slow_clock_is_seen_and_a_better_one_named(tmp_path: Path) -> None:
    folder = "sys/devices/system/clocksource/clocksource0"
    files = {f"{folder}/current_clocksource": "hpet", f"{folder}/available_clocksource": "tsc hpet acpi_pm"}
    check = machine.clock(machine_with(tmp_path, files))
    assert check.state == "warn"
    assert "clocksource=tsc" in check.advice


def test_network_devices_come_with_driver_and_queues(tmp_path: Path) -> None:
    root = machine_with(tmp_path, {"sys/class/net/eth0/operstate": "up", "sys/class/net/lo/operstate": "up"})
    device = root / "sys/class/net/eth0"
    (device / "device").mkdir()
    (root / "drivers/ixgbe").mkdir(parents=True)
    (device / "device/driver").symlink_to(root / "drivers/ixgbe")
    (device / "queues/rx-0").mkdir(parents=True)
    [check] = machine.devices(root)
    assert check.state == "warn"
    assert check.found == "eth0: driver ixgbe, 1 receive queues, up"
    assert "ethtool -L eth0" in check.advice
    (device / "queues/rx-1").mkdir()
    assert machine.devices(root)[0].state == "ok"


def test_a_machine_without_sysfs_and_procfs_gets_no_exception(tmp_path: Path) -> None:
    assert machine.examine(tmp_path)


def test_the_command_prints_every_check_as_text_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor"])
    text = capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--json"])
    body = json.loads(capsys.readouterr().out)
    names = {check["name"] for check in body["checks"]}
    wanted = {
        "cores",
        "open files",
        "data port",
        "control port",
        "somaxconn",
        "rmem_max",
        "wmem_max",
        "clock",
        "nic",
    }
    assert wanted <= names
    assert all(name in text for name in names)
    assert ended.value.code == (0 if body["ok"] else 1)
    assert all(check["advice"] for check in body["checks"] if check["state"] in ("warn", "fail"))

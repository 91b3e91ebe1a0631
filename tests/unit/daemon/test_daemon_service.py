"""The daemon as a process: ready, stopped, locked, notified, and without what it does not need."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexstream.daemon.catalog import Catalog, DataDirLock
from flexstream.daemon.service import describe_window
from flexstream.errors import ConfigError
from tests.unit.daemon.fake_engine import ADS, VIEWS
from tests.waiting import WAIT_S

# `flexstream serve` with everything real but the engine.
CHILD = """
import os, sys, time
from flexstream.daemon import service
from tests.unit.daemon.fake_engine import FakeEngine

def fake(config):
    engine = FakeEngine(config.data_dir, groups=config.groups)
    if os.environ.get("TEST_OPEN_WINDOWS"):
        engine.open_windows = [{"query": "ysb", "groups": n, "first_end": 0} for n in range(25)]
    if os.environ.get("TEST_SLOW_DRAIN"):
        engine.drain = lambda timeout: time.sleep(0.3) or ["w"]
    return engine

service.make_engine = fake
from flexstream.cli import main
main(sys.argv[1:])
"""


@contextmanager
def served(project: Path, data_dir: Path, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, "serve", "--control", "127.0.0.1:0", "--data-dir", str(data_dir)]
    child = subprocess.Popen(
        [*command, *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def ready_line(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, child.stderr.read() if child.stderr else ""
    return json.loads(line)


def ask(ready: Any, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(f"http://{ready['control']}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
        return json.load(reply)


def test_sigterm_drains_names_the_open_windows_and_exits_with_0(project: Path, tmp_path: Path) -> None:
    with served(project, tmp_path, TEST_OPEN_WINDOWS="1") as child:
        assert child.stdout is not None
        assert "flexstream is ready" in child.stdout.readline()
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 0, err
    assert "these windows had not fired" in out
    assert "query ysb, groups 0, first end 0" in out
    assert "and 5 more" in out
    assert "event=stopping" in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_it_stops_well_when_nobody_reads_its_output_any_more(project: Path, tmp_path: Path, unbuffered: str) -> None:
    with served(project, tmp_path, PYTHONUNBUFFERED=unbuffered) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert "flexstream is ready" in child.stdout.readline()
        child.stdout.close()
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=WAIT_S) == 0
        said = child.stderr.read()
        child.stdout = None
    assert "event=output_closed" in said
    assert "BrokenPipeError" not in said


def test_ctrl_c_stops_it_too_and_json_lines_say_so(project: Path, tmp_path: Path) -> None:
    with served(project, tmp_path, "--json") as child:
        ready = ready_line(child)
        assert ready["event"] == "ready"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 0, err
    assert json.loads(out) == {"event": "stopped", "drained": True, "open_windows": []}


def test_streams_and_queries_survive_kill_minus_nine(project: Path, tmp_path: Path) -> None:
    with served(project, tmp_path, "--json") as child:
        ask(ready_line(child), "/v1/queries", VIEWS.to_dict())
        child.kill()
    with served(project, tmp_path, "--json") as child:
        ready = ready_line(child)
        assert (ready["streams"], ready["queries"]) == (["ads"], ["ysb"])
        assert ask(ready, "/v1/queries/ysb")["plan"] == VIEWS.to_dict()


def test_a_data_directory_with_plans_of_version_1_starts_and_has_version_2_then(project: Path, tmp_path: Path) -> None:
    stored = project / "tests/unit/query/plan/version_1/catalog.json"
    (tmp_path / "catalog.json").write_bytes(stored.read_bytes())
    with served(project, tmp_path, "--json", "--groups", "16") as child:
        ready = ready_line(child)
        assert sorted(ready["queries"]) == ["full", "odd", "ysb"]
        assert ask(ready, "/v1/queries/ysb")["plan"]["version"] == 2
        child.send_signal(signal.SIGTERM)
        assert child.wait(timeout=WAIT_S) == 0
    written = json.loads((tmp_path / "catalog.json").read_text())
    assert [plan["version"] for plan in written["queries"]] == [2, 2, 2]
    with served(project, tmp_path, "--json", "--groups", "16") as child:
        assert sorted(ready_line(child)["queries"]) == ["full", "odd", "ysb"]


def test_a_second_daemon_on_the_directory_is_refused_with_the_pid_of_the_first(project: Path, tmp_path: Path) -> None:
    with served(project, tmp_path, "--json") as first:
        ready_line(first)
        with served(project, tmp_path) as second:
            _, err = second.communicate(timeout=WAIT_S)
        assert second.returncode == 1
        assert f"another daemon (pid {first.pid}) uses data_dir {tmp_path}" in err
        assert "hint:" in err


def test_systemd_hears_ready_watchdog_and_stopping(project: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(WAIT_S)
        environ = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"}
        with served(project, tmp_path / "data", **environ) as child:
            heard = [receiver.recv(1000).decode() for _ in range(3)]
            child.send_signal(signal.SIGTERM)
            while not heard[-1].startswith("STOPPING=1"):
                heard.append(receiver.recv(1000).decode())
            child.communicate(timeout=WAIT_S)
    assert sum(message.startswith("READY=1") for message in heard) == 1
    assert "WATCHDOG=1" in heard
    assert child.returncode == 0


def test_the_daemon_starts_without_pandas_pyspark_rich_or_pyarrow_dataset(project: Path, tmp_path: Path) -> None:
    """With traffic: a query, results in both formats, metrics. pandas is installed and stays out."""
    script = CHILD.replace(
        "main(sys.argv[1:])",
        """
import threading, time, urllib.request, json, signal
from tests.unit.daemon.fake_engine import VIEWS
engines = []
service.make_engine = lambda config: engines.append(fake(config)) or engines[0]
def traffic():
    while not (engines and service_ready()):
        time.sleep(0.02)
    request = urllib.request.Request(base() + "/v1/queries", VIEWS.to_json().encode(),
                                     {"Content-Type": "application/json"})
    urllib.request.urlopen(request).read()
    engines[0].emit("ysb", 100)
    for path in ("results?format=arrow", "results?format=jsonl", "late?format=arrow"):
        assert urllib.request.urlopen(base() + "/v1/queries/ysb/" + path).read()
    for path in ("/metrics", "/openapi.json", "/v1/status", "/v1/queries"):
        assert urllib.request.urlopen(base() + path).read()
    bad = [name for name in ("pandas", "pyspark", "rich", "pyarrow.dataset") if name in sys.modules]
    print("IMPORTED", bad, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
ready = {}
original = service._say_ready
def say(config, daemon, as_json):
    ready["address"] = daemon.control_address
    original(config, daemon, as_json)
service._say_ready = say
service_ready = lambda: "address" in ready
base = lambda: f"http://127.0.0.1:{ready['address'][1]}"
threading.Thread(target=traffic, daemon=True).start()
main(sys.argv[1:])
""",
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "serve", "--control", "127.0.0.1:0", "--data-dir", str(tmp_path)],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert "IMPORTED []" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


def test_bad_settings_and_a_taken_port_are_one_line_and_a_hint(project: Path, tmp_path: Path) -> None:
    with served(project, tmp_path, "--workers", "lots") as child:
        _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    assert err.startswith("flexstream: workers = 'lots' (from flag --workers)")
    assert "Traceback" not in err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with served(project, tmp_path, "--control", f"127.0.0.1:{taken.getsockname()[1]}") as child:
            _, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 1
    assert "cannot listen on" in err
    assert "Traceback" not in err


def test_the_lock_goes_with_its_process_and_names_its_owner(tmp_path: Path) -> None:
    lock = DataDirLock(tmp_path)
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        DataDirLock(tmp_path)
    lock.release()
    DataDirLock(tmp_path).release()


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot use data_dir"):
        DataDirLock(tmp_path / "file" / "data")


def test_the_catalog_is_replaced_whole_and_a_bad_one_is_left_alone(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    catalog.check_groups(16)
    catalog.save({"ads": ADS}, {"ysb": VIEWS}, {"ads": [("p", 3)]})
    again = Catalog(tmp_path)
    assert again.streams == {"ads": ADS}
    assert again.queries["ysb"].to_json() == VIEWS.to_json()
    assert again.sessions == {"ads": [("p", 3)]}
    with pytest.raises(ConfigError, match="groups = 16"):
        again.check_groups(32)
    assert [path.name for path in tmp_path.iterdir()] == ["catalog.json"]
    for text in ("{", "[]", '{"version": 2}', '{"version": 1, "groups": 1, "streams": [{}], "queries": []}',
                 '{"version": 1, "groups": 1, "streams": [], "queries": [], "sessions": {"s": [1]}}'):  # fmt: skip
        catalog.path.write_text(text)
        with pytest.raises(ConfigError, match="cannot read the catalog"):
            Catalog(tmp_path)
        assert catalog.path.read_text() == text


def test_open_windows_are_described_in_any_form() -> None:
    window = {"query": "ysb", "groups": 3, "first_end": 1_700_000_000_000}
    assert describe_window(window, {}) == "query ysb, groups 3, first end 1700000000000"
    assert describe_window(window, {"ysb": VIEWS}) == "query ysb, groups 3, first end 2023-11-14T22:13:20.000"
    assert describe_window("q at 3", {}) == "q at 3"
    ranges = {"query": "ysb", "ranges": [[1_700_000_000_000, 1_700_000_010_000], [0, 1000]], "more_ranges": 7}
    said = "2023-11-14T22:13:20.000 to 2023-11-14T22:13:30.000; 1970-01-01T00:00:00.000 to 1970-01-01T00:00:01.000"
    assert describe_window(ranges, {"ysb": VIEWS}) == f"query ysb, ranges {said}; and 7 more"


def test_draining_waits_for_a_slow_engine(project: Path, tmp_path: Path) -> None:
    with served(project, tmp_path, "--json", TEST_SLOW_DRAIN="1") as child:
        ready = ready_line(child)
        assert ask(ready, "/readyz")["ready"] is True
        child.terminate()
        out, _ = child.communicate(timeout=WAIT_S)
    assert json.loads(out) == {"event": "stopped", "drained": True, "open_windows": ["w"]}
    assert child.returncode == 0

"""What the machine refuses: ports, cores, pinning, descriptors, disk. Each has a clear word or a bounded count."""

import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flexstream as fs
from flexstream.errors import EngineError
from flexstream.results import collector
from tests.adversity.rig import (
    STREAM,
    Company,
    RawClient,
    address,
    assert_results,
    make_rows,
    serving,
)
from tests.waiting import WAIT_S, wait_until

ENVIRONMENT = os.environ | {"PYTHONPATH": os.getcwd()}


def child(code: str, *arguments: str) -> str:
    """Runs Python code in a process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# -- ports


def test_a_port_in_use_is_a_clear_error_and_leaves_nothing_open():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EngineError):  # the first may open what stays open for the process
            fs.Engine(groups=8, listen=f"127.0.0.1:{port}", pin=False)
        before = open_descriptors()
        for _ in range(3):
            with pytest.raises(EngineError, match=f"cannot listen on 127.0.0.1:{port}") as caught:
                fs.Engine(groups=8, listen=f"127.0.0.1:{port}", pin=False)
        assert caught.value.code == "cannot_listen"
        assert caught.value.hint
        assert open_descriptors() == before


def test_a_second_engine_on_the_port_of_a_running_one_is_refused_and_the_first_goes_on():
    with serving() as engine:
        good = Company(engine)
        good.start()
        host, port = engine.data_address
        with pytest.raises(EngineError, match="in use"):
            fs.Engine(groups=8, listen=f"{host}:{port}", pin=False)
        assert_results(engine, good.finish())


@pytest.mark.parametrize("listen", ["7400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", ":7400", ""])
def test_an_address_that_is_none_is_a_clear_error(listen):
    with pytest.raises(EngineError) as caught:
        fs.Engine(listen=listen)
    assert caught.value.code in ("bad_address", "needs_token")


def test_an_address_of_another_machine_is_a_clear_error():
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1"):
        fs.Engine(listen="192.0.2.1:0", token="t", pin=False)


def test_other_hosts_than_loopback_need_a_token():
    with pytest.raises(EngineError) as caught:
        fs.Engine(listen="0.0.0.0:0")
    assert caught.value.code == "needs_token"


def test_a_stopped_engine_leaves_no_descriptor_open():
    def once():
        with serving() as engine, RawClient(engine) as client:
            client.open()
            client.open(3)
            engine.close()  # while they are connected

    once()
    before = open_descriptors()
    for _ in range(3):
        once()
    wait_until(lambda: open_descriptors() <= before, f"at most {before} descriptors", seen=open_descriptors)


# -- cores and pinning


@pytest.mark.parametrize("workers", [[4096], [0, 4096], [-1], []])
def test_a_core_that_does_not_exist_is_a_clear_error(workers):
    with pytest.raises(EngineError, match="core") as caught:
        fs.Engine(workers=workers)
    assert caught.value.code == "bad_core"
    assert "may use" in caught.value.hint


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to forbid one")
def test_a_core_outside_the_allowed_ones_is_a_clear_error():
    allowed, forbidden = sorted(os.sched_getaffinity(0))[:2]
    said = child(
        f"""
import os
os.sched_setaffinity(0, [{allowed}])
import flexstream as fs
try:
    fs.Engine(workers=[{forbidden}])
except fs.EngineError as error:
    print(error.code, error)
with fs.Engine(workers=1) as engine:
    print([(w["cpu"], w["pinned"]) for w in engine.status()["workers"]])
"""
    )
    assert "bad_core" in said
    assert f"this process may use cores {allowed}" in said
    assert f"[({allowed}, True)]" in said


NO_PINNING = """
import ctypes, os, struct, time
# A seccomp filter under which sched_setaffinity (203 on x86-64) answers EPERM.
code = b"".join(struct.pack("HBBI", *op) for op in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 203), (0x06, 0, 0, 0x00050000 | 1), (0x06, 0, 0, 0x7FFF0000)])
class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("code", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
program = Program(4, code)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
import flexstream as fs
from tests.adversity.rig import QUERY, assert_results, make_rows
rows = make_rows(2000)
with fs.Engine(workers=1, groups=8, pin=True) as engine:
    engine.submit(QUERY)
    engine.feed("s", rows)
    assert_results(engine, rows)
    (worker,) = engine.status()["workers"]
    print(worker["pinned"], worker["pin_reason"])
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter names a system call of x86-64")
def test_without_the_permission_to_pin_the_engine_works_and_says_why_it_is_not_pinned():
    assert child(NO_PINNING).strip() == "False Operation not permitted"


# -- descriptors

FEW_DESCRIPTORS = """
import os, resource, socket, time
import flexstream as fs
from tests.adversity.rig import *
from tests.waiting import wait_until
with serving(max_pending_hello=1000) as engine:
    good = Company(engine)
    good.start()
    wait_until(lambda: engine.status()["streams"]["s"]["ledger"]["received"] > 100, "rows", seconds=30)
    used = len(os.listdir("/proc/self/fd"))
    first, second = socket.socketpair()
    pid = os.fork()
    if pid == 0:  # the flood has descriptors of its own
        second.close()
        held = []
        for _ in range(100):
            held.append(socket.create_connection(engine.data_address, timeout=60))
        first.send(b"x")
        first.recv(1)
        os._exit(0)
    first.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, 4096))
    assert second.recv(1) == b"x"
    refused = wait_until(lambda: closed(engine, "accept: Too many open files"), "a refused connection", seconds=30)
    second.send(b"x")
    os.waitpid(pid, 0)
    assert_results(engine, good.finish())
    print(refused)
"""


def test_out_of_descriptors_the_oldest_silent_connections_make_room():
    assert int(child(FEW_DESCRIPTORS)) > 0


HELD_DESCRIPTORS = """
import os, resource, socket, sys, threading, time
import flexstream as fs
from tests.adversity.rig import *
with serving() as engine, RawClient(engine) as client:
    client.open()
    sockets = [socket.socket() for _ in range(5)]
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used - 1, 4096))  # none of those that are there can be dropped
    for sock in sockets:
        sock.setblocking(False)
        sock.connect_ex(engine.data_address)
    time.sleep(1.0)
    print(engine.status()["connections"]["closed"].get("accept: Too many open files", 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    for sock in sockets:
        sock.close()
"""


def test_out_of_descriptors_with_nothing_to_drop_the_acceptor_does_not_spin():
    assert int(child(HELD_DESCRIPTORS)) < 1000


# -- disk


@contextlib.contextmanager
def small_disk(path: Path, size: str):
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs")
@pytest.mark.time_limit(280)
def test_a_full_disk_holds_producers_back_and_nothing_is_lost_when_there_is_room_again(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "MAX_HELD_BYTES", 256 * 1024)
    rows = make_rows(200_000, keys=20_000)  # nearly every row is a window of its own; a query holds 98,304
    with small_disk(tmp_path / "disk", "4m") as disk:
        ballast = disk / "ballast"
        with open(ballast, "wb") as file, contextlib.suppress(OSError):
            for _ in range(55):
                file.write(b"\0" * 65536)
                file.flush()
        with serving(data_dir=disk / "data") as engine:
            with fs.Producer(address(engine), stream=STREAM, replay_bytes=16384, on_full="raise") as producer:
                at, full = 0, False
                deadline = time.monotonic() + WAIT_S
                while not full and at < len(rows):
                    try:
                        producer.send(rows[at : at + 2000])
                        at += 2000
                    except fs.BackPressure as error:
                        at += error.accepted
                        full = engine.status()["queries"]["q"]["log"]["error"] is not None
                        time.sleep(0.05)
                    assert time.monotonic() < deadline
                assert full, "the producer never felt the full disk"
                health = engine.health()
                assert health["problem"] is None
                assert "query q cannot be written" in health["not_ready"]
                status = wait_until(
                    lambda: (s := engine.status()) and s["queries"]["q"]["log"]["error"] and s, "the log's error"
                )
                assert "No space left" in status["queries"]["q"]["log"]["error"]
                assert status["state"] == "running"
                ballast.unlink()
                subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
                while at < len(rows):
                    try:
                        producer.send(rows[at : at + 2000])
                        at += 2000
                    except fs.BackPressure as error:
                        at += error.accepted
                        time.sleep(0.01)
                    assert time.monotonic() < deadline + WAIT_S
            assert_results(engine, rows)
            assert engine.status()["queries"]["q"]["log"]["error"] is None
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs")
def test_an_engine_with_a_full_disk_can_still_be_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(collector, "MAX_HELD_BYTES", 64 * 1024)
    with small_disk(tmp_path / "disk", "1m") as disk, serving(data_dir=disk / "data") as engine:
        engine.feed("s", make_rows(300_000, keys=20_000), watermark=False)
        engine.feed("s", make_rows(1, start=10_000_000))
        wait_until(lambda: engine.status()["queries"]["q"]["log"]["error"], "the full disk")
        wait_until(lambda: engine.status()["workers"][0]["stalled"], "the worker to wait")
        engine.drain(timeout=1.0)
        assert engine.state == "stopped"


def test_a_data_dir_that_is_a_file_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fs.FlexStreamError, match="file' is not a directory"):
        fs.Engine(groups=8, data_dir=tmp_path / "file", pin=False)

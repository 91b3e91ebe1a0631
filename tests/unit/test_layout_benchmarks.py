"""The benchmarks' own parts: a wrong reference would make every ratio wrong."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from flexstream.testing import ysb
from flexstream.wire import frames as wire

SCRIPTS = ("ingest", "inmemory", "windows", "produce", "latency", "adaptive", "peers")


@pytest.fixture(autouse=True)
def benchmarks_importable(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_benchmark_explains_itself(project: Path, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--help"],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert "--quick" in done.stdout


def test_pairs_alternate_so_that_drift_cancels() -> None:
    from benchmarks import harness

    order: list[str] = []
    pairs = harness.alternate(3, lambda: order.append("a"), lambda: order.append("b"))
    assert len(pairs) == 3
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_budget_that_is_used_up_still_gives_one_pair() -> None:
    from benchmarks import harness

    assert harness.alternate(5, lambda: 1, lambda: 2, until=0.0) == [(1, 2)]


def test_frames_hold_the_rows_of_their_group_in_the_order_of_time() -> None:
    from benchmarks import workload

    frames = workload.frames(16)
    data = frames.path.read_bytes()
    at, rows, last = 0, 0, {}
    while at < len(data):
        magic, version, kind, flags, group, size, _, value, _ = wire.HEADER.unpack_from(data, at)
        assert (magic, version, kind, flags) == (wire.MAGIC, wire.VERSION, wire.FrameType.DATA, 0)
        part = np.frombuffer(data, ysb.YSB_STREAM.schema.dtype, value, at + wire.HEADER_BYTES)
        assert size == part.nbytes
        assert (ysb.YSB_STREAM.group_of(part, 16) == group).all()
        assert part["event_time"][0] >= last.get(group, 0)
        assert (np.diff(part["event_time"]) >= 0).all()
        last[group] = part["event_time"][-1]
        at += wire.HEADER_BYTES + size
        rows += value
    assert rows == frames.rows
    assert max(last.values()) < workload.START_MS + frames.time_delta


@pytest.mark.parametrize("crc", [False, True])
def test_sender_and_discard_agree_on_every_byte(crc: bool) -> None:
    from benchmarks import workload
    from benchmarks.programs import Discard, run_sender

    core = min(os.sched_getaffinity(0))
    frames = workload.frames(16)
    with Discard(16, cpu=core) as sink:
        sent = run_sender(sink.port, frames, cpu=core, duration_s=0.1, crc=crc)
        taken = sink.result()
    assert sent["rows"] > 0
    assert sent["rows"] % workload.rows_per_frame() == 0
    assert taken["bytes"] == sent["bytes"] + 16 * wire.HEADER_BYTES  # and an EOS on each connection


@pytest.mark.parametrize("crc", [False, True])
def test_an_engine_takes_what_the_sender_sends(crc: bool) -> None:
    """The reference looks at no frame; an engine refuses one without its CRC, or an EOS that is out of sequence."""
    from benchmarks import workload
    from benchmarks.programs import EngineProcess, run_sender

    core = min(os.sched_getaffinity(0))
    with EngineProcess(16, cpus=[core], compile="off") as engine:
        engine.ask("open", stream="ads")
        sent = run_sender(engine.port, workload.frames(16), cpu=core, duration_s=0.1, stream="ads", crc=crc)
        ledger = engine.ask("close", stream="ads")["query"]["ledger"]
    assert 0 < ledger["accepted"] == sent["rows"]
    assert ledger["late"] == ledger["rejected"] == 0


def test_the_reference_counts_what_numpy_counts(project: Path) -> None:
    import ctypes

    from benchmarks import harness

    rows = ysb.generate(50_000, keys=100, seed=3, rate=1_000, start=1_700_000_000_000)
    library = ctypes.CDLL(str(harness.compiled("ysb", shared=True)))
    counts = np.zeros((6, 100), dtype=np.uint32)
    windows = np.zeros((5, 100), dtype=np.uint32)
    numbers = [ctypes.c_int64(value) for value in (len(rows), 1_700_000_000_000, 10_000, 0, 100)]
    library.ysb_count(ctypes.c_void_p(rows.ctypes.data), *numbers, ctypes.c_void_p(counts.ctypes.data))
    library.ysb_slide(
        ctypes.c_void_p(counts.ctypes.data),
        ctypes.c_int64(6),
        ctypes.c_int64(2),
        ctypes.c_int64(100),
        ctypes.c_void_p(windows.ctypes.data),
    )
    views = rows[rows["event_type"] == b"view"]
    slot = (views["event_time"] - 1_700_000_000_000) // 10_000
    expected = np.zeros((6, 100), dtype=np.uint32)
    np.add.at(expected, (slot, views["campaign_id"]), 1)
    assert (counts == expected).all()
    assert (windows == expected[:-1] + expected[1:]).all()


def test_the_header_of_the_c_programs_is_the_wire_header() -> None:
    assert wire.HEADER.size == 32
    assert struct.pack("<H", wire.MAGIC) == b"FS"


def test_the_sender_numbers_checksums_and_times_its_frames_as_the_wire_wants(tmp_path: Path) -> None:
    """A receiver in Python, frame by frame, over several loops of the file."""
    import socket
    import threading

    from benchmarks import workload
    from benchmarks.programs import sender_result, start_sender
    from flexstream.cython_ext.wire.crc32c import crc32c

    frames: dict[int, list[tuple[int, int, bytes]]] = {}

    def exactly(connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def serve(connection: socket.socket) -> None:
        while True:
            try:
                raw = exactly(connection, wire.HEADER_BYTES)
            except EOFError:
                return
            _, _, kind, flags, group, size, crc, value, sequence = wire.HEADER.unpack(raw)
            payload = exactly(connection, size)
            if kind != wire.FrameType.HELLO:
                assert flags & wire.Flags.CRC
                assert crc32c(raw[:12] + bytes(4) + raw[16:] + payload) == crc
            if kind == wire.FrameType.HELLO or (kind == wire.FrameType.EOS and group == wire.CONTROL_GROUP):
                fields = (wire.MAGIC, wire.VERSION, wire.FrameType.ACK, 0, group, 0, 0, 420, 0)
                connection.sendall(wire.HEADER.pack(*fields))
                continue
            if kind == wire.FrameType.DATA:
                frames.setdefault(group, []).append((sequence, value, payload))
            elif kind == wire.FrameType.WATERMARK:
                frames.setdefault(group, []).append((sequence, -value, b""))

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            for _ in range(17):
                threading.Thread(target=serve, args=[listener.accept()[0]], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        core = min(os.sched_getaffinity(0))
        made = workload.frames(16)
        port = listener.getsockname()[1]
        process = start_sender(port, made, cpu=core, duration_s=0.3, crc=True, watermark_every=2)
        sent = sender_result(process, 0.3)

    assert sent["loops"] >= 1
    assert sorted(frames) == list(range(16))
    for group, found in frames.items():
        expected, watermark = 0, 0
        for sequence, value, payload in found:
            assert sequence == expected, f"group {group}"
            if payload:
                rows = np.frombuffer(payload, ysb.YSB_STREAM.schema.dtype)
                assert len(rows) == value
                assert rows["event_time"].min() >= watermark, "a row is older than the watermark before it"
                expected += value
            else:
                assert -value >= watermark
                watermark = -value

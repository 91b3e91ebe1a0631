"""Times far ahead of the clock: rejected and counted, and nobody else is late for them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.wire.frames import ErrorCode, FrameType, frame
from tests.adversity.rig import GROUPS, RawClient, bitmap, data_frame, expect_error, read_frame
from tests.property.checks import as_rows, assert_ledger
from tests.waiting import WAIT_S, wait_until

DAY_MS = 86_400_000
FIELDS = {"t": "timestamp[ms]", "k": "i32", "x": "i64", "pad": "bytes[12]"}


def stream(**options: Any) -> fs.Stream:
    return fs.Stream("s", FIELDS, key="k", time="t", **options)


def counting(of: fs.Stream) -> fs.Query:
    return of.query("q").window(fs.tumbling("1s")).agg(n=fs.count())


def rows_at(*times: int) -> np.ndarray:
    rows = np.zeros(len(times), stream().schema.dtype)
    rows["t"] = times
    return rows


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def engine_with(of: fs.Stream, **options: Any) -> fs.Engine:
    engine = fs.Engine(**{"groups": GROUPS, "listen": "127.0.0.1:0", "pin": False, "max_future": "1d"} | options)
    engine.submit(counting(of))
    return engine


def producer(engine: fs.Engine, name: str) -> fs.Producer:
    host, port = engine.data_address or ("", 0)
    return fs.Producer(f"tcp://{host}:{port}", stream="s", producer_id=name)


def query_status(engine: fs.Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.status()["queries"]["q"]
    return found


@pytest.mark.parametrize("compile", ["off", "require"])
@pytest.mark.parametrize("far", [2**62 - 1, 2**62, None])
def test_one_row_of_a_far_time_makes_nobody_late(far: int | None, compile: str) -> None:
    far = now_ms() + 2 * DAY_MS if far is None else far
    with engine_with(stream(), compile=compile) as engine:
        with producer(engine, "alone") as alone:
            alone.send(rows_at(now_ms(), far))
            alone.flush(WAIT_S)
            wait_until(lambda: query_status(engine)["ledger"]["accepted"] == 2, "the rows")
            with producer(engine, "other") as other:
                other.send(rows_at(now_ms() + 5_000, now_ms() + DAY_MS // 2))
        engine.finish(timeout=WAIT_S)
        said = query_status(engine)
        assert (said["late"], said["rejected"]["future"], said["rejected"]["time_range"]) == (0, 1, 0)
        assert sum(row["n"] for row in as_rows(engine.results("q"))) == 3
        assert_ledger(engine.status(), "s", 4)


def test_a_watermark_of_a_far_time_counts_as_the_clocks() -> None:
    with engine_with(stream()) as engine, RawClient(engine, schema=stream().schema.hash) as client:
        control = client.open()
        before = now_ms()
        control.sendall(frame(FrameType.WATERMARK, value=2**63 - 1, payload=bitmap()))
        said = wait_until(lambda: engine.status()["streams"]["s"]["watermark"]["min"], "the watermark")
        assert before - 600_000 <= said <= now_ms()
        assert engine.status()["streams"]["s"]["watermarks_capped"] >= 1
        group = int(stream().group_of(rows_at(0), GROUPS)[0])
        sock = client.open(group)
        sock.sendall(data_frame(group, rows_at(now_ms() + 10_000)) + frame(FrameType.WATERMARK, group, value=2**62))
        wait_until(lambda: query_status(engine)["ledger"]["applied"] == 1, "a row in time")
        wait_until(lambda: engine.status()["streams"]["s"]["watermarks_capped"] >= 2, "the second one")
        assert engine.status()["streams"]["s"]["watermark"]["max"] <= now_ms()


def test_rows_that_are_fed_and_staged_have_the_same_bound() -> None:
    with engine_with(stream()) as engine:
        engine.feed("s", rows_at(now_ms(), 2**62 - 1))
        host, port = engine.data_address or ("", 0)
        with fs.Producer(f"tcp://{host}:{port}", stream="s", stage="0b1cbd5e-5e1c-4f86-a6f3-0d6a0a5b7a3f") as staging:
            staging.send(rows_at(now_ms(), 2**61))
            receipt = staging.finish_stage()
        engine.staging.commit("sink", "q", 0, [receipt], wait_s=WAIT_S)
        wait_until(lambda: query_status(engine)["ledger"]["accepted"] == 4, "the rows")
        assert engine.status()["streams"]["s"]["watermarks_capped"] == 0
        engine.feed("s", rows_at(now_ms() + 5_000))
        engine.finish(timeout=WAIT_S)
        said = query_status(engine)
        assert (said["late"], said["rejected"]["future"]) == (0, 2)


@pytest.mark.parametrize(
    ("of_stream", "of_engine", "rejected"),
    [(None, None, 0), ("off", "1d", 0), ("1h", None, 1), (None, "1h", 1), ("3d", "1h", 0)],
)
def test_the_streams_own_bound_goes_before_the_engines(
    of_stream: str | None, of_engine: str | None, rejected: int
) -> None:
    with engine_with(stream(max_future=of_stream), max_future=of_engine) as engine:
        engine.feed("s", rows_at(now_ms() + 2 * DAY_MS))
        engine.finish(timeout=WAIT_S)
        assert query_status(engine)["rejected"]["future"] == rejected


def test_a_session_that_holds_the_stream_can_be_ended() -> None:
    with engine_with(stream()) as engine, RawClient(engine, producer="holds", schema=stream().schema.hash) as client:
        group = int(stream().group_of(rows_at(0), GROUPS)[0])
        control, sock = client.open(), client.open(group)
        sock.sendall(data_frame(group, rows_at(1)))
        with producer(engine, "good") as good:
            good.send(rows_at(2, 100_000))
            wait_until(lambda: query_status(engine)["ledger"]["accepted"] == 3, "the rows")
            assert query_status(engine)["windows_fired"] == 0
            assert engine.end_session("s", "holds") == {
                "stream": "s", "producer": "holds", "kind": "network", "ended": True,
            }  # fmt: skip
            wait_until(lambda: query_status(engine)["windows_fired"] == 1, "the window")
            wait_until(lambda: [s["producer"] for s in engine.sessions("s")] == ["good"], "its end")
            # Then: it is told, its connections end, and it does not come back as it was.
            header, _ = read_frame(control)
            assert header.type is FrameType.ERROR
            while sock.recv(4096):
                pass
            again = client.connect()
            again.sendall(client.hello())
            assert expect_error(again, ErrorCode.STALE_EPOCH)
        engine.finish(timeout=WAIT_S)
        assert sorted((row["window_start"], row["n"]) for row in as_rows(engine.results("q"))) == [(0, 2), (100_000, 1)]


def test_what_is_fed_or_committed_goes_on_after_its_session_was_ended() -> None:
    with engine_with(stream()) as engine:
        for turn in range(3):
            engine.feed("s", rows_at(10_000 * turn))
            engine.staging.commit("k", "q", turn, [], stream="s", wait_s=WAIT_S)
            for name in ("feed", "sink:k"):
                engine.end_session("s", name)
            wait_until(lambda: engine.sessions("s") == [], "the end of both")
        engine.finish(timeout=WAIT_S)
        assert [row["window_start"] for row in as_rows(engine.results("q"))] == [0, 10_000, 20_000]


def test_a_session_that_is_not_there_is_not_ended() -> None:
    with engine_with(stream()) as engine:
        for name in ("nobody", "\ud800"):
            with pytest.raises(fs.EngineError) as caught:
                engine.end_session("s", name)
            assert caught.value.code == "unknown_session"
        with pytest.raises(fs.EngineError) as caught:
            engine.end_session("t", "nobody")
        assert caught.value.code == "unknown_stream"

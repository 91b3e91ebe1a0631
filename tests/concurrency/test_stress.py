"""Engines started, stopped, starved and flooded: totals are conserved, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import EngineError, FlexStreamError

spec = importlib.util.spec_from_file_location("load", Path(__file__).with_name("load.py"))
assert spec is not None
assert spec.loader is not None
load: Any = importlib.util.module_from_spec(spec)
sys.modules["load"] = load
spec.loader.exec_module(load)

STREAM = load.make_stream("a")
SETTLE_S = 5.0


def descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(found)


def threads() -> list[str]:
    """Names of this process's threads, without those that Arrow's allocator starts for itself."""
    names = []
    for tid in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended between the two looks
            names.append(Path(f"/proc/self/task/{tid}/comm").read_text().strip())
    return sorted(name for name in names if not name.startswith("jemalloc"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settled(read: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """The value once it is as wanted, or what it is after some seconds: threads need a moment to leave."""
    until = time.monotonic() + SETTLE_S
    while not wanted(value := read()) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.02)
    return value


def first_use() -> None:
    """What is made once and stays (Arrow's and uvloop's own threads and files) is not a leak."""
    with fs.Engine(workers=1, groups=4, listen="127.0.0.1:0", pin=False) as engine:
        engine.submit(load.summed(STREAM, "first", fs.tumbling("1s")))
        with fs.Producer(address(engine), stream=STREAM) as producer:
            producer.send(load.some_rows(STREAM, np.random.default_rng(1), 0, 10))
        list(engine.results("first"))


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """After the test there are no more descriptors and threads than before."""
    first_use()
    gc.collect()
    before_threads = settled(threads, lambda found: not any(name.startswith("fs-") for name in found))
    before = descriptors()
    yield
    after_threads = settled(threads, lambda found: len(found) <= len(before_threads))
    assert len(after_threads) <= len(before_threads), f"{before_threads} -> {after_threads}"
    after = settled(descriptors, lambda found: len(found) <= len(before))
    assert len(after) <= len(before), f"{len(before)} descriptors before, {len(after)} after: {after}"


@pytest.fixture
def small_outputs() -> Iterator[None]:
    usual = load.engine_module.QueryState
    load.small_outputs()
    yield
    load.engine_module.QueryState = usual


def address(engine: fs.Engine) -> str:
    assert engine.data_address is not None
    return "tcp://{}:{}".format(*engine.data_address)


@pytest.mark.slow
def test_fifty_engines_start_and_stop_under_load_without_leaks(leaves_nothing: None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = load.some_rows(STREAM, rng, 0, 20_000)
    sizes = []
    for number in range(50):
        engine = fs.Engine(workers=1 + number % 2, groups=8, listen="127.0.0.1:0", max_sessions=4, pin=False)
        engine.submit(load.summed(STREAM, "q", fs.sliding("2s", every="1s")))
        stop = threading.Event()

        def feed(engine: fs.Engine = engine, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                try:
                    engine.feed("a", rows, watermark=False)
                except (EngineError, RuntimeError):
                    return

        feeders = [threading.Thread(target=feed) for _ in range(2)]
        for feeder in feeders:
            feeder.start()
        time.sleep(0.01 * (number % 4))
        engine.close()
        stop.set()
        for feeder in feeders:
            feeder.join(20)
            assert not feeder.is_alive(), "a feeder hangs on a closed engine"
        del engine, feed
        gc.collect()
        sizes.append(resident_bytes())
    print([size >> 20 for size in sizes])
    assert max(sizes[-5:]) < max(sizes[15:20]) + (48 << 20), "memory grows from engine to engine"


def test_open_connections_are_closed_with_the_engine(leaves_nothing: None, seed: int) -> None:
    """Drain while producers send: they learn of it at once, and no socket stays behind."""
    rng = np.random.default_rng(seed)
    engine = fs.Engine(workers=2, groups=8, listen="127.0.0.1:0", pin=False)
    engine.submit(load.summed(STREAM, "q", fs.tumbling("1s")))
    producers = [fs.Producer(address(engine), stream=STREAM, retry_s=0.2) for _ in range(3)]
    stop = threading.Event()

    def produce(producer: fs.Producer, rows: Any) -> None:
        try:
            while not stop.is_set():
                producer.send(rows)
        except FlexStreamError:
            pass

    senders = [
        threading.Thread(target=produce, args=(producer, load.some_rows(STREAM, rng, 0))) for producer in producers
    ]
    for sender in senders:
        sender.start()
    while not engine.status()["streams"]["a"]["ledger"]["received"]:
        time.sleep(0.01)
    engine.drain(10)
    ledger = engine.status()["streams"]["a"]["ledger"]
    assert ledger["received"] > 0
    assert ledger["in_flight"] == 0, ledger
    for sender in senders:
        sender.join(15)
    stuck = sum(sender.is_alive() for sender in senders)
    stop.set()
    for producer in producers:
        with pytest.raises(FlexStreamError):
            producer.close(timeout=1)
    assert not stuck, f"{stuck} producers did not learn that the engine is gone"


def test_totals_are_right_with_everything_at_once(leaves_nothing: None, small_outputs: None, seed: int) -> None:
    with fs.Engine(workers=2, groups=8, listen="127.0.0.1:0", max_sessions=8, pin=False) as engine:
        work = load.Load(engine, seed)
        assert work.run(rounds=4, until=time.monotonic() + 30) > 0
        assert work.polled
        assert work.cancelled


def test_results_larger_than_the_output_pool_all_arrive(small_outputs: None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = load.some_rows(STREAM, rng, 0, 60_000)
    rows["k"] = np.arange(len(rows))
    with fs.Engine(workers=1, groups=4, pin=False) as engine:
        engine.submit(load.summed(STREAM, "q", fs.tumbling("4s")))
        engine.feed("a", rows)
        engine.finish(timeout=30)
        assert load.totals_of(engine.results("q")) == load.expected(rows, 4000, 4000)


def test_a_slow_callback_slows_and_loses_nothing(small_outputs: None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [load.some_rows(STREAM, rng, start, 4000) for start in range(0, 5 * load.ROUND_MS, load.ROUND_MS)]
    seen = []
    with fs.Engine(workers=2, groups=8, pin=False) as engine:
        engine.submit(load.summed(STREAM, "q", fs.tumbling("1s")))
        engine.on_results("q", lambda batch: (time.sleep(0.01), seen.append(batch.num_rows)))
        for part in parts:
            engine.feed("a", np.sort(part, order="t"))
        engine.finish(timeout=30)
        wanted = load.expected(np.concatenate(parts), 1000, 1000)
        assert load.totals_of(engine.results("q")) == wanted
        assert sum(seen) == len(wanted)


def test_many_sessions_open_and_close_in_few_slots(leaves_nothing: None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with fs.Engine(workers=2, groups=8, listen="127.0.0.1:0", max_sessions=3, pin=False) as engine:
        engine.submit(load.summed(STREAM, "q", fs.tumbling("4s")))
        sent = [load.some_rows(STREAM, rng, 0, 50)]
        engine.feed("a", sent[0], watermark=False)  # holds the watermark while the others come and go
        for _ in range(40):
            rows = load.some_rows(STREAM, rng, 0, 200)
            sent.append(rows)
            with fs.Producer(address(engine), stream=STREAM, watermark="explicit", linger_ms=0) as producer:
                producer.send(rows)
        engine.finish(timeout=30)
        assert engine.status()["streams"]["a"]["sessions_ended"] == 41
        assert load.totals_of(engine.results("q")) == load.expected(np.concatenate(sent), 4000, 4000)


def test_queries_come_and_go_while_rows_flow(leaves_nothing: None, seed: int) -> None:
    rows = load.some_rows(STREAM, np.random.default_rng(seed), 0, 2000)
    fed, stop = [0], threading.Event()
    with fs.Engine(workers=2, groups=8, pin=False) as engine:
        engine.submit(load.summed(STREAM, "q", fs.tumbling("4s")))

        def feed() -> None:
            while not stop.is_set():
                engine.feed("a", rows, watermark=False)
                fed[0] += 1

        feeder = threading.Thread(target=feed)
        feeder.start()
        try:
            for number in range(100):
                engine.submit(load.summed(STREAM, f"q{number}", fs.sliding("2s", every="1s")))
                engine.cancel(f"q{number}")
        finally:
            stop.set()
            feeder.join()
        engine.finish(timeout=30)
        total = sum(n for n, _ in load.totals_of(engine.results("q")).values())
        assert total == fed[0] * len(rows)
        assert list(engine.queries) == ["q"]


@pytest.mark.parametrize("window", [fs.tumbling("1s"), fs.sliding("2s", every="1s")], ids=["tumbling", "sliding"])
def test_at_the_memory_cap_rows_are_rejected_and_counted_but_nothing_hangs(window: fs.WindowSpec, seed: int) -> None:
    """Every batch touches several panes; all want to grow, none can."""
    rows = load.some_rows(STREAM, np.random.default_rng(seed), 0, 300_000)
    rows["k"] = np.arange(len(rows))
    with fs.Engine(workers=1, groups=8, pin=False, state_memory_bytes=(4 << 20) + 8192) as engine:
        engine.submit(load.summed(STREAM, "q", window))
        engine.feed("a", rows)
        engine.finish(timeout=30)
        query = engine.status()["queries"]["q"]
        assert query["rows"] == len(rows)
        rejected = sum(query["rejected"].values())
        assert rejected > 0
        if query["state"] == "running" and window.kind == "tumbling":
            assert sum(n for n, _ in load.totals_of(engine.results("q")).values()) == len(rows) - rejected


def test_drain_keeps_its_time_limit_while_feeders_are_blocked(small_outputs: None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    go, engine = threading.Event(), fs.Engine(workers=1, groups=128, pin=False)
    drained = threading.Event()
    engine.submit(load.summed(STREAM, "q", fs.tumbling("1s")))
    engine.on_results("q", lambda batch: go.wait())

    def feed() -> None:
        for number in range(2000):
            rows = load.some_rows(STREAM, rng, 0, 1000)
            rows["t"] = number * 1000
            try:
                engine.feed("a", rows)
            except (EngineError, RuntimeError):
                return

    def drain() -> None:
        engine.drain(1)
        drained.set()

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        until = time.monotonic() + 10
        while feeder.is_alive() and time.monotonic() < until and (fed := engine.workers[0].stats()["rows"]) >= 0:
            time.sleep(1)
            if engine.workers[0].stats()["rows"] == fed and engine.status()["workers"][0]["stalled"]:
                break
        time.sleep(2)  # the mailbox fills up
        threading.Thread(target=drain, daemon=True).start()
        assert drained.wait(60), "drain(1) hangs"
    finally:
        go.set()
        drained.wait(20)


def test_an_engine_that_cannot_start_leaves_nothing(leaves_nothing: None) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        for _ in range(10):
            with pytest.raises(EngineError, match="cannot listen"):
                fs.Engine(workers=2, listen=f"127.0.0.1:{taken.getsockname()[1]}", pin=False)

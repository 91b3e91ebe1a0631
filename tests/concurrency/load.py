"""An engine under everything at once, as a script: `python load.py SECONDS SEED`. Exit code 0: totals are right.

Feeders, TCP producers whose sessions come and go, queries submitted and cancelled, groups moved between the workers,
split over further lanes of the producers and joined, status polled, results followed, a slow callback, output pools so
small that the workers stall, and an engine closed under those who still send.
Time goes in rounds: all rows of a round lie in its part of event time, and the watermark passes it when everybody is
done; so nothing is late, and the totals must be those of numpy. The thread sanitizer runs this script as it is
(test_tsan.py).
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import flexstream as fs
from flexstream.cython_ext.operators.queries import QueryState
from flexstream.engine import engine as engine_module
from flexstream.errors import EngineError, FlexStreamError
from flexstream.nic.balance.split_rule import SplitConfig

ROUND_MS = 4_000
KEYS = 3_000
ROWS = 4_000
FEEDERS = 2
PRODUCERS = 2
FINISH_S = 60.0

Rows = np.ndarray[Any, np.dtype[Any]]
Totals = dict[tuple[int, int], tuple[int, int]]


def make_stream(name: str) -> fs.Stream:
    return fs.Stream(name, {"t": "timestamp[ms]", "k": "i64", "v": "i64"}, key="k", time="t")


def summed(stream: fs.Stream, name: str, window: fs.WindowSpec) -> fs.Query:
    return stream.query(name).window(window).agg(n=fs.count(), total=fs.sum("v"))


def kept(stream: fs.Stream, name: str, window: fs.WindowSpec) -> fs.Query:
    """With state beside the entries; its rows are read by one worker after the other."""
    aggregates = {"values": fs.distinct("v"), "order": fs.order_hash("v"), "first": fs.first("v")}
    return stream.query(name).window(window).agg(n=fs.count(), total=fs.sum("v"), **aggregates)


def some_rows(stream: fs.Stream, rng: np.random.Generator, start: int, n: int = ROWS) -> Rows:
    rows = np.zeros(n, stream.schema.dtype)
    rows["t"] = start + rng.integers(0, ROUND_MS, n)
    rows["k"] = rng.integers(0, KEYS, n)
    rows["v"] = rng.integers(-100, 100, n)
    return rows


def expected(rows: Rows, size: int, slide: int) -> Totals:
    """(window start, key) -> (rows, sum), by numpy alone."""
    shares = size // slide
    starts = np.concatenate([rows["t"] // slide * slide - back * slide for back in range(shares)])
    keys, values = np.tile(rows["k"], shares), np.tile(rows["v"], shares)
    pairs, at = np.unique(np.stack([starts, keys]), axis=1, return_inverse=True)
    sums = np.zeros(pairs.shape[1], np.int64)
    np.add.at(sums, at.reshape(-1), values)
    counts = np.bincount(at.reshape(-1))
    return {(int(w), int(k)): (int(n), int(s)) for w, k, n, s in zip(*pairs, counts, sums, strict=True)}


def totals_of(batches: Any) -> Totals:
    found: Totals = {}
    for batch in batches:
        starts = np.asarray(batch.column("window_start").cast("int64"))
        columns = [np.asarray(batch.column(name)) for name in ("k", "n", "total")]
        for w, k, n, total in zip(starts, *columns, strict=True):
            window = (int(w), int(k))
            assert window not in found, f"window {window} came twice"
            found[window] = (int(n), int(total))
    return found


class Threads:
    """Runs functions in threads; the first failure is raised by `join`, after all have ended."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._failures: list[BaseException] = []

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float = FINISH_S) -> None:
        for thread in self._threads:
            thread.join(timeout_s)
        stuck = sum(thread.is_alive() for thread in self._threads)
        if self._failures:
            raise self._failures[0]
        assert not stuck, f"{stuck} threads are stuck"


class Load:
    """One engine's life under load."""

    def __init__(self, engine: fs.Engine, seed: int) -> None:
        self.engine = engine
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.streams = [make_stream("a"), make_stream("b")]
        self.sent: dict[str, list[Rows]] = {"a": [], "b": []}
        self.stop = threading.Event()
        self.followed = 0
        self.polled = 0
        self.cancelled = 0
        self.moves = 0
        self.splits = 0
        self.address = "tcp://{}:{}".format(*(engine.data_address or ("", 0)))
        for stream in self.streams:
            engine.submit(summed(stream, f"tumbling-{stream.name}", fs.tumbling("1s")))
        engine.submit(summed(self.streams[0], "sliding-a", fs.sliding("2s", every="1s")))
        engine.submit(kept(self.streams[1], "kept-b", fs.tumbling("1s")))
        engine.on_results("tumbling-a", lambda batch: time.sleep(0.002))

    def run(self, rounds: int, until: float) -> int:
        around = Threads()
        for work in (
            self.poll_status, self.follow_results, self.submit_and_cancel, self.move_groups, self.split_groups,
        ):  # fmt: skip
            around.start(work)
        done = 0
        while done < rounds and (not done or time.monotonic() < until):
            self.round(done)
            done += 1
        self.engine.finish(timeout=FINISH_S)
        self.stop.set()
        around.join()
        self.check()
        return done

    def round(self, number: int) -> None:
        start = number * ROUND_MS
        for stream in self.streams:  # the in-process session is there first, and holds the watermark
            self.feed(stream, some_rows(stream, self.rng, start, 10))
        work = Threads()
        for index in range(FEEDERS):
            work.start(self.feed_some, self.streams[index % 2], self.rng.spawn(1)[0], start)
        for index in range(PRODUCERS):
            work.start(self.produce, self.streams[index % 2], self.rng.spawn(1)[0], start, index)
        work.join()
        for stream in self.streams:
            self.engine.feed(stream.name, some_rows(stream, self.rng, start, 0), watermark=start + ROUND_MS)

    def feed(self, stream: fs.Stream, rows: Rows) -> None:
        self.sent[stream.name].append(rows)
        self.engine.feed(stream.name, rows, watermark=False)

    def feed_some(self, stream: fs.Stream, rng: np.random.Generator, start: int) -> None:
        for _ in range(3):
            self.feed(stream, some_rows(stream, rng, start))

    def produce(self, stream: fs.Stream, rng: np.random.Generator, start: int, index: int) -> None:
        with fs.Producer(self.address, stream=stream, watermark="explicit", crc=index == 1, linger_ms=1) as producer:
            for _ in range(2):
                rows = some_rows(stream, rng, start)
                self.sent[stream.name].append(rows)
                for first in range(0, len(rows), 500):
                    producer.send(rows[first : first + 500])
                    time.sleep(0.005)
                producer.marker()

    def abandon(self) -> Threads:
        """Feeders and a producer that go on until the engine is closed under them."""
        left = Threads()
        for index in range(FEEDERS):
            left.start(self.feed_until_closed, self.streams[index % 2], self.rng.spawn(1)[0])
        left.start(self.produce_until_closed, self.streams[0], self.rng.spawn(1)[0])
        time.sleep(0.3)
        return left

    def feed_until_closed(self, stream: fs.Stream, rng: np.random.Generator) -> None:
        with contextlib.suppress(FlexStreamError, RuntimeError):
            while True:
                self.engine.feed(stream.name, some_rows(stream, rng, 0), watermark=False)

    def produce_until_closed(self, stream: fs.Stream, rng: np.random.Generator) -> None:
        producer = fs.Producer(self.address, stream=stream, retry_s=0.1)
        with contextlib.suppress(FlexStreamError):
            while True:
                producer.send(some_rows(stream, rng, 0))
        with contextlib.suppress(FlexStreamError):
            producer.close(timeout=1)

    # -- around it

    def poll_status(self) -> None:
        while not self.stop.wait(0.005):
            status = json.loads(json.dumps(self.engine.status()))
            for name, stream in status["streams"].items():
                assert stream["ledger"]["in_flight"] >= 0, (name, stream["ledger"])
            for name, query in status["queries"].items():
                assert min(query["ledger"].values()) >= 0, (name, query["ledger"])
            self.polled += 1

    def follow_results(self) -> None:
        while not self.stop.is_set():
            offset = 0
            for batch in self.engine.results("tumbling-b", offset, follow=True, timeout=0.1):
                self.followed += batch.num_rows
                offset += batch.num_rows

    def submit_and_cancel(self) -> None:
        number = 0
        while not self.stop.wait(0.01):
            number += 1
            query = summed(self.streams[number % 2], f"passing-{number}", fs.sliding("3s", every="1s"))
            self.engine.submit(query)
            self.stop.wait(0.05)
            self.engine.cancel(query.name)
            self.cancelled += 1

    def move_groups(self) -> None:
        rng = np.random.default_rng(self.seed)
        while not self.stop.wait(float(rng.uniform(0, 0.01))):
            groups = rng.choice(self.engine.groups, int(rng.integers(1, 5)), replace=False)
            self.moves += len(self.engine.move({int(g): int(rng.integers(0, 2)) for g in groups}))

    def split_groups(self) -> None:
        """Producers are asked for lanes, also those that are about to end."""
        rng = np.random.default_rng(self.seed + 1)
        self.engine.balance.splitter.rule.config = SplitConfig(lanes_wait_s=0.1, lanes_settle_s=0.0)
        while not self.stop.wait(float(rng.uniform(0, 0.01))):
            with contextlib.suppress(EngineError):  # no connections, or the engine is at its end
                self.engine.split(int(rng.integers(0, self.engine.groups)), [0, 1])
                self.splits += 1
            if rng.random() < 0.5:
                self.engine.unsplit(int(rng.integers(0, self.engine.groups)))

    def check(self) -> None:
        status = self.engine.status()
        ledgers = {name: stream["ledger"] for name, stream in status["streams"].items()}
        for name, parts in self.sent.items():
            rows = np.concatenate(parts)
            assert ledgers[name]["received"] == len(rows), (name, ledgers[name], len(rows))
            assert ledgers[name]["accepted"] == len(rows), (name, ledgers[name], len(rows))
            applied = status["queries"][f"tumbling-{name}"]["ledger"]
            assert applied["accepted"] == applied["applied"] == len(rows), (name, applied, len(rows))
            assert totals_of(self.engine.results(f"tumbling-{name}")) == expected(rows, 1000, 1000), name
        assert totals_of(self.engine.results("kept-b")) == expected(np.concatenate(self.sent["b"]), 1000, 1000)
        assert totals_of(self.engine.results("sliding-a")) == expected(np.concatenate(self.sent["a"]), 2000, 1000)


def small_outputs() -> None:
    """Three chunks of four blocks per output: fewer rows than the windows of a round have, so that workers stall."""
    engine_module.QueryState = functools.partial(QueryState, max_chunks=3)  # type: ignore[misc]


def main(seconds: float, seed: int) -> None:
    small_outputs()
    until = time.monotonic() + seconds
    engines = rounds = polled = cancelled = moves = splits = 0
    while engines < 2 or time.monotonic() < until:
        compile = "auto" if engines % 2 else "off"  # what is compiled, the sanitizer does not see
        with fs.Engine(
            workers=2, groups=8, listen="127.0.0.1:0", max_sessions=16, pin=False, compile=compile
        ) as engine:
            load = Load(engine, seed + engines)
            rounds += load.run(rounds=4, until=until)
            left = load.abandon()
        left.join()
        engines += 1
        polled, cancelled, moves = polled + load.polled, cancelled + load.cancelled, moves + load.moves
        splits += load.splits
    print(
        f"{engines} engines, {rounds} rounds, {polled} times status, {cancelled} queries cancelled, {moves} moves, "
        f"{splits} splits: totals right"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))

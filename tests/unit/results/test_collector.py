"""The collector takes what workers report by its type, in the order in which it was reported."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from flexstream.cython_ext.worker.reports import (
    LateBlock,
    MarkerSeen,
    Pong,
    QueryHere,
    Report,
    ResultBlock,
    SessionAwake,
)
from flexstream.errors import EngineError
from flexstream.results.collector import Collector


class Worker:
    """Reports what it is given, then has ended."""

    def __init__(self, index: int, *reports: Report) -> None:
        self.index = index
        self.left = list(reports)

    @property
    def ended(self) -> bool:
        return not self.left

    def reports(self, most: int = 256) -> list[Report]:
        taken, self.left = self.left[:most], self.left[most:]
        return taken

    def about_to_sleep(self) -> bool:
        return not self.left

    def sleep_until_reports(self, timeout_ms: int) -> None:
        raise AssertionError("there is nothing to wait for")


class Writer:
    """A ResultWriter that notes what it is given."""

    held = held_bytes = 0
    error = None

    def __init__(self, name: str, notes: list[object]) -> None:
        self.name, self.notes = name, notes

    def write(self, rows: bytes) -> None:
        self.notes.append((self.name, rows))


class Late:
    """A LateLog that notes what it is given, and a query's part of it."""

    held = held_bytes = 0
    error = None

    def __init__(self, name: str, notes: list[object]) -> None:
        self.name, self.notes, self.stream = name, notes, self

    def write(self, worker: int, rows: bytes) -> None:
        self.notes.append((self.name, worker, rows))

    def seat(self, worker: int, slot: int, late: object) -> None:
        self.notes.append((self.name, worker, slot, late))


@pytest.fixture
def reader_fd() -> Iterator[int]:
    fd = os.eventfd(0)
    yield fd
    os.close(fd)


def collect(reader_fd: int, notes: list[object], *workers: Worker) -> Collector:
    collector = Collector(workers, reader_fd)
    late = Late("late", notes)
    for query in (1, 2):
        collector.add_query(query, 5, Writer(f"results {query}", notes), late)  # type: ignore[arg-type]
    collector.subscribe(Pong, lambda worker, report: notes.append((worker, report.tag)))
    collector.stop()
    collector.run()
    return collector


def test_blocks_that_come_together_are_one_batch_and_nothing_overtakes_them(reader_fd: int) -> None:
    notes: list[object] = []
    first = Worker(
        0, ResultBlock(1, b"a"), LateBlock(5, b"x"), ResultBlock(2, b"c"), ResultBlock(1, b"b"), Pong(7),
        ResultBlock(1, b"d"),
    )  # fmt: skip
    collect(reader_fd, notes, first, Worker(1, Pong(8)))
    batches = [("results 1", b"ab"), ("late", 0, b"x"), ("results 2", b"c")]
    assert notes == [*batches, (0, 7), ("results 1", b"d"), (1, 8)]


def test_a_slot_means_another_query_behind_the_late_rows_of_the_one_before(reader_fd: int) -> None:
    notes: list[object] = []
    collect(reader_fd, notes, Worker(3, LateBlock(5, b"x"), QueryHere(9, 5, 0), LateBlock(5, b"y")))
    assert notes == [("late", 3, b"x"), ("late", 3, 0, None), ("late", 3, b"y")]


def test_blocks_of_a_query_that_is_gone_are_dropped_and_reports_without_a_taker_are_passed_over(reader_fd: int) -> None:
    notes: list[object] = []
    collect(reader_fd, notes, Worker(0, ResultBlock(3, b"a"), SessionAwake(0, 4), Pong(1)))
    assert notes == [(0, 1)]


def test_markers_become_latencies(reader_fd: int) -> None:
    collector = collect(reader_fd, [], Worker(0, MarkerSeen(0, time.time_ns() - 5_000_000), MarkerSeen(0, 0)))
    summary = collector.latencies.summary()
    assert (summary["count"], summary["ignored"]) == (1, 1)
    assert summary["p50_ms"] >= 5


def test_a_taker_that_fails_is_the_collectors_failure(reader_fd: int) -> None:
    collector = Collector([Worker(0, Pong(1))], reader_fd)

    def fail(worker: int, report: Pong) -> None:
        raise ValueError("broken")

    collector.subscribe(Pong, fail)
    collector.stop()
    with pytest.raises(ValueError, match="broken"):
        collector.run()
    with pytest.raises(EngineError, match="the collector failed: broken"):
        collector.check_alive()

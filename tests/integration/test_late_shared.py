"""Rows that are late for several queries of a stream: each query has its own, whoever else has them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

import flexstream as fs
from tests.integration.small_engine import STREAM, counting, finish, many_rows, row
from tests.property.checks import as_rows
from tests.waiting import wait_until


def numbers(engine: fs.Engine, name: str) -> list[int]:
    """The x of the query's late rows, in order."""
    return [found["x"] for found in as_rows(engine.late(name))]


def numbered(first: int, n: int, keys: int = 10, t: int = 0) -> np.ndarray:
    rows = many_rows(n, keys)
    rows["x"] = np.arange(first, first + n)
    rows["t"] = t
    return rows


def test_a_row_may_be_late_for_one_query_and_in_time_for_another(engine: fs.Engine) -> None:
    engine.submit(counting("short", fs.tumbling("10s")))
    engine.submit(counting("long", fs.tumbling("100s")))
    engine.submit(STREAM.query("even").filter(fs.col("x") % 2 == 0).window(fs.tumbling("10s")).agg(n=fs.count()))
    engine.feed("s", [row(50)], watermark=50)
    engine.feed("s", [row(5, x=1), row(5, x=2), row(55, x=3), row(15, x=4)], watermark=False)
    engine.feed("s", [], watermark=200)
    engine.feed("s", [row(60, x=5), row(170, x=6)], watermark=False)
    engine.flush()
    finish(engine)
    assert sorted(numbers(engine, "short")) == [1, 2, 4, 5, 6]
    assert sorted(numbers(engine, "even")) == [2, 4, 6]
    assert sorted(numbers(engine, "long")) == [5, 6]
    assert {(late["x"], late["watermark"]) for late in as_rows(engine.late("even"))} == {(2, 50), (4, 50), (6, 200)}
    status = engine.status()["queries"]
    assert [status[name]["late"] for name in ("short", "even", "long")] == [5, 3, 2]


def test_each_query_says_its_own_watermark(engine: fs.Engine) -> None:
    """After the end of the stream it is the end of a query's last window."""
    engine.submit(counting("short", fs.tumbling("10s")))
    engine.submit(counting("long", fs.tumbling("100s")))
    engine.feed("s", [row(5)])
    finish(engine)
    engine.feed("s", [row(7, x=2)], watermark=False)
    engine.flush()
    finish(engine)
    assert [(late["x"], late["watermark"]) for late in as_rows(engine.late("short"))] == [(2, 10)]
    assert [(late["x"], late["watermark"]) for late in as_rows(engine.late("long"))] == [(2, 100)]


@pytest.mark.parametrize("compile", ["off", "require"])
def test_sixty_four_queries_have_the_same_late_rows(compile: str) -> None:
    names = [f"q{number}" for number in range(64)]
    with fs.Engine(groups=4, pin=False, compile=compile) as engine:
        engine.add(STREAM)
        for name in names:
            engine.submit(counting(name))
        engine.feed("s", [row(1_000)])
        engine.feed("s", numbered(0, 5_000))
        engine.feed("s", numbered(5_000, 10, t=2_000))
        engine.flush()
        finish(engine)
        for name in names:
            assert sorted(numbers(engine, name)) == list(range(5_000)), name
            assert engine.status()["queries"][name]["late"] == 5_000


@pytest.mark.parametrize("workers", [1, 2])
def test_a_query_has_only_rows_of_its_life_whoever_had_its_place_before(workers: int, seed: int) -> None:
    """Names come and go while late rows come: what is late for one is never said to be late for its successor."""
    rng = random.Random(seed)
    expected: dict[str, list[int]] = {}
    at = 0
    with fs.Engine(groups=8, workers=workers, pin=False) as engine:
        engine.add(STREAM)
        engine.submit(counting("always"))
        engine.feed("s", [row(1_000, k=k) for k in range(50)])
        for _ in range(60):
            name = f"q{rng.randrange(5)}"
            if name in expected:
                rows = expected.pop(name)
                wait_until(lambda name=name, rows=rows: len(numbers(engine, name)) >= len(rows), "its late rows")
                assert sorted(numbers(engine, name)) == rows, name
                engine.cancel(name)
            else:
                expected[name] = []
                engine.submit(counting(name))
                engine.feed("s", [], watermark=1_000)
            n = rng.randrange(1, 3_000)
            engine.feed("s", numbered(at, n, keys=50), watermark=False)
            for rows in expected.values():
                rows.extend(range(at, at + n))
            at += n
        engine.flush()
        finish(engine)
        for name, rows in expected.items():
            assert sorted(numbers(engine, name)) == rows, name
        assert sorted(numbers(engine, "always")) == list(range(at))


def test_no_late_row_is_lost_or_doubled_while_groups_move(seed: int) -> None:
    names = ["a", "b", "c"]
    rng = np.random.default_rng(seed)
    stop = threading.Event()
    with fs.Engine(groups=16, workers=3, pin=False, balance="off") as engine:
        engine.add(STREAM)
        for name in names:
            engine.submit(counting(name))
        engine.feed("s", [row(1_000, k=k) for k in range(200)])

        def move() -> None:
            while not stop.is_set():
                engine.move({int(g): int(rng.integers(0, 3)) for g in rng.choice(16, 6, replace=False)})

        mover = threading.Thread(target=move)
        mover.start()
        try:
            for number in range(60):
                engine.feed("s", numbered(number * 2_000, 2_000, keys=200), watermark=False)
        finally:
            stop.set()
            mover.join()
        engine.flush()
        finish(engine)
        assert engine.mover.moved > 0
        for name in names:
            assert engine.status()["queries"][name]["late"] == 120_000
            assert sorted(numbers(engine, name)) == list(range(120_000)), name

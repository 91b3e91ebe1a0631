"""Sliding windows that fire one after the other share panes: each must be the sum of its own, and nothing else."""

import numpy as np
import pytest

import flexstream as fs
from flexstream.testing import run
from tests.property.checks import FINISH_S, as_rows, assert_same_results

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "j": "i64", "x": "i64"}, key="k", time="t")
TWO_KEYS = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "j": "i64", "x": "i64"}, key=["k", "j"], time="t")
EXACT = {"n": fs.count(), "total": fs.sum("x")}
INEXACT = {**EXACT, "least": fs.min("x"), "mean": fs.avg("x")}


def fed(query: fs.Query, batches: list[tuple[np.ndarray, int | bool]]) -> list[dict]:
    with fs.Engine(workers=1, groups=2, pin=False, compile="off") as engine:
        engine.submit(query)
        for rows, watermark in batches:
            engine.feed("s", rows, watermark=watermark)
        engine.finish(timeout=FINISH_S)
        assert engine.status()["queries"]["q"]["state"] == "running"
        return as_rows(engine.results("q"))


def made(stream: fs.Stream, *rows: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(list(rows), stream.schema.dtype)


@pytest.mark.parametrize("aggregates", [{"n": fs.count()}, EXACT, INEXACT], ids=["count", "sum", "minimum"])
@pytest.mark.parametrize("stream", [STREAM, TWO_KEYS], ids=["one key", "two keys"])
@pytest.mark.parametrize(("size", "every"), [(10, 1), (7, 3), (6, 4), (60, 2)])
def test_windows_that_fire_together_equal_the_oracle(stream, size, every, aggregates, seed):
    """Keys come, vanish and come back; some panes are empty; the watermark jumps over many windows at once."""
    rng = np.random.default_rng(seed)
    query = stream.query("q").window(fs.sliding(f"{size}s", every=f"{every}s")).agg(**aggregates)
    batches, everything, start = [], [], 0
    for _ in range(6):
        rows = np.zeros(int(rng.integers(1, 400)), stream.schema.dtype)
        span = int(rng.integers(1, 5 * size))
        rows["t"] = np.sort(start + rng.integers(0, span, len(rows)))
        rows["k"] = (rows["t"] // max(1, size // 2) + rng.integers(0, 6, len(rows))) % 9
        rows["j"] = rng.integers(0, 3, len(rows))
        rows["x"] = rng.integers(-1000, 1000, len(rows))
        start += span + int(rng.integers(0, 2 * size))
        batches.append((rows, start))
        everything.append(rows)
    results = fed(query, batches)
    assert_same_results(query, results, run(query, np.concatenate(everything)).windows)


def test_a_sum_without_a_value_stops_the_query_also_when_it_comes_by_taking_out():
    """Without its oldest pane, -10, the first window's sum does not fit an int64."""
    rows = made(STREAM, (0, 1, 0, -10), (1, 1, 0, 6), (2, 1, 0, 2**63 - 6), (3, 1, 0, 1))
    query = STREAM.query("q").window(fs.sliding("3s", every="1s")).agg(**EXACT)
    with fs.Engine(workers=1, groups=2, pin=False, compile="off") as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=100)
        engine.finish(timeout=FINISH_S)
        assert engine.status()["queries"]["q"]["state"] == "failed"
        (first, *_) = [row for row in as_rows(engine.results("q")) if row["window_start"] == 0]
        assert first["total"] == 2**63 - 10


def test_a_row_behind_the_watermark_between_two_firings_is_in_the_windows_that_are_open():
    query = STREAM.query("q").window(fs.sliding("4s", every="1s")).agg(**EXACT)
    steps = [
        (made(STREAM, *((t, 1, 0, t) for t in range(8))), 6),
        (made(STREAM, (4, 1, 0, 100), (4, 2, 0, 1)), False),  # the windows that end at 7 and 8 are open
        (made(STREAM, (9, 1, 0, 9)), 12),
    ]
    found = {(row["window_start"], row["k"]): (row["n"], row["total"]) for row in fed(query, steps)}
    assert found[2, 1] == (4, 2 + 3 + 4 + 5), "had fired"
    assert found[3, 1] == (5, 3 + 4 + 5 + 6 + 100)
    assert found[4, 1] == (5, 4 + 5 + 6 + 7 + 100)
    assert found[3, 2] == found[4, 2] == (1, 1)
    assert found[5, 1] == (3, 5 + 6 + 7)

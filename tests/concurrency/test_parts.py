"""A group that is split or moved again and again within one window: its partials are folded, its memory comes back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.cython_ext.testing.probes import is_folding, parts_of
from tests.property.checks import FINISH_S, as_rows
from tests.waiting import wait_until

KEYS = 6_000
ROUNDS = 10
STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i64", "x": "i64"}, key="k", time="t")
LONG = STREAM.query("long").window(fs.tumbling("1h")).agg(n=fs.count(), total=fs.sum("x"), dev=fs.stddev("x"))
VALUES = (
    STREAM.query("values")
    .window(fs.tumbling("1h"))
    .agg(n=fs.count(), values=fs.distinct("x"), often=fs.mode("x"), middle=fs.median("x"))
)
SLIDING = STREAM.query("sliding").window(fs.sliding("1h", every="30m")).agg(n=fs.count(), last=fs.max("x"))

pytestmark = pytest.mark.time_limit(280)


def some_rows(rng: np.random.Generator) -> np.ndarray:
    rows = np.zeros(2 * KEYS, STREAM.schema.dtype)
    rows["k"] = rng.permutation(np.repeat(np.arange(KEYS), 2))
    rows["x"] = rng.integers(-2, 2, len(rows))  # few values: those of a key are soon all there
    return rows


def state_bytes(engine: fs.Engine) -> int:
    return sum(worker["state_bytes"] for worker in engine.status()["workers"])


def most_parts(engine: fs.Engine) -> int:
    return max(parts_of(state) for running in engine.running()[1] for state in running.states)


def is_any_folding(engine: fs.Engine) -> bool:
    return any(is_folding(state) for running in engine.running()[1] for state in running.states)


def open_engine(workers: int) -> fs.Engine:
    engine = fs.Engine(workers, groups=1, listen="127.0.0.1:0", pin=False, balance="off")
    engine.submit(LONG)
    engine.submit(SLIDING)
    engine.submit(VALUES)
    return engine


def send(engine: fs.Engine, producers: list[fs.Producer], rng: np.random.Generator) -> list[np.ndarray]:
    sent = [some_rows(rng) for _ in producers]
    for producer, rows in zip(producers, sent, strict=True):
        producer.send(rows)
    for producer in producers:
        producer.flush(FINISH_S)
    return sent


def assert_totals(engine: fs.Engine, sent: list[np.ndarray]) -> None:
    totals: Counter[int] = Counter()
    for rows in sent:
        np_totals = np.bincount(rows["k"], weights=rows["x"], minlength=KEYS)
        totals.update({key: int(total) for key, total in enumerate(np_totals)})
    count = sum(map(len, sent)) // KEYS
    found = as_rows(engine.results("long"))
    assert {row["k"]: (row["n"], row["total"]) for row in found} == {key: (count, totals[key]) for key in range(KEYS)}
    assert len(found) == KEYS
    largest = np.full(KEYS, -(10**9))
    for rows in sent:
        np.maximum.at(largest, rows["k"], rows["x"])
    everything = np.concatenate(sent)
    rows_of = np.zeros((KEYS, 4), np.int64)  # of each key and value from -2 to 1
    np.add.at(rows_of, (everything["k"], everything["x"] + 2), 1)
    values, often = (rows_of > 0).sum(axis=1), rows_of.argmax(axis=1) - 2
    middle = np.median(np.sort(everything, order="k")["x"].reshape(KEYS, count), axis=1)
    counted = as_rows(engine.results("values"))
    assert {row["k"]: (row["n"], row["values"], row["often"], row["middle"]) for row in counted} == {
        key: (count, values[key], often[key], middle[key]) for key in range(KEYS)
    }
    windows = as_rows(engine.results("sliding"))
    assert len(windows) == 2 * KEYS
    assert all((row["n"], row["last"]) == (count, largest[row["k"]]) for row in windows)


@pytest.mark.parametrize("moves", [False, True])
def test_a_group_split_again_and_again_in_one_window_keeps_one_partial(moves: bool) -> None:
    rng = np.random.default_rng(11)
    with open_engine(2) as engine:
        address = "tcp://{}:{}".format(*engine.data_address)
        producers = [fs.Producer(address, stream=STREAM, linger_ms=1) for _ in range(2)]
        sent = send(engine, producers, rng)
        once, most = state_bytes(engine), 0
        for number in range(ROUNDS):
            owner = engine.placement()[0]
            engine.mover.split(0, 1 - owner)
            sent += send(engine, producers, rng)
            engine.mover.unsplit(0)
            if moves and number % 2:
                engine.move({0: 1 - owner})
            most = max(most, state_bytes(engine))
        assert most <= 6 * once, "a pane's own partial, four parts, and what is on its way, at most"
        wait_until(lambda: state_bytes(engine) <= 2 * once, "memory of what was folded")
        wait_until(lambda: not is_any_folding(engine), "all that can be folded")
        engine.flush()
        assert most_parts(engine) == 1
        for producer in producers:
            producer.close()
        engine.finish(timeout=FINISH_S)
        assert_totals(engine, sent)
        wait_until(lambda: state_bytes(engine) < 1 << 16, "memory of the windows that fired")


def test_nothing_is_kept_when_no_window_is_open() -> None:
    """Tables that panes were merged in, and dense arrays, are of no use then."""
    with fs.Engine(1, groups=4, pin=False, compile="off") as engine:
        engine.submit(SLIDING)
        rows: Any = some_rows(np.random.default_rng(1))
        rows["t"] = np.arange(len(rows)) % 7200
        engine.feed("s", np.sort(rows, order="t"))
        engine.finish(timeout=FINISH_S)
        wait_until(lambda: state_bytes(engine) < 1 << 16, "memory of the windows that fired")

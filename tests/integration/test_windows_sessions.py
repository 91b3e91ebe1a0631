"""Sessions one after the other: an end of the stream fires what there is, and closes nothing that did not fire."""

import random

import numpy as np
import pytest

import flexstream as fs
from flexstream.testing import run
from tests.property.checks import FINISH_S, as_rows, assert_last_results, assert_ledger

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64"}, key="k", time="t", max_disorder="40s")
DAY = 86_400


def counting(window, lateness="0s"):
    return STREAM.query("q").window(window, allowed_lateness=lateness).agg(n=fs.count(), total=fs.sum("x"))


def rows_at(times, keys, x=1):
    rows = np.zeros(len(times), STREAM.schema.dtype)
    rows["t"], rows["k"], rows["x"] = times, keys, x
    return rows


def day(number, keys=100, every_s=60):
    """A day of rows, one a minute, its keys by turns."""
    times = number * DAY + np.arange(0, DAY, every_s)
    return rows_at(times, np.arange(len(times)) % keys)


def send(engine, rows):
    host, port = engine.data_address
    with fs.Producer(f"tcp://{host}:{port}", stream="s") as producer:
        producer.send(rows)
        producer.flush()


def taken(engine):
    return sum(row["n"] for row in as_rows(engine.results("q")))


@pytest.fixture
def engine():
    with fs.Engine(workers=2, groups=16, pin=False, listen="127.0.0.1:0") as engine:
        yield engine


WINDOWS = [fs.tumbling("1h"), fs.tumbling("1d"), fs.sliding("2h", every="1h"), fs.sliding("10h", every="4h")]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_sessions_that_send_nothing_close_no_window(engine, window):
    engine.submit(counting(window))
    send(engine, day(0))
    for _ in range(6):
        send(engine, rows_at([], []))
    send(engine, day(1))
    engine.finish(timeout=FINISH_S)
    assert as_rows(engine.late("q")) == []
    expected = run(counting(window), np.concatenate([day(0), day(1)]), [(1440, last_fired(window, day(0)))])
    assert taken(engine) == sum(values["n"] for values in expected.windows.values())


def last_fired(window, rows):
    size, slide = window.size_ns // 10**9, window.slide_ns // 10**9
    return int(rows["t"].max()) // slide * slide + size


def test_a_job_that_comes_every_hour_is_in_time_each_time(engine):
    engine.submit(counting(fs.tumbling("1h")))
    for hour in range(6):
        send(engine, rows_at(3600 * hour + np.arange(100) * 36, np.arange(100)))
    assert taken(engine) == 600
    assert as_rows(engine.late("q")) == []


def test_a_group_that_moves_between_two_sessions_is_not_ahead_of_them(engine):
    engine.submit(counting(fs.tumbling("1h")))
    send(engine, day(0))
    for turn in range(5):
        engine.move({group: (group + turn) % 2 for group in range(16)})
    send(engine, day(1))
    assert taken(engine) == 2880
    assert as_rows(engine.late("q")) == []


def test_a_window_that_fired_at_an_end_is_closed_for_keys_that_it_did_not_hold(engine):
    engine.submit(counting(fs.tumbling("1h")))
    send(engine, rows_at([10], [1]))
    send(engine, rows_at(np.full(40, 20), np.arange(2, 42)))
    send(engine, rows_at(np.full(40, 3700), np.arange(2, 42)))
    assert taken(engine) == 41
    assert {row["t"] for row in as_rows(engine.late("q"))} == {20}


def test_a_promise_ahead_of_the_rows_closes_only_the_windows_behind_it(engine):
    engine.submit(counting(fs.tumbling("1h")))
    for hour in range(4):
        engine.feed("s", rows_at(3600 * hour + np.arange(100), np.arange(100)), watermark=3600 * (hour + 1))
        engine.finish(timeout=FINISH_S)
    engine.feed("s", rows_at(np.full(10, 4 * 3600 + 5), np.arange(10)), watermark=4 * 3600 + 1000)
    engine.finish(timeout=FINISH_S)
    engine.feed("s", rows_at(np.full(10, 5 * 3600 + 5), np.arange(10)))
    engine.finish(timeout=FINISH_S)
    assert taken(engine) == 420
    assert as_rows(engine.late("q")) == []


# -- at random


def check_sessions(rnd):
    size = rnd.choice((1, 10, 12))
    slide = size if rnd.random() < 0.4 else rnd.randint(1, size)
    lateness = rnd.choice((0, 0, 1, 5, 30))
    query = counting(fs.sliding(f"{size}s", every=f"{slide}s"), f"{lateness}s")
    groups, workers = rnd.choice((1, 7, 16)), rnd.choice((1, 2))
    sent, marks, closed, now, story = [], [], None, 0, []
    with fs.Engine(workers=workers, groups=groups, pin=False, listen="127.0.0.1:0") as engine:
        engine.submit(query)
        for _ in range(rnd.randint(2, 8)):
            if workers == 2 and rnd.random() < 0.5:
                engine.move({group: rnd.randint(0, 1) for group in range(groups)})
            now += rnd.choice((0, 0, 1, 15, 50))
            n = rnd.choice((0, 1, 5, 30))
            rows = rows_at([now + rnd.randint(-20, 15) for _ in range(n)], [rnd.randint(0, 30) for _ in range(n)])
            story.append(rows.tolist())
            if closed is not None:
                marks.append((sum(map(len, sent)), closed))
            sent.append(rows)
            if rnd.random() < 0.5:
                send(engine, rows)
            else:
                engine.feed("s", rows)
                engine.finish(timeout=FINISH_S)
            windows = run(query, np.concatenate(sent), marks).windows
            closed = max((start + size for start, _ in windows), default=None)
        results, late, status = as_rows(engine.results("q")), as_rows(engine.late("q")), engine.status()
    everything = np.concatenate(sent)
    oracle = run(query, everything, marks)
    note = f"{query.explain()}\n{story}"
    assert_last_results(query, results, oracle.windows, note)
    expected = sorted(tuple(everything[i].tolist()) for i in oracle.late)
    assert sorted((row["t"], row["k"], row["x"]) for row in late) == expected, note
    assert_ledger(status, "s", len(everything))


@pytest.mark.slow
def test_random_sessions_give_what_the_oracle_gives(seed):
    for i in range(40):
        check_sessions(random.Random(f"{seed}/{i}"))

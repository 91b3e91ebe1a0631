"""Late rows and explicit watermarks: what is late, what makes a revision, and what the end of the stream closes."""

import random
import threading

import numpy as np
import pytest

import flexstream as fs
from flexstream.testing import run
from tests.property.checks import FINISH_S, as_rows, assert_last_results, assert_ledger, window_of
from tests.waiting import WAIT_S, wait_until

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64"}, key="k", time="t")


def rows(*times, k=1, x=1):
    return [{"t": t, "k": k, "x": x} for t in times]


def counting(window, lateness="0s", name="q"):
    return STREAM.query(name).window(window, allowed_lateness=lateness).agg(n=fs.count(), total=fs.sum("x"))


def fed(query, steps, *, workers=1, groups=4, finish=True):
    """Feed (rows, watermark) steps. Returns the results, the late rows, and the status."""
    with fs.Engine(workers=workers, groups=groups, pin=False) as engine:
        engine.submit(query)
        for batch, watermark in steps:
            engine.feed("s", batch, watermark=watermark)
        if finish:
            engine.finish(timeout=FINISH_S)
        return as_rows(engine.results(query.name)), as_rows(engine.late(query.name)), engine.status()


def emitted(results):
    return [(row["window_start"], row["k"], row["n"], row["revision"]) for row in results]


def late_times(late):
    return [(row["t"], row["watermark"]) for row in late]


# -- tumbling


def test_a_row_behind_its_fired_window_is_late_and_readable():
    steps = [(rows(5), 10), (rows(9, x=42), False), (rows(10), False)]
    results, late, status = fed(counting(fs.tumbling("10s")), steps)
    assert emitted(results) == [(0, 1, 1, 0), (10, 1, 1, 0)]
    assert late == [{"t": 9, "k": 1, "x": 42, "watermark": 10}]
    assert status["queries"]["q"]["late"] == 1
    assert status["queries"]["q"]["ledger"]["late"] == 1
    assert_ledger(status, "s", 3)


def test_a_row_behind_the_watermark_whose_window_is_open_is_in_time():
    results, late, _ = fed(counting(fs.tumbling("10s")), [(rows(5), 9), (rows(1), False)])
    assert emitted(results) == [(0, 1, 2, 0)]
    assert late == []


def test_a_watermark_comes_after_the_rows_of_its_call():
    results, late, _ = fed(counting(fs.tumbling("10s")), [(rows(5, 6, 7), 100)])
    assert emitted(results) == [(0, 1, 3, 0)]
    assert late == []


def test_a_watermark_never_goes_back():
    results, late, _ = fed(counting(fs.tumbling("10s")), [([], 20), ([], 5), (rows(7), False)])
    assert results == []
    assert late_times(late) == [(7, 20)]


def test_without_a_watermark_nothing_fires_before_the_end():
    query = counting(fs.tumbling("10s"))
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", rows(5, 1000), watermark=False)
        engine.feed("s", rows(6), watermark=False)
        assert as_rows(engine.results("q", follow=True, timeout=0.3)) == []
        engine.finish(timeout=FINISH_S)
        assert emitted(as_rows(engine.results("q"))) == [(0, 1, 2, 0), (1000, 1, 1, 0)]


def test_negative_times_and_watermarks():
    steps = [(rows(-5, -15), -10), (rows(-12), False), (rows(-1), 0), (rows(-1), False)]
    results, late, _ = fed(counting(fs.tumbling("10s")), steps)
    assert emitted(results) == [(-20, 1, 1, 0), (-10, 1, 2, 0)]
    assert late_times(late) == [(-12, -10), (-1, 0)]


# -- allowed lateness


def test_late_rows_within_the_allowed_lateness_make_revisions_of_the_changed_key_only():
    both = rows(5, k=1) + rows(5, k=2)
    steps = [(both, 10), (rows(6, k=1), False), (rows(7, k=1), False), (rows(8, k=2), 14)]
    results, late, _ = fed(counting(fs.tumbling("10s"), "5s"), steps, groups=1)
    assert sorted(emitted(results)[:2]) == [(0, 1, 1, 0), (0, 2, 1, 0)]
    assert emitted(results)[2:] == [(0, 1, 2, 1), (0, 1, 3, 2), (0, 2, 2, 3)]
    assert late == []


def test_past_the_allowed_lateness_a_row_is_late():
    steps = [(rows(5), 10), (rows(6), 14), (rows(7), 15), (rows(8), False)]
    results, late, _ = fed(counting(fs.tumbling("10s"), "5s"), steps)
    assert emitted(results) == [(0, 1, 1, 0), (0, 1, 2, 1), (0, 1, 3, 2)]
    assert late_times(late) == [(8, 15)]


def test_a_late_row_for_a_window_without_earlier_data_is_its_first_firing():
    results, late, _ = fed(counting(fs.tumbling("10s"), "5s"), [([], 12), (rows(3), False), (rows(4), False)])
    assert emitted(results) == [(0, 1, 1, 0), (0, 1, 2, 1)]
    assert late == []


def test_several_late_rows_of_one_call_are_one_revision():
    results, _, _ = fed(counting(fs.tumbling("10s"), "5s"), [(rows(5), 10), (rows(1, 2, 3), False)])
    assert emitted(results) == [(0, 1, 1, 0), (0, 1, 4, 1)]


# -- sliding windows


def test_a_row_counts_in_the_sliding_windows_that_are_still_open():
    # windows [0,10) and [5,15): at 10 the first has fired
    steps = [(rows(7), 10), (rows(8), False)]
    results, late, status = fed(counting(fs.sliding("10s", every="5s")), steps)
    assert emitted(results) == [(0, 1, 1, 0), (5, 1, 2, 0)]
    assert late == []
    assert status["queries"]["q"]["late"] == 0


def test_sliding_revisions_reach_fired_windows_within_their_lateness_only():
    # at 18 with lateness 5: [0,10) is closed, [5,15) fired and may change, [10,20) is open
    steps = [(rows(7, 12), 18), (rows(8, 11), False)]
    results, late, _ = fed(counting(fs.sliding("10s", every="5s"), "5s"), steps)
    assert emitted(results) == [(0, 1, 1, 0), (5, 1, 2, 0), (5, 1, 4, 1), (10, 1, 2, 0)]
    assert late == []


def test_a_size_that_is_no_multiple_of_the_slide_with_late_rows():
    # windows [-4,6) [0,10) [4,14) [8,18)
    steps = [(rows(5), 6), (rows(5), 10), (rows(5), 14), (rows(5), False)]
    results, late, _ = fed(counting(fs.sliding("10s", every="4s")), steps)
    assert emitted(results) == [(-4, 1, 1, 0), (0, 1, 2, 0), (4, 1, 3, 0)]
    assert late_times(late) == [(5, 14)]


# -- the end, and after it


def test_after_the_end_later_windows_go_on_and_fired_ones_are_closed():
    query = counting(fs.tumbling("10s"))
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", rows(5))
        engine.finish(timeout=FINISH_S)
        engine.feed("s", rows(6, 25))
        engine.finish(timeout=FINISH_S)
        assert emitted(as_rows(engine.results("q"))) == [(0, 1, 1, 0), (20, 1, 1, 0)]
        assert [row["t"] for row in as_rows(engine.late("q"))] == [6]
        assert_ledger(engine.status(), "s", 3)


def test_after_the_end_fired_windows_are_closed_for_every_key():
    query = counting(fs.tumbling("10s"))
    with fs.Engine(groups=128, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", rows(5))
        engine.finish(timeout=FINISH_S)
        others = [row for k in range(2, 40) for row in rows(6, k=k)]
        engine.feed("s", others)
        engine.finish(timeout=FINISH_S)
        assert emitted(as_rows(engine.results("q"))) == [(0, 1, 1, 0)]
        assert len(as_rows(engine.late("q"))) == len(others)


def test_the_end_of_many_sessions_in_a_row():
    query = counting(fs.sliding("10s", every="5s"))
    with fs.Engine(workers=2, groups=7, pin=False) as engine:
        engine.submit(query)
        for i in range(20):
            engine.feed("s", rows(100 * i, k=i))
            engine.finish(timeout=FINISH_S)
        assert len(as_rows(engine.results("q"))) == 40
        assert_ledger(engine.status(), "s", 20)


def test_finish_without_rows_returns():
    with fs.Engine(pin=False) as engine:
        engine.submit(counting(fs.tumbling("10s")))
        engine.finish(timeout=FINISH_S)
        engine.feed("s", [])
        engine.finish(timeout=FINISH_S)
        assert as_rows(engine.results("q")) == []


# -- everything together, at random


def random_steps(rnd, max_rows):
    steps, watermark = [], rnd.choice((0, -100))
    for _ in range(rnd.randint(1, 12)):
        batch = np.zeros(rnd.randint(0, max_rows), STREAM.schema.dtype)
        batch["t"] = [watermark + rnd.randint(-40, 40) for _ in batch]
        batch["k"] = [rnd.randint(0, rnd.choice((1, 30))) for _ in batch]
        batch["x"] = [rnd.randint(-9, 9) for _ in batch]
        watermark += rnd.choice((0, 1, 3, 10, 30))
        steps.append((batch, watermark if rnd.random() < 0.8 else False))
    return steps


def check_late(rnd, max_rows=12):
    size = rnd.choice((1, 10, 12))
    slide = size if rnd.random() < 0.4 else rnd.randint(1, size)
    lateness = rnd.choice((0, 0, 1, 5, 30))
    query = counting(fs.sliding(f"{size}s", every=f"{slide}s"), f"{lateness}s")
    steps = random_steps(rnd, max_rows)
    everything = np.concatenate([batch for batch, _ in steps])
    marks, at = [], 0
    for batch, watermark in steps:
        at += len(batch)
        if watermark is not False:
            marks.append((at, watermark))
    oracle = run(query, everything, marks)
    results, late, status = fed(query, steps, workers=rnd.choice((1, 2)), groups=rnd.choice((1, 7)))
    note = f"{query.explain()}\n{steps}"

    last = {}
    for row in results:
        window = window_of(query, row)
        if window in last:
            assert row["revision"] > last[window]["revision"], note
            assert row["n"] > last[window]["n"], f"{window} was sent again unchanged\n{note}"
            assert lateness > 0, note
        last[window] = row
    assert_last_results(query, results, oracle.windows, note)
    expected = sorted(tuple(everything[i].tolist()) for i in oracle.late)
    assert sorted((row["t"], row["k"], row["x"]) for row in late) == expected, note
    assert status["queries"]["q"]["late"] == len(oracle.late), note
    assert_ledger(status, "s", len(everything))


@pytest.mark.slow
def test_random_watermarks_give_what_the_oracle_gives(seed):
    for i in range(100):
        check_late(random.Random(f"{seed}/{i}"), max_rows=2500 if i % 25 == 0 else 12)


# -- moves


def test_a_revision_of_the_new_owner_is_not_read_before_what_the_old_one_said():
    query = counting(fs.tumbling("10s"), "50s")
    reading, go_on = threading.Event(), threading.Event()

    def hold_up_the_reader(batch):
        reading.set()
        go_on.wait(WAIT_S)

    with fs.Engine(workers=2, groups=1, pin=False) as engine:
        engine.submit(query)
        engine.move({0: 1})  # reports are read in the order of the workers: the new owner's first
        engine.on_results("q", hold_up_the_reader)
        engine.feed("s", rows(5), watermark=10)
        assert reading.wait(WAIT_S)
        engine.feed("s", rows(15), watermark=20)  # fires at the old owner, and is not read
        engine.flush()
        moving = threading.Thread(target=engine.move, args=({0: 0},))
        moving.start()
        wait_until(lambda: engine.placement() == [0], "the group has moved")
        engine.feed("s", rows(16), watermark=False)  # a revision, at the new one
        engine.flush()
        go_on.set()
        moving.join(WAIT_S)
        engine.finish(timeout=FINISH_S)
        found = emitted(as_rows(engine.results("q")))
    assert found == [(0, 1, 1, 0), (10, 1, 1, 0), (10, 1, 2, 1)]

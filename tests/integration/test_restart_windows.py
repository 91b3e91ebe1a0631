"""What a restart does to windows: what has fired has fired, and rows that come for it again are late."""

import numpy as np
import pytest

import flexstream as fs
from tests.integration.small_engine import STREAM, counting, finish, many_rows
from tests.property.checks import as_rows

GROUPS = 8
SLIDING = fs.sliding("20s", every="5s")


def engine_on(data_dir, query):
    engine = fs.Engine(data_dir=data_dir, groups=GROUPS, pin=False, compile="off")
    engine.add(STREAM)
    engine.submit(query)
    return engine


def rows_at(times, keys):
    rows = many_rows(len(times) * keys, keys)
    rows["t"] = np.repeat(times, keys)
    return rows


def identities(engine):
    return [(r["window_start"], r["k"], r["revision"]) for r in as_rows(engine.results("q"))]


def settle(engine):
    """Wait until all that was fed is in the logs."""
    engine.flush()
    engine._parts.round_trips.wait_for_workers()


def late(engine):
    return [(r["t"], r["k"]) for r in as_rows(engine.late("q"))]


def test_rows_that_come_again_for_a_window_that_fired_are_late(tmp_path):
    with engine_on(tmp_path, counting()) as engine:
        engine.feed("s", rows_at(range(0, 20), 10))
        engine.feed("s", rows_at([25], 10))
        engine.flush()
    with engine_on(tmp_path, counting()) as engine:
        before = as_rows(engine.results("q"))
        assert {(r["window_start"], r["n"]) for r in before} == {(0, 10), (10, 10)}
        engine.feed("s", rows_at(range(15, 20), 10), watermark=False)
        engine.feed("s", rows_at(range(20, 30), 10))
        finish(engine)
        after = as_rows(engine.results("q"))[len(before) :]
        assert {(r["window_start"], r["n"], r["revision"]) for r in after} == {(20, 10, 0)}
        assert sorted(set(late(engine))) == [(t, k) for t in range(15, 20) for k in range(10)]
        assert engine.status()["queries"]["q"]["late"] == 50


def test_an_empty_end_after_a_restart_closes_nothing_more(tmp_path):
    with engine_on(tmp_path, counting()) as engine:
        engine.feed("s", rows_at(range(0, 10), 10))
        finish(engine)
    for start in (10, 20, 30):
        with engine_on(tmp_path, counting()) as engine:
            engine.feed("s", rows_at([], 10))
            finish(engine)
            engine.feed("s", rows_at(range(start, start + 10), 10))
            finish(engine)
            assert engine.status()["queries"]["q"]["late"] == 0
            assert {r["n"] for r in as_rows(engine.results("q"))} == {10}
            assert len(identities(engine)) == start + 10


@pytest.mark.parametrize("window", [fs.tumbling("10s"), SLIDING, fs.sliding("10s", every="4s")])
@pytest.mark.parametrize("lateness", ["0s", "7s", "40s"])
@pytest.mark.parametrize("workers", [1, 2])
def test_no_result_is_there_twice_and_no_row_vanishes(tmp_path, window, lateness, workers):
    """Cut at any moment, with rows sent again: each row is in a result of a window that had not fired, or late."""
    rng = np.random.default_rng(7)
    query = STREAM.query("q").window(window, allowed_lateness=lateness).agg(n=fs.count(), ids=fs.sum("x"))
    for life in range(4):
        engine = fs.Engine(workers, data_dir=tmp_path, groups=GROUPS, pin=False, compile="off")
        with engine:
            engine.add(STREAM)
            engine.submit(query)
            had = as_rows(engine.results("q"))
            fired = {}  # group -> what the log says has fired
            for r in had:
                fired[r["group"]] = max(fired.get(r["group"], r["window_end"]), r["window_end"])
            n_late = len(late(engine))
            times = np.sort(rng.integers(10 * life, 10 * life + 60, 40))
            rows = rows_at(times, 5)
            groups = STREAM.group_of(rows, GROUPS)
            engine.feed("s", rows)
            if workers > 1:
                engine.move({int(group): life % 2 for group in set(groups)})
            engine.feed("s", rows_at([10 * life + 75], 5))
            settle(engine)
            new = as_rows(engine.results("q"))[len(had) :]
            assert all(r["window_end"] > fired.get(r["group"], -1) for r in new), "a window fired again"
            size, slide = query.bound().windower.size, query.bound().windower.slide
            last_end = rows["t"].astype(np.int64) // slide * slide + size
            hopeless = sum(int(end) <= fired.get(int(g), -1) for end, g in zip(last_end, groups, strict=True))
            assert len(late(engine)) - n_late == hopeless
        found = identities_of(tmp_path, query)
        assert len(found) == len(set(found))


def identities_of(data_dir, query):
    with engine_on(data_dir, query) as engine:
        return identities(engine)


def test_a_query_that_was_cancelled_begins_anew(tmp_path):
    with engine_on(tmp_path, counting()) as engine:
        engine.feed("s", rows_at(range(0, 10), 10))
        finish(engine)
        engine.cancel("q")
    with engine_on(tmp_path, counting()) as engine:
        engine.feed("s", rows_at(range(0, 10), 10))
        finish(engine)
        assert identities(engine) == [*identities(engine)[:10], *identities(engine)[:10]]
        assert late(engine) == []


def test_a_stop_names_every_open_window(tmp_path):
    """Not only the first of each group, and in ranges, however many there are."""
    engine = engine_on(tmp_path, counting())
    engine.feed("s", rows_at([5, 25, 35, 45, 105], 10), watermark=10)
    (named,) = engine.drain()
    assert named["ranges"] == [[20, 50], [100, 110]]
    assert (named["query"], named["windows"]) == ("q", 4)
    assert (named["first_end"], named["last_end"], named["more_ranges"]) == (30, 110, 0)


def test_open_windows_that_slide_are_named_with_all_of_their_time(tmp_path):
    engine = engine_on(tmp_path, counting(window=SLIDING))
    engine.feed("s", rows_at([22], 3), watermark=26)
    (named,) = engine.drain()
    assert named["ranges"] == [[10, 40]]  # windows that end at 30, 35 and 40
    assert named["windows"] == 3


def test_the_list_of_open_windows_is_bounded(tmp_path):
    engine = engine_on(tmp_path, counting())
    engine.feed("s", rows_at(range(0, 20_000, 20), 2), watermark=0)
    (named,) = engine.drain()
    assert named["windows"] == 1000
    assert (len(named["ranges"]), named["more_ranges"]) == (16, 984)
    assert (named["first_end"], named["last_end"]) == (10, 19_990)

"""Many keys, many results, rows of any size, and the cap on state."""

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from tests.integration.small_engine import STREAM, counting, counts, finish, many_rows, row
from tests.property.checks import as_rows, assert_ledger

# -- sizes


@pytest.mark.slow
def test_a_million_keys(engine):
    engine.submit(counting(window=fs.tumbling("10s")))
    engine.feed("s", many_rows(1_000_000, 1_000_000))
    engine.feed("s", many_rows(1_000_000, 1_000_000))
    engine.finish(timeout=120)
    batches = list(engine.results("q"))
    assert sum(batch.num_rows for batch in batches) == 1_000_000
    assert all((np.asarray(batch["n"]) == 2).all() for batch in batches)
    assert_ledger(engine.status(), "s", 2_000_000)


@pytest.mark.slow
@pytest.mark.parametrize("lateness", ["0s", "5s"])
def test_more_results_than_the_output_pool_holds(lateness):
    """With sliding windows over many keys hundreds of thousands of rows fire at once."""
    query = STREAM.query("q").window(fs.sliding("4s", every="1s"), allowed_lateness=lateness).agg(n=fs.count())
    with fs.Engine(workers=2, groups=7, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", many_rows(100_000, 100_000))
        engine.finish(timeout=60)
        assert sum(batch.num_rows for batch in engine.results("q")) == 400_000
        assert engine.status()["queries"]["q"]["results"] == 400_000


@pytest.mark.parametrize("keys", [1, 383, 384, 385, 20_000])
def test_results_of_queries_that_fire_at_once_each_come_whole(keys):
    """Blocks of several outputs, some not full, that the reader finds behind each other."""
    with fs.Engine(workers=1, groups=3, pin=False) as engine:
        for name in ("one", "two"):
            engine.submit(STREAM.query(name).window(fs.tumbling("1s")).agg(n=fs.count()))
        for _ in range(2):
            engine.feed("s", many_rows(2 * keys, keys))
        engine.finish(timeout=60)
        for name in ("one", "two"):
            batches = list(engine.results(name))
            assert all((np.asarray(batch["n"]) == 4).all() for batch in batches)
            found = np.concatenate([np.asarray(batch["k"]) for batch in batches])
            assert np.array_equal(np.sort(found), np.arange(keys))


@pytest.mark.slow
def test_more_late_rows_than_the_output_pool_holds(engine):
    engine.submit(counting())
    engine.feed("s", [], watermark=1000)
    for _ in range(4):
        engine.feed("s", many_rows(100_000, 50), watermark=False)
    engine.finish(timeout=60)
    assert sum(batch.num_rows for batch in engine.late("q")) == 400_000
    assert engine.status()["queries"]["q"]["late"] == 400_000
    assert_ledger(engine.status(), "s", 400_000)


def test_the_smallest_rows():
    stream = fs.Stream("s", {"t": "timestamp[s]"}, key="t", time="t")
    with fs.Engine(workers=2, groups=7, pin=False) as engine:
        engine.submit(stream.query("q").window(fs.tumbling("10s")).agg(n=fs.count()))
        rows = np.zeros(5000, stream.schema.dtype)
        rows["t"] = np.arange(5000)
        engine.feed("s", rows)
        finish(engine)
        assert len(as_rows(engine.results("q"))) == 5000


@pytest.mark.parametrize("late", [False, True])
def test_the_largest_rows(late):
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "u8", "pad": "bytes[16375]"}, key="k", time="t")
    rows = np.zeros(300, stream.schema.dtype)
    rows["k"] = np.arange(300) % 10
    rows["pad"] = [bytes([65 + i % 26]) * 16375 for i in range(300)]
    with fs.Engine(workers=2, groups=7, pin=False) as engine:
        engine.submit(stream.query("q").filter(col("pad") != b"x").window(fs.tumbling("10s")).agg(n=fs.count()))
        engine.feed("s", [], watermark=1000 if late else False)
        engine.feed("s", rows, watermark=False)
        finish(engine)
        if late:
            assert sorted(r["pad"] for r in as_rows(engine.late("q"))) == sorted(rows["pad"].tolist())
        else:
            assert sorted((r["k"], r["n"]) for r in as_rows(engine.results("q"))) == [(k, 30) for k in range(10)]
        assert_ledger(engine.status(), "s", 300)


def test_long_keys_of_many_fields():
    fields = {f"k{i}": "bytes[16]" for i in range(16)}
    stream = fs.Stream("s", {"t": "timestamp[s]", **fields}, key=list(fields), time="t")
    rows = np.zeros(1000, stream.schema.dtype)
    rows["k15"] = [str(i % 100).encode() for i in range(1000)]
    with fs.Engine(workers=2, groups=7, pin=False) as engine:
        engine.submit(stream.query("q").window(fs.tumbling("10s")).agg(n=fs.count()))
        engine.feed("s", rows)
        finish(engine)
        assert sorted((r["k15"], r["n"]) for r in as_rows(engine.results("q"))) == sorted(
            (str(i).encode(), 10) for i in range(100)
        )


# -- the cap on state


CAP = 6 << 20
WINDOWS = {"tumbling": fs.tumbling("10s"), "sliding": fs.sliding("10s", every="5s")}


def taken_below_the_cap(engine, n):
    """The query runs on, and some of its n rows were rejected, but not all."""
    status = engine.status()["queries"]["q"]
    assert status["state"] == "running", status["error"]
    full = status["rejected"]["state_full"]
    assert 0 < full < n
    return n - full


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lateness", ["0s", "60s"])
def test_past_the_cap_on_state_rows_are_rejected_and_counted(window, lateness):
    query = STREAM.query("q").window(WINDOWS[window], allowed_lateness=lateness).agg(n=fs.count())
    n = 300_000
    with fs.Engine(groups=4, pin=False, state_memory_bytes=CAP) as engine:
        engine.submit(query)
        engine.feed("s", many_rows(n, n, times=20), watermark=False)
        finish(engine)
        counted = sum(sum(batch["n"].to_pylist()) for batch in engine.results("q"))
        assert counted == taken_below_the_cap(engine, n) * (1 if window == "tumbling" else 2)
        assert_ledger(engine.status(), "s", n)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lateness", ["0s", "60s"])
def test_past_the_cap_many_small_panes_still_fire(window, lateness):
    """The memory that firing needs is of the size that the last panes took."""
    query = STREAM.query("q").window(WINDOWS[window], allowed_lateness=lateness).agg(n=fs.count())
    n = 30_000
    rows = many_rows(n, 1)
    rows["t"] = np.arange(n) * 10
    with fs.Engine(groups=1, pin=False, state_memory_bytes=CAP) as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=False)
        finish(engine)
        counted = sum(sum(batch["n"].to_pylist()) for batch in engine.results("q"))
        assert counted == taken_below_the_cap(engine, n) * (1 if window == "tumbling" else 2)


def test_after_the_cap_was_reached_fired_windows_make_room_again():
    with fs.Engine(groups=1, pin=False, state_memory_bytes=CAP) as engine:
        engine.submit(counting())
        engine.feed("s", many_rows(200_000, 200_000), watermark=20)
        again = many_rows(1000, 1000)
        again["t"] = 25
        engine.feed("s", again)
        finish(engine)
        assert len([r for r in counts(engine) if r[0] == 20]) == 1000


@pytest.mark.parametrize("cap", [1 << 20, 4 << 20])
def test_a_small_cap_on_state_works_or_says_what_is_needed(cap):
    refusal = ""
    try:
        engine = fs.Engine(pin=False, state_memory_bytes=cap)
    except fs.EngineError as error:
        refusal = str(error)
    if refusal:
        assert "state_memory_bytes" in refusal
        return
    with engine:
        engine.submit(counting())
        engine.feed("s", [row(1)])
        finish(engine)
        assert counts(engine) == [(0, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lateness", ["0s", "60s"])
def test_windows_fire_when_no_memory_is_left_at_all(window, lateness):
    """Panes of one key each took all there is: what merging and revisions need must not be waited for."""
    query = STREAM.query("q").window(WINDOWS[window], allowed_lateness=lateness).agg(n=fs.count())
    n = 18_000
    rows = many_rows(n, 1)
    rows["t"] = np.arange(n) * 10
    with fs.Engine(groups=1, pin=False, state_memory_bytes=CAP) as engine:
        engine.submit(query)
        for i in range(n):  # one at a time: each batch needs one pane
            engine.feed("s", rows[i : i + 1], watermark=False)
        finish(engine)
        results = engine.status()["queries"]["q"]["results"]
        assert results == taken_below_the_cap(engine, n) * (1 if window == "tumbling" else 2)

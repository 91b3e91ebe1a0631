"""The embedded engine as people use it, and as they misuse it."""

import logging
import threading
import time

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from tests.property.checks import FINISH_S, as_rows, assert_ledger

STREAM = fs.Stream(
    "s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "f": "f64", "u": "u64"}, key="k", time="t"
)
OTHER = fs.Stream("other", {"t": "timestamp[ms]", "name": "bytes[5]"}, key="name", time="t")
LIMIT = 2**62


def row(t, k=1, x=1, f=1.0, u=1):
    return {"t": t, "k": k, "x": x, "f": f, "u": u}


def counting(name="q", window=None, stream=STREAM):
    return stream.query(name).window(window or fs.tumbling("10s")).agg(n=fs.count())


def counts(engine, name="q", key="k"):
    return sorted((r["window_start"], r[key], r["n"]) for r in as_rows(engine.results(name)))


@pytest.fixture
def engine():
    with fs.Engine(groups=4, pin=False) as engine:
        engine.add(STREAM)
        yield engine


def finish(engine):
    engine.finish(timeout=FINISH_S)


def many_rows(n, keys, times=1):
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["k"] = np.arange(n) % keys
    rows["t"] = np.arange(n) % times if times > 1 else 0
    return rows


# -- names


def test_names_that_are_not_there_are_named(engine):
    engine.submit(counting())
    for call in (engine.cancel, lambda n: list(engine.results(n)), lambda n: list(engine.late(n)), engine.result_log):
        with pytest.raises(fs.QueryError, match="no query 'nope'") as error:
            call("nope")
        assert error.value.code == "unknown_query"
        assert "q" in error.value.hint
    with pytest.raises(fs.EngineError, match="no stream 'nope'") as error:
        engine.feed("nope", [])
    assert error.value.code == "unknown_stream"


def test_a_name_runs_once_until_it_is_cancelled(engine):
    engine.submit(counting())
    with pytest.raises(fs.EngineError) as error:
        engine.submit(counting(window=fs.tumbling("1s")))
    assert error.value.code == "query_exists"
    engine.cancel("q")
    engine.submit(counting(window=fs.tumbling("1s")))
    engine.feed("s", [row(0), row(1)])
    finish(engine)
    assert counts(engine) == [(0, 1, 1), (1, 1, 1)]


def test_a_stream_cannot_change_but_may_be_added_twice(engine):
    engine.add(STREAM)
    with pytest.raises(fs.EngineError) as error:
        engine.add(fs.Stream("s", {"t": "timestamp[s]", "k": "i32"}, key="k", time="t"))
    assert error.value.code == "stream_exists"


def test_an_incomplete_query_is_refused_and_leaves_nothing_behind(engine):
    with pytest.raises(fs.QueryError):
        engine.submit(STREAM.query("half").filter(col("x") > 1))
    assert engine.queries == {}
    assert engine.status()["queries"] == {}


# -- cancel


def test_a_cancelled_query_is_gone_and_others_go_on(engine):
    engine.submit(counting("a"))
    engine.submit(counting("b"))
    engine.feed("s", [row(1)])
    engine.cancel("a")
    engine.feed("s", [row(2)])
    finish(engine)
    assert list(engine.queries) == ["b"]
    assert counts(engine, "b") == [(0, 1, 2)]
    with pytest.raises(fs.QueryError):
        engine.results("a")
    assert_ledger(engine.status(), "s", 2)


def test_cancel_and_submit_over_and_over(engine):
    for i in range(50):
        engine.submit(counting())
        engine.feed("s", [row(10 * i)])
        engine.cancel("q")
    engine.submit(counting())
    engine.feed("s", [row(1000)])
    finish(engine)
    assert counts(engine) == [(1000, 1, 1)]
    assert sum(worker["state_bytes"] for worker in engine.status()["workers"]) < 1 << 20


def test_a_reader_that_follows_ends_when_the_query_is_cancelled(engine):
    engine.submit(counting())
    found = []
    reader = threading.Thread(target=lambda: found.extend(as_rows(engine.results("q", follow=True))), daemon=True)
    reader.start()
    engine.feed("s", [row(1), row(50)])
    time.sleep(0.3)
    engine.cancel("q")
    reader.join(10)
    assert not reader.is_alive()
    assert [r["n"] for r in found] == [1]


def test_a_query_sees_the_rows_that_come_after_it(engine):
    engine.submit(counting("early"))
    engine.feed("s", [row(1)], watermark=False)
    engine.submit(counting("later"))
    engine.feed("s", [row(2)], watermark=False)
    finish(engine)
    assert counts(engine, "early") == [(0, 1, 2)]
    assert counts(engine, "later") == [(0, 1, 1)]


def test_for_a_new_query_what_the_watermark_has_passed_is_late(engine):
    engine.feed("s", [row(100)])
    engine.submit(counting())
    engine.feed("s", [row(5), row(101)])
    finish(engine)
    assert counts(engine) == [(100, 1, 1)]
    assert [r["t"] for r in as_rows(engine.late("q"))] == [5]


# -- feeding


def test_nothing_is_not_a_row(engine):
    engine.submit(counting())
    engine.feed("s", [])
    engine.feed("s", np.empty(0, STREAM.schema.dtype))
    finish(engine)
    assert counts(engine) == []
    assert_ledger(engine.status(), "s", 0)


@pytest.mark.parametrize(
    "rows", [[{"t": 1}], [row(1) | {"k": 2**40}], [row("soon")], np.zeros(3, [("a", "i4")]), 7, "rows", [1, 2]]
)
def test_rows_that_do_not_fit_are_refused_whole(engine, rows):
    engine.submit(counting())
    with pytest.raises(fs.SchemaError):
        engine.feed("s", rows)
    engine.feed("s", [row(1)])
    finish(engine)
    assert counts(engine) == [(0, 1, 1)]
    assert_ledger(engine.status(), "s", 1)


def test_feeding_one_group_wants_rows_of_that_group(engine):
    engine.submit(counting())
    rows = STREAM.schema.pack([row(1)])
    mine = int(STREAM.group_of(rows, 4)[0])
    engine.feed("s", rows, group=mine)
    for group in (-1, 4):
        with pytest.raises(fs.EngineError, match="group"):
            engine.feed("s", rows, group=group)
    with pytest.raises(fs.EngineError) as error:
        engine.feed("s", rows, group=(mine + 1) % 4)
    assert error.value.code == "wrong_group"
    finish(engine)
    assert counts(engine) == [(0, 1, 1)]


def test_a_closed_engine_says_so():
    engine = fs.Engine(pin=False)
    engine.submit(counting())
    engine.close()
    engine.close()
    for call in (lambda: engine.feed("s", [row(1)]), lambda: engine.submit(counting("b")), lambda: engine.cancel("q")):
        with pytest.raises(fs.EngineError) as error:
            call()
        assert error.value.code == "closed"


def test_a_feed_that_fails_moves_no_watermark(engine):
    engine.submit(counting())
    with pytest.raises(fs.SchemaError):
        engine.feed("s", [row(1000), {"t": 5}])
    engine.feed("s", [row(1)])
    finish(engine)
    assert counts(engine) == [(0, 1, 1)]


def test_several_threads_may_feed(engine):
    engine.submit(counting())
    threads = [
        threading.Thread(target=lambda k=k: [engine.feed("s", [row(1, k=k)] * 10, watermark=False) for _ in range(50)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    finish(engine)
    assert counts(engine) == [(0, k, 500) for k in range(4)]


# -- several queries and streams


def test_two_queries_with_different_windows_share_a_stream(engine):
    engine.submit(counting("ten"))
    engine.submit(counting("sliding", fs.sliding("4s", every="2s")))
    engine.feed("s", [row(1), row(3), row(11)])
    finish(engine)
    assert counts(engine, "ten") == [(0, 1, 2), (10, 1, 1)]
    assert counts(engine, "sliding") == [(-2, 1, 1), (0, 1, 2), (2, 1, 1), (8, 1, 1), (10, 1, 1)]


def test_a_row_that_is_late_for_one_query_only_is_applied(engine):
    engine.submit(counting("short", fs.tumbling("1s")))
    engine.submit(counting("long", fs.tumbling("100s")))
    engine.feed("s", [row(50)])
    engine.feed("s", [row(3)])
    finish(engine)
    assert counts(engine, "long") == [(0, 1, 2)]
    assert [r["t"] for r in as_rows(engine.late("short"))] == [3]
    assert engine.status()["streams"]["s"]["ledger"]["late"] == 0


def test_two_streams_do_not_touch_each_other(engine):
    engine.submit(counting())
    engine.submit(counting("o", fs.tumbling("10ms"), OTHER))
    engine.feed("s", [row(1_000_000)])
    engine.feed("other", [{"t": 3, "name": b"a"}, {"t": 4, "name": b"a\0b"}])
    engine.feed("s", [row(1_000_001)])
    finish(engine)
    assert counts(engine) == [(1_000_000, 1, 2)]
    assert counts(engine, "o", "name") == [(0, b"a", 1), (0, b"a\0b", 1)]
    status = engine.status()
    assert_ledger(status, "s", 2)
    assert_ledger(status, "other", 2)


def test_the_limit_of_queries_on_a_stream_is_an_error_not_a_crash(engine):
    for i in range(64):
        engine.submit(counting(f"q{i}"))
    with pytest.raises(fs.EngineError) as error:
        engine.submit(counting("more"))
    assert error.value.code == "too_many_queries"
    engine.feed("s", [row(t, k=t) for t in range(100)])
    finish(engine)
    assert all(len(counts(engine, f"q{i}")) == 100 for i in range(64))


# -- results


def test_callbacks_get_every_batch_and_may_fail(engine, caplog):
    engine.submit(counting())
    seen = []

    def broken(batch):
        raise RuntimeError("the callback's own problem")

    engine.on_results("q", broken)
    engine.on_results("q", seen.append)
    with caplog.at_level(logging.ERROR):
        engine.feed("s", [row(t) for t in range(100)])
        finish(engine)
    assert sum(batch.num_rows for batch in seen) == 10
    assert len(counts(engine)) == 10
    assert "callback" in caplog.text


def test_results_from_an_offset(engine):
    engine.submit(counting())
    engine.feed("s", [row(t) for t in range(100)])
    finish(engine)
    everything = as_rows(engine.results("q"))
    for offset in range(11):
        assert as_rows(engine.results("q", offset=offset)) == everything[offset:]


def test_following_results_see_what_comes_later_and_end_at_the_timeout(engine):
    engine.submit(counting())
    found = []
    reader = threading.Thread(
        target=lambda: found.extend(as_rows(engine.results("q", follow=True, timeout=1.5))), daemon=True
    )
    reader.start()
    for t in (1, 15, 25):
        engine.feed("s", [row(t)])
        time.sleep(0.1)
    finish(engine)
    reader.join(10)
    assert not reader.is_alive()
    assert [r["window_start"] for r in found] == [0, 10, 20]


def test_following_results_end_when_the_engine_closes():
    engine = fs.Engine(pin=False)
    engine.submit(counting())
    failures = []

    def follow():
        try:
            list(engine.results("q", follow=True))
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    time.sleep(0.2)
    engine.close()
    reader.join(10)
    assert not reader.is_alive()
    assert failures == []


def test_finish_names_who_is_still_there():
    with fs.Engine(pin=False, listen="127.0.0.1:0", groups=4) as engine:
        engine.submit(counting())
        host, port = engine.data_address
        with fs.Producer(f"tcp://{host}:{port}", stream="s", producer_id="slow-one"):
            with pytest.raises(fs.EngineError, match="slow-one") as error:
                engine.finish(timeout=0.3)
            assert error.value.code == "not_finished"
        finish(engine)


# -- values


def failing_sum(name="sums"):
    return STREAM.query(name).window(fs.tumbling("10s")).agg(total=fs.sum("x"))


def test_an_integer_sum_that_overflows_fails_its_query_only(engine):
    engine.submit(failing_sum())
    engine.submit(counting())
    engine.feed("s", [row(1, x=2**63 - 1), row(1, x=1)])
    engine.feed("s", [row(2, x=5)])
    finish(engine)
    queries = engine.status()["queries"]
    assert queries["sums"]["state"] == "failed"
    assert "int64" in queries["sums"]["error"]
    assert as_rows(engine.results("sums")) == []
    assert queries["q"]["state"] == "running"
    assert counts(engine) == [(0, 1, 3)]
    assert queries["sums"]["rows"] == 3
    assert_ledger(engine.status(), "s", 3)


def test_a_failed_query_can_be_cancelled_and_started_again(engine):
    engine.submit(failing_sum())
    engine.feed("s", [row(1, x=2**63 - 1), row(1, x=1)])
    engine.cancel("sums")
    engine.submit(failing_sum())
    engine.feed("s", [row(2, x=5)])
    finish(engine)
    assert [r["total"] for r in as_rows(engine.results("sums"))] == [5]


def test_a_sum_that_overflows_when_panes_are_merged_fails_the_query(engine):
    engine.submit(STREAM.query("sums").window(fs.sliding("10s", every="5s")).agg(total=fs.sum("x")))
    engine.feed("s", [row(1, x=2**62), row(6, x=2**62)])
    finish(engine)
    assert engine.status()["queries"]["sums"]["state"] == "failed"


def test_rows_without_a_value_are_rejected_and_counted(engine):
    query = STREAM.query("q").map(y=100 // col("x"), z=col("x") + 1, w=col("f").cast("i64"))
    aggregates = {"y": fs.sum("y"), "z": fs.max("z"), "w": fs.max("w"), "u": fs.max("u")}
    query = query.window(fs.tumbling("10s")).agg(n=fs.count(), **aggregates)
    engine.submit(query)
    bad = [row(1, x=0), row(1, x=2**63 - 1), row(1, f=float("nan")), row(1, f=1e19), row(1, u=2**63)]
    engine.feed("s", [row(1, x=3), *bad, row(1, x=-7)])
    finish(engine)
    status = engine.status()
    assert sum(status["queries"]["q"]["rejected"].values()) == len(bad)
    assert as_rows(engine.results("q"))[0] | {"group": 0} == {
        "window_start": 0, "window_end": 10, "k": 1, "n": 2, "y": 33 - 14, "z": 4, "w": 1, "u": 1,
        "group": 0, "revision": 0,
    }  # fmt: skip
    assert status["streams"]["s"]["ledger"]["rejected"] == len(bad)
    assert_ledger(status, "s", 7)


def test_rejections_are_counted_under_the_documented_reasons(engine):
    """docs/queries.md: overflow, division_by_zero, cast."""
    query = STREAM.query("q").map(y=100 // col("x"), z=col("x") + 1, w=col("f").cast("i64"))
    engine.submit(query.window(fs.tumbling("10s")).agg(y=fs.max("y"), z=fs.max("z"), w=fs.max("w")))
    engine.feed("s", [row(1, x=0), row(1, x=2**63 - 1), row(1, f=float("nan")), row(1)])
    finish(engine)
    rejected = {reason: n for reason, n in engine.status()["queries"]["q"]["rejected"].items() if n}
    assert rejected == {"division_by_zero": 1, "overflow": 1, "cast": 1}


@pytest.mark.parametrize("t", [LIMIT + 1, -LIMIT - 1, 2**63 - 1, -(2**63)])
def test_times_out_of_range_are_rejected_and_the_rest_goes_on(engine, t):
    engine.submit(counting())
    engine.feed("s", [row(1), row(t), row(2)], watermark=False)
    finish(engine)
    assert counts(engine) == [(0, 1, 2)]
    assert engine.status()["queries"]["q"]["rejected"]["time_range"] == 1
    assert_ledger(engine.status(), "s", 3)


@pytest.mark.parametrize("t", [LIMIT + 1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("disorder", ["0s", "5s"])
def test_a_time_out_of_range_does_not_move_the_watermark(t, disorder):
    stream = fs.Stream("s", STREAM.schema, key="k", time="t", max_disorder=disorder)
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(counting(stream=stream))
        engine.feed("s", [row(1)])
        engine.feed("s", [row(t)])
        engine.feed("s", [row(2)])
        finish(engine)
        assert counts(engine) == [(0, 1, 2)]
        assert engine.status()["queries"]["q"]["late"] == 0


@pytest.mark.parametrize("t", [LIMIT, -LIMIT, LIMIT - 7, 7 - LIMIT])
def test_times_at_the_ends_of_the_range_work(engine, t):
    engine.submit(counting())
    engine.submit(counting("sliding", fs.sliding("10s", every="3s")))
    engine.feed("s", [row(t)])
    finish(engine)
    assert counts(engine) == [(t // 10 * 10, 1, 1)]
    starts = range(t // 3 * 3, t - 10, -3)
    assert counts(engine, "sliding") == sorted((s, 1, 1) for s in starts)


def test_nan_counts_as_one_key_and_as_the_greatest_value():
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "f64", "f": "f64"}, key="k", time="t")
    query = stream.query("q").window(fs.tumbling("10s")).agg(
        n=fs.count(), low=fs.min("f"), high=fs.max("f"), total=fs.sum("f"), mean=fs.avg("f"), dev=fs.stddev("f")
    )  # fmt: skip
    rows = np.zeros(4, stream.schema.dtype)
    rows["k"] = [np.nan, -np.nan, 0.0, -0.0]
    rows["k"].view(np.uint64)[1] = 0xFFF8000000000123
    rows["f"] = [1.0, np.nan, 2.0, 3.0]
    with fs.Engine(groups=7, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", rows)
        finish(engine)
        results = sorted(as_rows(engine.results("q")), key=lambda r: r["k"] == r["k"])
    assert [r["n"] for r in results] == [2, 2]
    assert results[0]["low"] == 1.0
    assert all(results[0][name] != results[0][name] for name in ("k", "high", "total", "mean", "dev"))
    assert (results[1]["k"], results[1]["low"], results[1]["high"], results[1]["total"]) == (0.0, 2.0, 3.0, 5.0)


def test_any_nan_among_the_rows_makes_a_deviation_nan_and_not_null(engine):
    engine.submit(STREAM.query("q").window(fs.tumbling("10s")).agg(dev=fs.stddev("f")))
    rows = STREAM.schema.pack([row(1), row(1)])
    rows["f"].view(np.uint64)[:] = 0x7FF8F1E257EA0001  # the engine's own mark for null, as an input
    engine.feed("s", rows)
    finish(engine)
    (result,) = as_rows(engine.results("q"))
    assert result["dev"] is not None
    assert result["dev"] != result["dev"]


def test_the_smallest_timestamp_is_a_value_like_any_other():
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "timestamp[ms]"}, key="k", time="t")
    with fs.Engine(groups=1, pin=False) as engine:
        engine.submit(stream.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), low=fs.min("k")))
        engine.feed("s", [{"t": 1, "k": -(2**63)}])
        finish(engine)
        (result,) = as_rows(engine.results("q"))
    assert (result["k"], result["low"]) == (-(2**63), -(2**63))


@pytest.mark.parametrize("offset", [1.6e9, 1.7e12])
def test_a_deviation_far_from_zero_is_as_exact_as_any_other(engine, offset):
    import statistics

    engine.submit(STREAM.query("q").window(fs.sliding("101s", every="45s")).agg(dev=fs.stddev("f")))
    values = [offset + (i * 37 % 101) for i in range(90)]
    engine.feed("s", [row(i, f=value) for i, value in enumerate(values)])
    finish(engine)
    (result,) = [r for r in as_rows(engine.results("q")) if r["window_start"] == 0]
    assert result["dev"] == pytest.approx(statistics.stdev(values), rel=1e-9)


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


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lateness", ["0s", "60s"])
def test_past_the_cap_on_state_rows_are_rejected_and_counted(window, lateness):
    query = STREAM.query("q").window(WINDOWS[window], allowed_lateness=lateness).agg(n=fs.count())
    n = 300_000
    with fs.Engine(groups=4, pin=False, state_memory_bytes=CAP) as engine:
        engine.submit(query)
        engine.feed("s", many_rows(n, n, times=20), watermark=False)
        finish(engine)
        status = engine.status()["queries"]["q"]
        assert status["state"] == "running", status["error"]
        full = status["rejected"]["state_full"]
        assert 0 < full < n
        counted = sum(sum(batch["n"].to_pylist()) for batch in engine.results("q"))
        assert counted == (n - full) * (1 if window == "tumbling" else 2)
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
        status = engine.status()["queries"]["q"]
        assert status["state"] == "running", status["error"]
        full = status["rejected"]["state_full"]
        assert 0 < full < n
        counted = sum(sum(batch["n"].to_pylist()) for batch in engine.results("q"))
        assert counted == (n - full) * (1 if window == "tumbling" else 2)


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


@pytest.mark.parametrize("watermark", [2**63, -(2**63) - 1, 2**70])
def test_a_watermark_that_does_not_fit_is_refused_before_any_row_is_taken(engine, watermark):
    engine.submit(counting())
    with pytest.raises(fs.FlexStreamError):
        engine.feed("s", [row(1)], watermark=watermark)
    finish(engine)
    assert counts(engine) == []


def test_the_earliest_time_there_is_can_be_fed_first():
    stream = fs.Stream("s", STREAM.schema, key="k", time="t", max_disorder="5s")
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(counting(stream=stream))
        engine.feed("s", [row(-(2**63))])
        engine.feed("s", [row(1)])
        finish(engine)
        assert counts(engine) == [(0, 1, 1)]
        assert engine.status()["queries"]["q"]["rejected"]["time_range"] == 1


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
        status = engine.status()["queries"]["q"]
        assert status["state"] == "running", status["error"]
        full = status["rejected"]["state_full"]
        assert 0 < full < n
        assert status["results"] == (n - full) * (1 if window == "tumbling" else 2)

"""Values that an engine cannot count with, at the limits of their types and beyond."""

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from tests.integration.small_engine import STREAM, counting, counts, finish, row
from tests.property.checks import as_rows, assert_ledger

LIMIT = 2**62


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
        "group": 0, "revision": 0, "complete": True,
    }  # fmt: skip
    assert status["queries"]["q"]["ledger"] == {
        "accepted": 7, "applied": 2, "filtered": 0, "late": 0, "rejected": len(bad), "in_flight": 0,
    }  # fmt: skip
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


def test_gaps_of_a_frame_are_refused_or_chosen_for_and_nan_results_are_counted(engine):
    pandas = pytest.importorskip("pandas")
    aggregates = {"total": fs.sum("f"), "spread": fs.stddev("f")}
    engine.submit(STREAM.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), **aggregates))
    frame = pandas.DataFrame([row(1, k=1, f=None), row(1, k=2), row(1, k=3)])
    with pytest.raises(fs.SchemaError, match="'f' has 1 null"):
        engine.feed("s", frame)
    engine.feed("s", frame, missing="drop")
    engine.feed("s", frame, missing=0.0)
    engine.feed("s", [row(1, k=4, f=float("nan")), row(1, k=4), row(1, k=5)])
    finish(engine)
    found = {r["k"]: r for r in as_rows(engine.results("q"))}
    assert {k: r["n"] for k, r in found.items()} == {1: 1, 2: 2, 3: 2, 4: 2, 5: 1}
    assert np.isnan(found[4]["total"])
    assert found[5]["spread"] is None
    assert engine.status()["queries"]["q"]["nan_results"] == 1

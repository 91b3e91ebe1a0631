"""Event times and spans at the ends of their range: refused with a reason, or right; no crash, no endless loop."""

import random

import numpy as np
import pytest

import flexstream as fs
from flexstream.rows.layout import SPAN_LIMIT
from flexstream.testing import run
from tests.property.checks import FINISH_S, as_rows, assert_same_results

LIMIT = 1 << 62
NS = fs.Stream("s", {"t": "timestamp[ns]", "k": "i64"}, key="k", time="t")


def rows_at(*times):
    rows = np.zeros(len(times), NS.schema.dtype)
    rows["t"].view("i8")[:] = times
    return rows


@pytest.mark.parametrize(
    "window",
    [fs.sliding(7 << 60, every=1 << 60), fs.tumbling(1 << 62), fs.tumbling(SPAN_LIMIT + 1)],
    ids=str,
)
def test_spans_whose_sums_would_not_fit_are_refused(window):
    with pytest.raises(fs.QueryError, match=r"too long: with times in ns the limit is 2\*\*60 ns, 36 years") as error:
        NS.query("q").window(window)
    assert error.value.code == "bad_window"
    seconds = fs.Stream("s", {"t": "timestamp[s]", "k": "i64"}, key="k", time="t")
    assert seconds.query("q").window(fs.tumbling("100000d")).window_spec is not None


def test_lateness_and_disorder_are_spans_too():
    with pytest.raises(fs.QueryError, match=r"allowed lateness .* too long"):
        NS.query("q").window(fs.tumbling("1s"), allowed_lateness=SPAN_LIMIT + 1)
    with pytest.raises(fs.FlexStreamError, match=r"max_disorder .* too long") as error:
        fs.Stream("s", {"t": "timestamp[ns]", "k": "i64"}, key="k", time="t", max_disorder=SPAN_LIMIT + 1)
    assert error.value.code == "bad_disorder"


def test_a_plan_from_json_is_held_to_the_same_bounds():
    plan = NS.query("q").window(fs.tumbling(SPAN_LIMIT)).agg(n=fs.count()).to_json()
    assert fs.Query.from_json(plan).to_json() == plan
    assert f"{SPAN_LIMIT}ns" in plan
    with pytest.raises(fs.QueryError, match="too long"):
        fs.Query.from_json(plan.replace(f"{SPAN_LIMIT}ns", f"{2 * SPAN_LIMIT}ns"))


def random_span(rnd):
    return rnd.choice((1, 2, 1000, SPAN_LIMIT // 7, SPAN_LIMIT - 1, SPAN_LIMIT, rnd.randint(1, SPAN_LIMIT)))


def random_time(rnd):
    edge = rnd.choice((-LIMIT, LIMIT, 0, -SPAN_LIMIT, SPAN_LIMIT, rnd.randint(-LIMIT, LIMIT)))
    return max(-LIMIT, min(LIMIT, edge + rnd.choice((0, 0, 1, -1, rnd.randint(-SPAN_LIMIT, SPAN_LIMIT)))))


def check_extremes(rnd):
    size = random_span(rnd)
    slide = size if rnd.random() < 0.5 else max(1, size // rnd.choice((1, 2, 3, 7)))
    if size % slide:
        size -= size % slide
    lateness = rnd.choice((0, 0, random_span(rnd)))
    query = NS.query("q").window(fs.sliding(size, every=slide), allowed_lateness=lateness).agg(n=fs.count())
    rows = rows_at(*(random_time(rnd) for _ in range(rnd.randint(1, 20))))
    watermark = rnd.choice((False, -LIMIT, 0, LIMIT))
    oracle = run(query, rows)
    with fs.Engine(workers=1, groups=2, pin=False, compile=rnd.choice(("off", "auto"))) as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=watermark)
        engine.feed("s", rows_at(), watermark=LIMIT)
        engine.finish(timeout=FINISH_S)
        results = as_rows(engine.results("q"))
    assert_same_results(query, results, oracle.windows)


@pytest.mark.slow
def test_times_and_spans_over_the_whole_range(seed):
    for i in range(60):
        check_extremes(random.Random(f"{seed}/{i}"))

"""What each aggregate says of rows that can be checked by eye, in both variants, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.errors import QueryError
from flexstream.testing import run

STREAM = fs.Stream(
    "s",
    {"t": "timestamp[ms]", "k": "i32", "x": "i64", "y": "f64", "small": "i16", "ok": "bool", "name": "bytes[8]"},
    key="k",
    time="t",
    max_disorder="1000s",
)
FINISH_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def private_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def rows_of(n: int, **columns: Any) -> np.ndarray:
    rows = np.zeros(n, STREAM.schema.dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


def query_of(window: Any = None, **aggregates: fs.Aggregate) -> fs.Query:
    return STREAM.query("q").window(window or fs.tumbling("10s")).agg(**aggregates)


def results(query: fs.Query, *batches: np.ndarray, compile: str = "off", **options: Any) -> list[dict[str, Any]]:
    with fs.Engine(groups=4, compile=compile, pin=False, **options) as engine:
        engine.submit(query)
        for batch in batches:
            engine.feed("s", batch, watermark=False)
        engine.finish(timeout=FINISH_S)
        return [row for batch in engine.results("q") for row in batch.to_pylist()]


both = pytest.mark.parametrize("compile", ["off", "require"])


# -- count_if


@both
def test_count_if_counts_the_rows_that_match_and_says_0_where_none_does(compile):
    query = query_of(n=fs.count(), big=fs.count_if(col("x") > 5), ok=fs.count_if("ok"))
    rows = rows_of(400, k=np.arange(400) % 2, x=np.where(np.arange(400) % 2, 9, 1), ok=np.arange(400) % 4 < 2)
    found = {row["k"]: (row["n"], row["big"], row["ok"]) for row in results(query, rows, compile=compile)}
    assert found == {0: (200, 0, 100), 1: (200, 200, 100)}
    assert query.result_schema().field("big").type == "int64"


@both
def test_count_if_of_a_row_without_a_value_rejects_the_row(compile):
    query = query_of(n=fs.count(), odd=fs.count_if(100 // col("x") > 10))
    (row,) = results(query, rows_of(100, x=np.arange(100) % 10), compile=compile)
    assert (row["n"], row["odd"]) == (90, 90)


def test_count_if_is_for_conditions():
    with pytest.raises(QueryError, match="count_if does not work on x, which is i64") as refused:
        query_of(n=fs.count_if("x"))
    assert refused.value.code == "bad_types"
    assert "compare it" in (refused.value.hint or "")


# -- the plan


@pytest.mark.parametrize("aggregate", [fs.count_if(col("x") > 5)], ids=str)
def test_the_plan_and_its_json_say_the_aggregate(aggregate):
    query = query_of(a=aggregate)
    assert fs.Query.from_json(query.to_json()) == query
    assert f"a = {aggregate}" in query.explain()
    assert f"a = {aggregate.fn}(" in query.explain("optimised")
    assert run(query, rows_of(3)).windows


@pytest.mark.parametrize("body", [["count_if"], ["count_if", ["col", "ok"], 1], ["median", ["col", "x"]]])
def test_json_that_is_no_aggregate_is_refused(body):
    plan = query_of(n=fs.count()).to_dict()
    with pytest.raises(QueryError, match="not an aggregate"):
        fs.Query.from_dict({**plan, "aggregates": {"n": body}})

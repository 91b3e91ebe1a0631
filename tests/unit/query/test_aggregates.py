"""What each aggregate says of rows that can be checked by eye, in both variants, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from flexstream.errors import QueryError
from flexstream.testing import run
from tests.property.checks import FINISH_S, equal

STREAM = fs.Stream(
    "s",
    {"t": "timestamp[ms]", "k": "i32", "x": "i64", "y": "f64", "small": "i16", "ok": "bool", "name": "bytes[8]"},
    key="k",
    time="t",
    max_disorder="1000s",
)


def rows_of(n: int, **columns: Any) -> np.ndarray:
    rows = np.zeros(n, STREAM.schema.dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


def query_of(window: Any = None, **aggregates: fs.Aggregate) -> fs.Query:
    return STREAM.query("q").window(window or fs.tumbling("10s")).agg(**aggregates)


def results(query: fs.Query, *batches: np.ndarray, compile: str = "off", **options: Any) -> list[dict[str, Any]]:
    with fs.Engine(**{"groups": 4, "compile": compile, "pin": False, **options}) as engine:
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


# -- first and last


@both
def test_first_and_last_go_by_event_time_and_then_by_the_order_in_which_rows_were_fed(compile):
    query = query_of(first=fs.first("x"), last=fs.last("x"), small=fs.first("small"), ok=fs.last("ok"), t=fs.last("t"))
    t = np.array([5, 3, 3, 9, 9, 4] * 100)
    rows = rows_of(600, t=t, x=np.arange(600), small=-np.arange(600), ok=np.arange(600) % 2 == 0)
    batches = [rows[at : at + 7] for at in range(0, 600, 7)]
    (row,) = results(query, *batches, compile=compile)
    assert (row["first"], row["last"], row["small"], row["ok"]) == (1, 598, -1, True)
    assert row["t"].microsecond == 9000
    kinds = {name: str(query.result_schema().field(name).type) for name in ("first", "small", "ok", "t")}
    assert kinds == {"first": "int64", "small": "int16", "ok": "bool", "t": "timestamp[ms]"}


@both
def test_first_and_last_keep_the_bits_of_a_real(compile):
    query = query_of(first=fs.first("y"), last=fs.last("y"))
    (row,) = results(query, rows_of(200, t=np.arange(200), y=[np.nan] * 199 + [-0.0]), compile=compile)
    assert np.isnan(row["first"])
    assert np.signbit(row["last"])
    assert row["last"] == 0


@both
def test_rows_of_the_same_time_come_by_session_in_the_order_of_registration(compile):
    query = query_of(first=fs.first("x"), last=fs.last("x"))
    with fs.Engine(groups=4, compile=compile, pin=False, listen="127.0.0.1:0") as engine:
        engine.submit(query)
        address = "tcp://{}:{}".format(*engine.data_address)
        producers = [fs.Producer(address, stream="s", linger_ms=1) for _ in range(3)]
        for number in (2, 0, 1):  # not in the order in which they came
            producers[number].send(rows_of(50, x=100 * number + np.arange(50)))
            producers[number].flush(FINISH_S)
        for producer in producers:
            producer.close(timeout=FINISH_S)
        engine.finish(timeout=FINISH_S)
        (row,) = [row for batch in engine.results("q") for row in batch.to_pylist()]
    assert (row["first"], row["last"]) == (0, 249)


def test_a_session_in_the_slot_of_one_that_has_gone_has_a_number_of_its_own():
    """With one slot, two lives: the second one's rows begin at sequence 0 again, and are later all the same."""
    query = query_of(first=fs.first("x"), last=fs.last("x"))
    with fs.Engine(groups=1, compile="off", pin=False, max_sessions=2) as engine:
        engine.submit(query)
        engine.add(STREAM)
        sessions = engine.running_stream("s").sessions
        numbers = []
        for life in range(4):
            session = sessions.register(f"p{life}", 0, "test")
            numbers.append(session.number)
            sessions.end(session, None)
            assert session.ended.wait(FINISH_S)
        assert numbers == sorted(set(numbers))


def test_what_keeps_values_is_not_for_bytes():
    for fn in (fs.first, fs.last, fs.distinct, fs.mode, fs.approx_distinct, fs.order_hash):
        with pytest.raises(QueryError, match="does not work on name, which is bytes"):
            query_of(a=fn("name"))


# -- approx_distinct


@both
def test_approx_distinct_is_near_the_truth_at_any_size(compile):
    query = query_of(n=fs.count(), about=fs.approx_distinct("x"), ok=fs.approx_distinct("ok"))
    rng = np.random.default_rng(7)
    for different in (1, 2, 10, 100, 1_000, 20_000, 200_000):
        values = rng.integers(-(2**62), 2**62, different)
        rows = rows_of(different + 1000, x=np.concatenate([values, np.resize(values, 1000)]))
        rows["ok"] = np.arange(len(rows)) % 2
        (row,) = results(query, rows, compile=compile)
        assert row["n"] == len(rows)
        assert row["ok"] == min(2, len(rows))
        assert abs(row["about"] - different) <= 4 * 0.0325 * different + 0.5, (different, row["about"])
        if different <= 10:
            assert row["about"] == different


@both
def test_approx_distinct_takes_zeros_of_both_signs_for_one_value_and_all_nans_for_one(compile):
    query = query_of(about=fs.approx_distinct("y"))
    rows = rows_of(300)
    rows["y"] = np.resize(np.array([0, 1 << 63, 0x7FF8 << 48, 0xFFF8 << 48, 0x7FF0 << 48 | 5], "u8").view("f8"), 300)
    (row,) = results(query, rows, compile=compile)
    assert row["about"] == 2


def test_what_sketches_keep_of_a_key_has_a_limit():
    aggregates = {f"a{i}": fs.approx_distinct(col("x") + i) for i in range(9)}
    with pytest.raises(QueryError, match="keep 9216 bytes for each key; the limit is 8192"):
        results(query_of(**aggregates), rows_of(1))


# -- distinct


@both
def test_distinct_counts_each_value_once_in_every_window(compile):
    query = query_of(
        fs.sliding("10s", every="2s"), n=fs.count(), x=fs.distinct("x"), y=fs.distinct("y"), ok=fs.distinct("ok")
    )
    rng = np.random.default_rng(3)
    rows = rows_of(4000, t=rng.integers(0, 60_000, 4000), k=rng.integers(0, 5, 4000), x=rng.integers(0, 200, 4000))
    rows["y"] = rng.choice([0.0, -0.0, np.nan, -np.nan, 1.5, np.inf], 4000)
    rows["ok"] = rows["x"] % 2 == 0
    expected = {(window, *key): values for (window, key), values in run(query, rows).windows.items()}
    found = results(query, *np.array_split(rows, 13), compile=compile)
    assert len(found) == len(expected)
    for row in found:
        start = int(row["window_start"].timestamp() * 1000)
        assert {name: row[name] for name in query.aggregates} == expected[start, row["k"]]


def test_distinct_of_late_rows_revises_the_count():
    query = STREAM.query("q").window(fs.tumbling("10s"), allowed_lateness="100s").agg(x=fs.distinct("x"))
    with fs.Engine(groups=4, pin=False) as engine:
        engine.submit(query)
        engine.feed("s", rows_of(3, t=[1, 2, 3], x=[5, 6, 5]), watermark=20_000)
        engine.feed("s", rows_of(2, t=[4, 5], x=[5, 7]), watermark=30_000)
        engine.finish(timeout=FINISH_S)
        found = [row for batch in engine.results("q") for row in batch.to_pylist()]
    assert [(row["x"], row["revision"]) for row in found] == [(2, 0), (3, 1)]


@both
@pytest.mark.parametrize(
    ("keys", "values", "panes", "memory"), [(40, 10**9, 2, 6 << 20), (12_000, 12_000, 3, 10 << 20)]
)
def test_distinct_is_exact_where_there_is_no_memory_to_merge_in(keys, values, panes, memory, compile):
    """The panes fit, and a table of all their values does not; in the second case nor does one of all keys."""
    n = 12_000
    query = query_of(fs.sliding(f"{panes}s", every="1s"), n=fs.count(), x=fs.distinct("x"))
    parts = [
        rows_of(n, t=1000 * p, k=np.arange(n) % keys, x=(n // 2 * p + np.arange(n)) % values) for p in range(panes)
    ]
    expected = {(window, *key): found for (window, key), found in run(query, np.concatenate(parts)).windows.items()}
    found = results(query, *parts, groups=1, state_memory_bytes=memory, compile=compile)
    assert len(found) == len(expected)
    for row in found:
        start = int(row["window_start"].timestamp() * 1000)
        assert {name: row[name] for name in query.aggregates} == expected[start, row["k"]]


@both
def test_rows_for_whose_values_there_is_no_room_are_rejected_and_counted(compile):
    query = query_of(n=fs.count(), x=fs.distinct("x"), y=fs.distinct("y"))
    rows = rows_of(100_000, k=np.arange(100_000) % 3, x=np.arange(100_000), y=np.arange(100_000) % 7)
    with fs.Engine(groups=4, pin=False, state_memory_bytes=2 << 20, compile=compile) as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=False)
        engine.finish(timeout=FINISH_S)
        found = [row for batch in engine.results("q") for row in batch.to_pylist()]
        full = engine.status()["queries"]["q"]["rejected"]["state_full"]
    assert full > 0
    assert sum(row["n"] for row in found) == len(rows) - full
    assert all(row["x"] == row["n"] and row["y"] == 7 for row in found)


def test_compiled_code_looks_values_up_itself():
    query = query_of(x=fs.distinct("x"), y=fs.distinct("y"), n=fs.count())
    rows = rows_of(50_000, k=np.arange(50_000) % 3, x=np.arange(50_000) % 101, y=np.arange(50_000) % 7)
    with fs.Engine(groups=4, pin=False, compile="require") as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=False)
        engine.finish(timeout=FINISH_S)
        said = engine.status()["queries"]["q"]
        found = [row for batch in engine.results("q") for row in batch.to_pylist()]
    assert [(row["x"], row["y"]) for row in found] == [(101, 7)] * 3
    assert said["compiled_rows"] > 40_000


def test_order_hash_says_that_it_is_not_compiled():
    query = query_of(x=fs.order_hash("x"))
    assert "order_hash is not compiled yet" in query.explain()
    assert "order_hash is not compiled yet" in query.explain("optimised")
    assert "order_hash is not compiled yet" in query.explain("code")
    with fs.Engine(groups=4, pin=False, compile="auto") as engine:
        engine.submit(query)
        said = engine.status()["queries"]["q"]
    assert said["variant"] == "generic"
    assert "order_hash is not compiled yet" in said["variant_reason"]
    with (
        fs.Engine(groups=4, pin=False, compile="require") as engine,
        pytest.raises(fs.EngineError, match="order_hash is not compiled yet"),
    ):
        engine.submit(query)


def test_a_query_keeps_the_values_of_four_aggregates_at_most():
    aggregates = {f"a{i}": fs.distinct(col("x") + i) for i in range(5)}
    with pytest.raises(QueryError, match="has 5 of distinct, mode, median and order_hash; the limit is 4"):
        results(query_of(**aggregates), rows_of(1))


# -- mode and median


def assert_as_the_oracle_says(query: fs.Query, rows: np.ndarray, found: list[dict[str, Any]]) -> None:
    expected = {(window, *key): values for (window, key), values in run(query, rows).windows.items()}
    assert len(found) == len(expected)
    for row in found:
        for name, value in expected[int(row["window_start"].timestamp() * 1000), row["k"]].items():
            assert equal(row[name], value), (row, name, value)


@both
def test_mode_is_the_most_frequent_value_and_the_smallest_of_several(compile):
    query = query_of(x=fs.mode("x"), y=fs.mode("y"), small=fs.mode("small"), ok=fs.mode("ok"), n=fs.count())
    rows = rows_of(
        600,
        k=np.arange(600) % 2,
        x=np.resize([7, 7, 3, 3, -5, -5, -5, 9], 600),
        y=np.resize([np.nan, 2.5, -0.0, -0.0, 0.0, 2.5, np.nan, 0.0], 600),
        small=-np.arange(600) // 300,
        ok=np.arange(600) % 4 < 2,
    )
    found = {row["k"]: row for row in results(query, rows, compile=compile)}
    assert (found[0]["x"], found[1]["x"]) == (-5, -5)  # of 7, 3 and -5 with 75 rows each; -5 with 150 of 300
    assert (found[0]["y"], np.signbit(found[0]["y"])) == (0.0, False)
    assert (found[1]["y"], found[1]["small"], found[1]["ok"]) == (0.0, -2, False)
    kinds = {name: str(query.result_schema().field(name).type) for name in ("x", "y", "small", "ok")}
    assert kinds == {"x": "int64", "y": "double", "small": "int16", "ok": "bool"}


@both
def test_mode_is_also_for_times_and_nan_is_a_value(compile):
    query = query_of(t=fs.mode("t"), y=fs.mode("y"))
    rows = rows_of(500, t=np.resize([3, 5, 5], 500), y=np.resize([np.nan, -np.nan, 1.0], 500))
    (row,) = results(query, rows, compile=compile)
    assert row["t"].microsecond == 5000
    assert np.isnan(row["y"])


@both
def test_median_is_the_middle_row_or_half_way_between_two(compile):
    query = query_of(x=fs.median("x"), y=fs.median("y"), small=fs.median(col("small") + 1))
    y = [np.inf, np.nan, 1, -np.inf, np.inf]
    rows = rows_of(5, k=[0, 0, 0, 1, 1], x=[9, 1, 4, 4, 7], y=y, small=[1, 1, 5, 2, 2])
    for n in (1, 40):
        found = {row["k"]: row for row in results(query, np.resize(rows, 5 * n), compile=compile)}
        assert (found[0]["x"], found[0]["y"], found[0]["small"]) == (4.0, np.inf, 2.0)
        assert (found[1]["x"], found[1]["small"]) == (5.5, 3.0)
        assert np.isnan(found[1]["y"])
    assert {str(query.result_schema().field(name).type) for name in ("x", "y", "small")} == {"double"}


def test_median_of_the_largest_values_does_not_overflow():
    query = query_of(x=fs.median("x"), y=fs.median("y"))
    (row,) = results(query, rows_of(2, x=[2**63 - 1, 2**63 - 3], y=[1.5 * 2.0**1023, 2.0**1023]))
    assert (row["x"], row["y"]) == (2.0**63, 1.25 * 2.0**1023)


@pytest.mark.parametrize(("argument", "said"), [("ok", "is bool"), ("t", "is timestamp"), ("name", "is bytes")])
def test_median_is_for_numbers(argument, said):
    with pytest.raises(QueryError, match=f"median does not work on {argument}, .*{said}") as refused:
        query_of(a=fs.median(argument))
    assert refused.value.code == "bad_types"
    assert "it takes numbers" in (refused.value.hint or "")


@both
@pytest.mark.parametrize("values", [3, 40, 10**6])
def test_values_are_ranked_and_counted_over_all_panes_of_a_window(values, compile):
    query = query_of(
        fs.sliding("10s", every="2s"), often=fs.mode("x"), x=fs.median("x"), y=fs.median("y"), z=fs.mode("y")
    )
    rng = np.random.default_rng(3)
    rows = rows_of(4000, t=rng.integers(0, 60_000, 4000), k=rng.integers(0, 5, 4000), x=rng.integers(0, values, 4000))
    rows["y"] = rng.choice([0.0, -0.0, np.nan, -np.nan, 1.5, np.inf, -np.inf], 4000)
    assert_as_the_oracle_says(query, rows, results(query, *np.array_split(rows, 13), compile=compile))


@both
def test_late_rows_revise_mode_and_median_of_their_keys_alone(compile):
    query = (
        STREAM.query("q")
        .window(fs.tumbling("10s"), allowed_lateness="100s")
        .agg(often=fs.mode("x"), middle=fs.median("x"))
    )
    with fs.Engine(groups=4, pin=False, compile=compile) as engine:
        engine.submit(query)
        engine.feed("s", rows_of(4, t=[1, 2, 3, 4], k=[0, 0, 0, 1], x=[5, 6, 5, 1]), watermark=20_000)
        engine.feed("s", rows_of(3, t=[4, 5, 6], x=[6, 6, 8]), watermark=30_000)
        engine.feed("s", rows_of(2, t=[7, 25_000], k=[1, 1], x=[0, 7]), watermark=40_000)
        engine.finish(timeout=FINISH_S)
        found = [row for batch in engine.results("q") for row in batch.to_pylist()]
    said = sorted((row["window_start"].second, row["k"], row["revision"], row["often"], row["middle"]) for row in found)
    assert said == [(0, 0, 0, 5, 5.0), (0, 0, 1, 6, 6.0), (0, 1, 0, 1, 1.0), (0, 1, 2, 0, 0.5), (20, 1, 0, 7, 7.0)]


@both
@pytest.mark.parametrize(
    ("keys", "values", "panes", "memory"), [(40, 10**9, 2, 10 << 20), (12_000, 12_000, 3, 16 << 20)]
)
def test_mode_and_median_are_exact_where_there_is_no_memory_to_merge_in(keys, values, panes, memory, compile):
    """As with distinct: in the second case not even a table of all keys fits."""
    n = 12_000
    query = query_of(fs.sliding(f"{panes}s", every="1s"), n=fs.count(), often=fs.mode("x"), middle=fs.median("x"))
    parts = [
        rows_of(n, t=1000 * p, k=np.arange(n) % keys, x=(n // 2 * p + np.arange(n)) % values) for p in range(panes)
    ]
    found = results(query, *parts, groups=1, state_memory_bytes=memory, compile=compile)
    assert_as_the_oracle_says(query, np.concatenate(parts), found)


@both
def test_rows_for_whose_values_there_is_no_room_are_in_no_mode_and_no_median(compile):
    query = query_of(n=fs.count(), often=fs.mode("y"), middle=fs.median("x"))
    rows = rows_of(100_000, k=np.arange(100_000) % 3, x=np.arange(100_000), y=np.arange(100_000) % 7)
    with fs.Engine(groups=4, pin=False, state_memory_bytes=2 << 20, compile=compile) as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=False)
        engine.finish(timeout=FINISH_S)
        found = [row for batch in engine.results("q") for row in batch.to_pylist()]
        full = engine.status()["queries"]["q"]["rejected"]["state_full"]
    assert full > 0
    assert sum(row["n"] for row in found) == len(rows) - full
    assert all(row["often"] in range(7) and 0 <= row["middle"] < 100_000 for row in found)


def test_one_key_with_many_values_is_ranked_in_many_slices():
    """A slice looks at 4096 values; this key has fifty times as many, in two parts of the window."""
    query = query_of(fs.sliding("2s", every="1s"), middle=fs.median("x"), real=fs.median("y"))
    rng = np.random.default_rng(5)
    rows = rows_of(200_001, t=rng.integers(0, 2000, 200_001), x=rng.permutation(200_001), y=rng.normal(size=200_001))
    found = {row["window_start"].second: row for row in results(query, rows)}
    assert found[0]["middle"] == 100_000.0
    assert found[0]["real"] == np.median(rows["y"])


# -- order_hash


def test_order_hash_tells_any_other_order_and_is_the_same_for_the_same():
    query = query_of(h=fs.order_hash("x"))
    there = rows_of(100, t=np.arange(100)[::-1], x=np.arange(100))
    swapped = there.copy()
    swapped["x"][[50, 51]] = swapped["x"][[51, 50]]
    (one,), (again,), (other,) = (
        results(query, *np.array_split(rows, n)) for rows, n in ((there, 1), (there, 9), (swapped, 1))
    )
    assert one["h"] == again["h"] == run(query, there).windows[0, (0,)]["h"]
    assert other["h"] != one["h"]


def test_order_hash_needs_a_tumbling_window():
    with pytest.raises(QueryError, match="order_hash needs a tumbling window, not sliding") as refused:
        query_of(fs.sliding("10s", every="1s"), h=fs.order_hash("x"))
    assert refused.value.code == "bad_window"


# -- the plan


@pytest.mark.parametrize(
    "aggregate",
    [
        fs.count_if(col("x") > 5),
        fs.first("x"),
        fs.last(col("y") + 1),
        fs.approx_distinct("ok"),
        fs.distinct("x"),
        fs.mode("ok"),
        fs.median(col("y") + 1),
        fs.order_hash("x"),
    ],
    ids=str,
)
def test_the_plan_and_its_json_say_the_aggregate(aggregate):
    query = query_of(a=aggregate)
    assert fs.Query.from_json(query.to_json()) == query
    assert f"a = {aggregate}" in query.explain()
    assert f"a = {aggregate.fn}(" in query.explain("optimised")
    assert run(query, rows_of(3)).windows


@pytest.mark.parametrize("body", [["count_if"], ["count_if", ["col", "ok"], 1], ["middle", ["col", "x"]]])
def test_json_that_is_no_aggregate_is_refused(body):
    plan = query_of(n=fs.count()).to_dict()
    next(node for node in plan["nodes"] if node["op"] == "aggregate")["aggregates"] = {"n": body}
    with pytest.raises(QueryError, match="not an aggregate"):
        fs.Query.from_dict(plan)


# -- variance, bool_and, bool_or, min_by, max_by


@both
def test_variance_is_the_square_of_the_deviation_and_null_for_a_single_row(compile):
    query = query_of(v=fs.variance("x"), d=fs.stddev("x"), y=fs.variance("y"))
    rows = rows_of(101, k=[0] * 100 + [1], x=np.arange(101), y=np.nan)
    found = {row["k"]: row for row in results(query, rows, compile=compile)}
    assert found[0]["v"] == pytest.approx(np.var(np.arange(100), ddof=1))
    assert found[0]["v"] == pytest.approx(found[0]["d"] ** 2)
    assert np.isnan(found[0]["y"])
    assert (found[1]["v"], found[1]["y"]) == (None, None)


@both
def test_bool_and_is_true_where_all_rows_are_and_bool_or_where_one_is(compile):
    query = query_of(all=fs.bool_and("ok"), any=fs.bool_or("ok"), big=fs.bool_and(col("x") > 2))
    rows = rows_of(300, k=np.arange(300) % 3, ok=[False, True, False] * 99 + [True, True, False], x=np.arange(300))
    found = {row["k"]: (row["all"], row["any"], row["big"]) for row in results(query, rows, compile=compile)}
    assert found == {0: (False, True, False), 1: (True, True, False), 2: (False, False, False)}
    assert query.result_schema().field("all").type == "bool"


@both
def test_max_by_is_the_value_of_the_row_with_the_greatest_and_of_equal_rows_the_greatest_value(compile):
    query = query_of(
        low=fs.min_by("small", "x"), high=fs.max_by("small", "x"), real=fs.max_by("y", "x"), last=fs.max_by("x", "y"),
        ok=fs.min_by("ok", col("x") * 2), at=fs.max_by("t", "x"),
    )  # fmt: skip
    rows = rows_of(200, t=np.arange(200), x=np.arange(200) % 50, small=-np.arange(200), y=np.arange(200) % 7, ok=True)
    rows["y"][60] = np.nan
    (row,) = results(query, rows, compile=compile)
    assert (row["low"], row["high"]) == (-150, -49)  # of rows 0, 50, 100, 150 and of 49, 99, 149, 199
    assert (row["real"], row["last"], row["ok"]) == (max(i % 7 for i in (49, 99, 149, 199)), 10, True)
    assert row["at"].microsecond == 199000
    kinds = {name: str(query.result_schema().field(name).type) for name in ("low", "real", "ok", "at")}
    assert kinds == {"low": "int16", "real": "double", "ok": "bool", "at": "timestamp[ms]"}


@both
def test_min_by_and_max_by_know_the_order_of_reals(compile):
    query = query_of(low=fs.min_by("y", "y"), high=fs.max_by("y", "y"), x=fs.max_by("x", "y"), zero=fs.min_by("x", "y"))
    values = [1.5, -np.inf, -2.5, 0.0, -0.0, np.inf, np.nan, 7.0, -1e300]
    (row,) = results(query, rows_of(180, x=np.arange(180) % 9, y=values * 20), compile=compile)
    assert (row["low"], row["x"], row["zero"]) == (-np.inf, 6, 1)
    assert np.isnan(row["high"])
    (row,) = results(query, rows_of(180, x=np.arange(180) % 2, y=[0.0, -0.0] * 90), compile=compile)
    assert (row["x"], row["zero"]) == (1, 0)  # -0.0 and 0.0 decide nothing between them


def test_min_by_says_what_it_takes():
    with pytest.raises(QueryError, match="min_by cannot choose a row by ok, which is bool"):
        query_of(a=fs.min_by("x", "ok"))
    with pytest.raises(QueryError, match="max_by takes two arguments"):
        query_of(a=fs.Aggregate("max_by", col("x")))
    with pytest.raises(QueryError, match="not an aggregate"):
        fs.Aggregate.from_json(["max_by", ["col", "x"]])
    assert str(fs.max_by("x", col("y") + 1)) == "max_by(x, (y + 1))"

"""The compiled variant says what the generic one says, and what the oracle says, wherever the switch falls."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexstream as fs
from flexstream import col
from flexstream.compile.codegen import generate
from flexstream.compile.toolchain import compile_code
from flexstream.testing import run
from tests.property.checks import (
    FINISH_S,
    Case,
    as_rows,
    assert_conserved,
    assert_ledger,
    equal,
    random_batches,
    random_query,
    random_rows,
    random_stream,
    window_of,
)

CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64"}, key="k", time="t")


def compiled_case(rnd: random.Random) -> Case:
    """Few keys for many rows, so that compiled code does most of the work; sometimes the reverse."""
    stream = random_stream(rnd)
    keys = rnd.choice((1, 3, 3, 20, 1000))
    rows = random_rows(rnd.getrandbits(32), stream, rnd.choice((0, 1, 40, 700, 2500)), keys)
    return Case(stream, rows, [random_query(rnd, stream, "q0")])


def run_case(rnd: random.Random, case: Case, mode: str) -> int:
    """Checks all against the oracle; how many rows compiled code finished."""
    with fs.Engine(workers=rnd.choice((1, 2)), groups=rnd.choice((1, 7)), compile=mode, pin=False) as engine:
        engine.add(case.stream)
        for query in case.queries:
            engine.submit(query)
        for batch in random_batches(rnd, case.rows):
            engine.feed(case.stream.name, batch)
        engine.finish(timeout=FINISH_S)
        assert_conserved(engine, case)
        statuses = engine.status()["queries"].values()
        assert all(said["variant"] == ("generic" if mode == "off" else "compiled") for said in statuses)
        return sum(said["compiled_rows"] for said in statuses)


@settings(max_examples=40, suppress_health_check=CHECKS)
@given(rnd=st.randoms(use_true_random=False))
@pytest.mark.time_limit(120)
def test_both_variants_give_what_the_oracle_gives(rnd):
    case = compiled_case(rnd)
    try:
        assert run_case(rnd, case, "off") == 0
        run_case(rnd, case, "require")
    except BaseException:
        print(case)
        raise


@pytest.mark.slow
def test_both_variants_give_what_the_oracle_gives_in_a_longer_run(seed):
    finished = 0
    for i in range(80):
        rnd = random.Random(f"{seed}/{i}")
        case = compiled_case(rnd)
        try:
            run_case(rnd, case, "off")
            finished += run_case(rnd, case, "require")
        except BaseException:
            print(f"case {i}\n{case}")
            raise
    assert finished > 1000


def switching(rnd: random.Random, query: fs.Query, steps: list[tuple[np.ndarray, Any]], **options: Any) -> Any:
    """Feed (rows, watermark) steps, each to a variant chosen at random on each worker."""
    function = compile_code(generate(query.bound())).function
    with fs.Engine(
        workers=rnd.choice((1, 2)), groups=rnd.choice((1, 7)), compile="off", pin=False, **options
    ) as engine:
        engine.submit(query)
        (running,) = engine.running()[1]
        for batch, watermark in steps:
            for state in running.states:
                state.use_variant(rnd.choice((0, function)))
            engine.feed(query.stream.name, batch, watermark=watermark, wait=rnd.random() < 0.5)
        engine.finish(timeout=FINISH_S)
        return as_rows(engine.results(query.name)), as_rows(engine.late(query.name)), engine.status()


@settings(max_examples=25, suppress_health_check=CHECKS)
@given(rnd=st.randoms(use_true_random=False))
@pytest.mark.time_limit(120)
def test_switches_at_random_batches_change_no_result(rnd):
    case = compiled_case(rnd)
    (query,) = case.queries
    function = compile_code(generate(query.bound())).function
    with fs.Engine(workers=rnd.choice((1, 2)), groups=rnd.choice((1, 7)), compile="off", pin=False) as engine:
        engine.submit(query)
        (running,) = engine.running()[1]
        for batch in random_batches(rnd, case.rows):
            for state in running.states:
                state.use_variant(rnd.choice((0, function)))
            engine.feed(case.stream.name, batch)
        engine.finish(timeout=FINISH_S)
        try:
            assert_conserved(engine, case)
        except BaseException:
            print(case)
            raise


# -- watermarks, lateness, revisions


def late_steps(rnd: random.Random) -> list[tuple[np.ndarray, Any]]:
    steps, watermark = [], rnd.choice((0, -100))
    for _ in range(rnd.randint(1, 14)):
        batch = np.zeros(rnd.choice((0, 3, 40, 1500)), STREAM.schema.dtype)
        batch["t"] = [watermark + rnd.randint(-40, 40) for _ in batch]
        batch["k"] = [rnd.randint(0, rnd.choice((1, 30))) for _ in batch]
        batch["x"] = [rnd.randint(-9, 9) for _ in batch]
        watermark += rnd.choice((0, 1, 3, 10, 30))
        steps.append((batch, watermark if rnd.random() < 0.8 else False))
    return steps


@pytest.mark.parametrize(
    ("size", "slide", "lateness"), [(10, 10, 0), (10, 10, 30), (1, 1, 5), (12, 5, 0), (12, 5, 1), (10, 2, 30)]
)
def test_late_rows_and_revisions_are_the_same_under_switches(size, slide, lateness, seed):
    window = fs.sliding(f"{size}s", every=f"{slide}s")
    query = STREAM.query("q").filter(col("x") != 3).window(window, allowed_lateness=f"{lateness}s")
    query = query.agg(n=fs.count(), total=fs.sum("x"), least=fs.min("x"), dev=fs.stddev("x"))
    for i in range(4):
        rnd = random.Random(f"{seed}/{i}")
        steps = late_steps(rnd)
        everything = np.concatenate([batch for batch, _ in steps])
        marks, at = [], 0
        for batch, watermark in steps:
            at += len(batch)
            if watermark is not False:
                marks.append((at, watermark))
        oracle = run(query, everything, marks)
        results, late, status = switching(rnd, query, steps)
        last: dict[Any, dict[str, Any]] = {}
        for row in results:
            window_key = window_of(query, row)
            if window_key in last:
                assert lateness > 0
                assert row["revision"] > last[window_key]["revision"]
                assert row["n"] > last[window_key]["n"]
            last[window_key] = row
        assert last.keys() == oracle.windows.keys()
        for window_key, values in oracle.windows.items():
            for name, value in values.items():
                assert equal(last[window_key][name], value), (window_key, name, last[window_key], value)
        expected = sorted(tuple(everything[i].tolist()) for i in oracle.late)
        assert sorted((row["t"], row["k"], row["x"]) for row in late) == expected
        assert status["queries"]["q"]["late"] == len(oracle.late)
        assert_ledger(status, "s", len(everything))


# -- what compiled code leaves to the generic variant


def required(query: fs.Query, *batches: Any, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with fs.Engine(groups=options.pop("groups", 4), compile="require", pin=False, **options) as engine:
        engine.submit(query)
        for batch in batches:
            engine.feed(query.stream.name, batch)
        engine.finish(timeout=FINISH_S)
        return as_rows(engine.results(query.name)), engine.status()["queries"][query.name]


def rows_of(stream: fs.Stream, n: int, **columns: Any) -> np.ndarray:
    rows = np.zeros(n, stream.schema.dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


def test_every_row_has_a_new_key():
    n = 3000
    query = STREAM.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), total=fs.sum("x"))
    results, said = required(query, rows_of(STREAM, n, k=np.arange(n), x=7))
    assert sorted((row["k"], row["n"], row["total"]) for row in results) == [(k, 1, 7) for k in range(n)]
    assert said["rows"] == n


def test_every_row_has_another_pane_than_the_row_before():
    rows = rows_of(STREAM, 1000, t=np.arange(1000) * 7 % 100, x=1)
    slack = fs.Stream("s", STREAM.schema, key="k", time="t", max_disorder="100s")
    query = slack.query("q").window(fs.tumbling("10s")).agg(n=fs.count())
    results, said = required(query, rows)
    assert [(row["window_start"], row["n"]) for row in sorted(results, key=lambda r: r["window_start"])] == [
        (start, 100) for start in range(0, 100, 10)
    ]
    assert said["late"] == 0


def test_a_row_without_a_value_is_rejected_with_its_reason_and_the_rest_goes_on():
    query = STREAM.query("q").map(y=100 // col("x")).filter(col("y") * 2**58 != 0).window(fs.tumbling("10s"))
    query = query.agg(n=fs.count(), total=fs.sum("y"))
    x = np.where(np.arange(2000) % 100 == 99, 0, np.where(np.arange(2000) % 100 == 50, 1, 10))
    results, said = required(query, rows_of(STREAM, 2000, x=x), groups=1)
    assert [(row["n"], row["total"]) for row in results] == [(1960, 19600)]
    assert {reason: n for reason, n in said["rejected"].items() if n} == {"division_by_zero": 20, "overflow": 20}
    assert said["compiled_rows"] > 300


def test_a_sum_that_overflows_in_compiled_code_fails_the_query_alone():
    query = STREAM.query("q").window(fs.tumbling("10s")).agg(total=fs.sum("x"))
    other = STREAM.query("other").window(fs.tumbling("10s")).agg(n=fs.count())
    big = rows_of(STREAM, 200, x=2**62)
    with fs.Engine(groups=1, compile="require", pin=False) as engine:
        engine.submit(query)
        engine.submit(other)
        engine.feed("s", rows_of(STREAM, 100, x=0))  # key and pane are there: what follows is compiled
        engine.feed("s", big)
        engine.feed("s", big)
        engine.finish(timeout=FINISH_S)
        said = engine.status()["queries"]
        assert said["q"]["state"] == "failed"
        assert said["q"]["error"] == "an integer sum passed the range of int64"
        assert said["q"]["rows"] == 500
        assert [row["n"] for row in as_rows(engine.results("other"))] == [500]


def test_state_at_its_cap_refuses_new_keys_and_counts_known_ones():
    wide = fs.Stream("w", {"t": "timestamp[s]", "k": "bytes[200]", "x": "i64"}, key="k", time="t")
    query = wide.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), total=fs.sum("x"))
    n = 20_000
    names = np.char.add("k", np.arange(n).astype(str)).astype("S200")
    rows = rows_of(wide, n, k=names, x=1)
    results, said = required(query, rows, rows[:10], rows, groups=1, state_memory_bytes=2 << 20)
    full = said["rejected"]["state_full"]
    assert full > 0
    assert sum(row["n"] for row in results) == 2 * n + 10 - full
    assert all(row["n"] == (3 if int(row["k"][1:]) < 10 else 2) for row in results)
    assert said["compiled_rows"] > 0


@pytest.mark.parametrize("widths", [(1,), (3,), (5,), (9,), (17,), (1, 2), (3, 5, 9), (255, 1)])
def test_keys_of_any_width_keep_apart_what_differs_in_any_byte(widths):
    fields = {"t": "timestamp[s]", "x": "u8", **{f"k{i}": f"bytes[{w}]" for i, w in enumerate(widths)}}
    stream = fs.Stream("s", fields, key=[f"k{i}" for i in range(len(widths))], time="t")
    query = stream.query("q").window(fs.tumbling("10s")).agg(n=fs.count(), total=fs.sum("x"))
    places = [(i, at) for i, width in enumerate(widths) for at in range(width)][:40]
    rows = rows_of(stream, 10 * len(places), x=3)
    raw = rows.view(np.uint8).reshape(len(rows), -1)
    for number in range(len(rows)):
        i, at = places[number % len(places)]
        raw[number, stream.schema.field(f"k{i}").offset + at] = 200
    results, said = required(query, rows, rows)
    assert [(row["n"], row["total"]) for row in results] == [(20, 60)] * len(places)
    assert said["compiled_rows"] > 0


def test_bools_of_any_byte_and_zeros_and_nans_of_any_sign_are_one_key_each():
    stream = fs.Stream(
        "s", {"t": "timestamp[s]", "b": "bool", "f": "f32", "d": "f64", "e": "bool"}, key=["b", "f", "d"], time="t"
    )
    query = stream.query("q").filter(col("e")).window(fs.tumbling("10s")).agg(n=fs.count(), least=fs.min("d"))
    rows = rows_of(stream, 1200)
    raw = rows.view(np.uint8).reshape(len(rows), -1)
    raw[:, stream.schema.field("b").offset] = np.resize([1, 2, 255], len(rows))
    raw[:, stream.schema.field("e").offset] = np.resize([1, 128], len(rows))
    rows["f"] = np.resize(np.array([0x7FC00000, 0xFFC00001, 0x7F800001], "<u4").view("<f4"), len(rows))
    rows["d"] = np.resize([0.0, -0.0], len(rows))
    results, said = required(query, rows[:600], rows[600:], groups=1)
    assert [row["n"] for row in results] == [1200]
    assert said["compiled_rows"] > 1000


def test_a_product_and_a_sum_are_rounded_apart():
    """With one rounding (fma) 0.1 * 10 - 1 is not 0."""
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "a": "f64", "b": "f64"}, key="k", time="t")
    query = stream.query("q").map(y=col("a") * col("b") - 1.0).window(fs.tumbling("10s"))
    query = query.agg(zeros=fs.sum((col("y") == 0.0).cast("i64")), most=fs.max("y"))
    results, said = required(query, rows_of(stream, 500, a=0.1, b=10.0))
    assert [(row["zeros"], row["most"]) for row in results] == [(500, 0.0)]
    assert said["compiled_rows"] > 400


def test_unsigned_fields_compare_as_numbers():
    stream = fs.Stream(
        "s", {"t": "timestamp[s]", "k": "i32", "a": "u8", "b": "u16", "c": "u32", "d": "u64"}, key="k", time="t"
    )
    rows = rows_of(
        stream, 900, a=200, b=50_000, c=3_000_000_000, d=np.resize(np.array([2**63, 2**63 - 1, 5], "u8"), 900)
    )
    query = stream.query("q").filter((col("a") > -1) & (col("b") > 40_000) & (col("c") > 2**31) & (col("c") > -5))
    query = query.window(fs.tumbling("10s")).agg(n=fs.count(), s=fs.max("d"), m=fs.min(col("a") - col("c")))
    results, said = required(query, rows)
    assert [(row["n"], row["s"], row["m"]) for row in results] == [(600, 2**63 - 1, 200 - 3_000_000_000)]
    assert said["rejected"]["overflow"] == 300


def test_a_time_past_the_limit_is_rejected_even_where_its_pane_is_open():
    limit = 1 << 62
    query = STREAM.query("q").window(fs.tumbling("10s")).agg(n=fs.count())
    before, past = rows_of(STREAM, 100, t=limit - 1), rows_of(STREAM, 200, t=limit + 1)
    results, said = required(query, before, past, groups=1)
    assert [row["n"] for row in results] == [100]
    assert said["rejected"]["time_range"] == 200

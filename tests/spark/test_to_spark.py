"""query.to_spark: the same plan on Spark gives what the oracle and the engine give."""

from __future__ import annotations

import decimal
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flexstream as fs
from flexstream import col
from flexstream import spark as fspark
from flexstream.testing import run
from tests.property import operators
from tests.property.checks import (
    FUNCTIONS,
    as_rows,
    assert_groups,
    assert_same_results,
    random_query,
    random_rows,
    random_stream,
)
from tests.spark.rig import QUERY, SPARK_SCHEMA, STREAM, arrow_table, frame, make_rows

CASES = 8
IN_SPARK = tuple(fn for fn in FUNCTIONS if fn not in (fs.first, fs.last, fs.approx_distinct, fs.order_hash))
WIDER = {"u8": "i2", "u16": "i4", "u32": "i8", "timestamp": "i8"}
PER_UNIT = {"s": (1, 1_000_000), "ms": (1, 1_000), "us": (1, 1), "ns": (1_000, 1)}


def spark_table(stream: fs.Stream, rows: np.ndarray) -> pa.Table:
    columns = {}
    for field in stream.schema:
        values = rows[field.name]
        if field.kind == "u64":
            columns[field.name] = pa.array(map(decimal.Decimal, values.tolist()), pa.decimal128(20, 0))
        elif field.kind == "bytes":  # with padding, as a file may have it
            columns[field.name] = pa.array([value.ljust(field.size, b"\0") for value in values.tolist()], pa.binary())
        else:
            columns[field.name] = pa.array(values.astype(WIDER.get(field.kind, values.dtype)))
    return pa.table(columns)


def results_of(query: fs.Query, df: Any) -> list[dict[str, Any]]:
    """Spark's results as the checks want them: times in their own unit, decimals as integers."""
    table = df.toArrow()
    units = {name: kind[10:-1] for name, kind in query.bound().result_fields if kind.startswith("timestamp")}
    rows = as_rows(table.to_batches())
    for row in rows:
        for name, unit in units.items():
            up, down = PER_UNIT[unit]
            row[name] = row[name] * up // down
        for name, value in row.items():
            if isinstance(value, decimal.Decimal):
                row[name] = int(value)
    return rows


def translatable(rnd: random.Random) -> tuple[fs.Stream, np.ndarray]:
    """A random stream that Spark's microseconds can hold."""
    while True:
        stream = random_stream(rnd)
        if all(field.unit != "ns" for field in stream.schema):
            break
    rows = random_rows(rnd.getrandbits(32), stream, rnd.randint(1, 200), rnd.choice((1, 3, 20)))
    for field in stream.schema:  # Spark's timestamps end long before 64 bits of milliseconds do
        if field.unit is not None and field.name != stream.time:
            rows[field.name] = np.clip(rows[field.name], -(2**33), 2**33)
    return stream, rows


@pytest.mark.time_limit(900)
def test_random_queries_agree_with_the_oracle_and_the_engine(spark: Any, seed: int) -> None:
    rnd = random.Random(seed)
    for _ in range(CASES):
        stream, rows = translatable(rnd)
        query = random_query(rnd, stream, "q", functions=IN_SPARK)
        df = spark.createDataFrame(spark_table(stream, rows))
        expected = run(query, rows).windows
        found = results_of(query, query.to_spark(df))
        assert_same_results(query, found, expected)
        with fs.Engine(workers=1, pin=False, compile="off") as engine:
            engine.add(stream)
            engine.submit(query)
            engine.feed(stream.name, rows)
            engine.finish(timeout=60)
            assert_same_results(query, as_rows(engine.results("q")), expected)
            assert_groups(engine, stream, found)


def operator_queries() -> dict[str, fs.Query]:
    """Every operator: what fails for some rows is asked of some rows each, so that it does not hide the others."""
    whole = [*operators.parts(), *operators.hashes()]
    whole += [fs.when(tree, 1).otherwise(0) for tree in operators.conditions()]
    some = list(operators.fallible())
    guarded = [fs.when(col("k") % 12 == i % 12, tree).otherwise(0) for i, tree in enumerate(some)]
    queries = {}
    for name, trees, size in (("whole", whole, 40), ("guarded", guarded, 12)):
        for at in range(0, len(trees), size):
            aggregates = {f"v{i}": fs.max(tree) for i, tree in enumerate(trees[at : at + size])}
            query = operators.STREAM.query("q").window(fs.tumbling("10s"))
            queries[f"{name}-{at}"] = query.agg(**aggregates)
    return queries


@pytest.mark.parametrize(("name", "query"), operator_queries().items(), ids=operator_queries().keys())
def test_every_operator_is_what_it_is_in_the_oracle(spark: Any, name: str, query: fs.Query) -> None:
    """In a session whose time zone is half an hour off."""
    rows = operators.make_rows(300, far=False)
    found = results_of(query, query.to_spark(spark.createDataFrame(spark_table(query.stream, rows))))
    assert_same_results(query, found, run(query, rows).windows)


def test_hash_is_that_of_a_spark_column(spark: Any) -> None:
    from pyspark.sql import functions as F

    rows = make_rows(200)
    query = STREAM.query("q").window(fs.tumbling("10s")).agg(h=fs.max(fs.hash("k", "kind", "x", "price", "t")))
    df = frame(spark, rows)
    wanted = df.select(F.max(F.hash("k", F.encode("kind", "utf-8"), "x", "price", "t"))).first()[0]
    assert max(row["h"] for row in results_of(query, query.to_spark(df))) == wanted
    assert max(values["h"] for values in run(query, rows).windows.values()) == wanted


def test_names_and_types_are_those_of_the_source(spark: Any) -> None:
    made = QUERY.to_spark(frame(spark, make_rows(10), 1)).schema
    wanted = fspark.result_schema(QUERY)
    assert [(field.name, field.dataType) for field in made] == [(field.name, field.dataType) for field in wanted]


def test_a_streaming_frame_fires_the_windows_that_the_watermark_has_passed(spark: Any, tmp_path: Path) -> None:
    # Given: files one after the other in event time; the last two are far away: one moves the watermark, and the
    # other makes Spark look at it.
    rows = make_rows(6_000)
    far = [make_rows(1, start=start) for start in (1_000_000, 1_000_001)]
    (tmp_path / "in").mkdir()
    for i, part in enumerate((rows[:3_000], rows[3_000:], *far)):
        pq.write_table(arrow_table(part), tmp_path / "in" / f"{i}.parquet")
        os.utime(tmp_path / "in" / f"{i}.parquet", (1_000_000 + i, 1_000_000 + i))  # Spark takes them by age
    df = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "in"))
    # When: the translated query runs in append mode.
    writer = QUERY.to_spark(df, groups=16).writeStream.format("memory").queryName("fired").outputMode("append")
    query = writer.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start()
    assert query.awaitTermination(400)
    # Then: each window of the first two files was emitted once, with the oracle's values.
    assert_same_results(QUERY, results_of(QUERY, spark.table("fired")), run(QUERY, rows).windows)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (
            fs.Stream("n", {"t": "timestamp[ns]", "k": "i64"}, key="k", time="t")
            .query("q").window(fs.tumbling("100ns")).agg(n=fs.count()),
            "window tumbling 100ns: Spark's times are in microseconds",
        ),
        (
            fs.Stream("n", {"t": "timestamp[ns]", "k": "i64"}, key="k", time="t")
            .query("q").window(fs.tumbling("1s")).agg(first=fs.min("t")),
            "aggregate first = min(t): it is in nanoseconds",
        ),
        (
            fs.Stream("n", {"t": "timestamp[ms]", "k": "timestamp[ns]"}, key="k", time="t")
            .query("q").window(fs.tumbling("1s")).agg(n=fs.count()),
            "key k: it is in nanoseconds",
        ),
        (
            fs.Stream("n", {"t": "timestamp[ms]", "k": "i64"}, key="k", time="t")
            .query("q").window(fs.tumbling("1s")).agg(a=fs.last("k")),
            "aggregate a = last(k): session and row sequence decide between rows of the same event time",
        ),
        (
            fs.Stream("n", {"t": "timestamp[ms]", "k": "i64"}, key="k", time="t")
            .query("q").window(fs.tumbling("1s")).agg(a=fs.order_hash("k")),
            "aggregate a = order_hash(k): rows of a DataFrame have no order of arrival",
        ),
    ],
    ids=["window", "aggregate", "key", "last", "order_hash"],
)  # fmt: skip
def test_what_spark_cannot_do_is_named(spark: Any, query: fs.Query, words: str) -> None:
    df = spark.createDataFrame([(1, 1)], ", ".join(f"{name} bigint" for name in query.stream.schema.names))
    with pytest.raises(fs.QueryError) as caught:
        query.to_spark(df)
    assert words in caught.value.message
    assert caught.value.code == "not_in_spark"


def test_revisions_are_refused_on_a_streaming_frame_only(spark: Any, tmp_path: Path) -> None:
    late = STREAM.query("q").window(fs.tumbling("1s"), allowed_lateness="5s").agg(n=fs.count())
    late.to_spark(frame(spark, make_rows(1), 1))
    with pytest.raises(fs.QueryError, match="allowed_lateness: Spark fires a window once"):
        late.to_spark(spark.readStream.schema(SPARK_SCHEMA).parquet(str(tmp_path)))


def test_exact_distinct_is_refused_on_a_streaming_frame_only(spark: Any, tmp_path: Path) -> None:
    query = STREAM.query("q").window(fs.tumbling("1s")).agg(n=fs.distinct("x"))
    rows = make_rows(500)
    assert_same_results(query, results_of(query, query.to_spark(frame(spark, rows, 1))), run(query, rows).windows)
    with pytest.raises(
        fs.QueryError, match=r"n = distinct\(x\): Spark counts different values exactly in batches only"
    ):
        query.to_spark(spark.readStream.schema(SPARK_SCHEMA).parquet(str(tmp_path)))


def test_an_approximate_count_is_sparks_own_with_our_error(spark: Any) -> None:
    query = STREAM.query("q").window(fs.tumbling("1000s")).agg(n=fs.count(), about=fs.approx_distinct("x"))
    rows = make_rows(4_000)
    found = results_of(query, query.to_spark(frame(spark, rows, 1)))
    expected = run(query.stream.query("q").window(fs.tumbling("1000s")).agg(n=fs.distinct("x")), rows).windows
    assert {(row["window_start"], (row["k"],)) for row in found} == expected.keys()
    for row in found:
        exact = expected[row["window_start"], (row["k"],)]["n"]
        assert abs(row["about"] - exact) <= 5 * 0.0325 * exact + 0.5


def test_mode_and_median_are_those_of_the_engine_with_ties_zeros_and_nan(spark: Any) -> None:
    stream = fs.Stream("m", {"t": "timestamp[ms]", "k": "i64", "x": "i64", "y": "f64"}, key="k", time="t")
    rows = np.zeros(240, stream.schema.dtype)
    rows["k"] = np.arange(240) % 6
    rows["x"] = np.resize([9, 9, -4, 3, -4, 2**62, 2**62 + 2], 240)
    rows["y"] = np.resize([2.0, -0.0, 0.0, np.nan, 2.0, np.inf, -np.inf, 0.0, np.nan, 2.0, -0.0], 240)
    aggregates = {"a": fs.mode("x"), "b": fs.mode("y"), "c": fs.median("x"), "d": fs.median("y")}
    query = stream.query("q").window(fs.tumbling("1s")).agg(**aggregates)
    found = results_of(query, query.to_spark(spark.createDataFrame(spark_table(stream, rows))))
    assert_same_results(query, found, run(query, rows).windows)


def test_mode_and_median_of_a_streaming_frame(spark: Any, tmp_path: Path) -> None:
    query = STREAM.query("q").window(fs.tumbling("1s")).agg(often=fs.mode("x"), middle=fs.median("price"))
    rows = make_rows(2_000)
    for i, part in enumerate((rows, *(make_rows(1, start=start) for start in (1_000_000, 1_000_001)))):
        pq.write_table(arrow_table(part), tmp_path / f"{i}.parquet")
        os.utime(tmp_path / f"{i}.parquet", (1_000_000 + i, 1_000_000 + i))
    df = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path))
    writer = query.to_spark(df).writeStream.format("memory").queryName("middles").outputMode("append")
    started = writer.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start()
    assert started.awaitTermination(400)
    assert_same_results(query, results_of(query, spark.table("middles")), run(query, rows).windows)


def test_a_sum_needs_ansi_mode(spark: Any) -> None:
    spark.conf.set("spark.sql.ansi.enabled", "false")
    try:
        with pytest.raises(fs.QueryError, match="total = sum"):
            QUERY.to_spark(frame(spark, make_rows(1), 1))
    finally:
        spark.conf.set("spark.sql.ansi.enabled", "true")


def test_a_null_ends_the_query_as_it_ends_the_sink(spark: Any) -> None:
    df = frame(spark, make_rows(10), 1).selectExpr("t", "k", "CAST(NULL AS STRING) AS kind", "x", "price")
    with pytest.raises(Exception, match="column 'kind' is null"):
        QUERY.to_spark(df).collect()


def test_a_column_that_is_missing_is_named(spark: Any) -> None:
    with pytest.raises(fs.SchemaError, match="does not have price"):
        QUERY.to_spark(frame(spark, make_rows(1), 1).drop("price"))


def test_names_that_differ_in_case_only_are_kept_apart(spark: Any) -> None:
    stream = fs.Stream("c", {"t": "timestamp[s]", "k": "i64", "v": "i64"}, key="k", time="t")
    query = stream.query("q").map(V=col("v") * 2).window(fs.tumbling("1s")).agg(a=fs.sum("v"), A=fs.sum("V"))
    (row,) = query.to_spark(spark.createDataFrame([(0, 1, 5)], "t bigint, k bigint, v bigint")).collect()
    assert tuple(row)[3:5] == (5, 10)

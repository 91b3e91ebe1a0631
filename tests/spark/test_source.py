"""spark.read and spark.readStream: a query's results, by offset, in Spark's types."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import spark as fspark
from flexstream.spark import nodes
from flexstream.spark.options import Options
from flexstream.testing import run
from flexstream.testing.ysb import YSB_QUERY
from tests.property.checks import as_rows, assert_same_results
from tests.spark.rig import GROUPS, QUERY, STREAM, Daemon, make_rows, serving
from tests.waiting import wait_until


def produce(daemon: Daemon, rows: np.ndarray) -> None:
    """Through our own producer, to the end of the stream: all windows fire."""
    with fs.Producer(daemon.endpoint, stream=STREAM) as producer:
        producer.send(rows)


def filled(daemon: Daemon, rows: np.ndarray) -> int:
    """Sends the rows; returns how many results there are when all are there."""
    before = next_offset(daemon)
    produce(daemon, rows)
    wanted = before + len(run(QUERY, rows).windows)
    wait_until(lambda: next_offset(daemon) >= wanted, f"{wanted} results", seen=lambda: next_offset(daemon))
    return next_offset(daemon)


def next_offset(daemon: Daemon) -> int:
    return int(daemon.client.get(f"/v1/queries/{QUERY.name}")["log"]["next_offset"])


def reading(reader: Any, *daemons: Daemon, **options: Any) -> Any:
    endpoint = ",".join(daemon.endpoint for daemon in daemons)
    return reader.format("flexstream").options(endpoint=endpoint, query=QUERY.name, timeout_s=120, **options)


def results_of(table: Any) -> list[dict[str, Any]]:
    """As the checks want them: times in the stream's milliseconds."""
    rows = as_rows(table.to_batches())
    for row in rows:
        row["window_start"] //= 1000
        row["window_end"] //= 1000
    return rows


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["window_start"], row["k"], row["revision"]


def test_results_come_back_as_a_frame_in_parts(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(20_000)
    count = filled(daemon, rows)
    df = reading(spark.read, daemon, partition_rows=100).load()
    assert df.schema == fspark.result_schema(QUERY)
    assert df.rdd.getNumPartitions() == -(-count // 100)
    found = results_of(df.toArrow())
    assert len(found) == count
    assert_same_results(QUERY, found, run(QUERY, rows).windows)
    assert df.where("n > 5").count() == sum(row["n"] > 5 for row in found)


def test_results_are_divided_by_group_over_partitions(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(20_000)
    count = filled(daemon, rows)
    df = reading(spark.read, daemon, group_partitions=3, partition_rows=count // 2 + 1).load()
    assert df.rdd.getNumPartitions() == 2 * 3
    found = results_of(df.toArrow())
    assert_same_results(QUERY, found, run(QUERY, rows).windows)
    placed = df.selectExpr("spark_partition_id() % 3 AS part", "group % 3 AS wanted").distinct().collect()
    assert {(row.part, row.wanted) for row in placed} == {(0, 0), (1, 1), (2, 2)}


@pytest.mark.parametrize("parts", [GROUPS, 5 * GROUPS], ids=["one-group-each", "more-than-groups"])
def test_partitions_without_rows_lose_nothing(spark: Any, daemon: Daemon, parts: int) -> None:
    count = filled(daemon, make_rows(3_000, keys=5))
    df = reading(spark.read, daemon, group_partitions=parts).load()
    assert df.rdd.getNumPartitions() == parts
    assert {identity(row) for row in results_of(df.toArrow())} == {identity(row) for row in daemon.results()}
    assert df.count() == count


def test_a_query_without_results_is_an_empty_frame(spark: Any, daemon: Daemon) -> None:
    assert reading(spark.read, daemon).load().count() == 0


@pytest.mark.parametrize("parts", [1, 4], ids=["whole", "by-group"])
def test_a_stream_of_results_is_limited_and_goes_on_after_a_restart(
    spark: Any, daemon: Daemon, tmp_path: Path, parts: int
) -> None:
    # Given: results, read as a stream with at most 250 rows in a micro-batch.
    first, second = make_rows(8_000), make_rows(8_000, start=20_000, seed=2)
    count = filled(daemon, first)

    def read() -> Any:
        df = reading(spark.readStream, daemon, max_rows=250, group_partitions=parts).load()
        writer = df.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        query = writer.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start()
        assert query.awaitTermination(400)
        return query

    progress = read().recentProgress
    assert max(batch["numInputRows"] for batch in progress) <= 250
    # When: more results come, and the query is started again from its checkpoint.
    filled(daemon, second)
    read()
    # Then: every result was read once.
    found = results_of(spark.read.parquet(str(tmp_path / "out")).toArrow())
    assert len(found) == len({identity(row) for row in found}) > count
    assert {identity(row) for row in found} == {identity(row) for row in daemon.results()}


def test_two_daemons_are_read_as_one(spark: Any, tmp_path: Path) -> None:
    rows = make_rows(4_000)
    node = STREAM.group_of(rows, 16) % 2
    with serving(tmp_path / "a") as one, serving(tmp_path / "b") as other:
        filled(one, rows[node == 0])
        filled(other, rows[node == 1])
        found = results_of(reading(spark.read, one, other).load().toArrow())
    assert_same_results(QUERY, found, run(QUERY, rows).windows)


def test_daemons_may_show_the_same_plan_in_two_versions_but_not_two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    old = json.loads((Path(__file__).parents[1] / "unit/query/plan/version_1/ysb.json").read_text())
    other = {**YSB_QUERY.to_dict(), "name": "other"}
    plans = {"http://a:1": old, "http://b:1": YSB_QUERY.to_dict(), "http://c:1": other}
    monkeypatch.setattr(nodes, "Client", lambda endpoint, **_: SimpleNamespace(get=lambda _: {"plan": plans[endpoint]}))
    options = {"query": "ysb", "endpoint": "http://a:1,http://b:1"}
    assert nodes.find_query(Options.parse(options)) == YSB_QUERY
    with pytest.raises(fs.SchemaError, match="differs between http://a:1, http://c:1"):
        nodes.find_query(Options.parse({**options, "endpoint": "http://a:1,http://c:1"}))


def test_a_query_that_is_not_there_is_named(spark: Any, daemon: Daemon) -> None:
    with pytest.raises(Exception, match="no query 'qq'"):
        spark.read.format("flexstream").options(endpoint=daemon.endpoint, query="qq").load()


def test_a_schema_that_is_not_the_results_is_refused_by_column(spark: Any, daemon: Daemon) -> None:
    for schema, message in (
        ("window_start timestamp, clicks bigint", "have no column 'clicks'"),
        ("window_start timestamp, n string", "column 'n' of query 'q' is bigint, but .schema.. says string"),
    ):
        with pytest.raises(Exception, match=message):
            reading(spark.read, daemon).schema(schema).load().count()
    count = filled(daemon, make_rows(1_000))
    assert reading(spark.read, daemon).schema("n bigint").load().count() == count


def test_rows_that_came_too_late_are_a_frame_of_their_own(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(4_000)
    filled(daemon, rows)
    late = reading(spark.read, daemon, late="true")
    assert late.load().count() == 0
    views = rows[rows["kind"] == b"view"][:10]  # the query filters others out, late or not
    produce(daemon, views)
    wait_until(lambda: daemon.late() == 10, "late rows")
    found = late.load()
    assert found.columns == [*STREAM.schema.names, "watermark"]
    assert sorted(row.x for row in found.collect()) == sorted(views["x"].tolist())


def test_to_configure_a_session_again_registers_nothing_again(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(type(spark.dataSource), "register", lambda self, source: asked.append(source))
    assert fspark.configure(spark) is spark
    assert asked == []

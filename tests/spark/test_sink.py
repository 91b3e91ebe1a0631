"""df.write and df.writeStream: every row arrives once, or none does and the error says what to do."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flexstream as fs
from flexstream import spark as fspark
from tests.spark.rig import (
    GROUPS,
    SPARK_SCHEMA,
    STREAM,
    Daemon,
    arrow_table,
    assert_once,
    end,
    frame,
    make_rows,
    serving,
)
from tests.waiting import wait_until


def writing(df: Any, daemon: Daemon, stream: str = STREAM.name, **options: Any) -> Any:
    given = {"endpoint": daemon.endpoint, "stream": stream, "timeout_s": 120, **options}
    return df.write.format("flexstream").mode("append").options(**given)


def streaming(df: Any, daemon: Daemon, checkpoint: Path, **options: Any) -> Any:
    given = {"endpoint": daemon.endpoint, "stream": STREAM.name, "timeout_s": 120, **options}
    return df.writeStream.format("flexstream").options(**given).option("checkpointLocation", str(checkpoint))


def put_files(folder: Path, *parts: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    for rows in parts:
        path = folder / f"{int(rows['t'][0]):09d}.parquet"
        pq.write_table(arrow_table(rows), path)
        age = 1_000_000 + int(rows["t"][0])
        os.utime(path, (age, age))  # Spark takes them by age


def files(spark: Any, folder: Path, per_batch: int = 1) -> Any:
    reader = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", per_batch)
    return reader.option("latestFirst", "false").parquet(str(folder))


# -- rows arrive


def test_a_batch_arrives_once_and_its_windows_are_right(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(20_000)
    writing(frame(spark, rows), daemon, end=True).save()
    assert_once(daemon, rows)
    assert daemon.ledger()["staged"] == 0


def test_jobs_one_after_the_other_are_one_producer_to_the_windows(spark: Any, daemon: Daemon) -> None:
    # Given: two jobs whose rows share a window.
    rows = make_rows(3_000)
    writing(frame(spark, rows[:1_500]), daemon).save()
    writing(frame(spark, rows[1_500:]), daemon).save()
    # Then: only windows that the second job has passed have fired; the end of the stream fires the rest.
    wait_until(lambda: daemon.results(), "the first windows")
    assert max(row["window_end"] for row in daemon.results()) <= int(rows["t"].max())
    fspark.finish(daemon.endpoint, STREAM.name)
    assert_once(daemon, rows)


def test_a_job_with_a_name_is_applied_once_however_often_it_runs(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(2_000)
    for _ in range(3):
        writing(frame(spark, rows), daemon, job="2026-01-01").save()
        assert daemon.client.get("/v1/stages")["finished"] == 0, "a repetition leaves nothing that waits"
    end(daemon)
    assert_once(daemon, rows)


def test_a_job_under_a_used_name_with_other_rows_is_an_error(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(2_000)
    writing(frame(spark, rows), daemon, job="2026-01-01").save()
    with pytest.raises(Exception, match="had 2000 rows; this commit has 1999"):
        writing(frame(spark, rows[1:]), daemon, job="2026-01-01").save()
    assert daemon.client.get("/v1/stages")["finished"] == 0
    end(daemon)
    assert_once(daemon, rows)


def test_an_empty_frame_changes_nothing(spark: Any, daemon: Daemon) -> None:
    writing(frame(spark, make_rows(10)).where("k < 0"), daemon).save()
    assert daemon.ledger()["received"] == 0


def test_a_frame_partitioned_by_key_has_one_group_per_task(spark: Any) -> None:
    from pyspark.sql import functions as F

    rows = make_rows(5_000, keys=500)
    placed = frame(spark, rows).repartition(GROUPS, "k").select("k", F.spark_partition_id().alias("part")).toArrow()
    found = dict(zip(placed["k"].to_pylist(), placed["part"].to_pylist(), strict=True))
    expected = dict(zip(rows["k"].tolist(), STREAM.group_of(rows, GROUPS).tolist(), strict=True))
    assert found == expected


def test_a_stream_of_files_arrives_once_across_a_restart_of_the_query(
    spark: Any, daemon: Daemon, tmp_path: Path
) -> None:
    rows = make_rows(12_000)
    parts = np.split(rows, 6)
    put_files(tmp_path / "in", *parts[:3])
    for after in (parts[3:], []):
        query = streaming(files(spark, tmp_path / "in"), daemon, tmp_path / "check").trigger(availableNow=True).start()
        assert query.awaitTermination(400)
        put_files(tmp_path / "in", *after)
    end(daemon)
    assert_once(daemon, rows)


def test_two_queries_with_one_sink_id_are_not_taken_for_one(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(2_000)
    for name, part in zip("ab", np.split(rows, 2), strict=True):  # both have a batch 0
        put_files(tmp_path / name, part)
        df = files(spark, tmp_path / name)
        query = streaming(df, daemon, tmp_path / f"check-{name}").trigger(availableNow=True).start()
        assert query.awaitTermination(400)
    end(daemon)
    assert_once(daemon, rows)


def test_a_task_that_fails_after_sending_is_run_again_and_counts_once(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(6_000)

    def fails_at_first(batches: Any) -> Any:
        from pyspark import TaskContext

        yield from batches
        if TaskContext.get().attemptNumber() == 0:
            raise RuntimeError("lost on purpose")

    df = frame(spark, rows)
    writing(df.mapInArrow(fails_at_first, df.schema), daemon, end=True).save()
    assert_once(daemon, rows)


def test_a_job_that_fails_leaves_nothing(spark: Any, daemon: Daemon) -> None:
    def fails(batches: Any) -> Any:
        yield from batches
        raise RuntimeError("lost on purpose")

    df = frame(spark, make_rows(1_000))
    with pytest.raises(Exception, match="lost on purpose"):
        writing(df.mapInArrow(fails, df.schema), daemon).save()
    wait_until(lambda: daemon.ledger()["staged"] == 0, "no staged rows")
    assert daemon.ledger()["accepted"] == 0


def test_a_worker_process_uses_its_connection_for_task_after_task(spark: Any, daemon: Daemon) -> None:
    from flexstream.spark.nodes import Target
    from flexstream.spark.options import Options
    from flexstream.spark.sending import give_up, stage_rows

    target = Target.find(Options.parse({"endpoint": daemon.endpoint, "stream": STREAM.name}))
    sent = [stage_rows(target, arrow_table(make_rows(100)).to_batches()) for _ in range(3)]
    stages = daemon.client.get("/v1/stages")["stages"]
    assert len(stages) == 3
    assert len({stage["producer"] for stage in stages}) == 1
    daemon.kill()  # a connection that broke between tasks is replaced
    daemon.start()
    sent.append(stage_rows(target, arrow_table(make_rows(100)).to_batches()))
    assert len(daemon.client.get("/v1/stages")["stages"]) == 4  # the first three are durable
    for one in sent:
        give_up(target, {daemon.endpoint: one.receipts[daemon.endpoint]["stage"]})
    assert daemon.client.get("/v1/stages")["stages"] == []


def test_at_least_once_goes_straight_to_the_queries(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(6_000)
    put_files(tmp_path / "in", *np.split(rows, 3))
    query = streaming(files(spark, tmp_path / "in"), daemon, tmp_path / "check", at_least_once=True)
    assert query.trigger(availableNow=True).start().awaitTermination(400)
    wait_until(lambda: daemon.ledger()["accepted"] == len(rows), "the rows")
    assert daemon.late() == 0


# -- types


def test_every_type_arrives_as_documented(spark: Any, tmp_path: Path) -> None:
    """Widened integers, decimal(20,0) as u64, text and binary, timestamps with and without a zone."""
    stream = fs.Stream(
        "types",
        {
            "t": "timestamp[us]", "local": "timestamp[ms]", "count": "timestamp[s]", "k": "bytes[8]", "small": "i16",
            "wide": "i64", "unsigned": "u32", "huge": "u64", "ratio": "f64", "single": "f32", "flag": "bool",
            "raw": "bytes[4]",
        },
        key="k",
        time="t",
    )  # fmt: skip
    maxima = {name: fs.max(name) for name in ("t", "local", "count", "small", "wide", "unsigned", "ratio", "single")}
    seen = (
        stream.query("seen")
        .filter((fs.col("raw") == b"\x00\xff") & fs.col("flag"))
        .filter(fs.col("huge") == 2**62)
        .window(fs.tumbling("1s"))
        .agg(n=fs.count(), **maxima)
    )
    df = spark.sql(
        "SELECT timestamp_micros(1500001) t, TIMESTAMP_NTZ'1970-01-01 00:00:02.125' local, 7 count, 'schlüss' k, "
        "CAST(-5 AS TINYINT) small, 12 wide, CAST(4000000000 AS BIGINT) unsigned, "
        "CAST(4611686018427387904 AS DECIMAL(20,0)) huge, CAST(0.5 AS FLOAT) ratio, CAST(0.25 AS FLOAT) single, "
        "true flag, X'00ff0000' raw"
    )
    with serving(tmp_path / "d", seen) as daemon:
        writing(df, daemon, "types", end=True).save()
        (row,) = wait_until(lambda: daemon.results(seen), "a result")
    assert row["k"] == "schlüss".encode()
    found = {name: row[name] for name in ("n", *maxima)}
    assert found == {
        "n": 1, "t": 1_500_001, "local": 2_125, "count": 7, "small": -5, "wide": 12, "unsigned": 4_000_000_000,
        "ratio": 0.5, "single": 0.25,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": "CAST(x AS BIGINT)"}, ["'x'", "bigint", "i32", "cast('int')"]),
        ({"k": "CAST(k AS STRING)"}, ["'k'", "string", "i64", "cast('bigint')"]),
        ({"kind": "1.5D"}, ["'kind'", "double", "bytes[6]", "cast('binary')"]),
        ({"t": "CAST(t AS DATE)"}, ["'t'", "date", "timestamp[ms]", "cast('timestamp')"]),
        ({"price": "CAST(price AS DECIMAL(10,2))"}, ["'price'", "decimal(10,2)", "f64", "cast('double')"]),
        ({"k": "CAST(price AS DECIMAL(10,2))"}, ["'k'", "decimal(10,2)", "i64", "* 100"]),
        ({"x": None}, ["does not have x"]),
        ({"more": "1"}, ["more", "df.drop('more')"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_column_is_told_before_any_task_starts(
    spark: Any, refusing: Daemon, change: dict[str, str | None], words: list[str]
) -> None:
    columns = {name: name for name in STREAM.schema.names} | change
    texts = [f"{text} AS {name}" for name, text in columns.items() if text is not None]
    df = frame(spark, make_rows(10), 1).selectExpr(*texts)
    before = refusing.ledger()["received"]
    with pytest.raises(Exception, match=re.escape(words[0])) as caught:
        writing(df, refusing).save()
    for word in words:
        assert word in str(caught.value)
    assert refusing.ledger()["received"] == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "CAST(NULL AS STRING)"}, ["'kind'", "null"]),
        ({"kind": "'viewing'"}, ["'kind'", "viewing", "6 bytes"]),
        ({"t": "timestamp_micros(1)"}, ["'t'", "timestamp[ms]", "round the column"]),
    ],
    ids=["null", "too-long", "too-fine"],
)
def test_a_value_that_does_not_fit_fails_the_job_and_nothing_arrives(
    spark: Any, refusing: Daemon, change: dict[str, str], words: list[str]
) -> None:
    columns = {name: name for name in STREAM.schema.names} | change
    df = frame(spark, make_rows(10), 1).selectExpr(*(f"{text} AS {name}" for name, text in columns.items()))
    with pytest.raises(Exception, match=re.escape(words[0])) as caught:
        writing(df, refusing).save()
    for word in words:
        assert word in str(caught.value)
    wait_until(lambda: refusing.ledger()["staged"] == 0, "no staged rows")
    assert refusing.ledger()["accepted"] == 0


# -- refusals


def test_a_stream_that_is_not_there_is_named(spark: Any, refusing: Daemon) -> None:
    with pytest.raises(Exception, match=r"(?s)no stream 'evnts'.*did you mean events"):
        writing(frame(spark, make_rows(5), 1), refusing, "evnts").save()


def test_nobody_at_the_endpoint_is_told_on_the_driver(spark: Any, daemon: Daemon) -> None:
    daemon.stop()
    with pytest.raises(Exception, match=f"no daemon answers at {daemon.endpoint}"):
        writing(frame(spark, make_rows(5), 1), daemon).save()


def test_a_wrong_token_is_refused_and_the_right_one_taken(spark: Any, tmp_path: Path) -> None:
    with serving(tmp_path / "d", token="s3cret-" + "x" * 32) as daemon:
        for wrong in ({}, {"token": "guess"}):
            with pytest.raises(Exception, match="token"):
                writing(frame(spark, make_rows(5), 1), daemon, **wrong).save()
        rows = make_rows(1_000)
        writing(frame(spark, rows), daemon, token=daemon.token, end=True).save()
        assert_once(daemon, rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpont": "x"}, "no option 'endpont'"),
        ({"endpoint": "tcp://127.0.0.1:7400"}, "is a data port"),
        ({"timeout_s": "soon"}, "timeout_s='soon'"),
        ({"at_least_once": "perhaps"}, "must be true or false"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_options_are_checked(spark: Any, refusing: Daemon, options: dict[str, str], words: str) -> None:
    with pytest.raises(Exception, match=words):
        writing(frame(spark, make_rows(5), 1), refusing, **options).save()


def test_a_stream_cannot_be_overwritten(spark: Any, refusing: Daemon) -> None:
    with pytest.raises(Exception, match="cannot be overwritten"):
        writing(frame(spark, make_rows(5), 1), refusing).mode("overwrite").save()


def test_another_thread_writes_after_configure(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(1_000)
    df = frame(spark, rows, 1)
    found: list[BaseException] = []

    def write() -> None:
        try:
            fspark.configure(spark)
            writing(df, daemon, end=True).save()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert found == []
    assert_once(daemon, rows)


def test_the_format_is_found_without_registration(spark: Any) -> None:
    import pyspark_flexstream
    from flexstream.spark import FlexStreamDataSource

    assert pyspark_flexstream.DefaultSource is FlexStreamDataSource

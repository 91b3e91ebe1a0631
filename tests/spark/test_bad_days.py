"""Something dies in the middle, with real processes: no row is lost and none counts twice, or the query says why."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flexstream as fs
from flexstream.spark.nodes import Target
from flexstream.spark.options import Options
from flexstream.spark.sending import stage_rows
from tests.spark.rig import (
    SPARK_SCHEMA,
    STREAM,
    WAIT_S,
    Daemon,
    arrow_table,
    assert_once,
    end,
    frame,
    make_rows,
)
from tests.waiting import wait_until

LIMIT_S = 1_500  # seconds on a quiet machine; a busy one may take minutes to start a Spark
START_S = 600
DRIVER = Path(__file__).with_name("driver.py")


@contextlib.contextmanager
def driver(*arguments: Any) -> Iterator[subprocess.Popen[str]]:
    """The driver in a session of its own: all of it, JVM and Python workers, is gone afterwards."""
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_all(process)
        output, _ = process.communicate()
        print(output)  # shown with a failure


def kill_all(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def put_files(folder: Path, parts: list[np.ndarray]) -> None:
    folder.mkdir()
    for i, rows in enumerate(parts):
        pq.write_table(arrow_table(rows), folder / f"{i:03d}.parquet")
        os.utime(folder / f"{i:03d}.parquet", (1_000_000 + i, 1_000_000 + i))  # Spark takes them by age


def staged(daemon: Daemon, rows: np.ndarray) -> tuple[Any, Any]:
    """What the driver (its writer) and a task (its message) hold between the task's end and the commit."""
    from flexstream.spark.sink import Staged, Writer

    options = Options.parse({"endpoint": daemon.endpoint, "stream": STREAM.name, "timeout_s": "30"})
    target = Target.find(options)
    sent = stage_rows(target, arrow_table(rows).to_batches())
    return Writer(options, target), Staged("query-1", sent.rows, sent.receipts)


def test_a_daemon_that_dies_between_stage_and_commit_still_has_the_rows(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(3_000)
    writer, message = staged(daemon, rows)
    daemon.kill()
    daemon.start()
    assert writer.apply([message], "query-1", 7)
    end(daemon)
    assert_once(daemon, rows)


def test_a_commit_waits_for_a_daemon_that_comes_back(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(3_000)
    writer, message = staged(daemon, rows)
    daemon.kill()
    back = threading.Timer(1.0, daemon.start)
    back.start()
    try:
        assert writer.apply([message], "query-1", 7)
    finally:
        back.join()
    end(daemon)
    assert_once(daemon, rows)


DIES_BEFORE_THE_COMMIT = """
import os, signal
from flexstream.staging import port as stage_port
from flexstream.cli import main

real = stage_port._Connection._finish


def finish(connection, header):
    real(connection, header)
    os.kill(os.getpid(), signal.SIGKILL)


stage_port._Connection._finish = finish
main()
"""


def test_a_streaming_query_waits_for_a_daemon_that_is_away_when_it_commits(
    spark: Any, daemon: Daemon, tmp_path: Path
) -> None:
    # Given: a query, and a daemon that dies when the first task has its receipt.
    rows = make_rows(4_000)
    put_files(tmp_path / "in", np.split(rows, 2))
    daemon.stop()
    daemon.start(DIES_BEFORE_THE_COMMIT)
    query = (
        spark.readStream.schema(SPARK_SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(tmp_path / "in"))
        .writeStream.format("flexstream")
        .option("endpoint", daemon.endpoint)
        .option("stream", STREAM.name)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    # When: it is away until Spark has asked for it in vain.
    daemon.wait_dead()
    host, port = daemon.endpoint.split(":")
    with socket.create_server((host, int(port))) as nobody:
        nobody.settimeout(WAIT_S)
        nobody.accept()[0].close()
    daemon.start()
    query.awaitTermination()
    # Then: the query has not noticed.
    assert query.exception() is None
    end(daemon)
    assert_once(daemon, rows)


def test_a_batch_is_applied_once_and_an_abort_does_not_undo_it(spark: Any, daemon: Daemon) -> None:
    # Given: a commit whose answer was lost, so that Spark aborts the batch and runs it again.
    rows = make_rows(3_000)
    writer, message = staged(daemon, rows)
    assert writer.apply([message], "query-1", 7)
    writer.forget([message, None])
    _, again = staged(daemon, rows)
    assert not writer.apply([again], "query-1", 7)
    end(daemon)
    assert_once(daemon, rows)


def test_rows_applied_before_a_crash_of_the_daemon_are_in_their_windows_after_it(spark: Any, daemon: Daemon) -> None:
    rows = make_rows(4_000)
    for batch, part in enumerate(np.split(rows, 4)):
        writer, message = staged(daemon, part)
        assert writer.apply([message], "query-1", batch)
        daemon.kill()
        daemon.start()
    end(daemon)
    assert_once(daemon, rows)


def test_a_daemon_that_restarts_in_the_middle_of_a_task_gets_the_rows_once(
    spark: Any, daemon: Daemon, tmp_path: Path
) -> None:
    # Given: a task that has sent a part of its rows and waits.
    rows = make_rows(2_000)
    waits, goes_on = str(tmp_path / "waits"), str(tmp_path / "goes_on")

    def stops_half_way(batches: Any) -> Any:
        import time
        from pathlib import Path

        from pyspark import TaskContext

        for batch in batches:
            yield batch.slice(0, batch.num_rows // 2)
            if TaskContext.get().attemptNumber() == 0:
                Path(waits).touch()
                while not Path(goes_on).exists():
                    time.sleep(0.05)
            yield batch.slice(batch.num_rows // 2)

    def restarts() -> None:
        try:
            wait_until(Path(waits).exists, "the task")
            daemon.kill()
            daemon.start()
        finally:
            Path(goes_on).touch()

    # When: the daemon dies and comes back. Then: Spark runs the task again, and the rows count once.
    meanwhile = threading.Thread(target=restarts)
    meanwhile.start()
    try:
        df = frame(spark, rows, 1)
        writer = df.mapInArrow(stops_half_way, df.schema).write.format("flexstream").mode("append")
        writer.options(endpoint=daemon.endpoint, stream=STREAM.name, end=True, timeout_s=120).save()
    finally:
        meanwhile.join()
    assert_once(daemon, rows)


def test_a_stream_whose_schema_has_changed_stops_the_query_and_names_the_column(
    spark: Any, daemon: Daemon, tmp_path: Path
) -> None:
    def run() -> Any:
        df = spark.readStream.schema(SPARK_SCHEMA).parquet(str(tmp_path / "in"))
        writer = df.writeStream.format("flexstream").options(endpoint=daemon.endpoint, stream=STREAM.name)
        query = writer.option("checkpointLocation", str(tmp_path / "check")).trigger(availableNow=True).start()
        query.awaitTermination(400)

    put_files(tmp_path / "in", [make_rows(100)])
    run()
    daemon.stop()
    shutil.rmtree(daemon.folder / "data")
    daemon.start()
    changed = fs.Stream(STREAM.name, STREAM.schema.to_dict() | {"kind": "i32"}, key="k", time="t")
    daemon.client.post("/v1/streams", changed.to_dict())
    pq.write_table(arrow_table(make_rows(100)), tmp_path / "in" / "more.parquet")
    with pytest.raises(Exception, match=r"(?s)column 'kind' is string in the frame, but i32 in stream 'events'.*cast"):
        run()
    assert daemon.ledger()["received"] == 0


@pytest.mark.time_limit(LIMIT_S)
def test_a_driver_killed_in_the_middle_goes_on_from_its_checkpoint(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(6_000)
    put_files(tmp_path / "in", np.split(rows, 6))
    arguments = ("local[2]", daemon.endpoint, tmp_path / "in", tmp_path / "check")
    with driver(*arguments) as first:
        wait_until(lambda: daemon.ledger()["accepted"] >= 1_000, "the first batch", seconds=START_S)
        kill_all(first)
    assert daemon.ledger()["accepted"] < len(rows), "it was killed too late to show anything"
    with driver(*arguments) as second:
        output, _ = second.communicate(timeout=START_S)
        assert second.returncode == 0, output
    end(daemon)
    assert_once(daemon, rows)


@pytest.mark.time_limit(LIMIT_S)
def test_an_executor_killed_in_mid_send_costs_nothing(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(4_000)
    put_files(tmp_path / "in", np.split(rows, 2))
    with driver("local-cluster[2,1,1024]", daemon.endpoint, tmp_path / "in", tmp_path / "check", "kill") as process:
        output, _ = process.communicate(timeout=START_S)
    assert process.returncode == 0, output
    assert (tmp_path / "check.killed").exists(), "no executor was killed"
    application = output.split("done ")[1].split()[0]
    import pyspark

    shutil.rmtree(Path(pyspark.__file__).parent / "work" / application, ignore_errors=True)
    end(daemon)
    assert_once(daemon, rows)

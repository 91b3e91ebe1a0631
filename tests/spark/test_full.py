"""A daemon without room holds the tasks back; Spark shows it, nothing is lost, and it goes on when there is room."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexstream.spark.nodes import Target
from flexstream.spark.options import Options
from flexstream.spark.sending import give_up, stage_rows
from tests.spark.rig import SPARK_SCHEMA, STREAM, Daemon, arrow_table, assert_once, end, make_rows, serving
from tests.waiting import wait_until

ROW_BYTES = STREAM.schema.row_bytes
HELD_S = 1.0


def start(spark: Any, daemon: Daemon, folder: Path) -> Any:
    """Files -> sink, one file in a batch, from the checkpoint beside them."""
    df = spark.readStream.schema(SPARK_SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    writer = df.writeStream.format("flexstream").options(endpoint=daemon.endpoint, stream=STREAM.name, timeout_s=120)
    return writer.option("checkpointLocation", str(folder / "check")).trigger(availableNow=True).start()


def put_files(folder: Path, parts: list[np.ndarray]) -> None:
    folder.mkdir()
    for i, rows in enumerate(parts):
        pq.write_table(arrow_table(rows), folder / f"{i}.parquet")
        os.utime(folder / f"{i}.parquet", (1_000_000 + i, 1_000_000 + i))  # Spark takes them by age


def test_tasks_wait_for_room_and_spark_shows_it(spark: Any, tmp_path: Path) -> None:
    # Given: a daemon whose room is taken by rows that somebody else has staged and not committed.
    rows = make_rows(6_000)
    put_files(tmp_path / "in", np.split(rows, 3))
    limit = 3_000 * ROW_BYTES
    with serving(tmp_path / "daemon", stage_limit_bytes=limit) as daemon:
        target = Target.find(Options.parse({"endpoint": daemon.endpoint, "stream": STREAM.name}))
        others = stage_rows(target, arrow_table(make_rows(2_500)).to_batches()).receipts[daemon.endpoint]["stage"]
        # When: a query writes. Then: its task is held back, with Spark's batch open and nothing applied.
        query = start(spark, daemon, tmp_path)
        try:
            wait_until(lambda: daemon.client.get("/v1/stages")["held_back"] == 1, "a task that is held back")
            held = time.monotonic()
            assert query.status["isTriggerActive"]
            assert spark.sparkContext.statusTracker().getActiveStageIds()
            assert query.recentProgress == []
            assert daemon.ledger()["accepted"] == 0
            time.sleep(HELD_S)
            # When: there is room. Then: all of it goes through, and Spark's progress has the time of the wait.
            held = time.monotonic() - held
            give_up(target, {daemon.endpoint: others})
            assert query.awaitTermination(400)
        finally:
            query.stop()
        assert query.recentProgress[0]["durationMs"]["addBatch"] >= held * 1000
        assert daemon.client.get("/v1/stages")["held_back"] == 0
        end(daemon)
        assert_once(daemon, rows)


def test_a_disk_without_room_fails_the_query_and_loses_nothing(spark: Any, tmp_path: Path) -> None:
    # Given: a daemon that cannot write a stage of this size (a limit on files: the same path as a full disk).
    rows = make_rows(9_000)
    put_files(tmp_path / "in", [rows[:1_000], rows[1_000:]])
    with serving(tmp_path / "daemon") as daemon:
        assert daemon.process is not None
        hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (128 << 10, hard))
        # When: the query writes. Then: it ends with the disk's error, and only the batch before is applied.
        with pytest.raises(Exception, match=r"cannot write the stage .*File too large"):
            start(spark, daemon, tmp_path).awaitTermination(400)
        wait_until(lambda: daemon.ledger()["staged"] == 0, "no staged rows")
        assert daemon.ledger()["accepted"] == 1_000
        # When: there is room. Then: the query goes on from its checkpoint.
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert start(spark, daemon, tmp_path).awaitTermination(400)
        end(daemon)
        assert_once(daemon, rows)

"""Executors whose Python has no flexstream: the error says where, and what to do."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexstream import spark as fspark
from tests.spark.rig import QUERY, STREAM, Daemon, arrow_table, frame, make_rows

ROWS = make_rows(200)
NO_FLEXSTREAM = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flexstream", "pyspark_flexstream"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Missing())
"""
# The driver's own workers (pyspark.sql.worker.*, which make readers and writers) have the package, tasks have not.
PYTHON = """#!/bin/sh
case "$*" in
*pyspark.sql.worker*|*pyspark.sql.streaming*) ;;
*) export PYTHONPATH="{folder}:$PYTHONPATH" ;;
esac
exec "{python}" "$@"
"""


@pytest.fixture
def lacking(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The format, under another name, for executors without the package; `ship` too uses them meanwhile."""
    (tmp_path / "sitecustomize.py").write_text(NO_FLEXSTREAM)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(python))
    name = f"flexstream_{tmp_path.name}"

    class Lacking(fspark.FlexStreamDataSource):
        @classmethod
        def name(cls) -> str:
            return name

    spark.dataSource.register(Lacking)
    return name


def write(spark: Any, form: str, daemon: Daemon, folder: Path) -> None:
    options = {"endpoint": daemon.endpoint, "stream": STREAM.name}
    frame(spark, ROWS).write.format(form).mode("append").options(**options).save()


def write_stream(spark: Any, form: str, daemon: Daemon, folder: Path) -> None:
    options = {"endpoint": daemon.endpoint, "stream": STREAM.name, "checkpointLocation": str(folder / "checkpoint")}
    frame(spark, ROWS).write.parquet(str(folder / "in"))
    df = spark.readStream.schema(frame(spark, ROWS).schema).parquet(str(folder / "in"))
    df.writeStream.format(form).options(**options).trigger(availableNow=True).start().awaitTermination()


def read(spark: Any, form: str, daemon: Daemon, folder: Path) -> None:
    fill(daemon)
    spark.read.format(form).options(endpoint=daemon.endpoint, query=QUERY.name).load().collect()


def read_stream(spark: Any, form: str, daemon: Daemon, folder: Path) -> None:
    fill(daemon)
    df = spark.readStream.format(form).options(endpoint=daemon.endpoint, query=QUERY.name).load()
    kept = df.writeStream.format("memory").queryName(form).option("checkpointLocation", str(folder / "checkpoint"))
    kept.trigger(availableNow=True).start().awaitTermination()


def ship(spark: Any, form: str, daemon: Daemon, folder: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(arrow_table(ROWS), folder / "rows.parquet")
    fspark.ship(spark, folder / "rows.parquet", daemon.endpoint, STREAM.name)


def fill(daemon: Daemon) -> None:
    """Results to read."""
    import flexstream as fs
    from tests.waiting import wait_until

    with fs.Producer(daemon.endpoint, stream=STREAM) as producer:
        producer.send(ROWS)
    wait_until(lambda: len(daemon.results()) > 0, "results")


@pytest.mark.parametrize("use", [write, write_stream, read, read_stream, ship])
def test_an_executor_without_the_package_says_where_and_what_to_do(
    spark: Any, lacking: str, daemon: Daemon, tmp_path: Path, use: Callable[[Any, str, Daemon, Path], None]
) -> None:
    with pytest.raises(Exception, match="No module named 'flexstream") as told:
        use(spark, lacking, daemon, tmp_path)
    text = str(told.value)
    assert "a Spark executor cannot import flexstream" in text
    assert f"host {socket.gethostname()}" in text
    assert sys.executable in text
    assert "pip install flexstream" in text
    assert "spark.archives" in text

"""The cases of the Spark benchmark: the files, a daemon, a session, and one way each to get the rows through.

A case returns when its rows count: the sink when the daemon has applied them, the fast lane and Spark's own query when
every window's result can be read. Each checks its rows; one that lost a row ends the benchmark.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import flexstream as fs
from benchmarks.engine_process import ysb_query
from benchmarks.harness import CACHE, PROJECT
from flexstream.client.http import Client
from flexstream.testing import ysb

FILES, FILE_ROWS = 8, 250_000
FEW_ROWS = 60_000  # for the writer that takes them one by one
QUERY_COLUMNS = ("event_time", "campaign_id", "event_type")
PAD = "0123456789abcdefghijkl"
SERVE = "from flexstream.cli import main; main()"
PATIENCE_S = 90.0
MOST_FILES = 65_536  # unstaged producers have a connection per group, stream and worker
CONFS = {
    "spark.ui.enabled": "false",
    "spark.log.level": "OFF",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "3g",
    "spark.sql.streaming.metricsEnabled": "false",
}


@dataclass(frozen=True)
class Files:
    """Parquet files of ad events: `folder` has them once, `many` several times over (the same files, linked)."""

    folder: Path
    many: Path
    few: Path
    rows: int
    many_rows: int
    few_rows: int
    many_views: int

    @classmethod
    def make(cls, files: int = FILES, repeat: int = 4) -> Files:
        root = CACHE / f"spark-{files}-{FILE_ROWS}-{repeat}"
        if not (root / "views").exists():
            for name in ("once", "many", "few"):
                (root / name).mkdir(parents=True, exist_ok=True)
            views = sum(_write_file(root, i, repeat) for i in range(files))
            (root / "views").write_text(str(views * repeat))
        return cls(
            root / "once", root / "many", root / "few", files * FILE_ROWS, files * FILE_ROWS * repeat, FEW_ROWS,
            int((root / "views").read_text()),
        )  # fmt: skip


def _write_file(root: Path, number: int, repeat: int) -> int:
    start = 1_700_000_000_000 + number * FILE_ROWS // 1000  # a million rows in a second of event time
    rows = ysb.generate(FILE_ROWS, seed=number, start=start)
    table = _table(rows)
    path = root / "once" / f"{number:03d}.parquet"
    pq.write_table(table, path, row_group_size=FILE_ROWS // 2)
    if number == 0:
        pq.write_table(table.slice(0, FEW_ROWS // 2), root / "few" / "0.parquet")
        pq.write_table(table.slice(0, FEW_ROWS // 2), root / "few" / "1.parquet")
    for again in range(repeat):
        link = root / "many" / f"{number:03d}-{again}.parquet"
        link.unlink(missing_ok=True)
        os.link(path, link)
    return int((rows["event_type"] == b"view").sum())


def _table(rows: np.ndarray) -> pa.Table:
    """As a pipeline has them: instants, text, 78 bytes of values in a row."""
    kinds = pa.array([kind.decode() for kind in ysb.EVENT_TYPES])
    at = np.searchsorted(np.sort(ysb.EVENT_TYPES), rows["event_type"])
    order = np.argsort(ysb.EVENT_TYPES)
    columns: dict[str, Any] = {name: rows[name] for name in ysb.YSB_STREAM.schema.names}
    columns["event_time"] = pa.array(rows["event_time"]).cast(pa.timestamp("ms")).cast(pa.timestamp("us", tz="UTC"))
    columns["event_type"] = kinds.take(pa.array(order[at]))
    columns["pad"] = pa.array([PAD] * len(rows))
    return pa.table(columns)


class Daemon:
    """`flexstream serve` with its data on the disk, as a user has it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", SERVE, "serve", "--json", "--control", "127.0.0.1:0", "--data", "127.0.0.1:0"]
        command += ["--data-dir", str(folder), "--workers", "1"]
        self._log = (folder.parent / "daemon.log").open("w")
        self._process = subprocess.Popen(
            command, cwd=folder.parent, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("{"):
            self.close()
            raise SystemExit("the daemon did not start:\n" + (folder.parent / "daemon.log").read_text()[-2000:])
        self.endpoint: str = json.loads(line)["control"]
        self.pid = self._process.pid
        self.client = Client(self.endpoint, timeout_s=PATIENCE_S)
        self._names = (f"ads{number}" for number in itertools.count())

    @contextlib.contextmanager
    def stream(self, columns: Sequence[str] = ysb.YSB_STREAM.schema.names) -> Iterator[str]:
        """A fresh YSB stream of these columns with its query of the same name: event time begins anew."""
        name = next(self._names)
        fields = {column: ysb.YSB_STREAM.schema.field(column).type for column in columns}
        stream = fs.Stream(name, fields, key=list(ysb.YSB_STREAM.key), time=ysb.YSB_STREAM.time)
        self.client.post("/v1/streams", stream.to_dict())
        self.client.post("/v1/queries", ysb_query(stream, name).to_dict())
        yield name
        self.client.delete(f"/v1/queries/{name}")

    def ledger(self, query: str) -> dict[str, int]:
        found: dict[str, int] = self.client.get("/v1/status")["queries"][query]["ledger"]
        return found

    def wait_applied(self, query: str, rows: int) -> None:
        """Until the query has seen so many rows, and has taken or filtered them."""
        deadline = time.monotonic() + PATIENCE_S
        while sum((ledger := self.ledger(query))[part] for part in ("applied", "filtered")) < rows:
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        if ledger["accepted"] != rows or ledger["in_flight"] or ledger["late"] or ledger["rejected"]:
            raise SystemExit(f"{rows} rows were written, but the daemon's ledger is {ledger}")

    def wait_views(self, query: str, views: int) -> None:
        """Until the results hold so many views."""
        deadline = time.monotonic() + PATIENCE_S
        seen = offset = 0
        while seen < views and time.monotonic() < deadline:
            for batch in self.client.batches(query, offset=offset):
                offset += batch.num_rows
                seen += int(pa.compute.sum(batch.column("n")).as_py() or 0)
            if seen < views:
                time.sleep(0.002)
        if seen != views:
            raise SystemExit(f"{views} views were shipped, but the results of {query} have {seen}")

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


def start_session(folder: Path) -> Any:
    from pyspark.sql import SparkSession

    from benchmarks.spark_writers import CountingDataSource
    from flexstream.spark import configure

    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ["PYTHONPATH"] = str(PROJECT)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MOST_FILES) if hard > 0 else MOST_FILES, hard))
    builder = SparkSession.builder.master("local[2]").appName("flexstream-benchmark")
    for name, value in CONFS.items():
        builder = builder.config(name, value)
    builder = builder.config("spark.local.dir", str(folder / "local"))
    session = configure(builder.config("spark.sql.warehouse.dir", str(folder / "warehouse")).getOrCreate())
    session.dataSource.register(CountingDataSource)
    return session


class Cases:
    """Each method is a case: does its work once and returns the rows it moved."""

    def __init__(self, spark: Any, daemon: Daemon, files: Files, folder: Path) -> None:
        from benchmarks.spark_writers import Discarding

        self._spark = spark
        self._daemon = daemon
        self._files = files
        self._folder = folder
        self._discarding = Discarding()
        self._runs = itertools.count()

    def all(self) -> dict[str, Callable[[], int]]:
        return {
            "noop": self.noop,
            "transfer": self.transfer,
            "sink": self.sink,
            "unstaged": self.unstaged,
            "rows": self.rows,
            "ship": self.ship,
            "ship_all": self.ship_all,
            "stream": self.stream,
        }

    def _frame(self) -> Any:
        return self._spark.read.parquet(str(self._files.folder))

    def noop(self) -> int:
        self._frame().write.format("noop").mode("overwrite").save()
        return self._files.rows

    def transfer(self) -> int:
        counted = self._folder / "counted"
        counted.unlink(missing_ok=True)
        self._frame().write.format("counting").mode("append").option("counted", str(counted)).save()
        if int(counted.read_text()) != self._files.rows:
            raise SystemExit(f"{self._files.rows} rows were written, but {counted.read_text()} came")
        return self._files.rows

    def _write(self, stream: str, **options: Any) -> None:
        writer = self._frame().write.format("flexstream").mode("append")
        writer.options(endpoint=self._daemon.endpoint, stream=stream, **options).save()

    def sink(self) -> int:
        with self._daemon.stream() as name:
            self._write(name)
            self._daemon.wait_applied(name, self._files.rows)
        return self._files.rows

    def unstaged(self) -> int:
        """A fresh stream has fresh connections, one per group and worker; those of the runs before stay open."""
        with self._daemon.stream() as name:
            self._write(name, at_least_once="true")
            self._daemon.wait_applied(name, self._files.rows)
        return self._files.rows

    def rows(self) -> int:
        from benchmarks.spark_writers import row_sender

        self._spark.read.parquet(str(self._files.few)).foreachPartition(row_sender(self._discarding.port))
        came = self._discarding.take_rows()
        if came != self._files.few_rows:
            raise SystemExit(f"{self._files.few_rows} rows were written, but {came} came")
        return came

    def ship(self) -> int:
        """The columns that the query uses, as Spark reads only those: the stream has no others."""
        return self._ship(QUERY_COLUMNS)

    def ship_all(self) -> int:
        """Whole rows: the stream is for other queries too."""
        return self._ship(ysb.YSB_STREAM.schema.names)

    def _ship(self, columns: Sequence[str]) -> int:
        from flexstream.spark import ship

        with self._daemon.stream(columns) as name:
            shipped = ship(self._spark, self._files.many, self._daemon.endpoint, name, end=True, progress=False)
            self._daemon.wait_views(name, self._files.many_views)
        return shipped.rows

    def stream(self) -> int:
        """The query in Spark's own words, all files in one micro-batch, state by campaign and window."""
        from pyspark.sql import functions as F

        run = next(self._runs)
        ads = self._spark.readStream.schema(self._frame().schema).parquet(str(self._files.many))
        views = ads.where("event_type = 'view'").withWatermark("event_time", "0 seconds")
        counted = views.groupBy(F.window("event_time", "10 seconds"), "campaign_id").count()
        writer = counted.writeStream.format("memory").queryName(f"views{run}").outputMode("update")
        writer = writer.option("checkpointLocation", str(self._folder / f"checkpoint{run}"))
        query = writer.trigger(availableNow=True).start()
        if not query.awaitTermination(PATIENCE_S):
            raise SystemExit(f"Spark's own query has not ended after {PATIENCE_S:g} s")
        seen = int(self._spark.table(f"views{run}").agg(F.sum("count")).first()[0])
        if seen != self._files.many_views:
            raise SystemExit(f"there are {self._files.many_views} views, but Spark counted {seen}")
        self._spark.catalog.dropTempView(f"views{run}")
        return self._files.many_rows

    def close(self) -> None:
        self._discarding.close()

"""The main job's part with Spark: executors make ad events and push them; Spark's own groupBy confirms the windows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flexstream.testing import ysb

BATCH_ROWS = 50_000  # a second of event time, exactly: no row of a job reaches into the next one's window
EVENT_RATE = 50_000
JOB_BATCHES = 10  # a job's rows are one window's
WINDOW_MS = JOB_BATCHES * BATCH_ROWS * 1000 // EVENT_RATE
MIN_JOBS = 2
COLUMNS = ", ".join(
    f"{name} {'binary' if kind.startswith('bytes') else 'bigint'}"
    for name, kind in ysb.YSB_STREAM.schema.to_dict().items()
)


def why_not() -> str | None:
    """What is missing for Spark, or None."""
    java = os.path.join(os.environ["JAVA_HOME"], "bin", "java") if os.environ.get("JAVA_HOME") else shutil.which("java")
    if java is None:
        return "there is no Java (17 or later, such as Debian's default-jre-headless)"
    try:
        subprocess.run([java, "-version"], capture_output=True, check=True, timeout=30)
        import pyspark  # noqa: F401
    except (OSError, subprocess.SubprocessError) as error:
        return f"{java} does not run: {error}"
    except ImportError:
        return "pyspark is not installed (pip install 'flexstream[spark]')"
    return None


@contextmanager
def session() -> Iterator[Any]:
    """A local Spark that says nothing."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    from pyspark.sql import SparkSession

    from flexstream.spark import configure

    confs = {
        "spark.ui.enabled": "false", "spark.log.level": "OFF", "spark.ui.showConsoleProgress": "false",
        "spark.driver.bindAddress": "127.0.0.1", "spark.sql.shuffle.partitions": str(os.cpu_count() or 2),
    }  # fmt: skip
    builder = SparkSession.builder.master("local[*]").appName("flexstream main job")
    for name, value in confs.items():
        builder = builder.config(name, value)
    with _quiet():
        spark = configure(builder.getOrCreate())
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def _quiet() -> Iterator[None]:
    """The JVM's words at its start go to its standard error, before any setting reaches it."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def events(spark: Any, first: int, batches: int, keys: int, start_ms: int) -> Any:
    """A frame whose executors generate these batches of ad events; the same numbers give the same rows."""
    rows, rate = BATCH_ROWS, EVENT_RATE

    def make(
        numbers: Iterator[Any],
    ) -> Iterator[Any]:  # goes to the executors by value: it names nothing of this module
        import pyarrow as pa

        from flexstream.testing import ysb

        for batch in numbers:
            for number in batch.column(0).to_pylist():
                begin = start_ms + number * rows * 1000 // rate
                made = ysb.generate(rows, keys=keys, seed=number + 1, rate=rate, start=begin)
                names = list(made.dtype.names or ())
                texts = {name for name in names if made[name].dtype.kind == "S"}
                columns = [pa.array(made[name].tolist() if name in texts else made[name]) for name in names]
                yield pa.record_batch(columns, names=names)

    return spark.range(first, first + batches, 1, batches).mapInArrow(make, COLUMNS)


@dataclass
class Pushed:
    """What Spark has sent."""

    batches: int = 0
    jobs: int = 0
    seconds: float = 0.0

    @property
    def rows(self) -> int:
        return self.batches * BATCH_ROWS

    @property
    def span_ms(self) -> int:
        return self.jobs * WINDOW_MS


def push(spark: Any, endpoint: str, seconds: float, keys: int, start_ms: int) -> Pushed:
    """Job after job for so long, each staged by its tasks and committed once."""
    from flexstream.spark import finish

    done, begin = Pushed(), time.monotonic()
    while done.jobs < MIN_JOBS or time.monotonic() - begin < seconds:
        df = events(spark, done.batches, JOB_BATCHES, keys, start_ms)
        options = {"endpoint": endpoint, "stream": ysb.YSB_STREAM.name, "job": f"main job {done.jobs}"}
        df.write.format("flexstream").mode("append").options(**options).save()
        done.batches += JOB_BATCHES
        done.jobs += 1
    done.seconds = time.monotonic() - begin
    finish(endpoint, ysb.YSB_STREAM.name)
    return done


def differences(
    spark: Any, endpoint: str, pushed: Pushed, keys: int, start_ms: int, groups: int
) -> tuple[int, list[Any]]:
    """(windows x campaigns compared, rows that only one side has): results from the source against Spark's groupBy."""
    from pyspark.sql import functions as F

    options = {"endpoint": endpoint, "query": ysb.YSB_QUERY.name}
    found = spark.read.format("flexstream").options(**options).load()
    found = found.where(F.unix_millis("window_start") < start_ms + pushed.span_ms).cache()
    expected = ysb.YSB_QUERY.to_spark(events(spark, 0, pushed.batches, keys, start_ms), groups=groups).cache()
    wrong = expected.exceptAll(found).take(3) + found.exceptAll(expected).take(3)
    return expected.count(), wrong

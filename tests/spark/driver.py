"""A Spark driver as a process of its own, to be killed: parquet files of a folder -> the sink. Run by test_bad_days.

driver.py MASTER ENDPOINT FOLDER CHECKPOINT [kill]: with `kill` the first task's executor dies in mid-send, once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from flexstream.spark import configure

SCHEMA = "t timestamp, k bigint, kind string, x int, price double"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def dying(marker: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Half of the first batch, then the end of this executor: its JVM, its Python daemon, its workers. Once."""

    def dies_in_the_middle(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                yield batch
                continue
            yield batch.slice(0, batch.num_rows // 2)
            daemon = os.getppid()
            for pid in (parent_of(daemon), daemon, os.getpid()):
                os.kill(pid, signal.SIGKILL)

    return dies_in_the_middle


def main(master: str, endpoint: str, folder: str, checkpoint: str, kill: str = "") -> None:
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.log.level", "OFF").config("spark.ui.showConsoleProgress", "false")
    spark = configure(builder.config("spark.driver.bindAddress", "127.0.0.1").getOrCreate())
    options = {"endpoint": endpoint, "stream": "events"}
    if kill:
        df = spark.read.schema(SCHEMA).parquet(folder)
        df = df.mapInArrow(dying(checkpoint + ".killed"), df.schema)
        df.write.format("flexstream").mode("append").options(**options).save()
    else:
        df = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(folder)
        writer = df.writeStream.format("flexstream").options(**options).option("checkpointLocation", checkpoint)
        writer.trigger(availableNow=True).start().awaitTermination()
    print("done", spark.sparkContext.applicationId, flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

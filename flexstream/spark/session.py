"""A Spark session made fit for `format("flexstream")`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# By default Spark works out the size of every row, to cut Arrow batches by bytes: that halves the sink's speed.
CONFS = {
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "32768",
}


def configure(spark: SparkSession) -> SparkSession:
    """Set what the sink's speed depends on, and register the format. Returns the session.

    `df.write` finds a format only in the session that is active in the calling thread, and Spark makes it so in the
    main thread alone: call this in each further thread that writes.
    """
    from flexstream.spark.datasource import FlexStreamDataSource

    for name, value in CONFS.items():
        spark.conf.set(name, value)
    if not _is_known(spark, FlexStreamDataSource.name()):
        spark.dataSource.register(FlexStreamDataSource)
    if hasattr(spark, "_jsparkSession"):  # not with Spark Connect, which has no threads of its own to tell
        spark._jvm.org.apache.spark.sql.SparkSession.setActiveSession(spark._jsparkSession)
    return spark


def _is_known(spark: SparkSession, name: str) -> bool:
    """Whether Spark has the format: by `pyspark_flexstream`, or from before. To register it again would warn."""
    if not hasattr(spark, "_jsparkSession"):
        return False
    return bool(spark._jsparkSession.sessionState().dataSourceManager().dataSourceExists(name))

"""Makes `format("flexstream")` known to Spark 4, which looks for modules named pyspark_*. See docs/spark.md."""

from flexstream.spark.datasource import FlexStreamDataSource as DefaultSource

__all__ = ["DefaultSource"]

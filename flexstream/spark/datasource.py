"""`format("flexstream")` for Spark 4: a sink for streams, a source of results."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from flexstream.spark.carried import Carried
from flexstream.spark.options import Options


class FlexStreamDataSource(Carried, DataSource):
    """Spark's format `flexstream`: streams as sinks, results as sources. Options: docs/spark.md.

    Register it with `spark.dataSource.register(FlexStreamDataSource)`; if the driver can import
    `pyspark_flexstream`, Spark finds it by itself.
    """

    @classmethod
    def name(cls) -> str:
        return "flexstream"

    def _options(self) -> Options:
        return Options.parse(self.options)

    def schema(self) -> StructType:
        from flexstream.spark.source import columns

        return columns(self._options())

    def reader(self, schema: StructType):
        from flexstream.spark.source import BatchReader, checked

        options = self._options()
        return BatchReader(options, checked(options, schema))

    def streamReader(self, schema: StructType):
        from flexstream.spark.source import StreamReader, checked

        options = self._options()
        return StreamReader(options, checked(options, schema))

    def writer(self, schema: StructType, overwrite: bool):
        from flexstream.spark.sink import BatchWriter

        return BatchWriter(self._options(), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool):
        from flexstream.spark.sink import StreamWriter

        return StreamWriter(self._options(), schema, overwrite)

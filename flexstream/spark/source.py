"""Reading a query's results, by offset, from the result logs of its daemons.

A Spark offset is {endpoint: next row}. Offsets of a result log never change their meaning, so Spark's checkpoint alone
decides what is read after a restart; nothing is kept at the daemon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from flexstream.client.http import Client
from flexstream.errors import FlexStreamError, ResultLogError
from flexstream.spark import types
from flexstream.spark.carried import Carried
from flexstream.spark.nodes import find_query, persist
from flexstream.spark.options import Options

try:  # Spark 4.2 and later can limit how much a micro-batch takes
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # pragma: no cover - Spark 4.0 and 4.1
    ReadAllAvailable = ReadMaxRows = None
    SupportsTriggerAvailableNow = object


def columns(options: Options) -> StructType:
    """What the query's results have, or its late rows."""
    query = find_query(options)
    return types.late_schema(query.stream) if options.late else types.result_schema(query)


def checked(options: Options, schema: StructType) -> StructType:
    """`schema`, which may be the user's own. Raises SchemaError."""
    types.check_results(options.need("query"), schema, persist(lambda: columns(options), options.timeout_s))
    return schema


class Part(InputPartition):
    """Of rows `begin` to `end` of one daemon's result log, those whose group mod `parts` is `part`."""

    def __init__(self, endpoint: str, begin: int, end: int, part: int = 0, parts: int = 1) -> None:
        super().__init__((endpoint, begin, end, part, parts))
        self.endpoint, self.begin, self.end = endpoint, begin, end
        self.part, self.parts = part, parts


class _Results:
    """The result logs of a query. Goes to the tasks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.schema = schema
        self.query = options.need("query")

    def _client(self, endpoint: str) -> Client:
        return Client(endpoint, token=self.options.token, timeout_s=self.options.timeout_s)

    def bounds(self) -> dict[str, tuple[int, int]]:
        """endpoint -> (first offset there is, next offset to be written)."""
        return {endpoint: self._bounds(endpoint) for endpoint in self.options.endpoints}

    def _bounds(self, endpoint: str) -> tuple[int, int]:
        client = self._client(endpoint)
        about = persist(lambda: client.get(f"/v1/queries/{quote(self.query, safe='')}"), self.options.timeout_s)
        log = about["late_log" if self.options.late else "log"]
        return int(log["first_offset"]), int(log["next_offset"])

    def parts(self, begin: dict[str, int], end: dict[str, int]) -> list[Part]:
        step, parts = self.options.partition_rows, 1 if self.options.late else self.options.group_partitions
        return [
            Part(endpoint, at, min(at + step, end[endpoint]), part, parts)
            for endpoint in self.options.endpoints
            for at in range(begin[endpoint], end[endpoint], step)
            for part in range(parts)
        ]

    def read(self, part: Part) -> Iterator[Any]:
        there = self._bounds(part.endpoint)[1]
        seen, client = 0, self._client(part.endpoint)
        wanted: dict[str, Any] = {"offset": part.begin, "limit": part.end - part.begin}
        if part.parts > 1:
            wanted |= {"parts": part.parts, "part": part.part}
        for batch in client.batches(self.query, late=self.options.late, **wanted):
            seen += batch.num_rows
            if batch.num_rows:
                yield types.arrow_for_spark(batch, self.schema)
        if there < part.end or (part.parts == 1 and part.begin + seen != part.end):
            raise ResultLogError(
                f"query {self.query!r} at {part.endpoint} does not have all rows from {part.begin} to {part.end}",
                code="results_missing",
                hint="was the daemon's data_dir replaced? Then the Spark query needs a new checkpoint",
            )


class BatchReader(Carried, DataSourceReader):
    """`spark.read`: what the logs hold now."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._results = _Results(options, schema)

    def partitions(self) -> list[Part]:
        bounds = self._results.bounds()
        start = self._results.options.starting_offset
        begin = {
            endpoint: max(first, int(start)) if start.isdecimal() else first for endpoint, (first, _) in bounds.items()
        }
        return self._results.parts(begin, {endpoint: end for endpoint, (_, end) in bounds.items()})

    def read(self, partition: Any) -> Iterator[Any]:
        return iter(()) if partition.value is None else self._results.read(partition)


class StreamReader(Carried, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """`spark.readStream`: rows as they come, at most `max_rows` in a micro-batch."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._results = _Results(options, schema)
        self._until: dict[str, int] | None = None

    def initialOffset(self) -> dict[str, int]:
        start, bounds = self._results.options.starting_offset, self._results.bounds()
        if start == "latest":
            return {endpoint: end for endpoint, (_, end) in bounds.items()}
        if start == "earliest":
            return {endpoint: first for endpoint, (first, _) in bounds.items()}
        return {endpoint: max(int(start), first) for endpoint, (first, _) in bounds.items()}

    def _ends(self) -> dict[str, int]:
        return self._until or {endpoint: end for endpoint, (_, end) in self._results.bounds().items()}

    def latestOffset(self, start: dict[str, int] | None = None, limit: Any = None) -> dict[str, int]:
        """With a limit of rows each daemon gives its share of it, the first ones what the others do not need."""
        ends = self._ends()
        if start is None or ReadMaxRows is None or not isinstance(limit, ReadMaxRows):
            return ends
        self._check(start)
        left, found = limit.max_rows, {}
        for i, (endpoint, end) in enumerate(ends.items()):
            share = -(-left // (len(ends) - i))
            found[endpoint] = max(start[endpoint], min(end, start[endpoint] + share))
            left -= found[endpoint] - start[endpoint]
        return found

    def _check(self, offset: dict[str, int]) -> None:
        if set(offset) != set(self._results.options.endpoints):
            raise FlexStreamError(
                f"the checkpoint was made with endpoint {','.join(offset)}, but this query has "
                f"{','.join(self._results.options.endpoints)}",
                code="endpoints_changed",
                hint="use the same list, or a new checkpoint",
            )

    def getDefaultReadLimit(self) -> Any:
        rows = self._results.options.max_rows
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def reportLatestOffset(self) -> dict[str, int]:
        return self._ends()

    def prepareForTriggerAvailableNow(self) -> None:
        self._until = self._ends()

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Part]:
        self._check(start)
        return self._results.parts(start, end)

    def read(self, partition: Any) -> Iterator[Any]:
        return self._results.read(partition)

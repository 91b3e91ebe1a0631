"""The fast lane: files that Arrow can read go to a stream without passing through the JVM.

Spark schedules: the files are cut into splits on the driver, small splits share a task, and each task reads its splits
with pyarrow and stages the rows. Retries, speculation and the one commit at the end are those of the sink.
"""

from __future__ import annotations

import glob
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flexstream.errors import ConfigError, FlexStreamError, SchemaError
from flexstream.rows.stream import Stream
from flexstream.spark.carried import Carried
from flexstream.spark.nodes import Target
from flexstream.spark.options import Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flexstream.spark.sink import Staged, Writer

FORMATS = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
}
SPLIT_BYTES = 64 << 20
BATCH_ROWS = 65_536
LOOK_S = 0.2
WAVES = 2  # tasks for each core, at least: one that is slow delays little


@dataclass(frozen=True)
class Split:
    """Units `begin` to `end` of a file: row groups of Parquet, batches of Arrow, the whole of a CSV."""

    path: str
    form: str
    begin: int
    end: int
    bytes: int


@dataclass(frozen=True)
class Shipped:
    """What a `ship` did. `applied` is False when its `job` had been committed before: nothing was added then."""

    rows: int
    bytes: int
    files: int
    splits: int
    seconds: float
    applied: bool

    def __str__(self) -> str:
        speed = self.rows / self.seconds / 1e6 if self.seconds else 0.0
        what = f"{self.rows:,} rows of {self.files} files in {self.splits} splits, {self.bytes / 1e6:,.0f} MB"
        return f"{what}, {self.seconds:.1f} s, {speed:.2f} M rows/s" + ("" if self.applied else " (already there)")


def ship(
    spark: SparkSession,
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    endpoint: str,
    stream: str,
    *,
    split_bytes: int = SPLIT_BYTES,
    progress: bool | None = None,
    **options: Any,
) -> Shipped:
    """Send the rows of files to a stream, once. Returns when they count.

    `paths` are files, folders or patterns of .parquet, .arrow or .csv that every executor can read; columns that the
    stream does not have are not read. `options` are those of the sink (`token`, `sink_id`, `job`, `end`, `remember_s`,
    `timeout_s`).
    `progress` shows a bar; by default when standard error is a terminal.

    Raises FlexStreamError: files or columns that do not fit (before any task starts), or a daemon that refuses.
    What a task raises ends the Spark job with Spark's own error, which holds ours; nothing was committed then.
    """
    from flexstream.spark.sink import Writer

    began = time.monotonic()
    given = {"endpoint": endpoint, "stream": stream, **options}
    parsed = Options.parse({name: _option(value) for name, value in given.items() if value is not None})
    target = Target.find(parsed)
    files = _files(paths)
    splits = [split for path in files for split in _splits(path, target.stream, split_bytes)]
    writer = Writer(parsed, target)
    tasks = share_out(splits, split_bytes, WAVES * spark.sparkContext.defaultParallelism)
    messages = _run(spark, tasks, writer, sys.stderr.isatty() if progress is None else progress)
    try:
        applied = writer.apply_job(messages, parsed.job or str(uuid.uuid4()))
    except FlexStreamError:
        writer.forget(messages)
        raise
    rows = sum(message.rows for message in messages)
    size = sum(split.bytes for split in splits)
    return Shipped(rows, size, len(files), len(splits), time.monotonic() - began, applied)


def _option(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _files(paths: Any) -> list[str]:
    found: list[str] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        text = os.path.abspath(os.path.expanduser(os.fspath(path)))
        names = sorted(glob.glob(text)) or [text]
        if os.path.isdir(text):
            inside = (os.path.join(folder, name) for folder, _, files in os.walk(text) for name in files)
            names = sorted(name for name in inside if os.path.splitext(name)[1] in FORMATS)
        missing = [name for name in names if not os.path.isfile(name)]
        if missing or not names:
            raise ConfigError(
                f"no files to ship at {missing[0] if missing else text}",
                code="no_files",
                hint=f"name files, folders or patterns of {', '.join(FORMATS)}",
            )
        found += names
    return list(dict.fromkeys(found))


def _splits(path: str, stream: Stream, split_bytes: int) -> Iterator[Split]:
    """Cut a file at its own borders. Raises SchemaError when it does not have the stream's columns."""
    form = FORMATS.get(os.path.splitext(path)[1])
    if form is None:
        raise ConfigError(
            f"{path}: cannot tell what kind of file this is", code="bad_file", hint=f"use {', '.join(FORMATS)}"
        )
    import pyarrow as pa

    try:
        units, schema = _units(path, form)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"cannot read {path} as {form}: {error}", code="bad_file") from error
    if schema is not None:
        _check_schema(path, schema, stream)
    begin, size = 0, 0
    for i, unit in enumerate(units):
        size += unit
        if size >= split_bytes or i == len(units) - 1:
            yield Split(path, form, begin, i + 1, size)
            begin, size = i + 1, 0


def _units(path: str, form: str) -> tuple[list[int], Any]:
    """(bytes of each part that can be read alone, the Arrow schema if the file tells it)."""
    import pyarrow as pa

    size = os.path.getsize(path)
    if form == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            whole = sum(group.total_byte_size for group in groups) or 1
            return [group.total_byte_size * size // whole for group in groups], file.schema_arrow
    if form == "arrow":
        with pa.ipc.open_file(path) as reader:
            count = reader.num_record_batches
            return [size // max(count, 1)] * count, reader.schema
    return [size], None  # a CSV's lines can only be told apart from its beginning


def _check_schema(path: str, schema: Any, stream: Stream) -> None:
    missing = [name for name in stream.schema.names if name not in schema.names]
    if missing:
        raise SchemaError(f"{path} lacks {', '.join(missing)}", code="unknown_field", hint=f"it has {schema.names}")
    import pyarrow as pa

    for field in stream.schema:
        given = schema.field(field.name).type
        if pa.types.is_dictionary(given):
            given = given.value_type
        text = pa.types.is_string(given) or pa.types.is_large_string(given) or pa.types.is_fixed_size_binary(given)
        text = text or pa.types.is_binary(given) or pa.types.is_large_binary(given)
        number = pa.types.is_integer(given) or pa.types.is_floating(given) or pa.types.is_boolean(given)
        if not (text if field.kind == "bytes" else number or pa.types.is_timestamp(given)):
            raise SchemaError(
                f"{path}: column {field.name!r} is {given} in the file, but {field.type} in stream {stream.name!r}",
                code="bad_types",
                hint="write the file with another type, or go through df.write with a cast",
            )
    columns = pa.schema([schema.field(name) for name in stream.schema.names])
    try:
        stream.schema.pack(columns.empty_table())
    except SchemaError as error:
        raise SchemaError(f"{path}: {error.message}", code=error.code, hint=error.hint) from None


def share_out(splits: Sequence[Split], task_bytes: int, least: int) -> list[list[Split]]:
    """The splits of each task: neighbours, together of about `task_bytes`, but at least so many tasks if there can be.

    A task, its stage and its round trips to the daemon cost as much as reading some megabytes.
    """
    whole = sum(split.bytes for split in splits)
    count = min(len(splits), max(least, -(-whole // max(task_bytes, 1))))
    tasks: list[list[Split]] = []
    before = 0
    for at, split in enumerate(splits):
        left = len(splits) - at
        due = before * count >= whole * len(tasks)
        if not tasks or (due and len(tasks) < count) or left <= count - len(tasks):
            tasks.append([])
        tasks[-1].append(split)
        before += split.bytes
    return tasks


def read_split(split: Split, names: tuple[str, ...]) -> Iterator[Any]:
    """The split's record batches, with these columns."""
    import pyarrow as pa

    if split.form == "parquet":
        import pyarrow.parquet as pq

        about = pq.read_metadata(split.path)
        texts = _dictionaries(about, names)
        with pq.ParquetFile(split.path, metadata=about, memory_map=True, read_dictionary=texts) as file:
            wanted = range(split.begin, split.end)  # no threads: Spark has a task for each core
            yield from file.iter_batches(BATCH_ROWS, row_groups=wanted, columns=list(names), use_threads=False)
    elif split.form == "arrow":
        with pa.memory_map(split.path) as source, pa.ipc.open_file(source) as reader:
            for i in range(split.begin, split.end):
                yield reader.get_batch(i).select(names)
    else:
        from pyarrow import csv

        with csv.open_csv(split.path, convert_options=csv.ConvertOptions(include_columns=list(names))) as lines:
            yield from lines


def _dictionaries(about: Any, names: tuple[str, ...]) -> list[str]:
    """The text columns that the file holds as dictionaries: they stay so, without a copy of each value."""
    group = about.row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    return [
        column.path_in_schema
        for column in columns
        if column.path_in_schema in names
        and column.physical_type == "BYTE_ARRAY"
        and {"RLE_DICTIONARY", "PLAIN_DICTIONARY"} & set(column.encodings)
    ]


@dataclass
class Task(Carried):
    """What a Spark task does: it reads its splits and stages their rows under names that begin with `group`."""

    writer: Writer
    names: tuple[str, ...]
    group: str

    def __call__(self, part: Iterator[list[Split]]) -> Iterator[Staged]:
        for splits in part:
            batches = (batch for split in splits for batch in read_split(split, self.names))
            yield self.writer.send(batches, self.group)


def _run(spark: SparkSession, tasks: list[list[Split]], writer: Writer, progress: bool) -> list[Staged]:
    """The job, under a group of its own so that it can be watched and cancelled."""
    if not tasks:
        return []
    from flexstream.spark.sending import give_up_all

    group = f"ship-{uuid.uuid4().hex[:16]}-"
    context = spark.sparkContext
    task = Task(writer, writer.target.stream.schema.names, group)
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(context, group, len(tasks), done), daemon=True)
    if progress:
        watcher.start()
    context.setJobGroup(group, f"ship {sum(map(len, tasks))} splits to {writer.options.stream}", interruptOnCancel=True)
    try:
        return context.parallelize(tasks, len(tasks)).mapPartitions(task).collect()
    except BaseException:
        context.cancelJobGroup(group)
        give_up_all(writer.target, group)
        raise
    finally:
        done.set()
        context.setLocalProperty("spark.jobGroup.id", None)
        if progress:
            watcher.join()


def _watch(context: Any, group: str, tasks: int, done: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("ship"), BarColumn(), MofNCompleteColumn(), TextColumn("tasks"), TimeElapsedColumn())
    tracker = context.statusTracker()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        row = bar.add_task("ship", total=tasks)
        while not done.wait(LOOK_S):
            bar.update(row, completed=_completed(tracker, group))
        bar.update(row, completed=_completed(tracker, group))


def _completed(tracker: Any, group: str) -> int:
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return sum(stage.numCompletedTasks for stage in stages if stage is not None)

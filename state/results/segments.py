"""One file of a result log: an Arrow IPC stream whose messages each carry their first row and a CRC.

A segment is a plain Arrow IPC stream (`pyarrow.ipc.open_stream` reads it) without the end-of-stream mark, so
that it can be continued. Its schema metadata names the format version, the first offset, the generation (of queries
under one name, each from its submission to its cancel) and that query's plan; each batch has custom metadata `offset`
(its first row) and `crc32` (over the message body). A whole batch is therefore told from a torn or a zero-filled one,
whatever a crash left behind.

Guarantees: a batch is written by positioned writes after the last whole one and becomes visible only when all
of it is there; a failed write leaves `rows`, `size_bytes` and every earlier batch as they were.
Assumes: one writer; the directory belongs to one process (the daemon's lock sees to that).
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.ipc

from flexstream.errors import ResultLogError

FORMAT_VERSION = "1"
SUFFIX = ".arrow"
ADDED = {"complete": True}  # columns at the end that logs of earlier versions lack, and what they read as there
_VERSION_KEY = b"flexstream.format"
_FIRST_KEY = b"flexstream.first_offset"
_PLAN_KEY = b"flexstream.plan"
GENERATION_KEY = b"flexstream.generation"


def plain(schema: pa.Schema) -> pa.Schema:
    """The schema without metadata: what two schemas are compared by."""
    return schema.remove_metadata()


class Life(NamedTuple):
    """Which of the queries that had the log's name wrote a segment. `plan` None: not known, or none yet."""

    generation: int
    plan: str | None


FIRST_LIFE = Life(1, None)


def header(schema: pa.Schema, first_offset: int, life: Life) -> pa.Schema:
    said = {_VERSION_KEY: FORMAT_VERSION, _FIRST_KEY: str(first_offset), GENERATION_KEY: str(life.generation)}
    if life.plan is not None:
        said[_PLAN_KEY] = life.plan
    return plain(schema).with_metadata(said)


def _life_of(metadata: dict[bytes, bytes]) -> Life:
    """Segments of versions without generations are of the first."""
    plan = metadata.get(_PLAN_KEY)
    return Life(int(metadata.get(GENERATION_KEY, b"1")), plan.decode() if plan is not None else None)


def encode(batch: pa.RecordBatch, schema: pa.Schema, offset: int) -> memoryview:
    """The batch as one IPC message with its offset and CRC in the custom metadata."""
    body = pa.ipc.read_message(batch.serialize()).body
    crc = zlib.crc32(body) if body is not None else 0
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, schema)
    writer.write_batch(batch, custom_metadata={"offset": str(offset), "crc32": str(crc)})
    return memoryview(sink.getvalue())[len(schema.serialize()) :]


def first_offset_of(path: Path) -> int | None:
    """The offset in the file's name, or None if the name is not a segment's."""
    return int(path.stem) if path.suffix == SUFFIX and path.stem.isdecimal() else None


class Segment:
    """One file and its index of batches (row numbers and file positions).

    Only the newest segment of a log has a descriptor, for writing. Readers open the file for each read, so a
    segment that retention removes meanwhile gives them FileNotFoundError, never another file's bytes.
    """

    def __init__(self, path: Path, schema: pa.Schema, first_offset: int, life: Life = FIRST_LIFE) -> None:
        self.path = path
        self.first_offset = first_offset
        self.life = life
        self.rows = 0
        self.size_bytes = 0
        self.last_append_s = 0.0
        self._schema = header(schema, first_offset, life)  # as in the file
        self._wanted = plain(schema)
        self._fd = -1
        self._indexed = True
        self._indexing = threading.Lock()
        self._starts: list[int] = []  # first row of each batch, as an offset of the log
        self._spans: list[tuple[int, int]] = []  # (file position, length) of each batch

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.rows

    @property
    def is_current(self) -> bool:
        """Whether batches of the log's columns can be appended to it."""
        return self._schema.equals(self._wanted, check_metadata=False)

    @classmethod
    def create(cls, directory: Path, schema: pa.Schema, first_offset: int, now_s: float, life: Life) -> Segment:
        """A new, empty file. On an error nothing is left behind."""
        segment = cls(directory / f"{first_offset:020d}{SUFFIX}", schema, first_offset, life)
        segment.last_append_s = now_s
        segment._fd = os.open(segment.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
        try:
            segment._write_header()
            sync_directory(directory)
        except OSError:
            segment.close()
            segment.path.unlink(missing_ok=True)
            raise
        return segment

    @classmethod
    def open_newest(cls, path: Path, schema: pa.Schema, first_offset: int, life: Life) -> Segment:
        """Go on with the newest file: cut what follows its last whole batch, and index it. `life`: if it has no header.

        Raises ResultLogError when the file is of another format or schema, or was renamed.
        """
        segment = cls(path, schema, first_offset, life)
        segment._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            length = os.fstat(segment._fd).st_size
            segment.last_append_s = os.fstat(segment._fd).st_mtime
            with pa.OSFile(str(path)) as source:
                if segment._read_header(source):
                    segment.size_bytes = segment._scan(source, length)
            if segment.size_bytes == 0:
                os.ftruncate(segment._fd, 0)
                segment._write_header()  # killed between creating the file and writing its first bytes
            elif segment.size_bytes < length:
                os.ftruncate(segment._fd, segment.size_bytes)
                os.fsync(segment._fd)
        except BaseException:
            segment.close()
            raise
        return segment

    @classmethod
    def open_finished(cls, path: Path, schema: pa.Schema, first_offset: int, next_offset: int) -> Segment:
        """A file that has a successor. Its index is made when it is first read: start-up stays quick."""
        segment = cls(path, schema, first_offset)
        with pa.OSFile(str(path)) as source:
            if not segment._read_header(source):
                raise _damaged(path, 0)
        segment.rows = next_offset - first_offset
        segment.size_bytes = path.stat().st_size
        segment.last_append_s = path.stat().st_mtime
        segment._indexed = False
        return segment

    def begin(self, life: Life) -> None:
        """Of another life from here on. Only while it has no rows; an error leaves it as it was."""
        before = self.life, self._schema
        self.life, self._schema = life, header(self._wanted, self.first_offset, life)
        try:
            self._write_header()
            os.ftruncate(self._fd, self.size_bytes)
        except OSError:
            self.life, self._schema = before
            with contextlib.suppress(OSError):
                self._write_header()
            raise

    def _write_header(self) -> None:
        head = memoryview(self._schema.serialize())
        _write_all(self._fd, head, 0)
        os.fsync(self._fd)
        self.size_bytes = len(head)

    def _read_header(self, source: pa.NativeFile) -> bool:
        """False if there is no whole header; raises ResultLogError if it is not this log's."""
        try:
            found = pa.ipc.read_schema(pa.ipc.read_message(source))
        except (pa.ArrowException, OSError, EOFError):
            return False
        metadata: dict[bytes, bytes] = found.metadata or {}
        version = metadata.get(_VERSION_KEY, b"none").decode()
        if version != FORMAT_VERSION:
            raise ResultLogError(
                f"{self.path} has result-log format {version}; this version reads format {FORMAT_VERSION}",
                code="log_format",
                hint="read it with the version that wrote it, or move the directory away",
            )
        if not fits(found, self._wanted):
            raise ResultLogError(
                f"{self.path} has columns [{_columns(found)}], but the query now has [{_columns(self._wanted)}]",
                code="log_schema",
                hint="give the changed query another name (a log has one set of columns, and its offsets stay), "
                f"or stop and move {self.path.parent} away",
            )
        if metadata.get(_FIRST_KEY) != str(self.first_offset).encode():
            raise ResultLogError(
                f"{self.path} was renamed: the first offset inside is {metadata.get(_FIRST_KEY)!r}",
                code="log_renamed",
                hint="give the file its old name back: offsets must keep their meaning",
            )
        self.life, self._schema = _life_of(metadata), found
        return True

    def _scan(self, source: pa.NativeFile, length: int) -> int:
        """Index the whole batches from here on; returns the position after the last one."""
        position = source.tell()
        rows = 0
        starts: list[int] = []
        spans: list[tuple[int, int]] = []
        prefix = self._schema.serialize().to_pybytes()
        while position < length:
            found = _whole_batch(source, prefix, self.first_offset + rows)
            if found is None:
                break
            end = source.tell()
            starts.append(self.first_offset + rows)
            spans.append((position, end - position))
            rows += found
            position = end
        self._starts, self._spans, self.rows = starts, spans, rows
        return position

    def append(self, batch: pa.RecordBatch, now_s: float) -> None:
        """Write one batch. OSError (disk full, ...) leaves the segment as it was."""
        message = encode(batch, self._schema, self.next_offset)
        try:
            _write_all(self._fd, message, self.size_bytes)
        except OSError:
            # If this fails too, the next append writes over the same place and a reopen cuts it by its CRC.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.size_bytes)
            raise
        self._spans.append((self.size_bytes, len(message)))
        self._starts.append(self.next_offset)
        self.size_bytes += len(message)
        self.last_append_s = now_s
        self.rows += batch.num_rows  # last: a reader that sees the rows sees the index

    def starts(self) -> list[int]:
        """The first row of each batch."""
        if not self._indexed:
            self._index()
        return self._starts[: len(self._spans)]

    def load(self, offset: int) -> pa.RecordBatch:
        """The rows from `offset` to the end of its batch. FileNotFoundError when retention was quicker."""
        if not self._indexed:
            self._index()
        index = bisect_right(self._starts, offset) - 1
        position, length = self._spans[index]
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, length, position)
        finally:
            os.close(fd)
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), self._schema)
        return of_generation(with_added(batch, self._wanted), self.life).slice(offset - self._starts[index])

    def _index(self) -> None:
        with self._indexing:
            if self._indexed:
                return
            rows = self.rows
            with pa.OSFile(str(self.path)) as source:
                self._read_header(source)
                position = self._scan(source, self.size_bytes)
            if self.rows != rows:
                self.rows = rows
                raise _damaged(self.path, position)
            self._indexed = True

    def sync(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close for writing; reading still works."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)


class MemorySegment:
    """The same for a log without a directory: the batches stay in memory."""

    def __init__(self, first_offset: int, now_s: float, life: Life = FIRST_LIFE) -> None:
        self.first_offset = first_offset
        self.life = life
        self.rows = 0
        self.size_bytes = 0
        self.last_append_s = now_s
        self._starts: list[int] = []
        self._batches: list[pa.RecordBatch] = []

    @property
    def next_offset(self) -> int:
        return self.first_offset + self.rows

    def append(self, batch: pa.RecordBatch, now_s: float) -> None:
        self._batches.append(of_generation(batch, self.life))
        self._starts.append(self.next_offset)
        self.size_bytes += batch.nbytes
        self.last_append_s = now_s
        self.rows += batch.num_rows

    @property
    def is_current(self) -> bool:
        return True

    def begin(self, life: Life) -> None:
        self.life = life

    def starts(self) -> list[int]:
        return list(self._starts)

    def load(self, offset: int) -> pa.RecordBatch:
        index = bisect_right(self._starts, offset) - 1
        return self._batches[index].slice(offset - self._starts[index])

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def remove(self) -> None: ...


def fits(found: pa.Schema, wanted: pa.Schema) -> bool:
    """Whether a file's columns are the wanted ones, or were before some were added."""
    older = pa.schema([field for field in wanted if field.name not in ADDED])
    return found.equals(wanted, check_metadata=False) or found.equals(older, check_metadata=False)


def with_added(batch: pa.RecordBatch, wanted: pa.Schema) -> pa.RecordBatch:
    """The batch of an older file with the columns that it lacks."""
    if batch.num_columns == len(wanted):
        return batch
    added = [_repeated(ADDED[field.name], batch.num_rows) for field in wanted if field.name not in batch.schema.names]
    return pa.RecordBatch.from_arrays([*batch.columns, *added], schema=wanted)


def _repeated(value: bool, n: int) -> pa.Array:
    bits = (b"\xff" if value else b"\0") * (n // 8 + 1)
    return pa.Array.from_buffers(pa.bool_(), n, [None, pa.py_buffer(bits)])


def of_generation(batch: pa.RecordBatch, life: Life) -> pa.RecordBatch:
    """The batch, saying in its schema's metadata of which generation it is."""
    return batch.replace_schema_metadata({GENERATION_KEY: str(life.generation)})


def _whole_batch(source: pa.NativeFile, prefix: bytes, offset: int) -> int | None:
    """Rows of the next batch, or None if it is torn, not the one of `offset`, or does not match its CRC."""
    try:
        message = pa.ipc.read_message(source)
        stream = pa.py_buffer(prefix + message.serialize().to_pybytes())
        batch, custom = pa.ipc.open_stream(stream).read_next_batch_with_custom_metadata()
    except (pa.ArrowException, OSError, EOFError, StopIteration):
        return None
    if custom is None or custom.get(b"offset") != str(offset).encode():
        return None
    crc = zlib.crc32(message.body) if message.body is not None else 0
    return batch.num_rows if custom.get(b"crc32") == str(crc).encode() else None


def _write_all(fd: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(fd, data, position)
        data = data[written:]
        position += written


def sync_directory(directory: Path) -> None:
    """Make a created or removed name in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _damaged(path: Path, position: int) -> ResultLogError:
    return ResultLogError(
        f"{path} is damaged at byte {position}, and it is not the newest segment",
        code="log_damaged",
        hint="restore it from a backup, or move it and all older segments away (their offsets are then gone)",
    )

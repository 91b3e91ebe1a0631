"""Results into files: a Parquet directory that can be continued, and JSON lines.

    sink = ParquetDirectory("out/ysb")
    sink.write(engine.results("ysb", offset=sink.next_offset))

JSON goes without `Array.to_pylist()` and `pyarrow.array()`: both import pandas when it is installed, which a
daemon should not pay for. Columns are read through numpy views of their buffers instead.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from flexstream.errors import ResultLogError

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_FILE = 1 << 20
_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def json_lines(batch: pa.RecordBatch) -> bytes:
    """One JSON object per row, each with its newline.

    Times are ISO 8601 (no zone, as in the stream), bytes are text without their NUL padding, or
    {"base64": ...} if they are not UTF-8; "NaN", "Infinity" and "-Infinity" are text, for JSON has no such numbers:
    Python's float() reads them, and so do Arrow's casts and Spark's from_json. null is no value.
    """
    names = [json.dumps(name) for name in batch.schema.names]
    columns = [[json.dumps(value) for value in column_values(column)] for column in batch.columns]
    lines = [
        "{" + ", ".join(f"{name}: {value}" for name, value in zip(names, row, strict=True)) + "}"
        for row in zip(*columns, strict=True)
    ]
    return ("\n".join(lines) + "\n").encode() if lines else b""


def column_values(column: pa.Array) -> list[Any]:
    """The column as plain Python values that JSON can hold."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_timestamp(kind):
        plain: list[Any] = np.datetime_as_string(
            _fixed(column, "<i8").view(f"datetime64[{kind.unit}]")
        ).tolist()
    elif pa.types.is_fixed_size_binary(kind):
        plain = [_text(value) for value in _chunks(column, kind.byte_width)]
    elif pa.types.is_boolean(kind):
        plain = _bits(column, 1).tolist()
    elif pa.types.is_integer(kind):
        sign = "i" if pa.types.is_signed_integer(kind) else "u"
        plain = _fixed(column, f"<{sign}{kind.bit_width // 8}").tolist()
    elif pa.types.is_floating(kind):
        floats = _fixed(column, f"<f{kind.bit_width // 8}").tolist()
        plain = [value if math.isfinite(value) else _NOT_FINITE.get(value, "NaN") for value in floats]
    else:
        return list(column.to_pylist())
    if column.null_count:
        plain = [value if there else None for value, there in zip(plain, _bits(column, 0), strict=True)]
    return plain


def _fixed(column: pa.Array, code: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(code)
    buffer = column.buffers()[1]
    if buffer is None or len(column) == 0:
        return np.zeros(len(column), dtype)
    return np.frombuffer(buffer, dtype, count=len(column), offset=column.offset * dtype.itemsize)


def _chunks(column: pa.Array, width: int) -> list[bytes]:
    buffer = column.buffers()[1]
    if buffer is None:
        return [b""] * len(column)
    data = buffer.slice(column.offset * width, len(column) * width).to_pybytes()
    return [data[start * width : (start + 1) * width] for start in range(len(column))]


def _bits(column: pa.Array, which: int) -> np.ndarray[Any, Any]:
    buffer = column.buffers()[which]
    if buffer is None:
        return np.ones(len(column), np.bool_)
    bits = np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(np.bool_)


def _text(value: bytes) -> str | dict[str, str]:
    value = value.rstrip(b"\0")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode("ascii")}


def write_json_lines(batches: Iterable[pa.RecordBatch], target: BinaryIO | str | Path) -> int:
    """Write every row of `batches` as a JSON line to an open binary file or a path; returns the rows."""
    if isinstance(target, str | Path):
        try:
            with open(target, "wb") as stream:
                return write_json_lines(batches, stream)
        except OSError as error:
            raise _cannot_write(Path(target), error) from error
    rows = 0
    for batch in batches:
        target.write(json_lines(batch))
        rows += batch.num_rows
    return rows


class ParquetDirectory:
    """A directory of `<first offset>.parquet` files that Spark, DuckDB or polars read as one table.

    Each file appears whole (written beside, synced, renamed) and its name is the offset of its first row, so
    an export that was interrupted goes on at `next_offset`: no row is lost, none is there twice.
    """

    def __init__(self, directory: str | Path, *, rows_per_file: int = ROWS_PER_FILE) -> None:
        self.directory = Path(directory)
        self._rows_per_file = rows_per_file
        self.directory.mkdir(parents=True, exist_ok=True)
        for left_over in self.directory.glob("*.parquet.tmp"):
            left_over.unlink()

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("*.parquet") if path.stem.isdecimal())

    @property
    def next_offset(self) -> int:
        """The offset after the last row that is in a finished file; 0 for an empty directory."""
        import pyarrow.parquet as pq

        files = self.files
        return int(files[-1].stem) + pq.read_metadata(files[-1]).num_rows if files else 0

    def write(self, batches: Iterable[pa.RecordBatch], first_offset: int | None = None) -> int:
        """Write all rows of `batches`, the first of which has `first_offset` (default: `next_offset`).

        Returns the rows written. Raises ResultLogError; files finished before stay.
        """
        offset = self.next_offset if first_offset is None else first_offset
        written = 0
        for part in _parts(batches, self._rows_per_file):
            rows = sum(batch.num_rows for batch in part)
            self._write_file(part, offset + written)
            written += rows
        return written

    def _write_file(self, batches: list[pa.RecordBatch], offset: int) -> None:
        import pyarrow.parquet as pq

        path = self.directory / f"{offset:020d}.parquet"
        temporary = path.with_suffix(".parquet.tmp")
        try:
            with pq.ParquetWriter(temporary, batches[0].schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.rename(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise _cannot_write(path, error) from error


def _parts(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[list[pa.RecordBatch]]:
    """The same rows in lists of at most `rows` rows."""
    part: list[pa.RecordBatch] = []
    room = rows
    for batch in batches:
        while batch.num_rows:
            piece = batch.slice(0, room)
            batch = batch.slice(piece.num_rows)
            part.append(piece)
            room -= piece.num_rows
            if room == 0:
                yield part
                part, room = [], rows
    if part:
        yield part


def _cannot_write(path: Path, error: OSError) -> ResultLogError:
    return ResultLogError(
        f"cannot write {path}: {error.strerror or error}",
        code="sink_io",
        hint="free some space or choose another place; what was finished stays and the export can go on",
    )

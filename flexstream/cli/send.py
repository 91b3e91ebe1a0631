"""flexstream send: rows from a file, or made up, into a stream."""

from __future__ import annotations

import enum
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say
from flexstream.client.http import Client
from flexstream.errors import FlexStreamError, SchemaError
from flexstream.rows.stream import Stream

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_ROWS = 100_000


class Generator(enum.StrEnum):
    """Data that can be made up."""

    YSB = "ysb"


class Sender(Protocol):
    """The part of flexstream.Producer that is used here."""

    def send(self, rows: Any) -> Any: ...

    def stats(self) -> Any: ...


def send(
    file: Annotated[Path | None, typer.Argument(help="A .csv, .parquet or .jsonl file.")] = None,
    stream: Annotated[
        str | None, typer.Option("--stream", "-s", help="The stream; required with a file.")
    ] = None,
    generate: Annotated[
        Generator | None, typer.Option(help="Generate rows instead of reading a file.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --generate: how many rows.")] = 1_000_000,
    keys: Annotated[int, typer.Option(min=1, help="With --generate: how many keys.")] = 10_000,
    rate: Annotated[
        int, typer.Option(min=1, help="With --generate: rows per second of event time.")
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="With --generate: the same seed gives the same rows.")] = 1,
    missing: Annotated[
        str | None,
        typer.Option(help="For missing values: drop leaves their rows out, a number or text replaces them."),
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Send rows to a stream, with a progress bar. After the last row this producer's session ends.

    Columns must have the stream's names; values are converted only if nothing is lost.

    Example: flexstream send clicks.parquet --stream clicks

    Example: flexstream send --generate ysb --rows 10000000 --keys 10000
    """
    if (file is None) == (generate is None):
        raise typer.BadParameter("give either a file or --generate ysb")
    client = connect(url, token_file)
    if generate is not None:
        target, batches, total = _generated(client, stream, rows, keys, rate, seed)
    else:
        assert file is not None
        if stream is None:
            raise typer.BadParameter("a file needs --stream NAME")
        target = Stream.from_dict(client.get(f"/v1/streams/{quote(stream, safe='')}")["stream"])
        batches, total = read_file(file, target, _choice(missing)), None
    began = time.monotonic()
    sent, sent_bytes = _send_all(client, target, batches, total, quiet=as_json)
    seconds = time.monotonic() - began
    if as_json:
        rates = {"seconds": seconds, "rows_per_s": sent / seconds if seconds else None}
        emit({"stream": target.name, "rows": sent, "bytes": sent_bytes, **rates})
    else:
        rate_text = f"{sent / seconds / 1e6:.2f} M rows/s" if seconds else ""
        say(f"sent {sent} rows ({sent_bytes / 1e6:.1f} MB) to {target.name} in {seconds:.2f} s, {rate_text}")


def _generated(
    client: Client, name: str | None, rows: int, keys: int, rate: int, seed: int
) -> tuple[Stream, Iterator[Any], int]:
    from flexstream.testing import ysb

    if name not in (None, ysb.YSB_STREAM.name):
        raise typer.BadParameter(f"--generate ysb sends to stream {ysb.YSB_STREAM.name}")
    client.post("/v1/streams", ysb.YSB_STREAM.to_dict())

    def pieces() -> Iterator[Any]:
        start = 1_700_000_000_000
        for number, first in enumerate(range(0, rows, CHUNK_ROWS)):
            piece_start = start + first * 1000 // rate
            yield ysb.generate(min(CHUNK_ROWS, rows - first), keys, seed + number, rate, piece_start)

    return ysb.YSB_STREAM, pieces(), rows


def _choice(missing: str | None) -> Any:
    """A number where it is one, else the text."""
    if missing is None:
        return None
    for kind in (int, float):
        try:
            return kind(missing)
        except ValueError:
            continue
    return missing


def read_file(path: Path, stream: Stream, missing: Any = None) -> Iterator[Any]:
    """Packed rows of a CSV, Parquet or JSON lines file, piece by piece. Raises SchemaError."""
    import pyarrow as pa

    readers = {".csv": _csv, ".parquet": _parquet, ".jsonl": _jsonl, ".ndjson": _jsonl, ".json": _jsonl}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SchemaError(
            f"cannot tell from its name what {path} holds", code="bad_file", hint="use .csv, .parquet or .jsonl"
        )
    try:
        for batch in reader(path, stream):
            yield stream.schema.pack(_with_times(batch, stream), missing)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SchemaError(f"cannot read {path}: {reason}", code="bad_file", hint="check the file") from error


def _with_times(batch: pa.RecordBatch, stream: Stream) -> pa.Table:
    """Columns in the stream's order; ISO 8601 text, as in JSON, becomes time."""
    import pyarrow as pa

    table = pa.Table.from_batches([batch])
    if twice := sorted({name for name in table.schema.names if table.schema.names.count(name) > 1}):
        raise SchemaError(
            f"several columns are called {', '.join(twice)}", code="bad_file", hint="give each its own name"
        )
    for field in stream.schema.fields:
        if field.kind == "timestamp" and field.name in table.schema.names:
            column = table.column(field.name)
            if pa.types.is_string(column.type):
                at = table.schema.get_field_index(field.name)
                table = table.set_column(at, field.name, column.cast(pa.timestamp(field.unit)))
    return table


def _csv(path: Path, stream: Stream) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.csv

    wanted = {f.name: pa.binary() if f.kind == "bytes" else _exact_type(f.kind) for f in stream.schema.fields}
    types = {name: kind for name, kind in wanted.items() if kind is not None}
    options = pa.csv.ConvertOptions(column_types=types)
    with pa.csv.open_csv(path, convert_options=options) as reader:
        yield from reader


def _exact_type(kind: str) -> pa.DataType | None:
    import pyarrow as pa

    names = {"i": "int", "u": "uint", "f": "float"}
    if kind == "bool":
        return pa.bool_()
    if kind[1:].isdecimal() and kind[0] in names:
        return pa.type_for_alias(f"{names[kind[0]]}{kind[1:]}")
    return None  # timestamps: inferred, so that numbers and ISO 8601 both work


def _parquet(path: Path, stream: Stream) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=CHUNK_ROWS, columns=None)


def _jsonl(path: Path, stream: Stream) -> Iterator[pa.RecordBatch]:
    yield from _json_table(path, stream).to_batches(max_chunksize=CHUNK_ROWS)


def _json_table(path: Path, stream: Stream) -> pa.Table:
    """Integers are read as such: by itself pyarrow takes those beside a float, or beyond 63 bits, for floats, which do
    not hold them. Where some are written as floats (1e2), all are read that way, if none is too large for it.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json

    exact = {f.name: _exact_type(f.kind) for f in stream.schema.fields if f.kind[0] in "iu"}
    options = pyarrow.json.ParseOptions(explicit_schema=pa.schema(list(exact.items())))
    try:
        table = pyarrow.json.read_json(path, parse_options=options)
        absent = [name for name in exact if table.column(name).null_count == len(table)]
        return table.drop_columns(absent)  # the schema puts in what the file does not have
    except pa.ArrowInvalid:
        table = pyarrow.json.read_json(path)
    for name in exact:
        column = table.column(name) if table.schema.names.count(name) == 1 else None
        if column is not None and pa.types.is_floating(column.type):
            largest = pc.max(pc.abs(column)).as_py()
            if largest is not None and largest >= 2**53:
                raise SchemaError(
                    f"{path}: {name} has integers of 2**53 or more, and some written as floats",
                    code="bad_file",
                    hint="write all of them as integers",
                )
    return table


@contextmanager
def _progress(total: int | None, quiet: bool) -> Iterator[Any]:
    """A function to call with the rows sent so far."""
    if quiet or not sys.stderr.isatty():
        yield lambda sent: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("sending"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sending", total=total)
        yield lambda sent: bar.update(task, completed=sent)


def _producer(client: Client, stream: Stream) -> AbstractContextManager[Sender]:
    from flexstream.client.producer import Producer

    producer: AbstractContextManager[Sender] = Producer(
        client.address, stream=stream.name, token=client.token
    )
    return producer


def _send_all(
    client: Client, stream: Stream, batches: Iterator[Any], total: int | None, *, quiet: bool
) -> tuple[int, int]:
    sent = 0
    with _progress(total, quiet) as shown:
        try:
            with _producer(client, stream) as producer:
                for rows in batches:
                    producer.send(rows)
                    sent += len(rows)
                    shown(sent)
        except FlexStreamError as error:
            raise type(error)(
                f"after {sent} rows: {error.message}", code=error.code, hint=error.hint
            ) from error
    return sent, sent * stream.schema.row_bytes

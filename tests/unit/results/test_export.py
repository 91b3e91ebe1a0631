"""Results in files: JSON lines that any program reads, Parquet directories that can be continued."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flexstream.errors import ResultLogError
from flexstream.results.export import ParquetDirectory, json_lines, write_json_lines

BATCH = pa.RecordBatch.from_pydict(
    {
        "t": pa.array([0, 1_700_000_000_123, None], pa.timestamp("ms")),
        "ns": pa.array([1, 2, 3], pa.timestamp("ns")),
        "i": pa.array([-1, 2**63 - 1, None], pa.int64()),
        "u": pa.array([0, 255, 7], pa.uint8()),
        "f": pa.array([1.5, float("nan"), None], pa.float64()),
        "f4": pa.array([0.5, float("inf"), 2.0], pa.float32()),
        "b": pa.array([True, False, None], pa.bool_()),
        "x": pa.array([b"view\0\0\0\0", b"\xff\xfe\0\0\0\0\0\0", None], pa.binary(8)),
    }
)
ROWS = [
    {"t": "1970-01-01T00:00:00.000", "ns": "1970-01-01T00:00:00.000000001", "i": -1, "u": 0, "f": 1.5,
     "f4": 0.5, "b": True, "x": "view"},
    {"t": "2023-11-14T22:13:20.123", "ns": "1970-01-01T00:00:00.000000002", "i": 2**63 - 1, "u": 255,
     "f": "NaN", "f4": "Infinity", "b": False, "x": {"base64": "//4="}},
    {"t": None, "ns": "1970-01-01T00:00:00.000000003", "i": None, "u": 7, "f": None, "f4": 2.0,
     "b": None, "x": None},
]  # fmt: skip


def parse(data: bytes) -> list[object]:
    return [json.loads(line) for line in data.splitlines()]


def test_every_type_has_its_form_in_json() -> None:
    assert parse(json_lines(BATCH)) == ROWS


def test_what_is_not_a_number_of_json_can_be_read_back() -> None:
    values = [1.5, math.nan, math.inf, -math.inf, None]
    lines = parse(json_lines(pa.RecordBatch.from_pydict({"x": pa.array(values, pa.float64())})))
    assert [line["x"] for line in lines] == [1.5, "NaN", "Infinity", "-Infinity", None]  # type: ignore[index]
    read = [None if line["x"] is None else float(line["x"]) for line in lines]  # type: ignore[index]
    assert repr(read) == repr(values)
    texts = pa.array(["NaN", "Infinity", "-Infinity"]).cast(pa.float64())
    assert repr(texts.to_pylist()) == repr(values[1:4])


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_slices_give_their_own_rows(start: int) -> None:
    assert parse(json_lines(BATCH.slice(start))) == ROWS[start:]
    assert parse(json_lines(BATCH.slice(start, 1))) == ROWS[start : start + 1]


def test_bits_beyond_a_byte_boundary_are_found() -> None:
    values = [bool(n % 3) for n in range(40)]
    batch = pa.RecordBatch.from_pydict({"b": pa.array(values, pa.bool_())}).slice(11, 20)
    assert [row["b"] for row in parse(json_lines(batch))] == values[11:31]  # type: ignore[index]


def test_json_lines_go_to_a_file_or_a_path(tmp_path: Path) -> None:
    stream = io.BytesIO()
    assert write_json_lines([BATCH, BATCH], stream) == 6
    path = tmp_path / "out.jsonl"
    assert write_json_lines(iter([BATCH, BATCH]), path) == 6
    assert path.read_bytes() == stream.getvalue()
    assert parse(stream.getvalue()) == ROWS + ROWS
    with pytest.raises(ResultLogError, match="cannot write"):
        write_json_lines([BATCH], tmp_path / "no" / "out.jsonl")


def numbers(first: int, count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"n": pa.array(range(first, first + count), pa.int64())})


def test_a_parquet_directory_is_cut_into_files_and_read_as_one_table(tmp_path: Path) -> None:
    sink = ParquetDirectory(tmp_path / "out", rows_per_file=10)
    assert sink.next_offset == 0
    assert sink.write([numbers(0, 4), numbers(4, 0), numbers(4, 21)]) == 25
    assert [(int(file.stem), pq.read_metadata(file).num_rows) for file in sink.files] == [
        (0, 10),
        (10, 10),
        (20, 5),
    ]
    assert pq.read_table(tmp_path / "out").column("n").to_pylist() == list(range(25))


def test_an_interrupted_export_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    def broken():  # type: ignore[no-untyped-def]
        yield numbers(0, 10)
        yield numbers(10, 3)
        raise RuntimeError("the connection went away")

    with pytest.raises(RuntimeError):
        ParquetDirectory(tmp_path, rows_per_file=10).write(broken())
    (tmp_path / "00000000000000000010.parquet.tmp").write_bytes(b"half a file")
    sink = ParquetDirectory(tmp_path, rows_per_file=10)
    assert sink.next_offset == 10
    sink.write([numbers(sink.next_offset, 5)])
    assert pq.read_table(tmp_path).column("n").to_pylist() == list(range(15))
    assert list(tmp_path.glob("*.tmp")) == []

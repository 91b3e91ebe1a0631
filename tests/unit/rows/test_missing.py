"""Missing values: one rule for every kind of table, and a choice."""

import datetime as dt
import math

import numpy as np
import pyarrow as pa
import pytest

import flexstream as fs
from flexstream.cli.send import read_file
from flexstream.errors import SchemaError

SCHEMA = fs.Schema.of({"t": "timestamp[ms]", "k": "i64", "x": "f64", "tag": "bytes[4]"})
MOMENT = dt.datetime(2024, 1, 1)
COLUMNS = {"t": [MOMENT] * 4, "k": [1, 2, 3, 4], "x": [0.5, None, 1.5, None], "tag": ["a", "b", None, "d"]}
AS_DICTS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
KINDS = ["dicts", "lists", "pandas", "pandas NA", "polars", "arrow"]
KINDS += ["arrow columns", "polars columns", "pandas columns"]


def table(kind):
    if kind == "dicts":
        return AS_DICTS
    if kind == "lists":
        return COLUMNS
    if kind.startswith("arrow"):
        return pa.table(COLUMNS) if kind == "arrow" else {name: pa.array(column) for name, column in COLUMNS.items()}
    if kind.startswith("polars"):
        frame = pytest.importorskip("polars").DataFrame(COLUMNS)
        return frame if kind == "polars" else {name: frame[name] for name in frame.columns}
    frame = pytest.importorskip("pandas").DataFrame(COLUMNS)
    if kind == "pandas NA":
        return frame.convert_dtypes()
    return frame if kind == "pandas" else {name: frame[name] for name in frame.columns}


@pytest.mark.parametrize("kind", KINDS)
def test_missing_values_are_refused_with_field_and_count(kind):
    with pytest.raises(SchemaError) as caught:
        SCHEMA.pack(table(kind))
    assert caught.value.code == "null_value"
    assert "field 'x' has 2 nulls, field 'tag' has 1 null" in str(caught.value)
    assert 'missing="drop"' in caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_their_rows_can_be_dropped(kind):
    assert SCHEMA.pack(table(kind), "drop")["k"].tolist() == [1]
    packed = SCHEMA.pack(table(kind), {"x": "drop", "tag": b"?"})
    assert packed["k"].tolist() == [1, 3]
    assert packed["tag"].tolist() == [b"a", b"?"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_can_take_their_place(kind):
    packed = SCHEMA.pack(table(kind), {"x": -1.0, "tag": "none"})
    assert packed["x"].tolist() == [0.5, -1.0, 1.5, -1.0]
    assert packed["tag"].tolist() == [b"a", b"b", b"none", b"d"]
    nan = SCHEMA.pack(table(kind), {"x": math.nan, "tag": ""})["x"]
    np.testing.assert_array_equal(nan, [0.5, math.nan, 1.5, math.nan])


def test_a_value_that_does_not_fit_is_refused():
    with pytest.raises(SchemaError, match="'tag'"):
        SCHEMA.pack(AS_DICTS, 0.0)
    with pytest.raises(SchemaError, match="'x' has 2"):
        SCHEMA.pack(AS_DICTS, {"tag": "?"})
    with pytest.raises(SchemaError, match="'tip'"):
        SCHEMA.pack(AS_DICTS, {"tip": 0.0})
    assert len(SCHEMA.pack(AS_DICTS[:1], 0.0)) == 1, "nothing is missing here"


def test_an_integer_column_that_a_gap_made_float_is_named():
    pandas = pytest.importorskip("pandas")
    schema = fs.Schema.of({"k": "i64"})
    frame = pandas.DataFrame({"k": [1, None, 3]})
    with pytest.raises(SchemaError, match="'k' has 1 null"):
        schema.pack(frame)
    assert schema.pack(frame, 0)["k"].tolist() == [1, 0, 3]


def test_times_can_be_missing_too():
    schema = fs.Schema.of({"t": "timestamp[ms]"})
    times = np.array(["2024-01-01", "NaT"], "M8[ms]")
    frames = [{"t": times}, pytest.importorskip("pandas").DataFrame({"t": times}), pa.table({"t": times})]
    zoned = frames[1].assign(t=frames[1]["t"].dt.tz_localize("Asia/Tokyo"))
    for frame in [*frames, zoned]:
        with pytest.raises(SchemaError, match="'t' has 1 null"):
            schema.pack(frame)
        assert len(schema.pack(frame, "drop")) == 1
        assert schema.pack(frame, 7)["t"][1] == 7


def test_what_numpy_masks_is_missing():
    rows = np.ma.masked_array(np.zeros(3, SCHEMA.dtype))
    rows["x"] = np.ma.masked_array([1.0, 2.0, 3.0], [False, True, False])
    with pytest.raises(SchemaError, match="'x' has 1 null"):
        SCHEMA.pack(rows)
    assert SCHEMA.pack(rows, "drop")["x"].tolist() == [1.0, 3.0]


def test_a_nan_that_somebody_put_there_is_a_value():
    schema = fs.Schema.of({"x": "f64"})
    rows = np.array([(math.nan,)], schema.dtype)
    polars = pytest.importorskip("polars")
    for data in (rows, {"x": np.array([math.nan])}, [{"x": math.nan}], pa.table({"x": np.array([math.nan])}),
                 polars.DataFrame({"x": [math.nan]})):  # fmt: skip
        assert np.isnan(schema.pack(data)["x"]).all()


def test_a_file_with_gaps(tmp_path):
    stream = fs.Stream("s", {"t": "timestamp[ms]", "k": "i64", "x": "f64"}, key="k", time="t")
    path = tmp_path / "rows.csv"
    path.write_text("t,k,x\n0,1,0.5\n0,2,\n")
    with pytest.raises(SchemaError, match="'x' has 1 null"):
        list(read_file(path, stream))
    (dropped,) = read_file(path, stream, "drop")
    assert dropped["k"].tolist() == [1]


# -- files whose values are easily changed on the way


LARGE = fs.Stream("s", {"t": "timestamp[ms]", "k": "i64", "u": "u64"}, key="k", time="t")


def test_large_integers_in_json_lines_are_read_as_they_are(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"t": 1, "k": {2**53 + 1}, "u": {2**64 - 1}}}\n{{"t": 2, "k": -7, "u": {2**63 + 1}}}\n')
    (rows,) = read_file(path, LARGE)
    assert rows["k"].tolist() == [2**53 + 1, -7]
    assert rows["u"].tolist() == [2**64 - 1, 2**63 + 1]


def test_integers_written_as_floats_are_taken_unless_a_large_one_would_change(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"t": 1, "k": 1e2, "u": 3}\n{"t": 2, "k": 5, "u": 4}\n')
    (rows,) = read_file(path, LARGE)
    assert rows["k"].tolist() == [100, 5]
    path.write_text(f'{{"t": 1, "k": 1e2, "u": 3}}\n{{"t": 2, "k": {2**53 + 1}, "u": 4}}\n')
    with pytest.raises(fs.SchemaError, match=r"k has integers of 2\*\*53 or more"):
        list(read_file(path, LARGE))


def test_a_column_that_is_not_there_or_there_twice_is_named(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"t": 1, "k": 1}\n')
    with pytest.raises(fs.SchemaError, match="rows lack u"):
        list(read_file(lines, LARGE))
    table = tmp_path / "rows.csv"
    table.write_text("t,k,k,u\n1000,3,4,1\n")
    with pytest.raises(fs.SchemaError, match="several columns are called k"):
        list(read_file(table, LARGE))


@pytest.mark.parametrize("odd", [1.7, True, "x", [1], float("nan")])
def test_a_watermark_that_is_no_whole_number_is_refused(odd):
    with fs.Engine(workers=1, groups=2, pin=False) as engine:
        engine.add(LARGE)
        with pytest.raises(fs.SchemaError, match="whole number"):
            engine.feed("s", [{"t": 1, "k": 1, "u": 1}], watermark=odd)
        engine.feed("s", [{"t": 1, "k": 1, "u": 1}], watermark=np.int32(7))
        assert engine.status()["streams"]["s"]["ledger"]["received"] == 1

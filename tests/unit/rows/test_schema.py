"""Row layouts, and other people's tables packed into them."""

import datetime as dt
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexstream import Schema, SchemaError

ALL = Schema.of(
    {
        "a": "i8",
        "b": "i16",
        "c": "i32",
        "d": "i64",
        "e": "u8",
        "f": "u16",
        "g": "u32",
        "h": "u64",
        "i": "f32",
        "j": "f64",
        "k": "bool",
        "s": "timestamp[s]",
        "ms": "timestamp[ms]",
        "us": "timestamp[us]",
        "ns": "timestamp[ns]",
        "z": "bytes[5]",
    }
)
ONE_ROW = {
    "a": -1,
    "b": -2,
    "c": -3,
    "d": -(2**63),
    "e": 255,
    "f": 65535,
    "g": 2**32 - 1,
    "h": 2**64 - 1,
    "i": 0.5,
    "j": 0.1,
    "k": True,
    "s": 1,
    "ms": -1,
    "us": 2,
    "ns": 2**63 - 1,
    "z": b"ab\0cd",
}


def one(kind):
    return Schema.of({"x": kind})


# -- definitions


def test_layout_is_packed_and_equal_to_the_numpy_dtype():
    assert [field.offset for field in ALL] == [ALL.dtype.fields[name][1] for name in ALL.names]
    assert ALL.row_bytes == ALL.dtype.itemsize == 80
    assert ALL.dtype["ms"] == np.dtype("<i8")
    assert (ALL.field("ms").kind, ALL.field("ms").unit, ALL.field("z").size) == ("timestamp", "ms", 5)


def test_dict_numpy_and_arrow_forms_come_back():
    assert Schema.from_dict(ALL.to_dict()) == ALL
    assert Schema.from_arrow(ALL.to_arrow()) == ALL
    times = {name: f"M8[{name}]" for name in ("s", "ms", "us", "ns")}
    dtype = np.dtype([(name, times.get(name, ALL.dtype[name])) for name in ALL.names], align=True)
    assert Schema.from_numpy(dtype) == ALL  # padding goes, datetime64 becomes timestamp


def test_hash_is_stable_over_versions():
    # On the wire and in checkpoints: changing this breaks every deployed producer.
    assert Schema.of({"t": "timestamp[ms]", "k": "i64"}).hash == "7914de6b06426069"


def test_hash_sees_name_type_and_order_but_not_spelling():
    base = Schema.of({"x": "i64", "y": "f64"})
    others = [{"x": "i64", "z": "f64"}, {"x": "u64", "y": "f64"}, {"y": "f64", "x": "i64"}]
    assert len({base.hash, *(Schema.of(other).hash for other in others)}) == 4
    assert Schema.of({"x": "int64", "y": "double"}).hash == base.hash


@pytest.mark.parametrize(
    "name", ["", "_x", "1x", "a b", "a.b", "a-b", "é", "x" * 65, "a\n", None, 3, b"x", "a\0", "..", "a/b"]
)
def test_bad_field_names_are_refused(name):
    with pytest.raises(SchemaError) as caught:
        Schema.of([(name, "i64")])
    assert caught.value.code == "bad_name"


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "i65",
        "string",
        "timestamp",
        "timestamp[h]",
        "timestamp[]",
        "bytes",
        "bytes[0]",
        "bytes[-1]",
        "bytes[x]",
        "bytes[99999999]",
        "bytes[8",
        None,
        8,
        "i64\0",
        ["i64"],
    ],
)
def test_bad_types_are_refused_and_name_the_field(kind):
    with pytest.raises(SchemaError, match="price") as caught:
        Schema.of({"price": kind})
    assert caught.value.code == "bad_type"


def test_a_near_miss_is_suggested():
    with pytest.raises(SchemaError, match="did you mean 'i64'"):
        one("i46")
    with pytest.raises(SchemaError, match="campaign_id"):
        Schema.of({"campaign_id": "i64"}).field("campain_id")


@pytest.mark.parametrize("body", [None, [], {}, "x", 3, {"x": {}}])
def test_bad_definitions_are_refused(body):
    with pytest.raises(SchemaError):
        Schema.from_dict(body)


def test_limits_are_refused_with_the_limit():
    with pytest.raises(SchemaError, match="16384"):
        Schema.of({"a": "bytes[16384]", "b": "i8"})
    with pytest.raises(SchemaError, match="1024"):
        Schema.of({f"f{i}": "i8" for i in range(1025)})
    with pytest.raises(SchemaError, match="twice"):
        Schema.of([("a", "i8"), ("a", "i8")])


def test_types_without_a_fixed_size_are_refused_with_the_fix():
    with pytest.raises(SchemaError, match=r"bytes\[N\]"):
        Schema.from_arrow(pa.schema([("name", pa.string())]))
    for dtype in ([("x", "O")], [("x", "U4")], [("x", "<f2")], [("x", "<i4", (3,))], [("x", "M8[D]")], "<i8"):
        with pytest.raises(SchemaError):
            Schema.from_numpy(np.dtype(dtype))


# -- packing


def test_rows_of_the_right_dtype_are_not_copied():
    rows = np.zeros(3, dtype=ALL.dtype)
    assert ALL.pack(rows) is rows
    strided = np.zeros(6, dtype=ALL.dtype)[::2]
    assert ALL.pack(strided).flags.c_contiguous


def test_all_inputs_make_the_same_rows():
    rows = ALL.pack([ONE_ROW, ONE_ROW])
    columns = {name: rows[name] for name in ALL.names}
    table = pa.table(
        {
            name: pa.array(column.tolist(), ALL.to_arrow().field(name).type)
            for name, column in columns.items()
            if name != "z"
        }
        | {"z": pa.array([b"ab\0cd"] * 2, pa.binary())}
    )
    shuffled = {name: columns[name] for name in reversed(ALL.names)}
    for data in (
        columns,
        shuffled,
        table,
        table.to_batches()[0],
        table.combine_chunks(),
        rows[list(ALL.names)[::-1]],
    ):
        assert ALL.pack(data).tobytes() == rows.tobytes()
    assert rows[0].tolist() == tuple(ONE_ROW.values())


def test_frames_make_the_same_rows():
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    schema = Schema.of({"t": "timestamp[ms]", "k": "i32", "x": "f64", "ok": "bool", "tag": "bytes[4]"})
    times = np.array(["2024-01-01T00:00:00.001", "1969-12-31T23:59:59.999"], dtype="M8[ms]")
    columns = {"t": times, "k": [1, 2], "x": [0.1, -0.0], "ok": [True, False], "tag": ["ab", "ü"]}
    expected = schema.pack(
        [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    )
    assert expected["t"].tolist() == times.astype("i8").tolist()
    assert expected["tag"].tolist() == [b"ab", "ü".encode()]
    for frame in (pandas.DataFrame(columns), polars.DataFrame(columns)):
        assert schema.pack(frame).tobytes() == expected.tobytes()
    tokyo = pandas.Series(times).dt.tz_localize("UTC").dt.tz_convert("Asia/Tokyo")
    zoned = pandas.DataFrame(columns).assign(t=tokyo)
    assert schema.pack(zoned).tobytes() == expected.tobytes()


def test_no_rows_pack_to_no_rows():
    for nothing in (
        [],
        np.zeros(0, ALL.dtype),
        ALL.to_arrow().empty_table(),
        {name: [] for name in ALL.names},
    ):
        assert len(ALL.pack(nothing)) == 0


def test_times_keep_their_instant_across_units_and_zones():
    schema = one("timestamp[ms]")
    zoned = dt.datetime(2024, 1, 1, 1, 0, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    expected = 1_704_067_200_000
    assert schema.pack([{"x": zoned}])["x"].tolist() == [expected]
    assert schema.pack([{"x": dt.datetime(2024, 1, 1)}])["x"].tolist() == [expected]  # naive: UTC
    for unit in ("s", "us", "ns"):
        assert schema.pack({"x": np.array(["2024-01-01"], f"M8[{unit}]")})["x"].tolist() == [expected]
    arrow = pa.table({"x": pa.array([zoned], pa.timestamp("us", tz="Europe/Berlin"))})
    assert schema.pack(arrow)["x"].tolist() == [expected]


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("i8", np.array([128])),
        ("i8", np.array([-129])),
        ("u8", np.array([-1])),
        ("u64", np.array([-1])),
        ("i64", np.array([2**63], dtype="u8")),
        ("i32", np.array([2**31], dtype="u4")),
        ("i64", np.array([0.5])),
        ("i64", np.array([2.0**63])),
        ("i64", np.array([float("nan")])),
        ("i64", np.array([float("inf")])),
        ("u8", np.array([-0.5])),
        ("f32", np.array([0.1])),
        ("f32", np.array([1e300])),
        ("f32", np.array([2**24 + 1])),
        ("f64", np.array([2**53 + 1])),
        ("f64", np.array([2**63 - 1])),
        ("f64", np.array([2**64 - 1], dtype="u8")),
        ("timestamp[s]", np.array(["2024-01-01T00:00:00.5"], "M8[ms]")),
        ("timestamp[ns]", np.array(["2500-01-01"], "M8[s]")),
        ("bytes[2]", np.array([b"abc"])),
        ("bytes[2]", np.array(["éé"])),
        ("bytes[2]", np.array([b"abc"], dtype=object)),
        ("bytes[2]", np.array([b"ab\0"], dtype=object)),
        ("i8", np.array([128], dtype=object)),
        ("u64", np.array([2**64], dtype=object)),
        ("f32", np.array([1e300], dtype=object)),
        ("f64", np.array([2**53 + 1], dtype=object)),
        ("f64", np.array([10**400], dtype=object)),
        ("timestamp[ms]", np.array([dt.datetime(2024, 1, 1, 0, 0, 0, 1)], dtype=object)),
        ("timestamp[ns]", np.array([dt.datetime(2500, 1, 1)], dtype=object)),
    ],
)
def test_a_cast_that_changes_a_value_is_refused_with_a_fix(kind, column):
    with pytest.raises(SchemaError, match="'x'") as caught:
        one(kind).pack({"x": column})
    assert caught.value.code == "lossy_cast"
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("i8", np.array([127, -128])),
        ("i64", np.array([-(2.0**63), 3.0])),
        ("u64", np.array([2**63 - 1])),
        ("f32", np.array([0.5, float("inf"), float("-inf"), float("nan"), -0.0])),
        ("f64", np.array([2**53, -(2**53)])),
        ("f64", np.array([-(2**63)])),
        ("f64", np.array([0.1], dtype="f4")),
        ("i64", np.array([1], dtype=">i8")),
        ("f32", np.array([0.1], dtype=object)),
    ],
)
def test_a_cast_that_changes_nothing_is_done(kind, column):
    packed = one(kind).pack({"x": column})["x"]
    if column.dtype.kind != "O":
        np.testing.assert_array_equal(packed.astype(column.dtype), column)
    assert packed.dtype == np.dtype(one(kind).field("x").numpy)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        ("i64", np.array([True])),
        ("bool", np.array([1])),
        ("i64", np.array(["1"])),
        ("i64", np.array([b"1"])),
        ("i64", np.array([1j])),
        ("i64", np.array(["2024-01-01"], "M8[ms]")),
        ("i64", np.array(["x"], dtype=object)),
        ("i64", np.array([1.0], dtype=object)),
        ("i64", np.array([True], dtype=object)),
        ("bool", np.array([1], dtype=object)),
        ("bytes[4]", np.array([1])),
        ("bytes[4]", np.array([1], dtype=object)),
        ("timestamp[ms]", np.array(["2024"], dtype=object)),
        ("timestamp[ms]", np.array([1.5], dtype=object)),
        ("timestamp[ms]", np.array([dt.date(2024, 1, 1)], dtype=object)),
        ("f64", np.array(["1"], dtype=object)),
    ],
)
def test_a_wrong_type_is_refused_and_says_what_to_send(kind, column):
    with pytest.raises(SchemaError, match="'x'") as caught:
        one(kind).pack({"x": column})
    assert caught.value.code == "bad_value"
    assert caught.value.hint.startswith("send ")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("i64", pa.table({"x": pa.array([1, None])})),
        ("timestamp[ms]", {"x": np.array(["NaT"], "M8[ms]")}),
        ("i64", [{"x": None}]),
        ("bytes[3]", [{"x": None}]),
        ("timestamp[ms]", [{"x": None}]),
    ],
)
def test_nulls_are_refused(kind, data):
    with pytest.raises(SchemaError, match="null") as caught:
        one(kind).pack(data)
    assert caught.value.code == "null_value"


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "rows",
        b"rows",
        object(),
        [1],
        [None],
        [{"x": 1}, {"y": 1}],
        [{}],
        np.zeros(3),
        np.zeros((2, 2), [("x", "<i8")]),
        {"x": [1], "y": [2]},
        {"y": [1]},
        {},
        {"x": np.zeros((2, 2))},
        [{"x": 1, "y": 2}],
        [{"x": [1]}],
        [{"x": {}}],
    ],
    ids=lambda data: re.sub(" at 0x[0-9a-f]+", "", str(data)),  # the same in every run
)
def test_things_that_are_no_rows_are_refused(data):
    with pytest.raises(SchemaError):
        one("i64").pack(data)


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(SchemaError, match="lengths"):
        Schema.of({"x": "i64", "y": "i64"}).pack({"x": [1], "y": [1, 2]})


@settings(deadline=None)
@given(
    st.lists(st.integers(-(2**70), 2**70) | st.floats() | st.booleans() | st.none() | st.text() | st.binary())
)
def test_any_python_values_pack_exactly_or_raise_a_schema_error(values):
    for kind in ("i8", "u64", "f64", "bool", "bytes[3]", "timestamp[ns]"):
        try:
            packed = one(kind).pack([{"x": value} for value in values])
        except SchemaError:
            continue
        for value, kept in zip(values, packed["x"].tolist(), strict=True):
            if isinstance(value, str):
                value = value.encode()
            if isinstance(value, bytes):
                value = value.rstrip(b"\0")
            assert kept == value or (kept != kept and value != value)

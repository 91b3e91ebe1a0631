"""Arrow -> rows by native code: the same values as numpy would give, the same errors, and nothing read outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import flexstream as fs
from flexstream.cython_ext.produce.columns import pack_columns
from flexstream.errors import SchemaError
from flexstream.rows.from_arrow import packed_pieces

SCHEMA = fs.Stream(
    "s",
    {
        "t": "timestamp[ms]", "k": "i64", "a": "i8", "b": "u16", "c": "i32", "x": "f64", "y": "f32", "on": "bool",
        "word": "bytes[6]", "code": "bytes[4]",
    },
    key="k",
    time="t",
).schema  # fmt: skip
WORDS = ["", "a", "view", "clicks", "naïve"]


def columns(n: int, seed: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "t": pa.array(rng.integers(-(10**12), 10**12, n)).cast(pa.timestamp("ms")).cast(pa.timestamp("us", tz="UTC")),
        "k": rng.integers(-(2**63), 2**63 - 1, n),
        "a": pa.array(rng.integers(-128, 127, n), pa.int8()),
        "b": pa.array(rng.integers(0, 65535, n), pa.uint16()),
        "c": pa.array(rng.integers(-5, 5, n), pa.int16()),  # narrower than the field
        "x": rng.normal(size=n),
        "y": pa.array(rng.normal(size=n).astype("f4")),
        "on": pa.array(rng.integers(0, 2, n).astype(bool)),
        "word": pa.array(rng.choice(WORDS, n)),
        "code": pa.array([bytes(row) for row in rng.integers(1, 255, (n, 4), np.uint8)], pa.binary(4)),
    }


def expected(given: dict[str, Any]) -> np.ndarray:
    n = len(given["k"])
    rows = np.zeros(n, SCHEMA.dtype)
    for name, values in given.items():
        if name == "t":
            rows["t"] = np.array(pa.array(values).cast(pa.timestamp("us")).cast(pa.int64()).to_pylist(), int) // 1000
        elif name == "word":
            rows["word"] = [text.encode() for text in values.to_pylist()]
        else:
            rows[name] = values.to_pylist() if isinstance(values, pa.Array) else values
    return rows


@pytest.mark.parametrize("n", [0, 1, 2, 209, 210, 211, 5_000])
def test_rows_hold_the_values_of_all_columns(n: int) -> None:
    given = columns(n)
    packed = SCHEMA.pack(pa.record_batch(given))
    assert packed.tobytes() == expected(given).tobytes()


@pytest.mark.parametrize(("start", "length"), [(0, 7), (3, 100), (511, 1), (600, 400), (1000, 0)])
def test_a_slice_is_packed_from_where_it_begins(start: int, length: int) -> None:
    given = columns(1_000)
    packed = SCHEMA.pack(pa.record_batch(given).slice(start, length))
    assert packed.tobytes() == expected(given)[start : start + length].tobytes()


def test_a_table_of_many_chunks_keeps_its_order() -> None:
    parts = [columns(n, seed=n) for n in (5, 0, 300, 1)]
    table = pa.concat_tables([pa.table(part) for part in parts])
    assert SCHEMA.pack(table).tobytes() == b"".join(expected(part).tobytes() for part in parts)


@pytest.mark.parametrize("kind", ["dictionary", "small-dictionary", "large", "sliced-dictionary"])
def test_text_in_any_form_is_the_same(kind: str) -> None:
    given = columns(800)
    changed = dict(given)
    if kind == "dictionary":
        changed["word"] = given["word"].dictionary_encode()
    elif kind == "small-dictionary":
        changed["word"] = given["word"].dictionary_encode().cast(pa.dictionary(pa.int8(), pa.string()))
    elif kind == "large":
        changed["word"] = given["word"].cast(pa.large_string())
    else:
        longer = pa.concat_arrays([pa.array(["viewing too long"] * 3).slice(3), given["word"]])
        changed["word"] = pa.concat_arrays([longer, longer]).dictionary_encode().slice(800)
    assert SCHEMA.pack(pa.record_batch(changed)).tobytes() == expected(given).tobytes()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("field", ["s", "ms", "us", "ns"])
def test_timestamps_change_their_unit_or_are_refused(unit: str, field: str) -> None:
    schema = fs.Schema.of({"t": f"timestamp[{field}]"})
    units = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    seconds = [-3, 0, 1, 1_700_000_000]
    times = pa.array([second * units[unit] for second in seconds], pa.timestamp(unit, tz="Asia/Kolkata"))
    assert schema.pack(pa.record_batch({"t": times}))["t"].tolist() == [second * units[field] for second in seconds]
    if units[unit] > units[field]:
        odd = pa.array([*times.cast(pa.int64()).to_pylist(), -1], pa.timestamp(unit))
        with pytest.raises(SchemaError, match="'t'"):
            schema.pack(pa.record_batch({"t": odd}))


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("word", pa.array(["ok", "much too long"]), "much too long"),
        ("word", pa.array(["ok", "much too long"]).dictionary_encode(), "much too long"),
        ("word", pa.array(["ok", None]), "1 null"),
        ("word", pa.array(["ok", None]).dictionary_encode(), "1 null"),
        ("code", pa.array([b"12345", b"1234 "], pa.binary(5)), "12345"),
        ("code", pa.array([b"1234", b"1234\0"]), "1234"),
        ("b", pa.array([1, -1], pa.int16()), "-1"),
        ("c", pa.array([1, 2**40]), str(2**40)),
        ("t", pa.array([0, 1], pa.timestamp("us")), "round the column"),
        ("on", pa.array([0, 1]), "bool"),
    ],
)
def test_a_value_that_does_not_fit_is_named(name: str, values: Any, words: str) -> None:
    with pytest.raises(SchemaError) as caught:
        SCHEMA.pack(pa.record_batch({**columns(2), name: values}))
    assert f"'{name}'" in str(caught.value)
    assert words in f"{caught.value} {caught.value.hint}"


def test_types_are_checked_without_rows() -> None:
    with pytest.raises(SchemaError, match="'on'"):
        SCHEMA.pack(pa.record_batch({**columns(0), "on": pa.array([], pa.int64())}))


# -- the native part alone, with buffers that lie


def out(rows: int, row_bytes: int = 8) -> np.ndarray:
    return np.full(rows * row_bytes, 0xEE, np.uint8)


@pytest.mark.parametrize(
    "column",
    [
        ("copy", 0, 8, bytes(15), 0, 8),
        ("copy", 0, 8, bytes(16), 1, 8),
        ("copy", 4, 8, bytes(16), 0, 8),
        ("copy", 0, 4, bytes(16), 0, 8),
        ("divide", 0, bytes(15), 0, 1000),
        ("divide", 0, bytes(16), 0, 0),
        ("text", 0, 8, bytes(11), 0, b""),
        ("pick", 0, 8, bytes(7), 0, bytes(8)),
    ],
    ids=lambda column: column[0],
)
def test_buffers_that_are_too_short_are_refused(column: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"too short|outside|wider|divisor"):
        pack_columns(out(2), 8, [column])


@pytest.mark.parametrize("ends", [[0, 4, 99], [0, -1, 2], [-1, 0, 0], [3, 2, 4], [0, 2**31 - 1, 4]])
def test_offsets_that_lie_are_told(ends: list[int]) -> None:
    assert pack_columns(out(2), 8, [("text", 0, 8, np.array(ends, "<i4"), 0, b"abcd")]) == 0


@pytest.mark.parametrize("index", [-1, 2, 2**31 - 1, -(2**31)])
def test_indices_that_lie_are_told(index: int) -> None:
    table = np.frombuffer(b"AAAABBBB", np.uint8)
    fine = ("copy", 4, 4, bytes(8), 0, 4)
    assert pack_columns(out(2), 8, [fine, ("pick", 0, 4, np.array([0, index], "<i4"), 0, table)]) == 1


def test_what_is_shorter_than_its_field_is_filled_with_zeros() -> None:
    rows = out(2)
    found = [("copy", 0, 4, b"abcd", 0, 2), ("text", 4, 4, np.array([1, 1, 4], "<i4"), 0, b"zxyz")]
    assert pack_columns(rows, 8, found) == -1
    assert rows.tobytes() == b"ab\0\0\0\0\0\0cd\0\0xyz\0"


@pytest.mark.parametrize("room", [1, 7, 100, 1000])
def test_rows_in_pieces_are_the_rows_of_the_batch(room: int) -> None:
    table = pa.table(columns(300)).combine_chunks()
    batch = table.to_batches()[0].slice(23, 250)
    memory = np.empty(room, SCHEMA.dtype)
    pieces = [piece.copy() for piece in packed_pieces(SCHEMA, batch, memory)]
    assert max(map(len, pieces)) <= room
    assert np.array_equal(np.concatenate(pieces), SCHEMA.pack(batch))


def test_a_piece_that_does_not_fit_names_the_field() -> None:
    given = columns(300)
    given["word"] = pa.array(["fits"] * 299 + ["does not"])
    batch = pa.table(given).combine_chunks().to_batches()[0]
    found = []
    with pytest.raises(SchemaError, match="word"):
        found.extend(len(piece) for piece in packed_pieces(SCHEMA, batch, np.empty(100, SCHEMA.dtype)))
    assert found == [100, 100]


def test_text_of_up_to_eight_bytes_is_filled_with_zeros() -> None:
    schema = fs.Stream("s", {"t": "timestamp[ms]", "w": "bytes[8]"}, key="t", time="t").schema
    words = ["", "a", "12345678", "naïve", "\x00b", "", "xyz", "z"]  # the last ones end the buffer
    for given in (words, words[3:], [""], ["", ""], ["12345678"]):
        arrow = pa.record_batch({"t": np.arange(len(given)), "w": pa.array(given)})
        raw = schema.pack(arrow)["w"].tobytes()
        assert raw == b"".join(word.encode().ljust(8, b"\0") for word in given)
    with pytest.raises(SchemaError, match="w"):
        schema.pack(pa.record_batch({"t": [1, 2], "w": ["123456789", "x"]}))


def test_columns_too_short_for_the_rows_asked_for_are_not_read() -> None:
    values = np.arange(10)
    rows = np.zeros(5 * 8, np.uint8)
    column = ("copy", 0, 8, values.view(np.uint8), 0, 8)
    assert pack_columns(rows, 8, [column], 5) == -1
    assert rows.view(np.int64).tolist() == [5, 6, 7, 8, 9]
    with pytest.raises(ValueError, match="too short"):
        pack_columns(rows, 8, [column], 6)

"""Streams: definitions from everywhere, checked the same way."""

import json

import numpy as np
import pyarrow as pa
import pytest

from flexstream import SchemaError, Stream
from flexstream.errors import FlexStreamError

FIELDS = {"at": "timestamp[ms]", "user": "i64", "city": "bytes[4]", "price": "f64", "big": "u64"}


def shop(**changes):
    return Stream("shop", FIELDS, **{"key": "user", "time": "at", **changes})


def test_a_stream_knows_its_key_and_its_time():
    stream = shop(key=["city", "user"], max_disorder="1500us")
    assert stream.key == ("city", "user")
    assert (stream.time, stream.time_field.offset, stream.time_unit, stream.unit_ns) == (
        "at",
        0,
        "ms",
        1_000_000,
    )
    assert stream.max_disorder_ns == 1_500_000
    assert stream.max_disorder == 2  # rounded up: a row may come that late


def test_dict_json_and_toml_forms_come_back(tmp_path):
    stream = shop(key=["user", "city"], max_disorder="5s")
    assert Stream.from_dict(json.loads(json.dumps(stream.to_dict()))) == stream
    (tmp_path / "shop.json").write_text(json.dumps(stream.to_dict()))
    fields = "".join(f'{name} = "{kind}"\n' for name, kind in FIELDS.items())
    head = 'name = "shop"\nkey = ["user", "city"]\ntime = "at"\nmax_disorder = "5s"\n[fields]\n'
    (tmp_path / "shop.toml").write_text(head + fields)
    assert Stream.from_file(tmp_path / "shop.json") == stream
    assert Stream.from_file(str(tmp_path / "shop.toml")) == stream


def test_numpy_and_arrow_make_the_same_stream():
    dtype = [("at", "M8[ms]"), ("user", "<i8"), ("city", "S4"), ("price", "<f8"), ("big", "<u8")]
    assert Stream.from_numpy("shop", dtype, key="user", time="at") == shop()
    assert Stream.from_arrow("shop", shop().schema.to_arrow(), key="user", time="at") == shop()
    with_zone = shop().schema.to_arrow().set(0, pa.field("at", pa.timestamp("ms", "UTC")))
    assert Stream.from_arrow("shop", with_zone, key="user", time="at") == shop()


def test_equal_streams_hash_alike_and_different_ones_differ():
    assert len({shop(), shop(), shop(key="city"), shop(max_disorder="1s")}) == 3


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"key": "big"}, "bad_key"),
        ({"key": []}, "bad_key"),
        ({"key": ["user", "user"]}, "bad_key"),
        ({"key": "usr"}, "unknown_field"),
        ({"key": ["user", 3]}, "unknown_field"),
        ({"time": "user"}, "bad_time"),
        ({"time": "when"}, "unknown_field"),
        ({"time": None}, "unknown_field"),
        ({"max_disorder": "soon"}, "bad_duration"),
        ({"max_disorder": "-1s"}, "bad_duration"),
    ],
)
def test_bad_definitions_are_refused_with_a_code(change, code):
    with pytest.raises(FlexStreamError) as caught:
        shop(**change)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "name", ["", "a b", "../x", ".hidden", "-x", "é", "x" * 65, None, 3, "a/b", "a\0", "a\n"]
)
def test_names_that_could_not_be_file_names_are_refused(name):
    with pytest.raises(SchemaError) as caught:
        Stream(name, FIELDS, key="user", time="at")
    assert caught.value.code == "bad_name"


@pytest.mark.parametrize("name", ["group", "revision", "window_start", "window_end", "complete"])
def test_a_key_with_the_name_of_a_result_column_is_refused(name):
    with pytest.raises(SchemaError, match=name):
        Stream("s", {"at": "timestamp[s]", name: "i64"}, key=name, time="at")


def test_a_field_with_the_name_of_the_late_outputs_column_is_refused():
    with pytest.raises(SchemaError, match="watermark"):
        Stream("s", {"at": "timestamp[s]", "k": "i64", "watermark": "i64"}, key="k", time="at")


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        {},
        "shop",
        {"name": "x"},
        {**shop().to_dict(), "extra": 1},
        {**shop().to_dict(), "key": {"user": 1}},
        {**shop().to_dict(), "key": None},
        {**shop().to_dict(), "fields": []},
        {**shop().to_dict(), "time": ["at"]},
        {**shop().to_dict(), "max_disorder": None},
        {**shop().to_dict(), "name": ["shop"]},
    ],
)
def test_bad_dicts_are_refused(body):
    with pytest.raises(FlexStreamError):
        Stream.from_dict(body)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{"),
        ("a.json", b"\xff\xfe"),
        ("a.toml", b"name = "),
        ("a.toml", b"\xff"),
        ("a.yaml", b""),
        ("a.json", b"[" * 100_000),
        ("a.json", b"null"),
    ],
)
def test_bad_files_are_refused_and_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SchemaError):
        Stream.from_file(tmp_path / name)


def test_a_missing_file_is_refused_and_named(tmp_path):
    with pytest.raises(SchemaError, match=r"nothing\.toml"):
        Stream.from_file(tmp_path / "nothing.toml")
    (tmp_path / "dir.json").mkdir()
    with pytest.raises(SchemaError, match=r"dir\.json"):
        Stream.from_file(tmp_path / "dir.json")


def test_group_of_takes_any_rows_and_any_group_count():
    stream = shop(key=["user", "city"])
    dicts = [{"at": i, "user": i % 3, "city": "ab", "price": 0.5, "big": 1} for i in range(9)]
    groups = stream.group_of(dicts, np.int64(128))
    assert groups.tolist() == stream.group_of(stream.schema.pack(dicts), 128).tolist()
    assert len(set(groups.tolist())) == 3
    for bad in (0, -1, 65536, 1.5, None, True, "128"):
        with pytest.raises(SchemaError, match="groups"):
            stream.group_of(dicts, bad)

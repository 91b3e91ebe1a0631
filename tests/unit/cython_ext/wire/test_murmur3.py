"""Key -> group, against values that a real Spark gave (scripts/make_murmur3_golden.py)."""

import json
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from flexstream import Stream
from flexstream.cython_ext.wire import murmur3

GOLDEN = json.loads((Path(__file__).parents[3] / "data" / "murmur3_golden.json").read_text())
CASES = [pytest.param(case, id="-".join(case["types"])) for case in GOLDEN["cases"]]


def stream_of(types):
    # An odd leading byte, so that no key field is aligned.
    fields = {"lead": "u8", **{f"k{i}": kind for i, kind in enumerate(types)}, "at": "timestamp[ms]"}
    return Stream("golden", fields, key=[f"k{i}" for i in range(len(types))], time="at")


def rows_of(stream, case):
    rows = np.zeros(len(case["keys"]), dtype=stream.schema.dtype)
    raw = rows.view(np.uint8).reshape(len(rows), -1)
    for at, key in enumerate(case["keys"]):
        for name, value in zip(stream.key, key, strict=True):
            if isinstance(value, str):  # bits of floats, and bytes: copied raw, or numpy would quieten NaNs
                packed = np.frombuffer(bytes.fromhex(value), dtype=np.uint8)
                offset = stream.schema.field(name).offset
                raw[at, offset : offset + len(packed)] = packed
            else:
                rows[name][at] = value
    return rows


@pytest.mark.parametrize("case", CASES)
def test_hash_is_bit_exact_with_spark(case):
    stream = stream_of(case["types"])
    rows = rows_of(stream, case)
    hashes = murmur3.hashes(rows.view(np.uint8), len(rows), stream.schema.row_bytes, stream.key_hasher)
    assert hashes.tolist() == case["hash"]


@pytest.mark.parametrize("case", CASES)
def test_group_is_sparks_pmod_for_every_group_count(case):
    stream = stream_of(case["types"])
    rows = rows_of(stream, case)
    for column, groups in enumerate(GOLDEN["group_counts"]):
        ids = stream.group_of(rows, groups)
        assert ids.dtype == np.uint16
        assert ids.tolist() == [answer[column] for answer in case["groups"]], groups


def test_spark_confirmed_what_the_documentation_says():
    assert all(GOLDEN["claims"].values()), GOLDEN["claims"]


def reference_pmod(value, groups):
    return value % groups  # Python's % is pmod for a positive divisor


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 127, 128, 129, 32768, 65534, 65535])
def test_group_matches_pmod_of_the_hash_over_random_keys(groups):
    rng = np.random.default_rng(5)
    stream = Stream("s", {"k": "i64", "at": "timestamp[ms]"}, key="k", time="at")
    rows = np.zeros(5000, dtype=stream.schema.dtype)
    rows["k"] = rng.integers(-(2**63), 2**63 - 1, len(rows))
    hashes = murmur3.hashes(rows, len(rows), 16, stream.key_hasher).tolist()
    assert stream.group_of(rows, groups).tolist() == [reference_pmod(h, groups) for h in hashes]


def test_i64_and_timestamp_us_of_the_same_value_are_the_same_key():
    values = [-(2**63), -1, 0, 1, 2**63 - 1]
    plain = Stream("a", {"k": "i64", "at": "timestamp[us]"}, key="k", time="at")
    time = Stream("b", {"k": "i64", "at": "timestamp[us]"}, key="at", time="at")
    rows = np.array([(value, value) for value in values], dtype=plain.schema.dtype)
    assert plain.group_of(rows, 1000).tolist() == time.group_of(rows, 1000).tolist()


def test_bytes_hash_only_up_to_the_last_non_nul_byte():
    narrow = Stream("n", {"k": "bytes[4]", "at": "timestamp[s]"}, key="k", time="at")
    wide = Stream("w", {"k": "bytes[30]", "at": "timestamp[s]"}, key="k", time="at")
    keys = [b"", b"a", b"ab", b"abc", b"abcd", b"\0\0\0x"]
    groups = [
        s.group_of(np.array([(k, 0) for k in keys], dtype=s.schema.dtype), 65535).tolist()
        for s in (narrow, wide)
    ]
    assert groups[0] == groups[1]


def test_no_rows_have_no_groups():
    stream = stream_of(["i64"])
    assert stream.group_of(np.zeros(0, dtype=stream.schema.dtype), 128).tolist() == []


@pytest.mark.parametrize(
    ("n", "row_bytes"), [(3, 17), (-1, 17), (2, 0), (2, -5), (2**62, 17), (1, 8), (1, 2**62)]
)
def test_rows_that_do_not_fit_the_buffer_are_refused(n, row_bytes):
    stream = stream_of(["i64"])  # 17 bytes a row, the key ends at byte 9
    buffer = np.zeros(2 * 17, dtype=np.uint8)
    for call in (
        lambda: murmur3.group_ids(buffer, n, row_bytes, stream.key_hasher, 4),
        lambda: murmur3.hashes(buffer, n, row_bytes, stream.key_hasher),
    ):
        with pytest.raises(ValueError, match="bytes"):
            call()


@pytest.mark.parametrize("groups", [0, -1, 65536, 2**40])
def test_group_counts_out_of_range_are_refused(groups):
    stream = stream_of(["i64"])
    with pytest.raises(ValueError, match="groups"):
        murmur3.group_ids(b"\0" * 17, 1, 17, stream.key_hasher, groups)


def test_nonsense_arguments_are_refused_and_not_fatal():
    stream = stream_of(["i64"])
    for rows, hasher in (
        (None, stream.key_hasher),
        (7, stream.key_hasher),
        (b"\0" * 17, None),
        (b"\0" * 17, "key"),
    ):
        with pytest.raises((TypeError, BufferError)):
            murmur3.group_ids(rows, 1, 17, hasher, 4)
    strided = np.zeros((4, 40), dtype=np.uint8)[:, ::2]
    with pytest.raises((ValueError, BufferError)):
        murmur3.group_ids(strided, 1, 17, stream.key_hasher, 4)


def test_threads_agree_on_the_groups():
    stream = stream_of(["i64", "bytes[20]"])
    rows = np.zeros(20_000, dtype=stream.schema.dtype)
    rows["k0"] = np.arange(len(rows))
    expected = stream.group_of(rows, 128).tolist()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(stream.group_of(rows, 128).tolist())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_floats_in_the_golden_file_include_the_hard_ones():
    bits = {key[0] for case in GOLDEN["cases"] if case["types"] == ["f64"] for key in case["keys"]}
    assert struct.pack("<d", -0.0).hex() in bits
    assert struct.pack("<Q", 0x7FF0000000000001).hex() in bits

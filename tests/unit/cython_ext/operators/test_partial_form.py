"""What is said to records that are not as they were written: always what is wrong, never a pane, never memory lost."""

from __future__ import annotations

import random
import struct
import time
from contextlib import contextmanager

import numpy as np
import pytest

import flexstream as fs
from flexstream.cython_ext.testing.partial_probe import PartialProbe
from flexstream.cython_ext.wire.crc32c import crc32c

HEAD = struct.Struct("<IHHIIQQqQQ")  # magic, version, kind, crc, n, bytes, layout, start, rows, flags
FIELDS = ("magic", "version", "kind", "crc", "n", "bytes", "layout", "start", "rows", "flags")
BLOCK = struct.Struct("<QQQ")  # entries, rows, stride
STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i64", "x": "i64"}, key="k", time="t", max_disorder="1000s")
KEYS = 12


def query_of(lateness="0s", **aggregates):
    aggregates = aggregates or {"n": fs.count(), "total": fs.sum("x"), "values": fs.distinct("x"), "m": fs.median("x")}
    return STREAM.query("q").window(fs.sliding("20s", every="10s"), allowed_lateness=lateness).agg(**aggregates)


@contextmanager
def state_of(query, rows=None):
    """A query's state on a worker at rest, with some rows, and a probe."""
    if rows is None:
        rows = np.zeros(60, STREAM.schema.dtype)
        rows["k"], rows["x"], rows["t"] = np.arange(60) % KEYS, np.arange(60) % 7, np.arange(60) % 10
    probe = PartialProbe()
    with fs.Engine(workers=1, groups=1, pin=False, compile="off") as engine:
        engine.submit(query)
        engine.feed("s", rows, watermark=False)
        engine.flush()
        engine._parts.round_trips.wait_for_workers(time.monotonic() + 60)
        yield engine.running()[1][0].states[0], probe


@pytest.fixture(scope="module")
def image():
    with state_of(query_of()) as (state, probe):
        (record,) = probe.images(state, 0)
        yield state, probe, record


def with_crc(record: bytes) -> bytes:
    clean = record[:8] + bytes(4) + record[12:]
    return clean[:8] + struct.pack("<I", crc32c(clean)) + clean[12:]


def forged(record: bytes, **changes: int) -> bytes:
    """Fields of the head changed, and the CRC right."""
    head = dict(zip(FIELDS, HEAD.unpack_from(record), strict=True)) | changes
    return with_crc(HEAD.pack(*head.values()) + record[HEAD.size :])


def patched(record: bytes, at: int, *words: int) -> bytes:
    return with_crc(record[:at] + struct.pack(f"<{len(words)}Q", *words) + record[at + 8 * len(words) :])


def blocks(record: bytes) -> list[tuple[int, int, int]]:
    """(where its entries begin, how many, their stride) of all blocks."""
    found, at = [], HEAD.size
    while at < len(record):
        entries, _, stride = BLOCK.unpack_from(record, at)
        found.append((at + BLOCK.size, entries, stride))
        at += BLOCK.size + entries * stride
    return found


def test_the_record_is_laid_out_as_its_page_says(image):
    state, probe, record = image
    head = dict(zip(FIELDS, HEAD.unpack_from(record), strict=True))
    assert (head["version"], head["kind"], head["n"], head["bytes"], head["start"]) == (1, 1, 1, len(record), 0)
    assert head["rows"] == 60
    assert [(entries, stride) for _, entries, stride in blocks(record)] == [(KEYS, 8 * 7), (60, 24), (60, 32)]
    assert with_crc(record) == record
    assert probe.read(state, record) == "ok"
    assert probe.read(state, record + b"more") == "ok"


def test_a_buffer_that_is_too_small_is_told_how_much_is_enough(image):
    state, probe, record = image
    status, size = probe.room_needed(state, 0, 0)
    assert status == "room"
    assert size >= len(record)
    assert probe.room_needed(state, 0, size - 1) == ("room", size)
    assert probe.room_needed(state, 0, size) == ("ok", len(record))


def test_any_bit_that_flips_is_noticed(image):
    state, probe, record = image
    rnd = random.Random("flips")
    places = [*range(8 * HEAD.size), *(rnd.randrange(8 * len(record)) for _ in range(4_000))]
    said = set()
    for place in places:
        broken = bytearray(record)
        broken[place // 8] ^= 1 << place % 8
        said.add(probe.read(state, bytes(broken)))
    assert "ok" not in said
    assert said == {"foreign", "version", "damaged", "lengths", "truncated"}
    assert probe.in_use == 0


def test_any_end_that_is_missing_is_noticed(image):
    state, probe, record = image
    assert {probe.read(state, record[:n]) for n in range(len(record))} == {"truncated"}
    assert probe.in_use == 0


def test_noise_is_no_record(image):
    state, probe, record = image
    rnd = random.Random("noise")
    for _ in range(2_000):
        noise = rnd.randbytes(rnd.randrange(3 * HEAD.size))
        assert probe.read(state, noise) in ("foreign", "truncated")
        assert probe.read(state, record[:4] + noise) in ("truncated", "version", "foreign", "lengths", "damaged")
    assert probe.read_unaligned(state, record) == "unaligned"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "version"),
        ({"version": 0}, "version"),
        ({"kind": 2}, "foreign"),
        ({"layout": 1}, "layout"),
        ({"n": 0}, "counts"),
        ({"n": 2}, "lengths"),
        ({"n": 2**32 - 1}, "lengths"),
        ({"rows": 59}, "counts"),
        ({"rows": 2**63}, "counts"),
        ({"flags": 2}, "counts"),
        ({"start": 3}, "pane"),
        ({"bytes": 0}, "lengths"),
        ({"bytes": 2**64 - 8}, "truncated"),
        ({"bytes": 57}, "lengths"),
    ],
    ids=str,
)
def test_a_head_that_lies_is_not_believed_though_its_crc_is_right(image, changes, said):
    state, probe, record = image
    assert probe.read(state, forged(record, **changes)) == said
    assert probe.in_use == 0


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((0, 0), {"lengths", "counts"}),
        ((2**64 - 1, 60), {"lengths"}),
        ((2**61, 60), {"lengths"}),
        ((2**59, 60), {"lengths"}),
        ((None, 61), {"counts"}),
        ((None, 60, 8), {"lengths"}),
        ((None, 60, 0), {"lengths"}),
        ((None, 60, 2**63), {"lengths"}),
    ],
    ids=str,
)
def test_a_block_that_lies_is_not_believed(image, block, words, said):
    state, probe, record = image
    begin, entries, _ = blocks(record)[block]
    changed = [entries if word is None else word for word in words]
    assert probe.read(state, patched(record, begin - BLOCK.size, *changed)) in said
    assert probe.in_use == 0


@pytest.mark.parametrize("block", [0, 1, 2])
def test_entries_that_are_unused_empty_twice_or_out_of_order_are_not_believed(image, block):
    state, probe, record = image
    begin, entries, stride = blocks(record)[block]
    first = record[begin : begin + stride]
    second = record[begin + stride : begin + 2 * stride]
    rows = struct.unpack_from("<Q", first)[0]
    for word in (0, rows & (2**62 - 1), 1 << 63):  # nothing there, not in use, no rows
        assert probe.read(state, patched(record, begin, word)) == "entries"
    for pair in (second + first, first + first):
        assert probe.read(state, with_crc(record[:begin] + pair + record[begin + 2 * stride :])) == "entries"
    dirty = patched(record, begin, rows | 1 << 62)
    assert probe.read(state, dirty) == ("ok" if block == 0 else "entries")
    most = with_crc(record[:begin] + b"".join(
        struct.pack("<Q", 2**63 | 2**62 - 1) + record[at + 8 : at + stride]
        for at in range(begin, begin + entries * stride, stride)
    ) + record[begin + entries * stride :])  # fmt: skip
    assert probe.read(state, most) == "counts", "rows whose sum leaves 64 bits"
    assert probe.in_use == 0


@pytest.mark.parametrize(("block", "word"), [(0, 4), (0, 5), (0, 6), (2, 3)])
def test_a_word_that_only_a_firing_uses_is_not_believed(image, block, word):
    """Values that windows count, medians, chains: who followed such a chain would read anything."""
    state, probe, record = image
    begin, entries, stride = blocks(record)[block]
    at = begin + (entries - 1) * stride + 8 * word
    assert record[at : at + 8] == bytes(8)
    assert probe.read(state, patched(record, at, 0x4141414141414140)) == "entries"
    assert probe.in_use == 0


def test_values_of_a_key_that_no_part_has_are_not_believed(image):
    """The last of the keys becomes a later one that nobody knows: order and sums are as they should be."""
    state, probe, record = image
    begin, entries, stride = blocks(record)[0]
    at = begin + (entries - 1) * stride + 8
    golden = 0x9E3779B97F4A7C15
    key = pow(golden, -1, 1 << 64) * (2**64 - 1) % 2**64  # the greatest hash
    assert probe.read(state, patched(record, at, key)) == "orphan"
    assert probe.in_use == 0


@pytest.mark.parametrize(
    "other",
    [
        query_of(n=fs.count()),
        query_of(n=fs.count(), total=fs.sum("x"), values=fs.distinct("x"), m=fs.mode("x")),
        query_of(total=fs.sum("x"), n=fs.count(), values=fs.distinct("x"), m=fs.median("x")),
        query_of("1s"),
        STREAM.query("q").window(fs.tumbling("10s")).agg(**query_of().aggregates),
    ],
    ids=str,
)
def test_the_record_of_another_layout_is_refused(image, other):
    _, _, record = image
    with state_of(other) as (state, probe):
        assert probe.read(state, record) == "layout"


def test_where_fields_lie_in_a_row_does_not_matter(image):
    _, _, record = image
    fields = {"x": "i64", "pad": "bytes[3]", "k": "i64", "t": "timestamp[s]"}
    other = fs.Stream("s", fields, key="k", time="t", max_disorder="1000s")
    query = other.query("q").window(fs.sliding("20s", every="10s")).agg(**query_of().aggregates)
    with state_of(query, np.zeros(3, other.schema.dtype)) as (elsewhere, another):
        assert another.again(elsewhere, record) == record


def test_a_pane_that_the_arena_has_no_room_for_is_not_made():
    rows = np.zeros(20_000, STREAM.schema.dtype)
    rows["k"], rows["x"] = np.arange(20_000), np.arange(20_000)
    with state_of(query_of(), rows) as (state, probe):
        (record,) = probe.images(state, 0)
        for cap in (1 << 17, 1 << 20, 3 << 20):
            small = PartialProbe(cap)
            assert small.read(state, record) == "full"
            assert small.in_use == 0
        assert probe.read(state, record) == "ok"


def test_a_position_says_what_is_wrong_with_it():
    with state_of(query_of("100s")) as (state, probe):
        record = probe.position(state, 0)
        assert probe.read_position(state, 0, record) == "ok"
        for n in range(len(record)):
            assert probe.read_position(state, 0, record[:n]) == "truncated"
        for place in range(8 * len(record)):
            broken = bytearray(record)
            broken[place // 8] ^= 1 << place % 8
            assert probe.read_position(state, 0, bytes(broken)) != "ok"
        assert probe.read_position(state, 0, forged(record, n=0)) == "lengths"
        assert probe.read_position(state, 0, forged(record, n=2**32 - 1)) == "lengths"
        assert probe.read_position(state, 0, forged(record, rows=1)) == "counts"
        assert probe.read_position(state, 0, patched(record, HEAD.size + 32, 2**40)) == "counts", "usual keys"
        assert probe.read_position(state, 0, patched(record, HEAD.size + 40, 70)) == "pane"
        assert probe.read_position(state, 0, probe.images(state, 0)[0]) == "foreign"

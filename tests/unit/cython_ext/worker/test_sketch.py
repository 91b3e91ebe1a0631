"""The heaviest keys of a group: named when they are there, not named when they are not, in bounded memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import flexstream as fs
from flexstream.balance.group_loads import plain
from flexstream.cython_ext.worker.sketch import KeySketch

STREAM = fs.Stream("s", {"t": "timestamp[ms]", "k": "i64", "v": "i32"}, key="k", time="t")
COUNTERS = 16


def rows_of(keys: np.ndarray, stream: fs.Stream = STREAM) -> np.ndarray:
    rows = np.zeros(len(keys), stream.schema.dtype)
    rows["k"] = keys
    return rows


def add(sketch: KeySketch, rows: np.ndarray, group: int = 0, batch: int = 512) -> None:
    for start in range(0, len(rows), batch):
        sketch.add(group, rows[start : start + batch].tobytes(), rows.dtype.itemsize)


@pytest.mark.parametrize("share", [0.9, 0.4, 0.15])
def test_a_heavy_key_is_first_and_its_share_is_about_right(share: float) -> None:
    rng = np.random.default_rng(int(share * 100))
    keys = rng.integers(0, 1_000_000, 400_000)
    keys[rng.random(len(keys)) < share] = 90210
    sketch = KeySketch(STREAM, 4)
    add(sketch, rows_of(keys))
    sampled, found = sketch.read(0)
    assert found[0][0] == 90210
    assert found[0][1] / sampled == pytest.approx(share, abs=0.08)


def test_without_a_heavy_key_none_has_much() -> None:
    keys = np.random.default_rng(1).integers(0, 1_000_000, 400_000)
    sketch = KeySketch(STREAM, 1)
    add(sketch, rows_of(keys))
    sampled, found = sketch.read(0)
    assert sampled > 250
    assert all(count < 0.05 * sampled for _, count in found)


def test_several_heavy_keys_are_ranked() -> None:
    rng = np.random.default_rng(2)
    keys = rng.choice([1, 2, 3, 4], 500_000, p=[0.4, 0.3, 0.2, 0.1])
    sketch = KeySketch(STREAM, 1)
    add(sketch, rows_of(keys))
    assert [key for key, _ in sketch.read(0)[1]] == [1, 2, 3, 4]


def test_it_speaks_of_the_recent_past() -> None:
    sketch = KeySketch(STREAM, 1)
    add(sketch, rows_of(np.full(400_000, 1)))
    add(sketch, rows_of(np.full(600_000, 2)))
    sampled, found = sketch.read(0)
    assert found[0][0] == 2
    assert found[0][1] > 0.7 * sampled


def test_about_one_row_in_1024_is_sampled_whatever_the_batches() -> None:
    for batch in (7, 64, 1000, 5000):
        sketch = KeySketch(STREAM, 1)
        add(sketch, rows_of(np.zeros(400_000, np.int64)), batch=batch)
        assert 300 < sketch.read(0)[0] < 500, batch


def test_groups_are_apart_and_an_empty_one_is_empty() -> None:
    sketch = KeySketch(STREAM, 3)
    add(sketch, rows_of(np.full(20_000, 5)), group=0)
    add(sketch, rows_of(np.full(20_000, 6)), group=2)
    assert [key for key, _ in sketch.read(0)[1]] == [5]
    assert sketch.read(1) == (0, [])
    assert [key for key, _ in sketch.read(2)[1]] == [6]


def test_keys_of_all_kinds_come_back_as_they_were() -> None:
    kinds = {"a": "bytes[5]", "b": "i16", "c": "f64", "d": "timestamp[s]", "e": "bool"}
    stream = fs.Stream("mixed", {"t": "timestamp[ms]", **kinds}, key=list(kinds), time="t")
    rows = np.zeros(20_000, stream.schema.dtype)
    rows["a"], rows["b"], rows["c"], rows["d"], rows["e"] = b"ab", -3, 2.5, 7, True
    sketch = KeySketch(stream, 1)
    add(sketch, rows)
    (key, _), *others = sketch.read(0)[1]
    assert not others
    assert (key[0], key[1], key[2], bool(key[4])) == (b"ab", -3, 2.5, True)
    assert plain(key)[0] == "ab"


def test_keys_that_differ_only_in_a_later_field_are_two() -> None:
    stream = fs.Stream("two", {"t": "timestamp[ms]", "k": "i64", "x": "i64"}, key=["k", "x"], time="t")
    rows = np.zeros(40_000, stream.schema.dtype)
    rows["x"][::2] = 1
    sketch = KeySketch(stream, 1)
    add(sketch, rows)
    assert sorted(key for key, _ in sketch.read(0)[1]) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("group", [3, 2**32 - 1])
def test_a_group_that_is_not_there_is_refused(group: int) -> None:
    sketch = KeySketch(STREAM, 3)
    with pytest.raises(ValueError, match="group"):
        sketch.read(group)
    with pytest.raises(ValueError, match="group"):
        sketch.add(group, b"", STREAM.schema.row_bytes)


def test_many_groups_and_long_keys_take_memory_only_where_there_are_rows() -> None:
    stream = fs.Stream("long", {"t": "timestamp[ms]", "k": "bytes[1000]"}, key="k", time="t")
    sketch = KeySketch(stream, 65_534)  # a gigabyte of addresses, a few pages of memory
    rows = np.zeros(8_000, stream.schema.dtype)
    rows["k"] = b"x" * 1000
    add(sketch, rows, group=65_533)
    assert [key for key, _ in sketch.read(65_533)[1]] == [b"x" * 1000]


def test_a_reader_never_pairs_a_key_with_anothers_count() -> None:
    """Light keys come and go all the time, and each has a count near 0; the heavy one is never mistaken for one."""
    rng = np.random.default_rng(4)
    keys = rng.integers(0, 1 << 40, 200_000)
    keys[rng.random(len(keys)) < 0.5] = 7
    rows, sketch, done = rows_of(keys), KeySketch(STREAM, 1), threading.Event()

    def write() -> None:
        while not done.is_set():
            add(sketch, rows, batch=20_000)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(2_000):
            sampled, found = sketch.read(0)
            assert len({key for key, _ in found}) == len(found) <= COUNTERS
            if sampled > 200:
                assert found[0][0] == 7
    finally:
        done.set()
        writer.join()

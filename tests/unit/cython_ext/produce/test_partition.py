"""Rows by group: each row once, with its group, in its order."""

from __future__ import annotations

import numpy as np
import pytest

import flexstream as fs
from flexstream.cython_ext.produce.partition import by_group
from flexstream.cython_ext.wire.murmur3 import group_ids


@pytest.mark.parametrize("groups", [1, 2, 7, 128, 1000])
@pytest.mark.parametrize("padding", [1, 3, 16, 47, 200, 2000])
@pytest.mark.parametrize("key", ["i64", "bytes[5]"])
def test_every_row_goes_to_its_group_and_rows_of_a_group_keep_their_order(groups: int, padding: int, key: str) -> None:
    fields = {"t": "timestamp[ms]", "k": key, "filling": f"bytes[{padding}]"}
    stream = fs.Stream("s", fields, key="k", time="t")
    rng = np.random.default_rng(groups + padding)
    rows = np.zeros(3000, stream.schema.dtype)
    rows["t"] = np.arange(len(rows))
    rows["k"] = rng.integers(0, 500, len(rows)).astype("S5" if key != "i64" else "i8")
    rows["filling"] = b"x"
    flat = rows.view(np.uint8)
    row_bytes = stream.schema.row_bytes

    ordered, offsets = by_group(flat, row_bytes, stream.key_hasher, groups)

    ids = group_ids(flat, len(rows), row_bytes, stream.key_hasher, groups)
    assert (ordered.view(rows.dtype) == rows[np.argsort(ids, kind="stable")]).all()
    assert (np.diff(offsets.astype(np.int64)) == np.bincount(ids, minlength=groups)).all()


def test_no_rows_are_no_rows() -> None:
    stream = fs.Stream("s", {"t": "timestamp[ms]", "k": "i64"}, key="k", time="t")
    ordered, offsets = by_group(np.empty(0, np.uint8), 16, stream.key_hasher, 4)
    assert len(ordered) == 0
    assert offsets.tolist() == [0] * 5

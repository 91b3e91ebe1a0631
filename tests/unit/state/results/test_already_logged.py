"""Results and late rows that a log holds are left out when they come again, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

import flexstream as fs
from flexstream.results.result_rows import LateRows, ResultRows
from flexstream.state.results.already_logged import KnownLate, KnownResults
from flexstream.state.results.result_log import ResultLog

KEYS = {"a": "i64", "b": "bytes[5]", "c": "bool", "d": "f64", "e": "u8", "f": "timestamp[us]"}


def results_of(names: list[str], n: int, seed: int = 1) -> tuple[fs.Query, ResultRows, np.ndarray, list[str]]:
    fields = {"t": "timestamp[ms]", **{name: KEYS[name] for name in names}}
    stream = fs.Stream("s", fields, key=names, time="t")
    query = stream.query("q").window(fs.tumbling("10ms")).agg(n=fs.count(), late=fs.max("t"))
    rows = ResultRows(query.bound())
    rng = np.random.default_rng(seed)
    table = np.zeros(n, rows.dtype)
    for name in names:
        table[name] = rng.integers(0, 2 if name == "c" else 9, n).astype(table[name].dtype)
    if "b" in names:
        table["b"] = rng.choice(np.array([b"", b"a", b"a\0b", b"\0x", b"zzzzz"], "S5"), n)
    table["window_start"] = rng.integers(-3, 9, n) * 10
    table["window_end"] = table["window_start"] + 10
    table["group"] = rng.integers(0, 128, n)
    table["revision"] = rng.integers(0, 3, n)
    table["n"] = rng.integers(0, 1000, n)
    identity = [name for name in rows.dtype.names if name not in ("n", "late", "window_end")]
    return query, rows, table, identity


@pytest.mark.parametrize("names", [["a"], ["b"], ["c", "e"], ["d", "b", "f"], list(KEYS)], ids=",".join)
def test_what_is_known_is_left_out_by_its_identity(names: list[str]) -> None:
    _, rows, table, identity = results_of(names, 3000)
    log = ResultLog(None, rows.schema)
    half, fresh = table[:1500], table[1500:]
    for start in range(0, 1500, 400):
        log.append(rows.batch(half[start : start + 400].tobytes()))
    known = KnownResults(log, rows.dtype, identity, -(2**62))
    changed = half.copy()
    changed["n"] += 1  # the value is not the identity
    assert known.without(changed.tobytes()) == b""

    seen = {tuple(row[name].tobytes() for name in identity) for row in half}
    expected = [row for row in fresh if tuple(row[name].tobytes() for name in identity) not in seen]
    assert known.without(fresh.tobytes()) == b"".join(row.tobytes() for row in expected)
    assert len(expected) > 0
    again = np.concatenate([fresh, half])
    assert known.without(again.tobytes()) == b"".join(row.tobytes() for row in expected)


def test_windows_that_end_before_are_not_looked_for() -> None:
    _, rows, table, identity = results_of(["a"], 500)
    log = ResultLog(None, rows.schema)
    log.append(rows.batch(table.tobytes()))
    known = KnownResults(log, rows.dtype, identity, 40)
    old = table[table["window_end"] <= 40]
    assert known.without(old.tobytes()) == old.tobytes()
    assert known.without(table[table["window_end"] > 40].tobytes()) == b""


def test_an_empty_log_knows_nothing() -> None:
    _, rows, table, identity = results_of(["a"], 50)
    known = KnownResults(ResultLog(None, rows.schema), rows.dtype, identity, 0)
    assert known.without(table.tobytes()) == table.tobytes()
    assert len(known) == 0


def test_of_equal_late_rows_as_many_are_left_out_as_the_log_has() -> None:
    stream = fs.Stream("s", {"t": "timestamp[ms]", "k": "bytes[3]", "ok": "bool"}, key="k", time="t")
    late = LateRows(stream)
    rows = np.zeros(6, late.of_query)
    rows["row"]["t"] = [1, 1, 1, 2, 3, 4]
    rows["row"]["k"] = b"a"
    rows["row"]["ok"] = [True, True, True, False, True, True]
    rows["watermark"] = 10
    log = ResultLog(None, late.schema)
    for places in ([5], [0, 1, 3]):
        written = np.zeros(6, late.dtype)
        written["row"], written["watermark"] = rows["row"], rows["watermark"]
        log.append(late.public(late.batch(written, 0, np.ones(6, np.uint64)), np.array(places)))
    known = KnownLate(log, late.of_query, 1)
    assert known.fresh(rows[:4]).tolist() == [False, False, True, False]
    assert known.fresh(rows[:4]).all()
    assert known.fresh(rows[5:]).all(), "that one is before the offset"

"""The log of a stream's late rows: who a row is for, in every state that the log can be in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import ResultLogError
from flexstream.results.late_log import LateLog
from flexstream.results.query_late import QueryLate
from flexstream.results.result_rows import LateRows

STREAM = fs.Stream("s", {"t": "timestamp[ms]", "k": "i32", "x": "i64"}, key="k", time="t")
ROWS = LateRows(STREAM)


def native(xs: Any, masks: Any) -> bytes:
    """Rows as a worker writes them, `masks` by slot."""
    table = np.zeros(len(xs), ROWS.dtype)
    table["row"]["x"] = xs
    table["mask"] = masks
    return table.tobytes()


def seen(late: QueryLate, offset: int | None = None) -> list[int]:
    begin = late.first_offset if offset is None else offset
    return [x for batch in late.read(begin) for x in batch.column("x").to_pylist()]


def opened(directory: Path | None, **options: Any) -> LateLog:
    return LateLog("s", ROWS, directory, **options)


@pytest.mark.parametrize("disk", [True, False])
def test_slots_are_the_workers_own(tmp_path: Path, disk: bool) -> None:
    log = opened(tmp_path / "s" if disk else None)
    a, b = log.open("a", "p"), log.open("b", "p")
    log.seat(0, 0, a)
    log.seat(0, 1, b)
    log.seat(1, 0, b)
    log.seat(1, 5, a)
    log.write(0, native([1, 2, 3], [1, 2, 3]))
    log.write(1, native([4, 5, 6], [1, 32, 33]))
    log.write(2, native([7], [1]))
    assert (seen(a), seen(b)) == ([1, 3, 5, 6], [2, 3, 4, 6])
    assert log.log.next_offset == 6, "each row once, and none that is for nobody"
    log.seat(1, 5, None)
    log.write(1, native([8], [33]))
    assert (seen(a), seen(b)) == ([1, 3, 5, 6], [2, 3, 4, 6, 8])
    log.close()


def test_more_queries_than_a_word_has_bits(tmp_path: Path) -> None:
    log = opened(tmp_path / "s")
    many = [log.open(f"q{number}", "p") for number in range(150)]
    for number, late in enumerate(many):
        log.seat(number // 50, number % 50, late)
    for worker in range(3):
        log.write(worker, native([worker, 9], [(1 << 50) - 1, 2]))
    assert [seen(late) for late in many] == [
        [number // 50, 9] if number % 50 == 1 else [number // 50] for number in range(150)
    ]
    log.close()
    again = opened(tmp_path / "s")
    assert [seen(again.open(f"q{number}", "p")) for number in (0, 51, 149)] == [[0], [1, 9], [2]]
    again.close()


def test_small_segments_and_the_bound_count_each_querys_own_rows(tmp_path: Path) -> None:
    log = opened(tmp_path / "s", retention_bytes=300_000)
    a, b = log.open("a", "p"), log.open("b", "p")
    log.seat(0, 0, a)
    log.seat(0, 1, b)
    expected: dict[str, list[int]] = {"a": [], "b": []}
    rng = np.random.default_rng(3)
    for number in range(200):
        xs = np.arange(100 * number, 100 * number + 100)
        masks = rng.integers(1, 4, 100)
        log.write(0, native(xs, masks))
        expected["a"].extend(xs[masks & 1 == 1])
        expected["b"].extend(xs[masks & 2 == 2])
        if number % 37 == 0:
            log.close()
            log = opened(tmp_path / "s", retention_bytes=300_000)
            b, a = log.open("b", "p"), log.open("a", "p")
            log.seat(0, 0, a)
            log.seat(0, 1, b)
    assert len(log.log.plans) > 2
    for late in (a, b):
        rows = expected[late.name]
        first = late.first_offset
        assert 0 < first < late.next_offset == len(rows)
        assert seen(late) == rows[first:]
        for offset in rng.integers(first, len(rows), 30):
            assert late.read(int(offset), 3)[0].column("x")[0].as_py() == rows[int(offset)]
        with pytest.raises(ResultLogError, match=f"starts at {first}"):
            late.read(first - 1)
    log.close()


def test_an_expired_segment_does_not_change_what_offsets_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path / "s", retention_s=100.0)
    now = [1000.0]
    monkeypatch.setattr(log.log, "_clock", lambda: now[0])
    a, b = log.open("a", "p"), log.open("b", "p")
    log.seat(0, 0, a)
    log.seat(0, 1, b)
    log.write(0, native([1, 2, 3], [1, 3, 1]))
    now[0] += 200
    assert a.enforce_retention() == 1
    assert (a.first_offset, a.next_offset, b.first_offset, b.next_offset) == (3, 3, 1, 1)
    log.write(0, native([4, 5], [3, 2]))
    assert (seen(a), seen(b, 1)) == ([4], [4, 5])
    log.close()
    log = opened(tmp_path / "s", retention_s=100.0)
    assert log.open("b", "p").next_offset == 3
    log.close()


def test_what_the_disk_refuses_is_written_later_and_not_for_who_left_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path / "s")
    a, b = log.open("a", "p"), log.open("b", "p")
    log.seat(0, 0, a)
    log.seat(0, 1, b)
    log.write(0, native([1], [3]))

    def refuse(batch: object) -> int:
        raise ResultLogError("no room", code="disk_full", hint=None)

    with monkeypatch.context() as full:
        full.setattr(log.log, "append", refuse)
        log.write(0, native([2, 3, 4], [1, 2, 3]))
        assert log.error == a.error == "no room"
        assert log.held_bytes > 0
        log.end(a)
        a.close()
        another = log.open("a", "p")
        assert another.bit == a.bit, "it has the place of the one before"
        log.seat(0, 0, another)
        log.write(0, native([5], [1]))
    log.flush()
    assert (log.error, log.held_bytes) == (None, 0)
    assert seen(b) == [1, 3, 4]
    assert (seen(another), another.generation, another.generation_offset) == ([1, 5], 2, 1)
    log.close()


def test_a_header_that_is_refused_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path / "s")
    a = log.open("a", "p")
    log.seat(0, 0, a)
    log.write(0, native([1], [1]))
    b = log.open("b", "p")
    log.seat(0, 1, b)

    def refuse() -> None:
        raise ResultLogError("no room", code="disk_full", hint=None)

    with monkeypatch.context() as full:
        full.setattr(log.log, "describe_again", refuse)
        log.write(0, native([2], [3]))
        log.write(0, native([3], [1]))
        assert (seen(a), seen(b)) == ([1], [])
    log.flush()
    assert (seen(a), seen(b)) == ([1, 2, 3], [2])
    log.close()


def test_a_query_that_nobody_brings_back_is_remembered(tmp_path: Path) -> None:
    log = opened(tmp_path / "s")
    a = log.open("a", "p")
    log.seat(0, 0, a)
    log.write(0, native([1, 2], [1, 1]))
    log.close()
    for name in ("b", "c"):
        log = opened(tmp_path / "s")
        other = log.open(name, "p")
        log.seat(0, 0, other)
        log.write(0, native([3], [1]))
        log.close()
    log = opened(tmp_path / "s")
    a = log.open("a", "p")
    assert (seen(a), a.next_offset, a.generation) == ([1, 2], 2, 1)
    log.end(log.open("b", "p"))
    log.close()
    log = opened(tmp_path / "s")
    assert (log.open("a", "p").next_offset, log.open("a", "p").generation) == (2, 2), "opened again while it was open"
    assert log.open("b", "p").generation == 2
    log.close()


def test_another_plan_is_another_generation(tmp_path: Path) -> None:
    log = opened(tmp_path / "s")
    log.seat(0, 0, log.open("a", "p"))
    log.write(0, native([1, 2], [1, 1]))
    log.close()
    log = opened(tmp_path / "s")
    a = log.open("a", "other")
    log.seat(0, 0, a)
    log.write(0, native([3], [1]))
    assert (seen(a), a.generation, a.generation_offset) == ([1, 2, 3], 2, 2)
    log.close()


def test_a_cancel_that_the_disk_refuses_is_remembered_before_the_headers_forget_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path / "s")
    a = log.open("a", "p")
    log.seat(0, 0, a)
    log.write(0, native([1, 2, 3], [1, 1, 1]))

    def refuse() -> None:
        raise ResultLogError("no room", code="disk_full", hint=None)

    with monkeypatch.context() as full:
        full.setattr(log.log, "flush", refuse)
        with pytest.raises(ResultLogError, match="no room"):
            log.end(a)
    b = log.open("b", "p")
    log.seat(0, 0, b)
    log.write(0, native([4], [1]))
    assert [list(table) for _, table in log.tables()] == [["a"], ["b"]]
    log.close()
    log = opened(tmp_path / "s")
    again = log.open("a", "p")
    assert (seen(again), again.next_offset, again.generation) == ([1, 2, 3], 3, 2)
    log.close()

"""One log of late rows per stream: what it takes, what it says after restarts, and who reads what in it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

import flexstream as fs
from flexstream.results.query_logs import plan_of
from flexstream.results.result_rows import LateRows
from flexstream.state.results.result_log import ResultLog
from tests.integration.small_engine import STREAM, counting, finish, row
from tests.integration.test_late_shared import numbered, numbers
from tests.property.checks import as_rows
from tests.waiting import wait_until


def late_engine(data_dir: Path | None, **options: object) -> fs.Engine:
    settings: dict[str, object] = {"data_dir": data_dir, "groups": 4, "pin": False, **options}
    return fs.Engine(**settings)


def arrived(engine: fs.Engine, name: str, n: int) -> None:
    wait_until(lambda: engine.late_log(name).next_offset >= n, f"{n} late rows of {name}")


def on_disk(data_dir: Path) -> int:
    return sum(path.stat().st_size for path in data_dir.rglob("*.arrow") if path.parent.parent.name.startswith("late"))


def with_queries(data_dir: Path, n: int) -> tuple[int, int]:
    """(bytes on the disk, rows in the log) of 20,000 rows that are late for n queries."""
    with late_engine(data_dir) as engine:
        for number in range(n):
            engine.submit(counting(f"q{number}"))
        engine.feed("s", [row(1_000)])
        engine.feed("s", numbered(0, 20_000))
        finish(engine)
        rows = engine.status()["streams"]["s"]["late_log"]["rows"]
        for number in range(n):
            assert sorted(numbers(engine, f"q{number}")) == list(range(20_000))
    return on_disk(data_dir), rows


def test_ten_queries_take_the_space_of_one(tmp_path: Path) -> None:
    alone, rows_alone = with_queries(tmp_path / "one", 1)
    two, rows_two = with_queries(tmp_path / "two", 2)
    ten, rows_ten = with_queries(tmp_path / "ten", 10)
    assert rows_alone == rows_two == rows_ten == 20_000
    assert alone > 20_000 * STREAM.schema.row_bytes
    assert max(two, ten) < 1.1 * alone, (alone, two, ten)


def test_offsets_stay_through_restarts_and_generations(tmp_path: Path) -> None:
    with late_engine(tmp_path) as engine:
        engine.submit(counting("a"))
        engine.submit(counting("b"))
        engine.feed("s", [row(1_000, k=k) for k in range(10)])
        engine.feed("s", numbered(0, 100))
        finish(engine)
    with late_engine(tmp_path) as engine:
        engine.submit(counting("b"))  # in another order: other bits
        engine.submit(counting("c"))
        engine.submit(counting("a"))
        engine.feed("s", [row(1_000, k=k) for k in range(10)], watermark=2_000)
        engine.feed("s", numbered(100, 50), watermark=False)
        arrived(engine, "a", 160)
        first = as_rows(engine.late("a"))
        engine.cancel("a")
        engine.feed("s", numbered(150, 10), watermark=False)
        engine.submit(counting("a"))
        engine.feed("s", [], watermark=2_000)
        engine.feed("s", numbered(160, 5), watermark=False)
        arrived(engine, "a", 165)
        late = engine.late_log("a")
        assert (late.generation, late.generation_offset) == (2, 160)
        finish(engine)
    with late_engine(tmp_path) as engine:
        for name in ("c", "b", "a"):
            engine.submit(counting(name))
        found = as_rows(engine.late("a"))
        assert found[:160] == first
        assert sorted(one["x"] for one in found[160:]) == [160, 161, 162, 163, 164]
        assert as_rows(engine.late("a", offset=162)) == found[162:]
        generations = [batch.schema.metadata[b"flexstream.generation"] for batch in engine.late("a")]
        assert generations == sorted(generations)
        assert {*generations} == {b"1", b"2"}
        assert (engine.late_log("a").generation, engine.late_log("a").generation_offset) == (2, 160)
        assert sorted(one["x"] for one in as_rows(engine.late("b")) if one["t"] == 0) == list(range(165))
        assert sorted(one["x"] for one in as_rows(engine.late("c")) if one["t"] == 0) == list(range(100, 165))


def test_offsets_of_a_name_go_on_when_all_of_its_rows_are_gone(tmp_path: Path) -> None:
    """It was cancelled, others wrote on, and the bound took what it had: who has the name next has other offsets."""
    with late_engine(tmp_path, late_bytes=1 << 20) as engine:
        engine.submit(counting("short"))
        engine.submit(counting("long"))
        engine.feed("s", [row(1_000, k=k) for k in range(10)])
        engine.feed("s", numbered(0, 1_000), watermark=False)
        arrived(engine, "short", 1_000)
        engine.cancel("short")
        for number in range(30):
            engine.feed("s", numbered(1_000 * number, 1_000), watermark=False)
            engine.flush()
            arrived(engine, "long", 1_000 * (number + 2))
        assert engine.late_log("long").first_offset > 1_000
    with late_engine(tmp_path, late_bytes=1 << 20) as engine:
        engine.submit(counting("long"))
        engine.submit(counting("short"))
        late = engine.late_log("short")
        assert (late.first_offset, late.next_offset, late.generation) == (1_000, 1_000, 2)
        with pytest.raises(fs.FlexStreamError, match="is gone"):
            next(engine.late("short"))
        assert list(engine.late("short", offset=1_000)) == []


@pytest.mark.parametrize("disk", [True, False])
def test_paging_and_following_give_each_row_once(tmp_path: Path, disk: bool) -> None:
    followed: list[int] = []
    with late_engine(tmp_path if disk else None) as engine:
        engine.submit(counting("all"))
        odd = STREAM.query("odd").filter(fs.col("x") % 2 == 1).window(fs.tumbling("10s")).agg(n=fs.count())
        engine.submit(odd)
        engine.feed("s", [row(1_000, k=k) for k in range(10)])

        def follow() -> None:
            for batch in engine.late("odd", follow=True):
                followed.extend(batch.column("x").to_pylist())

        reader = threading.Thread(target=follow)
        reader.start()
        for number in range(20):
            engine.feed("s", numbered(100 * number, 100), watermark=False)
        arrived(engine, "odd", 1_000)
        paged: list[int] = []
        late = engine.late_log("odd")
        while batches := late.read(len(paged), 7):
            paged.extend(x for batch in batches for x in batch.column("x").to_pylist())
        whole = numbers(engine, "odd")
        assert paged == whole
        assert sorted(whole) == list(range(1, 2_000, 2))
        for offset in np.random.default_rng(1).integers(0, 1_000, 20):
            assert late.read(int(offset), 1)[0].column("x").to_pylist() == [whole[int(offset)]]
        wait_until(lambda: len(followed) >= 1_000, "the follower")
        engine.cancel("odd")
        reader.join(20)
        assert not reader.is_alive(), "who follows a cancelled query is told"
        assert followed == whole


def test_rows_that_an_earlier_version_kept_are_read_first(tmp_path: Path) -> None:
    """It had a log of late rows per query."""
    rows = LateRows(STREAM)
    table = np.zeros(30, rows.dtype)
    table["row"]["x"] = np.arange(30)
    table["watermark"] = 500
    stored = rows.batch(table, 0, np.ones(30, np.uint64))
    log = ResultLog(tmp_path / "late" / "s", rows.schema, plan=plan_of(counting("s")))
    log.append(rows.public(stored, np.arange(30)))
    log.close()
    for run in range(2):
        with late_engine(tmp_path) as engine:
            engine.submit(counting("s"))  # a query may have the name of its stream
            assert engine.late_log("s").next_offset == 30 + 5 * run
            engine.feed("s", [row(1_000 * (run + 1), k=k) for k in range(10)], watermark=1_000 * (run + 1))
            engine.feed("s", numbered(30 + 5 * run, 5), watermark=False)
            arrived(engine, "s", 35 + 5 * run)
            late = engine.late_log("s")
            found = numbers(engine, "s")
            assert found[:30] == list(range(30))
            assert sorted(found) == list(range(35 + 5 * run))
            assert (late.first_offset, late.generation, late.generation_offset) == (0, 1, 0)
            assert [x for batch in late.read(28, 4) for x in batch.column("x").to_pylist()] == found[28:32]
            finish(engine)


def test_a_stream_that_changed_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with late_engine(tmp_path) as engine:
        engine.submit(counting("q"))
        engine.feed("s", [row(1_000)])
        finish(engine)
    other = fs.Stream("s", {"t": "timestamp[s]", "k": "i32"}, key="k", time="t")
    with late_engine(tmp_path) as engine, pytest.raises(fs.FlexStreamError) as refused:
        engine.submit(counting("new", stream=other))
    assert refused.value.code == "log_schema"
    assert "another name" in (refused.value.hint or "")


def test_names_that_come_and_go_leave_one_line_each(tmp_path: Path) -> None:
    with late_engine(tmp_path) as engine:
        engine.submit(counting("always"))
        engine.feed("s", [row(1_000, k=k) for k in range(10)])
        for number in range(12):
            name = f"n{number % 3}"
            engine.submit(counting(name))
            engine.feed("s", [], watermark=1_000)
            before = engine.late_log(name).next_offset
            engine.feed("s", numbered(number * 10, 10), watermark=False)
            arrived(engine, name, before + 10)
            assert sorted(numbers(engine, name)[before:]) == list(range(number * 10, number * 10 + 10))
            engine.cancel(name)
        assert sorted(numbers(engine, "always")) == list(range(120))
    said = json.loads((tmp_path / "late_rows" / "s" / "queries.json").read_text())
    assert {name: values[0] for name, values in said.items() if name != "always"} == {"n0": 4, "n1": 4, "n2": 4}
    assert {values[2] for name, values in said.items() if name != "always"} == {40}


def test_late_rows_that_cannot_be_written_are_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with late_engine(tmp_path) as engine:
        engine.submit(counting("q"))
        engine.feed("s", [row(1_000, k=k) for k in range(10)])
        late = engine.late_rows_of("s")
        assert late is not None

        def refuse(batch: object) -> int:
            raise fs.FlexStreamError("the disk is full", code="disk_full", hint=None)

        with monkeypatch.context() as full:
            full.setattr(late.log, "append", refuse)
            engine.feed("s", numbered(0, 100), watermark=False)
            wait_until(lambda: engine.health()["not_ready"], "that it is not ready")
            assert "late rows of stream s cannot be written" in engine.health()["not_ready"]
            assert engine.status()["streams"]["s"]["late_log"]["error"] == "the disk is full"
            assert engine.status()["queries"]["q"]["log"]["error"] == "the disk is full"
        arrived(engine, "q", 100)
        wait_until(lambda: engine.health()["not_ready"] is None, "that it is ready again")
        assert sorted(numbers(engine, "q")) == list(range(100))

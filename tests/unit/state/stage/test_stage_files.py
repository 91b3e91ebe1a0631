"""Stage files and the journal of commits: whole or not there, whatever a crash left behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import StageError
from flexstream.state.stage import applied
from flexstream.state.stage import commit_journal as commits
from flexstream.state.stage import direct_io as pages
from flexstream.state.stage.commit_journal import CommitJournal
from flexstream.state.stage.stage_file import StageFile
from flexstream.wire import stage_block
from flexstream.wire.frames import HEADER_BYTES, Header, WireError

STREAM = fs.Stream("s", {"t": "timestamp[ms]", "k": "i32", "x": "i64"}, key="k", time="t")
GROUPS = 8
ROW_BYTES = STREAM.schema.row_bytes


def make_rows(n: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["t"] = np.arange(n)
    rows["k"] = rng.integers(0, 50, n)
    rows["x"] = rng.integers(-5, 5, n)
    return rows


def frames(rows: np.ndarray, block_bytes: int = 1 << 16, stream: fs.Stream = STREAM) -> list[bytes]:
    """The rows as a producer frames them."""
    pool = stage_block.row_pool(stream, GROUPS, block_bytes)
    found, at, sent = [], 0, 0
    while at < len(rows) or pool.rows:
        at = pool.put(rows.view(np.uint8), at)
        found.append(b"".join(stage_block.encode(pool, stream.schema.row_bytes, sent)))
        sent += pool.rows
        pool.reset()
    return found


def split(frame: bytes) -> tuple[Header, np.ndarray]:
    return Header.unpack(frame), np.frombuffer(frame, np.uint8, offset=HEADER_BYTES)


def rows_in(payloads: list[tuple[Header, np.ndarray]], groups: int = GROUPS) -> dict[int, list[bytes]]:
    """The rows by group, in order."""
    found: dict[int, list[bytes]] = {}
    for header, payload in payloads:
        block = stage_block.decode(header, payload, ROW_BYTES, groups)
        stage_block.check_groups(block, STREAM, groups)
        for group, part in block.parts(ROW_BYTES):
            data = part.tobytes()
            found.setdefault(group, []).extend(data[i : i + ROW_BYTES] for i in range(0, len(data), ROW_BYTES))
    return found


def by_group(rows: np.ndarray) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for row, group in zip(rows, STREAM.group_of(rows, GROUPS), strict=True):
        found.setdefault(int(group), []).append(row.tobytes())
    return found


def written(path: Path | None, rows: np.ndarray) -> StageFile:
    stage = StageFile.create(path, {"stage": "a", "stream": "s"})
    for frame in frames(rows):
        stage.append(frame[:HEADER_BYTES], frame[HEADER_BYTES:])
    return stage


@pytest.mark.parametrize("n", [0, 1, 7, 5000, 50_000])
@pytest.mark.parametrize("block_bytes", [1 << 10, 1 << 16])
def test_blocks_hold_every_row_once_by_group_and_in_order(n: int, block_bytes: int) -> None:
    rows = make_rows(n)
    assert rows_in([split(frame) for frame in frames(rows, block_bytes)]) == by_group(rows)


@pytest.mark.parametrize("kind", ["i64", "u8", "bytes[11]", "f64", "bool"])
def test_blocks_of_any_key_type_and_row_size(kind: str) -> None:
    stream = fs.Stream("s", {"t": "timestamp[us]", "k": kind, "pad": "bytes[3]"}, key="k", time="t")
    rng = np.random.default_rng(3)
    rows = np.zeros(3000, stream.schema.dtype)
    rows["k"] = rng.integers(0, 2 if kind == "bool" else 100, 3000).astype(rows["k"].dtype)
    rows["t"] = rng.integers(-(2**63), 2**63 - 1, 3000)
    total = 0
    for frame in frames(rows, 1 << 14, stream):
        header, payload = split(frame)
        assert stage_block.check_crc(header, payload)
        block = stage_block.decode(header, payload, stream.schema.row_bytes, GROUPS)
        stage_block.check_groups(block, stream, GROUPS)
        for group, part in block.parts(stream.schema.row_bytes):
            assert set(stream.group_of(part.view(stream.schema.dtype), GROUPS).tolist()) == {group}
        total += header.value
    assert total == 3000


def test_the_time_span_leaves_out_what_has_no_window() -> None:
    rows = make_rows(100)
    rows["t"][:3] = [-(2**63), 2**63 - 1, 2**62 + 1]
    (frame,) = frames(rows)
    header, payload = split(frame)
    block = stage_block.decode(header, payload, ROW_BYTES, GROUPS)
    assert stage_block.time_span(block, STREAM) == (3, 99)
    rows["t"] = 2**63 - 1
    header, payload = split(frames(rows)[0])
    assert stage_block.time_span(stage_block.decode(header, payload, ROW_BYTES, GROUPS), STREAM) is None


def test_tables_that_do_not_fit_their_rows_are_refused() -> None:
    (frame,) = frames(make_rows(100))
    header, payload = split(frame)
    parts = int(payload[:4].view("<u4")[0])
    for change in ((0, parts + 1), (0, 2**31), (1, GROUPS), (2, 0), (2, 2**32 - 1)):
        table = payload.copy()
        table[: 4 + 8 * parts].view("<u4")[change[0]] = change[1]
        with pytest.raises(WireError):
            stage_block.decode(header, table, ROW_BYTES, GROUPS)
    swapped = payload.copy()
    ids = swapped[4 : 4 + 8 * parts].view("<u4")[0::2]
    ids[:] = ids[::-1].copy()
    with pytest.raises(WireError, match="group"):
        stage_block.check_groups(stage_block.decode(header, swapped, ROW_BYTES, GROUPS), STREAM, GROUPS)


@pytest.mark.parametrize("in_file", [True, False])
def test_what_was_staged_is_read_back(tmp_path: Path, in_file: bool) -> None:
    rows = make_rows(20_000)
    stage = written(tmp_path / "a.stage" if in_file else None, rows)
    stage.finish({"rows": len(rows)})
    assert rows_in(list(stage.blocks())) == by_group(rows)
    stage.discard()
    assert list(tmp_path.iterdir()) == []


def test_frames_begin_at_pages_and_memory_that_does_not_is_written_too(tmp_path: Path) -> None:
    stage = written(tmp_path / "a.stage", make_rows(3_000))
    assert stage.size_bytes % pages.PAGE_BYTES == 0
    assert (tmp_path / "a.stage").stat().st_size == stage.size_bytes
    stage.discard()
    fd = pages.open_direct(tmp_path / "b", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    data = np.arange(5_000, dtype=np.uint8)[1:]  # neither begins nor ends at a page: O_DIRECT refuses it
    pages.write_pages(fd, data, 0)
    found = pages.page_memory(len(data))
    assert pages.read_pages(fd, found, 0, len(data)) == len(data)
    assert (found[: len(data)] == data).all()
    assert pages.read_pages(fd, found, 8_192, 1) == 0  # past the end
    os.close(fd)


def test_spare_pages_are_used_again_when_they_are_large_enough() -> None:
    spare = pages.SparePages(most=2)
    first = spare.take(10_000)
    where = first.ctypes.data
    spare.give(first[32:5_000])
    assert len(spare.take(pages.whole_pages(10_000) + 1)) > len(first)
    assert spare.take(12_000).ctypes.data == where
    assert spare.take(1).ctypes.data != where


def test_a_stage_in_memory_can_be_spilled_and_goes_on(tmp_path: Path) -> None:
    rows = make_rows(20_000)
    stage = written(None, rows[:10_000])
    stage.spill()
    assert stage.in_memory_bytes == 0
    for frame in frames(rows[10_000:]):
        stage.append(frame)
    assert rows_in(list(stage.blocks())) == by_group(rows)
    stage.discard()


def test_a_file_is_finished_or_not_wherever_it_is_cut(tmp_path: Path) -> None:
    stage = written(tmp_path / "a.stage", make_rows(300))
    stage.finish({"rows": 300})
    stage.close()
    whole = (tmp_path / "a.stage").read_bytes()
    last = len(whole) - pages.PAGE_BYTES  # where the EOS frame begins
    for cut in {0, 1, 31, 32, 33, last // 2, *range(last, last + 120), *range(len(whole) - 9, len(whole))}:
        (tmp_path / "cut.stage").write_bytes(whole[:cut])
        assert StageFile.open(tmp_path / "cut.stage") is None, cut
    found = StageFile.open(tmp_path / "a.stage")
    assert found is not None
    assert (found[1]["stream"], found[2]["rows"]) == ("s", 300)
    found[0].close()


def test_a_flipped_bit_in_the_rows_is_damage(tmp_path: Path) -> None:
    stage = written(tmp_path / "a.stage", make_rows(300))
    stage.finish({"rows": 300})
    stage.close()
    data = bytearray((tmp_path / "a.stage").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.stage").write_bytes(data)
    found = StageFile.open(tmp_path / "a.stage")
    assert found is not None
    with pytest.raises(StageError, match="damaged") as caught:
        found[0].verify()
    assert caught.value.code == "stage_damaged"
    found[0].close()


def record(batch: int | None, **changes: object) -> dict[str, object]:
    return {
        "sink": "k", "query": "q", "batch": batch, "stream": "s", "stages": [{"stage": f"u{batch}", "rows": 1}],
        "rows": 1, "min_time": 0, "max_time": 9, "before": {}, "until": 9, "end": False, "queries": ["a", "b"],
        "late": {},
    } | changes  # fmt: skip


def test_the_journal_comes_back_as_it_was(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    for batch in range(5):
        journal.commit(record(batch, until=batch))
    journal.done([1, 2])
    journal.query_gone("a")
    journal.commit(record(5, until=50))
    for again in range(3):
        back = CommitJournal(tmp_path)
        assert list(back.kept) == [3, 4, 5, 6]
        assert [r["queries"] for r in back.kept.values()] == [["b"], ["b"], ["b"], ["a", "b"]]
        assert all(back.is_applied("k", "q", batch) for batch in range(6))
        assert not back.is_applied("k", "q", 6)
        assert not back.is_applied("k", "other", 1)
        assert back.sinks == {"s": {"k": 50}}
        assert back.next_number == 7
        if again == 0:
            assert sorted(back.dropped_stages) == ["u0", "u1"]
        back.rewrite(always=True)
        back.close()
    journal.close()


def test_a_sink_that_ended_is_not_live_and_its_batches_stay_applied(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    journal.commit(record(0))
    journal.commit(record(None, stages=[], end=True))
    journal.commit(record(1, sink="l", before={}))
    journal.rewrite(always=True)
    journal.close()
    back = CommitJournal(tmp_path)
    assert back.sinks == {"s": {"l": 9}}
    assert back.is_applied("k", "q", 0)
    back.close()


def test_a_torn_last_line_is_cut_and_the_journal_goes_on(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    journal.commit(record(0))
    size = (tmp_path / "journal").stat().st_size
    journal.commit(record(1))
    journal.close()
    whole = (tmp_path / "journal").read_bytes()
    for cut in range(size, len(whole)):
        (tmp_path / "journal").write_bytes(whole[:cut])
        back = CommitJournal(tmp_path)
        assert back.is_applied("k", "q", 0)
        assert not back.is_applied("k", "q", 1)
        back.commit(record(2))
        back.close()
        again = CommitJournal(tmp_path)
        assert again.is_applied("k", "q", 2)
        again.close()


def test_damage_before_the_last_line_is_said_and_nothing_is_changed(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    for batch in range(3):
        journal.commit(record(batch))
    journal.close()
    data = bytearray((tmp_path / "journal").read_bytes())
    data[20] ^= 1
    (tmp_path / "journal").write_bytes(data)
    with pytest.raises(StageError) as caught:
        CommitJournal(tmp_path)
    assert caught.value.code == "journal_damaged"
    assert (tmp_path / "journal").read_bytes() == data


def test_very_old_batches_are_known_as_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "REMEMBERED_BATCHES", 10)
    journal = CommitJournal(tmp_path)
    for batch in range(100):
        journal.commit(record(batch, stream=None))
    assert len(journal.applied.get("k", "q").batches) <= 10
    assert all(journal.is_applied("k", "q", batch) for batch in range(100))
    assert not journal.is_applied("k", "q", 100)
    journal.close()


def test_a_failed_append_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = CommitJournal(tmp_path)
    journal.commit(record(0))
    before = (tmp_path / "journal").read_bytes()

    def no_room(fd: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_room)
        with pytest.raises(StageError) as caught:
            journal.commit(record(1))
    assert caught.value.code == "disk_full"
    assert not journal.is_applied("k", "q", 1)
    assert (tmp_path / "journal").read_bytes() == before
    journal.commit(record(1))
    assert journal.is_applied("k", "q", 1)
    journal.close()


def commit_fresh(journal: CommitJournal, count: int, sink: str = "k", **changes: object) -> None:
    for i in range(count):
        journal.commit(record(0, stream=None, sink=sink, query=f"{sink}-{i}", **changes))


@pytest.mark.parametrize("sink", ["k", "another"])
def test_nobodys_commits_push_an_applied_batch_out(sink: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "SINK_QUERIES", 20)
    journal = CommitJournal(tmp_path)
    journal.commit(record(7, stream=None, query="honest"))
    with pytest.raises(StageError) as caught:
        commit_fresh(journal, 50, sink)
    assert caught.value.code == "sink_full"
    assert "remember_s" in str(caught.value)
    for again in (journal, CommitJournal(tmp_path)):
        assert again.is_applied("k", "honest", 7)
        again.commit(record(8, stream=None, query="honest"))  # one that is known always has room
        again.close()


def test_all_sinks_together_have_a_bound_and_what_is_known_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "ALL_QUERIES", 20)
    monkeypatch.setattr(applied, "ALL_BATCHES", 20)
    journal = CommitJournal(tmp_path)
    journal.commit(record(0, stream=None, query="honest"))
    for i in range(19):
        commit_fresh(journal, 1, f"sink {i}")
    with pytest.raises(StageError) as caught:
        commit_fresh(journal, 1, "one more")
    assert caught.value.code == "sink_full"
    for batch in range(1, 50):
        journal.commit(record(batch, stream=None, query="honest"))
    assert all(journal.is_applied("k", "honest", batch) for batch in range(50))
    assert journal.applied.queries == 20
    assert journal.applied.batches <= 21
    journal.close()


def test_what_may_not_be_repeated_any_more_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "SINK_QUERIES", 20)
    journal = CommitJournal(tmp_path)
    journal.commit(record(7, stream=None, query="honest"))
    for _ in range(3):
        commit_fresh(journal, 19, remember_s=1e-9)
    assert journal.is_applied("k", "honest", 7)
    assert journal.applied.queries <= 20
    journal.rewrite(always=True)
    journal.close()
    back = CommitJournal(tmp_path)
    assert back.applied.to_list() == journal.applied.to_list()
    back.close()


def test_a_journal_from_before_rows_were_kept_is_read(tmp_path: Path) -> None:
    old = {"op": "state", "next": 5, "sinks": {}, "applied": [["k", "q", 3, [3, 4], 1.5]]}
    (tmp_path / "journal").write_bytes(commits._line(old))
    journal = CommitJournal(tmp_path)
    assert [journal.is_applied("k", "q", batch) for batch in (0, 3, 4, 5)] == [True, True, True, False]
    journal.close()


def test_the_journal_counts_the_processes_that_died_of_a_batch(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    for batch in range(3):
        journal.commit(record(batch))
    for died in range(1, 4):
        journal.applying(1)
        journal.applying(2)
        journal.close()
        journal = CommitJournal(tmp_path)
        assert journal.attempts == {2: died}
        journal.rewrite(always=True)
    journal.applying(1)
    journal.applying(2)
    journal.applying(None)
    journal.close()
    journal = CommitJournal(tmp_path)
    assert journal.attempts == {}
    journal.close()


def test_a_batch_set_aside_takes_its_time_along_and_is_named(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    journal.commit(record(0, until=9))
    journal.commit(record(1, before={"k": 9}, max_time=2**62, until=2**62))
    journal.commit(record(2, before={"k": 2**62}, max_time=20, until=2**62))
    journal.commit(record(0, sink="l", before={"k": 2**62}, until=9))
    journal.commit(record(3, before={"k": 2**62, "l": 9}, max_time=15, until=2**62))
    journal.set_aside(2)
    for back in (journal, CommitJournal(tmp_path)):
        assert [(r["number"], r["before"], r["until"]) for r in back.kept.values()] == [
            (1, {}, 9), (3, {"k": 9}, 20), (4, {"k": 20}, 9), (5, {"k": 20, "l": 9}, 20),
        ]  # fmt: skip
        assert back.sinks == {"s": {"k": 20, "l": 9}}
        assert [(a["sink"], a["query"], a["batch"], a["rows"]) for a in back.aside] == [("k", "q", 1, 1)]
        assert back.is_applied("k", "q", 1)
        back.rewrite(always=True)
        back.close()


def test_a_sink_whose_only_batch_was_set_aside_holds_nobody(tmp_path: Path) -> None:
    journal = CommitJournal(tmp_path)
    journal.commit(record(0))
    journal.set_aside(1)
    assert journal.sinks == {"s": {}}
    journal.close()

"""The result log keeps what was appended, under the offsets it said, and forgets only what it may."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest

from flexstream.errors import ResultLogError
from flexstream.state.results.result_log import ResultLog

SCHEMA = pa.schema(
    [("window_start", pa.timestamp("ms")), ("key", pa.int64()), ("tag", pa.binary(4)), ("n", pa.int64())]
)


def rows(first: int, count: int) -> pa.RecordBatch:
    numbers = list(range(first, first + count))
    return pa.RecordBatch.from_arrays(
        [
            pa.array(numbers, pa.timestamp("ms")),
            pa.array(numbers, pa.int64()),
            pa.array([b"abcd"] * count, pa.binary(4)),
            pa.array([n * 10 for n in numbers], pa.int64()),
        ],
        schema=SCHEMA,
    )


def keys(batches: list[pa.RecordBatch]) -> list[int]:
    return [key for batch in batches for key in batch.column("key").to_pylist()]


@pytest.fixture(params=["disk", "memory"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "results" / "q" if request.param == "disk" else None


def test_append_says_the_first_offset_and_read_may_start_inside_a_batch(directory: Path | None) -> None:
    with ResultLog(directory, SCHEMA) as log:
        assert log.append(rows(0, 5)) == 0
        assert log.append(rows(5, 3)) == 5
        assert (log.first_offset, log.next_offset) == (0, 8)
        assert keys(log.read(3)) == [3, 4, 5, 6, 7]
        assert log.read(3)[0].schema.equals(SCHEMA)
        assert log.read(8) == []
        assert log.read(1000) == []
        assert log.bytes > 0


def test_read_gives_at_most_max_rows(directory: Path | None) -> None:
    with ResultLog(directory, SCHEMA) as log:
        for first in range(0, 30, 10):
            log.append(rows(first, 10))
        assert keys(log.read(5, max_rows=12)) == list(range(5, 17))
        with pytest.raises(ResultLogError, match="offset -1"):
            log.read(-1)


def test_an_empty_batch_changes_nothing(directory: Path | None) -> None:
    with ResultLog(directory, SCHEMA) as log:
        log.append(rows(0, 2))
        before = log.bytes
        assert log.append(rows(0, 0)) == 2
        assert (log.next_offset, log.bytes) == (2, before)


def test_a_batch_of_other_columns_is_refused(directory: Path | None) -> None:
    with ResultLog(directory, SCHEMA) as log:
        with pytest.raises(ResultLogError) as caught:
            log.append(pa.RecordBatch.from_pydict({"x": [1]}))
        assert caught.value.code == "log_schema"
        assert log.next_offset == 0


def test_sliced_batches_and_nulls_come_back_as_they_were(directory: Path | None) -> None:
    schema = pa.schema([("v", pa.float64())])
    batch = pa.RecordBatch.from_arrays([pa.array([1.0, None, 3.0, None], pa.float64())], schema=schema)
    with ResultLog(directory, schema) as log:
        log.append(batch.slice(1, 2))
        assert log.read(0)[0].column(0).to_pylist() == [None, 3.0]


def test_a_reopened_log_goes_on_at_the_same_offset(tmp_path: Path) -> None:
    with ResultLog(tmp_path, SCHEMA) as log:
        log.append(rows(0, 4))
    with ResultLog(tmp_path, SCHEMA) as log:
        assert log.append(rows(4, 4)) == 4
        assert keys(log.read(0)) == list(range(8))


def test_segments_are_plain_arrow_streams_named_by_their_first_offset(tmp_path: Path) -> None:
    with ResultLog(tmp_path, SCHEMA, segment_bytes=1024) as log:
        for first in range(0, 200, 20):
            log.append(rows(first, 20))
    files = sorted(tmp_path.glob("*.arrow"))
    assert len(files) > 2
    total = 0
    for file in files:
        assert int(file.stem) == total
        with pa.ipc.open_stream(file) as reader:
            assert reader.schema.metadata[b"flexstream.format"] == b"1"
            total += reader.read_all().num_rows
    assert total == 200
    with ResultLog(tmp_path, SCHEMA, segment_bytes=1024) as log:
        assert keys(log.read(0, max_rows=1000)) == list(range(200))
        assert keys(log.read(25, max_rows=3)) == [25, 26, 27]


def test_retention_by_bytes_removes_whole_old_segments_and_keeps_offsets(directory: Path | None) -> None:
    with ResultLog(directory, SCHEMA, retention_bytes=300_000, segment_bytes=20_000) as log:
        for first in range(0, 100_000, 500):
            log.append(rows(first, 500))
        assert log.bytes <= 300_000 + 40_000
        assert log.first_offset > 0
        assert log.next_offset == 100_000
        assert keys(log.read(log.first_offset, max_rows=2)) == [log.first_offset, log.first_offset + 1]
        with pytest.raises(ResultLogError) as caught:
            log.read(0)
        assert caught.value.code == "offset_expired"
        assert str(log.first_offset) in str(caught.value)


def test_retention_by_age_empties_an_idle_log_but_not_its_offset(tmp_path: Path) -> None:
    now = [1000.0]
    with ResultLog(tmp_path, SCHEMA, retention_s=60, clock=lambda: now[0]) as log:
        log.append(rows(0, 10))
        now[0] += 59
        assert log.enforce_retention() == 0
        now[0] += 2
        assert log.enforce_retention() == 1
        assert (log.first_offset, log.next_offset) == (10, 10)
        assert log.append(rows(10, 1)) == 10
    with ResultLog(tmp_path, SCHEMA) as log:
        assert (log.first_offset, log.next_offset) == (10, 11)


def test_wait_ends_when_rows_come_after_its_timeout_and_when_the_log_closes(directory: Path | None) -> None:
    log = ResultLog(directory, SCHEMA)
    assert log.wait(0, timeout=0.01) is False
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(log.wait(0, timeout=30)))
    waiter.start()
    log.append(rows(0, 1))
    waiter.join(30)
    closing = threading.Thread(target=lambda: answers.append(log.wait(1, timeout=30)))
    closing.start()
    log.close()
    closing.join(30)
    assert answers == [True, False]


def test_a_listener_hears_every_append_until_it_is_removed(directory: Path | None) -> None:
    with ResultLog(directory, SCHEMA) as log:
        heard: list[int] = []
        remove = log.add_listener(heard.append)
        log.append(rows(0, 3))
        log.append(rows(3, 2))
        remove()
        log.append(rows(5, 1))
        assert heard == [3, 5]


def test_readers_beside_the_appender_see_every_row_once_and_in_order(directory: Path | None) -> None:
    total, failures, seen = 4000, [], []
    log = ResultLog(directory, SCHEMA, segment_bytes=30_000)

    def follow() -> None:
        got: list[int] = []
        try:
            while len(got) < total and log.wait(len(got), timeout=30):
                got += keys(log.read(len(got), max_rows=700))
        except Exception as error:
            failures.append(error)
        seen.append(got)

    readers = [threading.Thread(target=follow) for _ in range(3)]
    for reader in readers:
        reader.start()
    for first in range(0, total, 40):
        log.append(rows(first, 40))
    for reader in readers:
        reader.join(60)
    log.close()
    assert failures == []
    assert seen == [list(range(total))] * 3


def test_readers_beside_retention_see_rows_or_offset_expired_never_wrong_rows(tmp_path: Path) -> None:
    log = ResultLog(tmp_path, SCHEMA, retention_bytes=200_000, segment_bytes=10_000)
    wrong: list[object] = []
    done = threading.Event()

    def follow() -> None:
        offset = 0
        while not done.is_set() or offset < log.next_offset:
            try:
                got = keys(log.read(offset, max_rows=100))
            except ResultLogError as error:
                if error.code != "offset_expired":
                    wrong.append(error)
                    return
                offset = log.first_offset
                continue
            if got != list(range(offset, offset + len(got))):
                wrong.append((offset, got))
                return
            offset += len(got)
            log.wait(offset, timeout=0.01)

    readers = [threading.Thread(target=follow) for _ in range(2)]
    for reader in readers:
        reader.start()
    for first in range(0, 60_000, 200):
        log.append(rows(first, 200))
    done.set()
    for reader in readers:
        reader.join(60)
    log.close()
    assert wrong == []


def test_another_result_schema_in_the_same_directory_is_refused_with_both_named(tmp_path: Path) -> None:
    ResultLog(tmp_path, SCHEMA).close()
    with pytest.raises(ResultLogError, match="another name") as caught:
        ResultLog(tmp_path, pa.schema([("other", pa.int32())]))
    assert "other: int32" in str(caught.value)
    assert "window_start" in str(caught.value)


def test_a_missing_or_renamed_segment_is_named(tmp_path: Path) -> None:
    with ResultLog(tmp_path, SCHEMA, segment_bytes=1024) as log:
        for first in range(0, 100, 20):
            log.append(rows(first, 20))
    files = sorted(tmp_path.glob("*.arrow"))
    files[1].unlink()
    with ResultLog(tmp_path, SCHEMA) as log, pytest.raises(ResultLogError) as caught:
        log.read(20)
    assert caught.value.code == "log_damaged"
    files[0].rename(files[1])
    with pytest.raises(ResultLogError, match="renamed"):
        ResultLog(tmp_path, SCHEMA)


def test_delete_removes_the_files(tmp_path: Path) -> None:
    directory = tmp_path / "q"
    log = ResultLog(directory, SCHEMA)
    log.append(rows(0, 3))
    log.delete()
    assert not directory.exists()


def test_a_closed_log_refuses_appends_but_can_be_read_to_its_end(directory: Path | None) -> None:
    log = ResultLog(directory, SCHEMA)
    log.append(rows(0, 3))
    heard: list[int] = []
    log.add_listener(heard.append)
    log.close()
    log.close()
    assert log.closed
    assert heard == [3]
    with pytest.raises(ResultLogError, match="closed"):
        log.append(rows(3, 1))
    assert keys(log.read(1)) == [1, 2]
    assert log.read(3) == []


def generations(log: ResultLog) -> list[tuple[int, int]]:
    """(generation, rows) of what is in the log, batch by batch."""
    batches = log.read(0)
    return [(int(batch.schema.metadata[b"flexstream.generation"]), batch.num_rows) for batch in batches]


def test_a_cancelled_query_and_the_next_of_its_name_are_told_apart(directory: Path | None) -> None:
    log = ResultLog(directory, SCHEMA, plan="a")
    log.append(rows(0, 3))
    assert (log.generation, log.generation_offset) == (1, 0)
    log.end_generation()
    log.end_generation()
    assert (log.generation, log.generation_offset) == (2, 3)
    if directory is not None:
        log.close()
        log = ResultLog(directory, SCHEMA, plan="a")
    log.append(rows(3, 2))
    assert (log.generation, log.generation_offset) == (2, 3)
    assert generations(log) == [(1, 3), (2, 2)]
    assert [keys([batch]) for batch in log.newest_first()] == [[3, 4]]
    log.close()


def test_the_same_plan_goes_on_and_another_begins_anew(tmp_path: Path) -> None:
    for plan, count in (("a", 2), ("a", 3), ("b", 4), ("c", 0), ("d", 1)):
        with ResultLog(tmp_path, SCHEMA, plan=plan) as log:
            if count:
                log.append(rows(log.next_offset, count))
    with ResultLog(tmp_path, SCHEMA, plan="d") as log:
        assert generations(log) == [(1, 2), (1, 3), (2, 4), (3, 1)]
        assert log.generation_offset == 9


def test_a_log_without_generations_is_the_first(tmp_path: Path) -> None:
    with ResultLog(tmp_path, SCHEMA) as log:
        log.append(rows(0, 3))
    (path,) = tmp_path.glob("*.arrow")
    with pa.OSFile(str(path)) as source:
        head = pa.ipc.read_schema(pa.ipc.read_message(source))
        body = source.read()
    old = {key: value for key, value in head.metadata.items() if key != b"flexstream.generation"}
    path.write_bytes(head.with_metadata(old).serialize().to_pybytes() + body)
    with ResultLog(tmp_path, SCHEMA, plan="a") as log:
        log.append(rows(3, 1))
        assert generations(log) == [(1, 3), (1, 1)]


def test_a_disk_that_refuses_leaves_the_generation_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ResultLog(tmp_path, SCHEMA, plan="a")
    log.append(rows(0, 3))

    def refuse(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", refuse)
        with pytest.raises(ResultLogError, match="No space"):
            log.end_generation()
    log.append(rows(3, 1))
    assert (log.generation, log.next_offset) == (1, 4)
    log.close()
    with ResultLog(tmp_path, SCHEMA, plan="a") as log:
        assert keys(log.read(0)) == [0, 1, 2, 3]

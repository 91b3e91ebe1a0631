"""Which results may lack rows after a restart, and how older logs read."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from flexstream.daemon.catalog import Catalog, DataDirLock
from flexstream.results.cut import Cut
from flexstream.state.results.result_log import ResultLog

SIZE = 10


def complete(cut: Cut, *starts: int) -> list[bool]:
    begun = np.array(starts, np.int64)
    return cut.complete(begun, begun + SIZE).tolist()


def test_without_a_restart_all_results_are_complete() -> None:
    cut = Cut("q")
    assert complete(cut, -5, 0, 10) == [True, True, True]
    assert (cut.results, cut.open) == (0, False)


def test_windows_that_began_before_the_stop_are_not() -> None:
    cut = Cut("q", 20)
    assert complete(cut, 0, 10, 20, 30) == [False, False, True, True]
    assert cut.results == 2


def test_after_a_crash_the_first_firing_says_how_far_rows_had_come() -> None:
    answers = [15, 1000]
    cut = Cut("q", None, lambda: answers.pop(0))
    assert cut.open
    assert complete(cut) == []
    assert cut.open, "nothing has fired"
    assert complete(cut, 0, 10) == [False, False]
    assert complete(cut, 20, 30) == [True, True]
    assert answers == [1000], "asked once"


def test_after_a_crash_and_the_end_of_all_producers_what_fires_with_it_may_lack_rows() -> None:
    answers = [None, None, 500]
    cut = Cut("q", None, lambda: answers.pop(0))
    assert complete(cut, 0, 10) == [False, False]
    assert complete(cut, 20, 10) == [False, False]
    assert cut.open
    assert complete(cut, 30, 40) == [True, True], "of the producers that came after the end"
    assert not cut.open


OLD = pa.schema([("window_start", pa.int64()), ("n", pa.int64()), ("revision", pa.int32())])
NEW = OLD.append(pa.field("complete", pa.bool_()))


def rows(schema: pa.Schema, *numbers: int) -> pa.RecordBatch:
    columns = {field.name: [n % 2 == 0 if field.name == "complete" else n for n in numbers] for field in schema}
    return pa.RecordBatch.from_pydict(columns, schema=schema)


@pytest.mark.parametrize("plan", [None, "p"])
def test_a_log_from_before_the_column_is_read_as_complete_and_goes_on_with_it(tmp_path: Path, plan: str | None) -> None:
    with ResultLog(tmp_path, OLD, plan=plan) as log:
        log.append(rows(OLD, 1, 2, 3))
    for n in (4, 5):
        with ResultLog(tmp_path, NEW, plan=plan) as log:
            log.append(rows(NEW, n))
    with ResultLog(tmp_path, NEW, plan=plan) as log:
        found = pa.Table.from_batches(log.read(0)).to_pydict()
        assert found["window_start"] == [1, 2, 3, 4, 5]
        assert found["complete"] == [True, True, True, True, False]
        assert pa.Table.from_batches(log.read(1, 1)).to_pydict()["complete"] == [True]
        assert log.read(0)[0].schema.equals(NEW)


def test_an_empty_log_from_before_the_column_goes_on_with_it(tmp_path: Path) -> None:
    ResultLog(tmp_path, OLD).close()
    with ResultLog(tmp_path, NEW) as log:
        log.append(rows(NEW, 1, 2))
        assert log.next_offset == 2


def test_the_lock_knows_whether_its_last_owner_stopped_cleanly(tmp_path: Path) -> None:
    lock = DataDirLock(tmp_path)
    assert not lock.crashed
    lock.release(clean=False)
    lock = DataDirLock(tmp_path)
    assert lock.crashed
    lock.release()
    lock = DataDirLock(tmp_path)
    assert not lock.crashed
    lock.release()


def test_the_catalog_keeps_what_was_open(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    assert (catalog.live, catalog.cut, catalog.knows_cuts) == (set(), {}, True)
    catalog.live = {"s"}
    catalog.cut = {"gone": 5}
    catalog.write(durable=False)
    again = Catalog(tmp_path)
    assert (again.live, again.cut) == ({"s"}, {})  # there is no such query
    old = (tmp_path / "catalog.json").read_text().replace('"live"', '"was"').replace('"cut"', '"were"')
    (tmp_path / "catalog.json").write_text(old)
    assert (Catalog(tmp_path).live, Catalog(tmp_path).knows_cuts) == (None, False)

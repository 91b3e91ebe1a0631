"""The fast lane: files to a stream, scheduled by Spark, read by Arrow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import flexstream as fs
from flexstream import spark as fspark
from flexstream.spark.shipping import Split, share_out
from flexstream.testing import run
from tests.property.checks import assert_same_results
from tests.spark.rig import QUERY, STREAM, Daemon, arrow_table, assert_once, end, make_rows, serving
from tests.waiting import wait_until


def put(rows: np.ndarray, path: Path, row_group: int = 500) -> None:
    table = arrow_table(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=row_group)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=row_group)
    else:
        plain = table.set_column(0, "t", pa.array(rows["t"].tolist()))
        pyarrow.csv.write_csv(plain, path)


def test_files_of_all_kinds_arrive_once(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(9_000)
    folder = tmp_path / "in"
    folder.mkdir()
    for part, suffix in zip(np.split(rows, 3), (".parquet", ".arrow", ".csv"), strict=True):
        put(part, folder / f"part{suffix}")
    (folder / "_SUCCESS").touch()
    shipped = fspark.ship(spark, folder, daemon.endpoint, STREAM.name, split_bytes=20_000, progress=True, end=True)
    assert (shipped.rows, shipped.files, shipped.applied) == (9_000, 3, True)
    assert shipped.splits > 3
    assert "9,000 rows of 3 files" in str(shipped)
    assert_once(daemon, rows)


def test_small_splits_share_a_task_and_none_is_left_out() -> None:
    def sizes(given: list[int], task_bytes: int, least: int) -> list[list[int]]:
        splits = [Split(f"{i}", "parquet", 0, 1, size) for i, size in enumerate(given)]
        tasks = share_out(splits, task_bytes, least)
        assert [split for task in tasks for split in task] == splits
        assert all(tasks)
        return [[split.bytes for split in task] for task in tasks]

    assert sizes([10] * 8, 1000, 4) == [[10, 10]] * 4
    assert sizes([10] * 8, 20, 1) == [[10, 10]] * 4
    assert sizes([10, 10], 1000, 4) == [[10], [10]]
    assert sizes([100, 1, 1, 1], 1000, 2) == [[100], [1, 1, 1]]
    assert sizes([1, 1, 1, 100], 1000, 4) == [[1], [1], [1], [100]]
    assert sizes([0, 0, 0], 10, 2) == [[0], [0, 0]]
    assert sizes([], 10, 2) == []


def test_a_job_with_a_name_is_shipped_once(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(2_000)
    put(rows, tmp_path / "a.parquet")
    pattern = str(tmp_path / "*.parquet")
    assert fspark.ship(spark, pattern, daemon.endpoint, STREAM.name, job="today").applied
    again = fspark.ship(spark, [pattern], daemon.endpoint, STREAM.name, job="today")
    assert not again.applied
    assert "already there" in str(again)
    end(daemon)
    assert_once(daemon, rows)


def test_columns_that_the_stream_does_not_have_are_not_read(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    rows = make_rows(1_000)
    table = arrow_table(rows).append_column("comment", pa.array([None] * len(rows), pa.string()))
    pq.write_table(table, tmp_path / "a.parquet")
    fspark.ship(spark, tmp_path / "a.parquet", daemon.endpoint, STREAM.name, end=True)
    assert_once(daemon, rows)


def test_groups_are_divided_over_two_daemons(spark: Any, tmp_path: Path) -> None:
    rows = make_rows(5_000)
    put(rows, tmp_path / "a.parquet")
    with serving(tmp_path / "one") as one, serving(tmp_path / "two") as two:
        both = f"{one.endpoint},{two.endpoint}"
        assert (
            fspark.ship(spark, tmp_path / "a.parquet", both, STREAM.name, job="j", end=True, split_bytes=1).rows
            == 5_000
        )
        assert not fspark.ship(spark, tmp_path / "a.parquet", both, STREAM.name, job="j", end=True).applied
        expected = run(QUERY, rows).windows
        wait_until(lambda: len(one.results()) + len(two.results()) >= len(expected), "all results")
        assert {row["group"] % 2 for row in one.results()} == {0}
        assert {row["group"] % 2 for row in two.results()} == {1}
        assert_same_results(QUERY, one.results() + two.results(), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop_columns(["price"]), "lacks price"),
        (lambda t: t.set_column(3, "x", t["x"].cast(pa.string())), "column 'x' is string in the file, but i32"),
        (None, "cannot tell what kind of file"),
    ],
    ids=["missing-column", "wrong-type", "unknown-kind"],
)
def test_files_that_do_not_fit_are_told_before_any_task(
    spark: Any, refusing: Daemon, tmp_path: Path, change: Any, words: str
) -> None:
    path = tmp_path / ("a.parquet" if change else "a.txt")
    if change:
        pq.write_table(change(arrow_table(make_rows(10))), path)
    else:
        path.touch()
    with pytest.raises(fs.FlexStreamError, match=words):
        fspark.ship(spark, path, refusing.endpoint, STREAM.name)


def test_no_files_and_broken_files_are_named(spark: Any, refusing: Daemon, tmp_path: Path) -> None:
    with pytest.raises(fs.ConfigError, match=re.escape(f"no files to ship at {tmp_path}/none")):
        fspark.ship(spark, tmp_path / "none", refusing.endpoint, STREAM.name)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(fs.ConfigError, match=re.escape("broken.parquet as parquet")):
        fspark.ship(spark, tmp_path / "broken.parquet", refusing.endpoint, STREAM.name)


def test_a_null_in_one_file_leaves_all_of_them_out(spark: Any, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    put(make_rows(1_000), tmp_path / "in" / "a.parquet")
    table = arrow_table(make_rows(10))
    nulls = pa.array([None, *range(9)], pa.int32())
    pq.write_table(table.set_column(3, "x", nulls), tmp_path / "in" / "b.parquet")
    with pytest.raises(Exception, match="field 'x' has 1 null"):
        fspark.ship(spark, tmp_path / "in", daemon.endpoint, STREAM.name)
    assert daemon.ledger()["accepted"] == 0
    wait_until(lambda: daemon.client.get("/v1/stages")["stages"] == [], "no stages")

"""The daemon with the real engine: rows over TCP in, results over HTTP out, across stops and crashes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.client.http import Client
from flexstream.testing.ysb import YSB_QUERY, expected_views, generate
from tests.waiting import WAIT_S, wait_until

ROWS = 60_000
RATE = 2_000  # rows in a second of event time: 30 s, three windows and a little
NEXT_START = 1_700_000_100_000


class Served:
    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        self.child = child
        self.ready = json.loads(child.stdout.readline())
        self.client = Client(self.ready["control"], timeout_s=WAIT_S)

    def send(self, rows: Any) -> None:
        with fs.Producer(self.ready["control"], stream="ads") as producer:
            producer.send(rows)

    def views(self, offset: int = 0, rows: int | None = None) -> dict[tuple[int, int], int]:
        """The results from `offset` on; with `rows` it waits until there are so many, and sees that no more come.

        (A producer's close waits until its rows are processed; their results are written a moment later.)
        """
        found: dict[tuple[int, int], int] = {}
        if rows is not None:
            assert sum(1 for _ in self.client.rows("ysb", offset=offset, limit=rows, follow=True)) == rows
        for row in self.client.rows("ysb", offset=offset):
            start = int(np.datetime64(row["window_start"], "ms").astype(np.int64))
            assert (start, row["campaign_id"]) not in found
            found[start, row["campaign_id"]] = row["views"]
        return found


@contextmanager
def serve(project: Path, data_dir: Path, *options: str) -> Iterator[Served]:
    code = "from flexstream.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "--json", "--workers", "1", "--groups", "16"]
    places = ["--control", "127.0.0.1:0", "--data", "127.0.0.1:0", "--data-dir", str(data_dir)]
    child = subprocess.Popen(
        [*command, *places, *options],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(project)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Served(child)
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def test_rows_sent_over_tcp_come_out_as_right_results_over_http(project: Path, tmp_path: Path) -> None:
    rows = generate(ROWS, 20, 1, RATE)
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        served.send(rows)
        expected = expected_views(rows)
        assert served.views(rows=len(expected)) == expected
        ledger = served.client.get("/v1/status")["streams"]["ads"]["ledger"]
        assert ledger["received"] == ledger["accepted"] == ROWS
        batches = list(served.client.batches("ysb"))
        assert batches[0].schema.equals(YSB_QUERY.result_schema())
        assert served.client.probe("/readyz")[0] == 200


def test_the_started_daemon_has_not_loaded_pandas_or_pyarrow_dataset(project: Path, tmp_path: Path) -> None:
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        assert list(served.client.rows("ysb")) == []
        mapped = Path(f"/proc/{served.child.pid}/maps").read_text()
        assert "pyarrow" in mapped
        assert not [line for line in mapped.splitlines() if "pandas" in line or "/_dataset." in line]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_results_streams_and_queries_survive_a_restart(project: Path, tmp_path: Path, how: int) -> None:
    first, second = generate(ROWS, 20, 1, RATE), generate(ROWS, 20, 2, RATE, NEXT_START)
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        served.send(first)
        expected = expected_views(first)
        assert served.views(rows=len(expected)) == expected
        next_offset = served.client.get("/v1/queries/ysb")["log"]["next_offset"]
        served.child.send_signal(how)
        served.child.wait(WAIT_S)
        assert served.child.returncode == (0 if how == signal.SIGTERM else -how)
    with serve(project, tmp_path) as served:
        assert served.ready["queries"] == ["ysb"]
        assert served.views() == expected
        served.send(second)
        expected = expected_views(second)
        assert served.views(next_offset, rows=len(expected)) == expected


def test_rows_sent_again_after_a_kill_do_not_fire_their_window_again(project: Path, tmp_path: Path) -> None:
    rows = generate(ROWS, 20, 1, RATE)
    tail = rows[-ROWS // 10 :]  # the last window's, fired and not yet acknowledged, for all that its producer knows
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        served.send(rows)
        expected = expected_views(rows)
        assert served.views(rows=len(expected)) == expected
        served.child.kill()
        served.child.wait(WAIT_S)
    with serve(project, tmp_path) as served:
        served.send(tail)
        assert served.views() == expected, "each result is there once"
        views = int((tail["event_type"] == b"view").sum())
        assert served.client.get("/v1/queries/ysb")["late"] == views
        assert sum(1 for _ in served.client.rows("ysb", late=True, limit=views, follow=True)) == views


def test_a_stop_names_the_windows_that_had_not_fired(project: Path, tmp_path: Path) -> None:
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        producer = fs.Producer(served.ready["control"], stream="ads", retry_s=0.1)
        producer.send(generate(ROWS, 20, 1, RATE))
        producer.flush(WAIT_S)
        served.child.terminate()
        out, _ = served.child.communicate(timeout=WAIT_S)
        stopped = json.loads(out.splitlines()[-1])
        assert served.child.returncode == 0
        assert stopped["drained"] is True
        assert [window["query"] for window in stopped["open_windows"]] == ["ysb"]
        with pytest.raises(fs.FlexStreamError):
            producer.close()


def test_a_taken_data_port_and_a_missing_core_are_one_line_and_a_hint(project: Path, tmp_path: Path) -> None:
    with serve(project, tmp_path / "a") as served:
        code = "from flexstream.cli import main; main()"
        for options, words in (
            (["--data", served.ready["data"]], "Address already in use"),
            (["--data", "127.0.0.1:0", "--workers", "0,4095"], "core 4095"),
        ):
            command = [
                sys.executable,
                "-c",
                code,
                "serve",
                "--control",
                "127.0.0.1:0",
                "--data-dir",
                str(tmp_path / "b"),
            ]
            done = subprocess.run(
                [*command, *options], cwd=project, capture_output=True, text=True, timeout=WAIT_S, check=False
            )
            assert done.returncode == 1
            assert words in done.stderr
            assert "hint:" in done.stderr
            assert "Traceback" not in done.stderr


def test_another_plan_under_an_old_name_is_told_apart_or_refused(project: Path, tmp_path: Path) -> None:
    rows, later = generate(ROWS, 20, 1, RATE), generate(ROWS, 20, 2, RATE, NEXT_START)
    other = YSB_QUERY.stream.query("ysb").window(fs.tumbling("10s"))
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        served.send(rows)
        first = len(expected_views(rows))
        served.views(rows=first)
        served.client.delete("/v1/queries/ysb")
        with pytest.raises(fs.FlexStreamError, match="views: int64") as caught:
            served.client.post("/v1/queries", other.agg(total=fs.count()).to_dict())
        assert caught.value.code == "log_schema"
        assert "another name" in caught.value.hint
        served.client.post("/v1/queries", other.agg(views=fs.count()).to_dict())
        served.send(later)
        log = served.client.get("/v1/queries/ysb")["log"]
        assert (log["generation"], log["generation_offset"]) == (2, first)
    with serve(project, tmp_path) as served:
        log = served.client.get("/v1/queries/ysb")["log"]
        assert (log["generation"], log["generation_offset"]) == (2, first)


def completeness(served: Served, offset: int = 0) -> dict[int, set[bool]]:
    """Window start, in windows of 10 s since the first of `generate` -> what its results say."""
    found: dict[int, set[bool]] = {}
    for row in served.client.rows("ysb", offset=offset):
        start = int(np.datetime64(row["window_start"], "ms").astype(np.int64))
        found.setdefault((start - 1_700_000_000_000) // 10_000, set()).add(row["complete"])
    return found


def wait_for_catalog(data_dir: Path, live: list[str]) -> None:
    path = data_dir / "catalog.json"
    wait_until(lambda: json.loads(path.read_text())["live"] == live, f"live streams {live} in the catalog")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_windows_that_a_stop_cut_say_so(project: Path, tmp_path: Path, how: int) -> None:
    """Window 2 is open when the daemon ends: what comes of it after the restart is not all of it."""
    rows = generate(3 * ROWS, 20, 1, RATE)  # 90 s
    before, after = rows[: ROWS * 5 // 6], rows[ROWS * 5 // 6 :]  # the first 25 s, and the rest
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        producer = fs.Producer(served.ready["control"], stream="ads", retry_s=0.1)
        producer.send(before)
        producer.flush(WAIT_S)
        wait_for_catalog(tmp_path, ["ads"])
        wait_until(lambda: len(completeness(served)) == 2, "two windows")
        assert set().union(*completeness(served).values()) == {True}
        first = served.client.get("/v1/queries/ysb")["log"]["next_offset"]
        served.child.send_signal(how)
        served.child.wait(WAIT_S)
    with pytest.raises(fs.FlexStreamError):
        producer.close()
    with serve(project, tmp_path) as served:
        with fs.Producer(served.ready["control"], stream="ads") as producer:
            for piece in np.array_split(after, 65):
                producer.send(piece)
                producer.flush(WAIT_S)
        wait_until(lambda: len(completeness(served, first)) == 7, "all windows")
        found = completeness(served, first)
        assert found[2] == {False}
        if how == signal.SIGTERM:
            assert [found[n] for n in range(3, 9)] == [{True}] * 6
        else:  # how far rows had come is not known: a window more
            assert [found[n] for n in range(4, 9)] == [{True}] * 5
        status = served.client.get("/v1/queries/ysb")
        assert status["incomplete_results"] == sum(
            1 for row in served.client.rows("ysb", offset=first) if not row["complete"]
        )
        wait_for_catalog(tmp_path, [])


def test_a_crash_of_a_daemon_that_had_nothing_to_lose_makes_nothing_incomplete(project: Path, tmp_path: Path) -> None:
    with serve(project, tmp_path) as served:
        served.client.post("/v1/queries", YSB_QUERY.to_dict())
        served.send(generate(ROWS, 20, 1, RATE))
        wait_for_catalog(tmp_path, [])
        served.child.kill()
        served.child.wait(WAIT_S)
    with serve(project, tmp_path) as served:
        served.send(generate(ROWS, 20, 2, RATE, NEXT_START))
        wait_until(lambda: len(completeness(served)) == 6, "all windows")
        assert set().union(*completeness(served).values()) == {True}

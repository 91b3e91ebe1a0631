"""Exactly once on bad days: a daemon killed at every point between a staged row and its window in the log."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest

import flexstream as fs
from flexstream.errors import FlexStreamError
from flexstream.state.stage.stage_file import StageFile
from tests.adversity.staged_daemon import (
    POISON_ROWS,
    STREAM,
    check,
    commit,
    drive,
    end,
    make_batches,
    stage,
    staged_daemon,
    wait_for,
)
from tests.property.checks import as_rows

pytestmark = pytest.mark.time_limit(240)  # daemons start and stop many times; each takes its time on a busy machine

BATCHES = 5

POINTS = [
    "before the stage is durable:5",
    "after the stage is durable:5",
    "before the commit:2",
    "between commit and apply:2",
    "while applying:5",
    "before the watermark:3",
    "after applying:3",
    "while writing results:3",
    "while writing results:8",
    "before a batch is done:1",
    "before its stages are removed:1",
    "while the journal is written anew:2",
]


@pytest.mark.parametrize("point", POINTS)
def test_killed(point: str, tmp_path: Path) -> None:
    batches = make_batches(BATCHES)
    with staged_daemon(tmp_path / "data", die=point) as daemon:
        for number, rows in enumerate(batches):
            drive(daemon, number, rows)
        end(daemon)
        wait_for(daemon, lambda status: status["stages"]["kept_batches"] == status["stages"]["committed"] == 0)
        assert daemon.deaths >= 1, "it was to die"
        check(daemon, batches)
        left = {stage["stage"]: stage["state"] for stage in daemon.client.get("/v1/stages")["stages"]}
        assert set(left.values()) <= {"finished"}, "only what an attempt before had staged waits for its end"
        assert {path.stem for path in (tmp_path / "data" / "stage").glob("*.stage")} == set(left)


def test_killed_after_every_commit_and_while_replaying(tmp_path: Path) -> None:
    batches = make_batches(BATCHES)
    with staged_daemon(tmp_path / "data") as daemon:
        for number, rows in enumerate(batches):
            drive(daemon, number, rows)
            daemon.kill()
            daemon.start("while replaying:2" if number % 2 else "")
        end(daemon)
        check(daemon, batches)
        assert daemon.deaths >= BATCHES


def test_killed_when_the_first_batches_are_done(tmp_path: Path) -> None:
    """Batches that are applied again meet the watermark that they met, and late rows find all of their windows."""
    batches = make_batches(12, 400, old_share=0.3)
    with staged_daemon(tmp_path / "data") as daemon:
        for number in range(10):
            drive(daemon, number, batches[number])
        wait_for(daemon, lambda status: status["stages"]["kept_batches"] < 6)
        daemon.kill()
        daemon.start()
        assert daemon.client.get("/v1/status")["stages"]["failed"] == {}
        for number in (10, 11):
            drive(daemon, number, batches[number])
        end(daemon)
        check(daemon, batches)


def test_stopped_after_every_commit(tmp_path: Path) -> None:
    batches = make_batches(BATCHES)
    with staged_daemon(tmp_path / "data") as daemon:
        for number, rows in enumerate(batches):
            drive(daemon, number, rows)
            daemon.terminate()
            daemon.start()
            assert not commit(daemon, number, [{"stage": "lost", "rows": len(rows)}])["applied"]
        end(daemon)
        check(daemon, batches)


def test_a_finished_stage_survives_the_death_of_the_daemon_and_can_be_committed(tmp_path: Path) -> None:
    batches = make_batches(2)
    with staged_daemon(tmp_path / "data") as daemon:
        drive(daemon, 0, batches[0])
        receipts = stage(daemon, batches[1])
        daemon.kill()
        daemon.start()
        assert daemon.client.get("/v1/status")["streams"]["s"]["ledger"]["staged"] == len(batches[1])
        assert commit(daemon, 1, receipts)["rows"] == len(batches[1])
        end(daemon)
        check(daemon, batches)


def test_a_query_that_came_after_a_batch_does_not_see_it_after_a_restart(tmp_path: Path) -> None:
    batches = make_batches(4)
    later = STREAM.query("later").window(fs.tumbling("100ms")).agg(n=fs.count())
    with staged_daemon(tmp_path / "data") as daemon:
        for number in (0, 1):
            drive(daemon, number, batches[number])
        daemon.client.post("/v1/queries", later.to_dict())
        for number in (2, 3):
            daemon.kill()
            daemon.start()
            drive(daemon, number, batches[number])
        daemon.kill()
        daemon.start()
        end(daemon)
        check(daemon, batches)
        seen = sum(sum(batch.column("n").to_pylist()) for batch in daemon.client.batches("later"))
        late = sum(batch.num_rows for batch in daemon.client.batches("later", late=True))
        assert seen + late == len(batches[2]) + len(batches[3])


def test_a_query_that_was_cancelled_and_came_again_does_not_see_the_batches_before(tmp_path: Path) -> None:
    batches = make_batches(2)
    again = STREAM.query("again").window(fs.tumbling("1000ms")).agg(n=fs.count())
    with staged_daemon(tmp_path / "data") as daemon:
        daemon.client.post("/v1/queries", again.to_dict())
        drive(daemon, 0, batches[0])
        daemon.client.delete("/v1/queries/again")
        daemon.client.post("/v1/queries", again.to_dict())
        drive(daemon, 1, batches[1])
        daemon.kill()
        daemon.start()
        end(daemon)
        found = as_rows(daemon.client.batches("again"))
        seen = sum(row["n"] for row in found if row["window_start"] == 0)  # the one before had fired for the first
        assert seen == int((batches[1]["t"] >= 0).sum())
        check(daemon, batches)


def test_a_full_disk_refuses_the_stage_or_the_commit_and_loses_nothing(tmp_path: Path) -> None:
    """A limit on the size of files is what a test can have of a full disk."""
    batches = make_batches(4)
    with staged_daemon(tmp_path / "data") as daemon:
        drive(daemon, 0, batches[0])
        daemon.terminate()
        daemon.start(file_bytes=16_384)  # a stage of few rows takes three pages
        with pytest.raises(FlexStreamError) as caught:
            stage(daemon, batches[1], tasks=1)
        assert caught.value.code == "disk_full", caught.value
        receipts = stage(daemon, batches[1][:90], tasks=3)
        assert daemon.client.delete(f"/v1/stages/{receipts[0]['stage']}")["dropped"]
        with pytest.raises(FlexStreamError) as caught:
            [commit(daemon, number, []) for number in range(100, 500)]  # until the journal is full
        assert caught.value.code == "disk_full", caught.value
        assert daemon.client.get("/v1/status")["state"] == "running"
        daemon.terminate()
        daemon.start()
        for number in (1, 2, 3):
            drive(daemon, number, batches[number])
        end(daemon)
        check(daemon, batches)


def test_a_batch_that_kills_the_daemon_whenever_it_is_applied_is_set_aside_by_name(tmp_path: Path) -> None:
    batches = make_batches(4)
    poison = make_batches(1, POISON_ROWS, seed=7)[0]
    poison["t"] += 100_000  # were its time to count, all that comes after would be late
    with staged_daemon(tmp_path / "data") as daemon:
        daemon.terminate()
        daemon.start("poison")
        for number in (0, 1):
            drive(daemon, number, batches[number])
        receipts = stage(daemon, poison, tasks=1)
        with pytest.raises((FlexStreamError, OSError)):
            commit(daemon, 2, receipts)
        daemon.wait_dead()
        daemon.start("poison")  # until it starts
        assert daemon.deaths == 3
        for _ in range(2):
            (aside,) = daemon.client.get("/v1/status")["stages"]["set_aside"]
            assert (aside["sink"], aside["query"], aside["batch"]) == ("sink", "query", 2)
            assert (aside["rows"], aside["died"]) == (POISON_ROWS, 3)
            assert aside["stages"] == [receipts[0]["stage"]]
            found = StageFile.open(tmp_path / "data" / "stage" / "aside" / f"{receipts[0]['stage']}.stage")
            assert found is not None
            assert found[2]["rows"] == POISON_ROWS
            with urllib.request.urlopen(f"http://{daemon.ready['control']}/metrics") as page:
                assert b"flexstream_batches_set_aside 1" in page.read()
            assert commit(daemon, 2, receipts)["duplicate"]
            daemon.kill()
            daemon.start("poison")
        assert "batch_set_aside" in (tmp_path / "daemon.log").read_text()
        for number in (2, 3):
            drive(daemon, number + 1, batches[number])
        end(daemon)
        check(daemon, batches)

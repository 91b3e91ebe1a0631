"""Staged rows: invisible until a commit names them, counted once, whoever repeats himself."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import ConfigError, ConnectError, FlexStreamError, ProtocolError, StageError
from flexstream.staging import room as stage_room
from flexstream.staging import stages
from flexstream.state.stage import applied
from flexstream.state.stage import commit_journal as commits
from flexstream.testing import run
from tests.adversity.rig import QUERY, STREAM, address, make_rows, serving
from tests.property.checks import as_rows, assert_balances, assert_ledger, assert_same_results
from tests.waiting import WAIT_S, wait_until


def new_id() -> str:
    return str(uuid.uuid4())


def staging(engine: fs.Engine, **options: Any) -> fs.Producer:
    return fs.Producer(address(engine), stream=STREAM, stage=True, **options)


def stage(engine: fs.Engine, *parts: np.ndarray, stage_id: str | None = None) -> dict[str, Any]:
    with staging(engine) as producer:
        producer.begin_stage(stage_id or new_id())
        for rows in parts:
            producer.send(rows)
        return producer.finish_stage()


def ledger(engine: fs.Engine) -> dict[str, int]:
    found = engine.status()["streams"]["s"]["ledger"]
    assert_balances(found, "received")
    return dict(found)


def results(engine: fs.Engine, query: fs.Query = QUERY) -> list[dict[str, Any]]:
    return as_rows(engine.results(query.name))


def assert_equal_to_oracle(engine: fs.Engine, rows: np.ndarray, query: fs.Query = QUERY) -> None:
    engine.finish(timeout=WAIT_S)
    assert_same_results(query, results(engine, query), run(query, rows).windows)


@pytest.fixture(params=["memory", "disk"])
def data_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "disk" else None


def test_rows_count_when_they_are_committed_and_not_before(data_dir: Path | None) -> None:
    rows = make_rows(20_000)
    with serving(data_dir=data_dir, workers=2) as engine:
        receipt = stage(engine, rows[:7], rows[7:])
        groups = np.bincount(STREAM.group_of(rows, engine.groups), minlength=engine.groups)
        assert receipt["rows"] == 20_000
        assert receipt["bytes"] == 20_000 * STREAM.schema.row_bytes
        assert receipt["groups"] == {g: n for g, n in enumerate(groups.tolist()) if n}
        assert ledger(engine) == {
            "received": 20_000, "accepted": 0, "rejected": 0, "staged": 20_000, "in_flight": 0,
        }  # fmt: skip
        assert engine.status()["queries"]["q"]["rows"] == 0
        assert engine.status()["streams"]["s"]["sessions"] == []
        assert engine.staging.commit("sink", "query", 0, [receipt]) == {
            "applied": True, "rows": 20_000, "duplicate": False,
        }  # fmt: skip
        wait_until(lambda: ledger(engine)["staged"] == 0, "no staged rows")
        assert_equal_to_oracle(engine, rows)
        assert_ledger(engine.status(), "s", 20_000)


def test_a_process_with_many_open_files_stages_too(data_dir: Path | None) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with serving(data_dir=data_dir) as engine, open(os.devnull) as nothing, contextlib.ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1100):
            opened.callback(os.close, os.dup(nothing.fileno()))
        rows = make_rows(500)
        assert stage(engine, rows[:250], rows[250:])["rows"] == len(rows)


def test_a_commit_raises_the_watermark_to_its_rows_and_no_further(data_dir: Path | None) -> None:
    rows = make_rows(4000)  # event times 0 to 999, disorder 5
    with serving(data_dir=data_dir) as engine:
        receipt = stage(engine, rows[:2000])
        assert results(engine) == []
        engine.staging.commit("sink", "query", 0, [receipt])
        expected = {w: v for w, v in run(QUERY, rows[:2000]).windows.items() if w[0] + 100 <= 499 - 5}
        wait_until(lambda: len(results(engine)) >= len(expected), "the results")
        assert_same_results(QUERY, results(engine), expected)
        wait_until(lambda: engine.status()["streams"]["s"]["watermark"]["max"] == 494, "the watermark")
        engine.staging.commit("sink", "query", 1, [stage(engine, rows[2000:])])
        assert_equal_to_oracle(engine, rows)


def test_a_batch_that_was_applied_is_acknowledged_and_ignored(data_dir: Path | None) -> None:
    rows = make_rows(1000)
    with serving(data_dir=data_dir) as engine:
        receipt = stage(engine, rows)
        engine.staging.commit("sink", "query", 7, [receipt])
        for _ in range(3):
            again = [stage(engine, rows[:400]), stage(engine, rows[400:])]
            for receipts in ([receipt], again, [{"stage": "never seen", "rows": 1000}]):
                answer = engine.staging.commit("sink", "query", 7, receipts)
                assert answer == {"applied": False, "rows": 0, "duplicate": True}
        assert {one["state"] for one in engine.staging.stages.list()} <= {"committed"}, "a repetition leaves nothing"
        assert_equal_to_oracle(engine, rows)


def test_other_rows_under_a_batch_number_that_was_used_are_an_error(
    data_dir: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "REMEMBERED_BATCHES", 2)
    rows = make_rows(1000)
    with serving(data_dir=data_dir) as engine:
        engine.staging.commit("sink", "query", 0, [])
        for batch in (1, 2):
            engine.staging.commit("sink", "query", batch, [stage(engine, rows[500 * batch - 500 : 500 * batch])])
        other = stage(engine, make_rows(499))
        for batch in (0, 1, 2):  # 0 is known as one of many
            with pytest.raises(StageError) as caught:
                engine.staging.commit("sink", "query", batch, [other])
            assert caught.value.code == "batch_differs"
            assert "checkpoint" in str(caught.value)
        assert ledger(engine)["staged"] == 499
        assert engine.staging.commit("sink", "another query", 1, [other])["applied"]
        wait_until(lambda: ledger(engine)["accepted"] == 1499, "the rows")


def test_the_same_batch_of_another_query_or_sink_is_another_batch(data_dir: Path | None) -> None:
    parts = [make_rows(500, seed=i) for i in range(3)]
    for rows in parts:
        rows["t"] %= 5  # within the disorder: no batch makes another late
    with serving(data_dir=data_dir) as engine:
        for (sink, query), rows in zip([("a", "q"), ("a", "p"), ("b", "q")], parts, strict=True):
            assert engine.staging.commit(sink, query, 0, [stage(engine, rows)])["applied"]
        assert_equal_to_oracle(engine, np.concatenate(parts))


def test_many_stages_of_one_commit_from_many_producers_at_once(data_dir: Path | None) -> None:
    parts = [make_rows(3000, seed=i) for i in range(8)]
    receipts: list[dict[str, Any]] = []
    with serving(data_dir=data_dir, workers=2) as engine:
        threads = [threading.Thread(target=lambda p=p: receipts.append(stage(engine, p))) for p in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert engine.staging.commit("sink", "query", 0, receipts)["rows"] == 24_000
        assert_equal_to_oracle(engine, np.concatenate(parts))


def test_a_producer_is_used_for_stage_after_stage(data_dir: Path | None) -> None:
    rows = make_rows(9000)
    with serving(data_dir=data_dir) as engine, staging(engine) as producer:
        for batch in range(9):
            producer.begin_stage(new_id())
            producer.send(rows[batch * 1000 : batch * 1000 + 1000])
            engine.staging.commit("sink", "query", batch, [producer.finish_stage()])
        assert producer.stats()["stages"] == 9
        assert producer.stats()["reconnects"] == 0
        assert_equal_to_oracle(engine, rows)


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any]], list[dict[str, Any]]]]] = {
    "rows": ("stage_counts", lambda r: [r | {"rows": r["rows"] + 1}]),
    "bytes": ("stage_counts", lambda r: [r | {"bytes": 1}]),
    "groups": ("stage_counts", lambda r: [r | {"groups": {**r["groups"], 0: 1}}]),
    "unknown": ("unknown_stage", lambda r: [r, {"stage": new_id(), "rows": 0}]),
    "twice": ("stage_used", lambda r: [r, r]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_commit_that_does_not_fit_applies_nothing_and_may_be_mended(case: str, data_dir: Path | None) -> None:
    code, spoil = REFUSED[case]
    rows = make_rows(1000)
    with serving(data_dir=data_dir) as engine:
        receipt = stage(engine, rows)
        with pytest.raises(StageError) as caught:
            engine.staging.commit("sink", "query", 0, spoil(receipt))
        assert caught.value.code == code
        assert ledger(engine)["staged"] == 1000
        assert engine.staging.commit("sink", "query", 0, [receipt])["applied"]
        with pytest.raises(StageError) as caught:
            engine.staging.commit("sink", "query", 1, [receipt])
        assert caught.value.code in ("stage_used", "unknown_stage")
        assert_equal_to_oracle(engine, rows)


def test_a_stage_that_is_not_finished_cannot_be_committed() -> None:
    with serving() as engine, staging(engine) as producer:
        stage_id = new_id()
        producer.begin_stage(stage_id)
        producer.send(make_rows(100))
        producer.flush()
        wait_until(lambda: ledger(engine)["staged"] == 100, "staged rows")
        with pytest.raises(StageError, match="not finished"):
            engine.staging.commit("sink", "query", 0, [{"stage": stage_id, "rows": 100}])


def test_stages_of_two_streams_do_not_go_into_one_commit() -> None:
    other = fs.Stream("other", {"t": "timestamp[ms]", "k": "i32"}, key="k", time="t")
    with serving() as engine:
        engine.add(other)
        with fs.Producer(address(engine), stream="other", stage=new_id()) as producer:
            producer.send([{"t": 1, "k": 2}])
            receipts = [producer.finish_stage(), stage(engine, make_rows(10))]
        with pytest.raises(StageError) as caught:
            engine.staging.commit("sink", "query", 0, receipts)
        assert caught.value.code == "mixed_streams"


def test_an_abort_after_the_commit_undoes_nothing(data_dir: Path | None) -> None:
    rows = make_rows(1000)
    with serving(data_dir=data_dir) as engine:
        receipt = stage(engine, rows)
        engine.staging.commit("sink", "query", 0, [receipt])
        assert engine.staging.drop(receipt["stage"])["dropped"] is False
        assert_equal_to_oracle(engine, rows)


def test_a_dropped_stage_is_fenced_and_its_rows_are_counted_as_rejected(data_dir: Path | None) -> None:
    with serving(data_dir=data_dir) as engine, staging(engine) as producer:
        receipt = stage(engine, make_rows(1000))
        assert engine.staging.drop(receipt["stage"]) == {"stage": receipt["stage"], "dropped": True, "was": "finished"}
        with pytest.raises(StageError) as caught:
            engine.staging.commit("sink", "query", 0, [receipt])
        assert caught.value.code == "unknown_stage"
        assert (ledger(engine)["rejected"], ledger(engine)["staged"]) == (1000, 0)
        for use in (lambda: producer.begin_stage(receipt["stage"]),):
            with pytest.raises(ProtocolError) as refused:
                use()
            assert refused.value.code == "fenced"
        assert data_dir is None or not list((data_dir / "stage").glob("*.stage"))


def test_a_task_that_writes_on_after_its_abort_is_refused(data_dir: Path | None) -> None:
    with serving(data_dir=data_dir) as engine, staging(engine) as producer:
        stage_id = new_id()
        producer.begin_stage(stage_id)
        producer.send(make_rows(10))
        producer.flush()
        wait_until(lambda: ledger(engine)["staged"] == 10, "staged rows")
        assert engine.staging.drop(stage_id)["was"] == "open"
        producer.send(make_rows(10))
        with pytest.raises(ProtocolError) as refused:
            producer.finish_stage()
        assert refused.value.code == "fenced"
        producer.begin_stage(new_id())  # the producer itself is fine
        producer.send(make_rows(5))
        assert producer.finish_stage()["rows"] == 5
        wait_until(lambda: ledger(engine)["staged"] == 5, "staged rows")
        assert ledger(engine)["rejected"] == 10
        assert data_dir is None or len(list((data_dir / "stage").glob("*.stage"))) == 1


def test_stages_that_nobody_names_expire(data_dir: Path | None) -> None:
    with serving(data_dir=data_dir, stage_timeout_s=0.2) as engine:
        receipt = stage(engine, make_rows(100))
        wait_until(lambda: engine.staging.stages.list() == [], "no stages")
        assert engine.status()["stages"]["expired"] == 1
        assert ledger(engine)["rejected"] == 100
        with pytest.raises(StageError):
            engine.staging.commit("sink", "query", 0, [receipt])


def test_a_connection_that_ends_in_mid_stage_takes_its_rows_along(data_dir: Path | None) -> None:
    with serving(data_dir=data_dir) as engine:
        producer = staging(engine)
        producer.begin_stage(new_id())
        producer.send(make_rows(100))
        producer.flush()
        wait_until(lambda: ledger(engine)["staged"] == 100, "staged rows")
        producer.close()
        wait_until(lambda: engine.staging.stages.list() == [], "no stages")
        assert ledger(engine)["rejected"] == 100
        with pytest.raises(ConnectError) as caught:
            producer.begin_stage(new_id())
        assert caught.value.code == "closed"


def test_a_full_stage_makes_producers_wait_until_a_commit_makes_room(data_dir: Path | None) -> None:
    rows = make_rows(40_000)
    size = STREAM.schema.row_bytes * 20_000
    with serving(data_dir=data_dir, stage_limit_bytes=size + size // 2) as engine:
        first = stage(engine, rows[:20_000])
        second: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: second.append(stage(engine, rows[20_000:])))
        thread.start()
        time.sleep(0.3)
        assert thread.is_alive()
        assert not second
        engine.staging.commit("sink", "query", 0, [first])
        thread.join(WAIT_S)
        engine.staging.commit("sink", "query", 1, second)
        assert_equal_to_oracle(engine, rows)


def test_a_batch_larger_than_the_limit_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_room, "ROOM_WAIT_S", 0.2)
    with serving(stage_limit_bytes=10_000) as engine, staging(engine) as producer:
        producer.begin_stage(new_id())
        producer.send(make_rows(1000))
        with pytest.raises(FlexStreamError) as caught:
            producer.finish_stage()
        assert caught.value.code == "stage_full"
        assert "stage_limit_bytes = 10000" in caught.value.message
        wait_until(lambda: engine.staging.stages.list() == [], "no stages")


def test_past_the_bound_on_memory_rows_are_spilled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MEMORY_BYTES", 50_000)
    rows = make_rows(30_000)
    with serving() as engine, staging(engine) as producer:
        producer.begin_stage(new_id())
        for start in range(0, 30_000, 1000):
            producer.send(rows[start : start + 1000])
            producer.flush()
        receipt = producer.finish_stage()
        assert engine.staging.stages.get(receipt["stage"]).file.in_memory_bytes == 0
        engine.staging.commit("sink", "query", 0, [receipt])
        assert_equal_to_oracle(engine, rows)


def test_two_sinks_hold_each_others_windows() -> None:
    rows = make_rows(4000)
    with serving() as engine:
        engine.staging.commit("slow", "q", 0, [stage(engine, rows[:40])])
        engine.staging.commit("fast", "q", 0, [stage(engine, rows[40:])])
        wait_until(lambda: ledger(engine)["accepted"] == 4000, "the rows")
        wait_until(lambda: engine.status()["streams"]["s"]["watermark"]["max"] == 9 - 5, "the watermark")
        engine.staging.commit("slow", "q", None, [], stream="s", end=True)
        wait_until(lambda: engine.status()["streams"]["s"]["watermark"]["max"] == 999 - 5, "the watermark")
        assert_equal_to_oracle(engine, rows)


def test_end_fires_what_is_open_and_a_later_commit_begins_anew() -> None:
    rows = make_rows(4000)
    with serving() as engine:
        engine.staging.commit("sink", "q", 0, [stage(engine, rows[:2000])], end=True)
        wait_until(lambda: len(results(engine)) == len(run(QUERY, rows[:2000]).windows), "the results")
        later = rows[2000:][rows[2000:]["t"] >= 600]
        engine.staging.commit("sink", "q", 1, [stage(engine, later)], end=True)
        assert_equal_to_oracle(engine, np.concatenate([rows[:2000], later]))
        assert engine.status()["streams"]["s"]["sessions_ended"] == 2


def test_an_empty_batch_is_a_batch(data_dir: Path | None) -> None:
    with serving(data_dir=data_dir) as engine:
        assert engine.staging.commit("sink", "q", 0, []) == {"applied": True, "rows": 0, "duplicate": False}
        empty = stage(engine)
        assert empty["rows"] == 0
        assert engine.staging.commit("sink", "q", 1, [empty])["applied"]
        assert not engine.staging.commit("sink", "q", 0, [])["applied"]
        assert not engine.staging.commit("sink", "q", 1, [])["applied"]
        engine.finish(timeout=WAIT_S)


def test_rows_too_late_for_their_window_are_late_and_rows_without_a_window_rejected() -> None:
    rows = make_rows(4000)
    odd = make_rows(3)
    odd["t"] = [2**63 - 1, -(2**63), 1]
    with serving() as engine:
        engine.staging.commit("sink", "q", 0, [stage(engine, rows)])
        engine.staging.commit("sink", "q", 1, [stage(engine, odd)])
        wait_until(lambda: ledger(engine)["accepted"] == len(rows) + 3, "the rows")
        said = engine.status()["queries"]["q"]["ledger"]
        assert (said["accepted"], said["late"], said["rejected"]) == (len(rows) + 3, 1, 2)
        assert engine.status()["streams"]["s"]["watermark"]["max"] == 999 - 5
        assert_equal_to_oracle(engine, rows)
        assert len(as_rows(engine.late("q"))) == 1


def test_an_applied_batch_is_kept_until_its_windows_are_in_the_log(tmp_path: Path) -> None:
    rows = make_rows(4000)
    with serving(data_dir=tmp_path) as engine:
        first, second = stage(engine, rows[:400]), stage(engine, rows[400:])
        engine.staging.commit("sink", "q", 0, [first])
        engine.flush()
        assert (tmp_path / "stage" / f"{first['stage']}.stage").exists()
        engine.staging.commit("sink", "q", 1, [second])
        wait_until(lambda: not (tmp_path / "stage" / f"{first['stage']}.stage").exists(), "the file to go")
        assert (tmp_path / "stage" / f"{second['stage']}.stage").exists()
        assert engine.status()["stages"]["kept_batches"] == 1
        engine.staging.commit("sink", "q", 2, [], stream="s", end=True)
        wait_until(lambda: engine.status()["stages"]["kept_batches"] == 0, "no batches that are kept")
        assert list((tmp_path / "stage").glob("*.stage")) == []


def test_a_producer_says_what_it_cannot_do() -> None:
    with serving() as engine:
        with fs.Producer(address(engine), stream="s") as plain:
            for use in (lambda: plain.begin_stage(new_id()), plain.finish_stage):
                with pytest.raises(ConfigError, match="does not stage"):
                    use()
        with staging(engine) as producer:
            for use in (lambda: producer.send(make_rows(1)), producer.finish_stage, producer.flush):
                with pytest.raises(ConfigError, match="no stage is open"):
                    use()
            with pytest.raises(ConfigError, match="staging producer"):
                producer.marker()
            with pytest.raises(ProtocolError) as caught:
                producer.begin_stage("../../etc/passwd")
            assert caught.value.code == "bad_stage"
            producer.begin_stage(new_id())
            with pytest.raises(ConfigError, match="is still open"):
                producer.begin_stage(new_id())
        with pytest.raises(ProtocolError) as caught:
            fs.Producer(address(engine), stream="nobody", stage=new_id())
        assert caught.value.code == "unknown_stream"
        changed = fs.Stream("s", {"t": "timestamp[ms]", "k": "i32"}, key="k", time="t")
        with pytest.raises(ProtocolError) as caught:
            fs.Producer(address(engine), stream=changed, stage=new_id())
        assert caught.value.code == "schema_mismatch"


def test_receipts_survive_json() -> None:
    with serving() as engine:
        receipt = json.loads(json.dumps(stage(engine, make_rows(100))))
        assert engine.staging.commit("sink", "q", 0, [receipt])["applied"]
        engine.finish(timeout=WAIT_S)


def test_commits_of_nothing_push_no_applied_batch_out_and_do_not_fill_the_disk(
    data_dir: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applied, "SINK_QUERIES", 40)
    monkeypatch.setattr(commits, "REWRITE_BYTES", 4_000)
    rows = make_rows(1000)
    with serving(data_dir=data_dir) as engine:
        engine.staging.commit("honest", "query", 0, [stage(engine, rows)])
        for i in range(40):
            engine.staging.commit("other", f"fresh {i}", 0, [])
        with pytest.raises(StageError) as caught:
            engine.staging.commit("other", "one more", 0, [])
        assert caught.value.code == "sink_full"
        for i in range(1, 1000):
            engine.staging.commit("honest", "query 2", i, [], wait_s=0)
        assert not engine.staging.commit("honest", "query", 0, [stage(engine, rows)])["applied"]
        assert engine.status()["stages"]["remembered_queries"] == 42
        if data_dir is not None:
            wait_until(lambda: (data_dir / "stage" / "journal").stat().st_size < 20_000, "a journal written anew")
        assert_equal_to_oracle(engine, rows)


def test_received_is_what_was_sent_while_committed_rows_are_applied(data_dir: Path | None) -> None:
    rows = make_rows(600_000)
    with serving(data_dir=data_dir, workers=2) as engine:
        receipts = [stage(engine, part) for part in np.split(rows, 3)]
        assert ledger(engine)["received"] == len(rows)
        engine.staging.commit("sink", "query", 0, receipts, wait_s=0)
        seen = []
        while ledger(engine)["accepted"] < len(rows):
            seen.append(ledger(engine)["received"])
        assert set(seen) <= {len(rows)}
        wait_until(lambda: ledger(engine)["in_flight"] == ledger(engine)["staged"] == 0, "all rows")
        assert_equal_to_oracle(engine, rows)
        assert ledger(engine)["received"] == len(rows)

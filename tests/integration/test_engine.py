"""The embedded engine as people use it, and as they misuse it."""

import logging
import threading
import time

import numpy as np
import pytest

import flexstream as fs
from flexstream import col
from tests.integration.small_engine import STREAM, counting, counts, finish, row
from tests.property.checks import as_rows, assert_ledger
from tests.waiting import WAIT_S, wait_until

OTHER = fs.Stream("other", {"t": "timestamp[ms]", "name": "bytes[5]"}, key="name", time="t")


# -- names


def test_names_that_are_not_there_are_named(engine):
    engine.submit(counting())
    for call in (engine.cancel, lambda n: list(engine.results(n)), lambda n: list(engine.late(n)), engine.result_log):
        with pytest.raises(fs.QueryError, match="no query 'nope'") as error:
            call("nope")
        assert error.value.code == "unknown_query"
        assert "q" in error.value.hint
    with pytest.raises(fs.EngineError, match="no stream 'nope'") as error:
        engine.feed("nope", [])
    assert error.value.code == "unknown_stream"


def test_a_name_runs_once_until_it_is_cancelled(engine):
    engine.submit(counting())
    with pytest.raises(fs.EngineError) as error:
        engine.submit(counting(window=fs.tumbling("1s")))
    assert error.value.code == "query_exists"
    engine.cancel("q")
    engine.submit(counting(window=fs.tumbling("1s")))
    engine.feed("s", [row(0), row(1)])
    finish(engine)
    assert counts(engine) == [(0, 1, 1), (1, 1, 1)]


def test_a_stream_cannot_change_but_may_be_added_twice(engine):
    engine.add(STREAM)
    with pytest.raises(fs.EngineError) as error:
        engine.add(fs.Stream("s", {"t": "timestamp[s]", "k": "i32"}, key="k", time="t"))
    assert error.value.code == "stream_exists"


def test_an_incomplete_query_is_refused_and_leaves_nothing_behind(engine):
    with pytest.raises(fs.QueryError):
        engine.submit(STREAM.query("half").filter(col("x") > 1))
    assert engine.queries == {}
    assert engine.status()["queries"] == {}


# -- cancel


def test_a_cancelled_query_is_gone_and_others_go_on(engine):
    engine.submit(counting("a"))
    engine.submit(counting("b"))
    engine.feed("s", [row(1)])
    engine.cancel("a")
    engine.feed("s", [row(2)])
    finish(engine)
    assert list(engine.queries) == ["b"]
    assert counts(engine, "b") == [(0, 1, 2)]
    with pytest.raises(fs.QueryError):
        engine.results("a")
    assert_ledger(engine.status(), "s", 2)


def test_cancel_and_submit_over_and_over(engine):
    for i in range(50):
        engine.submit(counting())
        engine.feed("s", [row(10 * i)])
        engine.cancel("q")
    engine.submit(counting())
    engine.feed("s", [row(1000)])
    finish(engine)
    assert counts(engine) == [(1000, 1, 1)]
    assert sum(worker["state_bytes"] for worker in engine.status()["workers"]) < 1 << 20


def test_a_reader_that_follows_ends_when_the_query_is_cancelled(engine):
    engine.submit(counting())
    found = []

    def follow():
        for batch in engine.results("q", follow=True):
            found.extend(as_rows([batch]))

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    engine.feed("s", [row(1), row(50)])
    wait_until(lambda: found, "the first result")
    engine.cancel("q")
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert [r["n"] for r in found] == [1]


def test_a_query_sees_the_rows_that_come_after_it(engine):
    engine.submit(counting("early"))
    engine.feed("s", [row(1)], watermark=False)
    engine.submit(counting("later"))
    engine.feed("s", [row(2)], watermark=False)
    finish(engine)
    assert counts(engine, "early") == [(0, 1, 2)]
    assert counts(engine, "later") == [(0, 1, 1)]


def test_for_a_new_query_what_the_watermark_has_passed_is_late(engine):
    engine.feed("s", [row(100)])
    engine.submit(counting())
    engine.feed("s", [row(5), row(101)])
    finish(engine)
    assert counts(engine) == [(100, 1, 1)]
    assert [r["t"] for r in as_rows(engine.late("q"))] == [5]


# -- feeding


def test_nothing_is_not_a_row(engine):
    engine.submit(counting())
    engine.feed("s", [])
    engine.feed("s", np.empty(0, STREAM.schema.dtype))
    finish(engine)
    assert counts(engine) == []
    assert_ledger(engine.status(), "s", 0)


@pytest.mark.parametrize(
    "rows", [[{"t": 1}], [row(1) | {"k": 2**40}], [row("soon")], np.zeros(3, [("a", "i4")]), 7, "rows", [1, 2]]
)
def test_rows_that_do_not_fit_are_refused_whole(engine, rows):
    engine.submit(counting())
    with pytest.raises(fs.SchemaError):
        engine.feed("s", rows)
    engine.feed("s", [row(1)])
    finish(engine)
    assert counts(engine) == [(0, 1, 1)]
    assert_ledger(engine.status(), "s", 1)


def test_feeding_one_group_wants_rows_of_that_group(engine):
    engine.submit(counting())
    rows = STREAM.schema.pack([row(1)])
    mine = int(STREAM.group_of(rows, 4)[0])
    engine.feed("s", rows, group=mine)
    for group in (-1, 4):
        with pytest.raises(fs.EngineError, match="group"):
            engine.feed("s", rows, group=group)
    with pytest.raises(fs.EngineError) as error:
        engine.feed("s", rows, group=(mine + 1) % 4)
    assert error.value.code == "wrong_group"
    finish(engine)
    assert counts(engine) == [(0, 1, 1)]


def test_a_closed_engine_says_so():
    engine = fs.Engine(pin=False)
    engine.submit(counting())
    engine.close()
    engine.close()
    for call in (lambda: engine.feed("s", [row(1)]), lambda: engine.submit(counting("b")), lambda: engine.cancel("q")):
        with pytest.raises(fs.EngineError) as error:
            call()
        assert error.value.code == "closed"


def test_a_feed_that_fails_moves_no_watermark(engine):
    engine.submit(counting())
    with pytest.raises(fs.SchemaError):
        engine.feed("s", [row(1000), {"t": 5}])
    engine.feed("s", [row(1)])
    finish(engine)
    assert counts(engine) == [(0, 1, 1)]


def test_several_threads_may_feed(engine):
    engine.submit(counting())
    threads = [
        threading.Thread(target=lambda k=k: [engine.feed("s", [row(1, k=k)] * 10, watermark=False) for _ in range(50)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    finish(engine)
    assert counts(engine) == [(0, k, 500) for k in range(4)]


# -- several queries and streams


def test_two_queries_with_different_windows_share_a_stream(engine):
    engine.submit(counting("ten"))
    engine.submit(counting("sliding", fs.sliding("4s", every="2s")))
    engine.feed("s", [row(1), row(3), row(11)])
    finish(engine)
    assert counts(engine, "ten") == [(0, 1, 2), (10, 1, 1)]
    assert counts(engine, "sliding") == [(-2, 1, 1), (0, 1, 2), (2, 1, 1), (8, 1, 1), (10, 1, 1)]


def test_a_row_that_is_late_for_one_query_only_is_applied_by_the_other(engine):
    engine.submit(counting("short", fs.tumbling("1s")))
    engine.submit(counting("long", fs.tumbling("100s")))
    engine.feed("s", [row(50)])
    engine.feed("s", [row(3)])
    finish(engine)
    assert counts(engine, "long") == [(0, 1, 2)]
    assert [r["t"] for r in as_rows(engine.late("short"))] == [3]
    status = engine.status()
    assert_ledger(status, "s", 2)
    nothing = {"filtered": 0, "rejected": 0, "in_flight": 0}
    assert status["queries"]["short"]["ledger"] == {"accepted": 2, "applied": 1, "late": 1, **nothing}
    assert status["queries"]["long"]["ledger"] == {"accepted": 2, "applied": 2, "late": 0, **nothing}


def test_each_ledger_begins_with_its_query_and_rows_without_one_are_named(engine):
    engine.add(STREAM)
    engine.feed("s", [row(1), row(2)])
    engine.flush()
    assert engine.status()["streams"]["s"]["unqueried"] == 2
    engine.submit(counting("early"))
    engine.feed("s", [row(3)])
    engine.flush()
    engine.submit(counting("second"))
    engine.feed("s", [row(4), row(5)])
    finish(engine)
    status = engine.status()
    assert_ledger(status, "s", 5)
    assert status["streams"]["s"]["unqueried"] == 2
    assert status["streams"]["s"]["ledger"] == {
        "received": 5, "accepted": 5, "rejected": 0, "staged": 0, "in_flight": 0,
    }  # fmt: skip
    assert status["queries"]["early"]["ledger"]["accepted"] == status["queries"]["early"]["ledger"]["applied"] == 3
    assert status["queries"]["second"]["ledger"]["accepted"] == status["queries"]["second"]["ledger"]["applied"] == 2


def test_two_streams_do_not_touch_each_other(engine):
    engine.submit(counting())
    engine.submit(counting("o", fs.tumbling("10ms"), OTHER))
    engine.feed("s", [row(1_000_000)])
    engine.feed("other", [{"t": 3, "name": b"a"}, {"t": 4, "name": b"a\0b"}])
    engine.feed("s", [row(1_000_001)])
    finish(engine)
    assert counts(engine) == [(1_000_000, 1, 2)]
    assert counts(engine, "o", "name") == [(0, b"a", 1), (0, b"a\0b", 1)]
    status = engine.status()
    assert_ledger(status, "s", 2)
    assert_ledger(status, "other", 2)


def test_the_limit_of_queries_on_a_stream_is_an_error_not_a_crash(engine):
    for i in range(64):
        engine.submit(counting(f"q{i}"))
    with pytest.raises(fs.EngineError) as error:
        engine.submit(counting("more"))
    assert error.value.code == "too_many_queries"
    engine.feed("s", [row(t, k=t) for t in range(100)])
    finish(engine)
    assert all(len(counts(engine, f"q{i}")) == 100 for i in range(64))


# -- results


def test_callbacks_get_every_batch_and_may_fail(engine, caplog):
    engine.submit(counting())
    seen = []

    def broken(batch):
        raise RuntimeError("the callback's own problem")

    engine.on_results("q", broken)
    engine.on_results("q", seen.append)
    with caplog.at_level(logging.ERROR):
        engine.feed("s", [row(t) for t in range(100)])
        finish(engine)
    assert sum(batch.num_rows for batch in seen) == 10
    assert len(counts(engine)) == 10
    assert "callback" in caplog.text


def test_results_from_an_offset(engine):
    engine.submit(counting())
    engine.feed("s", [row(t) for t in range(100)])
    finish(engine)
    everything = as_rows(engine.results("q"))
    for offset in range(11):
        assert as_rows(engine.results("q", offset=offset)) == everything[offset:]


def test_following_results_see_what_comes_later_and_end_at_the_timeout(engine):
    engine.submit(counting())
    found = []

    def follow(timeout):
        for batch in engine.results("q", len(found), follow=True, timeout=timeout):
            found.extend(as_rows([batch]))
            if len(found) == 3 and timeout > 1:
                return

    reader = threading.Thread(target=follow, args=(WAIT_S,), daemon=True)
    reader.start()
    for t in (1, 15, 25):
        engine.feed("s", [row(t)])
        wait_until(lambda t=t: len(found) == (t - 1) // 10, f"the window before {t}")
    finish(engine)
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert [r["window_start"] for r in found] == [0, 10, 20]
    follow(0.2)
    assert len(found) == 3


def test_following_results_end_when_the_engine_closes():
    engine = fs.Engine(pin=False)
    engine.submit(counting())
    results = engine.results("q", follow=True)
    begun, failures = threading.Event(), []

    def follow():
        begun.set()
        try:
            list(results)
        except Exception as error:
            failures.append(error)

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    assert begun.wait(WAIT_S)
    time.sleep(0.05)  # mostly it waits by then; if not, it must end all the same
    engine.close()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    assert failures == []


def test_finish_names_who_is_still_there():
    with fs.Engine(pin=False, listen="127.0.0.1:0", groups=4) as engine:
        engine.submit(counting())
        host, port = engine.data_address
        with fs.Producer(f"tcp://{host}:{port}", stream="s", producer_id="slow-one"):
            with pytest.raises(fs.EngineError, match="slow-one") as error:
                engine.finish(timeout=0.3)
            assert error.value.code == "not_finished"
        finish(engine)

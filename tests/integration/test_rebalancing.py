"""Groups follow the load while producers send: what moves, and that no result knows of it."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.cython_ext.operators.queries import QueryState
from flexstream.engine import engine as engine_module
from flexstream.errors import EngineError
from tests.concurrency.load import summed
from tests.integration.skewed_producers import GROUPS, PATIENCE_S, STREAM, Load, make_engine
from tests.waiting import wait_until

pytestmark = pytest.mark.time_limit(240)


def keys_of(groups: list[int], keys: int = 4_000) -> np.ndarray:
    every = np.zeros(keys, STREAM.schema.dtype)
    every["k"] = np.arange(keys)
    return every["k"][np.isin(STREAM.group_of(every, GROUPS), groups)]


def is_balanced(engine: fs.Engine) -> bool:
    found = engine.balance.status()["imbalance_percent"]
    return found is not None and found < 35  # none: no rows came since the last look


def test_groups_that_become_hot_are_spread_and_the_results_are_right() -> None:
    with make_engine() as engine, Load(engine) as load:
        placement = engine.placement()
        hot = [group for group in range(GROUPS) if placement[group] == 0]
        load.until(lambda: engine.balance.status()["imbalance_percent"] is not None, "rows")
        load.hot = keys_of(hot)
        load.until(lambda: len({engine.placement()[group] for group in hot}) == 2, "hot groups on both workers")
        load.until(lambda: is_balanced(engine), "balance")
        load.finish()
        moves = [entry for entry in engine.balance.history() if entry["moved"]]
        assert moves
        assert all(entry["what"] == "tick" and entry["verdict"] == "move" for entry in moves)
        assert moves[0]["imbalance_percent"] > 5
        assert {move.state for move in engine.mover.history} == {"moved"}


def test_a_worker_is_drained_and_added_under_load() -> None:
    with make_engine(workers=3, balance="off") as engine, Load(engine) as load:
        load.until(lambda: len(load.sent) > 20, "rows")
        for worker in (1, 0):
            drained = engine.balance.drain(worker)
            assert {move["from"] for move in drained["moved"]} == {worker}
            assert worker not in engine.placement()
            before = engine.workers[worker].stats()["rows"]
            sent = len(load.sent)
            load.until(lambda sent=sent: len(load.sent) > sent + 20, "more rows")
            assert engine.workers[worker].stats()["rows"] == before
            added = engine.balance.add(worker)
            assert {move["to"] for move in added["moved"]} >= {worker}
            load.until(lambda before=before, w=worker: engine.workers[w].stats()["rows"] > before, "rows at it again")
        load.finish()
        engine.balance.drain(0)
        engine.balance.drain(1)
        with pytest.raises(EngineError, match="last active"):
            engine.balance.drain(2)


def test_automatic_moves_keep_away_from_a_drained_worker() -> None:
    with make_engine(workers=3) as engine, Load(engine) as load:
        load.until(lambda: len(load.sent) > 20, "rows")
        engine.balance.drain(2)
        load.hot = keys_of([group for group, worker in enumerate(engine.placement()) if worker == 0])
        moved = engine.mover.moved
        load.until(lambda: engine.mover.moved > moved, "automatic moves")
        assert 2 not in engine.placement()
        load.finish()


def test_a_hot_key_is_named_with_its_share() -> None:
    with make_engine(workers=1) as engine:
        rng = np.random.default_rng(3)
        rows = np.zeros(200_000, STREAM.schema.dtype)
        rows["k"] = rng.integers(0, 4_000, len(rows))
        rows["k"][rng.random(len(rows)) < 0.6] = 90210
        group = int(STREAM.group_of(rows[rows["k"] == 90210][:1], GROUPS)[0])

        def named() -> Any:
            engine.feed("s", rows, watermark=False)
            engine.flush()
            return engine.status()["rebalance"]["hot"]

        (hot,) = wait_until(named, "a hot group")
        assert hot["group"] == group
        assert hot["stream"] == "s"
        assert 55 < hot["percent"] < 75
        assert hot["keys"][0]["key"] == 90210
        assert 45 < hot["keys"][0]["percent"] <= hot["percent"]
        assert hot["text"].startswith(f"group {group} is ")
        assert "of worker 0; key 90210 alone is " in hot["text"]


def test_even_load_has_no_hot_group() -> None:
    with make_engine(workers=1) as engine:
        rows = np.zeros(200_000, STREAM.schema.dtype)
        rows["k"] = np.arange(len(rows))
        engine.feed("s", rows, watermark=False)
        engine.flush()
        wait_until(lambda: engine.balance.status()["imbalance_percent"] is not None, "loads")
        assert engine.balance.status()["hot"] == []


def test_rows_in_the_sockets_of_a_worker_that_is_held_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are not read, outputs are full, the worker waits, and rows pile up in its sockets."""
    monkeypatch.setattr(engine_module, "QueryState", functools.partial(QueryState, max_chunks=3))
    go = threading.Event()
    with make_engine(workers=1) as engine:
        engine.on_results("q", lambda batch: go.wait(PATIENCE_S))
        with Load(engine) as load:
            try:
                load.until(lambda: engine.balance.status()["workers"][0]["waiting_rows"] > 1_000, "rows that wait")
            finally:
                go.set()
            load.finish()
        wait_until(lambda: engine.balance.status()["workers"][0]["waiting_rows"] == 0, "none")


@pytest.mark.parametrize(
    ("workers", "balance", "auto"), [(1, None, False), (2, None, True), (2, "off", False), (1, "auto", True)]
)
def test_balancing_is_automatic_with_several_workers_unless_told_otherwise(
    workers: int, balance: str | None, auto: bool
) -> None:
    with fs.Engine(workers, groups=4, pin=False, balance=balance) as engine:
        assert engine.balance.auto is auto
        assert engine.status()["rebalance"]["automatic"] is auto


def test_a_wrong_balance_option_is_refused() -> None:
    with pytest.raises(EngineError, match="balance='often' must be auto or off"):
        fs.Engine(2, groups=4, pin=False, balance="often")


def test_engines_that_do_nothing_stop_at_once_and_leave_no_thread() -> None:
    before = threading.active_count()
    for _ in range(5):
        with fs.Engine(2, groups=4, pin=False):
            pass
    wait_until(lambda: threading.active_count() <= before, "threads to end")


def test_callbacks_may_submit_and_cancel_while_groups_move() -> None:
    """The collector calls back; a move that waited for it with the catalog in hand would wait for itself."""
    with make_engine() as engine, Load(engine) as load:
        submitted: list[str] = []

        def on_results(batch: Any) -> None:
            for _ in range(2):
                query = summed(STREAM, f"passing-{len(submitted)}", fs.tumbling("1s"))
                engine.submit(query)
                engine.cancel(query.name)
                submitted.append(query.name)

        engine.on_results("q", on_results)

        def moved_often() -> bool:
            engine.move({group: 1 - worker for group, worker in enumerate(engine.placement())})
            return len(engine.mover.history) > 20 * GROUPS and len(submitted) > 10

        load.until(moved_often, "moves and queries")
        load.finish()

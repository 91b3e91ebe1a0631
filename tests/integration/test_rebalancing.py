"""Groups follow the load while producers send: what moves, and that no result knows of it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import engine as engine_module
from flexstream.cython_ext.queries import QueryState
from flexstream.errors import EngineError
from tests.concurrency.load import expected, make_stream, summed, totals_of

GROUPS = 16
PATIENCE_S = 60.0
STREAM = make_stream("s")
QUERY = summed(STREAM, "q", fs.sliding("2s", every="1s"))

pytestmark = pytest.mark.time_limit(240)


def make_engine(**options: Any) -> fs.Engine:
    settings: dict[str, Any] = {"workers": 2, "groups": GROUPS, "pin": False, "listen": "127.0.0.1:0"}
    engine = fs.Engine(**settings | options)
    engine.submit(QUERY)
    return engine


def keys_of(groups: list[int], keys: int = 4_000) -> np.ndarray:
    every = np.zeros(keys, STREAM.schema.dtype)
    every["k"] = np.arange(keys)
    return every["k"][np.isin(STREAM.group_of(every, GROUPS), groups)]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.01)


class Load:
    """Two producers that send on and on, each its own keys, with a marker now and then."""

    def __init__(self, engine: fs.Engine, seed: int = 1) -> None:
        assert engine.data_address is not None
        self.engine = engine
        self.sent: list[np.ndarray] = []
        self.hot: np.ndarray | None = None  # keys that have most of the rows
        self._done = threading.Event()
        self._failures: list[BaseException] = []
        address = "tcp://{}:{}".format(*engine.data_address)
        self._producers = [fs.Producer(address, stream=STREAM, linger_ms=2, watermark="explicit") for _ in range(2)]
        self._gate = threading.Barrier(len(self._producers))
        self._threads = [
            threading.Thread(target=self._produce, args=(producer, np.random.default_rng(seed + number)))
            for number, producer in enumerate(self._producers)
        ]
        for thread in self._threads:
            thread.start()

    def _produce(self, producer: fs.Producer, rng: np.random.Generator) -> None:
        try:
            turn = 0
            while not self._done.is_set():
                rows = np.zeros(600, STREAM.schema.dtype)
                rows["t"] = turn * 10 + rng.integers(0, 10, len(rows))
                rows["k"] = rng.integers(0, 4_000, len(rows))
                rows["v"] = rng.integers(-100, 100, len(rows))
                if self.hot is not None:
                    often = rng.random(len(rows)) < 0.8
                    rows["k"][often] = rng.choice(self.hot, int(often.sum()))
                self._gate.wait(PATIENCE_S)  # in step: no watermark passes the other's rows for long
                self.sent.append(rows)
                producer.send(rows)
                producer.watermark(turn * 10)
                producer.marker()
                turn += 1
                time.sleep(0.004)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._gate.abort()
            producer.close(timeout=PATIENCE_S)

    def until(self, condition: Callable[[], object], what: str) -> None:
        until(lambda: self._failures or condition(), what)
        assert not self._failures, self._failures

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def finish(self) -> None:
        """All rows are in the results, once."""
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert not self._failures, self._failures
        self.engine.finish(timeout=PATIENCE_S)
        rows = np.concatenate(self.sent)
        assert totals_of(self.engine.results("q")) == expected(rows, 2000, 1000)
        ledger = self.engine.status()["streams"]["s"]["ledger"]
        assert ledger["received"] == ledger["applied"] == len(rows)


def test_groups_that_become_hot_are_spread_and_the_results_are_right() -> None:
    with make_engine() as engine, Load(engine) as load:
        placement = engine.placement()
        hot = [group for group in range(GROUPS) if placement[group] == 0]
        load.until(lambda: engine.rebalancer.status()["imbalance_percent"] is not None, "rows")
        load.hot = keys_of(hot)
        load.until(lambda: len({engine.placement()[group] for group in hot}) == 2, "hot groups on both workers")
        load.until(lambda: engine.rebalancer.status()["imbalance_percent"] < 35, "balance")
        load.finish()
        moves = [entry for entry in engine.rebalancer.history() if entry["moved"]]
        assert moves
        assert all(entry["what"] == "tick" and entry["verdict"] == "move" for entry in moves)
        assert moves[0]["imbalance_percent"] > 5
        assert {move.state for move in engine.mover.history} == {"moved"}


def test_a_worker_is_drained_and_added_under_load() -> None:
    with make_engine(workers=3, balance="off") as engine, Load(engine) as load:
        load.until(lambda: len(load.sent) > 20, "rows")
        for worker in (1, 0):
            drained = engine.rebalancer.drain(worker)
            assert {move["from"] for move in drained["moved"]} == {worker}
            assert worker not in engine.placement()
            before = engine.workers[worker].stats()["rows"]
            sent = len(load.sent)
            load.until(lambda sent=sent: len(load.sent) > sent + 20, "more rows")
            assert engine.workers[worker].stats()["rows"] == before
            added = engine.rebalancer.add(worker)
            assert {move["to"] for move in added["moved"]} >= {worker}
            load.until(lambda before=before, w=worker: engine.workers[w].stats()["rows"] > before, "rows at it again")
        load.finish()
        engine.rebalancer.drain(0)
        engine.rebalancer.drain(1)
        with pytest.raises(EngineError, match="last active"):
            engine.rebalancer.drain(2)


def test_automatic_moves_keep_away_from_a_drained_worker() -> None:
    with make_engine(workers=3) as engine, Load(engine) as load:
        load.until(lambda: len(load.sent) > 20, "rows")
        engine.rebalancer.drain(2)
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

        def named() -> bool:
            engine.feed("s", rows, watermark=False)
            engine.flush()
            return bool(engine.status()["rebalance"]["hot"])

        until(named, "a hot group")
        (hot,) = engine.status()["rebalance"]["hot"]
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
        until(lambda: engine.rebalancer.status()["imbalance_percent"] is not None, "loads")
        assert engine.rebalancer.status()["hot"] == []


def test_rows_in_the_sockets_of_a_worker_that_is_held_up_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are not read, outputs are full, the worker waits, and rows pile up in its sockets."""
    monkeypatch.setattr(engine_module, "QueryState", functools.partial(QueryState, max_chunks=3))
    go = threading.Event()
    with make_engine(workers=1) as engine:
        engine.on_results("q", lambda batch: go.wait(PATIENCE_S))
        with Load(engine) as load:
            try:
                load.until(lambda: engine.rebalancer.status()["workers"][0]["waiting_rows"] > 1_000, "rows that wait")
            finally:
                go.set()
            load.finish()
        until(lambda: engine.rebalancer.status()["workers"][0]["waiting_rows"] == 0, "none")


@pytest.mark.parametrize(
    ("workers", "balance", "auto"), [(1, None, False), (2, None, True), (2, "off", False), (1, "auto", True)]
)
def test_balancing_is_automatic_with_several_workers_unless_told_otherwise(
    workers: int, balance: str | None, auto: bool
) -> None:
    with fs.Engine(workers, groups=4, pin=False, balance=balance) as engine:
        assert engine.rebalancer.auto is auto
        assert engine.status()["rebalance"]["automatic"] is auto


def test_a_wrong_balance_option_is_refused() -> None:
    with pytest.raises(EngineError, match="balance='often' must be auto or off"):
        fs.Engine(2, groups=4, pin=False, balance="often")


def test_engines_that_do_nothing_stop_at_once_and_leave_no_thread() -> None:
    before = threading.active_count()
    for _ in range(5):
        with fs.Engine(2, groups=4, pin=False):
            pass
    until(lambda: threading.active_count() <= before, "threads to end")


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

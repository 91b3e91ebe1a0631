"""Producers that send on and on while a test moves and splits groups; in the end every row must have counted once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import flexstream as fs
from tests.concurrency.load import expected, make_stream, summed, totals_of
from tests.waiting import wait_until

GROUPS = 16
PATIENCE_S = 120.0
STREAM = make_stream("s")
QUERY = summed(STREAM, "q", fs.sliding("2s", every="1s"))


def make_engine(**options: Any) -> fs.Engine:
    settings: dict[str, Any] = {"workers": 2, "groups": GROUPS, "pin": False, "listen": "127.0.0.1:0"}
    engine = fs.Engine(**settings | options)
    engine.submit(QUERY)
    return engine


def address(engine: fs.Engine) -> str:
    assert engine.data_address is not None
    return "tcp://{}:{}".format(*engine.data_address)


class Load:
    """`rows` a turn from each producer, in step; the keys in `hot`, if any, have `hot_share` of them."""

    def __init__(
        self, engine: fs.Engine, producers: int = 2, *, rows: int = 600, hot_share: float = 0.8, **options: Any
    ) -> None:
        self.engine = engine
        self.hot: Sequence[int] | np.ndarray = ()
        self.sent: list[np.ndarray] = []
        self._rows, self._hot_share = rows, hot_share
        self._done = threading.Event()
        self._failures: list[BaseException] = []
        settings: dict[str, Any] = {"stream": STREAM, "linger_ms": 2, "watermark": "explicit"}
        self.producers = [fs.Producer(address(engine), **settings | options) for _ in range(producers)]
        self._gate = threading.Barrier(producers)
        self._threads = [
            threading.Thread(target=self._produce, args=(producer, np.random.default_rng(1 + number)))
            for number, producer in enumerate(self.producers)
        ]
        for thread in self._threads:
            thread.start()

    def _produce(self, producer: fs.Producer, rng: np.random.Generator) -> None:
        try:
            turn = 0
            while not self._done.is_set():
                rows = self._make(turn, rng)
                self._gate.wait(PATIENCE_S)  # in step: no watermark passes another's rows for long
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
            try:
                producer.close(timeout=PATIENCE_S)
            except BaseException as error:
                self._failures.append(error)

    def _make(self, turn: int, rng: np.random.Generator) -> np.ndarray:
        rows = np.zeros(self._rows, STREAM.schema.dtype)
        rows["t"] = turn * 10 + rng.integers(0, 10, len(rows))
        rows["k"] = rng.integers(0, 4_000, len(rows))
        rows["v"] = rng.integers(-100, 100, len(rows))
        hot = self.hot
        if len(hot):
            often = rng.random(len(rows)) < self._hot_share
            rows["k"][often] = rng.choice(hot, int(often.sum()))
        return rows

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        found = wait_until(lambda: self._failures or condition(), what, seen=self.engine.balance.status)
        assert not self._failures, self._failures
        return found

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def finish(self) -> None:
        """All rows are in the results, once."""
        self.__exit__()
        assert not any(thread.is_alive() for thread in self._threads)
        assert not self._failures, self._failures
        self.engine.finish(timeout=PATIENCE_S)
        rows = np.concatenate(self.sent)
        assert totals_of(self.engine.results("q")) == expected(rows, 2000, 1000)
        ledger = self.engine.status()["queries"]["q"]["ledger"]
        assert ledger["accepted"] == ledger["applied"] == len(rows)

"""Producers outside the guest: rows of chosen groups, all of them remembered for the oracle."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

import flexstream as fs
from flexstream.testing import run
from tests import waiting
from tests.nic_in_loop.network import GUEST_IPV4, GUEST_IPV6
from tests.nic_in_loop.served import DATA_PORT, GROUPS, TOKEN, Daemon
from tests.property.checks import assert_same_results

ADDRESSES = {"IPv4": f"tcp://{GUEST_IPV4}:{DATA_PORT}", "IPv6": f"tcp://[{GUEST_IPV6}]:{DATA_PORT}"}
STREAM = fs.Stream("s", {"t": "timestamp[ms]", "k": "i64", "x": "i64"}, key="k", time="t")
QUERY = STREAM.query("q").window(fs.tumbling("1s")).agg(n=fs.count(), total=fs.sum("x"), most=fs.max("x"))
WAIT_S = 300.0
PHASE_MS = 1_000_000  # of event time: each producer's rows are later than those of the one before
_phases = itertools.count()


def wait_until(true: Callable[[], Any], what: str) -> Any:
    """As elsewhere, for a guest that may be emulated: it is slow, and asking is work for it."""
    return waiting.wait_until(true, what, seconds=WAIT_S, pause_s=0.2)


@functools.cache
def keys_of_groups(each: int = 2) -> tuple[tuple[int, ...], ...]:
    """The first keys of every group."""
    keys = np.zeros(GROUPS * 40, STREAM.schema.dtype)
    keys["k"] = np.arange(len(keys))
    groups = STREAM.group_of(keys, GROUPS)
    found = tuple(tuple(int(k) for k in keys["k"][groups == group][:each]) for group in range(GROUPS))
    assert all(len(group) == each for group in found)
    return found


class Sender:
    """One producer. `send` returns when the daemon has the rows."""

    def __init__(self, family: str) -> None:
        self._producer = fs.Producer(
            ADDRESSES[family],
            stream=STREAM,
            token=TOKEN,
            watermark="explicit",
            linger_ms=1,
            connect_timeout_s=60,
            retry_s=120,
        )
        self._time = next(_phases) * PHASE_MS
        self._sent: list[np.ndarray[Any, np.dtype[Any]]] = []

    def send(self, groups: Iterable[int], rounds: int = 1) -> int:
        """A row for every key of these groups, `rounds` times, each round a packet of its own; the number of rows."""
        keys = [k for group in groups for k in keys_of_groups()[group]]
        for _ in range(rounds):
            rows = np.zeros(len(keys), STREAM.schema.dtype)
            rows["k"] = keys
            rows["t"] = self._time + np.arange(len(keys)) % 7
            rows["x"] = np.arange(len(keys)) * 31 - self._time % 1009
            self._time += 100  # several windows, and several rows in each
            self._producer.send(rows)
            self._producer.flush(WAIT_S)
            self._sent.append(rows)
        return len(keys) * rounds

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[Any]]:
        return np.concatenate(self._sent)

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self._producer.close(WAIT_S)
            return
        with contextlib.suppress(fs.FlexStreamError):
            self._producer.close(5)


def next_offset(daemon: Daemon) -> int:
    return int(daemon.get(f"/v1/queries/{QUERY.name}")["log"]["next_offset"])


@contextlib.contextmanager
def sending(daemon: Daemon, family: str = "IPv4") -> Iterator[Sender]:
    """A producer; when it has ended, the daemon's new results must be the oracle's for its rows."""
    offset = next_offset(daemon)
    with Sender(family) as sender:
        yield sender
    check_results(daemon, offset, sender)


def check_results(daemon: Daemon, offset: int, *senders: Sender) -> None:
    """The results from `offset` on are the oracle's for the rows of these producers, which have ended."""
    rows = np.concatenate([sender.rows for sender in senders])
    oracle = run(QUERY, rows)
    wait_until(lambda: next_offset(daemon) >= offset + len(oracle.windows), f"{len(oracle.windows)} results")
    assert_same_results(QUERY, daemon.results(QUERY.name, offset), oracle.windows)
    ledger = daemon.get("/v1/status")["streams"][STREAM.name]["ledger"]
    assert ledger["received"] == ledger["accepted"], ledger

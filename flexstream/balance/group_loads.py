"""What each group costs, read from the workers' counters: rows, what waits, and the keys behind them.

Nothing here is on the record path: workers count rows anyway, sample what their sockets hold when they are asked to,
at a quiescent point, and sketch keys from one row in 1024. Load is what *came* for a group, not what was worked off: a
worker that the machine kept from running for a while has as much to do as before.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flexstream.balance.pinning import pinned_core

if TYPE_CHECKING:
    from flexstream.cython_ext.worker.worker import Worker
from flexstream.catalog.entries import RunningStream

Floats = NDArray[np.float64]

STEADY_HALF_LIFE_S = 1.0
BUSY_HALF_LIFE_S = 0.25
HOT_SHARE = 0.2  # of a worker's rows: a group below it is not worth a word
HOT_TIMES = 3.0  # and so many times what it would have if the worker's groups were equal
HOT_KEY_SHARE = 0.1  # of the group's rows
HOT_NAMED = 5
FEW_SAMPLES = 16


class Loads:
    """The load of every group of one engine, and which are hot. One thread calls `look`; any thread may call `hot`."""

    def __init__(
        self,
        workers: Sequence[Worker],
        groups: int,
        streams: Callable[[], list[RunningStream]],
        handed: Mapping[int, Floats],
    ) -> None:
        self._workers = workers
        self._groups = groups
        self._streams = streams
        self._handed = handed
        self._totals = np.zeros((0, groups))
        self._batches = 0.0
        self._last_s: float | None = None
        self._came = np.zeros((len(workers), groups))
        self._busy_ns = np.zeros(len(workers))
        self.busy = np.zeros(len(workers))  # share of each worker's time that is not idle, lately
        self.by_worker = np.zeros((len(workers), groups))  # as `steady`, of connections, for the worker that has them
        self.fresh = np.zeros(groups)  # rows that came since the look before, worked off or not
        self.fresh_batches = 0.0
        self.waiting = np.zeros(groups)  # rows in sockets, and fed rows that no worker has begun
        self.steady = np.zeros((0, groups))  # rows per stream and group, fading with a half-life of a second

    @property
    def workers(self) -> int:
        return len(self._workers)

    def cores(self) -> list[int | None]:
        """The core of each worker; None: it is not pinned."""
        return [pinned_core(worker.stats()) for worker in self._workers]

    def lanes(self) -> int:
        """How many queues of rows there are: connections, or groups that are fed."""
        return max(sum(worker.progress().connections for worker in self._workers), int((self.fresh > 0).sum()))

    def want_samples(self) -> None:
        for worker in self._workers:
            worker.want_sample()

    def sampled(self) -> bool:
        """Whether all workers have done what was wanted."""
        return all(worker.has_sampled for worker in self._workers)

    def look(self, now_s: float) -> None:
        """Read the samples."""
        streams = self._streams()
        totals = np.zeros((len(streams), self._groups))
        waiting = np.zeros(self._groups)
        came = np.zeros_like(self._came)
        for rows, running in zip(totals, streams, strict=True):
            mine = np.zeros_like(came)
            for of_worker, handle in zip(mine, running.handles, strict=True):
                handle.add_load(of_worker, waiting)
            came += mine
            rows += mine.sum(axis=0)
            handed = self._handed.get(running.index, 0.0)  # read after what was taken: never less than that
            rows += handed
            waiting += handed
        if len(streams) > len(self._totals):
            new = ((0, len(streams) - len(self._totals)), (0, 0))
            self._totals, self.steady = np.pad(self._totals, new), np.pad(self.steady, new)
        fresh = np.maximum(totals - self._totals, 0.0)  # a group on the move is for a moment at both, or at none
        fade = 0.0 if self._last_s is None else 0.5 ** ((now_s - self._last_s) / STEADY_HALF_LIFE_S)
        batches = float(sum(worker.progress().batches for worker in self._workers))
        self.steady = self.steady * fade + fresh
        self.fresh, self.fresh_batches = fresh.sum(axis=0), batches - self._batches
        self.waiting = np.maximum(waiting, 0.0)
        self.by_worker = self.by_worker * fade + np.maximum(came - self._came, 0.0)
        busy_ns = np.array([worker.busy_ns for worker in self._workers], np.float64)
        if self._last_s is not None and now_s > self._last_s:
            share = np.clip((busy_ns - self._busy_ns) / (1e9 * (now_s - self._last_s)), 0.0, 1.0)
            fade = 0.5 ** ((now_s - self._last_s) / BUSY_HALF_LIFE_S)
            self.busy = self.busy * fade + share * (1.0 - fade)
        self._busy_ns, self._came = busy_ns, came
        self._totals, self._batches, self._last_s = totals, batches, now_s

    def forget_parts(self, group: int) -> None:
        """It is served by other workers than before."""
        self.by_worker[:, group] = 0.0

    def links(self, group: int) -> tuple[int, float]:
        """(connections of the group, the part of its rows that the busiest of them has), as of the last sample."""
        count = rows = busiest = 0
        for running in self._streams():
            for handle in running.handles:
                links, recent, most = handle.links(group)
                count, rows, busiest = count + links, rows + recent, max(busiest, most)
        return count, busiest / rows if rows else 0.0

    def heaviest_keys(self, group: int, worker: int, stream: int) -> tuple[int, list[tuple[Any, int]]]:
        """(rows sampled, [(key, at least so many of them)]) of a group of the stream, at that worker."""
        found: tuple[int, list[tuple[Any, int]]] = self._streams()[stream].handles[worker].keys.read(group)
        return found

    def hot(self, placement: Sequence[int]) -> list[dict[str, Any]]:
        """Groups that are much of their worker's rows, the heaviest first, with the keys that make them so."""
        steady = self.steady
        rows = steady.sum(axis=0) if len(steady) else np.zeros(self._groups)
        if rows.sum() < 1.0:
            return []
        owners = np.array(placement)
        of_worker = np.bincount(owners, rows, self.workers)
        groups_of = np.bincount(owners, minlength=self.workers)
        share = rows / np.maximum(of_worker[owners], 1e-9)
        fair = rows / rows.sum() * self.workers
        crowded = share > np.minimum(HOT_TIMES / groups_of[owners], 1.0)
        # Alone on its worker a group is all of it: then only being more than a worker's fair share makes it hot.
        hot = np.flatnonzero((share >= HOT_SHARE) & (crowded | ((fair > 1.05) & (self.workers > 1))))
        cores = self.cores()
        ranked = sorted((int(group) for group in hot), key=lambda group: -float(rows[group]))
        return [
            self._describe(group, placement[group], cores[placement[group]], float(share[group]), steady)
            for group in ranked[:HOT_NAMED]
        ]

    def _describe(self, group: int, worker: int, core: int | None, share: float, steady: Floats) -> dict[str, Any]:
        stream = int(steady[:, group].argmax())
        part = share * float(steady[stream, group] / steady[:, group].sum())
        sampled, keys = self.heaviest_keys(group, worker, stream)
        named = [
            {"key": plain(key), "percent": round(100.0 * part * count / sampled, 1)}
            for key, count in keys
            if sampled >= FEW_SAMPLES and count >= HOT_KEY_SHARE * sampled
        ]
        where = f"worker {worker}" if core is None else f"core {core}"
        text = f"group {group} is {100 * share:.0f}% of {where}"
        if named:
            text += f"; key {named[0]['key']} alone is {named[0]['percent']:.0f}%"
        return {
            "group": group,
            "worker": worker,
            "core": core,
            "percent": round(100.0 * share, 1),
            "stream": self._streams()[stream].stream.name,
            "keys": named,
            "text": text,
        }


def plain(key: Any) -> Any:
    """A key as JSON has it."""
    if isinstance(key, tuple | list):
        return [plain(part) for part in key]
    if isinstance(key, bytes):
        text = key.rstrip(b"\0").decode("ascii", "backslashreplace")
        return text if text.isprintable() else key.hex()
    if isinstance(key, datetime.datetime | datetime.date):
        return key.isoformat()
    return key

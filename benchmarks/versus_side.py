"""One side of `benchmarks.versus`: an engine of the tree that is first on the path, in a process of its own.

Run as a file, never with -m: this code is the new tree's, whichever tree `flexstream` comes from. So it uses public
names alone, and of the status only what every tree since e2e5293 has. Its argument is a case as JSON; then commands as
JSON lines on standard input, one answer each:

  {"command": "run"}    rows, seconds and the workers' CPU seconds of a run; `wrong` says what was not done, or is null
  {"command": "open"}   for the C sender: the stream's name
  {"command": "close"}  rows, CPU seconds and `wrong` since "open"

The end of the input is the end of the process.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs

FIELDS = {
    "event_time": "timestamp[ms]",
    "campaign_id": "i64",
    "user_id": "i64",
    "page_id": "i64",
    "ad_id": "i64",
    "ip": "i64",
    "event_type": "bytes[8]",
    "pad": "bytes[22]",
}
WINDOWS = {"tumbling": (fs.tumbling("10s"), 1), "sliding": (fs.sliding("10s", every="1s"), 10)}  # and windows of a row
READY_S = 60.0
_names = (f"ads{number}" for number in itertools.count())


@dataclass(frozen=True)
class Work:
    """What a side is for. `data` is a folder that `versus.prepare` has filled, `repeats` how often a run feeds it."""

    kind: str  # memory | moves | ingest
    window: str
    compile: str
    groups: int
    cpus: list[int]
    feeder_cpu: int
    data: str
    repeats: int = 1


@dataclass(frozen=True)
class Data:
    """Slices of event time; of each, the rows of one group after the other, and the time at which it ends."""

    slices: list[tuple[list[tuple[int, np.ndarray]], int]]
    rows: int
    views: int

    @classmethod
    def load(cls, folder: Path) -> Data:
        rows, bounds = np.load(folder / "rows.npy"), np.load(folder / "bounds.npy")
        slices = []
        for part in bounds:  # the first row of each group, and the end
            batches = [(g, rows[part[g] : part[g + 1]]) for g in range(len(part) - 1) if part[g] < part[g + 1]]
            slices.append((batches, int(rows["event_time"][part[0] : part[-1]].max())))
        return cls(slices, len(rows), int((rows["event_type"] == b"view").sum()))


class Side:
    def __init__(self, work: Work) -> None:
        self.work = work
        self.data = Data.load(Path(work.data)) if work.kind != "ingest" else None
        listen = "127.0.0.1:0" if work.kind == "ingest" else None
        self.engine = fs.Engine(
            workers=work.cpus, groups=work.groups, compile=work.compile, balance="off", listen=listen
        )
        self.threads = self._threads()
        if work.kind == "memory":
            os.sched_setaffinity(0, {work.feeder_cpu})  # this thread feeds; the worker has its own core
        self.name, self.cpu_before = "", 0.0

    def cpu_seconds(self) -> float:
        """Of the workers' threads, as the kernel counts them: the engine's own count is a few milliseconds old."""
        counts = [Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0] for thread in self.threads]
        return sum(map(int, counts)) / 1e9

    def _threads(self) -> list[int]:
        while not all(found := [worker["thread_id"] for worker in self.engine.status()["workers"]]):
            time.sleep(0.001)  # a thread is just beginning
        return found

    def open(self) -> str:
        """A fresh stream with its query, once the variant that is wanted is in use."""
        self.name = next(_names)
        stream = fs.Stream(self.name, FIELDS, key="campaign_id", time="event_time", max_disorder=self._disorder())
        self.engine.add(stream)
        views = stream.query(self.name).filter(fs.col("event_type") == b"view")
        self.engine.submit(views.window(WINDOWS[self.work.window][0]).agg(n=fs.count()))
        deadline = time.monotonic() + READY_S
        while self._wrong_variant(self._query()):
            if time.monotonic() > deadline:
                raise SystemExit(f"after {READY_S:g} s {self._wrong_variant(self._query())}")
            time.sleep(0.001)
        self.cpu_before = self.cpu_seconds()
        return self.name

    def _disorder(self) -> str:
        return "0ms" if self.work.kind == "ingest" else "4s"

    def _wrong_variant(self, query: dict[str, Any]) -> str | None:
        """A compiled query may have become an instrumented or specialised one: these are compiled too."""
        if (query["variant"] == "generic") == (self.work.compile == "off"):
            return None
        return f"the query runs {query['variant']} with compile={self.work.compile!r}: {query['variant_reason']}"

    def _query(self) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.status()["queries"][self.name]
        return found

    def close(self) -> dict[str, Any]:
        """What became of the rows since `open`. The query ends."""
        cpu_seconds = self.cpu_seconds() - self.cpu_before
        counted = sum(int(np.asarray(batch.column("n")).sum()) for batch in self.engine.results(self.name))
        query = self._query()
        self.engine.cancel(self.name)
        return {"rows": query["rows"], "counted": counted, "cpu_seconds": cpu_seconds, "wrong": self._wrong(query)}

    def _wrong(self, query: dict[str, Any]) -> str | None:
        refused = query["late"] + sum(query["rejected"].values())
        if query["state"] != "running" or refused:
            return f"query {query['state']}, {refused} rows late or rejected"
        if wrong := self._wrong_variant(query):
            return wrong
        # Not all of them, even where it is compiled: the first row of a key goes another way.
        if (query["compiled_rows"] > 0) != (self.work.compile == "require"):
            return f"{query['compiled_rows']} of {query['rows']} rows went through compiled code"
        return None

    def run(self) -> dict[str, Any]:
        """Feed everything; what is timed is until all windows have fired, or the moves."""
        assert self.data is not None
        self.open()
        seconds, moved = self._feed(self.data) if self.work.kind == "memory" else self._feed_and_move(self.data)
        found = self.close()
        expected = self.data.views * self.work.repeats * WINDOWS[self.work.window][1]
        if found["wrong"] is None and found["counted"] != expected:
            found["wrong"] = f"{found['counted']} rows are in the results, not {expected}"
        rows = self.data.rows * self.work.repeats
        if self.work.kind == "moves":
            rows = self.work.groups * len(self.data.slices) * self.work.repeats
            if moved != rows:
                found["wrong"] = f"{moved} groups moved, not {rows}"
        return {**found, "rows": rows, "seconds": seconds}

    def _feed(self, data: Data) -> tuple[float, int]:
        feed, nothing = self.engine.feed, data.slices[0][0][0][1][:0]
        start = time.perf_counter()
        for batches, until_ms in data.slices:
            for _ in range(self.work.repeats):
                for group, rows in batches:
                    feed(self.name, rows, group=group, watermark=False, wait=False)
            feed(self.name, nothing, watermark=until_ms)
        self.engine.finish()
        return time.perf_counter() - start, 0

    def _feed_and_move(self, data: Data) -> tuple[float, int]:
        """After each slice all groups change workers, with the state that they have by then. Only moves are timed.

        The median batch stands for all: who takes a worker's core away for a moment decides the sum.
        """
        batches_s: list[float] = []
        batches_cpu_s: list[float] = []
        moved = 0
        nothing = data.slices[0][0][0][1][:0]
        for batches, until_ms in data.slices:
            for _ in range(self.work.repeats):
                for group, rows in batches:
                    self.engine.feed(self.name, rows, group=group, watermark=False, wait=False)
                self.engine.flush()
                targets = {group: 1 - worker for group, worker in enumerate(self.engine.placement())}
                cpu_before, start = self.cpu_seconds(), time.perf_counter()
                self.engine.move(targets)
                batches_s.append(time.perf_counter() - start)
                batches_cpu_s.append(self.cpu_seconds() - cpu_before)
                moved += sum(worker == targets[group] for group, worker in enumerate(self.engine.placement()))
            self.engine.feed(self.name, nothing, watermark=until_ms)
        self.engine.finish()
        # The rows' own CPU time does not count.
        self.cpu_before = self.cpu_seconds() - len(batches_cpu_s) * statistics.median(batches_cpu_s)
        return len(batches_s) * statistics.median(batches_s), moved


def serve(side: Side) -> None:
    _, port = side.engine.data_address or ("", 0)
    if side.data is not None:
        side.run()  # page faults, the compiler
    answer({"tree": str(Path(fs.__file__).resolve().parent.parent), "port": port})
    for line in sys.stdin:
        command = json.loads(line)["command"]
        answer({"stream": side.open()} if command == "open" else side.close() if command == "close" else side.run())


def answer(body: dict[str, Any]) -> None:
    print(json.dumps(body), flush=True)


def main() -> None:
    side = Side(Work(**json.loads(sys.argv[1])))
    with side.engine:
        serve(side)


if __name__ == "__main__":
    main()

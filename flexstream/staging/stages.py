"""The stages of an engine: rows that were sent and that no query sees until a commit names them.

A stage is open while its rows come, finished when its producer has its receipt, committed when a batch has named it,
and gone when its rows were applied and (with a directory) their windows are in the result log. Open and finished ones
that are dropped are fenced: whoever goes on writing to them is refused.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flexstream.errors import StageError
from flexstream.staging.room import STAGE_BYTES, StageRoom
from flexstream.state.results.segments import sync_directory
from flexstream.state.stage.commit_journal import NAME as JOURNAL_NAME
from flexstream.state.stage.direct_io import Bytes
from flexstream.state.stage.stage_file import SUFFIX, StageFile, io_error
from flexstream.wire.stage_block import Block

log = logging.getLogger("flexstream.stages")

MEMORY_BYTES = 256 << 20  # of stages without a directory; what is more is spilled
DEFAULT_LIMIT_BYTES = 16 << 30
FENCES = 10_000
ASIDE = "aside"  # the folder of stages whose batch was set aside
Pairs = np.ndarray[Any, np.dtype[np.int64]]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


@dataclass(eq=False)
class Stage:
    id: str
    stream: str
    file: StageFile
    producer: str = ""
    state: str = "open"  # open | finished | committed
    rows: int = 0
    bytes: int = 0  # of the rows
    groups: dict[int, int] = field(default_factory=dict)  # rows, while it is open
    min_time: int | None = None
    max_time: int | None = None
    touched: float = field(default_factory=time.time)
    waiting: int = 0  # rows that no worker was given and that were not dropped
    working: int = 0  # rows that workers were given and have not worked off
    taken_bytes: int = 0  # of the room
    in_memory_bytes: int = 0
    group_rows: Pairs = field(default_factory=lambda: np.zeros((0, 2), np.int64))  # the same when it is finished

    def close_groups(self) -> None:
        """Many may be finished: the rows of each group in a form that takes little memory."""
        self.group_rows = np.array(sorted(self.groups.items()), np.int64).reshape(-1, 2)
        self.groups = {}

    def receipt(self) -> dict[str, Any]:
        groups = {str(group): rows for group, rows in self.group_rows.tolist()}
        return {"stage": self.id, "rows": self.rows, "bytes": self.bytes, "groups": groups}


class Stages:
    """The stages of a daemon. Thread-safe. `directory` None: in memory, spilled to nameless files past a bound."""

    def __init__(self, directory: Path | None, limit_bytes: int, timeout_s: float) -> None:
        """Finds the stages that a process before has finished. Raises StageError."""
        self.directory = directory
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self.room = StageRoom(self._lock, limit_bytes)
        self._stages: dict[str, Stage] = {}
        self._fenced: OrderedDict[str, str] = OrderedDict()  # id -> why
        self._dropped: Counter[str] = Counter()  # rows by stream
        self._waiting: Counter[str] = Counter()  # the same of those that wait
        self._in_memory_bytes = 0
        self._stopped = False
        self.expired = 0
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o750)
                self._find(directory)
            except OSError as error:
                raise io_error("open", directory, error) from error

    def _find(self, directory: Path) -> None:
        for path in sorted(directory.iterdir()):
            if path.suffix != SUFFIX:
                if path.name.startswith(JOURNAL_NAME + "."):
                    path.unlink()  # a journal that was being written anew
                continue
            found = StageFile.open(path)
            if found is None:  # its producer never got a receipt
                path.unlink()
                continue
            file, about, receipt = found
            groups = {int(group): rows for group, rows in receipt["groups"].items()}
            rows, size = receipt["rows"], receipt["bytes"]
            stage = Stage(
                path.stem, about["stream"], file, about.get("producer", ""), "finished", rows, size, groups,
                receipt["min_time"], receipt["max_time"], path.stat().st_mtime, waiting=rows,
            )  # fmt: skip
            stage.close_groups()
            self._waiting[stage.stream] += rows
            stage.taken_bytes = STAGE_BYTES
            self.room.add(STAGE_BYTES, 1)
            self._stages[path.stem] = stage
            self._recount(stage)

    # Rows in ------------------------------------------------------------------------------------------------

    def begin(self, stage_id: object, stream: str, about: dict[str, Any]) -> Stage:
        """Raises StageError: `bad_stage` for the name, `fenced`, `stage_exists`, and the disk's."""
        if not isinstance(stage_id, str) or _ID.fullmatch(stage_id) is None:
            raise StageError(
                f"stage {stage_id!r:.80} is not a valid name",
                code="bad_stage",
                hint="use a fresh UUID: letters, digits, - and _, 64 characters at most",
            )
        with self._lock:
            self.room.take(STAGE_BYTES, 1, lambda: self._check_new(stage_id))
            try:
                path = self.directory / f"{stage_id}{SUFFIX}" if self.directory is not None else None
                file = StageFile.create(path, {"stage": stage_id, "stream": stream, **about})
            except StageError:
                self.room.add(-STAGE_BYTES, -1)
                raise
            stage = Stage(stage_id, stream, file, str(about.get("producer", "")), taken_bytes=STAGE_BYTES)
            self._stages[stage_id] = stage
            self._recount(stage)
            return stage

    def _check_new(self, stage_id: str) -> None:
        self._check_running()
        self._check_not_fenced(stage_id)
        if stage_id in self._stages:
            raise StageError(
                f"stage {stage_id} is already {self._stages[stage_id].state}",
                code="stage_exists",
                hint="each attempt needs a fresh UUID",
            )

    def _check_not_fenced(self, stage_id: str) -> None:
        if stage_id in self._fenced:
            raise StageError(
                f"stage {stage_id} is fenced: {self._fenced[stage_id]}",
                code="fenced",
                hint="its rows will never count; a new attempt needs a fresh UUID",
            )

    def _check_running(self) -> None:
        if self._stopped:
            raise StageError("the daemon is stopping", code="shutting_down", hint="run the task again")

    def wait_for_room(self, stage: Stage, n: int, wait_s: float | None = None) -> None:
        """Room for a frame of `n` bytes, which is the stage's from now on. Raises StageError."""
        n = stage.file.cost_of(n)
        with self._lock:
            self.room.take(n, 0, lambda: self._check_open(stage), wait_s)
            stage.taken_bytes += n

    def _check_open(self, stage: Stage) -> None:
        self._check_running()
        self._check_not_fenced(stage.id)
        if self._stages.get(stage.id) is not stage:  # so long ago that the fence was forgotten
            raise StageError(f"stage {stage.id} was dropped", code="fenced", hint="a new attempt needs a fresh UUID")

    def _recount(self, stage: Stage) -> None:
        """What the stage really takes, instead of what was asked for."""
        taken = STAGE_BYTES + stage.file.size_bytes
        self.room.add(taken - stage.taken_bytes)
        stage.taken_bytes = taken
        self._in_memory_bytes += stage.file.in_memory_bytes - stage.in_memory_bytes
        stage.in_memory_bytes = stage.file.in_memory_bytes

    def _give_back(self, stage: Stage) -> None:
        """It waits no longer: its rows were applied, or never will be."""
        if stage.taken_bytes:
            self.room.add(-stage.taken_bytes, -1)
            stage.taken_bytes = 0

    def _remove(self, stage: Stage) -> None:
        del self._stages[stage.id]
        self._dropped[stage.stream] += stage.waiting
        self._waiting[stage.stream] -= stage.waiting
        self._in_memory_bytes -= stage.in_memory_bytes
        stage.in_memory_bytes = 0
        self._give_back(stage)

    def append(self, stage: Stage, block: Block, span: tuple[int, int] | None, frame: Bytes, size: int) -> None:
        """Add one block, given as its frame: `size` bytes in memory of whole pages. On a StageError the stage is as
        it was, or fenced.
        """
        with self._lock:
            self._check_open(stage)
            too_much = self._in_memory_bytes + len(block.rows) > MEMORY_BYTES
        if self.directory is None and stage.file.in_memory_bytes and too_much:
            stage.file.spill()
        stage.file.append_pages(frame, size)
        rows = sum(block.counts)
        with self._lock:
            if self._stages.get(stage.id) is not stage:  # dropped while the disk was busy
                stage.file.discard()
                self._check_open(stage)
            self._recount(stage)
            self._waiting[stage.stream] += rows
            stage.rows += rows
            stage.waiting += rows
            stage.bytes += len(block.rows)
            stage.touched = time.time()
            for group, count in zip(block.groups, block.counts, strict=True):
                stage.groups[group] = stage.groups.get(group, 0) + count
            if span is not None:
                stage.min_time = span[0] if stage.min_time is None else min(span[0], stage.min_time)
                stage.max_time = span[1] if stage.max_time is None else max(span[1], stage.max_time)

    def finish(self, stage: Stage, rows: int) -> dict[str, Any]:
        """The receipt; the stage is durable then. StageError: it is not, and is dropped."""
        if rows != stage.rows:
            raise StageError(
                f"stage {stage.id} has {stage.rows} rows, but its producer says that it sent {rows}",
                code="stage_counts",
            )
        stage.close_groups()
        receipt = stage.receipt()
        stage.file.finish({**receipt, "min_time": stage.min_time, "max_time": stage.max_time})
        with self._lock:
            self._check_open(stage)
            self._recount(stage)
            stage.state = "finished"
            stage.touched = time.time()
        return receipt

    # What becomes of them -----------------------------------------------------------------------------------

    def get(self, stage_id: str) -> Stage | None:
        with self._lock:
            return self._stages.get(stage_id)

    def drop(self, stage_id: str, why: str) -> str:
        """Fence a stage and forget its rows, unless it was committed. Returns what it was, or "unknown"."""
        with self._lock:
            stage = self._stages.get(stage_id)
            if stage is not None and stage.state == "committed":
                return "committed"
            self._fenced[stage_id] = why
            while len(self._fenced) > FENCES:
                self._fenced.popitem(last=False)
            if stage is None:
                return "unknown"
            self._remove(stage)
            if stage.state != "open":  # an open one's file may be in use: whoever writes to it finds the fence
                stage.file.discard()
            elif stage.file.path is not None:
                stage.file.path.unlink(missing_ok=True)
            return stage.state

    def commit(self, stages: Iterable[Stage]) -> None:
        with self._lock:
            for stage in stages:
                stage.state = "committed"
                self._give_back_if_applied(stage)

    def handed(self, stage: Stage, rows: int) -> None:
        """So many of its rows are given to workers now, and are staged no longer."""
        with self._lock:
            stage.waiting -= rows
            stage.working += rows
            self._waiting[stage.stream] -= rows

    def applied(self, stage: Stage, rows: int) -> None:
        """So many of these were worked off."""
        with self._lock:
            stage.working -= rows
            self._give_back_if_applied(stage)

    def _give_back_if_applied(self, stage: Stage) -> None:
        if stage.state == "committed" and stage.waiting == stage.working == 0:
            self._give_back(stage)

    def forget(self, stage_ids: Iterable[str]) -> None:
        """Committed ones that nobody needs any more."""
        with self._lock:
            for stage_id in stage_ids:
                stage = self._stages.get(stage_id)
                if stage is not None:
                    self._remove(stage)
                    stage.file.discard()

    def set_aside(self, stage_ids: Iterable[str]) -> None:
        """No part of anything any more; the files are kept, in a folder of their own. Raises StageError."""
        with self._lock:
            for stage_id in stage_ids:
                stage = self._stages.get(stage_id)
                if stage is not None and stage.file.path is not None:
                    stage.file.move(stage.file.path.parent / ASIDE)
                    self._remove(stage)

    def expire(self) -> None:
        """Drop finished stages that no commit has named in time."""
        oldest = time.time() - self._timeout_s
        with self._lock:
            late = [s.id for s in self._stages.values() if s.state == "finished" and s.touched < oldest]
        for stage_id in late:
            if self.drop(stage_id, f"no commit named it within {self._timeout_s:g} s") == "finished":
                self.expired += 1
                log.warning("stage_expired", extra={"fields": {"stage": stage_id}})

    def sync(self) -> None:
        """Make the names of finished stages durable."""
        if self.directory is not None:
            try:
                sync_directory(self.directory)
            except OSError as error:
                raise io_error("write", self.directory, error) from error

    def counts(self, stream: str) -> tuple[int, int]:
        """(rows that wait for a commit or for a worker, rows that were dropped)."""
        with self._lock:
            return self._waiting[stream], self._dropped[stream]

    def totals(self) -> dict[str, int]:
        """How many there are in each state, and the bytes of their rows."""
        with self._lock:
            states = Counter(stage.state for stage in self._stages.values())
            size = sum(stage.bytes for stage in self._stages.values())
        return {**{state: states[state] for state in ("open", "finished", "committed")}, "bytes": size}

    def list(self) -> list[dict[str, Any]]:
        now = time.time()
        with self._lock:
            return [
                {
                    "stage": stage.id,
                    "stream": stage.stream,
                    "state": stage.state,
                    "rows": stage.rows,
                    "bytes": stage.bytes,
                    "waiting_rows": stage.waiting + stage.working,
                    "groups": len(stage.groups) or len(stage.group_rows),
                    "producer": stage.producer,
                    "age_s": round(max(0.0, now - stage.touched), 3),
                }
                for stage in sorted(self._stages.values(), key=lambda s: s.touched)
            ]

    def stop(self) -> None:
        """Refuse more rows; producers that wait are told."""
        with self._lock:
            self._stopped = True
            self.room.wake()

    def close(self) -> None:
        with self._lock:
            for stage in self._stages.values():
                stage.file.close()

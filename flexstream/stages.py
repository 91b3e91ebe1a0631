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

from flexstream.errors import StageError
from flexstream.stage_block import Block
from flexstream.state.commits import NAME as JOURNAL_NAME
from flexstream.state.pages import Bytes
from flexstream.state.segments import sync_directory
from flexstream.state.stage import SUFFIX, StageFile, io_error

log = logging.getLogger("flexstream.stages")

MEMORY_BYTES = 256 << 20  # of stages without a directory; what is more is spilled
DEFAULT_LIMIT_BYTES = 16 << 30
ROOM_WAIT_S = 30.0  # how long a producer waits for room before it is refused
FENCES = 10_000
ASIDE = "aside"  # the folder of stages whose batch was set aside
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
    groups: Counter[int] = field(default_factory=Counter)
    min_time: int | None = None
    max_time: int | None = None
    touched: float = field(default_factory=time.time)
    waiting: int = 0  # rows that were not applied and not dropped

    def receipt(self) -> dict[str, Any]:
        groups = {str(group): rows for group, rows in sorted(self.groups.items())}
        return {"stage": self.id, "rows": self.rows, "bytes": self.bytes, "groups": groups}


class Stages:
    """Thread-safe. `directory` None: in memory, spilled to nameless files past a bound."""

    def __init__(self, directory: Path | None, limit_bytes: int, timeout_s: float) -> None:
        """Finds the stages that a process before has finished. Raises StageError."""
        self.directory = directory
        self.limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._stages: dict[str, Stage] = {}
        self._fenced: OrderedDict[str, str] = OrderedDict()  # id -> why
        self._dropped: Counter[str] = Counter()  # rows by stream
        self._stopped = False
        self.expired = 0
        self.held_back = 0  # producers that wait for room
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
            groups = Counter({int(group): rows for group, rows in receipt["groups"].items()})
            rows, size = receipt["rows"], receipt["bytes"]
            self._stages[path.stem] = Stage(
                path.stem, about["stream"], file, about.get("producer", ""), "finished", rows, size, groups,
                receipt["min_time"], receipt["max_time"], path.stat().st_mtime, waiting=rows,
            )  # fmt: skip

    # Rows in ------------------------------------------------------------------------------------------------

    def begin(self, stage_id: object, stream: str, about: dict[str, Any]) -> Stage:
        """Raises StageError: `bad_stage` for the name, `fenced`, `stage_exists`, and the disk's."""
        if not isinstance(stage_id, str) or _ID.fullmatch(stage_id) is None:
            raise StageError(
                f"stage {stage_id!r:.80} is not a name",
                code="bad_stage",
                hint="use a fresh UUID: letters, digits, - and _, at most 64",
            )
        with self._lock:
            self._check_not_fenced(stage_id)
            if stage_id in self._stages:
                raise StageError(
                    f"stage {stage_id} is {self._stages[stage_id].state} already",
                    code="stage_exists",
                    hint="each attempt needs a fresh UUID",
                )
            path = self.directory / f"{stage_id}{SUFFIX}" if self.directory is not None else None
            file = StageFile.create(path, {"stage": stage_id, "stream": stream, **about})
            stage = Stage(stage_id, stream, file, str(about.get("producer", "")))
            self._stages[stage_id] = stage
            return stage

    def _check_not_fenced(self, stage_id: str) -> None:
        if stage_id in self._fenced:
            raise StageError(
                f"stage {stage_id} is fenced: {self._fenced[stage_id]}",
                code="fenced",
                hint="its rows will never count; a new attempt needs a fresh UUID",
            )

    def wait_for_room(self, stage: Stage, n: int, wait_s: float = ROOM_WAIT_S) -> None:
        """Back-pressure: returns when `n` bytes more fit. StageError `stage_full` when that takes too long."""
        deadline = time.monotonic() + wait_s
        with self._room:
            if self._fits(n):
                self._check_open(stage)
                return
            self.held_back += 1
            try:
                self._wait_until_it_fits(stage, n, deadline, wait_s)
            finally:
                self.held_back -= 1

    def _fits(self, n: int) -> bool:
        return self._unapplied_bytes() + n <= self.limit_bytes

    def _wait_until_it_fits(self, stage: Stage, n: int, deadline: float, wait_s: float) -> None:
        while not self._fits(n):
            self._check_open(stage)
            left = deadline - time.monotonic()
            if left <= 0:
                raise StageError(
                    f"staged rows take {self._unapplied_bytes()} of stage_limit_bytes = {self.limit_bytes}, "
                    f"and no batch was committed for {wait_s:g} s",
                    code="stage_full",
                    hint="make the batches smaller (maxFilesPerTrigger, maxOffsetsPerTrigger), or raise the limit",
                )
            self._room.wait(min(left, 0.5))
        self._check_open(stage)

    def _check_open(self, stage: Stage) -> None:
        if self._stopped:
            raise StageError("the daemon is stopping", code="shutting_down", hint="run the task again")
        self._check_not_fenced(stage.id)

    def _unapplied_bytes(self) -> int:
        return sum(stage.bytes for stage in self._stages.values() if stage.waiting or stage.state == "open")

    def append(self, stage: Stage, block: Block, span: tuple[int, int] | None, frame: Bytes, size: int) -> None:
        """Add one block, given as its frame: `size` bytes in memory of whole pages. On a StageError the stage is as
        it was, or fenced.
        """
        with self._lock:
            self._check_open(stage)
            in_memory = sum(known.file.in_memory_bytes for known in self._stages.values())
        if self.directory is None and stage.file.in_memory_bytes and in_memory + len(block.rows) > MEMORY_BYTES:
            stage.file.spill()
        stage.file.append_pages(frame, size)
        rows = sum(block.counts)
        with self._lock:
            if stage.id in self._fenced:  # dropped while the disk was busy
                stage.file.discard()
                self._check_open(stage)
            stage.rows += rows
            stage.waiting += rows
            stage.bytes += len(block.rows)
            stage.touched = time.time()
            for group, count in zip(block.groups, block.counts, strict=True):
                stage.groups[group] += count
            if span is not None:
                stage.min_time = span[0] if stage.min_time is None else min(span[0], stage.min_time)
                stage.max_time = span[1] if stage.max_time is None else max(span[1], stage.max_time)

    def finish(self, stage: Stage, rows: int) -> dict[str, Any]:
        """The receipt; the stage is durable then. StageError: it is not, and is dropped."""
        if rows != stage.rows:
            raise StageError(f"stage {stage.id} has {stage.rows} rows, its producer sent {rows}", code="stage_counts")
        receipt = stage.receipt()
        stage.file.finish({**receipt, "min_time": stage.min_time, "max_time": stage.max_time})
        with self._lock:
            self._check_open(stage)
            stage.state = "finished"
            stage.touched = time.time()
        return receipt

    # What becomes of them -----------------------------------------------------------------------------------

    def get(self, stage_id: str) -> Stage | None:
        with self._lock:
            return self._stages.get(stage_id)

    def drop(self, stage_id: str, why: str) -> str:
        """Fence a stage and forget its rows, unless it was committed. Returns what it was, or "unknown"."""
        with self._room:
            stage = self._stages.get(stage_id)
            if stage is not None and stage.state == "committed":
                return "committed"
            self._fenced[stage_id] = why
            while len(self._fenced) > FENCES:
                self._fenced.popitem(last=False)
            if stage is None:
                return "unknown"
            del self._stages[stage_id]
            self._dropped[stage.stream] += stage.waiting
            if stage.state != "open":  # an open one's file may be in use: whoever writes to it finds the fence
                stage.file.discard()
            elif stage.file.path is not None:
                stage.file.path.unlink(missing_ok=True)
            self._room.notify_all()
            return stage.state

    def commit(self, stages: Iterable[Stage]) -> None:
        with self._lock:
            for stage in stages:
                stage.state = "committed"

    def applied(self, stage: Stage, rows: int) -> None:
        """So many of its rows are a worker's now."""
        with self._room:
            stage.waiting -= rows
            self._room.notify_all()

    def forget(self, stage_ids: Iterable[str]) -> None:
        """Committed ones that nobody needs any more."""
        with self._room:
            for stage_id in stage_ids:
                stage = self._stages.pop(stage_id, None)
                if stage is not None:
                    self._dropped[stage.stream] += stage.waiting
                    stage.file.discard()
            self._room.notify_all()

    def set_aside(self, stage_ids: Iterable[str]) -> None:
        """No part of anything any more; the files are kept, in a folder of their own. Raises StageError."""
        with self._room:
            for stage_id in stage_ids:
                stage = self._stages.pop(stage_id, None)
                if stage is not None and stage.file.path is not None:
                    self._dropped[stage.stream] += stage.waiting
                    stage.file.move(stage.file.path.parent / ASIDE)
            self._room.notify_all()

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
        """(rows that wait for a commit or to be applied, rows that were dropped)."""
        with self._lock:
            waiting = sum(stage.waiting for stage in self._stages.values() if stage.stream == stream)
            return waiting, self._dropped[stream]

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
                    "waiting_rows": stage.waiting,
                    "groups": len(stage.groups),
                    "producer": stage.producer,
                    "age_s": round(max(0.0, now - stage.touched), 3),
                }
                for stage in sorted(self._stages.values(), key=lambda s: s.touched)
            ]

    def stop(self) -> None:
        """Refuse more rows; producers that wait are told."""
        with self._room:
            self._stopped = True
            self._room.notify_all()

    def close(self) -> None:
        with self._lock:
            for stage in self._stages.values():
                stage.file.close()

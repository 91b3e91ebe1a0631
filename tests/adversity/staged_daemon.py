"""A real daemon that dies when it is told to, and a driver that does as Spark does: the batch again until it counts."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import resource
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from flexstream.client.http import Client
from flexstream.errors import FlexStreamError
from flexstream.staging.service import Staging
from flexstream.state.results.result_log import ResultLog
from flexstream.state.stage.commit_journal import CommitJournal
from flexstream.state.stage.stage_file import StageFile
from flexstream.testing import run
from tests.property.checks import as_rows, assert_balances, assert_same_results, window_of

START_S = 120.0
DISORDER = 5
STREAM = fs.Stream(
    "s", {"t": "timestamp[ms]", "k": "i32", "x": "i64", "pad": "bytes[12]"}, key="k", time="t", max_disorder="5ms"
)
TUMBLING = STREAM.query("tumbling").window(fs.tumbling("100ms")).agg(n=fs.count(), total=fs.sum("x"))
SLIDING = STREAM.query("sliding").window(fs.sliding("60ms", every="20ms"), allowed_lateness="150ms").agg(n=fs.count())
QUERIES = (TUMBLING, SLIDING)

POINTS = {
    "before the stage is durable": (StageFile, "finish", "before"),
    "after the stage is durable": (StageFile, "finish", "after"),
    "before the commit": (CommitJournal, "commit", "before"),
    "between commit and apply": (CommitJournal, "commit", "after"),
    "while applying": (Staging, "_apply_stage", "before"),
    "before the watermark": (Staging, "_raise_watermark", "before"),
    "after applying": (Staging, "_apply", "after"),
    "while writing results": (ResultLog, "append", "after"),
    "before a batch is done": (CommitJournal, "done", "before"),
    "before its stages are removed": (CommitJournal, "done", "after"),
    "while the journal is written anew": (CommitJournal, "rewrite", "before"),
    "while replaying": (Staging, "_replay_one", "after"),
}


POISON_ROWS = 666  # a stage of so many rows kills a daemon that was started with "poison", whenever it is applied


def _arm(die: str) -> None:
    """Be killed with SIGKILL when a point is reached for the n-th time: "point:n"."""
    if die == "poison":
        _arm_poison()
        return
    point, _, count = die.partition(":")
    owner, name, when = POINTS[point]
    real, left = getattr(owner, name), [int(count)]

    def deadly(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*arguments, **named)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, deadly)


def _arm_poison() -> None:
    real = Staging._apply_stage

    def deadly(staging: Any, running: Any, slot: int, stage: Any) -> None:
        if stage.rows == POISON_ROWS:
            os.kill(os.getpid(), signal.SIGKILL)
        real(staging, running, slot, stage)

    Staging._apply_stage = deadly  # type: ignore[method-assign]


def _serve(arguments: list[str], die: str, out: str, errors: str, file_bytes: int | None) -> None:
    """The daemon's process: `flexstream serve`, as the command line runs it."""
    from flexstream.cli import main

    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
    os.dup2(os.open(out, os.O_WRONLY), 1)
    if die:
        _arm(die)
    main(arguments)


class StagedDaemon:
    """A daemon in a process of its own, on the same data_dir after every death. A server that has imported
    everything forks it, because starting an interpreter takes longer than all the rest.
    """

    def __init__(self, data_dir: Path, *arguments: str) -> None:
        self._data_dir = data_dir
        self._arguments = arguments
        self._child: Any = None
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(
            ["pytest", "flexstream.engine.engine", "flexstream.cli", "flexstream.daemon.service", __name__]
        )
        self.deaths = 0

    def start(self, die: str = "", *, file_bytes: int | None = None) -> None:
        """Start it, and again when it dies before it is ready."""
        arguments = ["serve", "--json", "--control", "127.0.0.1:0", "--data", "127.0.0.1:0", "--data-dir"]
        arguments += [str(self._data_dir), "--workers", "2", "--pin", "false", "--groups", "8", "--compile", "off"]
        errors = self._data_dir.parent / "daemon.log"
        while True:
            fifo = self._data_dir.parent / f"ready-{uuid.uuid4()}"
            os.mkfifo(fifo)
            self._child = self._processes.Process(
                target=_serve,
                args=([*arguments, *self._arguments], die, str(fifo), str(errors), file_bytes),
                daemon=True,
            )
            self._child.start()
            line = _first_line(fifo, self._child)
            fifo.unlink()
            if line:
                self.ready = json.loads(line)
                self.client = Client(self.ready["control"], timeout_s=START_S)
                return
            self._child.join(START_S)
            assert self._child.exitcode == -9, errors.read_text()[-3000:]
            self.deaths += 1
            die = die if die == "poison" else ""

    def wait_dead(self) -> None:
        self._child.join(START_S)
        assert self._child.exitcode == -9, (self._data_dir.parent / "daemon.log").read_text()[-3000:]
        self.deaths += 1

    def kill(self) -> None:
        self._child.kill()
        self.wait_dead()

    def terminate(self) -> None:
        """A clean stop."""
        self._child.terminate()
        self._child.join(START_S)
        assert self._child.exitcode == 0, (self._data_dir.parent / "daemon.log").read_text()[-3000:]

    def close(self) -> None:
        if self._child is not None and self._child.is_alive():
            self._child.kill()
            self._child.join()


def _first_line(fifo: Path, child: Any) -> str:
    """What the child says first; empty when it ends without a word."""
    fd = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    deadline, data = time.monotonic() + START_S, b""
    try:
        while b"\n" not in data and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                data += os.read(fd, 65536)
            if not data and not child.is_alive():
                return ""
            time.sleep(0.005)
    finally:
        os.close(fd)
    return data.partition(b"\n")[0].decode()


@contextlib.contextmanager
def staged_daemon(data_dir: Path, *arguments: str, die: str = "") -> Iterator[StagedDaemon]:
    data_dir.mkdir(exist_ok=True)
    daemon = StagedDaemon(data_dir, *arguments)
    try:
        daemon.start()
        for query in QUERIES:
            daemon.client.post("/v1/queries", query.to_dict())
        if die:
            daemon.terminate()
            daemon.start(die)
        yield daemon
    finally:
        daemon.close()


def make_batches(count: int, rows_each: int = 900, seed: int = 1, old_share: float = 0.02) -> list[np.ndarray]:
    """Batches of rows in rough order of time; some of the old ones are too late for some windows, some for all."""
    rng = np.random.default_rng(seed)
    batches = []
    for batch in range(count):
        rows = np.zeros(rows_each, STREAM.schema.dtype)
        rows["t"] = batch * 50 + rng.integers(0, 80, rows_each)
        old = rng.random(rows_each) < old_share
        rows["t"][old] -= rng.integers(0, 300, int(old.sum()))
        rows["k"] = rng.integers(0, 40, rows_each)
        rows["x"] = rng.integers(-1000, 1000, rows_each)
        batches.append(rows)
    return batches


def stage(daemon: StagedDaemon, rows: np.ndarray, tasks: int = 3) -> list[dict[str, Any]]:
    receipts = []
    with fs.Producer(daemon.ready["control"], stream=STREAM, stage=True, connect_timeout_s=60) as producer:
        for part in np.array_split(rows, tasks):
            producer.begin_stage(str(uuid.uuid4()))
            producer.send(part)
            receipts.append(producer.finish_stage(timeout=60))
    return receipts


def commit(daemon: StagedDaemon, batch: int | None, receipts: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    body = {"sink": "sink", "query": "query", "batch": batch, "stages": receipts, **more}
    return dict(daemon.client.post("/v1/commits", body))


def drive(daemon: StagedDaemon, batch: int, rows: np.ndarray) -> None:
    """The batch, until it counts: what is not committed is staged anew."""
    for _ in range(6):
        try:
            commit(daemon, batch, stage(daemon, rows))
            return
        except (FlexStreamError, OSError):
            daemon.wait_dead()  # nothing else may go wrong
            daemon.start()
    raise AssertionError(f"batch {batch} never counted")


def end(daemon: StagedDaemon) -> None:
    for _ in range(6):
        try:
            commit(daemon, None, [], stream="s", end=True)
            break
        except (FlexStreamError, OSError):
            daemon.wait_dead()
            daemon.start()
    wait_for(daemon, lambda status: not status["streams"]["s"]["sessions"])


def wait_for(daemon: StagedDaemon, true: Any) -> None:
    """Until the status is so; a daemon that dies meanwhile is started again."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            status = daemon.client.get("/v1/status")
            if true(status):
                return
        except (FlexStreamError, OSError):
            daemon.wait_dead()
            daemon.start()
            deadline = time.monotonic() + START_S
        assert time.monotonic() < deadline, status
        time.sleep(0.02)


def check(daemon: StagedDaemon, batches: list[np.ndarray]) -> None:
    """After the end: results and late rows are the oracle's, each once."""
    rows = np.concatenate(batches)
    watermarks, position = {}, 0
    for batch in batches:
        if position:
            watermarks[position] = int(rows["t"][:position].max()) - DISORDER
        position += len(batch)
    for query in QUERIES:
        expected = run(query, rows, watermarks)
        found = as_rows(daemon.client.batches(query.name))
        assert all(row["complete"] for row in found), "commits lose nothing"
        identities = [(window_of(query, row), row["revision"]) for row in found]
        assert len(set(identities)) == len(identities), "a result is in the log twice"
        last = {window_of(query, row): row for row in sorted(found, key=lambda row: row["revision"])}
        assert_same_results(query, list(last.values()), expected.windows)
        late = as_rows(daemon.client.batches(query.name, late=True))
        wanted = sorted(rows[["t", "k", "x"]][expected.late].tolist())
        assert sorted((row["t"], row["k"], row["x"]) for row in late) == wanted
    status = daemon.client.get("/v1/status")
    assert_balances(status["streams"]["s"]["ledger"], "received")
    for query in QUERIES:
        assert_balances(status["queries"][query.name]["ledger"], "accepted")

"""The main job: a daemon, the YSB query, ad events through Spark and a producer, windows arriving, totals checked.

Runs `flexstream serve` on free ports with a temporary data directory and submits the Yahoo Streaming Benchmark's
query (views per campaign per 10 s window). A local Spark's executors make ad events and push them; the windows come
back through the Spark source, and Spark's own groupBy of the same events must confirm every one. Then our own
producer sends as fast as it can, and at half that rate with latency markers; a computation in numpy must confirm its
windows. Without Java or pyspark our own producer does all of it, and the job says so. Exit code 0 only if all totals
are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import spark_job  # beside this file
from spark_job import Pushed

import flexstream as fs
from flexstream.testing import ysb

KEYS = 10_000
SEED = 42
BATCH_ROWS = 65_536
POOL = 24  # batches generated before the start and sent again and again, moved on in event time
EVENT_RATE = 500_000  # rows per second of event time: a 10 s window has 5 million rows
START_MS = 1_767_225_600_000  # 2026-01-01 00:00:00 UTC, a multiple of the window
WINDOW_MS = 10_000
MARKER_S = 0.01
PATIENCE_S = 30.0


class JobFailed(Exception):
    """The job cannot go on, or its totals are wrong; the message is for the person in front of it."""


# The daemon ------------------------------------------------------------------------------------------------


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def flexstream_command() -> list[str]:
    """The installed command of this interpreter's environment, or the same thing without it."""
    installed = shutil.which("flexstream", path=str(Path(sys.executable).parent))
    return [installed] if installed else [sys.executable, "-c", "from flexstream.cli import main; main()"]


@dataclass
class Daemon:
    """A running `flexstream serve` and its HTTP API."""

    process: subprocess.Popen[bytes]
    control: str
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.control}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as answer:
            body: bytes = answer.read()
            return body

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/v1/status"))
        return found

    def wait_until_ready(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise JobFailed(f"the daemon ended with exit code {code}:\n{self.log_tail()}")
            try:
                self.get("/readyz")
                return
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        raise JobFailed(f"the daemon was not ready within {PATIENCE_S:.0f} s:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """The end of the daemon's log, short enough to be read."""
        return "\n".join(line[:400] for line in self.log.read_text(errors="replace").splitlines()[-8:])

    def run(self, *arguments: str) -> None:
        """One command of the command line, against this daemon."""
        environment = {**os.environ, "FLEXSTREAM_URL": self.url}
        done = subprocess.run(
            [*flexstream_command(), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        if done.returncode != 0:
            raise JobFailed(f"flexstream {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise JobFailed(f"the daemon did not stop on SIGTERM:\n{self.log_tail()}") from None


@contextmanager
def running_daemon(folder: Path, workers: str) -> Iterator[Daemon]:
    control, data = (f"127.0.0.1:{port}" for port in free_ports(2))
    log = folder / "daemon.log"
    command = [*flexstream_command(), "serve", "--control", control, "--data", data]
    command += ["--data-dir", str(folder / "data"), "--workers", workers]
    with log.open("wb") as output:  # its own session: Ctrl-C reaches it through us, as SIGTERM
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    daemon = Daemon(process, control, log)
    try:
        daemon.wait_until_ready()
        yield daemon
    except BaseException:
        process.terminate()  # does nothing when it has ended already
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    daemon.stop()


# The events ------------------------------------------------------------------------------------------------


@dataclass
class Events:
    """A pool of batches sent in turn; pass p over the pool is the pool moved on by p spans of event time."""

    start_ms: int = START_MS
    pool: list[np.ndarray] = field(default_factory=list)
    sent: int = 0  # batches

    @property
    def span_ms(self) -> int:
        return -(-POOL * BATCH_ROWS * 1000 // EVENT_RATE)  # rounded up: passes must not overlap

    @property
    def rows(self) -> int:
        return self.sent * BATCH_ROWS

    def generate(self) -> None:
        rows = ysb.generate(POOL * BATCH_ROWS, keys=KEYS, seed=SEED, rate=EVENT_RATE, start=self.start_ms)
        times = rows["event_time"]
        assert int(times.min()) >= self.start_ms
        assert int(times.max()) < self.start_ms + self.span_ms
        self.pool = np.split(rows, POOL)

    def next(self) -> np.ndarray:
        batch = self.pool[self.sent % POOL]
        if self.sent >= POOL:
            batch["event_time"] += self.span_ms
        self.sent += 1
        return batch

    def expected(self) -> dict[int, np.ndarray]:
        """Views per window and campaign: numpy, over the same events, generated once more."""
        base = ysb.generate(POOL * BATCH_ROWS, keys=KEYS, seed=SEED, rate=EVENT_RATE, start=self.start_ms)
        totals: dict[int, np.ndarray] = {}
        for number in range(self.sent):
            rows = base[(number % POOL) * BATCH_ROWS :][:BATCH_ROWS]
            views = rows[rows["event_type"] == b"view"]
            windows = (views["event_time"] + number // POOL * self.span_ms) // WINDOW_MS * WINDOW_MS
            for window in range(int(windows.min()), int(windows.max()) + 1, WINDOW_MS):
                counts = np.bincount(views["campaign_id"][windows == window], minlength=KEYS)
                totals[window] = totals.get(window, 0) + counts
        return totals


def feed(producer: fs.Producer, events: Events, seconds: float, rate: float | None) -> float:
    """Send for so long, at this rate if one is given and then with markers; returns rows per second taken."""
    before, begin = events.rows, time.monotonic()
    marker_due = begin
    while time.monotonic() - begin < seconds:
        producer.send(events.next())
        if rate is None:
            continue
        due = begin + (events.rows - before) / rate
        while True:
            now = time.monotonic()
            if now >= marker_due:
                producer.marker()
                marker_due = now + MARKER_S
            if now >= due:
                break
            time.sleep(min(MARKER_S, due - now))
    producer.flush(PATIENCE_S)
    return (events.rows - before) / (time.monotonic() - begin)


# The results -----------------------------------------------------------------------------------------------


def clock(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%H:%M:%S")


class Windows:
    """Reads the query's results as they come, over HTTP, and shows each window when the next one begins."""

    def __init__(self, daemon: Daemon, query: str) -> None:
        self.counts: dict[int, dict[int, int]] = {}
        self.results = 0
        self.revised = 0
        self.error: BaseException | None = None
        self._daemon = daemon
        self._query = query
        self._shown: set[int] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="windows", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(0.25):
                self.read()
        except Exception as error:  # shown by the main thread, which is the one that can end the job
            self.error = error

    def read(self) -> None:
        path = f"/v1/queries/{self._query}/results?offset={self.results}&format=arrow"
        for batch in pa.ipc.open_stream(self._daemon.get(path)):
            self._add(batch)
        for window in sorted(self.counts)[:-1]:
            self._show(window)

    def _add(self, batch: pa.RecordBatch) -> None:
        starts = batch.column("window_start").cast(pa.int64()).to_numpy()
        keys = batch.column("campaign_id").to_numpy()
        counts = batch.column("views").to_numpy()
        self.results += batch.num_rows
        self.revised += int((batch.column("revision").to_numpy() > 0).sum())
        for window in np.unique(starts):
            here = starts == window
            found = self.counts.setdefault(int(window), {})
            found.update(zip(keys[here].tolist(), counts[here].tolist(), strict=True))

    def _show(self, window: int) -> None:
        if window in self._shown:
            return
        self._shown.add(window)
        found = self.counts[window]
        busiest = max(found, key=lambda key: found[key])
        begin, end = (clock(time_ms) for time_ms in (window, window + WINDOW_MS))
        print(
            f"  window {begin}-{end}  {len(found):>6,} campaigns  {sum(found.values()):>10,} views"
            f"  busiest: {busiest} ({found[busiest]:,})",
            flush=True,
        )

    def finish(self) -> None:
        """Stop following, read the rest and show it. Raises what went wrong while following."""
        self._stop.set()
        self._thread.join()
        if self.error is not None:
            raise JobFailed(f"reading results failed: {self.error}")
        self.read()
        for window in sorted(self.counts):
            self._show(window)


# The check and the summary ---------------------------------------------------------------------------------


def verify(events: Events, pushed: Pushed, windows: Windows, status: dict[str, Any]) -> None:
    """Every count of every window that our own producer filled, and the ledger of all: JobFailed at a difference."""
    stream, sent = status["streams"][ysb.YSB_STREAM.name]["ledger"], events.rows + pushed.rows
    if stream["received"] != sent or stream["accepted"] != sent:
        raise JobFailed(f"TOTALS DIFFER: sent {sent} records, but the stream's ledger says {stream}")
    for name, query in status["queries"].items():
        ledger = query["ledger"]
        if ledger["accepted"] != sent or ledger["late"] or ledger["rejected"]:
            raise JobFailed(f"TOTALS DIFFER: sent {sent} records, but the ledger of {name} says {ledger}")
    expected = events.expected()
    ours = {window for window in windows.counts if window >= events.start_ms}
    if set(expected) != ours:
        missing = sorted(set(expected) ^ ours)
        found = f"{len(expected)} windows expected, {len(ours)} seen"
        raise JobFailed(f"TOTALS DIFFER: {found}, not in both: {missing[:5]}")
    for window, counts in sorted(expected.items()):
        seen = np.zeros(KEYS, dtype=np.int64)
        for key, count in windows.counts[window].items():
            seen[key] = count
        wrong = np.flatnonzero(seen != counts)
        if len(wrong):
            key = int(wrong[0])
            raise JobFailed(
                f"TOTALS DIFFER: window {window}: {len(wrong)} campaigns are wrong, such as campaign {key}: "
                f"{seen[key]} views, expected {counts[key]}"
            )


def confirm(spark: Any, daemon: Daemon, pushed: Pushed, groups: int) -> int:
    """Spark's own groupBy against what the source gives back; returns how many results agree."""
    count, wrong = spark_job.differences(spark, daemon.control, pushed, KEYS, START_MS, groups)
    if wrong:
        raise JobFailed(f"TOTALS DIFFER: Spark's groupBy and the windows do not agree on {wrong}")
    return count


def summary(
    events: Events, pushed: Pushed, windows: Windows, status: dict[str, Any], rate: float, paced: float, confirmed: int
) -> None:
    latency = status["latency"]
    total = sum(worker["rows"] for worker in status["workers"]) or 1
    print()
    print(f"  records     {events.rows + pushed.rows:,} sent and received; 0 late, 0 rejected")
    if pushed.jobs:
        speed = pushed.rows / pushed.seconds / 1e6
        print(f"  Spark       {pushed.rows:,} records pushed in {pushed.jobs} jobs, {speed:.2f} M records/s,")
        print(f"              each committed once; its own groupBy confirms all {confirmed:,} results of these windows")
    print(f"  windows     {len(windows.counts)}, with {windows.results:,} results")
    print(f"  throughput  {rate / 1e6:.2f} M records/s through one producer at full speed")
    quantiles = ", ".join(f"{name} {latency[name + '_ms']:.2f} ms" for name in ("p50", "p99", "max"))
    print(f"  latency     {quantiles} at {paced / 1e6:.2f} M records/s ({latency['count']} markers)")
    for worker in status["workers"]:
        where = f"core {worker['cpu']}" if worker["pinned"] else "not pinned"
        print(f"  worker {worker['worker']}    {worker['rows'] / total:.0%} of the records, {where}")
    print()


def say(text: str) -> None:
    print(f"  {text}", flush=True)


@contextmanager
def maybe_spark(wanted: bool) -> Iterator[Any]:
    """A Spark session; None, with the reason said, when there can be none."""
    reason = spark_job.why_not() if wanted else "--no-spark"
    if reason is not None:
        say(f"without Spark: {reason}. Our own producer sends everything")
        yield None
        return
    say("starting Spark (some 10 s) ...")
    begin = time.monotonic()
    with spark_job.session() as spark:
        took = time.monotonic() - begin
        say(f"Spark {spark.version} is up after {took:.0f} s; its executors make and push ad events")
        yield spark


def job(options: argparse.Namespace, folder: Path) -> str:
    """The whole job; returns the last line."""
    print("FlexStream main job: views per campaign in 10 s windows", flush=True)
    with running_daemon(folder, options.workers) as daemon:
        daemon.run("submit", "flexstream.testing.ysb:YSB_QUERY")
        say(f"daemon at {daemon.url}, query {ysb.YSB_QUERY.name!r} submitted; windows as they arrive:")
        windows = Windows(daemon, ysb.YSB_QUERY.name)
        with maybe_spark(not options.no_spark) as spark:
            pushed, confirmed = Pushed(), 0
            if spark is not None:
                pushed = spark_job.push(spark, daemon.control, options.seconds * 0.5, KEYS, START_MS)
            events = Events(START_MS + pushed.span_ms)
            events.generate()
            own_seconds = options.seconds * (0.5 if pushed.jobs else 1.0)
            with fs.Producer(daemon.control, stream=ysb.YSB_STREAM.name) as producer:
                rate = feed(producer, events, own_seconds * 0.6, None)
                paced = feed(producer, events, own_seconds * 0.4, rate / 2)
            windows.finish()
            status = daemon.status()
            verify(events, pushed, windows, status)
            if spark is not None:
                say("every window of our own producer is right; now Spark's groupBy of what its executors pushed ...")
                confirmed = confirm(spark, daemon, pushed, status["groups"])
        summary(events, pushed, windows, status, rate, paced, confirmed)
    p99, records = status["latency"]["p99_ms"], events.rows + pushed.rows
    return (
        f"FlexStream: {records} records, {len(windows.counts)} windows, {rate / 1e6:.2f} M records/s, "
        f"p99 {p99:.2f} ms, totals verified"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to send events (default 10)")
    parser.add_argument("--no-spark", action="store_true", help="our own producer sends everything")
    parser.add_argument("--workers", default="auto", help="a number, or cores such as 0,1")
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="flexstream-run-") as folder:
            line = job(options, Path(folder))
    except KeyboardInterrupt:
        print("\nFlexStream: stopped by Ctrl-C; the daemon has ended, nothing is left behind")
        return 130
    except (JobFailed, fs.FlexStreamError) as error:
        print(f"\nFlexStream: FAILED: {error}", file=sys.stderr)
        return 1
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

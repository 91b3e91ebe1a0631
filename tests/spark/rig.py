"""What the tests with Spark share: daemons as processes, a small stream with strings, and comparisons."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import flexstream as fs
from flexstream import col
from flexstream.client.http import Client
from flexstream.testing import run
from tests.conftest import PROJECT
from tests.ports import quiet_port
from tests.property.checks import assert_same_results
from tests.waiting import wait_until

WAIT_S = 120.0
MAIN = "from flexstream.cli import main; main()"
GROUPS = 16
STREAM = fs.Stream(
    "events",
    {"t": "timestamp[ms]", "k": "i64", "kind": "bytes[6]", "x": "i32", "price": "f64"},
    key="k",
    time="t",
    max_disorder="0ms",
)
QUERY = (
    STREAM.query("q")
    .filter(col("kind") == b"view")
    .window(fs.tumbling("1s"))
    .agg(n=fs.count(), total=fs.sum("x"), best=fs.max("x"), mean=fs.avg("price"))
)
SPARK_SCHEMA = "t timestamp, k bigint, kind string, x int, price double"
KINDS = np.array([b"view", b"click", b"buy"])


def make_rows(n: int, *, seed: int = 1, keys: int = 40, start: int = 0, per_second: int = 1000) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["t"] = start + np.arange(n) * 1000 // per_second
    rows["k"] = rng.integers(0, keys, n)
    rows["kind"] = rng.choice(KINDS, n)
    rows["x"] = rng.integers(-1000, 1000, n)
    rows["price"] = np.round(rng.normal(10, 3, n), 2)
    return rows


def arrow_table(rows: np.ndarray) -> pa.Table:
    """As Spark and files have it: text, and timestamps with a zone."""
    return pa.table(
        {
            "t": pa.array(rows["t"]).cast(pa.timestamp("ms")).cast(pa.timestamp("us", tz="UTC")),
            "k": rows["k"],
            "kind": pa.array([kind.decode() for kind in rows["kind"].tolist()]),
            "x": rows["x"],
            "price": rows["price"],
        }
    )


def frame(spark: Any, rows: np.ndarray, partitions: int = 4) -> Any:
    return spark.createDataFrame(arrow_table(rows)).repartition(partitions)


class Daemon:
    """`flexstream serve` as a process of its own. It can be killed and started again on the same ports and data."""

    def __init__(self, folder: Path, *, token: str | None = None, **settings: Any) -> None:
        self.folder = folder
        self.token = token
        self._settings = {"groups": GROUPS, "workers": 1, **settings}
        self._ports = (f"127.0.0.1:{quiet_port()}", f"127.0.0.1:{quiet_port()}")
        self.process: subprocess.Popen[str] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        if token is not None:
            (folder / "token").write_text(token)
            (folder / "token").chmod(0o600)
        self.start()

    def start(self, main: str = MAIN) -> None:
        control, data = self._ports
        command = [sys.executable, "-c", main, "serve", "--json", "--control", control, "--data", data]
        command += ["--data-dir", str(self.folder / "data")]
        for name, value in self._settings.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        if self.token is not None:
            command += ["--token-file", str(self.folder / "token")]
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        log = (self.folder / "log").open("a")
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        log.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("{"):
            self.kill()
            raise AssertionError(line + (self.folder / "log").read_text()[-2000:])
        ready = json.loads(line)
        self.endpoint = ready["control"]
        self._ports = (ready["control"], ready["data"])
        self.client = Client(self.endpoint, token=self.token, timeout_s=WAIT_S)

    def wait_dead(self) -> None:
        assert self.process is not None
        self.process.wait(WAIT_S)

    def kill(self) -> None:
        """As a power cut does it."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None

    def add(self, *queries: fs.Query) -> None:
        for query in queries:
            self.client.post("/v1/streams", query.stream.to_dict())
            self.client.post("/v1/queries", query.to_dict())

    def ledger(self, stream: str = STREAM.name) -> dict[str, int]:
        found: dict[str, int] = self.client.get("/v1/status")["streams"][stream]["ledger"]
        return found

    def late(self, stream: str = STREAM.name) -> int:
        """Rows that were too late, over all queries of the stream."""
        queries = self.client.get("/v1/status")["queries"].values()
        return sum(query["ledger"]["late"] for query in queries if query["stream"] == stream)

    def results(self, query: fs.Query = QUERY) -> list[dict[str, Any]]:
        from tests.property.checks import as_rows

        return as_rows(self.client.batches(query.name))


@contextlib.contextmanager
def serving(folder: Path, *queries: fs.Query, **settings: Any) -> Iterator[Daemon]:
    daemon = Daemon(folder, **settings)
    try:
        daemon.add(*(queries or (QUERY,)))
        yield daemon
    finally:
        daemon.stop()


def end(daemon: Daemon, stream: str = STREAM.name, sink_id: str = "spark") -> None:
    from flexstream.spark import finish

    finish(daemon.endpoint, stream, sink_id=sink_id, token=daemon.token)


def assert_once(daemon: Daemon, *sent: np.ndarray, query: fs.Query = QUERY) -> None:
    """Each row sent is in the results exactly once. The sink has ended."""
    rows = np.concatenate(sent)
    expected = run(query, rows).windows
    wait_until(lambda: len(daemon.results(query)) >= len(expected), f"{len(expected)} results")
    assert_same_results(query, daemon.results(query), expected)
    assert daemon.late(query.stream.name) == 0

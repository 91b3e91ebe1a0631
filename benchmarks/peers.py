"""How do other libraries do on the same rows? YSB through numpy, DuckDB and Bytewax, in turn with our engine embedded.

Each peer runs in a virtual environment of its own below .cache/bench, which this script makes (pip must reach a
package index; a peer that cannot be installed is named, and left out). All read the same file of rows, count views
per campaign and 10 s window, and must find the same total. The clock runs from rows in memory to results in memory;
a peer that takes rows as Python objects gets fewer of them. Nothing here is judged.

    python -m benchmarks.peers [--json] [--quick]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import flexstream as fs
from benchmarks import harness, workload
from benchmarks.engine_process import ysb_query, ysb_stream
from benchmarks.harness import CACHE, Cores
from flexstream.testing import ysb

ROWS = 4_000_000
BATCH = 100_000
PROGRAMS = Path(__file__).parent / "peer_programs"


@dataclass(frozen=True)
class Peer:
    name: str
    program: str
    packages: tuple[str, ...]
    share: float = 1.0  # of the rows


PEERS = (
    Peer("numpy", "numpy_loop.py", ("numpy",)),
    Peer("DuckDB", "duckdb_loop.py", ("numpy", "duckdb", "pyarrow")),
    Peer("Bytewax", "bytewax_flow.py", ("numpy", "bytewax"), share=0.05),
)


def environment(peer: Peer) -> Path:
    """The Python of the peer's own environment. Raises CalledProcessError when it cannot be made."""
    directory = CACHE / "peers" / peer.program.removesuffix(".py")
    python = directory / "bin" / "python"
    if not (directory / "ready").exists():
        venv.create(directory, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *peer.packages]
        subprocess.run(install, check=True, capture_output=True, text=True, timeout=240)
        (directory / "ready").touch()
    return python


class PeerProcess:
    """Runs on the worker's core; told by a line to run once, it answers with seconds and the views it counted."""

    def __init__(self, peer: Peer, rows: Path, cpu: int) -> None:
        count = int(ROWS_IN[rows] * peer.share) if peer.share < 1 else ROWS_IN[rows]
        self.rows = count
        command = [str(environment(peer)), str(PROGRAMS / peer.program), str(rows), str(count), str(BATCH)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {cpu}),
        )
        self._read()  # ready

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args!r} ended with exit code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self) -> tuple[float, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        found = self._read()
        return found["seconds"], found["views"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


ROWS_IN: dict[Path, int] = {}


def row_file(rows: int) -> tuple[Path, np.ndarray]:
    generated = ysb.generate(rows, keys=workload.KEYS, seed=workload.SEED, rate=rows // 40, start=workload.START_MS)
    path = CACHE / f"peers-{rows}.npy"
    CACHE.mkdir(parents=True, exist_ok=True)
    np.save(path, generated)
    ROWS_IN[path] = rows
    return path, generated


def ours(engine: fs.Engine, rows: np.ndarray, number: int) -> tuple[float, int]:
    """As a user would: mixed rows in batches; the engine groups them."""
    name = f"ads{number}"
    stream = ysb_stream(name)
    engine.add(stream)
    engine.submit(ysb_query(stream, name))
    started = time.perf_counter()
    for at in range(0, len(rows), BATCH):
        engine.feed(name, rows[at : at + BATCH])
    engine.finish()
    seconds = time.perf_counter() - started
    counted = sum(int(np.asarray(batch.column("n")).sum()) for batch in engine.results(name))
    engine.cancel(name)
    return seconds, counted


def installed(rows: Path, cpu: int) -> tuple[dict[str, PeerProcess], dict[str, str]]:
    found, missing = {}, {}
    for peer in PEERS:
        try:
            found[peer.name] = PeerProcess(peer, rows, cpu)
        except (subprocess.SubprocessError, OSError) as error:
            said = getattr(error, "stderr", None) or str(error)
            missing[peer.name] = str(said).strip().splitlines()[-1][:200]
    return found, missing


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=5)
    end = harness.start("peers")
    cores = Cores.pick()
    path, rows = row_file(ROWS // 4 if options.quick else ROWS)
    views = {len(rows): int((rows["event_type"] == b"view").sum())}
    peers, missing = installed(path, cores.receiver)
    for name, why in missing.items():
        print(f"{name} is left out: {why}", file=sys.stderr)
    rates: dict[str, list[float]] = {}
    with fs.Engine(workers=[cores.receiver], compile="require") as engine:
        os.sched_setaffinity(0, {cores.sender})
        ours(engine, rows, 0)
        sides: list[tuple[str, int, Callable[[int], tuple[float, int]]]] = [
            ("FlexStream", len(rows), lambda number: ours(engine, rows, number)),
            *((name, peer.rows, lambda _, peer=peer: peer.run()) for name, peer in peers.items()),
        ]
        for number in range(1, options.pairs + 1):
            if number > 1 and time.monotonic() > end:
                break
            for name, count, side in sides if number % 2 else reversed(sides):
                seconds, counted = side(number)
                if count not in views:
                    views[count] = int((rows["event_type"][:count] == b"view").sum())
                if counted != views[count]:
                    raise SystemExit(f"{name} counts {counted} views, not {views[count]}")
                rates.setdefault(name, []).append(count / seconds)
    for peer in peers.values():
        peer.close()
    medians = {name: harness.median(found) for name, found in rates.items()}
    harness.print_table(
        ["who", "M rows/s", "FlexStream / it"],
        [[name, rate / 1e6, medians["FlexStream"] / rate] for name, rate in medians.items()],
    )
    result = {
        "benchmark": "peers",
        "rows": len(rows),
        "records_per_s": {name: round(rate) for name, rate in medians.items()},
        "missing": missing,
    }
    harness.finish(result, as_json=options.json)


if __name__ == "__main__":
    main()

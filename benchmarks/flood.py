"""How much of its rate a good producer keeps while 10,000 connections are held open before their HELLO.

    python -m benchmarks.flood [--json] [--connections N] [--seconds S]

Prints "ratio": rows per second with the flood, over rows per second without, medians of alternating rounds.
The flood is a process of its own: it holds connections, and opens again those that the engine drops.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flexstream as fs
from flexstream.testing.ysb import YSB_QUERY, YSB_STREAM, generate

BATCH_ROWS = 50_000

FLOOD = """
import resource, selectors, socket, sys
host, port, wanted = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
selector = selectors.DefaultSelector()
selector.register(sys.stdin, selectors.EVENT_READ)
held, said = 0, False
while True:
    for _ in range(64):
        if held >= wanted:
            break
        sock = socket.socket()
        sock.setblocking(False)
        if sock.connect_ex((host, port)) not in (0, 115):
            sock.close()
            break
        selector.register(sock, selectors.EVENT_READ)
        held += 1
    if held >= wanted and not said:
        said = True
        print(held, flush=True)
    for key, _ in selector.select(0.01):
        if key.fileobj is sys.stdin:
            sys.exit()
        selector.unregister(key.fileobj)
        key.fileobj.close()
        held -= 1
"""


@contextmanager
def flood(address: tuple[str, int], connections: int) -> Iterator[None]:
    child = subprocess.Popen(
        [sys.executable, "-c", FLOOD, address[0], str(address[1]), str(connections)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdout.readline()
        yield
    finally:
        child.stdin.close()
        child.kill()
        child.wait()
        child.stdout.close()


def rows_per_second(producer: fs.Producer, rows: Any, seconds: float) -> float:
    sent, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        sent += producer.send(rows)
    producer.flush(60)
    return sent / (time.perf_counter() - start)


def measure(connections: int, seconds: float, rounds: int) -> dict[str, Any]:
    rows = generate(BATCH_ROWS)
    quiet, flooded = [], []
    with fs.Engine(workers=1, listen="127.0.0.1:0") as engine:
        engine.submit(YSB_QUERY)
        assert engine.data_address is not None
        host, port = engine.data_address
        with fs.Producer(f"tcp://{host}:{port}", stream=YSB_STREAM) as producer:
            rows_per_second(producer, rows, 0.5)
            for _ in range(rounds):
                quiet.append(rows_per_second(producer, rows, seconds))
                with flood((host, port), connections):
                    flooded.append(rows_per_second(producer, rows, seconds))
        status = engine.status()
        received = status["streams"]["ads"]["ledger"]["received"]
        sent = producer.stats()["rows"]
    return {
        "ratio": round(statistics.median(f / q for f, q in zip(flooded, quiet, strict=True)), 3),
        "target": 0.5,
        "connections": connections,
        "rounds": rounds,
        "quiet_rows_per_s": round(statistics.median(quiet)),
        "flooded_rows_per_s": round(statistics.median(flooded)),
        "rows_lost": sent - received,
        "closed": status["connections"]["closed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    affordable = options.connections if hard == resource.RLIM_INFINITY else min(options.connections, hard - 200)
    found = measure(affordable, options.seconds, options.rounds)
    for name, value in found.items():
        print(f"{name:>20}  {value}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()

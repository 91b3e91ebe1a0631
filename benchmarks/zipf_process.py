"""One side of `benchmarks.zipf` in a process of its own: an engine with two workers, and four senders that fill it.

The process leads a group, its senders with it, so that all of it can be stopped and continued as one. Commands are JSON
lines on standard input: "count" tells the rows so far, "end" lets the senders end and checks the ledger.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import flexstream as fs
from benchmarks import skewed_load
from benchmarks.engine_process import answer, ysb_stream
from benchmarks.harness import Cores
from benchmarks.programs import sender_result, start_sender
from benchmarks.zipf_frames import GROUPS, PRODUCERS, zipf_frames

SEND_BUFFER = 64 << 10  # a few frames: with one, a hot connection and its worker would wait for each other
LONGEST_S = 240.0
ARRIVE_S = 60.0
COMPLETE_S = 0.5


def serve(engine: fs.Engine, z: float, balanced: bool) -> None:
    if balanced:
        engine.balance.set_auto(True)
    with ExitStack() as stack:
        senders = [
            start_sender((engine.data_address or ("", 0))[1], zipf_frames(z, producer), cpu=-1, duration_s=LONGEST_S,
                         stream="ads", watermark_every=0, sndbuf=SEND_BUFFER)
            for producer in range(PRODUCERS)
        ]  # fmt: skip
        for sender in senders:
            stack.callback(end_process, sender)
        wait_for_rows(engine)
        answer({})
        for line in sys.stdin:
            if json.loads(line)["command"] == "count":
                answer(count(engine))
            else:
                answer(end(engine, senders, z))


def count(engine: fs.Engine) -> dict[str, Any]:
    """Rows that each worker has worked off, what they and the balancer took of the processor, and when that was."""
    status = engine.status()
    ident = engine._parts.rebalancer.ident
    return {
        "at_s": time.monotonic(),
        "rows": [worker["rows"] for worker in status["workers"]],
        "worker_s": sum(worker["cpu_seconds"] for worker in status["workers"]),
        "balancer_s": time.clock_gettime(time.pthread_getcpuclockid(ident)) if ident is not None else 0.0,
        "moves": engine.mover.moved,
        "splits": [one["group"] for one in status["rebalance"]["split"]],
    }


def end(engine: fs.Engine, senders: list[subprocess.Popen[str]], z: float) -> dict[str, Any]:
    for sender in senders:
        sender.send_signal(signal.SIGTERM)
    sent = sum(sender_result(sender, LONGEST_S)["rows"] for sender in senders)
    engine.finish(timeout=ARRIVE_S)
    for query in engine.status()["queries"].values():
        ledger = query["ledger"]
        if ledger["accepted"] != sent or ledger["applied"] + ledger["filtered"] != sent:
            raise SystemExit(f"z={z}: {sent} rows were sent, the ledger says {ledger}")
    return {"history": engine.balance.history()}


def end_process(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def wait_for_rows(engine: fs.Engine) -> None:
    """Until rows come and all connections of all producers are there: no more have come for a while."""
    deadline = time.monotonic() + ARRIVE_S
    connections, since = 0, time.monotonic()
    while True:
        status = engine.status()
        if status["connections"]["open"] != connections:
            connections, since = status["connections"]["open"], time.monotonic()
        stream = status["streams"]["ads"]
        complete = len(stream["sessions"]) == PRODUCERS and time.monotonic() - since >= COMPLETE_S
        if complete and stream["ledger"]["received"]:
            return
        if time.monotonic() > deadline:
            raise SystemExit("the producers did not come")
        time.sleep(0.05)


def main() -> None:
    z, balanced = json.loads(sys.argv[1])
    cores = Cores.pick()
    with fs.Engine([cores.receiver, cores.sender], groups=GROUPS, listen="127.0.0.1:0", compile="off",
                   expected_producers=PRODUCERS, balance="off") as engine:  # fmt: skip
        for query in skewed_load.costly_queries(ysb_stream("ads", max_disorder="1h"), "costly"):
            engine.submit(query)
        serve(engine, z, balanced)


if __name__ == "__main__":
    main()

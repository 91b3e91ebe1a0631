"""The engine's process of test_record_path.py: commands on standard input, a JSON answer to each.

Runs with calls.c preloaded. "self-check": what a misbehaving thread of a worker's name was counted for; "arm": filter
the workers' system calls from here on; "counts ROWS": wait for so many rows, then the worker's counts.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import flexstream as fs
from flexstream.testing.ysb import YSB_QUERY

KINDS = ("malloc", "calloc", "realloc", "free", "aligned_alloc", "mmap", "munmap")
SYSCALLS = 512
PATIENCE_S = 120.0

library = ctypes.CDLL(os.environ["FLEXSTREAM_CALLS"])
library.calls_of.argtypes = [ctypes.c_long, ctypes.c_int]
library.calls_filtered.argtypes = [ctypes.c_long]
for function in (library.calls_of, library.calls_filtered, library.calls_trapped, library.calls_misbehave):
    function.restype = ctypes.c_long


def counts(tid: int) -> dict[str, Any]:
    name = ""
    if os.path.exists(f"/proc/self/task/{tid}/comm"):
        with open(f"/proc/self/task/{tid}/comm") as file:
            name = file.read().strip()
    return {
        "thread": name,
        "calls": {kind: library.calls_of(tid, index) for index, kind in enumerate(KINDS)},
        "filtered": library.calls_filtered(tid),
        "trapped": {str(n): library.calls_trapped(n) for n in range(SYSCALLS) if library.calls_trapped(n)},
    }


def wait_for_rows(engine: fs.Engine, rows: int) -> dict[str, Any]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        status = engine.status()
        if status["streams"]["ads"]["ledger"]["accepted"] >= rows:
            return status
        time.sleep(0.05)
    raise SystemExit(f"only {status['streams']['ads']['ledger']} after {PATIENCE_S:g} s")


def answer(body: dict[str, Any]) -> None:
    print(json.dumps(body), flush=True)


def main(cpu: int) -> None:
    with fs.Engine(workers=[cpu], groups=32, listen="127.0.0.1:0") as engine:
        engine.submit(YSB_QUERY)
        answer({"address": "tcp://{}:{}".format(*(engine.data_address or ("", 0)))})
        for line in sys.stdin:
            command, *arguments = line.split()
            if command == "arm":
                library.calls_arm()
                answer({})
            elif command == "self-check":
                answer(counts(library.calls_misbehave()))
            else:
                status = wait_for_rows(engine, int(arguments[0]))
                worker = status["workers"][0]  # it has begun by now: before, it has no thread id
                answer({**counts(worker["thread_id"]), "worker": worker, "query": status["queries"]["ysb"]})
        os._exit(0)  # a filtered thread cannot end properly: that takes a futex


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""What the peers' programs share: rows from a file, one run per line of standard input. Needs only numpy."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WINDOW_MS = 10_000


def serve(run: Callable[[Any, int], int], prepare: Callable[[Any], Any] = lambda rows: rows) -> None:
    """`run(prepared rows, batch)` returns how many views it counted."""
    path, count, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rows = prepare(np.load(path)[:count])
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        views = run(rows, batch)
        print(json.dumps({"seconds": time.perf_counter() - started, "views": int(views)}), flush=True)

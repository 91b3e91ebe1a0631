"""What the tests of the embedded engine share: a stream, rows, a query that counts, and what it found."""

from __future__ import annotations

from typing import Any

import numpy as np

import flexstream as fs
from tests.property.checks import FINISH_S, as_rows

STREAM = fs.Stream(
    "s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "f": "f64", "u": "u64"}, key="k", time="t"
)


def row(t: Any, k: int = 1, x: int = 1, f: float = 1.0, u: int = 1) -> dict[str, Any]:
    return {"t": t, "k": k, "x": x, "f": f, "u": u}


def counting(name: str = "q", window: fs.WindowSpec | None = None, stream: fs.Stream = STREAM) -> fs.Query:
    return stream.query(name).window(window or fs.tumbling("10s")).agg(n=fs.count())


def counts(engine: fs.Engine, name: str = "q", key: str = "k") -> list[tuple[Any, ...]]:
    return sorted((r["window_start"], r[key], r["n"]) for r in as_rows(engine.results(name)))


def finish(engine: fs.Engine) -> None:
    engine.finish(timeout=FINISH_S)


def many_rows(n: int, keys: int, times: int = 1) -> np.ndarray:
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["k"] = np.arange(n) % keys
    rows["t"] = np.arange(n) % times if times > 1 else 0
    return rows

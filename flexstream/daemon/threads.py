"""Threads for what must not run on the event loop, some for each kind of work: no kind keeps another waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
SIZES = {"health": 1, "status": 2, "changes": 2, "reads": 8}


class Threads:
    def __init__(self) -> None:
        self._pools = {kind: ThreadPoolExecutor(size, f"fs-{kind}") for kind, size in SIZES.items()}

    def run(self, kind: str, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """`work(*arguments)` on a thread of the kind."""
        return asyncio.get_running_loop().run_in_executor(self._pools[kind], work, *arguments)

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)

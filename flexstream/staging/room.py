"""The room that stages take until their rows are applied: bytes as they lie on the disk or in memory, and places.

Who asks for more than there is waits, and is refused when that takes too long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flexstream.errors import StageError
from flexstream.state.stage.direct_io import PAGE_BYTES

MOST_STAGES = 65_536  # that wait: each is a file, and some memory
STAGE_BYTES = PAGE_BYTES  # what a stage takes besides its frames: memory, a file and its name
ROOM_WAIT_S = 30.0  # how long a producer waits for room before it is refused


class StageRoom:
    """How much stages take, and how much they may. The lock of the stages, which is given, guards it."""

    def __init__(self, lock: threading.RLock, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.stages = 0
        self.held_back = 0  # producers that wait
        self._changed = threading.Condition(lock)

    def take(self, n: int, stages: int, check: Callable[[], None], wait_s: float | None = None) -> None:
        """Back-pressure: returns when `n` bytes and so many stages more are taken. `check` raises when the wait is in
        vain. StageError `stage_full` when it takes too long.
        """
        wait_s = ROOM_WAIT_S if wait_s is None else wait_s
        check()
        if not self._fits(n, stages):
            self.held_back += 1
            try:
                self._wait(n, stages, check, wait_s)
            finally:
                self.held_back -= 1
        self.used_bytes += n
        self.stages += stages

    def _wait(self, n: int, stages: int, check: Callable[[], None], wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        while not self._fits(n, stages):
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._full(wait_s)
            self._changed.wait(min(left, 0.5))
            check()

    def _fits(self, n: int, stages: int) -> bool:
        return self.used_bytes + n <= self.limit_bytes and self.stages + stages <= MOST_STAGES

    def _full(self, wait_s: float) -> StageError:
        if self.stages >= MOST_STAGES:
            return StageError(
                f"{self.stages} stages wait for a commit, and none was committed within {wait_s:g} s",
                code="stage_full",
                hint="run fewer tasks (coalesce), or drop stages that nobody will commit: flexstream stages list",
            )
        return StageError(
            f"staged rows take {self.used_bytes} of stage_limit_bytes = {self.limit_bytes}, "
            f"and no batch was committed within {wait_s:g} s",
            code="stage_full",
            hint="`flexstream stages list` shows them: drop those that nobody will commit, make the batches smaller"
            " (maxFilesPerTrigger, maxOffsetsPerTrigger), or raise the limit",
        )

    def add(self, n: int, stages: int = 0) -> None:
        """Taken already, whether it fits or not; below 0 it is given back."""
        self.used_bytes += n
        self.stages += stages
        if n < 0:
            self.wake()

    def wake(self) -> None:
        self._changed.notify_all()

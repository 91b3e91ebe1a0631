"""A bound in bytes that several logs have together."""

from __future__ import annotations

import threading
from typing import Protocol

SMALLEST_SEGMENT_BYTES = 64 << 10


class Tenant(Protocol):
    """What a log must be able to do to share a room."""

    @property
    def bytes(self) -> int: ...

    def forget_oldest(self) -> bool: ...


class Room:
    """A bound, `most_bytes`, that several logs share. Past it the largest log forgets its oldest rows. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._lock = threading.Lock()
        self._logs: list[Tenant] = []

    @property
    def segment_bytes(self) -> int:
        """Whole segments go: small ones keep what remains close to the bound, however many logs share it."""
        return max(self.most_bytes // (8 * max(1, len(self._logs))), SMALLEST_SEGMENT_BYTES)

    def enter(self, log: Tenant) -> None:
        with self._lock:
            self._logs.append(log)

    def leave(self, log: Tenant) -> None:
        with self._lock:
            if log in self._logs:
                self._logs.remove(log)

    def trim(self) -> None:
        """Until what is left fits, or nobody has anything to give but the segment that is being written.

        Not to be called by a log that is being written: others wait for it here.
        """
        with self._lock:
            sizes = {log: log.bytes for log in self._logs}
            over = sum(sizes.values()) - self.most_bytes
            while over > 0 and sizes:
                largest = max(sizes, key=sizes.__getitem__)
                before = sizes.pop(largest)
                if largest.forget_oldest():
                    sizes[largest] = largest.bytes
                    over -= before - sizes[largest]

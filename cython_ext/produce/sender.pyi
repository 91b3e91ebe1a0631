from typing import Any

from flexstream.cython_ext.produce.further_lanes import FurtherLanes
from flexstream.cython_ext.wire.murmur3 import KeyHasher

DONE: int
FULL: int

class Sender(FurtherLanes):
    def __init__(
        self,
        key: KeyHasher,
        *,
        groups: int,
        row_bytes: int,
        rows_per_frame: int,
        time_offset: int,
        ring: int = 8,
        linger_ns: int = 5_000_000,
        crc: bool = False,
        acks: bool = True,
        auto_watermark: bool = True,
        max_disorder: int = 0,
        send_frames: int = 1,
        max_future_ns: int | None = None,
        unit_ns: int = 1,
    ) -> None: ...
    def send(self, rows: Any, start: int = 0, wait: bool = True) -> tuple[int, int]: ...

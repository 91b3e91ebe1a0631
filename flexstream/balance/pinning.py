"""Where a worker's thread may run: asked of the kernel each time, since taskset and cpusets change it."""

from __future__ import annotations

import os
from typing import Any

from flexstream.nic.device.interrupts import format_cpus


def read_back(stats: dict[str, Any]) -> dict[str, Any]:
    """A worker's facts with "pinned" and "pin_reason" as they are now. A thread that has ended keeps what it had."""
    if not stats["pinned"] or not stats["thread_id"]:
        return stats
    try:
        cores = os.sched_getaffinity(stats["thread_id"])
    except OSError:
        return stats
    if cores == {stats["cpu"]}:
        return stats
    reason = f"somebody else has set its thread to cores {format_cpus(sorted(cores))}"
    return {**stats, "pinned": False, "pin_reason": reason}


def pinned_core(stats: dict[str, Any]) -> int | None:
    """The one core of a worker; None: it is not pinned."""
    return stats["cpu"] if read_back(stats)["pinned"] else None

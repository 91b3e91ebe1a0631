"""Checks of what an Engine is given: cores, addresses, sizes. Each error names the value and the fix."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flexstream.addresses import is_loopback, split_address
from flexstream.errors import EngineError
from flexstream.nic.probe import Spec


def worker_cores(workers: int | list[int]) -> list[int]:
    allowed = sorted(os.sched_getaffinity(0))
    if isinstance(workers, int):
        if workers < 1:
            raise EngineError(f"workers={workers} must be at least 1", code="bad_workers")
        return [allowed[index % len(allowed)] for index in range(workers)]
    missing = [cpu for cpu in workers if cpu not in allowed]
    if missing or not workers:
        raise EngineError(
            f"workers={workers}: core {', '.join(map(str, missing)) or '(none given)'} is missing or not allowed",
            code="bad_core",
            hint=f"this process may use cores {', '.join(map(str, allowed))}",
        )
    return list(workers)


@contextlib.contextmanager
def beside(cpus: list[int]) -> Iterator[None]:
    """Threads that are started inside stay off these cores, where there are others: workers have them to themselves."""
    allowed = os.sched_getaffinity(0)
    with contextlib.suppress(PermissionError):  # then workers are not pinned either, and say why
        os.sched_setaffinity(0, allowed.difference(cpus) or allowed)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.sched_setaffinity(0, allowed)


def balances(balance: str | None, workers: int) -> bool:
    """Whether groups move by themselves. Without a word: when there are several workers to move them between."""
    if balance not in (None, "auto", "off"):
        raise EngineError(f"balance={balance!r} must be auto or off", code="bad_balance")
    return workers > 1 if balance is None else balance == "auto"


def data_address(listen: str, token: str | None) -> tuple[str, int]:
    try:
        host, port = split_address(listen)
    except ValueError:
        raise EngineError(
            f"listen={listen!r} must be host:port", code="bad_address", hint="127.0.0.1:7400, or [::1]:7400"
        ) from None
    if host == "localhost":
        host = "127.0.0.1"
    if not is_loopback(host) and not token:
        raise EngineError(
            f"listening on {host} needs a token: otherwise everybody who can reach it can send rows",
            code="needs_token",
            hint="give token=, or listen on 127.0.0.1",
        )
    return host, port


def check_sizes(groups: int, frame_bytes: int, max_sessions: int, nic: str, compile: str, state_bytes: int) -> None:
    if not 1 <= groups <= 65_534:
        raise EngineError(f"groups={groups} must be from 1 to 65534", code="bad_groups")
    if not 4096 <= frame_bytes <= 1 << 20:
        raise EngineError(f"frame_bytes={frame_bytes} must be from 4096 to 1048576", code="bad_frame_bytes")
    if not 1 <= max_sessions <= 65_536:
        raise EngineError(f"max_sessions={max_sessions} must be from 1 to 65536", code="bad_max_sessions")
    try:
        Spec.parse(nic)
    except ValueError as error:
        raise EngineError(f"nic={nic!r} names no NIC", code="bad_nic", hint=f"use {error}") from None
    if state_bytes < 1 << 20:
        raise EngineError(
            f"state_memory_bytes leaves {state_bytes} bytes for each worker; a worker needs at least 1048576",
            code="bad_state_memory",
        )
    if compile not in ("auto", "off", "require"):
        raise EngineError(f"compile={compile!r} must be auto, off or require", code="bad_compile")


def check_data_dir(data_dir: str | Path | None) -> Path | None:
    """The folder of the logs, which need not be there yet."""
    if data_dir is None:
        return None
    folder = Path(data_dir)
    if folder.exists() and not folder.is_dir():
        raise EngineError(f"data_dir={str(folder)!r} is not a directory", code="bad_data_dir", hint="name a directory")
    return folder

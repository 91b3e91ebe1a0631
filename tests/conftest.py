"""Shared by all tests: a time limit for each, a printed seed, and the folders of the project.

The cases are the same in each run, so that a red run speaks of the change under test; FLEXSTREAM_EXPLORE=1 draws new
ones, in Hypothesis and for the `seed` fixture, and is how new bugs are looked for.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import pytest

PROJECT = Path(__file__).resolve().parent.parent
LIMIT_S = 150  # against hangs: most tests take far less than a second
SLOW_LIMIT_S = 280
SEED = 20240607
EXPLORE = os.environ.get("FLEXSTREAM_EXPLORE", "") not in ("", "0")
SHRINKING_S = 360  # Hypothesis looks up to 300 s for a small example; an end before would say nothing of the failure
# What a run is told by its environment; all else there is of others.
FOR_TESTS = {f"FLEXSTREAM_{name}" for name in ("EXPLORE", "SEED", "SANITIZE", "DEBUG", "EXT", "ANNOTATE", "QUIET")}
SERVICE_MANAGER = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "JOURNAL_STREAM", "STATE_DIRECTORY"}
SHUTDOWN_S = 20  # after the limit, a test stuck in native code ends the whole run with all stacks

os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(PROJECT / ".cache" / "hypothesis"))


def _with_fields(record: logging.LogRecord) -> bool:
    """Log records of others have no fields; pytest's log_format (pyproject.toml) shows them."""
    record.__dict__.setdefault("fields", "")
    return True


_STDERR = pytest.StashKey[TextIO]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background run ignores it, and so would children
    config.stash[_STDERR] = os.fdopen(os.dup(2), "w")  # the terminal's, not a test's: what ends the run must be seen
    handlers = config.pluginmanager.get_plugin("logging-plugin")
    for handler in (handlers.report_handler, handlers.caplog_handler):
        handler.addFilter(_with_fields)
    config.addinivalue_line("markers", "time_limit(seconds): this test may take longer than the usual limit")
    try:
        from hypothesis import settings
    except ImportError:
        return
    settings.register_profile("flexstream", deadline=None, print_blob=True, derandomize=not EXPLORE)
    settings.load_profile("flexstream")


def _limit_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("time_limit")
    more = SHRINKING_S if getattr(getattr(item, "obj", None), "is_hypothesis_test", False) else 0
    if marker is not None:
        return int(marker.args[0]) + more
    return (SLOW_LIMIT_S if item.get_closest_marker("slow") else LIMIT_S) + more


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    limit = _limit_of(item)
    said_to = item.config.stash[_STDERR]

    def expired(signum: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback(file=said_to)
        pytest.fail(f"{item.nodeid} took longer than its limit of {limit} s")

    previous: Any = signal.signal(signal.SIGALRM, expired)
    signal.alarm(limit)
    faulthandler.dump_traceback_later(limit + SHUTDOWN_S, exit=True, file=said_to)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True, scope="session")
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Settings, compiled code and a service manager of this run alone, in children too: what the user's environment,
    cache, folder or /etc says decides nothing, and nothing is left there."""
    folder = tmp_path_factory.mktemp("surroundings")
    (folder / "flexstream.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if (name.startswith("FLEXSTREAM_") and name not in FOR_TESTS) or name in SERVICE_MANAGER:
                patch.delenv(name)
        patch.setenv("FLEXSTREAM_CONFIG", str(folder / "flexstream.toml"))
        patch.setenv("FLEXSTREAM_CACHE", str(folder / "cache"))
        yield


@pytest.fixture
def seed() -> int:
    """Printed with a failure; FLEXSTREAM_SEED=n repeats it."""
    value = int(os.environ.get("FLEXSTREAM_SEED") or (random.SystemRandom().randrange(2**32) if EXPLORE else SEED))
    print(f"seed: FLEXSTREAM_SEED={value}")
    return value


@pytest.fixture(scope="session")
def project() -> Path:
    """The project's root folder."""
    return PROJECT

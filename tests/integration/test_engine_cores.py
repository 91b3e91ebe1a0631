"""A worker has its core to itself where there are others."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

import flexstream as fs
from flexstream.engine.options import beside
from tests.waiting import wait_until


def affinities() -> dict[int, set[int]]:
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # one of an earlier test, about to end
            found[int(thread.name)] = os.sched_getaffinity(int(thread.name))
    return found


def runs(engine: fs.Engine) -> dict[str, Any]:
    """The worker's facts once its thread has pinned itself."""
    [worker] = wait_until(lambda: [w for w in engine.status()["workers"] if w["thread_id"]], "the worker's thread runs")
    return worker


def test_threads_that_an_engine_starts_stay_off_the_cores_of_its_workers() -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    others = allowed - {core} or allowed
    before = affinities()
    with fs.Engine(workers=[core], groups=4) as engine:
        runs(engine)
        started = [cores for thread, cores in affinities().items() if thread not in before]
        assert {core} in started, "the worker"
        assert started.count(others) >= 4, "allocator, collector, sessions, rebalancer"
        assert os.sched_getaffinity(0) == allowed, "the caller is left where it was"


def test_without_pinning_all_threads_may_run_anywhere() -> None:
    allowed = os.sched_getaffinity(0)
    before = affinities()
    with fs.Engine(workers=1, groups=4, pin=False):
        assert all(cores == allowed for thread, cores in affinities().items() if thread not in before)


def test_workers_on_all_cores_leave_the_others_to_the_scheduler() -> None:
    allowed = os.sched_getaffinity(0)
    with beside(sorted(allowed)):
        assert os.sched_getaffinity(0) == allowed


def test_what_fails_inside_leaves_the_caller_where_it_was() -> None:
    allowed = os.sched_getaffinity(0)
    with pytest.raises(ValueError, match="inside"), beside([min(allowed)]):
        raise ValueError("inside")
    assert os.sched_getaffinity(0) == allowed


def test_whether_a_worker_is_pinned_is_asked_not_remembered() -> None:
    core, elsewhere = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    with fs.Engine(workers=[core], groups=4) as engine:
        worker = runs(engine)
        assert (worker["pinned"], worker["pin_reason"]) == (True, None)
        if len(elsewhere) == 1:
            pytest.skip("this machine has one core: there is nowhere else to go")
        os.sched_setaffinity(worker["thread_id"], elsewhere)  # as taskset or a cpuset would
        [worker] = engine.status()["workers"]
        assert worker["pinned"] is False
        assert "somebody else has set" in worker["pin_reason"]
        os.sched_setaffinity(worker["thread_id"], {core})
        assert engine.status()["workers"][0]["pinned"] is True

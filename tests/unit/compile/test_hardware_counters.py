"""Counters of the processor, where it has any: opened per thread, read as sums, and a reason where there are none."""

import os
import threading

import pytest

import flexstream as fs
from flexstream.compile import hardware_counters
from flexstream.compile.hardware_counters import SOFTWARE, Event, HardwareCounters

PAGE_FAULTS = Event("page_faults", SOFTWARE, 2)  # the kernel counts these on every machine


def touch_pages(count: int) -> None:
    memory = bytearray(os.sysconf("SC_PAGE_SIZE") * count)
    memory[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * count


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_thread_is_counted_from_opening_to_closing():
    before = open_fds()
    counters = HardwareCounters([threading.get_native_id()], [PAGE_FAULTS])
    if counters.reason is not None:  # a container may forbid the call: then that is what it says
        assert counters.reason.startswith("perf events: ")
        assert counters.read() == {"page_faults": 0}
        return
    first = counters.read()["page_faults"]
    touch_pages(20_000)
    assert counters.read()["page_faults"] - first >= 5_000
    counters.close()
    assert open_fds() == before


def test_several_threads_are_summed_and_others_left_out():
    stay, threads = threading.Event(), []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: (stay.wait(120), touch_pages(20_000))))
        threads[-1].start()
    counters = HardwareCounters([thread.native_id or 0 for thread in threads], [PAGE_FAULTS])
    touch_pages(20_000)
    mine = counters.read()["page_faults"]
    stay.set()
    for thread in threads:
        thread.join()
    theirs = counters.read()["page_faults"]
    assert mine < 1_000
    assert theirs >= 10_000 or counters.reason is not None
    counters.close()


@pytest.mark.parametrize(
    ("event", "thread", "said"),
    [(Event("no such", 4_000_000, 0), 0, "no hardware counters"), (PAGE_FAULTS, 2**22 + 1, "No such process")],
)
def test_what_cannot_be_counted_has_a_reason_and_leaves_nothing_open(event, thread, said):
    before = open_fds()
    counters = HardwareCounters([threading.get_native_id(), thread], [PAGE_FAULTS, event])
    assert counters.reason is not None
    assert said in counters.reason or "not allowed" in counters.reason
    assert set(counters.read().values()) == {0}
    assert open_fds() == before


def test_a_processor_that_is_not_known_has_a_reason(monkeypatch):
    monkeypatch.setattr(hardware_counters.platform, "machine", lambda: "pdp11")
    assert HardwareCounters([1]).reason == "perf events: Function not implemented"


def test_status_says_how_a_compiled_query_is_watched():
    stream = fs.Stream("s", {"t": "timestamp[s]", "k": "i64"}, key="k", time="t")
    with fs.Engine(workers=1, groups=2, pin=False, compile="require") as engine:
        engine.submit(stream.query("q").window(fs.tumbling("1s")).agg(n=fs.count()))
        watched = engine.status()["queries"]["q"]["watched_by"]
    assert watched == "branch and cache misses" or watched.startswith("perf events: ")

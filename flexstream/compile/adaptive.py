"""Watches compiled queries and gives each the variant that fits its rows: profile, decide, compile, switch, measure.

Nothing here touches a row. Workers count: rows, keys outside of a dense range, nanoseconds of a batch now and then,
and, while an instrumented variant runs for some milliseconds, a sample of the rows; where the processor shows them,
its own counters tell when branches or the cache begin to miss. One thread looks at the counts.
A switch stays only if it was measured to help; what did not is not tried again for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from flexstream.catalog.entries import RunningQuery
from flexstream.compile.codegen import Pipeline, generate
from flexstream.compile.hardware_counters import HardwareCounters
from flexstream.compile.specialise import Decision, Facts, Shape, decide
from flexstream.compile.toolchain import Compiled, Outcome
from flexstream.compile.variant_choices import PLAIN, Choices

log = logging.getLogger("flexstream.adaptive")

_SUMMED = ("rows", "filtered", "compiled_rows", "outside", "fresh_keys", "timed_rows", "timed_ns")
_MISSES = ("branch_misses", "cache_misses")

ReadCounters = Callable[[], Mapping[str, int]]
Submit = Callable[[Callable[[], str], Callable[[Outcome], None]], None]


@dataclass(frozen=True, slots=True)
class Pace:
    """How eager it is. Seconds, rows, shares."""

    tick_s: float = 0.01
    first_rows: int = 200_000  # before that nothing is worth it
    first_s: float = 0.3
    sampled_rows: int = 2_000
    profile_s: float = 0.5  # a profile that takes longer is given up: hardly any rows come
    timed_rows: int = 4_000  # for one measurement
    measurements: int = 8  # for one judgement
    period_s: float = 1.0  # between two profiles without a reason, doubled while nothing changes
    longest_period_s: float = 16.0
    outside: float = 0.01
    slower: float = 1.25
    drift: float = 0.1
    misses: float = 0.2  # a row, more or fewer than usual, of branches or of the cache
    worse: float = 0.97  # a switch with a smaller gain is taken back
    grudge_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over the workers; misses are of all that they do, and zero where nobody counts them."""

    rows: int = 0
    filtered: int = 0
    compiled_rows: int = 0
    outside: int = 0
    fresh_keys: int = 0
    timed_rows: int = 0
    timed_ns: int = 0
    branch_misses: int = 0
    cache_misses: int = 0

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name in _SUMMED + _MISSES))

    def misses_per_row(self) -> dict[str, float]:
        return {name: getattr(self, name) / max(self.rows, 1) for name in _MISSES}

    @property
    def ns_per_row(self) -> float:
        return self.timed_ns / max(self.timed_rows, 1)

    @property
    def kept(self) -> float:
        return 1 - self.filtered / max(self.rows, 1)


class Meter:
    """Nanoseconds per row, measured again and again; other work on the machine only ever adds to them."""

    def __init__(self, pace: Pace, start: Counts) -> None:
        self._pace = pace
        self._last = self._first = start
        self._found: list[float] = []

    def look(self, counts: Counts) -> Counts | None:
        """What came since the last measurement, when it is enough for another."""
        recent = counts - self._last
        if recent.timed_rows < self._pace.timed_rows:
            return None
        self._last = counts
        self._found = [*self._found[1 - 2 * self._pace.measurements :], recent.ns_per_row]
        return recent

    @property
    def total(self) -> Counts:
        return self._last - self._first

    @property
    def ready(self) -> bool:
        return len(self._found) >= self._pace.measurements

    @property
    def ns_per_row(self) -> float:
        """The lower quartile of the last measurements."""
        return sorted(self._found)[len(self._found) // 4]

    @property
    def latest_ns(self) -> float:
        """The least of the last measurements, as many as a judgement needs."""
        return min(self._found[-self._pace.measurements :])


@dataclass(frozen=True, slots=True)
class Usual:
    """How the present variant did when it was new."""

    ns_per_row: float
    kept: float
    misses: dict[str, float]


class Adapter:
    """One query's way: steady -> profiling -> waiting (for the compiler) -> proving (-> doubting) -> steady."""

    def __init__(
        self, running: RunningQuery, plain: int, submit: Submit, pace: Pace, read_counters: ReadCounters = dict
    ) -> None:
        self.running, self.pace, self._submit, self._read_counters = running, pace, submit, read_counters
        self.states = running.states
        self.bound = running.states[0].bound
        pipeline = Pipeline(self.bound)
        self.shape = Shape.of(pipeline)
        self.now = Decision()
        self.profiles = 0
        self.phase = self.steady
        self._functions: dict[Choices, int | None] = {PLAIN: plain}  # None: cannot be compiled
        self._asked: set[Choices] = set()
        self._instrumented = Choices(dense=self.shape.dense_bytes > 0, instrumented=True)
        self._why = "first look"
        self._wanted = Decision()
        self._before: tuple[Decision, float] = (self.now, 0.0)
        self._tried = self._before
        self._grudges: dict[tuple[Choices, int, int], float] = {}
        self._start = self.counts()
        self._meter = Meter(pace, self._start)
        self._began = 0.0
        self._flowing_since: float | None = None
        self._next_profile = 0.0
        self._period = pace.period_s
        self._usual: Usual | None = None
        self._warm = False

    def counts(self) -> Counts:
        parts = [state.counters() for state in self.states]
        return Counts(*(sum(part[name] for part in parts) for name in _SUMMED), **self._read_counters())

    def step(self, now: float) -> None:
        self.phase(now)

    # -- phases

    def steady(self, now: float) -> None:
        counts = self.counts()
        recent = self._meter.look(counts)
        if self._flowing_since is None or counts.rows - self._start.rows < self.pace.first_rows:
            self._flowing_since = now
            return
        if recent is None or now - self._flowing_since < self.pace.first_s:
            return
        reason = self._trigger(recent, now)
        if reason is None:
            return
        self._why = reason
        if self._function(self._instrumented) is None:
            if self._instrumented in self._functions:
                self._next_profile = float("inf")  # it does not compile: the plain one stays
            return
        self._begin_profile(now)

    def _trigger(self, recent: Counts, now: float) -> str | None:
        """Why another look is due, or None."""
        if self._next_profile == float("inf"):
            return None
        if not self.profiles:
            return "first look"
        if self.now.size and recent.outside > self.pace.outside * max(recent.compiled_rows, 1):
            share, last = recent.outside / recent.compiled_rows, self.now.base + self.now.size - 1
            return f"{share:.2f} of the keys are outside of {self.now.base} to {last}"
        if self._usual is not None:
            if self._meter.ready and self._meter.latest_ns > self.pace.slower * self._usual.ns_per_row:
                return f"a row takes {self._meter.latest_ns:.1f} ns; it took {self._usual.ns_per_row:.1f} before"
            if abs(recent.kept - self._usual.kept) > self.pace.drift:
                return f"{recent.kept:.2f} of the rows pass the filters; it was {self._usual.kept:.2f} before"
            for name, misses in recent.misses_per_row().items():
                if abs(misses - self._usual.misses[name]) > self.pace.misses:
                    return f"{misses:.2f} {name.replace('_', ' ')} a row; it was {self._usual.misses[name]:.2f} before"
        return "another look" if now >= self._next_profile else None

    def _begin_profile(self, now: float) -> None:
        for state in self.states:
            state.clear_profile()
        self._use(self._functions[self._instrumented])
        self._began = now
        self.phase = self.profiling

    def profiling(self, now: float) -> None:
        parts = [state.profile() for state in self.states]
        if sum(part["rows"] for part in parts) < self.pace.sampled_rows and now - self._began < self.pace.profile_s:
            return
        self._use(self._functions[self.now.choices])
        counts = self.counts()
        seen = counts - self._start
        facts = Facts.of(parts, len(self.shape.costs), seen.rows * seen.kept / max(seen.fresh_keys, 1))
        self.profiles += 1
        if facts.rows >= self.pace.sampled_rows // 4:
            self._wanted = decide(self.shape, facts, self.now)
            if self._wanted.what != self.now.what and self._grudges.get(self._wanted.what, 0) <= now:
                self._note("instrumented", f"{self._why}: {facts.rows} rows sampled")
                self._meter = Meter(self.pace, counts)
                self.phase = self.waiting
                return
        self._calm(now)

    def waiting(self, now: float) -> None:
        """The old variant goes on, and is measured with the rows of now, until the new one is there."""
        function = self._function(self._wanted.choices)
        counts = self.counts()
        self._meter.look(counts)
        if function is None:
            if self._wanted.choices in self._functions:  # it cannot be had
                self._grudges[self._wanted.what] = float("inf")
                self._calm(now)
            return
        if not self._meter.ready:
            return
        self._before = (self.now, self._meter.ns_per_row)
        self._switch(self._wanted)
        self._note(self._name(), "; ".join(self._wanted.reasons))
        self._meter, self._warm = Meter(self.pace, counts), False
        self.phase = self.proving

    def proving(self, now: float) -> None:
        counts = self.counts()
        if self._meter.look(counts) is None:
            return
        if not self._warm:  # the first batches fill the caches
            self._meter, self._warm = Meter(self.pace, counts), True
        if not self._meter.ready:
            return
        (old, before_ns), after_ns = self._before, max(self._meter.ns_per_row, 1e-9)
        if before_ns / after_ns < self.pace.worse:  # or other work came just then: the old one is measured again
            self._tried = (self.now, after_ns)
            self._switch(old)
            self._meter = Meter(self.pace, counts)
            self.phase = self.doubting
            return
        self._judge(before_ns / after_ns, after_ns)
        self._calm(now)

    def doubting(self, now: float) -> None:
        self._meter.look(self.counts())
        if not self._meter.ready:
            return
        tried, after_ns = self._tried
        gain = self._meter.ns_per_row / after_ns
        self._judge(gain, after_ns)
        if gain >= self.pace.worse:
            self._switch(tried)
        else:
            self._grudges[tried.what] = now + self.pace.grudge_s
            self._note(self._name(), f"back to the variant before: the gain was only {gain:.2f}")
        self._calm(now)

    def _judge(self, gain: float, after_ns: float) -> None:
        measured = {"gain": round(gain, 3), "ns_per_row": round(after_ns, 3)}
        self.running.history[-1] = {**self.running.history[-1], **measured}  # others may be reading the old one
        self._period = self.pace.period_s

    def _calm(self, now: float) -> None:
        """Nothing to change: learn what is usual, look again later, and later still."""
        self._usual = None
        self._next_profile = now + self._period
        self._period = min(2 * self._period, self.pace.longest_period_s)
        self._meter = Meter(self.pace, self.counts())
        self.phase = self.measuring

    def measuring(self, now: float) -> None:
        self._meter.look(self.counts())
        if self._meter.ready:
            total = self._meter.total
            self._usual = Usual(self._meter.ns_per_row, total.kept, total.misses_per_row())
            self.phase = self.steady

    # -- means

    def _function(self, choices: Choices) -> int | None:
        """The variant's address; None: not yet, or, if it is in `_functions`, never."""
        if choices not in self._functions and choices not in self._asked:
            self._asked.add(choices)

            def done(outcome: Outcome) -> None:
                self._functions[choices] = outcome.function if isinstance(outcome, Compiled) else None

            self._submit(lambda: generate(self.bound, choices), done)
        return self._functions.get(choices)

    def _use(self, function: int | None) -> None:
        assert function is not None
        for state in self.states:
            state.use_variant(function)

    def _switch(self, to: Decision) -> None:
        for state in self.states:
            state.use_range(to.base, to.size)
        self._use(self._functions[to.choices])
        self.now = to
        self.running.variant = self._name()

    def _name(self) -> str:
        return "compiled" if self.now.choices == PLAIN else "specialised"

    def _note(self, variant: str, reason: str) -> None:
        self.running.note(variant, reason, str(self.now.choices) if variant == "specialised" else None)


class Adaptive:
    """The thread that looks after all queries; started with the first of them."""

    def __init__(self, submit: Submit, pace: Pace | None, threads: Callable[[], Iterable[int]]) -> None:
        self._submit = submit
        self._pace = pace or Pace()
        self._threads = threads
        self._counters: HardwareCounters | None = None
        self._adapters: list[Adapter] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, running: RunningQuery, plain: int) -> None:
        """`plain` is the address of the compiled variant that runs already."""
        with self._lock:
            if self._counters is None:
                self._counters = HardwareCounters(self._threads())
            self._adapters.append(Adapter(running, plain, self._submit, self._pace, self._counters.read))
            running.watched_by = self._counters.reason or "branch and cache misses"
            if self._thread is None and not self._stopping.is_set():
                self._thread = threading.Thread(target=self._run, name="fs-adaptive", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(self._pace.tick_s):
            with self._lock:
                self._adapters = [adapter for adapter in self._adapters if not adapter.running.dropped.is_set()]
                adapters = list(self._adapters)
            now = time.monotonic()
            for adapter in adapters:
                try:
                    adapter.step(now)
                except Exception:  # the query runs on as it is
                    log.exception("adaptive_failed", extra={"fields": {"query": adapter.running.query.name}})
                    with self._lock:
                        self._adapters.remove(adapter)

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:  # `watch` may be starting it
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if self._counters is not None:
            self._counters.close()

"""Which variant runs a query: the generic one from the first record, the compiled one when it is ready, then the one
that fits the rows (adaptive.py)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from flexstream.catalog.entries import RunningQuery
from flexstream.compile.adaptive import Adaptive, Pace
from flexstream.compile.toolchain import BackgroundCompiler, Compiled, Limits, Outcome
from flexstream.query.analysis import why_generic


class Variants:
    """Gives each query its variants: generic at once, compiled when the compiler is done.

    `mode`: "auto" compiles in the background, "off" does not, "require" waits for it. `threads`: the workers'.
    """

    def __init__(
        self,
        mode: str,
        limits: Limits | None = None,
        pace: Pace | None = None,
        threads: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self._mode = mode
        self._compiler = BackgroundCompiler(limits)
        self._adaptive = Adaptive(self._compiler.submit, pace, threads)

    def start(self, running: RunningQuery, code: str | Callable[[], str]) -> bool:
        """Begin to compile (`code` may be what makes it). False: a compiled variant is required, and there is
        none (`variant_reason`)."""
        if self._mode == "off":
            running.variant_reason = "compile is off"
            return True
        cannot = why_generic(running.states[0].bound)
        if cannot is not None:
            running.variant_reason = cannot
            running.note(running.variant, cannot)
            return self._mode != "require"
        running.variant_reason = "compiling"
        ready = threading.Event()

        def done(outcome: Outcome) -> None:
            self._use(running, outcome)
            ready.set()

        self._compiler.submit(code, done)
        if self._mode == "require":
            ready.wait()
        return self._mode != "require" or running.variant != "generic"

    def _use(self, running: RunningQuery, outcome: Outcome) -> None:
        """Each worker switches by itself, at its next batch."""
        if isinstance(outcome, Compiled):
            for state in running.states:
                state.use_variant(outcome.function)
            running.variant, running.variant_reason = "compiled", None
            seconds = f"the compiler took {outcome.seconds:.2f} s"
            running.note("compiled", "the object was in the cache" if outcome.cached else seconds)
            self._adaptive.watch(running, outcome.function)
        else:
            running.variant_reason = str(outcome)
            running.note(running.variant, str(outcome))

    def stop(self) -> None:
        self._adaptive.stop()
        self._compiler.stop()

"""Which variant runs a query: the generic one from the first record, the compiled one when it is ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from flexstream.cython_ext.compiler import BackgroundCompiler, Compiled, Limits, Outcome
from flexstream.running import RunningQuery


class Variants:
    """`mode`: "auto" compiles in the background, "off" does not, "require" waits for it."""

    def __init__(self, mode: str, limits: Limits | None = None) -> None:
        self._mode = mode
        self._compiler = BackgroundCompiler(limits)

    def start(self, running: RunningQuery, code: str | Callable[[], str]) -> bool:
        """Begin to compile (`code` may be what makes it). False: a compiled variant is required, and there is
        none (`variant_reason`)."""
        if self._mode == "off":
            running.variant_reason = "compile is off"
            return True
        running.variant_reason = "compiling"
        ready = threading.Event()

        def done(outcome: Outcome) -> None:
            _use(running, outcome)
            ready.set()

        self._compiler.submit(code, done)
        if self._mode == "require":
            ready.wait()
        return self._mode != "require" or running.variant == "compiled"

    def stop(self) -> None:
        self._compiler.stop()


def _use(running: RunningQuery, outcome: Outcome) -> None:
    """Each worker switches by itself, at its next batch."""
    if isinstance(outcome, Compiled):
        for state in running.states:
            state.use_variant(outcome.function)
        running.variant, running.variant_reason = "compiled", None
        reason = "the object was in the cache" if outcome.cached else f"the compiler took {outcome.seconds:.2f} s"
    else:
        running.variant_reason = reason = str(outcome)
    after_s = round(time.monotonic() - running.submitted_at, 4)
    running.history.append({"variant": running.variant, "after_s": after_s, "reason": reason})

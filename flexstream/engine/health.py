"""Whether an engine does what it is there for. Asks as little as it can: a status that fails is no illness.

Takes no lock: whoever holds one for long, because a query's log is large, say, is no illness either.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexstream.engine.engine import Engine

ANSWER_S = 5.0  # who does not answer for so long does not answer
LOOK_S = 0.002


def health(engine: Engine) -> dict[str, Any]:
    """state: running, draining, stopped or failed. problem: why a HELLO would not be answered, or None. not_ready: why
    rows are not welcome all the same, or None: they would wait for room that there is not.

    May take up to 2 * ANSWER_S, when somebody does not answer.
    """
    failure = engine.collector.failure
    if failure is not None:
        return _said("failed", f"the collector failed: {type(failure).__name__}: {failure}")
    state = engine.state
    if state != "running":
        return _said(state, "the engine failed" if state == "failed" else None)
    unwritten = _logs(engine)
    problem = _acceptor(engine)
    stuck, waiting = _workers(engine, unwritten is not None) if problem is None else (None, None)
    if engine.state != "running":
        return health(engine)  # it was stopped meanwhile: nobody had to answer any more
    return _said(state, problem or stuck, unwritten or waiting)


def _said(state: str, problem: str | None, not_ready: str | None = None) -> dict[str, Any]:
    return {"state": state, "problem": problem, "not_ready": not_ready}


def _logs(engine: Engine) -> str | None:
    """A log that cannot be written: its query's workers will wait, and with them all streams."""
    writer = engine.collector.unwritten()
    return None if writer is None else f"{writer.what} cannot be written: {writer.error}"


def _acceptor(engine: Engine) -> str | None:
    if engine.acceptor is None or engine.acceptor.answers(ANSWER_S):
        return None
    return f"the data port has not answered for {ANSWER_S:g} s"


def _workers(engine: Engine, reason_known: bool) -> tuple[str | None, str | None]:
    """(who does not answer, who waits for room). Each worker is asked to take an order that does nothing, as a rule one
    that waits takes it too; and one waits that is found waiting each time it is looked at.
    """
    asked = [(worker, worker.knock()) for worker in engine.workers]
    deadline = time.monotonic() + ANSWER_S
    silent = {worker.index for worker, _ in asked}
    waits = {worker.index: "" for worker, _ in asked}
    while True:
        for worker, place in asked:
            if worker.taken >= place or worker.ended:
                silent.discard(worker.index)
            why = worker.stats()["stalled"]
            if why is None:
                waits.pop(worker.index, None)
            elif worker.index in waits:
                waits[worker.index] = why
        over = time.monotonic() > deadline or (reason_known and silent <= waits.keys())
        if over or not (silent or waits):
            stuck = sorted(silent - waits.keys())
            named = f"worker {', '.join(map(str, stuck))} has taken no order for {ANSWER_S:g} s" if stuck else None
            return named, next((f"worker {index} is {why}" for index, why in waits.items()), None)
        time.sleep(LOOK_S)

"""Whether an engine does what it is there for. Asks as little as it can: a status that fails is no illness."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexstream.engine import Engine

ANSWER_S = 5.0  # who does not answer for so long does not answer
LOOK_S = 0.002


def health(engine: Engine) -> dict[str, Any]:
    """state: running, draining, stopped or failed; problem: why a HELLO would not be answered, or None.

    May take up to 2 * ANSWER_S, when somebody does not answer.
    """
    failure = engine.collector.failure
    if failure is not None:
        return {"state": "failed", "problem": f"the collector failed: {type(failure).__name__}: {failure}"}
    state = engine.state
    problem = "the engine failed" if state == "failed" else None
    if state == "running":
        problem = _acceptor(engine) or _workers(engine)
        if engine.state != "running":
            return health(engine)  # it was stopped meanwhile: nobody had to answer any more
    return {"state": state, "problem": problem}


def _acceptor(engine: Engine) -> str | None:
    if engine.acceptor is None or engine.acceptor.answers(ANSWER_S):
        return None
    return f"the data port has not answered for {ANSWER_S:g} s"


def _workers(engine: Engine) -> str | None:
    """Each is asked to take an order that does nothing. One that says why it waits is stalled, not ill."""
    wanted = [(worker, worker.knock()) for worker in engine.workers]
    deadline = time.monotonic() + ANSWER_S
    while wanted := [(worker, place) for worker, place in wanted if worker.taken < place and not worker.ended]:
        if time.monotonic() > deadline:
            stuck = [worker.index for worker, _ in wanted if not worker.stats()["stalled"]]
            names = ", ".join(map(str, stuck))
            return f"worker {names} has taken no order for {ANSWER_S:g} s" if stuck else None
        time.sleep(LOOK_S)
    return None

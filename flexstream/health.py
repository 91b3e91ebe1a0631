"""Whether an engine does what it is there for. Asks as little as it can: a status that fails is no illness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flexstream.engine import Engine


def health(engine: Engine) -> dict[str, Any]:
    """state: running, draining, stopped or failed; problem: why it does not answer, or None."""
    failure = engine.collector.failure
    if failure is not None:
        return {"state": "failed", "problem": f"the collector failed: {type(failure).__name__}: {failure}"}
    problem = "the engine failed" if engine.state == "failed" else None
    return {"state": engine.state, "problem": problem}

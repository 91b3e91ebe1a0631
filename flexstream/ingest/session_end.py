"""The end of a session by order of an operator, whether it has connections or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexstream.errors import EngineError

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningStream
    from flexstream.catalog.sessions import Session
    from flexstream.ingest.acceptor import Acceptor


def end_session(running: RunningStream, producer: str, kind: str | None, acceptor: Acceptor | None) -> dict[str, Any]:
    """End the one session of that producer (and kind), and close its connections. Raises EngineError: none, several."""
    stream = running.stream.name
    there = running.sessions.all()
    found = [session for session in there if session.producer == producer and kind in (None, session.kind)]
    if len(found) != 1:
        raise _unclear(stream, producer, found, there)
    (session,) = found
    if acceptor is not None:
        acceptor.end_session(running.port, session)
    else:
        running.sessions.remove(session)
    return {"stream": stream, "producer": producer, "kind": session.kind, "ended": True}


def _unclear(stream: str, producer: str, found: list[Session], there: list[Session]) -> EngineError:
    if found:
        kinds = ", ".join(session.kind for session in found)
        return EngineError(
            f"stream {stream!r} has several sessions {producer!r}: {kinds}",
            code="unclear_session",
            hint="give the kind",
        )
    names = ", ".join(sorted({session.producer for session in there})[:8]) or "none"
    return EngineError(
        f"stream {stream!r} has no session {producer!r:.80}", code="unknown_session", hint=f"its sessions: {names}"
    )

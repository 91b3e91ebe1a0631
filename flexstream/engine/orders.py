"""What can be ordered of an engine's workers while rows arrive: groups moved, split and joined; and how it does."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from flexstream.balance.door import ASKED_FOR, Balance
from flexstream.balance.mover import GroupMove
from flexstream.catalog.sessions import Session, SessionRefused
from flexstream.engine.health import health
from flexstream.engine.status import sessions_of
from flexstream.errors import EngineError

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningStream
    from flexstream.engine.engine import Engine


class Orders(ABC):
    """A part of Engine. Errors of all: EngineError, and the group is served where it was."""

    balance: Balance

    def __init__(self) -> None:
        self._expected_sessions: dict[str, list[tuple[str, int]]] = {}

    @abstractmethod
    def _check_open(self) -> None:
        """Raises EngineError when the engine is closed."""

    def move(self, targets: Mapping[int, int], reason: str = ASKED_FOR) -> list[GroupMove]:
        """Move groups to workers, {group: worker}, while rows arrive. Returns when they are settled there.

        Raises EngineError, and nothing has moved: a group is frozen, a worker is drained, or not there.
        """
        return self.balance.move_all(targets, reason)

    def split(self, group: int, workers: Iterable[int]) -> dict[str, Any]:
        """Let these workers serve connections of the group beside its owner, which goes on firing its windows.

        A producer that knows lanes is asked for one for each of them; otherwise the group needs two connections.
        Automatic balancing undoes it when the group is not hot: freeze the group to keep it.
        """
        return self.balance.split(group, workers)

    def unsplit(self, group: int) -> dict[str, Any]:
        """The group's owner serves all its connections again; lanes end. Nothing to do if it is not split."""
        return self.balance.unsplit(group)

    def sessions(self, stream: str) -> list[dict[str, Any]]:
        """The sessions of a stream that have not ended, as in the status."""
        return sessions_of(cast("Engine", self).running_stream(stream))

    def registered_sessions(self, for_s: float = 0.0) -> dict[str, list[tuple[str, int]]]:
        """(producer, epoch) of each stream's network producers that came so long ago, for `expect_sessions`."""
        streams = cast("Engine", self).running()[0]
        return {running.stream.name: known for running in streams if (known := running.sessions.registered(for_s))}

    def expect_sessions(self, stream: str, known: Iterable[tuple[str, int]]) -> None:
        """Before the stream is added: its windows wait for these producers, for session_timeout_s at most.

        They were there before a restart; whoever is back first must not drive the watermark alone.
        """
        self._expected_sessions[stream] = list(known)

    def _wait_for_sessions(self, running: RunningStream) -> None:
        with contextlib.suppress(SessionRefused):  # there are as many as may be
            for producer, epoch in self._expected_sessions.pop(running.stream.name, ()):
                running.sessions.wait_for(producer, epoch)

    def end_session(self, stream: str, producer: str, kind: str | None = None) -> dict[str, Any]:
        """End a session that holds or poisons a stream, as if it had said EOS everywhere, and close its connections.

        Its rows so far count. A producer that comes back with the same epoch is refused. Raises EngineError: no such
        session, or several kinds of that name and no `kind` to choose by.
        """
        self._check_open()
        engine = cast("Engine", self)
        running = engine.running_stream(stream)
        found = [s for s in running.sessions.all() if s.producer == producer and kind in (None, s.kind)]
        if len(found) != 1:
            raise _unclear(stream, producer, found, running.sessions.all())
        (session,) = found
        if engine.acceptor is not None:
            engine.acceptor.end_session(running.port, session)
        else:
            running.sessions.remove(session)
        return {"stream": stream, "producer": producer, "kind": session.kind, "ended": True}

    def health(self) -> dict[str, Any]:
        """{"state", "problem", "not_ready"}, the last two None when all is well. It asks acceptor and workers for an
        answer, which takes seconds when they have none, and needs no part of `status`."""
        return health(cast("Engine", self))


def _unclear(stream: str, producer: str, found: list[Session], there: list[Session]) -> EngineError:
    if found:
        kinds = ", ".join(session.kind for session in found)
        return EngineError(
            f"stream {stream!r} has several sessions {producer!r}: {kinds}", code="unclear_session", hint="say the kind"
        )
    names = ", ".join(sorted({session.producer for session in there})[:8]) or "none"
    return EngineError(
        f"stream {stream!r} has no session {producer!r:.80}", code="unknown_session", hint=f"there is {names}"
    )

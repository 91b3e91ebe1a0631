"""What the balancer decided and did, as lines of a history with the numbers behind them."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flexstream.errors import FlexStreamError
from flexstream.nic.balance.balancer import Decision, Verdict
from flexstream.nic.balance.placement_plan import Plan

if TYPE_CHECKING:
    from flexstream.balance.mover import GroupMove

HISTORY = 256  # lines that are kept
LATENCY_TAIL_S = 0.05  # a marker that a move held up is seen a little after it


class Latency(Protocol):
    """Marker latencies; `collector.Latencies` in an engine."""

    def between(self, begin_ns: int, end_ns: int) -> dict[str, Any]: ...


@dataclass(eq=False)
class Entry:
    """A tick's decision, or what somebody asked for, and what came of it."""

    what: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)
    moves: list[GroupMove] = field(default_factory=list)
    span_ns: tuple[int, int] | None = None  # of a split, or its end
    error: str | None = None
    repeated: int = 1
    latency: dict[str, Any] | None = None
    at: float = field(default_factory=time.time)

    def failed(self, error: BaseException) -> None:
        self.error = error.message if isinstance(error, FlexStreamError) else str(error)

    def measure(self, latency: Latency) -> None:
        """The latency while it moved, once that is past."""
        stamps = self._stamps()
        if stamps and self.latency is None:
            end_ns = max(stamps) + int(LATENCY_TAIL_S * 1e9)
            if time.monotonic_ns() > end_ns:
                self.latency = latency.between(min(stamps), end_ns)

    @property
    def took_ms(self) -> float | None:
        """From the first step of the first move to the last step of the last."""
        stamps = self._stamps()
        return round((max(stamps) - min(stamps)) / 1e6, 3) if stamps else None

    def _stamps(self) -> list[int]:
        return [at for move in self.moves for at in move.steps.values()] + list(self.span_ns or ())

    def to_dict(self) -> dict[str, Any]:
        return {
            "at": round(self.at, 3),
            "what": self.what,
            "text": self.text,
            "error": self.error,
            "repeated": self.repeated,
            "moved": [move.to_dict() for move in self.moves],
            "took_ms": self.took_ms,
            "latency": self.latency,
            **self.numbers,
        }


class History:
    """The last lines. One thread writes at a time; any may read."""

    def __init__(self, latency: Latency) -> None:
        self._latency = latency
        self._entries: deque[Entry] = deque(maxlen=HISTORY)
        self.decision: Decision | None = None  # of the last tick

    def note(self, entry: Entry) -> None:
        self._entries.append(entry)

    def note_decision(self, decision: Decision) -> Entry:
        """A tick's. One that decides as the tick before, to move nothing, takes the place of its line."""
        self.decision = decision
        entry = Entry("tick", decision.text, decision_numbers(decision))
        last = self._entries[-1] if self._entries else None
        same = last is not None and last.what == "tick" and last.numbers["verdict"] == entry.numbers["verdict"]
        if same and last is not None and decision.verdict is not Verdict.MOVE:
            entry.repeated = last.repeated + 1
            self._entries[-1] = entry
        else:
            self._entries.append(entry)
        return entry

    def lines(self, most: int) -> list[dict[str, Any]]:
        """The oldest first."""
        entries = list(self._entries)[-most:] if most else []
        for entry in entries:
            entry.measure(self._latency)
        return [entry.to_dict() for entry in entries]

    def last_move(self) -> Entry | None:
        last = next((entry for entry in reversed(self._entries) if entry.moves), None)
        if last is not None:
            last.measure(self._latency)
        return last


def decision_numbers(decision: Decision) -> dict[str, Any]:
    left_out = ("moves", "at_s", "repeated", "text")
    return {name: _round(value) for name, value in decision.to_dict().items() if name not in left_out}


def _round(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3) if math.isfinite(value) else None  # JSON has no infinity
    return [_round(item) for item in value] if isinstance(value, list) else value


def plan_numbers(made: Plan) -> dict[str, Any]:
    return {
        "plan": [{"group": group, "from": source, "to": target} for group, source, target in made.moves],
        "text": made.text,
        "reason": str(made.reason),
        "objective_before": round(made.objective_before, 3),
        "objective_after": round(made.objective_after, 3),
        "imbalance_percent": round(made.imbalance_before, 1),
        "imbalance_percent_after": round(made.imbalance_after, 1),
        "worker_percent": [round(share, 1) for share in made.worker_percent_before],
        "worker_percent_after": [round(share, 1) for share in made.worker_percent_after],
        "hot_groups": list(made.hot_groups),
    }

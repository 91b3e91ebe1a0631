"""One door to the placement: what is asked of the engine is checked, remembered and answered as over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import EngineError

GROUPS = 8


@pytest.fixture
def engine() -> Iterator[fs.Engine]:
    with fs.Engine(2, groups=GROUPS, pin=False, balance="off") as engine:
        yield engine


def refusal(order: Callable[[], object]) -> tuple[str, str | None, str | None]:
    with pytest.raises(EngineError) as refused:
        order()
    return refused.value.message, refused.value.code, refused.value.hint


def test_a_frozen_group_is_moved_by_nobody(engine: fs.Engine) -> None:
    before = engine.placement()
    engine.balance.freeze([3])
    said = refusal(lambda: engine.move({3: 0}))
    assert said == refusal(lambda: engine.balance.move(3, 0))
    assert said[1] == "frozen"
    refusal(lambda: engine.move({group: 1 - before[group] for group in range(GROUPS)}))
    assert engine.placement() == before, "one that may not move keeps all where they are"
    engine.balance.freeze([3], on=False)
    engine.move({3: 0})
    assert engine.placement()[3] == 0


def test_a_drained_worker_is_nobodys_target(engine: fs.Engine) -> None:
    engine.balance.drain(1)
    said = refusal(lambda: engine.move({0: 1}))
    assert said == refusal(lambda: engine.balance.move(0, 1))
    assert said[1] == "drained"
    assert engine.placement() == [0] * GROUPS
    engine.balance.add(1)
    engine.move({0: 1})
    assert engine.placement()[0] == 1


def test_every_move_is_in_the_history(engine: fs.Engine) -> None:
    placement = engine.placement()
    one = engine.move({0: 1 - placement[0]}, reason="for a test")
    some = engine.move({group: 1 - placement[group] for group in range(1, 4)})
    engine.move({0: engine.placement()[0]})
    history = engine.balance.history()
    assert [entry["what"] for entry in history] == ["move"] * 3
    assert [entry["moved"] for entry in history] == [[m.to_dict() for m in moves] for moves in (one, some, [])]
    assert [entry["text"] for entry in history] == [
        f"group 0 to worker {1 - placement[0]}", "3 groups to workers 0, 1",
        f"group 0 is on worker {1 - placement[0]} already",
    ]  # fmt: skip
    assert {move["reason"] for move in history[0]["moved"]} == {"for a test"}
    assert engine.status()["rebalance"]["last"]["text"] == history[1]["text"]


def test_a_move_that_fails_is_in_the_history_with_its_error(engine: fs.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: str) -> None:
        raise EngineError("no quiescent point", code="no_grace")

    monkeypatch.setattr(engine.mover, "interrupt", fail)
    refusal(lambda: engine.move({0: 1 - engine.placement()[0]}))
    assert engine.balance.history()[-1]["error"] == "no quiescent point"


def test_a_split_that_fails_is_in_the_history_with_its_error(engine: fs.Engine) -> None:
    said = refusal(lambda: engine.split(0, [0, 1]))
    (entry,) = engine.balance.history()
    assert (entry["what"], entry["error"]) == ("split", said[0])
    assert "two connections" in said[0]


def test_numbers_of_numpy_are_numbers(engine: fs.Engine) -> None:
    group, worker = np.int64(0), np.int32(1 - engine.placement()[0])
    assert [type(move.group) for move in engine.move({group: worker})] == [int]
    assert engine.placement()[0] == worker


ORDERS: list[Callable[[fs.Engine], Any]] = [
    lambda engine: engine.move({0: 1}),
    lambda engine: engine.split(0, [0, 1]),
    lambda engine: engine.unsplit(0),
    lambda engine: engine.balance.move(0, 1),
    lambda engine: engine.balance.drain(1),
    lambda engine: engine.balance.add(1),
    lambda engine: engine.balance.freeze(),
    lambda engine: engine.balance.set_auto(True),
    lambda engine: engine.balance.plan(),
    lambda engine: engine.balance.apply(),
]


def test_a_closed_engine_takes_no_orders() -> None:
    engine = fs.Engine(2, groups=GROUPS, pin=False, balance="off")
    engine.close()
    for order in ORDERS:
        assert refusal(lambda order=order: order(engine))[1] == "closed"  # type: ignore[misc]


def test_the_door_has_its_name_of_before(engine: fs.Engine) -> None:
    assert engine.rebalancer is engine.balance

"""The ring between threads: messages come out once, whole, in order."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexstream.cython_ext.testing.probes import ProbeRing


def test_messages_come_out_in_the_order_they_went_in() -> None:
    ring = ProbeRing(16)
    assert all(ring.push(value) for value in range(10))
    assert [ring.pop() for _ in range(11)] == [*range(10), None]


def test_a_full_ring_refuses_and_keeps_what_it_has() -> None:
    ring = ProbeRing(8)
    assert [ring.push(value) for value in range(9)] == [True] * 8 + [False]
    assert ring.free_slots == 0
    assert ring.pop() == 0
    assert ring.free_slots == 1
    assert ring.push(100)
    assert not ring.push(101)
    assert [ring.pop() for _ in range(9)] == [1, 2, 3, 4, 5, 6, 7, 100, None]
    assert ring.empty


@pytest.mark.parametrize("position", [2**64 - 3, 2**63 - 2, 2**32 - 1, 5])
def test_positions_wrap_around_without_loss(position: int) -> None:
    ring = ProbeRing(4)
    ring.start_at(position)
    assert ring.empty
    assert ring.free_slots == 4
    for value in range(50):
        assert ring.push(value)
        assert ring.push(value + 1000)
        assert (ring.pop(), ring.pop()) == (value, value + 1000)
    assert ring.empty


@given(st.lists(st.booleans(), max_size=300))
def test_the_ring_is_a_bounded_queue(pushes: list[bool]) -> None:
    ring, model = ProbeRing(8), deque[int]()
    for value, is_push in enumerate(pushes):
        if is_push:
            assert ring.push(value) == (len(model) < 8)
            if len(model) < 8:
                model.append(value)
        else:
            assert ring.pop() == (model.popleft() if model else None)
        assert ring.free_slots == 8 - len(model)
        assert ring.empty == (not model)


@pytest.mark.parametrize("capacity", [1, 2, 64])
def test_two_threads_lose_tear_and_swap_nothing(capacity: int) -> None:
    n = 20_000 if capacity == 1 else 200_000
    ring = ProbeRing(capacity)
    wrong: list[Any] = []
    reader = threading.Thread(target=lambda: wrong.append(ring.pop_many(n)))
    reader.start()
    ring.push_many(n)
    reader.join()
    assert wrong == [0]
    assert ring.empty

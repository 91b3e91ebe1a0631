"""State memory: size classes, growth ahead of need, refusal at the cap, recovery after a release."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexstream.cython_ext.testing.probes import ProbeArena

CHUNK = 1 << 16
HEAD = 64 + 4095  # what a chunk costs beyond what was asked for, at most
ROUNDS = 20  # more tries than any allocation may take


def settle(arena: ProbeArena, n: int) -> tuple[str, int]:
    """As a worker does: try, let the allocator work, try again."""
    for _ in range(ROUNDS):
        status, address = arena.alloc(n)
        if status != "wait":
            return status, address
        arena.serve()
    raise AssertionError(f"{n} bytes were neither given nor refused in {ROUNDS} rounds")


def test_pieces_are_aligned_apart_and_counted_by_their_class() -> None:
    arena = ProbeArena(CHUNK, 1 << 20)
    sizes = [1, 128, 129, 256, 1000, 5000]
    pieces = [settle(arena, n)[1] for n in sizes]
    assert all(address % 64 == 0 for address in pieces)
    for index, (address, n) in enumerate(zip(pieces, sizes, strict=True)):
        arena.fill(address, n, index + 1)
    assert all(arena.holds(a, n, i + 1) for i, (a, n) in enumerate(zip(pieces, sizes, strict=True)))
    assert arena.in_use == 128 + 128 + 256 + 256 + 1024 + 8192


def test_released_memory_is_used_again_before_new_memory() -> None:
    arena = ProbeArena(CHUNK, 1 << 20)
    _, first = settle(arena, 1000)
    arena.release(first, 1000)
    assert arena.in_use == 0
    assert settle(arena, 700) == ("ok", first), "700 and 1000 bytes are of one class"


def test_the_allocator_is_asked_before_memory_runs_out() -> None:
    arena = ProbeArena(CHUNK, 1 << 20)
    taken = 0
    while not arena.requested:
        assert arena.alloc(1024)[0] == "ok"
        taken += 1024
    assert taken < CHUNK
    assert arena.wakes() == 1
    mapped = arena.mapped
    arena.serve()
    assert arena.mapped > mapped
    assert not arena.requested
    for _ in range(CHUNK // 1024):
        assert arena.alloc(1024)[0] == "ok", "the next chunk was there in time"


def test_a_piece_larger_than_a_chunk_gets_a_chunk_of_its_own() -> None:
    arena = ProbeArena(CHUNK, 1 << 22)
    assert arena.alloc(10 * CHUNK)[0] == "wait"
    status, address = settle(arena, 10 * CHUNK)
    assert status == "ok"
    arena.fill(address, 10 * CHUNK, 7)
    assert settle(arena, 128)[0] == "ok"


def test_what_is_left_of_a_chunk_is_not_lost() -> None:
    arena = ProbeArena(CHUNK, 1 << 22)
    settle(arena, 128)
    settle(arena, 8 * CHUNK)  # leaves the first chunk behind with room
    mapped = arena.mapped
    for _ in range(200):
        assert settle(arena, 128)[0] == "ok"
    assert arena.mapped - mapped <= CHUNK + HEAD


def test_the_cap_is_never_passed_and_refusals_say_so() -> None:
    cap = 4 * CHUNK
    arena = ProbeArena(CHUNK, cap)
    got = 0
    while (status := settle(arena, 4096)[0]) == "ok":
        got += 4096
        assert arena.mapped <= cap
    assert status == "full"
    assert got >= cap - 2 * CHUNK, f"only {got} of {cap} bytes could be used"


def test_after_a_refusal_a_release_makes_room_again() -> None:
    arena = ProbeArena(CHUNK, CHUNK + HEAD + 1)  # no room for another chunk of any size
    pieces = []
    while (found := settle(arena, 4096))[0] == "ok":
        pieces.append(found[1])
    for piece in (pieces[3], pieces[7]):
        arena.release(piece, 4096)
        assert settle(arena, 4096) == ("ok", piece)
        assert settle(arena, 4096)[0] == "full"


def test_memory_is_refused_only_when_it_does_not_fit_under_the_cap() -> None:
    """Even when a whole chunk does not: the refusal of what was asked for ahead is no refusal of a small piece."""
    cap = 2 * CHUNK
    arena = ProbeArena(CHUNK, cap)
    while settle(arena, 4096)[0] == "ok":
        pass
    assert arena.mapped + 4096 + HEAD > cap, f"refused 4096 bytes with {arena.mapped} of {cap} mapped"


def test_work_that_needs_two_pieces_is_refused_at_the_cap_not_kept_waiting_for_ever() -> None:
    """A batch may touch two panes that both have to grow: each try asks for both, and starts again after a wait."""
    arena = ProbeArena(CHUNK, CHUNK + 2 * HEAD)
    while settle(arena, 16384)[0] == "ok":
        pass
    for _ in range(ROUNDS):
        answers = [arena.alloc(16384)[0]]
        if answers[0] != "wait":
            answers.append(arena.alloc(32768)[0])
        if "wait" not in answers:
            break
        arena.serve()
    assert answers == ["full", "full"]


def test_work_that_gives_back_what_it_cannot_use_is_refused_at_the_cap_too() -> None:
    """A new pane is a small piece and a table; without the table the small piece goes back. Twice in a batch."""
    arena = ProbeArena(CHUNK, CHUNK + 2 * HEAD)
    while settle(arena, 16384)[0] == "ok":
        pass

    def new_pane() -> str:
        status, pane = arena.alloc(128)
        if status == "ok":
            status, _ = arena.alloc(16384)
            if status != "ok":
                arena.release(pane, 128)
        return status

    for _ in range(ROUNDS):
        answers = [new_pane()]
        if answers[0] != "wait":
            answers.append(new_pane())
        if "wait" not in answers:
            break
        arena.serve()
    assert answers == ["full", "full"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=120), st.integers(2, 12))
def test_pieces_never_overlap(steps: list[tuple[bool, int]], chunks: int) -> None:
    arena = ProbeArena(CHUNK, chunks * CHUNK)
    held: list[tuple[int, int, int]] = []
    for number, (is_alloc, n) in enumerate(steps):
        if is_alloc or not held:
            status, address = settle(arena, n)
            if status == "ok":
                arena.fill(address, n, number % 251)
                held.append((address, n, number % 251))
        else:
            address, size, value = held.pop(n % len(held))
            assert arena.holds(address, size, value)
            arena.release(address, size)
        assert arena.in_use <= arena.mapped <= chunks * CHUNK
    assert all(arena.holds(*piece) for piece in held)


def test_a_cap_below_the_first_chunk_is_refused_at_once() -> None:
    with pytest.raises(MemoryError):
        ProbeArena(CHUNK, CHUNK // 2)

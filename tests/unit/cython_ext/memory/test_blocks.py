"""Output pools: blocks between a worker and its reader, with a cap that becomes back-pressure."""

from __future__ import annotations

from flexstream.cython_ext.testing.probes import ProbeOutput

ROW = 24


def test_a_pool_starts_with_two_chunks() -> None:
    pool = ProbeOutput(ROW, 10, 4, 8)
    assert pool.chunks_made == 2


def test_blocks_are_whole_cache_lines_apart_and_hold_their_rows() -> None:
    pool = ProbeOutput(ROW, 10, 4, 2)
    blocks = []
    for value in range(8):
        block = pool.open()
        assert block is not None
        assert block % 64 == 0
        filled = [pool.put(value) for _ in range(10)]
        assert filled == [False] * 9 + [True]
        blocks.append(pool.hand_over())
    assert len(set(blocks)) == 8
    assert [pool.rows(block) for block in blocks] == [bytes([value]) * ROW * 10 for value in range(8)]


def test_the_open_block_stays_open_until_it_is_handed_over() -> None:
    pool = ProbeOutput(ROW, 10, 4, 2)
    block = pool.open()
    pool.put(1)
    assert pool.open() == block
    assert pool.rows(block) == b"\1" * ROW


def test_the_cap_stops_the_worker_until_the_reader_gives_back() -> None:
    pool = ProbeOutput(ROW, 10, 4, 2)
    taken = []
    while pool.open() is not None:
        taken.append(pool.hand_over())
        pool.serve()
    assert len(taken) == 8
    assert pool.chunks_made == 2
    assert pool.open() is None, "still"
    pool.give_back(taken[5])
    assert pool.open() == taken[5]
    assert pool.rows(taken[5]) == b"", "a block comes back empty"


def test_as_many_chunks_again_are_asked_for_when_less_than_half_of_the_blocks_are_left() -> None:
    pool = ProbeOutput(ROW, 10, 4, 7)
    for _ in range(4):
        pool.open()
        pool.hand_over()
    assert not pool.requested
    pool.open()
    assert pool.requested, "while there are others to fill"
    assert pool.wakes() == 1
    pool.serve()
    assert pool.chunks_made == 4
    assert not pool.requested
    for _ in range(11):
        pool.hand_over()
        assert pool.open() is not None
    pool.serve()
    assert pool.chunks_made == 7, "the cap"


def test_blocks_that_come_back_in_time_ask_for_no_more() -> None:
    pool = ProbeOutput(ROW, 10, 4, 7)
    for _ in range(100):
        pool.open()
        pool.give_back(pool.hand_over())
    assert not pool.requested
    assert pool.chunks_made == 2


def test_returned_blocks_are_used_before_fresh_ones() -> None:
    pool = ProbeOutput(ROW, 10, 4, 2)
    pool.open()
    first = pool.hand_over()
    pool.open()
    pool.hand_over()
    pool.give_back(first)
    assert pool.open() == first, "it is still in the cache"


def test_blocks_go_round_for_ever_within_the_cap() -> None:
    pool = ProbeOutput(ROW, 3, 4, 2)
    unread: list[int] = []
    for turn in range(1000):
        if pool.open() is None:
            assert len(unread) == 8
            for block in unread:
                pool.give_back(block)
            unread.clear()
            assert pool.open() is not None
        pool.put(turn % 256)
        block = pool.hand_over()
        assert pool.rows(block) == bytes([turn % 256]) * ROW
        unread.append(block)
        pool.serve()
    assert pool.chunks_made == 2

"""Tables of keys: whatever the keys, an entry is near where its probe begins. Probes are counted, never timed."""

from __future__ import annotations

import itertools
import random

import pytest

from flexstream.cython_ext.testing.probes import ProbeTable

GOLDEN = 0x9E3779B97F4A7C15
WORD = 1 << 64
KEYS = 4000
FAIR = 8.0  # steps per key; random keys at half load have 0.5, all in one heap half as many as there are keys


def keys_against(multiplier: int, n: int) -> list[tuple[int]]:
    """Keys whose products with the multiplier are 0, 1, 2...: all probes begin at one place."""
    inverse = pow(multiplier, -1, WORD)
    return [(i * inverse % WORD,) for i in range(n)]


def filled(keys: list[tuple[int, ...]], capacity: int = 16) -> ProbeTable:
    table = ProbeTable(len(keys[0]), capacity)
    for mark, key in enumerate(keys):
        assert table.add(key, mark)
    return table


def assert_fair(table: ProbeTable, keys: int) -> None:
    probes = table.probes()
    assert probes["keys"] == keys
    assert probes["too_far"] == 0, probes
    assert probes["steps"] < FAIR * keys, probes


@pytest.mark.parametrize("capacity", [16, 16384])
def test_keys_against_the_golden_ratio_make_the_table_draw_another_multiplier(capacity: int) -> None:
    keys = keys_against(GOLDEN, KEYS)
    table = filled(keys, capacity)
    assert table.multiplier != GOLDEN
    assert_fair(table, KEYS)
    assert [table.rows(key) for key in keys] == [(1, mark) for mark in range(KEYS)], "every entry moved whole"


def test_a_key_that_comes_again_is_found_after_the_entries_moved() -> None:
    keys = keys_against(GOLDEN, 500)
    table = filled(keys)
    for key in reversed(keys):
        assert table.add(key)
    assert all(table.rows(key) == (2, 0) for key in keys)


def test_who_learns_each_multiplier_gets_no_further_than_one_heap_at_a_time() -> None:
    table = ProbeTable(1)
    known: set[int] = set()
    seen: set[tuple[int]] = set()
    while len(known) < 6 and len(seen) < 50_000:
        known.add(table.multiplier)
        for key in keys_against(table.multiplier, 300):
            seen.add(key)
            assert table.add(key)
    assert table.probes()["too_far"] == 0


@pytest.mark.parametrize("words", [2, 3, 16])
def test_long_keys_do_not_meet_for_every_multiplier(words: int) -> None:
    """Bits at the top of a word go no further up in a product's low half: what one word adds the next takes away."""
    pairs = [(0, 0), (1 << 63, 1 << 63 | 1 << 31)]
    flips = list(itertools.product((0, 1), repeat=words - 1))
    random.Random(words).shuffle(flips)
    keys = set()
    for flip in flips[:KEYS]:
        key = [7 + word for word in range(words)]
        for at, one in enumerate(flip):
            key[at] ^= pairs[one][0]
            key[at + 1] ^= pairs[one][1]
        keys.add(tuple(key))
    assert_fair(filled(sorted(keys)), len(keys))


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 1000, 4096, 1 << 32, 3 << 40])
def test_keys_at_equal_distances_are_spread(step: int, words: int) -> None:
    keys: list[tuple[int, ...]] = [(*[5] * (words - 1), i * step % WORD) for i in range(KEYS)]
    assert_fair(filled(keys), KEYS)


def test_a_table_merged_into_a_small_one_does_not_heap_up() -> None:
    """It gives its keys in the order of their homes: in a table too small for all, they would be at its beginning."""
    rnd = random.Random(1)
    keys = [(rnd.getrandbits(64),) for _ in range(20_000)]
    first, second, into = filled(keys[:10_000]), filled(keys[5_000:]), ProbeTable(1)
    into.merge(first)
    into.merge(second)
    assert_fair(into, len(keys))
    assert all(into.rows(key)[0] == (2 if 5_000 <= at < 10_000 else 1) for at, key in enumerate(keys))


def test_without_memory_keys_that_are_there_are_found_and_new_ones_refused() -> None:
    table = ProbeTable(1, cap=4 << 20)
    keys = keys_against(GOLDEN, 200_000)
    held = list(itertools.takewhile(table.add, keys))
    assert 0 < len(held) < len(keys)
    assert all(table.rows(key)[0] == 1 for key in held)
    assert table.rows(keys[len(held)]) is None
    assert_fair(table, len(held))

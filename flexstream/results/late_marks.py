"""For whom a stored late row is: bits, and what they mean in a segment (late_log.py)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flexstream.results.result_rows import LateRows

WORD_BITS = 64


class Entry(NamedTuple):
    """What a bit means in a segment."""

    bit: int  # 64 * word + the bit in the word
    query: str
    generation: int
    plan: str | None  # None: it was cancelled
    before: int  # late rows that the query had when the segment began


@lru_cache(maxsize=4096)
def _parsed(plan: str) -> dict[str, Entry]:
    return {said[1]: Entry(*said) for said in json.loads(plan)}


def table_of(plan: str | None) -> dict[str, Entry]:
    """{query: what it is in the segment}, as its header says."""
    return _parsed(plan) if plan is not None else {}


def chosen_by(batch: pa.RecordBatch, bit: int) -> np.ndarray[Any, Any]:
    """Which of the stored rows have the bit."""
    word, bit = divmod(bit, WORD_BITS)
    words, masks = LateRows.marks(batch)
    chosen: np.ndarray[Any, Any] = (words == word) & ((masks >> np.uint64(bit)) & np.uint64(1) == 1)
    return chosen


def without(batch: pa.RecordBatch, bit: int) -> pa.RecordBatch:
    """The stored rows without the bit; those that have no other are gone."""
    word, bit = divmod(bit, WORD_BITS)
    words, masks = LateRows.marks(batch)
    return LateRows.marked(batch, np.where(words == word, masks & ~np.uint64(1 << bit), masks))

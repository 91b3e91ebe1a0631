"""What a compiled variant may take for granted about the rows: one query has as many variants as there are choices.

None of them decides a result. A choice that no longer fits costs time, never a row: what the code cannot do it
leaves to the table, or to the generic variant, in the same batch.
"""

from __future__ import annotations

from dataclasses import dataclass

MISS = 15.0  # cycles that a wrongly guessed branch costs


@dataclass(frozen=True, slots=True)
class Choices:
    """`order`: predicates by number, in parts that one branch decides each (None: as written, one by one)."""

    order: tuple[tuple[int, ...], ...] | None = None
    masked: bool = False  # the last part has no branch: dropped rows are folded as nothing
    dense: bool = False  # entries by key - base, as long as the key is in the range
    hot: bool = False  # rows of the most frequent key are folded apart, into several places in turn
    instrumented: bool = False  # samples rows into fs_profile

    def __str__(self) -> str:
        parts = []
        if self.order is not None:
            parts.append("predicates " + ", ".join("&".join(str(number) for number in part) for part in self.order))
        for name in ("masked", "dense", "hot", "instrumented"):
            if getattr(self, name):
                parts.append(name)
        return "; ".join(parts) or "plain"


PLAIN = Choices()


def branch_free_from(fold_cost: float, can_mask: bool) -> float | None:
    """The share of rows that pass the filters from which on a branch costs more than to fold the others as nothing.

    With a branch a row costs MISS * min(share, 1 - share) + share * fold_cost, without one fold_cost. None: never.
    """
    return fold_cost / (MISS + fold_cost) if can_mask and fold_cost < MISS else None

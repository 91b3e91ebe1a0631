"""The folds of a compiled variant as C: calls of folds.h, for a row and for the places of a hot key.

`slot` is the first slot of the entry's aggregates, `at` where this one's begin. Values are the bits of a register.
"""

from __future__ import annotations

from flexstream.compile.fold_table import Fold


def update(
    fold: Fold, at: int, value: str | None, by: str | None, masked: bool, overflowed: str = ""
) -> list[str]:  # fmt: skip
    """The statements that fold a row in; `by`: what decides. `masked`: `keep` is 0 for a row that counts as nothing.
    `overflowed`: the label to go to when there is no value any more; without one `overflow` tells."""
    if not fold.slots:
        return []
    told = [f".value = {value}", f".keep = {'keep' if masked else '1'}"]
    if by is not None:
        told.append(f".by = {by}")
    if fold.has("ORIGIN"):
        told += [".time = time", ".session = view->session", ".sequence = view->sequence + i"]
    call = f"fs_{fold.name}_update(slot + {at}, (fs_row){{{', '.join(told)}}})"
    if not fold.has("OVERFLOWS"):
        return [f"{call};"]
    return [f"if (FS_RARE({call})) goto {overflowed};" if overflowed else f"overflow |= (uint64_t){call};"]


def merge_places(folds: list[Fold]) -> tuple[list[str], list[str]]:
    """The statements that merge a `place` into the entry, and those behind all of them. What may overflow is added up
    first: the sum of all may have a value where that of some has none."""
    each, behind = [], []
    at = 0
    for fold in folds:
        into, source = f"slot + {at}", f"place + {1 + at}"
        if fold.has("OVERFLOWS"):
            each.append(f"if (p) overflow |= (uint64_t)fs_{fold.name}_merge(places[0] + {1 + at}, {source});")
            behind.append(f"overflow |= (uint64_t)fs_{fold.name}_merge({into}, places[0] + {1 + at});")
        elif fold.slots:
            each.append(f"fs_{fold.name}_merge({into}, {source});")
        at += fold.slots
    return each, behind

"""The loop of a dense variant over rows of known keys, as C.

Nearly all rows are of the pane in use, and of a key that has an entry in its dense array. A loop that can do nothing
else needs few registers and instructions, and is almost as fast as the rows come from memory. It leaves off at the
first row that is different; the loop over all kinds of rows does this one and some behind it, for they come in bunches.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK = 8  # small rows between two looks ahead: they share lines of the cache
OTHERS = 16  # rows that the other loop does before this one is tried again
_LINE = 64


def body_indent(row_bytes: int) -> str:
    return " " * (12 if row_bytes < _LINE else 8)


@dataclass(frozen=True, slots=True)
class KnownRows:
    """The C of a loop over rows whose keys have dense entries already.

    `body`: statements for a `row` of `row_bytes`. `kept`: what a row counts, None where no filter drops any.
    """

    body: list[str]
    row_bytes: int
    ahead: int  # from a row to what is fetched when it is read
    masked: bool  # is there a parameter of that name?
    kept: str | None
    sums: bool  # a fold may go to `overflowed`

    def function(self) -> list[str]:
        masked = ", const int masked" if self.masked else ""
        return [
            "/* From row i on, while rows are of the pane and their keys have dense entries. */",
            "static __attribute__((noinline)) uint32_t over_known(const unsigned char *rows, uint32_t i, uint32_t n,",
            f"    const fs_view *view, const fs_pane_view *in{masked}, uint64_t *all_kept, uint64_t *any_overflow)",
            "{",
            "    const fs_pane_view pane = *in;",
            "    uint64_t overflow = 0;",
            "    uint64_t kept = 0;" if self.kept else "    const uint32_t first = i;",
            *(self._in_blocks() if self.row_bytes < _LINE else self._one_by_one()),
            *(self._overflowed() if self.sums else []),
            "stop:",
            f"    *all_kept += {'kept' if self.kept else 'i - first'}, *any_overflow |= overflow;",
            "    return i;",
            "}",
            "",
        ]

    def _in_blocks(self) -> list[str]:
        return [
            f"    while (n - i >= {BLOCK}) {{ /* the others do what is left */",
            f"        const unsigned char *block = rows + (size_t)i * {self.row_bytes};",
            f"        for (int at = 0; at < {BLOCK * self.row_bytes}; at += {_LINE})",
            f"            __builtin_prefetch(block + {self.ahead} + at);",
            f"        for (int j = 0; j < {BLOCK}; j++, i++) {{",
            f"            const unsigned char *row = block + j * {self.row_bytes};",
            *self._work(),
            "        }",
            "    }",
        ]

    def _one_by_one(self) -> list[str]:
        """A line or more each: to fetch those of many rows at once would hold up the rows at hand."""
        return [
            '    _Pragma("GCC unroll 1")',
            "    for (; i < n; i++) {",
            f"        const unsigned char *row = rows + (size_t)i * {self.row_bytes};",
            f"        __builtin_prefetch(row + {self.ahead});",
            *self._work(),
            "    }",
        ]

    def _work(self) -> list[str]:
        return [*self.body, *([f"{body_indent(self.row_bytes)}kept += {self.kept};"] if self.kept else [])]

    def _overflowed(self) -> list[str]:
        return [
            "    goto stop;",
            "overflowed: /* the query has failed: nobody will miss the row's other folds */",
            f"    overflow = 1, i++{', kept++' if self.kept else ''};",
        ]

    def call(self) -> list[str]:
        """Within the loop over all rows, at its top."""
        return [
            "        if (i >= again) {",
            "            const fs_pane_view in = pane;",
            f"            i = over_known(rows, i, n, view, &in{', masked' if self.masked else ''}, &kept, &overflow);",
            "            if (i == n) break;",
            f"            again = i + {OTHERS};",
            "        }",
        ]

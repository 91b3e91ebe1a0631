"""Which register holds which intermediate value: as few as possible, each free again behind its last reader.

A program has no jumps, so that the last reader is the last instruction that names the value. A result never takes the
register of one of its own arguments: operators may write before they have read all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Instruction = tuple[int, int, int, int, int, int, int, bytes | None]  # op, dst, a, b, offset, size, imm, constant

# Numbers as in the Op enum of program.pxd.
_ONE = {25, 26, 34, 35, 40, 41, 72, 90, *range(101, 111)}
_TWO = {*range(20, 25), *range(30, 34), *range(50, 56), *range(60, 66), 70, 71, 86, *range(111, 115)}
_SELECT, _HASH_BYTES = 100, 115
_NO_RESULT = {86, 90, 91, 92}


def reads(instruction: Instruction) -> tuple[int, ...]:
    op, _, a, b, _, size, _, _ = instruction
    if op == _SELECT:
        return a, b, size
    if op == _HASH_BYTES:
        return (b,)
    return (a, b) if op in _TWO else (a,) if op in _ONE else ()


def allocate(code: Sequence[Instruction], results: Sequence[int]) -> tuple[list[Instruction], list[int], int]:
    """The code with real registers for the values that it names, those of `results`, and how many there are.

    Every value is written once, before it is read; results are read behind the end.
    """
    last = {value: at for at, instruction in enumerate(code) for value in reads(instruction)}
    last.update(dict.fromkeys(results, len(code)))
    place: dict[int, int] = {}
    free: list[int] = []
    used = 0
    made: list[Instruction] = []
    for at, instruction in enumerate(code):
        op, dst, a, b, offset, size, imm, constant = instruction
        named = reads(instruction)
        if op not in _NO_RESULT:
            if free:
                place[dst] = heapq.heappop(free)
            else:
                place[dst] = used
                used += 1
        new = {value: place[value] for value in named}
        made.append(
            (
                op,
                place[dst] if op not in _NO_RESULT else 0,
                new[a] if op != _HASH_BYTES and named else a,
                new[b] if op in _TWO or op in (_SELECT, _HASH_BYTES) else b,
                offset,
                new[size] if op == _SELECT else size,
                imm,
                constant,
            )
        )
        ended = {value for value in named if last[value] == at}
        if op not in _NO_RESULT and last.get(dst, at) <= at:  # nothing reads it
            ended.add(dst)
        for value in ended:
            heapq.heappush(free, place[value])
    return made, [place[value] for value in results], used

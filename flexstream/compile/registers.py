"""Which register holds which intermediate value: as few as possible, each free again behind its last reader.

A program has no jumps, so that the last reader is the last instruction that names the value. A result never takes the
register of one of its own arguments: operators may write before they have read all.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from flexstream.cython_ext.expressions.program import Op

Instruction = tuple[int, int, int, int, int, int, int, bytes | None]  # op, dst, a, b, offset, size, imm, constant

# Which of an instruction's fields name registers that it reads (program.pxd): none, `a`, or `a` and `b`; SELECT reads
# the one that `size` names as well, HASH_BYTES `b` alone.
NONE = {
    Op.LOAD_I8, Op.LOAD_I16, Op.LOAD_I32, Op.LOAD_I64, Op.LOAD_U8, Op.LOAD_U16, Op.LOAD_U32, Op.LOAD_U64, Op.LOAD_F32,
    Op.LOAD_F64, Op.LOAD_BOOL, Op.CONSTANT, Op.BYTES_EQ, Op.BYTES_EQ_FIELD, Op.BAD_SAVE, Op.FILTER_BYTES_EQ,
    Op.FILTER_BYTES_NE,
}  # fmt: skip
ONE = {
    Op.NEG_I, Op.ABS_I, Op.NEG_F, Op.ABS_F, Op.I_TO_F, Op.F_TO_I, Op.NOT, Op.FILTER, Op.FIT, Op.ROUND_F32, Op.I_TO_F32,
    Op.FLOOR, Op.FLOORMOD, Op.YEAR, Op.MONTH, Op.DAY, Op.DAY_OF_WEEK, Op.DAY_OF_YEAR,
}  # fmt: skip
TWO = {
    Op.ADD_I, Op.SUB_I, Op.MUL_I, Op.FLOORDIV_I, Op.MOD_I, Op.ADD_F, Op.SUB_F, Op.MUL_F, Op.DIV_F,
    Op.EQ_I, Op.NE_I, Op.LT_I, Op.LE_I, Op.GT_I, Op.GE_I, Op.EQ_F, Op.NE_F, Op.LT_F, Op.LE_F, Op.GT_F, Op.GE_F,
    Op.AND, Op.OR, Op.BAD_MASK, Op.HASH_INT, Op.HASH_LONG, Op.HASH_F32, Op.HASH_F64,
}  # fmt: skip
NO_RESULT = {Op.BAD_MASK, Op.FILTER, Op.FILTER_BYTES_EQ, Op.FILTER_BYTES_NE}


def reads(instruction: Instruction) -> tuple[int, ...]:
    op, _, a, b, _, size, _, _ = instruction
    if op == Op.SELECT:
        return a, b, size
    if op == Op.HASH_BYTES:
        return (b,)
    return (a, b) if op in TWO else (a,) if op in ONE else ()


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
        if op not in NO_RESULT:
            if free:
                place[dst] = heapq.heappop(free)
            else:
                place[dst] = used
                used += 1
        new = {value: place[value] for value in named}
        made.append(
            (
                op,
                place[dst] if op not in NO_RESULT else 0,
                new[a] if op != Op.HASH_BYTES and named else a,
                new[b] if op in TWO or op in (Op.SELECT, Op.HASH_BYTES) else b,
                offset,
                new[size] if op == Op.SELECT else size,
                imm,
                constant,
            )
        )
        ended = {value for value in named if last[value] == at}
        if op not in NO_RESULT and last.get(dst, at) <= at:  # nothing reads it
            ended.add(dst)
        for value in ended:
            heapq.heappush(free, place[value])
    return made, [place[value] for value in results], used

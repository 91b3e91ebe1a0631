"""The assembler: instructions bit for bit as linux/bpf.h has them."""

from __future__ import annotations

import pytest

from flexstream.nic.bpf.assembler import R0, R1, R2, R6, R10, Assembler, Helper, Size


def hex_of(code: Assembler) -> str:
    return code.assemble().hex(" ", 8)


def test_the_smallest_program_is_what_a_compiler_emits() -> None:
    code = Assembler()
    code.exit(2)
    assert hex_of(code) == "b700000002000000 9500000000000000"


def test_registers_and_immediates_are_told_apart() -> None:
    code = Assembler()
    code.move(R6, R1)
    code.move(R6, 1)  # not R1
    code.alu(R2, "^", R6)
    code.alu(R2, ">>", 16)
    assert hex_of(code) == "bf16000000000000 b706000001000000 af62000000000000 7702000010000000"


def test_loads_and_stores_of_every_size() -> None:
    code = Assembler()
    code.load(Size.U16, R1, R6, 12)
    code.load(Size.U64, R1, R6, -8)
    code.store(Size.U32, R10, -4, 0)
    code.store(Size.U8, R10, -1, R2)
    assert hex_of(code) == "69610c0000000000 7961f8ff00000000 620afcff00000000 732affff00000000"


def test_jumps_reach_labels_before_and_behind_them() -> None:
    code = Assembler()
    code.label("again")
    code.jump_if(R1, "==", 0, "end")
    code.jump_if(R1, ">", R2, "again")
    code.jump("again")
    code.label("end")
    code.exit()
    assert hex_of(code) == "1501020000000000 2d21feff00000000 0500fdff00000000 9500000000000000"


def test_a_map_takes_two_instructions_and_jumps_count_both() -> None:
    code = Assembler()
    code.jump("end")
    code.map_pointer(R1, 7)
    code.map_value(R2, 9, 1024)
    code.call(Helper.MAP_LOOKUP_ELEM)
    code.label("end")
    code.exit(-1)
    assert hex_of(code) == (
        "0500050000000000 1811000007000000 0000000000000000 1822000009000000 0000000000040000 "
        "8500000001000000 b7000000ffffffff 9500000000000000"
    )


def test_mistakes_are_refused_while_assembling() -> None:
    code = Assembler()
    code.jump("nowhere")
    with pytest.raises(ValueError, match="'nowhere' is never set"):
        code.assemble()
    code.label("twice")
    with pytest.raises(ValueError, match="set twice"):
        code.label("twice")
    with pytest.raises(ValueError, match="32 signed bits"):
        code.move(R0, 1 << 31)

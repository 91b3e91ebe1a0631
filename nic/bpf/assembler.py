"""eBPF instructions, written in Python: what a compiler would emit, so that no host needs one.

    code = Assembler()
    code.move(R0, 2)
    code.exit()
    code.assemble()  # bytes for BPF_PROG_LOAD

An operand that is a `Register` is a register, an `int` is an immediate. Sizes and helper numbers have the names of
linux/bpf.h and linux/bpf_common.h. Labels may be used before they are set; a missing one is a ValueError.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable

INSTRUCTION_BYTES = 8


class Register(enum.IntEnum):
    """R0: result of a call and of the program. R1-R5: arguments, lost in a call. R6-R9: kept. R10: frame pointer."""

    R0 = 0
    R1 = 1
    R2 = 2
    R3 = 3
    R4 = 4
    R5 = 5
    R6 = 6
    R7 = 7
    R8 = 8
    R9 = 9
    R10 = 10


R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10 = Register


class Size(enum.IntEnum):
    """How much a load or store moves: BPF_W, BPF_H, BPF_B, BPF_DW."""

    U32 = 0x00
    U16 = 0x08
    U8 = 0x10
    U64 = 0x18


class Helper(enum.IntEnum):
    """The kernel's functions that the programs call (linux/bpf.h, ___BPF_FUNC_MAPPER)."""

    MAP_LOOKUP_ELEM = 1
    GET_SMP_PROCESSOR_ID = 8
    REDIRECT = 23
    SKB_PULL_DATA = 39
    SET_HASH = 48
    REDIRECT_MAP = 51


_ALU64, _LDX_MEM, _ST_MEM, _STX_MEM, _JMP = 0x07, 0x61, 0x62, 0x63, 0x05
_FROM_REGISTER = 0x08
_LOAD_IMMEDIATE_64, _CALL, _EXIT = 0x18, 0x85, 0x95
_PSEUDO_MAP_FD, _PSEUDO_MAP_VALUE = 1, 2
_OPERATIONS = {
    "+": 0x00,
    "-": 0x10,
    "*": 0x20,
    "|": 0x40,
    "&": 0x50,
    "<<": 0x60,
    ">>": 0x70,
    "^": 0xA0,
    "=": 0xB0,
}
_CONDITIONS = {"==": 0x10, ">": 0x20, ">=": 0x30, "!=": 0x50, "<": 0xA0, "<=": 0xB0}  # all unsigned


class Assembler:
    """A program under construction. Every method appends one instruction (a 64-bit load: two)."""

    def __init__(self) -> None:
        self._instructions: list[tuple[int, int, int, int | str, int]] = []
        self._labels: dict[str, int] = {}

    def alu(self, target: Register, operation: str, operand: Register | int) -> None:
        """target = target operation operand, in 64 bits."""
        opcode = _ALU64 | _OPERATIONS[operation]
        if isinstance(operand, Register):
            self._append(opcode | _FROM_REGISTER, target, operand)
        else:
            self._append(opcode, target, immediate=operand)

    def move(self, target: Register, operand: Register | int) -> None:
        self.alu(target, "=", operand)

    def load(self, size: Size, target: Register, base: Register, offset: int = 0) -> None:
        """target = *(size *)(base + offset)."""
        self._append(_LDX_MEM | size, target, base, offset)

    def store(self, size: Size, base: Register, offset: int, operand: Register | int) -> None:
        """*(size *)(base + offset) = operand."""
        if isinstance(operand, Register):
            self._append(_STX_MEM | size, base, operand, offset)
        else:
            self._append(_ST_MEM | size, base, 0, offset, operand)

    def map_pointer(self, target: Register, map_fd: int) -> None:
        """The map itself, as helpers want it."""
        self._wide(target, _PSEUDO_MAP_FD, map_fd, 0)

    def map_value(self, target: Register, map_fd: int, offset: int = 0) -> None:
        """The address of the only value of an array map: no call, no lookup."""
        self._wide(target, _PSEUDO_MAP_VALUE, map_fd, offset)

    def call(self, helper: int) -> None:
        """A function of the kernel: a `Helper`, or the number of another one."""
        self._append(_CALL, immediate=helper)

    def jump(self, label: str) -> None:
        self._append(_JMP, offset=label)

    def jump_if(self, left: Register, condition: str, right: Register | int, label: str) -> None:
        opcode = _JMP | _CONDITIONS[condition]
        if isinstance(right, Register):
            self._append(opcode | _FROM_REGISTER, left, right, label)
        else:
            self._append(opcode, left, 0, label, right)

    def label(self, name: str) -> None:
        """The next instruction is the one that jumps to `name` reach."""
        if name in self._labels:
            raise ValueError(f"label {name!r} is set twice")
        self._labels[name] = len(self._instructions)

    def exit(self, result: int | None = None) -> None:
        if result is not None:
            self.move(R0, result)
        self._append(_EXIT)

    def __len__(self) -> int:
        return len(self._instructions)

    def assemble(self) -> bytes:
        return b"".join(self._encoded())

    def _encoded(self) -> Iterable[bytes]:
        for index, (opcode, target, source, offset, immediate) in enumerate(self._instructions):
            if isinstance(offset, str):
                if offset not in self._labels:
                    raise ValueError(f"label {offset!r} is never set")
                offset = self._labels[offset] - index - 1
            yield struct.pack("=BBhi", opcode, source << 4 | target, offset, immediate)

    def _append(self, opcode: int, target: int = 0, source: int = 0, offset: int | str = 0, immediate: int = 0) -> None:
        if not -(2**31) <= immediate < 2**31:
            raise ValueError(f"immediate {immediate} does not fit in 32 signed bits")
        self._instructions.append((opcode, target, source, offset, int(immediate)))

    def _wide(self, target: Register, pseudo_source: int, low: int, high: int) -> None:
        self._append(_LOAD_IMMEDIATE_64, target, pseudo_source, 0, low)
        self._append(0, immediate=high)

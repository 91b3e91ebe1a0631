"""The generic variant's operator program: a few vector instructions over the rows of a batch.

A batch is at most BATCH rows of one group. `Scratch.selected` holds the rows that are still in, and every register
is dense over it: element i belongs to row selected[i]. A FILTER shortens the selection and invalidates the
registers; the lowering loads again what it needs. Rows on which an expression has no value (overflow, division by
zero) are marked in `bad` and dropped, with a count, at the next FILTER or at the end.

A Program is immutable once built and shared by all workers; a Scratch belongs to one worker.

What is `cpdef` here Python reads from here, so that nobody writes the numbers twice.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint8_t

cpdef enum:
    BATCH = 1024
    MAX_REGISTERS = 64


cpdef enum Op:
    LOAD_I8 = 1
    LOAD_I16 = 2
    LOAD_I32 = 3
    LOAD_I64 = 4
    LOAD_U8 = 5
    LOAD_U16 = 6
    LOAD_U32 = 7
    LOAD_U64 = 8
    LOAD_F32 = 9
    LOAD_F64 = 10
    LOAD_BOOL = 11
    CONSTANT = 12
    ADD_I = 20
    SUB_I = 21
    MUL_I = 22
    FLOORDIV_I = 23
    MOD_I = 24
    NEG_I = 25
    ABS_I = 26
    ADD_F = 30
    SUB_F = 31
    MUL_F = 32
    DIV_F = 33
    NEG_F = 34
    ABS_F = 35
    I_TO_F = 40
    F_TO_I = 41
    EQ_I = 50
    NE_I = 51
    LT_I = 52
    LE_I = 53
    GT_I = 54
    GE_I = 55
    EQ_F = 60
    NE_F = 61
    LT_F = 62
    LE_F = 63
    GT_F = 64
    GE_F = 65
    AND = 70
    OR = 71
    NOT = 72
    BYTES_EQ = 80             # field (offset, size) against the constant at `bytes`
    BYTES_EQ_FIELD = 81       # field (offset, size) against the field at imm, which has b more bytes: padding
    BAD_SAVE = 85             # dst: which rows have no value so far
    BAD_MASK = 86             # where register a equals imm the right side did not count: back to what b saved
    FILTER = 90
    FILTER_BYTES_EQ = 91      # fused: at most 8 bytes, masked, against imm
    FILTER_BYTES_NE = 92
    SELECT = 100              # b where a is true, else the register that `size` names
    FIT = 101                 # a, or no value where it has more than `size` bits; b: one of them is the sign's
    ROUND_F32 = 102
    I_TO_F32 = 103
    FLOOR = 104               # by imm, which is positive
    FLOORMOD = 105
    YEAR = 106                # of days since 1970, and so the next four
    MONTH = 107
    DAY = 108
    DAY_OF_WEEK = 109
    DAY_OF_YEAR = 110
    HASH_INT = 111            # of a, with the seed in b
    HASH_LONG = 112
    HASH_F32 = 113
    HASH_F64 = 114
    HASH_BYTES = 115          # of field (offset, size), or of the constant at `bytes`


cdef enum Bad:                # why a row has no value
    BAD_OVERFLOW = 1
    BAD_DIVISION = 2
    BAD_CAST = 3


cdef struct Instr:
    uint16_t op
    uint16_t dst
    uint16_t a
    uint16_t b
    uint32_t offset
    uint32_t size
    int64_t imm               # an integer, or the bits of a double
    const unsigned char *bytes


cdef struct Program:
    Instr *code
    uint32_t n_instructions
    uint32_t n_registers
    uint32_t row_bytes
    uint32_t spare
    unsigned char *constants


cdef struct Scratch:
    uint32_t n_bad
    uint32_t bad_total
    uint32_t bad_by_reason[4]     # of these, by Bad
    uint32_t selected[BATCH]
    uint32_t late[BATCH]
    uint32_t todo[BATCH]
    uint32_t which[BATCH]
    uint8_t bad[BATCH]
    int64_t time[BATCH]
    unsigned char *entry[BATCH]
    int64_t keys[BATCH * 32]
    unsigned char *side[BATCH * 4]    # entries in side tables: of the first, then of the next
    int64_t registers[MAX_REGISTERS * BATCH]


cdef uint32_t program_run(const Program *program, const unsigned char *rows, uint32_t n, Scratch *scratch) noexcept nogil
cdef uint32_t drop_bad(Scratch *scratch, uint32_t m, uint32_t n_registers) noexcept nogil
cdef Program *program_build(list instructions, uint32_t n_registers, uint32_t row_bytes) except NULL
cdef void program_free(Program *program) noexcept nogil

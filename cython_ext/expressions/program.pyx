"""See program.pxd."""

from libc.math cimport fabs, isnan
from libc.stdint cimport INT64_MIN, int8_t, int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from flexstream.cython_ext.expressions.scalar_ops cimport fs_is_zero, run_call
from flexstream.cython_ext.includes.native cimport (
    fs_add_overflows, fs_f32, fs_f64, fs_i16, fs_i32, fs_i64, fs_mul_overflows, fs_sub_overflows, fs_u16, fs_u32,
    fs_u64,
)


cdef inline void mark_bad(Scratch *scratch, uint32_t i, Bad why=BAD_OVERFLOW) noexcept nogil:
    if not scratch.bad[i]:
        scratch.bad[i] = why
        scratch.n_bad += 1


cdef void count_bad(Scratch *scratch, uint32_t m) noexcept nogil:
    cdef uint32_t i
    for i in range(m):
        scratch.bad_by_reason[scratch.bad[i]] += 1
    scratch.bad_total += scratch.n_bad


cdef void load(const Instr *instr, const unsigned char *rows, uint32_t row_bytes, uint32_t m,
               Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef double *real = <double *> dst
    cdef const uint32_t *selected = scratch.selected
    cdef const unsigned char *base = rows + instr.offset
    cdef size_t stride = row_bytes
    cdef uint32_t i
    cdef uint64_t wide
    if instr.op == LOAD_I64:
        for i in range(m):
            dst[i] = fs_i64(base + selected[i] * stride)
    elif instr.op == LOAD_F64:
        for i in range(m):
            real[i] = fs_f64(base + selected[i] * stride)
    elif instr.op == LOAD_I32:
        for i in range(m):
            dst[i] = fs_i32(base + selected[i] * stride)
    elif instr.op == LOAD_U32:
        for i in range(m):
            dst[i] = fs_u32(base + selected[i] * stride)
    elif instr.op == LOAD_I16:
        for i in range(m):
            dst[i] = fs_i16(base + selected[i] * stride)
    elif instr.op == LOAD_U16:
        for i in range(m):
            dst[i] = fs_u16(base + selected[i] * stride)
    elif instr.op == LOAD_I8:
        for i in range(m):
            dst[i] = <int8_t> base[selected[i] * stride]
    elif instr.op == LOAD_U8:
        for i in range(m):
            dst[i] = base[selected[i] * stride]
    elif instr.op == LOAD_BOOL:
        for i in range(m):
            dst[i] = base[selected[i] * stride] != 0
    elif instr.op == LOAD_F32:
        for i in range(m):
            real[i] = fs_f32(base + selected[i] * stride)
    elif instr.op == LOAD_U64:
        for i in range(m):          # values are int64 inside the engine; what does not fit has no value
            wide = fs_u64(base + selected[i] * stride)
            dst[i] = <int64_t> wide
            if dst[i] < 0:
                mark_bad(scratch, i)


cdef void arithmetic_int(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const int64_t *a = scratch.registers + instr.a * BATCH
    cdef const int64_t *b = scratch.registers + instr.b * BATCH
    cdef uint32_t i
    cdef int64_t out
    if instr.op == ADD_I:
        for i in range(m):
            if fs_add_overflows(a[i], b[i], &out):
                mark_bad(scratch, i)
            dst[i] = out
    elif instr.op == SUB_I:
        for i in range(m):
            if fs_sub_overflows(a[i], b[i], &out):
                mark_bad(scratch, i)
            dst[i] = out
    elif instr.op == MUL_I:
        for i in range(m):
            if fs_mul_overflows(a[i], b[i], &out):
                mark_bad(scratch, i)
            dst[i] = out
    elif instr.op == NEG_I:
        for i in range(m):
            if fs_sub_overflows(0, a[i], &out):
                mark_bad(scratch, i)
            dst[i] = out
    elif instr.op == ABS_I:
        for i in range(m):
            if a[i] == INT64_MIN:
                mark_bad(scratch, i)
                dst[i] = 0
            else:
                dst[i] = a[i] if a[i] >= 0 else -a[i]
    else:
        for i in range(m):
            dst[i] = 0
            if b[i] == 0:
                mark_bad(scratch, i, BAD_DIVISION)
            elif b[i] == -1 and a[i] == INT64_MIN and instr.op == FLOORDIV_I:
                mark_bad(scratch, i)
            elif b[i] == -1:                # the processor traps on INT64_MIN % -1, which is 0
                dst[i] = -a[i] if instr.op == FLOORDIV_I else 0
            elif instr.op == FLOORDIV_I:
                dst[i] = a[i] // b[i]       # cdivision: truncates, as Spark's div
            else:
                dst[i] = a[i] % b[i]


cdef void arithmetic_real(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef double *dst = <double *> (scratch.registers + instr.dst * BATCH)
    cdef const double *a = <const double *> (scratch.registers + instr.a * BATCH)
    cdef const double *b = <const double *> (scratch.registers + instr.b * BATCH)
    cdef uint32_t i
    if instr.op == ADD_F:
        for i in range(m):
            dst[i] = a[i] + b[i]
    elif instr.op == SUB_F:
        for i in range(m):
            dst[i] = a[i] - b[i]
    elif instr.op == MUL_F:
        for i in range(m):
            dst[i] = a[i] * b[i]
    elif instr.op == NEG_F:
        for i in range(m):
            dst[i] = -a[i]
    elif instr.op == ABS_F:
        for i in range(m):
            dst[i] = fabs(a[i])
    else:
        for i in range(m):
            if b[i] == 0.0:
                mark_bad(scratch, i, BAD_DIVISION)
                dst[i] = 0.0
            else:
                dst[i] = a[i] / b[i]


cdef void convert(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *integer = scratch.registers + instr.dst * BATCH
    cdef double *real = <double *> integer
    cdef const int64_t *from_integer = scratch.registers + instr.a * BATCH
    cdef const double *from_real = <const double *> from_integer
    cdef uint32_t i
    if instr.op == I_TO_F:
        for i in range(m):
            real[i] = <double> from_integer[i]
    else:
        for i in range(m):
            if from_real[i] >= -9223372036854775808.0 and from_real[i] < 9223372036854775808.0:
                integer[i] = <int64_t> from_real[i]
            else:
                mark_bad(scratch, i, BAD_CAST)
                integer[i] = 0


cdef void compare_int(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const int64_t *a = scratch.registers + instr.a * BATCH
    cdef const int64_t *b = scratch.registers + instr.b * BATCH
    cdef uint32_t i
    if instr.op == EQ_I:
        for i in range(m):
            dst[i] = a[i] == b[i]
    elif instr.op == NE_I:
        for i in range(m):
            dst[i] = a[i] != b[i]
    elif instr.op == LT_I:
        for i in range(m):
            dst[i] = a[i] < b[i]
    elif instr.op == LE_I:
        for i in range(m):
            dst[i] = a[i] <= b[i]
    elif instr.op == GT_I:
        for i in range(m):
            dst[i] = a[i] > b[i]
    elif instr.op == GE_I:
        for i in range(m):
            dst[i] = a[i] >= b[i]
    elif instr.op == AND:
        for i in range(m):
            dst[i] = a[i] & b[i]
    elif instr.op == OR:
        for i in range(m):
            dst[i] = a[i] | b[i]
    else:
        for i in range(m):
            dst[i] = a[i] ^ 1


cdef void compare_real(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const double *a = <const double *> (scratch.registers + instr.a * BATCH)
    cdef const double *b = <const double *> (scratch.registers + instr.b * BATCH)
    cdef uint32_t i
    # As in Spark: NaN equals NaN and is greater than any other value.
    if instr.op == EQ_F:
        for i in range(m):
            dst[i] = a[i] == b[i] or (isnan(a[i]) and isnan(b[i]))
    elif instr.op == NE_F:
        for i in range(m):
            dst[i] = not (a[i] == b[i] or (isnan(a[i]) and isnan(b[i])))
    elif instr.op == LT_F:
        for i in range(m):
            dst[i] = a[i] < b[i] or (isnan(b[i]) and not isnan(a[i]))
    elif instr.op == LE_F:
        for i in range(m):
            dst[i] = a[i] <= b[i] or isnan(b[i])
    elif instr.op == GT_F:
        for i in range(m):
            dst[i] = a[i] > b[i] or (isnan(a[i]) and not isnan(b[i]))
    else:
        for i in range(m):
            dst[i] = a[i] >= b[i] or isnan(a[i])


cdef void save_or_mask_bad(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const int64_t *decided = scratch.registers + instr.a * BATCH
    cdef const int64_t *saved = scratch.registers + instr.b * BATCH
    cdef uint32_t i
    if instr.op == BAD_SAVE:
        for i in range(m):
            dst[i] = scratch.bad[i]
    elif scratch.n_bad:
        scratch.n_bad = 0
        for i in range(m):
            if decided[i] == instr.imm:
                scratch.bad[i] = <uint8_t> saved[i]
            scratch.n_bad += scratch.bad[i] != 0


cdef void compare_bytes(const Instr *instr, const unsigned char *rows, uint32_t row_bytes, uint32_t m,
                        Scratch *scratch) noexcept nogil:
    cdef int64_t *dst = scratch.registers + instr.dst * BATCH
    cdef const unsigned char *base = rows + instr.offset
    cdef const unsigned char *other = rows + instr.imm
    cdef size_t stride = row_bytes
    cdef uint32_t i
    if instr.op == BYTES_EQ:
        for i in range(m):
            dst[i] = memcmp(base + scratch.selected[i] * stride, instr.bytes, instr.size) == 0
    else:
        for i in range(m):
            dst[i] = (
                memcmp(base + scratch.selected[i] * stride, other + scratch.selected[i] * stride, instr.size) == 0
                and fs_is_zero(other + scratch.selected[i] * stride + instr.size, instr.b)
            )


cdef uint32_t filter_register(const Instr *instr, uint32_t m, Scratch *scratch) noexcept nogil:
    cdef const int64_t *keep = scratch.registers + instr.a * BATCH
    cdef uint32_t *selected = scratch.selected
    cdef uint32_t i
    cdef uint32_t out = 0
    if scratch.n_bad:
        count_bad(scratch, m)
        for i in range(m):
            selected[out] = selected[i]
            out += keep[i] != 0 and not scratch.bad[i]
        memset(scratch.bad, 0, m)
        scratch.n_bad = 0
    else:
        for i in range(m):
            selected[out] = selected[i]
            out += keep[i] != 0
    return out


cdef uint32_t filter_word(const Instr *instr, const unsigned char *rows, uint32_t row_bytes, uint32_t m,
                          Scratch *scratch) noexcept nogil:
    """Fixed bytes up to 8 wide as one masked word; branch-free, since selectivity is not known."""
    cdef uint32_t *selected = scratch.selected
    cdef const unsigned char *base = rows + instr.offset
    cdef size_t stride = row_bytes
    cdef uint64_t wanted = <uint64_t> instr.imm
    cdef uint64_t word
    cdef uint32_t i
    cdef uint32_t out = 0
    cdef bint negate = instr.op == FILTER_BYTES_NE
    if instr.size == 8:
        for i in range(m):
            word = fs_u64(base + selected[i] * stride)
            selected[out] = selected[i]
            out += (word == wanted) ^ negate
    else:
        for i in range(m):
            word = 0
            memcpy(&word, base + selected[i] * stride, instr.size)
            selected[out] = selected[i]
            out += (word == wanted) ^ negate
    return out


cdef uint32_t drop_bad(Scratch *scratch, uint32_t m, uint32_t n_registers) noexcept nogil:
    """Compact the selection, the times and the first registers to the rows that are not bad; clears `bad`."""
    cdef uint32_t i, r
    cdef uint32_t out = 0
    for i in range(m):
        if not scratch.bad[i]:
            scratch.selected[out] = scratch.selected[i]
            scratch.time[out] = scratch.time[i]
            for r in range(n_registers):
                scratch.registers[r * BATCH + out] = scratch.registers[r * BATCH + i]
            out += 1
    memset(scratch.bad, 0, m)
    scratch.n_bad = 0
    return out


cdef uint32_t program_run(const Program *program, const unsigned char *rows, uint32_t n,
                          Scratch *scratch) noexcept nogil:
    """Rows that pass, in `scratch.selected`; `scratch.bad_total` of the others had no value."""
    cdef uint32_t m = n
    cdef uint32_t i, k
    cdef const Instr *instr
    cdef int64_t *dst
    scratch.n_bad = 0
    scratch.bad_total = 0
    memset(scratch.bad_by_reason, 0, sizeof(scratch.bad_by_reason))
    for i in range(n):
        scratch.selected[i] = i
    for k in range(program.n_instructions):
        instr = &program.code[k]
        if instr.op <= LOAD_BOOL:
            load(instr, rows, program.row_bytes, m, scratch)
        elif instr.op == CONSTANT:
            dst = scratch.registers + instr.dst * BATCH
            for i in range(m):
                dst[i] = instr.imm
        elif instr.op <= ABS_I:
            arithmetic_int(instr, m, scratch)
        elif instr.op <= ABS_F:
            arithmetic_real(instr, m, scratch)
        elif instr.op <= F_TO_I:
            convert(instr, m, scratch)
        elif instr.op <= GE_I or (AND <= instr.op <= NOT):
            compare_int(instr, m, scratch)
        elif instr.op <= GE_F:
            compare_real(instr, m, scratch)
        elif instr.op <= BYTES_EQ_FIELD:
            compare_bytes(instr, rows, program.row_bytes, m, scratch)
        elif instr.op <= BAD_MASK:
            save_or_mask_bad(instr, m, scratch)
        elif instr.op == FILTER:
            m = filter_register(instr, m, scratch)
        elif instr.op >= SELECT:
            run_call(instr, rows, program.row_bytes, m, scratch)
        else:
            m = filter_word(instr, rows, program.row_bytes, m, scratch)
        if m == 0:
            return 0
    if scratch.n_bad:
        count_bad(scratch, m)
        m = drop_bad(scratch, m, program.n_registers)
    return m


cdef Program *program_build(list instructions, uint32_t n_registers, uint32_t row_bytes) except NULL:
    """`instructions`: tuples (op, dst, a, b, offset, size, imm, constant bytes or None), as lowering.py makes them."""
    if n_registers > MAX_REGISTERS:
        raise ValueError(f"the query needs {n_registers} registers, more than {MAX_REGISTERS}")
    cdef Py_ssize_t constant_bytes = sum(len(item[7]) for item in instructions if item[7] is not None)
    cdef Program *program = <Program *> calloc(1, sizeof(Program))
    if program == NULL:
        raise MemoryError("no memory for a query program")
    program.code = <Instr *> calloc(len(instructions) + 1, sizeof(Instr))
    program.constants = <unsigned char *> calloc(constant_bytes + 1, 1)
    if program.code == NULL or program.constants == NULL:
        program_free(program)
        raise MemoryError("no memory for a query program")
    program.n_registers = n_registers
    program.row_bytes = row_bytes
    cdef Py_ssize_t used = 0
    cdef const unsigned char *source
    for op, dst, a, b, offset, size, imm, constant in instructions:
        item = &program.code[program.n_instructions]
        item.op = op
        item.dst = dst
        item.a = a
        item.b = b
        item.offset = offset
        item.size = size
        item.imm = imm
        if constant is not None:
            source = constant
            memcpy(program.constants + used, source, len(constant))
            item.bytes = program.constants + used
            used += len(constant)
        program.n_instructions += 1
    return program


cdef void program_free(Program *program) noexcept nogil:
    if program != NULL:
        free(program.code)
        free(program.constants)
        free(program)

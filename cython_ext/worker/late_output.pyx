"""See late_output.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.blocks cimport Block, block_rows, output_block
from flexstream.cython_ext.memory.messages cimport LATE_BLOCK
from flexstream.cython_ext.operators.late_marks cimport LateMarks, LateRow, same_watermark
from flexstream.cython_ext.operators.edges cimport hand_over, operator_flush


cdef void take_slot(StreamState *stream, Input *input) noexcept nogil:
    """Assumes: fewer than MARK_BITS inputs have one."""
    input.late_slot = 0
    while stream.late_slots >> input.late_slot & 1:
        input.late_slot += 1
    stream.late_slots |= <uint64_t> 1 << input.late_slot


cdef void free_slot(StreamState *stream, const Input *input) noexcept nogil:
    stream.late_slots &= ~(<uint64_t> 1 << input.late_slot)


cdef bint flush_late(StreamState *stream, Context *context) noexcept nogil:
    """Hand over what is in the open block. False: the reader is behind."""
    return hand_over(&stream.late, context, LATE_BLOCK, stream.index)


cdef bint flush_stream(StreamState *stream, Context *context) noexcept nogil:
    """The same, of its queries' results too."""
    cdef uint32_t i
    cdef bint whole = flush_late(stream, context)
    for i in range(stream.n_inputs):
        whole = operator_flush(stream.inputs[i].op, context) and whole
    return whole


cdef bint has_late_room(StreamState *stream, Context *context, uint32_t n) noexcept nogil:
    """Room for n rows, so that what is late in a batch is written as soon as its last query has had it.

    False: the reader is behind, and the batch had better wait.
    """
    cdef Block *block = output_block(&stream.late)
    if block != NULL and block.capacity - block.rows < n:
        if not flush_late(stream, context):
            return False
        block = output_block(&stream.late)
    return block != NULL


cdef bint write_late(StreamState *stream, Context *context, const unsigned char *rows, uint32_t n,
                     uint32_t group) noexcept nogil:
    """The batch's marked rows, each once for all queries that had one watermark. False: no room; call again.

    What is written has no mark any more, so that nothing is written twice.
    """
    cdef LateMarks *marks = context.marks
    cdef LateRow late
    cdef Block *block
    cdef unsigned char *out
    cdef uint32_t i
    if not marks.any:
        return True
    late.word = 0
    late.group = group
    for i in range(n):
        while marks.mask[i]:
            if not has_late_room(stream, context, 1):
                return False
            block = stream.late.open
            late.mask = same_watermark(marks, marks.mask[i], &late.watermark)
            out = block_rows(block) + <size_t> block.rows * block.row_bytes
            memcpy(out, rows + <size_t> i * stream.row_bytes, stream.row_bytes)
            memcpy(out + stream.row_bytes, &late, sizeof(LateRow))
            block.rows += 1
            marks.mask[i] &= ~late.mask
    marks.any = False
    return True

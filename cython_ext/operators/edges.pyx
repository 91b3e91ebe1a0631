"""See edges.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from flexstream.cython_ext.includes.native cimport fs_count
from flexstream.cython_ext.memory.blocks cimport Block, Output, block_rows, output_block
from flexstream.cython_ext.memory.messages cimport RESULT_BLOCK
from flexstream.cython_ext.memory.ring cimport Message, ring_push


cdef bint hand_over(Output *output, Context *context, uint32_t kind, uint64_t tag) noexcept nogil:
    """Send the open block to the reader. False: the out ring is full, nothing happened."""
    cdef Message message
    if output.open == NULL or output.open.rows == 0:
        return True
    memset(&message, 0, sizeof(message))
    message.kind = kind
    message.ptr = output.open
    message.tag = tag
    if not ring_push(context.out, &message):
        return False
    output.open = NULL
    return True


cdef unsigned char *edge_row(Operator *op, Context *context) noexcept nogil:
    """Where the operator's next result row goes; it counts from here on. NULL: the reader is behind, nothing happened."""
    cdef Output *results = &op.out.results
    cdef Block *block = output_block(results)
    cdef unsigned char *row
    if block != NULL and block.rows == block.capacity:
        if not hand_over(results, context, RESULT_BLOCK, op.id):
            return NULL
        block = output_block(results)
    if block == NULL:
        return NULL
    row = block_rows(block) + <size_t> block.rows * block.row_bytes
    block.rows += 1
    fs_count(&op.out.rows, 1)
    return row


cdef bint operator_flush(Operator *op, Context *context) noexcept nogil:
    """Hand over the results in the open block. False: the reader is behind."""
    return hand_over(&op.out.results, context, RESULT_BLOCK, op.id)

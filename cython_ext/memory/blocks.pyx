"""See blocks.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from flexstream.cython_ext.includes.linux cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_POPULATE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap, write,
)
from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_load_relaxed, fs_store_relaxed, fs_store_release
from flexstream.cython_ext.memory.ring cimport Message, ring_free, ring_init, ring_pop, ring_push, ring_waiting


cdef struct Chunk:                # 64-byte preamble
    void *next
    uint64_t n
    uint64_t pad[6]


cdef inline uint64_t block_bytes(Output *output) noexcept nogil:
    return (64 + <uint64_t> output.block_rows * output.row_bytes + 63) & ~<uint64_t> 63


cdef uint64_t ring_size(uint64_t wanted) noexcept nogil:
    cdef uint64_t size = 16
    while size < wanted:
        size *= 2
    return size


cdef bint output_init(Output *output, uint32_t row_bytes, uint32_t rows, uint32_t chunk_blocks,
                      uint32_t max_chunks, int wake_fd) noexcept nogil:
    cdef uint64_t blocks = <uint64_t> chunk_blocks * max_chunks
    memset(output, 0, sizeof(Output))
    output.row_bytes = row_bytes
    output.block_rows = rows
    output.chunk_blocks = chunk_blocks
    output.max_chunks = max_chunks
    output.wake_fd = wake_fd
    if not ring_init(&output.returned, ring_size(blocks)) or not ring_init(&output.fresh, ring_size(blocks)):
        return False
    output.requested = 1
    output_serve(output)
    output.requested = 1
    output_serve(output)
    return output.chunks_made == 2


cdef uint64_t output_bytes(Output *output) noexcept nogil:
    cdef uint64_t chunk = 64 + block_bytes(output) * output.chunk_blocks
    cdef uint64_t rings = (output.returned.mask + output.fresh.mask + 2) * sizeof(Message)
    return fs_load_relaxed(&output.chunks_made) * chunk + rings


cdef void output_destroy(Output *output) noexcept nogil:
    cdef Chunk *chunk = <Chunk *> output.chunks
    cdef Chunk *following
    while chunk != NULL:
        following = <Chunk *> chunk.next
        munmap(chunk, chunk.n)
        chunk = following
    output.chunks = NULL
    ring_free(&output.returned)
    ring_free(&output.fresh)


cdef bint make_chunk(Output *output) noexcept nogil:
    cdef uint64_t n = 64 + block_bytes(output) * output.chunk_blocks
    cdef uint64_t i
    cdef Block *block
    cdef Message grant
    cdef Chunk *chunk = <Chunk *> mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                                       -1, 0)
    if chunk == <Chunk *> MAP_FAILED:
        return False
    chunk.next = output.chunks
    chunk.n = n
    output.chunks = chunk
    fs_store_relaxed(&output.chunks_made, output.chunks_made + 1)
    memset(&grant, 0, sizeof(grant))
    for i in range(output.chunk_blocks):
        block = <Block *> (<unsigned char *> chunk + 64 + i * block_bytes(output))
        block.capacity = output.block_rows
        block.row_bytes = output.row_bytes
        block.owner = output
        grant.ptr = block
        ring_push(&output.fresh, &grant)
    return True


cdef void output_serve(Output *output) noexcept nogil:
    """Allocator thread: as many chunks as there are, if the worker asked and the cap allows."""
    cdef uint64_t wanted = output.chunks_made if output.chunks_made else 1
    if fs_load_acquire(&output.requested) == 0:
        return
    while wanted and output.chunks_made < output.max_chunks and make_chunk(output):
        wanted -= 1
    fs_store_release(&output.requested, 0)


cdef Block *output_block(Output *output) noexcept nogil:
    """The open block, which has room for at least one row; NULL: the reader is behind, try again later."""
    cdef Message message
    cdef uint64_t one = 1
    if output.open != NULL:
        return output.open
    if ring_pop(&output.returned, &message):
        output.open = <Block *> message.ptr
    elif ring_pop(&output.fresh, &message):
        output.open = <Block *> message.ptr
    if fs_load_relaxed(&output.chunks_made) < output.max_chunks and fs_load_acquire(&output.requested) == 0 \
            and 2 * (ring_waiting(&output.returned) + ring_waiting(&output.fresh)) \
            < output.chunk_blocks * fs_load_relaxed(&output.chunks_made):
        fs_store_release(&output.requested, 1)
        if write(output.wake_fd, &one, 8) < 0:
            pass        # the eventfd is already readable: the allocator is awake
    if output.open != NULL:
        output.open.rows = 0
    return output.open


cdef void output_return(Block *block) noexcept nogil:
    """Reader: the rows have been copied; the worker may fill the block again."""
    cdef Message message
    memset(&message, 0, sizeof(message))
    message.ptr = block
    ring_push(&(<Output *> block.owner).returned, &message)

"""Blocks and chunks between a worker's operators and what reads their output (Enjima 3.1).

A block is a 64-byte preamble and N rows; a chunk is a 64-byte preamble and K blocks, contiguous and pre-faulted.
The worker fills one open block, hands it over on its out ring and takes the next; the reader gives blocks back on
`returned`. When half of them are taken the allocator thread makes as many again, up to `max_chunks`, while the worker
fills the other half: a window that fires may have more rows than the reader can follow. Past the cap the worker has
nothing to write to, stops reading its sockets, and TCP tells the producers.

Who writes what: `open` is the worker's; `returned` is pushed by the reader, `fresh` and `chunks` by the allocator;
`requested` is set by the worker (release) and cleared by the allocator (release).
"""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.memory.ring cimport Ring


cdef struct Block:
    uint32_t rows                 # write cursor
    uint32_t capacity
    uint32_t row_bytes
    uint32_t spare
    void *owner                   # the Output it goes back to
    uint64_t pad[5]


cdef struct Output:
    uint32_t row_bytes
    uint32_t block_rows
    uint32_t chunk_blocks
    uint32_t max_chunks
    int wake_fd
    Block *open
    Ring returned                 # reader -> worker
    Ring fresh                    # allocator -> worker
    uint64_t requested
    uint64_t chunks_made
    void *chunks


cdef inline unsigned char *block_rows(Block *block) noexcept nogil:
    return <unsigned char *> block + 64


cdef bint output_init(Output *output, uint32_t row_bytes, uint32_t block_rows, uint32_t chunk_blocks,
                      uint32_t max_chunks, int wake_fd) noexcept nogil
cdef uint64_t output_bytes(Output *output) noexcept nogil      # any thread: what it takes now
cdef void output_destroy(Output *output) noexcept nogil
cdef void output_serve(Output *output) noexcept nogil
cdef Block *output_block(Output *output) noexcept nogil
cdef void output_return(Block *block) noexcept nogil

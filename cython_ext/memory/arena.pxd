"""Per-worker state memory: size classes over pre-faulted chunks that the allocator thread maps ahead of need.

Who writes what: everything but `requested`, `refused` and `mapped` belongs to the worker. `requested` is set by
the worker (release) and cleared by the allocator (release) after it has pushed the grant; `mapped` is the
allocator's, read by anyone, and so is `refused`, the smallest size for which the cap left no room (0: none). Chunks are unmapped by `arena_destroy` only, after the worker has ended.
Guarantees: `arena_alloc` makes no system call but, at most, a write to the allocator's eventfd.
"""

from libc.stdint cimport uint64_t

from flexstream.cython_ext.memory.ring cimport Ring

cdef enum:
    ARENA_MIN_SHIFT = 7           # 128 bytes
    ARENA_CLASSES = 34            # up to 2^40 bytes, which the cap forbids long before

cdef enum ArenaStatus:
    ARENA_OK = 0
    ARENA_WAIT = 1                # asked for; try again later
    ARENA_FULL = 2                # the cap is reached


cdef struct Arena:
    unsigned char *bump
    unsigned char *bump_end
    void *free_lists[ARENA_CLASSES]
    uint64_t in_use
    uint64_t chunk_bytes
    uint64_t cap
    int wake_fd
    Ring grants                   # allocator -> worker
    uint64_t requested
    uint64_t refused
    uint64_t mapped
    void *chunks                  # allocator's list of what to unmap


cdef inline uint64_t arena_size(uint64_t n) noexcept nogil:
    """What a piece of n bytes takes."""
    cdef uint64_t size = <uint64_t> 1 << ARENA_MIN_SHIFT
    while size < n:
        size *= 2
    return size


cdef bint arena_init(Arena *arena, uint64_t chunk_bytes, uint64_t cap, int wake_fd) noexcept nogil
cdef void arena_destroy(Arena *arena) noexcept nogil
cdef ArenaStatus arena_alloc(Arena *arena, uint64_t n, void **out) noexcept nogil
cdef void arena_release(Arena *arena, void *memory, uint64_t n) noexcept nogil
cdef void arena_serve(Arena *arena) noexcept nogil

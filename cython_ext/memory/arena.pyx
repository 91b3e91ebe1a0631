"""See arena.pxd."""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from flexstream.cython_ext.includes.linux cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_POPULATE, MAP_PRIVATE, PROT_READ, PROT_WRITE, mmap, munmap, write,
)
from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_load_acquire, fs_load_relaxed, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.memory.ring cimport Message, ring_empty, ring_free, ring_init, ring_pop, ring_push


cdef struct ChunkHead:            # at the start of every mapped chunk
    void *next
    uint64_t n


cdef inline unsigned size_class(uint64_t n) noexcept nogil:
    cdef unsigned shift = ARENA_MIN_SHIFT
    while (<uint64_t> 1 << shift) < n:
        shift += 1
    return shift - ARENA_MIN_SHIFT


cdef bint arena_init(Arena *arena, uint64_t chunk_bytes, uint64_t cap, int wake_fd) noexcept nogil:
    memset(arena, 0, sizeof(Arena))
    if not ring_init(&arena.grants, 16):
        return False
    arena.chunk_bytes = chunk_bytes
    arena.cap = cap
    arena.wake_fd = wake_fd
    arena.requested = chunk_bytes
    arena_serve(arena)
    return not ring_empty(&arena.grants)


cdef void arena_destroy(Arena *arena) noexcept nogil:
    cdef ChunkHead *chunk = <ChunkHead *> arena.chunks
    cdef ChunkHead *following
    while chunk != NULL:
        following = <ChunkHead *> chunk.next
        munmap(chunk, chunk.n)
        chunk = following
    arena.chunks = NULL
    ring_free(&arena.grants)


cdef void arena_serve(Arena *arena) noexcept nogil:
    """Allocator thread: map what the worker asked for, or refuse it at the cap."""
    cdef uint64_t wanted = fs_load_acquire(&arena.requested)
    cdef uint64_t n
    cdef ChunkHead *chunk
    cdef Message grant
    if wanted == 0:
        return
    n = (wanted + 64 + 4095) & ~<uint64_t> 4095
    if n < arena.chunk_bytes:
        n = arena.chunk_bytes
    if arena.mapped + n > arena.cap and arena.mapped + wanted + 4096 <= arena.cap:
        n = (wanted + 64 + 4095) & ~<uint64_t> 4095
    chunk = <ChunkHead *> MAP_FAILED
    if arena.mapped + n <= arena.cap:
        chunk = <ChunkHead *> mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
                                   -1, 0)
    if chunk == <ChunkHead *> MAP_FAILED:
        if fs_load_relaxed(&arena.refused) == 0 or wanted < fs_load_relaxed(&arena.refused):
            fs_store_relaxed(&arena.refused, wanted)
    else:
        chunk.next = arena.chunks
        chunk.n = n
        arena.chunks = chunk
        fs_store_relaxed(&arena.mapped, arena.mapped + n)
        memset(&grant, 0, sizeof(grant))
        grant.ptr = <unsigned char *> chunk + 64
        grant.n = n - 64
        ring_push(&arena.grants, &grant)
    fs_store_release(&arena.requested, 0)


cdef void request(Arena *arena, uint64_t n) noexcept nogil:
    cdef uint64_t one = 1
    if fs_load_acquire(&arena.requested) != 0:
        return
    fs_store_release(&arena.requested, n)
    if write(arena.wake_fd, &one, 8) < 0:
        return          # the eventfd is non-blocking and already readable: the allocator is awake


cdef void salvage(Arena *arena) noexcept nogil:
    """Cut what is left of the chunk into free pieces, largest first, so that nothing is lost."""
    cdef uint64_t left = <uint64_t> (arena.bump_end - arena.bump)
    cdef unsigned shift
    while left >= (<uint64_t> 1 << ARENA_MIN_SHIFT):
        shift = ARENA_MIN_SHIFT
        while (<uint64_t> 2 << shift) <= left:
            shift += 1
        (<void **> arena.bump)[0] = arena.free_lists[shift - ARENA_MIN_SHIFT]
        arena.free_lists[shift - ARENA_MIN_SHIFT] = arena.bump
        arena.bump += <uint64_t> 1 << shift
        left -= <uint64_t> 1 << shift


cdef ArenaStatus arena_alloc(Arena *arena, uint64_t n, void **out) noexcept nogil:
    """Uninitialised memory of at least n bytes, 64-byte aligned."""
    cdef unsigned k = size_class(n)
    cdef uint64_t size = <uint64_t> 1 << (k + ARENA_MIN_SHIFT)
    cdef Message grant
    cdef void *piece
    while True:
        piece = arena.free_lists[k]
        if piece != NULL:
            arena.free_lists[k] = (<void **> piece)[0]
            break
        if <uint64_t> (arena.bump_end - arena.bump) >= size:
            piece = arena.bump
            arena.bump += size
            if <uint64_t> (arena.bump_end - arena.bump) < arena.chunk_bytes // 2 and ring_empty(&arena.grants) \
                    and fs_load_relaxed(&arena.refused) == 0:
                request(arena, arena.chunk_bytes)
            break
        if ring_pop(&arena.grants, &grant):
            salvage(arena)
            arena.bump = <unsigned char *> grant.ptr
            arena.bump_end = arena.bump + grant.n
            continue
        if fs_load_acquire(&arena.requested) != 0:
            return ARENA_WAIT
        if fs_load_relaxed(&arena.refused) != 0 and size >= fs_load_relaxed(&arena.refused):
            return ARENA_FULL       # for good: chunks are never unmapped, and the free lists were tried
        if not ring_empty(&arena.grants):
            continue                # granted between the two looks
        request(arena, size)
        return ARENA_WAIT
    fs_count(&arena.in_use, size)
    out[0] = piece
    return ARENA_OK


cdef void arena_release(Arena *arena, void *memory, uint64_t n) noexcept nogil:
    cdef unsigned k = size_class(n)
    (<void **> memory)[0] = arena.free_lists[k]
    arena.free_lists[k] = memory
    fs_count(&arena.in_use, -(<uint64_t> 1 << (k + ARENA_MIN_SHIFT)))

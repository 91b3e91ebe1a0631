"""A single-producer single-consumer ring of 64-byte messages: the only way that threads talk to a worker.

Ownership: `tail` is written by the producer alone, `head` by the consumer alone, each on its own cache line.
Memory order: a push stores the message, then `tail` with release; a pop loads `tail` with acquire, reads the
message, then stores `head` with release, which is what allows the producer to use that slot again.
Guarantees: messages come out once, whole, in the order in which they went in.
Assumes: one thread pushes and one pops; several Python threads that push take the owner's lock first.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memset

from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_load_relaxed, fs_store_release


cdef extern from "<stdlib.h>" nogil:
    void *aligned_alloc(size_t alignment, size_t n) noexcept


cdef struct Message:
    uint32_t kind
    uint32_t stream
    uint32_t group
    uint32_t slot
    int64_t value
    uint64_t n
    void *ptr
    void *extra
    uint64_t tag
    uint64_t spare


cdef struct Ring:
    Message *slots
    uint64_t mask
    uint64_t pad_a[6]
    uint64_t head          # consumer writes, producer reads
    uint64_t pad_b[7]
    uint64_t tail          # producer writes, consumer reads
    uint64_t pad_c[7]


cdef inline bint ring_init(Ring *ring, uint64_t capacity) noexcept nogil:
    """`capacity` is a power of two. False: no memory."""
    memset(ring, 0, sizeof(Ring))
    ring.slots = <Message *> aligned_alloc(64, capacity * sizeof(Message))
    if ring.slots == NULL:
        return False
    memset(ring.slots, 0, capacity * sizeof(Message))
    ring.mask = capacity - 1
    return True


cdef inline void ring_free(Ring *ring) noexcept nogil:
    free(ring.slots)
    ring.slots = NULL


cdef inline bint ring_push(Ring *ring, const Message *message) noexcept nogil:
    """False: full, nothing was pushed."""
    cdef uint64_t tail = fs_load_relaxed(&ring.tail)
    if tail - fs_load_acquire(&ring.head) > ring.mask:
        return False
    ring.slots[tail & ring.mask] = message[0]
    fs_store_release(&ring.tail, tail + 1)
    return True


cdef inline bint ring_pop(Ring *ring, Message *message) noexcept nogil:
    cdef uint64_t head = fs_load_relaxed(&ring.head)
    if head == fs_load_acquire(&ring.tail):
        return False
    message[0] = ring.slots[head & ring.mask]
    fs_store_release(&ring.head, head + 1)
    return True


cdef inline const Message *ring_first(const Ring *ring) noexcept nogil:
    """Seen by the consumer: what the next pop will give. Assumes: it is not empty."""
    return &ring.slots[ring.head & ring.mask]


cdef inline uint64_t ring_free_slots(Ring *ring) noexcept nogil:
    """Seen by the producer: at least this many pushes will succeed."""
    return ring.mask + 1 - (fs_load_relaxed(&ring.tail) - fs_load_acquire(&ring.head))


cdef inline bint ring_empty(Ring *ring) noexcept nogil:
    return fs_load_acquire(&ring.tail) == fs_load_acquire(&ring.head)


cdef inline uint64_t ring_waiting(Ring *ring) noexcept nogil:
    """Seen by the consumer: at least this many pops will succeed."""
    return fs_load_acquire(&ring.tail) - fs_load_relaxed(&ring.head)

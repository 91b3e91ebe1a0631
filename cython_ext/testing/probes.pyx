"""For tests only: rings, arenas, tables and output pools as Python objects, with the allocator's part called by hand."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memset

from flexstream.cython_ext.includes.linux cimport EFD_CLOEXEC, EFD_NONBLOCK, close, eventfd, poll, read
from flexstream.cython_ext.includes.native cimport FS_SPAN_LIMIT, FS_TIME_LIMIT, fs_pause
from flexstream.cython_ext.memory.arena cimport (
    ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus, arena_alloc, arena_destroy, arena_init, arena_release,
    arena_serve,
)
from flexstream.cython_ext.memory.blocks cimport (
    Block, Output, block_rows, output_block, output_destroy, output_init, output_return, output_serve,
)
from flexstream.cython_ext.memory.ring cimport (
    Message, Ring, ring_empty, ring_free, ring_free_slots, ring_init, ring_pop, ring_push,
)
from flexstream.cython_ext.operators.merging cimport table_merge
from flexstream.cython_ext.operators.graph cimport Operator
from flexstream.cython_ext.operators.pane cimport Pane
from flexstream.cython_ext.operators.queries cimport QueryState
from flexstream.cython_ext.operators.table cimport (
    MAX_KEY_WORDS, ROWS_MASK, USED_BIT, Layout, Table, home_of, table_find, table_init, table_locate,
)
from flexstream.cython_ext.wire.frame cimport HEADER_BYTES, Header, frame_crc, header_of

TIME_LIMIT = FS_TIME_LIMIT
SPAN_LIMIT = FS_SPAN_LIMIT
STATUS = {ARENA_OK: "ok", ARENA_WAIT: "wait", ARENA_FULL: "full"}


def frame_header(int kind, int group, uint32_t payload_bytes, uint64_t value, uint64_t sequence):
    """The bytes that native code writes as a header."""
    cdef Header header = header_of(<uint8_t> kind, <uint16_t> group, payload_bytes, value, sequence)
    return (<char *> &header)[:HEADER_BYTES]


def crc_of_frame(const unsigned char[::1] frame not None):
    return frame_crc(&frame[0], <size_t> frame.shape[0])


cdef uint64_t wakes_of(int fd) noexcept:
    """How often the eventfd was written since it was last asked."""
    cdef uint64_t count = 0
    if read(fd, &count, 8) < 0:
        return 0
    return count


cdef class ProbeRing:
    cdef Ring ring

    def __cinit__(self, uint64_t capacity):
        if not ring_init(&self.ring, capacity):
            raise MemoryError("no memory for a ring")

    def __dealloc__(self):
        ring_free(&self.ring)

    def push(self, uint64_t value):
        """False: full."""
        cdef Message message
        memset(&message, 0, sizeof(message))
        message.n = value
        message.spare = ~value
        return bool(ring_push(&self.ring, &message))

    def pop(self):
        """None: empty."""
        cdef Message message
        if not ring_pop(&self.ring, &message):
            return None
        if message.spare != ~message.n:
            raise AssertionError(f"a torn message: {message.n} and {message.spare}")
        return message.n

    def start_at(self, uint64_t position):
        """As if so many messages had gone through."""
        self.ring.head = position
        self.ring.tail = position

    @property
    def free_slots(self):
        return ring_free_slots(&self.ring)

    @property
    def empty(self):
        return bool(ring_empty(&self.ring))

    def push_many(self, uint64_t n):
        """0 to n-1, from one thread, without the GIL."""
        cdef Message message
        cdef uint64_t value = 0
        memset(&message, 0, sizeof(message))
        with nogil:
            while value < n:
                message.n = value
                message.spare = ~value
                if ring_push(&self.ring, &message):
                    value += 1
                else:
                    poll(NULL, 0, 0)

    def pop_many(self, uint64_t n):
        """How many of n messages came torn or out of order; from another thread, without the GIL."""
        cdef Message message
        cdef uint64_t value = 0
        cdef uint64_t wrong = 0
        with nogil:
            while value < n:
                if ring_pop(&self.ring, &message):
                    wrong += message.n != value or message.spare != ~value
                    value += 1
                else:
                    fs_pause()
                    poll(NULL, 0, 0)
        return wrong


cdef class ProbeArena:
    """An arena whose allocator thread is the test: nothing is mapped before `serve`."""

    cdef Arena arena
    cdef int wake_fd

    def __cinit__(self, uint64_t chunk_bytes, uint64_t cap):
        self.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if not arena_init(&self.arena, chunk_bytes, cap, self.wake_fd):
            raise MemoryError("the first chunk does not fit the cap")

    def __dealloc__(self):
        arena_destroy(&self.arena)
        close(self.wake_fd)

    def alloc(self, uint64_t n):
        """("ok", address), ("wait", 0) or ("full", 0)."""
        cdef void *memory = NULL
        cdef ArenaStatus status = arena_alloc(&self.arena, n, &memory)
        return STATUS[status], <size_t> memory

    def release(self, size_t address, uint64_t n):
        arena_release(&self.arena, <void *> address, n)

    def serve(self):
        arena_serve(&self.arena)

    def fill(self, size_t address, uint64_t n, int value):
        memset(<void *> address, value, n)

    def holds(self, size_t address, uint64_t n, int value):
        cdef uint64_t i
        for i in range(n):
            if (<unsigned char *> address)[i] != value:
                return False
        return True

    @property
    def in_use(self):
        return self.arena.in_use

    @property
    def mapped(self):
        return self.arena.mapped

    @property
    def requested(self):
        return self.arena.requested

    def wakes(self):
        return wakes_of(self.wake_fd)


cdef count_probes(dict seen, const Table *table, const Layout *layout):
    """Slots between the entries and where their probes begin."""
    cdef uint64_t at, far
    cdef const uint64_t *entry
    for at in range(table.capacity):
        entry = <const uint64_t *> (table.entries + at * layout.stride)
        if entry[0] & ROWS_MASK:
            far = (at - home_of(table, <const int64_t *> (entry + 1), layout.key_words)) & (table.capacity - 1)
            seen["keys"] += 1
            seen["steps"] += far
            seen["longest"] = max(seen["longest"], far)
            seen["too_far"] += far > table.reach


cdef class ProbeTable:
    """A table of keys of some words, with one slot that tells keys apart, in an arena of its own."""

    cdef ProbeArena memory
    cdef Layout layout
    cdef Table table

    def __cinit__(self, int words, int capacity=16, uint64_t cap=1 << 30):
        self.memory = ProbeArena(1 << 20, cap)
        memset(&self.layout, 0, sizeof(Layout))
        self.layout.key_words = words
        self.layout.key_bytes = 8 * words
        self.layout.stride = 8 * (2 + words)
        self.layout.empty[0] = USED_BIT
        while table_init(&self.table, &self.layout, capacity, &self.memory.arena) != ARENA_OK:
            self.memory.serve()

    def add(self, key, mark=0):
        """One more row for the key. False: there is no memory for it."""
        cdef int64_t words[MAX_KEY_WORDS]
        cdef unsigned char *entry = NULL
        cdef ArenaStatus status = ARENA_WAIT
        for i, word in enumerate(key):
            words[<int> i] = <int64_t> <uint64_t> (word & ((1 << 64) - 1))
        while True:
            status = table_locate(&self.table, &self.layout, words, NULL, 1, &entry, &self.memory.arena)
            if status != ARENA_WAIT:
                break
            self.memory.serve()
        if entry == NULL:
            return False
        (<uint64_t *> entry)[0] += 1
        (<uint64_t *> entry)[1 + self.layout.key_words] = mark
        return True

    def rows(self, key):
        """(rows, mark) of the key; None: it is not there."""
        cdef int64_t words[MAX_KEY_WORDS]
        cdef uint64_t *entry
        for i, word in enumerate(key):
            words[<int> i] = <int64_t> <uint64_t> (word & ((1 << 64) - 1))
        entry = <uint64_t *> table_find(&self.table, &self.layout, words)
        return None if entry == NULL else (entry[0] & ROWS_MASK, entry[1 + self.layout.key_words])

    def merge(self, ProbeTable other):
        cdef uint64_t cursor = 0
        cdef uint32_t budget
        cdef int problem = 0
        while cursor < other.table.capacity:
            budget = 4096
            if table_merge(&self.table, &self.layout, &other.table, &cursor, &budget, &self.memory.arena,
                           &problem) == ARENA_WAIT:
                self.memory.serve()

    def probes(self):
        seen = {"keys": 0, "steps": 0, "longest": 0, "too_far": 0}
        count_probes(seen, &self.table, &self.layout)
        return seen

    @property
    def multiplier(self):
        return self.table.multiplier

    @property
    def capacity(self):
        return self.table.capacity


def parts_of(QueryState state):
    """The most parts that a pane of the query has on one worker. Only while that worker has nothing to do."""
    cdef Operator *op = state.op
    cdef uint32_t g, i
    cdef Pane *part
    most = 0
    for g in range(op.groups):
        for i in range(op.sets[g].n):
            n = 0
            part = op.sets[g].panes[i]
            while part != NULL:
                n += 1
                part = part.also
            most = max(most, n)
    return most


def is_folding(QueryState state):
    """Whether the worker has parts of the query to fold. At any time."""
    return bool(state.op.unfolded)


def probes_of(QueryState state):
    """Of all tables of a query on one worker. Only while that worker has nothing to do."""
    cdef Operator *op = state.op
    cdef uint32_t g, i, d
    cdef Pane *part
    seen = {"keys": 0, "steps": 0, "longest": 0, "too_far": 0}
    for g in range(op.groups):
        for i in range(op.sets[g].n):
            part = op.sets[g].panes[i]
            while part != NULL:
                count_probes(seen, &part.table, &op.layout)
                for d in range(op.n_sides):
                    count_probes(seen, &part.sides[d], &op.sides[d].layout)
                part = part.also
    return seen


cdef class ProbeOutput:
    """An output pool; the test is the worker, the reader and the allocator."""

    cdef Output output
    cdef int wake_fd

    def __cinit__(self, int row_bytes, int rows, int chunk_blocks, int max_chunks):
        self.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if not output_init(&self.output, row_bytes, rows, chunk_blocks, max_chunks, self.wake_fd):
            raise MemoryError("no memory for the first chunks")

    def __dealloc__(self):
        output_destroy(&self.output)
        close(self.wake_fd)

    def open(self):
        """The worker's open block, as an address; None: the reader is behind."""
        cdef Block *block = output_block(&self.output)
        return None if block == NULL else <size_t> block

    def put(self, int value):
        """One row into the open block; True: that was the last that fits."""
        cdef Block *block = self.output.open
        memset(block_rows(block) + <size_t> block.rows * block.row_bytes, value, block.row_bytes)
        block.rows += 1
        return block.rows == block.capacity

    def hand_over(self):
        """The open block goes to the reader."""
        cdef Block *block = self.output.open
        self.output.open = NULL
        return <size_t> block

    def rows(self, size_t address):
        cdef Block *block = <Block *> address
        return (<char *> block_rows(block))[:<size_t> block.rows * block.row_bytes]

    def give_back(self, size_t address):
        output_return(<Block *> address)

    def serve(self):
        output_serve(&self.output)

    @property
    def chunks_made(self):
        return self.output.chunks_made

    @property
    def requested(self):
        return bool(self.output.requested)

    def wakes(self):
        return wakes_of(self.wake_fd)

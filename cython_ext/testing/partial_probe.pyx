"""For tests only: the serial form of a query's panes, in an arena of the test's own.

A group's panes go out as records and come in again as if another worker had sent them: the arena is that worker's, so it
must live as long as the engine does. Only while the query's worker has nothing to do.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from flexstream.cython_ext.includes.linux cimport EFD_CLOEXEC, EFD_NONBLOCK, close, eventfd
from flexstream.cython_ext.memory.arena cimport Arena, arena_destroy, arena_init, arena_serve
from flexstream.cython_ext.operators.dense_pane cimport dense_settle
from flexstream.cython_ext.operators.folding cimport fold_slice
from flexstream.cython_ext.operators.graph cimport Context, Operator
from flexstream.cython_ext.operators.pane cimport PHASE_NONE, Pane, PaneSet
from flexstream.cython_ext.operators.panes cimport drop_panes, mark_dirty, pane_bytes, panes_absorb
from flexstream.cython_ext.operators.pane_image cimport form_pane_bytes, pane_decode, pane_discard, pane_encode
from flexstream.cython_ext.operators.partial_form cimport (
    PARTIAL_COUNTS, PARTIAL_DAMAGED, PARTIAL_ENTRIES, PARTIAL_FOREIGN, PARTIAL_FULL, PARTIAL_LAYOUT, PARTIAL_LENGTHS,
    PARTIAL_NO_VALUE, PARTIAL_OK, PARTIAL_ORPHAN, PARTIAL_PANE, PARTIAL_ROOM, PARTIAL_TRUNCATED, PARTIAL_UNALIGNED,
    PARTIAL_VERSION, PARTIAL_WAIT, Form, PartialStatus, form_of, position_decode, position_encode,
)
from flexstream.cython_ext.operators.table cimport DIRTY_BIT, ROWS_MASK
from flexstream.cython_ext.operators.queries cimport QueryState
from flexstream.cython_ext.operators.rolling cimport rolling_release

STATUS = {
    PARTIAL_OK: "ok", PARTIAL_ROOM: "room", PARTIAL_UNALIGNED: "unaligned", PARTIAL_NO_VALUE: "no_value",
    PARTIAL_TRUNCATED: "truncated", PARTIAL_FOREIGN: "foreign", PARTIAL_VERSION: "version", PARTIAL_DAMAGED: "damaged",
    PARTIAL_LAYOUT: "layout", PARTIAL_LENGTHS: "lengths", PARTIAL_ENTRIES: "entries", PARTIAL_COUNTS: "counts",
    PARTIAL_ORPHAN: "orphan", PARTIAL_PANE: "pane", PARTIAL_WAIT: "wait", PARTIAL_FULL: "full",
}


cdef class Records:
    """A buffer of exactly so many bytes, so that a sanitizer sees what is read or written past them."""

    cdef unsigned char *memory
    cdef uint64_t n

    def __cinit__(self, uint64_t n, data=None):
        self.memory = <unsigned char *> malloc(n if n else 1)
        if self.memory == NULL:
            raise MemoryError("no memory for a record")
        self.n = n
        if data is not None:
            memcpy(self.memory, <const char *> data, n)

    def __dealloc__(self):
        free(self.memory)


cdef class PartialProbe:
    cdef Arena arena
    cdef Context context
    cdef int wake_fd

    def __cinit__(self, uint64_t cap=1 << 30):
        self.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if not arena_init(&self.arena, 1 << 16, cap, self.wake_fd):
            raise MemoryError("the first chunk does not fit the cap")
        memset(&self.context, 0, sizeof(Context))
        self.context.arena = &self.arena

    def __dealloc__(self):
        arena_destroy(&self.arena)
        close(self.wake_fd)

    cdef Form form(self, QueryState state) except *:
        cdef Form form
        cdef Operator *op = state.op
        form_of(&form, &op.layout, op.sides, op.n_sides, &op.windower)
        if form_pane_bytes(&form) != pane_bytes(op):
            raise AssertionError("panes that are decoded are not as large as others")
        return form

    cdef bytes encode(self, QueryState state, const Pane *pane):
        cdef Form form = self.form(state)
        cdef uint64_t size = 0
        cdef PartialStatus status = pane_encode(&form, pane, NULL, 0, &size)
        cdef Records records = Records(size)
        with nogil:
            status = pane_encode(&form, pane, records.memory, records.n, &size)
        if status != PARTIAL_OK or size > records.n:
            raise AssertionError(f"{STATUS[status]}: {size} of {records.n} bytes")
        return (<char *> records.memory)[:size]

    cdef PartialStatus decode(self, QueryState state, data, Pane **pane) except *:
        cdef Form form = self.form(state)
        cdef Records records = Records(len(data), data)
        cdef PartialStatus status = PARTIAL_WAIT
        cdef uint64_t size = 0
        while status == PARTIAL_WAIT:
            arena_serve(&self.arena)
            with nogil:
                status = pane_decode(&form, records.memory, records.n, &self.arena, pane, &size)
        if status == PARTIAL_OK and size > records.n:
            raise AssertionError(f"a record of {records.n} bytes has {size}")
        return status

    def images(self, QueryState state, uint32_t group):
        """Of all panes of the group, by start."""
        cdef PaneSet *panes = &state.op.sets[group]
        cdef uint32_t i
        if panes.phase != PHASE_NONE:
            raise AssertionError("the group is firing")
        return [self.encode(state, panes.panes[i]) for i in range(panes.n)]

    def position(self, QueryState state, uint32_t group):
        cdef Form form = self.form(state)
        cdef uint64_t size = 0
        cdef Records records
        position_encode(&form, &state.op.sets[group], NULL, 0, &size)
        records = Records(size)
        if position_encode(&form, &state.op.sets[group], records.memory, records.n, &size) != PARTIAL_OK:
            raise AssertionError("a position that does not fit where it said that it would")
        return (<char *> records.memory)[:size]

    def shape(self, QueryState state, uint32_t group):
        """(panes, most parts of one, dense fronts, dirty panes) of the group."""
        cdef PaneSet *panes = &state.op.sets[group]
        cdef Pane *part
        cdef uint32_t i
        most = fronts = dirty = 0
        for i in range(panes.n):
            parts, part = 0, panes.panes[i]
            dirty += part.dirty
            while part != NULL:
                parts += 1
                fronts += part.front != NULL and part.table.reserved != 0
                part = part.also
            most = max(most, parts)
        return panes.n, most, fronts, dirty

    def room_needed(self, QueryState state, uint32_t group, uint64_t room):
        """What the first pane says to a buffer of so many bytes: (status, size)."""
        cdef Form form = self.form(state)
        cdef Records records = Records(room)
        cdef uint64_t size = 0
        cdef PartialStatus status = pane_encode(&form, state.op.sets[group].panes[0], records.memory, room, &size)
        return STATUS[status], size

    def read(self, QueryState state, data):
        """What is said to a record, which is decoded and let go."""
        cdef Form form = self.form(state)
        cdef Pane *pane = NULL
        cdef PartialStatus status = self.decode(state, data, &pane)
        if (status == PARTIAL_OK) != (pane != NULL):
            raise AssertionError(f"{STATUS[status]}, and there is {'a' if pane != NULL else 'no'} pane")
        if pane != NULL:
            pane_discard(&form, &self.arena, pane)
        return STATUS[status]

    def read_unaligned(self, QueryState state, data):
        cdef Form form = self.form(state)
        cdef Records records = Records(len(data) + 1)
        cdef Pane *pane = NULL
        cdef uint64_t size = 0
        memcpy(records.memory + 1, <const char *> data, len(data))
        return STATUS[pane_decode(&form, records.memory + 1, len(data), &self.arena, &pane, &size)]

    def again(self, QueryState state, data):
        """A record, decoded and encoded."""
        cdef Form form = self.form(state)
        cdef Pane *pane = NULL
        cdef PartialStatus status = self.decode(state, data, &pane)
        if status != PARTIAL_OK:
            raise AssertionError(STATUS[status])
        made = self.encode(state, pane)
        pane_discard(&form, &self.arena, pane)
        return made

    def read_position(self, QueryState state, uint32_t group, data):
        """What is said to the record of a position, for a copy of the group's panes."""
        cdef Form form = self.form(state)
        cdef Records records = Records(len(data), data)
        cdef PaneSet panes = state.op.sets[group]
        cdef uint64_t size = 0
        cdef uint32_t i
        kept = [(<char *> state.op.sets[group].panes[i].fired)[:4 * form.n_fired] for i in range(panes.n)]
        status = STATUS[position_decode(&form, records.memory, records.n, &panes, &size)]
        for i in range(panes.n):
            memcpy(panes.panes[i].fired, <const char *> kept[i], 4 * form.n_fired)
        return status

    def take_out(self, QueryState state, uint32_t group):
        """(images, position): the group's panes are gone."""
        cdef Operator *op = state.op
        cdef PaneSet *panes = &op.sets[group]
        taken = self.images(state, group), self.position(state, group)
        rolling_release(op, &self.arena, panes)
        drop_panes(op, &self.arena, panes, panes.n)
        panes.dirty = False
        return taken

    def put_in(self, QueryState state, uint32_t group, taken):
        """The panes are parts of those that came meanwhile, or the other way round: they come from who has fired them."""
        cdef Operator *op = state.op
        cdef PaneSet *panes = &op.sets[group]
        cdef Form form = self.form(state)
        cdef PaneSet others
        cdef uint64_t size = 0
        cdef Records records
        images, position = taken
        memset(&others, 0, sizeof(PaneSet))
        others.panes = <Pane **> calloc(len(images) + 1, sizeof(Pane *))
        if others.panes == NULL:
            raise MemoryError("no memory for a list of panes")
        for image in images:
            status = STATUS[self.decode(state, image, &others.panes[others.n])]
            if status != "ok":
                raise AssertionError(status)
            others.n += 1
        records = Records(len(position), position)
        status = STATUS[position_decode(&form, records.memory, records.n, &others, &size)]
        if status != "ok":
            raise AssertionError(status)
        if (others.watermark, others.late_before, others.fired_until, others.restored_until) != (
                panes.watermark, panes.late_before, panes.fired_until, panes.restored_until):
            raise AssertionError("the position is not that of the group")
        panes.usual_keys = others.usual_keys
        op.unfolded = False      # the worker was not told to fold: that would not end
        memory = <size_t> others.panes
        while not panes_absorb(op, &self.context, panes, &others, True):
            arena_serve(&self.arena)
        free(<void *> <size_t> memory)

    def drop_fronts(self, QueryState state, uint32_t group):
        """What dense fronts have goes to the tables."""
        cdef PaneSet *panes = &state.op.sets[group]
        cdef uint32_t i
        for i in range(panes.n):
            dense_settle(state.op, &self.arena, panes.panes[i])

    def dirty_all(self, QueryState state, uint32_t group):
        """As if every entry had got a late row."""
        cdef PaneSet *panes = &state.op.sets[group]
        cdef uint64_t *entry
        cdef uint32_t i
        cdef uint64_t k
        for i in range(panes.n):
            for k in range(panes.panes[i].table.capacity):
                entry = <uint64_t *> (panes.panes[i].table.entries + k * state.op.layout.stride)
                if entry[0] & ROWS_MASK:
                    entry[0] |= DIRTY_BIT
            mark_dirty(panes, panes.panes[i])

    def fold_once(self, QueryState state):
        """One slice of folding parts. False: there is nothing to fold."""
        state.op.unfolded = True
        return bool(fold_slice(state.op, &self.arena))

    @property
    def in_use(self):
        return self.arena.in_use

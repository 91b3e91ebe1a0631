"""See dense_pane.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.memory.arena cimport ARENA_OK, Arena, arena_alloc, arena_release
from flexstream.cython_ext.operators.dense_front cimport Dense, DenseArray, DensePlan, Front
from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_store_relaxed
from flexstream.cython_ext.operators.graph cimport Context, Operator
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.operators.table cimport MAX_ENTRY_WORDS, ROWS_MASK, Layout, entry_merge, table_add

cdef enum:
    MAX_ARRAYS = 8            # panes that fill at the same time; more than these use their tables
    LEAST_TOUCHED = 64


cdef inline uint32_t dense_words(const Layout *layout) noexcept nogil:
    return layout.stride // 8 - layout.key_words


cdef void free_array(Operator *op, Arena *arena, DenseArray *array) noexcept nogil:
    arena_release(arena, array.entries, array.bytes)
    arena_release(arena, array, sizeof(DenseArray))
    op.dense.n_arrays -= 1


cdef DenseArray *spare_array(Operator *op, Arena *arena, const DensePlan *plan) noexcept nogil:
    """One that nobody uses and that has the plan's size; others are freed. NULL: none."""
    cdef DenseArray *array
    while op.dense.spare != NULL:
        array = op.dense.spare
        op.dense.spare = array.next
        if array.range == plan.range:
            return array
        free_array(op, arena, array)
    return NULL


cdef DenseArray *new_array(Operator *op, Arena *arena, const DensePlan *plan) noexcept nogil:
    cdef DenseArray *array
    cdef void *memory
    cdef void *entries
    cdef uint64_t n = plan.range * dense_words(&op.layout) * 8
    if op.dense.n_arrays == MAX_ARRAYS or arena_alloc(arena, sizeof(DenseArray), &memory) != ARENA_OK:
        return NULL
    if arena_alloc(arena, n, &entries) != ARENA_OK:
        arena_release(arena, memory, sizeof(DenseArray))
        return NULL
    memset(entries, 0, n)
    array = <DenseArray *> memory
    array.entries = <uint64_t *> entries
    array.bytes = n
    array.range = plan.range
    op.dense.n_arrays += 1
    return array


cdef DenseArray *array_for(Operator *op, Arena *arena, const DensePlan *plan, int64_t start) noexcept nogil:
    cdef DenseArray *array = op.dense.arrays
    while array != NULL:
        if array.start == start and array.base == plan.base and array.range == plan.range:
            return array
        array = array.next
    array = spare_array(op, arena, plan)
    if array == NULL:
        array = new_array(op, arena, plan)
    if array != NULL:
        array.base = plan.base
        array.start = start
        array.users = 0
        array.next = op.dense.arrays
        op.dense.arrays = array
    return array


cdef void leave_array(Operator *op, DenseArray *array) noexcept nogil:
    cdef DenseArray **at = &op.dense.arrays
    array.users -= 1
    if array.users:
        return
    while at[0] != array:
        at = &at[0].next
    at[0] = array.next
    array.next = op.dense.spare
    op.dense.spare = array


cdef void grow_touched(Pane *pane, Arena *arena) noexcept nogil:
    """As long as the table may hold keys; when there is no memory, new keys go to the table."""
    cdef uint32_t capacity = pane.table.capacity // 2
    cdef void *memory
    if arena_alloc(arena, <uint64_t> capacity * 4, &memory) != ARENA_OK:
        return
    memcpy(memory, pane.front.touched, <uint64_t> pane.table.reserved * 4)
    arena_release(arena, pane.front.touched, <uint64_t> pane.front.capacity * 4)
    pane.front.touched = <uint32_t *> memory
    pane.front.capacity = capacity


cdef Front *dense_front(Operator *op, Context *context, Pane *pane) noexcept nogil:
    """The pane's front, made when the plan wants one and there is memory. NULL: none."""
    cdef const DensePlan *plan
    cdef Front *front = pane.front
    cdef DenseArray *array
    cdef void *memory
    cdef void *touched
    if front != NULL:
        if pane.table.reserved == front.capacity and pane.table.capacity // 2 > front.capacity:
            grow_touched(pane, context.arena)
        return front
    plan = <const DensePlan *> fs_load_acquire(&op.dense.plan)
    if plan == NULL:
        return NULL
    array = array_for(op, context.arena, plan, pane.start)
    if array == NULL:
        return NULL
    array.users += 1
    if arena_alloc(context.arena, sizeof(Front), &memory) == ARENA_OK:
        front = <Front *> memory
        front.array = array
        front.capacity = pane.table.capacity // 2
        if front.capacity < LEAST_TOUCHED:
            front.capacity = LEAST_TOUCHED
        if arena_alloc(context.arena, <uint64_t> front.capacity * 4, &touched) == ARENA_OK:
            front.touched = <uint32_t *> touched
            pane.front = front
            return front
        arena_release(context.arena, memory, sizeof(Front))
    leave_array(op, array)
    return NULL


cdef void move_entry(Operator *op, Pane *pane, int64_t key, const uint64_t *source) noexcept nogil:
    cdef uint64_t moved[MAX_ENTRY_WORDS]
    cdef uint64_t *into = <uint64_t *> table_add(&pane.table, &op.layout, &key)
    cdef size_t slots = op.layout.stride - 16
    if into[0] & ROWS_MASK:
        moved[0] = source[0]
        moved[1] = <uint64_t> key
        memcpy(moved + 2, source + 1, slots)
        if entry_merge(&op.layout, <unsigned char *> into, <unsigned char *> moved):
            fs_store_relaxed(&op.failed, 1)
    else:
        into[0] += source[0] & ROWS_MASK
        memcpy(into + 2, source + 1, slots)


cdef void dense_settle(Operator *op, Arena *arena, Pane *pane) noexcept nogil:
    """What the pane has in its dense array goes to its table, where there is room for it."""
    cdef Front *front = pane.front
    cdef uint32_t n = pane.table.reserved
    cdef uint32_t words = dense_words(&op.layout)
    cdef uint32_t width = op.layout.key_bytes * 8
    cdef uint64_t mask = ~<uint64_t> 0 if width == 64 else (<uint64_t> 1 << width) - 1
    cdef uint64_t *source
    cdef uint32_t i
    if front == NULL:
        return
    pane.table.reserved = 0
    for i in range(n):
        source = front.array.entries + <uint64_t> front.touched[i] * words
        if source[0] & ROWS_MASK:
            move_entry(op, pane, <int64_t> ((front.array.base + front.touched[i]) & mask), source)
        memset(source, 0, words * 8)
    leave_array(op, front.array)
    arena_release(arena, front.touched, <uint64_t> front.capacity * 4)
    arena_release(arena, front, sizeof(Front))
    pane.front = NULL


cdef bint dense_settle_all(Operator *op, Arena *arena, PaneSet *panes) noexcept nogil:
    """True: some pane had a front."""
    cdef uint32_t i
    cdef bint any_ = False
    for i in range(panes.n):
        any_ = any_ or panes.panes[i].front != NULL
        dense_settle(op, arena, panes.panes[i])
    return any_


cdef void dense_release(Operator *op, Arena *arena) noexcept nogil:
    """All arrays back to the arena, when no pane uses one any more."""
    cdef DensePlan none
    none.base = 0
    none.range = 0
    spare_array(op, arena, &none)

"""See dense_pane.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.memory.arena cimport ARENA_OK, Arena, arena_alloc, arena_release
from flexstream.cython_ext.operators.dense_front cimport Dense, DenseArray, DensePlan, Front
from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_store_relaxed
from flexstream.cython_ext.operators.panes cimport Context, Pane, PaneSet, Query
from flexstream.cython_ext.operators.table cimport MAX_ENTRY_WORDS, ROWS_MASK, Layout, entry_merge, table_add

cdef enum:
    MAX_ARRAYS = 8            # panes that fill at the same time; more than these use their tables
    LEAST_TOUCHED = 64


cdef inline uint32_t dense_words(const Layout *layout) noexcept nogil:
    return layout.stride // 8 - layout.key_words


cdef void free_array(Query *query, Arena *arena, DenseArray *array) noexcept nogil:
    arena_release(arena, array.entries, array.bytes)
    arena_release(arena, array, sizeof(DenseArray))
    query.dense.n_arrays -= 1


cdef DenseArray *spare_array(Query *query, Arena *arena, const DensePlan *plan) noexcept nogil:
    """One that nobody uses and that has the plan's size; others are freed. NULL: none."""
    cdef DenseArray *array
    while query.dense.spare != NULL:
        array = query.dense.spare
        query.dense.spare = array.next
        if array.range == plan.range:
            return array
        free_array(query, arena, array)
    return NULL


cdef DenseArray *new_array(Query *query, Arena *arena, const DensePlan *plan) noexcept nogil:
    cdef DenseArray *array
    cdef void *memory
    cdef void *entries
    cdef uint64_t n = plan.range * dense_words(&query.layout) * 8
    if query.dense.n_arrays == MAX_ARRAYS or arena_alloc(arena, sizeof(DenseArray), &memory) != ARENA_OK:
        return NULL
    if arena_alloc(arena, n, &entries) != ARENA_OK:
        arena_release(arena, memory, sizeof(DenseArray))
        return NULL
    memset(entries, 0, n)
    array = <DenseArray *> memory
    array.entries = <uint64_t *> entries
    array.bytes = n
    array.range = plan.range
    query.dense.n_arrays += 1
    return array


cdef DenseArray *array_for(Query *query, Arena *arena, const DensePlan *plan, int64_t start) noexcept nogil:
    cdef DenseArray *array = query.dense.arrays
    while array != NULL:
        if array.start == start and array.base == plan.base and array.range == plan.range:
            return array
        array = array.next
    array = spare_array(query, arena, plan)
    if array == NULL:
        array = new_array(query, arena, plan)
    if array != NULL:
        array.base = plan.base
        array.start = start
        array.users = 0
        array.next = query.dense.arrays
        query.dense.arrays = array
    return array


cdef void leave_array(Query *query, DenseArray *array) noexcept nogil:
    cdef DenseArray **at = &query.dense.arrays
    array.users -= 1
    if array.users:
        return
    while at[0] != array:
        at = &at[0].next
    at[0] = array.next
    array.next = query.dense.spare
    query.dense.spare = array


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


cdef Front *dense_front(Query *query, Context *context, Pane *pane) noexcept nogil:
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
    plan = <const DensePlan *> fs_load_acquire(&query.dense.plan)
    if plan == NULL:
        return NULL
    array = array_for(query, context.arena, plan, pane.start)
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
    leave_array(query, array)
    return NULL


cdef void move_entry(Query *query, Pane *pane, int64_t key, const uint64_t *source) noexcept nogil:
    cdef uint64_t moved[MAX_ENTRY_WORDS]
    cdef uint64_t *into = <uint64_t *> table_add(&pane.table, &query.layout, &key)
    cdef size_t slots = query.layout.stride - 16
    if into[0] & ROWS_MASK:
        moved[0] = source[0]
        moved[1] = <uint64_t> key
        memcpy(moved + 2, source + 1, slots)
        if entry_merge(&query.layout, <unsigned char *> into, <unsigned char *> moved):
            fs_store_relaxed(&query.failed, 1)
    else:
        into[0] += source[0] & ROWS_MASK
        memcpy(into + 2, source + 1, slots)


cdef void dense_settle(Query *query, Arena *arena, Pane *pane) noexcept nogil:
    """What the pane has in its dense array goes to its table, where there is room for it."""
    cdef Front *front = pane.front
    cdef uint32_t n = pane.table.reserved
    cdef uint32_t words = dense_words(&query.layout)
    cdef uint32_t width = query.layout.key_bytes * 8
    cdef uint64_t mask = ~<uint64_t> 0 if width == 64 else (<uint64_t> 1 << width) - 1
    cdef uint64_t *source
    cdef uint32_t i
    if front == NULL:
        return
    pane.table.reserved = 0
    for i in range(n):
        source = front.array.entries + <uint64_t> front.touched[i] * words
        if source[0] & ROWS_MASK:
            move_entry(query, pane, <int64_t> ((front.array.base + front.touched[i]) & mask), source)
        memset(source, 0, words * 8)
    leave_array(query, front.array)
    arena_release(arena, front.touched, <uint64_t> front.capacity * 4)
    arena_release(arena, front, sizeof(Front))
    pane.front = NULL


cdef bint dense_settle_all(Query *query, Arena *arena, PaneSet *panes) noexcept nogil:
    """True: some pane had a front."""
    cdef uint32_t i
    cdef bint any_ = False
    for i in range(panes.n):
        any_ = any_ or panes.panes[i].front != NULL
        dense_settle(query, arena, panes.panes[i])
    return any_


cdef void dense_release(Query *query, Arena *arena) noexcept nogil:
    """All arrays back to the arena, when no pane uses one any more."""
    cdef DensePlan none
    none.base = 0
    none.range = 0
    spare_array(query, arena, &none)

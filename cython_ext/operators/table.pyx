"""See table.pxd."""

import os

from libc.math cimport NAN, isnan
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.includes.native cimport fs_i64
from flexstream.cython_ext.memory.arena cimport (
    ARENA_FULL, ARENA_OK, ARENA_WAIT, Arena, ArenaStatus, arena_alloc, arena_release,
)

cdef extern from "flexstream_abi.h" nogil:
    const uint64_t FS_GOLDEN
    const uint64_t FS_USED
    const uint64_t FS_ROWS
    uint64_t fs_hash_value(uint64_t bits) noexcept

cdef extern from "fold_calls.h" nogil:
    const uint64_t FS_NULL_BITS
    int fs_fold_column(uint32_t fold, uint32_t at, const int64_t *values, const int64_t *by, uint32_t m,
                       unsigned char **entry, const int64_t *time, const uint32_t *selected, uint64_t session, uint64_t sequence) noexcept
    int fs_fold_merge(uint32_t fold, uint64_t *slot, const uint64_t *source) noexcept
    uint64_t fs_fold_finish(uint32_t fold, const uint64_t *slot, uint64_t rows) noexcept

cdef enum:
    MAX_CAPACITY = 1 << 30
    REACH_PER_BIT = 6         # of the capacity; at half load a random set of keys stays below 4
    DRAWS = 8                 # one in three puts keys at equal distances in heaps

USED_BIT = FS_USED
DIRTY_BIT = <uint64_t> 1 << 62
ROWS_MASK = FS_ROWS

cdef uint64_t STALE_BIT = <uint64_t> 1 << 61      # within table_rehash only: not moved yet

cdef uint64_t SECRET = <uint64_t> int.from_bytes(os.urandom(8), "little")


cdef void pack_keys(const Layout *layout, const unsigned char *rows, uint32_t row_bytes, const uint32_t *selected,
                    uint32_t m, int64_t *keys) noexcept nogil:
    cdef size_t stride = row_bytes
    cdef size_t words = layout.key_words
    cdef uint32_t i, f
    cdef const unsigned char *base
    cdef const KeyField *field
    cdef unsigned char *at
    cdef float single
    cdef double real
    if layout.simple_key:
        base = rows + layout.key[0].offset
        for i in range(m):
            keys[i] = fs_i64(base + selected[i] * stride)
        return
    memset(keys, 0, m * words * 8)
    for f in range(layout.n_key_fields):
        field = &layout.key[f]
        base = rows + field.offset
        at = <unsigned char *> keys + field.at
        if field.form == KEY_RAW:
            for i in range(m):
                memcpy(at + i * words * 8, base + selected[i] * stride, field.size)
        elif field.form == KEY_BOOL:
            for i in range(m):
                (at + i * words * 8)[0] = (base + selected[i] * stride)[0] != 0
        elif field.form == KEY_F32:
            for i in range(m):
                memcpy(&single, base + selected[i] * stride, 4)
                if single == 0:
                    single = 0
                elif isnan(single):
                    single = NAN
                memcpy(at + i * words * 8, &single, 4)
        else:
            for i in range(m):
                memcpy(&real, base + selected[i] * stride, 8)
                if real == 0:
                    real = 0
                elif isnan(real):
                    real = NAN
                memcpy(at + i * words * 8, &real, 8)


cdef ArenaStatus table_init(Table *table, const Layout *layout, uint32_t capacity, Arena *arena,
                            bint sparse=False) noexcept nogil:
    """On anything but ARENA_OK the table is left as it was."""
    cdef void *memory
    cdef uint64_t n = <uint64_t> capacity * layout.stride
    cdef ArenaStatus status = arena_alloc(arena, n, &memory)
    if status != ARENA_OK:
        return status
    memset(memory, 0, n)
    table.entries = <unsigned char *> memory
    table.bytes = n
    table.capacity = capacity
    table.limit = keys_within(capacity, n, sparse)
    table.shift = 64
    while capacity > 1:
        capacity >>= 1
        table.shift -= 1
    table.used = 0
    table.dirty = 0
    table.reserved = 0
    table.reach = REACH_PER_BIT * (64 - table.shift)
    table.multiplier = FS_GOLDEN
    return ARENA_OK


cdef void table_destroy(Table *table, Arena *arena) noexcept nogil:
    if table.entries != NULL:
        arena_release(arena, table.entries, table.bytes)
    memset(table, 0, sizeof(Table))


cdef void table_clear(Table *table) noexcept nogil:
    memset(table.entries, 0, table.bytes)
    table.used = 0
    table.dirty = 0


cdef inline bint same_key(const int64_t *a, const int64_t *b, uint32_t words) noexcept nogil:
    cdef uint32_t w
    for w in range(words):
        if a[w] != b[w]:
            return False
    return True


cdef void put_back(Table *table, const Layout *layout, uint64_t *lifted) noexcept nogil:
    """An entry to its new place; one that stands there and was not moved yet is lifted for it, and so on."""
    cdef uint64_t at
    cdef uint64_t *entry
    cdef uint32_t w
    while True:
        lifted[0] &= ~STALE_BIT
        at = home_of(table, <const int64_t *> (lifted + 1), layout.key_words)
        entry = <uint64_t *> (table.entries + at * layout.stride)
        while entry[0] != 0 and not entry[0] & STALE_BIT:
            at = (at + 1) & (table.capacity - 1)
            entry = <uint64_t *> (table.entries + at * layout.stride)
        if entry[0] == 0:
            memcpy(entry, lifted, layout.stride)
            return
        for w in range(layout.stride // 8):
            entry[w], lifted[w] = lifted[w], entry[w]


cdef bint is_even(const Table *table, const Layout *layout) noexcept nogil:
    """Whether its keys are about one step from home, or less."""
    cdef uint64_t mask = table.capacity - 1
    cdef uint64_t steps = 0
    cdef uint64_t i
    cdef const uint64_t *entry
    for i in range(table.capacity):
        entry = <const uint64_t *> (table.entries + i * layout.stride)
        if entry[0] != 0:
            steps += (i - home_of(table, <const int64_t *> (entry + 1), layout.key_words)) & mask
    return steps <= table.used


cdef void move_all(Table *table, const Layout *layout) noexcept nogil:
    """All entries to where another multiplier puts them. Needs no memory."""
    cdef uint64_t lifted[MAX_ENTRY_WORDS]
    cdef uint64_t *entry
    cdef uint64_t i
    table.multiplier = fs_hash_value(table.multiplier ^ SECRET ^ <uint64_t> <size_t> table.entries) | 1
    for i in range(table.capacity):
        entry = <uint64_t *> (table.entries + i * layout.stride)
        if entry[0] != 0:
            entry[0] |= STALE_BIT
    for i in range(table.capacity):
        entry = <uint64_t *> (table.entries + i * layout.stride)
        if entry[0] & STALE_BIT:
            memcpy(lifted, entry, layout.stride)
            entry[0] = 0
            put_back(table, layout, lifted)


cdef void table_rehash(Table *table, const Layout *layout) noexcept nogil:
    """A multiplier that suits the keys. They may be further from home than before: a set of keys that none suits is
    not tried for ever."""
    cdef int draw
    table.reach *= 2
    for draw in range(DRAWS):
        move_all(table, layout)
        if is_even(table, layout):
            return


cdef unsigned char *table_add(Table *table, const Layout *layout, const int64_t *key) noexcept nogil:
    """NULL: the key is new and the table is too full for it. Entries may move (`table.multiplier`)."""
    cdef uint32_t words = layout.key_words
    cdef uint64_t mask = table.capacity - 1
    cdef uint64_t at, home
    cdef uint64_t *entry
    while True:
        home = home_of(table, key, words)
        at = home
        entry = <uint64_t *> (table.entries + at * layout.stride)
        while entry[0] != 0:
            if same_key(<int64_t *> (entry + 1), key, words):
                return <unsigned char *> entry
            at = (at + 1) & mask
            entry = <uint64_t *> (table.entries + at * layout.stride)
        if table.used + table.reserved >= table.limit:
            return NULL
        if ((at - home) & mask) <= table.reach:
            break
        table_rehash(table, layout)
    memcpy(entry, layout.empty, layout.stride)
    memcpy(entry + 1, key, words * 8)
    table.used += 1
    return <unsigned char *> entry


cdef unsigned char *table_find(const Table *table, const Layout *layout, const int64_t *key) noexcept nogil:
    """NULL: the key is not there."""
    cdef uint32_t words = layout.key_words
    cdef uint64_t at = home_of(table, key, words)
    cdef unsigned char *entry = table.entries + at * layout.stride
    while (<uint64_t *> entry)[0] != 0:
        if same_key(<int64_t *> (entry + 8), key, words):
            return entry
        at = (at + 1) & (table.capacity - 1)
        entry = table.entries + at * layout.stride
    return NULL


cdef ArenaStatus table_grow_to(Table *table, const Layout *layout, uint32_t capacity, Arena *arena) noexcept nogil:
    cdef Table bigger
    cdef uint64_t i
    cdef unsigned char *source
    cdef unsigned char *target
    cdef ArenaStatus status
    status = table_init(&bigger, layout, capacity, arena, is_sparse(table))
    if status != ARENA_OK:
        return status
    bigger.multiplier = table.multiplier
    for i in range(table.capacity):
        source = table.entries + i * layout.stride
        if (<uint64_t *> source)[0] != 0:
            target = table_add(&bigger, layout, <int64_t *> (source + 8))
            memcpy(target, source, layout.stride)
    if bigger.multiplier != FS_GOLDEN and not is_even(&bigger, layout):
        table_rehash(&bigger, layout)
    bigger.dirty = table.dirty
    bigger.reserved = table.reserved
    table_destroy(table, arena)
    table[0] = bigger
    return ARENA_OK


cdef ArenaStatus table_grow(Table *table, const Layout *layout, Arena *arena) noexcept nogil:
    if table.capacity >= <uint32_t> MAX_CAPACITY:
        return ARENA_FULL
    return table_grow_to(table, layout, table.capacity * 2, arena)


cdef ArenaStatus table_reserve(Table *table, const Layout *layout, uint32_t keys, Arena *arena) noexcept nogil:
    """Room for so many keys at once. On anything but ARENA_OK the table is left as it was."""
    cdef uint32_t capacity = table.capacity
    while keys_within(capacity, <uint64_t> capacity * layout.stride, is_sparse(table)) < keys \
            and capacity < <uint32_t> MAX_CAPACITY:
        capacity *= 2
    if capacity == table.capacity:
        return ARENA_OK
    return table_grow_to(table, layout, capacity, arena)


cdef ArenaStatus table_locate(Table *table, const Layout *layout, const int64_t *keys, const uint32_t *which,
                              uint32_t m, unsigned char **entry, Arena *arena) noexcept nogil:
    """entry[which[i]] for every i < m (which NULL: 0 to m-1), adding keys as needed.

    Has no effect on rows already counted, so it can be called again after ARENA_WAIT. ARENA_FULL: the keys for
    which there was no room have NULL.
    """
    cdef uint32_t i = 0
    cdef uint32_t k
    cdef size_t words = layout.key_words
    cdef bint full = False
    cdef ArenaStatus status
    cdef unsigned char *found
    cdef uint64_t at, mask, key
    cdef uint64_t stride = layout.stride
    cdef uint64_t multiplier = table.multiplier
    cdef uint64_t *probe
    while i < m:
        k = i if which == NULL else which[i]
        if words == 1:          # a known one-word key: the common case, without a call
            key = <uint64_t> keys[k]
            mask = table.capacity - 1
            at = (key * multiplier) >> table.shift
            probe = <uint64_t *> (table.entries + at * stride)
            while probe[0] != 0 and probe[1] != key:
                at = (at + 1) & mask
                probe = <uint64_t *> (table.entries + at * stride)
            if probe[0] != 0:
                entry[k] = <unsigned char *> probe
                i += 1
                continue
        found = table_add(table, layout, keys + k * words)
        if found == NULL and not full:
            status = table_grow(table, layout, arena)
            if status == ARENA_OK:
                multiplier = table.multiplier
                i = 0           # entries moved: what was located so far is located again
                continue
            if status == ARENA_WAIT:
                return ARENA_WAIT
            full = True
            found = table_add(table, layout, keys + k * words)
        if table.multiplier != multiplier:
            multiplier = table.multiplier
            i = 0               # here too
            continue
        entry[k] = found
        i += 1
    return ARENA_FULL if full else ARENA_OK


cdef int table_apply(const Layout *layout, const int64_t *registers, uint32_t batch, uint32_t m,
                     unsigned char **entry, const Origin *origin) noexcept nogil:
    """Count and fold m rows into their entries. Not 0: an aggregate has no value any more."""
    cdef const Aggregate *aggregate
    cdef uint32_t i, a
    cdef int problem = 0
    for i in range(m):
        (<uint64_t *> entry[i])[0] += 1
    for a in range(layout.n_aggregates):
        aggregate = &layout.aggregates[a]
        problem |= fs_fold_column(aggregate.fold, aggregate.slot, registers + aggregate.register_ * batch,
                                  registers + aggregate.by * batch, m, entry, origin.time, origin.selected,
                                  origin.session, origin.sequence)
    return problem


cdef int entry_merge(const Layout *layout, unsigned char *into, const unsigned char *source) noexcept nogil:
    """Another partial of the key. Not 0: an aggregate has no value any more."""
    cdef uint64_t *entry = <uint64_t *> into
    cdef const uint64_t *other = <const uint64_t *> source
    cdef const Aggregate *aggregate
    cdef uint32_t a
    cdef int problem = 0
    entry[0] += other[0] & ROWS_MASK
    entry[0] |= other[0] & DIRTY_BIT
    for a in range(layout.n_aggregates):
        aggregate = &layout.aggregates[a]
        problem |= fs_fold_merge(aggregate.fold, entry + aggregate.slot, other + aggregate.slot)
    return problem


cdef void entry_results(const Layout *layout, const unsigned char *entry, unsigned char *out) noexcept nogil:
    """The aggregates' final values, 8 bytes each, in the query's order."""
    cdef const uint64_t *words = <const uint64_t *> entry
    cdef uint64_t rows = words[0] & ROWS_MASK
    cdef uint64_t value
    cdef uint32_t a
    for a in range(layout.n_aggregates):
        value = fs_fold_finish(layout.aggregates[a].fold, words + layout.aggregates[a].slot, rows)
        memcpy(out, &value, 8)
        out += 8


def null_bits():
    """The bits of the double that stands for null in result rows."""
    return <uint64_t> FS_NULL_BITS


def folds():
    """{name: (number, slots, flags)}: all folds there are."""
    cdef const fs_fold_facts *facts
    cdef uint32_t number
    found = {}
    for number in range(<uint32_t> FS_FOLDS_END):
        facts = fs_facts_of(number)
        if facts != NULL:
            found[facts.name.decode()] = (number, facts.slots, facts.flags)
    return found


def fold_flags():
    """What the bits of a fold's flags mean."""
    return {
        "SIDE": <int> FS_SIDE,
        "ORDERED": <int> FS_ORDERED,
        "INVERTIBLE": <int> FS_INVERTIBLE,
        "ORIGIN": <int> FS_ORIGIN,
        "REAL": <int> FS_REAL,
        "MASKS": <int> FS_MASKS,
        "OVERFLOWS": <int> FS_OVERFLOWS,
        "COUNTED": <int> FS_COUNTED,
        "RANKED": <int> FS_RANKED,
    }

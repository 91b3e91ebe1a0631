"""See pane_image.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.memory.arena cimport ARENA_OK, ARENA_WAIT, Arena, ArenaStatus, arena_alloc, arena_release
from flexstream.cython_ext.operators.dense_front cimport Front
from flexstream.cython_ext.operators.hash_order cimport comes_before, home_hash, sort_entries
from flexstream.cython_ext.operators.pane cimport Pane
from flexstream.cython_ext.operators.partial_form cimport (
    IMAGE, MOST_ENTRIES, PARTIAL_COUNTS, PARTIAL_ENTRIES, PARTIAL_FULL, PARTIAL_LENGTHS, PARTIAL_NO_VALUE, PARTIAL_OK,
    PARTIAL_ORPHAN, PARTIAL_PANE, PARTIAL_ROOM, PARTIAL_UNALIGNED, PARTIAL_WAIT, Form, Head, PartialStatus, is_aligned,
    read_head, write_head,
)
from flexstream.cython_ext.operators.table cimport (
    DIRTY_BIT, FS_ORDERED, FS_RANKED, ROWS_MASK, USED_BIT, Layout, Side, Table, entry_merge, fs_facts_of, keys_within,
    table_add, table_destroy, table_find, table_init,
)
from flexstream.cython_ext.operators.windower cimport is_one_pane, pane_of

cdef extern from "flexstream_abi.h" nogil:
    const uint64_t FS_GOLDEN

cdef enum:
    FIRST_CAPACITY = 16


cdef inline uint64_t rows_of(const uint64_t *entry) noexcept nogil:
    return entry[0] & ROWS_MASK


cdef inline const Layout *layout_of(const Form *form, uint32_t t) noexcept nogil:
    """Of a part's table t: its own is 0, its side tables follow."""
    return form.layout if t == 0 else &form.sides[t - 1].layout


# Words that a firing writes and the next one writes anew: no state, and 0 in an image


cdef uint64_t *scratch_in(const Form *form, uint32_t t, uint32_t d, const unsigned char *entry,
                          uint32_t *n) noexcept nogil:
    """Of an entry of table t: what side table d has there, n words; of a side entry it is the chain."""
    cdef const Side *side = &form.sides[d if t == 0 else t - 1]
    cdef uint32_t slots = fs_facts_of(side.fold).slots
    n[0] = 0
    if side.flags & FS_ORDERED:
        return NULL
    if t:
        n[0] = 1 if side.flags & FS_RANKED else 0
        return <uint64_t *> entry + 1 + side.layout.key_words
    n[0] = slots if side.flags & FS_RANKED else slots // 2
    return <uint64_t *> entry + side.slot + slots - n[0]


cdef bint has_scratch(const Form *form, uint32_t t, const unsigned char *entry) noexcept nogil:
    """Whether some of it is not 0: a chain would be followed."""
    cdef const uint64_t *word
    cdef uint32_t d, w, n
    for d in range(form.n_sides if t == 0 else 1):
        word = scratch_in(form, t, d, entry, &n)
        for w in range(n):
            if word[w]:
                return True
    return False


# Writing


cdef inline uint64_t take_entry(const Layout *layout, const uint64_t *entry, unsigned char *out,
                                uint64_t n) noexcept nogil:
    if rows_of(entry):
        memcpy(out + n * layout.stride, entry, layout.stride)
        return n + 1
    return n


cdef uint64_t take_table(const Layout *layout, const Table *table, unsigned char *out) noexcept nogil:
    """Entries with rows, slot by slot; those that went round the end come last, where their hash is."""
    cdef uint64_t n = 0
    cdef uint64_t rounds = 2 if table.multiplier == FS_GOLDEN else 1
    cdef uint64_t k, wrapped
    cdef const uint64_t *entry
    if table.entries == NULL:
        return 0
    for wrapped in range(rounds):
        for k in range(table.capacity):
            entry = <const uint64_t *> (table.entries + k * layout.stride)
            if wrapped and entry[0] == 0:
                break
            if entry[0] and (table.multiplier != FS_GOLDEN
                             or (home_hash(layout, entry) >> table.shift > k) == wrapped):
                n = take_entry(layout, entry, out, n)
    return n


cdef uint64_t take_front(const Layout *layout, const Pane *pane, unsigned char *out, uint64_t n) noexcept nogil:
    """What a dense front has, as entries of the table."""
    cdef const Front *front = pane.front
    cdef uint32_t words = layout.stride // 8 - layout.key_words
    cdef uint32_t width = layout.key_bytes * 8
    cdef uint64_t mask = ~<uint64_t> 0 if width == 64 else (<uint64_t> 1 << width) - 1
    cdef const uint64_t *source
    cdef uint64_t *entry
    cdef uint32_t i
    if front == NULL:
        return n
    for i in range(pane.table.reserved):
        source = front.array.entries + <uint64_t> front.touched[i] * words
        if rows_of(source):
            entry = <uint64_t *> (out + n * layout.stride)
            entry[0] = source[0]
            entry[1] = (front.array.base + front.touched[i]) & mask
            memcpy(entry + 2, source + 1, layout.stride - 16)
            n += 1
    return n


cdef uint64_t join_equal(const Layout *layout, unsigned char *entries, uint64_t n, int *problem) noexcept nogil:
    """A key that table and front both have becomes one. Assumes: they are in order."""
    cdef uint64_t i
    cdef uint64_t out = 0
    cdef uint64_t *last
    cdef uint64_t *entry
    for i in range(n):
        entry = <uint64_t *> (entries + i * layout.stride)
        last = <uint64_t *> (entries + (out - 1) * layout.stride) if out else NULL
        if last != NULL and not comes_before(layout, last, entry):
            problem[0] |= entry_merge(layout, <unsigned char *> last, <const unsigned char *> entry)
        else:
            if out != i:
                memcpy(entries + out * layout.stride, entry, layout.stride)
            out += 1
    return out


cdef uint64_t close_block(const Layout *layout, unsigned char *out, uint64_t n) noexcept nogil:
    """The head of a block of n entries that are there already. Returns their rows."""
    cdef Block *block = <Block *> out
    cdef uint64_t i
    block.entries = n
    block.stride = layout.stride
    block.rows = 0
    for i in range(n):
        block.rows += rows_of(<const uint64_t *> (out + sizeof(Block) + i * layout.stride))
    return block.rows


cdef void forget_scratch(const Form *form, uint32_t t, unsigned char *entries, uint64_t n) noexcept nogil:
    cdef uint64_t i
    cdef uint64_t *word
    cdef uint32_t d, w, some
    for d in range(form.n_sides if t == 0 else 1):
        for i in range(n):
            word = scratch_in(form, t, d, entries + i * layout_of(form, t).stride, &some)
            for w in range(some):
                word[w] = 0


cdef uint64_t most_bytes(const Form *form, const Pane *pane) noexcept nogil:
    cdef uint64_t total = sizeof(Head)
    cdef uint32_t d
    while pane != NULL:
        total += sizeof(Block) + (<uint64_t> pane.table.used + pane.table.reserved) * form.layout.stride
        for d in range(form.n_sides):
            total += sizeof(Block) + <uint64_t> pane.sides[d].used * form.sides[d].layout.stride
        pane = pane.also
    return total


cdef PartialStatus pane_encode(const Form *form, const Pane *pane, unsigned char *out, uint64_t room,
                               uint64_t *size) noexcept nogil:
    """The image of a pane with all its parts, which stay as they are; `size`: its bytes, or, without room, how many are
    enough. Assumes: nobody fires or folds meanwhile."""
    cdef const Pane *part = pane
    cdef const Layout *layout
    cdef unsigned char *entries
    cdef uint64_t at = sizeof(Head)
    cdef uint64_t rows = 0
    cdef uint64_t parts = 0
    cdef uint64_t n
    cdef uint32_t t
    cdef int problem = 0
    size[0] = most_bytes(form, pane)
    if size[0] > room:
        return PARTIAL_ROOM
    if not is_aligned(out):
        return PARTIAL_UNALIGNED
    while part != NULL:
        for t in range(1 + form.n_sides):
            layout = layout_of(form, t)
            entries = out + at + sizeof(Block)
            n = take_table(layout, &part.table if t == 0 else &part.sides[t - 1], entries)
            if t == 0:
                n = take_front(layout, part, entries, n)
            forget_scratch(form, t, entries, n)
            sort_entries(layout, entries, n)
            if t == 0:
                n = join_equal(layout, entries, n, &problem)
                rows += close_block(layout, out + at, n)
            else:
                close_block(layout, out + at, n)
            at += sizeof(Block) + n * layout.stride
        parts += 1
        part = part.also
    write_head(form, out, IMAGE, parts, at, pane.start, rows, PANE_DIRTY if pane.dirty else 0)
    size[0] = at
    return PARTIAL_NO_VALUE if problem else PARTIAL_OK


# Reading


cdef PartialStatus check_entries(const Form *form, uint32_t t, const unsigned char *entries,
                                 const Block *block) noexcept nogil:
    cdef const Layout *layout = layout_of(form, t)
    cdef uint64_t known_bits = USED_BIT | (DIRTY_BIT if t == 0 else 0)
    cdef const uint64_t *before = NULL
    cdef const uint64_t *entry
    cdef uint64_t rows = 0
    cdef uint64_t i
    for i in range(block.entries):
        entry = <const uint64_t *> (entries + i * layout.stride)
        if not entry[0] & USED_BIT or rows_of(entry) == 0 or entry[0] & ~(ROWS_MASK | known_bits):
            return PARTIAL_ENTRIES
        if before != NULL and not comes_before(layout, before, entry):
            return PARTIAL_ENTRIES
        if has_scratch(form, t, <const unsigned char *> entry):
            return PARTIAL_ENTRIES
        rows += rows_of(entry)
        if rows > ROWS_MASK:
            return PARTIAL_COUNTS
        before = entry
    return PARTIAL_OK if rows == block.rows else PARTIAL_COUNTS


cdef PartialStatus check_block(const Form *form, uint32_t t, const unsigned char *record, uint64_t at, uint64_t end,
                               Block *block) noexcept nogil:
    """The block at `at` of the record lies before `end`, and its entries are as they should be."""
    cdef const Layout *layout = layout_of(form, t)
    if end - at < sizeof(Block):
        return PARTIAL_LENGTHS
    memcpy(block, record + at, sizeof(Block))
    if block.stride != layout.stride or block.entries > (end - at - sizeof(Block)) // layout.stride:
        return PARTIAL_LENGTHS
    if block.entries > MOST_ENTRIES:
        return PARTIAL_COUNTS
    return check_entries(form, t, record + at + sizeof(Block), block)


cdef PartialStatus check_image(const Form *form, const unsigned char *record, const Head *head) noexcept nogil:
    """Lengths, order and sums; keys of side entries are looked for when there are tables to find them in."""
    cdef uint64_t at = sizeof(Head)
    cdef uint64_t rows
    cdef uint64_t left
    cdef Block block
    cdef PartialStatus status
    cdef uint32_t p, t
    if head.n == 0 or head.flags & ~<uint64_t> PANE_DIRTY or head.rows > ROWS_MASK:
        return PARTIAL_COUNTS
    if pane_of(form.windower, head.start) != head.start:
        return PARTIAL_PANE
    for p in range(head.n):
        for t in range(1 + form.n_sides):
            status = check_block(form, t, record, at, head.bytes, &block)
            if status != PARTIAL_OK:
                return status
            at += sizeof(Block) + block.entries * block.stride
    if at != head.bytes:
        return PARTIAL_LENGTHS
    for t in range(1 + form.n_sides):       # each row is in the pane's own tables, and in its side tables
        at = sizeof(Head)
        rows = 0
        for left in range(<uint64_t> head.n * (1 + form.n_sides)):
            memcpy(&block, record + at, sizeof(Block))
            if left % (1 + form.n_sides) == t:
                rows += block.rows
                if rows > ROWS_MASK:
                    return PARTIAL_COUNTS
            at += sizeof(Block) + block.entries * block.stride
        if rows != head.rows:
            return PARTIAL_COUNTS
    return PARTIAL_OK


cdef ArenaStatus build_table(Table *table, const Layout *layout, const unsigned char *entries, uint64_t n, bint sparse,
                             Arena *arena) noexcept nogil:
    """In the order of the image, which is that of the slots: one pass through memory."""
    cdef uint32_t capacity = FIRST_CAPACITY
    cdef const unsigned char *entry
    cdef uint64_t i
    cdef ArenaStatus status
    while keys_within(capacity, <uint64_t> capacity * layout.stride, sparse) < n:
        capacity *= 2
    status = table_init(table, layout, capacity, arena, sparse)
    if status != ARENA_OK:
        return status
    for i in range(n):
        entry = entries + i * layout.stride
        memcpy(table_add(table, layout, <const int64_t *> (entry + 8)), entry, layout.stride)
    return ARENA_OK


cdef uint64_t form_pane_bytes(const Form *form) noexcept nogil:
    """As pane_bytes of panes.pxd: whoever drops the pane gives so many back."""
    return sizeof(Pane) + form.n_sides * sizeof(Table) + form.n_fired * sizeof(uint32_t)


cdef void pane_discard(const Form *form, Arena *arena, Pane *pane) noexcept nogil:
    """One that was decoded, with all its parts."""
    cdef Pane *following
    cdef uint32_t d
    while pane != NULL:
        following = pane.also
        table_destroy(&pane.table, arena)
        for d in range(form.n_sides):
            table_destroy(&pane.sides[d], arena)
        arena_release(arena, pane, form_pane_bytes(form))
        pane = following


cdef ArenaStatus build_part(const Form *form, const Head *head, const unsigned char *record, uint64_t *at, Arena *arena,
                            Pane **out) noexcept nogil:
    """The next part of the record. `out` has what there is of it, whatever is returned."""
    cdef bint sparse
    cdef Block block
    cdef ArenaStatus status
    cdef void *memory
    cdef Pane *part
    cdef uint32_t t
    status = arena_alloc(arena, form_pane_bytes(form), &memory)
    if status != ARENA_OK:
        return status
    memset(memory, 0, form_pane_bytes(form))
    part = <Pane *> memory
    part.start = head.start
    part.sides = <Table *> (<unsigned char *> memory + sizeof(Pane))
    part.fired = <uint32_t *> (part.sides + form.n_sides)
    out[0] = part
    for t in range(1 + form.n_sides):
        memcpy(&block, record + at[0], sizeof(Block))
        sparse = t == 0 and is_one_pane(form.windower)
        if t == 0 or block.entries:
            status = build_table(&part.table if t == 0 else &part.sides[t - 1], layout_of(form, t),
                                 record + at[0] + sizeof(Block), block.entries, sparse, arena)
            if status != ARENA_OK:
                return status
        at[0] += sizeof(Block) + block.entries * block.stride
    return ARENA_OK


cdef bint has_key(const Form *form, const Pane *pane, const unsigned char *entry) noexcept nogil:
    while pane != NULL:
        if table_find(&pane.table, form.layout, <const int64_t *> (entry + 8)) != NULL:
            return True
        pane = pane.also
    return False


cdef bint has_orphan(const Form *form, const Pane *pane) noexcept nogil:
    cdef const Pane *part = pane
    cdef const unsigned char *entry
    cdef uint32_t d
    cdef uint64_t k
    while part != NULL:
        for d in range(form.n_sides):
            for k in range(part.sides[d].capacity):
                entry = part.sides[d].entries + k * form.sides[d].layout.stride
                if rows_of(<const uint64_t *> entry) and not has_key(form, pane, entry):
                    return True
        part = part.also
    return False


cdef PartialStatus pane_decode(const Form *form, const unsigned char *record, uint64_t n, Arena *arena, Pane **out,
                               uint64_t *size) noexcept nogil:
    """A pane like the one that was encoded, in the arena, with no window of it fired; `size`: the bytes of its record.
    On anything but PARTIAL_OK there is none, and the arena has all its memory back."""
    cdef Head head
    cdef ArenaStatus status
    cdef Pane *first = NULL
    cdef Pane **last = &first
    cdef uint64_t at = sizeof(Head)
    cdef uint32_t p
    cdef PartialStatus found = read_head(form, record, n, IMAGE, &head)
    if found == PARTIAL_OK:
        found = check_image(form, record, &head)
    if found != PARTIAL_OK:
        return found
    for p in range(head.n):
        status = build_part(form, &head, record, &at, arena, last)
        if status != ARENA_OK:
            pane_discard(form, arena, first)
            return PARTIAL_WAIT if status == ARENA_WAIT else PARTIAL_FULL
        last = &last[0].also
    if has_orphan(form, first):
        pane_discard(form, arena, first)
        return PARTIAL_ORPHAN
    first.dirty = head.flags & PANE_DIRTY != 0
    out[0] = first
    size[0] = head.bytes
    return PARTIAL_OK

"""A partial: one worker's mergeable state for (query, pane, group), an open-addressing table of keys.

Entry layout, all 8-byte words: [flags and row count][key words][aggregate slots]. The top bit of the first word
says that the entry is in use, the next that it changed since its window fired (late update); the rest counts rows.
Keys are the key fields, packed and NUL padded to whole words. Aggregate slots are mergeable: what each fold keeps in them
is in folds.h.
A table belongs to one worker; its memory comes from that worker's arena.

A key's probe begins at the top bits of (key * multiplier). The multiplier is at first the golden ratio, which spreads
consecutive keys best, and which anybody may know who sends keys. An entry is never further than `reach` from where its
probe begins: a key that would be makes the table draw a secret multiplier and move all its entries, which needs no
memory. So a row costs a bounded number of probes, whatever the keys; tables may go anywhere and be merged with any other.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.memory.arena cimport Arena, ArenaStatus
from flexstream.cython_ext.wire.murmur3 cimport MAX_KEY_FIELDS

cdef extern from "flexstream_abi.h" nogil:
    uint64_t fs_hash_words(const uint64_t *key, int words, uint64_t multiplier) noexcept

cpdef enum:                   # Python refuses queries beyond them
    MAX_AGGREGATES = 32
    MAX_KEY_WORDS = 32
    MAX_SIDES = 4             # aggregates with a table of their own beside the entries
    MAX_SLOTS = 1024          # of all aggregates

cdef enum:
    MAX_ENTRY_WORDS = 1 + 32 + 1024
    SPARSE_BYTES = 65536
    SPARSE_ENTRY = 64         # bytes; of larger entries many are not worth their memory

cdef extern from "folds.h" nogil:
    enum:
        FS_SIDE
        FS_ORDERED
        FS_INVERTIBLE
        FS_ORIGIN
        FS_REAL
        FS_MASKS
        FS_OVERFLOWS
        FS_COUNTED
        FS_RANKED
        FS_FOLDS_END
    ctypedef struct fs_fold_facts:
        const char *name
        uint32_t slots
        uint32_t flags
    const fs_fold_facts *fs_facts_of(uint32_t fold) noexcept

cpdef enum KeyForm:
    KEY_RAW = 0
    KEY_F32 = 1               # -0.0 and 0.0 are one key, and so are all NaNs
    KEY_F64 = 2
    KEY_BOOL = 3


cdef struct KeyField:
    uint32_t offset
    uint32_t size
    uint32_t form
    uint32_t at               # byte offset within the packed key


cdef struct Aggregate:
    uint32_t fold             # folds.h
    uint32_t register_
    uint32_t slot             # first word within the entry
    uint32_t by               # the register that decides, where one does


cdef struct Origin:           # where the rows of a batch come from: element i is of the i-th row that is still in
    const int64_t *time
    const uint32_t *selected
    uint64_t session
    uint64_t sequence         # of the row at 0 of `selected`


cdef struct Layout:
    uint32_t n_key_fields
    uint32_t key_bytes
    uint32_t key_words
    uint32_t n_aggregates
    uint32_t stride           # bytes per entry
    bint simple_key           # one 8-byte integer field: no packing
    KeyField key[MAX_KEY_FIELDS]
    Aggregate aggregates[MAX_AGGREGATES]
    uint64_t empty[MAX_ENTRY_WORDS]   # a fresh entry


cdef struct Table:
    unsigned char *entries
    uint64_t bytes
    uint32_t capacity         # a power of two
    uint32_t shift            # 64 - log2(capacity)
    uint32_t used
    uint32_t dirty            # entries changed since their window fired
    uint32_t reserved         # keys that a dense front holds for it (dense_front.pxd); they count as used
    uint32_t limit            # keys that it holds before it grows
    uint32_t reach            # entries are at most so many slots from where their probe begins
    uint64_t multiplier       # odd; another one: entries have moved


cdef struct Ranking:          # of the key whose median is looked for (ranking.pxd)
    uint64_t *entry           # the key's; NULL: there is none
    uint64_t *chain           # the values that the pass is about
    uint64_t *at              # those not looked at yet
    uint64_t *below           # of those that were, by the pivot
    uint64_t *above
    uint64_t rows_below
    uint64_t rows_equal
    uint64_t rank             # of the lower middle row, among those of the chain
    bint even                 # the row behind it counts as well
    bint counted              # rows are, and rank and even are known
    uint32_t passes
    int64_t pivot
    int64_t least             # no value of the chain is less; nor is one greater:
    int64_t greatest
    int64_t least_above
    int64_t following         # the least value of those above that were left behind


cdef struct Side:             # of one aggregate: what it keeps beside the entries, in a table of (key, one more word)
    uint32_t fold
    uint32_t register_
    uint32_t slot             # of the aggregate, in the entry
    uint32_t flags            # of the fold
    Layout layout
    Table merged              # of a window that has several parts
    Ranking ranking           # of a window that fires


cdef inline uint32_t keys_within(uint64_t capacity, uint64_t n_bytes, bint sparse) noexcept nogil:
    """How many keys so many slots may hold. Sparse, if they are small: a probe that goes on is a branch guessed wrong,
    which is more than the rest of a row costs. Large ones wait for memory anyway."""
    if sparse and n_bytes <= SPARSE_BYTES and n_bytes <= capacity * SPARSE_ENTRY:
        return <uint32_t> (capacity // 4)
    return <uint32_t> (capacity // 2)


cdef inline uint64_t home_of(const Table *table, const int64_t *key, uint32_t words) noexcept nogil:
    """Where the key's probe begins."""
    if words == 1:
        return (<uint64_t> key[0] * table.multiplier) >> table.shift
    return fs_hash_words(<const uint64_t *> key, <int> words, table.multiplier) >> table.shift


cdef inline bint is_sparse(const Table *table) noexcept nogil:
    return table.limit < table.capacity // 2


cdef inline uint32_t table_room(const Table *table) noexcept nogil:
    """How many new keys it takes before it has to grow."""
    cdef uint32_t used = table.used + table.reserved
    return table.limit - used if used < table.limit else 0


cdef uint64_t USED_BIT
cdef uint64_t DIRTY_BIT
cdef uint64_t ROWS_MASK

cdef void pack_keys(const Layout *layout, const unsigned char *rows, uint32_t row_bytes, const uint32_t *selected,
                    uint32_t m, int64_t *keys) noexcept nogil
cdef ArenaStatus table_init(Table *table, const Layout *layout, uint32_t capacity, Arena *arena,
                            bint sparse=?) noexcept nogil
cdef void table_destroy(Table *table, Arena *arena) noexcept nogil
cdef void table_clear(Table *table) noexcept nogil
cdef ArenaStatus table_reserve(Table *table, const Layout *layout, uint32_t keys, Arena *arena) noexcept nogil
cdef ArenaStatus table_locate(Table *table, const Layout *layout, const int64_t *keys, const uint32_t *which,
                              uint32_t m, unsigned char **entry, Arena *arena) noexcept nogil
cdef unsigned char *table_add(Table *table, const Layout *layout, const int64_t *key) noexcept nogil
cdef unsigned char *table_find(const Table *table, const Layout *layout, const int64_t *key) noexcept nogil
cdef int table_apply(const Layout *layout, const int64_t *registers, uint32_t batch, uint32_t m,
                     unsigned char **entry, const Origin *origin) noexcept nogil
cdef int entry_merge(const Layout *layout, unsigned char *into, const unsigned char *source) noexcept nogil
cdef void entry_results(const Layout *layout, const unsigned char *entry, unsigned char *out) noexcept nogil

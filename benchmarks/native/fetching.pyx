# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Keyed state as other systems move it, in place of the engine's own: for benchmarks.skew alone.

The engine runs as it is: sockets, decoder, program, markers, and moves of sockets. Only where counts are kept is
replaced, through `Input.kernel`. A cell holds one key of one window; a table belongs to (group, worker).

Fetching (after Meces): a group's rows go to the new worker at once; there every row locks its key's cell, and a key
that is not here yet is fetched from the old worker's table under that key's lock. The old worker hands over what
nobody asks for, a bin of keys between two batches, also key by key under locks. Both locks are spin locks of one
word, and a fetch is a copy in memory: no message, no network. Tables never grow: there is room from the start, in memory that is there.

Snapshot: workers stop at the next batch, all cells go to a file, new tables are filled from it, workers go on.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport FILE, fclose, fopen, fread, fwrite
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memset

from flexstream.cython_ext.includes.native cimport fs_count, fs_i64, fs_load_acquire, fs_now_ns, fs_store_release
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_WAIT, Context, Input, Operator, Step
from flexstream.cython_ext.operators.pane cimport PaneSet
from flexstream.cython_ext.expressions.program cimport program_run
from flexstream.cython_ext.operators.queries cimport QueryState

cdef extern from *:
    """
    #include <stdint.h>
    static inline int fetching_try_lock(uint32_t *lock) { return !__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE); }
    static inline void fetching_unlock(uint32_t *lock) { __atomic_store_n(lock, 0, __ATOMIC_RELEASE); }
    static inline int fetching_claim(uint64_t *tag, uint64_t wanted) {
        uint64_t none = 0;
        return __atomic_compare_exchange_n(tag, &none, wanted, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) || none == wanted;
    }
    static inline void fetching_pause(void) { __builtin_ia32_pause(); }
    """
    bint fetching_try_lock(uint32_t *lock) noexcept nogil
    void fetching_unlock(uint32_t *lock) noexcept nogil
    bint fetching_claim(uint64_t *tag, uint64_t wanted) noexcept nogil
    void fetching_pause() noexcept nogil

cdef enum:
    MAX_WORKERS = 8
    BIN = 64                      # keys that the old worker hands over between two batches

cdef enum CellState:
    LOCAL = 0
    GONE = 1                      # fetched by the new worker
    FETCHED = 2                   # in a new worker's table: the old one's count is in


cdef struct Cell:
    uint64_t tag                  # window and key; 0: free
    uint64_t count
    uint32_t lock
    uint32_t state


cdef struct Table:
    Cell *cells
    uint64_t mask
    uint64_t at                   # how far the old worker has handed over


cdef struct Group:
    Table *table[MAX_WORKERS]     # of each worker; NULL: it has none
    Table *old                    # keys may still be there: every access locks. (Or the one being restored)
    uint64_t fetching             # the same, for the worker that gets rows: 1 + index of the old worker
    uint64_t given                # the old worker has no row of it any more: it may hand over what nobody asks for
    uint64_t finished_ns


cdef struct Store:
    uint32_t groups
    uint32_t workers
    uint64_t capacity
    int64_t first_window
    Operator *op[MAX_WORKERS]
    Group *group
    uint64_t paused
    uint64_t locked[MAX_WORKERS]  # rows counted under a lock
    uint64_t demanded[MAX_WORKERS]
    uint64_t handed[MAX_WORKERS]
    uint64_t conflicts[MAX_WORKERS]
    uint64_t n_fetching           # groups under way
    Table **spares
    uint32_t n_spares

cdef Store store


cdef inline Cell *find(Table *table, uint64_t tag) noexcept nogil:
    """The tag's cell, made if it is not there. Several threads may do so. Assumes: there is room."""
    cdef uint64_t at = (tag * <uint64_t> 0x9E3779B97F4A7C15) >> 20
    cdef Cell *cell
    while True:
        cell = &table.cells[at & table.mask]
        if fs_load_acquire(&cell.tag) == tag or fetching_claim(&cell.tag, tag):
            return cell
        at += 1


cdef inline Cell *find_old(Table *table, uint64_t tag) noexcept nogil:
    cdef uint64_t at = (tag * <uint64_t> 0x9E3779B97F4A7C15) >> 20
    cdef Cell *cell
    while True:
        cell = &table.cells[at & table.mask]
        if cell.tag == tag:
            return cell
        if cell.tag == 0:
            return NULL
        at += 1


cdef inline void lock_cell(Cell *cell, uint32_t worker) noexcept nogil:
    if fetching_try_lock(&cell.lock):
        return
    fs_count(&store.conflicts[worker], 1)
    while not fetching_try_lock(&cell.lock):
        fetching_pause()


cdef bint fetch(Group *group, Cell *cell, uint32_t worker) noexcept nogil:
    """The old count into a locked cell of the new table, once. True: there was one."""
    cdef Cell *old
    if cell.state == FETCHED:
        return False
    cell.state = FETCHED
    old = find_old(group.old, cell.tag)
    if old == NULL:
        return False
    lock_cell(old, worker)
    cell.count += old.count
    old.state = GONE
    fetching_unlock(&old.lock)
    return True


cdef void hand_over(Group *group, uint32_t worker, uint32_t new, uint32_t most) noexcept nogil:
    """Up to `most` keys of the old worker's table that nobody has asked for. At the end of the table: finished."""
    cdef Table *old = group.old
    cdef Cell *cell
    cdef Cell *target
    while most and old.at <= old.mask:
        cell = &old.cells[old.at]
        old.at += 1
        if cell.tag == 0 or cell.state == GONE:
            continue
        most -= 1
        target = find(group.table[new], cell.tag)
        lock_cell(target, worker)
        if fetch(group, target, worker):
            fs_count(&store.handed[worker], 1)
        fetching_unlock(&target.lock)
    if old.at > old.mask and group.finished_ns == 0:
        group.finished_ns = fs_now_ns()
        fs_store_release(&group.fetching, 0)


cdef void hand_over_some(uint32_t worker) noexcept nogil:
    """A bin of one of the groups that this worker has given away."""
    cdef uint32_t g, new
    cdef Group *group
    for g in range(store.groups):
        group = &store.group[g]
        if fs_load_acquire(&group.fetching) == worker + 1 and fs_load_acquire(&group.given):
            for new in range(store.workers):
                if new != worker and group.table[new] != NULL:
                    hand_over(group, worker, new, BIN)
                    return


cdef inline uint32_t worker_of(const Operator *op) noexcept nogil:
    cdef uint32_t worker = 0
    while store.op[worker] != op:
        worker += 1
    return worker


cdef Step store_kernel(Input *input, Context *context, PaneSet *panes, const unsigned char *rows,
                       uint32_t n) noexcept nogil:
    """The program as ever, then counts into the store. STEP_WAIT while workers are to rest."""
    cdef Operator *op = input.op
    cdef uint32_t worker = worker_of(op)
    cdef Group *group = &store.group[panes - op.sets]
    cdef Table *table = group.table[worker]
    cdef Cell *cell
    cdef const unsigned char *row
    cdef uint64_t old
    cdef uint64_t window = 0
    cdef int64_t start = 0
    cdef int64_t time
    cdef uint32_t m, i
    context.done = 0
    if fs_load_acquire(&store.paused):
        return STEP_WAIT
    m = program_run(input.program, rows, n, context.scratch)
    old = fs_load_acquire(&group.fetching)
    if old and old != worker + 1 and not fs_load_acquire(&group.given):
        fs_store_release(&group.given, 1)       # its rows are here, so the old worker has swept it
    for i in range(m):
        row = rows + <size_t> context.scratch.selected[i] * input.row_bytes
        time = fs_i64(row + input.time_offset)
        if window == 0 or time < start or time >= start + op.windower.pane:
            start = time // op.windower.pane * op.windower.pane
            window = <uint64_t> (start // op.windower.pane - store.first_window + 1) << 40
        cell = find(table, window | (<uint64_t> fs_i64(row + op.layout.key[0].offset) + 1))
        if old == 0 or old == worker + 1:
            cell.count += 1
            continue
        lock_cell(cell, worker)
        if fetch(group, cell, worker):
            fs_count(&store.demanded[worker], 1)
        cell.count += 1
        fetching_unlock(&cell.lock)
    if old and old != worker + 1:
        fs_count(&store.locked[worker], m)
    fs_count(&input.counters.rows, n)
    fs_count(&input.counters.filtered, n - m)
    if fs_load_acquire(&store.n_fetching):
        hand_over_some(worker)
    return STEP_DONE


cdef Table *new_table() except NULL:
    """Empty, and its memory is there: no page is missing when rows come."""
    cdef Table *table = <Table *> calloc(1, sizeof(Table))
    if table == NULL:
        raise MemoryError("no memory for a table")
    table.cells = <Cell *> malloc(store.capacity * sizeof(Cell))
    if table.cells == NULL:
        raise MemoryError("no memory for a table's cells")
    memset(table.cells, 0, store.capacity * sizeof(Cell))
    table.mask = store.capacity - 1
    return table


cdef Table *spare_table() except NULL:
    """One of those that were made beforehand, as long as there are any."""
    if store.n_spares == 0:
        return new_table()
    store.n_spares -= 1
    return store.spares[store.n_spares]


cdef void free_table(Table *table) noexcept:
    if table != NULL:
        free(table.cells)
        free(table)


def install(list states, list placement, uint64_t cells_per_group, int64_t first_time):
    """Count in the store from now on: once per process, before the first row. `states`: a QueryState per worker.

    `cells_per_group`: the most keys of a group, times the windows of the run; more would never find a cell.
    """
    cdef QueryState state
    if store.group != NULL:
        raise RuntimeError("the store is installed already: use a process of its own for each run")
    store.groups = len(placement)
    store.workers = len(states)
    store.capacity = 1024
    while store.capacity < 2 * cells_per_group:
        store.capacity *= 2
    store.group = <Group *> calloc(store.groups, sizeof(Group))
    store.spares = <Table **> calloc(store.groups, sizeof(Table *))
    if store.group == NULL or store.spares == NULL:
        raise MemoryError("no memory for the store")
    for g, worker in enumerate(placement):
        store.group[<int> g].table[<int> worker] = new_table()
        store.spares[<int> g] = new_table()
    store.n_spares = store.groups
    for w, one in enumerate(states):
        state = one
        store.op[<int> w] = state.op
        store.first_window = first_time // state.op.windower.pane
        state.input.kernel = store_kernel


def begin_fetching(moves):
    """Before the sockets move: (group, old worker, new worker) each. Rows that come to the new worker fetch their keys."""
    cdef Group *group
    for g, old, new in moves:
        group = &store.group[<int> g]
        if group.fetching:
            raise RuntimeError(f"group {g} is on its way already")
        group.table[<int> new] = spare_table()
        group.old = group.table[<int> old]
        group.old.at = 0
        group.finished_ns = 0
        group.given = 0
        fs_store_release(&group.fetching, <uint64_t> old + 1)
    fs_store_release(&store.n_fetching, len(moves))


def all_given(groups):
    """The sockets are over: old workers hand over also those groups of which no row has come since."""
    for g in groups:
        fs_store_release(&store.group[<int> g].given, 1)


def fetched(groups):
    """When the last key of the last group came over (CLOCK_MONOTONIC ns), or None: not yet."""
    cdef uint64_t last = 0
    for g in groups:
        if fs_load_acquire(&store.group[<int> g].fetching):
            return None
        last = max(last, store.group[<int> g].finished_ns)
    return last


def pause():
    """Workers rest from their next batch on: when all have passed a quiescent point, none is in a batch."""
    fs_store_release(&store.paused, 1)


def snapshot(str path):
    """Every cell of every group into a file; returns how many. Assumes: no worker is in a batch."""
    cdef bytes name = path.encode()
    cdef FILE *file = fopen(name, "wb")
    cdef Table *table
    cdef uint32_t g, w
    cdef uint64_t k, n = 0
    cdef uint64_t record[3]
    if file == NULL:
        raise OSError(f"cannot write {path}")
    with nogil:
        for g in range(store.groups):
            for w in range(store.workers):
                table = store.group[g].table[w]
                if table == NULL:
                    continue
                for k in range(table.mask + 1):
                    if table.cells[k].tag:
                        record[0] = g
                        record[1] = table.cells[k].tag
                        record[2] = table.cells[k].count
                        n += fwrite(record, sizeof(record), 1, file)
    if fclose(file) != 0:
        raise OSError(f"cannot write {path}")
    return n


def restore(str path, list placement, list before):
    """New tables from the file, for the new placement. A group's old worker may count into it until its sockets go."""
    cdef bytes name = path.encode()
    cdef FILE *file = fopen(name, "rb")
    cdef Table *table
    cdef Cell *cell
    cdef uint32_t g, w
    cdef uint64_t record[3]
    if file == NULL:
        raise OSError(f"cannot read {path}")
    for g in range(store.groups):
        for w in range(store.workers):
            free_table(store.group[g].table[w])
            store.group[g].table[w] = NULL
        table = spare_table()
        store.group[g].table[<int> placement[g]] = table
        store.group[g].table[<int> before[g]] = table
        store.group[g].old = table
    with nogil:
        while fread(record, sizeof(record), 1, file) == 1:
            cell = find(store.group[record[0]].old, record[1])
            cell.count = record[2]
    fclose(file)


def resume():
    fs_store_release(&store.paused, 0)


def counts():
    """(window start / window size - first window, key, count) of all: what the windows would say. After the run."""
    import numpy

    found = []
    cdef uint32_t g, w
    cdef uint64_t k
    cdef Table *table
    for g in range(store.groups):
        seen = set()
        for w in range(store.workers):
            table = store.group[g].table[w]
            if table == NULL or <size_t> table in seen:
                continue
            seen.add(<size_t> table)
            for k in range(table.mask + 1):
                if table.cells[k].tag and table.cells[k].state != GONE:
                    found.append((table.cells[k].tag >> 40, (table.cells[k].tag & ((<uint64_t> 1 << 40) - 1)) - 1,
                                  table.cells[k].count))
    return numpy.array(found, dtype=numpy.int64).reshape(-1, 3) - [1, 0, 0]


def facts():
    return {
        "rows_under_locks": sum(store.locked[<int> w] for w in range(store.workers)),
        "keys_demanded": sum(store.demanded[<int> w] for w in range(store.workers)),
        "keys_handed_over": sum(store.handed[<int> w] for w in range(store.workers)),
        "lock_conflicts": sum(store.conflicts[<int> w] for w in range(store.workers)),
    }

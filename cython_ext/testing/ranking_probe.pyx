"""For tests only: the middle of a chain of values, in slices as small as a test likes."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from flexstream.cython_ext.operators.ranking cimport chain_value, is_chained, ranking_begin, ranking_slice
from flexstream.cython_ext.operators.table cimport FS_REAL, Side

cdef enum:
    WORDS = 4                 # of a value: [rows][key][value][next]


def median_of(values, *, uint32_t slice_values=4096):
    """(the median of (value, rows) pairs, how many values were looked at). All values are int, or all are float."""
    cdef Side side
    cdef uint64_t entry[4]
    cdef uint64_t *memory
    cdef uint32_t budget
    cdef uint64_t looked_at = 0
    cdef int64_t whole
    cdef double real
    cdef bint done = False
    memset(&side, 0, sizeof(Side))
    memset(entry, 0, sizeof(entry))
    side.slot = 2
    side.layout.key_words = 2
    side.flags = FS_REAL if isinstance(values[0][0], float) else 0
    memory = <uint64_t *> calloc(len(values), WORDS * 8)
    if memory == NULL:
        raise MemoryError("no memory for a chain")
    try:
        for i, (value, rows) in enumerate(values):
            memory[<size_t> i * WORDS] = rows
            if side.flags:
                real = value
                memcpy(&memory[<size_t> i * WORDS + 2], &real, 8)
            else:
                whole = value
                memory[<size_t> i * WORDS + 2] = <uint64_t> whole
            chain_value(&side, entry, memory + <size_t> i * WORDS)
        ranking_begin(&side, entry)
        if is_chained(&side, entry):
            raise AssertionError("the chain is still on the entry")
        while not done:
            budget = slice_values
            done = ranking_slice(&side, &budget)
            looked_at += slice_values - budget
    finally:
        free(memory)
    memcpy(&real, &entry[2], 8)
    return real, looked_at

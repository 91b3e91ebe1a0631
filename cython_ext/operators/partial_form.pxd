"""The serial form of partials: what a checkpoint, a spill or another process gets of (layout, table, sides, position).

Two kinds of record, both of 8-byte words in the machine's order, both with a Head in front and a CRC32C over all of it:

    image      Head  { Block entries... } for each part of a pane, and in it for its own table, then for each side table
    position   Head  watermark, late_before, fired_until, restored_until, usual_keys  { start, fired... } for each pane

This module has what both share, and positions; images are in pane_image.pxd. What changes without rows, `fired`, is with
the position. Whether a record is of this layout says a hash of key, folds, slots and windows; where a row has a field and
which register a value is in does not matter. What a fold keeps in its slots is part of the form: who changes that, changes
FORM_VERSION.

Nothing here allocates but decoding an image, from the arena that it is given; nothing is written past `room` or read past
`n`; what is wrong with a record is said and not believed. Records are 8-byte aligned.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from flexstream.cython_ext.operators.pane cimport PaneSet
from flexstream.cython_ext.operators.table cimport Layout, Side
from flexstream.cython_ext.operators.windower cimport Windower

cdef enum:
    FORM_VERSION = 1
    IMAGE = 1
    POSITION = 2
    MOST_ENTRIES = 1 << 29        # of one table

cdef enum PartialStatus:
    PARTIAL_OK = 0
    PARTIAL_ROOM = 1              # there is no room for it; `size` says how much is enough
    PARTIAL_UNALIGNED = 2
    PARTIAL_NO_VALUE = 3          # an integer sum passed its range, between a dense front and its table
    PARTIAL_TRUNCATED = 4         # it goes on beyond n
    PARTIAL_FOREIGN = 5           # it is none of these records
    PARTIAL_VERSION = 6
    PARTIAL_DAMAGED = 7           # CRC32C
    PARTIAL_LAYOUT = 8            # it is of another query, or of another version of one
    PARTIAL_LENGTHS = 9           # its parts are not as long as it is
    PARTIAL_ENTRIES = 10          # one is not in use, without rows, not in order, there twice, or has what it may not have
    PARTIAL_COUNTS = 11           # entries or rows are not as many as is said, or too many
    PARTIAL_ORPHAN = 12           # a side entry whose key no part has
    PARTIAL_PANE = 13             # a pane that is not there
    PARTIAL_WAIT = 14             # memory is on its way: once more
    PARTIAL_FULL = 15             # the arena's cap


cdef struct Form:                 # of one query
    const Layout *layout
    const Side *sides
    const Windower *windower
    uint32_t n_sides
    uint32_t n_fired              # windows of a pane that may fire again
    uint64_t hash


cdef struct Head:
    uint32_t magic
    uint16_t version
    uint16_t kind
    uint32_t crc                  # of the record with 0 here
    uint32_t n                    # parts of the pane, or panes of the position
    uint64_t bytes                # of the record
    uint64_t layout               # Form.hash
    int64_t start                 # of the pane; 0 for a position
    uint64_t rows                 # of the pane
    uint64_t flags


cdef inline bint is_aligned(const void *memory) noexcept nogil:
    return <size_t> memory % 8 == 0


cdef void form_of(Form *form, const Layout *layout, const Side *sides, uint32_t n_sides,
                  const Windower *windower) noexcept nogil
cdef void write_head(const Form *form, unsigned char *out, int kind, uint64_t n, uint64_t n_bytes, int64_t start,
                     uint64_t rows, uint64_t flags) noexcept nogil
cdef PartialStatus read_head(const Form *form, const unsigned char *record, uint64_t n, int kind,
                             Head *head) noexcept nogil
cdef PartialStatus position_encode(const Form *form, const PaneSet *panes, unsigned char *out, uint64_t room,
                                   uint64_t *size) noexcept nogil
cdef PartialStatus position_decode(const Form *form, const unsigned char *record, uint64_t n, PaneSet *panes,
                                   uint64_t *size) noexcept nogil

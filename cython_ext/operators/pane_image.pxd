"""The image of a pane: all its parts, each with its own table and its side tables, as a record (partial_form.pxd).

An image has the entries that have rows, as they lie in memory: row count and dirty bit, key, slots. They are in the order
of their keys' hash by the golden ratio, then of the keys, whatever multiplier their table had drawn (hash_order.pxd): so
images of any tables of a layout can be merged, split and searched in sequence, and a state has one image only. A dense
front is copied into it, and stays as it is. Words that only a firing uses (chains, medians, what windows counted) are 0.
A part that is being folded may have values whose keys another part has already; that is why an image is of a whole pane.

Encoding and decoding are one slice each: whoever has a part that is too large for a slice seals it and leaves it to a
thread of its own.
"""

from libc.stdint cimport uint64_t

from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.operators.pane cimport Pane
from flexstream.cython_ext.operators.partial_form cimport Form, PartialStatus

cdef enum:
    PANE_DIRTY = 1                # of the head's flags


cdef struct Block:                # of one table, ahead of its entries
    uint64_t entries
    uint64_t rows
    uint64_t stride


cdef PartialStatus pane_encode(const Form *form, const Pane *pane, unsigned char *out, uint64_t room,
                               uint64_t *size) noexcept nogil
cdef PartialStatus pane_decode(const Form *form, const unsigned char *record, uint64_t n, Arena *arena, Pane **out,
                               uint64_t *size) noexcept nogil
cdef void pane_discard(const Form *form, Arena *arena, Pane *pane) noexcept nogil
cdef uint64_t form_pane_bytes(const Form *form) noexcept nogil

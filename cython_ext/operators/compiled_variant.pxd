"""Compiled variants: the ABI of generated code, and the kernel that runs one with the generic variant behind it."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from flexstream.cython_ext.operators.graph cimport Context, Input, Step, fs_profile
from flexstream.cython_ext.operators.pane cimport PaneSet


cdef extern from "flexstream_abi.h" nogil:
    enum:
        FS_ABI_VERSION
        FS_ABI_BATCH
    ctypedef struct fs_pane_view:
        int64_t start
        uint64_t span
        unsigned char *entries
        uint64_t mask
        uint32_t shift
        uint32_t limit
        uint64_t multiplier
        uint64_t reach
        uint32_t *used
        uint32_t *reserved
        uint64_t *dense
        uint64_t base
        uint64_t range
        uint32_t *touched
        uint64_t touched_limit
    enum:
        FS_SIDES
    ctypedef struct fs_side_view:
        unsigned char *entries
        uint64_t mask
        uint64_t multiplier
        uint64_t reach
        uint32_t shift
        uint32_t limit
        uint32_t *used
    ctypedef struct fs_view:
        fs_side_view side[2][FS_SIDES]
        fs_pane_view pane[2]
        const uint64_t *empty
        uint64_t passing
        uint64_t filtered
        uint64_t overflow
        uint64_t outside
        uint64_t fresh
        fs_profile *profile
        uint64_t session
        uint64_t sequence
    ctypedef uint32_t (*fs_variant)(const unsigned char *rows, uint32_t n, fs_view *view) noexcept nogil


cdef Step variant_kernel(Input *input, Context *context, PaneSet *panes, const unsigned char *rows,
                         uint32_t n) noexcept nogil

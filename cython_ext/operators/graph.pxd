"""A query on one worker as a graph: inputs take rows, operators keep state and fire it, edges take results on.

    stream --> Input --> Operator --> Edge --> collector

A stream feeds inputs. An input runs rows through its program (filters, maps) into the operator that it belongs to. An
operator keeps panes per group and fires what is due; it has up to MAX_PORTS inputs, and has come as far as the one that
is furthest behind. What fires leaves by the operator's edge.

All of it belongs to the worker's thread, but for the counters, which others may read at any time, `failed` and
`ended_until`, which the worker writes, what is marked as Python's, and the output's ring (blocks.pxd).
"""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t

from flexstream.cython_ext.expressions.program cimport Program, Scratch
from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.memory.blocks cimport Output
from flexstream.cython_ext.memory.ring cimport Ring
from flexstream.cython_ext.operators.dense_front cimport Dense
from flexstream.cython_ext.operators.late_marks cimport LateMarks
from flexstream.cython_ext.operators.pane cimport PaneSet, Rolling
from flexstream.cython_ext.operators.table cimport Layout, Side
from flexstream.cython_ext.operators.windower cimport Windower

cdef extern from "flexstream_abi.h" nogil:
    enum:
        FS_PREDICATES
        FS_BUCKETS
    ctypedef struct fs_profile:
        uint64_t rows
        uint64_t passed[FS_PREDICATES]
        uint64_t keys
        int64_t least
        int64_t most
        uint64_t bucket[FS_BUCKETS]

cdef enum:
    MAX_PORTS = 8                 # inputs of an operator

cdef enum Step:
    STEP_DONE = 0
    STEP_MORE = 1             # a slice is done; there is more to do
    STEP_WAIT = 2             # memory or a free block is needed first

cdef enum EdgeKind:
    EDGE_RESULTS = 1          # to the collector


cdef struct Context:          # what a worker lends to kernels
    Arena *arena
    Scratch *scratch
    Ring *out
    LateMarks *marks          # of the batch under way
    uint64_t session          # of the batch's rows, and the sequence of the first: what `first` and `last` go by
    uint64_t sequence
    int64_t latest            # of the batch's stream: later event times are rejected
    uint32_t batch_from       # where in the batch the rows given to input.kernel begin
    uint32_t late_from        # and where in these the rows given to the generic variant begin
    uint32_t done             # rows that a kernel finished before STEP_WAIT
    bint unfolded             # some operator has parts to fold


ctypedef Step (*Kernel)(Input *input, Context *context, PaneSet *panes, const unsigned char *rows,
                        uint32_t n) noexcept nogil
ctypedef Step (*Fire)(Operator *op, Context *context, uint32_t group, int64_t watermark) noexcept nogil


cdef struct InputCounters:
    uint64_t rows
    uint64_t filtered
    uint64_t late
    uint64_t no_value[4]      # rejected: an expression has no value for the row, by program.Bad
    uint64_t time_range       # rejected: event time out of range
    uint64_t future           # rejected: event time too far ahead of the clock
    uint64_t state_full       # rejected: no room for a new key or pane
    uint64_t after_failure    # rejected: the query had failed
    uint64_t compiled_rows    # of `rows`, those that the compiled variant finished
    uint64_t outside          # of these, with a key outside of the dense range
    uint64_t fresh_keys       # keys that compiled code found new to their pane
    uint64_t timed_rows       # of these, in batches that were timed
    uint64_t timed_ns
    uint64_t rows_before      # rows of the stream that the worker had had when the input came; UINT64_MAX: it has not come


cdef struct Input:            # one way into an operator
    Operator *op
    uint32_t port             # its place among the operator's inputs
    uint32_t stream           # index of the stream that feeds it
    uint32_t row_bytes
    uint32_t time_offset
    Kernel kernel
    const Program *program
    int64_t *watermark        # [groups] how far the input has come, in groups that are served here
    uint32_t late_slot        # its bit in the marks of late rows (late_marks.pxd)
    InputCounters counters
    uint64_t batches          # that compiled code was given
    uint64_t passing          # of 1024 rows lately, those that filters let pass
    fs_profile *profile       # what an instrumented variant counts into; Python owns it
    uint64_t variant          # the compiled variant's function, or 0; Python stores it (release), the worker loads it


cdef struct Edge:             # where an operator's results go
    uint32_t kind
    Output results            # EDGE_RESULTS: blocks on their way to the collector
    uint64_t rows             # counter


cdef struct OperatorCounters:
    uint64_t windows_fired
    uint64_t open_panes


cdef struct Operator:
    uint32_t id
    uint32_t groups
    uint32_t n_inputs
    Input *inputs[MAX_PORTS]
    Fire fire
    Edge out
    Windower windower         # its unit is that of the streams' time fields, like that of all times here
    int64_t ended_until       # the last end of a window that fired when the stream had ended; others may read it
    Layout layout
    uint32_t n_sides
    Side *sides
    bint ordered              # needs rows in the order of arrival: never split, and a new owner waits for the old one
    PaneSet *sets             # one per group
    bint invertible           # what was merged can be taken out again
    bint stacked              # or is merged in two tables
    bint keeps                # a window has so many panes that each group keeps its own Rolling between firings
    Rolling rolling           # of one group at a time: nobody fires while another's windows do
    PaneSet *rolling_of       # NULL, or which; forgotten when all that was due has fired
    bint unfolded             # some pane has parts (folding.pxd); the folding goes on here:
    uint32_t fold_group
    int64_t fold_from
    OperatorCounters counters
    uint64_t failed           # 0, or why the query stopped
    uint64_t cancelled        # Python sets it, ahead of DROP_QUERY: what it has to say, nobody wants to know any more
    Dense dense


cdef inline int64_t least_watermark(const Operator *op, uint32_t group) noexcept nogil:
    """How far the operator has come in the group: as far as the input that is furthest behind. INT64_MIN: it has not
    begun; INT64_MAX: all inputs have ended."""
    cdef int64_t least = INT64_MAX
    cdef uint32_t i
    for i in range(op.n_inputs):
        if op.inputs[i].watermark[group] < least:
            least = op.inputs[i].watermark[group]
    return least


cdef inline bint is_first_of_stream(const Input *input) noexcept nogil:
    """Whether no other input of the operator that the same stream feeds is before it: who goes over a stream's inputs and
    means operators takes each operator once."""
    cdef uint32_t i
    for i in range(input.port):
        if input.op.inputs[i].stream == input.stream:
            return False
    return True

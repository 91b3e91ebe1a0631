"""See orders.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t

from flexstream.cython_ext.includes.native cimport fs_count, fs_store_relaxed
from flexstream.cython_ext.memory.messages cimport (
    ADD_CONNECTION, ADD_QUERY, ADD_STREAM, ADVANCE, CLOSE_WINDOWS, DRAIN_POINT, DROP_QUERY, FEED, GIVEN_BACK, HOLD,
    LEND, PING, PONG, QUERY_GONE, QUERY_HERE, RECALL, REGISTER_SESSION, SESSION_AWAKE, SESSION_END, SESSION_FREE, SESSION_IDLE,
    SESSION_WATERMARK, SWEEP,
)
from flexstream.cython_ext.operators.edges cimport operator_flush
from flexstream.cython_ext.operators.firing cimport close_until
from flexstream.cython_ext.operators.graph cimport Input, Operator, least_watermark
from flexstream.cython_ext.operators.panes cimport operator_release
from flexstream.cython_ext.wire.decoder cimport FAULT_NO_SESSION
from flexstream.cython_ext.worker.connections cimport close_connection, take_socket
from flexstream.cython_ext.worker.late_output cimport flush_late, flush_stream, free_slot, take_slot
from flexstream.cython_ext.worker.moving cimport drain, operator_of, sweep
from flexstream.cython_ext.worker.shared cimport Connection, Loan, Move
from flexstream.cython_ext.worker.splitting cimport lend
from flexstream.cython_ext.worker.work_item cimport (
    END_OF_STREAM, NO_WATERMARK, begin_advance, begin_revision, begin_rows, believable, is_working, raise_session, report,
)
from flexstream.cython_ext.worker.worker cimport (
    MAX_INPUTS, MAX_OPERATORS, SESSION_IS_IDLE, SESSION_LIVE, SESSION_NONE, StreamState,
)


# Queries come and go


cdef bint has_room_for(WorkerState *worker, const Operator *op) noexcept nogil:
    cdef uint32_t i
    for i in range(op.n_inputs):
        if worker.streams[op.inputs[i].stream].n_inputs + op.n_inputs > MAX_INPUTS:
            return False
    return worker.n_operators < MAX_OPERATORS


cdef void add_input(WorkerState *worker, StreamState *stream, Input *input) noexcept nogil:
    cdef uint32_t g
    take_slot(stream, input)
    report(worker, QUERY_HERE, stream.index, input.late_slot, NULL, 0, input.op.id)
    stream.inputs[stream.n_inputs] = input
    stream.n_inputs += 1
    fs_store_relaxed(&input.counters.rows_before, stream.received)      # no rows are under way while an order is obeyed
    for g in range(stream.groups):
        if stream.owned[g]:
            input.watermark[g] = stream.watermark[g]


cdef void add_operator(WorkerState *worker, Operator *op) noexcept nogil:
    """It sees rows from here on; what the watermark has passed already is late for it."""
    cdef uint32_t i, g
    cdef int64_t watermark
    if not has_room_for(worker, op):
        report(worker, QUERY_GONE, 0, 0, op, 1, op.id)
        return
    worker.operators[worker.n_operators] = op
    worker.n_operators += 1
    for i in range(op.n_inputs):
        add_input(worker, worker.streams[op.inputs[i].stream], op.inputs[i])
    for g in range(op.groups):
        watermark = least_watermark(op, g)
        if watermark != NO_WATERMARK:
            op.fire(op, &worker.context, g, watermark)      # no panes yet: settles at once


cdef void drop_input(WorkerState *worker, StreamState *stream, const Input *input) noexcept nogil:
    cdef uint32_t i
    flush_late(stream, &worker.context)         # ahead of QUERY_GONE: the slot is another's next
    free_slot(stream, input)
    for i in range(stream.n_inputs):
        if stream.inputs[i] == input:
            stream.n_inputs -= 1
            stream.inputs[i] = stream.inputs[stream.n_inputs]
            stream.inputs[stream.n_inputs] = NULL
            return


cdef void drop_operator(WorkerState *worker, Operator *op) noexcept nogil:
    cdef uint32_t i, port
    for i in range(worker.n_operators):
        if worker.operators[i] == op:
            worker.n_operators -= 1
            worker.operators[i] = worker.operators[worker.n_operators]
            worker.operators[worker.n_operators] = NULL
            for port in range(op.n_inputs):
                drop_input(worker, worker.streams[op.inputs[port].stream], op.inputs[port])
            operator_flush(op, &worker.context)
            operator_release(op, &worker.arena)
            break
    report(worker, QUERY_GONE, 0, 0, op, 0, op.id)


cdef void close_windows(WorkerState *worker, uint64_t number, int64_t end) noexcept nogil:
    cdef Operator *op = operator_of(worker, number)       # NULL: it was dropped meanwhile
    if op != NULL:
        close_until(op, end)


# Sessions come and go


cdef inline void forget_loan(StreamState *stream, uint32_t group, size_t at) noexcept nogil:
    stream.lent[at] = 0
    if stream.borrowed[at]:
        stream.borrowed[at] = 0
        stream.borrows[group] -= 1


cdef void register_session(StreamState *stream, uint32_t slot, uint64_t number, uint64_t now) noexcept nogil:
    cdef uint32_t g
    cdef size_t at
    for g in range(stream.groups):
        at = <size_t> g * stream.max_sessions + slot
        fs_store_relaxed(<uint64_t *> &stream.session_watermark[at], <uint64_t> NO_WATERMARK)
        stream.next_row[at] = 0
        stream.connection[at] = NULL
        stream.counted[at] = 0
        forget_loan(stream, g, at)
    stream.session_state[slot] = SESSION_LIVE
    stream.session_number[slot] = number
    fs_store_relaxed(&stream.seen_ns[slot], now)
    if slot >= stream.slots_high:
        stream.slots_high = slot + 1


cdef void free_session(WorkerState *worker, StreamState *stream, uint32_t slot) noexcept nogil:
    cdef uint32_t g
    cdef size_t at
    for g in range(stream.groups):
        at = <size_t> g * stream.max_sessions + slot
        if stream.connection[at] != NULL:
            if stream.connection[at].decoder.ended:
                stream.connection[at] = NULL        # it said EOS: closing is the producer's turn
            else:
                close_connection(worker, stream.connection[at], FAULT_NO_SESSION)
        forget_loan(stream, g, at)
    stream.session_state[slot] = SESSION_NONE


cdef void session_watermark(WorkerState *worker, StreamState *stream, Message *order) noexcept nogil:
    """A watermark, or the end, for every group that the bitmap does not name."""
    cdef const uint8_t *except_ = <const uint8_t *> order.ptr
    cdef int64_t watermark = END_OF_STREAM if order.kind == SESSION_END else believable(stream, order.value)
    cdef uint32_t g
    if stream.session_state[order.slot] == SESSION_NONE:
        return
    for g in range(stream.groups):
        if except_ == NULL or not except_[g >> 3] & (1 << (g & 7)):
            raise_session(worker, stream, order.slot, g, watermark)
    if is_working(worker):
        worker.work.later |= <uint64_t> 1 << stream.index
    else:
        begin_advance(worker, stream, 0, stream.groups)


cdef void hear(WorkerState *worker, StreamState *stream, uint32_t slot, uint64_t now) noexcept nogil:
    """The session is alive; if it was idle it counts again, here at once and elsewhere when Python says so."""
    fs_store_relaxed(&stream.seen_ns[slot], now)
    if stream.session_state[slot] == SESSION_IS_IDLE:
        stream.session_state[slot] = SESSION_LIVE
        report(worker, SESSION_AWAKE, stream.index, slot, NULL, 0, 0)


# The mailbox


cdef bint flush_outputs(WorkerState *worker) noexcept nogil:
    cdef uint32_t s
    cdef bint whole = True
    for s in range(worker.n_streams):
        whole = flush_stream(worker.streams[s], &worker.context) and whole
    return whole


cdef void obey(WorkerState *worker, Message *order, uint64_t now) noexcept nogil:
    cdef StreamState *stream = worker.streams[order.stream]
    if order.kind == FEED:
        hear(worker, stream, order.slot, now)
        worker.work.feeding = True
        fs_count(&stream.fed_rows[order.group], order.n)
        begin_rows(worker, stream, order.group, <const unsigned char *> order.ptr, order.n, order.slot,
                   <uint64_t> order.value)
    elif order.kind == SESSION_WATERMARK or order.kind == SESSION_END:
        hear(worker, stream, order.slot, now)
        session_watermark(worker, stream, order)
        if order.ptr != NULL:
            report(worker, GIVEN_BACK, order.stream, order.slot, order.ptr, 0, 0)
    elif order.kind == ADD_STREAM:
        worker.streams[order.stream] = <StreamState *> order.ptr
        if order.stream >= worker.n_streams:
            worker.n_streams = order.stream + 1
    elif order.kind == ADD_QUERY:
        add_operator(worker, <Operator *> order.ptr)
    elif order.kind == DROP_QUERY:
        drop_operator(worker, <Operator *> order.ptr)
    elif order.kind == ADD_CONNECTION:
        hear(worker, stream, order.slot, now)
        take_socket(worker, <Connection *> order.ptr)
    elif order.kind == REGISTER_SESSION:
        register_session(stream, order.slot, <uint64_t> order.value, now)
    elif order.kind == SESSION_FREE:
        free_session(worker, stream, order.slot)
    elif order.kind == SESSION_IDLE:
        if stream.session_state[order.slot] != SESSION_NONE:
            stream.session_state[order.slot] = SESSION_IS_IDLE if order.value else SESSION_LIVE
            begin_advance(worker, stream, 0, stream.groups)
    elif order.kind == HOLD:
        stream.hold = order.value != 0
        begin_advance(worker, stream, 0, stream.groups)
    elif order.kind == SWEEP:
        sweep(worker, <Move *> order.ptr)
    elif order.kind == DRAIN_POINT:
        drain(worker, <Move *> order.ptr)
    elif order.kind == LEND:
        lend(worker, <Loan *> order.ptr)
    elif order.kind == RECALL:
        (<Loan *> order.ptr).next = worker.migration.recalled
        worker.migration.recalled = <Loan *> order.ptr
    elif order.kind == ADVANCE:
        if order.value:
            begin_revision(worker, stream, order.group)
        else:
            begin_advance(worker, stream, order.group, order.group + 1)
    elif order.kind == CLOSE_WINDOWS:
        close_windows(worker, order.tag, order.value)
    elif order.kind == PING:
        flush_outputs(worker)
        report(worker, PONG, 0, 0, NULL, 0, order.tag)

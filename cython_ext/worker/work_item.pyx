"""See work_item.pxd."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.wire.decoder cimport (
    DECODE_BARRIER, DECODE_EOS, DECODE_FAULT, DECODE_MARKER, DECODE_NEED, DECODE_ROWS, DECODE_WATERMARK, Decoded,
    decoder_next,
)
from flexstream.cython_ext.wire.frame cimport FRAME_ACK, HEADER_BYTES, Header, header_of
from flexstream.cython_ext.operators.firing cimport query_fire
from flexstream.cython_ext.includes.linux cimport (
    EPOLL_CTL_DEL, MSG_DONTWAIT, MSG_NOSIGNAL, epoll_ctl, send,
)
from flexstream.cython_ext.includes.moves cimport FS_MOVES
from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_load_acquire, fs_load_relaxed, fs_realtime_ns, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.memory.messages cimport CONNECTION_CLOSED, MARKER_SEEN, SESSION_DONE
from flexstream.cython_ext.operators.panes cimport (
    STEP_DONE, STEP_MORE, STEP_WAIT, Query, Step, query_flush, query_has_late_room,
)
from flexstream.cython_ext.memory.ring cimport Message, ring_push
from flexstream.cython_ext.worker.shared cimport Connection
from flexstream.cython_ext.worker.sketch cimport sketch_rows
from flexstream.cython_ext.worker.splitting cimport contribute
from flexstream.cython_ext.worker.worker cimport (
    SESSION_IS_IDLE, SESSION_LIVE, Advance, Item, StreamState, WorkerState,
)

NO_WATERMARK = INT64_MIN
END_OF_STREAM = INT64_MAX


cdef bint report(WorkerState *worker, uint32_t kind, uint32_t stream, uint32_t slot, void *ptr, int64_t value,
                 size_t tag) noexcept nogil:
    cdef Message message
    memset(&message, 0, sizeof(message))
    message.kind = kind
    message.stream = stream
    message.slot = slot
    message.ptr = ptr
    message.value = value
    message.tag = tag
    return ring_push(&worker.out, &message)


# Rows


cdef void look_at_clock(WorkerState *worker) noexcept nogil:
    """Once in a turn of the loop, for streams whose times have a bound."""
    cdef uint64_t now = 0
    cdef uint32_t s
    for s in range(worker.n_streams):
        if worker.streams[s].max_future >= 0:
            if now == 0:
                now = fs_realtime_ns()
            bound_times(worker.streams[s], now)


cdef void begin_rows(WorkerState *worker, StreamState *stream, uint32_t group, const unsigned char *rows,
                     size_t n, uint32_t slot, uint64_t sequence) noexcept nogil:
    worker.item.stream = stream
    worker.item.group = group
    worker.item.rows = rows
    worker.item.n = n
    worker.item.session = stream.session_number[slot]
    worker.item.sequence = sequence
    worker.item.done = 0
    worker.item.next_query = 0
    worker.item.query_done = 0
    fs_count(&stream.received, n)
    fs_count(&stream.group_rows[group], n)
    fs_count(&worker.rows, n)


cdef inline void account(StreamState *stream, uint32_t n) noexcept nogil:
    """Every query has had them; what became of a row differs from query to query, and each counts that itself."""
    fs_count(&stream.accepted, n)
    if stream.n_queries == 0:
        fs_count(&stream.unqueried, n)


cdef Step run_item(WorkerState *worker) noexcept nogil:
    """Batches through every query of the stream, until done or until a late row made a revision due."""
    cdef Item *item = &worker.item
    cdef StreamState *stream = item.stream
    cdef Query *query
    cdef uint32_t n
    cdef uint32_t i
    cdef Step step
    cdef const unsigned char *rows
    cdef bint revise = False
    while item.done < item.n and not revise:
        n = stream.batch_rows if item.n - item.done > stream.batch_rows else <uint32_t> (item.n - item.done)
        rows = item.rows + item.done * stream.row_bytes
        worker.context.session = item.session
        worker.context.sequence = item.sequence + item.done
        worker.context.latest = stream.latest
        while item.next_query < stream.n_queries:
            query = stream.queries[item.next_query]
            if fs_load_relaxed(&query.cancelled):
                item.query_done = 0
                item.next_query += 1
                continue
            if not query_has_late_room(query, &worker.context, n):
                return STEP_WAIT
            worker.context.batch_from = item.query_done
            step = query.kernel(query, &worker.context, &query.sets[item.group],
                                rows + <size_t> item.query_done * stream.row_bytes, n - item.query_done)
            if step == STEP_WAIT:
                item.query_done += worker.context.done
                return STEP_WAIT
            item.query_done = 0
            item.next_query += 1
        for i in range(stream.n_queries):
            revise |= stream.queries[i].sets[item.group].dirty
        account(stream, n)
        if FS_MOVES:
            sketch_rows(stream.sketches, item.group, rows, n, stream.row_bytes)
        item.done += n
        item.next_query = 0
    if revise:
        begin_revision(worker, stream, item.group)
    if item.done == item.n:
        item.stream = NULL
    return STEP_DONE


# Watermarks


cdef int64_t group_minimum(const StreamState *stream, uint32_t group) noexcept nogil:
    """The least watermark of the sessions that count. NO_WATERMARK: hold.

    Idle ones do not count while others do. When all are idle it is the greatest that any of them promised: so far it
    would have come had that one become idle last, and who is silent first must not decide what fires.
    """
    cdef const int64_t *watermarks = stream.session_watermark + <size_t> group * stream.max_sessions
    cdef const uint32_t *lent = stream.lent + <size_t> group * stream.max_sessions
    cdef int64_t least = END_OF_STREAM
    cdef int64_t greatest_idle = NO_WATERMARK
    cdef bint any_ended = False
    cdef bint any_idle = False
    cdef uint32_t slot
    if stream.hold:
        return NO_WATERMARK
    for slot in range(stream.slots_high):
        if stream.session_state[slot] == SESSION_LIVE or (stream.session_state[slot] == SESSION_IS_IDLE and lent[slot]):
            if watermarks[slot] == END_OF_STREAM:
                any_ended = True
            elif watermarks[slot] < least:
                least = watermarks[slot]
        elif stream.session_state[slot] == SESSION_IS_IDLE and watermarks[slot] != END_OF_STREAM:
            any_idle = True
            if watermarks[slot] > greatest_idle:
                greatest_idle = watermarks[slot]
    if least != END_OF_STREAM:
        return least
    return END_OF_STREAM if any_ended and not any_idle else greatest_idle


cdef void begin_advance(WorkerState *worker, StreamState *stream, uint32_t group, uint32_t end) noexcept nogil:
    worker.advance.stream = stream
    worker.advance.group = group
    worker.advance.end = end
    worker.advance.started = False
    worker.advance.revise = False


cdef void begin_revision(WorkerState *worker, StreamState *stream, uint32_t group) noexcept nogil:
    """Windows that have fired and changed since fire again."""
    begin_advance(worker, stream, group, group + 1)
    worker.advance.revise = True


cdef bint owed(WorkerState *worker, uint32_t group) noexcept nogil:
    """Whether somebody else may still have rows of the group: then nothing of it fires."""
    return FS_MOVES and worker.flags.flag[group] and (worker.awaiting[group]
                                                      or fs_load_acquire(&worker.shared.counter[group]) != 0)


cdef void count_ends(StreamState *stream, uint32_t group) noexcept nogil:
    """Sessions whose end in the group has done all that it will do."""
    cdef size_t at = <size_t> group * stream.max_sessions
    cdef uint32_t slot
    stream.ends_due[group] = 0
    for slot in range(stream.slots_high):
        if stream.session_watermark[at + slot] == END_OF_STREAM and not stream.counted[at + slot]:
            stream.counted[at + slot] = 1
            stream.n_done += stream.session_done[slot] == 0
            stream.session_done[slot] += 1


cdef inline void finish_advance(StreamState *stream, Advance *advance) noexcept nogil:
    if stream.ends_due[advance.group]:
        count_ends(stream, advance.group)
    advance.group += 1


cdef Step run_advance(WorkerState *worker) noexcept nogil:
    cdef Advance *advance = &worker.advance
    cdef StreamState *stream = advance.stream
    cdef Query *query
    cdef Step step
    cdef int64_t watermark
    while advance.group < advance.end:
        if not advance.started:
            if not stream.owned[advance.group]:
                if stream.borrows[advance.group] and not contribute(worker, stream, advance.group, False):
                    return STEP_WAIT
                advance.group += 1
                continue
            if owed(worker, advance.group):
                stream.deferred[advance.group] = 1
                advance.group += 1
                continue
            watermark = NO_WATERMARK
            if not advance.revise:
                watermark = group_minimum(stream, advance.group)
                if watermark == NO_WATERMARK or watermark <= stream.watermark[advance.group]:
                    finish_advance(stream, advance)
                    continue
                if watermark != END_OF_STREAM:
                    fs_store_relaxed(<uint64_t *> &stream.watermark[advance.group], <uint64_t> watermark)
            advance.watermark = watermark
            advance.started = True
            advance.next_query = 0
        while advance.next_query < stream.n_queries:
            query = stream.queries[advance.next_query]
            watermark = query.sets[advance.group].watermark if advance.revise else advance.watermark
            step = query_fire(query, &worker.context, advance.group, watermark)
            if step != STEP_DONE:
                return step
            advance.next_query += 1
        advance.started = False
        finish_advance(stream, advance)
    advance.stream = NULL
    return STEP_DONE


cdef void note_session(StreamState *stream, uint32_t slot, uint32_t group, int64_t watermark) noexcept nogil:
    cdef int64_t *current = &stream.session_watermark[<size_t> group * stream.max_sessions + slot]
    if watermark <= current[0]:
        return
    fs_store_relaxed(<uint64_t *> current, <uint64_t> watermark)
    if watermark == END_OF_STREAM and stream.owned[group]:
        stream.ends_due[group] = 1


cdef void raise_session(WorkerState *worker, StreamState *stream, uint32_t slot, uint32_t group,
                        int64_t watermark) noexcept nogil:
    """The session promises no earlier row in the group.

    It is noted for groups of other workers too: one of them may be adopted here before its old owner has read the
    same order, and then nobody else would know. For a connection that was lent the borrower says it, behind its rows.
    """
    if not stream.lent[<size_t> group * stream.max_sessions + slot]:
        note_session(stream, slot, group, watermark)


# Connections


cdef void ack_the_rest(Connection *connection) noexcept nogil:
    """Nothing more will come on it: what is not acknowledged now never is."""
    if connection.ack_bytes and connection.decoder.next_row > connection.acked_row:
        send_ack(connection)


cdef void send_ack(Connection *connection) noexcept nogil:
    """Tell the producer what it may forget. A full socket loses nothing: the next ACK says more."""
    cdef uint64_t next_row = connection.decoder.next_row
    cdef Header ack = header_of(FRAME_ACK, <uint16_t> connection.group, 0, 0, next_row)
    if send(connection.fd, &ack, HEADER_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL) == HEADER_BYTES:
        connection.acked_row = next_row
        connection.unacked_bytes = 0


cdef void push_limbo(WorkerState *worker) noexcept nogil:
    cdef Connection *connection
    cdef Connection *following
    while worker.limbo != NULL:
        connection = worker.limbo
        following = connection.next         # once reported, Python may free it
        if not report(worker, CONNECTION_CLOSED, connection.stream, connection.slot, connection,
                      connection.closed_why, connection.id):
            return
        worker.limbo = following


cdef void detach(WorkerState *worker, Connection *connection) noexcept nogil:
    """Stop serving it."""
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef size_t at = <size_t> connection.group * stream.max_sessions + connection.slot
    epoll_ctl(worker.epoll_fd, EPOLL_CTL_DEL, connection.fd, NULL)
    if stream.connection[at] == connection:
        stream.connection[at] = NULL
        stream.next_row[at] = connection.decoder.next_row
    if connection.previous != NULL:
        connection.previous.next = connection.next
    else:
        worker.connections = connection.next
    if connection.next != NULL:
        connection.next.previous = connection.previous
    if worker.serving == connection:
        worker.serving = NULL
    fs_store_relaxed(&worker.n_connections, worker.n_connections - 1)
    worker.detached += 1


cdef void close_connection(WorkerState *worker, Connection *connection, int64_t why) noexcept nogil:
    """Stop serving it and give it back to Python, which tells the peer why and closes the socket."""
    detach(worker, connection)
    connection.closed_why = why
    connection.next = worker.limbo
    connection.previous = NULL
    worker.limbo = connection
    push_limbo(worker)


cdef void keep_carry(WorkerState *worker, Connection *connection) noexcept nogil:
    connection.carry_n = worker.bytes_n - worker.bytes_at
    memcpy(connection.carry, worker.block + worker.bytes_at, connection.carry_n)


cdef void serve_event(WorkerState *worker, Decoded event) noexcept nogil:
    """Turn what the decoder found into the next piece of work."""
    cdef Connection *connection = worker.serving
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef uint32_t q
    if event == DECODE_ROWS:
        connection.rows += connection.decoder.n_rows
        begin_rows(worker, stream, connection.group, connection.decoder.rows, connection.decoder.n_rows,
                   connection.slot, connection.decoder.next_row - connection.decoder.n_rows)
    elif event == DECODE_WATERMARK:
        raise_session(worker, stream, connection.slot, connection.group,
                      believable(stream, <int64_t> connection.decoder.value))
        begin_advance(worker, stream, connection.group, connection.group + 1)
    elif event == DECODE_EOS:
        ack_the_rest(connection)
        raise_session(worker, stream, connection.slot, connection.group, END_OF_STREAM)
        begin_advance(worker, stream, connection.group, connection.group + 1)
    elif event == DECODE_MARKER:
        for q in range(stream.n_queries):
            query_flush(stream.queries[q], &worker.context)
        report(worker, MARKER_SEEN, connection.stream, connection.slot, NULL, <int64_t> connection.decoder.value, 0)
    elif event == DECODE_BARRIER:
        fs_count(&worker.barriers, 1)


cdef void finish_bytes(WorkerState *worker) noexcept nogil:
    cdef Connection *connection = worker.serving
    keep_carry(worker, connection)
    worker.serving = NULL
    if connection.ack_bytes and connection.unacked_bytes >= connection.ack_bytes \
            and connection.decoder.next_row > connection.acked_row:
        send_ack(connection)


cdef void begin_later_advance(WorkerState *worker) noexcept nogil:
    """Watermarks that came while something else was worked on."""
    cdef uint32_t s = 0
    while not worker.later >> s & 1:
        s += 1
    worker.later &= ~(<uint64_t> 1 << s)
    begin_advance(worker, worker.streams[s], 0, worker.streams[s].groups)


cdef Step worker_progress(WorkerState *worker) noexcept nogil:
    """Work on the current item. STEP_DONE: there is none left. STEP_MORE: a good place for a quiescent point."""
    cdef Step step
    cdef Decoded event
    while True:
        if worker.advance.stream != NULL:
            step = run_advance(worker)
            if step != STEP_DONE:
                return step
        if worker.item.stream != NULL:
            if run_item(worker) == STEP_WAIT:
                return STEP_WAIT
            continue
        if worker.later:
            begin_later_advance(worker)
            continue
        report_done_sessions(worker)
        if worker.feeding:
            worker.feeding = False
            fs_store_release(&worker.fed, worker.fed + 1)
        if worker.serving == NULL:
            return STEP_DONE
        event = decoder_next(&worker.serving.decoder, worker.block, worker.bytes_n, &worker.bytes_at)
        if event == DECODE_NEED:
            finish_bytes(worker)
        elif event == DECODE_FAULT:
            close_connection(worker, worker.serving, worker.serving.decoder.fault)
        else:
            serve_event(worker, event)


cdef void report_done_sessions(WorkerState *worker) noexcept nogil:
    """Behind the results of the session's last windows: who hears of the end finds them in the log."""
    cdef uint32_t s, q, slot
    cdef StreamState *stream
    cdef bint flushed
    for s in range(worker.n_streams):
        stream = worker.streams[s]
        if stream.n_done == 0:
            continue
        flushed = True
        for q in range(stream.n_queries):
            flushed = query_flush(stream.queries[q], &worker.context) and flushed
        for slot in range(stream.slots_high if flushed else 0):
            if stream.session_done[slot] and report(worker, SESSION_DONE, s, slot, NULL, stream.session_done[slot], 0):
                stream.session_done[slot] = 0
                stream.n_done -= 1

"""See work_item.pxd."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.includes.moves cimport FS_MOVES
from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_load_acquire, fs_load_relaxed, fs_realtime_ns, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.memory.messages cimport MARKER_SEEN, SESSION_DONE
from flexstream.cython_ext.memory.ring cimport Message, ring_push
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_WAIT, Input, Operator, Step, least_watermark
from flexstream.cython_ext.wire.decoder cimport (
    DECODE_BARRIER, DECODE_EOS, DECODE_FAULT, DECODE_MARKER, DECODE_NEED, DECODE_ROWS, DECODE_WATERMARK, Decoded,
    decoder_next,
)
from flexstream.cython_ext.worker.connections cimport ack_the_rest, close_connection, send_ack
from flexstream.cython_ext.worker.late_output cimport flush_stream, has_late_room, write_late
from flexstream.cython_ext.worker.shared cimport Connection
from flexstream.cython_ext.worker.sketch cimport sketch_rows
from flexstream.cython_ext.worker.splitting cimport contribute
from flexstream.cython_ext.worker.worker cimport ADVANCE_TASK, SESSION_IS_IDLE, SESSION_LIVE, TaskPlace, TaskRun

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
    return ring_push(&worker.mail.out, &message)


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


cdef inline Task *begin(WorkerState *worker, TaskPlace place, TaskRun run, StreamState *stream,
                        uint32_t group) noexcept nogil:
    """The task at that place, from now on with something to do. Assumes: it has none."""
    cdef Task *task = &worker.work.tasks[<int> place]
    worker.work.pending |= 1 << place
    task.run = run
    task.stream = stream
    task.group = group
    task.next_input = 0
    return task


cdef inline void finish(WorkerState *worker, TaskPlace place) noexcept nogil:
    worker.work.pending &= ~(<uint32_t> 1 << place)


cdef void begin_rows(WorkerState *worker, StreamState *stream, uint32_t group, const unsigned char *rows,
                     size_t n, uint32_t slot, uint64_t sequence) noexcept nogil:
    cdef Task *task = begin(worker, ROWS_TASK, run_rows, stream, group)
    task.rows = rows
    task.n = n
    task.session = stream.session_number[slot]
    task.sequence = sequence
    task.done = 0
    task.input_done = 0
    fs_count(&stream.received, n)
    fs_count(&stream.group_rows[group], n)
    fs_count(&worker.counters.rows, n)


cdef inline void account(StreamState *stream, uint32_t n) noexcept nogil:
    """Every input has had them; what became of a row differs from input to input, and each counts that itself."""
    fs_count(&stream.accepted, n)
    if stream.n_inputs == 0:
        fs_count(&stream.unqueried, n)


cdef Step run_rows(WorkerState *worker, Task *task) noexcept nogil:
    """Batches through every input of the stream, until done or until a late row made a revision due."""
    cdef StreamState *stream = task.stream
    cdef Input *input
    cdef uint32_t n
    cdef uint32_t i
    cdef Step step
    cdef const unsigned char *rows
    cdef bint revise = False
    while task.done < task.n and not revise:
        n = stream.batch_rows if task.n - task.done > stream.batch_rows else <uint32_t> (task.n - task.done)
        rows = task.rows + task.done * stream.row_bytes
        worker.context.session = task.session
        worker.context.sequence = task.sequence + task.done
        worker.context.latest = stream.latest
        if task.next_input == 0 and task.input_done == 0 and not has_late_room(stream, &worker.context, n):
            return STEP_WAIT
        while task.next_input < stream.n_inputs:
            input = stream.inputs[task.next_input]
            if fs_load_relaxed(&input.op.cancelled):
                task.input_done = 0
                task.next_input += 1
                continue
            worker.context.batch_from = task.input_done
            step = input.kernel(input, &worker.context, &input.op.sets[task.group],
                                rows + <size_t> task.input_done * stream.row_bytes, n - task.input_done)
            if step == STEP_WAIT:
                task.input_done += worker.context.done
                return STEP_WAIT
            task.input_done = 0
            task.next_input += 1
        if not write_late(stream, &worker.context, rows, n, task.group):
            return STEP_WAIT
        for i in range(stream.n_inputs):
            revise |= stream.inputs[i].op.sets[task.group].dirty
        account(stream, n)
        if FS_MOVES:
            sketch_rows(stream.sketches, task.group, rows, n, stream.row_bytes)
        task.done += n
        task.next_input = 0
    if revise:
        begin_revision(worker, stream, task.group)
    if task.done == task.n:
        finish(worker, ROWS_TASK)
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
    """Of the groups from `group` to `end - 1`."""
    cdef Task *task = begin(worker, ADVANCE_TASK, run_advance, stream, group)
    task.end = end
    task.started = False
    task.revise = False


cdef void begin_revision(WorkerState *worker, StreamState *stream, uint32_t group) noexcept nogil:
    """Windows that have fired and changed since fire again."""
    begin_advance(worker, stream, group, group + 1)
    worker.work.tasks[<int> ADVANCE_TASK].revise = True


cdef bint owed(WorkerState *worker, uint32_t group) noexcept nogil:
    """Whether somebody else may still have rows of the group: then nothing of it fires."""
    return FS_MOVES and worker.migration.flags.flag[group] and (worker.migration.awaiting[group]
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


cdef inline void finish_group(StreamState *stream, Task *task) noexcept nogil:
    if stream.ends_due[task.group]:
        count_ends(stream, task.group)
    task.group += 1


cdef Step advance_input(WorkerState *worker, Input *input, const Task *task) noexcept nogil:
    """What is due in the input's operator, now that the input has come so far."""
    cdef Operator *op = input.op
    cdef int64_t watermark
    if task.revise:
        watermark = op.sets[task.group].watermark
    else:
        input.watermark[task.group] = task.watermark
        watermark = least_watermark(op, task.group)
        if watermark == NO_WATERMARK:
            return STEP_DONE                # another input has not begun
    return op.fire(op, &worker.context, task.group, watermark)


cdef Step run_advance(WorkerState *worker, Task *task) noexcept nogil:
    cdef StreamState *stream = task.stream
    cdef Step step
    cdef int64_t watermark
    while task.group < task.end:
        if not task.started:
            if not stream.owned[task.group]:
                if stream.borrows[task.group] and not contribute(worker, stream, task.group, False):
                    return STEP_WAIT
                task.group += 1
                continue
            if owed(worker, task.group):
                stream.deferred[task.group] = 1
                task.group += 1
                continue
            watermark = NO_WATERMARK
            if not task.revise:
                watermark = group_minimum(stream, task.group)
                if watermark == NO_WATERMARK or watermark <= stream.watermark[task.group]:
                    finish_group(stream, task)
                    continue
                if watermark != END_OF_STREAM:
                    fs_store_relaxed(<uint64_t *> &stream.watermark[task.group], <uint64_t> watermark)
            task.watermark = watermark
            task.started = True
            task.next_input = 0
        while task.next_input < stream.n_inputs:
            step = advance_input(worker, stream.inputs[task.next_input], task)
            if step != STEP_DONE:
                return step
            task.next_input += 1
        task.started = False
        finish_group(stream, task)
    finish(worker, ADVANCE_TASK)
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


# Received bytes


cdef void keep_carry(WorkerState *worker, Connection *connection) noexcept nogil:
    connection.carry_n = worker.net.bytes_n - worker.net.bytes_at
    memcpy(connection.carry, worker.net.block + worker.net.bytes_at, connection.carry_n)


cdef void serve_event(WorkerState *worker, Decoded event) noexcept nogil:
    """Turn what the decoder found into the next piece of work."""
    cdef Connection *connection = worker.net.serving
    cdef StreamState *stream = worker.streams[connection.stream]
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
        flush_stream(stream, &worker.context)
        report(worker, MARKER_SEEN, connection.stream, connection.slot, NULL, <int64_t> connection.decoder.value, 0)
    elif event == DECODE_BARRIER:
        fs_count(&worker.counters.barriers, 1)


cdef void finish_bytes(WorkerState *worker) noexcept nogil:
    cdef Connection *connection = worker.net.serving
    keep_carry(worker, connection)
    worker.net.serving = NULL
    if connection.ack_bytes and connection.unacked_bytes >= connection.ack_bytes \
            and connection.decoder.next_row > connection.acked_row:
        send_ack(connection)


cdef void begin_later_advance(WorkerState *worker) noexcept nogil:
    """Watermarks that came while something else was worked on."""
    cdef uint32_t s = 0
    while not worker.work.later >> s & 1:
        s += 1
    worker.work.later &= ~(<uint64_t> 1 << s)
    begin_advance(worker, worker.streams[s], 0, worker.streams[s].groups)


cdef Step worker_progress(WorkerState *worker) noexcept nogil:
    """Work on what was begun, then on what was received. STEP_DONE: there is nothing left. STEP_MORE: a good place for a
    quiescent point."""
    cdef Task *task
    cdef Step step
    cdef Decoded event
    while True:
        task = pick(&worker.work)
        if task != NULL:
            step = task.run(worker, task)
            if step != STEP_DONE:
                return step
            continue
        if worker.work.later:
            begin_later_advance(worker)
            continue
        report_done_sessions(worker)
        if worker.work.feeding:
            worker.work.feeding = False
            fs_store_release(&worker.counters.fed, worker.counters.fed + 1)
        if worker.net.serving == NULL:
            return STEP_DONE
        event = decoder_next(&worker.net.serving.decoder, worker.net.block, worker.net.bytes_n, &worker.net.bytes_at)
        if event == DECODE_NEED:
            finish_bytes(worker)
        elif event == DECODE_FAULT:
            close_connection(worker, worker.net.serving, worker.net.serving.decoder.fault)
        else:
            serve_event(worker, event)


cdef void report_done_sessions(WorkerState *worker) noexcept nogil:
    """Behind the results of the session's last windows: who hears of the end finds them in the log."""
    cdef uint32_t s, slot
    cdef StreamState *stream
    cdef bint flushed
    for s in range(worker.n_streams):
        stream = worker.streams[s]
        if stream.n_done == 0:
            continue
        flushed = flush_stream(stream, &worker.context)
        for slot in range(stream.slots_high if flushed else 0):
            if stream.session_done[slot] and report(worker, SESSION_DONE, s, slot, NULL, stream.session_done[slot], 0):
                stream.session_done[slot] = 0
                stream.n_done -= 1

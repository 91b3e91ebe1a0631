"""See splitting.pxd."""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.memory.arena cimport ARENA_OK, arena_alloc, arena_release, arena_size
from flexstream.cython_ext.operators.dense_pane cimport dense_settle
from flexstream.cython_ext.operators.firing cimport settle
from flexstream.cython_ext.includes.native cimport fs_count, fs_load_acquire, fs_store_release
from flexstream.cython_ext.memory.messages cimport BORROW, GIVE_BACK, SHARE
from flexstream.cython_ext.worker.moving cimport (
    begin_at, bytes_of_pane, operator_of, ring_room, say_position, tell, wake,
)
from flexstream.cython_ext.operators.graph cimport Input, Operator, is_first_of_stream, least_watermark
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.operators.panes cimport list_release, list_skip, mark_dirty, panes_absorb, panes_reset
from flexstream.cython_ext.operators.windower cimport Windower, pane_end, pane_of
from flexstream.cython_ext.worker.connections cimport detach, take_over
from flexstream.cython_ext.worker.work_item cimport begin_advance, note_session
from flexstream.cython_ext.worker.shared cimport Connection, LentStream, SharedOperator


# The owner lends


cdef inline bint can_lend(StreamState *stream, LentStream *lent, size_t at, uint32_t slot) noexcept nogil:
    cdef Connection *connection = stream.connection[at + slot]
    return connection != NULL and not connection.decoder.ended and not lent.lent[slot]


cdef void choose(StreamState *stream, Loan *loan, LentStream *lent) noexcept nogil:
    """Connections with about the wanted share of the recent rows; never all of them.

    Lanes that were opened for the borrower come first, then the busiest that fit.
    """
    cdef size_t at = <size_t> loan.group * stream.max_sessions
    cdef uint64_t total = 0
    cdef uint64_t given = 0
    cdef uint32_t left = 0
    cdef uint32_t slot, best
    cdef uint64_t recent
    for slot in range(stream.slots_high):
        if can_lend(stream, lent, at, slot):
            total += stream.connection[at + slot].recent + 1
            left += 1
    for slot in range(stream.slots_high):
        if left > 1 and lent.wanted[slot] and can_lend(stream, lent, at, slot):
            lent.lent[slot] = 1
            given += stream.connection[at + slot].recent + 1
            left -= 1
    while left > 1:
        best = stream.slots_high
        for slot in range(stream.slots_high):
            if not can_lend(stream, lent, at, slot):
                continue
            recent = stream.connection[at + slot].recent
            if (given + recent + 1) * 100 <= total * (loan.share + 5) \
                    and (best == stream.slots_high or recent > stream.connection[at + best].recent):
                best = slot
        if best == stream.slots_high:
            return
        lent.lent[best] = 1
        given += stream.connection[at + best].recent + 1
        left -= 1


cdef void lend_stream(WorkerState *worker, StreamState *stream, Loan *loan, LentStream *lent) noexcept nogil:
    cdef size_t at = <size_t> loan.group * stream.max_sessions
    cdef uint32_t slot
    cdef Connection *connection
    choose(stream, loan, lent)
    for slot in range(stream.slots_high):
        if lent.lent[slot]:
            connection = stream.connection[at + slot]
            detach(worker, connection)
            connection.next = loan.connections
            loan.connections = connection
            loan.n_connections += 1
            lent.session_number[slot] = stream.session_number[slot]
            lent.session_watermark[slot] = stream.session_watermark[at + slot]
            lent.next_row[slot] = stream.next_row[at + slot]
            stream.lent[at + slot] = 1 + loan.borrower


cdef void lend(WorkerState *worker, Loan *loan) noexcept nogil:
    """Give some connections of the group to the borrower. Without two connections there is nothing to share."""
    cdef uint32_t s, i
    cdef uint32_t borrower = loan.borrower  # once it has been told, the parcel may be gone
    if worker.n_streams and worker.streams[0].owned[loan.group]:
        for s in range(worker.n_streams):
            lend_stream(worker, worker.streams[s], loan, &loan.streams[s])
        for i in range(worker.n_operators):
            say_position(worker.operators[i], loan.group, &loan.operators[i])
        loan.n_operators = worker.n_operators
    if loan.n_connections == 0:
        fs_store_release(&loan.done, 1)
        return
    tell(worker, borrower, BORROW, loan)
    wake(worker, borrower)


# The borrower


cdef void borrow_stream(StreamState *stream, Loan *loan, LentStream *lent) noexcept nogil:
    cdef size_t at = <size_t> loan.group * stream.max_sessions
    cdef uint32_t slot
    for slot in range(stream.max_sessions):
        if lent.lent[slot] and stream.session_number[slot] <= lent.session_number[slot]:    # or another session has the slot by now
            stream.borrowed[at + slot] = 1
            stream.borrows[loan.group] += 1
            stream.next_row[at + slot] = lent.next_row[slot]
            note_session(stream, slot, loan.group, lent.session_watermark[slot])
    if stream.borrows[loan.group]:
        stream.shared_until[loan.group] = INT64_MIN


cdef bint gets_borrowed_rows(const WorkerState *worker, const Operator *op, uint32_t group) noexcept nogil:
    cdef uint32_t i
    for i in range(op.n_inputs):
        if worker.streams[op.inputs[i].stream].borrows[group]:
            return True
    return False


cdef void borrow(WorkerState *worker, Loan *loan) noexcept nogil:
    cdef uint32_t s, i
    cdef Operator *op
    for s in range(loan.n_streams):
        borrow_stream(worker.streams[s], loan, &loan.streams[s])
    for i in range(loan.n_operators):
        op = operator_of(worker, loan.operators[i].id)
        if op != NULL and gets_borrowed_rows(worker, op, loan.group):
            begin_at(op, loan.group, &loan.operators[i])
    take_over(worker, &loan.connections)
    fs_store_release(&loan.done, 1)         # the mover's again: the split stands


cdef int64_t borrowed_watermark(StreamState *stream, uint32_t group) noexcept nogil:
    """The least of what was borrowed; INT64_MAX: all of it has ended."""
    cdef size_t at = <size_t> group * stream.max_sessions
    cdef int64_t least = INT64_MAX
    cdef uint32_t slot
    for slot in range(stream.slots_high):
        if stream.borrowed[at + slot] and stream.session_watermark[at + slot] < least:
            least = stream.session_watermark[at + slot]
    return least


cdef bint passes_a_pane(StreamState *stream, int64_t before, int64_t now) noexcept nogil:
    cdef uint32_t i
    cdef const Windower *windower
    if now == before or now == INT64_MIN:
        return False
    if now == INT64_MAX or before == INT64_MIN:
        return True
    for i in range(stream.n_inputs):
        windower = &stream.inputs[i].op.windower
        if pane_of(windower, now) > pane_of(windower, before):
            return True
    return stream.n_inputs == 0


cdef uint32_t complete_panes(const Operator *op, const PaneSet *panes, int64_t watermark, bint everything) noexcept nogil:
    cdef uint32_t n = 0
    if everything or watermark == INT64_MAX:
        return panes.n
    while n < panes.n and pane_end(&op.windower, panes.panes[n].start) <= watermark:
        n += 1
    return n


cdef Share *new_share(WorkerState *worker, StreamState *stream, uint32_t group) noexcept nogil:
    cdef uint32_t n_slots = stream.borrows[group]
    cdef uint64_t bytes_ = sizeof(Share) + stream.n_inputs * sizeof(SharedOperator) + n_slots * 16
    cdef void *memory
    cdef Share *share
    if arena_alloc(&worker.arena, bytes_, &memory) != ARENA_OK:
        return NULL
    share = <Share *> memory
    share.bytes = bytes_
    share.state_bytes = arena_size(bytes_)
    share.borrower = worker.index
    share.stream = stream.index
    share.group = group
    share.n_operators = 0
    share.taken = 0
    share.n_slots = 0
    share.operators = <SharedOperator *> (<unsigned char *> memory + sizeof(Share))
    share.watermarks = <int64_t *> (share.operators + stream.n_inputs)
    share.slots = <uint32_t *> (share.watermarks + n_slots)
    return share


cdef bint share_operator(WorkerState *worker, Share *share, Operator *op, int64_t watermark,
                         bint everything) noexcept nogil:
    """The operator's complete panes into the share. False: no memory for the list."""
    cdef PaneSet *panes = &op.sets[share.group]
    cdef SharedOperator *out = &share.operators[share.n_operators]
    cdef uint32_t n = complete_panes(op, panes, watermark, everything)
    cdef uint32_t i
    cdef void *memory = NULL
    if n and arena_alloc(&worker.arena, n * sizeof(Pane *), &memory) != ARENA_OK:
        return False
    out.id = op.id
    panes_reset(&out.panes)
    out.panes.n = n
    out.panes.capacity = n
    out.panes.room = <Pane **> memory
    out.panes.panes = <Pane **> memory
    share.n_operators += 1
    if n == 0:
        return True
    share.state_bytes += arena_size(n * sizeof(Pane *))
    memcpy(memory, panes.panes, n * sizeof(Pane *))
    for i in range(n):
        dense_settle(op, &worker.arena, panes.panes[i])
        share.state_bytes += bytes_of_pane(op, panes.panes[i])
        panes.usual_keys = panes.panes[i].table.used
    list_skip(panes, n)
    panes.recent = NULL
    panes.previous = NULL
    panes.dirty = False
    for i in range(panes.n):
        if panes.panes[i].dirty:
            mark_dirty(panes, panes.panes[i])
    fs_count(&op.counters.open_panes, -<uint64_t> n)
    return True


cdef void settle_input(WorkerState *worker, Input *input, uint32_t group, int64_t watermark) noexcept nogil:
    """The owner knows how far the input has come here: rows before are late from now on."""
    cdef Operator *op = input.op
    input.watermark[group] = watermark
    watermark = least_watermark(op, group)
    if INT64_MIN < watermark < INT64_MAX:
        while not settle(op, &worker.context, &op.sets[group], watermark):
            pass


cdef bint contribute(WorkerState *worker, StreamState *stream, uint32_t group, bint everything) noexcept nogil:
    """Send the owner what is complete, if there is news. False: no memory, or no room on the ring; try again.

    A share that could not be completed is sent with the operators that it has, and without its watermarks.
    """
    cdef size_t at = <size_t> group * stream.max_sessions
    cdef int64_t watermark = borrowed_watermark(stream, group)
    cdef uint32_t owner = <uint32_t> fs_load_acquire(&worker.shared.placement[group])
    cdef uint32_t slot, i
    cdef bint whole = True
    cdef Share *share
    if not everything and not passes_a_pane(stream, stream.shared_until[group], watermark):
        return True
    if ring_room(worker, owner) < 2:
        return False
    share = new_share(worker, stream, group)
    if share == NULL:
        return False
    for i in range(stream.n_inputs):
        if is_first_of_stream(stream.inputs[i]) \
                and not share_operator(worker, share, stream.inputs[i].op, watermark, everything):
            whole = False
            break
    if whole:
        for slot in range(stream.slots_high):
            if stream.borrowed[at + slot]:
                share.slots[share.n_slots] = slot
                share.watermarks[share.n_slots] = stream.session_watermark[at + slot]
                share.n_slots += 1
        stream.shared_until[group] = watermark
        if INT64_MIN < watermark < INT64_MAX:
            for i in range(stream.n_inputs):
                settle_input(worker, stream.inputs[i], group, watermark)
    fs_count(&worker.arena.in_use, -share.state_bytes)
    tell(worker, owner, SHARE, share)
    wake(worker, owner)
    return whole


cdef bint has_panes(StreamState *stream, uint32_t group) noexcept nogil:
    cdef uint32_t i
    for i in range(stream.n_inputs):
        if stream.inputs[i].op.sets[group].n:
            return True
    return False


cdef bint give_back(WorkerState *worker, Loan *loan) noexcept nogil:
    """All panes, then the connections. False: no memory for the last share; try again."""
    cdef uint32_t s, slot, i
    cdef size_t at
    cdef uint32_t owner = loan.owner        # once it has been told, the parcel may be gone
    cdef StreamState *stream
    cdef LentStream *lent
    cdef Connection *connection
    for s in range(loan.n_streams):
        stream = worker.streams[s]
        if (stream.borrows[loan.group] or has_panes(stream, loan.group)) \
                and not contribute(worker, stream, loan.group, True):
            return False
    for s in range(loan.n_streams):
        stream = worker.streams[s]
        lent = &loan.streams[s]
        at = <size_t> loan.group * stream.max_sessions
        for slot in range(stream.slots_high):
            if not stream.borrowed[at + slot]:
                continue
            if stream.connection[at + slot] != NULL:
                connection = stream.connection[at + slot]
                detach(worker, connection)
                connection.next = loan.connections
                loan.connections = connection
                loan.n_connections += 1
            lent.lent[slot] = 1
            lent.next_row[slot] = stream.next_row[at + slot]
            stream.borrowed[at + slot] = 0
        stream.borrows[loan.group] = 0
        for i in range(stream.n_inputs):
            list_release(&worker.arena, &stream.inputs[i].op.sets[loan.group])
            panes_reset(&stream.inputs[i].op.sets[loan.group])
    tell(worker, owner, GIVE_BACK, loan)
    wake(worker, owner)
    return True


# The owner gets back


cdef bint absorb_share(WorkerState *worker, Share *share) noexcept nogil:
    """Panes first, then the watermarks that they allow. False: no memory for a list of panes; try again."""
    cdef StreamState *stream = worker.streams[share.stream]
    cdef SharedOperator *shared
    cdef Operator *op
    cdef PaneSet *panes
    cdef uint32_t i
    while share.taken < share.n_operators:
        shared = &share.operators[share.taken]
        op = operator_of(worker, shared.id)
        if op != NULL:
            panes = &op.sets[share.group]
            if not panes_absorb(op, &worker.context, panes, &shared.panes, False):
                return False
        share.taken += 1
    for i in range(share.n_slots):          # not of a slot that another session has by now: that was not lent
        if stream.lent[<size_t> share.group * stream.max_sessions + share.slots[i]] == 1 + share.borrower:
            note_session(stream, share.slots[i], share.group, share.watermarks[i])
    fs_count(&worker.arena.in_use, share.state_bytes)
    begin_advance(worker, stream, share.group, share.group + 1)
    arena_release(&worker.arena, share, share.bytes)
    return True


cdef void take_back(WorkerState *worker, Loan *loan) noexcept nogil:
    cdef uint32_t s, slot
    cdef size_t at
    cdef StreamState *stream
    for s in range(loan.n_streams):
        stream = worker.streams[s]
        at = <size_t> loan.group * stream.max_sessions
        for slot in range(stream.slots_high):
            if stream.lent[at + slot] == 1 + loan.borrower:
                stream.lent[at + slot] = 0
                if loan.streams[s].lent[slot]:
                    stream.next_row[at + slot] = loan.streams[s].next_row[slot]
    take_over(worker, &loan.connections)
    fs_store_release(&loan.done, 1)

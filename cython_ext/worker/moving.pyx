"""See moving.pxd."""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memset

from flexstream.cython_ext.includes.linux cimport write
from flexstream.cython_ext.includes.moves cimport FS_MOVES
from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_fence, fs_fetch_sub, fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.memory.arena cimport arena_size
from flexstream.cython_ext.memory.messages cimport ADOPT, BORROW, DRAINED, GIVE_BACK, SHARE, SOCKET
from flexstream.cython_ext.memory.ring cimport Message, Ring, ring_empty, ring_free_slots, ring_pop, ring_push
from flexstream.cython_ext.operators.dense_pane cimport dense_settle_all
from flexstream.cython_ext.operators.edges cimport operator_flush
from flexstream.cython_ext.operators.panes cimport pane_bytes, panes_absorb, panes_reset
from flexstream.cython_ext.operators.rolling cimport rolling_release
from flexstream.cython_ext.worker.connections cimport detach, take_over, take_socket, take_sockets
from flexstream.cython_ext.worker.late_output cimport flush_late
from flexstream.cython_ext.worker.shared cimport Flags, Loan, MovedStream, Position, Share
from flexstream.cython_ext.worker.splitting cimport absorb_share, borrow, take_back
from flexstream.cython_ext.worker.work_item cimport begin_advance, begin_revision, note_session

cdef enum:
    DEFERRED = 1                  # StreamState.deferred: revisions first,
    DEFERRED_WATERMARK = 2        # then what the watermark has passed


cdef inline Ring *ring_to(WorkerState *worker, uint32_t target) noexcept nogil:
    return &worker.shared.rings[<size_t> worker.index * worker.shared.n_workers + target]


cdef inline Ring *ring_from(WorkerState *worker, uint32_t source) noexcept nogil:
    return &worker.shared.rings[<size_t> source * worker.shared.n_workers + worker.index]


cdef void wake(WorkerState *worker, uint32_t target) noexcept nogil:
    cdef uint64_t one = 1
    fs_fence()
    if fs_load_relaxed(worker.shared.sleeping[target]):
        if write(worker.shared.wake_fd[target], &one, 8) < 0:
            return          # readable already: it is awake


cdef bint tell(WorkerState *worker, uint32_t target, uint32_t kind, void *ptr) noexcept nogil:
    cdef Message message
    memset(&message, 0, sizeof(message))
    message.kind = kind
    message.ptr = ptr
    return ring_push(ring_to(worker, target), &message)


cdef uint64_t ring_room(WorkerState *worker, uint32_t target) noexcept nogil:
    """Messages that may be sent and still leave room for every move."""
    cdef uint64_t free_slots = ring_free_slots(ring_to(worker, target))
    cdef uint64_t moves = 2 * <uint64_t> worker.shared.groups
    return free_slots - moves if free_slots > moves else 0


cdef void quiescent(WorkerState *worker) noexcept nogil:
    """Nothing that was read from the flags before is in use any more."""
    cdef Flags *flags
    if not FS_MOVES:
        return
    flags = <Flags *> <void *> fs_load_acquire(&worker.shared.flags)
    if flags != worker.migration.flags:
        worker.migration.flags = flags
        fs_store_release(&worker.migration.seen, flags.version)


# Sockets


cdef bint waits_for_order(const WorkerState *worker, const StreamState *stream, uint32_t group) noexcept nogil:
    """Whether the group's rows must stay unread here until its old owner has drained: a query needs their order."""
    cdef uint32_t i
    if not worker.migration.awaiting[group]:
        return False
    for i in range(stream.n_inputs):
        if stream.inputs[i].op.ordered:
            return True
    return False


cdef void take_over_unordered(WorkerState *worker, Move *move) noexcept nogil:
    """Serve the parcel's connections, but for those that wait for the old owner: they stay in it."""
    cdef Connection *connection = move.connections
    cdef Connection *following
    cdef Connection *ready = NULL
    move.connections = NULL
    while connection != NULL:
        following = connection.next
        if waits_for_order(worker, worker.streams[connection.stream], move.group):
            connection.next = move.connections
            move.connections = connection
        else:
            connection.next = ready
            ready = connection
        connection = following
    take_over(worker, &ready)


cdef Position position_of(const PaneSet *panes) noexcept nogil:
    cdef Position position
    position.watermark = panes.watermark
    position.late_before = panes.late_before
    position.fired_until = panes.fired_until
    position.restored_until = panes.restored_until
    position.usual_keys = panes.usual_keys
    return position


cdef void say_position(const Operator *op, uint32_t group, MovedOperator *moved) noexcept nogil:
    """How far the operator has come with the group, for whoever goes on with it."""
    cdef uint32_t i
    moved.id = op.id
    moved.absorbed = False
    moved.position = position_of(&op.sets[group])
    for i in range(op.n_inputs):
        moved.watermark[i] = op.inputs[i].watermark[group]


cdef void begin_at(Operator *op, uint32_t group, const MovedOperator *moved) noexcept nogil:
    """Fresh partials that go on where another worker is, or later: windows may have been closed here meanwhile."""
    cdef PaneSet *panes = &op.sets[group]
    cdef const Position *position = &moved.position
    cdef Position known = position_of(panes)
    cdef uint32_t i
    for i in range(op.n_inputs):
        op.inputs[i].watermark[group] = moved.watermark[i]
    panes_reset(panes)
    panes.watermark = max(position.watermark, known.watermark)
    panes.late_before = max(position.late_before, known.late_before)
    panes.fired_until = max(position.fired_until, known.fired_until)
    panes.restored_until = max(position.restored_until, known.restored_until)
    panes.usual_keys = position.usual_keys


# The old owner


cdef void sweep_stream(WorkerState *worker, StreamState *stream, Move *move, MovedStream *moved) noexcept nogil:
    cdef size_t at = <size_t> move.group * stream.max_sessions
    cdef uint32_t slot
    cdef Connection *connection
    fs_store_relaxed(&stream.owned[move.group], 0)
    stream.deferred[move.group] = 0
    stream.ends_due[move.group] = 0
    moved.slots = stream.slots_high
    moved.watermark = stream.watermark[move.group]
    for slot in range(stream.slots_high):
        connection = stream.connection[at + slot]
        if connection != NULL:
            detach(worker, connection)
            connection.next = move.connections
            move.connections = connection
            move.n_connections += 1
        moved.session_number[slot] = stream.session_number[slot]
        moved.session_watermark[slot] = stream.session_watermark[at + slot]
        moved.next_row[slot] = stream.next_row[at + slot]
        moved.counted[slot] = stream.counted[at + slot]


cdef void sweep(WorkerState *worker, Move *move) noexcept nogil:
    """Sessions, sockets and positions of the group go to the new owner. Assumes: nothing is being worked on."""
    cdef uint32_t s, i
    for s in range(worker.n_streams):
        sweep_stream(worker, worker.streams[s], move, &move.streams[s])
    move.n_streams = worker.n_streams
    for i in range(worker.n_operators):
        say_position(worker.operators[i], move.group, &move.operators[i])
    move.n_operators = worker.n_operators
    move.swept_ns = fs_now_ns()
    tell(worker, move.target, ADOPT, move)
    wake(worker, move.target)


cdef uint64_t bytes_of_pane(const Operator *op, const Pane *pane) noexcept nogil:
    """In the arena, with all its parts."""
    cdef uint64_t total = 0
    cdef uint32_t d
    while pane != NULL:
        total += arena_size(pane_bytes(op)) + arena_size(pane.table.bytes)
        for d in range(op.n_sides):
            if pane.sides[d].entries != NULL:
                total += arena_size(pane.sides[d].bytes)
        pane = pane.also
    return total


cdef void count_panes(Move *move, const Operator *op, const PaneSet *panes) noexcept nogil:
    cdef uint32_t i
    cdef const Pane *part
    if panes.room != NULL:
        move.bytes += arena_size(panes.capacity * sizeof(Pane *))
    for i in range(panes.n):
        move.bytes += bytes_of_pane(op, panes.panes[i])
        part = panes.panes[i]
        while part != NULL:
            move.panes += 1
            move.entries += part.table.used
            part = part.also


cdef void drain(WorkerState *worker, Move *move) noexcept nogil:
    """All that was received is worked off: publish what there is of the group, then count out."""
    cdef uint32_t i, s
    cdef uint32_t target = move.target      # once counted out, the parcel may be gone
    cdef Operator *op
    cdef PaneSet *panes
    for i in range(move.n_operators):
        op = operator_of(worker, move.operators[i].id)
        if op == NULL:
            continue                        # dropped since
        panes = &op.sets[move.group]
        dense_settle_all(op, &worker.arena, panes)
        rolling_release(op, &worker.arena, panes)
        operator_flush(op, &worker.context)       # so that older results are not read after newer ones
        move.operators[i].panes = panes[0]
        fs_count(&op.counters.open_panes, -<uint64_t> panes.n)
        count_panes(move, op, panes)
        panes_reset(panes)
    for s in range(move.n_streams):
        flush_late(worker.streams[s], &worker.context)
    fs_count(&worker.arena.in_use, -move.bytes)
    move.out_head = &worker.mail.out.head
    move.out_tail = worker.mail.out.tail
    move.drained_ns = fs_now_ns()
    tell(worker, target, DRAINED, move)
    fs_fetch_sub(&worker.shared.counter[move.group], 1)
    wake(worker, target)


# The new owner


cdef Operator *operator_of(WorkerState *worker, uint64_t number) noexcept nogil:
    """NULL: there is none of that number any more, or not yet."""
    cdef uint32_t i
    for i in range(worker.n_operators):
        if worker.operators[i].id == number:
            return worker.operators[i]
    return NULL


cdef void adopt_stream(StreamState *stream, Move *move, MovedStream *moved) noexcept nogil:
    cdef size_t at = <size_t> move.group * stream.max_sessions
    cdef uint32_t slot
    for slot in range(moved.slots):
        if stream.session_number[slot] > moved.session_number[slot]:
            continue                        # another session has the slot by now: what is said is not about it
        note_session(stream, slot, move.group, moved.session_watermark[slot])
        stream.next_row[at + slot] = moved.next_row[slot]
        stream.counted[at + slot] = moved.counted[slot]
    stream.ends_due[move.group] = 1         # ends that were noted here, and those that the old owner did not count
    fs_store_relaxed(<uint64_t *> &stream.watermark[move.group], <uint64_t> moved.watermark)
    stream.deferred[move.group] = DEFERRED
    fs_store_relaxed(&stream.owned[move.group], 1)


cdef void adopt(WorkerState *worker, Move *move) noexcept nogil:
    """The group is ours. Its sockets are served from here on; it fires when the old owner has drained."""
    cdef uint32_t s, i
    cdef Operator *op
    worker.migration.awaiting[move.group] = 1
    for i in range(move.n_operators):
        op = operator_of(worker, move.operators[i].id)
        if op != NULL:
            begin_at(op, move.group, &move.operators[i])
    for s in range(move.n_streams):
        adopt_stream(worker.streams[s], move, &move.streams[s])
    take_over_unordered(worker, move)
    move.adopted_ns = fs_now_ns()
    move.next = worker.migration.adopting
    worker.migration.adopting = move
    take_sockets(worker, &worker.migration.parked)


cdef bint absorb(WorkerState *worker, Move *move) noexcept nogil:
    """Take the old owner's panes by pointer. False: no memory for the longer list of panes yet."""
    cdef uint32_t i
    cdef MovedOperator *moved
    cdef Operator *op
    for i in range(move.n_operators):
        moved = &move.operators[i]
        if moved.absorbed:
            continue
        op = operator_of(worker, moved.id)
        if op != NULL \
                and not panes_absorb(op, &worker.context, &op.sets[move.group], &moved.panes, True):
            return False
        moved.absorbed = True
    return True


cdef void read_peer(WorkerState *worker, uint32_t peer) noexcept nogil:
    """The next message of that worker. Assumes: all orders posted before it was sent are obeyed."""
    cdef Message message
    cdef Move *move
    if not ring_pop(ring_from(worker, peer), &message):
        return
    if message.kind == ADOPT:
        adopt(worker, <Move *> message.ptr)
    elif message.kind == DRAINED:
        move = <Move *> message.ptr
        fs_count(&worker.arena.in_use, move.bytes)
        move.drained = True
    elif message.kind == SOCKET:
        take_socket(worker, <Connection *> message.ptr)
    elif message.kind == BORROW:
        borrow(worker, <Loan *> message.ptr)
    elif message.kind == SHARE:
        if not absorb_share(worker, <Share *> message.ptr):
            worker.migration.share = <Share *> message.ptr
    elif message.kind == GIVE_BACK:
        take_back(worker, <Loan *> message.ptr)


cdef uint32_t waiting_peer(WorkerState *worker) noexcept nogil:
    """A worker that has sent something which was not read; this one itself: there is none."""
    cdef uint32_t w
    if FS_MOVES:
        for w in range(worker.shared.n_workers):
            if w != worker.index and not ring_empty(ring_from(worker, w)):
                return w
    return worker.index


cdef bint peers_wait(WorkerState *worker) noexcept nogil:
    return waiting_peer(worker) != worker.index


cdef inline bint results_are_read(const Move *move) noexcept nogil:
    """Whether what the old owner had to say is read: a later revision, or window, of the group must not be before it."""
    return fs_load_acquire(move.out_head) >= move.out_tail


cdef bint next_due_advance(WorkerState *worker) noexcept nogil:
    """Go on with moves to here. True: an advance was begun, and has to be worked off before the next call."""
    cdef Move *move = worker.migration.adopting
    cdef Move *previous = NULL
    cdef Move *following
    cdef StreamState *stream
    cdef uint32_t s
    while move != NULL:
        following = move.next
        if move.drained and worker.migration.awaiting[move.group] and results_are_read(move) and absorb(worker, move):
            worker.migration.awaiting[move.group] = 0
            move.absorbed_ns = fs_now_ns()
            take_over(worker, &move.connections)        # those that waited for it
            take_sockets(worker, &worker.migration.parked)
        if not worker.migration.awaiting[move.group] and fs_load_acquire(&worker.shared.counter[move.group]) == 0:
            for s in range(worker.n_streams):
                stream = worker.streams[s]
                if stream.deferred[move.group] == DEFERRED:
                    stream.deferred[move.group] = DEFERRED_WATERMARK
                    begin_revision(worker, stream, move.group)
                    return True
                if stream.deferred[move.group] == DEFERRED_WATERMARK:
                    stream.deferred[move.group] = 0
                    begin_advance(worker, stream, move.group, move.group + 1)
                    return True
            if previous == NULL:
                worker.migration.adopting = following
            else:
                previous.next = following
            fs_store_release(&move.done, 1)     # the mover's again
            move = following
            continue
        previous = move
        move = following
    return False

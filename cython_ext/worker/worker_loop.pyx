"""The thread of a worker: mailbox, sockets, and the waiting. See worker.pxd for who owns what."""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.wire.decoder cimport FAULT_NO_SESSION, FAULT_SHUTTING_DOWN
from flexstream.cython_ext.operators.firing cimport close_until, query_fire
from flexstream.cython_ext.operators.folding cimport fold_slice, rest
from flexstream.cython_ext.includes.linux cimport (
    CPU_SET, CPU_ZERO, EAGAIN, EINTR, MSG_DONTWAIT, cpu_set_t, epoll_event, epoll_wait, errno, read, recv,
    sched_setaffinity, write,
)
from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_fence, fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_sleep_ns, fs_store_relaxed,
    fs_store_release, fs_thread_cpu_ns, fs_thread_id,
)
from flexstream.cython_ext.memory.messages cimport (
    ADD_CONNECTION, ADD_QUERY, ADD_STREAM, ADVANCE, CLOSE_WINDOWS, DRAIN_POINT, DROP_QUERY, FEED, GIVEN_BACK, HOLD, KNOCK, LEND, PING, PONG,
    QUERY_GONE, RECALL, REGISTER_SESSION, SESSION_AWAKE, SESSION_END, SESSION_FREE, SESSION_IDLE, SESSION_WATERMARK,
    SWEEP,
)
from flexstream.cython_ext.worker.moving cimport (
    drain, give_back_sockets, next_due_advance, peers_wait, query_of, quiescent, read_peer, sweep, take_socket, take_sockets,
    waiting_peer, waits_for_order,
)
from flexstream.cython_ext.operators.panes cimport STEP_DONE, STEP_MORE, STEP_WAIT, Query, Step, query_flush, query_release
from flexstream.cython_ext.worker.work_item cimport (
    END_OF_STREAM, NO_WATERMARK, ack_the_rest, begin_advance, begin_revision, begin_rows, believable, close_connection,
    is_working, look_at_clock, push_limbo, raise_session, report, send_ack, worker_progress,
)
from flexstream.cython_ext.memory.ring cimport Message, ring_empty, ring_first, ring_free_slots, ring_pop
from flexstream.cython_ext.worker.sampling cimport sample_if_wanted, sample_is_wanted
from flexstream.cython_ext.worker.shared cimport Connection, Loan, Move
from flexstream.cython_ext.worker.splitting cimport absorb_share, give_back, lend
from flexstream.cython_ext.worker.worker cimport (
    MAX_QUERIES, SESSION_IS_IDLE, SESSION_LIVE, SESSION_NONE, StreamState, WorkerState,
)

cdef enum:
    MAX_EVENTS = 512
    RECEIVES_PER_EVENT = 4        # a full socket may have this many blocks before others get their turn
    ACK_TICK_MS = 25
    IDLE_TICK_MS = 1000
    DRAIN_NS = 1000000000         # what was received by then is worked off well before; who sends on would never end
    FEEDS_PER_TURN = 64           # fed pieces before the sockets get their turn
    FIRST_WAIT_NS = 20000         # for results to be read, or for memory
    LONGEST_WAIT = 50             # times the first
    RING_RESERVE = 64             # reports that must fit before anything that may report is begun


# Orders


cdef void add_query(WorkerState *worker, StreamState *stream, Query *query) noexcept nogil:
    """The query sees rows from here on; what the watermark has passed already is late for it."""
    cdef uint32_t g
    if stream.n_queries == MAX_QUERIES:
        report(worker, QUERY_GONE, stream.index, 0, query, 1, query.id)
        return
    stream.queries[stream.n_queries] = query
    stream.n_queries += 1
    fs_store_relaxed(&query.counters.rows_before, stream.received)      # no rows are under way while an order is obeyed
    for g in range(stream.groups):
        if stream.owned[g] and stream.watermark[g] != NO_WATERMARK:
            query_fire(query, &worker.context, g, stream.watermark[g])      # no panes yet: settles at once


cdef void drop_query(WorkerState *worker, StreamState *stream, Query *query) noexcept nogil:
    cdef uint32_t i
    for i in range(stream.n_queries):
        if stream.queries[i] == query:
            stream.n_queries -= 1
            stream.queries[i] = stream.queries[stream.n_queries]
            stream.queries[stream.n_queries] = NULL
            query_flush(query, &worker.context)
            query_release(query, &worker.arena)
            break
    report(worker, QUERY_GONE, stream.index, 0, query, 0, query.id)


cdef void close_windows(StreamState *stream, uint64_t number, int64_t end) noexcept nogil:
    cdef Query *query = query_of(stream, number)        # NULL: it was dropped meanwhile
    if query != NULL:
        close_until(query, end)


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
        worker.later |= <uint64_t> 1 << stream.index
    else:
        begin_advance(worker, stream, 0, stream.groups)


cdef inline void hear(WorkerState *worker, StreamState *stream, uint32_t slot, uint64_t now) noexcept nogil:
    """The session is alive; if it was idle it counts again, here at once and elsewhere when Python says so."""
    fs_store_relaxed(&stream.seen_ns[slot], now)
    if stream.session_state[slot] == SESSION_IS_IDLE:
        stream.session_state[slot] = SESSION_LIVE
        report(worker, SESSION_AWAKE, stream.index, slot, NULL, 0, 0)


cdef void obey(WorkerState *worker, Message *order, uint64_t now) noexcept nogil:
    cdef StreamState *stream = worker.streams[order.stream]
    if order.kind == FEED:
        hear(worker, stream, order.slot, now)
        worker.feeding = True
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
        add_query(worker, stream, <Query *> order.ptr)
    elif order.kind == DROP_QUERY:
        drop_query(worker, stream, <Query *> order.ptr)
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
        (<Loan *> order.ptr).next = worker.recalled
        worker.recalled = <Loan *> order.ptr
    elif order.kind == ADVANCE:
        if order.value:
            begin_revision(worker, stream, order.group)
        else:
            begin_advance(worker, stream, order.group, order.group + 1)
    elif order.kind == CLOSE_WINDOWS:
        close_windows(stream, order.tag, order.value)
    elif order.kind == PING:
        flush_outputs(worker)
        report(worker, PONG, 0, 0, NULL, 0, order.tag)


# Sockets


cdef int receive(WorkerState *worker, Connection *connection, uint64_t now) noexcept nogil:
    """One receive into the hot block, behind what the connection carried. 1: a full one; 0: short; -1: closed."""
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef int64_t n
    memcpy(worker.block, connection.carry, connection.carry_n)
    n = recv(connection.fd, worker.block + connection.carry_n, worker.block_bytes, MSG_DONTWAIT)
    if n <= 0:
        if n < 0 and (errno == EAGAIN or errno == EINTR):
            return 0
        if n == 0:
            ack_the_rest(connection)        # it may have shut its side only
            close_connection(worker, connection, 0)
        else:
            close_connection(worker, connection, -errno)
        return -1
    fs_count(&worker.receive_calls, 1)
    fs_count(&worker.bytes_received, <uint64_t> n)
    hear(worker, stream, connection.slot, now)
    connection.unacked_bytes += <uint64_t> n
    worker.serving = connection
    worker.bytes_at = 0
    worker.bytes_n = connection.carry_n + <uint64_t> n
    connection.carry_n = 0
    return <uint64_t> n == worker.block_bytes


cdef Step serve(WorkerState *worker, Connection *connection, uint64_t now) noexcept nogil:
    """Receive and work off. STEP_WAIT: the current item could not be finished yet."""
    cdef int tries, full
    cdef uint64_t detached = worker.detached
    for tries in range(RECEIVES_PER_EVENT):
        full = receive(worker, connection, now)
        if full < 0:
            return STEP_DONE
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
        # Closed: it may be freed already. Orders: what is left is reported again.
        if full == 0 or worker.detached != detached or orders_wait(worker):
            break
    return STEP_DONE


cdef bint send_acks(WorkerState *worker) noexcept nogil:
    """What connections have not been told yet. True: some still wait."""
    cdef Connection *connection = worker.connections
    cdef bint waiting = False
    while connection != NULL:
        if connection.ack_bytes and connection.decoder.next_row > connection.acked_row:
            send_ack(connection)
            waiting = True
        connection = connection.next
    return waiting


# Waiting


cdef bint flush_outputs(WorkerState *worker) noexcept nogil:
    cdef uint32_t s, q
    cdef bint whole = True
    for s in range(worker.n_streams):
        for q in range(worker.streams[s].n_queries):
            whole = query_flush(worker.streams[s].queries[q], &worker.context) and whole
    return whole


cdef void fold_parts(WorkerState *worker) noexcept nogil:
    """A slice for each query that has parts to fold. Assumes: nothing is being worked on."""
    cdef uint32_t s, q
    cdef bint more = False
    if not worker.context.unfolded:
        return
    for s in range(worker.n_streams):
        for q in range(worker.streams[s].n_queries):
            more = fold_slice(worker.streams[s].queries[q], &worker.arena) or more
    worker.context.unfolded = more


cdef void rest_queries(WorkerState *worker) noexcept nogil:
    cdef uint32_t s, q
    for s in range(worker.n_streams):
        for q in range(worker.streams[s].n_queries):
            rest(worker.streams[s].queries[q], &worker.arena)


cdef void wake_reader(WorkerState *worker) noexcept nogil:
    cdef uint64_t one = 1
    if ring_empty(&worker.out):
        return
    fs_fence()
    if fs_load_relaxed(&worker.reader_sleeping):
        fs_store_relaxed(&worker.reader_sleeping, 0)
        if write(worker.reader_fd, &one, 8) < 0:
            return          # readable already: the reader is awake


cdef void wait_for_reader(WorkerState *worker) noexcept nogil:
    """Or for memory: both are soon there as a rule, so it looks again after a short time, then after longer ones."""
    fs_count(&worker.stalled, 1)
    wake_reader(worker)
    fs_sleep_ns(FIRST_WAIT_NS * (worker.stalled if worker.stalled < LONGEST_WAIT else LONGEST_WAIT))
    if fs_load_acquire(&worker.stop_wanted) == 2:
        worker.stopping = 2


cdef int wait_for_events(WorkerState *worker, epoll_event *events, int timeout_ms) noexcept nogil:
    """Blocks only after saying so, and only if nothing was posted since: a post after the fence sees `sleeping`."""
    cdef int n
    if timeout_ms == 0:
        return epoll_wait(worker.epoll_fd, events, MAX_EVENTS, 0)
    fs_store_release(&worker.sleeping, 1)       # who sees it may free what was read before
    fs_fence()
    if orders_wait(worker) or feeds_wait(worker) or fs_load_acquire(&worker.stop_wanted) or sample_is_wanted(worker):
        timeout_ms = 0
    n = epoll_wait(worker.epoll_fd, events, MAX_EVENTS, timeout_ms)
    fs_store_relaxed(&worker.sleeping, 0)
    fs_fence()                  # asleep is quiescent; from here on it is not: the flags are loaded anew
    quiescent(worker)
    return n


cdef void pin(WorkerState *worker) noexcept nogil:
    cdef cpu_set_t cpus
    if worker.cpu >= 0:
        CPU_ZERO(&cpus)
        CPU_SET(worker.cpu, &cpus)
        if sched_setaffinity(0, sizeof(cpus), &cpus) != 0:
            worker.pin_errno = errno


cdef inline bint can_be_obeyed_at_once(const Message *order) noexcept nogil:
    """Orders that begin no work and look at no window: they need not wait for what is being worked on."""
    return (order.kind == ADD_CONNECTION or order.kind == REGISTER_SESSION or order.kind == SESSION_FREE
            or order.kind == SESSION_WATERMARK or order.kind == ADD_STREAM or order.kind == KNOCK)


cdef void run_light_orders(WorkerState *worker) noexcept nogil:
    """While something is being worked on, or has to wait: the mailbox, as far as its orders can be obeyed at once."""
    cdef Message order
    while ring_free_slots(&worker.out) >= RING_RESERVE and not ring_empty(&worker.mailbox) \
            and can_be_obeyed_at_once(ring_first(&worker.mailbox)) and ring_pop(&worker.mailbox, &order):
        obey(worker, &order, fs_now_ns())


cdef Step work_off(WorkerState *worker) noexcept nogil:
    """The current item to its end, or STEP_WAIT. Between its slices the worker is at a quiescent point."""
    cdef Step step = worker_progress(worker)
    quiescent(worker)
    while step == STEP_MORE:
        if fs_load_acquire(&worker.stop_wanted) == 2:
            worker.stopping = 2
            return STEP_WAIT
        run_light_orders(worker)
        step = worker_progress(worker)
        quiescent(worker)
    return step


cdef Step run_mailbox(WorkerState *worker, uint64_t now) noexcept nogil:
    """Orders, each worked off before the next. STEP_WAIT: one could not be finished yet."""
    cdef Message order
    while worker.stopping != 2 and ring_free_slots(&worker.out) >= RING_RESERVE and ring_pop(&worker.mailbox, &order):
        obey(worker, &order, now)
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    return STEP_DONE


cdef Step run_peers(WorkerState *worker, uint64_t now) noexcept nogil:
    """What other workers sent, each message behind the orders that were posted before it was sent."""
    cdef Loan *recalled
    cdef uint32_t peer
    while worker.share != NULL or peers_wait(worker):
        peer = waiting_peer(worker)         # before the mailbox is read: what others send meanwhile may be behind orders
        if run_mailbox(worker, now) == STEP_WAIT:
            return STEP_WAIT
        if not ring_empty(&worker.mailbox):
            return STEP_DONE                # no room for reports: later
        if worker.share == NULL:
            read_peer(worker, peer)
        elif absorb_share(worker, worker.share):
            worker.share = NULL
        else:
            return STEP_DONE
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    while worker.recalled != NULL:
        recalled = worker.recalled
        worker.recalled = recalled.next     # once given back it is not ours to read
        if not give_back(worker, recalled):
            worker.recalled = recalled
            break
    if worker.held_sockets != NULL:
        take_sockets(worker, &worker.held_sockets)
    while worker.adopting != NULL and next_due_advance(worker):
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    return STEP_DONE


cdef bint comes_before_its_group(WorkerState *worker, const Message *order) noexcept nogil:
    """Rows of a group that will be adopted here: without ADOPT nobody knows which of them are late. And rows whose
    order matters, while the old owner may still have some before them."""
    cdef StreamState *stream = worker.streams[order.stream]
    if order.kind != FEED or stream.owned[order.group]:
        return order.kind == FEED and waits_for_order(worker, stream, order.group)
    return fs_load_acquire(&worker.shared.placement[order.group]) == worker.index


cdef Step run_feeds(WorkerState *worker, uint64_t now) noexcept nogil:
    """Fed rows and the orders among them; orders of the mailbox that were posted before come first."""
    cdef Message order
    cdef int turn
    for turn in range(FEEDS_PER_TURN):
        if worker.stopping == 2 or ring_free_slots(&worker.out) < RING_RESERVE:
            break
        if not worker.feed_waits and not ring_pop(&worker.feeds, &worker.next_feed):
            break
        worker.feed_waits = True
        if run_mailbox(worker, now) == STEP_WAIT:
            return STEP_WAIT
        if not ring_empty(&worker.mailbox) or comes_before_its_group(worker, &worker.next_feed):
            break
        worker.feed_waits = False
        order = worker.next_feed
        obey(worker, &order, now)
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    return STEP_DONE


cdef inline bint orders_wait(WorkerState *worker) noexcept nogil:
    return not ring_empty(&worker.mailbox) or peers_wait(worker)


cdef inline bint feeds_wait(WorkerState *worker) noexcept nogil:
    return worker.feed_waits or not ring_empty(&worker.feeds)


cdef int run_sockets(WorkerState *worker, epoll_event *events, int n, uint64_t now) noexcept nogil:
    """How many connections were served; fewer than the events when the worker has to wait."""
    cdef int i
    cdef int served = 0
    cdef uint64_t count
    cdef uint64_t detached = worker.detached
    for i in range(n):
        if events[i].data.ptr == NULL:
            if read(worker.wake_fd, &count, 8) < 0:
                count = 0
            continue
        if ring_free_slots(&worker.out) < RING_RESERVE:
            return -1
        if serve(worker, <Connection *> events[i].data.ptr, now) == STEP_WAIT:
            return -1
        served += 1
        quiescent(worker)
        sample_if_wanted(worker)
        if worker.detached != detached or orders_wait(worker):
            break               # a socket may be gone, or an order take it away; what was not served is reported again
    return served


cdef void begin_stop(WorkerState *worker, uint64_t now) noexcept nogil:
    cdef uint64_t wanted = fs_load_acquire(&worker.stop_wanted)
    if wanted > worker.stopping:
        worker.stopping = <uint32_t> wanted
        worker.drain_until_ns = now + DRAIN_NS


cdef void say_goodbye(WorkerState *worker) noexcept nogil:
    """Every producer learns what was received; every socket goes back to Python, which tells it why."""
    send_acks(worker)
    give_back_sockets(worker)
    while worker.connections != NULL:
        close_connection(worker, worker.connections, FAULT_SHUTTING_DOWN)
    push_limbo(worker)
    while worker.limbo != NULL and fs_load_acquire(&worker.stop_wanted) != 2:
        wait_for_reader(worker)
        push_limbo(worker)


cdef void *worker_main(void *argument) noexcept nogil:
    cdef WorkerState *worker = <WorkerState *> argument
    cdef epoll_event events[MAX_EVENTS]
    cdef int n, timeout_ms
    cdef int served = 1
    cdef uint64_t now = fs_now_ns()
    cdef uint64_t before
    cdef uint64_t last_acks = now
    cdef bint acks_wait = False
    pin(worker)
    fs_store_relaxed(&worker.started_ns, now)
    fs_store_release(<uint64_t *> &worker.thread_id, <uint64_t> fs_thread_id())
    while worker.stopping != 2:
        fs_count(&worker.loops, 1)
        push_limbo(worker)
        sample_if_wanted(worker)
        begin_stop(worker, now)
        look_at_clock(worker)
        # An unfinished item comes first: until it is done no socket is read and no order taken that begins work.
        if work_off(worker) == STEP_WAIT or ring_free_slots(&worker.out) < RING_RESERVE:
            flush_outputs(worker)
            run_light_orders(worker)
            wait_for_reader(worker)
            continue
        fs_store_relaxed(&worker.stalled, 0)
        if run_mailbox(worker, now) == STEP_WAIT or run_peers(worker, now) == STEP_WAIT \
                or run_feeds(worker, now) == STEP_WAIT:
            continue
        flush_outputs(worker)
        wake_reader(worker)
        fold_parts(worker)
        if now - last_acks > ACK_TICK_MS * <uint64_t> 1000000:
            acks_wait = send_acks(worker)
            last_acks = now
            fs_store_relaxed(&worker.cpu_ns, fs_thread_cpu_ns())
        if worker.busy_poll or worker.stopping or orders_wait(worker) or feeds_wait(worker) or served > 0 \
                or worker.context.unfolded:
            timeout_ms = 0
        elif worker.adopting != NULL or worker.held_sockets != NULL or worker.share != NULL or worker.recalled != NULL:
            timeout_ms = 1
        else:
            timeout_ms = ACK_TICK_MS if acks_wait or any_unacked(worker) else IDLE_TICK_MS
            rest_queries(worker)
        before = fs_now_ns()
        fs_count(&worker.busy_ns, before - now)
        n = wait_for_events(worker, events, timeout_ms)
        now = fs_now_ns()
        if timeout_ms == 0:
            fs_count(&worker.busy_ns, now - before)
        served = run_sockets(worker, events, n, now)
        if served >= 0 and n < MAX_EVENTS:
            fs_store_relaxed(&worker.drained_ns, now)       # who had nothing to say now has an empty socket
        if worker.stopping == 1 and ((served == 0 and not orders_wait(worker) and not feeds_wait(worker)) or now > worker.drain_until_ns):
            worker.stopping = 2
    while not flush_outputs(worker) and fs_load_acquire(&worker.stop_wanted) != 2:
        wait_for_reader(worker)
    say_goodbye(worker)
    fs_store_relaxed(&worker.cpu_ns, fs_thread_cpu_ns())
    fs_store_release(&worker.ended, 1)
    # The last report says that there are no more: a PONG that no PING asked for, as tags begin at 1. Without it a reader
    # that waits for the end would sleep on, so it is woken whether it sleeps or not. If the ring is full it is awake.
    fs_store_relaxed(&worker.reader_sleeping, 1)
    report(worker, PONG, 0, 0, NULL, 0, 0)
    wake_reader(worker)
    return NULL


cdef bint any_unacked(WorkerState *worker) noexcept nogil:
    cdef Connection *connection = worker.connections
    while connection != NULL:
        if connection.ack_bytes and connection.decoder.next_row > connection.acked_row:
            return True
        connection = connection.next
    return False

"""The thread of a worker: mailbox, sockets, and the waiting. See worker.pxd for who owns what."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.includes.linux cimport (
    CPU_SET, CPU_ZERO, EAGAIN, EINTR, MSG_DONTWAIT, cpu_set_t, epoll_event, epoll_wait, errno, read, recv,
    sched_setaffinity, write,
)
from flexstream.cython_ext.includes.native cimport (
    fs_count, fs_fence, fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_sleep_ns, fs_store_relaxed,
    fs_store_release, fs_thread_cpu_ns, fs_thread_id,
)
from flexstream.cython_ext.memory.messages cimport FEED, PONG
from flexstream.cython_ext.memory.ring cimport Message, ring_empty, ring_first, ring_free_slots, ring_pop
from flexstream.cython_ext.operators.folding cimport fold_slice, rest
from flexstream.cython_ext.operators.graph cimport STEP_DONE, STEP_MORE, STEP_WAIT, Step
from flexstream.cython_ext.wire.decoder cimport FAULT_SHUTTING_DOWN
from flexstream.cython_ext.worker.connections cimport (
    ack_the_rest, any_unacked, close_connection, give_back_sockets, push_limbo, send_acks, take_sockets,
)
from flexstream.cython_ext.worker.moving cimport (
    next_due_advance, peers_wait, quiescent, read_peer, waiting_peer, waits_for_order,
)
from flexstream.cython_ext.worker.orders cimport can_be_obeyed_at_once, flush_outputs, hear, obey
from flexstream.cython_ext.worker.sampling cimport sample_if_wanted, sample_is_wanted
from flexstream.cython_ext.worker.shared cimport Connection, Loan
from flexstream.cython_ext.worker.splitting cimport absorb_share, give_back
from flexstream.cython_ext.worker.work_item cimport look_at_clock, report, worker_progress
from flexstream.cython_ext.worker.worker cimport StreamState, WorkerState

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


# Sockets


cdef int receive(WorkerState *worker, Connection *connection, uint64_t now) noexcept nogil:
    """One receive into the hot block, behind what the connection carried. 1: a full one; 0: short; -1: closed."""
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef int64_t n
    memcpy(worker.net.block, connection.carry, connection.carry_n)
    n = recv(connection.fd, worker.net.block + connection.carry_n, worker.net.block_bytes, MSG_DONTWAIT)
    if n <= 0:
        if n < 0 and (errno == EAGAIN or errno == EINTR):
            return 0
        if n == 0:
            ack_the_rest(connection)        # it may have shut its side only
            close_connection(worker, connection, 0)
        else:
            close_connection(worker, connection, -errno)
        return -1
    fs_count(&worker.counters.receive_calls, 1)
    fs_count(&worker.counters.bytes_received, <uint64_t> n)
    hear(worker, stream, connection.slot, now)
    connection.unacked_bytes += <uint64_t> n
    worker.net.serving = connection
    worker.net.bytes_at = 0
    worker.net.bytes_n = connection.carry_n + <uint64_t> n
    connection.carry_n = 0
    return <uint64_t> n == worker.net.block_bytes


cdef Step serve(WorkerState *worker, Connection *connection, uint64_t now) noexcept nogil:
    """Receive and work off. STEP_WAIT: what was begun could not be finished yet."""
    cdef int tries, full
    cdef uint64_t detached = worker.net.detached
    for tries in range(RECEIVES_PER_EVENT):
        full = receive(worker, connection, now)
        if full < 0:
            return STEP_DONE
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
        # Closed: it may be freed already. Orders: what is left is reported again.
        if full == 0 or worker.net.detached != detached or orders_wait(worker):
            break
    return STEP_DONE


# Waiting


cdef void fold_parts(WorkerState *worker) noexcept nogil:
    """A slice for each operator that has parts to fold. Assumes: nothing is being worked on."""
    cdef uint32_t i
    cdef bint more = False
    if not worker.context.unfolded:
        return
    for i in range(worker.n_operators):
        more = fold_slice(worker.operators[i], &worker.arena) or more
    worker.context.unfolded = more


cdef void rest_operators(WorkerState *worker) noexcept nogil:
    cdef uint32_t i
    for i in range(worker.n_operators):
        rest(worker.operators[i], &worker.arena)


cdef void wake_reader(WorkerState *worker) noexcept nogil:
    cdef uint64_t one = 1
    if ring_empty(&worker.mail.out):
        return
    fs_fence()
    if fs_load_relaxed(&worker.mail.reader_sleeping):
        fs_store_relaxed(&worker.mail.reader_sleeping, 0)
        if write(worker.mail.reader_fd, &one, 8) < 0:
            return          # readable already: the reader is awake


cdef void wait_for_reader(WorkerState *worker) noexcept nogil:
    """Or for memory: both are soon there as a rule, so it looks again after a short time, then after longer ones."""
    fs_count(&worker.counters.stalled, 1)
    wake_reader(worker)
    fs_sleep_ns(FIRST_WAIT_NS * (worker.counters.stalled if worker.counters.stalled < LONGEST_WAIT else LONGEST_WAIT))
    if fs_load_acquire(&worker.stop_wanted) == 2:
        worker.stopping = 2


cdef int wait_for_events(WorkerState *worker, epoll_event *events, int timeout_ms) noexcept nogil:
    """Blocks only after saying so, and only if nothing was posted since: a post after the fence sees `sleeping`."""
    cdef int n
    if timeout_ms == 0:
        return epoll_wait(worker.net.epoll_fd, events, MAX_EVENTS, 0)
    fs_store_release(&worker.mail.sleeping, 1)       # who sees it may free what was read before
    fs_fence()
    if orders_wait(worker) or feeds_wait(worker) or fs_load_acquire(&worker.stop_wanted) or sample_is_wanted(worker):
        timeout_ms = 0
    n = epoll_wait(worker.net.epoll_fd, events, MAX_EVENTS, timeout_ms)
    fs_store_relaxed(&worker.mail.sleeping, 0)
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


cdef void run_light_orders(WorkerState *worker) noexcept nogil:
    """While something is being worked on, or has to wait: the mailbox, as far as its orders can be obeyed at once."""
    cdef Message order
    while ring_free_slots(&worker.mail.out) >= RING_RESERVE and not ring_empty(&worker.mail.mailbox) \
            and can_be_obeyed_at_once(ring_first(&worker.mail.mailbox)) and ring_pop(&worker.mail.mailbox, &order):
        obey(worker, &order, fs_now_ns())


cdef Step work_off(WorkerState *worker) noexcept nogil:
    """What was begun, to its end, or STEP_WAIT. Between slices the worker is at a quiescent point."""
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
    while worker.stopping != 2 and ring_free_slots(&worker.mail.out) >= RING_RESERVE and ring_pop(&worker.mail.mailbox, &order):
        obey(worker, &order, now)
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    return STEP_DONE


cdef Step run_peers(WorkerState *worker, uint64_t now) noexcept nogil:
    """What other workers sent, each message behind the orders that were posted before it was sent."""
    cdef Loan *recalled
    cdef uint32_t peer
    while worker.migration.share != NULL or peers_wait(worker):
        peer = waiting_peer(worker)         # before the mailbox is read: what others send meanwhile may be behind orders
        if run_mailbox(worker, now) == STEP_WAIT:
            return STEP_WAIT
        if not ring_empty(&worker.mail.mailbox):
            return STEP_DONE                # no room for reports: later
        if worker.migration.share == NULL:
            read_peer(worker, peer)
        elif absorb_share(worker, worker.migration.share):
            worker.migration.share = NULL
        else:
            return STEP_DONE
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    while worker.migration.recalled != NULL:
        recalled = worker.migration.recalled
        worker.migration.recalled = recalled.next     # once given back it is not ours to read
        if not give_back(worker, recalled):
            worker.migration.recalled = recalled
            break
    if worker.migration.held_sockets != NULL:
        take_sockets(worker, &worker.migration.held_sockets)
    while worker.migration.adopting != NULL and next_due_advance(worker):
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
        if worker.stopping == 2 or ring_free_slots(&worker.mail.out) < RING_RESERVE:
            break
        if not worker.mail.feed_waits and not ring_pop(&worker.mail.feeds, &worker.mail.next_feed):
            break
        worker.mail.feed_waits = True
        if run_mailbox(worker, now) == STEP_WAIT:
            return STEP_WAIT
        if not ring_empty(&worker.mail.mailbox) or comes_before_its_group(worker, &worker.mail.next_feed):
            break
        worker.mail.feed_waits = False
        order = worker.mail.next_feed
        obey(worker, &order, now)
        if work_off(worker) == STEP_WAIT:
            return STEP_WAIT
    return STEP_DONE


cdef inline bint orders_wait(WorkerState *worker) noexcept nogil:
    return not ring_empty(&worker.mail.mailbox) or peers_wait(worker)


cdef inline bint feeds_wait(WorkerState *worker) noexcept nogil:
    return worker.mail.feed_waits or not ring_empty(&worker.mail.feeds)


cdef int run_sockets(WorkerState *worker, epoll_event *events, int n, uint64_t now) noexcept nogil:
    """How many connections were served; fewer than the events when the worker has to wait."""
    cdef int i
    cdef int served = 0
    cdef uint64_t count
    cdef uint64_t detached = worker.net.detached
    for i in range(n):
        if events[i].data.ptr == NULL:
            if read(worker.mail.wake_fd, &count, 8) < 0:
                count = 0
            continue
        if ring_free_slots(&worker.mail.out) < RING_RESERVE:
            return -1
        if serve(worker, <Connection *> events[i].data.ptr, now) == STEP_WAIT:
            return -1
        served += 1
        quiescent(worker)
        sample_if_wanted(worker)
        if worker.net.detached != detached or orders_wait(worker):
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
    while worker.net.connections != NULL:
        close_connection(worker, worker.net.connections, FAULT_SHUTTING_DOWN)
    push_limbo(worker)
    while worker.net.limbo != NULL and fs_load_acquire(&worker.stop_wanted) != 2:
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
    fs_store_relaxed(&worker.counters.started_ns, now)
    fs_store_release(<uint64_t *> &worker.counters.thread_id, <uint64_t> fs_thread_id())
    while worker.stopping != 2:
        fs_count(&worker.counters.loops, 1)
        push_limbo(worker)
        sample_if_wanted(worker)
        begin_stop(worker, now)
        look_at_clock(worker)
        # Unfinished tasks come first: until they are done no socket is read and no order taken that begins work.
        if work_off(worker) == STEP_WAIT or ring_free_slots(&worker.mail.out) < RING_RESERVE:
            flush_outputs(worker)
            run_light_orders(worker)
            wait_for_reader(worker)
            continue
        fs_store_relaxed(&worker.counters.stalled, 0)
        if run_mailbox(worker, now) == STEP_WAIT or run_peers(worker, now) == STEP_WAIT \
                or run_feeds(worker, now) == STEP_WAIT:
            continue
        flush_outputs(worker)
        wake_reader(worker)
        fold_parts(worker)
        if now - last_acks > ACK_TICK_MS * <uint64_t> 1000000:
            acks_wait = send_acks(worker)
            last_acks = now
            fs_store_relaxed(&worker.counters.cpu_ns, fs_thread_cpu_ns())
        if worker.net.busy_poll or worker.stopping or orders_wait(worker) or feeds_wait(worker) or served > 0 \
                or worker.context.unfolded:
            timeout_ms = 0
        elif worker.migration.adopting != NULL or worker.migration.held_sockets != NULL or worker.migration.share != NULL or worker.migration.recalled != NULL:
            timeout_ms = 1
        else:
            timeout_ms = ACK_TICK_MS if acks_wait or any_unacked(worker) else IDLE_TICK_MS
            rest_operators(worker)
        before = fs_now_ns()
        fs_count(&worker.counters.busy_ns, before - now)
        n = wait_for_events(worker, events, timeout_ms)
        now = fs_now_ns()
        if timeout_ms == 0:
            fs_count(&worker.counters.busy_ns, now - before)
        served = run_sockets(worker, events, n, now)
        if served >= 0 and n < MAX_EVENTS:
            fs_store_relaxed(&worker.counters.drained_ns, now)       # who had nothing to say now has an empty socket
        if worker.stopping == 1 and ((served == 0 and not orders_wait(worker) and not feeds_wait(worker)) or now > worker.drain_until_ns):
            worker.stopping = 2
    while not flush_outputs(worker) and fs_load_acquire(&worker.stop_wanted) != 2:
        wait_for_reader(worker)
    say_goodbye(worker)
    fs_store_relaxed(&worker.counters.cpu_ns, fs_thread_cpu_ns())
    fs_store_release(&worker.ended, 1)
    # The last report says that there are no more: a PONG that no PING asked for, as tags begin at 1. Without it a reader
    # that waits for the end would sleep on, so it is woken whether it sleeps or not. If the ring is full it is awake.
    fs_store_relaxed(&worker.mail.reader_sleeping, 1)
    report(worker, PONG, 0, 0, NULL, 0, 0)
    wake_reader(worker)
    return NULL

"""The Python face of a worker: handles for what is lent to its thread, orders in, reports out."""

import os
import threading

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from flexstream.cython_ext.memory.allocator cimport Allocator
from flexstream.cython_ext.memory.arena cimport arena_destroy, arena_init
from flexstream.cython_ext.memory.blocks cimport Block, block_rows, output_return
from flexstream.cython_ext.includes.linux cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLLIN, POLLIN, close, epoll_create1, epoll_ctl,
    epoll_event, eventfd, poll, pollfd, pthread_create, pthread_join, pthread_setname_np, pthread_t, read, write,
)
from flexstream.cython_ext.includes.native cimport (
    fs_fence, fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_sleep_ns, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.memory.messages cimport (
    ADD_CONNECTION, ADD_QUERY, ADD_STREAM, ADVANCE, CLOSE_WINDOWS, CONNECTION_CLOSED, DRAIN_POINT, DROP_QUERY, FEED, GIVEN_BACK, HOLD,
    KNOCK, LATE_BLOCK, LEND,
    MARKER_SEEN, PING, PONG, QUERY_GONE, QUERY_HERE, RECALL, REGISTER_SESSION, RESULT_BLOCK, SESSION_AWAKE, SESSION_DONE,
    SESSION_END, SESSION_FREE, SESSION_IDLE, SESSION_WATERMARK, SWEEP,
)
from flexstream.cython_ext.worker.placement cimport LoanHandle, MoveHandle, Placement
from flexstream.cython_ext.expressions.program cimport Scratch
from flexstream.cython_ext.operators.queries cimport QueryState
from flexstream.cython_ext.memory.ring cimport (
    Message, Ring, ring_empty, ring_free, ring_free_slots, ring_init, ring_pop, ring_push,
)
from flexstream.cython_ext.worker.shared cimport Connection, Flags
from flexstream.cython_ext.worker.streams cimport StreamHandle, zeroed
from flexstream.cython_ext.worker.worker_loop cimport worker_main

from flexstream.cython_ext.worker.reports import (
    ConnectionClosed, LateBlock, MarkerSeen, Pong, Progress, QueryGone, QueryHere, ResultBlock, SessionAwake, SessionDone,
)

cdef extern from "<stdlib.h>" nogil:
    void *aligned_alloc(size_t alignment, size_t n) noexcept


cdef void free_connection(Connection *connection) noexcept:
    free(connection.carry)
    free(connection.hello_ack)
    free(connection)


cdef Message order(uint32_t kind, uint32_t stream, uint32_t slot, int64_t value, void *ptr) noexcept:
    cdef Message message
    memset(&message, 0, sizeof(message))
    message.kind = kind
    message.stream = stream
    message.slot = slot
    message.value = value
    message.ptr = ptr
    return message


class WorkerEnded(RuntimeError):
    """Nobody is left to take it: what was handed over is the caller's again."""


cdef class Worker:
    """One native thread, pinned to `cpu` (-1: not pinned). Orders are thread-safe; `reports` is for one thread."""

    cdef WorkerState *state
    cdef pthread_t thread
    cdef bint running
    cdef bint emptied             # the mailbox was, for good: what is posted now nobody would find
    cdef Allocator allocator
    cdef Placement placement
    cdef readonly int index
    cdef object lock
    cdef dict lent
    cdef list streams
    cdef uint32_t frame_bytes
    cdef uint32_t max_frame_bytes
    cdef int batch_bytes
    cdef uint64_t tickets
    cdef uint64_t connection_ids

    def __cinit__(self, int index, int cpu, Allocator allocator, Placement placement, *, int frame_bytes=32768,
                  int max_frame_bytes=1 << 20, uint64_t state_bytes=1 << 32, uint64_t chunk_bytes=1 << 22,
                  int mailbox=8192, int feeds=65536, int reader_fd=-1, bint busy_poll=False, int batch_bytes=65536):
        cdef epoll_event event
        self.index = index
        self.allocator = allocator
        self.placement = placement
        self.lock = threading.Lock()
        self.lent = {}
        self.streams = []
        self.frame_bytes = frame_bytes
        self.max_frame_bytes = max_frame_bytes
        self.batch_bytes = batch_bytes
        self.state = <WorkerState *> zeroed(sizeof(WorkerState))
        self.state.index = index
        self.state.cpu = cpu
        self.state.net.busy_poll = busy_poll
        self.state.mail.reader_fd = reader_fd
        self.state.net.epoll_fd = epoll_create1(EPOLL_CLOEXEC)
        self.state.mail.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        if self.state.net.epoll_fd < 0 or self.state.mail.wake_fd < 0:
            raise OSError("cannot make epoll and eventfd descriptors for a worker")
        event.events = EPOLLIN
        event.data.ptr = NULL
        epoll_ctl(self.state.net.epoll_fd, EPOLL_CTL_ADD, self.state.mail.wake_fd, &event)
        self.state.net.block_bytes = frame_bytes + 32
        # A connection carries at most a row, or with CRC a frame, in front of what one receive brings.
        self.state.net.block = <unsigned char *> aligned_alloc(4096, (3 * frame_bytes + 16384 + 8191) & ~4095)
        self.state.scratch = <Scratch *> zeroed(sizeof(Scratch))
        if (self.state.net.block == NULL or not ring_init(&self.state.mail.mailbox, mailbox)
                or not ring_init(&self.state.mail.feeds, feeds) or not ring_init(&self.state.mail.out, 8192)
                or not arena_init(&self.state.arena, chunk_bytes, state_bytes, allocator.wake_fd)):
            raise MemoryError("no memory for a worker")
        memset(self.state.net.block, 0, (3 * frame_bytes + 16384 + 8191) & ~4095)
        self.state.context.arena = &self.state.arena
        self.state.context.scratch = self.state.scratch
        self.state.context.out = &self.state.mail.out
        self.state.context.marks = &self.state.marks
        self.state.shared = placement.shared
        self.state.migration.flags = <Flags *> <void *> placement.shared.flags
        self.state.migration.seen = self.state.migration.flags.version
        self.state.migration.awaiting = <uint8_t *> zeroed(placement.shared.groups)
        placement.join(index, &self.state.mail.sleeping, &self.state.migration.seen, self.state.mail.wake_fd)
        allocator.serve_arena(&self.state.arena)

    def __dealloc__(self):
        if self.state == NULL:
            return
        if self.running:
            fs_store_release(&self.state.stop_wanted, 2)
            pthread_join(self.thread, NULL)
        ring_free(&self.state.mail.mailbox)
        ring_free(&self.state.mail.feeds)
        ring_free(&self.state.mail.out)
        free(self.state.migration.awaiting)
        free(self.state.net.block)
        free(self.state.scratch)
        if self.state.net.epoll_fd > 0:
            close(self.state.net.epoll_fd)
            close(self.state.mail.wake_fd)
        free(self.state)

    # -- life

    def start(self):
        if pthread_create(&self.thread, NULL, worker_main, self.state) != 0:
            raise OSError("cannot start a worker thread")
        self.running = True
        name = f"fs-worker-{self.index}".encode()
        pthread_setname_np(self.thread, name)

    def stop(self, *, bint wait_for_readers=True):
        """Ask the thread to work off what its sockets and its mailbox hold, and to end.

        Without `wait_for_readers` it ends also while it waits for an output that nobody reads.
        """
        cdef uint64_t one = 1
        fs_store_release(&self.state.stop_wanted, 1 if wait_for_readers else 2)
        if write(self.state.mail.wake_fd, &one, 8) < 0:
            return          # readable already: the worker is awake

    @property
    def ended(self):
        return not self.running or fs_load_acquire(&self.state.ended) == 1

    def join(self):
        """Wait for the thread; go on reading reports until it has `ended`.

        Returns the descriptors of connections that came too late to be served: they are the caller's to close.
        """
        cdef Message message
        if self.running:
            with nogil:
                pthread_join(self.thread, NULL)
            self.running = False
        with self.lock:
            self.emptied = True
        found = []
        while ring_pop(&self.state.mail.mailbox, &message):
            if message.kind == ADD_CONNECTION:
                found.append((<Connection *> message.ptr).fd)
                free_connection(<Connection *> message.ptr)
        return found

    def release(self):
        """Free the state memory. Only after `join`, and after the allocator thread has stopped."""
        arena_destroy(&self.state.arena)

    # -- orders

    cdef bint post(self, Message message):
        """An order that is obeyed as soon as possible, before what was fed and is still waiting.

        False: the worker has ended, and nobody will obey it.
        """
        return self.push(&self.state.mail.mailbox, &message)

    cdef bint post_behind(self, Message message):
        """An order that is obeyed when all that was fed before has been worked off. False: as `post`."""
        return self.push(&self.state.mail.feeds, &message)

    cdef bint push(self, Ring *ring, Message *message):
        cdef bint pushed = False
        while True:
            with self.lock:
                pushed = not self.emptied and ring_push(ring, message)
            if pushed:
                break
            if self.ended:
                return False
            with nogil:
                poll(NULL, 0, 1)
        self.wake()
        return True

    @property
    def mailbox_room(self):
        """So many orders can be posted now without waiting for the worker."""
        return ring_free_slots(&self.state.mail.mailbox)

    def knock(self):
        """An order without effect, unless the mailbox is nearly full. Returns what `taken` reaches when it is served."""
        if ring_free_slots(&self.state.mail.mailbox) > 64:
            self.post(order(KNOCK, 0, 0, 0, NULL))
        return fs_load_acquire(&self.state.mail.mailbox.tail)

    @property
    def taken(self):
        """Orders that the worker has taken from its mailbox so far."""
        return fs_load_acquire(&self.state.mail.mailbox.head)

    cdef wake(self):
        cdef uint64_t one = 1
        fs_fence()
        if fs_load_relaxed(&self.state.mail.sleeping):
            if write(self.state.mail.wake_fd, &one, 8) < 0:
                return          # readable already: the worker is awake

    def add_stream(self, stream, int index, list placement, int max_sessions, max_future_ns=None):
        handle = StreamHandle(stream, index, placement, self.index, max_sessions, self.batch_bytes,
                              self.allocator, max_future_ns)
        self.allocator.serve_output(&(<StreamHandle> handle).state.late)
        self.streams.append(handle)
        self.post(order(ADD_STREAM, index, 0, 0, (<StreamHandle> handle).state))
        return handle

    def add_query(self, int stream, QueryState query):
        query.input.stream = stream
        self.lent[<size_t> query.op] = query
        self.allocator.serve_output(&query.op.out.results)
        self.post_behind(order(ADD_QUERY, stream, 0, 0, query.op))

    def drop_query(self, int stream, QueryState query):
        self.post_behind(order(DROP_QUERY, stream, 0, 0, query.op))

    def close_windows(self, int stream, uint64_t query, int64_t end):
        """Windows up to `end` have fired in some group: they are closed in all. Only while no session counts."""
        cdef Message message = order(CLOSE_WINDOWS, stream, 0, end, NULL)
        message.tag = query
        self.post(message)

    def register_session(self, int stream, int slot, int64_t number):
        """`number` tells the sessions apart that have the slot one after the other, and orders all of a stream's."""
        self.post(order(REGISTER_SESSION, stream, slot, number, NULL))

    def free_session(self, int stream, int slot):
        self.post(order(SESSION_FREE, stream, slot, 0, NULL))

    def session_watermark(self, int stream, int slot, int64_t watermark, bytes except_groups=None, *, bint fed=False):
        """For every group that the bitmap does not name. `fed`: of the session whose rows are fed."""
        self.promise(order(SESSION_WATERMARK, stream, slot, watermark, self.lend(except_groups)), fed)

    def end_session(self, int stream, int slot, bytes except_groups=None, *, bint fed=False):
        self.promise(order(SESSION_END, stream, slot, 0, self.lend(except_groups)), fed)

    cdef promise(self, Message message, bint fed):
        if fed:
            self.post_behind(message)
        else:
            self.post(message)

    def session_idle(self, int stream, int slot, bint idle):
        self.post(order(SESSION_IDLE, stream, slot, idle, NULL))

    def hold(self, int stream, bint hold):
        self.post(order(HOLD, stream, 0, hold, NULL))

    def ping(self, uint64_t tag):
        """Answered by Pong(tag) among the reports, after everything posted before was worked off."""
        cdef Message message = order(PING, 0, 0, 0, NULL)
        message.tag = tag
        self.post_behind(message)

    def sweep(self, MoveHandle move):
        """Give the group to its new owner. Keep the handle until it has `arrived`."""
        self.post(order(SWEEP, 0, 0, 0, move.move))

    def drain_point(self, MoveHandle move):
        """Behind `sweep`, and behind the last rows of the group that were fed to this worker."""
        self.post_behind(order(DRAIN_POINT, 0, 0, 0, move.move))

    def split(self, LoanHandle loan):
        """Split the group: the borrower serves some of its connections. Keep the handle until it is `done`."""
        self.post(order(LEND, 0, 0, 0, loan.loan))

    def recall(self, LoanHandle loan):
        """To the borrower: give all connections of the group back. Keep the handle until it is `done`."""
        self.post(order(RECALL, 0, 0, 0, loan.loan))

    def advance(self, int stream, int group):
        """What was deferred while the group was flagged may go on."""
        cdef Message message = order(ADVANCE, stream, 0, 1, NULL)
        message.group = group
        self.post(message)
        message.value = 0
        self.post(message)

    def feed(self, int stream, int group, int slot, const unsigned char[::1] rows, uint64_t row_bytes,
             int64_t sequence=0):
        """Rows of one group, read in place: keep them unchanged until `fed` reaches the ticket returned.

        `sequence` is that of the first row, as in a DATA frame; what the same session fed later has a later one.
        """
        cdef uint64_t n = rows.shape[0] // row_bytes
        cdef Message message
        if n:
            message = order(FEED, stream, slot, sequence, <void *> &rows[0])
            message.group = group
            message.n = n
            if not self.post_behind(message):
                raise WorkerEnded(f"worker {self.index} has ended")
            self.tickets += 1
        return self.tickets

    @property
    def next_ticket(self):
        """What the next `feed` of at least one row will return."""
        return self.tickets + 1

    @property
    def fed(self):
        return fs_load_acquire(&self.state.counters.fed)

    def wait_fed(self, uint64_t ticket, double timeout):
        """False: not yet, after `timeout` seconds."""
        cdef uint64_t until = fs_now_ns() + <uint64_t> (timeout * 1e9)
        with nogil:
            while fs_load_acquire(&self.state.counters.fed) < ticket:
                if fs_now_ns() > until or fs_load_acquire(&self.state.ended):
                    break
                fs_sleep_ns(20000)
        return fs_load_acquire(&self.state.counters.fed) >= ticket

    cdef void *lend(self, bytes bitmap):
        if bitmap is None:
            return NULL
        key = <size_t> PyBytes_AS_STRING(bitmap)
        held = self.lent.get(key)
        self.lent[key] = (bitmap, 1 if held is None else held[1] + 1)
        return <void *> PyBytes_AS_STRING(bitmap)

    def add_connection(self, int fd, StreamHandle stream, int group, int slot, bytes hello_ack, bint crc,
                       uint64_t ack_bytes):
        """The worker owns the socket until it reports it closed."""
        cdef Connection *connection = <Connection *> zeroed(sizeof(Connection))
        connection.fd = fd
        connection.stream = stream.index
        connection.group = group
        connection.slot = slot
        connection.carry_capacity = self.frame_bytes + 32 if crc else max(stream.state.row_bytes, 32)
        connection.carry = <unsigned char *> zeroed(connection.carry_capacity)
        connection.hello_ack = <unsigned char *> zeroed(len(hello_ack))
        memcpy(connection.hello_ack, PyBytes_AS_STRING(hello_ack), len(hello_ack))
        connection.hello_ack_n = len(hello_ack)
        connection.ack_bytes = ack_bytes
        connection.decoder.row_bytes = stream.state.row_bytes
        connection.decoder.group = group
        connection.decoder.groups = stream.state.groups
        connection.decoder.crc = crc
        connection.decoder.frame_bytes = self.frame_bytes
        connection.decoder.max_frame_bytes = self.max_frame_bytes
        connection.decoder.key = stream.state.key
        self.connection_ids += 1
        connection.id = self.connection_ids
        if not self.post(order(ADD_CONNECTION, stream.index, slot, 0, connection)):
            free_connection(connection)
            raise WorkerEnded(f"worker {self.index} has ended")

    # -- reports

    def sleep_until_reports(self, int timeout_ms):
        """Block without the GIL until some worker that shares the reader descriptor has something."""
        cdef pollfd waiting
        cdef uint64_t count
        waiting.fd = self.state.mail.reader_fd
        waiting.events = POLLIN
        with nogil:
            poll(&waiting, 1, timeout_ms)
            if read(self.state.mail.reader_fd, &count, 8) < 0:
                count = 0

    def about_to_sleep(self):
        """Ask to be woken. True: nothing is waiting, go to sleep."""
        fs_store_relaxed(&self.state.mail.reader_sleeping, 1)
        fs_fence()
        if ring_empty(&self.state.mail.out):
            return True
        fs_store_relaxed(&self.state.mail.reader_sleeping, 0)
        return False

    def reports(self, int most=256):
        """Up to `most` reports, oldest first. Blocks are copied and given back to the worker."""
        cdef Message message
        cdef list found = []
        while len(found) < most and ring_pop(&self.state.mail.out, &message):
            item = self.read_report(&message)
            if item is not None:
                found.append(item)
        return found

    cdef object read_report(self, Message *message):
        cdef Block *block
        if message.kind == RESULT_BLOCK or message.kind == LATE_BLOCK:
            block = <Block *> message.ptr
            rows = PyBytes_FromStringAndSize(<char *> block_rows(block), <size_t> block.rows * block.row_bytes)
            output_return(block)
            return (ResultBlock if message.kind == RESULT_BLOCK else LateBlock)(message.tag, rows)
        if message.kind == MARKER_SEEN:
            return MarkerSeen(message.stream, message.value)
        if message.kind == CONNECTION_CLOSED:
            return self.read_closed(<Connection *> message.ptr)
        if message.kind == SESSION_DONE:
            return SessionDone(message.stream, message.slot, message.value)
        if message.kind == SESSION_AWAKE:
            return SessionAwake(message.stream, message.slot)
        if message.kind == QUERY_HERE:
            return QueryHere(message.tag, message.stream, message.slot)
        if message.kind == QUERY_GONE:
            query = <QueryState> self.lent.pop(<size_t> message.ptr)
            self.allocator.forget_output(&(<QueryState> query).op.out.results)
            return QueryGone(message.tag, message.value != 0)
        if message.kind == GIVEN_BACK:
            bitmap, times = self.lent[<size_t> message.ptr]
            if times == 1:
                del self.lent[<size_t> message.ptr]
            else:
                self.lent[<size_t> message.ptr] = (bitmap, times - 1)
            return None
        if message.kind == PONG:
            return Pong(message.tag)
        return None

    cdef object read_closed(self, Connection *connection):
        """The socket's descriptor belongs to the caller from here on."""
        item = ConnectionClosed(connection.id, connection.fd, connection.stream, connection.group, connection.slot,
                                connection.closed_why, connection.decoder.ended != 0, connection.rows)
        free_connection(connection)
        return item

    # -- facts

    def want_sample(self):
        """What came and what waits, per group, as soon as the worker gets to it: see sampling.pxd. For one thread."""
        fs_store_release(&self.state.sample_wanted, self.state.sample_wanted + 1)
        self.wake()

    @property
    def has_sampled(self):
        """It has done so since it was last wanted, or never will."""
        return fs_load_acquire(&self.state.counters.sampled) == self.state.sample_wanted or self.ended

    @property
    def busy_ns(self):
        return fs_load_relaxed(&self.state.counters.busy_ns)

    def progress(self):
        return Progress(fs_load_relaxed(&self.state.counters.rows),
                        fs_load_relaxed(&self.state.counters.receive_calls) + fs_load_relaxed(&self.state.counters.fed),
                        fs_load_relaxed(&self.state.counters.n_connections))

    def stats(self):
        cdef WorkerState *state = self.state
        cdef uint64_t up = fs_now_ns() - fs_load_relaxed(&state.counters.started_ns) if fs_load_relaxed(&state.counters.started_ns) else 1
        return {
            "worker": self.index,
            "cpu": state.cpu,
            "pinned": state.cpu >= 0 and state.pin_errno == 0,
            "pin_reason": os.strerror(state.pin_errno) if state.pin_errno else (
                None if state.cpu >= 0 else "pinning is off"),
            "rows": fs_load_relaxed(&state.counters.rows),
            "bytes": fs_load_relaxed(&state.counters.bytes_received),
            "receive_calls": fs_load_relaxed(&state.counters.receive_calls),
            "busy_share": round(<double> fs_load_relaxed(&state.counters.busy_ns) / <double> up, 4),
            "busy_ns": fs_load_relaxed(&state.counters.busy_ns),
            "connections": fs_load_relaxed(&state.counters.n_connections),
            "cpu_seconds": fs_load_relaxed(&state.counters.cpu_ns) / 1e9,
            "stalled": "waiting for the results to be read, or for memory"
                       if fs_load_relaxed(&state.counters.stalled) else None,
            "state_bytes": fs_load_relaxed(&state.arena.in_use),
            "arena_bytes": fs_load_relaxed(&state.arena.mapped),
            "thread_id": <int64_t> fs_load_relaxed(<uint64_t *> &state.counters.thread_id),
            "drained_ns": fs_load_relaxed(&state.counters.drained_ns),
        }


def now_ns():
    """The clock that workers stamp with (CLOCK_MONOTONIC)."""
    return fs_now_ns()


def make_reader_fd():
    """The descriptor by which workers wake the thread that reads their reports."""
    return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)

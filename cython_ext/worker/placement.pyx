"""Placement, flags and counters of an engine, and the parcels in which groups travel. See shared.pxd for who writes what.

All methods but `owners` and `owner` are the mover's: one thread at a time.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy

from flexstream.cython_ext.includes.linux cimport close
from flexstream.cython_ext.includes.native cimport (
    fs_fence, fs_load_acquire, fs_load_relaxed, fs_now_ns, fs_sleep_ns, fs_store_relaxed, fs_store_release,
)
from flexstream.cython_ext.memory.messages cimport ADOPT, BORROW, GIVE_BACK, SOCKET
from flexstream.cython_ext.memory.ring cimport Message, ring_free, ring_init, ring_pop
from flexstream.cython_ext.worker.shared cimport (
    MAX_WORKERS, Connection, Flags, LentStream, Loan, Move, MovedOperator, MovedStream, Ring, Shared,
)
from flexstream.cython_ext.worker.streams cimport zeroed


cdef class Placement:
    """The map group -> worker: the truth that the NIC's table follows."""

    def __cinit__(self, list owners, int workers):
        cdef uint32_t groups = len(owners)
        cdef uint64_t capacity = 1024
        cdef size_t i
        if workers > MAX_WORKERS:
            raise ValueError(f"{workers} workers: at most {MAX_WORKERS}")
        self.shared = <Shared *> zeroed(sizeof(Shared))
        self.shared.groups = groups
        self.shared.n_workers = workers
        self.shared.counter = <uint64_t *> zeroed(groups * 8)
        self.shared.placement = <uint64_t *> zeroed(groups * 8)
        self.shared.rings = <Ring *> zeroed(<size_t> workers * workers * sizeof(Ring))
        while capacity < 4 * groups:
            capacity *= 2
        for i in range(<size_t> workers * workers):
            if not ring_init(&self.shared.rings[i], capacity):
                raise MemoryError("no memory for the rings between workers")
        for i in range(groups):
            self.shared.placement[i] = owners[i]
        self.shared.flags = <uint64_t> zeroed(sizeof(Flags) + groups)
        (<Flags *> self.shared.flags).version = 1

    def __dealloc__(self):
        cdef size_t i
        if self.shared == NULL:
            return
        for i in range(<size_t> self.shared.n_workers * self.shared.n_workers):
            if self.shared.rings != NULL:
                ring_free(&self.shared.rings[i])
        free(self.shared.rings)
        free(self.shared.counter)
        free(self.shared.placement)
        free(<void *> self.shared.flags)
        self.free_retired()
        free(self.shared)

    cdef void join(self, int worker, void *sleeping, void *seen, int wake_fd):
        """A worker says by what it is seen and woken. Before it starts."""
        self.shared.sleeping[worker] = <uint64_t *> sleeping
        self.shared.seen[worker] = <uint64_t *> seen
        self.shared.wake_fd[worker] = wake_fd

    @property
    def groups(self):
        return self.shared.groups

    def owners(self):
        cdef uint32_t g
        return [fs_load_relaxed(&self.shared.placement[g]) for g in range(self.shared.groups)]

    def owner(self, uint32_t group):
        return fs_load_relaxed(&self.shared.placement[group])

    def flip(self, uint32_t group, uint32_t worker):
        fs_store_release(&self.shared.placement[group], worker)

    # -- flags

    def publish(self, set_, clear):
        """A copy of the flags with these groups set and cleared. Returns its version, to wait for with `grace`."""
        cdef Flags *old = <Flags *> <void *> self.shared.flags
        cdef Flags *new = <Flags *> zeroed(sizeof(Flags) + self.shared.groups)
        memcpy(new, old, sizeof(Flags) + self.shared.groups)
        new.version = old.version + 1
        for group in set_:
            new.flag[<uint32_t> group] = 1
        for group in clear:
            new.flag[<uint32_t> group] = 0
        fs_store_release(&self.shared.flags, <uint64_t> new)
        old.older = self.retired
        self.retired = old
        return new.version

    def flagged(self):
        cdef Flags *flags = <Flags *> <void *> self.shared.flags
        return [g for g in range(self.shared.groups) if flags.flag[<uint32_t> g]]

    def expect(self, uint32_t group, uint64_t contributors):
        """How many will still owe the group something. Only while it is settled and before its flag is published."""
        fs_store_release(&self.shared.counter[group], contributors)

    def owing(self, uint32_t group):
        return fs_load_acquire(&self.shared.counter[group])

    cdef bint has_passed(self, uint64_t version) noexcept nogil:
        cdef uint32_t w
        fs_fence()
        for w in range(self.shared.n_workers):
            if self.shared.seen[w] != NULL and not fs_load_acquire(self.shared.sleeping[w]) \
                    and fs_load_acquire(self.shared.seen[w]) < version:
                return False
        return True

    def grace(self, uint64_t version, double timeout):
        """Wait until every worker has passed a quiescent point, or sleeps, since the version was published."""
        cdef uint64_t until = fs_now_ns() + <uint64_t> (timeout * 1e9)
        cdef uint64_t nap_ns = 0
        cdef bint passed
        with nogil:
            passed = self.has_passed(version)
            while not passed and fs_now_ns() < until:
                nap(&nap_ns)
                passed = self.has_passed(version)
        if passed and version == (<Flags *> <void *> self.shared.flags).version:
            self.free_retired()
        return passed

    cdef void free_retired(self) noexcept:
        cdef Flags *older
        while self.retired != NULL:
            older = self.retired.older
            free(self.retired)
            self.retired = older

    # -- parcels

    def close_leftovers(self):
        """Sockets that were on their way between workers when these ended: theirs to close. Returns how many."""
        cdef Message message
        cdef Connection *connection
        cdef Connection *following
        cdef size_t i
        found = 0
        for i in range(<size_t> self.shared.n_workers * self.shared.n_workers):
            while ring_pop(&self.shared.rings[i], &message):
                connection = NULL
                if message.kind == SOCKET:
                    connection = <Connection *> message.ptr
                    connection.next = NULL
                elif message.kind == ADOPT:
                    connection = (<Move *> message.ptr).connections
                elif message.kind == BORROW or message.kind == GIVE_BACK:
                    connection = (<Loan *> message.ptr).connections
                while connection != NULL:
                    following = connection.next
                    close(connection.fd)
                    free(connection.carry)
                    free(connection.hello_ack)
                    free(connection)
                    connection = following
                    found += 1
        return found


cdef class MoveHandle:
    """The parcel of one move: room for the positions of every session and operator that there is."""

    def __cinit__(self, uint64_t number, int group, int source, int target, int streams, int operators,
                  int max_sessions):
        cdef size_t n = streams
        cdef size_t i
        self.number = number
        self.group, self.source, self.target = group, source, target
        self.move = <Move *> zeroed(sizeof(Move))
        self.move.id = number
        self.move.group = group
        self.move.source = source
        self.move.target = target
        self.move.streams = <MovedStream *> zeroed(n * sizeof(MovedStream))
        self.move.n_streams = n
        self.move.operators = <MovedOperator *> zeroed(operators * sizeof(MovedOperator))
        for i in range(n):
            self.move.streams[i].session_watermark = <int64_t *> zeroed(max_sessions * 8)
            self.move.streams[i].session_number = <uint64_t *> zeroed(max_sessions * 8)
            self.move.streams[i].next_row = <uint64_t *> zeroed(max_sessions * 8)
            self.move.streams[i].counted = <uint8_t *> zeroed(max_sessions)

    def __dealloc__(self):
        cdef size_t i
        if self.move != NULL:
            for i in range(self.move.n_streams):
                free(self.move.streams[i].session_watermark)
                free(self.move.streams[i].session_number)
                free(self.move.streams[i].next_row)
                free(self.move.streams[i].counted)
            free(self.move.streams)
            free(self.move.operators)
            free(self.move)

    def arrived(self, double timeout):
        """Wait until the new owner has everything. False: not yet, after `timeout` seconds."""
        return wait_for(&self.move.done, timeout)

    def facts(self):
        """What went over and when. Only when it has arrived."""
        return {
            "connections": self.move.n_connections,
            "panes": self.move.panes,
            "entries": self.move.entries,
            "bytes": self.move.bytes,
            "swept_ns": self.move.swept_ns,
            "adopted_ns": self.move.adopted_ns,
            "drained_ns": self.move.drained_ns,
            "absorbed_ns": self.move.absorbed_ns,
        }


cdef class LoanHandle:
    """The parcel of a split, or of its end."""

    def __cinit__(self, int group, int owner, int borrower, int share, int streams, int operators,
                  int max_sessions, wanted=()):
        """`wanted`: (stream, slot) of lanes that are meant for the borrower."""
        cdef size_t n = streams
        cdef size_t i
        self.group, self.owner, self.borrower = group, owner, borrower
        self.loan = <Loan *> zeroed(sizeof(Loan))
        self.loan.group = group
        self.loan.owner = owner
        self.loan.borrower = borrower
        self.loan.share = share
        self.loan.n_streams = n
        self.loan.streams = <LentStream *> zeroed(n * sizeof(LentStream))
        self.loan.operators = <MovedOperator *> zeroed(operators * sizeof(MovedOperator))
        for i in range(n):
            self.loan.streams[i].wanted = <uint8_t *> zeroed(max_sessions)
            self.loan.streams[i].lent = <uint8_t *> zeroed(max_sessions)
            self.loan.streams[i].session_number = <uint64_t *> zeroed(max_sessions * 8)
            self.loan.streams[i].session_watermark = <int64_t *> zeroed(max_sessions * 8)
            self.loan.streams[i].next_row = <uint64_t *> zeroed(max_sessions * 8)
        for stream, slot in wanted:
            if 0 <= stream < n and 0 <= slot < max_sessions:
                self.loan.streams[<size_t> stream].wanted[<size_t> slot] = 1

    def __dealloc__(self):
        cdef size_t i
        if self.loan != NULL:
            for i in range(self.loan.n_streams):
                free(self.loan.streams[i].wanted)
                free(self.loan.streams[i].lent)
                free(self.loan.streams[i].session_number)
                free(self.loan.streams[i].session_watermark)
                free(self.loan.streams[i].next_row)
            free(self.loan.streams)
            free(self.loan.operators)
            free(self.loan)

    def done(self, double timeout):
        """Wait until the split stands, or has ended. False: not yet, after `timeout` seconds."""
        return wait_for(&self.loan.done, timeout)

    @property
    def connections(self):
        """How many went over. Only when it is done."""
        return self.loan.n_connections


cdef bint wait_for(uint64_t *word, double timeout):
    cdef uint64_t until = fs_now_ns() + <uint64_t> (timeout * 1e9)
    cdef uint64_t nap_ns = 0
    with nogil:
        while not fs_load_acquire(word) and fs_now_ns() < until:
            nap(&nap_ns)
    return fs_load_acquire(word) != 0


cdef void nap(uint64_t *nap_ns) noexcept nogil:
    """A short sleep, each longer than the one before.

    Not a yield: what is waited for is a worker that has the core of whoever waits, and since Linux 6.18 a thread that
    yields gives its claim to the core away for a whole slice, and with every turn of the loop another.
    """
    nap_ns[0] = min(2 * nap_ns[0], <uint64_t> LONGEST_NAP_NS) if nap_ns[0] else <uint64_t> FIRST_NAP_NS
    fs_sleep_ns(nap_ns[0])


cdef enum:
    FIRST_NAP_NS = 10000
    LONGEST_NAP_NS = 320000

"""A lane: what one producer has to say to one group, as the bytes that go on the wire. A group has one, and further ones
while the server asks for them: each has its own connection and row numbers, and frames go to them in turn.

The log is a ring of slots. A slot holds whole frames, one behind the other: DATA whose rows were scattered straight
into it, and WATERMARK, MARKER, EOS between them. The bytes are sent from where they lie, and lie there until the
server has acknowledged their rows, so the log is the replay buffer as well. The last slot is the current one; it may
end in an open DATA frame, whose header is written when it is closed.

  slot.bytes:  [header rows...][WATERMARK][header rows...][header| rows so far -> cursor.at ... cursor.end]
                ^start            ^sent                    ^length (open frame begins here)

Rows are numbered from 0 within the lane; on the wire they are numbered row + base, because a server that knows the
session from before, or has forgotten it, counts differently.

Who: every function here runs under the Sender's lock. Slot memory comes from a pool that is last in, first out, so
that the next frame is filled in memory that is still in the cache. Nothing blocks; sockets are non-blocking.
"""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from flexstream.cython_ext.produce.scatter cimport Cursor

cdef enum:
    SLOT_SPARE_BYTES = 128    # room behind a full frame for a watermark, a marker and an EOS
    INBOX_BYTES = 2080        # an ERROR frame's header and as much of its payload as we show
    REQUEST_BYTES = 65536     # LANES frames that nobody has looked at yet

    LANE_UNOPENED = 0         # no connection was needed yet
    LANE_OPEN = 1
    LANE_BROKEN = 2           # had one; Lane.fault says why it went
    LANE_ENDED = 3            # EOS sent, every row acknowledged, connection closed

    PUMP_DONE = 0             # every complete frame is with the kernel
    PUMP_BLOCKED = 1          # the socket is full
    PUMP_AWAY = 2             # there is no connection

ctypedef struct Slot:
    unsigned char *bytes
    uint32_t start            # first byte that still counts; moves when a replay cuts a frame
    uint32_t length           # complete frames end here
    uint32_t sent             # handed to the kernel up to here
    uint64_t end_row          # one past the last row of the complete frames

ctypedef struct Pool:
    unsigned char **free      # a stack
    uint32_t n_free
    uint32_t slot_bytes
    unsigned char *chunks     # 2 MiB each, on huge pages where there are any: 128 cursors need no 128 TLB entries.
    unsigned char *fresh      # slots not yet cut off the newest chunk; a chunk's first 8 bytes point to the one before
    unsigned char *fresh_end
    uint64_t allocated

ctypedef struct Shape:        # the same for every lane; written once
    uint32_t row_bytes
    uint32_t rows_per_frame
    uint32_t ring             # slots per lane
    bint crc
    bint acks                 # False: a row is done with when the kernel has it

ctypedef struct Lane:
    int fd                    # owned; -1 when not open
    int state
    int fault                 # errno; 0: the peer closed
    uint16_t group
    bint attached_once
    bint ending               # EOS is in the log
    bint eos_sent             # and with the kernel
    uint32_t head             # slots [head, tail) of the ring are in use, modulo shape.ring
    uint32_t tail
    uint32_t next_send        # the slot with the first unsent byte
    Slot *slots
    uint64_t next_row         # the first row of the open frame
    uint64_t acked            # rows below are the server's
    int64_t base              # wire sequence - row
    int64_t watermark         # the last one in this connection's log
    uint64_t watermark_ns     # when it was put there
    uint64_t filled_ns        # when the open frame got its place
    uint64_t unsent_ns        # when the first complete frame that is not sent got its place
    uint64_t frames
    uint64_t sent_bytes
    uint32_t inbox_bytes
    uint32_t error_value      # of an ERROR frame that came; 0: none
    uint32_t acks             # ACK frames seen on this connection
    unsigned char *inbox      # allocated at the first attach
    unsigned char *requests   # LANES frames that came, one behind the other; the control lane's only
    uint32_t requests_bytes
    uint32_t number           # a further lane's; 0: the group's first
    uint32_t sibling          # the next lane of the group, round and round
    bint used                 # a further lane: somebody asked for it
    bint linked               # and it gets rows
    bint retired              # and it gets none any more: EOS as soon as there is room
    bint shut                 # our side is closed

cdef void pool_free(Pool *pool) noexcept nogil
cdef Slot *current_slot(Lane *lane, const Shape *shape) noexcept nogil
cdef bint lane_open_frame(Lane *lane, Cursor *cursor, Pool *pool, const Shape *shape, uint64_t now) noexcept nogil
cdef void lane_close_frame(Lane *lane, Cursor *cursor, const Shape *shape) noexcept nogil
cdef bint lane_append(Lane *lane, Pool *pool, const Shape *shape, int kind, uint64_t value,
                      const unsigned char *payload, uint32_t n) noexcept nogil
cdef int lane_pump(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil
cdef void lane_drain(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil
cdef void lane_break(Lane *lane, int fault) noexcept nogil
cdef int64_t lane_attach(Lane *lane, Pool *pool, const Shape *shape, int fd, uint64_t wanted) noexcept nogil
cdef void lane_shut(Lane *lane) noexcept nogil
cdef void lane_recycle(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil
cdef uint32_t lane_unsent_slots(Lane *lane, const Shape *shape) noexcept nogil
cdef bint lane_unsent(Lane *lane, const Shape *shape) noexcept nogil
cdef uint64_t lane_open_rows(Lane *lane, Cursor *cursor, const Shape *shape) noexcept nogil

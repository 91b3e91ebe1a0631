"""See lane.pxd."""

from libc.errno cimport EAGAIN, EINTR, EPROTO, errno
from libc.stdint cimport INT64_MIN, uint8_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memmove, memset

from flexstream.cython_ext.includes.linux cimport (
    MADV_HUGEPAGE, MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, close, iovec, madvise, msghdr, recv, sendmsg, shutdown,
)
from flexstream.cython_ext.wire.frame cimport (
    CONTROL_GROUP, FLAG_CRC, FRAME_ACK, FRAME_DATA, FRAME_EOS, FRAME_ERROR, FRAME_LANES, FRAME_MAGIC, FRAME_VERSION,
    HEADER_BYTES, Header, frame_crc, header_of,
)

cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **memory, size_t alignment, size_t size) noexcept

cdef enum:
    CHUNK_BYTES = 2097152
    MOST_SLOTS = 8            # in one system call


cdef inline Slot *current_slot(Lane *lane, const Shape *shape) noexcept nogil:
    if lane.tail == lane.head:
        return NULL
    return &lane.slots[(lane.tail - 1) % shape.ring]


cdef unsigned char *pool_cut(Pool *pool) noexcept nogil:
    """A slot that was never used, from a new chunk if need be. NULL: no memory."""
    # Not a multiple of a page: cursors of many groups must not meet in the same cache sets.
    cdef size_t stride = (pool.slot_bytes + 127) // 64 * 64
    cdef size_t size = CHUNK_BYTES if stride + 64 <= CHUNK_BYTES else stride + 64
    cdef void *chunk = NULL
    if pool.fresh == NULL or <size_t> (pool.fresh_end - pool.fresh) < stride:
        if posix_memalign(&chunk, CHUNK_BYTES, size) != 0:
            return NULL
        madvise(chunk, size, MADV_HUGEPAGE)      # a wish: no harm if it is not granted
        memcpy(chunk, &pool.chunks, sizeof(void *))
        pool.chunks = <unsigned char *> chunk
        pool.fresh = pool.chunks + 64
        pool.fresh_end = pool.chunks + size
    pool.fresh += stride
    pool.allocated += stride
    return pool.fresh - stride


cdef void pool_free(Pool *pool) noexcept nogil:
    cdef unsigned char *chunk
    while pool.chunks != NULL:
        chunk = pool.chunks
        memcpy(&pool.chunks, chunk, sizeof(void *))
        free(chunk)


cdef Slot *take_slot(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil:
    cdef unsigned char *memory
    cdef Slot *slot
    if lane.tail - lane.head >= shape.ring:
        return NULL
    if pool.n_free:
        pool.n_free -= 1
        memory = pool.free[pool.n_free]
    else:
        memory = pool_cut(pool)
        if memory == NULL:
            return NULL
    slot = &lane.slots[lane.tail % shape.ring]
    lane.tail += 1
    slot.bytes = memory
    slot.start = slot.length = slot.sent = 0
    slot.end_row = lane.next_row
    return slot


cdef Slot *slot_with_room(Lane *lane, Pool *pool, const Shape *shape, uint32_t need) noexcept nogil:
    """The current slot if it has `need` bytes left, or is done with and can begin anew; else the next one."""
    cdef Slot *slot = current_slot(lane, shape)
    if slot != NULL:
        if slot.sent == slot.length and slot.end_row <= lane.acked:
            slot.start = slot.length = slot.sent = 0
        if slot.length + need <= pool.slot_bytes:
            return slot
    return take_slot(lane, pool, shape)


cdef void write_header(unsigned char *at, Lane *lane, const Shape *shape, int kind, uint32_t payload_bytes,
                       uint64_t value, uint64_t sequence) noexcept nogil:
    """Assumes: the payload is in place behind `at` when CRCs are on."""
    cdef Header *header = <Header *> at
    header[0] = header_of(<uint8_t> kind, lane.group, payload_bytes, value, sequence)
    if shape.crc:
        header.flags = FLAG_CRC
        header.crc32c = frame_crc(at, HEADER_BYTES + payload_bytes)


cdef bint lane_open_frame(Lane *lane, Cursor *cursor, Pool *pool, const Shape *shape, uint64_t now) noexcept nogil:
    """Gives the cursor room for rows. False: the ring is full. Assumes: no frame is open."""
    # A frame that would be short because the slot is nearly full is not worth its header: at least a quarter.
    cdef uint32_t least = 1 + shape.rows_per_frame // 4
    cdef uint32_t rows
    cdef Slot *slot = slot_with_room(lane, pool, shape, HEADER_BYTES + least * shape.row_bytes + SLOT_SPARE_BYTES)
    if slot == NULL:
        return False
    rows = (pool.slot_bytes - SLOT_SPARE_BYTES - HEADER_BYTES - slot.length) // shape.row_bytes
    if rows > shape.rows_per_frame:
        rows = shape.rows_per_frame
    cursor.at = slot.bytes + slot.length + HEADER_BYTES
    cursor.end = cursor.at + rows * shape.row_bytes
    lane.filled_ns = now
    return True


cdef void lane_close_frame(Lane *lane, Cursor *cursor, const Shape *shape) noexcept nogil:
    """Completes the open frame if it has rows; after it no frame is open."""
    cdef Slot *slot
    cdef unsigned char *header
    cdef uint32_t payload
    cdef uint32_t rows
    if cursor.at == NULL:
        return
    slot = current_slot(lane, shape)
    header = slot.bytes + slot.length
    payload = <uint32_t> (cursor.at - header) - HEADER_BYTES
    cursor.at = cursor.end = NULL
    if payload == 0:
        return
    rows = payload // shape.row_bytes
    if not lane_unsent(lane, shape):
        lane.unsent_ns = lane.filled_ns
    write_header(header, lane, shape, FRAME_DATA, payload, rows, lane.next_row + <uint64_t> lane.base)
    slot.length += HEADER_BYTES + payload
    lane.next_row += rows
    slot.end_row = lane.next_row
    lane.frames += 1


cdef uint64_t lane_open_rows(Lane *lane, Cursor *cursor, const Shape *shape) noexcept nogil:
    cdef Slot *slot
    if cursor.at == NULL:
        return 0
    slot = current_slot(lane, shape)
    return <uint64_t> (cursor.at - slot.bytes - slot.length - HEADER_BYTES) // shape.row_bytes


cdef bint lane_append(Lane *lane, Pool *pool, const Shape *shape, int kind, uint64_t value,
                      const unsigned char *payload, uint32_t n) noexcept nogil:
    """Puts a frame without rows at the end of the log. False: the ring is full. Assumes: no frame is open."""
    cdef Slot *slot = slot_with_room(lane, pool, shape, HEADER_BYTES + n)
    if slot == NULL:
        return False
    if n:
        memcpy(slot.bytes + slot.length + HEADER_BYTES, payload, n)
    write_header(slot.bytes + slot.length, lane, shape, kind, n, value, lane.next_row + <uint64_t> lane.base)
    slot.length += HEADER_BYTES + n
    return True


cdef void release(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil:
    """Returns slots whose rows are all acknowledged. The current slot stays; slot_with_room begins it anew."""
    cdef Slot *slot
    while lane.tail - lane.head > 1 and lane.head != lane.next_send:
        slot = &lane.slots[lane.head % shape.ring]
        if slot.end_row > lane.acked:
            return
        pool.free[pool.n_free] = slot.bytes
        pool.n_free += 1
        lane.head += 1


cdef bint lane_unsent(Lane *lane, const Shape *shape) noexcept nogil:
    cdef Slot *slot
    if lane.tail == lane.head:
        return False
    slot = current_slot(lane, shape)
    return lane.next_send != lane.tail - 1 or slot.sent != slot.length


cdef uint32_t lane_unsent_slots(Lane *lane, const Shape *shape) noexcept nogil:
    cdef Slot *slot = &lane.slots[lane.next_send % shape.ring]
    return lane.tail - lane.next_send - (lane.next_send != lane.tail and slot.sent == slot.length)


cdef size_t gather(Lane *lane, const Shape *shape, iovec *pieces) noexcept nogil:
    """The unsent bytes of the next slots, as many as fit in one call."""
    cdef uint32_t index = lane.next_send
    cdef size_t n = 0
    cdef Slot *slot
    while index != lane.tail and n < MOST_SLOTS:
        slot = &lane.slots[index % shape.ring]
        if slot.sent != slot.length:
            pieces[n].iov_base = slot.bytes + slot.sent
            pieces[n].iov_len = slot.length - slot.sent
            n += 1
        index += 1
    return n


cdef void advance(Lane *lane, const Shape *shape, uint32_t n) noexcept nogil:
    """The kernel took `n` bytes: next_send is the slot with the first one that it did not take, or the current."""
    cdef Slot *slot
    cdef uint32_t part
    lane.sent_bytes += n
    while True:
        slot = &lane.slots[lane.next_send % shape.ring]
        part = slot.length - slot.sent
        part = n if n < part else part
        slot.sent += part
        n -= part
        if slot.sent != slot.length:
            return
        if not shape.acks:
            lane.acked = slot.end_row
        if lane.next_send == lane.tail - 1:
            return
        lane.next_send += 1


cdef int lane_pump(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil:
    """Hands complete frames to the kernel until it takes no more: one system call if it takes them all."""
    cdef iovec pieces[MOST_SLOTS]
    cdef msghdr message
    cdef ssize_t n
    cdef int fault
    if lane.fd < 0:
        return PUMP_AWAY
    memset(&message, 0, sizeof(message))
    message.msg_iov = pieces
    while True:
        message.msg_iovlen = gather(lane, shape, pieces)
        if message.msg_iovlen == 0:
            break
        n = sendmsg(lane.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
        if n < 0:
            if errno == EINTR:
                continue
            if errno == EAGAIN:
                return PUMP_BLOCKED
            fault = errno
            lane_drain(lane, pool, shape)     # an ERROR frame that says why may be waiting
            if lane.fd >= 0:
                lane_break(lane, fault)
            return PUMP_AWAY
        advance(lane, shape, <uint32_t> n)
    lane.eos_sent = lane.ending
    if not shape.acks:
        release(lane, pool, shape)
    return PUMP_DONE


cdef void lane_break(Lane *lane, int fault) noexcept nogil:
    if lane.fd >= 0:
        close(lane.fd)
    lane.fd = -1
    lane.fault = fault
    # A clean close after our EOS is the server's way to say that it has it all; on the control connection the ACK is.
    if fault == 0 and lane.eos_sent and lane.acked == lane.next_row and (lane.acks or lane.group != CONTROL_GROUP):
        lane.state = LANE_ENDED
    else:
        lane.state = LANE_BROKEN


cdef void lane_shut(Lane *lane) noexcept nogil:
    """All is said: the server closes when it has read the end. (A close with unread answers would lose it.)"""
    if lane.fd >= 0 and not lane.shut:
        shutdown(lane.fd, SHUT_WR)
        lane.shut = True


cdef void lane_recycle(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil:
    """The lane as it was before its first use. Assumes: it has no connection, and nobody wants its rows."""
    cdef Slot *slots = lane.slots
    cdef unsigned char *inbox = lane.inbox
    cdef uint16_t group = lane.group
    while lane.head != lane.tail:
        pool.free[pool.n_free] = lane.slots[lane.head % shape.ring].bytes
        pool.n_free += 1
        lane.head += 1
    memset(lane, 0, sizeof(Lane))
    lane.slots = slots
    lane.inbox = inbox
    lane.group = group
    lane.fd = -1
    lane.watermark = INT64_MIN


cdef bint keep_request(Lane *lane, uint32_t size) noexcept nogil:
    """The LANES frame at the front of the inbox is for Python. False: nobody has looked at them for long."""
    if lane.requests == NULL:
        lane.requests = <unsigned char *> malloc(REQUEST_BYTES)
    if lane.requests == NULL or lane.requests_bytes + size > REQUEST_BYTES:
        return False
    memcpy(lane.requests + lane.requests_bytes, lane.inbox, size)
    lane.requests_bytes += size
    return True


cdef uint32_t take_frame(Lane *lane) noexcept nogil:
    """Handles the frame at the front of the inbox and returns its size; 0: it is not whole yet."""
    cdef const Header *header = <const Header *> lane.inbox
    cdef uint32_t size
    cdef int64_t row
    if lane.inbox_bytes < HEADER_BYTES:
        return 0
    if header.magic != FRAME_MAGIC or header.version != FRAME_VERSION or header.payload_bytes > INBOX_BYTES - HEADER_BYTES:
        lane_break(lane, EPROTO)
        return 0
    size = HEADER_BYTES + header.payload_bytes
    if lane.inbox_bytes < size:
        return 0
    if header.type == FRAME_ACK and lane.group == CONTROL_GROUP:
        lane.acks += 1
    elif header.type == FRAME_ACK:
        row = <int64_t> (header.sequence - <uint64_t> lane.base)
        if row > <int64_t> lane.next_row:
            lane_break(lane, EPROTO)
            return 0
        if row > <int64_t> lane.acked:
            lane.acked = <uint64_t> row
        lane.acks += 1
    elif header.type == FRAME_LANES and lane.group == CONTROL_GROUP:
        if not keep_request(lane, size):
            lane_break(lane, EPROTO)          # the next connection says all of them anew
            return 0
    elif header.type == FRAME_ERROR:
        lane.error_value = <uint32_t> header.value if header.value else 1
        lane_break(lane, EPROTO)              # its payload stays at the front of the inbox
        return 0
    return size


cdef void lane_drain(Lane *lane, Pool *pool, const Shape *shape) noexcept nogil:
    """Reads what the server said: acknowledgements free slots; an ERROR or the end breaks the lane."""
    cdef ssize_t n
    cdef uint32_t size
    while lane.fd >= 0:
        n = recv(lane.fd, lane.inbox + lane.inbox_bytes, INBOX_BYTES - lane.inbox_bytes, MSG_DONTWAIT)
        if n < 0 and errno == EINTR:
            continue
        if n < 0 and errno == EAGAIN:
            break
        if n <= 0:
            lane_break(lane, errno if n < 0 else 0)
            break
        lane.inbox_bytes += <uint32_t> n
        while True:
            size = take_frame(lane)
            if size == 0:
                break
            lane.inbox_bytes -= size
            memmove(lane.inbox, lane.inbox + size, lane.inbox_bytes)
        if lane.inbox_bytes == 0:             # a short read: there is nothing more
            break
    release(lane, pool, shape)


cdef uint32_t resume_in_slot(Lane *lane, Slot *slot, const Shape *shape, uint64_t want, int64_t old_base,
                             bint found) noexcept nogil:
    """Renumbers the slot's frames; returns where sending starts: the slot's length if nothing in it is wanted."""
    cdef Header header
    cdef uint32_t at = slot.start
    cdef uint32_t resume = slot.start if found else slot.length
    cdef uint32_t cut
    cdef uint64_t first
    while at < slot.length:
        memcpy(&header, slot.bytes + at, HEADER_BYTES)
        cut = 0
        if header.type == FRAME_DATA:
            first = header.sequence - <uint64_t> old_base
            if not found and first + header.value > want:
                found = True
                cut = <uint32_t> (want - first) if want > first else 0
                resume = at + cut * shape.row_bytes
            write_header(slot.bytes + at + cut * shape.row_bytes, lane, shape, FRAME_DATA,
                         header.payload_bytes - cut * shape.row_bytes, header.value - cut,
                         first + cut + <uint64_t> lane.base)
        elif not found and header.type == FRAME_EOS:
            found = True
            resume = at
        at += HEADER_BYTES + header.payload_bytes
    return resume


cdef int64_t lane_attach(Lane *lane, Pool *pool, const Shape *shape, int fd, uint64_t wanted) noexcept nogil:
    """Takes over a connected socket whose HELLO was answered with `wanted`, and rewinds the log to that row.

    Returns the acknowledged rows that the server has forgotten (it restarted without them), or -1 when it wants
    rows that were never produced: then the lane is as before and the socket is still the caller's.
    """
    cdef int64_t old_base = lane.base
    cdef int64_t lost = 0
    cdef int64_t want
    cdef uint32_t index
    cdef uint32_t resume
    cdef bint found = False
    cdef Slot *slot
    if lane.inbox == NULL:
        lane.inbox = <unsigned char *> malloc(INBOX_BYTES)
        if lane.inbox == NULL:
            return -1
    if lane.attached_once:
        lane.watermark = INT64_MIN            # what the old connection carried may not have arrived
    else:
        lane.base = <int64_t> wanted
    want = <int64_t> wanted - lane.base
    if want > <int64_t> lane.next_row:
        return -1
    if want < <int64_t> lane.acked:
        lost = <int64_t> lane.acked - want
        lane.base += -lost
        want = <int64_t> lane.acked
    lane.acked = <uint64_t> want
    lane.attached_once = True
    lane.next_send = lane.tail
    for index in range(lane.head, lane.tail):
        slot = &lane.slots[index % shape.ring]
        resume = resume_in_slot(lane, slot, shape, <uint64_t> want, old_base, found)
        if not found and (resume < slot.length or index == lane.tail - 1):
            found = True
            lane.next_send = index
        slot.start = slot.sent = resume
    lane.fd = fd
    lane.state = LANE_OPEN
    lane.fault = 0
    lane.error_value = 0
    lane.inbox_bytes = 0
    lane.acks = 0
    lane.eos_sent = False
    lane.shut = False
    release(lane, pool, shape)
    return lost

"""See connections.pxd."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from flexstream.cython_ext.includes.linux cimport (
    EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLLIN, MSG_DONTWAIT, MSG_NOSIGNAL, epoll_ctl, epoll_event, errno, send,
)
from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_store_relaxed
from flexstream.cython_ext.memory.messages cimport CONNECTION_CLOSED, SOCKET
from flexstream.cython_ext.wire.decoder cimport FAULT_FENCED, FAULT_NO_SESSION, FAULT_SHUTTING_DOWN
from flexstream.cython_ext.wire.frame cimport FRAME_ACK, HEADER_BYTES, Header, header_of
from flexstream.cython_ext.worker.moving cimport ring_room, tell, waits_for_order, wake
from flexstream.cython_ext.worker.shared cimport Move
from flexstream.cython_ext.worker.work_item cimport report
from flexstream.cython_ext.worker.worker cimport SESSION_NONE, StreamState


# Acknowledgements


cdef void send_ack(Connection *connection) noexcept nogil:
    """Tell the producer what it may forget. A full socket loses nothing: the next ACK says more."""
    cdef uint64_t next_row = connection.decoder.next_row
    cdef Header ack = header_of(FRAME_ACK, <uint16_t> connection.group, 0, 0, next_row)
    if send(connection.fd, &ack, HEADER_BYTES, MSG_DONTWAIT | MSG_NOSIGNAL) == HEADER_BYTES:
        connection.acked_row = next_row
        connection.unacked_bytes = 0


cdef void ack_the_rest(Connection *connection) noexcept nogil:
    """Nothing more will come on it: what is not acknowledged now never is."""
    if connection.ack_bytes and connection.decoder.next_row > connection.acked_row:
        send_ack(connection)


cdef bint send_acks(WorkerState *worker) noexcept nogil:
    """What connections have not been told yet. True: some still wait."""
    cdef Connection *connection = worker.net.connections
    cdef bint waiting = False
    while connection != NULL:
        if connection.ack_bytes and connection.decoder.next_row > connection.acked_row:
            send_ack(connection)
            waiting = True
        connection = connection.next
    return waiting


cdef bint any_unacked(WorkerState *worker) noexcept nogil:
    cdef Connection *connection = worker.net.connections
    while connection != NULL:
        if connection.ack_bytes and connection.decoder.next_row > connection.acked_row:
            return True
        connection = connection.next
    return False


# Connections come and go


cdef void attach(WorkerState *worker, Connection *connection) noexcept nogil:
    """Link it in. Assumes: it was detached, or is new."""
    cdef StreamState *stream = worker.streams[connection.stream]
    stream.connection[<size_t> connection.group * stream.max_sessions + connection.slot] = connection
    connection.previous = NULL
    connection.next = worker.net.connections
    if worker.net.connections != NULL:
        worker.net.connections.previous = connection
    worker.net.connections = connection
    fs_store_relaxed(&worker.counters.n_connections, worker.counters.n_connections + 1)


cdef void detach(WorkerState *worker, Connection *connection) noexcept nogil:
    """Stop serving it."""
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef size_t at = <size_t> connection.group * stream.max_sessions + connection.slot
    epoll_ctl(worker.net.epoll_fd, EPOLL_CTL_DEL, connection.fd, NULL)
    if stream.connection[at] == connection:
        stream.connection[at] = NULL
        stream.next_row[at] = connection.decoder.next_row
    if connection.previous != NULL:
        connection.previous.next = connection.next
    else:
        worker.net.connections = connection.next
    if connection.next != NULL:
        connection.next.previous = connection.previous
    if worker.net.serving == connection:
        worker.net.serving = NULL
    fs_store_relaxed(&worker.counters.n_connections, worker.counters.n_connections - 1)
    worker.net.detached += 1


cdef void push_limbo(WorkerState *worker) noexcept nogil:
    cdef Connection *connection
    cdef Connection *following
    while worker.net.limbo != NULL:
        connection = worker.net.limbo
        following = connection.next         # once reported, Python may free it
        if not report(worker, CONNECTION_CLOSED, connection.stream, connection.slot, connection,
                      connection.closed_why, connection.id):
            return
        worker.net.limbo = following


cdef void close_connection(WorkerState *worker, Connection *connection, int64_t why) noexcept nogil:
    """Stop serving it and give it back to Python, which tells the peer why and closes the socket."""
    detach(worker, connection)
    connection.closed_why = why
    connection.next = worker.net.limbo
    connection.previous = NULL
    worker.net.limbo = connection
    push_limbo(worker)


cdef void serve_from_now(WorkerState *worker, Connection *connection) noexcept nogil:
    cdef epoll_event event
    event.events = EPOLLIN
    event.data.ptr = connection
    if epoll_ctl(worker.net.epoll_fd, EPOLL_CTL_ADD, connection.fd, &event) != 0:
        close_connection(worker, connection, -errno)


cdef void add_connection(WorkerState *worker, Connection *connection) noexcept nogil:
    """Fence an older connection of the same session and group, say which row is wanted next, begin to serve."""
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef size_t at = <size_t> connection.group * stream.max_sessions + connection.slot
    cdef uint64_t next_row
    if stream.connection[at] != NULL:
        close_connection(worker, stream.connection[at], FAULT_FENCED)
    next_row = stream.next_row[at]
    connection.session = stream.session_number[connection.slot]
    connection.decoder.next_row = next_row
    connection.acked_row = next_row
    attach(worker, connection)
    if stream.session_state[connection.slot] == SESSION_NONE:
        close_connection(worker, connection, FAULT_NO_SESSION)
        return
    if worker.stopping:
        close_connection(worker, connection, FAULT_SHUTTING_DOWN)
        return
    memcpy(connection.hello_ack + 24, &next_row, 8)
    if send(connection.fd, connection.hello_ack, connection.hello_ack_n, MSG_DONTWAIT | MSG_NOSIGNAL) \
            != <int64_t> connection.hello_ack_n:
        close_connection(worker, connection, -errno)
    else:
        serve_from_now(worker, connection)


cdef void take_socket(WorkerState *worker, Connection *connection) noexcept nogil:
    """Of the acceptor, or forwarded: serve it, keep it until the group is adopted, or send it to whoever serves it."""
    cdef StreamState *stream = worker.streams[connection.stream]
    cdef size_t at = <size_t> connection.group * stream.max_sessions + connection.slot
    cdef uint32_t owner
    if stream.owned[connection.group] and waits_for_order(worker, stream, connection.group):
        connection.next = worker.migration.parked
        worker.migration.parked = connection
        return
    if stream.borrowed[at] or (stream.owned[connection.group] and not stream.lent[at]):
        add_connection(worker, connection)
        return
    if stream.owned[connection.group]:
        owner = stream.lent[at] - 1
    else:
        owner = <uint32_t> fs_load_acquire(&worker.shared.placement[connection.group])
    if owner == worker.index:
        connection.next = worker.migration.parked
        worker.migration.parked = connection
    elif ring_room(worker, owner):
        tell(worker, owner, SOCKET, connection)
        wake(worker, owner)
    else:
        connection.next = worker.migration.held_sockets
        worker.migration.held_sockets = connection


cdef void take_sockets(WorkerState *worker, Connection **kept) noexcept nogil:
    """All that were kept in the list; those that must still wait are kept again."""
    cdef Connection *connection = kept[0]
    cdef Connection *following
    kept[0] = NULL
    while connection != NULL:
        following = connection.next
        take_socket(worker, connection)
        connection = following


# Handed over by another worker, or given back


cdef bint is_stranger(const WorkerState *worker, const Connection *connection) noexcept nogil:
    """Whether the connection's session has ended, and another may have the slot, since it was detached."""
    cdef const StreamState *stream = worker.streams[connection.stream]
    return stream.session_state[connection.slot] == SESSION_NONE \
        or stream.session_number[connection.slot] != connection.session


cdef void turn_away(WorkerState *worker, Connection *connection, int64_t why) noexcept nogil:
    """Give a connection that is not attached here to Python, which tells the peer why and closes the socket."""
    connection.closed_why = why
    connection.previous = NULL
    connection.next = worker.net.limbo
    worker.net.limbo = connection


cdef void take_over(WorkerState *worker, Connection **handed) noexcept nogil:
    """Serve the connections of a parcel, which another worker has detached."""
    cdef Connection *connection = handed[0]
    cdef Connection *following
    handed[0] = NULL
    while connection != NULL:
        following = connection.next
        if is_stranger(worker, connection):
            turn_away(worker, connection, 0 if connection.decoder.ended else FAULT_NO_SESSION)
            connection = following
            continue
        attach(worker, connection)
        if worker.stopping:
            close_connection(worker, connection, FAULT_SHUTTING_DOWN)
        else:
            serve_from_now(worker, connection)
        connection = following


cdef void give_back_list(WorkerState *worker, Connection **kept) noexcept nogil:
    cdef Connection *connection = kept[0]
    cdef Connection *following
    kept[0] = NULL
    while connection != NULL:
        following = connection.next
        turn_away(worker, connection, FAULT_SHUTTING_DOWN)
        connection = following


cdef void give_back_sockets(WorkerState *worker) noexcept nogil:
    """The worker ends: what it kept for later goes back to Python."""
    cdef Move *move = worker.migration.adopting
    give_back_list(worker, &worker.migration.parked)
    give_back_list(worker, &worker.migration.held_sockets)
    while move != NULL:
        give_back_list(worker, &move.connections)
        move = move.next
    push_limbo(worker)

"""A worker's connections: taken, served, acknowledged, handed on, closed.

Everything here runs on the worker's thread. A connection is attached to one worker at a time; closed, it goes back to
Python, which tells the peer why and closes the socket.
"""

from libc.stdint cimport int64_t

from flexstream.cython_ext.worker.shared cimport Connection
from flexstream.cython_ext.worker.worker cimport WorkerState

cdef void send_ack(Connection *connection) noexcept nogil
cdef void ack_the_rest(Connection *connection) noexcept nogil
cdef bint send_acks(WorkerState *worker) noexcept nogil
cdef bint any_unacked(WorkerState *worker) noexcept nogil
cdef void detach(WorkerState *worker, Connection *connection) noexcept nogil
cdef void push_limbo(WorkerState *worker) noexcept nogil
cdef void close_connection(WorkerState *worker, Connection *connection, int64_t why) noexcept nogil
cdef void take_socket(WorkerState *worker, Connection *connection) noexcept nogil
cdef void take_sockets(WorkerState *worker, Connection **kept) noexcept nogil
cdef void take_over(WorkerState *worker, Connection **handed) noexcept nogil
cdef void give_back_sockets(WorkerState *worker) noexcept nogil

"""What a worker does when it is told to (memory/messages.pxd): queries and sessions come and go, work begins.

Everything here runs on the worker's thread. An order that begins work (rows, watermarks, moves) is obeyed only when
nothing is being worked on.
"""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.memory.messages cimport (
    ADD_CONNECTION, ADD_STREAM, KNOCK, REGISTER_SESSION, SESSION_FREE, SESSION_WATERMARK,
)
from flexstream.cython_ext.memory.ring cimport Message
from flexstream.cython_ext.worker.worker cimport StreamState, WorkerState


cdef inline bint can_be_obeyed_at_once(const Message *order) noexcept nogil:
    """Orders that begin no work and look at no window: they need not wait for what is being worked on."""
    return (order.kind == ADD_CONNECTION or order.kind == REGISTER_SESSION or order.kind == SESSION_FREE
            or order.kind == SESSION_WATERMARK or order.kind == ADD_STREAM or order.kind == KNOCK)


cdef void obey(WorkerState *worker, Message *order, uint64_t now) noexcept nogil
cdef void hear(WorkerState *worker, StreamState *stream, uint32_t slot, uint64_t now) noexcept nogil
cdef bint flush_outputs(WorkerState *worker) noexcept nogil

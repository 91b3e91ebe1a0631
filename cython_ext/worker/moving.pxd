"""A group's way from one worker to another, as the two workers do it (design section 5, model in state/).

The old owner, at a quiescent point: SWEEP gives sessions, sockets with their decoder state, and firing positions to
the new owner (ADOPT); rows that were fed to it before are its own to work off; behind them DRAIN_POINT makes it
publish every pane it has (DRAINED), on the same ring, and then count itself out.
The new owner serves the sockets from ADOPT on, on fresh partials, and fires nothing of the group until DRAINED is
here and the counter is zero. Then it fires what was due and gives the parcel back (`done`); the mover clears the flag.
Where an operator needs rows in the order of arrival (Operator.ordered) it reads none of the stream's rows before DRAINED either:
sockets wait in the parcel, new ones are parked, fed rows stay where they are. Then there is only ever one partial.
"""

from libc.stdint cimport uint32_t, uint64_t

from flexstream.cython_ext.operators.graph cimport Operator
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.worker.shared cimport Connection, Move, MovedOperator
from flexstream.cython_ext.worker.worker cimport StreamState, WorkerState

cdef bint tell(WorkerState *worker, uint32_t target, uint32_t kind, void *ptr) noexcept nogil
cdef void wake(WorkerState *worker, uint32_t target) noexcept nogil
cdef uint64_t ring_room(WorkerState *worker, uint32_t target) noexcept nogil
cdef bint waits_for_order(const WorkerState *worker, const StreamState *stream, uint32_t group) noexcept nogil
cdef Operator *operator_of(WorkerState *worker, uint64_t number) noexcept nogil
cdef void say_position(const Operator *op, uint32_t group, MovedOperator *moved) noexcept nogil
cdef void begin_at(Operator *op, uint32_t group, const MovedOperator *moved) noexcept nogil
cdef uint64_t bytes_of_pane(const Operator *op, const Pane *pane) noexcept nogil
cdef void quiescent(WorkerState *worker) noexcept nogil
cdef void sweep(WorkerState *worker, Move *move) noexcept nogil
cdef void drain(WorkerState *worker, Move *move) noexcept nogil
cdef bint peers_wait(WorkerState *worker) noexcept nogil
cdef void read_peer(WorkerState *worker, uint32_t peer) noexcept nogil
cdef uint32_t waiting_peer(WorkerState *worker) noexcept nogil
cdef bint next_due_advance(WorkerState *worker) noexcept nogil

"""What has come for each group and what waits for it, when somebody wants to know.

Python raises `sample_wanted` and wakes the worker if it sleeps; the worker looks at it between connections, asks the
kernel what each of its sockets holds, publishes `StreamState.arrived` and `waiting` (relaxed) and then says so in
`sampled`. Rows that were read and rows in the sockets are counted at one moment: so a worker that the machine kept
from running looks no less loaded than the others.
"""

from flexstream.cython_ext.includes.native cimport fs_load_relaxed
from flexstream.cython_ext.worker.worker cimport WorkerState

cdef void sample_sockets(WorkerState *worker) noexcept nogil


cdef inline bint sample_is_wanted(WorkerState *worker) noexcept nogil:
    return fs_load_relaxed(&worker.sample_wanted) != worker.counters.sampled


cdef inline void sample_if_wanted(WorkerState *worker) noexcept nogil:
    if sample_is_wanted(worker):
        sample_sockets(worker)

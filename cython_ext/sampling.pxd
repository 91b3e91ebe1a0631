"""What waits in a worker's sockets, per group, when somebody wants to know.

Python raises `sample_wanted`; the worker looks at it between connections, asks the kernel what each of its sockets
holds, publishes that in `StreamState.waiting` (bytes, relaxed) and then says so in `sampled`. A worker that sleeps has
empty sockets, and is not woken for it.
"""

from flexstream.cython_ext.includes.native cimport fs_load_relaxed
from flexstream.cython_ext.worker cimport WorkerState

cdef void sample_sockets(WorkerState *worker) noexcept nogil


cdef inline void sample_if_wanted(WorkerState *worker) noexcept nogil:
    if fs_load_relaxed(&worker.sample_wanted) != worker.sampled:
        sample_sockets(worker)

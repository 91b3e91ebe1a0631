"""The Python face of what workers share."""

from libc.stdint cimport uint64_t

from flexstream.cython_ext.worker.shared cimport Flags, Loan, Move, Shared


cdef class Placement:
    cdef Shared *shared
    cdef Flags *retired           # replaced, and perhaps still read
    cdef void join(self, int worker, void *sleeping, void *seen, int wake_fd)
    cdef void free_retired(self) noexcept
    cdef bint has_passed(self, uint64_t version) noexcept nogil


cdef class MoveHandle:
    cdef Move *move
    cdef readonly int group
    cdef readonly int source
    cdef readonly int target
    cdef readonly object number


cdef class LoanHandle:
    cdef Loan *loan
    cdef readonly int group
    cdef readonly int owner
    cdef readonly int borrower

"""A group served by several workers at once, because it is hotter than a core (design section 5, "Split groups").

The owner lends connections of the group to another worker, which counts their rows in partials of its own. Whenever
the least watermark of what it borrowed passes the end of a pane, it sends the panes that are complete, with those
watermarks, in one message; the owner takes the panes by pointer, and only then lets the watermarks count. So the
owner's minimum is never past rows that somebody else still has, and it goes on firing as ever. The flag of the group
stands as long as the split does: it says that nobody may take the group for settled.

Why nothing is late that would not be: a borrower judges lateness by the watermark that it has sent last, and the
owner cannot have passed that one. Why an idle session holds a split group: its rows may be in panes that were not
sent yet, so a lent connection counts whether it is idle or not; the mover ends splits that are of no use.
"""

from libc.stdint cimport uint32_t

from flexstream.cython_ext.worker.shared cimport Loan, Share
from flexstream.cython_ext.worker.worker cimport StreamState, WorkerState

cdef void lend(WorkerState *worker, Loan *loan) noexcept nogil
cdef void borrow(WorkerState *worker, Loan *loan) noexcept nogil
cdef bint contribute(WorkerState *worker, StreamState *stream, uint32_t group, bint everything) noexcept nogil
cdef bint absorb_share(WorkerState *worker, Share *share) noexcept nogil
cdef bint give_back(WorkerState *worker, Loan *loan) noexcept nogil
cdef void take_back(WorkerState *worker, Loan *loan) noexcept nogil

"""The allocator thread: maps memory for arenas and outputs before workers need it, so that workers never do.

One per engine. Python registers and removes what it serves, under `lock`; the thread walks the lists when a worker
writes to `wake_fd`.
"""

from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.memory.blocks cimport Output


cdef class Allocator:
    cdef int wake_fd
    cdef void *shared
    cdef void serve_arena(self, Arena *arena)
    cdef void serve_output(self, Output *output)
    cdef void forget_output(self, Output *output)

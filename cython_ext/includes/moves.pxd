cdef extern from "moves.h" nogil:
    const bint FS_MOVES

"""Further lanes of groups that are hotter than a core, and what Python asks about lanes."""

from flexstream.cython_ext.produce.lanes cimport Lanes

cdef class FurtherLanes(Lanes):
    cdef list look(self)

cdef void *worker_main(void *argument) noexcept nogil

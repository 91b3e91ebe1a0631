"""See allocator.pxd."""

from libc.stdint cimport uint64_t
from libc.stdlib cimport calloc, free

from flexstream.cython_ext.includes.linux cimport (
    EFD_CLOEXEC, EFD_NONBLOCK, POLLIN, close, eventfd, poll, pollfd, pthread_create, pthread_join, pthread_setname_np,
    pthread_t, read, write,
)
from flexstream.cython_ext.includes.native cimport fs_load_acquire, fs_store_release
from flexstream.cython_ext.memory.arena cimport Arena, arena_serve
from flexstream.cython_ext.memory.blocks cimport Output, output_serve

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, const void *attributes) noexcept
    int pthread_mutex_lock(pthread_mutex_t *mutex) noexcept
    int pthread_mutex_unlock(pthread_mutex_t *mutex) noexcept
    int pthread_mutex_destroy(pthread_mutex_t *mutex) noexcept

cdef enum:
    MAX_SERVED = 4096


cdef struct Shared:
    pthread_mutex_t lock
    pthread_t thread
    int wake_fd
    uint64_t stopping
    Arena *arenas[MAX_SERVED]
    Output *outputs[MAX_SERVED]
    unsigned n_arenas
    unsigned n_outputs


cdef void *allocator_loop(void *argument) noexcept nogil:
    cdef Shared *shared = <Shared *> argument
    cdef pollfd waiting
    cdef uint64_t count
    cdef unsigned i
    while fs_load_acquire(&shared.stopping) == 0:
        waiting.fd = shared.wake_fd
        waiting.events = POLLIN
        waiting.revents = 0
        poll(&waiting, 1, 1000)
        if read(shared.wake_fd, &count, 8) < 0:
            count = 0           # woken by the time limit
        pthread_mutex_lock(&shared.lock)
        for i in range(shared.n_arenas):
            arena_serve(shared.arenas[i])
        for i in range(shared.n_outputs):
            output_serve(shared.outputs[i])
        pthread_mutex_unlock(&shared.lock)
    return NULL


cdef class Allocator:
    def __cinit__(self):
        cdef Shared *shared = <Shared *> calloc(1, sizeof(Shared))
        if shared == NULL:
            raise MemoryError("no memory for the allocator")
        pthread_mutex_init(&shared.lock, NULL)
        shared.wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
        self.shared = shared
        self.wake_fd = shared.wake_fd
        if pthread_create(&shared.thread, NULL, allocator_loop, shared) != 0:
            raise MemoryError("cannot start the allocator thread")
        pthread_setname_np(shared.thread, b"fs-allocator")

    cdef void serve_arena(self, Arena *arena):
        cdef Shared *shared = <Shared *> self.shared
        pthread_mutex_lock(&shared.lock)
        if shared.n_arenas < MAX_SERVED:
            shared.arenas[shared.n_arenas] = arena
            shared.n_arenas += 1
        pthread_mutex_unlock(&shared.lock)

    cdef void serve_output(self, Output *output):
        cdef Shared *shared = <Shared *> self.shared
        pthread_mutex_lock(&shared.lock)
        if shared.n_outputs < MAX_SERVED:
            shared.outputs[shared.n_outputs] = output
            shared.n_outputs += 1
        pthread_mutex_unlock(&shared.lock)

    cdef void forget_output(self, Output *output):
        cdef Shared *shared = <Shared *> self.shared
        cdef unsigned i
        pthread_mutex_lock(&shared.lock)
        for i in range(shared.n_outputs):
            if shared.outputs[i] == output:
                shared.n_outputs -= 1
                shared.outputs[i] = shared.outputs[shared.n_outputs]
                break
        pthread_mutex_unlock(&shared.lock)

    def stop(self):
        """End the thread. Call it after every worker has ended."""
        cdef Shared *shared = <Shared *> self.shared
        cdef uint64_t one = 1
        if shared == NULL:
            return
        fs_store_release(&shared.stopping, 1)
        if write(shared.wake_fd, &one, 8) < 0:
            pass
        with nogil:
            pthread_join(shared.thread, NULL)
        close(shared.wake_fd)
        pthread_mutex_destroy(&shared.lock)
        free(shared)
        self.shared = NULL

    def __dealloc__(self):
        self.stop()

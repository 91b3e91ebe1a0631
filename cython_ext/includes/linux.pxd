"""The Linux calls that workers and producers make, by their kernel and libc names."""

from libc.stdint cimport int32_t, uint32_t, uint64_t


cdef extern from "<errno.h>" nogil:
    int errno
    enum:
        EAGAIN
        EINTR
        EWOULDBLOCK

cdef extern from "<unistd.h>" nogil:
    ssize_t read(int fd, void *buffer, size_t n) noexcept
    ssize_t write(int fd, const void *buffer, size_t n) noexcept
    int close(int fd) noexcept

cdef extern from "<sys/types.h>" nogil:
    pass

cdef extern from "<sys/socket.h>" nogil:
    enum:
        MSG_DONTWAIT
        MSG_NOSIGNAL
        SHUT_RDWR
        SHUT_WR
    ssize_t recv(int fd, void *buffer, size_t n, int flags) noexcept
    ssize_t send(int fd, const void *buffer, size_t n, int flags) noexcept
    struct iovec:
        void *iov_base
        size_t iov_len
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    ssize_t sendmsg(int fd, const msghdr *message, int flags) noexcept
    int shutdown(int fd, int how) noexcept

cdef extern from "<sys/epoll.h>" nogil:
    enum:
        EPOLLIN
        EPOLLHUP
        EPOLLERR
        EPOLLRDHUP
        EPOLL_CTL_ADD
        EPOLL_CTL_DEL
        EPOLL_CLOEXEC
    ctypedef union epoll_data_t:
        void *ptr
        int fd
        uint64_t u64
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags) noexcept
    int epoll_ctl(int epfd, int op, int fd, epoll_event *event) noexcept
    int epoll_wait(int epfd, epoll_event *events, int maxevents, int timeout) noexcept

cdef extern from "<sys/eventfd.h>" nogil:
    enum:
        EFD_NONBLOCK
        EFD_CLOEXEC
    int eventfd(unsigned int initial, int flags) noexcept

cdef extern from "<sys/mman.h>" nogil:
    enum:
        PROT_READ
        PROT_WRITE
        MAP_PRIVATE
        MAP_ANONYMOUS
        MAP_POPULATE
        MADV_HUGEPAGE
    void *MAP_FAILED
    void *mmap(void *address, size_t n, int protection, int flags, int fd, long offset) noexcept
    int munmap(void *address, size_t n) noexcept
    int madvise(void *address, size_t n, int advice) noexcept

cdef extern from "<poll.h>" nogil:
    enum:
        POLLIN
        POLLOUT
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long n, int timeout_ms) noexcept

cdef extern from "<pthread.h>" nogil:
    ctypedef unsigned long pthread_t
    int pthread_create(pthread_t *thread, const void *attributes, void *(*start)(void *) noexcept nogil,
                       void *argument) noexcept
    int pthread_join(pthread_t thread, void **result) noexcept
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *lock, const void *attributes) noexcept
    int pthread_mutex_destroy(pthread_mutex_t *lock) noexcept
    int pthread_mutex_lock(pthread_mutex_t *lock) noexcept
    int pthread_mutex_trylock(pthread_mutex_t *lock) noexcept
    int pthread_mutex_unlock(pthread_mutex_t *lock) noexcept
    int pthread_setname_np(pthread_t thread, const char *name) noexcept
    pthread_t pthread_self() noexcept

cdef extern from "<sched.h>" nogil:
    ctypedef struct cpu_set_t:
        pass
    void CPU_ZERO(cpu_set_t *cpus) noexcept
    void CPU_SET(int cpu, cpu_set_t *cpus) noexcept
    int sched_yield() noexcept
    int sched_setaffinity(int pid, size_t n, const cpu_set_t *cpus) noexcept

/* Counts, per thread, the calls that a worker must not make. Preloaded; read with ctypes.
 *
 * Two nets. (1) The malloc family and mmap are wrapped by name: that sees what the C library serves without a
 * system call. (2) After calls_arm() every thread whose name begins with "fs-worker-" puts a seccomp filter on
 * itself at its next epoll_wait: any system call that the record path has no need of is caught (SIGSYS), counted by
 * its number and fails with ENOSYS. So futex, mmap, brk, madvise, clone and the rest cannot hide behind an inlined
 * system call.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { MALLOC, CALLOC, REALLOC, FREE, ALIGNED, MMAP, MUNMAP, KINDS };
#define MAX_THREADS 512
#define MAX_SYSCALL 512
#define HIDDEN __attribute__((visibility("hidden")))

struct thread_calls {
    long tid;
    long filtered; /* 0 not asked, 1 the filter is on, -errno it was refused */
    long calls[KINDS];
};

static struct thread_calls threads[MAX_THREADS];
static int n_threads;
static long trapped[MAX_SYSCALL]; /* of all filtered threads together */
static int armed;
static __thread struct thread_calls *mine __attribute__((tls_model("initial-exec")));

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static struct thread_calls *self(void)
{
    if (mine == NULL) {
        int at = __atomic_fetch_add(&n_threads, 1, __ATOMIC_RELAXED);
        mine = &threads[at < MAX_THREADS ? at : MAX_THREADS - 1];
        mine->tid = syscall(SYS_gettid);
    }
    return mine;
}

static void count(int kind) { __atomic_fetch_add(&self()->calls[kind], 1, __ATOMIC_RELAXED); }

void *malloc(size_t n) { return count(MALLOC), __libc_malloc(n); }
void *calloc(size_t n, size_t size) { return count(CALLOC), __libc_calloc(n, size); }
void *realloc(void *p, size_t n) { return count(REALLOC), __libc_realloc(p, n); }
void free(void *p) { count(FREE), __libc_free(p); }
void *memalign(size_t to, size_t n) { return count(ALIGNED), __libc_memalign(to, n); }
void *aligned_alloc(size_t to, size_t n) { return count(ALIGNED), __libc_memalign(to, n); }
int posix_memalign(void **out, size_t to, size_t n)
{
    count(ALIGNED);
    return (*out = __libc_memalign(to, n)) ? 0 : ENOMEM;
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset)
{
    count(MMAP);
    return (void *)syscall(SYS_mmap, at, n, protection, flags, fd, offset);
}
int munmap(void *at, size_t n) { return count(MUNMAP), (int)syscall(SYS_munmap, at, n); }

/* -- the filter */

static const int allowed[] = {
    SYS_epoll_wait, SYS_epoll_pwait, SYS_epoll_ctl, SYS_recvfrom, SYS_recvmsg, SYS_sendto, SYS_read, SYS_write, SYS_poll, SYS_ppoll,
    SYS_clock_gettime, SYS_rt_sigreturn, SYS_exit, SYS_exit_group,
};
#define N_ALLOWED (sizeof allowed / sizeof *allowed)

static void on_trap(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    int number = info->si_syscall;
    __atomic_fetch_add(&trapped[number >= 0 && number < MAX_SYSCALL ? number : MAX_SYSCALL - 1], 1, __ATOMIC_RELAXED);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = -ENOSYS;
}

static long put_filter(void)
{
    struct sock_filter code[4 + N_ALLOWED + 2];
    size_t n = 0;
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < N_ALLOWED; i++)
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], N_ALLOWED - i + 3, 0);
    /* the balancer's sample, now and then: how much does this socket hold? */
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 2);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1]));
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, FIONREAD, 1, 0);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {.len = n, .filter = code};
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (sigaction(SIGSYS, &action, NULL) != 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        return -errno;
    return 1;
}

static void maybe_filter(void)
{
    char name[16] = "";
    if (!__atomic_load_n(&armed, __ATOMIC_RELAXED) || self()->filtered)
        return;
    prctl(PR_GET_NAME, name);
    if (strncmp(name, "fs-worker-", 10) == 0)
        __atomic_store_n(&mine->filtered, put_filter(), __ATOMIC_RELEASE);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int timeout)
{
    static int (*real)(int, struct epoll_event *, int, int);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "epoll_wait");
    maybe_filter();
    return real(fd, events, most, timeout);
}

/* -- read by the test */

void calls_arm(void) { __atomic_store_n(&armed, 1, __ATOMIC_RELAXED); }
long calls_of(long tid, int kind)
{
    for (int i = 0; i < MAX_THREADS && i < n_threads; i++)
        if (threads[i].tid == tid)
            return __atomic_load_n(&threads[i].calls[kind], __ATOMIC_RELAXED);
    return 0;
}
long calls_filtered(long tid)
{
    for (int i = 0; i < MAX_THREADS && i < n_threads; i++)
        if (threads[i].tid == tid)
            return __atomic_load_n(&threads[i].filtered, __ATOMIC_ACQUIRE);
    return 0;
}
long calls_trapped(int number) { return __atomic_load_n(&trapped[number], __ATOMIC_RELAXED); }

/* A thread that does what a worker must not. The test is worth something only if this is counted. */
static void *misbehave(void *unused)
{
    static int word = 0;
    struct epoll_event event;
    void *volatile memory;
    (void)unused;
    pthread_setname_np(pthread_self(), "fs-worker-bad");
    calls_arm();
    epoll_wait(-1, &event, 1, 0); /* puts the filter on */
    memory = malloc(100);
    memory = realloc(memory, 200);
    free(memory);
    memory = calloc(1, 100);
    free(memory);
    memory = aligned_alloc(64, 128);
    free(memory);
    mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(NULL, 4096);
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    syscall(SYS_brk, 0);
    return (void *)self()->tid;
}

long calls_misbehave(void)
{
    pthread_t thread;
    void *tid;
    if (pthread_create(&thread, NULL, misbehave, NULL) != 0 || pthread_join(thread, &tid) != 0)
        return -1;
    return (long)tid;
}

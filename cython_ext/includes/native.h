/* The few C things that Cython has no word for: ordered loads and stores, unaligned loads, checked arithmetic. */
#ifndef FLEXSTREAM_NATIVE_H
#define FLEXSTREAM_NATIVE_H

#include <stdint.h>
#include <string.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>

#include "window_times.h"

static inline uint64_t fs_load_acquire(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
static inline void fs_store_release(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
static inline uint64_t fs_load_relaxed(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void fs_store_relaxed(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline uint64_t fs_fetch_sub(uint64_t *p, uint64_t v) { return __atomic_fetch_sub(p, v, __ATOMIC_ACQ_REL); }
static inline void fs_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
static inline void fs_pause(void) { __builtin_ia32_pause(); }

/* A counter with a single writer: an ordinary add that other threads may read at any time without tearing. */
static inline void fs_count(uint64_t *p, uint64_t n) {
    __atomic_store_n(p, __atomic_load_n(p, __ATOMIC_RELAXED) + n, __ATOMIC_RELAXED);
}

/* Rows are packed, so fields are unaligned: memcpy is how C spells an unaligned load. */
static inline int16_t fs_i16(const unsigned char *p) { int16_t v; memcpy(&v, p, 2); return v; }
static inline int32_t fs_i32(const unsigned char *p) { int32_t v; memcpy(&v, p, 4); return v; }
static inline int64_t fs_i64(const unsigned char *p) { int64_t v; memcpy(&v, p, 8); return v; }
static inline uint16_t fs_u16(const unsigned char *p) { uint16_t v; memcpy(&v, p, 2); return v; }
static inline uint32_t fs_u32(const unsigned char *p) { uint32_t v; memcpy(&v, p, 4); return v; }
static inline uint64_t fs_u64(const unsigned char *p) { uint64_t v; memcpy(&v, p, 8); return v; }
static inline float fs_f32(const unsigned char *p) { float v; memcpy(&v, p, 4); return v; }
static inline double fs_f64(const unsigned char *p) { double v; memcpy(&v, p, 8); return v; }

static inline int fs_add_overflows(int64_t a, int64_t b, int64_t *r) { return __builtin_add_overflow(a, b, r); }
static inline int fs_sub_overflows(int64_t a, int64_t b, int64_t *r) { return __builtin_sub_overflow(a, b, r); }
static inline int fs_mul_overflows(int64_t a, int64_t b, int64_t *r) { return __builtin_mul_overflow(a, b, r); }

static inline uint64_t fs_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}
static inline void fs_sleep_ns(uint64_t ns) { /* less than a second; the kernel adds 50 us of slack */
    const struct timespec pause = {0, (long)ns};
    ppoll(0, 0, &pause, 0); /* no other call for it is among those that a worker makes */
}
static inline uint64_t fs_realtime_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}
static inline uint64_t fs_thread_cpu_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}
static inline int64_t fs_thread_id(void) { return (int64_t)syscall(SYS_gettid); }

#endif

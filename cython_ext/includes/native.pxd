from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t


cdef extern from "native.h" nogil:
    uint64_t fs_load_acquire(const uint64_t *p) noexcept
    void fs_store_release(uint64_t *p, uint64_t v) noexcept
    uint64_t fs_load_relaxed(const uint64_t *p) noexcept
    void fs_store_relaxed(uint64_t *p, uint64_t v) noexcept
    uint64_t fs_fetch_sub(uint64_t *p, uint64_t v) noexcept
    void fs_fence() noexcept
    void fs_pause() noexcept
    void fs_count(uint64_t *p, uint64_t n) noexcept

    int16_t fs_i16(const unsigned char *p) noexcept
    int32_t fs_i32(const unsigned char *p) noexcept
    int64_t fs_i64(const unsigned char *p) noexcept
    uint16_t fs_u16(const unsigned char *p) noexcept
    uint32_t fs_u32(const unsigned char *p) noexcept
    uint64_t fs_u64(const unsigned char *p) noexcept
    float fs_f32(const unsigned char *p) noexcept
    double fs_f64(const unsigned char *p) noexcept

    bint fs_add_overflows(int64_t a, int64_t b, int64_t *r) noexcept
    bint fs_sub_overflows(int64_t a, int64_t b, int64_t *r) noexcept
    bint fs_mul_overflows(int64_t a, int64_t b, int64_t *r) noexcept

    const int64_t FS_TIME_LIMIT
    const int64_t FS_SPAN_LIMIT
    int64_t fs_plus(int64_t a, int64_t b) noexcept
    int64_t fs_minus(int64_t a, int64_t b) noexcept
    int64_t fs_floor_to(int64_t moment, int64_t step) noexcept
    int64_t fs_first_end(int64_t pane_start, int64_t pane, int64_t size, int64_t slide) noexcept
    int64_t fs_last_end(int64_t pane_start, int64_t size, int64_t slide) noexcept
    int64_t fs_end_after(int64_t moment, int64_t size, int64_t slide) noexcept
    int64_t fs_open_from(int64_t moment, int64_t size, int64_t slide) noexcept

    uint64_t fs_now_ns() noexcept
    void fs_sleep_ns(uint64_t ns) noexcept
    uint64_t fs_realtime_ns() noexcept
    uint64_t fs_thread_cpu_ns() noexcept
    int64_t fs_thread_id() noexcept

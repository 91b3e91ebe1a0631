/* What both programs need of the operating system: clocks, pinning, arguments, giving up with a reason. */
#ifndef FLEXSTREAM_BENCH_PROCESS_H
#define FLEXSTREAM_BENCH_PROCESS_H

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DIE(...) (fprintf(stderr, __VA_ARGS__), fprintf(stderr, ": %s\n", strerror(errno)), exit(1))

static inline int64_t clock_ns(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
static inline int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }
static inline int64_t cpu_ns(void) { return clock_ns(CLOCK_PROCESS_CPUTIME_ID); }

static inline void pin_to(int cpu)
{
    cpu_set_t set;
    if (cpu < 0)
        return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        DIE("pin to core %d", cpu);
}

/* "--name value" anywhere in argv, or the default. */
static inline const char *option(int argc, char **argv, const char *name, const char *otherwise)
{
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    return otherwise;
}
static inline long long number(int argc, char **argv, const char *name, long long otherwise)
{
    const char *text = option(argc, argv, name, NULL);
    return text ? atoll(text) : otherwise;
}

/* A whole file; the caller frees it. */
static inline char *read_whole(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        DIE("open %s", path);
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    char *data = malloc(*size + 1);
    if (!data || fread(data, 1, *size, file) != *size)
        DIE("read %s", path);
    data[*size] = 0;
    fclose(file);
    return data;
}

#endif

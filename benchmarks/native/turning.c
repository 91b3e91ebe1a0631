/* A producer at a fixed rate whose rows turn to some of the groups in mid-run.
 *
 * The file holds DATA frames of equal size, several per group. Until --turn-ms frames go to all groups in turn; from
 * then on --hot-percent of them go to the groups that --hot marks with a 1, the others to the rest. Event times follow
 * the rows sent, so what was sent is known from the order of the frames (--log: their numbers, 32 bits each).
 * Every --marker-ms the next --markers frames carry a marker. --shared: a file in which others can see how far it is
 * and for how long it could not send; what could not be sent is back-pressure, and nothing else is.
 *
 *   turning --port n --frames file --groups G --hot 0011.. --turn-ms n --hot-percent 80 --rate rows/s
 *           --duration-ms n --start-time n --event-rate rows/s --time-offset n --row-bytes n --stream s --schema hash
 *           [--marker-ms 5] [--markers 4] [--watermark-every 8] [--sndbuf bytes] [--cpu n] [--log file] [--shared file]
 */
#define _GNU_SOURCE
#include "frames.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { NAP_NS = 700000 };

/* Written here alone; read by others at any time. */
struct shared {
    uint64_t rows, blocked_ns, turned_ns, blocked_since_ns;
};

static uint32_t *frames_of[MAX_GROUPS], n_of[MAX_GROUPS], next_of[MAX_GROUPS];
static struct shared unseen, *shared = &unseen;

static void sort_by_group(void)
{
    for (uint32_t i = 0; i < frame_count; i++) {
        uint16_t group = frames[i].group;
        frames_of[group] = realloc(frames_of[group], (n_of[group] + 1) * sizeof(uint32_t));
        frames_of[group][n_of[group]++] = i;
    }
}

static void send_counting(int fd, const char *at, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EAGAIN) {
            struct pollfd room = {.fd = fd, .events = POLLOUT};
            int64_t since = now_ns();
            __atomic_store_n(&shared->blocked_since_ns, since, __ATOMIC_RELAXED);
            if (poll(&room, 1, PATIENCE_S * 1000) == 0)
                DIE("the receiver took nothing for %d s", PATIENCE_S);
            __atomic_store_n(&shared->blocked_ns, shared->blocked_ns + now_ns() - since, __ATOMIC_RELAXED);
            __atomic_store_n(&shared->blocked_since_ns, 0, __ATOMIC_RELAXED);
            continue;
        }
        if (sent <= 0)
            DIE("send");
        at += sent, size -= sent;
    }
}

static size_t add_tail(struct frame *frame, size_t size, uint16_t group, uint8_t type, int64_t value)
{
    fs_header tail = fs_header_of(type, group, 0, value, next_row[group]);
    memcpy(frame->data + size, &tail, sizeof tail);
    return size + sizeof tail;
}

static void sleep_until(int64_t due_ns)
{
    struct timespec due = {due_ns / 1000000000, due_ns % 1000000000};
    clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, NULL);
}

static struct shared *share(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(struct shared)) != 0)
        DIE("open %s", path);
    void *memory = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED)
        DIE("map %s", path);
    close(fd);
    return memory;
}

int main(int argc, char **argv)
{
    int port = number(argc, argv, "--port", 0), groups = number(argc, argv, "--groups", 128);
    int64_t duration = number(argc, argv, "--duration-ms", 1000) * 1000000;
    int64_t turn = number(argc, argv, "--turn-ms", 1 << 30) * 1000000LL;
    int64_t marker_every = number(argc, argv, "--marker-ms", 0) * 1000000;
    int64_t start_time = number(argc, argv, "--start-time", 0), event_rate = number(argc, argv, "--event-rate", 1000000);
    int64_t markers_each = number(argc, argv, "--markers", 4), hot_percent = number(argc, argv, "--hot-percent", 80);
    uint64_t watermark_every = number(argc, argv, "--watermark-every", 8);
    double rate = number(argc, argv, "--rate", 0);
    const char *hot = option(argc, argv, "--hot", ""), *log_path = option(argc, argv, "--log", NULL);
    const char *shared_path = option(argc, argv, "--shared", NULL);
    char hello[2048];
    row_bytes = number(argc, argv, "--row-bytes", 78);
    time_offset = number(argc, argv, "--time-offset", 0);
    send_buffer = number(argc, argv, "--sndbuf", 0);
    pin_to(number(argc, argv, "--cpu", -1));
    signal(SIGPIPE, SIG_IGN);
    load_frames(option(argc, argv, "--frames", "frames.bin"));
    sort_by_group();
    FILE *log = log_path ? fopen(log_path, "wb") : NULL;
    if (shared_path)
        shared = share(shared_path);

    uint16_t part[2][MAX_GROUPS], turns[MAX_GROUPS]; /* cold and hot groups, and all in turn */
    uint32_t n_part[2] = {0, 0}, n_turns = 0, at_part[2] = {0, 0}, at_turn = 0;
    int hot_length = strlen(hot);
    write_hello(hello, sizeof hello, argc, argv, row_bytes);
    control = greet(port, CONTROL_GROUP, hello);
    for (int group = 0; group < groups; group++) {
        if (n_of[group] == 0)
            continue;
        int is_hot = group < hot_length && hot[group] == '1';
        part[is_hot][n_part[is_hot]++] = turns[n_turns++] = group;
        sockets[group] = greet(port, group, hello);
    }
    if (hot_length && (n_part[0] == 0 || n_part[1] == 0))
        DIE("--hot marks all groups or none");

    int64_t rows = 0, count = 0, markers = 0, markers_due = 0, credit = 0;
    int64_t start = now_ns(), start_cpu = cpu_ns(), now = start, marker_at = start + marker_every;
    for (; now - start < duration; now = now_ns()) {
        uint16_t group;
        if (now - start < turn || !hot_length) {
            group = turns[at_turn++ % n_turns];
        } else {
            if (!shared->turned_ns)
                __atomic_store_n(&shared->turned_ns, now, __ATOMIC_RELAXED);
            int is_hot = (credit += hot_percent) >= 100;
            credit -= is_hot ? 100 : 0;
            group = part[is_hot][at_part[is_hot]++ % n_part[is_hot]];
        }
        uint32_t which = frames_of[group][next_of[group]++ % n_of[group]];
        struct frame *frame = &frames[which];
        fs_header *header = (fs_header *)frame->data;
        header->sequence = next_row[group];
        next_row[group] += frame->rows;
        char *time_at = frame->data + HEADER_BYTES + time_offset;
        int64_t time = start_time + rows * 1000 / event_rate, rest = rows * 1000 % event_rate;
        for (uint32_t row = 0; row < frame->rows; row++, time_at += row_bytes, rest += 1000) {
            for (; rest >= event_rate; rest -= event_rate)
                time++;
            memcpy(time_at, &time, 8);
        }
        size_t size = HEADER_BYTES + frame->payload_bytes;
        if (watermark_every && next_of[group] % watermark_every == 0)
            size = add_tail(frame, size, group, FRAME_WATERMARK, start_time + (rows + frame->rows) * 1000 / event_rate);
        if (marker_every && now >= marker_at)
            markers_due = markers_each, marker_at += (now - marker_at) / marker_every * marker_every + marker_every;
        if (markers_due > 0) {
            size = add_tail(frame, size, group, FRAME_MARKER, clock_ns(CLOCK_REALTIME));
            markers_due--, markers++;
        }
        send_counting(sockets[group], frame->data, size);
        rows += frame->rows, count++;
        __atomic_store_n(&shared->rows, (uint64_t)rows, __ATOMIC_RELAXED);
        if (log)
            fwrite(&which, sizeof which, 1, log);
        int64_t due = rate > 0 ? start + (int64_t)(rows / rate * 1e9) : 0;
        if (due - now_ns() > NAP_NS) /* a few frames at a time: a nap costs as much as sending one */
            sleep_until(due);
    }
    int64_t sent = now_ns();
    end_session(groups);
    int64_t end = now_ns();
    if (log && fclose(log) != 0)
        DIE("write %s", log_path);
    printf("{\"rows\": %lld, \"frames\": %lld, \"markers\": %lld, \"send_seconds\": %.6f, \"seconds\": %.6f, "
           "\"cpu_ns\": %lld, \"blocked_ns\": %llu, \"started_ns\": %lld, \"turned_ns\": %llu}\n",
           (long long)rows, (long long)count, (long long)markers, (sent - start) / 1e9, (end - start) / 1e9,
           (long long)(cpu_ns() - start_cpu), (unsigned long long)shared->blocked_ns, (long long)start,
           (unsigned long long)shared->turned_ns);
    return 0;
}

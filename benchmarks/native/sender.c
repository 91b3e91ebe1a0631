/* The one sender of all ingest benchmarks: pre-framed DATA, one connection per group, in turn, in a loop.
 *
 * The file holds wire frames as they would be sent, in sending order, all of one row size. Per loop the row sequence
 * is patched into each header and, with --time-delta, the event times move on. After the duration, or on SIGTERM: EOS
 * everywhere, then it waits until the receiver says that the session has ended, so that rows / seconds is what was
 * *taken*, not what was put into socket buffers. Prints one JSON object.
 *
 *   sender --port n --frames file --groups G --stream ads --schema hash --row-bytes 78 [--cpu n] [--duration-ms 1000]
 *          [--rows max] [--time-offset n --time-delta n] [--watermark-every n] [--crc 1] [--rate rows/s]
 *          [--marker-ms n] [--sndbuf bytes] [--token text] [--producer uuid]
 */
#define _GNU_SOURCE
#include "frames.h"

enum { CHAINS = 3 };

static uint64_t sent_frames[MAX_GROUPS];
static uint64_t planned_row[MAX_GROUPS]; /* behind the frames that are ready; next_row is behind those that were sent */
static int64_t time_delta, first_time = INT64_MAX;

static volatile sig_atomic_t told_to_end;

static void end_soon(int signal_number)
{
    (void)signal_number;
    told_to_end = 1;
}

typedef int64_t __attribute__((aligned(1))) unaligned_time; /* rows are packed */

static unaligned_time *time_of(const struct frame *frame, uint32_t row)
{
    return (unaligned_time *)(frame->data + HEADER_BYTES + row * row_bytes + time_offset);
}

/* later_min of each frame, over the rest of this loop and all of the next: what a watermark after it may say. */
static void find_watermarks(void)
{
    for (size_t i = 0; i < frame_count; i++)
        for (uint32_t row = 0; row < frames[i].rows; row++)
            if (*time_of(&frames[i], row) < first_time)
                first_time = *time_of(&frames[i], row);
    int64_t least = first_time + time_delta;
    for (size_t i = frame_count; i-- > 0;) {
        frames[i].later_min = least;
        for (uint32_t row = 0; row < frames[i].rows; row++)
            if (*time_of(&frames[i], row) < least)
                least = *time_of(&frames[i], row);
    }
}

/* CRC32C of up to three equally long frames at once: three independent chains keep the unit busy. */
static void checksum(struct frame **some, int count)
{
    uint64_t crc[CHAINS] = {0xFFFFFFFFu, 0xFFFFFFFFu, 0xFFFFFFFFu};
    size_t size[CHAINS], common = SIZE_MAX;
    for (int i = 0; i < CHAINS; i++) {
        fs_header *header = (fs_header *)some[i < count ? i : 0]->data;
        header->flags |= FLAG_CRC, header->crc32c = 0;
        size[i] = HEADER_BYTES + header->payload_bytes;
        if (size[i] / 8 < common)
            common = size[i] / 8;
    }
    const char *a = some[0]->data, *b = some[count > 1 ? 1 : 0]->data, *c = some[count > 2 ? 2 : 0]->data;
    for (size_t word = 0; word < common; word++) {
        uint64_t x, y, z;
        memcpy(&x, a + 8 * word, 8), memcpy(&y, b + 8 * word, 8), memcpy(&z, c + 8 * word, 8);
        crc[0] = _mm_crc32_u64(crc[0], x), crc[1] = _mm_crc32_u64(crc[1], y), crc[2] = _mm_crc32_u64(crc[2], z);
    }
    for (int i = 0; i < count; i++) {
        for (size_t at = 8 * common; at < size[i]; at++)
            crc[i] = _mm_crc32_u8(crc[i], some[i]->data[at]);
        ((fs_header *)some[i]->data)->crc32c = ~crc[i];
    }
}

/* Make the frame ready for this loop: its sequence, and its event times moved on by one step. */
static void patch(struct frame *frame, int64_t loop)
{
    fs_header *header = (fs_header *)frame->data;
    header->sequence = planned_row[frame->group];
    planned_row[frame->group] += frame->rows;
    if (loop > 0 && time_delta)
        for (uint32_t row = 0; row < frame->rows; row++)
            *time_of(frame, row) += time_delta;
}

static size_t add_tail(struct frame *frame, size_t size, uint8_t type, int64_t value)
{
    fs_header tail = fs_header_of(type, frame->group, 0, value, next_row[frame->group]);
    seal((char *)&tail, sizeof tail);
    memcpy(frame->data + size, &tail, sizeof tail);
    return size + sizeof tail;
}

static void wait_until(int64_t due_ns)
{
    for (int64_t left; (left = due_ns - now_ns()) > 0;) {
        struct timespec nap = {0, left > 200000 ? 100000 : 1000};
        nanosleep(&nap, NULL);
    }
}

int main(int argc, char **argv)
{
    int port = number(argc, argv, "--port", 0), groups = number(argc, argv, "--groups", 128);
    int64_t duration = number(argc, argv, "--duration-ms", 1000) * 1000000, limit = number(argc, argv, "--rows", INT64_MAX);
    int64_t marker_every = number(argc, argv, "--marker-ms", 0) * 1000000;
    uint64_t watermark_every = number(argc, argv, "--watermark-every", 0);
    double rate = number(argc, argv, "--rate", 0);
    char hello[2048];
    with_crc = number(argc, argv, "--crc", 0) != 0;
    row_bytes = number(argc, argv, "--row-bytes", 78);
    time_offset = number(argc, argv, "--time-offset", 0);
    time_delta = number(argc, argv, "--time-delta", 0);
    send_buffer = number(argc, argv, "--sndbuf", 0);
    pin_to(number(argc, argv, "--cpu", -1));
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, end_soon);
    load_frames(option(argc, argv, "--frames", "frames.bin"));
    find_watermarks();

    write_hello(hello, sizeof hello, argc, argv, row_bytes);
    control = greet(port, CONTROL_GROUP, hello);
    for (size_t i = 0; i < frame_count; i++)
        if (sockets[frames[i].group] == 0)
            sockets[frames[i].group] = greet(port, frames[i].group, hello);
    memcpy(planned_row, next_row, sizeof planned_row);

    int64_t rows = 0, bytes = 0, count = 0, loop = 0, markers = 0;
    int64_t start = now_ns(), start_cpu = cpu_ns(), now = start, marker_due = start + marker_every;
    for (; now - start < duration && rows < limit && !told_to_end; loop++) {
        for (size_t i = 0; i < frame_count && now - start < duration && rows < limit && !told_to_end; i++) {
            struct frame *frame = &frames[i];
            if (with_crc && i % CHAINS == 0) {
                struct frame *some[CHAINS];
                int ready = 0;
                for (; ready < CHAINS && i + ready < frame_count; ready++)
                    patch(some[ready] = &frames[i + ready], loop);
                checksum(some, ready);
            } else if (!with_crc)
                patch(frame, loop);
            size_t size = HEADER_BYTES + frame->payload_bytes;
            next_row[frame->group] += frame->rows;
            if (watermark_every && ++sent_frames[frame->group] % watermark_every == 0)
                size = add_tail(frame, size, FRAME_WATERMARK, frame->later_min + loop * time_delta);
            if (marker_every && now >= marker_due) {
                size = add_tail(frame, size, FRAME_MARKER, clock_ns(CLOCK_REALTIME));
                marker_due = now + marker_every, markers++;
            }
            send_all(sockets[frame->group], frame->data, size);
            rows += frame->rows, bytes += size, count++;
            if (rate > 0)
                wait_until(start + (int64_t)(rows / rate * 1e9));
            now = now_ns();
        }
    }
    int64_t sent = now_ns();
    end_session(groups);
    int64_t end = now_ns();
    printf("{\"rows\": %lld, \"bytes\": %lld, \"frames\": %lld, \"loops\": %lld, \"markers\": %lld, "
           "\"send_seconds\": %.6f, \"seconds\": %.6f, \"cpu_ns\": %lld, \"rows_per_s\": %.0f}\n",
           (long long)rows, (long long)bytes, (long long)count, (long long)loop, (long long)markers,
           (sent - start) / 1e9, (end - start) / 1e9, (long long)(cpu_ns() - start_cpu), rows / ((end - start) / 1e9));
    return 0;
}

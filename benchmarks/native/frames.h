/* Frames in memory as both senders have them: read from a file of whole DATA frames. */
#ifndef FLEXSTREAM_BENCH_FRAMES_H
#define FLEXSTREAM_BENCH_FRAMES_H

#include "session.h"

enum { TAIL_BYTES = 2 * HEADER_BYTES };

/* One frame: header, payload, and room for a watermark and a marker behind it, so that it is one send. */
struct frame {
    char *data;
    uint32_t payload_bytes, rows;
    uint16_t group;
    int64_t later_min; /* the smallest event time after this frame, in this loop; the sender's own */
};

static struct frame *frames;
static size_t frame_count;
static int64_t row_bytes, time_offset;

static void load_frames(const char *path)
{
    size_t size, capacity = 0;
    char *file = read_whole(path, &size);
    for (size_t at = 0; at < size;) {
        fs_header *header = (fs_header *)(file + at);
        size_t whole = HEADER_BYTES + header->payload_bytes;
        if (size - at < HEADER_BYTES || header->magic != FRAME_MAGIC || header->type != FRAME_DATA || size - at < whole ||
            header->group >= MAX_GROUPS || header->payload_bytes != header->value * row_bytes)
            DIE("%s: byte %zu is not a whole DATA frame of %lld-byte rows", path, at, (long long)row_bytes);
        if (frame_count == capacity)
            frames = realloc(frames, (capacity = capacity ? 2 * capacity : 1024) * sizeof *frames);
        struct frame *frame = &frames[frame_count++];
        *frame = (struct frame){malloc(whole + TAIL_BYTES), header->payload_bytes, header->value, header->group, 0};
        memcpy(frame->data, header, whole);
        at += whole;
    }
    if (frame_count == 0)
        DIE("%s holds no frames", path);
    free(file);
}

#endif

/* The reference receiver: answers HELLO as a daemon would, then receives and throws away.
 *
 * One epoll loop, one hot buffer of block size for all connections, copying recv (no MSG_TRUNC): what any receiver
 * must pay before it looks at a row. On a connection whose HELLO wants no ACKs it does not look at the bytes at all;
 * where ACKs are wanted (ack_bytes > 0) it follows the frame headers and acknowledges rows.
 *
 * Prints "PORT n" when it listens and one JSON object when all data connections have closed.
 *
 *   discard [--cpu n] [--port 0] [--room bytes] [--block 32768] [--rows-per-frame 420] [--control-json file]
 */
#define _GNU_SOURCE
#include "process.h"
#include "frame.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_FD = 4096, HELLO_MAX = 8192, EVENTS = 256, QUIET_MS = 20 };

/* Per connection: the HELLO as far as it came, then the place in the stream of frames (only if it is followed). */
struct connection {
    int greeted, follow, control, ended, hello_filled;
    int64_t ack_bytes, unacked;
    uint64_t next_row;
    uint16_t group;
    int header_filled;
    fs_header header;
    uint64_t payload_left;
    unsigned char *hello;
};

static struct connection connections[MAX_FD];
static int epoll_fd, data_open, data_seen, control_fd = -1, control_eos;
static long rows_per_frame;
static int room;
static const char *control_rest;
static int64_t bytes, receive_calls, rows, first_ns, last_ns, first_cpu, last_cpu;

static void send_all(int fd, const void *data, size_t size)
{
    for (const char *at = data; size > 0;) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN)
            continue; /* ACKs are small and few: waiting here is rare */
        if (sent <= 0)
            return; /* the peer has gone; its close is seen by recv */
        at += sent, size -= sent;
    }
}

static void send_ack(int fd, uint16_t group, uint64_t value, uint64_t sequence)
{
    fs_header ack = fs_header_of(FRAME_ACK, group, 0, value, sequence);
    send_all(fd, &ack, sizeof ack);
}

static void finish_control(void)
{
    if (control_fd >= 0 && control_eos && data_open == 0) {
        send_ack(control_fd, CONTROL_GROUP, 0, 0);
        shutdown(control_fd, SHUT_WR);
        control_eos = 0;
    }
}

static void answer_hello(int fd, struct connection *c)
{
    fs_header *hello = (fs_header *)c->hello;
    const char *json = (const char *)c->hello + HEADER_BYTES;
    const char *acks = strstr(json, "\"ack_bytes\"");
    struct sockaddr_in peer = {0}, local = {0};
    socklen_t length = sizeof peer;
    c->group = hello->group;
    c->control = hello->group == CONTROL_GROUP;
    c->ack_bytes = acks ? atoll(acks + strcspn(acks, ":") + 1) : 0;
    c->follow = c->control || c->ack_bytes > 0;
    c->greeted = 1;
    getpeername(fd, (struct sockaddr *)&peer, &length);
    length = sizeof local;
    getsockname(fd, (struct sockaddr *)&local, &length);

    size_t room = 256 + (c->control ? strlen(control_rest) : 0);
    char *answer = malloc(HEADER_BYTES + room);
    int size = snprintf(answer + HEADER_BYTES, room,
                        "{\"version\":1,\"peer\":[\"127.0.0.1\",%d],\"local\":[\"127.0.0.1\",%d]%s%s}",
                        ntohs(peer.sin_port), ntohs(local.sin_port), c->control && *control_rest ? "," : "",
                        c->control ? control_rest : "");
    fs_header ack = fs_header_of(FRAME_ACK, c->group, size, rows_per_frame, 0);
    memcpy(answer, &ack, sizeof ack);
    send_all(fd, answer, HEADER_BYTES + size);
    free(answer);
    free(c->hello);
    c->hello = NULL;
    if (c->control)
        control_fd = fd;
    else
        data_open++, data_seen = 1;
}

/* The last row of a data connection has come: its EOS where frames are followed, its close where they are not. */
static void end_group(struct connection *c)
{
    if (c->greeted && !c->control && !c->ended) {
        c->ended = 1;
        data_open--;
    }
}

/* Walk over the frames in these bytes: count rows, acknowledge them, note the control connection's EOS. */
static void follow(int fd, struct connection *c, const unsigned char *at, size_t size)
{
    while (size > 0) {
        if (c->payload_left > 0) {
            size_t skip = size < c->payload_left ? size : c->payload_left;
            c->payload_left -= skip, at += skip, size -= skip, c->unacked += skip;
            if (c->payload_left > 0)
                return;
        } else {
            size_t part = HEADER_BYTES - c->header_filled;
            part = size < part ? size : part;
            memcpy((char *)&c->header + c->header_filled, at, part);
            c->header_filled += part, at += part, size -= part;
            if (c->header_filled < HEADER_BYTES)
                return;
            c->header_filled = 0;
            if (c->header.magic != FRAME_MAGIC)
                DIE("group %d: not a frame", c->group);
            c->payload_left = c->header.payload_bytes;
            if (c->header.type == FRAME_EOS && c->control)
                control_eos = 1;
            else if (c->header.type == FRAME_EOS)
                end_group(c);
        }
        if (c->payload_left == 0 && c->header.type == FRAME_DATA) {
            c->next_row = c->header.sequence + c->header.value;
            rows += c->header.value;
            if (c->unacked >= c->ack_bytes) {
                send_ack(fd, c->group, 0, c->next_row);
                c->unacked = 0;
            }
        } else if (c->payload_left == 0 && c->header.type != FRAME_DATA && !c->control) {
            send_ack(fd, c->group, 0, c->next_row); /* a watermark or EOS: do not leave rows unacknowledged */
            c->unacked = 0;
        }
    }
    finish_control();
}

/* Nothing came for a while: what is received but not acknowledged yet would hold the peer up. */
static void acknowledge_rest(void)
{
    for (int fd = 0; fd < MAX_FD; fd++) {
        struct connection *c = &connections[fd];
        if (c->greeted && !c->control && c->unacked > 0) {
            send_ack(fd, c->group, 0, c->next_row);
            c->unacked = 0;
        }
    }
}

static void close_connection(int fd)
{
    struct connection *c = &connections[fd];
    end_group(c);
    if (fd == control_fd)
        control_fd = -1;
    free(c->hello);
    memset(c, 0, sizeof *c);
    close(fd);
    finish_control();
}

/* The handshake, byte-exact: never reads past the HELLO. */
static void greet(int fd, struct connection *c)
{
    if (!c->hello && !(c->hello = calloc(1, HELLO_MAX + 1)))
        DIE("memory");
    for (;;) {
        size_t want = HEADER_BYTES;
        if (c->hello_filled >= HEADER_BYTES) {
            fs_header *hello = (fs_header *)c->hello;
            if (hello->magic != FRAME_MAGIC || hello->type != FRAME_HELLO || hello->payload_bytes > HELLO_MAX - HEADER_BYTES) {
                close_connection(fd);
                return;
            }
            want += hello->payload_bytes;
            if ((size_t)c->hello_filled == want) {
                answer_hello(fd, c);
                return;
            }
        }
        ssize_t got = recv(fd, c->hello + c->hello_filled, want - c->hello_filled, 0);
        if (got < 0 && errno == EAGAIN)
            return;
        if (got <= 0) {
            close_connection(fd);
            return;
        }
        c->hello_filled += got;
    }
}

static void receive(int fd, unsigned char *block, size_t block_bytes)
{
    struct connection *c = &connections[fd];
    ssize_t got = recv(fd, block, block_bytes, 0);
    receive_calls++;
    if (got < 0 && errno == EAGAIN)
        return;
    if (got <= 0) {
        close_connection(fd);
        return;
    }
    if (c->follow)
        follow(fd, c, block, got);
    if (!c->control)
        bytes += got;
}

static void accept_all(int listener)
{
    for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
        int one = 1;
        if (fd >= MAX_FD)
            DIE("more than %d connections", MAX_FD);
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (room > 0) { /* as the engine does it, flexstream/ingest/receive_room.py */
            setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &room, sizeof room);
            setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof one);
        }
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static int listen_on(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), one = 1;
    socklen_t length = sizeof address;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 1024) != 0)
        DIE("listen on port %d", port);
    getsockname(listener, (struct sockaddr *)&address, &length);
    printf("PORT %d\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

int main(int argc, char **argv)
{
    size_t block_bytes = number(argc, argv, "--block", 32768), ignored;
    const char *control_file = option(argc, argv, "--control-json", NULL);
    room = number(argc, argv, "--room", 0);
    rows_per_frame = number(argc, argv, "--rows-per-frame", 420);
    control_rest = control_file ? read_whole(control_file, &ignored) : "";
    pin_to(number(argc, argv, "--cpu", -1));

    unsigned char *block = aligned_alloc(4096, (block_bytes + 4095) & ~4095UL);
    struct epoll_event events[EVENTS];
    epoll_fd = epoll_create1(0);
    int listener = listen_on(number(argc, argv, "--port", 0));
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);

    while (!(data_seen && data_open == 0 && control_fd < 0)) {
        int ready = epoll_wait(epoll_fd, events, EVENTS, QUIET_MS);
        if (ready == 0)
            acknowledge_rest();
        for (int i = 0; i < ready; i++) {
            int fd = events[i].data.fd;
            if (fd == listener)
                accept_all(listener);
            else if (!connections[fd].greeted)
                greet(fd, &connections[fd]);
            else {
                if (bytes == 0)
                    first_ns = now_ns(), first_cpu = cpu_ns();
                receive(fd, block, block_bytes);
                if (data_open == 0 && last_ns == 0)
                    last_ns = now_ns(), last_cpu = cpu_ns();
            }
        }
    }
    double seconds = (last_ns - first_ns) / 1e9;
    printf("{\"bytes\": %lld, \"rows\": %lld, \"seconds\": %.6f, \"cpu_ns\": %lld, \"receive_calls\": %lld, "
           "\"bytes_per_s\": %.0f}\n",
           (long long)bytes, (long long)rows, seconds, (long long)(last_cpu - first_cpu), (long long)receive_calls,
           seconds > 0 ? bytes / seconds : 0);
    return 0;
}

/* A producer's session as both senders speak it: control connection, one connection per group, EOS everywhere. */
#ifndef FLEXSTREAM_BENCH_SESSION_H
#define FLEXSTREAM_BENCH_SESSION_H

#include "process.h"
#include "frame.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nmmintrin.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

enum { MAX_GROUPS = 4096, PATIENCE_S = 60 };

static int sockets[MAX_GROUPS], control, send_buffer, with_crc;
static uint64_t next_row[MAX_GROUPS];

/* A whole frame gets its CRC, if the session has them: then every frame must. */
static void seal(char *frame, size_t size)
{
    fs_header *header = (fs_header *)frame;
    uint64_t crc = 0xFFFFFFFFu;
    if (!with_crc)
        return;
    header->flags |= FLAG_CRC, header->crc32c = 0;
    for (size_t at = 0; at < size; at++)
        crc = _mm_crc32_u8(crc, frame[at]);
    header->crc32c = ~crc;
}

static void receive_all(int fd, void *data, size_t size)
{
    for (char *at = data; size > 0;) {
        ssize_t got = recv(fd, at, size, 0);
        if (got < 0 && errno == EINTR)
            continue; /* stopped and continued: sockets with a time limit say so */
        if (got <= 0)
            DIE("the receiver closed the connection or was silent for %d s", PATIENCE_S);
        at += got, size -= got;
    }
}

/* The next frame that is not DATA flow: its header; the payload is thrown away, unless it is an ERROR to show. */
static fs_header receive_answer(int fd)
{
    fs_header answer;
    char payload[65536];
    receive_all(fd, &answer, sizeof answer);
    if (answer.magic != FRAME_MAGIC || answer.payload_bytes >= sizeof payload)
        DIE("the receiver's answer is not a frame");
    receive_all(fd, payload, answer.payload_bytes);
    payload[answer.payload_bytes] = 0;
    if (answer.type == FRAME_ERROR) {
        fprintf(stderr, "sender: the receiver refused: %s\n", payload);
        exit(1);
    }
    return answer;
}

static void send_all(int fd, const char *at, size_t size)
{
    while (size > 0) {
        ssize_t sent = send(fd, at, size, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent <= 0) {
            if (errno == EPIPE || errno == ECONNRESET)
                receive_answer(fd); /* shows the ERROR frame if there is one */
            DIE("send");
        }
        at += sent, size -= sent;
    }
}

static int connect_to(int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    struct timeval patience = {.tv_sec = PATIENCE_S};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
        DIE("connect to port %d", port);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (send_buffer)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &send_buffer, sizeof send_buffer);
    return fd;
}

static int greet(int port, uint16_t group, const char *json)
{
    int fd = connect_to(port);
    fs_header hello = fs_header_of(FRAME_HELLO, group, strlen(json), 0, 0);
    send_all(fd, (char *)&hello, sizeof hello);
    send_all(fd, json, strlen(json));
    fs_header answer = receive_answer(fd);
    if (answer.type != FRAME_ACK || answer.group != group)
        DIE("HELLO of group %d: answer of type %d for group %d", group, answer.type, answer.group);
    next_row[group % MAX_GROUPS] = answer.sequence;
    return fd;
}

/* What both kinds of HELLO say. */
static void write_hello(char *hello, size_t size, int argc, char **argv, int64_t row_bytes)
{
    const char *token = option(argc, argv, "--token", "");
    snprintf(hello, size,
             "{\"versions\":[1],\"stream\":\"%s\",\"row_bytes\":%lld,\"schema\":\"%s\",\"producer\":\"%s\",\"epoch\":1,"
             "\"token\":%s%s%s,\"crc\":%s,\"ack_bytes\":0}",
             option(argc, argv, "--stream", "ads"), (long long)row_bytes, option(argc, argv, "--schema", ""),
             option(argc, argv, "--producer", "00000000-0000-4000-8000-000000000001"), *token ? "\"" : "",
             *token ? token : "null", *token ? "\"" : "", with_crc ? "true" : "false");
}

/* Waits for the control connection's next frame; an ERROR on any data connection ends the wait, and the program. */
static void wait_for_control(int groups)
{
    struct pollfd watched[MAX_GROUPS + 1] = {{.fd = control, .events = POLLIN}};
    for (int group = 0; group < groups; group++)
        watched[group + 1] = (struct pollfd){.fd = sockets[group] ? sockets[group] : -1, .events = POLLIN};
    while (!watched[0].revents) {
        char first;
        if (poll(watched, groups + 1, PATIENCE_S * 1000) <= 0)
            DIE("the receiver was silent for %d s", PATIENCE_S);
        for (int at = 1; at <= groups; at++) {
            if (!watched[at].revents)
                continue;
            if (recv(watched[at].fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) > 0)
                receive_answer(watched[at].fd);
            else
                watched[at].fd = -1; /* closed: it has said all it had to say */
        }
    }
}

static void end_session(int groups)
{
    char message[HEADER_BYTES + MAX_GROUPS / 8] = {0};
    uint32_t bitmap_bytes = (groups + 7) / 8;
    for (int group = 0; group < groups; group++) {
        if (sockets[group] == 0)
            continue;
        fs_header eos = fs_header_of(FRAME_EOS, group, 0, 0, next_row[group]);
        seal((char *)&eos, sizeof eos);
        send_all(sockets[group], (char *)&eos, sizeof eos);
        shutdown(sockets[group], SHUT_WR);
        message[HEADER_BYTES + group / 8] |= 1 << (group % 8);
    }
    fs_header eos = fs_header_of(FRAME_EOS, CONTROL_GROUP, bitmap_bytes, 0, 0);
    memcpy(message, &eos, sizeof eos);
    seal(message, HEADER_BYTES + bitmap_bytes);
    send_all(control, message, HEADER_BYTES + bitmap_bytes);
    do
        wait_for_control(groups);
    while (receive_answer(control).type != FRAME_ACK);
}

#endif

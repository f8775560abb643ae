/* web_client.c — an open-loop HTTP client: fetches an object at random moments, whatever becomes of
 * the fetches before.
 *
 *     web_client RATE SECONDS SEED PATH HOST:PORT...
 *
 * Requests begin as a Poisson process of RATE per second, each to a server drawn from the list,
 * each over a connection of its own. The time of a request runs from the moment that the process
 * drew, not from when the client got round to it, to the response's last byte: a client that falls
 * behind measures it (Tene, "coordinated omission"). After SECONDS it waits for what is still on
 * its way, at most 10 s; SIGTERM ends it the same way. Prints a line per request: when it should
 * have begun, s; how long it took, ms, or "failed".
 */
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 8192, EVENTS = 256 };

struct request {
    int fd;
    double begun;       /* as drawn */
    long expected, got; /* of the body; -1: its length is not known yet */
    char head[1024];    /* of the response, until its empty line */
    int head_bytes;
};

static struct request requests[MOST];
static int idle[MOST], idles;
static double start;
static volatile sig_atomic_t stopped;

static void stop(int signal) {
    (void)signal;
    stopped = 1;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec - start;
}

/* Uniform in (0, 1]: xorshift64* (Vigna 2016). */
static double uniform(uint64_t *state) {
    *state ^= *state >> 12, *state ^= *state << 25, *state ^= *state >> 27;
    return ldexp((double)((*state * 0x2545f4914f6cdd1du >> 11) + 1), -53);
}

static void finish(struct request *r, int well) {
    if (well)
        printf("%.6f %.4f\n", r->begun, 1e3 * (now() - r->begun));
    else
        printf("%.6f failed\n", r->begun);
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
    idle[idles++] = (int)(r - requests);
}

static void begin(int poll, double when, const struct sockaddr_in *to) {
    if (idles == 0) {
        printf("%.6f failed\n", when);
        return;
    }
    struct request *r = &requests[idle[--idles]];
    *r = (struct request){.begun = when, .expected = -1};
    r->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct epoll_event event = {.events = EPOLLOUT, .data.ptr = r};
    if (r->fd < 0 ||
        (connect(r->fd, (const struct sockaddr *)to, sizeof *to) && errno != EINPROGRESS) ||
        epoll_ctl(poll, EPOLL_CTL_ADD, r->fd, &event))
        finish(r, 0);
}

static void ask(int poll, struct request *r, const char *path) {
    char text[512];
    int bytes = snprintf(text, sizeof text,
                         "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = r};
    if (send(r->fd, text, (size_t)bytes, MSG_NOSIGNAL) != bytes ||
        epoll_ctl(poll, EPOLL_CTL_MOD, r->fd, &event))
        finish(r, 0);
}

/* The head's end: what of it belongs to the body, and how long that will be; -1: not an OK. */
static long body_length(struct request *r) {
    char *end = strstr(r->head, "\r\n\r\n");
    char *length = strcasestr(r->head, "\r\nContent-Length:");
    if (!end) return r->head_bytes == (int)sizeof r->head - 1 ? -2 : -1;
    if (strncmp(r->head, "HTTP/1.1 200", 12) != 0 || !length) return -2;
    r->got = r->head_bytes - (end + 4 - r->head);
    return strtol(length + 17, NULL, 10);
}

static void take(struct request *r) {
    static char bytes[1 << 16];
    for (;;) {
        ssize_t n;
        if (r->expected < 0) {
            n = recv(r->fd, r->head + r->head_bytes, sizeof r->head - 1 - (size_t)r->head_bytes, 0);
            if (n > 0) {
                r->head_bytes += (int)n;
                r->head[r->head_bytes] = 0;
                r->expected = body_length(r);
            }
        } else {
            n = recv(r->fd, bytes, sizeof bytes, 0);
            if (n > 0) r->got += n;
        }
        if (r->expected >= 0 && r->got >= r->expected) return finish(r, 1);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0 || r->expected == -2) return finish(r, 0);
    }
}

int main(int argc, char **argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: web_client RATE SECONDS SEED PATH HOST:PORT...\n");
        return 2;
    }
    double rate = atof(argv[1]), seconds = atof(argv[2]);
    uint64_t state = strtoull(argv[3], NULL, 10) * 0x9e3779b97f4a7c15u + 1;
    int servers = argc - 5, poll = epoll_create1(EPOLL_CLOEXEC);
    struct sockaddr_in *server = calloc((size_t)servers, sizeof *server);
    if (!server || poll < 0 || !(rate > 0) || !(seconds > 0)) return 2;
    for (int i = 0; i < servers; i++) {
        char *colon = strrchr(argv[5 + i], ':');
        server[i].sin_family = AF_INET;
        if (colon) *colon = 0, server[i].sin_port = htons((uint16_t)atoi(colon + 1));
        if (!colon || inet_pton(AF_INET, argv[5 + i], &server[i].sin_addr) != 1) {
            fprintf(stderr, "web_client: %s: expected an IPv4 address and a port\n", argv[5 + i]);
            return 2;
        }
    }
    for (int i = 0; i < MOST; i++) idle[idles++] = MOST - 1 - i;
    for (int i = 0; i < 8; i++) uniform(&state);
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    start = (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
    double next = -log(uniform(&state)) / rate;
    signal(SIGTERM, stop);
    while (now() < seconds || (idles < MOST && now() < seconds + 10)) {
        if (stopped) seconds = fmin(seconds, now()), stopped = 0;
        while (next <= now() && next < seconds) {
            int which = (int)(uniform(&state) * servers) % servers;
            begin(poll, next, &server[which]);
            next += -log(uniform(&state)) / rate;
        }
        struct epoll_event events[EVENTS];
        double wait = next < seconds ? fmax(0, next - now()) : 0.01;
        struct timespec sleep = {(time_t)wait, (long)((wait - floor(wait)) * 1e9)};
        int n = epoll_pwait2(poll, events, EVENTS, &sleep, NULL);
        for (int i = 0; i < n; i++) {
            struct request *r = events[i].data.ptr;
            if (events[i].events & EPOLLOUT)
                ask(poll, r, argv[4]);
            else
                take(r);
        }
    }
    for (int i = 0; i < MOST; i++)
        if (requests[i].fd > 0) finish(&requests[i], 0);
    return 0;
}

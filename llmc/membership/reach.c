/* reach.c — see reach.h. */
#include "llmc/membership/reach.h"

#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "llmc/log/jsonl.h"

enum { AT_ONCE = 64, LIMIT = 500 /* ms */ };

static int64_t milliseconds(void) {
    return (int64_t)(1e3 * log_seconds());
}

static enum reached result_of(int error) {
    return error == 0 ? REACHED : error == ECONNREFUSED ? REACHED_REFUSED : REACHED_NOT;
}

/* Begins to connect. Returns a socket; or -1 and *reached. */
static int begin(const char *address, enum reached *reached) {
    char host[72];
    struct addrinfo *found,
        wanted = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
    const char *port = strrchr(address, ':');
    if (!port || (size_t)(port - address) >= sizeof host) return -1;
    const bool brackets = *address == '[' && port[-1] == ']';
    snprintf(host, sizeof host, "%.*s", (int)(port - address) - 2 * brackets, address + brackets);
    if (getaddrinfo(host, port + 1, &wanted, &found)) return -1;
    int s = socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s >= 0 && connect(s, found->ai_addr, found->ai_addrlen) && errno != EINPROGRESS) {
        *reached = result_of(errno);
        close(s);
        s = -1;
    }
    freeaddrinfo(found);
    return s;
}

static enum reached connected(int s) {
    int error = -1;
    socklen_t bytes = sizeof error;
    return getsockopt(s, SOL_SOCKET, SO_ERROR, &error, &bytes) ? REACHED_NOT : result_of(error);
}

static void reach_some(const struct member *m, int members, enum reached *reached) {
    struct pollfd wait[AT_ONCE];
    int open = 0;
    for (int i = 0; i < members; i++) {
        reached[i] = REACHED_NOT;
        wait[i] = (struct pollfd){begin(m[i].address, &reached[i]), POLLOUT, 0};
        open += wait[i].fd >= 0;
    }
    const int64_t end = milliseconds() + LIMIT;
    for (int64_t left = LIMIT; open && left > 0; left = end - milliseconds()) {
        if (poll(wait, (nfds_t)members, (int)left) <= 0) continue;
        for (int i = 0; i < members; i++) {
            if (wait[i].fd < 0 || !wait[i].revents) continue;
            reached[i] = connected(wait[i].fd);
            close(wait[i].fd);
            wait[i].fd = -1;
            open--;
        }
    }
    for (int i = 0; i < members; i++)
        if (wait[i].fd >= 0) close(wait[i].fd);
}

void reach_members(const struct member *m, int members, enum reached *reached) {
    for (int i = 0; i < members; i += AT_ONCE)
        reach_some(m + i, members - i < AT_ONCE ? members - i : AT_ONCE, reached + i);
}

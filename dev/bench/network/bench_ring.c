/* bench_ring.c — a baseline to compare with: a ring over TCP, as collective libraries build it.
 *
 *     mpirun -np 4 bench_ring MIB ROUNDS SECONDS ADDRESS,ADDRESS,...
 *
 * Each round averages MIB of float32 and hands the result to all ranks. Prints {"ms": T} for each
 * of at most ROUNDS rounds after one that warms up, and stops after SECONDS. Rank r listens on
 * ADDRESS r; MPI only starts the processes and their stopwatch.
 *
 * The vector is cut into one chunk per rank. Rank r sends one stream of bytes to rank r + 1. It
 * begins with chunk r. Chunks r - 1, r - 2, ... follow as they come in from rank r - 1, and rank r
 * adds its own part to them (reduce-scatter). After ranks - 1 chunks, what comes in is complete,
 * and is stored and passed on (all-gather). A byte is passed on as soon as it is here: nothing
 * waits for the end of a chunk. Both directions run at once, without blocking, through socket
 * buffers of 4 MiB. Data is sent out of the vector itself.
 */
#include "dev/bench/network/bench_time.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PORT = 17771, SOCKET_BYTES = 4 << 20, SCRATCH_BYTES = 1 << 20 };

struct ring {
    int rank, ranks;
    int next, previous; /* sockets */
    char *vector;
    size_t chunk, total; /* bytes of a chunk, and of the stream of a round */
    char *scratch;       /* what came in and is not yet added */
};

static void check(int ok, const char *what) {
    if (ok) return;
    fprintf(stderr, "bench_ring: %s: %s\n", what, strerror(errno));
    MPI_Abort(MPI_COMM_WORLD, 1);
}

/* ---- connections ---- */

static int new_socket(int family) {
    const int s = socket(family, SOCK_STREAM, 0), one = 1, bytes = SOCKET_BYTES;
    check(s >= 0, "socket");
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(s, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(s, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return s;
}

static socklen_t address_of(char *list, int rank, struct sockaddr_storage *out) {
    char *address = strtok(list, ",");
    while (rank-- > 0 && address) address = strtok(NULL, ",");
    struct sockaddr_in *v4 = (struct sockaddr_in *)out;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)out;
    memset(out, 0, sizeof *out);
    if (address && inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons(PORT);
        return sizeof *v4;
    }
    errno = EINVAL;
    check(address && inet_pton(AF_INET6, address, &v6->sin6_addr) == 1, "ADDRESS");
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(PORT);
    return sizeof *v6;
}

static void connect_ring(struct ring *r, const char *addresses) {
    struct sockaddr_storage own, next;
    char *list = strdup(addresses), *again = strdup(addresses);
    check(list && again, "strdup");
    const socklen_t bytes = address_of(list, r->rank, &own);
    address_of(again, (r->rank + 1) % r->ranks, &next);
    const int listener = new_socket(own.ss_family);
    check(!bind(listener, (struct sockaddr *)&own, bytes) && !listen(listener, 1), "bind");
    MPI_Barrier(MPI_COMM_WORLD);
    r->next = new_socket(next.ss_family);
    check(!connect(r->next, (struct sockaddr *)&next, bytes), "connect");
    r->previous = accept(listener, NULL, NULL);
    check(r->previous >= 0, "accept");
    close(listener);
    free(list);
    free(again);
}

/* ---- one round ---- */

/* Where byte `at` of the stream of rank `from` lies in the vector; *bytes are left in its chunk. */
static char *locate(const struct ring *r, int from, size_t at, size_t *bytes) {
    const int step = (int)(at / r->chunk);
    const int chunk = (from - step + 2 * r->ranks) % r->ranks;
    *bytes = r->chunk - at % r->chunk;
    return r->vector + (size_t)chunk * r->chunk + at % r->chunk;
}

/* Sends at most `most` bytes. Returns how many, or -1 if it would block. */
static ssize_t send_some(const struct ring *r, size_t sent, size_t most) {
    size_t bytes;
    const char *from = locate(r, r->rank, sent, &bytes);
    const ssize_t done =
        send(r->next, from, bytes < most ? bytes : most, MSG_DONTWAIT | MSG_NOSIGNAL);
    check(done >= 0 || errno == EAGAIN, "send");
    return done;
}

/* Receives what has come, and adds it in the reduce-scatter. There `received` counts whole floats
 * only, and up to 3 more bytes (*odd) wait in scratch. Returns the bytes by which `received` grows,
 * or -1 if it would block. */
static ssize_t receive_some(const struct ring *r, size_t received, size_t *odd) {
    const bool reduce = received < r->chunk * (size_t)(r->ranks - 1);
    size_t bytes;
    char *to = locate(r, (r->rank + r->ranks - 1) % r->ranks, received, &bytes);
    if (!reduce) {
        const ssize_t done = recv(r->previous, to, bytes, MSG_DONTWAIT);
        check(done > 0 || (done < 0 && errno == EAGAIN), "receive");
        return done;
    }
    if (bytes > SCRATCH_BYTES) bytes = SCRATCH_BYTES;
    const ssize_t done = recv(r->previous, r->scratch + *odd, bytes - *odd, MSG_DONTWAIT);
    check(done > 0 || (done < 0 && errno == EAGAIN), "receive");
    if (done < 0) return -1;
    const size_t have = *odd + (size_t)done, whole = have / sizeof(float);
    float *sum = (float *)to;
    const float *part = (const float *)r->scratch;
    for (size_t i = 0; i < whole; i++) sum[i] += part[i];
    *odd = have % sizeof(float);
    memmove(r->scratch, r->scratch + whole * sizeof(float), *odd);
    return (ssize_t)(whole * sizeof(float));
}

static void exchange(const struct ring *r) {
    size_t sent = 0, received = 0, odd = 0;
    while (sent < r->total || received < r->total) {
        const size_t ready = received + r->chunk < r->total ? received + r->chunk : r->total;
        ssize_t out = -1, in = -1;
        if (sent < ready) out = send_some(r, sent, ready - sent);
        if (received < r->total) in = receive_some(r, received, &odd);
        if (out > 0) sent += (size_t)out;
        if (in > 0) received += (size_t)in;
        if (out < 0 && in < 0) {
            struct pollfd wait[2] = {{r->next, sent < ready ? POLLOUT : 0, 0},
                                     {r->previous, received < r->total ? POLLIN : 0, 0}};
            poll(wait, 2, -1);
        }
    }
}

static void fill(const struct ring *r) {
    float *vector = (float *)r->vector;
    const size_t count = r->chunk * (size_t)r->ranks / sizeof *vector;
    for (size_t i = 0; i < count; i++) vector[i] = (float)((size_t)r->rank + i % 7);
}

static bool sums_are_right(const struct ring *r) {
    const float *vector = (const float *)r->vector;
    const size_t count = r->chunk * (size_t)r->ranks / sizeof *vector;
    for (size_t i = 0; i < count; i++) {
        if (vector[i] != (float)(r->ranks * (r->ranks - 1) / 2 + r->ranks * (int)(i % 7))) {
            return false;
        }
    }
    return true;
}

int main(int argc, char **argv) {
    struct ring r = {0};
    bool ok = true;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &r.ranks);
    if (argc != 5 || r.ranks < 2) {
        fprintf(stderr, "usage: mpirun -np RANKS bench_ring MIB ROUNDS SECONDS ADDRESSES\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    r.chunk = ((size_t)atoi(argv[1]) << 20) / (size_t)r.ranks / sizeof(float) * sizeof(float);
    r.total = 2 * (size_t)(r.ranks - 1) * r.chunk;
    r.vector = malloc(r.chunk * (size_t)r.ranks);
    r.scratch = malloc(SCRATCH_BYTES);
    check(r.vector && r.scratch, "malloc");
    connect_ring(&r, argv[4]);

    const double opened = bench_now();
    for (int round = -1; round < atoi(argv[2]); round++) {
        fill(&r);
        const double begun = bench_start();
        exchange(&r);
        if (round >= 0 && !bench_stop(begun, opened, atof(argv[3]))) break;
        ok = ok && sums_are_right(&r);
    }

    if (!ok) fprintf(stderr, "bench_ring: rank %d: wrong sums\n", r.rank);
    MPI_Barrier(MPI_COMM_WORLD);
    close(r.next);
    close(r.previous);
    free(r.scratch);
    free(r.vector);
    MPI_Finalize();
    return !ok;
}

/* rendezvous.c — how ranks meet without MPI: rank 0 listens at a TCP address, the others connect.
 *
 * The connections carry only what ranks tell each other before a comm is open. They form a star:
 * rank 0 collects every rank's part and sends all parts back. No data of training steps use them.
 *
 *     rank 0 -> rank r    challenge  magic, nonce
 *     rank r -> rank 0    greeting   magic, r, ranks, epoch, nonce, proof
 *     rank 0 -> rank r    seat       magic, local rank and local ranks of r, proof; or EARLY if r's
 *                                    epoch is later than rank 0's, or if rank 0's meeting began before
 *                                    it had heard r: then r connects again later
 *     rank r -> rank 0    bytes, part      } once per
 *     rank 0 -> rank r    all parts        } share
 *
 * With a key file, a proof is the HMAC of who sends it, both nonces, r, ranks and epoch, so each side
 * knows that the other has the key, and that it speaks now. Without one, proofs are zero bytes.
 *
 * All ranks must have the same byte order. The magic number does not match if they have not.
 */
#include "lossynet/comm.h"
#include "lossynet/crypto/crypto.h"

#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

static const uint64_t MAGIC = 0x6c6f737379310003; /* "lossy1", version 3 */
static const uint64_t EARLY = 0x6c6f7373794e4f54; /* in a seat: come again, for a later meeting */
static const double ENDED_SECONDS = 0.2;          /* how often rank 0 asks which ranks have ended */
static const double ATTEMPT_SECONDS = 2;          /* for an address of several */

enum { NONCE_BYTES = 16 };

struct challenge {
    uint64_t magic;
    uint8_t nonce[NONCE_BYTES];
};

struct greeting {
    uint64_t magic;
    int32_t rank, ranks;
    uint64_t epoch;
    uint8_t nonce[NONCE_BYTES], proof[LOSSYNET_PROOF_BYTES];
};

struct seat {
    uint64_t magic;
    int32_t local_rank, local_ranks;
    uint8_t proof[LOSSYNET_PROOF_BYTES];
};

struct caller { /* a connection to rank 0 whose greeting is not complete */
    int fd;
    size_t came; /* bytes of the greeting */
    struct greeting hello;
    struct challenge asked;
};

/* So many connections may be open without a greeting, beside one of each rank. If there are more,
 * the oldest is closed. */
enum { STRANGERS_MOST = 256 };

struct rendezvous {
    int ranks;
    uint64_t epoch;
    int *peer;       /* [ranks] sockets by rank, -1: none; rank r > 0 has rank 0's only */
    int lost;        /* the rank that was not heard in `share`, -1: none */
    double patience; /* seconds of an exchange */
    struct ln_key key;
    /* While rank 0 gathers the others: */
    struct caller *caller; /* [ranks + STRANGERS_MOST], the oldest first */
    struct pollfd *wait;   /* [1 + ranks + STRANGERS_MOST] */
    struct seat *seat;     /* [ranks] */
    int callers;
    bool refused; /* somebody without the key came, which was logged */
};

/* ---- sockets ---- */

/* Splits "host:port"; a host in brackets may contain colons. */
static bool split_address(const char *address, char host[256], const char **port) {
    const char *colon = strrchr(address, ':');
    if (!colon || !colon[1] || colon - address > 255) return false;
    size_t length = (size_t)(colon - address);
    *port = colon + 1;
    if (length >= 2 && address[0] == '[' && address[length - 1] == ']') address++, length -= 2;
    memcpy(host, address, length);
    host[length] = '\0';
    return true;
}

static struct addrinfo *resolve(const char *address, bool listen) {
    char host[256];
    const char *port;
    struct addrinfo *found = NULL;
    const struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = listen ? AI_PASSIVE : 0};
    if (!split_address(address, host, &port)) {
        ln_log("rendezvous '%s': expected HOST:PORT, as 10.0.0.1:7000 or [::1]:7000", address);
        return NULL;
    }
    int code = getaddrinfo(*host ? host : NULL, port, &hints, &found);
    if (code) ln_log("rendezvous '%s': %s: expected HOST:PORT", address, gai_strerror(code));
    return code ? NULL : found;
}

static void set_timeout(int fd, double seconds) {
    if (seconds < 0.01) seconds = 0.01; /* 0 would mean for ever */
    struct timeval limit = {(time_t)seconds, (suseconds_t)((seconds - (time_t)seconds) * 1e6)};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

/* Switches Nagle's algorithm off, because messages are short and wait for an answer. */
static void send_at_once(int fd) {
    const int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static bool send_all(int fd, const void *data, size_t bytes) {
    for (const char *at = data; bytes > 0;) {
        ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        at += sent;
        bytes -= (size_t)sent;
    }
    return true;
}

static bool receive_all(int fd, void *data, size_t bytes) {
    for (char *at = data; bytes > 0;) {
        ssize_t received = recv(fd, at, bytes, 0);
        if (received < 0 && errno == EINTR) continue;
        if (received == 0) errno = ECONNRESET; /* the peer closed the connection */
        if (received <= 0) return false;
        at += received;
        bytes -= (size_t)received;
    }
    return true;
}

static bool is_time_out(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

static const char *reason(void) {
    return is_time_out() ? "it said nothing in time" : strerror(errno);
}

/* ---- sharing ---- */

static lossynet_status share_as_root(struct rendezvous *r, char *all, size_t bytes) {
    for (int rank = 1; rank < r->ranks; rank++) {
        uint64_t announced = 0;
        r->lost = rank; /* until it has said its part */
        if (!receive_all(r->peer[rank], &announced, sizeof announced) ||
            (announced == bytes && !receive_all(r->peer[rank], all + (size_t)rank * bytes, bytes)))
            return ln_fail(LOSSYNET_LINK,
                           "rendezvous: rank 0 has heard nothing more from rank %d: %s", rank,
                           reason());
        if (announced != bytes)
            return ln_fail(LOSSYNET_PROTOCOL,
                           "rendezvous: rank %d shares %llu bytes, rank 0 %zu: expected the same "
                           "program and settings on all ranks",
                           rank, (unsigned long long)announced, bytes);
    }
    for (int rank = 1; rank < r->ranks; rank++) {
        r->lost = rank;
        if (send_all(r->peer[rank], all, (size_t)r->ranks * bytes)) continue;
        return ln_fail(LOSSYNET_LINK, "rendezvous: rank 0 cannot reach rank %d: %s", rank,
                       reason());
    }
    r->lost = -1;
    return LOSSYNET_OK;
}

/* A lossynet_share. */
static lossynet_status share(void *context, const struct lossynet_world *world, void *all,
                             size_t bytes) {
    struct rendezvous *r = context;
    if (world->rank == 0) return share_as_root(r, all, bytes);
    uint64_t announced = bytes;
    if (send_all(r->peer[0], &announced, sizeof announced) &&
        send_all(r->peer[0], (char *)all + (size_t)world->rank * bytes, bytes) &&
        receive_all(r->peer[0], all, (size_t)world->ranks * bytes))
        return LOSSYNET_OK;
    if (is_time_out()) r->lost = 0; /* a rank 0 that lost another rank would have said so */
    return ln_fail(LOSSYNET_LINK, "rendezvous: rank %d has heard nothing more from rank 0: %s",
                   world->rank, reason());
}

int lossynet_rendezvous_lost(const struct lossynet_world *world) {
    LN_DEMAND(NULL, world, "expected a world, got NULL");
    return world->share == share ? ((const struct rendezvous *)world->share_context)->lost : -1;
}

/* ---- proofs ---- */

/* `from`: who gives the proof, 0 or the rank of the greeting. */
static bool prove(const struct rendezvous *r, const struct challenge *asked,
                  const struct greeting *hello, bool from_root, uint8_t *proof) {
    struct {
        uint64_t magic, epoch;
        int32_t rank, ranks;
        uint64_t from_root;
        uint8_t nonce[2][NONCE_BYTES];
    } said = {MAGIC, r->epoch, hello->rank, hello->ranks, from_root, {{0}}};
    memset(proof, 0, LOSSYNET_PROOF_BYTES);
    memcpy(said.nonce[0], asked->nonce, NONCE_BYTES);
    memcpy(said.nonce[1], hello->nonce, NONCE_BYTES);
    return !r->key.count || ln_key_proof_of(&r->key, &said, sizeof said, proof);
}

static bool is_proof(const struct rendezvous *r, const struct challenge *asked,
                     const struct greeting *hello, bool from_root, const uint8_t *proof) {
    uint8_t right[LOSSYNET_PROOF_BYTES], differs = 0;
    if (!prove(r, asked, hello, from_root, right)) return false;
    for (int i = 0; i < LOSSYNET_PROOF_BYTES; i++) differs |= right[i] ^ proof[i];
    return !differs || !r->key.count;
}

/* Linux always gives so few bytes. */
static void draw_nonce(uint8_t nonce[NONCE_BYTES]) {
    if (getrandom(nonce, NONCE_BYTES, 0) != NONCE_BYTES) memset(nonce, 0, NONCE_BYTES);
}

/* ---- rank 0 ---- */

/* A port of the address itself is taken although a program that has ended used it a minute ago. Ports of a
 * range are other processes', which take theirs in the same way. */
static int listen_at(const char *address, const int ports[2]) {
    struct addrinfo *found = resolve(address, true);
    if (!found) return -1;
    const int again = !ports[0];
    int fd = -1, failure = EADDRNOTAVAIL;
    /* A name may have addresses that this host lacks. A port that is taken is another program's. */
    for (const struct addrinfo *at = found; at && fd < 0 && failure != EADDRINUSE;
         at = at->ai_next) {
        fd = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
        if (fd >= 0 && !setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &again, sizeof again) &&
            ln_port_bind(fd, at->ai_addr, at->ai_addrlen, ports) && !listen(fd, SOMAXCONN))
            break;
        failure = errno;
        if (fd >= 0) close(fd);
        fd = -1;
    }
    if (fd < 0)
        ln_log("rendezvous '%s': rank 0 cannot listen there: %s: expected an address of "
               "this host and a free port",
               address, strerror(failure));
    freeaddrinfo(found);
    return fd;
}

static void forget(struct rendezvous *r, int i) {
    memmove(&r->caller[i], &r->caller[i + 1], (size_t)(--r->callers - i) * sizeof *r->caller);
}

static void dismiss(struct rendezvous *r, int i) {
    close(r->caller[i].fd);
    forget(r, i);
}

/* Accepts a connection and sends it a challenge. */
static void answer_call(struct rendezvous *r, int listener) {
    struct caller new = {.fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC),
                         .asked = {.magic = MAGIC}};
    if (new.fd < 0) return;
    draw_nonce(new.asked.nonce);
    if (r->callers == r->ranks + STRANGERS_MOST) dismiss(r, 0);
    r->caller[r->callers++] = new;
    send_at_once(new.fd);
    if (send(new.fd, &new.asked, sizeof new.asked, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof new.asked)
        dismiss(r, r->callers - 1);
}

/* Whether a caller's greeting is one to this meeting. *fault: it comes from a rank that was started
 * in another way. */
static bool is_expected(struct rendezvous *r, const struct caller *c, lossynet_status *fault) {
    const struct greeting *hello = &c->hello;
    if (hello->epoch != r->epoch) return false;
    if (!is_proof(r, &c->asked, hello, false, hello->proof)) {
        if (!r->refused)
            ln_log("rendezvous: somebody who does not have the key of --key-file has come as "
                   "rank %d, and is sent away",
                   hello->rank);
        r->refused = true;
        return false;
    }
    if (hello->ranks == r->ranks && hello->rank >= 1 && hello->rank < r->ranks &&
        r->peer[hello->rank] < 0)
        return true;
    if (r->epoch) return false; /* in a later meeting the others go on */
    ln_log("rendezvous: rank %d of %d has come: expected each of the ranks 1 to %d of %d "
           "once",
           hello->rank, hello->ranks, r->ranks - 1, r->ranks);
    *fault = LOSSYNET_INVALID;
    return false;
}

static void ask_to_come_again(int fd) {
    const struct seat later = {.magic = EARLY};
    send(fd, &later, sizeof later, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* Reads what a caller has sent of its greeting, without waiting. Closes the connection if it does
 * not begin with the magic number, because it then comes from another program, or if its epoch is
 * over. */
static lossynet_status listen_to(struct rendezvous *r, int i) {
    struct caller *c = &r->caller[i];
    lossynet_status fault = LOSSYNET_OK;
    const ssize_t more =
        recv(c->fd, (char *)&c->hello + c->came, sizeof c->hello - c->came, MSG_DONTWAIT);
    if (more < 0 && (is_time_out() || errno == EINTR)) return LOSSYNET_OK;
    if (more > 0) c->came += (size_t)more;
    if (more <= 0 || (c->came >= sizeof MAGIC && c->hello.magic != MAGIC)) {
        dismiss(r, i);
        return LOSSYNET_OK;
    }
    if (c->came < sizeof c->hello) return LOSSYNET_OK;
    const int rank = c->hello.rank;
    if (c->hello.epoch > r->epoch) ask_to_come_again(c->fd); /* it will join a later meeting */
    if (!is_expected(r, c, &fault) || !prove(r, &c->asked, &c->hello, true, r->seat[rank].proof)) {
        dismiss(r, i);
        return fault;
    }
    r->peer[rank] = c->fd;
    set_timeout(c->fd, r->patience);
    forget(r, i);
    return LOSSYNET_OK;
}

/* Waits at most `seconds` for connections and greetings; all callers are heard at once, so that one
 * that says nothing holds up nobody. */
static lossynet_status hear(struct rendezvous *r, int listener, double wait) {
    lossynet_status status = LOSSYNET_OK;
    const int callers = r->callers;
    r->wait[0] = (struct pollfd){.fd = listener, .events = POLLIN};
    for (int i = 0; i < callers; i++)
        r->wait[1 + i] = (struct pollfd){.fd = r->caller[i].fd, .events = POLLIN};
    if (poll(r->wait, (nfds_t)callers + 1, (int)(wait * 1000) + 1) <= 0) return LOSSYNET_OK;
    for (int i = callers; i-- > 0 && !status;)
        if (r->wait[1 + i].revents) status = listen_to(r, i);
    if (r->wait[0].revents) answer_call(r, listener);
    return status;
}

/* Finds ranks that have ended before they came, and sets m->missing. Returns the last of them, or
 * 0. */
static int find_ended(const struct rendezvous *r, const struct lossynet_meeting *m) {
    int found = 0;
    for (int rank = 0; rank < r->ranks; rank++) m->missing[rank] = r->peer[rank] >= 0;
    m->find_ended(m->context, m->missing);
    for (int rank = 0; rank < r->ranks; rank++) {
        m->missing[rank] &= rank > 0 && r->peer[rank] < 0;
        if (m->missing[rank]) found = rank;
    }
    return found;
}

/* Accepts the connections of all other ranks. If some do not come, sets m->missing. */
static lossynet_status gather(struct rendezvous *r, int listener,
                              const struct lossynet_meeting *m) {
    const double end = ln_now() + m->seconds;
    double ask = m->find_ended && m->missing ? ln_now() + ENDED_SECONDS : INFINITY;
    lossynet_status status = LOSSYNET_OK;
    for (int missing = r->ranks - 1; missing > 0 && status == LOSSYNET_OK;) {
        double left = end - ln_now();
        if (left <= 0) {
            ln_log("rendezvous: %d of %d ranks have not come in %g s: expected them to be "
                   "started with the same address",
                   missing, r->ranks, m->seconds);
            for (int rank = 1; m->missing && rank < r->ranks; rank++)
                m->missing[rank] = r->peer[rank] < 0;
            return LOSSYNET_LINK;
        }
        if (ln_now() >= ask) {
            const int ended = find_ended(r, m);
            if (ended)
                return ln_fail(LOSSYNET_LINK, "rendezvous: rank %d has ended and does not come",
                               ended);
            ask = ln_now() + ENDED_SECONDS;
        }
        const double wait = fmax(fmin(end, ask) - ln_now(), 0);
        status = hear(r, listener, wait);
        missing = 0;
        for (int rank = 1; rank < r->ranks; rank++) missing += r->peer[rank] < 0;
    }
    return status;
}

struct host { /* an IP address, IPv4 in the last four bytes */
    uint8_t address[16];
};

static struct host host_of(const struct sockaddr_storage *a) {
    struct host host = {{0}};
    if (a->ss_family == AF_INET6)
        memcpy(host.address, &((const struct sockaddr_in6 *)a)->sin6_addr, 16);
    else
        memcpy(host.address + 12, &((const struct sockaddr_in *)a)->sin_addr, 4);
    return host;
}

/* Two ranks are on one host if rank 0 sees them at the same address. A rank is on rank 0's host if
 * its connection has the same address at both ends. host[0] stays 0. */
static void find_hosts(const struct rendezvous *r, struct host *host) {
    for (int rank = 1; rank < r->ranks; rank++) {
        struct sockaddr_storage near = {0}, far = {0};
        socklen_t near_bytes = sizeof near, far_bytes = sizeof far;
        getsockname(r->peer[rank], (struct sockaddr *)&near, &near_bytes);
        getpeername(r->peer[rank], (struct sockaddr *)&far, &far_bytes);
        struct host here = host_of(&near), there = host_of(&far);
        if (memcmp(&here, &there, sizeof here)) host[rank] = there;
    }
}

static void find_seat(const struct host *host, int rank, int ranks, struct seat *seat) {
    seat->magic = MAGIC;
    for (int other = 0; other < ranks; other++) {
        bool together = memcmp(&host[rank], &host[other], sizeof *host) == 0;
        seat->local_ranks += together;
        seat->local_rank += together && other < rank;
    }
}

/* Takes the memory for gathering; the caller frees it, also after a failure. */
static bool prepare_root(struct rendezvous *r, struct host **host) {
    const size_t most = (size_t)r->ranks + STRANGERS_MOST;
    *host = ln_memory_take((size_t)r->ranks, sizeof **host);
    r->caller = ln_memory_take(most, sizeof *r->caller);
    r->wait = ln_memory_take(most + 1, sizeof *r->wait);
    r->seat = ln_memory_take((size_t)r->ranks, sizeof *r->seat);
    if (*host && r->caller && r->wait && r->seat) return true;
    ln_log("rendezvous: no memory for the addresses of %d ranks", r->ranks);
    return false;
}

static lossynet_status seat_all(struct rendezvous *r, struct host *host, struct seat *own) {
    find_hosts(r, host);
    find_seat(host, 0, r->ranks, own);
    for (int rank = 1; rank < r->ranks; rank++) {
        find_seat(host, rank, r->ranks, &r->seat[rank]);
        if (send_all(r->peer[rank], &r->seat[rank], sizeof r->seat[rank])) continue;
        return ln_fail(LOSSYNET_LINK, "rendezvous: rank 0 cannot reach rank %d: %s", rank,
                       reason());
    }
    return LOSSYNET_OK;
}

static lossynet_status meet_as_root(struct rendezvous *r, const struct lossynet_meeting *m,
                                    struct seat *seat) {
    int listener = m->listener >= 0 ? m->listener : listen_at(m->address, (const int[2]){0, 0});
    if (listener < 0) return LOSSYNET_LINK;
    struct host *host;
    lossynet_status status = prepare_root(r, &host) ? LOSSYNET_OK : LOSSYNET_NO_MEMORY;
    if (!status) status = gather(r, listener, m);
    if (listener != m->listener) close(listener);
    while (r->callers) { /* who has not said yet for which meeting it comes */
        const int last = r->callers - 1;
        if (!status && listener == m->listener) ask_to_come_again(r->caller[last].fd);
        dismiss(r, last);
    }
    if (!status) status = seat_all(r, host, seat);
    free(host);
    free(r->caller);
    free(r->wait);
    free(r->seat);
    return status;
}

/* ---- the others ---- */

/* Tries again until rank 0 listens. Where a name has several addresses, one that does not answer takes only
 * a part of the time. listened: rank 0 listens already; if it has only one address, a
 * refusal is then final. */
static int connect_to(const struct addrinfo *found, bool listened, double seconds) {
    const struct timespec pause = {0, 50000000};
    const double end = ln_now() + seconds;
    for (const struct addrinfo *to = found;; to = to->ai_next ? to->ai_next : found) {
        int fd = socket(to->ai_family, to->ai_socktype | SOCK_CLOEXEC, to->ai_protocol);
        if (fd >= 0) set_timeout(fd, found->ai_next ? fmin(seconds, ATTEMPT_SECONDS) : seconds);
        if (fd >= 0) send_at_once(fd);
        if (fd >= 0 && connect(fd, to->ai_addr, to->ai_addrlen) == 0) {
            set_timeout(fd, seconds);
            return fd;
        }
        const int failure = errno == EINPROGRESS ? ETIMEDOUT : errno;
        if (fd >= 0) close(fd);
        errno = failure;
        if (ln_now() >= end) return -1;
        if (listened && failure == ECONNREFUSED && !found->ai_next) return -1;
        nanosleep(&pause, NULL);
    }
}

/* Exchanges challenge, greeting and seat. Returns false if rank 0 closes the connection, says
 * nothing in time (errno says which), or does not have the key. */
static bool take_seat(const struct rendezvous *r, int rank, int fd, struct seat *seat) {
    struct challenge asked;
    struct greeting hello = {.magic = MAGIC, .rank = rank, .ranks = r->ranks, .epoch = r->epoch};
    if (!receive_all(fd, &asked, sizeof asked)) return false;
    errno = 0;
    draw_nonce(hello.nonce);
    if (asked.magic != MAGIC || !prove(r, &asked, &hello, false, hello.proof)) return false;
    if (!send_all(fd, &hello, sizeof hello) || !receive_all(fd, seat, sizeof *seat)) return false;
    errno = 0;
    return seat->magic == EARLY ||
           (seat->magic == MAGIC && is_proof(r, &asked, &hello, true, seat->proof));
}

/* Greets rank 0 and waits for a seat. LOSSYNET_OK with peer[0] = -1: connect again later. *early:
 * rank 0 has said so once, so it lives. */
static lossynet_status greet(struct rendezvous *r, const struct lossynet_meeting *m,
                             const struct addrinfo *found, double seconds, bool *early,
                             struct seat *seat) {
    int fd = r->peer[0] = connect_to(found, m->listener >= 0, seconds);
    if (fd < 0) {
        if (m->listener >= 0 && errno == ECONNREFUSED)
            ln_log("rendezvous '%s': rank 0 has ended: its host refuses rank %d's connection",
                   m->address, m->rank);
        else
            ln_log("rendezvous '%s': rank %d reaches nobody in %g s: %s: expected rank 0 to "
                   "listen there",
                   m->address, m->rank, m->seconds, strerror(errno));
        if (m->missing) m->missing[0] = true;
        return LOSSYNET_LINK;
    }
    if (take_seat(r, m->rank, fd, seat)) {
        set_timeout(fd, r->patience);
        if (seat->magic == MAGIC) return LOSSYNET_OK;
        *early = true;
        close(fd);
        r->peer[0] = -1;
        return LOSSYNET_OK;
    }
    /* The kernel of a process that hangs accepts connections. A rank 0 that lacks another rank
     * closes them. */
    const bool hangs = is_time_out() && !*early;
    if (m->missing && hangs) m->missing[0] = true;
    return ln_fail(LOSSYNET_LINK,
                   "rendezvous '%s': rank %d was not admitted: expected rank 0 of %d ranks there, "
                   "and all others within %g s%s",
                   m->address, m->rank, r->ranks, m->seconds,
                   hangs ? "; rank 0 says nothing at all" : "");
}

static lossynet_status meet_root(struct rendezvous *r, const struct lossynet_meeting *m,
                                 struct seat *seat) {
    const struct timespec pause = {0, 50000000};
    const double end = ln_now() + m->seconds;
    lossynet_status status = LOSSYNET_OK;
    bool early = false;
    struct addrinfo *found = resolve(m->address, false);
    if (!found) return LOSSYNET_LINK;
    while (!status && r->peer[0] < 0) {
        status = greet(r, m, found, fmax(end - ln_now(), 0), &early, seat);
        if (!status && r->peer[0] < 0) nanosleep(&pause, NULL);
    }
    freeaddrinfo(found);
    return status;
}

/* ---- open and close ---- */

lossynet_status lossynet_rendezvous_listen(const char *address, const int ports[2], int *listener,
                                           int *port) {
    struct sockaddr_storage bound = {0};
    socklen_t bytes = sizeof bound;
    LN_EXPECT(NULL, address && ports && listener && port,
              "expected an address, ports, and memory for a socket and a port, got NULL");
    *listener = listen_at(address, ports);
    if (*listener < 0) return LOSSYNET_LINK;
    getsockname(*listener, (struct sockaddr *)&bound, &bytes);
    *port = ntohs(((const struct sockaddr_in *)&bound)->sin_port); /* also that of IPv6 */
    return LOSSYNET_OK;
}

lossynet_status lossynet_rendezvous_meet(const struct lossynet_meeting *m,
                                         struct lossynet_world *world) {
    LN_EXPECT(NULL, m && world && (m->address || m->ranks == 1),
              "expected an address, and memory for a world, got NULL");
    *world = (struct lossynet_world){.rank = m->rank, .ranks = m->ranks, .local_ranks = 1};
    if (m->ranks < 1 || m->rank < 0 || m->rank >= m->ranks || !(m->seconds > 0))
        return ln_refuse(
            "rendezvous: rank %d of %d, %g s: expected 0 <= rank < ranks, and a time above "
            "0",
            m->rank, m->ranks, m->seconds);
    const size_t ranks = (size_t)m->ranks;
    if (m->missing) memset(m->missing, 0, ranks * sizeof *m->missing);
    if (m->ranks == 1) return LOSSYNET_OK;
    struct rendezvous *r = ln_memory_take(1, sizeof *r + ranks * sizeof *r->peer);
    if (!r)
        return ln_fail(LOSSYNET_NO_MEMORY, "rendezvous: rank %d: no memory for %d ranks", m->rank,
                       m->ranks);
    r->ranks = m->ranks;
    r->epoch = m->epoch;
    r->lost = -1;
    r->patience = m->exchange_seconds > 0 ? m->exchange_seconds : m->seconds;
    r->peer = (int *)(r + 1);
    for (int i = 0; i < m->ranks; i++) r->peer[i] = -1;
    world->share = share;
    world->share_context = r;
    struct seat seat = {0};
    lossynet_status status = LOSSYNET_OK;
    if (m->key_file && !ln_key_read(m->key_file, m->rank, &r->key)) status = LOSSYNET_PROTOCOL;
    if (!status) status = m->rank == 0 ? meet_as_root(r, m, &seat) : meet_root(r, m, &seat);
    explicit_bzero(&r->key, sizeof r->key);
    world->local_rank = seat.local_rank;
    world->local_ranks = seat.local_ranks;
    if (status) lossynet_rendezvous_close(world);
    return status;
}

lossynet_status lossynet_rendezvous_open(const char *address, int rank, int ranks, double seconds,
                                         struct lossynet_world *world) {
    const struct lossynet_meeting meeting = {
        .address = address, .listener = -1, .rank = rank, .ranks = ranks, .seconds = seconds};
    return lossynet_rendezvous_meet(&meeting, world);
}

void lossynet_rendezvous_close(struct lossynet_world *world) {
    if (!world || world->share != share) return;
    struct rendezvous *r = world->share_context;
    for (int i = 0; i < r->ranks; i++)
        if (r->peer[i] >= 0) close(r->peer[i]);
    explicit_bzero(r, sizeof *r);
    free(r);
    world->share = NULL;
    world->share_context = NULL;
}

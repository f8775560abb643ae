/* session.c — seals every datagram on its way out, and verifies every datagram on its way in.
 *
 * Over links that lose datagrams each datagram carries a checksum, or is encrypted (crypto.h). A
 * datagram passes if a rank of this run has sent it to this rank. Other files check its contents.
 */
#include "lossynet/transport/peer/peer.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Notes which peers are missing, as far as this rank knows, so that nobody need wait for them.
 * Peers that sent LEAVE or ABORT are not missing. */
static void note_missed(struct ln_transport *t) {
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_liveness *live = &t->peers[r].live;
        const double silence = ln_timer_silence(t, r, live->asked);
        if (r == t->world.rank || live->leaving > 0 || live->aborted > 0) continue;
        live->missed =
            silence > t->session.peer_timeout / 2 || (silence > 0 && ln_timer_is_refused(t, r));
    }
}

void ln_session_fail(struct ln_transport *t, int peer, const char *format, ...) {
    if (t->failed) return;
    char what[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    if (!__atomic_exchange_n(t->threads.team.first_told, true, __ATOMIC_RELAXED))
        ln_log("rank %d, step %" PRIu64 ", peer rank %d %s", t->world.rank, ln_session_step(t),
               peer, what);
    t->failed = LOSSYNET_LINK;
    t->session.missed = 1 + peer;
    note_missed(t);
}

/* ---- out ---- */

static void seal(struct ln_transport *t, int peer, struct ln_datagram *d, int slot) {
    struct ln_session *session = &t->session;
    wire_put(d->header + WIRE_CHECKSUM_AT, 0, 4);
    if (session->secure) {
        size_t sealed = d->length + LOSSYNET_SECURE_BYTES;
        uint8_t *out = session->sealed + (size_t)slot * session->payload_most;
        ln_secure_seal(session->secure, peer, d->header, d->payload, d->length, out);
        d->payload = out;
        d->length = sealed;
    } else if (!t->link->features.reliable) {
        uint32_t crc = ln_crc32c(0, d->header, WIRE_HEADER_BYTES);
        crc = ln_crc32c(crc, d->payload, d->length);
        wire_put(d->header + WIRE_CHECKSUM_AT, crc, 4);
    }
}

void ln_session_send_by(struct ln_transport *t, int peer, int way, struct ln_datagram *batch,
                        int n) {
    for (int i = 0; i < n; i++) {
        seal(t, peer, &batch[i], i);
        batch[i].path = way == WAY_OTHER_PATH;
    }
    const int to = way < WAY_BY ? peer : way - WAY_BY;
    lossynet_status status = t->link->send(t->link, to, batch, n);
    if (status && !t->failed) t->failed = status;
}

void ln_session_send(struct ln_transport *t, int peer, struct ln_datagram *batch, int n) {
    ln_session_send_by(t, peer, t->peers[peer].detour.way, batch, n);
}

/* ---- in ---- */

static bool is_intact(const struct ln_transport *t, const struct wire_header *h, uint8_t *datagram,
                      size_t bytes) {
    if (t->link->features.reliable) return true;
    wire_put(datagram + WIRE_CHECKSUM_AT, 0, 4);
    uint32_t crc = ln_crc32c(0, datagram, bytes);
    wire_put(datagram + WIRE_CHECKSUM_AT, h->checksum, 4);
    return crc == h->checksum;
}

/* The rank of a sender or receiver in a header. */
static int rank_of(const struct ln_transport *t, const struct wire_header *h, int who) {
    return h->type == WIRE_DATA ? who / t->shape.local : who;
}

/* Counts a datagram that is not handled. */
static bool refuse(uint64_t *counter) {
    ++*counter;
    return false;
}

/* Sends on a datagram for another rank, which its sender has sent us (detour.c). It is sealed for
 * its receiver. Only a peer's own datagrams are sent on, and only directly, so that none goes in a
 * circle; and none that is larger than those of this run, which a link need not take. */
static bool send_on(struct ln_transport *t, int peer, int to, const struct wire_header *h,
                    uint8_t *datagram) {
    if (rank_of(t, h, h->sender) != peer || to == peer || to >= t->world.ranks ||
        h->length > t->session.payload_most || t->failed)
        return refuse(t->session.secure ? &t->receiver.rejected.corrupt
                                        : &t->receiver.rejected.invalid);
    struct ln_datagram d = {.payload = datagram + WIRE_HEADER_BYTES,
                            .length = h->length,
                            .bulk = h->type == WIRE_DATA,
                            .path = t->peers[to].detour.way == WAY_OTHER_PATH};
    memcpy(d.header, datagram, sizeof d.header);
    if (t->link->send(t->link, to, &d, 1) != LOSSYNET_OK && !t->failed) t->failed = LOSSYNET_LINK;
    t->receiver.relayed.packets[h->kind & 1] += d.bulk;
    t->receiver.relayed.bytes[h->kind & 1] += d.bulk ? h->length : 0;
    return false;
}

/* Returns whether rank *from of this run has sent a datagram to us. If not, counts its first error, or
 * sends it on. */
static bool is_ours(struct ln_transport *t, int peer, int *from, struct wire_header *h,
                    uint8_t *datagram, size_t bytes) {
    struct ln_session *session = &t->session;
    struct ln_rejected *rejected = &t->receiver.rejected;
    if (bytes < WIRE_HEADER_BYTES) return refuse(&rejected->truncated);
    wire_decode(h, datagram, bytes);
    if (h->magic != WIRE_MAGIC || peer < 0 || peer >= t->world.ranks || peer == t->world.rank)
        return refuse(&rejected->foreign);
    if (h->version != WIRE_VERSION) return refuse(&rejected->version);
    if (h->run != (uint32_t)session->id) return refuse(&rejected->foreign);
    if (h->type == WIRE_TEST) return false;
    const int to = rank_of(t, h, h->receiver);
    *from = rank_of(t, h, h->sender);
    const bool strange = *from >= t->world.ranks || *from == t->world.rank;
    if (t->link->features.reliable && (*from != peer || to != t->world.rank))
        return refuse(&rejected->invalid);
    if (session->secure && to == t->world.rank && !strange) {
        ln_secure_verdict verdict = ln_secure_open_datagram(
            session->secure, *from, datagram, datagram + WIRE_HEADER_BYTES, h->length);
        if (verdict == LOSSYNET_SECURE_FORGED) return refuse(&rejected->corrupt);
        if (verdict == LOSSYNET_SECURE_REPLAYED) return refuse(&rejected->duplicate);
        h->length -= LOSSYNET_SECURE_BYTES;
    } else if (!session->secure && !is_intact(t, h, datagram, bytes)) {
        return refuse(&rejected->corrupt);
    }
    if (session->secure && strange) return refuse(&rejected->corrupt);
    if (h->type == 0 || h->type >= WIRE_TYPES || h->kind >= WIRE_KINDS || strange)
        return refuse(&rejected->invalid);
    return to == t->world.rank || send_on(t, peer, to, h, datagram);
}

bool ln_session_verify(struct ln_transport *t, int *peer, int *way, struct wire_header *h,
                       uint8_t *datagram, size_t bytes) {
    int from = *peer;
    const bool ours = is_ours(t, *peer, &from, h, datagram, bytes);
    *way = from != *peer ? WAY_BY + *peer : t->session.path ? WAY_OTHER_PATH : WAY_DIRECT;
    *peer = from;
    return ours;
}

/* session.c — seals every datagram on its way out, and verifies every datagram on its way in.
 *
 * Over links that lose datagrams each datagram carries a checksum, or is encrypted (crypto.h). A
 * datagram passes if a rank of this run has sent it to this rank. Other files check its contents.
 */
#include "lossynet/transport/progress.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

/* Notes which peers are missing, as far as this rank knows, so that nobody need wait for them.
 * Peers that sent LEAVE or ABORT are not missing. */
static void note_missed(struct ln_transport *t) {
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_liveness *live = &t->peers[r].live;
        const double silence = ln_timer_unanswered(t, r);
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
    ln_log("rank %d, step %" PRIu64 ", peer rank %d %s", t->world.rank, ln_session_step(t), peer,
           what);
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

void ln_session_send(struct ln_transport *t, int peer, struct ln_datagram *batch, int n) {
    for (int i = 0; i < n; i++) seal(t, peer, &batch[i], i);
    lossynet_status status = t->link->send(t->link, peer, batch, n);
    if (status && !t->failed) t->failed = status;
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

/* Returns whether the header says that the datagram is from this peer and for us. */
static bool is_addressed(const struct ln_transport *t, int peer, const struct wire_header *h) {
    const int local = t->shape.local;
    if (h->type != WIRE_DATA) return h->sender == peer && h->receiver == t->world.rank;
    return h->sender / local == peer && h->receiver / local == t->world.rank;
}

/* Returns the counter of the first error in a datagram, or NULL if a rank of this run has sent
 * it. */
static uint64_t *reject(struct ln_transport *t, int peer, struct wire_header *h, uint8_t *datagram,
                        size_t bytes) {
    struct ln_session *session = &t->session;
    struct ln_rejected *rejected = &t->receiver.rejected;
    if (bytes < WIRE_HEADER_BYTES) return &rejected->truncated;
    wire_decode(h, datagram, bytes);
    if (h->magic != WIRE_MAGIC || peer < 0 || peer >= t->world.ranks || peer == t->world.rank)
        return &rejected->foreign;
    if (h->version != WIRE_VERSION) return &rejected->version;
    if (h->run != (uint32_t)session->id) return &rejected->foreign;
    if (h->type == WIRE_TEST) return &t->receiver.ignored;
    if (session->secure) {
        ln_secure_verdict verdict = ln_secure_open_datagram(
            session->secure, peer, datagram, datagram + WIRE_HEADER_BYTES, h->length);
        if (verdict == LOSSYNET_SECURE_FORGED) return &rejected->corrupt;
        if (verdict == LOSSYNET_SECURE_REPLAYED) return &rejected->duplicate;
        h->length -= LOSSYNET_SECURE_BYTES;
    } else if (!is_intact(t, h, datagram, bytes)) {
        return &rejected->corrupt;
    }
    if (h->type == 0 || h->type >= WIRE_TYPES || h->kind >= WIRE_KINDS || !is_addressed(t, peer, h))
        return &rejected->invalid;
    return NULL;
}

bool ln_session_verify(struct ln_transport *t, int peer, struct wire_header *h, uint8_t *datagram,
                       size_t bytes) {
    uint64_t *wrong = reject(t, peer, h, datagram, bytes);
    if (wrong) ++*wrong;
    return !wrong;
}

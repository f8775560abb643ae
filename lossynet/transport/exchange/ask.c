/* ask.c — asks late ranks for acknowledgements of a GRADIENT phase, and answers such questions.
 *
 * After the GRADIENT phases of a step the ranks acknowledge to each other which packets came, in a
 * gather that goes on without late ranks (deadline.c). A rank then asks the transport of
 * each late rank for its acknowledgement. That transport answers while its caller computes. In the
 * same way a late rank asks the others for the acknowledgements that they exchanged without it. The
 * asking rank waits for a few round trips at most.
 *
 * An answer is final, so a rank may answer only in two cases:
 *
 *   - The question is about the step in whose first GRADIENT phase the rank is. The rank has begun
 *     this step, so it will certainly average this phase. No more packets of the asking rank can
 *     come, because that rank has ended all phases of the step and sends nothing in rounds of
 *     retransmission.
 *   - The rank has averaged the step. It repeats its acknowledgement.
 *
 * While one of these cases may still come about, the rank does not answer, and it will be asked
 * again. About any other step it sends a TELL without bytes.
 *
 * The bytes of an answer arrive in order. If some are missing, the asking rank asks again, from the
 * first missing byte on.
 */
#include "lossynet/transport/exchange/exchange.h"

#include <math.h>

/* ---- answering ---- */

static void answer(struct ln_transport *t, int peer, const struct wire_header *h,
                   const uint8_t *from, size_t bytes) {
    size_t at = h->packet < bytes ? h->packet : bytes;
    int n = 0;
    do {
        const size_t left = bytes - at, most = t->session.fragment_bytes;
        const size_t length = left < most ? left : most;
        t->sender.batch[n++] =
            ln_control_datagram(t, peer, WIRE_TELL, LOSSYNET_GRADIENT, h->index, (uint32_t)at,
                                length > 0 ? from + at : (const uint8_t *)"", length);
        at += length;
    } while (at < bytes && n < LOSSYNET_BATCH);
    ln_session_send(t, peer, t->sender.batch, n);
}

void ln_ask_receive(struct ln_transport *t, int peer, const struct wire_header *h) {
    struct ln_peer *p = &t->peers[peer];
    const struct ln_phase_state *phase = &t->phase[LOSSYNET_GRADIENT];
    const uint32_t count = h->index + 1, step = ln_deadline_steps(t, count);
    const bool same = step == ln_deadline_steps(t, phase->opened);
    const bool stays = same && phase->opened != phase->closed &&
                       phase->opened == t->deadline.present.opened &&
                       p->rx[LOSSYNET_GRADIENT].state == RX_OVER;
    size_t bytes = 0;
    const uint8_t *from = NULL;
    if (!t->deadline.late_comes || t->failed || h->kind != LOSSYNET_GRADIENT) {
        t->receiver.rejected.invalid++;
        return;
    }
    if (stays) p->question.holds = count;
    if (same && p->question.holds != count) return; /* it will be asked again */
    if (p->question.holds == count)
        from = t->calls.acknowledge(t->calls.context, peer, stays, &bytes);
    answer(t, peer, h, from, bytes);
}

void ln_transport_acknowledges(struct ln_transport *t, bool whole) {
    ln_threads_enter(t);
    for (int r = 0; r < t->world.ranks; r++)
        t->peers[r].question.holds = whole ? t->phase[LOSSYNET_GRADIENT].closed : 0;
    ln_threads_leave(t);
}

/* ---- asking ---- */

void ln_ask_sending(struct ln_transport *t) {
    const bool first = ln_deadline_is_first(t);
    for (int r = 0; r < t->world.ranks; r++) {
        struct ln_peer *p = &t->peers[r];
        p->question.sent = first ? 0 : p->question.sent + p->tx[LOSSYNET_GRADIENT].sent;
    }
}

double ln_ask_push(struct ln_transport *t, int peer, double now) {
    struct ln_peer *p = &t->peers[peer];
    struct ln_question *q = &p->question;
    if (!q->open) return HUGE_VAL;
    if (ln_timer_is_due(t, p, &q->repeat, now))
        ln_control_send(t, peer, WIRE_ASK, LOSSYNET_GRADIENT, t->phase[LOSSYNET_GRADIENT].begun - 1,
                        (uint32_t)q->got);
    return ln_timer_due(t, &q->repeat, now);
}

void ln_ask_told(struct ln_transport *t, int peer, const struct wire_header *h,
                 const uint8_t *payload) {
    struct ln_question *q = &t->peers[peer].question;
    if (!q->open || h->kind != LOSSYNET_GRADIENT ||
        h->index + 1 != t->phase[LOSSYNET_GRADIENT].begun || h->packet != q->got ||
        h->length > q->bytes - q->got)
        return; /* it was overtaken, or answers an earlier question */
    ln_timer_news(t, &t->peers[peer]);
    memcpy(q->to + q->got, payload, h->length);
    q->got += h->length;
    q->repeat = ln_timer_at_once();
    q->open = h->length > 0 && q->got < q->bytes;
}

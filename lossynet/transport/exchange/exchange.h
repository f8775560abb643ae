/* exchange.h — what all ranks do together: phases and small messages, the loop that drives them,
 * and how a step goes on without late ranks. It uses peer/peer.h. */
#ifndef LOSSYNET_EXCHANGE_H
#define LOSSYNET_EXCHANGE_H

#include "lossynet/transport/peer/peer.h"

/* ---- threads.c: one thread at a time ---- */

/* Takes the lock from the transport's thread, and gives it back. */
void ln_threads_enter(struct ln_transport *t);
void ln_threads_leave(struct ln_transport *t);

/* ---- deadline.c: going on without late ranks ---- */

/* Returns whether the time is over that a rank waits for the others after half of them are done. half:
 * when half of the ranks were done; 0: they are not yet. */
bool ln_deadline_is_over(const struct ln_transport *t, double half);
/* Returns the next time, after `now`, at which it is over for a phase or gather that waits; infinity
 * if there is none. */
double ln_deadline_due(const struct ln_transport *t, double now);
/* Returns how many steps `phases` GRADIENT phases belong to. The last may lack some phases. */
static inline uint32_t ln_deadline_steps(const struct ln_transport *t, uint32_t phases) {
    const uint32_t each = t->deadline.phases[LOSSYNET_GRADIENT];
    return (phases + each - 1) / each;
}
/* Returns whether the present GRADIENT phase is the first of its step. */
static inline bool ln_deadline_is_first(const struct ln_transport *t) {
    return (t->phase[LOSSYNET_GRADIENT].opened - 1) % t->deadline.phases[LOSSYNET_GRADIENT] == 0;
}
/* Logs that a peer is late, now and then. */
void ln_deadline_tell(const struct ln_transport *t, int peer);
/* Marks a peer as late: we go on without it. */
void ln_deadline_late(struct ln_transport *t, int peer);
/* Takes a peer's new state, and finds out whether it has caught up. */
void ln_deadline_told(struct ln_transport *t, int peer);
/* Ends a phase for the late peers that hold it up. Every turn calls it. */
void ln_deadline_check(struct ln_transport *t, int kind);
/* Learns how late peers were, when the first GRADIENT phase of a step has ended. */
void ln_deadline_learn(struct ln_transport *t);

/* ---- ask.c: acknowledgements of late ranks ---- */

/* Counts our DATA of the step's earlier GRADIENT phases. Call it when the next one begins to send,
 * before its tx is cleared. */
void ln_ask_sending(struct ln_transport *t);
void ln_ask_receive(struct ln_transport *t, int peer, const struct wire_header *h);
void ln_ask_told(struct ln_transport *t, int peer, const struct wire_header *h,
                 const uint8_t *payload);
/* Asks a peer if that is due. Returns when to look again. */
double ln_ask_push(struct ln_transport *t, int peer, double now);

/* ---- message.c ---- */

/* Sends a peer the fragments of our messages that are due. Returns when the next will be due. */
double ln_message_push(struct ln_transport *t, int peer, double now);
void ln_message_receive(struct ln_transport *t, int peer, const struct wire_header *h,
                        const uint8_t *payload);
void ln_message_acknowledge(struct ln_transport *t, int peer, const struct wire_header *h,
                            const uint8_t *payload);
/* Returns how many seconds ago a peer that has begun an open gather last sent a fragment, if we lack
 * some; else 0. A peer repeats fragments until we acknowledge them, unless it wrongly believes that
 * we did. */
double ln_message_owed(const struct ln_transport *t, int peer);
/* Begins a gather of a kind. Our part for rank r is bytes out_offset[r] ... out_offset[r + 1] of
 * `out`; with `same` all ranks get the part at this rank's own offset. The part from rank r goes to
 * in_offset[r] ... in_offset[r + 1] of `in`. */
void ln_message_begin(struct ln_transport *t, int which, const uint8_t *out,
                      const size_t *out_offset, bool same, uint8_t *in, const size_t *in_offset);
/* For ln_progress_until: returns whether all parts of the gather have come, and ours have
 * arrived or are kept. A LOSSYNET_PULSE does not wait for late ranks. */
bool ln_message_exchanged(struct ln_transport *t, int which);
/* For ln_progress_until: returns whether our kept parts have arrived, so that the next gather
 * may begin. */
bool ln_message_settled(struct ln_transport *t, int which);

/* ---- dispatch.c ---- */

/* Verifies one datagram and passes it to the file that handles its type. The lock is held. */
void ln_dispatch(struct ln_transport *t, int peer, uint8_t *datagram, size_t bytes);

/* ---- progress.c ---- */

/* Runs one turn. Returns seconds until something is due, or 0 if there may be more to do now. */
double ln_progress_turn(struct ln_transport *t);
/* Sends all peers the datagrams that are due, except DATA. */
void ln_progress_push(struct ln_transport *t, double now);
/* Runs turns, with the lock held, until over(t, argument) is true or the transport has failed. */
lossynet_status ln_progress_until(struct ln_transport *t,
                                  bool (*over)(struct ln_transport *t, int argument), int argument);
/* Tells the peers that we leave, and ends the thread. */
void ln_progress_stop(struct ln_transport *t);

#endif

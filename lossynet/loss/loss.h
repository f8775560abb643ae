/* loss.h — losses that are made up: which packets of a link arrive, and traces of what did.
 *
 * Knows a link as (phase, sender, receiver), its packets as numbers 0, 1, ..., and models of loss.
 * Must not know what packets carry, who owns them, or whether they travel at all. Uses base only.
 */
#ifndef LOSSYNET_LOSS_H
#define LOSSYNET_LOSS_H

#include "lossynet/base/base.h"

#include <stdio.h>

/* ---- injected loss (loss_model.c) ---- */

enum lossynet_loss_model { LOSS_BERNOULLI, LOSS_BURST, LOSS_OUTAGE, LOSS_TRACE, LOSS_REPLAY };

struct lossynet_loss_replay; /* opaque: a recorded run */

struct lossynet_loss_at { /* links with a rate of their own */
    int sender, receiver; /* receiver -1: those from and to `sender` */
    double rate;
};

struct lossynet_loss {
    enum lossynet_loss_model model;
    uint64_t seed;
    double rate[2];
    double mean_run; /* burst: packets; outage: steps */
    uint8_t *trace;  /* 1 = arrives */
    size_t trace_length;
    struct lossynet_loss_replay *replay;
    struct lossynet_loss_at *at; /* [at_count] */
    int at_count;
};

/* On failure `why` says in one line what was expected. */
lossynet_status lossynet_loss_open(struct lossynet_loss *loss,
                                   const struct lossynet_loss_settings *settings, char *why,
                                   size_t why_size);
void lossynet_loss_close(struct lossynet_loss *loss);

/* arrived[k] = 1 or 0 for the n packets that `sender` sends to `receiver` in this phase and step,
 * in order of (bucket, packet). A pure function of its arguments, whatever the number of ranks.
 * chain: for "burst" and "outage", one word per link and phase that starts as 0 and saves looking
 * back (loss_model.c); NULL is fine. */
void lossynet_loss_mask(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                        int sender, int receiver, size_t n, uint64_t *chain, uint8_t *arrived);

/* Of all that masks depend on, but for a trace's contents. */
uint64_t lossynet_loss_fingerprint(const struct lossynet_loss *loss);

/* ---- what arrived, as a trace for the loss model trace:FILE (loss_trace.c) ---- */

/* Writes to `path`, with several ranks to path.RANK. On failure *out is NULL and a line is
 * logged. */
lossynet_status lossynet_loss_trace_open(const char *path, const struct lossynet_world *world,
                                         FILE **out);
/* What arrived of n packets of a link in a phase. */
void lossynet_loss_trace_link(FILE *trace, uint64_t step, lossynet_phase phase, int sender,
                              int receiver, const uint8_t *arrived, size_t n);
/* What a worker did in a step. */
void lossynet_loss_trace_part(FILE *trace, uint64_t step, int worker,
                              const struct lossynet_part *part);
/* told[w], w < workers: owner w has told this worker in this step what arrived. */
void lossynet_loss_trace_told(FILE *trace, uint64_t step, int worker, const uint8_t *told,
                              int workers);
/* After all links of a phase: logs what could not be written. */
lossynet_status lossynet_loss_trace_flush(FILE *trace, int rank);

/* ---- a recorded run, made again (loss_replay.c) ---- */

/* Reads FILE, or FILE.0, FILE.1 ... On failure *out is NULL and `why` says in one line what was
 * expected. */
lossynet_status lossynet_loss_replay_open(const char *path, struct lossynet_loss_replay **out,
                                          char *why, size_t why_size);
void lossynet_loss_replay_close(struct lossynet_loss_replay *replay); /* NULL is fine */
/* As lossynet_loss_mask. */
void lossynet_loss_replay_mask(const struct lossynet_loss_replay *replay, lossynet_phase phase,
                               uint64_t step, int sender, int receiver, size_t n, uint8_t *arrived);
/* Whether a worker was told by an owner in this step what has arrived. */
bool lossynet_loss_replay_told(const struct lossynet_loss_replay *replay, uint64_t step, int worker,
                               int owner);
struct lossynet_part lossynet_loss_replay_part(const struct lossynet_loss_replay *replay,
                                               uint64_t step, int worker);

#endif

/* loss.h — injects losses: decides which packets of a link arrive, and writes traces of what did.
 *
 * This layer knows a link as (phase, sender, receiver), its packets as numbers 0, 1, ..., and
 * models of loss. It must not know what packets carry, who owns them, or whether they are sent at
 * all. It uses base only.
 */
#ifndef LOSSYNET_LOSS_H
#define LOSSYNET_LOSS_H

#include "lossynet/base/base.h"

#include <stdio.h>

/* ---- values of some links or tensors (at.c) ---- */

enum { LOSSYNET_AT_NAMES = 32 }; /* most entries of a list that begin with a name */

struct ln_at_entry {
    int sender, receiver; /* -1: every worker */
    bool both_ways;       /* also the links from `receiver` to `sender` */
    uint32_t bit;         /* of an entry for tensors, each its own; 0: the entry is for links */
    char name[96];        /* of these tensors */
    double value[2];      /* by phase */
};

struct ln_at {
    struct ln_at_entry *entry; /* [count] */
    int count, names;          /* entries; those with a name */
};

struct ln_at_form {           /* what values may be */
    const char *setting;      /* whose list it is, for messages */
    const char *value, *what; /* as messages call one: "RATE", "loss rate" */
    double most;
    bool whole;
};

/* Reads a list; NULL and "none" are empty. Logs what is wrong. Close it in any case. */
lossynet_status ln_at_parse(struct ln_at *at, const char *text, const struct ln_at_form *form,
                            int workers);
void ln_at_close(struct ln_at *at);
/* Whether a name of a list stands for a tensor; a part A-B of it for all of its numbers, the first or the last. */
enum ln_at_numbers { LN_AT_ALL, LN_AT_FIRST, LN_AT_LAST };
bool ln_at_fits(const char *name, const char *tensor, enum ln_at_numbers which);
/* The bits of all entries that stand for a tensor. */
uint32_t ln_at_names(const struct ln_at *at, const char *tensor);
/* The value of packets on a link that hold parts of tensors with these bits: that of the last entry which
 * stands for the link or for one of the tensors, or else `otherwise`. */
double ln_at_value(const struct ln_at *at, lossynet_phase phase, int sender, int receiver,
                   uint32_t names, double otherwise);
double ln_at_most(const struct ln_at *at, lossynet_phase phase); /* the largest value; at least 0 */
uint64_t ln_at_fingerprint(const struct ln_at *at, uint64_t hash);

/* ---- injected loss (loss_model.c) ---- */

enum ln_loss_model { LOSS_BERNOULLI, LOSS_BURST, LOSS_OUTAGE, LOSS_TRACE, LOSS_REPLAY };

/* Which links an outage takes down together: one, all from a worker, or all to a worker. */
enum ln_loss_fate { FATE_LINK, FATE_SENDER, FATE_RECEIVER };

struct ln_loss_replay; /* opaque: a recorded run */

struct ln_loss {
    enum ln_loss_model model;
    uint64_t seed;
    double rate[2];
    double mean_run;        /* mean length of a run of losses: burst in packets, outage in steps */
    enum ln_loss_fate fate; /* outage */
    int paths;              /* outage: independent paths of a link; packets leave on path 0 */
    uint8_t *trace;         /* 1 = arrives */
    size_t trace_length;
    struct ln_loss_replay *replay;
    struct ln_at at; /* links and tensors with rates of their own */
};

/* On failure logs one line that names the setting and says what was expected. */
lossynet_status ln_loss_open(struct ln_loss *loss, const struct lossynet_loss_settings *settings,
                             int workers);
void ln_loss_close(struct ln_loss *loss);

/* Sets arrived[k] to 1 or 0 for the n packets that `sender` sends to `receiver` in this phase and
 * step, in order of (bucket, packet). The result depends on the arguments alone, not on the number
 * of ranks. chain: for "burst" and "outage", one word per link and phase, 0 at the start, in which
 * the function remembers the link's state (loss_model.c). It only saves time; NULL is fine. */
void ln_loss_mask(const struct ln_loss *loss, lossynet_phase phase, uint64_t step, int sender,
                  int receiver, size_t n, uint64_t *chain, uint8_t *arrived);
/* The same with the rate of packets that hold parts of tensors with these bits (ln_at_names). With another
 * rate, a link has the same random numbers; `chain` is then of that rate alone. */
void ln_loss_mask_of(const struct ln_loss *loss, uint32_t names, lossynet_phase phase,
                     uint64_t step, int sender, int receiver, size_t n, uint64_t *chain,
                     uint8_t *arrived);

/* Whether path `path` of a link is down in this step and phase: everything on it is lost, in rounds of
 * retransmission, too. Other models than "outage" only have links that are always down, with rate 1. */
bool ln_loss_is_down(const struct ln_loss *loss, lossynet_phase phase, uint64_t step, int sender,
                     int receiver, int path);

/* Whether some links are always down, and not all of them. */
bool ln_loss_has_dead_links(const struct ln_loss *loss);

/* The loss rate that is injected on average over the links between `workers` workers, in packets of tensors
 * with these bits. 0 for models "trace" and "replay", whose rates are in their files. */
double ln_loss_mean(const struct ln_loss *loss, lossynet_phase phase, int workers, uint32_t names);

/* A hash of everything that masks depend on. */
uint64_t ln_loss_fingerprint(const struct ln_loss *loss);

/* ---- traces of what arrived, for the loss model trace:FILE (loss_trace.c) ---- */

/* Opens a trace or a record for reading. A pipe, which would have us wait and can be read only once, is
 * refused with ESPIPE. NULL: errno says why. */
FILE *ln_loss_file(const char *path);

/* Opens `path` for writing; with several ranks path.RANK. It is no file that the loss model reads. On
 * failure it logs one line, and *out is NULL. */
lossynet_status ln_loss_trace_open(const char *path, const char *model,
                                   const struct lossynet_world *world, FILE **out);
/* Writes which of a link's n packets arrived in a phase. */
void ln_loss_trace_link(FILE *trace, uint64_t step, lossynet_phase phase, int sender, int receiver,
                        const uint8_t *arrived, size_t n);
/* The last line of a record that is whole. */
#define LOSSYNET_TRACE_END "# end"
/* Writes what a worker did in a step. */
void ln_loss_trace_part(FILE *trace, uint64_t step, int worker, const struct lossynet_part *part);
/* Writes told[w], w < workers: in this step owner w has told this worker which packets arrived. */
void ln_loss_trace_told(FILE *trace, uint64_t step, int worker, const uint8_t *told, int workers);
/* Call it after all links of a phase. Logs one line if something could not be written. */
lossynet_status ln_loss_trace_flush(FILE *trace, int rank);

/* ---- repeating a recorded run (loss_replay.c) ---- */

/* Reads FILE, or FILE.0, FILE.1 ... On failure *out is NULL, and one line is logged that says what
 * was expected. */
lossynet_status ln_loss_replay_open(const char *path, int workers, uint64_t steps,
                                    struct ln_loss_replay **out);
/* Whether the record has, in all steps, the packets of this run: packets[owner], from each worker to the owner
 * and from the owner to each, and what error feedback needs. If not, logs why. */
lossynet_status ln_loss_replay_fits(const struct ln_loss_replay *replay, const size_t *packets,
                                    int workers, bool feedback);
void ln_loss_replay_close(struct ln_loss_replay *replay); /* NULL is fine */
/* Sets arrived[k] as ln_loss_mask does. */
void ln_loss_replay_mask(const struct ln_loss_replay *replay, lossynet_phase phase, uint64_t step,
                         int sender, int receiver, size_t n, uint8_t *arrived);
uint64_t ln_loss_replay_fingerprint(const struct ln_loss_replay *replay, uint64_t hash);
/* Whether the record has this step. */
bool ln_loss_replay_has(const struct ln_loss_replay *replay, uint64_t step);
/* Whether an owner told a worker in this step which packets arrived. */
bool ln_loss_replay_told(const struct ln_loss_replay *replay, uint64_t step, int worker, int owner);
struct lossynet_part ln_loss_replay_part(const struct ln_loss_replay *replay, uint64_t step,
                                         int worker);

#endif

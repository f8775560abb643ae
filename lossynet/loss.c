/* loss.c — injected loss: which packets of a link survive.
 *
 * A link is directed, from one worker to another, and has a life of its own in each phase. Loss
 * is a pure function of (seed, step, phase, sender, receiver, packet): random numbers are hashes of
 * these, counted rather than drawn, so that the outcome does not depend on how workers are spread
 * over ranks and threads, nor on whether a run was resumed. A packet is counted as the k-th of its
 * link in its step; since sender, receiver and phase name the owner, this says which packet of the
 * vector it is.
 *
 * bernoulli   lost when the hash, as a number in [0, 1), is below p.
 *
 * burst:MEAN  Gilbert-Elliott (Gilbert 1960): a state per link, good loses nothing, bad loses
 *     everything. From packet to packet, also from one step's last to the next step's first, it
 *     moves good -> bad with probability a and bad -> good with probability b:
 *         mean run of losses = 1/b             = MEAN
 *         stationary loss    = a / (a + b)     = p      hence  a = p / (MEAN (1 - p))
 *     a <= 1 asks for p <= MEAN / (MEAN + 1): shorter runs cannot lose that much.
 *     MEAN = 1/(1-p) is bernoulli; anything longer is bursty.
 *
 *     The state is a pure function too. With one number u per packet, u < min(a, 1-b) leads to bad
 *     and u >= max(a, 1-b) to good from either state; in between the state is kept (a < 1-b) or
 *     flips (a > 1-b). So looking back to the last packet that decided, and counting flips since,
 *     gives the state of a chain that has run for ever, that is, in its stationary distribution
 *     (coupling from the past, Propp & Wilson 1996). Looking back takes MEAN (1-p) packets on
 *     average; the word `chain` remembers where the last step ended and saves that in sequence.
 *
 * trace:FILE  the file is read in a circle; a link starts at a place of its own, and goes on from
 *     step to step. `rate` 0 turns loss off for a phase; other rates mean nothing.
 */
#include "lossynet/internal.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const phase_name[2] = {"gradient", "parameter"};

/* ---- random numbers ---- */

enum { STREAM_LOSS = 1, STREAM_STATIONARY = 2, STREAM_TRACE = 3 };

/* The key of all random numbers of a link in a step. */
static uint64_t stream_key(uint64_t seed, int stream, lossynet_phase phase, uint64_t step,
                           int sender, int receiver) {
    uint64_t key = lossynet_mix(seed ^ ((uint64_t)stream << 8 | (uint64_t)phase));
    key = lossynet_mix(key ^ step);
    return lossynet_mix(key ^ ((uint64_t)sender << 32 | (uint64_t)receiver));
}

/* The k-th number of a stream, uniform in [0, 2^64). */
static inline uint64_t stream_number(uint64_t key, size_t k) {
    return lossynet_mix(key + k * 0xd1342543de82ef95u);
}

/* Probability p < 1 as a bound on a uniform 64-bit number. */
static uint64_t bound(double p) {
    return p >= 1 ? UINT64_MAX : (uint64_t)ldexp(p, 64);
}

/* ---- models ---- */

static void mask_bernoulli(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                           int sender, int receiver, size_t n, uint8_t *arrived) {
    uint64_t key = stream_key(loss->seed, STREAM_LOSS, phase, step, sender, receiver);
    uint64_t lost = bound(loss->rate[phase]);
    for (size_t k = 0; k < n; k++) arrived[k] = stream_number(key, k) >= lost;
}

/* The chain's state before packet 0 of `step`: looks back until a packet decided. */
static bool burst_look_back(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                            int sender, int receiver, size_t n) {
    uint64_t enter = loss->enter[phase], stay = loss->stay[phase];
    uint64_t low = enter < stay ? enter : stay, high = enter < stay ? stay : enter;
    bool flips = enter > stay, flipped = false;
    /* One packet decides with probability >= 1/MEAN for a bursty chain, so this far back one has,
     * but for a chance of e^-64. (MEAN = 1, p = 1/2 alternates for ever and never decides.) */
    size_t limit = (size_t)(64 * loss->mean_run) + 1024;
    for (size_t seen = 0; seen < limit;) {
        step--; /* steps before 0 wrap round, and are as random as any */
        uint64_t key = stream_key(loss->seed, STREAM_LOSS, phase, step, sender, receiver);
        for (size_t k = n; k-- > 0; seen++) {
            uint64_t u = stream_number(key, k);
            if (u < low) return !flipped;
            if (u >= high) return flipped;
            flipped ^= flips;
        }
    }
    uint64_t key = stream_key(loss->seed, STREAM_STATIONARY, phase, step, sender, receiver);
    return (stream_number(key, 0) < bound(loss->rate[phase])) ^ flipped;
}

static void mask_burst(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                       int sender, int receiver, size_t n, uint64_t *chain, uint8_t *arrived) {
    /* chain: (step after the one it ended) * 2 + state; 0 is "nothing known", and step 0. */
    bool bad = chain && *chain >> 1 == step && step > 0
                   ? *chain & 1
                   : burst_look_back(loss, phase, step, sender, receiver, n);
    uint64_t key = stream_key(loss->seed, STREAM_LOSS, phase, step, sender, receiver);
    for (size_t k = 0; k < n; k++) {
        bad = stream_number(key, k) < (bad ? loss->stay[phase] : loss->enter[phase]);
        arrived[k] = !bad;
    }
    if (chain) *chain = (step + 1) << 1 | bad;
}

static void mask_trace(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                       int sender, int receiver, size_t n, uint8_t *arrived) {
    uint64_t key = stream_key(loss->seed, STREAM_TRACE, phase, 0, sender, receiver);
    size_t length = loss->trace_length;
    size_t at =
        (size_t)((stream_number(key, 0) % length + (step % length) * (n % length)) % length);
    for (size_t k = 0; k < n; k++) {
        arrived[k] = loss->trace[at];
        if (++at == length) at = 0;
    }
}

void lossynet_loss_mask(const struct lossynet_loss *loss, lossynet_phase phase, uint64_t step,
                        int sender, int receiver, size_t n, uint64_t *chain, uint8_t *arrived) {
    if (n == 0) return;
    double rate = loss->rate[phase];
    if (rate <= 0)
        memset(arrived, 1, n);
    else if (loss->model == LOSS_TRACE)
        mask_trace(loss, phase, step, sender, receiver, n, arrived);
    else if (rate >= 1)
        memset(arrived, 0, n);
    else if (loss->model == LOSS_BURST)
        mask_burst(loss, phase, step, sender, receiver, n, chain, arrived);
    else
        mask_bernoulli(loss, phase, step, sender, receiver, n, arrived);
}

/* ---- settings ---- */

static lossynet_status trace_read(struct lossynet_loss *loss, const char *path, char *why,
                                  size_t why_size) {
    lossynet_status status = LOSSYNET_FILE;
    FILE *file = fopen(path, "r");
    if (!file) {
        snprintf(why, why_size, "loss trace %s: %s", path, strerror(errno));
        return status;
    }
    size_t room = 0;
    int line = 1;
    for (int c = getc(file); c != EOF; c = getc(file)) {
        if (c == '#') {
            while (c != '\n' && c != EOF) c = getc(file);
            if (c == EOF) break;
        }
        if (c == '\n') line++;
        if (strchr(" \t\r\n", c) && c) continue;
        if (c != '0' && c != '1') {
            snprintf(why, why_size,
                     "loss trace %s, line %d: byte %d, expected 0 (arrives) or 1 (lost)", path,
                     line, c);
            goto close_file;
        }
        if (loss->trace_length == room) {
            room = room ? 2 * room : 4096;
            uint8_t *larger = (uint8_t *)lossynet_memory_take(room, 1);
            if (!larger) {
                snprintf(why, why_size, "no memory for the loss trace %s", path);
                status = LOSSYNET_NO_MEMORY;
                goto close_file;
            }
            if (loss->trace) memcpy(larger, loss->trace, loss->trace_length);
            free(loss->trace);
            loss->trace = larger;
        }
        loss->trace[loss->trace_length++] = c == '0';
    }
    if (ferror(file))
        snprintf(why, why_size, "loss trace %s: cannot be read: %s", path, strerror(errno));
    else if (loss->trace_length == 0)
        snprintf(why, why_size, "loss trace %s: empty, expected 0 (arrives) and 1 (lost)", path);
    else
        status = LOSSYNET_OK;
close_file:
    fclose(file);
    return status;
}

static lossynet_status burst_parse(struct lossynet_loss *loss, const char *text, char *why,
                                   size_t why_size) {
    char *end;
    double mean = strtod(text, &end);
    if (end == text || *end || !(mean >= 1 && mean <= 1e6)) {
        snprintf(why, why_size,
                 "loss model burst:%s: the mean run length must be a number from 1 to 1000000",
                 text);
        return LOSSYNET_INVALID;
    }
    loss->model = LOSS_BURST;
    loss->mean_run = mean;
    for (int phase = 0; phase < 2; phase++) {
        double p = loss->rate[phase];
        if (p <= 0 || p >= 1) continue;
        double enter = p / (mean * (1 - p));
        if (enter > 1 + 1e-12) {
            snprintf(why, why_size,
                     "loss model burst:%g loses at most %.4g of the packets, the %s loss rate is "
                     "%g: expected longer runs or a lower rate",
                     mean, mean / (mean + 1), phase_name[phase], p);
            return LOSSYNET_INVALID;
        }
        loss->enter[phase] = bound(enter);
        loss->stay[phase] = bound(1 - 1 / mean);
    }
    return LOSSYNET_OK;
}

lossynet_status lossynet_loss_open(struct lossynet_loss *loss,
                                   const struct lossynet_loss_settings *settings, char *why,
                                   size_t why_size) {
    *loss = (struct lossynet_loss){.seed = settings->seed};
    for (int phase = 0; phase < 2; phase++) {
        loss->rate[phase] = settings->rate[phase];
        if (!(settings->rate[phase] >= 0 && settings->rate[phase] <= 1)) {
            snprintf(why, why_size, "%s loss rate %g: expected a number from 0 to 1",
                     phase_name[phase], settings->rate[phase]);
            return LOSSYNET_INVALID;
        }
    }
    const char *model = settings->model ? settings->model : "bernoulli";
    if (strcmp(model, "bernoulli") == 0) return LOSSYNET_OK;
    if (strncmp(model, "burst:", 6) == 0) return burst_parse(loss, model + 6, why, why_size);
    if (strncmp(model, "trace:", 6) == 0) {
        loss->model = LOSS_TRACE;
        lossynet_status status = trace_read(loss, model + 6, why, why_size);
        if (status) lossynet_loss_close(loss);
        return status;
    }
    snprintf(why, why_size,
             "loss model \"%s\": expected bernoulli, burst:MEAN_LENGTH or trace:FILE", model);
    return LOSSYNET_INVALID;
}

void lossynet_loss_close(struct lossynet_loss *loss) {
    free(loss->trace);
    *loss = (struct lossynet_loss){0};
}

lossynet_status lossynet_loss_check(const struct lossynet_loss_settings *settings, char *why,
                                    size_t why_size) {
    struct lossynet_loss loss;
    lossynet_status status = lossynet_loss_open(&loss, settings, why, why_size);
    lossynet_loss_close(&loss);
    return status;
}

/* loss_model.c — injects losses: decides which packets of a link arrive.
 *
 * A link goes from one worker to another in one direction, and its losses in the two phases are
 * independent (except outages). Loss is a pure function of (seed, step, phase, sender, receiver,
 * packet): random numbers are hashes of these. So the outcome does not depend on how workers are
 * spread over ranks and threads, nor on whether a run was resumed. `packet` counts the packets of a
 * link in a step. Sender, receiver and phase determine the owner, so this number identifies one
 * packet of the vector.
 *
 * bernoulli   A packet is lost if its hash, as a number in [0, 1), is below p.
 *
 * burst:MEAN  Gilbert-Elliott (Gilbert 1960): each link is in one of two states. The good state
 *     loses nothing, the bad state loses everything. From packet to packet, also from a step's last
 *     to the next step's first, it goes good -> bad with probability a and bad -> good with b:
 *         mean run of losses = 1/b             = MEAN
 *         stationary loss    = a / (a + b)     = p      hence  a = p / (MEAN (1 - p))
 *     a <= 1 requires p <= MEAN / (MEAN + 1): shorter runs cannot lose that much.
 *     MEAN = 1/(1-p) is bernoulli; longer runs are bursts.
 *
 *     The state is a pure function, too. There is one number u per packet. From either state, u <
 *     min(a, 1-b) leads to bad and u >= max(a, 1-b) to good. In between the state is kept (a < 1-b)
 *     or flips (a > 1-b). So one looks back to the last packet that decided, and counts the flips
 *     since. This gives the state of a chain that has run for ever, in its stationary distribution
 *     (coupling from the past, Propp & Wilson 1996). Looking back takes MEAN (1-p) packets on
 *     average. The word `chain` remembers the state after the last step, which saves looking back.
 *
 * outage:MEAN  A link is down for whole steps, for MEAN steps on average, and loses nothing in other
 *     steps. It is the same chain with steps instead of packets, so p <= MEAN / (MEAN + 1) again.
 *     What shares a fate has the same random numbers. "outage:MEAN:sender": all links from a
 *     worker, as if its way into the network were down. "outage:MEAN:receiver": all links to a
 *     worker. "outage:MEAN:PATHS": nothing; each link has PATHS paths through the network, which
 *     are down independently of one another. Packets leave on the first path.
 *     Both phases of a step use the same number u, so an outage drops what the sender sends in
 *     both. If the phases' rates differ (and MEAN >= 1/(1-p)), the phase with the lower rate is
 *     down only while the other one is. The opposite direction is independent. Packets sent again
 *     on the same path in the same step are lost again. A packet's age is 0 with probability 1-p, and
 *     k > 0 with p (1-s) s^(k-1), s = 1 - 1/MEAN; drift.c derives the drift from this.
 *
 * trace:FILE  Links read the file in a circle. Each link starts at its own place, and continues from
 *     step to step. `rate` 0 turns loss off for a phase; other rates have no effect.
 *
 * replay:FILE  Packets arrive as in a run that --record-loss recorded. Rates have no effect
 *     (loss_replay.c).
 *
 * Some links or tensors may have another rate (`at`, at.c). The rest of the model is the same.
 */
#include "lossynet/loss/loss.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const phase_name[2] = {"gradient", "parameter"};

/* ---- random numbers ---- */

enum { STREAM_LOSS = 1, STREAM_STATIONARY = 2, STREAM_TRACE = 3 };

struct directed { /* a link in a phase */
    const struct ln_loss *loss;
    lossynet_phase phase; /* for outages always GRADIENT, because both phases share them */
    int sender, receiver;
    double rate;
};

/* The key of all random numbers of a link in a step. */
static uint64_t stream_key(const struct directed *link, int stream, uint64_t step) {
    uint64_t key = ln_mix(link->loss->seed ^ ((uint64_t)stream << 8 | (uint64_t)link->phase));
    key = ln_mix(key ^ step);
    return ln_mix(key ^ ((uint64_t)link->sender << 32 | (uint64_t)link->receiver));
}

/* The k-th number of a stream, uniform in [0, 2^64). */
static inline uint64_t stream_number(uint64_t key, size_t k) {
    return ln_mix(key + k * 0xd1342543de82ef95u);
}

/* Probability p < 1 as a bound on a uniform 64-bit number. */
static uint64_t bound(double p) {
    return p >= 1 ? UINT64_MAX : (uint64_t)ldexp(p, 64);
}

/* ---- models ---- */

static void mask_bernoulli(const struct directed *link, uint64_t step, size_t n, uint8_t *arrived) {
    uint64_t key = stream_key(link, STREAM_LOSS, step);
    uint64_t lost = bound(link->rate);
    for (size_t k = 0; k < n; k++) arrived[k] = stream_number(key, k) >= lost;
}

struct chain { /* P(bad | good) and P(bad | bad), as bounds */
    uint64_t enter, stay;
};

/* P(bad | good) of the chain with this rate and mean run. If it is above 1, no such chain
 * exists. */
static double enters(double rate, double mean_run) {
    return rate / (mean_run * (1 - rate));
}

static struct chain chain_of(const struct directed *link) {
    double mean = link->loss->mean_run;
    return (struct chain){bound(enters(link->rate, mean)), bound(1 - 1 / mean)};
}

/* The chain's state before packet 0 of `step`. Looks back to the last packet that decided. */
static bool chain_look_back(const struct directed *link, const struct chain *c, uint64_t step,
                            size_t n) {
    uint64_t low = c->enter < c->stay ? c->enter : c->stay;
    uint64_t high = c->enter < c->stay ? c->stay : c->enter;
    bool flips = c->enter > c->stay, flipped = false;
    /* In a bursty chain a packet decides with probability >= 1/MEAN. So this far back one has
     * decided, except with probability e^-64. (With MEAN = 1, p = 1/2 no packet ever decides.) */
    size_t limit = (size_t)(64 * link->loss->mean_run) + 1024;
    for (size_t seen = 0; seen < limit;) {
        step--; /* steps before 0 wrap around; their numbers are as random as others */
        uint64_t key = stream_key(link, STREAM_LOSS, step);
        for (size_t k = n; k-- > 0; seen++) {
            uint64_t u = stream_number(key, k);
            if (u < low) return !flipped;
            if (u >= high) return flipped;
            flipped ^= flips;
        }
    }
    uint64_t key = stream_key(link, STREAM_STATIONARY, step);
    return (stream_number(key, 0) < bound(link->rate)) ^ flipped;
}

static void mask_burst(const struct directed *link, uint64_t step, size_t n, uint64_t *memory,
                       uint8_t *arrived) {
    const struct chain c = chain_of(link);
    /* memory: (last step + 1) * 2 + state after that step. 0 means that nothing is known. */
    bool bad = memory && *memory >> 1 == step && step > 0 ? *memory & 1
                                                          : chain_look_back(link, &c, step, n);
    uint64_t key = stream_key(link, STREAM_LOSS, step);
    for (size_t k = 0; k < n; k++) {
        bad = stream_number(key, k) < (bad ? c.stay : c.enter);
        arrived[k] = !bad;
    }
    if (memory) *memory = (step + 1) << 1 | bad;
}

static void mask_outage(const struct directed *link, uint64_t step, size_t n, uint64_t *memory,
                        uint8_t *arrived) {
    uint8_t up;
    mask_burst(link, step, 1, memory, &up);
    memset(arrived, up, n);
}

static void mask_trace(const struct directed *link, uint64_t step, size_t n, uint8_t *arrived) {
    uint64_t key = stream_key(link, STREAM_TRACE, 0);
    size_t length = link->loss->trace_length;
    size_t at =
        (size_t)((stream_number(key, 0) % length + (step % length) * (n % length)) % length);
    for (size_t k = 0; k < n; k++) {
        arrived[k] = link->loss->trace[at];
        if (++at == length) at = 0;
    }
}

double ln_loss_mean(const struct ln_loss *loss, lossynet_phase phase, int workers, uint32_t names) {
    double sum = 0;
    if (loss->model == LOSS_TRACE || loss->model == LOSS_REPLAY || workers < 2) return 0;
    if (!loss->at.count) return loss->rate[phase];
    for (int s = 0; s < workers; s++)
        for (int r = 0; r < workers; r++)
            sum += r == s ? 0 : ln_at_value(&loss->at, phase, s, r, names, loss->rate[phase]);
    return sum / ((double)workers * (workers - 1));
}

void ln_loss_mask_of(const struct ln_loss *loss, uint32_t names, lossynet_phase phase,
                     uint64_t step, int sender, int receiver, size_t n, uint64_t *chain,
                     uint8_t *arrived) {
    if (n == 0) return;
    const bool outage = loss->model == LOSS_OUTAGE;
    const struct directed link = {
        loss, outage ? LOSSYNET_GRADIENT : phase,
        outage && loss->fate == FATE_RECEIVER ? receiver : sender,
        outage && loss->fate == FATE_SENDER ? sender : receiver,
        ln_at_value(&loss->at, phase, sender, receiver, names, loss->rate[phase])};
    if (loss->model == LOSS_REPLAY)
        ln_loss_replay_mask(loss->replay, phase, step, sender, receiver, n, arrived);
    else if (link.rate <= 0)
        memset(arrived, 1, n);
    else if (loss->model == LOSS_TRACE)
        mask_trace(&link, step, n, arrived);
    else if (link.rate >= 1)
        memset(arrived, 0, n);
    else if (loss->model == LOSS_BURST)
        mask_burst(&link, step, n, chain, arrived);
    else if (loss->model == LOSS_OUTAGE)
        mask_outage(&link, step, n, chain, arrived);
    else
        mask_bernoulli(&link, step, n, arrived);
}

void ln_loss_mask(const struct ln_loss *loss, lossynet_phase phase, uint64_t step, int sender,
                  int receiver, size_t n, uint64_t *chain, uint8_t *arrived) {
    ln_loss_mask_of(loss, 0, phase, step, sender, receiver, n, chain, arrived);
}

bool ln_loss_is_down(const struct ln_loss *loss, lossynet_phase phase, uint64_t step, int sender,
                     int receiver, int path) {
    if (loss->model == LOSS_TRACE || loss->model == LOSS_REPLAY) return false;
    if (loss->model != LOSS_OUTAGE)
        return ln_at_value(&loss->at, phase, sender, receiver, 0, loss->rate[phase]) >= 1;
    struct ln_loss of_path = *loss;
    if (path > 0) of_path.seed = ln_mix(loss->seed + (uint64_t)path);
    uint8_t up;
    ln_loss_mask(&of_path, phase, step, sender, receiver, 1, NULL, &up);
    return !up;
}

bool ln_loss_has_dead_links(const struct ln_loss *loss) {
    for (int i = 0; i < loss->at.count; i++) {
        const struct ln_at_entry *e = &loss->at.entry[i];
        if (!e->bit && (e->value[0] >= 1 || e->value[1] >= 1)) return true;
    }
    return false;
}

uint64_t ln_loss_fingerprint(const struct ln_loss *loss) {
    uint64_t hash = ln_mix(loss->seed);
    hash = ln_mix(hash ^ (uint64_t)loss->model);
    const double numbers[] = {loss->rate[0], loss->rate[1], loss->mean_run};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        uint64_t bits;
        memcpy(&bits, &numbers[i], sizeof bits);
        hash = ln_mix(hash ^ bits);
    }
    if (loss->fate != FATE_LINK || loss->paths > 1)
        hash = ln_mix(hash ^ (uint64_t)loss->fate << 32 ^ (uint64_t)loss->paths);
    for (size_t i = 0; i < loss->trace_length; i++) hash = ln_mix(hash ^ loss->trace[i]);
    if (loss->replay) hash = ln_loss_replay_fingerprint(loss->replay, hash);
    return ln_at_fingerprint(&loss->at, hash);
}

/* ---- settings ---- */

static lossynet_status trace_read(struct ln_loss *loss, const char *path) {
    FILE *file = ln_loss_file(path);
    if (!file)
        return ln_fail(LOSSYNET_FILE, "loss-model: loss trace %s: %s", path,
                       errno == ESPIPE ? "a pipe or device: expected a regular file"
                                       : strerror(errno));
    lossynet_status status = LOSSYNET_OK;
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
            status = ln_fail(
                LOSSYNET_FILE,
                "loss-model: loss trace %s, line %d: byte %d, expected 0 (arrives) or 1 (lost)",
                path, line, c);
            break;
        }
        uint8_t *trace = ln_memory_grow(loss->trace, loss->trace_length, &room, sizeof *trace);
        if (!trace) {
            status =
                ln_fail(LOSSYNET_NO_MEMORY, "loss-model: no memory for the loss trace %s", path);
            break;
        }
        loss->trace = trace;
        loss->trace[loss->trace_length++] = c == '0';
    }
    if (!status && ferror(file))
        status = ln_fail(LOSSYNET_FILE, "loss-model: loss trace %s: cannot be read: %s", path,
                         strerror(errno));
    else if (!status && loss->trace_length == 0)
        status =
            ln_fail(LOSSYNET_FILE,
                    "loss-model: loss trace %s: empty, expected 0 (arrives) and 1 (lost)", path);
    fclose(file);
    return status;
}

/* Checks that a chain can have this rate: it can lose at most MEAN / (MEAN + 1). setting, whose:
 * name the rate in the message. */
static lossynet_status chain_check(const struct ln_loss *loss, double rate, const char *setting,
                                   const char *whose) {
    const bool chained = loss->model == LOSS_BURST || loss->model == LOSS_OUTAGE;
    double mean = loss->mean_run;
    if (!chained || rate <= 0 || rate >= 1 || enters(rate, mean) <= 1 + 1e-12) return LOSSYNET_OK;
    return ln_refuse(
        "%s: loss model %s:%g loses at most %.4g of the packets, the %s loss rate is %g: expected "
        "longer runs or a lower rate",
        setting, loss->model == LOSS_BURST ? "burst" : "outage", mean, mean / (mean + 1), whose,
        rate);
}

enum { PATHS_MOST = 64 };

/* Parses what follows outage:MEAN: sender, receiver, or a number of paths. */
static bool fate_parse(struct ln_loss *loss, const char *text) {
    char *end;
    const long paths = strtol(text, &end, 10);
    if (strcmp(text, "sender") == 0) loss->fate = FATE_SENDER;
    if (strcmp(text, "receiver") == 0) loss->fate = FATE_RECEIVER;
    if (loss->fate != FATE_LINK) return true;
    loss->paths = (int)paths;
    return *text >= '0' && *text <= '9' && !*end && paths >= 2 && paths <= PATHS_MOST;
}

/* Parses MEAN of a model NAME:MEAN. */
static lossynet_status chain_parse(struct ln_loss *loss, const char *model) {
    const char *text = strchr(model, ':') + 1;
    char *end;
    double mean = ln_number(text, &end);
    const bool shared = loss->model == LOSS_OUTAGE && end != text && *end == ':';
    if (end == text || (*end && !shared) || !(mean >= 1 && mean <= 1e6))
        return ln_refuse(
            "loss-model: loss model %s: the mean run length must be a number from 1 to 1000000",
            model);
    loss->mean_run = mean;
    if (shared && !fate_parse(loss, end + 1))
        return ln_refuse("loss-model: loss model %s: \"%s\": expected sender, receiver, or a "
                         "number of paths from 2 to %d",
                         model, end + 1, PATHS_MOST);
    lossynet_status status = LOSSYNET_OK;
    for (int phase = 0; phase < 2 && !status; phase++)
        status = chain_check(loss, loss->rate[phase], "loss-model", phase_name[phase]);
    return status;
}

static lossynet_status at_parse(struct ln_loss *loss, const char *text, int workers) {
    static const struct ln_at_form form = {"loss-at", "RATE", "loss rate", 1, false};
    if (!text || strcmp(text, "none") == 0) return LOSSYNET_OK;
    if (loss->model == LOSS_TRACE || loss->model == LOSS_REPLAY)
        return ln_refuse(
            "loss-at: '%s': a trace has no rates; expected loss model bernoulli, burst or outage",
            text);
    lossynet_status status = ln_at_parse(&loss->at, text, &form, workers);
    for (int i = 0; i < loss->at.count && !status; i++) {
        const struct ln_at_entry *e = &loss->at.entry[i];
        char whose[128];
        const char *kind = e->bit ? "tensors" : e->both_ways ? "worker" : "link";
        const int length = (int)strcspn(text, "=");
        snprintf(whose, sizeof whose, "%s %.*s's", kind, length, text);
        for (int phase = 0; phase < 2 && !status; phase++)
            status = chain_check(loss, e->value[phase], "loss-at", whose);
        text += strcspn(text, ",");
        text += *text == ',';
    }
    return status;
}

static lossynet_status model_parse(struct ln_loss *loss,
                                   const struct lossynet_loss_settings *settings, int workers) {
    const char *model = settings->model ? settings->model : "bernoulli";
    if (strcmp(model, "bernoulli") == 0) return LOSSYNET_OK;
    if (strncmp(model, "burst:", 6) == 0) {
        loss->model = LOSS_BURST;
        return chain_parse(loss, model);
    }
    if (strncmp(model, "outage:", 7) == 0) {
        loss->model = LOSS_OUTAGE;
        return chain_parse(loss, model);
    }
    if (strncmp(model, "trace:", 6) == 0) {
        loss->model = LOSS_TRACE;
        return trace_read(loss, model + 6);
    }
    if (strncmp(model, "replay:", 7) == 0) {
        loss->model = LOSS_REPLAY;
        return ln_loss_replay_open(model + 7, workers, settings->steps, &loss->replay);
    }
    return ln_refuse(
        "loss-model: loss model \"%s\": expected bernoulli, burst:MEAN_LENGTH, outage:MEAN_STEPS "
        "(:sender, :receiver or :PATHS), trace:FILE or replay:FILE",
        model);
}

static lossynet_status parse(struct ln_loss *loss, const struct lossynet_loss_settings *settings,
                             int workers) {
    for (int phase = 0; phase < 2; phase++) {
        loss->rate[phase] = settings->rate[phase];
        if (settings->rate[phase] >= 0 && settings->rate[phase] <= 1) continue;
        return ln_refuse("loss-model: %s loss rate %g: expected a number from 0 to 1",
                         phase_name[phase], settings->rate[phase]);
    }
    const lossynet_status status = model_parse(loss, settings, workers);
    return status ? status : at_parse(loss, settings->at, workers);
}

lossynet_status ln_loss_open(struct ln_loss *loss, const struct lossynet_loss_settings *settings,
                             int workers) {
    *loss = (struct ln_loss){.seed = settings->seed, .paths = 1};
    const lossynet_status status = parse(loss, settings, workers);
    if (status) ln_loss_close(loss);
    return status;
}

void ln_loss_close(struct ln_loss *loss) {
    ln_loss_replay_close(loss->replay);
    free(loss->trace);
    ln_at_close(&loss->at);
    *loss = (struct ln_loss){0};
}

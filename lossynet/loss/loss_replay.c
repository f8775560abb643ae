/* loss_replay.c — repeats a run with late ranks from the records that loss_trace.c wrote.
 *
 * FILE is the record of one rank, or FILE.0, FILE.1 ... are those of all ranks. A packet arrives if
 * the record of its receiver says so. A worker has no record of a step that it left out, so nothing
 * arrives there. A line of its own says what a worker did in a step (ln_loss_trace_part). A record that is
 * cut off, lacks a rank or a step, has something twice, or is of a run with other workers, other packets,
 * fewer steps or other options is refused: what it lacks would count as lost.
 */
#include "lossynet/loss/loss.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PART = 2, TOLD, KINDS }; /* kinds of records; before them a link's, which are its phases */

struct record {
    uint64_t step;
    int kind, worker, other; /* of a link its receiver and its sender; else `other` is 0 */
    size_t start, count;     /* in `arrived`: packets of a link, or what a worker was told */
    struct lossynet_part part;
};

struct ln_loss_replay {
    const char *path;      /* of the settings */
    bool ends;             /* the file's last line says that nothing is missing */
    uint8_t *arrived;      /* [packets] */
    struct record *record; /* [records], after reading in order of kind and step */
    size_t packets, records, room_packets, room_records;
    size_t link; /* the last record of a link */
    size_t of[KINDS];
};

#define GROW(r, array, number, room)                                                               \
    do {                                                                                           \
        void *memory = ln_memory_grow((r)->array, (r)->number, &(r)->room, sizeof *(r)->array);    \
        if (!memory) return LOSSYNET_NO_MEMORY;                                                    \
        (r)->array = memory;                                                                       \
    } while (0)

/* ---- reading ---- */

/* A number that --record-loss writes: finite and not below 0, or NaN where it is not known. */
static bool is_noted(double number) {
    return isnan(number) || (isfinite(number) && number >= 0);
}

/* Reads a line of digits into the packets. */
static lossynet_status take_digits(struct ln_loss_replay *r, const char *line, char arrives,
                                   size_t *count) {
    for (const char *c = line; *c; c++, ++*count) {
        if (*c != '0' && *c != '1') return LOSSYNET_FILE;
        GROW(r, arrived, packets, room_packets);
        r->arrived[r->packets++] = *c == arrives;
    }
    return LOSSYNET_OK;
}

/* Reads a line that begins with "# step". LOSSYNET_FILE: it has none of our three forms. */
static lossynet_status take_header(struct ln_loss_replay *r, const char *line) {
    struct record new = {.start = r->packets};
    char what[16];
    int digits = 0;
    if (sscanf(line, "# step %" SCNu64 ", %15[a-z], worker %d to %d", &new.step, what, &new.other,
               &new.worker) == 4) {
        new.kind = strcmp(what, "gradient") ? LOSSYNET_PARAMETER : LOSSYNET_GRADIENT;
        if (new.kind == LOSSYNET_PARAMETER && strcmp(what, "parameter")) return LOSSYNET_FILE;
        r->link = r->records;
    } else if (sscanf(line, "# step %" SCNu64 ", worker %d %15[a-z], norm %la, lead %la", &new.step,
                      &new.worker, what, &new.part.norm, &new.part.lead) == 5) {
        new.kind = PART;
        new.part.takes_part = true;
        new.part.computes = strcmp(what, "computes") == 0;
        if (!new.part.computes && strcmp(what, "idles")) return LOSSYNET_FILE;
        if (!is_noted(new.part.norm) || !is_noted(new.part.lead)) return LOSSYNET_FILE;
    } else {
        new = (struct record){.kind = TOLD, .start = r->packets};
        sscanf(line, "# step %" SCNu64 ", worker %d told %n", &new.step, &new.worker, &digits);
        if (digits == 0) return LOSSYNET_FILE;
        lossynet_status status = take_digits(r, line + digits, '1', &new.count);
        if (status) return status;
    }
    if (new.worker < 0 || new.other < 0) return LOSSYNET_FILE;
    GROW(r, record, records, room_records);
    r->record[r->records++] = new;
    r->of[new.kind]++;
    return LOSSYNET_OK;
}

/* Reads a line without its end. A line that begins with # and not with "# step" is a comment. */
static lossynet_status take_line(struct ln_loss_replay *r, const char *line) {
    if (!strncmp(line, "# step", 6)) return take_header(r, line);
    if (line[0] == '#' || !line[0]) return LOSSYNET_OK;
    const bool follows = r->of[LOSSYNET_GRADIENT] || r->of[LOSSYNET_PARAMETER];
    return follows ? take_digits(r, line, '0', &r->record[r->link].count) : LOSSYNET_FILE;
}

static lossynet_status read_file(struct ln_loss_replay *r, FILE *file, const char *name) {
    char *line = NULL;
    size_t room = 0;
    lossynet_status status = LOSSYNET_OK;
    r->ends = false;
    for (size_t number = 1; !status && getline(&line, &room, file) >= 0; number++) {
        const bool whole = strchr(line, '\n');
        line[strcspn(line, "\r\n")] = 0;
        if (line[0]) r->ends = whole && !strcmp(line, LOSSYNET_TRACE_END);
        status = take_line(r, line);
        if (status == LOSSYNET_FILE && !whole) status = LOSSYNET_OK; /* it is cut off */
        if (status == LOSSYNET_FILE)
            ln_log("loss-model: replay %s, line %zu: expected what --record-loss writes", name,
                   number);
    }
    free(line);
    if (status || r->ends) return status;
    return ln_fail(LOSSYNET_FILE,
                   "loss-model: replay %s: it is cut off: expected \"" LOSSYNET_TRACE_END
                   "\" as its last line",
                   name);
}

static int in_order(const void *a, const void *b) {
    const struct record *x = a, *y = b;
    if (x->kind != y->kind) return x->kind - y->kind;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    return x->worker != y->worker ? x->worker - y->worker : x->other - y->other;
}

/* The sorted records of workers' parts. */
static const struct record *parts_of(const struct ln_loss_replay *r) {
    return r->record + r->of[LOSSYNET_GRADIENT] + r->of[LOSSYNET_PARAMETER];
}

static const struct record *find(const struct ln_loss_replay *r, int kind, uint64_t step,
                                 int worker, int other) {
    const struct record key = {.kind = kind, .step = step, .worker = worker, .other = other};
    return bsearch(&key, r->record, r->records, sizeof key, in_order);
}

/* ---- whether it is a record of this run ---- */

/* Does a sorted record have something twice? */
static lossynet_status check_once(const struct ln_loss_replay *r) {
    for (size_t i = 1; i < r->records; i++)
        if (!in_order(&r->record[i - 1], &r->record[i]))
            return ln_fail(LOSSYNET_FILE,
                           "loss-model: replay %s: step %" PRIu64
                           " of worker %d is there twice: expected the record of each rank once",
                           r->path, r->record[i].step, r->record[i].worker);
    return LOSSYNET_OK;
}

/* Does a sorted record lack a worker or a step? The first step may be that of a resumed run
 * (ln_loss_replay_has). */
static lossynet_status check_all(const struct ln_loss_replay *r, int workers) {
    const struct record *part = parts_of(r);
    for (int w = 0; w < workers; w++) {
        size_t i = 0;
        while (i < r->of[PART] && part[i].worker != w) i++;
        if (i == r->of[PART])
            return ln_fail(LOSSYNET_FILE,
                           "loss-model: replay %s: it has nothing of worker %d: expected the "
                           "records of all ranks",
                           r->path, w);
    }
    for (size_t i = 1; i < r->of[PART]; i++)
        if (part[i].step > part[i - 1].step + 1)
            return ln_fail(LOSSYNET_FILE,
                           "loss-model: replay %s: it lacks step %" PRIu64
                           ": expected all that was recorded",
                           r->path, part[i - 1].step + 1);
    return LOSSYNET_OK;
}

static lossynet_status check_whole(const struct ln_loss_replay *r, int workers, uint64_t steps) {
    const uint64_t last = parts_of(r)[r->of[PART] - 1].step;
    const uint64_t each = (uint64_t)r->of[PART] * (uint64_t)(workers - 1);
    int most = 0;
    for (size_t i = 0; i < r->records; i++) {
        const struct record *k = &r->record[i];
        const int larger = k->worker > k->other ? k->worker : k->other;
        if (larger > most) most = larger;
    }
    if (most != workers - 1)
        return ln_fail(LOSSYNET_FILE,
                       "loss-model: replay %s: it is of %d workers: expected the %d of this run",
                       r->path, most + 1, workers);
    if (check_once(r) || check_all(r, workers)) return LOSSYNET_FILE;
    if (r->of[LOSSYNET_GRADIENT] != each ||
        (r->of[LOSSYNET_PARAMETER] && r->of[LOSSYNET_PARAMETER] != each))
        return ln_fail(LOSSYNET_FILE,
                       "loss-model: replay %s: links are missing: expected all that was recorded",
                       r->path);
    if (last + 1 >= steps) return LOSSYNET_OK;
    return ln_fail(LOSSYNET_FILE,
                   "loss-model: replay %s: it has %" PRIu64 " steps: expected the %" PRIu64
                   " of this run",
                   r->path, last + 1, steps);
}

lossynet_status ln_loss_replay_fits(const struct ln_loss_replay *r, const size_t *packets,
                                    int workers, bool feedback) {
    for (const struct record *link = r->record; link < parts_of(r); link++) {
        const size_t n = packets[link->kind == LOSSYNET_GRADIENT ? link->worker : link->other];
        if (link->count != n)
            return ln_refuse("replay %s: step %" PRIu64
                             ", worker %d to %d: %zu packets: expected the %zu of this run",
                             r->path, link->step, link->other, link->worker, link->count, n);
    }
    const struct record *first = parts_of(r) + r->of[PART];
    bool told = r->of[TOLD] == r->of[PART];
    for (size_t i = 0; i < r->of[TOLD]; i++) told &= first[i].count == (size_t)workers;
    if (told || !feedback) return LOSSYNET_OK;
    return ln_refuse(
        "replay %s: it does not say what senders were told: expected a record of a run "
        "with error feedback (--carry), or a run without",
        r->path);
}

FILE *ln_loss_file(const char *path) {
    struct stat status;
    if (stat(path, &status) || S_ISREG(status.st_mode)) return fopen(path, "r");
    errno = S_ISDIR(status.st_mode) ? EISDIR : ESPIPE;
    return NULL;
}

lossynet_status ln_loss_replay_open(const char *path, int workers, uint64_t steps,
                                    struct ln_loss_replay **out) {
    struct ln_loss_replay *r = ln_memory_take(1, sizeof *r);
    lossynet_status status = r ? LOSSYNET_OK : LOSSYNET_NO_MEMORY;
    int files = 0;
    if (r) r->path = path;
    for (int rank = -1; !status; rank++) {
        char name[4096];
        snprintf(name, sizeof name, rank < 0 ? "%s" : "%s.%d", path, rank);
        FILE *file = ln_loss_file(name);
        if (!file && rank < 0) continue;
        if (!file) break;
        status = read_file(r, file, name);
        fclose(file);
        files++;
        if (rank < 0) break;
    }
    if (status == LOSSYNET_NO_MEMORY)
        ln_log("loss-model: no memory for the replay %s", path);
    else if (!status && files == 0)
        status = ln_fail(LOSSYNET_FILE,
                         "loss-model: replay %s: expected this file, or FILE.0, FILE.1 ... of all "
                         "ranks",
                         path);
    else if (!status && r->of[PART] == 0)
        status = ln_fail(
            LOSSYNET_FILE,
            "loss-model: replay %s: expected what a run that records losses and does not wait for "
            "late ranks (--deadline) has written; trace:FILE reads others",
            path);
    if (!status) qsort(r->record, r->records, sizeof *r->record, in_order);
    if (!status) status = check_whole(r, workers, steps);
    if (status) ln_loss_replay_close(r);
    *out = status ? NULL : r;
    return status;
}

void ln_loss_replay_close(struct ln_loss_replay *r) {
    if (!r) return;
    free(r->record);
    free(r->arrived);
    free(r);
}

/* ---- queries ---- */

void ln_loss_replay_mask(const struct ln_loss_replay *r, lossynet_phase phase, uint64_t step,
                         int sender, int receiver, size_t n, uint8_t *arrived) {
    const struct record *link = find(r, (int)phase, step, receiver, sender);
    memset(arrived, 0, n);
    if (link && link->count == n) memcpy(arrived, r->arrived + link->start, n);
}

uint64_t ln_loss_replay_fingerprint(const struct ln_loss_replay *r, uint64_t hash) {
    for (size_t i = 0; i < r->packets; i++) hash = ln_mix(hash ^ r->arrived[i]);
    return hash;
}

bool ln_loss_replay_has(const struct ln_loss_replay *r, uint64_t step) {
    const struct record *part = parts_of(r);
    return part[0].step <= step && step <= part[r->of[PART] - 1].step;
}

bool ln_loss_replay_told(const struct ln_loss_replay *r, uint64_t step, int worker, int owner) {
    const struct record *told = find(r, TOLD, step, worker, 0);
    return told && (size_t)owner < told->count && r->arrived[told->start + (size_t)owner];
}

struct lossynet_part ln_loss_replay_part(const struct ln_loss_replay *r, uint64_t step,
                                         int worker) {
    const struct record *part = find(r, PART, step, worker, 0);
    return part ? part->part : (struct lossynet_part){.takes_part = false};
}

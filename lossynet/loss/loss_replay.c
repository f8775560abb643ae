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

/* Makes room for one more element, and returns the array. NULL: no memory. */
static void *grow(void *old, size_t count, size_t *room, size_t size) {
    if (count < *room) return old;
    const size_t larger = *room ? 2 * *room : 1024;
    void *memory = ln_memory_take(larger, size);
    if (!memory) return NULL;
    if (old) memcpy(memory, old, count * size);
    free(old);
    *room = larger;
    return memory;
}

#define GROW(r, array, number, room)                                                               \
    do {                                                                                           \
        void *memory = grow((r)->array, (r)->number, &(r)->room, sizeof *(r)->array);              \
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

static lossynet_status read_file(struct ln_loss_replay *r, FILE *file, const char *name, char *why,
                                 size_t why_size) {
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
            snprintf(why, why_size, "replay %s, line %zu: expected what --record-loss writes", name,
                     number);
    }
    free(line);
    if (!status && !r->ends)
        snprintf(why, why_size,
                 "replay %s: it is cut off: expected \"" LOSSYNET_TRACE_END "\" as its last line",
                 name);
    return status || r->ends ? status : LOSSYNET_FILE;
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

/* Says in `why` what a sorted record has twice. */
static bool has_once(const struct ln_loss_replay *r, char *why, size_t why_size) {
    for (size_t i = 1; i < r->records; i++) {
        if (in_order(&r->record[i - 1], &r->record[i])) continue;
        snprintf(why, why_size,
                 "replay %s: step %" PRIu64 " of worker %d is there twice: expected the record of "
                 "each rank once",
                 r->path, r->record[i].step, r->record[i].worker);
        return false;
    }
    return true;
}

/* Says in `why` which worker or which step a sorted record lacks. The first step may be that of a resumed
 * run (ln_loss_replay_has). */
static bool has_all(const struct ln_loss_replay *r, int workers, char *why, size_t why_size) {
    const struct record *part = parts_of(r);
    for (int w = 0; w < workers; w++) {
        size_t i = 0;
        while (i < r->of[PART] && part[i].worker != w) i++;
        if (i < r->of[PART]) continue;
        snprintf(why, why_size,
                 "replay %s: it has nothing of worker %d: expected the records of all ranks",
                 r->path, w);
        return false;
    }
    for (size_t i = 1; i < r->of[PART]; i++) {
        const uint64_t next = part[i - 1].step + 1;
        if (part[i].step <= next) continue;
        snprintf(why, why_size,
                 "replay %s: it lacks step %" PRIu64 ": expected all that was recorded", r->path,
                 next);
        return false;
    }
    return true;
}

/* Says in `why` what a record lacks. */
static bool is_whole(const struct ln_loss_replay *r, int workers, uint64_t steps, char *why,
                     size_t why_size) {
    const uint64_t last = parts_of(r)[r->of[PART] - 1].step;
    const uint64_t each = (uint64_t)r->of[PART] * (uint64_t)(workers - 1);
    int most = 0;
    for (size_t i = 0; i < r->records; i++) {
        const struct record *k = &r->record[i];
        const int larger = k->worker > k->other ? k->worker : k->other;
        if (larger > most) most = larger;
    }
    if (most != workers - 1)
        snprintf(why, why_size, "replay %s: it is of %d workers: expected the %d of this run",
                 r->path, most + 1, workers);
    else if (!has_once(r, why, why_size) || !has_all(r, workers, why, why_size))
        return false;
    else if (r->of[LOSSYNET_GRADIENT] != each ||
             (r->of[LOSSYNET_PARAMETER] && r->of[LOSSYNET_PARAMETER] != each))
        snprintf(why, why_size, "replay %s: links are missing: expected all that was recorded",
                 r->path);
    else if (last + 1 < steps)
        snprintf(why, why_size,
                 "replay %s: it has %" PRIu64 " steps: expected the %" PRIu64 " of this run",
                 r->path, last + 1, steps);
    else
        return true;
    return false;
}

/* Says in `why` if a record lacks what error feedback needs. */
static bool tells_senders(const struct ln_loss_replay *r, int workers, char *why, size_t why_size) {
    const struct record *first = parts_of(r) + r->of[PART];
    bool told = r->of[TOLD] == r->of[PART];
    for (size_t i = 0; i < r->of[TOLD]; i++) told &= first[i].count == (size_t)workers;
    if (!told)
        snprintf(why, why_size,
                 "replay %s: it does not say what senders were told: expected a record of a run "
                 "with error feedback (--carry), or a run without",
                 r->path);
    return told;
}

bool ln_loss_replay_fits(const struct ln_loss_replay *r, const size_t *packets, int workers,
                         bool feedback, char *why, size_t why_size) {
    for (const struct record *link = r->record; link < parts_of(r); link++) {
        const size_t n = packets[link->kind == LOSSYNET_GRADIENT ? link->worker : link->other];
        if (link->count == n) continue;
        snprintf(why, why_size,
                 "replay %s: step %" PRIu64 ", worker %d to %d: %zu packets: expected the %zu of "
                 "this run",
                 r->path, link->step, link->other, link->worker, link->count, n);
        return false;
    }
    return !feedback || tells_senders(r, workers, why, why_size);
}

FILE *ln_loss_file(const char *path) {
    struct stat status;
    if (stat(path, &status) || S_ISREG(status.st_mode)) return fopen(path, "r");
    errno = S_ISDIR(status.st_mode) ? EISDIR : ESPIPE;
    return NULL;
}

lossynet_status ln_loss_replay_open(const char *path, int workers, uint64_t steps,
                                    struct ln_loss_replay **out, char *why, size_t why_size) {
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
        status = read_file(r, file, name, why, why_size);
        fclose(file);
        files++;
        if (rank < 0) break;
    }
    if (!status && (files == 0 || r->of[PART] == 0)) {
        snprintf(why, why_size,
                 files ? "replay %s: expected what a run that records losses and does "
                         "not wait for late ranks (--deadline) has written; trace:FILE reads others"
                       : "replay %s: expected this file, or FILE.0, FILE.1 ... of all ranks",
                 path);
        status = LOSSYNET_FILE;
    } else if (status == LOSSYNET_NO_MEMORY) {
        snprintf(why, why_size, "no memory for the replay %s", path);
    }
    if (!status) qsort(r->record, r->records, sizeof *r->record, in_order);
    if (!status && !is_whole(r, workers, steps, why, why_size)) status = LOSSYNET_FILE;
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

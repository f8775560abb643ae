/* loss_replay.c — repeats a run with late ranks from the records that loss_trace.c wrote.
 *
 * FILE is the record of one rank, or FILE.0, FILE.1 ... are those of all ranks. A packet arrives if
 * the record of its receiver says so. A worker has no record of a step that it left out, so nothing
 * arrives there. A line of its own says what a worker did in a step (ln_loss_trace_part). A record that is
 * cut off, lacks a rank or a step, has something twice, or is of a run with other workers, other packets,
 * fewer steps or other options is refused: what it lacks would count as lost.
 */
#include "lossynet/loss/loss.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct link_record {
    uint64_t step;
    int phase, sender, receiver;
    size_t start, count; /* in `arrived` */
};

struct part_record {
    uint64_t step;
    int worker;
    struct lossynet_part part;
};

struct told_record {
    uint64_t step;
    int worker;
    size_t start, count; /* in `arrived` */
};

struct ln_loss_replay {
    const char *path; /* of the settings */
    bool ends;        /* the file's last line says that nothing is missing */
    uint8_t *arrived; /* [packets] */
    struct link_record *link;
    struct part_record *part;
    struct told_record *told;
    size_t packets, links, parts, tolds;
    size_t room_packets, room_links, room_parts, room_tolds;
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
    struct link_record link = {.start = r->packets};
    struct part_record part;
    struct told_record told = {.start = r->packets};
    char phase[16], what[16];
    int digits = 0;
    if (sscanf(line, "# step %" SCNu64 ", %15[a-z], worker %d to %d", &link.step, phase,
               &link.sender, &link.receiver) == 4) {
        link.phase = strcmp(phase, "gradient") ? LOSSYNET_PARAMETER : LOSSYNET_GRADIENT;
        if (link.phase == LOSSYNET_PARAMETER && strcmp(phase, "parameter")) return LOSSYNET_FILE;
        if (link.sender < 0 || link.receiver < 0) return LOSSYNET_FILE;
        GROW(r, link, links, room_links);
        r->link[r->links++] = link;
        return LOSSYNET_OK;
    }
    if (sscanf(line, "# step %" SCNu64 ", worker %d %15[a-z], norm %la, lead %la", &part.step,
               &part.worker, what, &part.part.norm, &part.part.lead) == 5) {
        part.part.takes_part = true;
        part.part.computes = strcmp(what, "computes") == 0;
        if (!part.part.computes && strcmp(what, "idles")) return LOSSYNET_FILE;
        if (part.worker < 0 || !is_noted(part.part.norm) || !is_noted(part.part.lead))
            return LOSSYNET_FILE;
        GROW(r, part, parts, room_parts);
        r->part[r->parts++] = part;
        return LOSSYNET_OK;
    }
    if (sscanf(line, "# step %" SCNu64 ", worker %d told %n", &told.step, &told.worker, &digits) !=
            2 ||
        digits == 0)
        return LOSSYNET_FILE;
    lossynet_status status = take_digits(r, line + digits, '1', &told.count);
    if (status) return status;
    GROW(r, told, tolds, room_tolds);
    r->told[r->tolds++] = told;
    return LOSSYNET_OK;
}

/* Reads a line without its end. A line that begins with # and not with "# step" is a comment. */
static lossynet_status take_line(struct ln_loss_replay *r, const char *line) {
    if (!strncmp(line, "# step", 6)) return take_header(r, line);
    if (line[0] == '#' || !line[0]) return LOSSYNET_OK;
    return r->links ? take_digits(r, line, '0', &r->link[r->links - 1].count) : LOSSYNET_FILE;
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

static int by_link(const void *a, const void *b) {
    const struct link_record *x = a, *y = b;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    if (x->phase != y->phase) return x->phase - y->phase;
    return x->receiver != y->receiver ? x->receiver - y->receiver : x->sender - y->sender;
}

static int by_part(const void *a, const void *b) {
    const struct part_record *x = a, *y = b;
    return x->step != y->step ? (x->step < y->step ? -1 : 1) : x->worker - y->worker;
}

static int by_told(const void *a, const void *b) {
    const struct told_record *x = a, *y = b;
    return x->step != y->step ? (x->step < y->step ? -1 : 1) : x->worker - y->worker;
}

/* ---- whether it is a record of this run ---- */

/* Says in `why` what a sorted record has twice. */
static bool has_once(const struct ln_loss_replay *r, char *why, size_t why_size) {
    uint64_t step = 0;
    int worker = -1;
    for (size_t i = 1; i < r->links && worker < 0; i++)
        if (!by_link(&r->link[i - 1], &r->link[i])) {
            step = r->link[i].step;
            worker = r->link[i].receiver;
        }
    for (size_t i = 1; i < r->parts && worker < 0; i++)
        if (!by_part(&r->part[i - 1], &r->part[i])) {
            step = r->part[i].step;
            worker = r->part[i].worker;
        }
    for (size_t i = 1; i < r->tolds && worker < 0; i++)
        if (!by_told(&r->told[i - 1], &r->told[i])) {
            step = r->told[i].step;
            worker = r->told[i].worker;
        }
    if (worker >= 0)
        snprintf(why, why_size,
                 "replay %s: step %" PRIu64 " of worker %d is there twice: expected the record of "
                 "each rank once",
                 r->path, step, worker);
    return worker < 0;
}

/* Says in `why` which worker or which step a sorted record lacks. The first step may be that of a resumed
 * run (ln_loss_replay_has). */
static bool has_all(const struct ln_loss_replay *r, int workers, char *why, size_t why_size) {
    for (int w = 0; w < workers; w++) {
        size_t i = 0;
        while (i < r->parts && r->part[i].worker != w) i++;
        if (i < r->parts) continue;
        snprintf(why, why_size,
                 "replay %s: it has nothing of worker %d: expected the records of all ranks",
                 r->path, w);
        return false;
    }
    for (size_t i = 1; i < r->parts; i++) {
        const uint64_t next = r->part[i - 1].step + 1;
        if (r->part[i].step <= next) continue;
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
    const uint64_t last = r->part[r->parts - 1].step;
    const uint64_t each = (uint64_t)r->parts * (uint64_t)(workers - 1);
    uint64_t links[2] = {0, 0};
    int most = 0;
    for (size_t i = 0; i < r->links; i++) {
        const struct link_record *link = &r->link[i];
        const int larger = link->sender > link->receiver ? link->sender : link->receiver;
        links[link->phase]++;
        if (larger > most) most = larger;
    }
    for (size_t i = 0; i < r->parts; i++)
        if (r->part[i].worker > most) most = r->part[i].worker;
    if (most != workers - 1)
        snprintf(why, why_size, "replay %s: it is of %d workers: expected the %d of this run",
                 r->path, most + 1, workers);
    else if (!has_once(r, why, why_size) || !has_all(r, workers, why, why_size))
        return false;
    else if (links[LOSSYNET_GRADIENT] != each ||
             (links[LOSSYNET_PARAMETER] && links[LOSSYNET_PARAMETER] != each))
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
    bool told = r->tolds == r->parts;
    for (size_t i = 0; i < r->tolds; i++) told &= r->told[i].count == (size_t)workers;
    if (!told)
        snprintf(why, why_size,
                 "replay %s: it does not say what senders were told: expected a record of a run "
                 "with error feedback (--carry), or a run without",
                 r->path);
    return told;
}

bool ln_loss_replay_fits(const struct ln_loss_replay *r, const size_t *packets, int workers,
                         bool feedback, char *why, size_t why_size) {
    for (size_t i = 0; i < r->links; i++) {
        const struct link_record *link = &r->link[i];
        const size_t n = packets[link->phase == LOSSYNET_GRADIENT ? link->receiver : link->sender];
        if (link->count == n) continue;
        snprintf(why, why_size,
                 "replay %s: step %" PRIu64 ", worker %d to %d: %zu packets: expected the %zu of "
                 "this run",
                 r->path, link->step, link->sender, link->receiver, link->count, n);
        return false;
    }
    return !feedback || tells_senders(r, workers, why, why_size);
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
        FILE *file = fopen(name, "r");
        if (!file && rank < 0) continue;
        if (!file) break;
        status = read_file(r, file, name, why, why_size);
        fclose(file);
        files++;
        if (rank < 0) break;
    }
    if (!status && (files == 0 || r->parts == 0)) {
        snprintf(why, why_size,
                 files ? "replay %s: expected what a run that records losses and does "
                         "not wait for late ranks (--deadline) has written; trace:FILE reads others"
                       : "replay %s: expected this file, or FILE.0, FILE.1 ... of all ranks",
                 path);
        status = LOSSYNET_FILE;
    } else if (status == LOSSYNET_NO_MEMORY) {
        snprintf(why, why_size, "no memory for the replay %s", path);
    }
    if (!status) qsort(r->link, r->links, sizeof *r->link, by_link);
    if (!status && r->tolds) qsort(r->told, r->tolds, sizeof *r->told, by_told);
    if (!status) qsort(r->part, r->parts, sizeof *r->part, by_part);
    if (!status && !is_whole(r, workers, steps, why, why_size)) status = LOSSYNET_FILE;
    if (status) ln_loss_replay_close(r);
    *out = status ? NULL : r;
    return status;
}

void ln_loss_replay_close(struct ln_loss_replay *r) {
    if (!r) return;
    free(r->told);
    free(r->part);
    free(r->link);
    free(r->arrived);
    free(r);
}

/* ---- queries ---- */

void ln_loss_replay_mask(const struct ln_loss_replay *r, lossynet_phase phase, uint64_t step,
                         int sender, int receiver, size_t n, uint8_t *arrived) {
    const struct link_record key = {
        .step = step, .phase = (int)phase, .sender = sender, .receiver = receiver};
    const struct link_record *link =
        r->links ? bsearch(&key, r->link, r->links, sizeof key, by_link) : NULL;
    memset(arrived, 0, n);
    if (link && link->count == n) memcpy(arrived, r->arrived + link->start, n);
}

bool ln_loss_replay_has(const struct ln_loss_replay *r, uint64_t step) {
    return r->part[0].step <= step && step <= r->part[r->parts - 1].step;
}

bool ln_loss_replay_told(const struct ln_loss_replay *r, uint64_t step, int worker, int owner) {
    const struct told_record key = {.step = step, .worker = worker};
    const struct told_record *told =
        r->tolds ? bsearch(&key, r->told, r->tolds, sizeof key, by_told) : NULL;
    return told && (size_t)owner < told->count && r->arrived[told->start + (size_t)owner];
}

struct lossynet_part ln_loss_replay_part(const struct ln_loss_replay *r, uint64_t step,
                                         int worker) {
    const struct part_record key = {.step = step, .worker = worker};
    const struct part_record *part = bsearch(&key, r->part, r->parts, sizeof key, by_part);
    return part ? part->part : (struct lossynet_part){.takes_part = false};
}

/* loss_replay.c — repeats a run with late ranks from the records that loss_trace.c wrote.
 *
 * FILE is the record of one rank, or FILE.0, FILE.1 ... are those of all ranks. A packet arrives if
 * the record of its receiver says so. A worker has no record of a step that it left out, so nothing
 * arrives there. A line of its own says what a worker did in a step (ln_loss_trace_part). A record that is
 * cut off, or of a run with other workers, other packets or fewer steps, is refused: what it lacks would
 * count as lost.
 */
#include "lossynet/loss/loss.h"

#include <inttypes.h>
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

/* Reads a line that begins with #. If it has none of our three forms, it is a comment. */
static lossynet_status take_header(struct ln_loss_replay *r, const char *line) {
    struct link_record link = {.start = r->packets};
    struct part_record part;
    struct told_record told = {.start = r->packets};
    char phase[16], what[16];
    int digits = 0;
    if (sscanf(line, "# step %" SCNu64 ", %15[a-z], worker %d to %d", &link.step, phase,
               &link.sender, &link.receiver) == 4) {
        link.phase = strcmp(phase, "gradient") ? LOSSYNET_PARAMETER : LOSSYNET_GRADIENT;
        GROW(r, link, links, room_links);
        r->link[r->links++] = link;
    } else if (sscanf(line, "# step %" SCNu64 ", worker %d %15[a-z], norm %la, lead %la",
                      &part.step, &part.worker, what, &part.part.norm, &part.part.lead) == 5) {
        part.part.takes_part = true;
        part.part.computes = strcmp(what, "computes") == 0;
        GROW(r, part, parts, room_parts);
        r->part[r->parts++] = part;
    } else if (sscanf(line, "# step %" SCNu64 ", worker %d told %n", &told.step, &told.worker,
                      &digits) == 2 &&
               digits > 0) {
        for (const char *c = line + digits; *c == '0' || *c == '1'; c++, told.count++) {
            GROW(r, arrived, packets, room_packets);
            r->arrived[r->packets++] = *c == '1';
        }
        GROW(r, told, tolds, room_tolds);
        r->told[r->tolds++] = told;
    }
    return LOSSYNET_OK;
}

static lossynet_status read_file(struct ln_loss_replay *r, FILE *file) {
    char *line = NULL;
    size_t room = 0;
    lossynet_status status = LOSSYNET_OK;
    r->ends = false;
    while (!status && getline(&line, &room, file) >= 0) {
        r->ends = !strcmp(line, LOSSYNET_TRACE_END);
        if (line[0] == '#') {
            status = take_header(r, line);
            continue;
        }
        for (const char *c = line; *c == '0' || *c == '1'; c++) {
            GROW(r, arrived, packets, room_packets);
            r->arrived[r->packets++] = *c == '0';
            if (r->links) r->link[r->links - 1].count++;
        }
    }
    free(line);
    return status;
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
        if (link->sender < 0 || link->receiver < 0 || larger > most) most = larger;
    }
    for (size_t i = 0; i < r->parts; i++)
        if (r->part[i].worker > most) most = r->part[i].worker;
    if (most != workers - 1)
        snprintf(why, why_size, "replay %s: it is of %d workers: expected the %d of this run",
                 r->path, most + 1, workers);
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

bool ln_loss_replay_fits(const struct ln_loss_replay *r, const size_t *packets, char *why,
                         size_t why_size) {
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
    return true;
}

lossynet_status ln_loss_replay_open(const char *path, int workers, uint64_t steps,
                                    struct ln_loss_replay **out, char *why, size_t why_size) {
    struct ln_loss_replay *r = ln_memory_take(1, sizeof *r);
    lossynet_status status = r ? LOSSYNET_OK : LOSSYNET_NO_MEMORY;
    int files = 0;
    bool ends = true;
    if (r) r->path = path;
    for (int rank = -1; !status; rank++) {
        char name[4096];
        snprintf(name, sizeof name, rank < 0 ? "%s" : "%s.%d", path, rank);
        FILE *file = fopen(name, "r");
        if (!file && rank < 0) continue;
        if (!file) break;
        status = read_file(r, file);
        ends = ends && r->ends;
        fclose(file);
        files++;
        if (rank < 0) break;
    }
    if (!status && (files == 0 || r->parts == 0)) {
        snprintf(why, why_size,
                 files ? "replay %s: expected what a run that records losses and does "
                         "not wait for late ranks has written"
                       : "replay %s: expected this file, or FILE.0, FILE.1 ... of all ranks",
                 path);
        status = LOSSYNET_FILE;
    } else if (status) {
        snprintf(why, why_size, "no memory for the replay %s", path);
    }
    if (!status && !ends) {
        snprintf(why, why_size, "replay %s: it is cut off: expected \"# end\" as its last line",
                 path);
        status = LOSSYNET_FILE;
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

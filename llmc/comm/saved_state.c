/* saved_state.c — see saved_state.h. The tensors are listed in resume.h and rank_state.h. */
#include "llmc/comm/saved_state.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"
#include "llmc/backend/host_vector.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/checkpoint/safetensors.h"
#include "llmc/comm/rank_state.h"
#include "llmc/options/options_table.h"
#include "llmc/util/bf16.h"

/* ---- ranges ----------------------------------------------------------------------------- */

/* Whether all elements of a replica may differ from the model. */
static bool own_replicas(const struct data_parallel *d) {
    return d->options->algorithm == ALGORITHM_NAIVE;
}

/* Lists the ranges in which a replica differs from the model: the gaps between fresh ranges, or
 * everything. The caller frees list->range. Returns 0, or -1 after reporting. */
static int stale_ranges(const struct data_parallel *d, int worker, struct ranges *list) {
    size_t cursor = 0, offset = 0, count = 0, end = 0;
    memset(list, 0, sizeof *list);
    if (d->workers == 1) return 0; /* the only replica equals the model */
    for (bool more = true; more; end = offset + count) {
        more = !own_replicas(d) && lossynet_next_fresh(d->comm, worker, &cursor, &offset, &count);
        if (!more) offset = d->layout->count;
        if (ranges_add(list, (struct range){end, offset - end, list->elements})) return -1;
    }
    return 0;
}

/* The next two functions copy n elements from `offset` of a replica in host memory, or to it. */
static void read_replica(const struct data_parallel *d, float *to, const float *replica,
                         size_t offset, size_t n) {
    const uint16_t *from = (const uint16_t *)replica + offset;
    if (d->worker->copy_bytes == sizeof(float))
        memcpy(to, replica + offset, n * sizeof *to);
    else
        for (size_t i = 0; i < n; i++) to[i] = from_bf16(from[i]);
}

static void write_replica(const struct data_parallel *d, float *replica, size_t offset,
                          const char *from, size_t n) {
    if (d->worker->copy_bytes < (int)sizeof(float))
        lossynet_narrow_parameters(d->comm, (uint16_t *)replica + offset, from, offset, n);
    else
        memcpy(replica + offset, from, n * sizeof *replica);
}

/* ---- saving ----------------------------------------------------------------------------- */

/* Adds a table of ranges; empty ones are left out. Returns whether there is memory for it. */
static bool add_table(struct snapshot *out, const char *name, int worker, const struct range *list,
                      size_t ranges) {
    size_t rows = 0;
    for (size_t i = 0; i < ranges; i++) rows += list[i].count > 0;
    int64_t *table = snapshot_add(out, "I64", rows, 2, name, worker);
    for (size_t i = 0; i < ranges && table; i++) {
        if (!list[i].count) continue;
        *table++ = (int64_t)list[i].offset;
        *table++ = (int64_t)list[i].count;
    }
    return table;
}

/* Adds the arrays that a worker has of the ranges that it owns. */
static void add_owned(const struct data_parallel *d, const struct worker *w, struct snapshot *out) {
    for (int a = 0; a < ARRAYS; a++) {
        const char *name = array_rows[a].saved;
        if (!name || (a == ARRAY_AHEAD && !d->vectors.sent_ahead)) continue;
        const size_t elements = state_of_owner(d, w, (enum array)a).elements;
        void *copy = snapshot_add(out, "F32", elements, 0, "worker.%d.%s", w->id, name);
        if (copy) d->be->download(copy, worker_array(w, (enum array)a), elements * sizeof(float));
    }
}

static int add_replica(const struct data_parallel *d, const struct worker *w,
                       struct snapshot *out) {
    struct ranges stale;
    int status = stale_ranges(d, w->id, &stale);
    const bool table = add_table(out, "worker.%d.stale", w->id, stale.range, stale.count);
    float *values = snapshot_add(out, "F32", stale.elements, 0, "worker.%d.replica", w->id);
    if (!status && table && values && stale.count) {
        float *replica = host_vector(d->vectors.memory, w->params, d->layout->count, true);
        if (!replica) status = -1;
#pragma omp parallel for if (stale.count > 64)
        for (size_t i = 0; i < (replica ? stale.count : 0); i++) {
            const struct range range = stale.range[i];
            read_replica(d, values + range.state, replica, range.offset, range.count);
        }
        if (replica) host_vector_end(d->vectors.memory, replica);
    }
    free(stale.range);
    return status;
}

static void add_network(const struct data_parallel *d, int worker, struct snapshot *out) {
    size_t bytes = lossynet_state_bytes(d->comm, worker);
    void *state = worker == LOSSYNET_ALL_WORKERS
                      ? snapshot_add(out, "U8", bytes, 0, "network")
                      : snapshot_add(out, "U8", bytes, 0, "worker.%d.network", worker);
    if (state) lossynet_state_save(d->comm, worker, state);
}

static int add_all(const struct data_parallel *d, struct snapshot *out) {
    if (d->world.rank == 0) add_network(d, LOSSYNET_ALL_WORKERS, out);
    for (int i = 0; i < d->local; i++) {
        const struct worker *w = &d->worker[i];
        const struct ranges mine = state_of_owner(d, w, ARRAY_M);
        add_table(out, "worker.%d.owned", w->id, mine.range, mine.count);
        add_owned(d, w, out);
        add_network(d, w->id, out);
        if (add_replica(d, w, out)) return -1;
    }
    return 0;
}

int saved_state_copy(const struct data_parallel *d, struct snapshot *out) {
    snapshot_measure(out);
    int status = add_all(d, out);
    if (!status) status = snapshot_allocate(out);
    return status ? status : add_all(d, out);
}

/* ---- reading ---------------------------------------------------------------------------- */

struct source { /* the optimizer files of a checkpoint */
    const char *directory;
    int ranks, workers;
    struct safetensors **file; /* [ranks] */
};

static void source_close(struct source *s) {
    for (int i = 0; s->file && i < s->ranks; i++) safetensors_close(s->file[i]);
    free(s->file);
}

static int source_open(struct source *s, const char *directory, const json_t *saved) {
    memset(s, 0, sizeof *s);
    s->directory = directory;
    s->ranks = (int)json_integer_value(json_object_get(saved, "ranks"));
    s->workers = (int)json_integer_value(json_object_get(saved, "workers"));
    s->file = calloc((size_t)s->ranks, sizeof *s->file);
    if (!s->file) return log_out_of_memory("the list of optimizer files", 0);
    for (int i = 0; i < s->ranks; i++) {
        char name[64], path[FILE_PATH_BYTES];
        resume_file_name(i, s->ranks, name);
        if (file_join(path, directory, name) || safetensors_open(path, &s->file[i])) return -1;
    }
    return 0;
}

/* Whether a tensor of a run's state may be used: numbers are finite, and second moments, of which AdamW
 * takes the root, are not negative. Reports the first that is not so. */
static bool is_sound(const struct source *s, const char *path, const char *name,
                     const struct safetensors_view *view) {
    const bool root = strlen(name) > 2 && !strcmp(name + strlen(name) - 2, ".v");
    for (size_t i = 0; !strcmp(view->dtype, "F32") && i < view->elements; i++) {
        float x;
        memcpy(&x, (const char *)view->data + i * sizeof x, sizeof x);
        if (isfinite(x) && (!root || x >= 0)) continue;
        log_error(
            "'%s/%s': tensor '%s' is %g in element %zu: expected finite numbers%s; start from "
            "another checkpoint",
            s->directory, path, name, (double)x, i, root ? " from 0 on" : "");
        return false;
    }
    return true;
}

/* A tensor of a worker (< 0: of all workers) with this type and shape (-1: any length). NULL
 * after reporting. */
static const struct safetensors_view *get(const struct source *s, int worker, const char *what,
                                          const char *dtype, int64_t rows, int64_t columns) {
    char name[64], path[64];
    int file = worker < 0 ? 0 : worker / (s->workers / s->ranks);
    if (worker < 0)
        snprintf(name, sizeof name, "%s", what);
    else
        snprintf(name, sizeof name, "worker.%d.%s", worker, what);
    resume_file_name(file, s->ranks, path);
    const struct safetensors_view *view = safetensors_find(s->file[file], name);
    if (view && !strcmp(view->dtype, dtype) && view->dims == (columns ? 2 : 1) &&
        (rows < 0 || view->shape[0] == rows) && (!columns || view->shape[1] == columns))
        return is_sound(s, path, name, view) ? view : NULL;
    log_error("'%s/%s': tensor '%s' is %s, expected %s of %lld elements%s", s->directory, path,
              name, view ? "of another type or shape" : "missing", dtype, (long long)rows,
              columns ? " by 2" : "");
    return NULL;
}

/* Reads a table of ascending ranges within the vector. The caller frees list->range. */
static int get_ranges(const struct source *s, int worker, const char *what, size_t P,
                      struct ranges *list) {
    const struct safetensors_view *view = get(s, worker, what, "I64", -1, 2);
    size_t end = 0;
    memset(list, 0, sizeof *list);
    for (int64_t i = 0; view && i < view->shape[0]; i++) {
        int64_t row[2];
        memcpy(row, (const char *)view->data + (size_t)i * sizeof row, sizeof row);
        const struct range range = {(size_t)row[0], (size_t)row[1], list->elements};
        if (range.offset < end || range.count < 1 || range.count > P ||
            range.offset > P - range.count)
            return log_error("'%s': range %lld of worker.%d.%s is %lld elements from %lld: not in "
                             "ascending order within the model's %zu",
                             s->directory, (long long)i, worker, what, (long long)row[1],
                             (long long)row[0], P);
        if (ranges_add(list, range)) return -1;
        end = range.offset + range.count;
    }
    return view ? 0 : -1;
}

/* The values of these ranges. NULL after reporting. */
static const char *get_values(const struct source *s, int worker, const char *what,
                              const struct ranges *list) {
    const struct safetensors_view *view = get(s, worker, what, "F32", (int64_t)list->elements, 0);
    return view ? (const char *)view->data : NULL;
}

/* The ranges of which a checkpoint has an array, of those that a saved worker owned. Older programs saved 0 as
 * v of the matrices that Muon updates. NULL after reporting. */
static const struct ranges *ranges_of(const struct source *s, int worker, int array,
                                      const struct ranges *owned, const struct ranges *squares) {
    if (array != ARRAY_V || squares->elements == owned->elements) return owned;
    const struct safetensors_view *v = get(s, worker, array_rows[array].saved, "F32", -1, 0);
    return !v ? NULL : v->elements == owned->elements ? owned : squares;
}

/* Whether a worker owns elements of these ranges. */
static bool owns_some(const struct data_parallel *d, const struct worker *w,
                      const struct ranges *list) {
    const struct ranges mine = state_of_owner(d, w, ARRAY_M);
    struct range listed, own;
    size_t next = 0;
    for (size_t i = 0; i < mine.count; i++, next = 0)
        if (ranges_next(list->range, list->count, mine.range[i], &next, &listed, &own)) return true;
    return false;
}

/* Copies to a worker's arrays the elements that a saved worker has, and adds their number to *taken. Values of
 * which the worker needs none are not read: else each worker would read the state of all. */
static int take_owned(const struct data_parallel *d, const struct source *s, int from,
                      const struct worker *w, size_t *taken) {
    struct ranges list, squares = {0};
    int failed = get_ranges(s, from, "owned", d->layout->count, &list) ||
                 param_layout_squares(d->layout, list.range, list.count, &squares);
    const bool takes = !failed && owns_some(d, w, &list);
    for (int a = 0; a < ARRAYS && takes && !failed; a++) {
        if (!array_rows[a].follows) continue;
        const struct ranges *of = ranges_of(s, from, a, &list, &squares);
        const char *values = of ? get_values(s, from, array_rows[a].saved, of) : NULL;
        failed = !values;
        if (!failed) *taken += state_take(d, w, (enum array)a, of->range, of->count, values);
    }
    free(list.range);
    free(squares.range);
    return failed ? -1 : 0;
}

/* Takes what a worker owns from all saved workers, or from one if each has everything. */
static int load_owned(const struct data_parallel *d, const struct source *s, bool saved_whole,
                      const struct worker *w) {
    const size_t needed = w->squares.elements + state_of_owner(d, w, ARRAY_M).elements;
    size_t taken = 0;
    int first = saved_whole ? w->id % s->workers : 0, last = saved_whole ? first : s->workers - 1;
    for (int from = first; from <= last; from++)
        if (take_owned(d, s, from, w, &taken)) return -1;
    if (taken == needed) return 0;
    return log_error("'%s' has %zu of the %zu moments that worker %d needs", s->directory, taken,
                     needed, w->id);
}

/* Writes to a replica the values that a saved worker has of the ranges of a table. */
static int take_values(const struct data_parallel *d, const struct source *s, int from,
                       const char *table, const char *what, float *replica) {
    struct ranges list;
    int failed = get_ranges(s, from, table, d->layout->count, &list);
    const char *values = failed ? NULL : get_values(s, from, what, &list);
    for (size_t i = 0; values && i < list.count; i++) {
        const struct range range = list.range[i];
        write_replica(d, replica, range.offset, values + range.state * sizeof(float), range.count);
    }
    free(list.range);
    return values ? 0 : -1;
}

/* Takes the values that the last broadcast of the other workers sent, if they were ahead of the
 * model: a replica holds them, except where it is stale. */
static int take_ahead(const struct data_parallel *d, const struct source *s, int worker,
                      float *replica) {
    int failed = 0;
    for (int from = 0; from < s->workers && !failed; from++) {
        char name[64];
        snprintf(name, sizeof name, "worker.%d.ahead", from);
        if (from != worker && lossynet_is_partner_of(d->comm, worker, from) &&
            safetensors_find(s->file[from / (s->workers / s->ranks)], name))
            failed = take_values(d, s, from, "owned", "ahead", replica);
    }
    return failed;
}

/* Reads what differs from the model in a replica, which is copied from a device and back once.
 * ahead: also what the last broadcast sent. */
static int load_replica(const struct data_parallel *d, const struct source *s,
                        const struct worker *w, bool ahead) {
    const struct backend *be = d->vectors.memory;
    const size_t P = d->layout->count;
    float *replica = host_vector(be, w->params, P, true);
    if (!replica) return -1;
    int status = ahead ? take_ahead(d, s, w->id, replica) : 0;
    if (!status) status = take_values(d, s, w->id, "stale", "replica", replica);
    if (!status && replica != w->params) be->upload(w->params, replica, P * sizeof *replica);
    host_vector_end(be, replica);
    return status;
}

/* Loads the network's state. *fits: whether it was saved by a network with the same shape. */
static int load_network(const struct data_parallel *d, const struct source *s, int worker,
                        bool *fits) {
    bool all = worker == LOSSYNET_ALL_WORKERS;
    const struct safetensors_view *state = get(s, all ? -1 : worker, "network", "U8", -1, 0);
    if (!state) return -1;
    *fits = lossynet_state_load(d->comm, worker, state->data, state->bytes);
    return 0;
}

/* ---- differences ------------------------------------------------------------------------ */

static void differ(json_t *list, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void differ(json_t *list, const char *format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    json_array_append_new(list, json_string(line));
}

static void compare_value(json_t *list, const char *name, const json_t *was, const json_t *is) {
    if (json_equal((json_t *)was, (json_t *)is)) return;
    char *a = json_dumps(was, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    char *b = json_dumps(is, JSON_ENCODE_ANY | JSON_REAL_PRECISION(9));
    differ(list, "%s was %s, is %s", name, a ? a : "?", b ? b : "?");
    free(a);
    free(b);
}

/* The place of a saved choice in the list of its names; 0, the default, if it is not there. */
static int choice_of(const json_t *options, const char *option, const char *const *names) {
    const char *value = json_string_value(json_object_get(options, option));
    for (int i = 0; value && names[i]; i++)
        if (!strcmp(names[i], value)) return i;
    return 0;
}

/* The learning rates that saved options ask for. */
static struct schedule saved_schedule(const json_t *options) {
    const struct schedule s = {
        .kind = choice_of(options, "schedule", schedule_names),
        .steps = (int)json_integer_value(json_object_get(options, "steps")),
        .warmup = (int)json_integer_value(json_object_get(options, "warmup")),
        .peak = json_number_value(json_object_get(options, "lr")),
        .final_fraction = json_number_value(json_object_get(options, "lr-final")),
        .decay = json_number_value(json_object_get(options, "decay")),
        .decay_shape = choice_of(options, "decay-shape", schedule_decay_names),
    };
    return s;
}

/* Other --steps or another --schedule count only if they change the rates of the steps done. With
 * wsd, a run can be continued beyond its --steps until the decay begins. */
static void compare_schedules(json_t *list, const json_t *was, const json_t *is, int steps_done) {
    static const char *const names[] = {"steps", "schedule", "decay", "decay-shape"};
    const struct schedule old = saved_schedule(was), now = saved_schedule(is);
    int step = 0;
    while (step < steps_done &&
           schedule_learning_rate(&old, step) == schedule_learning_rate(&now, step))
        step++;
    for (size_t i = 0; i < sizeof names / sizeof *names && step < steps_done; i++)
        if (json_object_get(was, names[i]))
            compare_value(list, names[i], json_object_get(was, names[i]),
                          json_object_get(is, names[i]));
}

/* Effective values that a checkpoint names apart, and the options that are marked so. All others may
 * differ without any effect on the results. */
static void compare_options(json_t *list, const json_t *was, const json_t *is) {
    const json_t *old = json_object_get(was, "options"), *now = json_object_get(is, "options");
    const struct lossynet_option *e;
    const char *name;
    json_t *value;
    json_object_foreach(json_object_get(is, "settings"), name, value)
        compare_value(list, name, json_object_get(json_object_get(was, "settings"), name), value);
    for (int i = 0; (e = options_entry(i)) != NULL; i++) {
        if (!(e->marks & LOSSYNET_RESUMED)) continue;
        compare_value(list, e->name, json_object_get(old, e->name), json_object_get(now, e->name));
    }
    compare_schedules(list, old, now, (int)json_integer_value(json_object_get(was, "step")));
    compare_value(list, "backend", json_object_get(was, "backend"), json_object_get(is, "backend"));
    if (json_integer_value(json_object_get(was, "attention")) !=
        json_integer_value(json_object_get(is, "attention")))
        differ(list, "attention is computed by other kernels (--attention)");
}

/* ---- loading ---------------------------------------------------------------------------- */

/* Says which workers' network state did not fit, on whatever rank they are. fits: of local workers.
 * Collective. */
static int report_misfits(const struct data_parallel *d, const bool *fits, json_t *differences) {
    bool *all = calloc((size_t)d->workers, sizeof *all);
    if (!all) return log_out_of_memory("the workers' states", d->workers);
    int count = 0, first = -1;
    const int failed = lossynet_all_gather(d->comm, fits, all, sizeof *fits) ? -1 : 0;
    for (int w = 0; w < d->workers && !failed; w++)
        if (!all[w] && count++ == 0) first = w;
    free(all);
    if (count == d->workers)
        differ(differences, "every replica starts as the model, ages at 0");
    else if (count > 0)
        differ(differences, "replica %d%s as the model, ages at 0: its state is damaged", first,
               count > 1 ? " and others start" : " starts");
    return failed;
}

static int load(const struct data_parallel *d, const struct source *s, const json_t *saved,
                json_t *differences) {
    const char *was =
        json_string_value(json_object_get(json_object_get(saved, "options"), "algorithm"));
    const char *is = algorithm_names[d->options->algorithm];
    const bool same = was && strcmp(was, is) == 0 && s->workers == d->workers;
    const bool saved_whole = was && (!strcmp(was, "rps") || !strcmp(was, "naive"));
    bool *fits = calloc((size_t)d->local, sizeof *fits), drift_fits = false;
    int status = fits ? 0 : log_out_of_memory("the workers' states", d->local);
    for (int i = 0; i < d->local && !status; i++) {
        const struct worker *w = &d->worker[i];
        status = load_owned(d, s, saved_whole, w);
        if (status || !same) continue;
        status = load_network(d, s, w->id, &fits[i]);
        if (!status && (fits[i] || own_replicas(d))) status = load_replica(d, s, w, fits[i]);
    }
    if (!status && same) status = load_network(d, s, LOSSYNET_ALL_WORKERS, &drift_fits);
    if (s->workers != d->workers)
        differ(differences,
               "%d workers were %d: moments are distributed again, data goes on at "
               "the same sequence",
               d->workers, s->workers);
    if (!status) status = report_misfits(d, fits, differences);
    free(fits);
    if (!drift_fits) differ(differences, "the history of the drift sample starts again");
    return status;
}

static void show(const struct data_parallel *d, const char *directory, int step,
                 const json_t *differences) {
    size_t i;
    json_t *line;
    if (d->world.rank > 0) return;
    if (step > d->options->steps)
        log_error(
            "--steps %d: '%s' has done %d already, so no step is made: expected more to go on",
            d->options->steps, directory, step);
    if (d->options->quiet) return;
    printf("resumed from %s after %d steps%s\n", directory, step,
           json_array_size(differences) ? "; cannot be identical:" : ", bit for bit");
    json_array_foreach(differences, i, line) printf("  %s\n", json_string_value(line));
    fflush(stdout);
}

/* What is saved of another optimizer is of no use. */
static int check_optimizer(const struct data_parallel *d, const char *directory,
                           const json_t *saved) {
    const int was = choice_of(json_object_get(saved, "options"), "optimizer", optimizer_names);
    if (was == d->options->optimizer) return 0;
    return log_error(
        "'%s' has the state of --optimizer %s: expected the same, got %s; to start anew "
        "with its parameters, give them as --model",
        directory, optimizer_names[was], optimizer_names[d->options->optimizer]);
}

int saved_state_load(const struct data_parallel *d, const struct run_info *facts,
                     const char *directory, const json_t *saved, struct jsonl *log) {
    const int step = (int)json_integer_value(json_object_get(saved, "step"));
    const json_int_t parameters = json_integer_value(json_object_get(saved, "parameters"));
    struct resume_point nowhere;
    struct source source;
    memset(&nowhere, 0, sizeof nowhere);
    if (parameters != (json_int_t)d->layout->count)
        return log_error("'%s' was saved with %lld parameters, config.json makes it %zu", directory,
                         (long long)parameters, d->layout->count);
    if (check_optimizer(d, directory, saved) ||
        resume_verify(directory, saved, d->world.rank, d->world.ranks))
        return -1;
    json_t *differences = json_array(), *now = resume_describe(facts, &nowhere);
    int status = source_open(&source, directory, saved);
    if (!status) {
        compare_options(differences, saved, now);
        if (d->world.ranks > 1 && strcmp(lossynet_link_name(d->comm), "udp") == 0)
            differ(differences, "over --link udp the network decides what else is lost");
        status = load(d, &source, saved, differences);
        for (int i = 0; i < source.ranks && !status; i++)
            status = safetensors_is_lost(source.file[i]) ? -1 : 0;
    }
    source_close(&source);
    json_decref(now);
    if (!status) {
        show(d, directory, step, differences);
        jsonl_write(log, json_pack("{s:s, s:i, s:s, s:b, s:O}", "event", "resume", "step", step,
                                   "checkpoint", directory, "identical",
                                   json_array_size(differences) == 0, "differences", differences));
    }
    json_decref(differences);
    return status;
}

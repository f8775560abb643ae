/* data_parallel.c — see data_parallel.h. */
#include "llmc/comm/data_parallel.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/memory/memory_check.h"
#include "llmc/comm/settings.h"
#include "llmc/comm/attention_choice.h"
#include "llmc/comm/rule.h"
#include "llmc/log/error.h"

/* Whether nothing is lost in this phase (reliable, or by --rule). */
static bool is_lossless(const struct data_parallel *d) {
    return d->options->algorithm == ALGORITHM_RELIABLE || d->numbers.lossless;
}

bool data_parallel_replicas_are_exact(const struct data_parallel *d) {
    return comm_groups(d->options, d->workers) == 1 ||
           (d->options->algorithm == ALGORITHM_RELIABLE && !comm_leads(d->options, d->workers) &&
            d->options->net.wire_dtype == LOSSYNET_FLOAT32);
}

/* ---- open and close --------------------------------------------------------------------- */

int data_parallel_choose(struct data_parallel *d, int batch, int seq, bool training, bool tell,
                         struct backend_choice *choice) {
    struct memory_plan_settings plan = memory_plan_of_options(d->options, d->workers, seq);
    comm_plan(d->options, d->layout, d->workers, d->world.ranks, &plan);
    plan.batch = batch;
    plan.run.evaluates = !training;
    plan.remembers = d->options->generate != NULL;
    memory_plan_place(&plan, d->world.ranks, d->world.rank);
    if (backend_select(d->options, &d->layout->config, &plan, &d->world, tell, choice)) return -1;
    d->be = choice->backend;
    if (comm_check_device(d->options, d->be->on_device)) return -1;
    d->placement = placement_of(&plan.run);
    d->port.groups.sets = plan.sets;
    const struct lossynet_settings network =
        comm_settings(d->options, d->layout, d->workers, d->world.ranks, d->be->on_device);
    plan.network_bytes = (double)lossynet_memory_needed(&d->world, &network);
    if (plan.network_bytes == 0 || memory_check(d->options, &d->world, &d->layout->config, &plan))
        return -1;
    if (!training) return 0;
    return attention_choose(d->options, &d->layout->config, batch, seq, plan.cudnn, d->be,
                            &d->world, tell);
}

static int open_comm(struct data_parallel *d) {
    const struct backend *be = d->be;
    const struct placement *p = &d->placement;
    d->vectors.exchange.be = be;
    d->vectors.exchange.rounds_to_bf16 = p->rounds_to_bf16;
    const struct lossynet_memory memory = exchange_memory(&d->vectors.exchange);
    struct lossynet_settings s =
        comm_settings(d->options, d->layout, d->workers, d->world.ranks, be->on_device);
    if (!p->trains) s.error_feedback = false, s.drift_samples = 0, s.record_loss = NULL;
    s.weighted_sum = p->has[ARRAY_COMM_PARAMS] ? be->weighted_sum_pinned : be->weighted_sum;
    s.weighted_sum_whole = be->on_device;
    if (p->copy_bytes == 2)
        s.vector_dtype = LOSSYNET_BF16, s.weighted_sum_bf16 = be->weighted_sum_pinned_bf16;
    if (p->has[ARRAY_COMM_PARAMS]) s.allocate = be->allocate_pinned, s.release = be->release_pinned;
    s.memory = be->on_device && !p->has[ARRAY_COMM_PARAMS] ? &memory : NULL;
    struct lossynet_tensor *tensors = comm_tensors(d->layout, &s.tensor_count);
    s.tensors = tensors;
    const int failed = !tensors || lossynet_open(&d->world, &s, &d->comm) ? -1 : 0;
    free(tensors);
    if (failed || !s.memory) return failed;
    return exchange_open(&d->vectors.exchange, d->comm, d->workers);
}

/* range: [buckets]: receives the shards of an owner, in the order of its moments. */
static void find_shards(const struct data_parallel *d, int owner, struct range *range) {
    size_t state = 0;
    for (int b = 0; b < d->layout->buckets; b++, range++) {
        lossynet_shard(d->comm, owner, b, &range->offset, &range->count);
        assert(range->offset + range->count <= d->layout->count);
        range->state = state;
        state += range->count;
    }
}

/* Tells lossynet where shards lie apart from the network's copies of the vectors. */
static int give_shards(const struct data_parallel *d) {
    const int buckets = d->layout->buckets, shards = d->local * buckets;
    struct lossynet_shard *shard = calloc((size_t)shards, sizeof *shard);
    if (!shard) return log_out_of_memory("the list of shards", 0);
    for (int i = 0; i < shards; i++) {
        const struct worker *w = &d->worker[i / buckets];
        shard[i].average = w->comm_average + d->range[i].state;
        shard[i].value = w->comm_master + d->range[i].state;
    }
    const int failed = lossynet_shards(d->comm, shard) ? -1 : 0;
    free(shard);
    return failed;
}

static int open_port(struct data_parallel *d) {
    const struct options *o = d->options;
    const struct placement *p = &d->placement;
    const bool overlaps = p->trains && o->algorithm == ALGORITHM_LOSSY && !o->no_overlap &&
                          lossynet_overlaps(d->comm);
    const struct port port = {.be = d->be,
                              .layout = d->layout,
                              .comm = d->comm,
                              .placement = p,
                              .worker = d->worker,
                              .groups = {.workers = d->workers, .sets = d->port.groups.sets},
                              .local = d->local,
                              .overlap = overlaps};
    d->port = port;
    return port_open(&d->port, &d->world, o->net.peer_timeout);
}

static int allocate_workers(struct data_parallel *d) {
    const struct placement *p = &d->placement;
    const size_t local = (size_t)d->local, N = (size_t)d->workers;
    const struct range all = {0, d->layout->count, 0};
    d->vectors.params = calloc(2 * local, sizeof *d->vectors.params);
    d->vectors.ahead = calloc(local, sizeof *d->vectors.ahead);
    d->range = calloc(local * (size_t)d->layout->buckets, sizeof *d->range);
    d->numbers.mine = calloc(3 * local + 5 * N, sizeof *d->numbers.mine);
    d->numbers.news = calloc(local + N, sizeof *d->numbers.news);
    if (!d->vectors.params || !d->vectors.ahead || !d->range || !d->numbers.mine ||
        !d->numbers.news)
        return log_out_of_memory("the list of workers", 0);
    d->vectors.grads = d->vectors.params + local;
    d->numbers.gathered = d->numbers.mine + 3 * local;
    d->numbers.losses = d->numbers.gathered + 3 * N;
    d->numbers.squares = d->numbers.losses + N;
    for (int w = 0; w < d->local; w++) {
        struct worker *k = &d->worker[w];
        k->id = d->world.rank * d->local + w;
        k->range = d->range + (size_t)w * d->layout->buckets;
        find_shards(d, k->id, d->range + (size_t)w * d->layout->buckets);
        port_share_vectors(&d->port, w);
        if (param_layout_squares(d->layout, p->steps_alone ? &all : k->range,
                                 p->steps_alone ? 1 : (size_t)d->layout->buckets, &k->squares) ||
            worker_allocate(k, d->be, d->layout, p, lossynet_owned_elements(d->comm, k->id)))
            return -1;
        d->vectors.params[w] = k->comm_params;
        d->vectors.grads[w] = k->comm_grads;
        d->vectors.ahead[w] = k->comm_ahead;
    }
    if (p->copy_bytes == 2 && give_shards(d)) return -1;
    d->vectors.model = d->worker[0].grads;
    if (!p->has[ARRAY_MODEL]) return 0;
    const struct array_sizes sizes = worker_sizes(d->layout, p, 0);
    d->vectors.model = array_allocate(ARRAY_MODEL, d->vectors.memory, p, &sizes);
    return d->vectors.model ? 0 : -1;
}

int data_parallel_open(struct data_parallel *d) {
    d->local = d->workers / d->world.ranks;
    d->numbers.norm = NAN;
    d->vectors.memory = d->placement.has[ARRAY_MASTER] ? backend_cpu(DTYPE_FLOAT32) : d->be;
    d->worker = calloc((size_t)d->local, sizeof *d->worker);
    if (!d->worker) return log_out_of_memory("the list of workers", 0);
    return open_comm(d) || open_port(d) || allocate_workers(d) || port_connect(&d->port) ? -1 : 0;
}

bool data_parallel_is_of_another_run(const struct data_parallel *d) {
    return d->local > 0 && !d->comm && !strncmp(d->options->net.loss_model, "replay:", 7);
}

void data_parallel_close(struct data_parallel *d) {
    lossynet_close(d->comm); /* first, since it uses memory that is released below */
    for (int w = 0; d->worker && w < d->local; w++) worker_release(&d->worker[w], d->be);
    port_close(&d->port);
    if (d->vectors.memory && d->placement.has[ARRAY_MODEL])
        array_release(ARRAY_MODEL, d->vectors.memory, d->vectors.model);
    exchange_close(&d->vectors.exchange);
    free(d->worker);
    free(d->vectors.params);
    free(d->vectors.ahead);
    free(d->range);
    free(d->numbers.mine);
    free(d->numbers.news);
}

/* ---- the model, and small numbers ------------------------------------------------------- */

size_t data_parallel_moments(const struct data_parallel *d) {
    size_t most = worker_steps_alone(d->options) ? d->layout->count : 0, squares;
    if (d->layout->shard_elements)
        return param_layout_largest_owner(d->layout, d->workers, &squares) + squares;
    for (int w = 0; w < d->workers; w++) {
        size_t owned = lossynet_owned_elements(d->comm, w);
        if (owned > most) most = owned;
    }
    return 2 * most;
}

int data_parallel_log_links(struct data_parallel *d, struct jsonl *log, int step) {
    enum {
        MOST_WORKERS = 128
    }; /* beyond these the event would be larger than all others together */
    const size_t n = (size_t)d->workers;
    if (n < 2 || n > MOST_WORKERS) return 0;
    float *lost = malloc(n * n * sizeof *lost);
    if (!lost) return log_out_of_memory("the table of links", (double)(n * n * sizeof *lost));
    const int failed = lossynet_lost_between(d->comm, lost) ? -1 : 0;
    json_t *rows = json_array();
    for (size_t r = 0; r < n && !failed; r++) {
        json_t *row = json_array();
        for (size_t s = 0; s < n; s++)
            json_array_append_new(row, jsonl_number(round(1e4 * lost[r * n + s]) / 1e4));
        json_array_append_new(rows, row);
    }
    free(lost);
    json_t *event = json_pack("{s:s, s:i, s:o}", "event", "links", "step", step, "lost", rows);
    jsonl_write(failed ? NULL : log, event);
    return failed;
}

/* What a bucket holds, for the log. */
static void bucket_name(const struct param_layout *l, int bucket, char name[32]) {
    const int layer = l->config.layers - 1 - (bucket - !l->config.tied);
    const bool head = bucket == 0 && !l->config.tied;
    snprintf(name, 32, head ? "lm_head" : layer < 0 ? "embed_tokens" : "layers.%d", layer);
}

int data_parallel_log_buckets(struct data_parallel *d, struct jsonl *log, int step) {
    const int n = d->layout->buckets;
    if (!d->options->log_buckets || d->workers < 2) return 0;
    struct lossynet_bucket *of = calloc((size_t)n, sizeof *of);
    if (!of) return log_out_of_memory("the counts of buckets", 0);
    const int failed = lossynet_step_buckets(d->comm, (uint64_t)step, of) ? -1 : 0;
    json_t *list = json_array();
    for (const struct lossynet_bucket *k = of; k < of + n && !failed; k++) {
        char name[32];
        bucket_name(d->layout, (int)(k - of), name);
        json_array_append_new(
            list, json_pack("{s:s, s:[I,I], s:[I,I], s:[I,I], s:[I,I]}", "name", name, "packets",
                            (json_int_t)k->expected[0], (json_int_t)k->expected[1], "lost",
                            (json_int_t)(k->expected[0] - k->arrived[0]),
                            (json_int_t)(k->expected[1] - k->arrived[1]), "resent",
                            (json_int_t)k->resent[0], (json_int_t)k->resent[1], "late",
                            (json_int_t)k->late[0], (json_int_t)k->late[1]));
    }
    free(of);
    json_t *event = json_pack("{s:s, s:i, s:o}", "event", "buckets", "step", step, "buckets", list);
    jsonl_write(failed ? NULL : log, event);
    return failed;
}

int data_parallel_log_late(struct data_parallel *d, struct jsonl *log, int step) {
    const size_t ranks = (size_t)d->world.ranks;
    if (!lossynet_skips_late(d->comm) || d->world.rank > 0) return 0;
    uint64_t *late = malloc(ranks * sizeof *late);
    if (!late) return log_out_of_memory("the list of ranks", (double)(ranks * sizeof *late));
    lossynet_lateness(d->comm, late);
    json_t *steps = json_array();
    for (size_t r = 0; r < ranks; r++)
        json_array_append_new(steps, json_integer((json_int_t)late[r]));
    free(late);
    jsonl_write(log,
                json_pack("{s:s, s:i, s:o}", "event", "late_ranks", "step", step, "steps", steps));
    return 0;
}

/* ---- initial values and checkpoints ------------------------------------------------------ */

int data_parallel_start(struct data_parallel *d) {
    port_start(&d->port);
    lossynet_round_as_sent(d->comm, d->vectors.params);
    return port_replica_in(&d->port, ARRAY_PARAMS);
}

/* ---- passes of the model ---------------------------------------------------------------- */

int data_parallel_passes(struct data_parallel *d,
                         bool (*pass)(void *context, struct worker *w, int set), void *context) {
    double waited = 0;
    bool failed = false;
    port_passes(&d->port, pass, context);
    for (int w = 0; w < d->local; w++) {
        failed |= d->port.hooks[w].status != LOSSYNET_OK;
        waited = fmax(waited, d->port.hooks[w].waited);
        d->port.hooks[w].waited = 0;
    }
    d->time.communicating += waited;
    return failed ? -1 : 0;
}

struct bucket_hooks *data_parallel_pass(struct data_parallel *d, const struct worker *w, int set,
                                        bool first, bool last) {
    struct bucket_hooks *hooks = &d->port.hooks[w - d->worker];
    if (first)
        *hooks = (struct bucket_hooks){.port = &d->port, .worker = w, .gradient = w->gradient};
    hooks->set = set, hooks->first = first, hooks->last = last;
    hooks->params = d->port.weights[set] ? d->port.weights[set] : w->params;
    if (d->port.groups.apart && w->id > w->group) hooks->gradient.first = d->port.groups.apart[set];
    return hooks;
}

/* ---- a step ----------------------------------------------------------------------------- */

/* Whether the rule of --rule wants nothing lost in this phase. */
static void ask_rule(struct data_parallel *d, lossynet_phase phase, int step) {
    const struct lossynet_rule *rule = rule_loaded(d->options);
    d->numbers.step = step;
    d->numbers.lossless = rule && rule->reliable &&
                          rule->reliable(rule->context, phase, (uint64_t)step,
                                         (uint64_t)d->options->steps, d->numbers.norm);
}

int data_parallel_begin(struct data_parallel *d, int *step) {
    if (!d->time.unfinished) d->time.finished = log_seconds();
    uint64_t number = (uint64_t)*step;
    bool idle;
    lossynet_error_feedback_share(d->comm, d->options->net.carry < 0 ? 1 : d->options->net.carry);
    if (lossynet_step_begin_with_majority(d->comm, &number, &idle)) return -1;
    *step = (int)number;
    ask_rule(d, LOSSYNET_GRADIENT, *step);
    if (!d->port.overlap) return 0;
    return lossynet_reduce_begin(d->comm, d->vectors.grads, is_lossless(d)) ? -1 : 0;
}

int data_parallel_micro_batches(const struct data_parallel *d, const struct worker *w,
                                double *counts) {
    const int64_t all = options_micro_batches(d->options, d->workers), N = d->workers;
    const int own = (int)((all - w->id + N - 1) / N);
    *counts = (double)own * (double)N / (double)all;
    return own;
}

void data_parallel_note_loss(struct data_parallel *d, const struct worker *w, double loss) {
    d->numbers.mine[w - d->worker] = loss;
}

int data_parallel_tell_losses(struct data_parallel *d) {
    return lossynet_all_gather_later(d->comm, d->numbers.mine, d->numbers.losses,
                                     sizeof *d->numbers.mine)
               ? -1
               : 0;
}

double data_parallel_mean_loss(struct data_parallel *d) {
    double sum = 0;
    int computed = 0;
    for (int w = 0; w < d->workers; w++) {
        if (d->numbers.losses[w] < 0) continue;
        sum += d->numbers.losses[w];
        computed++;
    }
    if (computed) d->numbers.loss = sum / computed;
    return d->numbers.loss;
}

bool data_parallel_is_finite(const struct data_parallel *d, double loss, double norm) {
    struct lossynet_not_finite found;
    return isfinite(loss) && norm < 0x1p40 && !lossynet_is_not_finite(d->comm, &found);
}

int data_parallel_find_not_finite(struct data_parallel *d, struct lossynet_not_finite *found) {
    if (lossynet_find_not_finite(d->comm, d->vectors.grads)) return -1;
    lossynet_is_not_finite(d->comm, found);
    return 0;
}

int data_parallel_odd_worker(const struct data_parallel *d) {
    int odd = -1;
    for (int w = 0; w < d->workers; w++) {
        if (isfinite(d->numbers.losses[w])) continue;
        if (odd >= 0) return -1;
        odd = w;
    }
    return d->workers > 1 ? odd : -1;
}

bool data_parallel_computes(const struct data_parallel *d, const struct worker *w) {
    struct lossynet_part part;
    lossynet_replayed(d->comm, w->id, &part);
    return part.computes;
}

int data_parallel_agree(struct data_parallel *d, struct data_parallel_news *news) {
    struct data_parallel_news *mine = d->numbers.news, *all = d->numbers.news + d->local;
    for (int w = 0; w < d->local; w++) mine[w] = *news;
    if (lossynet_all_gather(d->comm, mine, all, sizeof *mine)) return -1;
    for (int w = 0; w < d->workers; w++) {
        if (all[w].step > news->step) news->step = all[w].step;
        news->stop |= all[w].stop;
        news->broken |= all[w].broken;
        news->ranks_change |= all[w].ranks_change;
    }
    lossynet_agreed(d->comm);
    return 0;
}

/* The workers' parameters or gradients, as lossynet takes them. */
static float **vectors_of(const struct data_parallel *d, enum array what) {
    return what == ARRAY_PARAMS ? d->vectors.params : d->vectors.grads;
}

/* Owners average what they receive of the workers' parameters or gradients. */
static int average(struct data_parallel *d, enum array what, double start) {
    lossynet_status status = lossynet_reduce(d->comm, vectors_of(d, what), is_lossless(d));
    if (d->port.verbs.average_in) d->port.verbs.average_in(&d->port, what);
    d->time.communicating += log_seconds() - start;
    return status ? -1 : 0;
}

/* Each owner has its shards of the averaged gradient. */
int data_parallel_gradient_norm(struct data_parallel *d, double *norm) {
    enum { MOST = 512 }; /* shards of one call */
    const float *shard[MOST];
    size_t count[MOST];
    double sum[MOST];
    const int buckets = d->layout->buckets, shards = d->local * buckets;
    memset(d->numbers.mine, 0, (size_t)d->local * sizeof *d->numbers.mine);
    for (int first = 0; first < shards; first += MOST) {
        const int n = shards - first < MOST ? shards - first : MOST;
        for (int i = 0; i < n; i++) {
            shard[i] = worker_averaged(&d->worker[(first + i) / buckets], &d->range[first + i]);
            count[i] = d->range[first + i].count;
        }
        d->be->sums_of_squares(sum, shard, count, n);
        for (int i = 0; i < n; i++) d->numbers.mine[(first + i) / buckets] += sum[i];
    }
    if (lossynet_pulse(d->comm, d->numbers.mine, d->numbers.squares, sizeof *d->numbers.mine))
        return -1;
    *norm = 0;
    for (int w = 0; w < d->workers; w++) *norm += d->numbers.squares[w];
    *norm = d->numbers.norm = sqrt(*norm);
    return 0;
}

int data_parallel_average_gradients(struct data_parallel *d) {
    const double start = log_seconds();
    const struct port *p = &d->port;
    if (p->verbs.gradients_out && p->verbs.gradients_out(p, d->vectors.grads, is_lossless(d)))
        return -1;
    /* A device is still busy with what was queued. */
    return average(d, ARRAY_GRADS, start) || lossynet_broadcast_prepare(d->comm, is_lossless(d))
               ? -1
               : 0;
}

int data_parallel_average_models(struct data_parallel *d) {
    const double start = log_seconds();
    port_values_out(&d->port, ARRAY_PARAMS, EXTENT_WHOLE);
    return average(d, ARRAY_PARAMS, start);
}

void data_parallel_update_shards(struct data_parallel *d, struct worker_step step, double norm) {
    const bool leads = comm_leads(d->options, d->workers);
    const double lead = leads ? comm_lead(d->options, d->comm) : 0;
    d->vectors.sent_ahead = lead != 0;
    lossynet_note_part(d->comm, norm, lead);
    struct lossynet_part part;
    for (int w = 0; w < d->local; w++) /* in a replay, owners may have different leads */
        d->vectors.sent_ahead |=
            leads && lossynet_replayed(d->comm, d->worker[w].id, &part) && part.lead > 0;
    struct worker_updates updates = {.be = d->be, .options = d->options};
    /* A single worker owns all parameters, so only the optimizer changes the weights in use. */
    if (d->workers == 1 || d->placement.copy_bytes == 2) step.weights = d->port.weights[0];
    for (int w = 0; w < d->local; w++) {
        struct worker *k = &d->worker[w];
        const bool replayed = lossynet_replayed(d->comm, k->id, &part);
        if (!part.takes_part) continue;
        /* A trace of an invented run (scripts/late_ranks.py) has no norm. */
        const bool knows = replayed && !isnan(part.norm);
        step.gradient_scale = worker_clip(d->options, knows ? part.norm : norm);
        step.lead = knows && leads ? part.lead : lead;
        worker_update(&updates, k, d->layout, &step, k->range, d->layout->buckets);
        if (!d->vectors.sent_ahead || step.lead != 0) continue;
        worker_updates_end(&updates); /* a replayed owner that did not lead */
        for (int b = 0; b < d->layout->buckets; b++)
            d->be->copy(k->ahead + k->range[b].state, worker_values(k, &k->range[b]),
                        k->range[b].count * sizeof(float));
    }
    worker_updates_end(&updates);
    if (d->vectors.sent_ahead) port_values_out(&d->port, ARRAY_AHEAD, EXTENT_OWNED);
    lossynet_broadcast_ahead(d->comm, d->vectors.sent_ahead ? d->vectors.ahead : NULL, lead);
}

struct replica_steps {
    struct data_parallel *d;
    struct worker_step step;
};

static void step_replica(void *context, struct worker *w, int set) {
    const struct replica_steps *steps = context;
    const struct data_parallel *d = steps->d;
    const double norm = sqrt(d->be->sum_of_squares(w->grads, d->layout->count));
    struct worker_step step = steps->step;
    (void)set;
    d->numbers.mine[w - d->worker] = norm / d->workers;
    step.gradient_scale = worker_clip(d->options, norm);
    const struct range all = {0, d->layout->count, 0};
    struct worker_updates updates = {.be = d->be, .options = d->options};
    if (isfinite(norm)) worker_update(&updates, w, d->layout, &step, &all, 1);
    worker_updates_end(&updates);
}

int data_parallel_update_replicas(struct data_parallel *d, struct worker_step step, double *norm) {
    struct replica_steps steps = {d, step};
    port_work(&d->port, step_replica, &steps);
    if (lossynet_all_gather(d->comm, d->numbers.mine, d->numbers.gathered, sizeof(double)))
        return -1;
    *norm = 0;
    for (int w = 0; w < d->workers; w++) *norm += d->numbers.gathered[w];
    return 0;
}

void data_parallel_update_received(struct data_parallel *d, struct worker_step step, double norm) {
    struct worker_updates updates = {.be = d->be, .options = d->options};
    step.gradient_scale = worker_clip(d->options, norm);
    for (int w = 0; w < d->local; w++) {
        struct worker *k = &d->worker[w];
        size_t cursor = 0;
        struct range range;
        while (lossynet_next_fresh(d->comm, k->id, &cursor, &range.offset, &range.count)) {
            range.state = range.offset;
            worker_update(&updates, k, d->layout, &step, &range, 1);
        }
    }
    worker_updates_end(&updates);
    port_values_out(&d->port, ARRAY_PARAMS, EXTENT_WHOLE); /* drift and evaluation read them */
}

int data_parallel_broadcast(struct data_parallel *d, enum array what) {
    const double start = log_seconds();
    d->time.unfinished = true;
    ask_rule(d, LOSSYNET_PARAMETER, d->numbers.step);
    port_values_out(&d->port, what, EXTENT_OWNED);
    if (d->port.overlap) port_expect(&d->port);
    lossynet_status status = lossynet_broadcast_begin(d->comm, vectors_of(d, what), is_lossless(d));
    if (!status && !d->port.overlap) {
        status = lossynet_broadcast_end(d->comm);
        if (!status && port_replica_in(&d->port, what)) return -1;
    }
    d->time.communicating += log_seconds() - start;
    return status ? -1 : 0;
}

bool data_parallel_ends_later(const struct data_parallel *d) {
    return d->port.overlap || lossynet_skips_late(d->comm);
}

int data_parallel_finish_begin(struct data_parallel *d, struct step_metrics *r) {
    const double start = log_seconds();
    if (lossynet_broadcast_end(d->comm) || port_finish(&d->port)) return -1;
    const double now = log_seconds();
    r->communication_seconds = d->time.communicating + now - start;
    r->seconds = now - d->time.finished;
    d->time.communicating = 0;
    d->time.finished = now;
    return lossynet_report_begin(d->comm, (uint64_t)r->step, d->vectors.params) ? -1 : 0;
}

int data_parallel_finish_end(struct data_parallel *d, struct step_metrics *r) {
    struct lossynet_counters counters;
    struct lossynet_drift drift;
    d->time.unfinished = false;
    if (lossynet_report_end(d->comm, &counters, &drift)) return -1;
    for (int phase = 0; phase < 2; phase++) {
        r->expected[phase] = (double)counters.expected[phase];
        r->arrived[phase] = (double)counters.arrived[phase];
        r->resent[phase] = (double)counters.resent[phase];
    }
    memcpy(r->network, counters.network, sizeof r->network);
    /* The formulas hold only for `lossy`, where each packet that arrives replaces stale values. */
    const bool lossy = d->options->algorithm == ALGORITHM_LOSSY;
    r->drift = drift.pair;
    r->drift_expected = lossy ? drift.expected_pair : NAN;
    r->drift_paper = lossy ? drift.paper_pair : NAN;
    r->lead = drift.lead;
    r->lag = drift.lag;
    r->mean_age = drift.mean_age;
    r->max_age = drift.max_age;
    memcpy(r->age_share, drift.age_share, sizeof r->age_share);
    return 0;
}

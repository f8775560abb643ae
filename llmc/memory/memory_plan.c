/* memory_plan.c — see memory_plan.h. All arithmetic is in double: exact up to 2^53. */
#include "llmc/memory/memory_plan.h"
#include "llmc/memory/worker.h"
#include "llmc/model/activations.h"
#include "llmc/backend/cpu/backend_cpu.h"
#include "llmc/backend/cpu/working.h"
#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/checkpoint/hf_model.h"

#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <string.h>

/* What a thread takes for an element and for a byte of packets that it packs, sends, receives and unpacks: CPU
 * time of dev/bench/network/bench_exchange over UDP, a core of an AMD EPYC, all wire types within 7%. */
static const double THREAD_ELEMENT = 1.4e-9, THREAD_BYTE = 0.58e-9;

struct memory_plan_settings memory_plan_of_options(const struct options *o, int workers, int seq) {
    struct memory_plan_settings s;
    memset(&s, 0, sizeof s);
    s.model = o->model;
    s.run.workers = workers;
    s.run.group = o->group_size;
    s.run.micro_batches = o->micro_batches;
    s.run.steps_alone = worker_steps_alone(o);
    s.run.narrow = o->net.wire_dtype != LOSSYNET_FLOAT32;
    s.run.changes = o->meet != NULL;
    s.batch = o->batch;
    s.seq = seq;
    s.wire.packet_bytes = o->net.packet_bytes ? o->net.packet_bytes : 4096;
    s.wire.dtype = lossynet_wire_dtype_name(o->net.wire_dtype);
    for (int phase = 0; phase < 2; phase++)
        s.wire.bytes[phase] =
            lossynet_wire_bytes((lossynet_wire_dtype)o->net.wire_dtype, (lossynet_phase)phase);
    if (o->net.wire_dtype >= LOSSYNET_INT8) s.wire.packet_bytes -= s.wire.packet_bytes % 33;
    s.wire.link_gbps = o->link_gbps;
    s.wire.threads = o->net.link_threads;
    s.cudnn = o->attention != OPTION_ATTENTION_OWN;
    s.saving.stale = o->algorithm == ALGORITHM_RELIABLE ? 0 : o->net.loss_rate[1];
    if (o->algorithm == ALGORITHM_NAIVE && workers > 1) s.saving.stale = workers / (workers - 1.0);
    s.saving.exact = o->algorithm == ALGORITHM_RELIABLE && !s.run.narrow;
    s.saving.saves = o->out || !o->train;
    s.saving.gathers = workers > 1 && (s.saving.saves || o->val || o->sample_every);
    s.saving.shard_bytes = 1e9 * o->shard_size;
    s.threads = o->threads ? o->threads : omp_get_max_threads();
    memory_plan_place(&s, workers, 0);
    return s;
}

static bool carries(const struct memory_plan_settings *s) {
    return s->saving.carries && !s->run.device;
}

static int local_of(const struct memory_plan_settings *s) { /* workers of a rank */
    return s->run.workers / s->run.ranks;
}

static int group_of(const struct memory_plan_settings *s) {
    return s->run.group > 1 ? s->run.group : 1;
}

static int groups_of(const struct memory_plan_settings *s) {
    return s->run.workers / group_of(s);
}

/* The groups of this rank, whole or a part of one. */
static int local_groups(const struct memory_plan_settings *s) {
    return (local_of(s) + group_of(s) - 1) / group_of(s);
}

/* The replicas of a rank. A replica that ranks share counts in equal parts. */
static double replicas_of(const struct memory_plan_settings *s) {
    return local_of(s) > 1 ? local_groups(s) : 1.0 / group_of(s);
}

int memory_plan_most_sets(const struct memory_plan_settings *s) {
    const int groups = s->run.evaluates ? 1 : local_groups(s);
    return groups < BACKEND_SETS ? groups : BACKEND_SETS;
}

static int sets_of(const struct memory_plan_settings *s) {
    return s->sets ? s->sets : 1;
}

/* Threads are used as in train_llama2.cu: with at least as many local groups as threads, each
 * thread computes whole groups, with activations of its own. A device has one set until it is known how
 * many fit (backend_select). */
void memory_plan_place(struct memory_plan_settings *s, int ranks, int rank) {
    s->run.ranks = ranks;
    s->saving.rank = rank;
    s->sets = local_groups(s) >= s->threads && !s->run.device ? s->threads : 1;
}

/* Elements of the largest bucket with a layer, and of the embedding's bucket. */
static void bucket_elements(const struct llama_config *c, double *layer, double *table) {
    const double P = (double)config_parameters(c), C = c->width;
    *table = C * c->vocabulary;
    *layer = (P - C - (c->tied ? 1 : 2) * *table) / c->layers + C;
}

/* Elements of a gradient in slots, as in param_layout_gradient_elements. */
static double gradient_elements(const struct llama_config *c, int slots) {
    double layer, table;
    bucket_elements(c, &layer, &table);
    if (!slots) return (double)config_parameters(c);
    return c->tied ? slots * layer + table : slots * fmax(layer, table);
}

/* The elements that a worker owns, at most. A rank with all workers has all elements. */
static double owned_of(const struct memory_plan_settings *s, double P) {
    return s->owners.largest > 0 ? fmin(s->owners.largest, P / local_of(s)) : P / s->run.workers;
}

/* The second moments of all workers together, and those that a worker has, at most. */
static double squares(const struct llama_config *c, const struct memory_plan_settings *s) {
    double layer, table;
    bucket_elements(c, &layer, &table);
    if (!(s->owners.largest > 0)) return (double)config_parameters(c);
    return (c->tied ? 1 : 2) * table + (2.0 * c->layers + 1) * c->width;
}

static double squares_of(const struct llama_config *c, const struct memory_plan_settings *s) {
    if (!(s->owners.largest > 0)) return owned_of(s, (double)config_parameters(c));
    return fmin(s->owners.squares, squares(c, s) / local_of(s));
}

/* The elements of the arrays, and how many of them the rank has. */
static struct array_sizes sizes_of(const struct llama_config *c,
                                   const struct memory_plan_settings *s) {
    const struct placement p = placement_of(&s->run);
    const double P = (double)config_parameters(c), replicas = replicas_of(s);
    const bool several = local_of(s) > 1; /* else a group's ranks share, on devices only copies */
    double layer, table;
    bucket_elements(c, &layer, &table);
    return (struct array_sizes){.whole = P,
                                .owned = owned_of(s, P),
                                .squares = squares_of(c, s),
                                .slots = gradient_elements(c, p.slots),
                                .copy_slots = gradient_elements(c, p.copy_slots),
                                .model = p.has[ARRAY_MASTER] ? fmax(layer, table) : P,
                                .workers = local_of(s),
                                .sets = sets_of(s),
                                .gradients = several ? replicas : 1,
                                .replicas = several || !s->run.device ? replicas : 1,
                                .groups = replicas};
}

/* cuDNN's attention in training: above all dS of a layer. */
static double cudnn_bytes(const struct llama_config *c, const struct memory_plan_settings *s) {
    if (!s->cudnn || !s->run.device || s->run.evaluates || s->run.dtype != DTYPE_BF16) return 0;
    return cudnn_attention_bytes(s->batch, s->seq, c->heads, c->kv_heads, c->head_size);
}

/* Workers of one device: the list of their packets, and marks or weights of one exchange. */
static double packet_bytes(const struct memory_plan_settings *s, double P) {
    const double packets = s->wire.bytes[1] * P / s->wire.packet_bytes;
    return packets *
           ((double)sizeof(struct backend_packet) + fmax(s->run.workers, 4 * groups_of(s)));
}

/* Working memory of operations (backend_cuda.cu): the logits of a chunk, sums of the backward
 * passes of attention and norms, cuDNN's attention, and the memory that opening the device
 * takes. */
static double device_bytes(const struct llama_config *c, const struct memory_plan_settings *s) {
    const size_t element = s->run.dtype == DTYPE_BF16 ? 2 : 4;
    const double N = (double)s->batch * s->seq;
    const double logits =
        (double)backend_cuda_logits_rows(s->batch * s->seq, c->vocabulary, element) *
        (double)backend_cuda_logits_row(c->vocabulary) * (double)element;
    /* Muon has its working memory where the logits were. */
    const int HD = c->heads * c->head_size, longest = c->hidden > HD ? c->hidden : HD;
    const double muon = s->owners.largest > 0 && !s->run.evaluates
                            ? (double)backend_cuda_muon_bytes(longest, c->width, element)
                            : 0;
    const double attention = 8.0 * (N + 64.0 * s->batch) * c->heads, norm = 384.0 * 4 * c->width;
    const double embedding = 4.0 * (N * (2 + c->width / 32.0) + c->vocabulary);
    const double set =
        cudnn_bytes(c, s) + fmax(logits, muon) + fmax(fmax(attention, norm), embedding);
    return sets_of(s) * set + (sets_of(s) - 1.0) * MEMORY_PLAN_PRODUCT_BYTES +
           MEMORY_PLAN_OPENED_BYTES;
}

/* The same on a CPU. */
static double cpu_bytes(const struct llama_config *c, const struct memory_plan_settings *s) {
    const int N = s->batch * s->seq, C = c->width, F = c->hidden, HD = c->heads * c->head_size;
    const int threads = s->threads > 1 ? s->threads : 1;
    const bool backward = !s->run.evaluates;
    struct cpu_working w = {0, {0}};
    if (s->run.dtype == DTYPE_BF16) w.packed = backend_cpu_multiplies_bf16() ? 2 : 4;
    cpu_working_classifier(&w, N, C, c->vocabulary, backward);
    cpu_working_attention(&w, s->seq, c->head_size, backward);
    cpu_working_matmul(&w, N, C, HD + 2 * c->kv_heads * c->head_size, backward);
    cpu_working_matmul(&w, N, HD, C, backward);
    cpu_working_matmul(&w, N, C, 2 * F, backward);
    cpu_working_matmul(&w, N, F, C, backward);
    if (s->owners.largest > 0 && backward) cpu_working_muon(&w, C > HD ? C : HD, F > HD ? F : HD);
    return cpu_working_bytes(&w, sets_of(s), threads);
}

/* The copy from which a checkpoint is written while training goes on. */
static double copy_bytes(const struct llama_config *c, const struct memory_plan_settings *s,
                         const struct memory_plan *e) {
    if (s->run.evaluates || !s->saving.saves) return 0;
    const double owned = 1.0 / s->run.ranks;
    const double stale = s->saving.stale * 4 * e->parameters * (replicas_of(s) - owned);
    return hf_model_bytes_of_rank(c, s->saving.shard_bytes, s->saving.rank, s->run.ranks) +
           e->line[LINE_OPTIMIZER] + stale + (carries(s) ? 2 * e->parameters * local_of(s) : 0) +
           e->line[LINE_AHEAD];
}

/* The state that a rank keeps from the view before: parameters, and moments of its shards; the
 * parameters that it receives, and the messages with what it owns, sent and received (handover.c). */
static double change_bytes(const struct memory_plan_settings *s, double P) {
    const double owned = owned_of(s, P) * local_of(s), state = 4 * arrays_that_follow() * owned;
    return s->run.changes && !s->run.evaluates ? 8 * P + 8 * owned + 3 * state : 0;
}

bool memory_plan_choose_recompute(const struct llama_config *c, struct memory_plan_settings *s,
                                  double available, double *total) {
    for (int r = RECOMPUTE_NONE; r < RECOMPUTE_AUTO; r++) {
        s->recompute = (enum recompute)r;
        *total = memory_plan_of_run(c, s).total_bytes;
        if (available == 0 || *total <= available) return true;
    }
    return false;
}

struct memory_plan memory_plan_of_run(const struct llama_config *config,
                                      const struct memory_plan_settings *s) {
    const struct placement p = placement_of(&s->run);
    const struct array_sizes sizes = sizes_of(config, s);
    const double P = sizes.whole, N = s->run.workers, others = (groups_of(s) - 1) * sizes.owned / P;
    const bool device = s->run.device, bf16 = s->run.dtype == DTYPE_BF16;
    struct memory_plan e = {0};
    e.parameters = P;
    for (int l = 0; l < LINES; l++) e.line[l] = array_line_bytes((enum array_line)l, &p, &sizes);
    /* Pages of host memory count when they are first written, a device's memory at once. With a
     * device, its host's memory has the model, too. */
    const bool gathers = s->saving.gathers && (!s->saving.exact || s->run.leads);
    e.line[LINE_MODEL] = (device ? N > 1 : gathers) ? array_bytes(ARRAY_MODEL, &p, &sizes) : 0;
    e.working_bytes = device ? device_bytes(config, s) : cpu_bytes(config, s);
    /* Buffers to convert parameters received in float32 (the model, to evaluate), and gradients. */
    if (p.has[ARRAY_MASTER]) e.working_bytes += 4.0 / p.copy_bytes * BACKEND_CUDA_PART_BYTES;
    if (device && N > 1 && p.way == WAY_IN_PLACE) e.working_bytes += packet_bytes(s, P);
    e.program_bytes = device ? 0 : MEMORY_PLAN_PROGRAM_BYTES;
    /* With bfloat16 copies, lossynet receives gradients in half of the memory. */
    const double received = p.copy_bytes == 2 ? 2 * sizes.owned * (groups_of(s) - 1) : 0;
    e.network_bytes = fmax(s->network_bytes - received, 0);
    e.copy_bytes = copy_bytes(config, s, &e);
    e.activation_bytes =
        (double)activations_bytes(config, bf16 ? 2 : 4, s->batch, s->seq, p.trains, s->recompute) *
        sets_of(s);
    if (s->remembers)
        e.activation_bytes += (bf16 ? 2.0 : 4.0) * s->batch * s->seq * config->layers *
                              (config->heads + 2.0 * config->kv_heads) * config->head_size;
    e.change_bytes = change_bytes(s, P);
    e.total_bytes = e.program_bytes;
    for (int l = 0; l < LINES; l++)
        if (l != LINE_COPIES && !(l == LINE_MODEL && p.has[ARRAY_COMM_PARAMS] && p.trains))
            e.total_bytes += e.line[l];
    /* Ranks hand over state while nothing is computed or saved, so only the larger of the two
     * counts. The network's memory and the copies lie where vectors are. */
    const double computing = e.working_bytes + e.activation_bytes;
    e.total_bytes +=
        device ? computing : e.network_bytes + fmax(e.copy_bytes + computing, e.change_bytes);
    /* Pinned copies of the vectors that are sent; and the model while it is evaluated, saved or
     * read. */
    if (device)
        e.host_bytes = e.network_bytes + fmax(e.copy_bytes, e.change_bytes) + e.line[LINE_MODEL] +
                       e.line[LINE_COPIES];
    /* GRADIENT: a worker sends the shards of the owners whose partner it is (without --group, of
     * all others). PARAMETER: it sends its own shard to its partners. Both phases have the same
     * number of packets and elements. */
    e.phase_packets = ceil(s->wire.bytes[1] * P * others / s->wire.packet_bytes);
    for (int phase = 0; phase < 2; phase++) {
        e.phase_bytes[phase] = s->wire.bytes[phase] * P * others;
        e.phase_seconds[phase] =
            8 *
            (e.phase_bytes[phase] +
             e.phase_packets * (s->wire.header_bytes + MEMORY_PLAN_FRAME_BYTES)) /
            (s->wire.link_gbps * 1e9);
        e.thread_seconds[phase] =
            P * others * (THREAD_ELEMENT + THREAD_BYTE * s->wire.bytes[phase]) / s->wire.threads;
    }
    return e;
}

double memory_plan_checkpoint_bytes(const struct llama_config *config,
                                    const struct memory_plan_settings *s) {
    const double P = (double)config_parameters(config), N = s->run.workers;
    const double carried = carries(s) ? N * 2 * P : 0;
    return 4 * P + 4 * (P + squares(config, s)) * (s->run.steps_alone ? N : 1) +
           s->saving.stale * (groups_of(s) - 1) * 4 * P + carried;
}

static void line(const char *what, double bytes, const char *note) {
    printf("  %-20s %10.3f GB%s%s\n", what, bytes / 1e9, *note ? "  " : "", note);
}

/* Prints the total memory with the other values of --recompute. */
static void print_recompute(const struct llama_config *config,
                            const struct memory_plan_settings *s) {
    for (int r = RECOMPUTE_NONE; r < RECOMPUTE_AUTO; r++) {
        struct memory_plan_settings other = *s;
        other.recompute = (enum recompute)r;
        printf("  %-20s %10.3f GB with --recompute %s\n", r == RECOMPUTE_NONE ? "or in all" : "",
               memory_plan_of_run(config, &other).total_bytes / 1e9, recompute_names[r]);
    }
    if (cudnn_bytes(config, s) > 0)
        printf("  %-20s %10.3f GB of it cuDNN's (--attention own: none)\n", "",
               cudnn_bytes(config, s) / 1e9);
}

void memory_plan_print_memory(const struct llama_config *config,
                              const struct memory_plan_settings *s) {
    const struct memory_plan e = memory_plan_of_run(config, s);
    printf("Memory %s", local_of(s) > 1 ? "" : "per worker ");
    if (local_of(s) > 1) printf("of a rank with %d of %d workers ", local_of(s), s->run.workers);
    printf("(%s; GB = 10^9 bytes)\n",
           s->run.dtype == DTYPE_BF16 ? "bf16, float32 where not said" : "float32");
    const struct placement p = placement_of(&s->run);
    const bool masters = p.has[ARRAY_MASTER], staged = p.has[ARRAY_COMM_PARAMS];
    const char *part =
        p.slots ? "three buckets, the average of its 1/N" : "and the average of the 1/N it owns";
    line("parameters", e.line[LINE_PARAMETERS], masters ? "float32 of the 1/N it owns" : "");
    if (e.line[LINE_WEIGHTS] > 0) line("weights in use", e.line[LINE_WEIGHTS], "bf16");
    line("gradients", e.line[LINE_GRADIENTS], masters ? part : "");
    line("optimizer state", e.line[LINE_OPTIMIZER],
         s->owners.largest > 0 ? "moments of what it owns, of matrices one"
         : !p.steps_alone      ? "two moments of the 1/N it owns"
                               : "two moments of everything");
    if (s->owners.largest > 0)
        printf("  (whole matrices have one owner: the largest owns %.3f times the mean)\n",
               s->owners.largest * s->run.workers / e.parameters);
    if (p.has[ARRAY_AHEAD])
        line("values ahead", e.line[LINE_AHEAD], "of the 1/N it owns, broadcast (--lead)");
    if (!s->run.device) line("network", e.network_bytes, "gradients that others send it");
    if (!staged) line("evaluation, saving", e.line[LINE_MODEL], "the owners' shards put together");
    if (!s->run.device)
        line("copy to save", e.copy_bytes, "its files of the model, optimizer state");
    line("activations", e.activation_bytes, s->run.dtype == DTYPE_BF16 ? "bf16" : "");
    line("working memory", e.working_bytes,
         s->run.device ? "logits, libraries, driver" : "logits, attention, copies for products");
    if (e.change_bytes > 0 && !s->run.device)
        line("or ranks change", e.change_bytes, "what they hand over, in place of the last three");
    if (!s->run.device) line("program", e.program_bytes, "with its libraries");
    line("total", e.total_bytes, "");
    if (s->run.device) {
        print_recompute(config, s);
        printf("\nMemory of the host per worker\n");
        if (staged)
            line("copies that travel", e.line[LINE_COPIES], "parameters and gradients, pinned");
        line("network", e.network_bytes,
             staged ? "gradients that others send it, pinned" : "gradients that others send it");
        line("evaluation, saving", e.line[LINE_MODEL],
             masters ? "the model, put together bucket by bucket"
                     : "for the moment: the model put together");
        line("copy to save", e.copy_bytes, "its files of the model, optimizer state");
        if (e.change_bytes > 0)
            line("or ranks change", e.change_bytes, "what they hand over, in place of that copy");
        line("host's total", e.host_bytes, "");
    }
}

void memory_plan_print(const struct llama_config *config, const struct memory_plan_settings *s) {
    const struct memory_plan e = memory_plan_of_run(config, s);
    printf("%s: %.0f parameters, %d layers of width %d, vocabulary %d\n", s->model, e.parameters,
           config->layers, config->width, config->vocabulary);
    printf("%d worker%s, one per rank, batch %d x %d tokens: %.0f tokens per step\n",
           s->run.workers, s->run.workers > 1 ? "s" : "", s->batch, s->seq,
           (double)s->run.workers * s->batch * s->seq * s->run.micro_batches);
    if (group_of(s) > 1)
        printf("groups of %d share a replica: each is on one host, which has one copy of it\n",
               group_of(s));
    printf("\n");
    memory_plan_print_memory(config, s);
    printf("\nOn disk\n");
    line("a checkpoint", memory_plan_checkpoint_bytes(config, s),
         carries(s) ? "with stale packets and lost gradients"
                    : "of all workers, stale packets too");
    printf("\nSent per worker and step, as %s; as much is received\n", s->wire.dtype);
    line("gradient phase", e.phase_bytes[0], "");
    line("parameter phase", e.phase_bytes[1], "");
    const double again =
        s->wire.resent[0] * e.phase_bytes[0] + s->wire.resent[1] * e.phase_bytes[1];
    if (again > 0) line("sent again", again, "expected at these loss rates");
    printf("  %.0f packets of at most %d bytes in each phase\n", e.phase_packets,
           s->wire.packet_bytes);
    printf("  at %g Gbit/s: %.1f", s->wire.link_gbps, 1e3 * e.phase_seconds[0]);
    if (e.phase_seconds[0] < e.phase_seconds[1]) printf(" and %.1f", 1e3 * e.phase_seconds[1]);
    printf(" ms per phase, %.1f ms per step on the link\n",
           1e3 * ((1 + s->wire.resent[0]) * e.phase_seconds[0] +
                  (1 + s->wire.resent[1]) * e.phase_seconds[1]));
    printf("  (with %d bytes of header and %d of Ethernet, IPv4 and UDP per packet)\n",
           s->wire.header_bytes, MEMORY_PLAN_FRAME_BYTES);
    if (s->run.workers > 1)
        printf("  %d thread%s of a rank (--link-threads): %.1f ms per step for its packets\n",
               s->wire.threads, s->wire.threads > 1 ? "s" : "",
               1e3 * ((1 + s->wire.resent[0]) * e.thread_seconds[0] +
                      (1 + s->wire.resent[1]) * e.thread_seconds[1]));
}

void memory_plan_print_drift(double p, double uncorrelated, double correlated, double paper) {
    printf("\nExpected drift between two replicas at parameter loss rate %g,\n"
           "losses being independent, in units of the squared size of one step's change\n",
           p);
    printf("  steps uncorrelated   %10.4f\n", uncorrelated);
    printf("  correlated by 0.9^k  %10.4f\n", correlated);
    printf("  the paper's 2p/(1+p) %10.4f\n", paper);
}

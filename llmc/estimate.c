/* estimate.c — see estimate.h. All arithmetic is in double: exact up to 2^53. */
#include "llmc/estimate.h"
#include "llmc/activations.h"
#include "llmc/backend_cuda.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct estimate_settings estimate_of_options(const struct options *o, int workers, int seq) {
    struct estimate_settings s;
    memset(&s, 0, sizeof s);
    s.model = o->model;
    s.workers = workers;
    s.batch = o->batch;
    s.seq = seq;
    s.micro_batches = o->micro_batches;
    s.sharded_optimizer = o->algorithm != ALGORITHM_RPS && o->algorithm != ALGORITHM_NAIVE;
    s.packet_bytes = o->packet_bytes ? o->packet_bytes : 4096;
    s.wire_bytes = o->wire_dtype == OPTION_WIRE_BF16 ? 2 : 4;
    s.link_gbps = o->link_gbps;
    s.stale = o->algorithm == ALGORITHM_RELIABLE ? 0 : o->parameter_loss_rate;
    return s;
}

/* What operations keep for themselves (backend_cuda.cu): logits of a chunk, sums of attention's and
 * the norms' backward passes; and what opening the device takes. */
static double working_bytes(const struct llama_config *c, const struct estimate_settings *s) {
    const size_t element = s->dtype == DTYPE_BF16 ? 2 : 4;
    const double N = (double)s->batch * s->seq;
    const double logits =
        (double)backend_cuda_logits_rows(s->batch * s->seq, c->vocabulary, element) *
        (double)backend_cuda_logits_row(c->vocabulary) * (double)element;
    const double attention = 8.0 * (N + 64.0 * s->batch) * c->heads, norm = 384.0 * 4 * c->width;
    return logits + (attention > norm ? attention : norm) + ESTIMATE_OPENED_BYTES;
}

bool estimate_choose_recompute(const struct llama_config *c, struct estimate_settings *s,
                               double available, double *total) {
    for (int r = RECOMPUTE_NONE; r < RECOMPUTE_AUTO; r++) {
        s->recompute = (enum recompute)r;
        *total = estimate_run(c, s).total_bytes;
        if (available == 0 || *total <= available) return true;
    }
    return false;
}

struct estimate estimate_run(const struct llama_config *config, const struct estimate_settings *s) {
    struct estimate e;
    const double P = (double)config_parameters(config), N = s->workers;
    const double others = (N - 1) / N, V = s->local ? s->local : 1;
    const bool half = s->dtype == DTYPE_BF16;
    e.parameters = P;
    e.parameter_bytes = 4 * P * V;
    e.gradient_bytes = s->evaluating ? 0 : 4 * P * V;
    e.optimizer_bytes = s->evaluating ? 0 : s->sharded_optimizer ? 8 * P * V / N : 8 * P * V;
    e.weight_bytes = half ? 2 * P : 0;
    e.working_bytes = s->device ? working_bytes(config, s) : 0;
    e.network_bytes = s->network_bytes;
    e.fresh_bytes = s->workers > 1 ? 4 * P : 0;
    const double fresh = s->device && s->staged && !s->evaluating ? 0 : e.fresh_bytes;
    e.copy_bytes = s->evaluating ? 0 : 4 * P + e.optimizer_bytes;
    e.activation_bytes = (double)activations_bytes(config, half ? 2 : 4, s->batch, s->seq,
                                                   !s->evaluating, s->recompute);
    e.total_bytes = e.parameter_bytes + e.gradient_bytes + e.optimizer_bytes + e.weight_bytes +
                    e.working_bytes + fresh + e.activation_bytes;
    const double host = e.network_bytes + e.copy_bytes; /* wherever the vectors are */
    if (!s->device) e.total_bytes += host;
    /* Pinned copies of what travels, and the model on its way to and from evaluation and files. */
    if (s->device)
        e.host_bytes =
            host + e.fresh_bytes + (s->staged ? e.parameter_bytes + e.gradient_bytes : 0);
    /* GRADIENT: every shard but one's own to its owner. PARAMETER: one's own shard to N-1. */
    e.phase_bytes = s->wire_bytes * P * others;
    e.phase_packets = ceil(e.phase_bytes / s->packet_bytes);
    e.phase_seconds = 8 *
                      (e.phase_bytes + e.phase_packets * (s->header_bytes + ESTIMATE_FRAME_BYTES)) /
                      (s->link_gbps * 1e9);
    return e;
}

double estimate_checkpoint_bytes(const struct llama_config *config,
                                 const struct estimate_settings *s) {
    const double P = (double)config_parameters(config), N = s->workers;
    return 4 * P + (s->sharded_optimizer ? 8 * P : 8 * P * N) + s->stale * (N - 1) * 4 * P;
}

static void line(const char *what, double bytes, const char *note) {
    printf("  %-20s %10.3f GB%s%s\n", what, bytes / 1e9, *note ? "  " : "", note);
}

/* The other choices. */
static void print_recompute(const struct llama_config *config, const struct estimate_settings *s) {
    for (int r = RECOMPUTE_NONE; r < RECOMPUTE_AUTO; r++) {
        struct estimate_settings other = *s;
        other.recompute = (enum recompute)r;
        printf("  %-20s %10.3f GB with --recompute %s\n", r == RECOMPUTE_NONE ? "or in all" : "",
               estimate_run(config, &other).total_bytes / 1e9, recompute_names[r]);
    }
}

void estimate_print(const struct llama_config *config, const struct estimate_settings *s) {
    const struct estimate e = estimate_run(config, s);
    printf("%s: %.0f parameters, %d layers of width %d, vocabulary %d\n", s->model, e.parameters,
           config->layers, config->width, config->vocabulary);
    printf("%d worker%s, one per rank, batch %d x %d tokens: %.0f tokens per step\n", s->workers,
           s->workers > 1 ? "s" : "", s->batch, s->seq,
           (double)s->workers * s->batch * s->seq * s->micro_batches);
    printf("\nMemory per worker (%s; GB = 10^9 bytes)\n",
           s->dtype == DTYPE_BF16 ? "bf16, float32 where not said" : "float32");
    line("parameters", e.parameter_bytes, "");
    if (s->dtype == DTYPE_BF16) line("weights in use", e.weight_bytes, "bf16");
    line("gradients", e.gradient_bytes, "");
    line("optimizer state", e.optimizer_bytes,
         s->sharded_optimizer ? "two moments of the 1/N it owns" : "two moments of everything");
    if (!s->device) line("network", e.network_bytes, "gradients of its shards, from others");
    if (!s->device || !s->staged)
        line("evaluation, saving", e.fresh_bytes, "the owners' shards put together");
    if (!s->device) line("copy to save", e.copy_bytes, "the model (rank 0 only), optimizer state");
    line("activations", e.activation_bytes, s->dtype == DTYPE_BF16 ? "bf16" : "");
    if (s->device) line("working memory", e.working_bytes, "logits, libraries, driver");
    line("total", e.total_bytes, "");
    if (s->device) {
        print_recompute(config, s);
        printf("\nMemory of the host per worker\n");
        if (s->staged)
            line("copies that travel", e.parameter_bytes + e.gradient_bytes,
                 "parameters and gradients, pinned");
        line("network", e.network_bytes,
             s->staged ? "gradients of its shards, from others, pinned"
                       : "gradients of its shards, from others");
        line("evaluation, saving", e.fresh_bytes, "for the moment: the model put together");
        line("copy to save", e.copy_bytes, "the model (rank 0 only), optimizer state");
        line("host's total", e.host_bytes, "");
    }
    printf("\nOn disk\n");
    line("a checkpoint", estimate_checkpoint_bytes(config, s), "of all workers, stale packets too");
    printf("\nSent per worker and step, as %s; as much is received\n",
           s->wire_bytes == 2 ? "bf16" : "float32");
    line("gradient phase", e.phase_bytes, "");
    line("parameter phase", e.phase_bytes, "");
    const double again = s->resent[0] + s->resent[1];
    if (again > 0) line("sent again", again * e.phase_bytes, "expected at these loss rates");
    printf("  %.0f packets of at most %d bytes in each phase\n", e.phase_packets, s->packet_bytes);
    printf("  at %g Gbit/s: %.1f ms per phase, %.1f ms per step on the link\n", s->link_gbps,
           1e3 * e.phase_seconds, 1e3 * (2 + again) * e.phase_seconds);
    printf("  (with %d bytes of header and %d of Ethernet, IPv4 and UDP per packet)\n",
           s->header_bytes, ESTIMATE_FRAME_BYTES);
}

void estimate_print_drift(double p, double uncorrelated, double correlated, double paper) {
    printf("\nExpected drift between two replicas at parameter loss rate %g,\n"
           "losses being independent, in units of the squared size of one step's change\n",
           p);
    printf("  steps uncorrelated   %10.4f\n", uncorrelated);
    printf("  correlated by 0.9^k  %10.4f\n", correlated);
    printf("  the paper's 2p/(1+p) %10.4f\n", paper);
}

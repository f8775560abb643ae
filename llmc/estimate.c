/* estimate.c — see estimate.h. All arithmetic is in double: exact up to 2^53. */
#include "llmc/estimate.h"
#include "llmc/activations.h"

#include <math.h>
#include <stdio.h>

struct estimate estimate_run(const struct llama_config *config, const struct estimate_settings *s) {
    struct estimate e;
    const double P = (double)config_parameters(config), N = s->workers;
    const double others = (N - 1) / N;
    e.parameters = P;
    e.parameter_bytes = e.gradient_bytes = 4 * P;
    e.optimizer_bytes = s->sharded_optimizer ? 8 * P / N : 8 * P;
    e.network_bytes = s->network_bytes;
    e.fresh_bytes = s->workers > 1 ? 4 * P : 0;
    e.copy_bytes = 4 * P + e.optimizer_bytes;
    e.activation_bytes = (double)activations_bytes(config, sizeof(float), s->batch, s->seq, true);
    e.total_bytes = e.parameter_bytes + e.gradient_bytes + e.optimizer_bytes + e.network_bytes +
                    e.fresh_bytes + e.copy_bytes + e.activation_bytes;
    /* GRADIENT: every shard but one's own to its owner. PARAMETER: one's own shard to N-1. */
    e.phase_bytes = 4 * P * others;
    e.phase_packets = ceil(e.phase_bytes / s->packet_bytes);
    e.phase_seconds = 8 *
                      (e.phase_bytes + e.phase_packets * (s->header_bytes + ESTIMATE_FRAME_BYTES)) /
                      (s->link_gbps * 1e9);
    return e;
}

static void line(const char *what, double bytes, const char *note) {
    printf("  %-20s %10.3f GB%s%s\n", what, bytes / 1e9, *note ? "  " : "", note);
}

void estimate_print(const struct llama_config *config, const struct estimate_settings *s) {
    const struct estimate e = estimate_run(config, s);
    printf("%s: %.0f parameters, %d layers of width %d, vocabulary %d\n", s->model, e.parameters,
           config->layers, config->width, config->vocabulary);
    printf("%d worker%s, one per rank, batch %d x %d tokens: %.0f tokens per step\n", s->workers,
           s->workers > 1 ? "s" : "", s->batch, s->seq,
           (double)s->workers * s->batch * s->seq * s->micro_batches);
    printf("\nMemory per worker (float32; GB = 10^9 bytes)\n");
    line("parameters", e.parameter_bytes, "");
    line("gradients", e.gradient_bytes, "");
    line("optimizer state", e.optimizer_bytes,
         s->sharded_optimizer ? "two moments of the 1/N it owns" : "two moments of everything");
    line("network", e.network_bytes, "gradients of its shards, from others");
    line("evaluation, saving", e.fresh_bytes, "the owners' shards put together");
    line("copy to save", e.copy_bytes, "the model (rank 0 only), optimizer state");
    line("activations", e.activation_bytes, "");
    line("total", e.total_bytes, "");
    printf("\nSent per worker and step; as much is received\n");
    line("gradient phase", e.phase_bytes, "");
    line("parameter phase", e.phase_bytes, "");
    printf("  %.0f packets of at most %d bytes in each phase\n", e.phase_packets, s->packet_bytes);
    printf("  at %g Gbit/s: %.1f ms per phase, %.1f ms per step on the link\n", s->link_gbps,
           1e3 * e.phase_seconds, 2e3 * e.phase_seconds);
    printf("  (with %d bytes of header and %d of Ethernet, IPv4 and UDP per packet)\n",
           s->header_bytes, ESTIMATE_FRAME_BYTES);
}

void estimate_print_drift(double p, double uncorrelated, double correlated, double paper) {
    printf("\nExpected drift between two replicas at parameter loss rate %g,\n"
           "in units of the squared size of one step's change\n",
           p);
    printf("  steps uncorrelated   %10.4f\n", uncorrelated);
    printf("  correlated by 0.9^k  %10.4f\n", correlated);
    printf("  the paper's 2p/(1+p) %10.4f\n", paper);
}

/* network.c — see network.h. */
#include "llmc/network.h"

#include <math.h>
#include <string.h>

#include "llmc/config.h"
#include "llmc/estimate.h"
#include "llmc/report.h"
#include "llmc/usage.h"
#include "llmc/worker.h"

static struct lossynet_loss_settings loss_settings(const struct options *o, int workers) {
    struct lossynet_loss_settings loss = {{o->gradient_loss_rate, o->parameter_loss_rate},
                                          o->loss_model,
                                          (uint64_t)o->loss_seed,
                                          o->loss_at,
                                          workers};
    return loss;
}

struct lossynet_settings network_settings(const struct options *o, const struct layout *l,
                                          int workers) {
    struct lossynet_settings s;
    memset(&s, 0, sizeof s);
    s.workers = workers;
    s.buckets = l->buckets;
    s.bucket_elements = l->bucket_elements;
    s.packet_bytes = (size_t)o->packet_bytes;
    s.wire_dtype = o->wire_dtype == OPTION_WIRE_BF16 ? LOSSYNET_BF16 : LOSSYNET_FLOAT32;
    s.loss = loss_settings(o, workers);
    s.carry = o->carry > 0;
    s.repair[LOSSYNET_GRADIENT] = o->gradient_repair;
    s.repair[LOSSYNET_PARAMETER] = o->parameter_repair;
    s.repair_budget = o->repair_budget;
    s.drift_samples = o->drift_samples;
    s.interface = o->interface;
    s.pace_gbps = o->pace_gbps;
    s.loss_budget = o->loss_budget;
    s.record_loss = o->record_loss;
    s.peer_timeout = o->peer_timeout;
    s.multicast = o->multicast;
    s.encrypt = o->encrypt;
    lossynet_traffic_class_parse(o->traffic_class, &s.dscp);
    lossynet_estimator_parse(o->estimator, &s.estimator);
    lossynet_link_parse(o->link, &s.link);
    if (o->algorithm == ALGORITHM_RELIABLE) {
        s.link = LOSSYNET_LINK_MPI;
        memset(s.repair, 0, sizeof s.repair);
        s.carry = false;
    }
    if (o->algorithm == ALGORITHM_RPS) s.estimator = LOSSYNET_MEAN; /* models: by who arrived */
    return s;
}

int network_check(const struct options *o, int workers) {
    const struct lossynet_loss_settings loss = loss_settings(o, workers);
    struct lossynet_loss_settings evenly = loss;
    lossynet_estimator estimator;
    lossynet_link_kind link;
    char why[256];
    int dscp, wrong = 0;
    evenly.at = NULL;
    if (!lossynet_estimator_parse(o->estimator, &estimator)) {
        wrong = report("--estimator: expected mean, balanced, ht or zero, got '%s'", o->estimator);
    } else if (!lossynet_link_parse(o->link, &link)) {
        wrong = report("--link: expected auto, mpi, udp or verbs, got '%s'", o->link);
    } else if (link > LOSSYNET_LINK_MPI && o->algorithm == ALGORITHM_RELIABLE) {
        wrong = report("--algorithm reliable: expected a link that loses nothing, --link mpi");
    } else if (o->loss_budget > 0 && !(o->pace_gbps > 0)) {
        wrong = report("--loss-budget: expected --pace-gbps too, the rate of a rank's link");
    } else if (!lossynet_traffic_class_parse(o->traffic_class, &dscp)) {
        wrong =
            report("--traffic-class: expected default, le, cs0 to cs7, af11 to af43, va, ef or a "
                   "DSCP from 0 to 63, got '%s'",
                   o->traffic_class);
    } else if (o->carry > 0 && o->algorithm != ALGORITHM_LOSSY &&
               o->algorithm != ALGORITHM_RELIABLE) {
        wrong =
            report("--carry: expected --algorithm lossy, got %s", algorithm_names[o->algorithm]);
    } else if (o->carry > 0 && estimator != LOSSYNET_MEAN && estimator != LOSSYNET_ZERO) {
        wrong = report("--carry: expected --estimator mean or zero, got %s", o->estimator);
    } else if (o->wire_dtype == OPTION_WIRE_BF16 && worker_steps_alone(o)) {
        wrong = report("--wire-dtype bf16: expected --algorithm lossy or reliable, got %s, whose "
                       "workers step on what they receive: most steps are too small for bf16",
                       algorithm_names[o->algorithm]);
    } else if (o->gpu_direct && (o->algorithm != ALGORITHM_LOSSY || o->carry > 0 || o->encrypt ||
                                 o->wire_dtype != OPTION_WIRE_FLOAT32)) {
        wrong = report("--gpu-direct: expected --algorithm lossy without --carry, --encrypt and "
                       "--wire-dtype bf16, for which the host has to see gradients");
    } else if (o->multicast && o->parameter_repair) {
        wrong = report("--multicast: expected no --repair of parameters, which are sent again to "
                       "single workers; --gradient-repair is fine");
    } else if (o->repair_budget > 0 && !o->gradient_repair && !o->parameter_repair) {
        wrong = report("--repair-budget: expected --repair too, the rounds that may use it");
    } else if (lossynet_loss_check(&evenly, why, sizeof why)) {
        wrong = report("--loss-model: %s", why);
    } else if (lossynet_loss_check(&loss, why, sizeof why)) {
        wrong = report("--loss-at: %s", why);
    }
    return wrong;
}

int network_step_begin(struct lossynet *net, const struct options *o, int step) {
    lossynet_carry_share(net, o->carry);
    return lossynet_step_begin(net, (uint64_t)step) ? -1 : 0;
}

void network_record(const struct lossynet_counters *counters, struct step_record *r) {
    for (int phase = 0; phase < 2; phase++) {
        r->expected[phase] = (double)counters->expected[phase];
        r->arrived[phase] = (double)counters->arrived[phase];
        r->resent[phase] = (double)counters->resent[phase];
    }
    memcpy(r->network, counters->network, sizeof r->network);
}

int network_dry_run(const struct options *o, int workers) {
    struct llama_config c;
    struct layout layout;
    const struct lossynet_world cluster = {0, workers, 0, 1};
    if (config_of_model(o->model, &c) ||
        config_complete(o->model, o->vocabulary ? o->vocabulary : 32000, 0, &c))
        return -1;
    if (layout_build(&c, &layout)) return -1;
    struct lossynet_settings net = network_settings(o, &layout, workers);
    struct estimate_settings settings =
        estimate_of_options(o, workers, usage_sequence_length(o, c.positions));
    settings.network_bytes = (double)lossynet_memory_needed(&cluster, &net);
    settings.header_bytes = LOSSYNET_HEADER_BYTES + (o->encrypt ? LOSSYNET_SECURE_BYTES : 0);
    settings.staged = workers > 1;
    settings.device = o->device == DEVICE_CUDA || o->dtype == OPTION_DTYPE_BF16;
    if (settings.device && o->dtype != OPTION_DTYPE_FLOAT32) settings.dtype = DTYPE_BF16;
    double left[2] = {o->gradient_loss_rate, o->parameter_loss_rate}; /* shares that stay lost */
    for (int phase = 0; phase < 2; phase++) {
        const double rate = left[phase];
        for (int r = 1; r <= net.repair[phase]; r++) {
            double again = left[phase];
            if (o->repair_budget > 0)
                again = fmin(again, o->repair_budget - settings.resent[phase]);
            settings.resent[phase] += again;
            left[phase] -= again * (1 - rate);
        }
    }
    if (o->recompute != RECOMPUTE_AUTO) settings.recompute = (enum recompute)o->recompute;
    layout_release(&layout);
    estimate_print(&c, &settings);

    const double p = left[LOSSYNET_PARAMETER];
    double correlation[LOSSYNET_LAGS];
    for (int k = 0; k < LOSSYNET_LAGS; k++) correlation[k] = pow(0.9, k + 1);
    estimate_print_drift(p, lossynet_drift_pair(workers, p, 1, correlation, 0),
                         lossynet_drift_pair(workers, p, 1, correlation, LOSSYNET_LAGS),
                         lossynet_drift_paper(p, 1));
    return 0;
}

/* settings.c — see settings.h. */
#include "llmc/comm/settings.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/checkpoint/checksum.h"
#include "llmc/model/config.h"
#include "llmc/comm/rule.h"
#include "llmc/log/error.h"
#include "llmc/memory/worker.h"

int comm_group(const struct options *o) {
    return o->group_size > 1 ? o->group_size : 1;
}

int comm_groups(const struct options *o, int workers) {
    return workers / comm_group(o);
}

int comm_layout(const struct options *o, const struct llama_config *c, int workers,
                struct param_layout *l) {
    if (param_layout_build(c, l)) return -1;
    return o->optimizer == OPTIMIZER_MUON ? param_layout_deal(l, workers) : 0;
}

/* ---- what is done about loss ------------------------------------------------------------ */

static bool lead_is_measured(const struct options *o) {
    return !worker_steps_alone(o) && o->net.lead == LOSSYNET_LEAD_AUTO;
}

bool comm_leads(const struct options *o, int workers) {
    if (worker_steps_alone(o) || comm_groups(o, workers) == 1) return false;
    return (lead_is_measured(o) && o->algorithm == ALGORITHM_LOSSY) || o->net.look_ahead > 0;
}

double comm_lead(const struct options *o, const struct lossynet_comm *comm) {
    return o->net.look_ahead + (lead_is_measured(o) ? lossynet_lead(comm) : 0);
}

/* Ranks that meet may become several. */
static int ranks_at_most(const struct options *o, int ranks) {
    return o->meet && ranks == 1 ? 2 : ranks;
}

double comm_carry(const struct options *o, int ranks, bool on_device) {
    struct lossynet_options net = o->net;
    const bool lossless = o->algorithm == ALGORITHM_RELIABLE;
    if (on_device || worker_steps_alone(o) || (lossless && net.wire_dtype < LOSSYNET_INT8))
        return 0;
    if (lossless) net.estimator = LOSSYNET_MEAN; /* as all are if everything arrives */
    return lossynet_options_carry(&net, ranks_at_most(o, ranks));
}

void comm_plan(const struct options *o, const struct param_layout *l, int workers, int ranks,
               struct memory_plan_settings *s) {
    if (l->shard_elements) {
        size_t squares;
        s->owners.largest = (double)param_layout_largest_owner(l, workers, &squares);
        s->owners.squares = (double)squares;
        s->owners.layout = l;
    }
    s->run.leads = comm_leads(o, workers);
    s->saving.carries = comm_carry(o, ranks, false) > 0;
}

/* ---- the type on the wire ---------------------------------------------------------------- */

void comm_choose_wire(struct options *o, int workers) {
    const bool gpu = o->device == DEVICE_CUDA ||
                     (o->device == DEVICE_AUTO && access("/dev/nvidiactl", F_OK) == 0);
    if (o->net.wire_dtype != LOSSYNET_WIRE_AUTO) return;
    if (o->plain || worker_steps_alone(o))
        o->net.wire_dtype = LOSSYNET_FLOAT32;
    else if (workers > 1 || o->meet)
        o->net.wire_dtype = lossynet_options_wire(&o->net);
    else /* nothing is sent: the type of a GPU's vectors */
        o->net.wire_dtype =
            gpu && o->dtype != OPTION_DTYPE_FLOAT32 ? LOSSYNET_BF16 : LOSSYNET_FLOAT32;
}

/* ---- settings --------------------------------------------------------------------------- */

int comm_rounds(const struct options *o, lossynet_phase phase) {
    const bool automatic = o->net.repair[phase] == LOSSYNET_AUTO;
    if (automatic && o->algorithm != ALGORITHM_LOSSY) return 0;
    return lossynet_options_rounds(&o->net, phase);
}

const char *comm_trace_checksum(const struct options *o) {
    static char checksum[CHECKSUM_TEXT_BYTES];
    const char *model = o->net.loss_model;
    if (!model || strncmp(model, "trace:", 6)) return NULL;
    return checksum_file(model + 6, checksum, NULL) ? NULL : checksum;
}

static bool deadline_fits(const struct options *o) {
    return o->algorithm == ALGORITHM_LOSSY && o->net.link != LOSSYNET_LINK_MPI;
}

struct lossynet_settings comm_settings(const struct options *o, const struct param_layout *l,
                                       int workers, int ranks, bool on_device) {
    struct lossynet_settings s = {0};
    lossynet_options_apply(&o->net, ranks_at_most(o, ranks), &s);
    s.workers = workers;
    s.loss.steps = (uint64_t)o->steps;
    s.group = comm_group(o);
    s.buckets = l->buckets;
    s.bucket_elements = l->bucket_elements;
    s.shard_elements = l->shard_elements;
    s.error_feedback = comm_carry(o, ranks, on_device) > 0;
    s.acknowledge_later = true; /* nothing changes gradients before their norm is exchanged */
    for (int phase = 0; phase < 2; phase++)
        s.retransmission_rounds[phase] = comm_rounds(o, (lossynet_phase)phase);
    s.rule = rule_loaded(o);
    s.network.skip_late = s.network.skip_late && deadline_fits(o);
    s.lead = lead_is_measured(o);
    if (o->algorithm == ALGORITHM_RELIABLE) {
        s.lead = false; /* nothing is lost */
        s.link = LOSSYNET_LINK_MPI;
        memset(s.retransmission_rounds, 0, sizeof s.retransmission_rounds);
        s.repair_at = NULL;
    }
    if (o->algorithm == ALGORITHM_RPS || o->algorithm == ALGORITHM_RELIABLE)
        s.estimator = LOSSYNET_MEAN; /* of the models that arrived; of everything */
    return s;
}

struct lossynet_tensor *comm_tensors(const struct param_layout *l, int *count) {
    enum { NAME = sizeof((struct named_tensor *)0)->name };
    static float vector[1]; /* for its address alone */
    size_t n;
    struct named_tensor *of = param_layout_tensor_list(l, vector, &n);
    struct lossynet_tensor *tensors = malloc(n * (sizeof *tensors + NAME));
    char *names = (char *)(tensors + n);
    for (size_t i = 0; of && tensors && i < n; i++) {
        tensors[i].name = strcpy(names + i * NAME, of[i].name);
        tensors[i].first = ((uintptr_t)of[i].data - (uintptr_t)vector) / sizeof *vector;
        tensors[i].count = model_tensor_elements(&of[i]);
    }
    *count = (int)n;
    if (of && !tensors) log_out_of_memory("the list of tensors", 0);
    if (!of) free(tensors), tensors = NULL;
    free(of);
    return tensors;
}

struct lossynet_world comm_planned_world(const struct options *o,
                                         const struct lossynet_world *launched) {
    const struct lossynet_world first = {.ranks = o->meet_ranks, .local_ranks = 1};
    return o->meet ? first : *launched;
}

/* The library's check of the network's settings. Its lines name a setting as the options do. */
static void report_setting(void *context, const char *message) {
    (void)context;
    log_error("--%s", message);
}

static int check_network(const struct options *o, int workers, int ranks,
                         const struct lossynet_tensor *tensors, int count) {
    size_t elements = 1;
    const struct param_layout layout = {.buckets = 1, .bucket_elements = &elements};
    const struct lossynet_world world = {.ranks = ranks, .local_ranks = ranks};
    struct lossynet_settings settings = comm_settings(o, &layout, workers, ranks, false);
    settings.log = report_setting;
    settings.tensors = tensors;
    settings.tensor_count = count;
    return lossynet_check(&world, &settings) ? -1 : 0;
}

int comm_check(const struct options *o, int workers, int ranks) {
    const char *algorithm = algorithm_names[o->algorithm];
    if (rule_load(o) || comm_check_device(o, o->device == DEVICE_CUDA)) return -1;
    if (o->net.link > LOSSYNET_LINK_MPI && o->algorithm == ALGORITHM_RELIABLE)
        return log_error("--algorithm reliable: expected a link that loses nothing, --link mpi");
    if (strcmp(o->net.deadline, "off") != 0 && !deadline_fits(o))
        return log_error("--deadline %s: expected --algorithm lossy over --link udp or verbs: "
                         "else ranks wait for each other",
                         o->net.deadline);
    if (o->log_buckets && strcmp(o->net.deadline, "off") != 0)
        return log_error("--log-buckets: expected no --deadline, whose steps wait for no rank");
    if (o->net.look_ahead > 0 && worker_steps_alone(o))
        return log_error("--look-ahead: expected --algorithm lossy or reliable, whose owners "
                         "broadcast parameters, got %s",
                         algorithm);
    if (o->optimizer == OPTIMIZER_MUON && worker_steps_alone(o))
        return log_error(
            "--optimizer muon: expected --algorithm lossy or reliable, whose owners have "
            "the averaged gradient of whole matrices, got %s",
            algorithm);
    if (o->net.carry > 0 && worker_steps_alone(o))
        return log_error("--carry: expected --algorithm lossy, got %s", algorithm);
    if (o->net.wire_dtype != LOSSYNET_FLOAT32 && worker_steps_alone(o)) {
        const char *wire = lossynet_wire_dtype_name(o->net.wire_dtype);
        return log_error("--wire-dtype %s: expected --algorithm lossy or reliable, got %s, whose "
                         "workers step on what they receive: most steps are too small for %s",
                         wire, algorithm, wire);
    }
    if (comm_group(o) > 1 && worker_steps_alone(o))
        return log_error("--group %d: expected --algorithm lossy or reliable, got %s",
                         comm_group(o), algorithm);
    if (comm_group(o) > 1 && o->meet)
        return log_error("--group %d: expected no --meet", comm_group(o));
    if (o->net.repair_budget > 0 && !comm_rounds(o, LOSSYNET_GRADIENT) &&
        !comm_rounds(o, LOSSYNET_PARAMETER))
        return log_error("--repair-budget: expected --repair too, the rounds that may use it");
    return check_network(o, workers, ranks, NULL, 0);
}

int comm_check_names(const struct options *o, const struct llama_config *c, int workers,
                     int ranks) {
    if (!strcmp(o->net.loss_at, "none") && !strcmp(o->net.repair_at, "none")) return 0;
    const size_t n = model_tensor_count(c);
    struct named_tensor *of = malloc(n * sizeof *of);
    struct lossynet_tensor *tensors = calloc(n, sizeof *tensors);
    int failed = of && tensors ? 0 : log_out_of_memory("the list of tensors", 0);
    if (!failed) model_tensors(c, of);
    for (size_t i = 0; i < n && !failed; i++) tensors[i].name = of[i].name;
    if (!failed) failed = check_network(o, workers, ranks, tensors, (int)n);
    free(tensors);
    free(of);
    return failed;
}

int comm_check_device(const struct options *o, bool on_device) {
    if (on_device && o->rule)
        return log_error("--rule %s: expected --device cpu: a rule's functions read vectors there",
                         o->rule);
    if (on_device && o->net.carry > 0)
        return log_error(
            "--carry: expected --device cpu: a GPU keeps no lost gradients, and more of "
            "them are sent again (--repair)");
    return 0;
}

/* step_plan.c — see step_plan.h. */
#include "llmc/memory/step_plan.h"
#include "llmc/backend/muon.h"
#include "llmc/model/param_layout.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* What a GPU does per second. The first four are data sheets' numbers. */
struct gpu {
    const char *name;
    double peak, memory; /* FLOP of dense bf16 products with float32 sums; bytes of its memory */
    double pcie, peer; /* bytes each way: from the host; from another GPU of it, 0: not possible */
    bool sm_90;        /* attention: at the rates that an H100 reaches */
};

enum part {
    STEP_PRODUCTS, /* of layers */
    STEP_ATTENTION,
    STEP_ELEMENTWISE, /* norms, rotary embedding, SwiGLU */
    STEP_AGAIN,       /* what backward computes again (--recompute) */
    STEP_CLASSIFIER,
    STEP_OPTIMIZER, /* AdamW or Muon, the norm */
    STEP_REST,      /* embedding; launches and waits of the host */
    STEP_EXCHANGE,  /* copies and packets that computing does not hide */
    STEP_PARTS
};

struct step_plan {
    double seconds[STEP_PARTS], total;
    double tokens_per_second; /* of all workers */
    double share;             /* of the peak: 6 FLOP per parameter and token, and attention's */
};

/* NVIDIA's data sheets. H100, H200 and A100 are the SXM versions, whose NVLink brings two thirds of
 * its 450, 450 and 300 GB/s; GPUs of the 4090's kind do not reach each other. A link of PCIe with 16
 * lanes brings 55 GB/s in version 5 and 25 GB/s in version 4. */
enum { GPUS = 4 };
static const struct gpu gpus[GPUS] = {
    {"H100", 989e12, 3.35e12, 55e9, 300e9, true},
    {"H200", 989e12, 4.8e12, 55e9, 300e9, true},
    {"A100", 312e12, 2.04e12, 25e9, 200e9, false},
    {"4090", 165e12, 1.008e12, 25e9, 0, false},
};

static const char *const part_name[STEP_PARTS] = {
    "products of layers", "attention",          "norms, rope, SwiGLU", "computed again",
    "classifier",         "optimizer and norm", "embedding, host",     "exchange, not hidden"};

/* Shares of the data sheet's rates, as an H100 reached them in steps of 1.1B: products of layers 741
 * TFLOP/s, the kernels that memory bounds 2.78 TB/s, AdamW 3.02 TB/s. */
static const double PRODUCT = 0.75, KERNEL = 0.83, ADAMW = 0.90;
/* Shares of the product's rate that attention reached there: our kernels and cuDNN's; heads of at
 * most 64 elements and larger ones; forward and backward. Before sm_90, mma.sync, which our kernels
 * use, has the full rate of the tensor cores; on sm_90 two thirds of it. */
static const double ATTENTION[2][2][2] = {{{0.33, 0.23}, {0.37, 0.24}},
                                          {{0.45, 0.30}, {0.64, 0.46}}};
static const double BEFORE_SM_90 = 1.5;
/* Launches that do not overlap with kernels, and waits for the norm; exchanging the norm. */
static const double HOST = 2e-3, NORM = 1e-3;

struct passes { /* of a micro-batch */
    double forward, backward;
};

/* FLOP of Muon's products of the matrix (rows, cols), and of those of a layer. */
static double muon_product_flop(double rows, double cols) {
    const double S = fmin(rows, cols), n = rows * cols;
    return MUON_STEPS * (4 * S * n + 2 * S * S * S);
}

static double muon_flop(double C, double HD, double KD, double F) {
    return 2 * muon_product_flop(HD, C) + 2 * muon_product_flop(KD, C) +
           3 * muon_product_flop(F, C);
}

/* Fills the operations' parts of a step. */
static struct passes computing(const struct llama_config *c, const struct memory_plan_settings *s,
                               const struct gpu *gpu, double *seconds) {
    const double B = s->batch, T = s->seq, N = B * T, M = fmax(s->run.micro_batches, 1);
    const double C = c->width, L = c->layers, H = c->heads, K = c->kv_heads, D = c->head_size;
    const double F = c->hidden, V = c->vocabulary, P = (double)config_parameters(c);
    const double QKV = (H + 2 * K) * D, HD = H * D, weights = C * QKV + HD * C + 3 * F * C;
    const double flop = 1 / (PRODUCT * gpu->peak), byte = 1 / (KERNEL * gpu->memory);
    const double *share = ATTENTION[s->cudnn && gpu->sm_90][c->head_size > 64];
    const double faster = gpu->sm_90 ? 1 : BEFORE_SM_90;
    /* A product of T x T x D, half of which the mask hides, for all heads. Forward has 2 of them,
     * backward 5. */
    const double heads = B * H * T * T * D * flop / faster;
    const double attention = 2 * heads / share[0], back = 5 * heads / share[1];
    const double elements = N * (32 * C + 8 * (H + K) * D + 16 * F) * byte; /* in bf16 */
    const double classifier = 6 * N * C * V * flop + 4 * N * V * byte;
    double again = 0; /* of a layer */
    if (s->recompute != RECOMPUTE_NONE) again += N * (8 * C + 6 * F) * byte;
    if (s->recompute >= RECOMPUTE_ATTENTION)
        again += 2 * N * C * QKV * flop + 4 * N * (H + K) * D * byte + attention;
    if (s->recompute == RECOMPUTE_BLOCK)
        again += 2 * N * (HD * C + 2 * F * C) * flop + 4 * N * C * byte;
    seconds[STEP_PRODUCTS] = M * L * 6 * N * weights * flop;
    seconds[STEP_ATTENTION] = M * L * (attention + back);
    seconds[STEP_ELEMENTWISE] = M * L * elements;
    seconds[STEP_AGAIN] = M * (L - 1) * again;
    seconds[STEP_CLASSIFIER] = M * classifier;
    const double mine = fmax(s->owners.largest, P / s->run.workers);
    seconds[STEP_OPTIMIZER] = 34 * mine / (ADAMW * gpu->memory); /* AdamW 30 bytes, the norm 4 */
    if (s->owners.largest > 0)
        seconds[STEP_OPTIMIZER] += L * muon_flop(C, HD, K * D, F) * mine / P * flop;
    seconds[STEP_REST] = M * (N * 6 * C + 4 * V * C) * byte + HOST;
    const struct passes passes = {L * (2 * N * weights * flop + attention + elements / 3),
                                  L * (4 * N * weights * flop + back + elements * 2 / 3) +
                                      (L - 1) * again + classifier};
    return passes;
}

static double largest(double a, double b, double c, double d) {
    return fmax(fmax(a, b), fmax(c, d));
}

/* With Muon, what computing cannot hide because owners have unequal shards of a layer: all workers send
 * to, or wait for, the owner that has most. phase: seconds of packets of the largest owner. */
static double backlog(const struct llama_config *c, const struct memory_plan_settings *s,
                      double phase, double pass) {
    if (!(s->owners.largest > 0) || !(phase > 0)) return 0;
    const double elements = s->owners.largest / phase; /* of a second */
    return param_layout_backlog(s->owners.layout, s->run.workers, elements * pass / c->layers) /
           elements;
}

/* What of the exchange is left when computing has hidden what it can. In each direction a bucket
 * goes through several links, each of which has other buckets meanwhile: together they take as long
 * as the slowest. The last bucket of gradients and the first of parameters, those of the table of
 * the embedding, have nothing beside them. */
static double exchange(const struct llama_config *c, const struct memory_plan_settings *s,
                       const struct gpu *gpu, struct passes passes, bool overlap) {
    const struct placement place = placement_of(&s->run);
    const struct memory_plan plan = memory_plan_of_run(c, s);
    const double P = plan.parameters, owned = fmax(s->owners.largest, P / s->run.workers),
                 element = place.copy_bytes;
    const double G = place.way == WAY_SHARED ? s->run.group : 1;
    const bool mapped = place.copy_slots && gpu->peer > 0;
    const double received = plan.phase_bytes[0] / s->wire.bytes[0]; /* elements */
    const double again = 1 + s->wire.resent[0];
    const double table = (double)c->vocabulary * c->width / P; /* nothing is beside its exchange */
    if (s->run.workers == 1) return 0;
    /* Backward: sums, or all of a gradient, to the host; what others sent, own sums and averages to
     * the GPU, and without mapped memory the gradients of the group. */
    const double down = element * (mapped ? P / G : P) / gpu->pcie;
    const double up =
        (element * (received + owned + (G > 1 && !mapped ? P : 0)) + 4 * owned) / gpu->pcie;
    const double read = mapped ? 4 * P * (G - 1) / G / gpu->peer : 0;
    const double gradients = fmax(plan.phase_seconds[0], plan.thread_seconds[0]) * again;
    /* Between: what the owners broadcast, to the host. */
    const double fresh =
        ((place.copy_bytes == 2 ? 6 : 4) + (place.has[ARRAY_AHEAD] ? 4 : 0)) * owned / gpu->pcie;
    /* Forward: the replica to the GPU. */
    const double replica =
        (place.has[ARRAY_MASTER] ? element : 4) * P / (mapped ? G : 1) / gpu->pcie;
    const double copied = mapped ? 2 * P * (G - 1) / G / gpu->peer : 0;
    const double parameters =
        fmax(plan.phase_seconds[1], plan.thread_seconds[1]) * (1 + s->wire.resent[1]);
    const double backward_all = down + up + read + gradients,
                 forward_all = replica + copied + parameters;
    if (!overlap) return backward_all + NORM + fresh + forward_all;
    const double in_backward =
        fmax(0, largest(down, up, read, gradients) - passes.backward) + table * backward_all;
    const double in_forward =
        fmax(0, largest(replica, copied, parameters, 0) - passes.forward) + table * forward_all;
    return fmax(in_backward, backlog(c, s, gradients, passes.backward)) + NORM + fresh +
           fmax(in_forward, backlog(c, s, parameters, passes.forward));
}

static struct step_plan plan_of_run(const struct llama_config *c,
                                    const struct memory_plan_settings *s, const struct gpu *gpu,
                                    bool overlap) {
    struct step_plan plan;
    memset(&plan, 0, sizeof plan);
    const struct passes passes = computing(c, s, gpu, plan.seconds);
    plan.seconds[STEP_EXCHANGE] = exchange(c, s, gpu, passes, overlap);
    for (int i = 0; i < STEP_PARTS; i++) plan.total += plan.seconds[i];
    const double tokens = (double)s->batch * s->seq * fmax(s->run.micro_batches, 1);
    /* The embedding is looked up, not multiplied; if it is tied, the classifier multiplies it. */
    const double P =
        (double)config_parameters(c) - (c->tied ? 0 : (double)c->vocabulary * c->width);
    const double flop = 6 * P + 6.0 * c->layers * c->heads * c->head_size * s->seq; /* of a token */
    plan.tokens_per_second = s->run.workers * tokens / plan.total;
    plan.share = flop * tokens / plan.total / gpu->peak;
    return plan;
}

double step_plan_seconds(const struct llama_config *c, const struct memory_plan_settings *s,
                         const char *device) {
    for (int g = 0; g < GPUS; g++)
        if (strstr(device, gpus[g].name)) return plan_of_run(c, s, &gpus[g], true).total;
    return 0;
}

void step_plan_print(const struct llama_config *c, const struct memory_plan_settings *s,
                     bool overlap) {
    struct step_plan plan[GPUS];
    printf("\nExpected milliseconds of a step, one GPU for each worker, --recompute %s\n"
           "(rates of an H100, on which 110M to 7B-shaped models took 0.98 to 1.04 of it;\n"
           " others by their data sheets)\n  %-20s",
           recompute_names[s->recompute], "");
    for (int g = 0; g < GPUS; g++) {
        plan[g] = plan_of_run(c, s, &gpus[g], overlap);
        printf(" %10s", gpus[g].name);
    }
    for (int part = 0; part <= STEP_PARTS; part++) {
        printf("\n  %-20s", part < STEP_PARTS ? part_name[part] : "step");
        for (int g = 0; g < GPUS; g++)
            printf(" %10.1f", 1e3 * (part < STEP_PARTS ? plan[g].seconds[part] : plan[g].total));
    }
    printf("\n  %-20s", "tokens per second");
    for (int g = 0; g < GPUS; g++) printf(" %10.0f", plan[g].tokens_per_second);
    printf("\n  %-20s", "share of the peak");
    for (int g = 0; g < GPUS; g++) printf(" %9.1f%%", 100 * plan[g].share);
    printf("\n");
}

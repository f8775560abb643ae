/* gpu_bench.c — times operations and training steps on a GPU. gpu_check.py makes a report of it.
 *
 *   gpu_bench peak SIZE BYTES               a product of SIZE cubed in bf16; a copy of BYTES
 *   gpu_bench host SIZE BYTES               copies of BYTES to and from pinned memory, alone and
 *                                           beside products
 *   gpu_bench step PRESET LAYERS B T STEPS [cudnn LOSS]
 *                                           training steps; LAYERS 0: as many as the memory holds;
 *                                           with --attention cudnn, and compared
 *                                           with LOSS, that of the last step without it
 *   gpu_bench attention B T H K D [cudnn]   forward and backward, by our kernels or by cuDNN's
 *   gpu_bench kernels N C F H K D V         each operation that memory bounds, bf16, N rows
 *   gpu_bench train OPTIONS ...             train_llama2's options: one run, its perplexity and
 *                                           drift
 *
 * Prints a JSON object per line. A time is the mean of calls in a row, with one wait at the end,
 * after two calls that do not count. The calls take at least GPU_BENCH_SECONDS (default 0.2; 0: one
 * call). Bytes are those that an operation must read and write once, by its definition in
 * llmc/backend/backend.h; what it reads twice counts once. Exits with 77 if there is no device. */
#include "dev/bench/gpu/gpu_model.h"
#include "llmc/comm/settings.h"
#include "llmc/backend/cuda/attention/cudnn_plan.h"
#include "lossynet/base/wire.h"
#include "lossynet/partition/partition.h"

/* ---- timing ------------------------------------------------------------------------------- */

enum { NO_DEVICE = 77 }; /* exit code */

static const struct backend *be;
static float *waited_for; /* 1 */

static void wait_for_all(void) {
    float x;
    be->download(&x, waited_for, sizeof x);
}

typedef void (*call)(void *context);

static double seconds_of(call call, void *context) {
    const char *wanted = getenv("GPU_BENCH_SECONDS");
    const double least = wanted ? atof(wanted) : 0.2;
    int calls = 1;
    for (int i = 0; i < 2 && least > 0; i++) call(context);
    for (;;) {
        wait_for_all();
        const double start = seconds();
        for (int i = 0; i < calls; i++) call(context);
        wait_for_all();
        const double took = seconds() - start;
        if (took >= least || calls >= 1 << 20) return took / calls;
        calls = took > least / 16 ? (int)(1.3 * calls * least / took) + 1 : calls * 8;
    }
}

/* ---- what the chip can do ----------------------------------------------------------------- */

struct peak {
    tensor *a, *b, *out;
    int size;
    size_t bytes;
};

static void product_once(void *context) {
    const struct peak *p = (const struct peak *)context;
    be->matmul_forward(p->out, p->a, p->b, p->size, p->size, p->size);
}

static void copy_once(void *context) {
    const struct peak *p = (const struct peak *)context;
    be->copy(p->out, p->a, p->bytes);
}

static int peak(int size, size_t bytes) {
    const size_t n = (size_t)size * size;
    struct peak p = {filled(be, n, 1, false), filled(be, n, 1, false), filled(be, n, 1, false),
                     size, bytes};
    const double product = seconds_of(product_once, &p);
    be->release(p.a);
    be->release(p.b);
    be->release(p.out);
    p.a = filled(be, bytes / 4, 1, true);
    p.out = filled(be, bytes / 4, 1, true);
    const double copy = seconds_of(copy_once, &p);
    printf("{\"what\": \"peak\", \"device\": \"%s\", \"size\": %d, \"seconds\": %.9g, "
           "\"flops\": %.9g, \"copy_bytes\": %.9g, \"copy_seconds\": %.9g}\n",
           be->details, size, product, 2.0 * size * size * size, 2.0 * (double)bytes, copy);
    return 0;
}

/* ---- between host and device --------------------------------------------------------------- */

struct host_copies {
    struct peak product;
    char *device, *pinned;
    size_t bytes;
    int products; /* so many that they take longer than a copy */
    bool to_host, multiplies;
};

static void copies_once(void *context) {
    const struct host_copies *h = (const struct host_copies *)context;
    if (h->to_host)
        be->d2h_async(h->pinned, h->device, h->bytes);
    else
        be->h2d_async(h->device, h->pinned, h->bytes);
    for (int i = 0; h->multiplies && i < h->products; i++)
        product_once((void *)(uintptr_t)&h->product);
    be->d2h_wait();
}

static void products_once(void *context) {
    const struct host_copies *h = (const struct host_copies *)context;
    for (int i = 0; i < h->products; i++) product_once((void *)(uintptr_t)&h->product);
}

/* Times copies, products, and products that run beside copies. */
static int host(int size, size_t bytes) {
    const size_t n = (size_t)size * size;
    const struct peak product = {filled(be, n, 1, false), filled(be, n, 1, false),
                                 filled(be, n, 1, false), size, 0};
    struct host_copies h = {
        product, (char *)be->allocate(bytes), (char *)be->allocate_pinned(bytes), bytes, 1, true,
        false};
    if (!h.device || !h.pinned) return log_out_of_memory("what is copied", (double)bytes);
    memset(h.pinned, 0, bytes);
    const double out = seconds_of(copies_once, &h);
    h.to_host = false;
    const double in = seconds_of(copies_once, &h);
    h.products = 1 + (int)(1.5 * out / seconds_of(product_once, &h.product));
    const double alone = seconds_of(products_once, &h);
    h.to_host = h.multiplies = true;
    const double beside = seconds_of(copies_once, &h);
    printf("{\"what\": \"host\", \"bytes\": %.9g, \"to_host_seconds\": %.9g, "
           "\"to_device_seconds\": %.9g, \"products_seconds\": %.9g, "
           "\"products_beside_copy_seconds\": %.9g}\n",
           (double)bytes, out, in, alone, beside);
    return 0;
}

/* ---- training steps ----------------------------------------------------------------------- */

/* loss: the last of the same steps, computed by default; 0: these are computed by default. A step
 * learns much of its one batch, so the last loss can be near 0, and a relative error of it says
 * little. Of the first loss, cuDNN's is off by 0.001% (1.1B on an H100). */
static int step(const char *preset, int layers, int B, int T, int steps, bool cudnn, double loss) {
    const double bound = 0.01; /* of the first loss */
    struct trained x;
    if (train_a_while(preset, layers, B, T, steps, cudnn, &x)) return -1;
    printf("{\"what\": \"step\", \"model\": \"%s\", \"layers\": %d, \"of_layers\": %d, "
           "\"batch\": %d, \"seq\": %d, \"recompute\": \"%s\", \"seconds\": %.9g, "
           "\"flops_6n\": %.9g, \"flops\": %.9g, \"parameters\": %.0f, \"used_bytes\": %.0f, "
           "\"estimated_bytes\": %.0f, \"first_loss\": %.6g, \"last_loss\": %.6g, "
           "\"expected_seconds\": %.9g, \"cudnn\": %d}\n",
           preset, x.layers, x.of_layers, B, T, recompute_names[x.recompute], x.seconds, x.flops_6n,
           x.flops, x.parameters, x.used_bytes, x.estimated_bytes - MEMORY_PLAN_OPENED_BYTES,
           x.first_loss, x.last_loss, x.expected, be->attention_choice->library);
    fflush(stdout);
    if (!isfinite(x.last_loss)) return log_error("the loss is %g", x.last_loss);
    const double error = loss > 0 ? fabs(x.last_loss - loss) / x.first_loss : 0;
    if (error <= bound) return 0;
    return log_error("the last loss is %.6g, by default %.6g: off by %.2g%% of the first loss, "
                     "%.6g; %g%% allowed",
                     x.last_loss, loss, 100 * error, x.first_loss, 100 * bound);
}

/* ---- attention ---------------------------------------------------------------------------- */

struct attention {
    int B, T, H, K, D;
    tensor *qkv, *out, *dqkv, *dout;
    float *log_sum_exp;
};

static void attention_forward_once(void *context) {
    const struct attention *a = (const struct attention *)context;
    be->attention_forward(a->out, a->log_sum_exp, a->qkv, a->B, a->T, a->H, a->K, a->D);
}

static void attention_backward_once(void *context) {
    const struct attention *a = (const struct attention *)context;
    be->attention_backward(a->dqkv, a->dout, a->out, a->qkv, a->log_sum_exp, a->B, a->T, a->H, a->K,
                           a->D);
}

static int attention(int B, int T, int H, int K, int D, bool cudnn) {
    const size_t rows = (size_t)B * T, wide = rows * (size_t)(H + 2 * K) * (size_t)D;
    const size_t narrow = rows * (size_t)H * (size_t)D;
    struct attention a = {B,
                          T,
                          H,
                          K,
                          D,
                          filled(be, wide, 1, false),
                          filled(be, narrow, 1, false),
                          filled(be, wide, 1, false),
                          filled(be, narrow, 1, false),
                          (float *)filled(be, rows * (size_t)H, 1, true)};
    if (cudnn) {
        be->attention_choice->library = be->attention_open(B, T, H, K, D);
        be->attention_choice->made = true;
        if (!be->attention_choice->library) return log_error("%s", be->attention_choice->failed);
    }
    const double forward = seconds_of(attention_forward_once, &a);
    const double backward = seconds_of(attention_backward_once, &a);
    const double product = 2.0 * B * H * (double)T * T * D / 2; /* of one product, causal */
    printf("{\"what\": \"attention\", \"batch\": %d, \"seq\": %d, \"heads\": %d, "
           "\"kv_heads\": %d, \"head_size\": %d, \"forward_seconds\": %.9g, "
           "\"backward_seconds\": %.9g, \"forward_flops\": %.9g, \"backward_flops\": %.9g}\n",
           B, T, H, K, D, forward, backward, 2 * product, 5 * product);
    return 0;
}

/* ---- what memory bounds ------------------------------------------------------------------- */

struct shapes {
    int N, C, F, H, K, D, V, rows; /* rows: of the classifier's logits at a time */
    size_t P;                      /* elements of flat vectors */
    tensor *x[4], *w, *wide[3], *qkv, *table, *weights; /* (N, C), (C), (N, 2F), ..., (V, C), (P) */
    float *rstd, *dw, *angles[2], *vector[6], *losses, *dtable, *pinned;
    int32_t *tokens;
    uint8_t *arrived;
    float *weight;
    size_t packet, packets;
    struct backend_exchange exchange; /* worker 0 receives what worker 1 owns: everything */
    float *exchanged[2];
};
enum { SENDERS = 4 };

static void rmsnorm_forward(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->rmsnorm_forward(s->x[0], s->rstd, s->x[1], s->w, s->N, s->C, 1e-5f);
}
static void residual_rmsnorm(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->residual_rmsnorm_forward(s->x[0], s->x[1], s->rstd, s->x[2], s->x[3], s->w, s->N, s->C,
                                 1e-5f);
}
static void rmsnorm_backward(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->rmsnorm_backward(s->x[0], s->dw, s->x[1], s->x[2], s->w, s->rstd, s->N, s->C, false);
}
static void rope_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->rope(s->qkv, s->angles[0], s->angles[1], 1, s->N, s->H, s->K, s->D, false);
}
static void swiglu_forward(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->swiglu_forward(s->wide[2], s->wide[0], s->N, s->F);
}
static void swiglu_backward(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->swiglu_backward(s->wide[1], s->wide[2], s->wide[0], s->N, s->F);
}
static void embedding_forward(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->embedding_forward(s->x[0], s->tokens, s->table, s->N, s->C);
}
static void embedding_backward(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->embedding_backward(s->dtable, s->tokens, s->x[0], s->N, s->C, s->V, false);
}
static void classifier_whole(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->classifier(s->losses, s->x[0], s->dtable, s->x[1], s->table, s->tokens, s->rows, s->C, s->V,
                   1.0f / (float)s->rows, false);
}
static void classifier_products(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->matmul_forward(s->wide[0], s->x[1], s->table, s->rows, s->C, s->V);
    be->matmul_backward_input(s->x[0], s->wide[0], s->table, s->rows, s->C, s->V, false);
    be->matmul_backward_weight(s->dtable, s->wide[0], s->x[1], s->rows, s->C, s->V, false);
}
static void adamw_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    const struct adamw_settings settings = {0.9f, 0.95f, 1e-8f, 0};
    be->adamw(s->vector[0], s->vector[0], s->vector[1], s->vector[2], NULL, s->vector[3], s->P,
              &settings, 100, 1e-4f, 0.1f, 1);
}
static void convert_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->convert(s->weights, s->vector[0], s->P);
}
static void norm_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->sum_of_squares(s->vector[0], s->P);
}
static void average_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    const float *const sender[SENDERS] = {s->vector[0], s->vector[1], s->vector[2], s->vector[3]};
    be->weighted_sum(s->vector[4], sender, s->weight, SENDERS, s->P, s->packet);
}
static void average_pinned_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    const float *sender[SENDERS];
    for (int i = 0; i < SENDERS; i++) sender[i] = s->pinned + (size_t)i * s->P;
    be->weighted_sum_pinned(s->pinned, sender, s->weight, SENDERS, s->P, s->packet);
}
static void exchange_copy_once(void *context) {
    struct shapes *s = (struct shapes *)context;
    be->exchange_copy(&s->exchange, s->exchanged, NULL, s->arrived, 32);
}

static void kernel_line(const char *name, const char *shape, double seconds, double bytes) {
    printf("{\"what\": \"kernel\", \"name\": \"%s\", \"shape\": \"%s\", \"seconds\": %.9g, "
           "\"bytes\": %.9g}\n",
           name, shape, seconds, bytes);
    fflush(stdout);
}

static void fill_shapes(struct shapes *s) {
    const size_t N = (size_t)s->N, C = (size_t)s->C, F = (size_t)s->F, V = (size_t)s->V;
    const size_t logits = (size_t)s->rows * V, gates = N * 2 * F;
    for (int i = 0; i < 4; i++) s->x[i] = filled(be, N * C, 1, false);
    s->w = filled(be, C, 1, false);
    s->wide[0] = filled(be, gates > logits ? gates : logits, 1, false);
    s->wide[1] = filled(be, gates, 1, false);
    s->wide[2] = filled(be, N * F, 1, false);
    s->qkv = filled(be, N * (size_t)(s->H + 2 * s->K) * (size_t)s->D, 1, false);
    s->table = filled(be, V * C, 0.02, false);
    s->weights = filled(be, s->P, 1, false);
    s->rstd = (float *)filled(be, N, 1, true);
    s->dw = (float *)filled(be, C, 1, true);
    for (int i = 0; i < 2; i++) s->angles[i] = (float *)filled(be, N * (size_t)s->D / 2, 1, true);
    for (int i = 0; i < 5; i++) s->vector[i] = (float *)filled(be, s->P, 1, true);
    be->clear(s->vector[2], s->P * sizeof(float)); /* second moments are not negative */
    s->losses = (float *)filled(be, N, 1, true);
    s->dtable = (float *)filled(be, V * C, 1, true);
    s->tokens = tokens_below(be, s->N, s->V);
    s->pinned = (float *)be->allocate_pinned(SENDERS * s->P * sizeof(float));
    if (!s->pinned) exit(1);
    memset(s->pinned, 0, SENDERS * s->P * sizeof(float));
    s->packets = (s->P + s->packet - 1) / s->packet;
    s->arrived = (uint8_t *)calloc(2 * s->packets, 1);
    s->weight = (float *)calloc(s->packets * SENDERS, sizeof(float));
    if (!s->arrived || !s->weight) exit(1);
    for (size_t k = 0; k < s->packets; k++) {
        s->arrived[k] = 1;
        for (int i = 0; i < SENDERS; i++) s->weight[k * SENDERS + i] = 1.0f / SENDERS;
    }
}

static void *on_device(const void *host, size_t bytes) {
    void *memory = be->allocate(bytes);
    if (!memory) exit(1);
    be->upload(memory, host, bytes);
    return memory;
}

static void fill_exchange(struct shapes *s) {
    static const uint8_t takes[] = {0, 1, 0, 0};
    static const int32_t partner[] = {0, 1, 0, 1};
    struct backend_packet *packet = (struct backend_packet *)calloc(s->packets, sizeof *packet);
    if (!packet) exit(1);
    for (size_t k = 0; k < s->packets; k++) {
        const size_t at = k * s->packet, left = s->P - at;
        packet[k].element = packet[k].owned = at;
        packet[k].count = (uint32_t)(left < s->packet ? left : s->packet);
        packet[k].owner = 1;
    }
    const struct backend_exchange exchange = {
        (const struct backend_packet *)on_device(packet, s->packets * sizeof *packet),
        (const uint8_t *)on_device(takes, sizeof takes),
        partner,
        (uint32_t)s->packets,
        (uint32_t)s->packet,
        2,
        2,
        2};
    s->exchange = exchange;
    s->exchanged[0] = s->vector[4], s->exchanged[1] = s->vector[0];
    free(packet);
}

static int kernels(int N, int C, int F, int H, int K, int D, int V) {
    struct shapes s;
    char nc[64], nf[64], qkv[64], vc[64], p[64];
    memset(&s, 0, sizeof s);
    s.N = N, s.C = C, s.F = F, s.H = H, s.K = K, s.D = D, s.V = V;
    s.rows = backend_cuda_logits_rows(N, V, be->element_bytes);
    s.P = (size_t)V * C;
    /* As over RDMA with its largest MTU. */
    s.packet = ln_payload_elements(LOSSYNET_FLOAT32,
                                   ln_payload_default(LOSSYNET_FLOAT32, 4096 - WIRE_HEADER_BYTES));
    fill_shapes(&s);
    fill_exchange(&s);
    const double e = (double)be->element_bytes, n = (double)N * C, f = (double)N * F;
    const double P = (double)s.P;
    snprintf(nc, sizeof nc, "%d x %d", N, C);
    snprintf(nf, sizeof nf, "%d x %d", N, F);
    snprintf(qkv, sizeof qkv, "%d x %d", N, (H + K) * D);
    snprintf(vc, sizeof vc, "%d x %d", s.rows, V);
    snprintf(p, sizeof p, "%.0f", P);
    kernel_line("rmsnorm_forward", nc, seconds_of(rmsnorm_forward, &s), 2 * n * e + 4.0 * N);
    kernel_line("residual_rmsnorm_forward", nc, seconds_of(residual_rmsnorm, &s),
                4 * n * e + 4.0 * N);
    kernel_line("rmsnorm_backward", nc, seconds_of(rmsnorm_backward, &s), 4 * n * e + 4.0 * N);
    kernel_line("rope", qkv, seconds_of(rope_once, &s), 2.0 * N * (H + K) * D * e + 4.0 * N * D);
    kernel_line("swiglu_forward", nf, seconds_of(swiglu_forward, &s), 3 * f * e);
    kernel_line("swiglu_backward", nf, seconds_of(swiglu_backward, &s), 5 * f * e);
    kernel_line("embedding_forward", nc, seconds_of(embedding_forward, &s), 2 * n * e + 4.0 * N);
    kernel_line("embedding_backward", nc, seconds_of(embedding_backward, &s),
                n * e + 4 * P + 4.0 * N);
    const double whole = seconds_of(classifier_whole, &s);
    const double products = seconds_of(classifier_products, &s);
    kernel_line("classifier less its products", vc, whole - products,
                2.0 * s.rows * V * e + 8.0 * s.rows);
    kernel_line("adamw", p, seconds_of(adamw_once, &s), 28 * P);
    kernel_line("convert", p, seconds_of(convert_once, &s), (4 + e) * P);
    kernel_line("sum_of_squares", p, seconds_of(norm_once, &s), 4 * P);
    kernel_line("weighted_sum of 4", p, seconds_of(average_once, &s),
                4.0 * (SENDERS + 1) * P + 4.0 * SENDERS * (double)s.packets);
    kernel_line("weighted_sum of 4, from the host", p, seconds_of(average_pinned_once, &s),
                4.0 * SENDERS * P); /* the result goes back over the link's other direction */
    kernel_line("exchange_copy", p, seconds_of(exchange_copy_once, &s), 8 * P + (double)s.packets);
    return 0;
}

/* ---- a run with loss ---------------------------------------------------------------------- */

/* Trains as the program does, but without its log, which needs Jansson. */
static int train_once(int argc, char **argv) {
    struct options o;
    struct trainer t;
    struct eval_metrics eval;
    const struct lossynet_world alone = {.ranks = 1, .local_ranks = 1};
    double drift = 0, expected = 0, lost[2] = {0, 0};
    int drifts = 0;
    memset(&t, 0, sizeof t);
    if (options_parse(argc, argv, &o)) return -1;
    comm_choose_wire(&o, o.net.workers ? o.net.workers : 1);
    t.run.options = &o;
    t.run.world = alone;
    trainer_begin(&t);
    if (prepare(&t, true)) return -1;
    const double start = seconds();
    for (t.run.at.step = 0; t.run.at.step < o.steps; t.run.at.step++) {
        if (training_step(&t, t.run.at.step)) return -1;
        t.run.at.sequence += (uint64_t)o.micro_batches * t.dp.workers * t.B;
        for (int phase = 0; phase < 2; phase++)
            lost[phase] += t.view.last.expected[phase] - t.view.last.arrived[phase];
        if (t.run.at.step < o.steps / 2 || !(t.view.last.drift_expected > 0)) continue;
        drift += t.view.last.drift;
        expected += t.view.last.drift_expected;
        drifts++;
    }
    const double took = seconds() - start;
    if (evaluate(&t, o.steps, &eval)) return -1;
    const double steps = o.steps, packets = t.view.last.expected[0] * steps;
    printf("{\"what\": \"train\", \"workers\": %d, \"loss_rate\": %g, \"steps\": %d, "
           "\"tokens\": %.0f, \"seconds\": %.9g, \"last_loss\": %.6g, \"val_loss\": %.9g, "
           "\"replica_val_loss\": %.9g, \"drift\": %.6g, \"drift_expected\": %.6g, "
           "\"gradient_lost\": %.6g, \"parameter_lost\": %.6g}\n",
           t.dp.workers, o.net.loss_rate[1], o.steps, t.view.record.tokens * steps, took,
           t.view.record.loss, eval.val_loss, eval.replica_val_loss, drifts ? drift / drifts : 0,
           drifts ? expected / drifts : 0, packets > 0 ? lost[0] / packets : 0,
           packets > 0 ? lost[1] / packets : 0);
    trainer_release(&t);
    return 0;
}

/* ---- main --------------------------------------------------------------------------------- */

int main(int argc, char **argv) {
    char why[256];
    int n[8] = {0};
    const char *what = argc > 1 ? argv[1] : "";
    for (int i = 2; i < argc && i < 10; i++) n[i - 2] = atoi(argv[i]);
    if (!strcmp(what, "train")) return train_once(argc - 1, argv + 1) ? 1 : 0;
    const bool steps = !strcmp(what, "step") && (argc == 7 || argc == 9);
    const bool cudnn = argc > 7 && !strcmp(argv[7], "cudnn");
    be = backend_cuda(DTYPE_BF16, 0, why, sizeof why);
    if (!be) return log_error("%s", why), NO_DEVICE;
    if (cudnn && !cudnn_attention_open()) return log_error("%s", cudnn_why), NO_DEVICE;
    waited_for = (float *)be->allocate(sizeof *waited_for);
    int failed = 2;
    if (!strcmp(what, "peak") && argc == 4) failed = peak(n[0], strtoull(argv[3], NULL, 10));
    if (!strcmp(what, "host") && argc == 4) failed = host(n[0], strtoull(argv[3], NULL, 10));
    if (steps && (argc == 7 || cudnn))
        failed = step(argv[2], n[1], n[2], n[3], n[4], cudnn, argc == 9 ? atof(argv[8]) : 0);
    if (!strcmp(what, "attention") && argc == 7 + cudnn)
        failed = attention(n[0], n[1], n[2], n[3], n[4], cudnn);
    if (!strcmp(what, "kernels") && argc == 9)
        failed = kernels(n[0], n[1], n[2], n[3], n[4], n[5], n[6]);
    if (failed == 2)
        fprintf(stderr, "gpu_bench: see the first lines of dev/bench/gpu/gpu_bench.c\n");
    return failed == 2 ? 2 : failed ? 1 : 0;
}

/* gpu_check.c — checks that a GPU computes what it should. gpu_check.py calls it, and says why.
 *
 *   gpu_check parity PRESET B T     loss and gradients on the GPU must be close to the CPU's, in
 *                                   float32 and bf16
 *   gpu_check values B T H K D      attention, and with N C F H K D V the products of a layer and the
 *   gpu_check values N C F H K D V  classifier, in bf16 must be close to float32 on the same GPU
 *                                   (gpu_values.h)
 *   gpu_check bits N C F H K D V    products and attention of a model's real shapes, three times
 *                                   each, must give the same bits
 *   gpu_check ranks R ADDRESS OPTIONS ...
 *                                   train_llama2's options: a run in one process, and a run in R
 *                                   processes that meet at ADDRESS and exchange over UDP, must
 *                                   give the same losses and the same model
 *
 * Prints a JSON object per line. Exits with 1 when something is wrong, and with 77 when a run
 * cannot be judged.
 */
#include "dev/bench/gpu/gpu_model.h"
#include "dev/bench/gpu/gpu_values.h"

#include "llmc/comm/settings.h"
#include "llmc/backend/host_vector.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- parity ------------------------------------------------------------------------------- */

/* The worst relative error of a tensor's gradient. */
static double worst_gradient(const struct param_layout *l, const float *a, const float *b) {
    double worst = 0;
    for (int s = 0; s < l->spans; s++) {
        double difference = 0, norm = 0;
        for (size_t e = l->span[s].offset; e < l->span[s].offset + l->span[s].count; e++) {
            difference += ((double)a[e] - b[e]) * ((double)a[e] - b[e]);
            norm += (double)b[e] * b[e];
        }
        double error = sqrt(difference / norm);
        if (!(error <= worst)) worst = error; /* NaN too */
    }
    return worst;
}

static int parity_of(const char *preset, int B, int T, enum dtype dtype, double loss_bound,
                     double gradient_bound) {
    struct llama_config c;
    struct bench cpu, gpu;
    char why[256];
    const struct backend *be = backend_cuda(dtype, 0, why, sizeof why);
    if (!be) return log_error("%s", why);
    if (config_preset(preset, &c)) return -1;
    c.vocabulary = 1000;
    const struct backend *on_cpu = backend_cpu(DTYPE_FLOAT32);
    if (!on_cpu || bench_open(&cpu, on_cpu, &c, B, T, RECOMPUTE_NONE, false)) return -1;
    if (bench_open(&gpu, be, &c, B, T, RECOMPUTE_NONE, false)) return -1;
    const double expected = bench_forward_backward(&cpu), got = bench_forward_backward(&gpu);
    float *host = host_vector(be, gpu.grads, gpu.layout.count, true);
    const double loss = fabs(got - expected) / expected;
    const double gradient = worst_gradient(&cpu.layout, host, cpu.grads);
    const bool good = loss <= loss_bound && gradient <= gradient_bound;
    printf("{\"what\": \"parity\", \"model\": \"%s\", \"dtype\": \"%s\", \"loss_error\": %.3g, "
           "\"loss_bound\": %.3g, \"gradient_error\": %.3g, \"gradient_bound\": %.3g, "
           "\"good\": %s}\n",
           preset, dtype == DTYPE_BF16 ? "bf16" : "float32", loss, loss_bound, gradient,
           gradient_bound, good ? "true" : "false");
    fflush(stdout);
    host_vector_end(be, host);
    bench_close(&cpu);
    bench_close(&gpu);
    return good ? 0
                : log_error("%s: the loss is off by %.1e of %.0e, the worst gradient by %.1e of "
                            "%.0e",
                            preset, loss, loss_bound, gradient, gradient_bound);
}

static int parity(const char *preset, int B, int T) {
    int failed = parity_of(preset, B, T, DTYPE_FLOAT32, 1e-5, 1e-5);
    return parity_of(preset, B, T, DTYPE_BF16, 3e-3, 0.06) || failed ? -1 : 0;
}

/* ---- bits --------------------------------------------------------------------------------- */

enum { TIMES = 3 };

struct repeated { /* arrays that are large enough for every operation of a model's shapes */
    const struct backend *be;
    int N, C, F, H, K, D, V;
    tensor *x, *y, *w, *qkv, *dqkv;
    float *dw, *log_sum_exp;
    int I, O; /* shape of a product, with N */
    char *first, *again;
};

static void product_forward_once(struct repeated *r) {
    r->be->matmul_forward(r->y, r->x, r->w, r->N, r->I, r->O);
}

static void product_input_once(struct repeated *r) {
    r->be->matmul_backward_input(r->y, r->x, r->w, r->N, r->I, r->O, false);
}

static void product_weight_once(struct repeated *r) {
    r->be->matmul_backward_weight(r->dw, r->x, r->y, r->N, r->I, r->O, false);
}

static void attention_forward_of(struct repeated *r) {
    r->be->attention_forward(r->y, r->log_sum_exp, r->qkv, 1, r->N, r->H, r->K, r->D);
}

static void attention_backward_of(struct repeated *r) {
    r->be->attention_backward(r->dqkv, r->x, r->y, r->qkv, r->log_sum_exp, 1, r->N, r->H, r->K,
                              r->D);
}

/* Calls `once` several times, with other work between, and compares what it writes to `out`. */
static int repeat(struct repeated *r, const char *name, void (*once)(struct repeated *r), void *out,
                  size_t bytes) {
    int different = 0;
    for (int time = 0; time < TIMES; time++) {
        char *host = time ? r->again : r->first;
        r->be->clear(out, bytes);
        once(r);
        r->be->download(host, out, bytes);
        different += time && memcmp(r->first, r->again, bytes) != 0;
    }
    printf("{\"what\": \"bits\", \"name\": \"%s\", \"shape\": \"%d x %d x %d\", \"times\": %d, "
           "\"good\": %s}\n",
           name, r->N, r->I, r->O, TIMES, different ? "false" : "true");
    fflush(stdout);
    return different ? log_error("%s of %d x %d x %d: %d of %d repetitions gave other bits", name,
                                 r->N, r->I, r->O, different, TIMES - 1)
                     : 0;
}

static int repeat_product(struct repeated *r, const char *name, int I, int O) {
    const size_t e = r->be->element_bytes, N = (size_t)r->N;
    char text[80];
    int failed = 0;
    r->I = I, r->O = O;
    snprintf(text, sizeof text, "%s", name);
    failed |= repeat(r, text, product_forward_once, r->y, N * (size_t)O * e);
    snprintf(text, sizeof text, "%s, gradient of the weights", name);
    failed |= repeat(r, text, product_weight_once, r->dw, (size_t)O * (size_t)I * sizeof(float));
    snprintf(text, sizeof text, "%s, gradient of the input", name);
    failed |= repeat(r, text, product_input_once, r->y, N * (size_t)I * e);
    return failed;
}

static int bits(const struct backend *be, const int *n) {
    struct repeated r = {
        .be = be, .N = n[0], .C = n[1], .F = n[2], .H = n[3], .K = n[4], .D = n[5], .V = n[6]};
    const int QKV = (r.H + 2 * r.K) * r.D, HD = r.H * r.D;
    const int rows = backend_cuda_logits_rows(r.N, r.V, be->element_bytes), all = r.N;
    size_t widest = (size_t)(2 * r.F > QKV ? 2 * r.F : QKV);
    if (widest < (size_t)r.C) widest = (size_t)r.C;
    size_t most = (size_t)all * widest, weights = widest * (size_t)r.C;
    if (most < (size_t)rows * (size_t)r.V) most = (size_t)rows * (size_t)r.V;
    if (weights < (size_t)r.V * (size_t)r.C) weights = (size_t)r.V * (size_t)r.C;
    r.x = filled(be, most, 1, false);
    r.y = filled(be, most, 1, false);
    r.w = filled(be, weights, 1, false);
    r.dw = (float *)filled(be, weights, 1, true);
    r.qkv = filled(be, (size_t)all * (size_t)QKV, 1, false);
    r.dqkv = filled(be, (size_t)all * (size_t)QKV, 1, false);
    r.log_sum_exp = (float *)filled(be, (size_t)all * (size_t)r.H, 1, true);
    const size_t host = (most > weights ? most : weights) * sizeof(float);
    r.first = (char *)malloc(host);
    r.again = (char *)malloc(host);
    if (!r.first || !r.again) return log_out_of_memory("what is compared", 2.0 * (double)host);
    int failed = 0;
    failed |= repeat_product(&r, "queries, keys and values", r.C, QKV);
    failed |= repeat_product(&r, "out of attention", HD, r.C);
    failed |= repeat_product(&r, "gate and up", r.C, 2 * r.F);
    failed |= repeat_product(&r, "down", r.F, r.C);
    r.N = rows;
    failed |= repeat_product(&r, "classifier", r.C, r.V);
    r.N = all, r.I = r.H, r.O = r.D;
    failed |= repeat(&r, "attention", attention_forward_of, r.y,
                     (size_t)all * (size_t)HD * be->element_bytes);
    failed |= repeat(&r, "attention, backward", attention_backward_of, r.dqkv,
                     (size_t)all * (size_t)QKV * be->element_bytes);
    return failed;
}

/* ---- one process and several --------------------------------------------------------------- */

enum { MOST_STEPS = 100 };

struct outcome { /* of a run; in memory that the processes share */
    int steps;
    double loss[MOST_STEPS], norm[MOST_STEPS], arrived[MOST_STEPS];
    uint64_t model; /* hash of the parameters */
};

static uint64_t hash_of(const float *x, size_t n) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a, by 32 bits */
    for (size_t i = 0; i < n; i++) {
        uint32_t word;
        memcpy(&word, x + i, sizeof word);
        hash = (hash ^ word) * 1099511628211u;
    }
    return hash;
}

/* Computes the steps of a run, without its log; rank 0 writes the outcome to *out. */
static int train_as(const struct lossynet_world *world, int argc, char **argv,
                    struct outcome *out) {
    struct options o;
    struct trainer t;
    memset(&t, 0, sizeof t);
    if (options_parse(argc, argv, &o)) return -1;
    comm_choose_wire(&o, o.net.workers ? o.net.workers : world->ranks);
    if (o.steps > MOST_STEPS) return log_error("--steps: expected at most %d", MOST_STEPS);
    t.run.options = &o;
    t.run.world = *world;
    trainer_begin(&t);
    threads_choose_alone(o.threads, world->ranks);
    if (prepare(&t, true)) return -1;
    if (data_parallel_start(&t.dp)) return -1;
    for (t.run.at.step = 0; t.run.at.step < o.steps; t.run.at.step++) {
        if (training_step(&t, t.run.at.step) ||
            (t.dp.time.unfinished && training_finish_step(&t.view)))
            return -1;
        t.run.at.sequence += (uint64_t)o.micro_batches * t.dp.workers * t.B;
        if (world->rank) continue;
        out->loss[t.run.at.step] = t.view.record.loss;
        out->norm[t.run.at.step] = t.view.record.grad_norm;
        out->arrived[t.run.at.step] = t.view.last.arrived[0] + t.view.last.arrived[1];
        out->steps = t.run.at.step + 1;
    }
    float *host = (float *)malloc(t.layout.count * sizeof *host);
    if (!host) return log_out_of_memory("the model", 4.0 * (double)t.layout.count);
    size_t count;
    struct named_tensor *tensors = param_layout_tensor_list(&t.layout, host, &count);
    if (!tensors || data_parallel_copy_model(&t.dp, tensors, count)) return -1;
    free(tensors);
    if (!world->rank) out->model = hash_of(host, t.layout.count);
    free(host);
    trainer_release(&t);
    return 0;
}

/* Starts a rank in a process of its own, since an open device does not survive a fork. */
static pid_t start_rank(int rank, int ranks, const char *address, int argc, char **argv,
                        struct outcome *out) {
    const pid_t child = fork();
    if (child) return child;
    struct lossynet_world world = {.ranks = 1, .local_ranks = 1};
    if (ranks > 1 && lossynet_rendezvous_open(address, rank, ranks, 60, &world)) _exit(1);
    log_muted = false;
    log_rank = ranks > 1 ? rank : -1;
    const int failed = train_as(&world, argc, argv, out);
    lossynet_rendezvous_close(&world);
    fflush(NULL);
    _exit(failed ? 1 : 0);
}

/* Waits for a rank. Of several that have ended, one that a signal ended comes first: the others end
 * when they miss it. */
static pid_t wait_for_rank(const pid_t *child, int ranks, int *status) {
    siginfo_t ended;
    if (waitid(P_ALL, 0, &ended, WEXITED | WNOWAIT)) return -1;
    pid_t pid = ended.si_pid;
    for (int rank = 0; rank < ranks; rank++) {
        ended.si_pid = 0;
        if (child[rank] && !waitid(P_PID, (id_t)child[rank], &ended, WEXITED | WNOHANG | WNOWAIT) &&
            ended.si_pid && ended.si_code != CLD_EXITED)
            pid = child[rank];
    }
    return waitpid(pid, status, 0);
}

/* Ends all ranks when one has failed, since the others would wait for it. */
static int run_ranks(int ranks, const char *address, int argc, char **argv, struct outcome *out) {
    enum { MOST_RANKS = 16 };
    int failed = 0, status;
    pid_t child[MOST_RANKS], ended;
    if (ranks > MOST_RANKS) return log_error("expected at most %d ranks", MOST_RANKS);
    for (int rank = 0; rank < ranks; rank++)
        if ((child[rank] = start_rank(rank, ranks, address, argc, argv, out)) < 0) return -1;
    while ((ended = wait_for_rank(child, ranks, &status)) > 0) {
        const bool first = status && !failed;
        if (status) failed = -1;
        for (int rank = 0; rank < ranks; rank++) {
            const bool this = child[rank] == ended;
            if (this) child[rank] = 0;
            if (!first || (!this && !child[rank])) continue;
            if (!this)
                kill(child[rank], SIGKILL);
            else if (WIFSIGNALED(status))
                log_error("error: rank %d of %d was ended by signal %d (%s)", rank, ranks,
                          WTERMSIG(status), strsignal(WTERMSIG(status)));
            else
                log_error("error: rank %d of %d ended with exit code %d", rank, ranks,
                          WEXITSTATUS(status));
        }
    }
    return failed;
}

/* Returns the first step whose loss or norm differs, or -1. */
static int first_difference(const struct outcome *a, const struct outcome *b) {
    for (int s = 0; s < a->steps; s++)
        if (a->loss[s] != b->loss[s] || a->norm[s] != b->norm[s]) return s;
    return -1;
}

static bool same_outcome(const struct outcome *a, const struct outcome *b) {
    return first_difference(a, b) < 0 && a->steps == b->steps && a->model == b->model;
}

static int ranks(int several, const char *address, int argc, char **argv) {
    struct outcome *out = (struct outcome *)mmap(NULL, 2 * sizeof *out, PROT_READ | PROT_WRITE,
                                                 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (out == MAP_FAILED) return log_out_of_memory("what two runs share", 2 * sizeof *out);
    if (run_ranks(1, address, argc, argv, out) || run_ranks(several, address, argc, argv, out + 1))
        return -1;
    const int differs = first_difference(out, out + 1);
    bool lost = false;
    for (int s = 0; s < out->steps; s++) lost = lost || out[0].arrived[s] != out[1].arrived[s];
    const bool good = same_outcome(out, out + 1);
    printf("{\"what\": \"ranks\", \"ranks\": %d, \"steps\": %d, \"first_loss\": %.6g, "
           "\"last_loss\": %.6g, \"lost_on_the_way\": %s, \"good\": %s}\n",
           several, out->steps, out->loss[0], out->loss[out->steps - 1], lost ? "true" : "false",
           good ? "true" : "false");
    fflush(stdout);
    if (!good && lost) {
        log_error("the machine lost datagrams between the processes: bits cannot be compared");
        return 77;
    }
    if (good) return 0;
    if (differs < 0) return log_error("the same losses, but another model");
    return log_error("step %d: loss %.9g and norm %.9g in one process, %.9g and %.9g in %d",
                     differs, out[0].loss[differs], out[0].norm[differs], out[1].loss[differs],
                     out[1].norm[differs], several);
}

int main(int argc, char **argv) {
    char why[256];
    const char *what = argc > 1 ? argv[1] : "";
    if (argc == 5 && !strcmp(what, "parity"))
        return parity(argv[2], atoi(argv[3]), atoi(argv[4])) ? 1 : 0;
    int n[7];
    for (int i = 0; i < 7 && i + 2 < argc; i++) n[i] = atoi(argv[i + 2]);
    if ((argc == 7 || argc == 9) && !strcmp(what, "values")) {
        const struct backend *be = backend_cuda(DTYPE_BF16, 0, why, sizeof why);
        const struct backend *float32 = backend_cuda(DTYPE_FLOAT32, 0, why, sizeof why);
        if (!be || !float32) return log_error("%s", why), 77;
        return values_at(be, float32, n, argc - 2) ? 1 : 0;
    }
    if (argc == 9 && !strcmp(what, "bits")) {
        const struct backend *be = backend_cuda(DTYPE_BF16, 0, why, sizeof why);
        if (!be) return log_error("%s", why), 77;
        return bits(be, n) ? 1 : 0;
    }
    if (argc > 4 && !strcmp(what, "ranks")) {
        const int status = ranks(atoi(argv[2]), argv[3], argc - 3, argv + 3);
        return status < 0 ? 1 : status;
    }
    fprintf(stderr, "gpu_check: see the first lines of dev/bench/gpu/gpu_check.c\n");
    return 2;
}

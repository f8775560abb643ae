/* attention_choice.c — see attention_choice.h. */
#include "llmc/comm/attention_choice.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "llmc/checkpoint/resume.h"
#include "llmc/log/error.h"
#include "llmc/util/bf16.h"
#include "llmc/util/random.h"

/* ---- results ---------------------------------------------------------------------------- */

/* Compares `count` rows of D numbers (bfloat16) of a and b. Rows begin `row` elements apart.
 * Returns the largest difference between two rows, in units of the difference that rounding may
 * cause: 10% of the row's norm, plus 0.06 sqrt(D * share / (t + 1)) for row t of T, since results
 * of attention are means over t + 1 tokens. Inputs have variance 1, and `share` query heads add up.
 * Rounding alone gives 0.1 with heads of 48, and 0.3 with heads of 8. Wrong results give 6 and
 * more. NaN counts as infinite. */
static double difference_of(const uint16_t *a, const uint16_t *b, size_t count, int T, int D,
                            size_t row, int share) {
    double most = 0;
    for (size_t i = 0; i < count; i++) {
        double apart = 0, norm = 0;
        for (int d = 0; d < D; d++) {
            const double x = from_bf16(a[i * row + (size_t)d]),
                         y = from_bf16(b[i * row + (size_t)d]);
            apart += (x - y) * (x - y), norm += x * x;
        }
        const double t = (double)(i % (size_t)T);
        const double allowed = 0.1 * sqrt(norm) + 0.06 * sqrt(D * share / (t + 1));
        const double relative = sqrt(apart) / allowed;
        if (!(relative <= most)) most = isnan(relative) ? INFINITY : relative;
    }
    return most;
}

struct shape {
    int B, T, H, K, D;
    size_t in, out, sums; /* elements of qkv, of the result, of the log-sum-exp */
};

static struct shape shape_of(const struct llama_config *c, int B, int T) {
    struct shape s = {B, T, c->heads, c->kv_heads, c->head_size, 0, 0, 0};
    const size_t N = (size_t)B * (size_t)T;
    s.in = N * (size_t)(s.H + 2 * s.K) * (size_t)s.D;
    s.out = N * (size_t)s.H * (size_t)s.D;
    s.sums = N * (size_t)s.H;
    return s;
}

/* Results of attention, in host memory. */
struct results {
    uint16_t *out, *dqkv;
    float *sums;
};

static bool results_allocate(struct results *r, const struct shape *s) {
    r->out = malloc(s->out * sizeof *r->out);
    r->dqkv = malloc(s->in * sizeof *r->dqkv);
    r->sums = malloc(s->sums * sizeof *r->sums);
    return r->out && r->dqkv && r->sums;
}

static void results_release(struct results *r) {
    free(r->out), free(r->dqkv), free(r->sums);
}

static bool same_bits(const struct results *a, const struct results *b, const struct shape *s) {
    return !memcmp(a->out, b->out, s->out * sizeof *a->out) &&
           !memcmp(a->dqkv, b->dqkv, s->in * sizeof *a->dqkv) &&
           !memcmp(a->sums, b->sums, s->sums * sizeof *a->sums);
}

/* The name of a result that differs too much from our own kernels' result; NULL: none does. */
static const char *wrong_result(const struct results *own, const struct results *x,
                                const struct shape *s) {
    const size_t N = (size_t)s->B * (size_t)s->T, D = (size_t)s->D;
    const int heads = s->H + 2 * s->K;
    for (size_t i = 0; i < s->sums; i++)
        if (!(fabsf(own->sums[i] - x->sums[i]) <= 1e-3f)) return "log-sum-exp";
    for (int h = 0; h < s->H; h++)
        if (difference_of(own->out + (size_t)h * D, x->out + (size_t)h * D, N, s->T, s->D,
                          (size_t)s->H * D, 1) > 1)
            return "result";
    for (int h = 0; h < heads; h++)
        if (difference_of(own->dqkv + (size_t)h * D, x->dqkv + (size_t)h * D, N, s->T, s->D,
                          (size_t)heads * D, h < s->H ? 1 : s->H / s->K) > 1)
            return h < s->H          ? "gradient of queries"
                   : h < s->H + s->K ? "gradient of keys"
                                     : "gradient of values";
    return NULL;
}

/* ---- a trial ---------------------------------------------------------------------------- */

enum { NOISE = 65521 }; /* a prime, so that rows do not repeat */

struct trial { /* tensors on the device */
    const struct backend *be;
    struct shape s;
    tensor *qkv, *dqkv, *dout, *out;
    float *sums;
};

static tensor *normal(const struct backend *be, const float *noise, size_t n) {
    char *x = (char *)be->allocate(n * be->element_bytes);
    for (size_t done = 0; x && done < n; done += NOISE)
        be->convert(x + done * be->element_bytes, noise, n - done < NOISE ? n - done : NOISE);
    return x;
}

static bool trial_allocate(struct trial *t) {
    const struct backend *be = t->be;
    float *noise = (float *)be->allocate(NOISE * sizeof *noise);
    float *host = malloc(NOISE * sizeof *host);
    if (noise && host) {
        for (size_t i = 0; i < NOISE; i++) host[i] = (float)random_normal(1, i);
        be->upload(noise, host, NOISE * sizeof *host);
        t->qkv = normal(be, noise, t->s.in), t->dout = normal(be, noise, t->s.out);
        t->dqkv = be->allocate(t->s.in * be->element_bytes);
        t->out = be->allocate(t->s.out * be->element_bytes);
        t->sums = (float *)be->allocate(t->s.sums * sizeof *t->sums);
    }
    free(host);
    be->release(noise);
    return t->qkv && t->dout && t->dqkv && t->out && t->sums;
}

static void trial_release(struct trial *t) {
    tensor *const all[] = {t->qkv, t->dqkv, t->dout, t->out, t->sums};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) t->be->release(all[i]);
}

/* Clears results first, so that elements that are not written are zero. */
static void compute_results(const struct trial *t, struct results *out) {
    const struct shape *s = &t->s;
    const size_t element = t->be->element_bytes;
    t->be->clear(t->out, t->s.out * element);
    t->be->clear(t->dqkv, t->s.in * element);
    t->be->clear(t->sums, t->s.sums * sizeof *t->sums);
    t->be->attention_forward(t->out, t->sums, t->qkv, s->B, s->T, s->H, s->K, s->D);
    t->be->attention_backward(t->dqkv, t->dout, t->out, t->qkv, t->sums, s->B, s->T, s->H, s->K,
                              s->D);
    t->be->download(out->out, t->out, t->s.out * element);
    t->be->download(out->dqkv, t->dqkv, t->s.in * element);
    t->be->download(out->sums, t->sums, t->s.sums * sizeof *t->sums);
}

/* The findings of a rank; ranks exchange its bytes. */
struct found {
    int32_t chosen;  /* earlier choice: the library's version; 0: own kernels; -1: none */
    int32_t resumed; /* that choice is from the checkpoint, not from an earlier view */
    int32_t library; /* version of the library that gives correct results here; 0: none */
    char host[64], why[256];
};

static void try_results(const struct trial *t, int version, struct results r[2],
                        struct found *mine) {
    struct attention_choice *choice = t->be->attention_choice;
    const char *wrong;
    compute_results(t, &r[0]);
    choice->library = version, choice->trial = true, *choice->failed = '\0';
    compute_results(t, &r[1]);
    if (!*choice->failed && (wrong = wrong_result(&r[0], &r[1], &t->s)))
        snprintf(choice->failed, sizeof choice->failed,
                 "cuDNN's %s is not that of the own kernels: expected the same but for rounding",
                 wrong);
    if (!*choice->failed) {
        compute_results(t, &r[0]);
        if (!same_bits(&r[0], &r[1], &t->s))
            snprintf(choice->failed, sizeof choice->failed,
                     "cuDNN gives other bits the second time");
    }
    choice->library = 0, choice->trial = false;
    snprintf(mine->why, sizeof mine->why, "%s", choice->failed);
    mine->library = *choice->failed ? 0 : version;
}

static void try_library(const struct backend *be, const struct shape *s, struct found *mine) {
    struct trial t = {be, *s, NULL, NULL, NULL, NULL, NULL};
    struct results r[2] = {{NULL, NULL, NULL}, {NULL, NULL, NULL}};
    const int version =
        be->attention_open(s->B, s->T, s->H, s->K, s->D, mine->why, sizeof mine->why);
    if (!version) return;
    if (trial_allocate(&t) && results_allocate(&r[0], s) && results_allocate(&r[1], s))
        try_results(&t, version, r, mine);
    else
        snprintf(mine->why, sizeof mine->why, "out of memory for a trial of cuDNN's attention");
    results_release(&r[0]), results_release(&r[1]);
    trial_release(&t);
}

/* ---- between ranks ---------------------------------------------------------------------- */

static int find_chosen(const struct options *o, const struct backend *be, struct found *mine) {
    const struct attention_choice *choice = be->attention_choice;
    struct resume_point at;
    json_t *saved = NULL;
    mine->chosen = choice->made ? choice->library : -1;
    if (choice->made || !o->resume || o->attention != OPTION_ATTENTION_AUTO) return 0;
    if (resume_open(o->resume, &saved, &at)) return -1;
    mine->chosen = resume_attention(saved, be->details);
    mine->resumed = mine->chosen >= 0;
    json_decref(saved);
    return 0;
}

/* The first rank that has an earlier choice, or NULL. */
static const struct found *first_chosen(const struct found *all, int ranks) {
    for (int r = 0; r < ranks; r++)
        if (all[r].chosen >= 0) return &all[r];
    return NULL;
}

/* The first rank that cannot compute with this version, or -1. */
static int first_without(const struct found *all, int ranks, int version) {
    for (int r = 0; r < ranks; r++)
        if (all[r].library != version) return r;
    return -1;
}

static void say_why(const struct found *all, int r, int version, char *why, size_t size) {
    char other[64];
    snprintf(other, sizeof other, "cuDNN is %d.%d.%d, expected %d.%d.%d", all[r].library / 10000,
             all[r].library / 100 % 100, all[r].library % 100, version / 10000, version / 100 % 100,
             version % 100);
    const char *said = all[r].library ? other : all[r].why;
    if (r == 0)
        snprintf(why, size, "%s", said);
    else
        snprintf(why, size, "rank %d on %s: %s", r, all[r].host, said);
}

/* Returns the version of the library to compute with, 0 for our own kernels, or -1 if the user or
 * an earlier view requires the library and a rank cannot use it. The same on all ranks. */
static int decide(const struct options *o, const struct found *all, int ranks, char *why,
                  size_t size) {
    const struct found *before = first_chosen(all, ranks);
    if (before && before->chosen == 0) {
        snprintf(why, size, "as before");
        return 0;
    }
    const int version = before && !before->resumed ? before->chosen : all[0].library;
    const int without = version ? first_without(all, ranks, version) : 0;
    if (without >= 0) {
        say_why(all, without, version, why, size);
        return o->attention == OPTION_ATTENTION_CUDNN || (before && !before->resumed) ? -1 : 0;
    }
    return version;
}

static void report(const struct backend *be, const char *why) {
    char name[RUN_INFO_ATTENTION_BYTES];
    run_info_attention(be, name);
    if (be->attention_choice->library)
        printf("attention: %s (its last bits differ from the own kernels')\n", name);
    else
        printf("attention: %s (%s)\n", name, why);
}

/* The rule of --attention auto, which goes before a trial: NULL, or why this rank keeps the own
 * kernels. */
static const char *keeps_own(const struct options *o, const struct attention_choice *choice, int T,
                             bool room) {
    if (o->attention != OPTION_ATTENTION_AUTO) return NULL;
    if (!choice->from) return "cuDNN's are for sm_90 and newer";
    if (T < choice->from) return "cuDNN's are for longer sequences";
    return room ? NULL : "the GPU has no memory left for cuDNN's";
}

int attention_choose(const struct options *o, const struct llama_config *c, int B, int T, bool room,
                     const struct backend *be, const struct lossynet_world *world, bool tell) {
    struct attention_choice *choice = be->attention_choice;
    const struct shape s = shape_of(c, B, T);
    char why[400] = "";
    if (o->attention == OPTION_ATTENTION_OWN) {
        if (choice) be->attention_close(), choice->made = false;
        return 0;
    }
    if (!choice) {
        if (o->attention == OPTION_ATTENTION_AUTO) return 0;
        return world->rank ? -1
                           : log_error("--attention cudnn computes in bf16 on a GPU, and this run "
                                       "is on: %s",
                                       be->details);
    }
    struct found *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the list of ranks", 0);
    struct found *mine = &all[world->rank];
    if (gethostname(mine->host, sizeof mine->host - 1))
        snprintf(mine->host, sizeof mine->host, "?");
    int status = find_chosen(o, be, mine) || lossynet_bootstrap_gather(world, all, sizeof *all);
    if (!status) {
        const struct found *before = first_chosen(all, world->ranks);
        const bool bound = before && !before->resumed; /* a rank that joins takes the others' */
        const char *own = bound ? NULL : keeps_own(o, choice, T, room);
        if (choice->made)
            mine->library = choice->library;
        else if (own)
            snprintf(mine->why, sizeof mine->why, "%s", own);
        else if (!before || before->chosen)
            try_library(be, &s, mine);
        status = lossynet_bootstrap_gather(world, all, sizeof *all);
    }
    if (!status) {
        const int version = decide(o, all, world->ranks, why, sizeof why);
        if (version <= 0) be->attention_close();
        choice->library = version > 0 ? version : 0;
        choice->made = true;
        status = version < 0;
        if (version < 0 && world->rank == 0)
            log_error("--attention %s: %s",
                      o->attention == OPTION_ATTENTION_AUTO ? "auto" : "cudnn", why);
        if (version >= 0 && tell) report(be, why);
    }
    free(all);
    return status ? -1 : 0;
}

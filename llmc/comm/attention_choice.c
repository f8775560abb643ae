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

/* ---- a trial ---------------------------------------------------------------------------- */

/* What attention writes, and what it reads: input RESULTS + a is as large as result a. */
enum { OUT, DQKV, SUMS, RESULTS, DOUT = RESULTS, QKV, ARRAYS };

struct trial {
    const struct backend *be;
    int B, T, H, K, D;
    size_t bytes[ARRAYS];
    void *array[ARRAYS];      /* in the backend's memory; bfloat16, but for SUMS */
    void *result[2][RESULTS]; /* copies in the host's memory: of the own kernels, of the library */
};

/* Fills the inputs with random numbers of variance 1. Returns false if there is no memory. */
static bool trial_allocate(struct trial *t) {
    enum { NOISE = 65521 }; /* a prime, so that rows do not repeat */
    const size_t rows = (size_t)t->B * (size_t)t->T, D = (size_t)t->D;
    t->bytes[OUT] = t->bytes[DOUT] = rows * (size_t)t->H * D * sizeof(uint16_t);
    t->bytes[DQKV] = t->bytes[QKV] = rows * (size_t)(t->H + 2 * t->K) * D * sizeof(uint16_t);
    t->bytes[SUMS] = rows * (size_t)t->H * sizeof(float);
    for (int a = 0; a < ARRAYS; a++)
        if (!(t->array[a] = t->be->allocate(t->bytes[a]))) return false;
    for (int a = 0; a < 2 * RESULTS; a++)
        if (!(t->result[a / RESULTS][a % RESULTS] = malloc(t->bytes[a % RESULTS]))) return false;
    for (int a = OUT; a <= DQKV; a++) {
        uint16_t *x = t->result[0][a];
        for (size_t i = 0; i < t->bytes[a] / sizeof *x; i++)
            x[i] = i < NOISE ? to_bf16((float)random_normal(1, i)) : x[i - NOISE];
        t->be->upload(t->array[RESULTS + a], x, t->bytes[a]);
    }
    return true;
}

static void trial_release(struct trial *t) {
    for (int a = 0; a < ARRAYS; a++) t->be->release(t->array[a]);
    for (int a = 0; a < RESULTS; a++) free(t->result[0][a]), free(t->result[1][a]);
}

/* Clears results first, so that elements that are not written are zero. */
static void compute(const struct trial *t, void *const *result) {
    void *const *x = t->array;
    for (int a = 0; a < RESULTS; a++) t->be->clear(x[a], t->bytes[a]);
    t->be->attention_forward(x[OUT], x[SUMS], x[QKV], t->B, t->T, t->H, t->K, t->D);
    t->be->attention_backward(x[DQKV], x[DOUT], x[OUT], x[QKV], x[SUMS], t->B, t->T, t->H, t->K,
                              t->D);
    for (int a = 0; a < RESULTS; a++) t->be->download(result[a], x[a], t->bytes[a]);
}

/* Whether the two results differ, in a head of so many, by more than rounding may cause: in a row
 * by 10% of its norm, plus 0.06 sqrt(D * share / (t + 1)) for row t of T, since results of
 * attention are means over t + 1 tokens. Inputs have variance 1, and `share` query heads add up.
 * Rounding alone gives 0.1 of that with heads of 48, and 0.3 with heads of 8. Wrong results give 6
 * and more. NaN differs. */
static bool differ(const struct trial *t, int result, int head, int heads, int share) {
    for (int i = 0; i < t->B * t->T; i++) {
        const size_t at = ((size_t)i * (size_t)heads + (size_t)head) * (size_t)t->D;
        const uint16_t *a = (uint16_t *)t->result[0][result] + at;
        const uint16_t *b = (uint16_t *)t->result[1][result] + at;
        double apart = 0, norm = 0;
        for (int d = 0; d < t->D; d++) {
            const double x = from_bf16(a[d]), y = from_bf16(b[d]);
            apart += (x - y) * (x - y), norm += x * x;
        }
        const double mean = 0.06 * sqrt((double)t->D * share / (i % t->T + 1));
        if (!(sqrt(apart) <= 0.1 * sqrt(norm) + mean)) return true;
    }
    return false;
}

/* The name of a result that differs too much from our own kernels' result; NULL: none does. */
static const char *wrong_result(const struct trial *t) {
    const float *own = t->result[0][SUMS], *other = t->result[1][SUMS];
    const int H = t->H, K = t->K, heads = H + 2 * K;
    for (size_t i = 0; i < t->bytes[SUMS] / sizeof *own; i++)
        if (!(fabsf(own[i] - other[i]) <= 1e-3f)) return "log-sum-exp";
    for (int h = 0; h < H; h++)
        if (differ(t, OUT, h, H, 1)) return "result";
    for (int h = 0; h < heads; h++)
        if (differ(t, DQKV, h, heads, h < H ? 1 : H / K))
            return h < H       ? "gradient of queries"
                   : h < H + K ? "gradient of keys"
                               : "gradient of values";
    return NULL;
}

/* The findings of a rank; ranks exchange its bytes. */
struct found {
    int32_t chosen;  /* earlier choice: the library's version; 0: own kernels; -1: none */
    int32_t library; /* version of the library that gives correct results here; 0: none */
    char host[64], why[256];
};

static void try_library(struct trial *t, struct found *mine) {
    struct attention_choice *choice = t->be->attention_choice;
    const int version = t->be->attention_open(t->B, t->T, t->H, t->K, t->D);
    const bool fits = version && trial_allocate(t);
    const char *wrong = NULL;
    bool same = true;
    if (fits) {
        compute(t, t->result[0]);
        choice->library = version;
        compute(t, t->result[1]);
        wrong = wrong_result(t);
        compute(t, t->result[0]);
        choice->library = 0;
    }
    for (int a = 0; a < RESULTS && fits; a++)
        same &= !memcmp(t->result[0][a], t->result[1][a], t->bytes[a]);
    if (*choice->failed)
        snprintf(mine->why, sizeof mine->why, "%s", choice->failed);
    else if (!fits)
        snprintf(mine->why, sizeof mine->why, "out of memory for a trial of cuDNN's attention");
    else if (wrong)
        snprintf(mine->why, sizeof mine->why,
                 "cuDNN's %s is not that of the own kernels: expected the same but for rounding",
                 wrong);
    else if (!same)
        snprintf(mine->why, sizeof mine->why, "cuDNN gives other bits the second time");
    else
        mine->library = version;
    trial_release(t);
}

/* ---- between ranks ---------------------------------------------------------------------- */

static int find_chosen(const struct options *o, const struct backend *be, struct found *mine) {
    const struct attention_choice *choice = be->attention_choice;
    struct resume_point at;
    json_t *saved = NULL;
    mine->library = choice->library;
    mine->chosen = choice->made ? choice->library : -1;
    if (choice->made || !o->resume || o->attention != OPTION_ATTENTION_AUTO) return 0;
    if (resume_open(o->resume, &saved, &at)) return -1;
    /* The library is tried again, and may have another version now. */
    if (resume_attention(saved, be->details) == 0) mine->chosen = 0;
    json_decref(saved);
    return 0;
}

/* Returns the version of the library to compute with; 0 for our own kernels, and `why`; or -1 if a
 * rank cannot use the library that is required. The same on all ranks. chosen: earlier, or -1. */
static int decide(const struct found *all, int ranks, int chosen, bool required, char *why,
                  size_t size) {
    const int version = chosen > 0 ? chosen : all[0].library;
    int r = 0; /* the first rank that cannot compute with this version */
    char where[96] = "";
    while (version && r < ranks && all[r].library == version) r++;
    if (r == ranks) return version;
    if (r > 0) snprintf(where, sizeof where, "rank %d on %s: ", r, all[r].host);
    if (chosen == 0)
        snprintf(why, size, "as before");
    else if (all[r].library)
        snprintf(why, size, "%scuDNN is %d.%d.%d, expected %d.%d.%d", where, all[r].library / 10000,
                 all[r].library / 100 % 100, all[r].library % 100, version / 10000,
                 version / 100 % 100, version % 100);
    else
        snprintf(why, size, "%s%s", where, all[r].why);
    return required ? -1 : 0;
}

/* The rule of --attention auto, which goes before a trial: NULL, or why this rank keeps the own
 * kernels. */
static const char *keeps_own(const struct attention_choice *choice, int T, bool room) {
    if (!choice->from) return "cuDNN's are for sm_90 and newer";
    if (T < choice->from) return "cuDNN's are for longer sequences";
    return room ? NULL : "the GPU has no memory left for cuDNN's";
}

int attention_choose(const struct options *o, const struct llama_config *c, int B, int T, bool room,
                     const struct backend *be, const struct lossynet_world *world, bool tell) {
    struct attention_choice *choice = be->attention_choice;
    struct trial trial = {
        .be = be, .B = B, .T = T, .H = c->heads, .K = c->kv_heads, .D = c->head_size};
    const bool free_to = o->attention == OPTION_ATTENTION_AUTO;
    char why[400] = "", name[RUN_INFO_ATTENTION_BYTES];
    if (o->attention == OPTION_ATTENTION_OWN) {
        if (choice) be->attention_close(), choice->made = false;
        return 0;
    }
    if (!choice && free_to) return 0;
    if (!choice && world->rank) return -1;
    if (!choice)
        return log_error("--attention cudnn computes in bf16 on a GPU, and this run is on: %s",
                         be->details);
    struct found *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the list of ranks", 0);
    struct found *mine = &all[world->rank];
    if (gethostname(mine->host, sizeof mine->host - 1))
        snprintf(mine->host, sizeof mine->host, "?");
    int status = find_chosen(o, be, mine) || lossynet_bootstrap_gather(world, all, sizeof *all);
    int chosen = -1; /* by the first rank that has; a rank that joins takes it */
    for (int r = world->ranks - 1; r >= 0 && !status; r--)
        if (all[r].chosen >= 0) chosen = all[r].chosen;
    const char *own = free_to && chosen < 0 ? keeps_own(choice, T, room) : NULL;
    if (!status) {
        if (own)
            snprintf(mine->why, sizeof mine->why, "%s", own);
        else if (chosen != 0 && !choice->made)
            try_library(&trial, mine);
        status = lossynet_bootstrap_gather(world, all, sizeof *all);
    }
    if (!status) {
        const bool required = chosen > 0 || !free_to;
        const int version = decide(all, world->ranks, chosen, required, why, sizeof why);
        if (version <= 0) be->attention_close();
        choice->library = version > 0 ? version : 0;
        choice->made = true;
        status = version < 0;
        run_info_attention(be, name);
        if (version < 0 && world->rank == 0)
            log_error("--attention %s: %s", free_to ? "auto" : "cudnn", why);
        if (version >= 0 && tell)
            printf("attention: %s (%s)\n", name,
                   version ? "its last bits differ from the own kernels'" : why);
    }
    free(all);
    return status ? -1 : 0;
}

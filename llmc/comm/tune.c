/* tune.c — see tune.h. */
#include "llmc/comm/tune.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/log/error.h"
#include "llmc/model/products.h"
#include "llmc/util/random.h"

/* ---- between ranks ---------------------------------------------------------------------- */

/* All ranks take the choices of the first rank that has any. */
static int agree(struct product_choices *mine, const struct lossynet_world *world) {
    struct product_choices *all = calloc((size_t)world->ranks, sizeof *all);
    if (!all) return log_out_of_memory("the choices of algorithms", 0);
    all[world->rank] = *mine;
    const int status = lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    for (int r = world->ranks - 1; r >= 0 && !status; r--)
        if (all[r].count > 0) *mine = all[r];
    free(all);
    return status;
}

/* ---- timing ----------------------------------------------------------------------------- */

enum { NOISE = 1 << 16 };

/* A tensor of noise: with zeros a chip would compute faster. NULL: out of memory. */
static tensor *filled(const struct backend *be, const float *noise, size_t n) {
    char *x = (char *)be->allocate(n * be->element_bytes);
    for (size_t done = 0; x && done < n; done += NOISE)
        be->convert(x + done * be->element_bytes, noise, n - done < NOISE ? n - done : NOISE);
    return x;
}

/* Calls each operation once: an operation times shapes that are not in the list of choices. */
static int time_product(const struct backend *be, const float *noise,
                        const struct model_product *p) {
    const size_t N = (size_t)p->N, I = (size_t)p->I, O = (size_t)p->O;
    tensor *x = filled(be, noise, N * I), *y = filled(be, noise, N * O);
    tensor *w = filled(be, noise, O * I);
    float *dw = (float *)be->allocate(O * I * sizeof *dw);
    const bool there = x && y && w && dw;
    if (there) {
        be->matmul_forward(y, x, w, p->N, p->I, p->O);
        be->matmul_backward_input(x, y, w, p->N, p->I, p->O, false);
        be->matmul_backward_weight(dw, y, x, p->N, p->I, p->O, false);
    }
    be->release(x), be->release(y), be->release(w), be->release(dw);
    if (there) return 0;
    return log_out_of_memory("a product that is timed",
                             (double)((N * I + N * O + O * I) * be->element_bytes + 4 * O * I));
}

static int time_model(const struct llama_config *c, int N, const struct backend *be) {
    struct model_product all[MODEL_PRODUCTS];
    model_products(c, N, backend_cuda_logits_rows(N, c->vocabulary, be->element_bytes), all);
    float *noise = (float *)be->allocate(NOISE * sizeof *noise);
    float *host = malloc(NOISE * sizeof *host);
    int status = noise && host ? 0 : log_out_of_memory("numbers to multiply", 4.0 * NOISE);
    if (!status) {
        for (size_t i = 0; i < NOISE; i++) host[i] = (float)(0.02 * random_normal(0, i));
        be->upload(noise, host, NOISE * sizeof *host);
    }
    for (int i = 0; i < MODEL_PRODUCTS && !status; i++) status = time_product(be, noise, &all[i]);
    free(host);
    be->release(noise);
    return status;
}

static void report(const struct product_choices *choices, int known) {
    int later = 0;
    for (int i = known; i < choices->count; i++) later += choices->choice[i].place > 0;
    printf("timed %d shapes of products: for %d another algorithm is faster than the library's "
           "first\n",
           choices->count - known, later);
}

int tune_products(const struct options *o, const struct llama_config *c, int N,
                  const struct backend *be, const struct lossynet_world *world, bool tell) {
    struct product_choices *choices = be->product_choices;
    struct resume_point at;
    json_t *saved = NULL;
    if (!choices || !o->tune) return 0;
    if (o->resume && choices->count == 0) {
        if (resume_open(o->resume, &saved, &at)) return -1;
        resume_products(saved, be->details, choices);
        json_decref(saved);
    }
    if (agree(choices, world)) return -1;
    const int known = choices->count;
    if (world->rank == 0) {
        choices->times = true;
        const int failed = time_model(c, N, be);
        choices->times = false;
        if (failed) return -1;
        if (tell && choices->count > known) report(choices, known);
    }
    return agree(choices, world);
}

/* step_plan.h — a model of a training step on GPUs: how long it takes, by arithmetic.
 *
 * Each operation takes as long as its floating point operations or its bytes at the rate that a GPU
 * reaches, whichever it is bound by. Copies and packets run beside the computing; what is left
 * after that counts. dev/bench/gpu/notes.md has the formulas in a table. No GPU has confirmed them.
 */
#ifndef LLMC_MEMORY_STEP_PLAN_H
#define LLMC_MEMORY_STEP_PLAN_H

#include "llmc/memory/memory_plan.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a GPU does per second. The first four are data sheets' numbers. */
struct step_plan_gpu {
    const char *name;
    double peak, memory; /* FLOP of dense bf16 products with float32 sums; bytes of its memory */
    double pcie, peer; /* bytes each way: from the host; from another GPU of it, 0: not possible */
    double attention;  /* our kernels' rate beside that on an H100, as a share of products' */
};

enum { STEP_PLAN_GPUS = 4 };
extern const struct step_plan_gpu step_plan_gpu[STEP_PLAN_GPUS]; /* H100, H200, A100, 4090 */

enum step_plan_part {
    STEP_PRODUCTS, /* of layers */
    STEP_ATTENTION,
    STEP_ELEMENTWISE, /* norms, rotary embedding, SwiGLU */
    STEP_AGAIN,       /* what backward computes again (--recompute) */
    STEP_CLASSIFIER,
    STEP_OPTIMIZER, /* AdamW, the norm */
    STEP_REST,      /* embedding; launches and waits of the host */
    STEP_EXCHANGE,  /* copies and packets that computing does not hide */
    STEP_PARTS
};
extern const char *const step_plan_part_name[STEP_PARTS];

struct step_plan {
    double seconds[STEP_PARTS], total;
    double tokens_per_second; /* of all workers */
    double share;             /* of the peak: 6 FLOP per parameter and token, and attention's */
};

/* The step of a run whose workers have a GPU each, in bf16. overlap: the exchange goes on while
 * workers compute. */
struct step_plan step_plan_of_run(const struct llama_config *config,
                                  const struct memory_plan_settings *s,
                                  const struct step_plan_gpu *gpu, bool overlap);

/* Prints it for all GPUs of the list. */
void step_plan_print(const struct llama_config *config, const struct memory_plan_settings *s,
                     bool overlap);

#ifdef __cplusplus
}
#endif
#endif

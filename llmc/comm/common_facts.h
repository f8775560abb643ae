/* common_facts.h — what must be the same on all ranks although its options may differ: they name
 * files, whose paths may be others on another host.
 *
 * Ranks under mpirun compare these facts before they begin (validate.h). With --meet they stand in
 * the store beside the common options, so a process that does not fit is refused before the others
 * take it in.
 */
#ifndef LLMC_COMM_COMMON_FACTS_H
#define LLMC_COMM_COMMON_FACTS_H

#include <stddef.h>

#include "llmc/options/options.h"
#include "lossynet/lossynet.h"

enum { FACT_MODEL, FACT_TRAIN, FACT_VAL, FACT_KEY, FACT_RULE, FACT_TRACE, FACTS, FACT_BYTES = 256 };

struct common_facts {
    char text[FACTS][FACT_BYTES]; /* "" where the options name no file */
};

extern const char *const common_fact_names[FACTS]; /* for messages: "the model's shape" */

/* Reads the model's shape, a part of the data, the key, and the files of --rule and of a trace. run: the
 * name of the run; the key's fact is a proof for it, from which the key cannot be computed. Says in one
 * line if everybody on this host may read the key file. Returns 0, or -1 after reporting. */
int common_facts_find(const struct options *o, const char *run, struct common_facts *out);

/* The options and facts that must be the same in all processes that meet by --meet, as JSON. run:
 * its name. The caller releases it. NULL after reporting. */
json_t *common_facts_json(const struct options *o, const char *run);

/* Replaces *answer, of `bytes` bytes, by rank 0's. Collective. Returns 0, or -1 after reporting. */
int common_answer(const struct lossynet_world *world, void *answer, size_t bytes);

/* Chooses the number of threads (threads_choose). The ranks of a machine share its processors. Collective.
 * Returns 0, or -1 after reporting. */
int common_threads(const struct lossynet_world *world, int wanted);

#endif

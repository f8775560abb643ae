/* due.h — says what a run does after a step: evaluate, write a sample, save a checkpoint. */
#ifndef LLMC_RUN_DUE_H
#define LLMC_RUN_DUE_H

#include "llmc/options/options.h"

struct due {
    bool evaluates, samples, saves;
    bool any; /* something that all ranks do together; the end of the run as well */
};

/* True after every `every` steps (0: never), and after the last step. */
static inline bool due_every(const struct options *o, int done, int every) {
    return done == o->steps || (every && done % every == 0);
}

/* What to do after `done` steps. stop: the run ends here. behind: a checkpoint is missing, because
 * ranks changed while it was written. */
static inline struct due due_after(const struct options *o, int done, bool stop, bool behind) {
    struct due due;
    due.evaluates = o->val && due_every(o, done, o->eval_every);
    due.samples = o->sample_every && due_every(o, done, o->sample_every);
    due.saves = o->out && (stop || behind || due_every(o, done, o->save_every));
    due.any = stop || done == o->steps || due.evaluates || due.samples || due.saves;
    return due;
}

#endif

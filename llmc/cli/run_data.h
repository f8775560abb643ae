/* run_data.h — the token files that a run names. */
#ifndef LLMC_CLI_RUN_DATA_H
#define LLMC_CLI_RUN_DATA_H

#include "llmc/cli/options.h"
#include "llmc/data/dataloader.h"
#include "llmc/model/config.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens --train (only when training) and --val for sequences of `length` tokens, completes the
 * vocabulary of `config` by them, and checks that their tokens are in it. The caller closes *train
 * and *val (NULL: not opened), also after a failure. Returns 0, or -1 after reporting. */
int run_data_open(const struct options *options, bool training, int workers, int length,
                  struct llama_config *config, struct dataloader **train, struct dataloader **val);

#ifdef __cplusplus
}
#endif
#endif

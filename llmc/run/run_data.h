/* run_data.h — opens the token files of a run. */
#ifndef LLMC_RUN_RUN_DATA_H
#define LLMC_RUN_RUN_DATA_H

#include "llmc/options/options.h"
#include "llmc/data/dataloader.h"
#include "llmc/model/config.h"

/* Opens --train (only when training) and --val for sequences of `length` tokens, takes the
 * vocabulary of `config` from them if it is unknown, and checks their tokens. The caller closes
 * *train and *val (NULL: not opened), also after a failure. Says if both have the same file. Returns 0, or -1
 * after reporting. */
int run_data_open(const struct options *options, bool training, int workers, int length,
                  struct llama_config *config, struct dataloader **train, struct dataloader **val);

#endif

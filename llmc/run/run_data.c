/* run_data.c — see run_data.h. */
#include "llmc/run/run_data.h"

#include "llmc/data/tokenizer_file.h"
#include "llmc/log/error.h"
#include "llmc/util/file.h"

int run_data_open(const struct options *o, bool training, int workers, int length,
                  struct llama_config *c, struct dataloader **train, struct dataloader **val) {
    if (training && dataloader_open(o->train, DATALOADER_TRAIN, length, (uint64_t)o->seed, train))
        return -1;
    if (training && o->data_split == DATA_CONTIGUOUS && dataloader_split(*train, workers))
        return -1;
    if (o->val && dataloader_open(o->val, DATALOADER_VALIDATE, length, 0, val)) return -1;
    if (o->val && o->stride) dataloader_set_stride(*val, o->stride);
    const struct dataloader *data = training ? *train : *val;
    if (config_complete(o->model, o->vocabulary, dataloader_vocabulary(data), c)) return -1;
    if (*train && dataloader_check_vocabulary(*train, c->vocabulary)) return -1;
    if (*val && dataloader_check_vocabulary(*val, c->vocabulary)) return -1;
    const char *shared = *train && *val ? dataloader_shared(*val, *train) : NULL;
    if (shared && log_rank <= 0)
        log_error("--train has the file '%s' of --val, too, or a copy of it: the validation "
                  "perplexity will be that "
                  "of text that the model has learnt",
                  shared);
    return 0;
}

int run_data_open_choices(const struct options *o, struct llama_config *c,
                          struct choices **choices) {
    char tokenizer[FILE_PATH_BYTES];
    if (config_read(o->model, c) || tokenizer_file_in(tokenizer, o->model)) return -1;
    return choices_open(o->eval_choices, o->tokenizer ? o->tokenizer : tokenizer, c->vocabulary,
                        o->seq ? o->seq : c->positions, choices);
}

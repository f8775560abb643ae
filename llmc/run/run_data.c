/* run_data.c — see run_data.h. */
#include "llmc/run/run_data.h"

#include "llmc/checkpoint/checksum.h"
#include "llmc/data/tokenizer_file.h"
#include "llmc/log/error.h"
#include "llmc/util/file.h"

/* Says that two tokenizers differ: that beside some data (NULL: there is none), and `path`. */
static int compare_tokenizers(const struct dataloader *data, const char *option, const char *path,
                              const char *whose) {
    const char *beside = dataloader_tokenizer(data);
    char sum[2][CHECKSUM_TEXT_BYTES];
    if (!beside || !path || access(path, F_OK) || log_rank > 0 ||
        strcmp(tokenizer_file_name(beside), tokenizer_file_name(path)) != 0)
        return 0;
    if (checksum_file(beside, sum[0], NULL) || checksum_file(path, sum[1], NULL)) return -1;
    if (strcmp(sum[0], sum[1]) != 0)
        log_error("'%s', beside the files of %s, differs from '%s', %s: if their ids stand for "
                  "other text, the result says nothing",
                  beside, option, path, whose);
    return 0;
}

/* Says what data and model do not have in common. A model's vocabulary may be padded. */
static int compare_data(const struct options *o, const struct dataloader *train,
                        const struct dataloader *val, int vocabulary) {
    char model[FILE_PATH_BYTES];
    const int known = train ? dataloader_vocabulary(train) : 0;
    const int made_with = train ? known : dataloader_vocabulary(val);
    if (made_with && vocabulary - made_with > made_with / 4 && file_is_directory(o->model) &&
        !o->resume && log_rank <= 0)
        log_error("--%s was made with a vocabulary of %d, the model has %d: expected the same "
                  "tokenizer, else the result says nothing",
                  train ? "train" : "val", made_with, vocabulary);
    if (known && val && dataloader_vocabulary(val) && dataloader_vocabulary(val) != known &&
        log_rank <= 0)
        log_error("--val was made with a vocabulary of %d, --train with one of %d: expected the "
                  "same tokenizer, else the perplexity says nothing",
                  dataloader_vocabulary(val), known);
    if (tokenizer_file_in(model, o->model)) return -1;
    if (train && val && compare_tokenizers(val, "--val", dataloader_tokenizer(train), "of --train"))
        return -1;
    if (o->resume) return 0; /* checkpoints are verified */
    return train ? compare_tokenizers(train, "--train", model, "the model's")
                 : compare_tokenizers(val, "--val", model, "the model's");
}

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
    return compare_data(o, *train, *val, c->vocabulary);
}

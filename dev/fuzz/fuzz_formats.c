/* fuzz_formats.c — everything that reads files of strangers, as a target for libFuzzer.
 *
 *     make build/fuzz_formats
 *     build/fuzz_formats -dict=dev/fuzz/fuzz_formats.dict NEW_CORPUS test/corpus/formats
 *
 * The first byte of an input chooses the reader, the rest is the file:
 *
 *     s   a safetensors file, all its tensors read
 *     m   model.safetensors of a small model whose config.json is good
 *     i   model.safetensors.index.json of that model, beside one good shard
 *     c   config.json
 *     t   an llm.c token file, every window read
 *     l   a trace of lost packets
 *
 * Files live in memory (memfd); their names lead there through /proc. A reader may refuse or
 * accept, but neither crash, nor leak, nor read or write where it should not, nor take long. With
 * -DREPLAY there is a main that reads the files it is given once each, for compilers without
 * libFuzzer.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "llmc/checkpoint/hf_model.h"
#include "llmc/model/config.h"
#include "llmc/data/dataloader.h"
#include "llmc/data/tokenizer.h"
#include "llmc/util/file.h"
#include "llmc/log/error.h"
#include "llmc/checkpoint/safetensors.h"
#include "lossynet/loss/loss.h"
#include "test/support/write_model.h"

/* Only writers of checkpoints read a tokenizer, and no writer is called here. So SentencePiece is not
 * linked. */
int tokenizer_open(const char *path, struct tokenizer **tokenizer) {
    (void)path;
    *tokenizer = NULL;
    return -1;
}
void tokenizer_close(struct tokenizer *tokenizer) {
    (void)tokenizer;
}
int tokenizer_bos(const struct tokenizer *tokenizer) {
    return tokenizer ? 0 : -1;
}
int tokenizer_eos(const struct tokenizer *tokenizer) {
    return tokenizer ? 0 : -1;
}

/* ---- mapping --------------------------------------------------------------------------------- *
 * Linked with --wrap, so that readers get these instead of file.c's. A mapped file ends where its
 * page does not: what reads behind the end would see zeros. Here the end is the end of a page that
 * nothing follows, which stops libraries without sanitizers too.                                 */

int __wrap_file_map(const char *path, struct file_map *map);
int __wrap_file_unmap(struct file_map *map);
int __real_file_map(const char *path, struct file_map *map);
int __real_file_unmap(struct file_map *map);

static size_t guarded_bytes(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

int __wrap_file_map(const char *path, struct file_map *map) {
    struct file_map real;
    *map = (struct file_map){NULL, 0};
    if (__real_file_map(path, &real)) return -1;
    if (real.bytes == 0) return 0;
    size_t room = guarded_bytes(real.bytes);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *pages =
        (char *)mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages + room, page, PROT_NONE)) abort();
    *map = (struct file_map){pages + room - real.bytes, real.bytes};
    memcpy(pages + room - real.bytes, real.data, real.bytes);
    __real_file_unmap(&real);
    return 0;
}

int __wrap_file_unmap(struct file_map *map) {
    size_t room = guarded_bytes(map->bytes);
    if (map->data)
        munmap((char *)map->data + map->bytes - room, room + (size_t)sysconf(_SC_PAGESIZE));
    *map = (struct file_map){NULL, 0};
    return 0;
}

/* ---- files in memory ------------------------------------------------------------------------- */

static char directory[] = "/tmp/fuzz-formats-XXXXXX", index_directory[64];

struct memory_file {
    int descriptor;
    char path[64];
};

static struct memory_file input, good_config, good_shard;

static void make_file(struct memory_file *file) {
    file->descriptor = memfd_create("fuzz", 0);
    if (file->descriptor < 0) abort();
    snprintf(file->path, sizeof file->path, "/proc/self/fd/%d", file->descriptor);
}

static void fill(const struct memory_file *file, const void *data, size_t bytes) {
    if (ftruncate(file->descriptor, 0) || pwrite(file->descriptor, data, bytes, 0) < 0) abort();
}

static void name(const char *folder, const char *file, const struct memory_file *target) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    unlink(path);
    if (symlink(target->path, path)) abort();
}

static void remove_names(void) {
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", directory);
    if (system(command)) abort();
}

/* ---- a small good model ---------------------------------------------------------------------- */

static const struct llama_config small = {2, 1, 1, 1, 2, 2, 4, 8, 1e-5f, 10000, true, {0, 0, 0, 0}};
enum { TENSORS = 9 + 2, FLOATS = 2 * 4 + 2 + 4 * 4 + 2 + 3 * 4 + 2 };

static void small_tensors(struct named_tensor *tensors, float *memory) {
    model_tensors(&small, tensors);
    for (int i = 0; i < TENSORS; i++) {
        tensors[i].data = memory;
        memory += model_tensor_elements(&tensors[i]);
    }
}

/* The directories: one whose model.safetensors is the input, one whose index is. */
static void make_model(void) {
    float memory[FLOATS] = {0};
    struct named_tensor tensors[TENSORS];
    small_tensors(tensors, memory);
    char path[128];
    snprintf(path, sizeof path, "%s/good", directory);
    if (write_whole_model(path, &small, tensors, TENSORS, NULL)) abort();
    static const char *const copied[2] = {"config.json", "model.safetensors"};
    const struct memory_file *const to[2] = {&good_config, &good_shard};
    for (int i = 0; i < 2; i++) {
        char data[8192], from[160];
        snprintf(from, sizeof from, "%s/%s", path, copied[i]);
        FILE *file = fopen(from, "rb");
        if (!file) abort();
        size_t bytes = fread(data, 1, sizeof data, file);
        fclose(file);
        fill(to[i], data, bytes);
    }
}

static void say_nothing(void *context, const char *message) {
    (void)context, (void)message;
}

static void prepare(void) {
    log_muted = true;
    ln_log_to(say_nothing, NULL);
    if (!mkdtemp(directory)) abort();
    atexit(remove_names);
    make_file(&input);
    make_file(&good_config);
    make_file(&good_shard);
    make_model();
    snprintf(index_directory, sizeof index_directory, "%s/index", directory);
    char model[64], config[64];
    snprintf(model, sizeof model, "%s/model", directory);
    snprintf(config, sizeof config, "%s/config", directory);
    char command[512];
    snprintf(command, sizeof command, "mkdir '%s' '%s' '%s'", index_directory, model, config);
    if (system(command)) abort();
    name(model, "model.safetensors", &input);
    name(model, "config.json", &good_config);
    name(config, "config.json", &input);
    name(index_directory, "model.safetensors.index.json", &input);
    name(index_directory, "config.json", &good_config);
    name(index_directory, "a.safetensors", &good_shard);
}

/* ---- the readers ----------------------------------------------------------------------------- */

static volatile unsigned char sink;

/* What is mapped must be there: reads each byte. */
static void touch(const void *data, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) sink = ((const unsigned char *)data)[i];
}

static void read_safetensors(void) {
    struct safetensors *file;
    if (safetensors_open(input.path, &file)) return;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const struct safetensors_view *view = safetensors_at(file, i);
        if (!safetensors_find(file, view->name)) abort();
        touch(view->data, view->bytes);
        float *copy = (float *)malloc(view->elements * sizeof *copy + 1);
        if (copy) safetensors_copy_float(file, view->name, view->shape, view->dims, copy);
        free(copy);
    }
    safetensors_close(file);
}

static void read_model(const char *folder) {
    float memory[FLOATS];
    struct named_tensor tensors[TENSORS];
    char path[64];
    snprintf(path, sizeof path, "%s/%s", directory, folder);
    small_tensors(tensors, memory);
    hf_model_read(path, &small, tensors, TENSORS);
}

static void read_config(void) {
    struct llama_config config;
    char path[64];
    snprintf(path, sizeof path, "%s/config", directory);
    if (config_read(path, &config)) return;
    /* what is accepted has sizes that can be worked with */
    if (config_check(&config, "an accepted file") || config_parameters(&config) == 0) abort();
}

static void read_tokens(void) {
    enum { T = 16 };
    int32_t tokens[T], targets[T];
    struct dataloader *loader;
    for (int stride = 0; stride < T; stride += 5) {
        if (dataloader_open(input.path, DATALOADER_VALIDATE, T, 1, &loader)) return;
        if (stride) dataloader_set_stride(loader, stride);
        dataloader_check_vocabulary(loader, 1000);
        for (uint64_t i = 0; i < dataloader_windows(loader); i++) {
            int length = dataloader_window(loader, i, tokens, targets);
            if (length < 1 || length > T || dataloader_window_skip(loader, i) >= length) abort();
        }
        for (uint64_t i = 0; dataloader_epoch(loader) && i < 10; i++)
            dataloader_batch(loader, i * 0x123456789abcdef, 0, 0, 1, 1, tokens, targets);
        dataloader_close(loader);
    }
}

static void read_trace(void) {
    struct ln_loss loss;
    char model[80];
    static uint8_t arrived[10000]; /* more than room is taken for at once */
    snprintf(model, sizeof model, "trace:%s", input.path);
    const struct lossynet_loss_settings settings = {.rate = {0.5, 0.5}, .model = model, .seed = 1};
    if (ln_loss_open(&loss, &settings, 2)) return;
    for (uint64_t step = 0; step < 3; step++)
        ln_loss_mask(&loss, LOSSYNET_GRADIENT, step, 0, 1, sizeof arrived, NULL, arrived);
    ln_loss_close(&loss);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    if (!input.descriptor) prepare();
    if (bytes == 0) return 0;
    fill(&input, data + 1, bytes - 1);
    switch (data[0]) {
    case 's':
        read_safetensors();
        break;
    case 'm':
        read_model("model");
        break;
    case 'i':
        read_model("index");
        break;
    case 'c':
        read_config();
        break;
    case 't':
        read_tokens();
        break;
    case 'l':
        read_trace();
        break;
    }
    return 0;
}

#ifdef REPLAY
int main(int argc, char **argv) {
    static uint8_t data[1 << 20];
    for (int i = 1; i < argc; i++) {
        FILE *file = fopen(argv[i], "rb");
        if (!file) return 1;
        size_t bytes = fread(data, 1, sizeof data, file);
        fclose(file);
        fprintf(stderr, "%s\n", argv[i]); /* the last line before a crash */
        LLVMFuzzerTestOneInput(data, bytes);
    }
    return 0;
}
#endif

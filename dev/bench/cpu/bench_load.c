/* bench_load.c — how fast a model is read from the file cache, beside the memory's own speed.
 *
 *     make build/bench_load && build/bench_load DIRECTORY [GIGABYTES]
 *
 * Makes Llamas of about so many gigabytes (default 2) in DIRECTORY, float32 and bfloat16, in one
 * file and in shards, and reads each five times as training does: all threads, into memory never
 * touched before. Compared is traffic: bytes read from the file plus bytes written to memory, per
 * second, against a copy with all threads between two places in memory. Exit code 1 below half of
 * that.
 */
#include "llmc/backend/backend.h"
#include "llmc/backend/cpu/backend_cpu.h"
#include "llmc/checkpoint/hf_model.h"
#include "llmc/util/file.h"
#include "llmc/model/param_layout.h"
#include "llmc/log/jsonl.h"
#include "llmc/checkpoint/safetensors.h"

#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { ROUNDS = 5, SHARDS = 4 };
static const double BAR = 0.5;

static double best(double a, double b) {
    return a > b ? a : b;
}

/* Some tensors of a model in one file: of every SHARDS the which-th, or all for which < 0. */
static int write_file(const char *path, const struct named_tensor *tensors, size_t count,
                      const char *dtype, int which) {
    struct safetensors_tensor *list = (struct safetensors_tensor *)calloc(count, sizeof *list);
    size_t n = 0;
    for (size_t i = 0; list && i < count; i++) {
        if (which >= 0 && (int)(i % SHARDS) != which) continue;
        list[n].name = tensors[i].name;
        list[n].dims = tensors[i].dims;
        list[n].shape[0] = tensors[i].shape[0];
        list[n].shape[1] = tensors[i].shape[1];
        list[n].dtype = dtype;
        /* For BF16 the first half of it, so that both halves of a float must be finite numbers. */
        uint32_t *bits = (uint32_t *)tensors[i].data;
        const size_t elements =
            (size_t)tensors[i].shape[0] * (size_t)(tensors[i].dims > 1 ? tensors[i].shape[1] : 1);
        for (size_t e = 0; e < elements; e++) bits[e] &= 0xffff0000;
        list[n++].data = tensors[i].data;
    }
    int status = list ? safetensors_write(path, list, n, NULL) : -1;
    free(list);
    return status;
}

static int write_shards(const char *directory, const struct named_tensor *tensors, size_t count,
                        const char *dtype) {
    char path[FILE_PATH_BYTES];
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
    FILE *index = fopen(path, "w");
    if (!index) return -1;
    fprintf(index, "{\"weight_map\": {");
    for (size_t i = 0; i < count; i++)
        fprintf(index, "%s\"%s\": \"model-%zu.safetensors\"", i ? ", " : "", tensors[i].name,
                i % SHARDS);
    fprintf(index, "}}\n");
    fclose(index);
    int status = 0;
    for (int s = 0; s < SHARDS && !status; s++) {
        snprintf(path, sizeof path, "%s/model-%d.safetensors", directory, s);
        status = write_file(path, tensors, count, dtype, s);
    }
    return status;
}

static void remove_files(const char *directory) {
    char path[FILE_PATH_BYTES];
    for (int s = -2; s < SHARDS; s++) {
        if (s == -2) snprintf(path, sizeof path, "%s/model.safetensors.index.json", directory);
        if (s == -1) snprintf(path, sizeof path, "%s/model.safetensors", directory);
        if (s >= 0) snprintf(path, sizeof path, "%s/model-%d.safetensors", directory, s);
        unlink(path);
    }
}

/* Seconds for reading the model into fresh memory; 0 after an error. */
static double read_once(const struct backend *be, const struct param_layout *l,
                        const char *directory) {
    float *memory = (float *)be->allocate(l->count * sizeof *memory);
    size_t count;
    struct named_tensor *tensors = memory ? param_layout_tensor_list(l, memory, &count) : NULL;
    double start = log_seconds();
    int status = tensors ? hf_model_read(directory, &l->config, tensors, count) : -1;
    double seconds = log_seconds() - start;
    free(tensors);
    be->release(memory);
    return status ? 0 : seconds;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: bench_load DIRECTORY [GIGABYTES]\n");
        return 2;
    }
    const struct backend *be = backend_cpu(DTYPE_FLOAT32);
    if (!be) return 2;
    double gigabytes = argc > 2 ? atof(argv[2]) : 2;
    struct llama_config c;
    struct param_layout l;
    const char *preset = gigabytes < 1 ? "15M" : "7B"; /* small: to see that everything runs */
    if (config_preset(preset, &c)) return 1;
    c.vocabulary = 32000;
    c.layers = 1;
    while (4e-9 * (double)config_parameters(&c) < gigabytes && c.layers < 32) c.layers++;
    if (file_make_directory(argv[1]) || param_layout_build(&c, &l)) return 1;
    float *memory = (float *)be->allocate(l.count * sizeof *memory);
    size_t count;
    struct named_tensor *tensors = memory ? param_layout_tensor_list(&l, memory, &count) : NULL;
    if (!tensors) return 1;
    param_layout_initialise(&l, 1, LAYOUT_ALL, memory);

    float *other = (float *)be->allocate(l.count * sizeof *other);
    if (!other) return 1;
    be->copy(other, memory, l.count * sizeof *other); /* touches it */

    double parameters = (double)l.count;
    printf("%d layer%s of %s, %.2f GB in float32, %d threads; GB/s read and written, best of %d\n",
           c.layers, c.layers > 1 ? "s" : "", preset, 4e-9 * parameters, omp_get_max_threads(),
           ROUNDS);
    int slow = 0;
    for (int kind = 0; kind < 4; kind++) {
        const char *dtype = kind / 2 ? "BF16" : "F32";
        char path[FILE_PATH_BYTES];
        double bytes = parameters * (kind / 2 ? 2 : 4);
        snprintf(path, sizeof path, "%s/model.safetensors", argv[1]);
        int status = kind % 2 ? write_shards(argv[1], tensors, count, dtype)
                              : write_file(path, tensors, count, dtype, -1);
        double copy = 0, rate = 0;
        for (int i = 0; i <= ROUNDS && !status; i++) { /* in turns, since other programs disturb */
            double seconds = read_once(be, &l, argv[1]), start = log_seconds();
            be->copy(other, memory, l.count * sizeof *other);
            copy = best(copy, 8 * parameters / (log_seconds() - start));
            status = seconds == 0;
            if (i > 0 && !status) rate = best(rate, (bytes + 4 * parameters) / seconds);
        }
        printf("%-4s %-8s  read %6.2f (file %5.2f)   copy in memory %6.2f   %3.0f%%\n", dtype,
               kind % 2 ? "4 shards" : "1 file", rate / 1e9,
               rate / 1e9 * bytes / (bytes + 4 * parameters), copy / 1e9, 100 * rate / copy);
        slow |= !(rate >= BAR * copy);
        remove_files(argv[1]);
    }
    free(tensors);
    be->release(other);
    be->release(memory);
    param_layout_release(&l);
    return slow;
}

/* preflight_host.c — examines the host of a rank. See preflight.h. */
#include "llmc/cli/preflight.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "llmc/backend/cuda/backend_cuda.h"
#include "llmc/model/config.h"
#include "llmc/memory/memory_plan.h"
#include "llmc/util/file.h"
#include "llmc/util/host_memory.h"
#include "llmc/comm/common_facts.h"
#include "llmc/comm/settings.h"
#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"
#include "llmc/cli/generate.h"
#include "llmc/cli/validate.h"

enum { VOCABULARY = 32000 };                /* of a preset, where neither options nor data say it */
static const double MARKER_SECONDS = 5;     /* a network file system may show new names late */
static const double PRODUCT_SECONDS = 0.02; /* a product that takes this long is timed */
enum { PRODUCT_LEAST = 128, PRODUCT_MOST = 8192 }; /* its three dimensions */

static void *taken; /* the device's memory that the run would need */
static const struct backend *device;

__attribute__((format(printf, 2, 3))) static void wrong(struct preflight_rank *out,
                                                        const char *format, ...) {
    va_list arguments;
    if (out->wrong[0]) return; /* the first fault is reported */
    va_start(arguments, format);
    vsnprintf(out->wrong, sizeof out->wrong, format, arguments);
    va_end(arguments);
}

/* ---- needs of the run ---- */

int preflight_needs(const struct options *o, const struct lossynet_world *world,
                    struct preflight_needs *out) {
    struct llama_config c;
    struct param_layout layout;
    const struct lossynet_world planned = comm_planned_world(o, world);
    const int workers = o->net.workers ? o->net.workers : planned.ranks;
    if (config_of_model(o->model, &c) ||
        config_complete(o->model, o->vocabulary ? o->vocabulary : VOCABULARY, 0, &c) ||
        comm_layout(o, &c, workers, &layout))
        return -1;
    const struct lossynet_settings network = comm_settings(o, &layout, workers, workers, false);
    struct memory_plan_settings s =
        memory_plan_of_options(o, workers, validate_sequence_length(o, c.positions));
    comm_plan(o, &layout, workers, workers, &s);
    if (o->attention == OPTION_ATTENTION_AUTO) s.cudnn = false; /* which does without, if need be */
    s.network_bytes = (double)lossynet_memory_needed(&planned, &network);
    param_layout_release(&layout);
    s.recompute = o->recompute == RECOMPUTE_AUTO ? RECOMPUTE_NONE : (enum recompute)o->recompute;
    memory_plan_place(&s, planned.ranks, planned.rank);
    if (o->dtype == OPTION_DTYPE_BF16) s.run.dtype = DTYPE_BF16;
    const struct memory_plan cpu = memory_plan_of_run(&c, &s);
    s.run.device = true;
    if (o->dtype != OPTION_DTYPE_FLOAT32) s.run.dtype = DTYPE_BF16;
    out->bf16 = s.run.dtype == DTYPE_BF16;
    /* `auto` recomputes as much as is needed for the run to fit, so assume the most
     * recomputation. */
    if (o->recompute == RECOMPUTE_AUTO) s.recompute = RECOMPUTE_BLOCK;
    const struct memory_plan gpu = memory_plan_of_run(&c, &s);
    out->device = gpu.total_bytes;
    out->host = cpu.total_bytes;
    out->beside_device = gpu.host_bytes;
    const double saves = !o->save_every ? 1 : floor((double)o->steps / o->save_every);
    const double kept = !o->save_every || !o->keep ? saves : fmin(saves, o->keep + 1);
    s.run.device = o->device == DEVICE_CUDA; /* with lost gradients, which a CPU's run holds */
    out->disk = fmax(kept, 1) * memory_plan_checkpoint_bytes(&c, &s);
    return 0;
}

/* ---- memory ---- */

/* The memory that is available in this rank's host and control groups. */
static double host_memory_free(void) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    const int count = host_memory_limits("", limit);
    double least = count ? limit[0].available : 0;
    for (int i = 1; i < count; i++) least = fmin(least, limit[i].available);
    return least;
}

/* ---- the device ---- */

static double seconds_of_product(const struct backend *be, tensor *out, tensor *x, weight *w,
                                 int n) {
    float one;
    const double start = log_seconds();
    be->matmul_forward(out, x, w, n, n, n);
    be->download(&one, out, sizeof one); /* waits for it */
    return log_seconds() - start;
}

/* Speed of a product that is large enough to be timed, in 10^9 floating-point operations per
 * second. Returns 0 if out of memory. */
static double measure_product(const struct backend *be) {
    double rate = 0, seconds = 0;
    for (int n = PRODUCT_LEAST; n <= PRODUCT_MOST && seconds < PRODUCT_SECONDS; n *= 2) {
        const size_t elements = (size_t)n * (size_t)n, bytes = elements * be->element_bytes;
        tensor *out = be->allocate(bytes), *x = be->allocate(bytes);
        weight *w = be->allocate(elements * be->weight_bytes);
        if (out && x && w) {
            seconds = seconds_of_product(be, out, x, w, n);
            seconds = fmin(seconds, seconds_of_product(be, out, x, w, n));
            rate = 2e-9 * n * n * n / seconds;
        } else {
            seconds = PRODUCT_SECONDS;
        }
        be->release(w);
        be->release(x);
        be->release(out);
    }
    return rate;
}

/* "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  ..." */
static void read_driver(char *out, size_t size) {
    char line[256] = "";
    FILE *file = fopen("/proc/driver/nvidia/version", "r");
    if (file && fgets(line, sizeof line, file)) {
        for (char *word = strtok(line, " \t\n"); word; word = strtok(NULL, " \t\n"))
            if (strspn(word, "0123456789.") == strlen(word) && strchr(word, '.')) {
                snprintf(out, size, "%s", word);
                break;
            }
    }
    if (file) fclose(file);
}

static void look_at_device(const struct options *o, int local_rank,
                           const struct preflight_needs *needs, struct preflight_rank *out) {
    char why[160] = "";
    const struct backend *be = NULL;
    if (o->device != DEVICE_CPU)
        be = backend_cuda(needs->bf16 ? DTYPE_BF16 : DTYPE_FLOAT32, local_rank, why, sizeof why);
    out->on_device = be != NULL;
    if (!be && o->device == DEVICE_CUDA) wrong(out, "--device cuda: %s", why);
    if (!be) be = backend_cpu(o->dtype == OPTION_DTYPE_BF16 ? DTYPE_BF16 : DTYPE_FLOAT32);
    snprintf(out->device, sizeof out->device, "%s", be->details);
    out->gflops = measure_product(be);
    if (!out->on_device) return;
    read_driver(out->driver, sizeof out->driver);
    out->device_free = (double)be->memory_free();
    out->device_needed = needs->device;
    device = be;
    taken = be->allocate((size_t)needs->device);
    if (!taken)
        wrong(out,
              "its GPU gives no %.1f GB, which the run needs (%.1f GB are free): end what else "
              "runs there, or take a smaller --batch or --seq",
              needs->device / 1e9, out->device_free / 1e9);
}

void preflight_release(void) {
    if (taken) device->release(taken);
    taken = NULL;
}

/* ---- files ---- */

/* What the run would look at when it starts: token files, the key, the tokenizer. */
static void look_as_the_run(const struct options *o, struct preflight_rank *out) {
    struct options given = *o;
    struct common_facts facts;
    char said[LOG_BYTES] = "";
    if (!o->vocabulary && !o->train && !o->val) given.vocabulary = VOCABULARY;
    log_kept = said;
    const int failed = common_facts_find(&given, "", &facts) ||
                       (o->sample_every && o->tokenizer && generate_check_tokenizer(o->tokenizer));
    log_kept = NULL;
    checksum_bytes(facts.text, sizeof facts.text, out->data);
    if (failed)
        wrong(out, "%s", said);
    else if (*said)
        log_error("%s", said);
}

/* Whether a file can be written, of which nothing stays. path: NULL: none. */
static void look_at_writing(const char *option, const char *path, struct preflight_rank *out) {
    if (!path || !access(path, W_OK)) return;
    const int descriptor = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor < 0 || close(descriptor) || unlink(path))
        wrong(out, "cannot write to %s '%s': %s", option, path, strerror(errno));
}

static void look_at_files(const struct options *o, struct preflight_rank *out) {
    uint64_t bytes;
    checksum_file("/proc/self/exe", out->program, &bytes);
    look_as_the_run(o, out);
    look_at_writing("--log", o->log, out);
    look_at_writing("--record-loss", o->net.record_loss, out);
}

static void look_at_out(const char *directory, const char *marker, double needed,
                        struct preflight_rank *out) {
    struct statvfs fs;
    char name[64], path[FILE_PATH_BYTES];
    const double start = log_seconds();
    const struct timespec moment = {0, 200000000};
    while (marker && access(marker, R_OK) && log_seconds() < start + MARKER_SECONDS)
        nanosleep(&moment, NULL);
    if (!marker || access(marker, R_OK)) {
        wrong(out,
              "does not see in --out '%s' what rank 0 wrote there: expected one directory that "
              "all nodes share, writable",
              directory);
        return;
    }
    snprintf(name, sizeof name, ".preflight-%.20s-%d", out->host, (int)getpid());
    if (file_join(path, directory, name)) return;
    const int descriptor = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0 || close(descriptor) || unlink(path))
        wrong(out, "cannot write to --out '%s': %s", directory, strerror(errno));
    if (statvfs(directory, &fs)) return;
    out->disk_free = (double)fs.f_bavail * (double)fs.f_frsize;
    out->disk_needed = needed;
}

/* ---- all of it ---- */

void preflight_look(const struct options *o, const struct lossynet_world *world,
                    const struct preflight_needs *needs, const char *marker,
                    struct preflight_rank *out) {
    struct rlimit lockable;
    look_at_device(o, world->local_rank, needs, out);
    out->memory_needed = out->on_device ? needs->beside_device : needs->host;
    out->memory_free = host_memory_free();
    if (!getrlimit(RLIMIT_MEMLOCK, &lockable)) out->lockable = (double)lockable.rlim_cur;
    if (world->local_rank > 0) return; /* one rank per host reports about its files */
    look_at_files(o, out);
    if (!o->out) return;
    look_at_out(o->out, marker, needs->disk, out);
}

/* preflight_host.c — examines the host of a rank. See preflight.h. */
#include "llmc/cli/preflight.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "llmc/cli/validate.h"
#include "llmc/comm/select.h"
#include "llmc/comm/settings.h"
#include "llmc/log/jsonl.h"
#include "llmc/memory/memory_check.h"
#include "llmc/memory/memory_plan.h"
#include "llmc/model/config.h"
#include "llmc/util/file.h"

static const double MARKER_SECONDS = 5;     /* a network file system may show new names late */
static const double PRODUCT_SECONDS = 0.02; /* a product that takes this long is timed */
enum { PRODUCT_LEAST = 128, PRODUCT_MOST = 8192 }; /* its three dimensions */

/* ---- as the run ---- */

static double checkpoint_bytes(const struct options *o, const struct llama_config *c,
                               const struct memory_plan_settings *run) {
    const double saves = !o->save_every ? 1 : floor((double)o->steps / o->save_every);
    const double kept = !o->save_every || !o->keep ? saves : fmin(saves, o->keep + 1);
    return fmax(kept, 1) * memory_plan_checkpoint_bytes(c, run);
}

int preflight_choose(const struct options *o, const struct lossynet_world *world,
                     const struct backend **be, double *disk) {
    struct llama_config c;
    struct param_layout layout;
    struct backend_choice choice;
    const struct lossynet_world planned = comm_planned_world(o, world);
    const int workers = o->net.workers ? o->net.workers : planned.ranks;
    if (validate_planned_config(o, &c) || comm_layout(o, &c, workers, &layout)) return -1;
    struct memory_plan_settings run =
        memory_plan_of_options(o, workers, validate_sequence_length(o, c.positions));
    comm_plan(o, &layout, workers, planned.ranks, &run);
    memory_plan_place(&run, planned.ranks, planned.rank);
    int failed = backend_select(o, &c, &run, world, false, &choice) ||
                 comm_check_device(o, choice.backend->on_device);
    if (!failed) {
        const struct lossynet_settings network =
            comm_settings(o, &layout, workers, planned.ranks, run.run.device);
        run.network_bytes = (double)lossynet_memory_needed(&planned, &network);
        failed = run.network_bytes == 0 || memory_check(o, world, &c, &run) ? -1 : 0;
        *be = choice.backend;
        *disk = checkpoint_bytes(o, &c, &run);
    }
    param_layout_release(&layout);
    return failed ? -1 : 0;
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

/* ---- the directory of checkpoints ---- */

static void look_at_out(const char *directory, const char *marker, double needed,
                        struct preflight_rank *out) {
    struct statvfs fs;
    char name[64], path[FILE_PATH_BYTES];
    const double start = log_seconds();
    const struct timespec moment = {0, 200000000};
    while (marker && access(marker, R_OK) && log_seconds() < start + MARKER_SECONDS)
        nanosleep(&moment, NULL);
    if (!marker || access(marker, R_OK)) {
        snprintf(out->wrong, sizeof out->wrong,
                 "does not see in --out '%s' what rank 0 wrote there: expected one directory that "
                 "all nodes share, writable",
                 directory);
        return;
    }
    snprintf(name, sizeof name, ".preflight-%.20s-%d", out->host, (int)getpid());
    if (file_join(path, directory, name)) return;
    const int descriptor = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (descriptor < 0 || close(descriptor) || unlink(path))
        snprintf(out->wrong, sizeof out->wrong, "cannot write to --out '%s': %s", directory,
                 strerror(errno));
    if (statvfs(directory, &fs)) return;
    out->disk_free = (double)fs.f_bavail * (double)fs.f_frsize;
    out->disk_needed = needed;
}

/* ---- all of it ---- */

void preflight_look(const struct options *o, const struct lossynet_world *world,
                    const struct backend *be, double disk, const char *marker,
                    struct preflight_rank *out) {
    out->on_device = be->on_device;
    snprintf(out->device, sizeof out->device, "%s", be->details);
    out->gflops = measure_product(be);
    if (o->out && world->local_rank == 0) look_at_out(o->out, marker, disk, out);
}

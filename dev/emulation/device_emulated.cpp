/* device_emulated.cpp — llmc/backend/cuda/device.h without a GPU: for test programs, in place of
 * device.cu and product.cu.
 *
 * "Device memory" is host memory that cannot be accessed outside an operation. Pages are opened
 * when work runs within a device_scope and closed when the scope ends, so that a program that reads
 * a GPU's array from the host dies here too. Most scopes only queue work, and open nothing. Each
 * block of memory ends (except for alignment) at a page that is never opened. Products are plain
 * loops that add in float32. They sum 64 terms at a time, or another number for each place of an
 * algorithm (backend.h), so that the bits of places differ. Work runs later than it is called
 * (streams_emu.h); the streams are those of llmc/backend/cuda/streams.cu. */
#include "dev/emulation/device_emulated.h"
#include "dev/emulation/kernel_names.h"
#include "llmc/backend/cuda/device.h"
#include "llmc/backend/cuda/streams.h"
#include "llmc/log/error.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <map>

enum { ALIGNMENT = 256 };

struct block {
    char *pages;
    size_t bytes; /* of whole pages, without the closed one behind them */
    bool foreign; /* another process's */
};

static std::map<void *, block> blocks; /* by the address that was returned */
static pthread_mutex_t turn = PTHREAD_ERRORCHECK_MUTEX_INITIALIZER_NP;
static bool in_scope, pages_open;
static bool opened;
struct device_facts device_facts = {"emulated", "", "plain loops", -1, 0};
static char *const identity = device_facts.identity;
static size_t limit;                     /* EMULATED_MEMORY: bytes of the device; 0: no limit */
static size_t used, most;                /* bytes: now, and at the peak */
static size_t averages, averages_beside; /* EMULATED_AVERAGES */
static size_t calls;                     /* EMULATED_OPERATIONS: of the backend */
static struct {
    void *memory;
    size_t bytes;
} scratches[BACKEND_SETS][SCRATCHES];

static void protect(int protection) {
    for (const auto &entry : blocks) {
        if (mprotect(entry.second.pages, entry.second.bytes, protection)) abort();
    }
}

static void open_pages(void) {
    if (!in_scope || pages_open) return;
    pages_open = true;
    protect(PROT_READ | PROT_WRITE);
}

device_scope::device_scope() {
    /* A test program that lives on after a crash comes here again, and would wait for itself. */
    if (pthread_mutex_lock(&turn)) {
        fprintf(stderr, "emulated device: an operation of this thread has crashed before; the "
                        "device cannot go on, and the program ends\n");
        abort();
    }
    in_scope = true;
    calls++;
}

device_scope::~device_scope() {
    if (pages_open) protect(PROT_NONE);
    in_scope = pages_open = false;
    pthread_mutex_unlock(&turn);
}

void emulated_order(enum emulated_order order, uint64_t seed) {
    cuda_emu_order(order == EMULATED_FORWARD   ? CUDA_EMU_FORWARD
                   : order == EMULATED_REVERSE ? CUDA_EMU_REVERSE
                                               : CUDA_EMU_RANDOM,
                   seed);
}

/* EMULATED_STREAMS: late, others, soon or random:SEED */
static void choose_streams(void) {
    const char *wanted = getenv("EMULATED_STREAMS");
    unsigned seed;
    if (wanted && sscanf(wanted, "random:%u", &seed) == 1) {
        cuda_emu_seed(seed);
        return cuda_emu_streams(CUDA_EMU_STREAMS_RANDOM);
    }
    if (!wanted || !strcmp(wanted, "late")) return cuda_emu_streams(CUDA_EMU_LATE);
    if (!strcmp(wanted, "others")) return cuda_emu_streams(CUDA_EMU_OTHERS);
    if (!strcmp(wanted, "soon")) return cuda_emu_streams(CUDA_EMU_SOON);
    fprintf(stderr, "EMULATED_STREAMS: expected late, others, soon or random:SEED, got '%s'\n",
            wanted);
    exit(2);
}

/* Writes two numbers to FILE.<device>; FILE is the variable's value. */
static void write_numbers(const char *variable, size_t first, size_t second) {
    char path[4096];
    if (!getenv(variable)) return;
    snprintf(path, sizeof path, "%s.%s", getenv(variable), identity);
    FILE *file = fopen(path, "w");
    if (!file) return;
    fprintf(file, "%zu %zu\n", first, second);
    fclose(file);
}

static void write_report(void) {
    write_numbers("EMULATED_PEAK", most, cuda_emu::pinned_registered());
    write_numbers("EMULATED_AVERAGES", averages, averages_beside);
    write_numbers("EMULATED_UPLOADS", cuda_emu::pinned_uploaded(), 0);
    write_numbers("EMULATED_OPERATIONS", cuda_emu::operations_counted(), calls);
}

static void count_averages(cudaStream_t stream) {
    if (stream != device_average_stream()) return;
    averages++;
    averages_beside += cuda_emu::pending(device_stream()) > 0;
}

/* ---- planted faults ---- */

static std::string name_of(const void *kernel) {
    std::string names;
    const auto found = cuda_emu::functions().equal_range((uintptr_t)kernel);
    for (auto f = found.first; f != found.second; ++f)
        names += (names.empty() ? "" : " ") + f->second;
    return names;
}

static void fail_as_cuda(const std::string &name) {
    const bool blocking = getenv("CUDA_LAUNCH_BLOCKING") != NULL;
    cuda_check(cudaErrorIllegalAddress, blocking ? name.c_str() : "cudaStreamSynchronize(stream)",
               blocking ? "launch" : "streams.cu", 0);
}

/* EMULATED_BROKEN=HOW:KERNEL[:BLOCKS[:DEVICE]] */
static dim3 begin_kernel(const void *kernel, dim3 grid) {
    static const char *broken = getenv("EMULATED_BROKEN");
    static const bool noted = getenv("CUDA_LAUNCHED") != NULL;
    char how[8] = "", wanted[128] = "", device[8] = "";
    unsigned blocks = 0;
    if (!broken && !noted) return grid;
    const std::string name = name_of(kernel);
    streams_note(name.c_str());
    if (!broken || sscanf(broken, "%7[^:]:%127[^:]:%u:%7s", how, wanted, &blocks, device) < 2 ||
        name.find(wanted) == std::string::npos || grid.x * grid.y * grid.z < blocks ||
        (*device && strcmp(device, identity)))
        return grid;
    if (!strcmp(how, "error")) fail_as_cuda(name);
    if (!strcmp(how, "die")) raise(SIGKILL);
    while (!strcmp(how, "hang")) pause();
    if (!strcmp(how, "wrong") && grid.x > 0) grid.x--;
    return grid;
}

static bool sets_fault(const char *fault) {
    const char *planted = getenv("EMULATED_SETS");
    return planted && !strcmp(planted, fault);
}

static bool is_of_another_set(cudaStream_t stream) {
    bool found = false;
    for (int set = 1; set < BACKEND_SETS; set++)
        device_use_set(set), found = found || stream == device_stream();
    return found;
}

static bool before_event(cudaStream_t waits, cudaStream_t other) {
    const int now = device_set();
    if (!getenv("EMULATED_SETS")) return true;
    const bool begins = is_of_another_set(waits), ends = is_of_another_set(other);
    device_use_set(0);
    const bool first = waits == device_stream(), of_first = other == device_stream();
    device_use_set(now);
    return !(sets_fault("begin") && begins && of_first) && !(sets_fault("end") && ends && first);
}

bool device_open(int local_rank, char *why, size_t why_size) {
    const char *wanted = getenv("EMULATED_DEVICE"), *memory = getenv("EMULATED_MEMORY");
    const char *devices = getenv("EMULATED_DEVICES");
    if (wanted && !strcmp(wanted, "none")) {
        snprintf(why, why_size, "no NVIDIA driver on this machine (emulated)");
        return false;
    }
    struct device_facts *facts = &device_facts;
    if (wanted) snprintf(facts->name, sizeof facts->name, "%s", wanted);
    snprintf(facts->identity, sizeof facts->identity, "%d",
             devices ? local_rank % atoi(devices) : local_rank);
    /* So few tokens that tests of small models have enough. */
    facts->cudnn_from = strstr(facts->name, "sm_90") ? 16 : 0;
    if (memory) limit = strtoull(memory, NULL, 10);
    if (!opened && streams_open() != cudaSuccess) return false;
    choose_streams();
    cuda_emu_before_work(open_pages);
    cuda_emu_before_wait(count_averages);
    cuda_emu_before_kernel(begin_kernel);
    cuda_emu_before_event(before_event);
    if (!opened) atexit(write_report);
    opened = true;
    return true;
}

/* ---- memory ---- */

size_t device_memory_free(void) {
    if (limit) return limit > used ? limit - used : 0;
    return (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
}

void *device_allocate(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!opened || bytes > (size_t)1 << 40) return NULL;
    if (bytes == 0) bytes = 1;
    const size_t whole = (bytes + page - 1) / page * page;
    if (limit && whole > device_memory_free()) return NULL;
    char *pages = (char *)mmap(NULL, whole + page, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return NULL;
    if (pages_open && mprotect(pages, whole, PROT_READ | PROT_WRITE)) abort();
    char *memory = pages + (whole - bytes) / ALIGNMENT * ALIGNMENT;
    blocks[memory] = {pages, whole, false};
    used += whole;
    if (used > most) most = used;
    open_pages();
    memset(memory, 0xff, bytes); /* as cudaMalloc gives it: not cleared */
    streams_clear(memory, bytes);
    return memory;
}

/* What `handle` of struct backend_shared holds here. */
struct place {
    long long process;
    int file;
    size_t bytes, offset; /* of the memory in its pages */
};

static bool has_peers(void) {
    const char *without = getenv("EMULATED_PEERS");
    return !without || (strcmp(without, "none") != 0 && strcmp(without, identity) != 0);
}

/* Replaces the block's pages by those of a file without a name, at the same addresses. */
bool device_share(const void *memory, struct backend_shared *out) {
    const struct block b = blocks.at((void *)memory);
    open_pages();
    const int file = has_peers() ? memfd_create("emulated device", MFD_CLOEXEC) : -1;
    if (file < 0) return false;
    if (pwrite(file, b.pages, b.bytes, 0) != (ssize_t)b.bytes ||
        mmap(b.pages, b.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) != b.pages)
        abort();
    const struct place place = {getpid(), file, b.bytes, (size_t)((char *)memory - b.pages)};
    static_assert(sizeof place <= sizeof out->handle, "a place fits");
    memcpy(out->handle, &place, sizeof place);
    return true;
}

const void *device_open_shared(const struct backend_shared *shared) {
    struct place place;
    char path[64];
    memcpy(&place, shared->handle, sizeof place);
    if (!has_peers() || place.process == getpid()) return NULL; /* CUDA refuses its own, too */
    open_pages();
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", place.process, place.file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return NULL;
    char *pages = (char *)mmap(NULL, place.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (pages == MAP_FAILED) return NULL;
    blocks[pages + place.offset] = {pages, place.bytes, true};
    return pages + place.offset;
}

void device_close_shared(const void *memory) {
    cudaDeviceSynchronize();
    auto found = blocks.find((void *)memory);
    if (found == blocks.end() || !found->second.foreign) abort(); /* not open */
    munmap(found->second.pages, found->second.bytes);
    blocks.erase(found);
}

void device_release(void *memory) {
    if (!memory) return;
    cudaDeviceSynchronize(); /* as cudaFree does */
    auto found = blocks.find(memory);
    if (found == blocks.end() || found->second.foreign)
        abort(); /* not a block, or released twice */
    used -= found->second.bytes;
    munmap(found->second.pages, found->second.bytes + (size_t)sysconf(_SC_PAGESIZE));
    blocks.erase(found);
    device_passes_forget();
}

/* Filled with NaN for every operation: an operation must not read what it did not write. */
void *device_scratch_memory(enum device_scratch which, size_t bytes) {
    auto *s = &scratches[sets_fault("scratch") ? 0 : device_set()][which];
    if (bytes > s->bytes) {
        device_release(s->memory);
        s->memory = device_allocate(bytes);
        if (!s->memory) {
            log_error(
                "CUDA: out of memory: an operation needs %.3f GB to work with, %.3f GB are free "
                "(a smaller --batch or --seq needs less)",
                (double)bytes / 1e9, (double)device_memory_free() / 1e9);
            exit(1);
        }
        s->bytes = bytes;
    }
    cudaMemsetAsync(s->memory, 0xff, bytes, device_stream());
    cuda_emu::count_operations(-1); /* a device does not do this */
    return s->memory;
}

/* ---- products ---- */

static float load(const void *p, size_t i, enum dtype dtype) {
    return dtype == DTYPE_BF16 ? __bfloat162float(((const __nv_bfloat16 *)p)[i])
                               : ((const float *)p)[i];
}

/* A row-major (rows, columns) float copy of op(x). */
static float *unpacked(const void *x, bool transpose, int rows, int columns, size_t row,
                       enum dtype dtype) {
    float *to = (float *)malloc(sizeof(float) * ((size_t)rows * columns + 1));
    if (!to) abort();
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < columns; j++) {
            size_t at = transpose ? (size_t)j * row + i : (size_t)i * row + j;
            to[(size_t)i * columns + j] = load(x, at, dtype);
        }
    }
    return to;
}

static void multiply(void *out, const void *a_, const void *b_, const struct product *p) {
    const int M = p->M, N = p->N, K = p->K, together = 64;
    float *a = unpacked(a_, p->transpose_a, M, K, p->row_a, p->in);
    float *b = unpacked(b_, p->transpose_b, K, N, p->row_b, p->in);
#pragma omp parallel for if ((double)M * N * K > 1e6)
    for (int i = 0; i < M; i++) {
        float *sum = (float *)calloc(2 * (size_t)N, sizeof *sum), *part = sum + N;
        if (!sum) abort();
        for (int k = 0; k < K; k++) {
            const float x = a[(size_t)i * K + k], *y = b + (size_t)k * N;
            for (int j = 0; j < N; j++) part[j] += x * y[j];
            if (k % together < together - 1 && k < K - 1) continue;
            for (int j = 0; j < N; j++) sum[j] += part[j], part[j] = 0;
        }
        for (int j = 0; j < N; j++) {
            const size_t at = (size_t)i * p->row_out + j;
            float value = sum[j] + (p->accumulate ? load(out, at, p->out_type) : 0);
            if (p->out_type == DTYPE_BF16) {
                ((__nv_bfloat16 *)out)[at] = __float2bfloat16(value);
            } else {
                ((float *)out)[at] = value;
            }
        }
        free(sum);
    }
    free(a);
    free(b);
}

void device_product(void *out, const void *a, const void *b, const struct product *p) {
    const struct product kept = *p;
    char name[64];
    snprintf(name, sizeof name, "a product of %d x %d x %d", p->M, p->N, p->K);
    streams_note(name);
    cuda_emu::enqueue(device_stream(), [out, a, b, kept] { multiply(out, a, b, &kept); });
}

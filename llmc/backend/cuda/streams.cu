/* streams.cu — the compute stream and the streams that copy beside it; device.h draws what waits
 * for what. Compiled by nvcc, and also for the emulated device, where each stream runs as late or
 * as early as it may (dev/emulation/streams_emu.h): a wait that is missing here gives wrong numbers
 * there. */
#include "llmc/backend/cuda/streams.h"
#include "llmc/backend/cuda/device.h"
#include "llmc/log/error.h"
#include "llmc/util/host_memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BUFFERS = 2 };

/* Copies in parts through staging buffers; the kernels that write or read these have a stream. */
struct staging {
    cudaStream_t kernels;
    cudaEvent_t full[BUFFERS], empty[BUFFERS];
};

static struct {
    cudaStream_t compute[BACKEND_SETS], out, in, average;
    cudaEvent_t reached;                 /* by the stream that another waits for */
    cudaEvent_t mark[BACKEND_ALL_MARKS]; /* of out */
    struct staging leaving, coming;
    int sets; /* that were begun */
} device;

static thread_local int set;

#define CHECK(call) CUDA_CHECK(call)

/* ---- errors, and what runs ---- */

/* Most errors are those of kernels that were launched before, and show at a later call. */
void cuda_check(cudaError_t error, const char *call, const char *file, int line) {
    if (error == cudaSuccess) return;
    const char *blocking = getenv("CUDA_LAUNCH_BLOCKING"), *name = strrchr(file, '/');
    log_error("CUDA: %s (%s:%d): %s%s", call, name ? name + 1 : file, line,
              cudaGetErrorString(error),
              blocking ? "" : " (CUDA_LAUNCH_BLOCKING=1 names the kernel)");
    exit(1);
}

void streams_note(const char *name) {
    enum { BYTES = 512 };
    static char *note;
    static bool asked;
    const char *path = getenv("CUDA_LAUNCHED");
    if (!asked && path) {
        char own[4096];
        snprintf(own, sizeof own, "%s.%d", path, (int)getpid());
        const int file = open(own, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (file >= 0 && !ftruncate(file, BYTES))
            note = (char *)mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (note == MAP_FAILED) note = NULL;
        if (file >= 0) close(file);
    }
    asked = true;
    if (note && log_rank >= 0)
        snprintf(note, BYTES, "rank %d: %s", log_rank, name);
    else if (note)
        snprintf(note, BYTES, "%s", name);
}

static const char *name_of(const void *kernel) {
    const char *name = NULL;
#if CUDART_VERSION >= 12030
    if (cudaFuncGetName(&name, kernel) != cudaSuccess) name = NULL;
#else
    (void)kernel;
#endif
    return name ? name : "a kernel";
}

void cuda_launching(const void *kernel) {
    static const bool noted = getenv("CUDA_LAUNCHED") != NULL;
    if (noted) streams_note(name_of(kernel));
}

/* With CUDA_LAUNCH_BLOCKING=1, an error of the kernel shows here. */
void cuda_launched(const void *kernel) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) cuda_check(error, name_of(kernel), "launch", 0);
}

cudaError_t streams_open(void) {
    cudaStream_t *const streams[] = {&device.out, &device.in, &device.average,
                                     &device.leaving.kernels, &device.coming.kernels};
    cudaEvent_t *const events[] = {
        &device.reached,          &device.leaving.full[0],  &device.leaving.full[1],
        &device.leaving.empty[0], &device.leaving.empty[1], &device.coming.full[0],
        &device.coming.full[1],   &device.coming.empty[0],  &device.coming.empty[1]};
    int least, greatest;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    /* Kernels that move data are short, and the host, the network or compute wait for them. Without
     * priority, their blocks would start when a product has started all of its own. */
    for (int i = 0; i < BACKEND_SETS && error == cudaSuccess; i++) {
        error = cudaStreamCreateWithPriority(&device.compute[i], cudaStreamNonBlocking, least);
    }
    for (int i = 0; i < 5 && error == cudaSuccess; i++) {
        error = cudaStreamCreateWithPriority(streams[i], cudaStreamNonBlocking, greatest);
    }
    for (int i = 0; i < 9 && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(events[i], cudaEventDisableTiming);
    }
    for (int i = 0; i < BACKEND_ALL_MARKS && error == cudaSuccess; i++) {
        error = cudaEventCreateWithFlags(&device.mark[i], cudaEventDisableTiming);
    }
    return error;
}

/* ---- compute ---- */

int device_set(void) {
    return set;
}

cudaStream_t device_stream(void) {
    return device.compute[set];
}

/* An event may be recorded again at once: who waits for it waits for what was last recorded. */
static void wait_for(cudaStream_t waits, cudaStream_t stream) {
    CHECK(cudaEventRecord(device.reached, stream));
    CHECK(cudaStreamWaitEvent(waits, device.reached, 0));
}

void device_sets_begin(int sets) {
    for (int i = 1; i < sets; i++) wait_for(device.compute[i], device.compute[0]);
    device.sets = sets;
}

void device_use_set(int set_) {
    set = set_;
}

void device_sets_end(void) {
    for (int i = 1; i < device.sets; i++) wait_for(device.compute[0], device.compute[i]);
    device.sets = 1, set = 0;
}

/* ---- passes that repeat ---- */

/* A graph takes a kilobyte for each kernel, so there are not more of them. */
enum { PASSES = 1024 };
static struct pass {
    enum { UNKNOWN, CALLED, RECORDING, RECORDED } state;
    char key[BACKEND_PASS_KEY];
    cudaGraphExec_t graph;
} passes[PASSES];

static void forget(struct pass *p) {
    if (p->graph) CHECK(cudaGraphExecDestroy(p->graph));
    memset(p, 0, sizeof *p);
}

void device_passes_forget(void) {
    for (int i = 0; i < PASSES; i++) forget(&passes[i]);
}

bool device_pass_begin(int number, const void *key, size_t bytes) {
    static const bool noted = getenv("CUDA_LAUNCHED") != NULL; /* each kernel is to be named */
    if (noted || number >= PASSES) return false;
    struct pass *p = &passes[number];
    if (memcmp(p->key, key, bytes) != 0) forget(p);
    if (p->state == pass::RECORDED) {
        CHECK(cudaGraphLaunch(p->graph, device_stream()));
        return true;
    }
    if (p->state == pass::CALLED) {
        CHECK(cudaStreamBeginCapture(device_stream(), cudaStreamCaptureModeRelaxed));
        p->state = pass::RECORDING;
    } else {
        memcpy(p->key, key, bytes);
        p->state = pass::CALLED;
    }
    return false;
}

void device_pass_end(int number) {
    cudaGraph_t graph;
    if (number >= PASSES || passes[number].state != pass::RECORDING) return;
    struct pass *p = &passes[number];
    CHECK(cudaStreamEndCapture(device_stream(), &graph));
    CHECK(cudaGraphInstantiateWithFlags(&p->graph, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphLaunch(p->graph, device_stream()));
    p->state = pass::RECORDED;
}

void device_synchronize(void) {
    CHECK(cudaStreamSynchronize(device_stream()));
}

void device_copy(void *to, const void *from, size_t bytes) {
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device_stream()));
}

void device_clear(void *memory, size_t bytes) {
    CHECK(cudaMemsetAsync(memory, 0, bytes, device_stream()));
}

/* Copy-in never waits for compute, and never records: the host may wait for it during a pass, too. */
void streams_clear(void *memory, size_t bytes) {
    CHECK(cudaMemsetAsync(memory, 0, bytes, device.in));
    CHECK(cudaStreamSynchronize(device.in));
}

/* Uploads go through a ring of pinned memory, so that the host may reuse its memory at once and never
 * waits for the device, but for the copies of one round before. */
enum { RING_PIECES = 512 };
static const size_t RING_BYTES = (size_t)8 << 20, RING_MOST = (size_t)1 << 20;
struct ring_piece {
    size_t begin, end;
    cudaEvent_t read;
};
static struct {
    char *memory;
    size_t at;             /* where the next piece begins */
    unsigned first, count; /* of the pieces that may still be read, the oldest first */
    struct ring_piece piece[RING_PIECES];
} ring;

static void ring_wait(void) {
    CHECK(cudaEventSynchronize(ring.piece[ring.first].read));
    ring.first = (ring.first + 1) % RING_PIECES;
    ring.count--;
}

static char *ring_take(size_t bytes) {
    if (!ring.memory) ring.memory = (char *)device_allocate_pinned(RING_BYTES);
    if (!ring.memory) {
        log_out_of_memory("uploads, pinned", (double)RING_BYTES);
        exit(1);
    }
    if (ring.at + bytes > RING_BYTES) { /* a new round: what lies behind is older than the rest */
        while (ring.count && ring.piece[ring.first].begin >= ring.at) ring_wait();
        ring.at = 0;
    }
    while (ring.count &&
           (ring.count == RING_PIECES || (ring.piece[ring.first].begin < ring.at + bytes &&
                                          ring.piece[ring.first].end > ring.at)))
        ring_wait();
    return ring.memory + ring.at;
}

static void ring_give(size_t bytes, cudaStream_t reader) {
    struct ring_piece *piece = &ring.piece[(ring.first + ring.count++) % RING_PIECES];
    piece->begin = ring.at, piece->end = ring.at += bytes;
    if (!piece->read) CHECK(cudaEventCreateWithFlags(&piece->read, cudaEventDisableTiming));
    CHECK(cudaEventRecord(piece->read, reader));
}

void device_upload(void *to, const void *host, size_t bytes) {
    for (size_t done = 0, part; done < bytes; done += part) {
        part = bytes - done < RING_MOST ? bytes - done : RING_MOST;
        char *pinned = ring_take(part);
        memcpy(pinned, (const char *)host + done, part);
        CHECK(cudaMemcpyAsync((char *)to + done, pinned, part, cudaMemcpyHostToDevice,
                              device_stream()));
        ring_give(part, device_stream());
    }
}

void device_download(void *host, const void *from, size_t bytes) {
    CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device_stream()));
    device_synchronize();
}

/* ---- copies beside the computing ---- */

static bool prefer_node(void) {
    const int node = device_facts.memory_node;
    return node >= 0 && host_memory_prefer(node);
}

/* Takes memory of the NUMA node that the device is attached to: the thread may run on another node,
 * from whose memory the device reads over a slower link. */
void *device_allocate_pinned(size_t bytes) {
    void *memory = NULL;
    const bool preferred = prefer_node();
    const cudaError_t error = cudaHostAlloc(&memory, bytes ? bytes : 1, cudaHostAllocDefault);
    if (preferred) host_memory_prefer(-1);
    if (error == cudaErrorMemoryAllocation ||
        error == cudaErrorInvalidValue /* impossible size */) {
        cudaGetLastError(); /* otherwise the next launch would report this error */
        return NULL;
    }
    cuda_check(error, "cudaHostAlloc", __FILE__, __LINE__); /* or an error of earlier work */
    return memory;
}

void device_release_pinned(void *memory) {
    if (memory) CHECK(cudaFreeHost(memory));
}

/* Pages that nobody has written yet come from that node, too. */
bool device_pin(void *memory, size_t bytes) {
    const bool preferred = prefer_node();
    const bool done = cudaHostRegister(memory, bytes, cudaHostRegisterDefault) == cudaSuccess;
    if (preferred) host_memory_prefer(-1);
    if (!done) cudaGetLastError(); /* otherwise the next launch would report this error */
    return done;
}

void device_unpin(void *memory) {
    CHECK(cudaHostUnregister(memory));
}

/* A stream that waits for an event waits for what was last recorded in it before that call, and
 * does not wait if nothing was. */
void device_out_begin(void) {
    wait_for(device.out, device_stream());
    wait_for(device.leaving.kernels, device_stream());
}

cudaStream_t device_out_part(int buffer) {
    CHECK(cudaStreamWaitEvent(device.leaving.kernels, device.leaving.empty[buffer], 0));
    return device.leaving.kernels;
}

void device_out_download(int buffer, void *host, const void *from, size_t bytes) {
    CHECK(cudaEventRecord(device.leaving.full[buffer], device.leaving.kernels));
    CHECK(cudaStreamWaitEvent(device.out, device.leaving.full[buffer], 0));
    CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device.out));
    CHECK(cudaEventRecord(device.leaving.empty[buffer], device.out));
}

void device_d2h_async(void *host, const void *from, size_t bytes) {
    device_out_begin();
    CHECK(cudaMemcpyAsync(host, from, bytes, cudaMemcpyDeviceToHost, device.out));
}

void device_d2h_on_complete(void (*call)(void *context), void *context) {
    CHECK(cudaLaunchHostFunc(device.out, call, context));
}

void device_d2h_wait(void) {
    CHECK(cudaStreamSynchronize(device.out));
}

void device_d2h_mark(int mark) {
    CHECK(cudaEventRecord(device.mark[mark], device.out));
}

void device_d2h_wait_mark(int mark) {
    CHECK(cudaEventSynchronize(device.mark[mark]));
}

void device_d2h_order_mark(int mark) {
    CHECK(cudaStreamWaitEvent(device_stream(), device.mark[mark], 0));
}

cudaStream_t device_average_stream(void) {
    return device.average;
}

void device_average_upload(void *to, const void *host, size_t bytes) {
    CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, device.average));
}

void device_average_wait(void) {
    CHECK(cudaStreamSynchronize(device.average));
}

/* Copy-in waits for no other stream but that of its own kernels, see device.h. */
cudaStream_t device_in_upload(int buffer, void *to, const void *host, size_t bytes) {
    CHECK(cudaStreamWaitEvent(device.in, device.coming.empty[buffer], 0));
    CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, device.in));
    CHECK(cudaEventRecord(device.coming.full[buffer], device.in));
    CHECK(cudaStreamWaitEvent(device.coming.kernels, device.coming.full[buffer], 0));
    return device.coming.kernels;
}

void device_in_read(int buffer) {
    CHECK(cudaEventRecord(device.coming.empty[buffer], device.coming.kernels));
}

void device_in_end(void) {
    wait_for(device_stream(), device.coming.kernels);
}

void device_h2d_async(void *to, const void *host, size_t bytes) {
    CHECK(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, device.in));
    wait_for(device_stream(), device.in);
}

void device_h2d_wait(void) {
    CHECK(cudaStreamSynchronize(device.in));
    CHECK(cudaStreamSynchronize(device.coming.kernels));
}

void device_peer_async(void *to, const void *from, size_t bytes) {
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, device.in));
    wait_for(device_stream(), device.in);
}

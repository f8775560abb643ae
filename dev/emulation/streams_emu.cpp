/* streams_emu.cpp — see streams_emu.h. Only one thread calls at a time, since the backend's
 * operations take turns. */
#include "dev/emulation/cuda_emu.h"

#include <deque>
#include <map>
#include <random>
#include <vector>

using std::function;

struct work {
    function<void()> run;
    cudaStream_t awaited; /* without `run`: wait until it has finished `count` pieces */
    size_t count;
};

struct cuda_emu_stream {
    std::deque<work> queue;
    size_t added, finished;                  /* pieces of work so far */
    std::vector<function<void()>> *recorded; /* what it is given now, or NULL */
};

struct cuda_emu_event {
    cudaStream_t stream; /* NULL: never recorded */
    size_t count;
};

static enum cuda_emu_streams mode;
static std::minstd_rand random_numbers;
static bool (*before_event)(cudaStream_t, cudaStream_t);
static std::vector<cudaStream_t> streams;
static std::map<const char *, size_t> pinned;
static size_t registered, uploaded; /* bytes, in all */
static size_t operations;
static bool running;
static void (*before_work)(void);
static void (*before_wait)(cudaStream_t);
static dim3 (*before_kernel)(const void *, dim3);

void cuda_emu_streams(enum cuda_emu_streams mode_) {
    mode = mode_;
}

void cuda_emu_seed(unsigned seed) {
    random_numbers.seed(seed + 1);
}

void cuda_emu_before_event(bool (*call)(cudaStream_t waits, cudaStream_t other)) {
    before_event = call;
}

void cuda_emu_before_work(void (*call)(void)) {
    before_work = call;
}

void cuda_emu_before_wait(void (*call)(cudaStream_t stream)) {
    before_wait = call;
}

void cuda_emu_before_kernel(dim3 (*call)(const void *kernel, dim3 grid)) {
    before_kernel = call;
}

namespace cuda_emu {

dim3 begin_kernel(const void *kernel, dim3 grid) {
    return before_kernel ? before_kernel(kernel, grid) : grid;
}

size_t pending(cudaStream_t stream) {
    return stream->queue.size();
}

void begin_work(void) {
    if (before_work) before_work();
}

static bool can_run(cudaStream_t s) {
    if (s->queue.empty()) return false;
    const work &first = s->queue.front();
    return first.run || first.awaited->finished >= first.count;
}

static void run_first(cudaStream_t s) {
    work first = std::move(s->queue.front());
    s->queue.pop_front();
    if (running) fail("a host function called CUDA");
    running = true;
    if (first.run) begin_work(), first.run();
    running = false;
    s->finished++;
}

static void run_others(cudaStream_t but) {
    for (bool more = true; more;) {
        more = false;
        for (cudaStream_t s : streams)
            if (s != but && can_run(s)) run_first(s), more = true;
    }
}

static void run_some(void) {
    while (random_numbers() % 8) {
        cudaStream_t s = streams[random_numbers() % streams.size()];
        if (can_run(s)) run_first(s);
    }
}

static void run_until(cudaStream_t s, size_t count) {
    while (s->finished < count) {
        if (mode == CUDA_EMU_STREAMS_RANDOM)
            run_some();
        else if (mode != CUDA_EMU_LATE)
            run_others(s);
        if (s->finished >= count) return;
        if (can_run(s))
            run_first(s);
        else
            run_until(s->queue.front().awaited, s->queue.front().count);
    }
}

cudaStream_t stream_new(void) {
    streams.push_back(new cuda_emu_stream());
    return streams.back();
}

static void add(cudaStream_t s, work w) {
    s->queue.push_back(std::move(w));
    s->added++;
    if (mode == CUDA_EMU_SOON) run_others(NULL);
    if (mode == CUDA_EMU_STREAMS_RANDOM && random_numbers() % 8 == 0) run_some();
}

void wait_for(cudaStream_t stream) {
    if (running) fail("a host function called CUDA");
    for (cudaStream_t s : streams)
        if (s->recorded && (!stream || s == stream))
            fail("the host waits for a stream that records");
    if (before_wait && stream) before_wait(stream);
    for (cudaStream_t s : streams)
        if (!stream || s == stream) run_until(s, s->added);
}

void count_operations(int more) {
    operations += (size_t)more;
}

size_t operations_counted(void) {
    return operations;
}

void record_begin(cudaStream_t s) {
    s->recorded = new std::vector<function<void()>>();
}

std::vector<function<void()>> *record_end(cudaStream_t s) {
    return std::exchange(s->recorded, nullptr);
}

bool records(cudaStream_t s) {
    return s->recorded != NULL;
}

void enqueue(cudaStream_t s, function<void()> run) {
    operations++;
    if (s && s->recorded) return s->recorded->push_back(std::move(run));
    if (s) {
        add(s, work{std::move(run), NULL, 0});
    } else {
        wait_for(NULL);
        begin_work();
        run();
    }
}

cudaEvent_t event_new(void) {
    return new cuda_emu_event();
}

void event_record(cudaEvent_t event, cudaStream_t s) {
    if (s->recorded) fail("an event in a stream that records");
    event->stream = s;
    event->count = s->added;
}

void event_wait(cudaStream_t s, cudaEvent_t event) {
    if (s->recorded) fail("a stream that records waits");
    if (event->stream && (!before_event || before_event(s, event->stream)))
        add(s, work{nullptr, event->stream, event->count});
}

void event_finish(cudaEvent_t event) {
    if (running) fail("a host function called CUDA");
    if (event->stream) run_until(event->stream, event->count);
}

void pinned_add(void *memory, size_t bytes) {
    pinned[(const char *)memory] = bytes;
}

void pinned_remove(void *memory) {
    pinned.erase((const char *)memory);
}

bool pinned_register(void *memory, size_t bytes) {
    if (is_pinned(memory) || is_pinned((char *)memory + bytes - 1)) return false;
    pinned_add(memory, bytes);
    registered += bytes;
    return true;
}

size_t pinned_registered(void) {
    return registered;
}

void count_upload(size_t bytes) {
    uploaded += bytes;
}

size_t pinned_uploaded(void) {
    return uploaded;
}

bool is_pinned(const void *memory) {
    auto after = pinned.upper_bound((const char *)memory);
    if (after == pinned.begin()) return false;
    --after;
    return (const char *)memory < after->first + after->second;
}

} // namespace cuda_emu

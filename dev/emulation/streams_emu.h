/* streams_emu.h — streams and events of the emulation, whose work runs later than it is called.
 * Part of cuda_emu.h.
 *
 * A stream is a queue of work, which runs at the latest when the host waits for the stream or for
 * the device. cuda_emu_streams() chooses the order, within what CUDA guarantees: a stream's work
 * runs in its order, and a wait for an event ends after the work that was in the event's stream
 * when it was recorded. So a missing wait shows as a wrong number in some mode:
 *
 *     LATE     runs only what is waited for, at the last moment
 *     OTHERS   runs what can run in other streams, before each piece of work that is waited for
 *     SOON     runs everything as soon as it can
 *     STREAMS_RANDOM  runs now and then what can run in some stream, in an order that cuda_emu_seed() decides
 *
 * The NULL stream is no queue: its work runs at once, after the work of all streams. As on a
 * device, a copy reads and writes pinned memory when it runs, and reads other memory of the host
 * when it is called. */
#ifndef CUDA_EMU_STREAMS_H
#define CUDA_EMU_STREAMS_H

#include <stddef.h>
#include <functional>
#include <vector>

typedef struct cuda_emu_stream *cudaStream_t;
typedef struct cuda_emu_event *cudaEvent_t;

enum cuda_emu_streams { CUDA_EMU_LATE, CUDA_EMU_OTHERS, CUDA_EMU_SOON, CUDA_EMU_STREAMS_RANDOM };
/* Sets the mode for the work that follows. LATE at the start. */
void cuda_emu_streams(enum cuda_emu_streams mode);
void cuda_emu_seed(unsigned seed);
/* Sets what is called before each piece of work, and each copy that runs at once. NULL at first. */
void cuda_emu_before_work(void (*call)(void));
/* Sets what is called when the host begins to wait for a stream. NULL at first. */
void cuda_emu_before_wait(void (*call)(cudaStream_t stream));

/* Sets what is called when a stream is to wait for another: false plants a fault, it does not. */
void cuda_emu_before_event(bool (*call)(cudaStream_t waits, cudaStream_t other));
/* Sets what is called before each kernel begins, with its grid. It returns the grid that runs. */
void cuda_emu_before_kernel(struct dim3 (*call)(const void *kernel, struct dim3 grid));

namespace cuda_emu {

cudaStream_t stream_new(void);
size_t pending(cudaStream_t stream); /* pieces of work that have not run */
/* Runs `work` now (stream NULL) or later. */
void enqueue(cudaStream_t stream, std::function<void()> work);
void wait_for(cudaStream_t stream); /* NULL: all */
/* Work that a stream is given until record_end is kept instead of queued. */
void record_begin(cudaStream_t stream);
std::vector<std::function<void()>> *record_end(cudaStream_t stream);
bool records(cudaStream_t stream);
void begin_work(void); /* calls what cuda_emu_before_work() set */
struct dim3 begin_kernel(const void *kernel, struct dim3 grid);

cudaEvent_t event_new(void);
void event_record(cudaEvent_t event, cudaStream_t stream);
void event_wait(cudaStream_t stream, cudaEvent_t event);
void event_finish(cudaEvent_t event); /* the host waits */

void pinned_add(void *memory, size_t bytes);
void pinned_remove(void *memory);
/* Pins memory that was allocated elsewhere. False if a part of it is pinned already. */
bool pinned_register(void *memory, size_t bytes);
size_t pinned_registered(void); /* bytes, since the start */
void count_upload(size_t bytes);
/* Operations that streams were given: kernels, copies, clearings. */
void count_operations(int more);
size_t operations_counted(void);
size_t pinned_uploaded(void); /* bytes of pinned memory that were copied to the device */
bool is_pinned(const void *memory);

} // namespace cuda_emu

#endif

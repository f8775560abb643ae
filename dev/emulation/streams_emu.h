/* streams_emu.h — streams and events of the emulation: work that runs later than it is
 * called. Part of cuda_emu.h.
 *
 * A stream is a queue. What is put in runs when somebody waits (for a stream, or for the device),
 * and in which order, cuda_emu_streams() decides, within what CUDA promises: a stream's work in its
 * order, a wait for an event after what was in the event's stream when it was recorded. So a wait
 * that is missing shows as a wrong number in some mode:
 *
 *     LATE     only what is waited for, at the last moment
 *     OTHERS   of the other streams whatever can run, before each piece of work of this one
 *     SOON     all, as soon as it can
 *
 * The NULL stream is no queue: its work runs at once, when all streams are empty. As on a device,
 * memory that is pinned is read and written when the copy runs, and other memory of the host is
 * read when the copy is called. */
#ifndef CUDA_EMU_STREAMS_H
#define CUDA_EMU_STREAMS_H

#include <stddef.h>
#include <functional>

typedef struct cuda_emu_stream *cudaStream_t;
typedef struct cuda_emu_event *cudaEvent_t;

enum cuda_emu_streams { CUDA_EMU_LATE, CUDA_EMU_OTHERS, CUDA_EMU_SOON };
/* For the work that follows. LATE at the start. */
void cuda_emu_streams(enum cuda_emu_streams mode);
/* Called before each piece of work, and each copy that runs at once. NULL at the start. */
void cuda_emu_before_work(void (*call)(void));

namespace cuda_emu {

cudaStream_t stream_new(void);
/* Runs `work` now (stream NULL) or later. */
void enqueue(cudaStream_t stream, std::function<void()> work);
void wait_for(cudaStream_t stream); /* NULL: all */
void begin_work(void);              /* what cuda_emu_before_work() was given */

cudaEvent_t event_new(void);
void event_record(cudaEvent_t event, cudaStream_t stream);
void event_wait(cudaStream_t stream, cudaEvent_t event);
void event_finish(cudaEvent_t event); /* the host waits */

void pinned_add(void *memory, size_t bytes);
void pinned_remove(void *memory);
/* Of memory that the program has from elsewhere: false where a part of it is pinned already. */
bool pinned_register(void *memory, size_t bytes);
size_t pinned_registered(void); /* bytes, since the begin */
bool is_pinned(const void *memory);

} // namespace cuda_emu

#endif

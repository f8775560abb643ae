/* device.h — what the CUDA backend needs from a device besides kernels: memory, streams, products.
 *
 * Two implementations: device.cu (CUDA's runtime and cuBLASLt) and, for test programs,
 * dev/emulation/device_emulated.cpp (host memory that only operations may touch, plain loops).
 *
 * The drawing shows what waits for what when several ranks have a GPU each. Time goes down. ---> is
 * an event: the stream at the arrow's head waits for it. ===> means that the host waits, and ...>
 * that the stream calls the host. The host's calls run ahead of the streams until it waits.
 *
 *     compute              copy-out               host                    copy-in
 *
 *     backward, bucket 0 -> bucket 0 to host       d2h_async(), d2h_on_complete()
 *     backward, bucket 1 -> bucket 1 to host       d2h_async(), d2h_on_complete()
 *     ...                   losses to host         d2h_async(), d2h_mark(): read before the norm
 *     ...                   bucket 0 is there ..>  lossynet_bucket_ready
 *                           bucket 1 is there ..>  lossynet_bucket_ready
 *                           bucket 0 is there ==> d2h_wait_mark()
 *     (average stream: of pinned memory)     ===>  weighted_sum_pinned(), if all of bucket 0
 *                                                  has come
 *                           ...              ===>  d2h_wait()
 *                                                  lossynet_reduce, the other buckets as they come:
 *     (average stream)                       ===>  weighted_sum_pinned()
 *        <------------------------------------     h2d_async() --------- own shards of the average
 *     norm            ==========================>  sum_of_squares()
 *     AdamW           -----> own shards to host    d2h_async()
 *                                            ===>  d2h_wait()
 *                                                  lossynet_broadcast_begin
 *                                                  lossynet_bucket_wait, last bucket
 *        <------------------------------------     h2d_async() --------- last bucket
 *     forward, embedding                           lossynet_bucket_wait, layer 0's bucket
 *        <------------------------------------     h2d_async() --------- layer 0's bucket
 *     forward, layer 0                             ...
 *
 * Without overlap the host does not call lossynet_bucket_ready, and calls lossynet_broadcast
 * instead of its parts. All parameters are then copied in at once.
 *
 * The streams that move data have a higher priority than compute.
 *
 * Nothing in a step's forward and backward makes the host wait for compute, so it is ahead of the
 * streams when it begins to average. A group's member waits for the copy of the bucket before the
 * one that it queues, and adds up the group's gradients of that bucket.
 *
 * Copy-in waits for no other stream, so a bucket is copied in while earlier layers are computed.
 * This is safe because no operation has used what it overwrites since the host waited (d2h_wait,
 * sum_of_squares). On the host, the copies use a whole vector of pinned memory and not a pair of
 * buffers: the network writes packets of any bucket in any order, and it may read what it sends
 * for a long time.
 *
 * If a gradient has slots for only a few buckets (llmc/model/param_layout.h), compute waits, before
 * it writes to a slot again, until the bucket that was there is copied: d2h_order_mark(). Float32
 * values that the device uses as bfloat16 are rounded on copy-in: h2d_convert_async(). Rounding has
 * a stream of its own in each direction and two buffers, so that one part is rounded while another
 * is copied.
 *
 * Workers that share a device and a process exchange in its memory, on the compute stream, and need
 * no copies. The host also waits in `download`, and in `allocate` until the memory is clear.
 *
 * A call that fails ends the program after one line with the call, CUDA's message and the place.
 */
#ifndef LLMC_BACKEND_CUDA_DEVICE_H
#define LLMC_BACKEND_CUDA_DEVICE_H

#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/common.cuh"

/* Opens the device number `local_rank`, modulo the number of devices of the host. Later calls do
 * nothing. Returns false, with the reason in one line, if there is no device that these kernels
 * run on. */
bool device_open(int local_rank, char *why, size_t why_size);

/* What is known once the device is open. The name tells everything that results depend on:
 * "NVIDIA H100 (sm_90, 132 SMs, 80 GB)". The identity names this one device, and is the same in
 * every process that uses it. */
struct device_facts {
    char name[384], identity[40], products[64]; /* products: the library that makes them */
    int memory_node;                            /* NUMA node nearest to the device; -1: unknown */
    int cudnn_from; /* see `from` of struct attention_choice (backend.h) */
};
extern struct device_facts device_facts;

/* Every operation holds a device_scope while it works: operations of several threads take turns,
 * and the calling thread is bound to the device. */
struct device_scope {
    device_scope();
    ~device_scope();
};

/* The functions below are called within a scope. */

void *device_allocate(size_t bytes); /* zeroed, aligned to 256 bytes; NULL if out of memory */
void device_release(void *memory);   /* NULL is fine */
size_t device_memory_free(void);

/* Each set (backend.h) has a compute stream and working memory of its own. device_set: the calling
 * thread's. The compute streams of sets wait for that of set 0, and it waits for them in the end. */
int device_set(void);
void device_sets_begin(int sets);
void device_use_set(int set);
void device_sets_end(void);

/* The second time that a pass has a number and a key (backend.h, pass_begin), its operations become a CUDA
 * graph, whose launch takes the host as long as that of one kernel. The first time gives operations their working
 * memory. device_release forgets all graphs, which may use what it releases. */
bool device_pass_begin(int number, const void *key, size_t bytes);
void device_pass_end(int number);
void device_passes_forget(void);

cudaStream_t device_stream(void); /* compute, of the set */
void device_synchronize(void);    /* the host waits for the compute stream */

/* These work on the compute stream. After upload returns, the host's memory may be reused. After
 * download returns, the data is on the host. */
void device_copy(void *to, const void *from, size_t bytes);
void device_clear(void *memory, size_t bytes);
void device_upload(void *to, const void *host, size_t bytes);
void device_download(void *host, const void *from, size_t bytes);

/* The stream that averages pinned memory beside all other streams, which never wait for it.
 * device_average_upload copies from pinned memory to memory that only this stream uses. */
cudaStream_t device_average_stream(void);
void device_average_upload(void *to, const void *host, size_t bytes);
void device_average_wait(void);

/* Copies while operations compute; see backend.h and the drawing above. */
void *device_allocate_pinned(size_t bytes);
void device_release_pinned(void *memory);
bool device_pin(void *memory, size_t bytes);
void device_unpin(void *memory);
void device_d2h_async(void *host, const void *from, size_t bytes);
/* Copies in parts that a kernel rounds first. device_out_begin: what follows waits for compute.
 * device_out_part returns the stream of the kernel that writes the staging buffer `buffer`, 0 or 1,
 * once its last copy has ended. device_out_download copies the buffer, after the kernel. */
void device_out_begin(void);
cudaStream_t device_out_part(int buffer);
void device_out_download(int buffer, void *host, const void *from, size_t bytes);
void device_d2h_on_complete(void (*call)(void *context), void *context);
void device_d2h_wait(void);
void device_d2h_mark(int mark);
void device_d2h_wait_mark(int mark);
void device_d2h_order_mark(int mark);
void device_h2d_async(void *to, const void *host, size_t bytes);
void device_h2d_wait(void);
void device_peer_async(void *to, const void *from, size_t bytes);
/* Copies in parts that a kernel rounds then. device_in_upload copies to the staging buffer
 * `buffer`, 0 or 1, once the last kernel has read it, and returns the stream of the kernel that
 * reads it now. device_in_read: that kernel was launched. After device_in_end, compute waits for
 * all of it. */
cudaStream_t device_in_upload(int buffer, void *to, const void *host, size_t bytes);
void device_in_read(int buffer);
void device_in_end(void);
/* Let kernels of other processes read memory from device_allocate, over NVLink or PCIe if it is on
 * another device (CUDA Runtime API, "Device Management", cudaIpcGetMemHandle). False or NULL: not
 * possible here. */
bool device_share(const void *memory, struct backend_shared *out);
const void *device_open_shared(const struct backend_shared *shared);
void device_close_shared(const void *memory);

/* Working memory of the set's operations. It grows and never shrinks, and is not zeroed. Its contents last
 * until the next operation that asks for the same. The program ends if there is none. */
enum device_scratch { SCRATCH_KERNEL, SCRATCH_ARGUMENTS, SCRATCH_LOGITS, SCRATCHES };
void *device_scratch_memory(enum device_scratch which, size_t bytes);

/* out (M, N) = op(a) (M, K) op(b) (K, N), or += with accumulate. Arrays are row-major; row_a, row_b
 * and row_out are the elements from one row to the next. With transpose_a or transpose_b, op is the
 * transpose, and the array is (K, M) or (N, K). a and b have the type `in`, out has `out_type`,
 * which is `in` or float32. Sums are float32 (and never TF32), rounded once. The same arguments
 * give the same bits. */
struct product {
    bool transpose_a, transpose_b;
    int M, N, K;
    size_t row_a, row_b, row_out;
    enum dtype in, out_type;
    bool accumulate;
};
void device_product(void *out, const void *a, const void *b, const struct product *product);

#endif

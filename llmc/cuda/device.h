/* device.h — what the CUDA backend needs of a device beside kernels: memory, streams, products.
 *
 * Two implementations: device.cu (CUDA's runtime and cuBLASLt) and, for test programs,
 * dev/cuda_emulation/device_emulated.cpp (host memory that only operations may touch, plain loops).
 *
 * Who waits for whom, when several ranks have a GPU each. Time goes down; ---> is an event for
 * which the stream at its head waits, ===> is the host waiting, ...> a call of the host by the
 * stream. The host's calls run ahead of the streams until it waits.
 *
 *     compute              copy-out               host                    copy-in
 *
 *     backward, bucket 0 -> bucket 0 to host       send(), when_sent()
 *     backward, bucket 1 -> bucket 1 to host       send(), when_sent()
 *     ...                   bucket 0 is there ..>  lossynet_bucket_ready
 *                           bucket 1 is there ..>  lossynet_bucket_ready
 *                           ...              ===>  sent()
 *                                                  lossynet_reduce, each bucket as it comes:
 *     average, of pinned memory  ============>     weighted_sum_pinned()
 *        <------------------------------------     receive() ----------- own shards of the average
 *     norm            ==========================>  sum_of_squares()
 *     AdamW           -----> own shards to host    send()
 *                                            ===>  sent()
 *                                                  lossynet_broadcast_begin
 *                                                  lossynet_bucket_wait, last bucket
 *        <------------------------------------     receive() ----------- last bucket
 *     forward, embedding                           lossynet_bucket_wait, layer 0's bucket
 *        <------------------------------------     receive() ----------- layer 0's bucket
 *     forward, layer 0                             ...
 *
 * Without overlap the host calls lossynet_bucket_ready not at all, and lossynet_broadcast in place
 * of its parts, behind which all parameters are received at once.
 *
 * Copy-in waits for no other stream, so a bucket is copied in while the layers before it are
 * computed: what it overwrites nobody uses since the host waited (sent, sum_of_squares). The host's
 * side of the copies is whole vectors of pinned memory: the network writes packets of any bucket in
 * any order, and reads what it sends for as long as it likes, so a pair of buffers would not do.
 *
 * Where network hardware reads gradients on the device (--gpu-direct), copy-out brings only what the
 * rank's own workers average, and waits for the bucket all the same.
 *
 * Workers that share a device and a process exchange in its memory, on the compute stream, and need
 * no copies. The host also waits in `download`.
 *
 * A call that fails ends the program after one line: what was called, CUDA's own words, where.
 */
#ifndef LLMC_CUDA_DEVICE_H
#define LLMC_CUDA_DEVICE_H

#include "llmc/backend.h"
#include "llmc/cuda/common.cuh"

/* Opens the device of a host's rank `local_rank` (modulo their number); later calls do nothing.
 * False, and why in one line, when there is no device that these kernels run on. */
bool device_open(int local_rank, char *why, size_t why_size);
const char *device_name(void); /* "NVIDIA H100 (sm_90, 80 GB)", once open */
const char *device_product_library(void);

/* Every operation holds one of these while it works: operations of several threads take turns, and
 * the calling thread is bound to the device. */
struct device_scope {
    device_scope();
    ~device_scope();
};

/* The rest is called within a scope. */

void *device_allocate(size_t bytes); /* zeroed, aligned to 256 bytes; NULL when there is none */
void device_release(void *memory);   /* NULL is fine */
size_t device_memory_free(void);

cudaStream_t device_stream(void); /* compute */
void device_synchronize(void);    /* the host waits for the compute stream */

/* On the compute stream. upload: the host's memory may be reused on return; download: it is there
 * on return. */
void device_copy(void *to, const void *from, size_t bytes);
void device_clear(void *memory, size_t bytes);
void device_upload(void *to, const void *host, size_t bytes);
void device_download(void *host, const void *from, size_t bytes);

/* Copies beside the computing, see backend.h and the drawing above. */
void *device_allocate_pinned(size_t bytes);
void device_release_pinned(void *memory);
void device_send(void *host, const void *from, size_t bytes);
void device_when_sent(void (*call)(void *context), void *context);
void device_sent(void);
void device_receive(void *to, const void *host, size_t bytes);
/* CUDA Driver API, cuMemGetHandleForAddressRange */
int device_export(const void *memory, size_t bytes, size_t *offset);

/* Memory that operations keep for themselves: grows, never shrinks, is not cleared; contents last
 * until the next operation that asks for the same. Ends the program when there is none. */
enum device_scratch { SCRATCH_KERNEL, SCRATCH_ARGUMENTS, SCRATCH_LOGITS, SCRATCHES };
void *device_scratch_memory(enum device_scratch which, size_t bytes);

/* out (M, N) = op(a) (M, K) op(b) (K, N), or += with accumulate. Row-major, with the distance
 * between rows in elements; op is the transpose where told, so that the array is (K, M) or (N, K).
 * a, b: `in`; out: `out_type`, which is `in` or float32. Sums in float32 (and never TF32), rounded
 * once. The same arguments give the same bits. */
struct product {
    bool transpose_a, transpose_b;
    int M, N, K;
    size_t row_a, row_b, row_out;
    enum dtype in, out_type;
    bool accumulate;
};
void device_product(void *out, const void *a, const void *b, const struct product *product);

#endif

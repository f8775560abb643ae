/* device.h — what the CUDA backend needs of a device beside kernels: memory, streams, products.
 *
 * Two implementations: device.cu (CUDA's runtime and cuBLASLt) and, for test programs,
 * dev/emulation/device_emulated.cpp (host memory that only operations may touch, plain loops).
 *
 * Who waits for whom, when several ranks have a GPU each. Time goes down; ---> is an event for
 * which the stream at the arrow's head waits, ===> means that the host waits, and ...> means that
 * the stream calls the host. The host's calls run ahead of the streams until it waits.
 *
 *     compute              copy-out               host                    copy-in
 *
 *     backward, bucket 0 -> bucket 0 to host       d2h_async(), d2h_on_complete()
 *     backward, bucket 1 -> bucket 1 to host       d2h_async(), d2h_on_complete()
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
 * Copy-in waits for no other stream, so a bucket is copied in while earlier layers are computed.
 * This is safe because no operation has used what it overwrites since the host waited (d2h_wait,
 * sum_of_squares). The host's side of the copies is a whole vector of pinned memory, and not a pair
 * of buffers, because the network writes packets of any bucket in any order, and reads what it
 * sends for as long as it needs.
 *
 * Where a gradient has slots for a few buckets (llmc/model/param_layout.h), compute waits, before it
 * writes to a slot again, for the copy of the bucket that was there: d2h_order_mark(). Float32 that the
 * device computes with as bfloat16 is rounded on copy-in: h2d_convert_async().
 *
 * If network hardware reads gradients on the device (--gpu-direct), copy-out brings only what the
 * rank's own workers average, and still waits for the bucket.
 *
 * Workers that share a device and a process exchange in its memory, on the compute stream, and need
 * no copies. The host also waits in `download`.
 *
 * A call that fails ends the program after one line, which has the call, CUDA's message and the
 * place.
 */
#ifndef LLMC_BACKEND_CUDA_DEVICE_H
#define LLMC_BACKEND_CUDA_DEVICE_H

#include "llmc/backend/backend.h"
#include "llmc/backend/cuda/common.cuh"

/* Opens the device number `local_rank`, modulo the number of devices of the host. Later calls do
 * nothing. Returns false, with the reason in one line, if there is no device that these kernels
 * run on. */
bool device_open(int local_rank, char *why, size_t why_size);
/* Once open. The name tells all that results depend on: "NVIDIA H100 (sm_90, 132 SMs, 80 GB)". The
 * identity is that of this one device, the same in every process that uses it. */
const char *device_name(void);
const char *device_identity(void);
int device_memory_node(void); /* of the host's memory, the nearest; -1: unknown */
const char *device_product_library(void);
bool device_multiplies_fp8(void); /* sm_89 and newer */

/* Every operation holds one of these while it works. So operations of several threads take
 * turns, and the calling thread is bound to the device. */
struct device_scope {
    device_scope();
    ~device_scope();
};

/* The functions below are called within a scope. */

void *device_allocate(size_t bytes); /* zeroed, aligned to 256 bytes; NULL if out of memory */
void device_release(void *memory);   /* NULL is fine */
size_t device_memory_free(void);

cudaStream_t device_stream(void); /* compute */
void device_synchronize(void);    /* the host waits for the compute stream */
double device_clock(void);        /* seconds, when it has waited */

/* On the compute stream. upload: the host's memory may be reused on return; download: it is there
 * on return. */
void device_copy(void *to, const void *from, size_t bytes);
void device_clear(void *memory, size_t bytes);
void device_upload(void *to, const void *host, size_t bytes);
void device_download(void *host, const void *from, size_t bytes);

/* The stream on which averages of pinned memory are computed beside all others, which wait for
 * nothing that it does. upload: to memory that only it uses; host as in device_upload, pageable. */
cudaStream_t device_average_stream(void);
void device_average_upload(void *to, const void *host, size_t bytes);
void device_average_wait(void);

/* Copies while operations compute; see backend.h and the drawing above. */
void *device_allocate_pinned(size_t bytes);
void device_release_pinned(void *memory);
bool device_pin(void *memory, size_t bytes);
void device_unpin(void *memory);
void device_d2h_async(void *host, const void *from, size_t bytes);
/* Its two parts: copy-out waits for compute, and may then work on what leaves; then the copy. */
cudaStream_t device_out_begin(void);
void device_out_download(void *host, const void *from, size_t bytes);
void device_d2h_on_complete(void (*call)(void *context), void *context);
void device_d2h_wait(void);
void device_d2h_mark(int mark);
void device_d2h_wait_mark(int mark);
void device_d2h_order_mark(int mark);
void device_h2d_async(void *to, const void *host, size_t bytes);
/* Its two parts: the copy, after which copy-in may work on what came; then compute waits for it. */
cudaStream_t device_in_stream(void);
void device_in_upload(void *to, const void *host, size_t bytes);
void device_in_end(void);
/* CUDA Runtime API, "Memory Management", cudaIpcGetMemHandle: memory of device_allocate, which kernels of
 * other processes may read, over NVLink or PCIe where it is another device's. False, NULL: not here. */
bool device_share(const void *memory, struct backend_shared *out);
const void *device_open_shared(const struct backend_shared *shared);
void device_close_shared(const void *memory);
/* CUDA Driver API, cuMemGetHandleForAddressRange */
int device_export(const void *memory, size_t bytes, size_t *offset);

/* Working memory of operations. It grows and never shrinks, and is not zeroed. Its contents last
 * until the next operation that asks for the same. The program ends if there is none. */
enum device_scratch { SCRATCH_KERNEL, SCRATCH_ARGUMENTS, SCRATCH_LOGITS, SCRATCH_FP8, SCRATCHES };
void *device_scratch_memory(enum device_scratch which, size_t bytes);

/* out (M, N) = op(a) (M, K) op(b) (K, N), or += with accumulate. Row-major, with the distance
 * between rows in elements; op is the transpose where told, so that the array is (K, M) or (N, K).
 * a, b: `in`; out: `out_type`, which is `in` or float32. Sums in float32 (and never TF32), rounded
 * once. The same arguments give the same bits.
 *
 * 8-bit numbers (fp8.cuh): a is E4M3 or E5M2, b is E4M3; they are multiplied by *scale_a and
 * *scale_b, in device memory (else NULL); transpose_b, and not transpose_a; M, N, K and rows in
 * multiples of 16; out bfloat16 or float32. Only where device_multiplies_fp8(). */
struct product {
    bool transpose_a, transpose_b;
    int M, N, K;
    size_t row_a, row_b, row_out;
    enum dtype in, out_type;
    bool accumulate;
    const float *scale_a, *scale_b;
};
void device_product(void *out, const void *a, const void *b, const struct product *product);
struct product_choices *device_product_choices(void); /* see backend.h */

#endif

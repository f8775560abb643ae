/* device_emulated.h — what tests can set on the emulated device (device_emulated.cpp): the order in
 * which blocks, warps and lanes run in the launches that follow, and variables of the environment.
 *
 *   EMULATED_DEVICE=NAME     the device's name; none: there is no device; one with sm_90 suits cuDNN
 *   EMULATED_DEVICES=N       the ranks of a host share N devices; without it each has its own
 *   EMULATED_MEMORY=BYTES    the memory of a device
 *   EMULATED_PEAK=FILE       at the end, writes to FILE.<device> the most bytes that were in use,
 *                            and all bytes of host memory that were registered as pinned
 *   EMULATED_AVERAGES=FILE   at the end, writes to FILE.<device> how often the host waited for the
 *                            stream that averages, and how often computing was under way then
 *   EMULATED_UPLOADS=FILE    at the end, writes to FILE.<device> how many bytes of pinned memory were
 *                            copied to the device
 *   EMULATED_OPERATIONS=FILE at the end, writes to FILE.<device> how many operations the streams were
 *                            given (kernels, copies, clearings; a graph counts as one), and how many
 *                            calls of the backend there were
 *   EMULATED_PEERS=none      no process can open another's memory; N: all can except device N's
 *   EMULATED_BROKEN=HOW:KERNEL[:BLOCKS[:DEVICE]]
 *                            a fault of launches that have at least BLOCKS blocks, of kernels whose
 *                            name contains KERNEL, on all devices or on DEVICE. HOW: wrong (the
 *                            last block does not run), error (CUDA says so at a later call), hang,
 *                            or die (so does the process)
 *   EMULATED_PAGEABLE=1      the device reads memory of the host that is not pinned when a copy runs,
 *                            as a GH200 does
 *   EMULATED_FAULT=1         allocating pinned memory meets the error of a kernel that ran before
 *   EMULATED_SETS=FAULT      a fault of sets (backend.h): all have one working memory (scratch), begin without
 *                            a wait for set 0 (begin), or it does not wait for the others (end)
 *   EMULATED_STREAMS=MODE    late, others, soon or random:SEED: when work on a stream runs (streams_emu.h) */
#ifndef DEVICE_EMULATED_H
#define DEVICE_EMULATED_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum emulated_order { EMULATED_FORWARD, EMULATED_REVERSE, EMULATED_RANDOM };
void emulated_order(enum emulated_order order, uint64_t seed);

#ifdef __cplusplus
}
#endif
#endif

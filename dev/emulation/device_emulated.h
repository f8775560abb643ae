/* device_emulated.h — what tests ask of the emulated device (device_emulated.cpp) beside what a
 * device does: the order in which blocks, warps and lanes run in the launches that follow.
 *
 * Environment: EMULATED_DEVICE=NAME: its name; none: there is no device. EMULATED_DEVICES=N: the
 * ranks of a host share so many, otherwise each has its own. EMULATED_MEMORY=BYTES: a device has so
 * much. EMULATED_PEAK=FILE: the most bytes in use, and all bytes of the host that were registered as pinned
 * memory, are written to FILE.<device> at the end.
 * EMULATED_FASTEST=PLACE: of the algorithms that are timed (--tune), on all ranks; P,Q,...: on the
 * host's first, second, ... rank.
 * EMULATED_PEERS=none: no process can open another's memory; N: all but device N's.
 * EMULATED_FAULT=1: allocating pinned memory meets the error of a kernel that ran before.
 * EMULATED_STREAMS=late, others or soon: when work on a stream runs (streams_emu.h). */
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

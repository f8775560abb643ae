/* shared_memory.h — memory that ranks of one host share, and a barrier between them.
 *
 * Ranks are taken in groups of `size` that follow one another; each gives some memory, which all
 * ranks of its group map. It is anonymous memory of the kernel (memfd_create), so it needs no room
 * in /dev/shm and is gone with the last rank, however that ends.
 */
#ifndef LLMC_COMM_SHARED_MEMORY_H
#define LLMC_COMM_SHARED_MEMORY_H

#include <stddef.h>

#include "lossynet/lossynet.h"

#ifdef __cplusplus
extern "C" {
#endif

struct shared_memory; /* opaque */

/* Gives `bytes` bytes, all 0, which may differ between ranks. first, size: this rank's group.
 * Collective: every rank of the world calls it. Returns 0, or -1 after reporting, for ranks that do
 * not share a host, too. */
int shared_memory_open(const struct lossynet_world *world, int first, int size, size_t bytes,
                       struct shared_memory **out);
void shared_memory_close(struct shared_memory *m); /* NULL is fine */

/* What member 0 ... size - 1 of this rank's group has given, at an address of a page. */
void *shared_memory_of(const struct shared_memory *m, int member);

/* Returns when all members have called it: what each has written before, all can read. Meanwhile
 * `comm` (NULL: there is none) sends and receives what other ranks may wait for. Returns 0, or -1
 * after reporting that one of the members has ended. */
int shared_memory_wait(struct shared_memory *m, struct lossynet_comm *comm);

#ifdef __cplusplus
}
#endif
#endif

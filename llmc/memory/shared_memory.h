/* shared_memory.h — memory that ranks of one host share, and a barrier between them.
 *
 * A group has `size` consecutive ranks. Each rank gives some memory, which all ranks of its group
 * map. It is anonymous memory of the kernel (memfd_create), so it needs no room in /dev/shm, and
 * the kernel frees it when the last rank ends, for whatever reason.
 */
#ifndef LLMC_MEMORY_SHARED_MEMORY_H
#define LLMC_MEMORY_SHARED_MEMORY_H

#include <stddef.h>

#include "lossynet/lossynet_trainer.h"

struct shared_memory; /* opaque */

/* Gives `bytes` bytes of memory, all 0, to this rank's group. `bytes` may differ between ranks.
 * first, size: the first rank of the group, and their number. timeout: seconds without a sign of
 * life after which a member has failed; a thread of each member gives these signs. Collective: every
 * rank of the world calls it. Returns 0, or -1 after reporting, also if the ranks of a group are not
 * on one host. */
int shared_memory_open(const struct lossynet_world *world, int first, int size, size_t bytes,
                       double timeout, struct shared_memory **out);
void shared_memory_close(struct shared_memory *m); /* NULL is fine */

/* The memory that member 0 ... size - 1 of this rank's group has given; it begins at a page. */
void *shared_memory_of(const struct shared_memory *m, int member);

/* A barrier: returns when all members have called it, and then all of them can read what each has
 * written before. While it waits, `comm` (or NULL) goes on to send and receive, since other ranks
 * may wait for that. Returns 0, or -1 after reporting that one of the members has ended or gives no
 * sign of life. */
int shared_memory_wait(struct shared_memory *m, struct lossynet_comm *comm);

#endif

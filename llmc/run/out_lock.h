/* out_lock.h — keeps two runs from writing to one --out.
 *
 * Rank 0 locks the file OUT/lock, which says who has it, and removes it at the end. The kernel ends
 * the lock with its process, however that dies; NFS ends it with the host. It is a lock of an open
 * file description (fcntl(2), F_OFD_SETLK), which NFS passes on to its server.
 */
#ifndef LLMC_RUN_OUT_LOCK_H
#define LLMC_RUN_OUT_LOCK_H

#include <stdbool.h>

#include "llmc/options/options.h"
#include "llmc/util/file.h"
#include "lossynet/lossynet.h"

struct out_lock {
    int file;  /* the descriptor plus 1; 0: this process does not have the lock */
    bool made; /* the folder was not there before */
    char path[FILE_PATH_BYTES];
};

/* Rank 0 locks --out, which is created. If another process of the same run (--meet) has the lock, which
 * writes nothing any more unless it is rank 0, this one goes on without. Where files cannot be locked,
 * a line says so. Collective: all ranks return rank 0's answer, 0, or -1 after it has reported that
 * another run is writing there. Does nothing if this process has the lock already. */
int out_lock_take(const struct options *options, const struct lossynet_world *world,
                  struct out_lock *lock);
/* A folder that was not there before, and in which nothing was written, is removed, too. Zeros are
 * fine. */
void out_lock_release(struct out_lock *lock);

#endif

/* out_lock.c — see out_lock.h. */
#include "llmc/run/out_lock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/comm/common_facts.h"
#include "llmc/log/error.h"

enum { OWNER_BYTES = 600 };

/* Whether the path still names the file, which its former owner may just have removed. */
static bool is_there(int file, const char *path) {
    struct stat named, opened;
    return !stat(path, &named) && !fstat(file, &opened) && named.st_ino == opened.st_ino &&
           named.st_dev == opened.st_dev;
}

/* Says in the file who has the lock. On a full disk it says nothing. */
static void sign(int file, const char *run) {
    char text[OWNER_BYTES], host[65] = "";
    if (gethostname(host, sizeof host - 1)) snprintf(host, sizeof host, "?");
    const int bytes = snprintf(text, sizeof text, "host %s, process %d%s%s", host, (int)getpid(),
                               *run ? ", run " : "", run);
    if (ftruncate(file, 0) || write(file, text, (size_t)bytes) != bytes) return;
}

static int refuse(int file, const char *out, const char *run) {
    char owner[OWNER_BYTES];
    const ssize_t bytes = pread(file, owner, sizeof owner - 1, 0);
    owner[bytes > 0 ? bytes : 0] = '\0';
    close(file);
    const char *their = strstr(owner, ", run ");
    if (*run && their && !strcmp(their + strlen(", run "), run)) return 0;
    return log_error("--out: another run is writing to '%s' (%s): expected a folder of its own for "
                     "each run",
                     out, *owner ? owner : "a process that has not signed yet");
}

static int take(const char *out, const char *run, struct out_lock *lock) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (lock->file) return 0;
    lock->made = !file_is_directory(out);
    if (file_make_directory(out) || file_join(lock->path, out, "lock")) return -1;
    for (;;) {
        const int file = open(lock->path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (file < 0) return 0; /* nothing can be written there, which the first save reports */
        if (fcntl(file, F_OFD_SETLK, &whole)) {
            if (errno == EAGAIN || errno == EACCES) return refuse(file, out, run);
            log_error("--out: '%s' cannot be locked (%s): nothing keeps another run from writing "
                      "there",
                      lock->path, strerror(errno));
            close(file);
            return 0;
        }
        if (is_there(file, lock->path)) {
            lock->file = file + 1;
            sign(file, run);
            return 0;
        }
        close(file);
    }
}

int out_lock_take(const struct options *o, const struct lossynet_world *world,
                  struct out_lock *lock) {
    int32_t failed = 0;
    if (o->out && world->rank == 0) failed = take(o->out, o->meet ? o->meet : "", lock);
    return common_answer(world, &failed, sizeof failed) || failed ? -1 : 0;
}

void out_lock_release(struct out_lock *lock) {
    if (!lock->file) return;
    if (is_there(lock->file - 1, lock->path)) unlink(lock->path);
    char *end = strrchr(lock->path, '/');
    if (lock->made && end) *end = '\0', rmdir(lock->path); /* fails unless it is empty */
    close(lock->file - 1);
    lock->file = 0;
}

/* another_clock.c — a library for LD_PRELOAD: the clock of a program is SHIFT seconds ahead, or behind
 * if SHIFT is negative. Only the wall clock is; the monotonic clock is the same on all of a host. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

int clock_gettime(clockid_t id, struct timespec *t) {
    int (*real)(clockid_t, struct timespec *) =
        (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const int status = real(id, t);
    if (id == CLOCK_REALTIME) t->tv_sec += atoi(getenv("SHIFT"));
    return status;
}

/* random.c — random numbers of the operating system, for values that must differ between runs. */
#include "lossynet/base/base.h"

#include <sys/random.h>

uint64_t ln_random(void) {
    uint64_t bits;
    if (getrandom(&bits, sizeof bits, 0) == (ssize_t)sizeof bits) return bits;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return ln_mix((uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec);
}

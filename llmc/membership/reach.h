/* reach.h — whether members listen where they say. */
#ifndef LLMC_MEMBERSHIP_REACH_H
#define LLMC_MEMBERSHIP_REACH_H

#include "llmc/membership/view.h"

#ifdef __cplusplus
extern "C" {
#endif

enum reached {
    REACHED_NOT,     /* no answer, or an error */
    REACHED_REFUSED, /* its host answers that nobody listens there: the process has ended */
    REACHED
};

/* reached[i]: whether a TCP connection to the address of member i came about within half a second.
 * Each is closed at once. */
void reach_members(const struct member *m, int members, enum reached *reached);

#ifdef __cplusplus
}
#endif
#endif

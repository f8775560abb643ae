/* reach.h — checks whether members listen at the addresses that they have registered. */
#ifndef LLMC_MEMBERSHIP_REACH_H
#define LLMC_MEMBERSHIP_REACH_H

#include "llmc/membership/view.h"

enum reached {
    REACHED_NOT,     /* no answer, or an error */
    REACHED_REFUSED, /* the host answers that nobody listens there: the process has ended */
    REACHED
};

/* Sets reached[i]: whether a TCP connection to the address of member i was made within half a
 * second. Connections are closed at once. */
void reach_members(const struct member *m, int members, enum reached *reached);

#endif

/* reach.h — whether members listen where they say. */
#ifndef LLMC_MEMBERSHIP_REACH_H
#define LLMC_MEMBERSHIP_REACH_H

#include "llmc/membership/view.h"

#ifdef __cplusplus
extern "C" {
#endif

/* reached[i]: a TCP connection to the address of member i came about within half a second. Each is
 * closed at once. */
void reach_members(const struct member *m, int members, bool *reached);

#ifdef __cplusplus
}
#endif
#endif

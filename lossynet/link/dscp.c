/* dscp.c — the traffic class of DATA: its names, and its equivalent on RDMA.
 *
 * A class is a DSCP, the upper six bits of IPv4's TOS and IPv6's traffic class (RFC 2474). Switches
 * that support it serve one class before another. `le` (RFC 8622) is for traffic that may be
 * starved, and dropped first. Control datagrams stay in the default class, since they are few and
 * all ranks wait for them; those that must arrive after DATA also travel in the class of DATA
 * (transport/state.h).
 */
#include "lossynet/link/link.h"

#include <stdlib.h>

enum { LE = 1, BACKGROUND = 1 };

static bool is_number(const char *text, int most, int *out) {
    char *end;
    long value = strtol(text, &end, 10);
    if (end == text || *end || value < 0 || value > most) return false;
    *out = (int)value;
    return true;
}

bool ln_dscp_parse(const char *name, int *dscp) {
    static const struct {
        const char *name;
        int dscp;
    } names[] = {{"default", 0}, {"le", LE}, {"va", 44}, {"ef", 46}}; /* RFC 5865, RFC 3246 */
    int value;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(name, names[i].name) == 0) return *dscp = names[i].dscp, true;
    if (strncmp(name, "cs", 2) == 0 && strlen(name) == 3 && is_number(name + 2, 7, &value))
        return *dscp = 8 * value, true; /* RFC 2474, 4.2.2 */
    if (strncmp(name, "af", 2) == 0 && strlen(name) == 4 && is_number(name + 2, 43, &value) &&
        value >= 11 && value % 10 >= 1 && value % 10 <= 3)
        return *dscp = 8 * (value / 10) + 2 * (value % 10), true; /* RFC 2597 */
    return is_number(name, 63, dscp);
}

/* Returns the priority that switches derive from a class selector. `le` is "background" (802.1Q
 * table I-2, RFC 8622 section 6), which is lower than the default 0. */
int ln_service_level(int dscp) {
    return dscp == LE ? BACKGROUND : dscp >> 3;
}

/* port.c — ports of a range that a firewall lets pass. */
#include "lossynet/base/base.h"

#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <unistd.h>

enum { PORT_MOST = 65535 };

/* Processes begin at different places, so that one that takes the place of another has another port: peers then
 * hear that the old one is closed. */
bool ln_port_bind(int fd, struct sockaddr *address, size_t bytes, const int ports[2]) {
    struct sockaddr_in *v4 =
        (struct sockaddr_in *)address; /* the port of IPv6 is at the same place */
    const unsigned count = ports[0] ? (unsigned)(ports[1] - ports[0] + 1) : 1;
    const unsigned start = (unsigned)getpid() * 2;
    errno = EADDRINUSE;
    for (unsigned i = 0; i < count && errno == EADDRINUSE; i++) {
        if (ports[0]) v4->sin_port = htons((uint16_t)((unsigned)ports[0] + (start + i) % count));
        if (!bind(fd, address, (socklen_t)bytes)) return true;
    }
    return false;
}

bool ln_port_parse(const char *text, int ports[2]) {
    char more;
    return sscanf(text, "%5d-%5d%c", &ports[0], &ports[1], &more) == 2 && ports[0] >= 1 &&
           ports[0] < ports[1] && ports[1] <= PORT_MOST;
}

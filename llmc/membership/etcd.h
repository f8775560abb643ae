/* etcd.h — the store of store.h in etcd 3.4 or newer, over its JSON gateway.
 *
 * etcd is asked over plain HTTP, without a password and without a proxy: it belongs into the
 * cluster's own network. */
#ifndef LLMC_MEMBERSHIP_ETCD_H
#define LLMC_MEMBERSHIP_ETCD_H

#include <stdbool.h>

#include "llmc/membership/store.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the program was built with libcurl. */
bool etcd_built(void);

/* Asks for nothing yet. An answer is waited for two seconds. host: a name, or an address without
 * brackets. Returns 0, or -1 after reporting. The caller ends it with store->close. Not
 * thread-safe. */
int etcd_open(const char *host, int port, struct store **out);

/* The address of this machine in the last connection to the store, "" before the first answer.
 * Valid to the next call. */
const char *etcd_local_address(const struct store *store);

/* A connection over which etcd says that keys are written, at once (etcd's watch). */
struct etcd_watch;

enum etcd_watch_result { ETCD_WATCH_TIME, ETCD_WATCH_WRITTEN, ETCD_WATCH_ENDED };

/* Hears of keys that begin with `prefix`. Connects to nothing yet. Returns 0, or -1 after
 * reporting. */
int etcd_watch_open(const char *host, int port, const char *prefix, struct etcd_watch **out);

/* Waits `seconds` (ETCD_WATCH_TIME), or until a key was perhaps written since the last call: it is
 * said of each new connection, too. listens: false waits without a connection. A store that is away
 * is asked again once a second, and nothing is reported. */
enum etcd_watch_result etcd_watch_wait(struct etcd_watch *w, bool listens, double seconds);

/* Lets the present and all later calls return ETCD_WATCH_ENDED. From any thread. */
void etcd_watch_end(struct etcd_watch *w);
void etcd_watch_close(struct etcd_watch *w); /* NULL is fine */

#ifdef __cplusplus
}
#endif
#endif

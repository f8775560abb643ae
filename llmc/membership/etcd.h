/* etcd.h — the store of store.h in etcd 3.4 or newer, over its JSON gateway.
 *
 * Requests are plain HTTP, without a password and without a proxy, so etcd should run in the
 * cluster's own network. */
#ifndef LLMC_MEMBERSHIP_ETCD_H
#define LLMC_MEMBERSHIP_ETCD_H

#include <stdbool.h>

#include "llmc/membership/store.h"

/* Whether the program was built with libcurl. */
bool etcd_built(void);

/* Prepares a store, without sending a request. Its requests wait up to two seconds for an answer,
 * and are sent again over other connections meanwhile.
 * host: a name, or an address without brackets. Returns 0, or -1 after reporting. The caller ends
 * it with store->close. Not thread-safe. */
int etcd_open(const char *host, int port, struct store **out);

/* The address of this machine in the last connection to the store, "" before the first answer.
 * Valid until the next call. */
const char *etcd_local_address(const struct store *store);

/* A connection over which etcd reports at once that keys were written (etcd's watch). */
struct etcd_watch;

enum etcd_watch_result { ETCD_WATCH_TIME, ETCD_WATCH_WRITTEN, ETCD_WATCH_ENDED };

/* Prepares a watch of the keys that begin with `prefix`, without connecting. Returns 0, or -1 after
 * reporting. */
int etcd_watch_open(const char *host, int port, const char *prefix, struct etcd_watch **out);

/* Waits `seconds` (result ETCD_WATCH_TIME), or until a key may have been written since the last
 * call (ETCD_WATCH_WRITTEN). The latter is also the result for each new connection. listens: false
 * waits without a connection. If the store is away, it tries again once a second, and reports
 * nothing. */
enum etcd_watch_result etcd_watch_wait(struct etcd_watch *w, bool listens, double seconds);

/* Lets the present and all later calls of etcd_watch_wait return ETCD_WATCH_ENDED. Any thread may
 * call it. */
void etcd_watch_end(struct etcd_watch *w);
void etcd_watch_close(struct etcd_watch *w); /* NULL is fine */

#endif

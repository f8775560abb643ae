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

#ifdef __cplusplus
}
#endif
#endif

/* store.h — the interface of a store of keys, as membership needs it: list a run's keys at one
 * moment, and write on a condition.
 *
 * etcd.c implements it with etcd, and test/llmc/membership/membership_store.h in memory. A run's keys begin
 * with "RUN/". A store may not answer for a while. A write that returned STORE_AWAY may have been
 * made already, may be made later, or never. One that was made may be made again later, if its
 * guard has the same revision then. */
#ifndef LLMC_MEMBERSHIP_STORE_H
#define LLMC_MEMBERSHIP_STORE_H

#include <stddef.h>
#include <stdint.h>

enum store_status {
    STORE_DONE,
    STORE_CHANGED, /* commit: the guard has another revision. keep: the lease has ended */
    STORE_AWAY,    /* no answer, or an error; `why` says which */
};

struct store_entry {
    char *key, *value; /* ended by zero bytes */
    int64_t modified;  /* revision of the last write to the key; greater for every write */
};

struct store_entries { /* in the order in which the keys were created */
    int count;
    struct store_entry *entry;
};

struct store_write {
    const char *key;
    const char *value; /* NULL: removes the key */
    int64_t lease;     /* the key is removed when this lease ends; 0: it stays */
};

struct store {
    /* Lists all keys that begin with `prefix`, as they are at one moment. The caller clears *out,
     * which is empty unless the store answered. */
    enum store_status (*list)(struct store *s, const char *prefix, struct store_entries *out);
    /* Makes all writes at once if the key `guard` has revision `modified` (0: it does not
     * exist). STORE_DONE as well if the guard already has the value that is written to it: an
     * earlier try to make these writes, or another process, has made them. */
    enum store_status (*commit)(struct store *s, const char *guard, int64_t modified,
                                const struct store_write *write, int writes);
    /* grant gives a lease that ends after `seconds`; keep starts this time again. */
    enum store_status (*grant)(struct store *s, int seconds, int64_t *lease);
    enum store_status (*keep)(struct store *s, int64_t lease);
    void (*close)(struct store *s);
    char why[200]; /* the reason of the last STORE_AWAY */
};

enum { STORE_WRITES_MOST = 100 }; /* most writes in a commit; etcd allows 128 */

void store_entries_clear(struct store_entries *e);

#endif

/* membership_store.h — the store of llmc/membership/store.h in memory, in made-up time, with
 * faults: it is away, answers are lost, writes arrive late. For one process of C and one thread.
 */
#ifndef MEMBERSHIP_STORE_H
#define MEMBERSHIP_STORE_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/membership/store.h"

enum { STORE_KEYS = 2048, STORE_LEASES = 65536, STORE_LATE = 256 };

struct memory_key {
    char *key, *value;
    int64_t lease, modified;
};

/* A write that is on its way. */
struct memory_late {
    double when;
    char *guard;
    int64_t modified;
    int writes;
    struct store_write write[8]; /* texts are its own */
};

/* The store itself; what processes have are connections to it (struct store). */
struct memory {
    double now;
    int64_t revision;
    int keys, late, leases;
    struct memory_key key[STORE_KEYS];    /* in the order in which they were created */
    struct memory_late later[STORE_LATE]; /* in no order */
    double lease[STORE_LEASES];           /* when lease i + 1 ends */
    int seconds[STORE_LEASES];
    /* Sees every write that is made, before it is made; may be NULL. */
    void (*seen)(void *context, const struct store_write *write);
    void *context;
};

static char *memory_text(const char *text) {
    return text ? strdup(text) : NULL;
}

static void memory_remove(struct memory *m, int i) {
    free(m->key[i].key);
    free(m->key[i].value);
    memmove(&m->key[i], &m->key[i + 1], (size_t)(--m->keys - i) * sizeof m->key[0]);
}

static int memory_find(const struct memory *m, const char *key) {
    for (int i = 0; i < m->keys; i++)
        if (!strcmp(m->key[i].key, key)) return i;
    return -1;
}

static bool memory_lives(const struct memory *m, int64_t lease) {
    return !lease || m->lease[lease - 1] > m->now;
}

/* Keys whose lease has ended go. */
static void memory_expire(struct memory *m) {
    for (int i = m->keys; i-- > 0;)
        if (!memory_lives(m, m->key[i].lease)) memory_remove(m, i);
}

static void memory_write(struct memory *m, const struct store_write *write) {
    int i = memory_find(m, write->key);
    if (m->seen) m->seen(m->context, write);
    if (!write->value) {
        if (i >= 0) memory_remove(m, i);
        return;
    }
    if (i < 0) {
        if (m->keys == STORE_KEYS) abort();
        i = m->keys++;
        m->key[i] = (struct memory_key){strdup(write->key), NULL, 0, 0};
    }
    free(m->key[i].value);
    m->key[i].value = strdup(write->value);
    m->key[i].lease = write->lease;
    m->key[i].modified = m->revision;
}

static enum store_status memory_commit(struct memory *m, const char *guard, int64_t modified,
                                       const struct store_write *write, int writes) {
    memory_expire(m);
    const int i = memory_find(m, guard);
    if ((i < 0 ? 0 : m->key[i].modified) != modified) {
        for (int k = 0; k < writes && i >= 0; k++)
            if (!strcmp(write[k].key, guard) && write[k].value &&
                !strcmp(write[k].value, m->key[i].value))
                return STORE_DONE;
        return STORE_CHANGED;
    }
    for (int k = 0; k < writes; k++)
        if (write[k].value && !memory_lives(m, write[k].lease)) return STORE_AWAY; /* as etcd */
    if (writes > STORE_WRITES_MOST) abort();
    m->revision++;
    for (int k = 0; k < writes; k++) memory_write(m, &write[k]);
    return STORE_DONE;
}

/* The commit arrives at `when`. */
static void memory_commit_late(struct memory *m, double when, const char *guard, int64_t modified,
                               const struct store_write *write, int writes) {
    if (m->late == STORE_LATE || writes > 8) return;
    struct memory_late *l = &m->later[m->late++];
    *l = (struct memory_late){.when = when, .guard = strdup(guard), .modified = modified};
    for (; l->writes < writes; l->writes++)
        l->write[l->writes] =
            (struct store_write){memory_text(write[l->writes].key),
                                 memory_text(write[l->writes].value), write[l->writes].lease};
}

/* Makes or drops a write that is on its way. */
static void memory_arrive(struct memory *m, int i, bool makes) {
    struct memory_late l = m->later[i];
    m->later[i] = m->later[--m->late];
    if (makes) memory_commit(m, l.guard, l.modified, l.write, l.writes);
    free(l.guard);
    for (int k = 0; k < l.writes; k++) {
        free((char *)l.write[k].key);
        free((char *)l.write[k].value);
    }
}

static void memory_list(struct memory *m, const char *prefix, struct store_entries *out) {
    memory_expire(m);
    *out = (struct store_entries){0};
    out->entry = (struct store_entry *)calloc((size_t)m->keys + 1, sizeof *out->entry);
    for (int i = 0; i < m->keys; i++)
        if (!strncmp(m->key[i].key, prefix, strlen(prefix)))
            out->entry[out->count++] = (struct store_entry){
                strdup(m->key[i].key), strdup(m->key[i].value), m->key[i].modified};
}

static int64_t memory_grant(struct memory *m, int seconds) {
    if (m->leases == STORE_LEASES) abort();
    m->lease[m->leases] = m->now + seconds;
    m->seconds[m->leases] = seconds;
    return ++m->leases;
}

static enum store_status memory_keep(struct memory *m, int64_t lease) {
    if (!memory_lives(m, lease)) return STORE_CHANGED;
    m->lease[lease - 1] = m->now + m->seconds[lease - 1];
    return STORE_DONE;
}

/* No lease ends while the store is down, and each begins again after that, as in etcd; or all are
 * lost. */
static void memory_down(struct memory *m) {
    memory_expire(m);
    for (int i = 0; i < m->leases; i++)
        if (m->lease[i] > m->now) m->lease[i] = INFINITY;
}

static void memory_up(struct memory *m, bool leases_lost) {
    for (int i = 0; i < m->leases; i++)
        if (isinf(m->lease[i])) m->lease[i] = m->now + (leases_lost ? 0 : m->seconds[i]);
}

static void memory_clear(struct memory *m) {
    while (m->late) memory_arrive(m, 0, false);
    while (m->keys) memory_remove(m, 0);
}

#endif

/* peer_table.h — which rank a datagram came from: a hash table from addresses to ranks.
 *
 * The table knows no addresses. A link hashes its own, walks the ranks of that hash, and compares:
 *
 *     for (unsigned at = hash; (rank = peer_table_next(&table, &at)) >= 0;)
 *         if (the address of rank is the one looked for) break;
 */
#ifndef LOSSYNET_PEER_TABLE_H
#define LOSSYNET_PEER_TABLE_H

#include "lossynet/link/link.h"

struct peer_table {
    int *slots;    /* rank + 1; 0: empty */
    unsigned size; /* of slots, a power of two */
};

/* For at most two addresses per rank. False where there is no memory; closing is fine then, too. */
bool peer_table_open(struct peer_table *table, int ranks);
void peer_table_close(struct peer_table *table);
size_t peer_table_memory(int ranks); /* bytes */

void peer_table_add(struct peer_table *table, unsigned hash, int rank);

/* The next rank that may have this hash; -1: there is none. *at: first the hash, then the
 * walk's. */
int peer_table_next(const struct peer_table *table, unsigned *at);

#endif

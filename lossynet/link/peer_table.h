/* peer_table.h — a hash table from addresses to ranks, which finds the sender of a datagram.
 *
 * The table does not store addresses. A link hashes an address, walks the ranks with that hash, and
 * compares the addresses itself:
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

/* Opens a table for at most two addresses per rank. Returns false if there is no memory. Closing is
 * allowed then, too. */
bool peer_table_open(struct peer_table *table, int ranks);
void peer_table_close(struct peer_table *table);
size_t peer_table_memory(int ranks); /* bytes */

void peer_table_add(struct peer_table *table, unsigned hash, int rank);

/* Returns the next rank that may have this hash, or -1. *at is the hash at first, and then the
 * place in the walk. */
int peer_table_next(const struct peer_table *table, unsigned *at);

#endif

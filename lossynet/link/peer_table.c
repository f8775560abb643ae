/* peer_table.c — the hash table of peer_table.h, with open addressing and linear probing. At least
 * half of it is empty. */
#include "lossynet/link/peer_table.h"

#include <stdlib.h>

static unsigned size_for(int ranks) {
    unsigned size = 4;
    while (size < 4 * (unsigned)ranks) size *= 2;
    return size;
}

bool peer_table_open(struct peer_table *table, int ranks) {
    table->size = size_for(ranks);
    table->slots = ln_memory_take(table->size, sizeof *table->slots);
    return table->slots;
}

void peer_table_close(struct peer_table *table) {
    free(table->slots);
}

size_t peer_table_memory(int ranks) {
    return size_for(ranks) * sizeof(int);
}

void peer_table_add(struct peer_table *table, unsigned hash, int rank) {
    while (table->slots[hash & (table->size - 1)]) hash++;
    table->slots[hash & (table->size - 1)] = rank + 1;
}

int peer_table_next(const struct peer_table *table, unsigned *at) {
    return table->slots[(*at)++ & (table->size - 1)] - 1;
}

/* select.c — chooses the link. */
#include "lossynet/link/link.h"

#include <stdlib.h>

static ln_link_open link_of(lossynet_link_kind kind) {
    return kind == LOSSYNET_LINK_UDP     ? ln_link_udp_open
           : kind == LOSSYNET_LINK_VERBS ? ln_link_verbs_open
                                         : ln_link_mpi_open;
}

/* Chooses RDMA if every rank has it, else UDP. Collective. */
static lossynet_status choose_link(const struct lossynet_world *world, lossynet_link_kind *kind) {
    size_t ranks = (size_t)world->ranks;
    bool *all = ln_memory_take(ranks, sizeof *all), every = true;
    if (!all)
        return ln_fail(LOSSYNET_NO_MEMORY, "rank %d: no memory to ask %zu ranks for RDMA",
                       world->rank, ranks);
    all[world->rank] = ln_link_verbs_available();
    lossynet_status status = ln_share(world, all, sizeof *all);
    for (size_t r = 0; r < ranks; r++) every &= all[r];
    *kind = every ? LOSSYNET_LINK_VERBS : LOSSYNET_LINK_UDP;
    free(all);
    return status;
}

lossynet_status ln_link_choose(const struct lossynet_world *world, lossynet_link_kind kind,
                               ln_link_open *out) {
    lossynet_status status = LOSSYNET_OK;
    if (kind == LOSSYNET_LINK_AUTO) status = choose_link(world, &kind);
    *out = link_of(kind);
    return status;
}

/* parts.c — which part a worker takes in a step: whether it takes part, and whether it has a gradient.
 * In a replay (loss_replay.c) the record says it, else a rank that is late knows (step.c).
 */
#include "lossynet/algorithm/calls.h"

bool lossynet_replayed(const struct lossynet_comm *comm, int worker, struct lossynet_part *out) {
    COMM_DEMAND(comm, COMM_WORKER(comm, worker));
    COMM_DEMAND(comm, out, LN_NO_OUTPUT);
    const struct ln_loss_replay *replay = comm->loss.replay;
    const bool idle = comm->steps.idle && ln_is_local(comm, worker);
    *out = replay ? ln_loss_replay_part(replay, comm->steps.step, worker)
                  : (struct lossynet_part){.takes_part = true, .computes = !idle};
    return replay != NULL;
}

bool ln_has_gradient(const struct lossynet_comm *comm, int worker) {
    struct lossynet_part part;
    lossynet_replayed(comm, worker, &part);
    return part.computes;
}

void ln_without_gradient(const struct lossynet_comm *comm, bool *without) {
    const bool told = comm->steps.skips && !comm->loss.replay;
    if (told) ln_transport_idle(comm->transport, without);
    /* From the end, because the first entries still hold values by rank. */
    for (int w = comm->workers.count - 1; w >= 0; w--)
        without[w] = told ? without[w / comm->workers.local] : !ln_has_gradient(comm, w);
}

/* step.c — begins a step, and handles vectors in steps that do not wait for late ranks.
 *
 * A rank is late in a step if most ranks ended the step's GRADIENT phase before all of this rank's
 * gradient had left. The late rank still ends the step as an owner: it averages what arrived for
 * its shards, updates them and broadcasts them, though the broadcast may come too late as well.
 * Then
 *
 *     it goes to the step that most ranks are at, and leaves out the steps in between
 *     if it left steps out, or if the others began that step more than a deadline ago, it is idle
 *     in it: it computes no gradient, so that it is on time again
 *
 * For the other ranks, packets that a late rank did not send are lost. With error feedback its late
 * gradient comes in the step in which it is idle (unconfirmed.c). Parameters that it missed age by
 * the number of steps left out. In a replay (loss_replay.c) the record says what each worker did.
 */
#include "lossynet/algorithm/calls.h"

/* Leaves out `steps` steps, and opens the GRADIENT phase of the step after them for receiving. */
static lossynet_status leave_out(struct lossynet_comm *comm, uint64_t steps) {
    if (steps == 0) return LOSSYNET_OK;
    lossynet_status status = lossynet_broadcast_end(comm);
    if (status) return status;
    ln_transport_jump(comm->transport, (uint32_t)steps);
    for (int phase = 0; phase < 2; phase++) ln_arrivals_clear(comm, (lossynet_phase)phase);
    for (int v = 0; v < comm->workers.local; v++) ln_arrivals_age(comm, v, steps);
    ln_transport_receive_begin(comm->transport, LOSSYNET_GRADIENT);
    return LOSSYNET_OK;
}

lossynet_status lossynet_step_begin(struct lossynet_comm *comm, uint64_t step) {
    COMM_EXPECT(comm, !comm->steps.reducing && step != LN_NO_STEP,
                "step %llu: expected a number from 0 on, and lossynet_reduce before it where "
                "lossynet_reduce_begin was called",
                (unsigned long long)step);
    ln_not_finite_log(comm);
    if (comm->loss.replay && !ln_loss_replay_has(comm->loss.replay, step))
        return ln_fail(LOSSYNET_FILE, "the replay has no step %llu", (unsigned long long)step);
    comm->steps.step = step;
    comm->steps.prepared = false;
    comm->steps.current = !comm->steps.current;
    if (comm->transport) ln_transport_set_step(comm->transport, step);
    comm->stats.step[comm->steps.current] = step;
    struct lossynet_counters *counters = comm->stats.counters[comm->steps.current];
    struct lossynet_bucket *buckets = comm->stats.buckets[comm->steps.current];
    memset(buckets, 0,
           (size_t)comm->workers.local * (size_t)comm->partition.buckets * sizeof *buckets);
    memset(counters, 0, (size_t)comm->workers.local * sizeof *counters);
    return LOSSYNET_OK;
}

lossynet_status lossynet_step_begin_with_majority(struct lossynet_comm *comm, uint64_t *step,
                                                  bool *idle) {
    COMM_EXPECT(comm, step && idle, LN_NO_OUTPUT);
    struct ln_steps *steps = &comm->steps;
    *idle = false;
    if (steps->skips) {
        const uint64_t others =
            steps->begun ? steps->next + ln_transport_position(comm->transport) : *step;
        if (!steps->begun) steps->next = *step;
        *idle = others > *step || (steps->late && ln_transport_is_behind(comm->transport));
        if (others > *step) *step = others;
        lossynet_status status = leave_out(comm, *step - steps->next);
        if (status) return status;
        steps->next = *step + 1;
        steps->begun = true;
    }
    steps->idle = *idle;
    steps->late = false;
    lossynet_status status = lossynet_step_begin(comm, *step);
    if (!status && steps->skips) ln_transport_stays(comm->transport, *idle);
    return status;
}

void ln_late_note(struct lossynet_comm *comm) {
    if (!comm->steps.skips) return;
    comm->steps.late = ln_transport_is_late(comm->transport);
    comm->steps.lates += comm->steps.late;
}

bool lossynet_skips_late(const struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->steps.skips;
}

bool lossynet_is_awaited(struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->steps.skips && ln_transport_is_awaited(comm->transport);
}

void lossynet_agreed(struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    comm->steps.late = false;
}

bool lossynet_turn(struct lossynet_comm *comm) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    return comm->transport && ln_transport_turn(comm->transport);
}

/* ---- records and replays ---- */

void lossynet_note_part(struct lossynet_comm *comm, double norm, double lead) {
    LN_DEMAND(NULL, comm, LN_NO_COMM);
    const struct lossynet_part part = {
        .takes_part = true, .computes = !comm->steps.idle, .norm = norm, .lead = lead};
    if (!comm->arrivals.trace || !comm->steps.skips) return;
    for (int v = 0; v < comm->workers.local; v++) {
        const size_t links = (size_t)v * comm->workers.count;
        ln_loss_trace_part(comm->arrivals.trace, comm->steps.step, comm->workers.first + v, &part);
        if (comm->feedback.unconfirmed.on)
            ln_loss_trace_told(comm->arrivals.trace, comm->steps.step, comm->workers.first + v,
                               comm->feedback.unconfirmed.told + links, comm->workers.count);
    }
}

void lossynet_lateness(struct lossynet_comm *comm, uint64_t *late) {
    COMM_DEMAND(comm, late, LN_NO_OUTPUT);
    memset(late, 0, (size_t)comm->world.ranks * sizeof *late);
    if (comm->transport) ln_transport_lateness(comm->transport, late);
    late[comm->world.rank] = comm->steps.lates;
}

bool lossynet_has_failed(struct lossynet_comm *comm, bool *missing) {
    COMM_DEMAND(comm, missing, LN_NO_OUTPUT);
    memset(missing, 0, (size_t)comm->world.ranks * sizeof *missing);
    return comm->transport && ln_transport_has_failed(comm->transport, missing);
}

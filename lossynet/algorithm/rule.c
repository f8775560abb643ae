/* rule.c — calls the functions of a rule of the program's own (struct lossynet_rule).
 *
 * One thread at a time calls them, for one part after another: a part is what one owner has of a bucket.
 *
 *     send       before packets are rounded and leave, of each bucket once in a phase
 *     average    instead of the estimator (gradient.c), when no more packets of the bucket can come
 *     receive    when a broadcast has ended, for all parts that other workers own
 */
#include "lossynet/algorithm/algorithm.h"

static struct lossynet_rule_part part_of(const struct lossynet_comm *comm, int owner, int bucket) {
    struct lossynet_rule_part part = {.step = comm->steps.step,
                                      .workers = comm->workers.count,
                                      .owner = owner,
                                      .bucket = bucket,
                                      .packet = comm->partition.packet_elements,
                                      .packets = ln_shard_packets(&comm->partition, bucket, owner)};
    ln_shard_span(&comm->partition, owner, bucket, &part.offset, &part.count);
    return part;
}

/* ---- open and close ---- */

lossynet_status ln_rule_check(const struct lossynet_settings *s) {
    const struct lossynet_rule *rule = s->rule;
    if (!rule) return LOSSYNET_OK;
    if (rule->size != sizeof *rule)
        return ln_refuse(
            "rule: a struct of %zu bytes, expected %zu: compile it with this library's header",
            rule->size, sizeof *rule);
    const char *wrong =
        s->vector_dtype != LOSSYNET_FLOAT32 || s->memory ? "vectors of float32 in the host's memory"
        : s->group > 1                                   ? "no groups"
        : rule->reliable && s->network.skip_late ? "no deadline: ranks may know another norm"
        : rule->send && s->error_feedback        ? "carry 0: what it sends of one step is "
                                                   "not to be added to that of another"
                                                 : NULL;
    if (!wrong) return LOSSYNET_OK;
    return ln_refuse("rule: expected %s", wrong);
}

void ln_rule_open(struct lossynet_comm *comm, const struct lossynet_rule *rule) {
    if (!rule) return;
    struct ln_rule *own = &comm->averaging.rule;
    const size_t packets = comm->partition.largest_shard_packets;
    const size_t workers = (size_t)comm->workers.count;
    own->functions = *rule;
    if (rule->average) {
        COMM_TAKE(comm, own->arrived, packets * workers);
        COMM_TAKE(comm, own->carried, packets * workers);
        COMM_TAKE(comm, own->gradients, workers);
        COMM_TAKE(comm, own->average, packets * comm->partition.packet_elements);
    }
}

uint64_t ln_rule_fingerprint(const struct lossynet_rule *rule) {
    if (!rule) return 0;
    return 1 + 2 * (rule->send != NULL) + 4 * (rule->average != NULL) + 8 * (rule->receive != NULL);
}

/* ---- calls ---- */

void ln_rule_send(struct lossynet_comm *comm, int v, float *vector, int bucket) {
    const struct ln_rule *own = &comm->averaging.rule;
    if (!own->functions.send) return;
#pragma omp critical(lossynet_rule)
    for (int b = ln_exchange_next(comm, v); b <= bucket; b++)
        for (int owner = 0; owner < comm->workers.count; owner++) {
            const struct lossynet_rule_part part = part_of(comm, owner, b);
            if (part.count > 0)
                own->functions.send(own->functions.context, &part, comm->workers.first + v,
                                    vector + part.offset);
        }
}

void ln_rule_average(const struct lossynet_comm *comm, float *const *vectors, int v, int bucket) {
    const struct ln_rule *own = &comm->averaging.rule;
    const struct ln_partition *partition = &comm->partition;
    const int owner = comm->workers.first + v;
    const struct lossynet_rule_part part = part_of(comm, owner, bucket);
    const size_t n = ln_partition_owner_packets(partition, owner); /* packets of a link */
    const size_t first = ln_packets_before(partition, bucket, owner);
    const size_t row = (size_t)owner * (size_t)(partition->buckets + 1) + (size_t)bucket;
    const uint8_t *arrived =
        comm->arrivals.arrived[LOSSYNET_GRADIENT] + comm->arrivals.own_start[v];
    const float *mass = ln_feedback_mass(comm, v);
    if (part.count == 0) return;
    for (int s = 0; s < comm->workers.count; s++) {
        const size_t from = (size_t)s * n + first, to = (size_t)s * part.packets;
        own->gradients[s] =
            ln_is_local(comm, s)
                ? vectors[s - comm->workers.first] + part.offset
                : (const float *)ln_inbox(comm, v, s, partition->owner_element[row]);
        memcpy(own->arrived + to, arrived + from, part.packets);
        if (mass) memcpy(own->carried + to, mass + from, part.packets * sizeof *mass);
    }
    own->functions.average(own->functions.context, &part, own->gradients, own->arrived,
                           own->carried, own->average);
    memcpy(ln_shard_of(comm, vectors[v], v, bucket).average, own->average,
           part.count * sizeof *own->average);
}

void ln_rule_receive(const struct lossynet_comm *comm) {
    const struct lossynet_rule *rule = &comm->averaging.rule.functions;
    for (int v = 0; rule->receive && v < comm->workers.local; v++)
        for (int b = comm->partition.buckets - 1; b >= 0; b--)
            for (int owner = 0; owner < comm->workers.count; owner++) {
                struct lossynet_rule_part part = part_of(comm, owner, b);
                const size_t shard = (size_t)b * (size_t)comm->workers.count + (size_t)owner;
                part.step = comm->steps.broadcast_step;
                if (part.count == 0 || owner == comm->workers.first + v) continue;
                rule->receive(rule->context, &part, comm->workers.first + v,
                              comm->arrivals.age + (size_t)v * comm->partition.packets +
                                  comm->partition.shard_packet[shard],
                              comm->averaging.rule.vectors[v] + part.offset);
            }
}

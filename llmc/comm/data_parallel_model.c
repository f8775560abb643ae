/* data_parallel_model.c — see data_parallel_model.h. */
#include "llmc/comm/data_parallel_model.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/backend/host_vector.h"
#include "llmc/checkpoint/hf_model.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/comm/settings.h"
#include "llmc/comm/rule.h"
#include "llmc/log/error.h"
#include "llmc/util/bf16.h"
#include "llmc/util/file.h"

/* ---- the owners' shards put together ------------------------------------------------------ */

/* Copies the tensors that are wanted and present. Releases the list of those that are present. If
 * it is NULL, memory was lacking. */
static int copy_tensors(const struct backend *be, const struct named_tensor *wanted,
                        struct named_tensor *there, size_t count) {
    if (!there) return -1;
    for (size_t i = 0; i < count; i++)
        if (wanted[i].data && there[i].data)
            be->download(wanted[i].data, there[i].data,
                         model_tensor_elements(&wanted[i]) * sizeof(float));
    free(there);
    return 0;
}

/* Puts the model together bucket by bucket, and copies it to the wanted tensors. If `wanted` is
 * NULL, rounds it into the replica, which the next step receives again. */
static int gather_buckets(struct data_parallel *d, const struct named_tensor *wanted) {
    size_t offset = 0, count;
    for (int b = 0; b < d->layout->buckets; b++, offset += count) {
        count = d->layout->bucket_elements[b];
        if (lossynet_gather_bucket(d->comm, d->vectors.params, b, d->vectors.model)) return -1;
        if (wanted) {
            size_t tensors;
            struct named_tensor *there =
                param_layout_bucket_tensors(d->layout, b, d->vectors.model, &tensors);
            if (copy_tensors(d->vectors.memory, wanted, there, tensors)) return -1;
            continue;
        }
        d->be->h2d_convert_async((char *)d->port.weights[0] + offset * d->be->weight_bytes,
                                 d->vectors.model, count);
        d->be->d2h_async(d->worker[0].comm_grads, d->worker[0].grads, 0); /* see d2h_wait */
        d->be->d2h_wait();
    }
    if (!wanted) port_expect(&d->port);
    return 0;
}

int data_parallel_copy_model(struct data_parallel *d, const struct named_tensor *tensors,
                             size_t count) {
    const float *model;
    if (d->placement.has[ARRAY_MASTER]) return gather_buckets(d, tensors);
    if (data_parallel_model(d, &model)) return -1;
    return copy_tensors(d->be, tensors, param_layout_tensor_list(d->layout, (float *)model, &count),
                        count);
}

int data_parallel_model(struct data_parallel *d, const float **model) {
    if (d->placement.has[ARRAY_MASTER]) {
        *model = NULL;
        return gather_buckets(d, NULL);
    }
    *model = d->worker[0].params;
    if (data_parallel_replicas_are_exact(d)) return 0;
    *model = d->vectors.model;
    const size_t P = d->layout->count;
    const bool moves = d->placement.has[ARRAY_COMM_PARAMS];
    float *host = moves ? host_vector(d->be, d->vectors.model, P, false) : d->vectors.model;
    int failed = !host || lossynet_gather_fresh(d->comm, d->vectors.params, host) ? -1 : 0;
    if (moves && !failed) d->be->upload(d->vectors.model, host, P * sizeof(float));
    if (moves) host_vector_end(d->be, host);
    return failed;
}

const weight *data_parallel_weights(struct data_parallel *d, const float *params) {
    /* With masters, data_parallel_model has put them there. */
    if (d->port.weights[0] && !d->placement.has[ARRAY_MASTER])
        d->be->convert(d->port.weights[0], params, d->layout->count);
    return d->port.weights[0] ? d->port.weights[0] : params;
}

const weight *data_parallel_replica(struct data_parallel *d, const struct worker *w) {
    if (!d->placement.has[ARRAY_MASTER]) return data_parallel_weights(d, w->params);
    port_read_replica(&d->port, w, (struct range){0, d->layout->count, 0});
    return d->port.weights[0];
}

/* ---- initial values ----------------------------------------------------------------------- */

/* Computes or reads initial values of a bucket or of all parameters; `first` has room for them. */
static int initial_values(const struct data_parallel *d, int bucket, float *first) {
    if (!file_is_directory(d->options->model)) {
        param_layout_initialise(d->layout, (uint64_t)d->options->seed, bucket, first);
        return 0;
    }
    size_t count;
    struct named_tensor *tensors =
        bucket == LAYOUT_ALL ? param_layout_tensor_list(d->layout, first, &count)
                             : param_layout_bucket_tensors(d->layout, bucket, first, &count);
    const bool first_part = !d->options->resume && (bucket == LAYOUT_ALL || bucket == 0);
    const int failed =
        !tensors ||
        (first_part && resume_verify(d->options->model, NULL, d->world.rank, d->world.ranks)) ||
        hf_model_read(d->options->model, &d->layout->config, tensors, count);
    free(tensors);
    return failed ? -1 : 0;
}

/* Sets a bucket of a bfloat16 replica: shards that its group owns are rounded to bfloat16, and the
 * others as packets would deliver them. */
static void narrow(const struct data_parallel *d, int bucket, uint16_t *replica,
                   const float *values, size_t begin) {
    const struct worker *w = &d->worker[0];
#pragma omp parallel for
    for (int owner = 0; owner < d->workers; owner++) {
        size_t offset, count;
        lossynet_shard(d->comm, owner, bucket, &offset, &count);
        const float *from = values + (offset - begin);
        if (owner < w->group || owner >= w->group + w->members)
            lossynet_narrow_parameters(d->comm, replica + offset, from, offset, count);
        else
            for (size_t i = 0; i < count; i++) replica[offset + i] = to_bf16(from[i]);
    }
}

/* With masters: initialises them bucket by bucket, and the copies that the network reads; in a
 * group only the first member's copies. */
static int initialise_masters(struct data_parallel *d) {
    const struct worker *w = &d->worker[0];
    const bool fills = w->id == w->group;
    size_t begin = 0, count;
    for (int b = 0; b < d->layout->buckets; b++, begin += count) {
        const struct range range = w->range[b];
        count = d->layout->bucket_elements[b];
        const float *values = d->vectors.model + (range.count ? range.offset - begin : 0);
        if (initial_values(d, b, d->vectors.model)) return -1;
        const size_t bytes = range.count * sizeof(float);
        if (bytes) d->be->upload(w->master + range.state, values, bytes);
        if (bytes && w->comm_master) memcpy(w->comm_master + range.state, values, bytes);
        if (fills && w->copy_bytes < (int)sizeof(float))
            narrow(d, b, (uint16_t *)w->comm_params, d->vectors.model, begin);
        else if (fills)
            memcpy(w->comm_params + begin, d->vectors.model, count * sizeof(float));
    }
    return port_wait(&d->port);
}

int data_parallel_initialise(struct data_parallel *d) {
    if (d->placement.has[ARRAY_MASTER]) return initialise_masters(d);
    const unsigned own = 1u << ARRAY_PARAMS;
    if (!(d->worker[0].own & own) && d->worker[0].id > d->worker[0].group)
        return port_wait(&d->port); /* another rank fills it */
    float *first = host_vector(d->be, d->worker[0].params, d->layout->count, false);
    int failed = first ? initial_values(d, LAYOUT_ALL, first) : -1;
    for (int w = d->be->on_device ? 0 : 1; w < d->local && !failed; w++)
        if (d->worker[w].own & own)
            worker_initialise(&d->worker[w], d->be, first, d->layout->count);
    host_vector_end(d->be, first);
    return failed ? -1 : port_wait(&d->port);
}

void data_parallel_facts(const struct data_parallel *d, struct run_info *facts) {
    facts->options = d->options;
    facts->layout = d->layout;
    facts->be = d->be;
    facts->link = lossynet_link_name(d->comm);
    facts->loss.rule = rule_checksum(d->options);
    facts->loss.trace = comm_trace_checksum(d->options);
    facts->sends = d->port.sends;
    facts->loss.carries = comm_carry(d->options, d->world.ranks, d->be->on_device) > 0;
    for (int p = 0; p < 2; p++) {
        facts->loss.measured[p] =
            comm_rounds(d->options, (lossynet_phase)p) == LOSSYNET_ROUNDS_MEASURED;
        facts->loss.rounds[p] = lossynet_rounds_now(d->comm, (lossynet_phase)p);
        facts->loss.of_late[p] = lossynet_lost_of_late(d->comm, (lossynet_phase)p);
    }
    facts->mapped = shared_reads_peers(&d->port);
    facts->rank = d->world.rank;
    facts->ranks = d->world.ranks;
    facts->workers = d->workers;
    facts->threads = omp_get_max_threads();
    facts->packet_bytes = lossynet_packet_bytes(d->comm);
    facts->packets = lossynet_packets(d->comm);
    facts->moments = data_parallel_moments(d);
}

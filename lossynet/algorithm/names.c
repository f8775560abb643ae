/* names.c — which packets hold parts of tensors that have a loss rate or rounds of their own.
 *
 * settings.tensors says where tensors lie in the vector. A packet with elements of several tensors counts
 * for each of them. Packets that the same entries of the two lists (settings.loss.at, settings.repair_at)
 * stand for are a class. Most packets are in class 0, which no entry stands for.
 */
#include "lossynet/algorithm/algorithm.h"

#include <omp.h>
#include <stdlib.h>

/* Where the classes of an owner's packets begin; in order of (bucket, packet), as on a link. */
static const uint8_t *classes_of(const struct lossynet_comm *comm, int owner) {
    return comm->arrivals.names.packet + comm->partition.owner_start[owner];
}

/* ---- open and close ---- */

/* Adds the entries that stand for a tensor to the packets that hold elements of it. */
static void mark(const struct ln_partition *partition, const struct lossynet_tensor *tensor,
                 struct ln_name_class entries, struct ln_name_class *packet) {
    const size_t end = tensor->first + tensor->count, step = partition->packet_elements;
    for (int b = 0; b < partition->buckets; b++)
        for (int owner = 0; owner < partition->workers; owner++) {
            size_t offset, count;
            ln_shard_span(partition, owner, b, &offset, &count);
            if (tensor->count == 0 || end <= offset || tensor->first >= offset + count) continue;
            const size_t from = tensor->first > offset ? (tensor->first - offset) / step : 0;
            const size_t last = ((end < offset + count ? end : offset + count) - offset - 1) / step;
            struct ln_name_class *of_owner =
                packet + partition->owner_start[owner] + ln_packets_before(partition, b, owner);
            for (size_t k = from; k <= last; k++) {
                of_owner[k].loss |= entries.loss;
                of_owner[k].rounds |= entries.rounds;
            }
        }
}

/* The number of a class, which is new if it is not there yet; -1: there are too many. */
static int number_of(struct ln_names *names, struct ln_name_class entries) {
    for (int i = 0; i < names->classes; i++)
        if (names->class_of[i].loss == entries.loss && names->class_of[i].rounds == entries.rounds)
            return i;
    if (names->classes == LOSSYNET_NAME_CLASSES) return -1;
    names->class_of[names->classes] = entries;
    return names->classes++;
}

static lossynet_status classify(struct lossynet_comm *comm,
                                const struct lossynet_settings *settings,
                                struct ln_name_class *packet) {
    struct ln_names *names = &comm->arrivals.names;
    for (int t = 0; t < settings->tensor_count; t++) {
        const struct lossynet_tensor *tensor = &settings->tensors[t];
        const struct ln_name_class entries = {ln_at_names(&comm->loss.at, tensor->name),
                                              ln_at_names(&names->rounds, tensor->name)};
        if (entries.loss || entries.rounds) mark(&comm->partition, tensor, entries, packet);
    }
    number_of(names, (struct ln_name_class){0, 0});
    for (size_t k = 0; k < comm->partition.packets; k++) {
        const int number = number_of(names, packet[k]);
        if (number < 0)
            return ln_refuse(
                "loss-at, repair-at: expected entries whose tensors overlap less: packets have "
                "more than %d combinations of them",
                LOSSYNET_NAME_CLASSES);
        names->packet[k] = (uint8_t)number;
    }
    return LOSSYNET_OK;
}

lossynet_status ln_names_open(struct lossynet_comm *comm,
                              const struct lossynet_settings *settings) {
    struct ln_names *names = &comm->arrivals.names;
    const lossynet_status parsed = ln_repair_at_parse(&names->rounds, settings);
    if (parsed) return parsed;
    if (!comm->loss.at.names && !names->rounds.names) return LOSSYNET_OK;
    COMM_TAKE(comm, names->packet, comm->partition.packets);
    COMM_TAKE(comm, names->mask,
              (size_t)comm->resources.threads * comm->partition.largest_owner_packets);
    if (comm->resources.pool.measuring || !names->packet) return LOSSYNET_OK;
    if (!ln_names_exist(&comm->loss.at, "loss-at", settings) ||
        !ln_names_exist(&names->rounds, "repair-at", settings))
        return LOSSYNET_INVALID;
    struct ln_name_class *packet = ln_memory_take(comm->partition.packets, sizeof *packet);
    if (!packet)
        return ln_fail(LOSSYNET_NO_MEMORY, "no memory for the tensors of %zu packets",
                       comm->partition.packets);
    const lossynet_status status = classify(comm, settings, packet);
    free(packet);
    return status;
}

static bool is_a_tensor(const struct lossynet_settings *settings, const char *name,
                        enum ln_at_numbers which) {
    int t = 0;
    while (t < settings->tensor_count && !ln_at_fits(name, settings->tensors[t].name, which)) t++;
    return t < settings->tensor_count;
}

bool ln_names_exist(const struct ln_at *at, const char *setting,
                    const struct lossynet_settings *settings) {
    for (int i = 0; i < at->count; i++) {
        const char *name = at->entry[i].name;
        if (!at->entry[i].bit ||
            (is_a_tensor(settings, name, LN_AT_FIRST) && is_a_tensor(settings, name, LN_AT_LAST)))
            continue;
        if (is_a_tensor(settings, name, LN_AT_ALL))
            ln_log("%s: '%s': expected two numbers that tensors have", setting, name);
        else if (settings->tensor_count)
            ln_log("%s: '%s': no tensor has such a name: expected parts of one such as %s", setting,
                   name, settings->tensors[settings->tensor_count / 2].name);
        else
            ln_log("%s: '%s': expected a list of tensors (settings.tensors)", setting, name);
        return false;
    }
    return true;
}

lossynet_status ln_repair_at_parse(struct ln_at *at, const struct lossynet_settings *settings) {
    static const struct ln_at_form form = {"repair-at", "ROUNDS", "round", LOSSYNET_ROUNDS_GIVEN,
                                           true};
    return ln_at_parse(at, settings->repair_at, &form, settings->workers);
}

/* ---- what packets have of their own ---- */

void ln_names_mask(const struct lossynet_comm *comm, const struct ln_loss *loss,
                   lossynet_phase phase, int sender, int receiver, size_t n, uint64_t *chain,
                   uint8_t *mask) {
    const uint64_t step = comm->steps.step;
    ln_loss_mask(loss, phase, step, sender, receiver, n, chain, mask);
    if (!comm->arrivals.names.packet || !loss->at.names) return;
    const uint8_t *class_of = classes_of(comm, phase == LOSSYNET_GRADIENT ? receiver : sender);
    uint8_t *own = comm->arrivals.names.mask +
                   (size_t)omp_get_thread_num() * comm->partition.largest_owner_packets;
    for (int c = 1; c < comm->arrivals.names.classes; c++) {
        const uint32_t entries = comm->arrivals.names.class_of[c].loss;
        if (!entries || !memchr(class_of, c, n)) continue;
        ln_loss_mask_of(loss, entries, phase, step, sender, receiver, n, NULL, own);
        for (size_t k = 0; k < n; k++)
            if (class_of[k] == c) mask[k] = own[k];
    }
}

double ln_names_loss(const struct lossynet_comm *comm, lossynet_phase phase) {
    double mean[LOSSYNET_NAME_CLASSES], sum = 0;
    const struct ln_names *names = &comm->arrivals.names;
    if (!names->packet) return ln_loss_mean(&comm->loss, phase, comm->workers.count, 0);
    for (int c = 0; c < names->classes; c++)
        mean[c] = ln_loss_mean(&comm->loss, phase, comm->workers.count, names->class_of[c].loss);
    for (size_t k = 0; k < comm->partition.packets && names->classes; k++)
        sum += mean[names->packet[k]];
    return sum / (double)comm->partition.packets;
}

int ln_names_rounds(const struct lossynet_comm *comm, lossynet_phase phase, int sender,
                    int receiver, size_t k) {
    const struct ln_names *names = &comm->arrivals.names;
    if (names->rounds.count == 0) return -1;
    const int owner = phase == LOSSYNET_GRADIENT ? receiver : sender;
    const uint32_t entries = names->packet ? names->class_of[classes_of(comm, owner)[k]].rounds : 0;
    return (int)ln_at_value(&names->rounds, phase, sender, receiver, entries, -1);
}

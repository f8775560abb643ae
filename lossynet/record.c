/* record.c — which packets arrived, as a trace that the loss model trace:FILE reads (loss.c).
 *
 * Each rank writes what its workers received, from every other worker, injected loss included:
 *
 *     # step 12, gradient, worker 3 to 0
 *     0000001110000...                 in order of (bucket, packet): 0 arrived, 1 did not
 *
 * scripts/loss_trace.py puts the steps of a link behind one another and tells how bursty they are.
 */
#include "lossynet/internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { LINE = 4096 };

lossynet_status lossynet_record_open(struct lossynet *net, const char *path) {
    char own[4096];
    if (!path || net->measuring) return LOSSYNET_OK;
    const char *format = net->world.ranks > 1 ? "%s.%d" : "%s";
    int length = snprintf(own, sizeof own, format, path, net->world.rank);
    if (length < (int)sizeof own) net->record = fopen(own, "w");
    if (net->record) return LOSSYNET_OK;
    lossynet_log("cannot write the loss trace %s: %s", own,
                 length < (int)sizeof own ? strerror(errno) : "the name is too long");
    return LOSSYNET_FILE;
}

static void put(FILE *file, const char *digits, size_t n) {
    if (fwrite(digits, 1, n, file) != n || putc('\n', file) == EOF) return; /* ferror tells */
}

/* One shard after the other; packets of one lie together. */
static void write_link(struct lossynet *net, int phase, int v, int sender) {
    const struct lossynet_layout *layout = &net->layout;
    int owner = phase == LOSSYNET_GRADIENT ? net->first + v : sender;
    const size_t *row = layout->owner_packet + (size_t)owner * (layout->buckets + 1);
    const uint8_t *arrived = phase == LOSSYNET_GRADIENT ? lossynet_arrived(net, v, sender) : NULL;
    char digits[LINE];
    size_t n = 0;
    for (int b = 0; b < layout->buckets; b++) {
        size_t shard = (size_t)b * layout->workers + owner;
        const uint32_t *age = net->age + (size_t)v * layout->packets + layout->shard_packet[shard];
        for (size_t k = row[b]; k < row[b + 1]; k++) {
            bool lost = arrived ? !arrived[k] : age[k - row[b]] > 0;
            digits[n++] = lost ? '1' : '0';
            if (n == LINE) put(net->record, digits, n), n = 0;
        }
    }
    if (n > 0) put(net->record, digits, n);
}

lossynet_status lossynet_record(struct lossynet *net, lossynet_phase phase, uint64_t step) {
    if (!net->record) return LOSSYNET_OK;
    for (int v = 0; v < net->local; v++) {
        for (int sender = 0; sender < net->workers; sender++) {
            if (sender == net->first + v) continue;
            fprintf(net->record, "# step %" PRIu64 ", %s, worker %d to %d\n", step,
                    phase == LOSSYNET_GRADIENT ? "gradient" : "parameter", sender, net->first + v);
            write_link(net, phase, v, sender);
        }
    }
    if (fflush(net->record) == 0 && !ferror(net->record)) return LOSSYNET_OK;
    lossynet_log("rank %d: the loss trace cannot be written: %s", net->world.rank, strerror(errno));
    return LOSSYNET_FILE;
}

void lossynet_record_close(struct lossynet *net) {
    if (net->record) fclose(net->record);
    net->record = NULL;
}

/* loss_trace.c — writes which packets arrived, as a trace that the loss model trace:FILE reads
 * (loss_model.c).
 *
 * Each rank writes which packets its workers received from every other worker. Losses include
 * injected ones:
 *
 *     # step 12, gradient, worker 3 to 0
 *     0000001110000...                 in order of (bucket, packet): 0 arrived, 1 did not
 *
 * Packets that came in a round of retransmission count as arrived, because results depend only on
 * what had arrived in the end.
 *
 * With a deadline it also writes what each worker did, for the loss model replay:FILE
 * (loss_replay.c):
 *
 *     # step 12, worker 3 computes, norm 0x1.8p+0, lead 0x0p+0      or "idles": it has no gradient
 *
 *     # step 12, worker 3 told 1101    by owner: 1 if in this step the owner told it what arrived
 *
 * The last line is "# end".
 *
 * scripts/loss_trace.py concatenates the steps of a link and says how bursty its losses are.
 */
#include "lossynet/loss/loss.h"

#include <errno.h>
#include <inttypes.h>
#include <sys/stat.h>

enum { LINE = 4096 };

/* Returns whether a file may be written anew: it has nothing in it, or an earlier trace, or is a pipe. */
static bool is_free(const char *path) {
    char begin[7] = "";
    FILE *file = ln_loss_file(path);
    const size_t got = file ? fread(begin, 1, sizeof begin - 1, file) : 0;
    if (file) fclose(file);
    return got == 0 || !strcmp(begin, "# step") || !strncmp(begin, LOSSYNET_TRACE_END, 5);
}

/* Whether a loss model NAME:FILE reads this file. */
static bool is_read(const char *model, const char *path) {
    struct stat a, b;
    const char *colon = model ? strchr(model, ':') : NULL;
    return colon && !stat(colon + 1, &a) && !stat(path, &b) && a.st_ino == b.st_ino &&
           a.st_dev == b.st_dev;
}

lossynet_status ln_loss_trace_open(const char *path, const char *model,
                                   const struct lossynet_world *world, FILE **out) {
    char own[4096];
    const char *format = world->ranks > 1 ? "%s.%d" : "%s";
    *out = NULL;
    if (snprintf(own, sizeof own, format, path, world->rank) >= (int)sizeof own)
        return ln_fail(LOSSYNET_FILE, "cannot write the loss trace %s: the name is too long", own);
    if (!is_free(own))
        return ln_fail(LOSSYNET_FILE,
                       "the file for the loss trace, %s, has something else in it: "
                       "expected a new file, or an earlier trace",
                       own);
    if (is_read(model, own))
        return ln_fail(
            LOSSYNET_FILE,
            "the file for the loss trace, %s, is that of the loss model: expected another", own);
    *out = fopen(own, "w");
    if (*out) return LOSSYNET_OK;
    return ln_fail(LOSSYNET_FILE, "cannot write the loss trace %s: %s", own, strerror(errno));
}

void ln_loss_trace_link(FILE *trace, uint64_t step, lossynet_phase phase, int sender, int receiver,
                        const uint8_t *arrived, size_t n) {
    fprintf(trace, "# step %" PRIu64 ", %s, worker %d to %d\n", step,
            phase == LOSSYNET_GRADIENT ? "gradient" : "parameter", sender, receiver);
    char digits[LINE];
    for (size_t start = 0; start < n; start += LINE) {
        size_t count = n - start < LINE ? n - start : LINE;
        for (size_t k = 0; k < count; k++) digits[k] = arrived[start + k] ? '0' : '1';
        if (fwrite(digits, 1, count, trace) != count || putc('\n', trace) == EOF)
            return; /* ln_loss_trace_flush reports the error */
    }
}

void ln_loss_trace_part(FILE *trace, uint64_t step, int worker, const struct lossynet_part *part) {
    fprintf(trace, "# step %" PRIu64 ", worker %d %s, norm %a, lead %a\n", step, worker,
            part->computes ? "computes" : "idles", part->norm, part->lead);
}

void ln_loss_trace_told(FILE *trace, uint64_t step, int worker, const uint8_t *told, int workers) {
    fprintf(trace, "# step %" PRIu64 ", worker %d told ", step, worker);
    for (int w = 0; w < workers; w++) putc(told[w] ? '1' : '0', trace);
    putc('\n', trace);
}

lossynet_status ln_loss_trace_flush(FILE *trace, int rank) {
    if (fflush(trace) == 0 && !ferror(trace)) return LOSSYNET_OK;
    return ln_fail(LOSSYNET_FILE, "rank %d: the loss trace cannot be written: %s", rank,
                   strerror(errno));
}

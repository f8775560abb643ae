/* named.c — settings by name and value, for programs in languages that cannot fill in a C struct.
 *
 * The names are those of the trainer's options. Every name has a default, so that a program need
 * not know it. Texts that settings point to live as long as the settings.
 */
#include "lossynet/comm.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

enum kind {
    WHOLE,
    ROUNDS, /* of both phases, or of each with a comma; so are REALS */
    SIZE,
    SEED,
    REAL,
    REALS,
    FLAG,
    TEXT,
    WIRE,
    ESTIMATOR,
    LINK,
    CLASS,
    DEADLINE,
    SHARE,
    LEAD,
    FREE
};

struct entry {
    const char *name;
    enum kind kind;
    size_t offset; /* in struct lossynet_settings */
    const char *initial;
};

#define AT(member) offsetof(struct lossynet_settings, member)
static const struct entry table[] = {
    {"workers", WHOLE, AT(workers), "1"},
    {"packet-bytes", SIZE, AT(packet_bytes), "0"},
    {"wire-dtype", WIRE, AT(wire_dtype), "float32"},
    {"estimator", ESTIMATOR, AT(estimator), "mean"},
    {"loss-rate", REALS, AT(loss.rate), "0"},
    {"loss-model", TEXT, AT(loss.model), "bernoulli"},
    {"loss-seed", SEED, AT(loss.seed), "1"},
    {"loss-at", TEXT, AT(loss.at), "none"},
    {"lead", LEAD, AT(lead), "auto"},
    {"look-ahead", FREE, 0, "0"},
    {"carry", SHARE, AT(error_feedback), "1"},
    {"repair", ROUNDS, AT(retransmission_rounds), "auto,0"},
    {"repair-budget", REAL, AT(retransmission_budget), "0.2"},
    {"link", LINK, AT(link), "auto"},
    {"interface", TEXT, AT(network.interface), ""},
    {"pace-gbps", REAL, AT(network.pace_gbps), "0"},
    {"loss-budget", REAL, AT(network.loss_budget), "0"},
    {"traffic-class", CLASS, AT(network.dscp), "default"},
    {"peer-timeout", REAL, AT(network.peer_timeout), "0"},
    {"deadline", DEADLINE, AT(network.deadline), "off"},
    {"encrypt", FLAG, AT(network.encrypt), "0"},
    {"key-file", TEXT, AT(network.key_file), ""},
    {"record-loss", TEXT, AT(record_loss), ""},
    {"drift-samples", WHOLE, AT(drift_samples), "1024"},
};
enum { ENTRIES = sizeof table / sizeof *table };

struct lossynet_named {
    struct lossynet_settings settings;
    size_t *bucket_elements;
    char *text[ENTRIES]; /* the value of each entry, as it was given */
};

static bool parse_real(const char *text, double *out) {
    char *end;
    *out = strtod(text, &end);
    return end != text && !*end && isfinite(*out);
}

static bool parse_whole(const char *text, uint64_t most, uint64_t *out) {
    char *end;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end && !errno && *out <= most;
}

/* Parses "X" or "X,Y": a text for each phase. Returns false if one is too long. */
static bool split_phases(const char *text, char phase[2][32]) {
    const size_t bytes = strcspn(text, ",");
    const char *second = text[bytes] ? text + bytes + 1 : text;
    if (bytes >= sizeof phase[0] || strlen(second) >= sizeof phase[1]) return false;
    snprintf(phase[LOSSYNET_GRADIENT], sizeof phase[0], "%.*s", (int)bytes, text);
    snprintf(phase[LOSSYNET_PARAMETER], sizeof phase[1], "%s", second);
    return true;
}

static bool parse_rates(const char *text, double rate[2]) {
    char phase[2][32];
    return split_phases(text, phase) && parse_real(phase[0], &rate[0]) &&
           parse_real(phase[1], &rate[1]);
}

static bool parse_rounds(const char *text, int rounds[2]) {
    char phase[2][32];
    if (!split_phases(text, phase)) return false;
    for (int p = 0; p < 2; p++) {
        uint64_t whole = 0;
        const bool measured = !strcmp(phase[p], "auto");
        if (!measured && !parse_whole(phase[p], INT32_MAX, &whole)) return false;
        rounds[p] = measured ? LOSSYNET_ROUNDS_MEASURED : (int)whole;
    }
    return true;
}

static bool parse_wire(const char *text, lossynet_wire_dtype *out) {
    for (int d = LOSSYNET_FLOAT32; d <= LOSSYNET_INT4; d++) {
        if (strcmp(text, ln_wire_dtype_name((uint64_t)d)) != 0) continue;
        *out = (lossynet_wire_dtype)d;
        return true;
    }
    return false;
}

/* Returns what was expected, or NULL if `text` is stored in `place`. */
static const char *store(struct lossynet_settings *settings, const struct entry *e,
                         const char *text) {
    void *place = (char *)settings + e->offset;
    uint64_t whole;
    double real;
    switch (e->kind) {
    case WHOLE:
        if (!parse_whole(text, INT32_MAX, &whole)) return "a whole number, at least 0";
        *(int *)place = (int)whole;
        return NULL;
    case ROUNDS:
        return parse_rounds(text, (int *)place) ? NULL
                                                : "auto or a whole number, or two with a comma";
    case SIZE:
        if (!parse_whole(text, SIZE_MAX, &whole)) return "a whole number, at least 0";
        *(size_t *)place = (size_t)whole;
        return NULL;
    case SEED:
        return parse_whole(text, UINT64_MAX, (uint64_t *)place) ? NULL : "a whole number";
    case REAL:
        return parse_real(text, (double *)place) ? NULL : "a number";
    case REALS:
        return parse_rates(text, (double *)place) ? NULL : "a number, or two with a comma";
    case FLAG:
        if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0) return "0 or 1";
        *(bool *)place = *text == '1';
        return NULL;
    case TEXT:
        *(const char **)place = *text ? text : NULL;
        return NULL;
    case WIRE:
        return parse_wire(text, (lossynet_wire_dtype *)place) ? NULL
                                                              : "float32, bf16, int8, int6 or int4";
    case ESTIMATOR:
        return lossynet_estimator_parse(text, (lossynet_estimator *)place)
                   ? NULL
                   : "mean, balanced, ht or zero";
    case LINK:
        return lossynet_link_parse(text, (lossynet_link_kind *)place) ? NULL
                                                                      : "auto, mpi, udp or verbs";
    case CLASS:
        return lossynet_traffic_class_parse(text, (int *)place)
                   ? NULL
                   : "default, le, cs0 to cs7, af11 to af43, va, ef or a DSCP from 0 to 63";
    case DEADLINE:
        settings->network.skip_late = strcmp(text, "off") != 0;
        *(double *)place = 0;
        if (!settings->network.skip_late || !strcmp(text, "auto")) return NULL;
        return parse_real(text, (double *)place) && *(double *)place > 0
                   ? NULL
                   : "auto, off or a number of seconds above 0";
    case SHARE:
        if (!parse_real(text, &real) || real < 0 || real > 1) return "a share from 0 to 1";
        *(bool *)place = real > 0;
        return NULL;
    case LEAD:
        *(bool *)place = !strcmp(text, "auto");
        return *(bool *)place || !strcmp(text, "off") ? NULL : "auto or off";
    case FREE:
        return parse_real(text, &real) && real >= 0 && real <= 100
                   ? NULL
                   : "a number of steps from 0 to 100";
    }
    return "another name";
}

static int find(const char *name) {
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(table[i].name, name) == 0) return i;
    return -1;
}

lossynet_status lossynet_named_set(struct lossynet_named *named, const char *name,
                                   const char *value) {
    const int i = find(name);
    if (i < 0) {
        ln_log("there is no setting '%s'", name);
        return LOSSYNET_INVALID;
    }
    char *text = strdup(value);
    if (!text) {
        ln_log("no memory for the setting %s", name);
        return LOSSYNET_NO_MEMORY;
    }
    struct lossynet_settings changed = named->settings;
    const char *expected = store(&changed, &table[i], text);
    if (expected) {
        ln_log("%s '%s': expected %s", name, value, expected);
        free(text);
        return LOSSYNET_INVALID;
    }
    named->settings = changed;
    free(named->text[i]);
    named->text[i] = text;
    return LOSSYNET_OK;
}

const char *lossynet_named_get(const struct lossynet_named *named, const char *name) {
    const int i = find(name);
    return i < 0 ? NULL : named->text[i];
}

const char *lossynet_named_name(int index) {
    return index >= 0 && index < ENTRIES ? table[index].name : NULL;
}

struct lossynet_named *lossynet_named_open(int buckets, const size_t *bucket_elements) {
    struct lossynet_named *named = calloc(1, sizeof *named);
    const size_t bytes = (buckets > 0 ? (size_t)buckets : 1) * sizeof(size_t);
    if (named) named->bucket_elements = malloc(bytes);
    if (!named || !named->bucket_elements) {
        ln_log("no memory for settings of %d buckets", buckets);
        lossynet_named_close(named);
        return NULL;
    }
    if (buckets > 0) memcpy(named->bucket_elements, bucket_elements, bytes);
    named->settings.buckets = buckets;
    named->settings.bucket_elements = named->bucket_elements;
    for (int i = 0; i < ENTRIES; i++) {
        if (!lossynet_named_set(named, table[i].name, table[i].initial)) continue;
        lossynet_named_close(named);
        return NULL;
    }
    return named;
}

const struct lossynet_settings *lossynet_named_settings(const struct lossynet_named *named) {
    return &named->settings;
}

void lossynet_named_close(struct lossynet_named *named) {
    if (!named) return;
    for (int i = 0; i < ENTRIES; i++) free(named->text[i]);
    free(named->bucket_elements);
    free(named);
}

size_t lossynet_struct_bytes(const char *name) {
    static const struct {
        const char *name;
        size_t bytes;
    } structs[] = {{"world", sizeof(struct lossynet_world)},
                   {"counters", sizeof(struct lossynet_counters)},
                   {"drift", sizeof(struct lossynet_drift)}};
    for (size_t i = 0; i < sizeof structs / sizeof *structs; i++)
        if (strcmp(structs[i].name, name) == 0) return structs[i].bytes;
    return 0;
}

void lossynet_messages_to(lossynet_log_function log, void *context) {
    ln_log_to(log, context);
}

/* view.c — see view.h. */
#include "llmc/membership/view.h"

#include <jansson.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "llmc/log/error.h"

enum { MOST_MEMBERS = 65536 };

int view_rank_of(const struct view *v, const char *uid) {
    for (int r = 0; r < v->members; r++)
        if (!strcmp(v->member[r].uid, uid)) return r;
    return -1;
}

static int view_allocate(int members, struct view *out) {
    *out = (struct view){0, 0, NULL, -1};
    out->member = calloc((size_t)members + 1, sizeof *out->member);
    if (!out->member)
        return log_out_of_memory("a view", (double)members * (double)sizeof *out->member);
    return 0;
}

int view_next(const struct view *present, const bool *missing, const struct member *joiner,
              int joiners, struct view *out) {
    if (view_allocate(present->members + joiners, out)) return -1;
    out->epoch = present->epoch + 1;
    for (int r = 0; r < present->members; r++)
        if (!missing || !missing[r]) out->member[out->members++] = present->member[r];
    for (int i = 0; i < joiners; i++) {
        out->member[out->members] = joiner[i];
        out->member[out->members++].joined = out->epoch;
    }
    return 0;
}

double view_patience(const struct view *v, const bool *missing, const bool *ended) {
    static const double TURN = 0.1, TURNS_MOST = 2, HALF = 0.5, MORE = 1.5; /* seconds */
    static const double UNSURE = 2;
    int gone = 0, dead = 0, before = 0;
    for (int r = 0; r < v->members; r++) {
        if (missing && missing[r])
            gone++, dead += ended[r];
        else if (r < v->self)
            before++;
    }
    const double turn = TURN * before < TURNS_MOST ? TURN * before : TURNS_MOST;
    if (missing && gone == 0) return turn + UNSURE;
    const int silent = gone - dead, living = v->members - dead;
    return turn + (2 * silent > living ? MORE : silent && 2 * silent == living ? HALF : 0);
}

int view_copy(const struct view *from, struct view *to) {
    if (view_allocate(from->members, to)) return -1;
    to->epoch = from->epoch;
    to->members = from->members;
    to->self = from->self;
    for (int r = 0; r < from->members; r++) to->member[r] = from->member[r];
    return 0;
}

void view_clear(struct view *v) {
    free(v->member);
    *v = (struct view){0, 0, NULL, -1};
}

/* ---- text ---- */

static json_t *member_json(const struct member *m) {
    json_t *json =
        json_pack("{s:s, s:s, s:i}", "address", m->address, "host", m->host, "pid", m->pid);
    if (m->process >= 0) json_object_set_new(json, "process", json_integer(m->process));
    return json;
}

static char *text_of(json_t *json) {
    char *text = json_dumps(json, JSON_COMPACT | JSON_PRESERVE_ORDER);
    json_decref(json);
    if (!text) log_out_of_memory("a view as JSON", 0);
    return text;
}

char *member_to_json(const struct member *m) {
    json_t *json = member_json(m);
    if (*m->proof) json_object_set_new(json, "proof", json_string(m->proof));
    return text_of(json);
}

char *view_to_json(const struct view *v) {
    json_t *members = json_array();
    for (int r = 0; r < v->members; r++) {
        json_t *one = member_json(&v->member[r]);
        json_object_set_new(one, "uid", json_string(v->member[r].uid));
        json_object_set_new(one, "joined", json_integer(v->member[r].joined));
        json_array_append_new(members, one);
    }
    return text_of(json_pack("{s:I, s:o}", "epoch", (json_int_t)v->epoch, "members", members));
}

/* Copies a string. Returns false if it is NULL, empty or too long. */
static bool take_text(const char *from, char *to, size_t bytes) {
    if (!from || !*from || strlen(from) >= bytes) return false;
    memcpy(to, from, strlen(from) + 1);
    return true;
}

static bool take_member(const json_t *json, const char *uid, struct member *out) {
    *out = (struct member){0};
    const json_t *pid = json_object_get(json, "pid");
    if (!json_is_integer(pid) || json_integer_value(pid) < 0 || json_integer_value(pid) > INT_MAX)
        return false;
    out->pid = (int)json_integer_value(pid);
    const json_t *process = json_object_get(json, "process");
    out->process = json_is_integer(process) ? (int)json_integer_value(process) : -1;
    const char *proof = json_string_value(json_object_get(json, "proof"));
    if (proof && !take_text(proof, out->proof, sizeof out->proof)) return false;
    return take_text(uid, out->uid, sizeof out->uid) &&
           take_text(json_string_value(json_object_get(json, "address")), out->address,
                     sizeof out->address) &&
           take_text(json_string_value(json_object_get(json, "host")), out->host, sizeof out->host);
}

bool member_from_json(const char *text, const char *uid, struct member *out) {
    json_t *json = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const bool valid = json && take_member(json, uid, out);
    json_decref(json);
    return valid;
}

static bool take_members(const json_t *list, int64_t epoch, struct view *out) {
    size_t rank;
    json_t *one;
    json_array_foreach(list, rank, one) {
        struct member *m = &out->member[rank];
        if (!take_member(one, json_string_value(json_object_get(one, "uid")), m)) return false;
        m->joined = json_integer_value(json_object_get(one, "joined"));
        if (m->joined < 1 || m->joined > epoch) return false;
        if (view_rank_of(out, m->uid) >= 0) return false; /* twice */
        out->members++;
    }
    return true;
}

bool view_from_json(const char *text, struct view *out) {
    *out = (struct view){0, 0, NULL, -1};
    json_t *json = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    const json_t *list = json_object_get(json, "members");
    const size_t members = json_array_size(list);
    bool valid =
        json_is_array(list) && members <= MOST_MEMBERS && !view_allocate((int)members, out);
    if (valid) {
        out->epoch = json_integer_value(json_object_get(json, "epoch"));
        valid = out->epoch > 0 && take_members(list, out->epoch, out);
    }
    json_decref(json);
    if (!valid) view_clear(out);
    return valid;
}

/* resume.c — writes, checks and finds trainer.json. See resume.h. */
#include "llmc/checkpoint/resume.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "llmc/checkpoint/checksum.h"
#include "llmc/log/error.h"

enum {
    FORMAT = 1,
    FLAGS = JSON_REAL_PRECISION(17) /* enough digits to identify a double exactly */
};

static const char own_checksum[] = "xxh128";

void resume_file_name(int rank, int ranks, char name[64]) {
    snprintf(name, 64, "optimizer-%05d-of-%05d.safetensors", rank + 1, ranks);
}

/* ---- writing ---------------------------------------------------------------------------- */

static json_t *describe_record(const struct run_metrics *r) {
    const struct step_metrics *s = &r->sum;
    return json_pack("{s:i, s:f, s:f, s:f, s:[f,f], s:[f,f], s:[f,f], s:o, s:o, s:o}", "steps",
                     r->steps, "tokens", s->tokens, "seconds", s->seconds, "communication_seconds",
                     s->communication_seconds, "expected", s->expected[0], s->expected[1],
                     "arrived", s->arrived[0], s->arrived[1], "resent", s->resent[0], s->resent[1],
                     "drift", jsonl_number(s->drift), "drift_expected",
                     jsonl_number(s->drift_expected), "drift_paper", jsonl_number(s->drift_paper));
}

json_t *resume_describe(const struct run_info *run, const struct resume_point *at) {
    const struct attention_choice *attention = run->be->attention_choice;
    struct timespec now;
    char sum[17];
    clock_gettime(CLOCK_REALTIME, &now);
    snprintf(sum, sizeof sum, "%016llx", (unsigned long long)run->data.checksum);
    return json_pack("{s:i, s:f, s:i, s:I, s:i, s:i, s:I, s:s, s:s, s:{s:i, s:i, s:I, s:I, s:s,"
                     " s:s*, s:s*}, s:o, s:o, s:i, s:{}}",
                     "format", FORMAT, "saved", (double)now.tv_sec + 1e-9 * (double)now.tv_nsec,
                     "step", at->step, "sequence", (json_int_t)at->sequence, "ranks", run->ranks,
                     "workers", run->workers, "parameters", (json_int_t)run->layout->count,
                     "backend", run->be->details, "link", run->link, "settings", "batch",
                     run->batch, "seq", run->seq, "packet_bytes", (json_int_t)run->packet_bytes,
                     "train_tokens", (json_int_t)run->data.tokens, "train_checksum", sum,
                     "rule_checksum", run->loss.rule, "trace_checksum", run->loss.trace, "options",
                     options_json(run->options, 0), "record", describe_record(&at->record),
                     "attention", attention ? attention->library : 0, "files");
}

int resume_list_file(json_t *list, const char *directory, const char *name) {
    char path[FILE_PATH_BYTES], checksum[CHECKSUM_TEXT_BYTES];
    uint64_t bytes;
    if (file_join(path, directory, name) || checksum_file(path, checksum, &bytes)) return -1;
    json_t *entry = json_pack("{s:I, s:s}", "bytes", (json_int_t)bytes, own_checksum, checksum);
    return json_object_set_new(list, name, entry) ? log_out_of_memory("the list of files", 0) : 0;
}

static int list_path(char path[FILE_PATH_BYTES], const char *directory, int rank, int ranks) {
    char name[64];
    snprintf(name, sizeof name, "files-%05d-of-%05d.json", rank + 1, ranks);
    return file_join(path, directory, name);
}

int resume_write_list(const json_t *list, const char *directory, int rank, int ranks) {
    char path[FILE_PATH_BYTES];
    if (list_path(path, directory, rank, ranks)) return -1;
    return file_write_json(path, list, JSON_COMPACT);
}

int resume_collect_lists(json_t *trainer, const char *directory, int ranks) {
    json_t *files = json_object_get(trainer, "files");
    for (int r = 0; r < ranks; r++) {
        char path[FILE_PATH_BYTES];
        struct file_map map;
        json_error_t error;
        if (list_path(path, directory, r, ranks) || file_map(path, &map)) return -1;
        json_t *list = json_loadb(map.data ? (const char *)map.data : "", map.bytes, 0, &error);
        file_unmap(&map);
        const bool taken = json_is_object(list) && !json_object_update(files, list);
        json_decref(list);
        if (!taken) return log_error("cannot read '%s', the list of a rank's files", path);
        if (unlink(path)) return log_error("cannot remove '%s': %s", path, strerror(errno));
    }
    return 0;
}

/* Checksum of the object without its own checksum, in a fixed text form. */
static int checksum_of(const json_t *trainer, char text[CHECKSUM_TEXT_BYTES]) {
    json_t *rest = json_copy((json_t *)trainer);
    json_object_del(rest, own_checksum);
    char *spelled = rest ? json_dumps(rest, JSON_COMPACT | JSON_SORT_KEYS | FLAGS) : NULL;
    json_decref(rest);
    if (!spelled) return -1;
    checksum_bytes(spelled, strlen(spelled), text);
    free(spelled);
    return 0;
}

int resume_write(json_t *trainer, const char *directory) {
    char path[FILE_PATH_BYTES], checksum[CHECKSUM_TEXT_BYTES];
    if (file_join(path, directory, "trainer.json")) return -1;
    const bool failed = checksum_of(trainer, checksum) ||
                        json_object_set_new(trainer, own_checksum, json_string(checksum));
    return file_write_json(path, failed ? NULL : trainer, JSON_INDENT(1) | FLAGS);
}

/* ---- reading ---------------------------------------------------------------------------- */

/* Whether every file exists and has the listed size. */
static int check_sizes(const char *directory, const char *path, const json_t *trainer) {
    const char *name;
    json_t *entry, *files = json_object_get(trainer, "files");
    json_object_foreach(files, name, entry) {
        char file[FILE_PATH_BYTES];
        struct stat status;
        long long expected = (long long)json_integer_value(json_object_get(entry, "bytes"));
        if (strchr(name, '/') || *name == '.')
            return log_error("'%s' names a file '%.60s' outside the directory", path, name);
        if (file_join(file, directory, name)) return -1;
        if (stat(file, &status))
            return log_error("'%s': %s, but trainer.json lists it: the checkpoint is incomplete",
                             file, strerror(errno));
        if (status.st_size != expected)
            return log_error(
                "'%s' has %lld bytes, trainer.json says %lld: the checkpoint is damaged", file,
                (long long)status.st_size, expected);
    }
    return json_object_size(files) ? 0 : log_error("'%s' lists no files", path);
}

static int64_t integer(const json_t *object, const char *key) {
    return (int64_t)json_integer_value(json_object_get(object, key));
}

static int check(const char *directory, const char *path, const json_t *trainer) {
    char checksum[CHECKSUM_TEXT_BYTES];
    const char *said = json_string_value(json_object_get(trainer, own_checksum));
    if (!json_is_object(trainer) || integer(trainer, "format") != FORMAT)
        return log_error("'%s' has format %lld, expected %d: written by another version?", path,
                         (long long)integer(trainer, "format"), FORMAT);
    if (checksum_of(trainer, checksum)) return log_error("cannot read '%s': out of memory", path);
    if (!said || strcmp(said, checksum) != 0)
        return log_error("'%s' is damaged: its checksum is %s, it says %.40s", path, checksum,
                         said ? said : "none");
    if (integer(trainer, "step") < 0 || integer(trainer, "step") > INT32_MAX ||
        integer(trainer, "sequence") < 0 || integer(trainer, "ranks") < 1 ||
        integer(trainer, "ranks") > 65535 || integer(trainer, "workers") < 1 ||
        integer(trainer, "workers") > 65535 ||
        integer(trainer, "workers") % integer(trainer, "ranks"))
        return log_error("'%s' has a step, a sequence, ranks or workers out of range", path);
    return check_sizes(directory, path, trainer);
}

static int read_trainer(const char *directory, json_t **out) {
    char path[FILE_PATH_BYTES];
    struct file_map map;
    json_error_t error;
    *out = NULL;
    if (file_join(path, directory, "trainer.json")) return -1;
    if (!file_is_directory(directory))
        return log_error("'%s' is no directory, expected a checkpoint to resume from", directory);
    if (access(path, F_OK) != 0)
        return log_error(
            "'%s' is no checkpoint of a training run: it has no trainer.json; expected "
            "a folder checkpoint-N of a run's --out (to train its model anew, give it as "
            "--model)",
            directory);
    if (file_map(path, &map)) return -1;
    json_t *trainer = json_loadb(map.data ? (const char *)map.data : "", map.bytes,
                                 JSON_REJECT_DUPLICATES, &error);
    int status = file_unmap(&map) ? -1
                 : trainer        ? check(directory, path, trainer)
                                  : log_error("'%s' line %d: %s", path, error.line, error.text);
    if (status)
        json_decref(trainer);
    else
        *out = trainer;
    return status;
}

int resume_verify(const char *directory, const json_t *saved, int rank, int ranks) {
    char path[FILE_PATH_BYTES], found[CHECKSUM_TEXT_BYTES];
    const char *name;
    json_t *entry, *read = NULL;
    int i = 0, status = 0;
    if (!saved) { /* of another program, if it lists no files */
        if (file_join(path, directory, "trainer.json")) return -1;
        if (access(path, F_OK)) return 0;
        saved = read = json_load_file(path, 0, NULL);
        if (!read)
            return log_error("'%s' is damaged, and says which model the run wrote: expected JSON; "
                             "to take the model as it is, remove trainer.json",
                             path);
    }
    json_object_foreach(json_object_get(saved, "files"), name, entry) {
        const char *said = json_string_value(json_object_get(entry, own_checksum));
        const bool of_model = !strncmp(name, "model", 5) || !strcmp(name, "config.json");
        if (read && (!of_model || strchr(name, '/') || !said)) continue;
        if (status || i++ % ranks != rank) continue;
        status = file_join(path, directory, name) || checksum_file(path, found, NULL) ? -1 : 0;
        if (!status && (!said || strcmp(said, found) != 0))
            status =
                log_error("'%s' is %s: its checksum is %s, trainer.json says %.40s; %s", path,
                          read ? "not what the run wrote" : "damaged", found, said ? said : "none",
                          read ? "if it was changed on purpose, remove trainer.json"
                               : "resume from an older checkpoint");
    }
    json_decref(read);
    return status;
}

static double real(const json_t *object, const char *key) { /* null: NaN */
    const json_t *value = json_object_get(object, key);
    return json_is_number(value) ? json_number_value(value) : NAN;
}

static double real_at(const json_t *object, const char *key, size_t i) {
    return json_number_value(json_array_get(json_object_get(object, key), i));
}

static void read_record(const json_t *r, struct run_metrics *out) {
    struct step_metrics *s = &out->sum;
    memset(out, 0, sizeof *out);
    out->steps = (int)integer(r, "steps");
    s->tokens = real(r, "tokens");
    s->seconds = real(r, "seconds");
    s->communication_seconds = real(r, "communication_seconds");
    s->drift = real(r, "drift");
    s->drift_expected = real(r, "drift_expected");
    s->drift_paper = real(r, "drift_paper");
    for (size_t phase = 0; phase < 2; phase++) {
        s->expected[phase] = real_at(r, "expected", phase);
        s->arrived[phase] = real_at(r, "arrived", phase);
        s->resent[phase] = real_at(r, "resent", phase);
    }
}

int resume_attention(const json_t *saved, const char *details) {
    const char *backend = json_string_value(json_object_get(saved, "backend"));
    if (!backend || strcmp(backend, details)) return -1;
    return (int)json_integer_value(json_object_get(saved, "attention"));
}

int resume_open(const char *directory, json_t **saved, struct resume_point *at) {
    if (read_trainer(directory, saved)) return -1;
    at->step = (int)integer(*saved, "step");
    at->sequence = (uint64_t)integer(*saved, "sequence");
    read_record(json_object_get(*saved, "record"), &at->record);
    return 0;
}

/* ---- finding ---------------------------------------------------------------------------- */

struct candidate {
    char path[FILE_PATH_BYTES];
    int64_t start, step;
};

static int older_first(const void *a, const void *b) {
    const struct candidate *x = a, *y = b;
    if (x->start != y->start) return x->start < y->start ? -1 : 1;
    return (x->step > y->step) - (x->step < y->step);
}

bool resume_is_checkpoint_name(const char *name) {
    int length = 0;
    sscanf(name, "checkpoint-%*[0-9]%n", &length);
    return length && !name[length];
}

int resume_checkpoint_path(const char *out, int step, char path[FILE_PATH_BYTES]) {
    char name[RESUME_NAME_BYTES];
    snprintf(name, sizeof name, "checkpoint-%08d", step);
    return file_join(path, out, name);
}

/* Finds the complete checkpoints under `out`, and counts the others that have a trainer.json. */
static size_t find(const char *out, struct candidate **found, size_t *damaged) {
    size_t count = 0;
    DIR *directory = opendir(out);
    *found = NULL;
    *damaged = 0;
    if (!directory) return 0;
    for (struct dirent *entry; (entry = readdir(directory));) {
        char path[FILE_PATH_BYTES], trainer[FILE_PATH_BYTES];
        json_t *saved;
        if (!resume_is_checkpoint_name(entry->d_name) || file_join(path, out, entry->d_name) ||
            file_join(trainer, path, "trainer.json") || access(trainer, F_OK) != 0)
            continue;
        if (read_trainer(path, &saved)) {
            ++*damaged;
            continue;
        }
        struct candidate *more = realloc(*found, (count + 1) * sizeof *more);
        if (more) {
            *found = more, more += count++;
            strcpy(more->path, path);
            more->start = integer(saved, "start"), more->step = integer(saved, "step");
        }
        json_decref(saved);
    }
    closedir(directory);
    if (count) qsort(*found, count, sizeof **found, older_first);
    return count;
}

/* Damaged checkpoints are not reported here. */
static size_t find_quietly(const char *out, struct candidate **found) {
    size_t damaged;
    const bool muted = log_muted;
    log_muted = true;
    const size_t count = find(out, found, &damaged);
    log_muted = muted;
    return count;
}

int resume_last_start(const char *out) {
    struct candidate *found;
    const size_t count = find_quietly(out, &found);
    const int last = count ? (int)found[count - 1].start : 0;
    free(found);
    return last;
}

size_t resume_list(const char *out, int step, char ***list) {
    struct candidate *found;
    size_t kept = 0, count = find_quietly(out, &found);
    *list = calloc(count + 1, sizeof **list);
    for (size_t i = 0; i < count && *list; i++)
        if (found[i].step <= step && ((*list)[kept] = strdup(found[i].path))) kept++;
    free(found);
    return kept;
}

int resume_newest(const struct options *o, char name[RESUME_NAME_BYTES]) {
    struct candidate *found;
    size_t damaged, count;
    *name = 0;
    if (!o->resume || strcmp(o->resume, "auto") != 0 || !o->out) return 0;
    count = find(o->out, &found, &damaged);
    if (count) snprintf(name, RESUME_NAME_BYTES, "%s", strrchr(found[count - 1].path, '/') + 1);
    free(found);
    if (!count && damaged) {
        log_error("--resume auto: no checkpoint under '%s' is whole, %zu are damaged (see "
                  "above); move them away to start a new run",
                  o->out, damaged);
        return 1;
    }
    if (!count && !o->quiet && !log_muted)
        printf("no checkpoint in %s yet: training starts at the first step\n", o->out);
    return 0;
}

int resume_choose(struct options *o, const char *newest) {
    static char chosen[FILE_PATH_BYTES];
    json_t *saved;
    if (!o->resume) return 0;
    if (o->eval || o->generate || o->dry_run)
        return log_wrong_usage(
            "--resume: expected without --eval, --generate and --dry-run; give them --model %s",
            o->resume);
    if (strcmp(o->resume, "auto") == 0) {
        if (!o->out)
            return log_wrong_usage(
                "--resume auto: expected --out DIR, whose newest checkpoint it takes");
        o->resume = *newest ? chosen : NULL;
        if (!o->resume) return 0;
        if (file_join(chosen, o->out, newest)) return 1;
        if (!file_is_directory(chosen)) {
            log_error("--resume auto: rank 0 goes on from '%s', which is not there on this rank: "
                      "expected a folder --out that all ranks share",
                      chosen);
            return 1;
        }
    }
    if (read_trainer(o->resume, &saved)) return 1;
    json_decref(saved);
    o->model = o->resume;
    return 0;
}

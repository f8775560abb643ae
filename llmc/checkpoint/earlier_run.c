/* earlier_run.c — see earlier_run.h. */
#include "llmc/checkpoint/earlier_run.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/checkpoint/hf_model.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/log/error.h"
#include "llmc/util/file.h"

/* Devices, pipes and empty files contain nothing that could be lost. */
static bool has_content(const char *path) {
    struct stat s;
    return !stat(path, &s) && S_ISREG(s.st_mode) && s.st_size > 0;
}

/* Every line of our logs begins like this. A killed run may leave only the beginning of a line. */
static bool is_log(const char *path) {
    static const char begin[] = "{\"event\":";
    char found[sizeof begin - 1];
    FILE *file = fopen(path, "re");
    size_t bytes = file ? fread(found, 1, sizeof found, file) : 0;
    if (file) fclose(file);
    return bytes > 0 && !memcmp(found, begin, bytes);
}

/* The file that shows that `out` holds a run: its last checkpoint, or its log. */
static bool find_run(const char *out, char name[NAME_MAX + 1]) {
    char log[FILE_PATH_BYTES];
    DIR *directory = opendir(out);
    *name = 0;
    if (!directory) return false;
    for (struct dirent *entry; (entry = readdir(directory));)
        if (resume_is_checkpoint_name(entry->d_name) && strcmp(entry->d_name, name) > 0)
            snprintf(name, NAME_MAX + 1, "%s", entry->d_name);
    closedir(directory);
    if (!*name && !file_join(log, out, "log.jsonl") && has_content(log))
        snprintf(name, NAME_MAX + 1, "log.jsonl");
    return *name;
}

/* Whether the run continues the run in --out. */
static bool goes_on(const struct options *o) {
    if (!o->resume) return false;
    if (!strcmp(o->resume, "auto")) return true;
    char *checkpoint = realpath(o->resume, NULL), *out = realpath(o->out, NULL);
    char *slash = checkpoint ? strrchr(checkpoint, '/') : NULL;
    const size_t parent = slash ? (size_t)(slash - checkpoint) : 0;
    const bool inside = slash && out && strlen(out) == parent && !strncmp(out, checkpoint, parent);
    free(checkpoint);
    free(out);
    return inside;
}

static int check_log(const struct options *o) {
    char path[FILE_PATH_BYTES];
    if (!o->log && (!o->out || file_join(path, o->out, "log.jsonl"))) return 0;
    const char *log = o->log ? o->log : path;
    if (!has_content(log)) return 0;
    if (!o->overwrite && (o->eval || !o->resume))
        return log_error("the log '%s' exists already: give another with --log FILE, or add "
                         "--overwrite to replace it",
                         log);
    if (!is_log(log))
        return log_error("--log: '%s' is no log of this program, which %s: give another FILE", log,
                         o->overwrite ? "--overwrite could replace"
                                      : "a resumed run could go on with");
    return 0;
}

/* What is in the way of the last checkpoint would cost the whole run. An older checkpoint is replaced. */
static int check_last_place(const struct options *o) {
    char last[FILE_PATH_BYTES], trainer[FILE_PATH_BYTES];
    if (resume_checkpoint_path(o->out, o->steps, last) || file_join(trainer, last, "trainer.json"))
        return -1;
    return access(trainer, F_OK) ? hf_model_check_place(last) : 0;
}

int earlier_run_check(const struct options *o) {
    char name[NAME_MAX + 1];
    if (o->overwrite && o->resume && !strcmp(o->resume, "auto"))
        return log_wrong_usage(
            "--overwrite: expected without --resume auto, which goes on with the run in --out");
    if (o->generate || o->dry_run || o->preflight) return 0;
    if (o->out && !o->eval && !o->overwrite && !goes_on(o) && find_run(o->out, name)) {
        log_error("--out: '%s' holds an earlier run (%s): add --resume auto to go on with it, or "
                  "--overwrite to replace it",
                  o->out, name);
        return 1;
    }
    if (o->out && !o->eval && check_last_place(o)) return 1;
    return check_log(o) ? 1 : 0;
}

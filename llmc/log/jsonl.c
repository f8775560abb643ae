/* jsonl.c — see jsonl.h. */
#include "llmc/log/jsonl.h"
#include "llmc/util/file.h"
#include "llmc/log/error.h"
#include "llmc/log/terminal.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

double log_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

json_t *jsonl_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *jsonl_float(float value) {
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)value);
    return jsonl_number(strtod(text, NULL));
}

/* Nine significant digits identify every float32 exactly. */
#define FORM (JSON_COMPACT | JSON_REAL_PRECISION(9))

struct jsonl {
    int file;
    bool failed;
    int last;       /* step; -1: none */
    int gap, after; /* steps gap ... after - 1 have no line; after 0: no gap */
    char path[];    /* for messages */
};

/* Which run a log must be of to be continued: one that began at this checkpoint, or that saved it. */
struct origin {
    const char *checkpoint; /* NULL: any run */
    char *options;          /* of the run that saved it, as the log has them; NULL: not known */
    bool found, other;      /* a line of such a run, of another one */
};

/* Whether a line of an earlier part of the run is still valid when `step` steps are done. Sets
 * log->last to the step of the line, and notes a gap before it. A log may begin where the run was resumed. */
static bool holds(const char *line, size_t bytes, int step, struct jsonl *log,
                  struct origin *origin) {
    json_t *event = json_loadb(line, bytes, 0, NULL);
    const char *kind = json_string_value(json_object_get(event, "event"));
    json_int_t at = json_integer_value(json_object_get(event, "step"));
    if (kind && !strcmp(kind, "run") && origin->options) {
        const char *from =
            json_string_value(json_object_get(json_object_get(event, "options"), "resume"));
        const bool found = memmem(line, bytes, origin->options, strlen(origin->options)) ||
                           (from && origin->checkpoint && !strcmp(from, origin->checkpoint));
        *(found ? &origin->found : &origin->other) = true;
    }
    bool yes = kind && strcmp(kind, "end") != 0 && (strcmp(kind, "step") ? at <= step : at < step);
    if (yes && !strcmp(kind, "resume") && log->last < 0) log->last = (int)at - 1;
    if (yes && !strcmp(kind, "step") && at > log->last) {
        if (at > log->last + 1 && !log->after) log->gap = log->last + 1, log->after = (int)at;
        log->last = (int)at;
    }
    json_decref(event);
    return yes;
}

static bool is_at(const char *path, const struct stat *file) {
    struct stat named;
    return !stat(path, &named) && named.st_ino == file->st_ino && named.st_dev == file->st_dev;
}

/* Writes the lines of `map` that are still valid to a file. *prefix: the bytes before the first line
 * that is not. */
static int copy_valid(const struct file_map *map, int step, int file, const char *path,
                      size_t *prefix, struct jsonl *log, struct origin *origin) {
    const char *start = (const char *)map->data, *line = start, *end = line + map->bytes;
    bool all = true;
    int status = 0;
    *prefix = 0;
    while (line < end) { /* the last line of a killed run may be incomplete */
        const char *newline = (const char *)memchr(line, '\n', (size_t)(end - line));
        if (!newline) break;
        const size_t bytes = (size_t)(newline + 1 - line);
        const bool valid = holds(line, bytes - 1, step, log, origin);
        all &= valid;
        if (all) *prefix += bytes;
        if (valid && !status && file >= 0) status = file_write(file, line, bytes, path);
        line += bytes;
    }
    return status;
}

/* Writes the lines that are still valid to a new file, which replaces the old one, so that nobody
 * else writes to it. With --meet a rank 0 may be stopped in here, and another one may have replaced
 * the log when it goes on. Then this one keeps a file that has no name any more. On a full disk the
 * old file stays, and is cut. Returns the file, or -1 after reporting. */
static int cut_back(const char *path, int step, struct jsonl *log, struct origin *origin) {
    char partial[FILE_PATH_BYTES];
    struct file_map map;
    struct stat old, made;
    size_t prefix;
    if (snprintf(partial, sizeof partial, "%s.partial", path) >= (int)sizeof partial)
        return log_error("%.100s...: the path is too long", path);
    if (stat(path, &old) || file_map(path, &map)) return -1;
    unlink(partial); /* of one that was stopped or killed */
    int file = open(partial, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    int status = file < 0 || fstat(file, &made)
                     ? log_error("cannot create '%s': %s", partial, strerror(errno))
                     : 0;
    if (copy_valid(&map, step, file, partial, &prefix, log, origin)) status = -1;
    if (file_unmap(&map)) status = -1;
    if (origin->other && !origin->found) {
        if (file >= 0) close(file), unlink(partial);
        return log_error("%s: another run than that of '%s' wrote it, and its lines would be lost: "
                         "expected that run's log, or a new file (--log)",
                         path, origin->checkpoint);
    }
    if (!status && fsync(file))
        status = log_error("cannot write '%s' to disk: %s", partial, strerror(errno));
    if (!status && is_at(path, &old) && is_at(partial, &made) && rename(partial, path))
        status = log_error("cannot rename '%s' to '%s': %s", partial, path, strerror(errno));
    if (!status) return file;
    if (file >= 0) close(file), unlink(partial);
    file = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)prefix))
        log_error("%s: cannot write the log: %s", path, strerror(errno));
    return file;
}

static int open_log(const char *path, int step, struct origin *origin, struct jsonl **out) {
    struct jsonl *log = calloc(1, sizeof *log + strlen(path) + 1);
    *out = NULL;
    if (!log) return log_error("%s: out of memory for the log", path);
    strcpy(log->path, path);
    log->last = -1;
    if (step && file_is_regular(path)) {
        char *target = realpath(path, NULL); /* a link stays, and what it names is replaced */
        log->file = cut_back(target ? target : path, step, log, origin);
        free(target);
    } else {
        log->file =
            open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (step ? 0 : O_TRUNC), 0666);
        if (log->file < 0) log_error("%s: cannot write the log: %s", path, strerror(errno));
    }
    if (log->file < 0) {
        free(log);
        return -1;
    }
    *out = log;
    return 0;
}

int jsonl_open(const char *path, int step, struct jsonl **out) {
    return open_log(path, step, &(struct origin){0}, out);
}

int jsonl_open_of_run(const char *path, const char *out_directory, int rank, int step,
                      const char *checkpoint, const json_t *saved, struct jsonl **out) {
    char place[FILE_PATH_BYTES];
    if (rank > 0) return 0;
    if ((path || out_directory) && !json_true()) /* dev/bare/jansson.h has no values */
        return log_error("this program was built without Jansson (BARE=1) and writes no log and no "
                         "checkpoint: leave out --log and --out, or build it where "
                         "libjansson-dev and libxxhash-dev are installed");
    if (out_directory && file_make_directory(out_directory)) return -1;
    if (!path && !out_directory) return 0;
    if (!path && file_join(place, out_directory, "log.jsonl")) return -1;
    struct origin origin = {.checkpoint = checkpoint,
                            .options = json_dumps(json_object_get(saved, "options"), FORM)};
    const int status = open_log(path ? path : place, step, &origin, out);
    free(origin.options);
    return status;
}

/* Writes the whole line, or nothing. Returns 0, or -1 with errno set. */
static int append(int file, const char *line, size_t bytes) {
    struct stat before;
    bool regular = !fstat(file, &before) && S_ISREG(before.st_mode);
    ssize_t written = write(file, line, bytes);
    if (written == (ssize_t)bytes) return 0;
    int error = written < 0 ? errno : ENOSPC;
    if (regular && written > 0 && ftruncate(file, before.st_size)) error = errno;
    errno = error;
    return -1;
}

int jsonl_write(struct jsonl *log, json_t *event) {
    char *text = log && event ? json_dumps(event, FORM) : NULL;
    json_decref(event);
    if (!log) return 0;
    if (!text) errno = ENOMEM;
    size_t bytes = text ? strlen(text) : 0;
    if (text) text[bytes] = '\n'; /* replaces the terminating zero */
    int status = text ? append(log->file, text, bytes + 1) : -1;
    if (status && !log->failed) {
        log->failed = true;
        log_error("%s: cannot write the log: %s; lines are missing from here on while it cannot",
                  log->path, log_reason());
    }
    free(text);
    return status;
}

int jsonl_last_step(const struct jsonl *log) {
    return log ? log->last : -1;
}

void jsonl_report_gap(const struct jsonl *log, int step) {
    if (!log || log->last < 0) return;
    const int first = log->after ? log->gap : log->last + 1;
    const int last = (log->after ? log->after : step) - 1;
    if (first <= last)
        log_error("the log '%s' has no lines of steps %d to %d, which the run has done: they are "
                  "missing from reports and pictures",
                  log->path, first, last);
}

void jsonl_close(struct jsonl *log) {
    if (!log) return;
    close(log->file);
    free(log);
}

/* ---- the terminal ----------------------------------------------------------------------- */

void progress_begin(struct progress *p, int first, int total, bool on, bool bar) {
    memset(p, 0, sizeof *p);
    p->first = p->printed_at = first;
    p->on = on;
    p->bar = on && bar;
    p->total = total;
    p->start = p->last = log_seconds();
}

static void clear_bar(const struct progress *p) {
    if (p->bar) terminal_redraw(stdout, "");
}

/* A bar as wide as the terminal leaves, or only numbers where that is too little. */
static void draw_bar(struct progress *p, int done, double now) {
    enum { MOST = 40, LEAST = 4 };
    int made = done - p->first;
    double left = made ? (now - p->start) / made * (p->total - done) : 0;
    char numbers[64], line[2 * MOST + sizeof numbers] = "", bar[MOST + 1] = "";
    const int columns = terminal_columns(stdout) - 1, percent = (int)(100.0 * done / p->total);
    const int used = snprintf(numbers, sizeof numbers, "%3d%%  %.0f:%02d left", percent,
                              floor(left / 60), (int)fmod(left, 60));
    int width = columns - used - 3; /* brackets and a space */
    if (width > MOST) width = MOST;
    for (int i = 0; i < width; i++) bar[i] = i < (int)((double)done / p->total * width) ? '#' : '.';
    if (width >= LEAST)
        snprintf(line, sizeof line, "[%s] %s", bar, numbers);
    else if (columns >= used)
        snprintf(line, sizeof line, "%s", numbers);
    else if (columns >= 4)
        snprintf(line, sizeof line, "%3d%%", percent);
    terminal_redraw(stdout, line);
    p->last = now;
}

void progress_step(struct progress *p, int done, const char *line) {
    if (!p->on) return;
    double now = log_seconds();
    bool print = done == p->first + 1 || done == p->total ||
                 (long long)done * 20 / p->total > (long long)p->printed_at * 20 / p->total;
    if (print) {
        clear_bar(p);
        puts(line);
        fflush(stdout);
        p->printed_at = done;
    }
    if (p->bar && (print || now - p->last > 0.1)) draw_bar(p, done, now);
}

void progress_message(struct progress *p, const char *line) {
    if (!p->on) return;
    clear_bar(p);
    puts(line);
    fflush(stdout);
}

void progress_end(struct progress *p) {
    clear_bar(p);
}

/* runlog.c — see runlog.h. */
#include "llmc/runlog.h"
#include "llmc/report.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

double runlog_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

json_t *runlog_number(double value) {
    return isfinite(value) ? json_real(value) : json_null();
}

json_t *runlog_float(float value) {
    char text[32];
    snprintf(text, sizeof text, "%.7g", (double)value);
    return runlog_number(strtod(text, NULL));
}

struct runlog {
    FILE *file;
    bool failed;
    char path[]; /* for messages */
};

int runlog_open(const char *path, struct runlog **out) {
    struct runlog *log = (struct runlog *)calloc(1, sizeof *log + strlen(path) + 1);
    *out = NULL;
    if (!log) return report("%s: out of memory for the log", path);
    strcpy(log->path, path);
    log->file = fopen(path, "w");
    if (!log->file) {
        report("%s: cannot write the log: %s", path, strerror(errno));
        free(log);
        return -1;
    }
    *out = log;
    return 0;
}

int runlog_write(struct runlog *log, json_t *event) {
    int status = 0;
    if (log && !log->failed) {
        /* Nine significant digits give back every float32 exactly. */
        bool ok = event && !json_dumpf(event, log->file, JSON_COMPACT | JSON_REAL_PRECISION(9)) &&
                  fputc('\n', log->file) != EOF && !fflush(log->file);
        if (!ok) {
            log->failed = true;
            status = report("%s: cannot write the log: %s", log->path, strerror(errno));
        }
    }
    json_decref(event);
    return status;
}

int runlog_close(struct runlog *log) {
    if (!log) return 0;
    int status = log->failed ? -1 : 0;
    if (fclose(log->file) && !log->failed) {
        status = report("%s: cannot write the log: %s", log->path, strerror(errno));
    }
    free(log);
    return status;
}

/* ---- the terminal ----------------------------------------------------------------------- */

void progress_begin(struct progress *p, int total, bool on) {
    memset(p, 0, sizeof *p);
    p->on = on;
    p->terminal = on && isatty(STDOUT_FILENO);
    p->total = total;
    p->start = p->last = runlog_seconds();
}

static void clear_bar(const struct progress *p) {
    if (p->terminal) fputs("\r\033[K", stdout);
}

static void draw_bar(struct progress *p, int done, double now) {
    enum { WIDTH = 40 };
    double left = done ? (now - p->start) / done * (p->total - done) : 0;
    int filled = (int)((double)done / p->total * WIDTH);
    char bar[WIDTH + 1];
    for (int i = 0; i < WIDTH; i++) bar[i] = i < filled ? '#' : '.';
    bar[WIDTH] = 0;
    printf("\r\033[K[%s] %3d%%  %d:%02d left", bar, (int)(100.0 * done / p->total), (int)left / 60,
           (int)left % 60);
    fflush(stdout);
    p->last = now;
}

void progress_step(struct progress *p, int done, const char *line) {
    if (!p->on) return;
    double now = runlog_seconds();
    bool print = done == 1 || done == p->total ||
                 (long long)done * 20 / p->total > (long long)p->printed_at * 20 / p->total;
    if (print) {
        clear_bar(p);
        puts(line);
        fflush(stdout);
        p->printed_at = done;
    }
    if (p->terminal && (print || now - p->last > 0.1)) draw_bar(p, done, now);
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

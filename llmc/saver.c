/* saver.c — see saver.h.
 *
 * A save passes through these states, on every rank:
 *
 *     IDLE --begin--> READY --write--> WRITING --thread--> WRITTEN --all are--> COMMITTING --> IDLE
 *                                         '-----> FAILED --nobody is writing---- abandoned --> IDLE
 *
 * COMMITTING is rank 0's alone. The other ranks become idle when rank 0 has counted the save as
 * finished. Who decides what is decided from what all ranks told in one gather, so all decide
 * alike.
 */
#include "llmc/saver.h"

#include <errno.h>
#include <glob.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/checkpoint.h"
#include "llmc/checksum.h"
#include "llmc/report.h"

enum state { IDLE, READY, WRITING, WRITTEN, FAILED, COMMITTING };

struct note { /* what a rank tells the others */
    int32_t state, stop;
    uint32_t finished; /* rank 0: saves that were concluded, well or not */
    char checksum[CHECKSUM_TEXT_BYTES + 3];
    uint64_t bytes; /* of its file */
};

struct saver {
    struct saver_settings settings;
    const struct resume_run *run; /* settings.run */
    struct note *mine, *all;      /* [local], [workers]: a rank's first worker speaks */
    uint32_t started, succeeded;
    char directory[FILE_PATH_BYTES];
    struct snapshot snapshot;
    float *model; /* [P], rank 0: the copy */
    json_t *trainer;
    char **kept; /* rank 0: complete checkpoints of this run, oldest first */
    size_t kept_count;

    pthread_t thread;
    bool thread_runs; /* is to be joined */
    pthread_mutex_t lock;
    struct note note; /* under the lock while the thread runs */
};

/* ---- signals ---------------------------------------------------------------------------- */

static volatile sig_atomic_t signal_seen;

static void on_signal(int number) {
    signal_seen = number;
}

/* Ctrl-C: the first saves, a later one ends at once (`timeout -s INT` sends two in one moment). */
static void on_interrupt(int number) {
    static volatile time_t first;
    if (!signal_seen) first = time(NULL);
    if (time(NULL) > first + 1) {
        signal(number, SIG_DFL);
        raise(number);
    }
    signal_seen = number;
}

static void handle_signals(bool on) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on ? on_signal : SIG_DFL;
    action.sa_flags = SA_RESTART;
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    struct sigaction before; /* where it is ignored (nohup, a sweep), it stays so */
    if (on) action.sa_handler = on_interrupt;
    if (!sigaction(SIGINT, NULL, &before) && before.sa_handler != SIG_IGN)
        sigaction(SIGINT, &action, NULL);
}

/* ---- the thread ------------------------------------------------------------------------- */

/* Tests stretch a save, to see what is possible in the middle of it. */
static void pause_for_tests(void) {
    const char *text = getenv("TRAIN_LLAMA2_TEST_SAVE_PAUSE_MS");
    if (text) usleep((useconds_t)atoi(text) * 1000);
}

static void set_state(struct saver *s, enum state state) {
    pthread_mutex_lock(&s->lock);
    s->note.state = state;
    pthread_mutex_unlock(&s->lock);
}

/* The tokenizer to copy: as the trainer has it, or that of the model it began with, or, when that
 * was a checkpoint of ours which is gone by now, of the newest. NULL: there is none. */
static const char *find_tokenizer(const struct saver *s, char path[FILE_PATH_BYTES]) {
    static const char name[] = "tokenizer.model";
    const char *last = saver_last(s);
    if (s->settings.tokenizer) return s->settings.tokenizer;
    if (!file_join(path, s->run->facts.options->model, name) && !access(path, R_OK)) return path;
    return *last && !file_join(path, last, name) && !access(path, R_OK) ? path : NULL;
}

static int write_model(struct saver *s, const char *partial) {
    char path[FILE_PATH_BYTES];
    const struct layout *layout = s->run->facts.layout;
    size_t count;
    struct named_tensor *tensors = layout_tensor_list(layout, s->model, &count);
    if (!tensors) return -1;
    int status =
        checkpoint_write_model(partial, &layout->config, tensors, count, find_tokenizer(s, path));
    free(tensors);
    return status;
}

static int describe_model_files(struct saver *s, const char *partial) {
    static const char *const names[] = {"model.safetensors", "tokenizer.model", "config.json"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[FILE_PATH_BYTES], checksum[CHECKSUM_TEXT_BYTES];
        uint64_t bytes;
        if (file_join(path, partial, names[i])) return -1;
        if (!strcmp(names[i], "tokenizer.model") && access(path, F_OK)) continue;
        if (checksum_file(path, checksum, &bytes)) return -1;
        resume_add_file(s->trainer, names[i], bytes, checksum);
    }
    return 0;
}

/* This rank's part. */
static void *write_part(void *argument) {
    struct saver *s = (struct saver *)argument;
    char partial[FILE_PATH_BYTES], path[FILE_PATH_BYTES], name[64];
    char checksum[CHECKSUM_TEXT_BYTES];
    uint64_t bytes = 0;
    resume_file_name(s->run->facts.rank, s->run->facts.ranks, name);
    pause_for_tests();
    int status = checkpoint_partial(s->directory, partial) || file_join(path, partial, name) ||
                 snapshot_write(&s->snapshot, path) || checksum_file(path, checksum, &bytes);
    if (!status && s->run->facts.rank == 0) {
        pause_for_tests();
        status = write_model(s, partial) || describe_model_files(s, partial);
    }
    pthread_mutex_lock(&s->lock);
    if (!status) memcpy(s->note.checksum, checksum, sizeof checksum);
    s->note.bytes = bytes;
    s->note.state = status ? FAILED : WRITTEN;
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void remember(struct saver *s) {
    char **more = (char **)realloc(s->kept, (s->kept_count + 1) * sizeof *more);
    if (more) s->kept = more;
    char *copy = more ? strdup(s->directory) : NULL;
    if (!copy) return; /* it is kept for ever */
    s->kept[s->kept_count++] = copy;
}

/* Checkpoints beyond the newest `keep` go. Under another name first: half a checkpoint must not be
 * found under the name of a whole one. */
static void prune(struct saver *s) {
    const size_t keep = (size_t)s->run->facts.options->keep;
    while (keep && s->kept_count > keep) {
        char partial[FILE_PATH_BYTES], *oldest = s->kept[0];
        if (checkpoint_partial(oldest, partial) == 0) {
            checkpoint_remove(partial);
            if (rename(oldest, partial) == 0) {
                pause_for_tests();
                checkpoint_remove(partial);
            } else if (errno != ENOENT) {
                report("cannot remove the old checkpoint '%s': %s", oldest, strerror(errno));
            }
        }
        free(oldest);
        memmove(s->kept, s->kept + 1, --s->kept_count * sizeof *s->kept);
    }
}

/* Rank 0, when all parts are there: the list of files comes last, and then the name. */
static void *commit(void *argument) {
    struct saver *s = (struct saver *)argument;
    char partial[FILE_PATH_BYTES];
    pause_for_tests();
    int status = checkpoint_partial(s->directory, partial) || resume_write(s->trainer, partial);
    pause_for_tests();
    if (!status) status = checkpoint_commit(s->directory);
    pause_for_tests();
    if (status) {
        checkpoint_abandon(s->directory);
    } else {
        remember(s);
        prune(s);
    }
    pthread_mutex_lock(&s->lock);
    s->note.state = IDLE;
    s->note.finished++;
    s->succeeded += !status;
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void join(struct saver *s) {
    if (s->thread_runs) pthread_join(s->thread, NULL);
    s->thread_runs = false;
}

/* Signals are for the main thread, which is not to be interrupted for long. */
static void start(struct saver *s, enum state state, void *(*work)(void *)) {
    sigset_t all, before;
    join(s);
    s->note.state = state;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    s->thread_runs = pthread_create(&s->thread, NULL, work, s) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!s->thread_runs) work(s); /* without threads training waits */
}

/* ---- ranks together --------------------------------------------------------------------- */

static const struct note *note_of(const struct saver *s, int rank) {
    return &s->all[rank * s->run->facts.local];
}

/* Everybody's notes. */
static int hear(struct saver *s) {
    pthread_mutex_lock(&s->lock);
    s->mine[0] = s->note;
    pthread_mutex_unlock(&s->lock);
    s->mine[0].stop = signal_seen;
    if (s->run->facts.ranks > 1)
        return s->settings.gather(s->settings.gather_context, s->mine, s->all, sizeof *s->mine);
    s->all[0] = s->mine[0];
    return 0;
}

static int count(const struct saver *s, enum state state) {
    int ranks = 0;
    for (int r = 0; r < s->run->facts.ranks; r++) ranks += note_of(s, r)->state == (int32_t)state;
    return ranks;
}

static void abandon(struct saver *s) {
    checkpoint_abandon(s->directory);
    s->note.state = IDLE;
    s->note.finished++;
}

/* What follows from the notes just heard. */
static void act(struct saver *s) {
    const struct resume_run *run = s->run;
    if (note_of(s, 0)->finished == s->started) { /* also after a failure on another rank */
        if (s->note.state != IDLE) join(s), s->note.state = IDLE;
        return;
    }
    if (run->facts.rank > 0) return;
    if (count(s, WRITTEN) == run->facts.ranks) {
        for (int r = 0; r < run->facts.ranks; r++) {
            char name[64];
            resume_file_name(r, run->facts.ranks, name);
            resume_add_file(s->trainer, name, note_of(s, r)->bytes, note_of(s, r)->checksum);
        }
        start(s, COMMITTING, commit);
    } else if (count(s, FAILED) && !count(s, WRITING)) {
        join(s);
        abandon(s);
    }
}

static int poll_ranks(struct saver *s, bool *stop) {
    if (hear(s)) return -1;
    *stop = false;
    for (int r = 0; r < s->run->facts.ranks; r++) *stop |= note_of(s, r)->stop != 0;
    act(s);
    return 0;
}

/* By what all heard, so that every rank polls equally often. */
int saver_finish(struct saver *s) {
    for (bool stop; s;) {
        if (poll_ranks(s, &stop)) return -1;
        if (note_of(s, 0)->finished == s->started) return 0;
        usleep(1000);
    }
    return 0;
}

/* ---- a save ----------------------------------------------------------------------------- */

/* *go: there is room for a checkpoint of this step; it was reported if not. */
static int begin(struct saver *s, int step, bool *go) {
    const char *out = s->run->facts.options->out;
    if (saver_finish(s)) return -1;
    join(s);
    s->started++;
    s->note.state = READY;
    if (snprintf(s->directory, sizeof s->directory, "%s/checkpoint-%08d", out, step) >=
        (int)sizeof s->directory) {
        report("%s: the path is too long", out);
        s->note.state = FAILED;
    } else if (s->run->facts.rank == 0 && checkpoint_begin(s->directory)) {
        s->note.state = FAILED;
    }
    if (hear(s)) return -1;
    *go = count(s, FAILED) == 0;
    if (!*go && s->run->facts.rank == 0) {
        s->note.finished++;
        s->note.state = IDLE;
    }
    return 0;
}

static int copy_model(struct saver *s, const float *model) {
    const size_t bytes = s->run->facts.layout->count * sizeof *model;
    if (!s->model) s->model = (float *)snapshot_block(bytes);
    if (!s->model)
        return report_out_of_memory("the copy of the model that a checkpoint is written from",
                                    (double)bytes);
    s->run->download(s->model, model, bytes);
    return 0;
}

static void copy_and_write(struct saver *s, const struct resume_point *at, const float *model) {
    json_decref(s->trainer);
    s->trainer = resume_describe(s->run, at);
    int failed = s->trainer ? resume_snapshot(s->run, &s->snapshot)
                            : report("cannot save a checkpoint: out of memory");
    if (!failed && s->run->facts.rank == 0) failed = copy_model(s, model);
    if (failed)
        set_state(s, FAILED);
    else
        start(s, WRITING, write_part);
}

int saver_poll(struct saver *s, int step, bool *due, bool *stop) {
    *due = false;
    if (!s) return 0;
    const struct options *o = s->run->facts.options;
    if (poll_ranks(s, stop)) return -1;
    *due = *stop || step == o->steps || (o->save_every && step % o->save_every == 0);
    return 0;
}

int saver_save(struct saver *s, const struct resume_point *at) {
    const float *model;
    bool go;
    if (begin(s, at->step, &go)) return -1;
    if (!go) return 0;
    if (s->settings.model(s->settings.model_context, &model)) return -1;
    copy_and_write(s, at, model);
    return 0;
}

/* ---- open and close --------------------------------------------------------------------- */

/* What killed runs left half-done. */
static void remove_partial(const char *out) {
    char pattern[FILE_PATH_BYTES];
    glob_t found;
    if (file_join(pattern, out, "checkpoint-[0-9]*.partial")) return;
    if (glob(pattern, 0, NULL, &found) == 0)
        for (size_t i = 0; i < found.gl_pathc; i++) checkpoint_remove(found.gl_pathv[i]);
    globfree(&found);
}

static bool is_same(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* The run's checkpoints so far, if the one it is resumed from is one of them: a run that is resumed
 * into another directory leaves alone what is there. */
static void recall(struct saver *s, int step) {
    bool found = false;
    s->kept_count = resume_list(s->run->facts.options->out, step, &s->kept);
    for (size_t i = 0; i < s->kept_count; i++)
        found |= is_same(s->kept[i], s->run->facts.options->resume);
    for (size_t i = 0; !found && i < s->kept_count; i++) free(s->kept[i]);
    if (!found) s->kept_count = 0;
}

int saver_open(const struct saver_settings *settings, int step, struct saver **out) {
    const struct resume_run *run = settings->run;
    *out = NULL;
    struct saver *s = (struct saver *)calloc(1, sizeof *s);
    if (!s) return report_out_of_memory("the writer of checkpoints", 0);
    s->settings = *settings;
    s->run = run;
    pthread_mutex_init(&s->lock, NULL);
    s->mine = (struct note *)calloc((size_t)run->facts.local, sizeof *s->mine);
    s->all = (struct note *)calloc((size_t)run->facts.workers, sizeof *s->all);
    if (!s->mine || !s->all) {
        saver_close(s);
        return report_out_of_memory("the writer of checkpoints", 0);
    }
    if (run->facts.rank == 0) remove_partial(run->facts.options->out);
    if (run->facts.rank == 0 && run->facts.options->resume) recall(s, step);
    signal_seen = 0;
    handle_signals(true);
    *out = s;
    return 0;
}

void saver_close(struct saver *s) {
    if (!s) return;
    handle_signals(false);
    join(s);
    if (s->run->facts.rank == 0 && s->note.state != IDLE) checkpoint_abandon(s->directory);
    for (size_t i = 0; i < s->kept_count; i++) free(s->kept[i]);
    free(s->kept);
    json_decref(s->trainer);
    snapshot_release(&s->snapshot);
    free(s->model);
    free(s->mine);
    free(s->all);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

const char *saver_last(const struct saver *s) {
    return s && s->kept_count && file_is_directory(s->kept[s->kept_count - 1])
               ? s->kept[s->kept_count - 1]
               : "";
}

bool saver_has_failed(const struct saver *s) {
    return s && s->started && (!s->succeeded || !*saver_last(s));
}

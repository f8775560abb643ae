/* async_writer.c — see async_writer.h.
 *
 * A save passes through these states, on every rank:
 *
 *     IDLE --begin--> READY --write--> WRITING --thread--> WRITTEN --all are--> COMMITTING --> IDLE
 *                                         '-----> FAILED --nobody is writing---- abandoned --> IDLE
 *
 * Only rank 0 is ever COMMITTING. The other ranks become idle when rank 0 has counted the save as
 * finished. All decisions follow from one gather of all ranks' notes, so all ranks decide the same.
 */
#include "llmc/comm/async_writer.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "llmc/checkpoint/hf_model.h"
#include "llmc/comm/data_parallel_model.h"
#include "llmc/log/error.h"
#include "llmc/util/stop_signal.h"

enum state { IDLE, READY, WRITING, WRITTEN, FAILED, COMMITTING };

struct note { /* what a rank sends to the others */
    int32_t state, stop;
    int32_t behind;    /* rank 0: result of async_writer_is_behind at the start */
    uint32_t finished; /* rank 0: number of saves that have ended, with or without success */
    int32_t lost;      /* rank 0: the last of these was without */
};

struct async_writer {
    struct data_parallel *dp;
    const struct run_info *facts;
    struct carried *carried; /* rank 0 */
    bool continues;
    struct note *all; /* [ranks] */
    uint32_t started;
    int start; /* rank 0: see `start` in resume.h */
    bool behind;
    char directory[FILE_PATH_BYTES];
    struct snapshot snapshot;
    struct named_tensor *tensors; /* [tensor_count], the whole model, cut into shards */
    size_t tensor_count;
    int shards;
    float *model; /* copy of the tensors that this rank writes; their data points here */
    json_t *trainer;
    char **kept; /* rank 0: complete checkpoints of this run, oldest first */
    size_t kept_count;

    pthread_t thread;
    bool thread_runs; /* the thread must be joined */
    pthread_mutex_t lock;
    struct note note; /* guarded by the lock while the thread runs */
};

/* ---- the thread ------------------------------------------------------------------------- */

/* Tests make a save slower, to test what happens during one. */
static void pause_for_tests(void) {
    const char *text = getenv("TRAIN_LLAMA2_TEST_SAVE_PAUSE_MS");
    if (text) usleep((useconds_t)atoi(text) * 1000);
}

static void set_state(struct async_writer *s, enum state state) {
    pthread_mutex_lock(&s->lock);
    s->note.state = state;
    pthread_mutex_unlock(&s->lock);
}

static int write_state(struct async_writer *s, const char *partial, json_t *files) {
    char path[FILE_PATH_BYTES], name[64];
    resume_file_name(s->facts->rank, s->facts->ranks, name);
    if (file_join(path, partial, name) || snapshot_write(&s->snapshot, path)) return -1;
    return resume_list_file(files, partial, name);
}

/* Writes this rank's shards of the model. */
static int write_shards(struct async_writer *s, const char *partial, json_t *files) {
    for (int i = s->facts->rank; i < s->shards; i += s->facts->ranks) {
        char name[HF_MODEL_NAME_BYTES];
        hf_model_shard_name(i, s->shards, name);
        pause_for_tests();
        if (hf_model_write_shard(partial, s->tensors, s->tensor_count, i, s->shards) ||
            resume_list_file(files, partial, name))
            return -1;
    }
    return 0;
}

/* Rank 0 writes the model's other files. */
static int write_rest(struct async_writer *s, const char *partial, json_t *files) {
    if (hf_model_write_rest(partial, &s->facts->layout->config, s->tensors, s->tensor_count,
                            s->shards, s->carried))
        return -1;
    const char *name;
    for (int i = 0; (name = carried_name(s->carried, i)); i++)
        if (resume_list_file(files, partial, name)) return -1;
    if (s->shards > 1 && resume_list_file(files, partial, "model.safetensors.index.json"))
        return -1;
    return resume_list_file(files, partial, "config.json");
}

/* Writes this rank's part. */
static void *write_part(void *argument) {
    struct async_writer *s = argument;
    const int rank = s->facts->rank;
    char partial[FILE_PATH_BYTES];
    json_t *files = json_object();
    pause_for_tests();
    int failed = hf_model_partial(s->directory, partial) || write_state(s, partial, files) ||
                 write_shards(s, partial, files) || (rank == 0 && write_rest(s, partial, files)) ||
                 resume_write_list(files, partial, rank, s->facts->ranks);
    json_decref(files);
    set_state(s, failed ? FAILED : WRITTEN);
    return NULL;
}

static void remember(struct async_writer *s) {
    char **more = realloc(s->kept, (s->kept_count + 1) * sizeof *more);
    if (more) s->kept = more;
    char *copy = more ? strdup(s->directory) : NULL;
    if (!copy) return; /* the copy is never removed */
    s->kept[s->kept_count++] = copy;
}

/* Removes a checkpoint. It is renamed first, so that nobody finds an incomplete checkpoint under
 * the name of a complete one. */
static void retire(const char *directory) {
    char partial[FILE_PATH_BYTES];
    if (hf_model_partial(directory, partial)) return;
    hf_model_remove(partial);
    if (rename(directory, partial) == 0) {
        pause_for_tests();
        hf_model_remove(partial);
    } else if (errno != ENOENT) {
        log_error("cannot remove the old checkpoint '%s': %s", directory, strerror(errno));
    }
}

/* Removes all checkpoints except the newest `keep`. */
static void prune(struct async_writer *s) {
    const size_t keep = (size_t)s->facts->options->keep;
    while (keep && s->kept_count > keep) {
        retire(s->kept[0]);
        free(s->kept[0]);
        memmove(s->kept, s->kept + 1, --s->kept_count * sizeof *s->kept);
    }
}

/* Rank 0, after all parts are written: writes the list of files, then gives the checkpoint its
 * name. */
static void *commit(void *argument) {
    struct async_writer *s = argument;
    char partial[FILE_PATH_BYTES];
    pause_for_tests();
    int status = hf_model_partial(s->directory, partial) ||
                 resume_collect_lists(s->trainer, partial, s->facts->ranks) ||
                 resume_write(s->trainer, partial);
    pause_for_tests();
    if (!status) status = hf_model_commit(s->directory);
    pause_for_tests();
    if (status) {
        hf_model_abandon(s->directory);
    } else {
        remember(s);
        prune(s);
    }
    pthread_mutex_lock(&s->lock);
    s->note.state = IDLE;
    s->note.finished++;
    s->note.lost = status != 0;
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void join(struct async_writer *s) {
    if (s->thread_runs) pthread_join(s->thread, NULL);
    s->thread_runs = false;
}

static void start(struct async_writer *s, enum state state, void *(*work)(void *)) {
    join(s);
    s->note.state = state;
    s->thread_runs = pthread_create(&s->thread, NULL, work, s) == 0;
    if (!s->thread_runs) work(s); /* if no thread can be started, training waits for the write */
}

/* ---- ranks together --------------------------------------------------------------------- */

/* Gives this rank's note to all ranks at once, or `aside`, with the caller's next gather. */
static int give_note(struct async_writer *s, bool aside) {
    pthread_mutex_lock(&s->lock);
    struct note mine = s->note;
    pthread_mutex_unlock(&s->lock);
    mine.stop = stop_signal_seen();
    return lossynet_rank_gather(s->dp->comm, &mine, s->all, sizeof mine, aside) ? -1 : 0;
}

int async_writer_tell(struct async_writer *s) {
    return s ? give_note(s, true) : 0;
}

static int count(const struct async_writer *s, enum state state) {
    int ranks = 0;
    for (int r = 0; r < s->facts->ranks; r++) ranks += s->all[r].state == (int32_t)state;
    return ranks;
}

static void abandon(struct async_writer *s) {
    hf_model_abandon(s->directory);
    s->note.state = IDLE;
    s->note.finished++;
    s->note.lost = true;
}

/* Acts on the notes that were just gathered. */
static void act(struct async_writer *s) {
    if (s->all[0].finished == s->started) { /* also after a failure on another rank */
        if (s->note.state != IDLE) join(s), s->note.state = IDLE;
        return;
    }
    if (s->facts->rank > 0) return;
    if (count(s, WRITTEN) == s->facts->ranks) {
        start(s, COMMITTING, commit);
    } else if (count(s, FAILED) && !count(s, WRITING)) {
        join(s);
        abandon(s);
    }
}

/* Decides from the gathered notes, so that every rank polls equally often. */
int async_writer_finish(struct async_writer *s) {
    while (s) {
        if (give_note(s, false)) return -1;
        act(s);
        if (s->all[0].finished == s->started) return 0;
        usleep(1000);
    }
    return 0;
}

/* ---- a save ----------------------------------------------------------------------------- */

/* *go: whether a checkpoint of this step can be begun; if not, the reason was reported. */
static int begin(struct async_writer *s, int step, bool *go) {
    if (async_writer_finish(s)) return -1;
    join(s);
    s->started++;
    s->note.state = READY;
    if (resume_checkpoint_path(s->facts->options->out, step, s->directory) ||
        (s->facts->rank == 0 && hf_model_begin(s->directory)))
        s->note.state = FAILED;
    if (give_note(s, false)) return -1;
    *go = count(s, FAILED) == 0;
    if (!*go && s->facts->rank == 0) {
        s->note.finished++;
        s->note.state = IDLE;
        s->note.lost = true;
    }
    return 0;
}

/* Allocates the copy of this rank's shards of the model. It is kept for later saves. */
static int allocate_copy(struct async_writer *s) {
    const struct run_info *facts = s->facts;
    size_t elements = 0;
    if (s->model || facts->rank >= s->shards) return 0;
    for (int pass = 0; pass < 2; pass++) { /* measures, then sets data pointers */
        elements = 0;
        for (size_t i = 0; i < s->tensor_count; i++) {
            struct named_tensor *t = &s->tensors[i];
            if (t->shard % facts->ranks != facts->rank) continue;
            if (pass) t->data = s->model + elements;
            elements += model_tensor_elements(t);
        }
        if (!pass) s->model = (float *)snapshot_block(elements * sizeof *s->model);
        if (!s->model)
            return log_out_of_memory("the copy of the model that a checkpoint is written from",
                                     (double)(elements * sizeof *s->model));
    }
    return 0;
}

static void copy_and_write(struct async_writer *s, const struct resume_point *at, int failed) {
    json_decref(s->trainer);
    s->trainer = resume_describe(s->facts, at);
    if (s->trainer) json_object_set_new(s->trainer, "start", json_integer(s->start));
    if (!failed)
        failed = s->trainer ? saved_state_copy(s->dp, &s->snapshot)
                            : log_error("cannot save a checkpoint: out of memory");
    if (failed)
        set_state(s, FAILED);
    else
        start(s, WRITING, write_part);
}

void async_writer_poll(struct async_writer *s, bool *stop) {
    *stop = false;
    if (!s) return;
    for (int r = 0; r < s->facts->ranks; r++) *stop |= s->all[r].stop != 0;
    act(s);
}

int async_writer_save(struct async_writer *s, const struct resume_point *at) {
    bool go;
    s->behind = false;
    if (begin(s, at->step, &go)) return -1;
    if (!go) return 0;
    const int failed = allocate_copy(s);
    if (data_parallel_copy_model(s->dp, s->tensors, s->tensor_count)) return -1;
    copy_and_write(s, at, failed);
    return 0;
}

/* ---- open and close --------------------------------------------------------------------- */

/* Removes the incomplete checkpoints of killed runs. */
static void remove_partial(const char *out) {
    char path[FILE_PATH_BYTES];
    DIR *directory = opendir(out);
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (!fnmatch("checkpoint-[0-9]*.partial", entry->d_name, 0) &&
            !file_join(path, out, entry->d_name))
            hf_model_remove(path);
    if (directory) closedir(directory);
}

static bool is_same(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* --overwrite: removes the checkpoints of the earlier run, except the one that this run starts
 * from. */
static void remove_earlier(const struct options *o) {
    char **list;
    size_t count = resume_list(o->out, INT_MAX, &list);
    for (size_t i = 0; i < count; i++) {
        if (!is_same(list[i], o->model)) retire(list[i]);
        free(list[i]);
    }
    free(list);
}

/* Finds the run's earlier checkpoints, if it continues or resumes from one of them. A run that is
 * resumed into another directory does not touch the checkpoints that are there. */
static void recall(struct async_writer *s, int step) {
    bool found = s->continues;
    s->kept_count = resume_list(s->facts->options->out, step, &s->kept);
    for (size_t i = 0; i < s->kept_count; i++)
        found = found || is_same(s->kept[i], s->facts->options->resume);
    for (size_t i = 0; !found && i < s->kept_count; i++) free(s->kept[i]);
    if (!found) s->kept_count = 0;
}

/* Rank 0: whether the last checkpoint that was due is missing. */
static bool lacks_due(const struct async_writer *s, int step) {
    const int every = s->facts->options->save_every;
    const char *last = s->kept_count ? strrchr(s->kept[s->kept_count - 1], '-') : NULL;
    return every && (last ? atoi(last + 1) : 0) < step / every * every;
}

/* Rank 0 tells the other ranks whether a checkpoint is missing. */
static int agree_behind(struct async_writer *s, int step) {
    s->note.behind = s->facts->rank == 0 && lacks_due(s, step);
    if (give_note(s, false)) return -1;
    s->behind = s->all[0].behind;
    return 0;
}

/* What checkpoints keep of the model that the run began with, or of a checkpoint of the run, if that model
 * was one of our checkpoints and has been removed. */
static int carry(struct async_writer *s, const char *tokenizer) {
    const struct options *o = s->facts->options;
    const char *last = async_writer_last(s), *sources[4] = {o->model};
    int count = 1;
    if (o->resume) sources[count++] = o->resume;
    if (*last) sources[count++] = last;
    return carried_open(sources, tokenizer, &s->carried);
}

bool async_writer_is_behind(const struct async_writer *s) {
    return s && s->behind;
}

int async_writer_open(struct data_parallel *d, const struct run_info *facts, const char *tokenizer,
                      int step, bool continues, struct async_writer **out) {
    const struct options *o = facts->options;
    *out = NULL;
    if (!o->out) return 0;
    struct async_writer *s = calloc(1, sizeof *s);
    if (!s) return log_out_of_memory("the writer of checkpoints", 0);
    s->dp = d, s->facts = facts, s->continues = continues;
    pthread_mutex_init(&s->lock, NULL);
    s->all = calloc((size_t)facts->ranks, sizeof *s->all);
    s->tensor_count = model_tensor_count(&facts->layout->config);
    s->tensors = calloc(s->tensor_count, sizeof *s->tensors);
    if (!s->all || !s->tensors) {
        async_writer_close(s);
        return log_out_of_memory("the writer of checkpoints", 0);
    }
    model_tensors(&facts->layout->config, s->tensors);
    s->shards = hf_model_cut(s->tensors, s->tensor_count, 1e9 * o->shard_size);
    if (facts->rank == 0) remove_partial(o->out);
    if (facts->rank == 0 && o->overwrite && !continues) remove_earlier(o);
    if (facts->rank == 0 && (o->resume || continues)) recall(s, step);
    if (facts->rank == 0) s->start = resume_last_start(o->out) + !continues;
    if (!s->start) s->start = 1;
    if ((facts->rank == 0 && carry(s, tokenizer)) || (continues && agree_behind(s, step))) {
        async_writer_close(s);
        return -1;
    }
    stop_signal_note(true);
    *out = s;
    return 0;
}

void async_writer_close(struct async_writer *s) {
    if (!s) return;
    /* A rank that goes to the next view notes signals meanwhile, and stops there. */
    if (!s->facts->options->meet) stop_signal_note(false);
    join(s);
    if (s->facts->rank == 0 && s->note.state != IDLE) hf_model_abandon(s->directory);
    for (size_t i = 0; i < s->kept_count; i++) free(s->kept[i]);
    free(s->kept);
    carried_close(s->carried);
    json_decref(s->trainer);
    snapshot_release(&s->snapshot);
    free(s->model);
    free(s->tensors);
    free(s->all);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

const char *async_writer_last(const struct async_writer *s) {
    return s && s->kept_count && file_is_directory(s->kept[s->kept_count - 1])
               ? s->kept[s->kept_count - 1]
               : "";
}

bool async_writer_has_failed(const struct async_writer *s) {
    return s && s->started && (s->all[0].lost || (s->facts->rank == 0 && !*async_writer_last(s)));
}

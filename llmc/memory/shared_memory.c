/* shared_memory.c — see shared_memory.h. */
#include "llmc/memory/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"

enum { HEAD_BYTES = 4096, TOKEN_BYTES = 16 };
/* A waiting rank looks so often before it sleeps. It does not yield the processor meanwhile: beside
 * busy neighbours each yield costs the rest of its time slice, while one who sleeps is woken at once. */
enum { TRIES = 200 };
static const double PAUSE = 2e-5;    /* seconds; of a rank that also turns the network's loop */
enum { BEATS = 16 };                 /* signs of life of a member in the time-out, at least, */
static const double BEAT_MOST = 0.1; /* and so many seconds from one to the next, at most */

struct head { /* begins each member's memory; the barrier uses the one of member 0 */
    unsigned char token[TOKEN_BYTES];
    uint32_t waiting, rounds;
    uint32_t beats; /* of the member whose memory this is; grows while its process runs */
};

struct place { /* where a member's memory is */
    int64_t pid;
    int32_t file; /* its descriptor in that process; -1: the rank has none */
    uint64_t bytes;
    unsigned char token[TOKEN_BYTES]; /* random: other hosts may have the same pid */
};

struct silence { /* of a member, in a wait */
    uint32_t beats;
    double since; /* seconds; when this number of beats was first seen */
};

struct shared_memory {
    int rank, first, size;   /* this rank; the group's first rank and number of ranks */
    struct place *place;     /* [size] */
    double timeout;          /* seconds; see shared_memory_open */
    struct silence *silence; /* [size], in a wait */
    pthread_t heart;
    bool beats, stops;  /* the thread runs; it is to end (atomic) */
    struct head **head; /* [size], mapped */
};

/* ---- open ---- */

static int report_no_memory(uint64_t bytes) {
    return log_error("--group: no %.1f GB of memory to share with the group: %s",
                     (double)bytes / 1e9, strerror(errno));
}

/* Creates this rank's own memory. Returns its descriptor, or -1 after reporting. */
static int create(struct place *mine, size_t bytes) {
    mine->pid = getpid();
    mine->bytes = HEAD_BYTES + bytes;
    mine->file = memfd_create("train_llama2", MFD_CLOEXEC);
    if (mine->file >= 0 && getrandom(mine->token, TOKEN_BYTES, 0) == TOKEN_BYTES &&
        ftruncate(mine->file, (off_t)mine->bytes) == 0 &&
        pwrite(mine->file, mine->token, TOKEN_BYTES, 0) == TOKEN_BYTES)
        return mine->file;
    report_no_memory(mine->bytes);
    if (mine->file >= 0) close(mine->file);
    return mine->file = -1;
}

/* Maps the memory that a member has given. Returns 0, or -1 after reporting. */
static int map(struct shared_memory *m, int member) {
    const struct place *place = &m->place[member];
    char path[64];
    if (place->file < 0) return -1; /* that rank has reported it */
    snprintf(path, sizeof path, "/proc/%lld/fd/%d", (long long)place->pid, place->file);
    const int file = open(path, O_RDWR | O_CLOEXEC);
    unsigned char token[TOKEN_BYTES];
    const bool reached = file >= 0 && pread(file, token, TOKEN_BYTES, 0) == TOKEN_BYTES &&
                         memcmp(token, place->token, TOKEN_BYTES) == 0;
    if (reached) {
        void *at = mmap(NULL, place->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (at != MAP_FAILED) m->head[member] = at;
    }
    if (file >= 0) close(file);
    if (m->head[member]) {
        madvise(m->head[member], place->bytes, MADV_HUGEPAGE); /* where the system allows it */
        return 0;
    }
    if (reached) return report_no_memory(place->bytes);
    return log_error("--group %d: rank %d does not reach the memory of rank %d: expected ranks %d "
                     "to %d on one host, started by one user",
                     m->size, m->rank, m->first + member, m->first, m->first + m->size - 1);
}

/* ---- signs of life ---- */

static void sleep_for(double seconds) {
    const struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

static void *beat(void *argument) {
    struct shared_memory *m = argument;
    const double pause = m->timeout / BEATS < BEAT_MOST ? m->timeout / BEATS : BEAT_MOST;
    while (!__atomic_load_n(&m->stops, __ATOMIC_ACQUIRE)) {
        __atomic_add_fetch(&m->head[m->rank - m->first]->beats, 1, __ATOMIC_RELEASE);
        sleep_for(pause);
    }
    return NULL;
}

static int start_heart(struct shared_memory *m) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* other threads take signals */
    m->beats = pthread_create(&m->heart, NULL, beat, m) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return m->beats
               ? 0
               : log_error("--group: no thread that shows the group that rank %d lives", m->rank);
}

int shared_memory_open(const struct lossynet_world *world, int first, int size, size_t bytes,
                       double timeout, struct shared_memory **out) {
    struct place *all = calloc((size_t)world->ranks, sizeof *all);
    struct shared_memory *m = *out = calloc(1, sizeof *m);
    int failed = !all || !m;
    if (!failed) {
        m->rank = world->rank;
        m->first = first;
        m->size = size;
        m->timeout = timeout;
        m->silence = calloc((size_t)size, sizeof *m->silence);
        m->place = calloc((size_t)size, sizeof *m->place);
        m->head = calloc((size_t)size, sizeof *m->head);
        failed = !m->place || !m->head || !m->silence;
    }
    if (failed) {
        free(all);
        return log_out_of_memory("the list of a group's ranks", 0);
    }
    const int file = create(&all[world->rank], bytes);
    failed = lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    memcpy(m->place, all + m->first, (size_t)size * sizeof *m->place);
    for (int r = 0; r < world->ranks && !failed; r++) failed = all[r].file < 0 ? -1 : 0;
    int mine = failed; /* all ranks learn whether all could map before any closes its descriptor */
    for (int i = 0; i < size && !mine; i++) mine = map(m, i);
    all[world->rank].file = mine ? -1 : 0;
    if (!failed) failed = lossynet_bootstrap_gather(world, all, sizeof *all) ? -1 : 0;
    for (int r = 0; r < world->ranks && !failed; r++) failed = all[r].file < 0 ? -1 : 0;
    if (file >= 0) close(file);
    free(all);
    return failed || start_heart(m) ? -1 : 0;
}

void shared_memory_close(struct shared_memory *m) {
    if (!m) return;
    __atomic_store_n(&m->stops, true, __ATOMIC_RELEASE);
    if (m->beats) pthread_join(m->heart, NULL);
    for (int i = 0; m->head && i < m->size; i++)
        if (m->head[i]) munmap(m->head[i], m->place[i].bytes);
    free(m->silence);
    free(m->head);
    free(m->place);
    free(m);
}

void *shared_memory_of(const struct shared_memory *m, int member) {
    return (char *)m->head[member] + HEAD_BYTES;
}

/* ---- the barrier ---- */

/* Sleeps until *word is no longer `value`, or for a while. */
static void sleep_while(uint32_t *word, uint32_t value) {
    const struct timespec most = {.tv_sec = 0, .tv_nsec = 100000000};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &most, NULL, 0);
}

static int find_ended(const struct shared_memory *m) {
    for (int i = 0; i < m->size; i++)
        if (kill((pid_t)m->place[i].pid, 0) && errno == ESRCH)
            return log_error("rank %d, of this rank's group, has ended", m->first + i);
    return 0;
}

/* Looks for a member that has given no sign of life for the time-out. Its silence counts while this
 * rank looks itself: one that was stopped, maybe with all others, begins anew. *looked: when it
 * last looked; 0: not in this wait. */
static int find_silent(struct shared_memory *m, double *looked) {
    const double now = log_seconds();
    const bool anew = *looked == 0 || now - *looked > m->timeout / 2;
    *looked = now;
    for (int i = 0; i < m->size; i++) {
        struct silence *silence = &m->silence[i];
        const uint32_t beats = __atomic_load_n(&m->head[i]->beats, __ATOMIC_ACQUIRE);
        if (anew || beats != silence->beats) *silence = (struct silence){beats, now};
        if (now - silence->since > m->timeout)
            return log_error("rank %d, of this rank's group, gave no sign of life for %.1f s: "
                             "expected one within %g s (--peer-timeout)",
                             m->first + i, now - silence->since, m->timeout);
    }
    return 0;
}

int shared_memory_wait(struct shared_memory *m, struct lossynet_comm *comm) {
    struct head *barrier = m->head[0];
    const uint32_t round = __atomic_load_n(&barrier->rounds, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->waiting, 1, __ATOMIC_ACQ_REL) == (uint32_t)m->size) {
        __atomic_store_n(&barrier->waiting, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->rounds, round + 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &barrier->rounds, FUTEX_WAKE, m->size, NULL, NULL, 0);
        return 0;
    }
    double looked = 0;
    for (int i = 0; __atomic_load_n(&barrier->rounds, __ATOMIC_ACQUIRE) == round; i++) {
        const bool turns = comm && lossynet_turn(comm);
        if (turns && i >= TRIES) sleep_for(PAUSE);
        if ((i + 1) % TRIES && (turns || i < TRIES)) continue;
        if (!turns) sleep_while(&barrier->rounds, round);
        if (__atomic_load_n(&barrier->rounds, __ATOMIC_ACQUIRE) == round &&
            (find_ended(m) || find_silent(m, &looked)))
            return -1;
    }
    return 0;
}

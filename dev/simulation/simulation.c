/* simulation.c — simulates threads, clock, locks and network in one thread: see simulation.h. */
#include "dev/simulation/simulation.h"
#include "lossynet/base/base.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#define ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ADDRESS_SANITIZER 1
#endif
#endif
#ifdef ADDRESS_SANITIZER
#include <sanitizer/common_interface_defs.h>
#endif

enum {
    FIBERS = 4,              /* most fibers of a rank */
    BLOCK = 64,              /* fibers in a block; each block stores its first time to wake */
    ON_THE_WAY = 256,        /* datagrams in flight to a rank, per rank; or two receive queues */
    STACK_BYTES = 128 << 10, /* the system provides memory only for pages that are used */
};
/* Seconds for reading the clock and for switching fibers, divided by the ranks that run at once. */
static const double READING = 4e-6, SWITCHING = 4e-7;

struct place { /* where a fiber or the scheduler goes on */
    ucontext_t context;
    jmp_buf jump;
    bool begun; /* `jump` holds it; before, a fiber begins at `context` */
};

struct fiber {
    struct place place;
    uint8_t *stack;
    void *(*run)(void *);
    void *argument;
    void *fake_stack; /* for the address sanitizer */
};

struct sleeper { /* a fiber's state for the scheduler; small, because it scans all fibers */
    int rank;
    bool used, over;
    const void *waits_for; /* a lock, condition or link; NULL: only the clock wakes it */
    double wake_at;
};

struct flight { /* a datagram on its way */
    double due;
    uint64_t order;
    int peer;
    size_t count;
    uint8_t *bytes;
};

struct simulated_link {
    struct ln_link link;
    int rank;
    bool woken;
    struct flight *flights; /* a heap; the datagram that arrives first is at its top */
    int flying, room;
    int waits;                      /* the fiber that waits in link_wait; -1: none */
    int showing;                    /* datagrams in `shown` */
    uint8_t *shown[LOSSYNET_BATCH]; /* returned by receive; freed when it is called again */
    uint64_t overruns;
};

static struct {
    struct simulation_settings settings;
    double now;
    uint64_t random, switches, order;
    struct fiber *fiber;     /* [fibers] */
    struct sleeper *sleeper; /* [fibers] */
    int fibers, present;     /* present: the running fiber; -1: the scheduler */
    int blocks;
    double *first; /* [blocks]: when the first fiber of a block is due; below 0: not known */
    int *of_rank;  /* [ranks][FIBERS]: a rank's fibers, index + 1; 0: none yet */
    struct place scheduler;
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    void (*rank)(int);
    double *stopped_until;        /* [ranks] */
    uint64_t *ran;                /* [ranks]: how often a fiber of the rank has run */
    struct simulated_link **link; /* [ranks] */

    uint8_t *shared; /* memory of simulation_share; its barriers use the rest */
    int arrived;
    uint64_t barriers;
} sim;

uint64_t simulation_random(void) {
    uint64_t x = sim.random += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

bool simulation_chance(double share) {
    return (double)(simulation_random() % 1000000) < 1e6 * share;
}

void simulation_require(bool done, const char *what) {
    if (done) return;
    fprintf(stderr, "%s has failed\n", what);
    abort();
}

double simulation_now(void) {
    return sim.now;
}

static void give_up(const char *what) {
    fprintf(stderr, "simulation: %s after %.6f s and %llu switches\n", what, sim.now,
            (unsigned long long)sim.switches);
    for (int i = 0; i < sim.fibers; i++)
        if (sim.sleeper[i].used && !sim.sleeper[i].over)
            fprintf(stderr, "  fiber %d of rank %d waits for %p until %.6f\n", i,
                    sim.sleeper[i].rank, sim.sleeper[i].waits_for, sim.sleeper[i].wake_at);
    abort();
}

/* ---- fibers ---- */

/* Stops here and goes on there. swapcontext would ask the kernel for the signal mask at each switch, which
 * takes longer than the switch. The address sanitizer does not understand a jump to another stack. */
static void swap(struct place *here, struct place *there) {
#ifdef ADDRESS_SANITIZER
    swapcontext(&here->context, &there->context);
#else
    here->begun = true;
    if (_setjmp(here->jump)) return;
    if (there->begun) _longjmp(there->jump, 1);
    setcontext(&there->context);
#endif
}

static void switch_to(int i) {
    struct fiber *fiber = &sim.fiber[i];
#ifdef ADDRESS_SANITIZER
    void *fake = NULL;
    __sanitizer_start_switch_fiber(&fake, fiber->stack, STACK_BYTES);
#endif
    sim.present = i;
    swap(&sim.scheduler, &fiber->place);
    sim.present = -1;
#ifdef ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#endif
}

static void switch_back(int i) {
    struct fiber *fiber = &sim.fiber[i];
#ifdef ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(sim.sleeper[i].over ? NULL : &fiber->fake_stack,
                                   sim.scheduler_stack, sim.scheduler_stack_bytes);
#endif
    /* Where a thread's messages go is a thread's own, and so a fiber's. */
    const struct ln_log_target *log = ln_log_use(NULL);
    swap(&fiber->place, &sim.scheduler);
    ln_log_use(log);
#ifdef ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fiber->fake_stack, NULL, NULL);
#endif
}

static void fiber_main(void) {
    const int i = sim.present;
#ifdef ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(NULL, &sim.scheduler_stack, &sim.scheduler_stack_bytes);
#endif
    sim.fiber[i].run(sim.fiber[i].argument);
    sim.sleeper[i].over = true;
    switch_back(i);
}

static void *take(size_t bytes) {
    void *memory = calloc(1, bytes);
    if (!memory) give_up("no memory");
    return memory;
}

static void make_context(struct fiber *fiber) {
    ucontext_t *context = &fiber->place.context;
    getcontext(context);
    context->uc_stack.ss_sp = fiber->stack;
    context->uc_stack.ss_size = STACK_BYTES;
    makecontext(context, fiber_main, 0);
    fiber->place.begun = false;
}

static int fiber_start(int rank, void *(*run)(void *), void *argument) {
    int i = 0;
    while (i < sim.fibers && sim.sleeper[i].used) i++;
    if (i == sim.fibers) give_up("too many threads");
    struct fiber *fiber = &sim.fiber[i];
    uint8_t *stack = fiber->stack ? fiber->stack : malloc(STACK_BYTES);
    if (!stack) give_up("no memory");
    *fiber = (struct fiber){.stack = stack, .run = run, .argument = argument};
    sim.sleeper[i] = (struct sleeper){.rank = rank, .used = true};
    sim.first[i / BLOCK] = -1;
    int *own = sim.of_rank + FIBERS * rank;
    for (int k = 0; k < FIBERS; k++)
        if (own[k] == 0 || own[k] == i + 1 || !sim.sleeper[own[k] - 1].used ||
            sim.sleeper[own[k] - 1].rank != rank) {
            own[k] = i + 1;
            break;
        }
    make_context(fiber);
    return i;
}

static void set_wake(int i, double at) {
    sim.sleeper[i].wake_at = at;
    sim.first[i / BLOCK] = -1;
}

/* Yields until another fiber wakes it for `what`, or until the time `until`. */
static void sleep_for(const void *what, double until) {
    struct sleeper *sleeper = &sim.sleeper[sim.present];
    sleeper->waits_for = what;
    set_wake(sim.present, until);
    switch_back(sim.present);
}

static void wake_if_waits(int i, const void *what) {
    if (sim.sleeper[i].waits_for == what && sim.sleeper[i].used) set_wake(i, 0);
}

static void wake_all_for(const void *what) {
    for (int i = 0; i < sim.fibers; i++) wake_if_waits(i, what);
}

/* Wakes this rank's fibers that wait for `what`: locks, conditions and links belong to one rank. */
static void wake_for(const void *what) {
    const int *own = sim.of_rank + FIBERS * sim.sleeper[sim.present].rank;
    for (int k = 0; k < FIBERS && own[k]; k++) wake_if_waits(own[k] - 1, what);
}

void simulation_sleep(double seconds) {
    sleep_for(NULL, sim.now + seconds);
}

void simulation_stop(int rank, double seconds) {
    const double until = sim.now + seconds;
    if (until > sim.stopped_until[rank]) sim.stopped_until[rank] = until;
    const int *own = sim.of_rank + FIBERS * rank;
    for (int k = 0; k < FIBERS && own[k]; k++) sim.first[(own[k] - 1) / BLOCK] = -1;
}

uint64_t simulation_switches(int rank) {
    return sim.ran[rank];
}

static double due_at(const struct sleeper *sleeper) {
    const double stopped = sim.stopped_until[sleeper->rank];
    return sleeper->wake_at > stopped ? sleeper->wake_at : stopped;
}

static int end_of(int block) {
    return BLOCK * (block + 1) < sim.fibers ? BLOCK * (block + 1) : sim.fibers;
}

/* When the first fiber of a block is due; infinity if none is. */
static double first_of(int block) {
    double first = sim.first[block];
    if (first >= 0) return first;
    first = INFINITY;
    for (int i = BLOCK * block; i < end_of(block); i++) {
        const struct sleeper *sleeper = &sim.sleeper[i];
        if (!sleeper->used || sleeper->over) continue;
        const double due = due_at(sleeper);
        if (due < first) first = due;
    }
    return sim.first[block] = first;
}

static bool all_are_over(void) {
    for (int i = 0; i < sim.fibers; i++)
        if (sim.sleeper[i].used && !sim.sleeper[i].over) return false;
    return true;
}

/* Chooses at random a fiber that is due. If none is, the clock moves. -1: all fibers are over. */
static int choose(void) {
    double first = INFINITY;
    for (int b = 0; b < sim.blocks; b++)
        if (first_of(b) < first) first = first_of(b);
    if (isinf(first)) {
        if (all_are_over()) return -1;
        give_up("deadlock");
    }
    if (first > sim.now) sim.now = first;
    /* Takes the first block with a fiber that is due, beginning at a random block. */
    int block = sim.blocks > 1 ? (int)(simulation_random() % (uint64_t)sim.blocks) : 0;
    while (first_of(block) > sim.now) block = (block + 1) % sim.blocks;
    int chosen = -1;
    uint64_t seen = 0;
    for (int i = BLOCK * block; i < end_of(block); i++) {
        const struct sleeper *sleeper = &sim.sleeper[i];
        if (!sleeper->used || sleeper->over || due_at(sleeper) > sim.now) continue;
        if (simulation_random() % ++seen == 0) chosen = i;
    }
    return chosen;
}

static void *rank_main(void *argument) {
    sim.rank((int)(intptr_t)argument);
    return NULL;
}

/* Makes room for the fibers of all ranks. Uses the stacks of earlier runs again. */
static void begin(const struct simulation_settings *settings) {
    const int before = sim.fibers, fibers = FIBERS * settings->ranks;
    struct fiber *fiber = take((size_t)fibers * sizeof *fiber);
    for (int i = 0; i < before && i < fibers; i++) fiber[i].stack = sim.fiber[i].stack;
    for (int i = fibers; i < before; i++) free(sim.fiber[i].stack);
    free(sim.fiber);
    memset(&sim, 0, sizeof sim);
    sim.fiber = fiber;
    sim.fibers = fibers;
    sim.sleeper = take((size_t)fibers * sizeof *sim.sleeper);
    sim.blocks = (fibers + BLOCK - 1) / BLOCK;
    sim.first = take((size_t)sim.blocks * sizeof *sim.first);
    for (int b = 0; b < sim.blocks; b++) sim.first[b] = -1;
    sim.of_rank = take((size_t)fibers * sizeof *sim.of_rank);
    sim.stopped_until = take((size_t)settings->ranks * sizeof *sim.stopped_until);
    sim.ran = take((size_t)settings->ranks * sizeof *sim.ran);
    sim.link = take((size_t)settings->ranks * sizeof *sim.link);
}

void simulation_run(const struct simulation_settings *settings, void (*rank)(int rank)) {
    begin(settings);
    sim.settings = *settings;
    sim.random = settings->seed;
    sim.rank = rank;
    sim.now = 1;
    for (int r = 0; r < settings->ranks; r++) fiber_start(r, rank_main, (void *)(intptr_t)r);
    for (int i; (i = choose()) >= 0;) {
        if (++sim.switches > settings->most_switches || sim.now > settings->longest_seconds + 1)
            give_up("no end");
        sim.ran[sim.sleeper[i].rank]++;
        switch_to(i);
        sim.first[i / BLOCK] = -1;
        sim.now += SWITCHING / settings->ranks;
    }
    free(sim.sleeper);
    free(sim.first);
    free(sim.of_rank);
    free(sim.stopped_until);
    free(sim.ran);
    free(sim.link);
    free(sim.shared);
}

/* ---- replacements for pthreads, the clock and random numbers ---- */

ssize_t simulated_getrandom(void *bytes, size_t count, unsigned flags) {
    (void)flags;
    for (size_t i = 0; i < count; i++) ((uint8_t *)bytes)[i] = (uint8_t)simulation_random();
    return (ssize_t)count;
}

int simulated_clock_gettime(clockid_t clock, struct timespec *t) {
    (void)clock;
    sim.now += READING / sim.settings.ranks;
    t->tv_sec = (time_t)sim.now;
    t->tv_nsec = (long)((sim.now - (double)t->tv_sec) * 1e9);
    return 0;
}

int simulated_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                     void *argument) {
    (void)attributes;
    *thread = (pthread_t)fiber_start(sim.sleeper[sim.present].rank, run, argument);
    return 0;
}

int simulated_join(pthread_t thread, void **result) {
    struct sleeper *sleeper = &sim.sleeper[thread];
    (void)result;
    while (!sleeper->over) sleep_for(NULL, sim.now + 1e-5);
    sleeper->used = false;
    return 0;
}

/* A mutex's first byte: whether it is held. A condition's first 4 bytes: how often signalled. */
int simulated_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attributes) {
    (void)attributes;
    *(uint8_t *)mutex = 0;
    return 0;
}

int simulated_mutex_trylock(pthread_mutex_t *mutex) {
    if (*(uint8_t *)mutex) return 1;
    *(uint8_t *)mutex = 1;
    return 0;
}

int simulated_mutex_lock(pthread_mutex_t *mutex) {
    if (simulation_random() % 4 == 0) sleep_for(NULL, 0); /* another thread may come first */
    while (simulated_mutex_trylock(mutex)) sleep_for(mutex, INFINITY);
    return 0;
}

int simulated_mutex_unlock(pthread_mutex_t *mutex) {
    if (!*(uint8_t *)mutex) give_up("a mutex was unlocked that nobody holds");
    *(uint8_t *)mutex = 0;
    wake_for(mutex);
    if (simulation_random() % 4 == 0) sleep_for(NULL, 0);
    return 0;
}

int simulated_mutex_destroy(pthread_mutex_t *mutex) {
    if (*(uint8_t *)mutex) give_up("a mutex was destroyed that somebody holds");
    return 0;
}

int simulated_cond_init(pthread_cond_t *condition, const pthread_condattr_t *attributes) {
    (void)attributes;
    *(uint32_t *)condition = 0;
    return 0;
}

static int cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, double until) {
    uint32_t before = *(uint32_t *)condition;
    *(uint8_t *)mutex = 0; /* not simulated_mutex_unlock, which may yield before we sleep */
    wake_for(mutex);
    while (*(uint32_t *)condition == before && sim.now < until) sleep_for(condition, until);
    bool signalled = *(uint32_t *)condition != before;
    simulated_mutex_lock(mutex);
    return signalled ? 0 : ETIMEDOUT;
}

int simulated_cond_wait(pthread_cond_t *condition, pthread_mutex_t *mutex) {
    return cond_wait(condition, mutex, INFINITY);
}

int simulated_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                             const struct timespec *until) {
    return cond_wait(condition, mutex, (double)until->tv_sec + 1e-9 * (double)until->tv_nsec);
}

int simulated_cond_signal(pthread_cond_t *condition) {
    ++*(uint32_t *)condition;
    wake_for(condition);
    return 0;
}

int simulated_cond_destroy(pthread_cond_t *condition) {
    (void)condition;
    return 0;
}

/* ---- the network ---- */

lossynet_status simulation_share(void *context, const struct lossynet_world *world, void *all,
                                 size_t bytes) {
    (void)context;
    size_t ranks = (size_t)world->ranks, mine = (size_t)world->rank * bytes;
    uint64_t barrier = sim.barriers;
    if (sim.arrived == 0) {
        free(sim.shared);
        sim.shared = malloc(ranks * bytes + 1);
    }
    memcpy(sim.shared + mine, (uint8_t *)all + mine, bytes);
    uint8_t *shared = sim.shared;
    if (++sim.arrived == world->ranks) {
        sim.arrived = 0;
        sim.barriers++;
        wake_all_for(&sim.barriers);
    }
    while (sim.barriers == barrier) sleep_for(&sim.barriers, INFINITY);
    memcpy(all, shared, ranks * bytes);
    /* A second barrier: no rank begins the next call before all have read this one's data. */
    barrier = sim.barriers;
    if (++sim.arrived == world->ranks) {
        sim.arrived = 0;
        sim.barriers++;
        wake_all_for(&sim.barriers);
    }
    while (sim.barriers == barrier) sleep_for(&sim.barriers, INFINITY);
    return LOSSYNET_OK;
}

static bool comes_before(const struct flight *f, const struct flight *g) {
    return f->due < g->due || (f->due == g->due && f->order < g->order);
}

/* Inserts a datagram into the heap: starts at place `at` and moves towards the top. */
static void put_up(struct simulated_link *link, int at, struct flight flight) {
    for (; at > 0 && comes_before(&flight, &link->flights[(at - 1) / 2]); at = (at - 1) / 2)
        link->flights[at] = link->flights[(at - 1) / 2];
    link->flights[at] = flight;
}

/* Removes the datagram that arrives first from the heap. */
static struct flight take_first(struct simulated_link *link) {
    const struct flight first = link->flights[0], last = link->flights[--link->flying];
    int at = 0;
    for (int child; (child = 2 * at + 1) < link->flying; at = child) {
        child += child + 1 < link->flying &&
                 comes_before(&link->flights[child + 1], &link->flights[child]);
        if (!comes_before(&link->flights[child], &last)) break;
        link->flights[at] = link->flights[child];
    }
    link->flights[at] = last;
    return first;
}

void simulation_deliver(int receiver, int peer, const uint8_t *bytes, size_t count, double delay) {
    struct simulated_link *link = sim.link[receiver];
    if (!link) return;
    if (link->flying >= ON_THE_WAY * sim.settings.ranks &&
        link->flying >= 2 * sim.settings.receive_queue) {
        link->overruns++;
        return;
    }
    if (link->flying == link->room) {
        link->room = 2 * link->room + 64;
        link->flights = realloc(link->flights, (size_t)link->room * sizeof *link->flights);
        if (!link->flights) give_up("no memory");
    }
    const struct flight flight = {sim.now + sim.settings.latency + delay, sim.order++, peer, count,
                                  take(count + 1)};
    memcpy(flight.bytes, bytes, count);
    put_up(link, link->flying++, flight);
    if (link->waits >= 0 && sim.sleeper[link->waits].wake_at > flight.due)
        set_wake(link->waits, flight.due); /* the fiber wakes when the datagram arrives */
}

static lossynet_status link_send(struct ln_link *base, int peer, const struct ln_datagram *batch,
                                 int count) {
    struct simulated_link *link = (struct simulated_link *)base;
    if (count < 1 || count > LOSSYNET_BATCH) give_up("send: a batch that must not be");
    for (int i = 0; i < count; i++) {
        size_t bytes = WIRE_HEADER_BYTES + batch[i].length;
        if (batch[i].length > base->features.payload_most)
            give_up("send: a payload that is too large");
        uint8_t *copy = malloc(bytes);
        memcpy(copy, batch[i].header, WIRE_HEADER_BYTES);
        if (batch[i].length) memcpy(copy + WIRE_HEADER_BYTES, batch[i].payload, batch[i].length);
        sim.settings.carry(link->rank, peer, copy, bytes);
        free(copy);
    }
    return LOSSYNET_OK;
}

static void forget_shown(struct simulated_link *link) {
    for (int i = 0; i < link->showing; i++) free(link->shown[i]);
    link->showing = 0;
}

static int link_receive(struct ln_link *base, struct ln_arrival *arrivals) {
    struct simulated_link *link = (struct simulated_link *)base;
    int n = 0, waiting;
    forget_shown(link);
    if (link->flying == 0 || link->flights[0].due > sim.now) return 0;
    waiting = link->flying; /* the exact number matters only if there may be too many */
    if (waiting > base->features.receive_queue)
        for (int i = 0; i < link->flying; i++) waiting -= link->flights[i].due > sim.now;
    while (n < LOSSYNET_BATCH && link->flying > 0 && link->flights[0].due <= sim.now) {
        const struct flight f = take_first(link);
        if (simulation_random() % (uint64_t)waiting-- >= (uint64_t)base->features.receive_queue) {
            free(f.bytes);
            link->overruns++;
            continue;
        }
        /* Shrinks it to its size, so that the address sanitizer notices reads behind its end. */
        link->shown[n] = realloc(f.bytes, f.count ? f.count : 1);
        arrivals[n] = (struct ln_arrival){link->shown[n], f.count, f.peer, 0};
        n++;
    }
    link->showing = n;
    return n;
}

static void link_wait(struct ln_link *base, double seconds) {
    struct simulated_link *link = (struct simulated_link *)base;
    double until = sim.now + seconds;
    if (link->flying > 0) until = fmin(until, link->flights[0].due);
    link->waits = sim.present;
    if (!link->woken) sleep_for(link, until);
    link->waits = -1;
    link->woken = false;
}

static void link_wake(struct ln_link *base) {
    ((struct simulated_link *)base)->woken = true;
    wake_for(base);
}

static uint64_t link_overruns(struct ln_link *base) {
    return ((struct simulated_link *)base)->overruns;
}

static void link_close(struct ln_link *base) {
    struct simulated_link *link = (struct simulated_link *)base;
    forget_shown(link);
    for (int i = 0; i < link->flying; i++) free(link->flights[i].bytes);
    sim.link[link->rank] = NULL;
    free(link->flights);
    free(link);
}

lossynet_status simulation_link_open(const struct ln_link_settings *settings,
                                     struct ln_link **out) {
    struct simulated_link *link = calloc(1, sizeof *link);
    uint8_t *nothing = take((size_t)settings->world.ranks);
    link->rank = settings->world.rank;
    link->waits = -1;
    link->link = (struct ln_link){
        .name = "simulated",
        .features.payload_most =
            settings->payload_bytes ? settings->payload_bytes : sim.settings.payload_most,
        .features.receive_queue = sim.settings.receive_queue,
        .features.queue_setting = "net.core.rmem_max",
        .features.queue_bytes = 1984, /* as over UDP with an MTU of 1,500 */
        .send = link_send,
        .receive = link_receive,
        .wait = link_wait,
        .wake = link_wake,
        .overruns = link_overruns,
        .close = link_close,
    };
    sim.link[link->rank] = link;
    *out = &link->link;
    lossynet_status status = simulation_share(NULL, &settings->world, nothing, 1);
    free(nothing);
    return status;
}

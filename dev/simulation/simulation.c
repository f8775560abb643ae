/* simulation.c — fibers, a clock, locks and a network in one thread: see simulation.h. */
#include "dev/simulation/simulation.h"

#include <errno.h>
#include <math.h>
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

enum { FIBERS = 4 * SIMULATION_RANKS, STACK_BYTES = 128 << 10, ON_THE_WAY = 1024 };

struct fiber {
    ucontext_t context;
    uint8_t *stack;
    void *(*run)(void *);
    void *argument;
    int rank;
    bool used, over;
    const void *waits_for; /* NULL: for the clock only */
    double wake_at;
    void *fake_stack; /* address sanitizer's */
};

struct flight { /* a datagram on its way */
    double due;
    uint64_t order;
    int peer;
    size_t count;
    uint8_t *bytes;
};

struct simulated_link {
    struct lossynet_link link;
    int rank;
    bool woken;
    struct flight flights[ON_THE_WAY];
    int flying;
    uint8_t *shown[LOSSYNET_BATCH]; /* freed when receive is called again */
    uint64_t overruns;
};

static struct {
    struct simulation_settings settings;
    double now;
    uint64_t random, switches, order;
    struct fiber fiber[FIBERS];
    struct fiber *present; /* NULL: the scheduler */
    ucontext_t scheduler;
    const void *scheduler_stack;
    size_t scheduler_stack_bytes;
    void (*rank)(int);
    double stopped_until[SIMULATION_RANKS];
    struct simulated_link *link[SIMULATION_RANKS];

    uint8_t *shared; /* of simulation_share: a barrier */
    int arrived;
    uint64_t barriers;
} sim;

uint64_t simulation_random(void) {
    uint64_t x = sim.random += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

double simulation_now(void) {
    return sim.now;
}

static void give_up(const char *what) {
    fprintf(stderr, "simulation: %s after %.6f s and %llu switches\n", what, sim.now,
            (unsigned long long)sim.switches);
    for (int i = 0; i < FIBERS; i++)
        if (sim.fiber[i].used && !sim.fiber[i].over)
            fprintf(stderr, "  fiber %d of rank %d waits for %p until %.6f\n", i, sim.fiber[i].rank,
                    sim.fiber[i].waits_for, sim.fiber[i].wake_at);
    abort();
}

/* ---- fibers ---- */

static void switch_to(struct fiber *fiber) {
#ifdef ADDRESS_SANITIZER
    void *fake = NULL;
    __sanitizer_start_switch_fiber(&fake, fiber->stack, STACK_BYTES);
#endif
    sim.present = fiber;
    swapcontext(&sim.scheduler, &fiber->context);
    sim.present = NULL;
#ifdef ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#endif
}

static void switch_back(struct fiber *fiber) {
#ifdef ADDRESS_SANITIZER
    __sanitizer_start_switch_fiber(fiber->over ? NULL : &fiber->fake_stack, sim.scheduler_stack,
                                   sim.scheduler_stack_bytes);
#endif
    swapcontext(&fiber->context, &sim.scheduler);
#ifdef ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(fiber->fake_stack, NULL, NULL);
#endif
}

static void fiber_main(void) {
    struct fiber *fiber = sim.present;
#ifdef ADDRESS_SANITIZER
    __sanitizer_finish_switch_fiber(NULL, &sim.scheduler_stack, &sim.scheduler_stack_bytes);
#endif
    fiber->run(fiber->argument);
    fiber->over = true;
    switch_back(fiber);
}

static struct fiber *fiber_start(int rank, void *(*run)(void *), void *argument) {
    for (int i = 0; i < FIBERS; i++) {
        struct fiber *fiber = &sim.fiber[i];
        if (fiber->used) continue;
        uint8_t *stack = fiber->stack ? fiber->stack : malloc(STACK_BYTES);
        if (!stack) give_up("no memory");
        *fiber = (struct fiber){
            .stack = stack, .run = run, .argument = argument, .rank = rank, .used = true};
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = stack;
        fiber->context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber->context, fiber_main, 0);
        return fiber;
    }
    give_up("too many threads");
    return NULL;
}

/* Gives way until woken for `what`, or until the clock shows `until`. */
static void sleep_for(const void *what, double until) {
    struct fiber *fiber = sim.present;
    fiber->waits_for = what;
    fiber->wake_at = until;
    switch_back(fiber);
}

static void wake_for(const void *what) {
    for (int i = 0; i < FIBERS; i++)
        if (sim.fiber[i].used && sim.fiber[i].waits_for == what) sim.fiber[i].wake_at = 0;
}

void simulation_sleep(double seconds) {
    sleep_for(NULL, sim.now + seconds);
}

void simulation_stop(int rank, double seconds) {
    sim.stopped_until[rank] = fmax(sim.stopped_until[rank], sim.now + seconds);
}

static double due_at(const struct fiber *fiber) {
    return fmax(fiber->wake_at, sim.stopped_until[fiber->rank]);
}

/* One that is due, drawn at random; the clock moves where none is. NULL: all are over. */
static struct fiber *choose(void) {
    double first = INFINITY;
    bool any = false;
    for (int i = 0; i < FIBERS; i++) {
        if (!sim.fiber[i].used || sim.fiber[i].over) continue;
        any = true;
        first = fmin(first, due_at(&sim.fiber[i]));
    }
    if (!any) return NULL;
    if (isinf(first)) give_up("deadlock");
    if (first > sim.now) sim.now = first;
    struct fiber *chosen = NULL;
    uint64_t seen = 0;
    for (int i = 0; i < FIBERS; i++) {
        struct fiber *fiber = &sim.fiber[i];
        if (!fiber->used || fiber->over || due_at(fiber) > sim.now) continue;
        if (simulation_random() % ++seen == 0) chosen = fiber;
    }
    return chosen;
}

static void *rank_main(void *argument) {
    sim.rank((int)(intptr_t)argument);
    return NULL;
}

void simulation_run(const struct simulation_settings *settings, void (*rank)(int rank)) {
    uint8_t *stacks[FIBERS];
    for (int i = 0; i < FIBERS; i++) stacks[i] = sim.fiber[i].stack; /* taken once */
    memset(&sim, 0, sizeof sim);
    for (int i = 0; i < FIBERS; i++) sim.fiber[i].stack = stacks[i];
    sim.settings = *settings;
    sim.random = settings->seed;
    sim.rank = rank;
    sim.now = 1;
    for (int r = 0; r < SIMULATION_RANKS; r++) fiber_start(r, rank_main, (void *)(intptr_t)r);
    for (struct fiber *fiber; (fiber = choose());) {
        if (++sim.switches > settings->most_switches || sim.now > settings->longest_seconds + 1)
            give_up("no end");
        switch_to(fiber);
        sim.now += 1e-7;
    }
    free(sim.shared);
}

/* ---- in the place of pthreads, the clock and chance ---- */

ssize_t simulated_getrandom(void *bytes, size_t count, unsigned flags) {
    (void)flags;
    for (size_t i = 0; i < count; i++) ((uint8_t *)bytes)[i] = (uint8_t)simulation_random();
    return (ssize_t)count;
}

int simulated_clock_gettime(clockid_t clock, struct timespec *t) {
    (void)clock;
    sim.now += 1e-6;
    t->tv_sec = (time_t)sim.now;
    t->tv_nsec = (long)((sim.now - (double)t->tv_sec) * 1e9);
    return 0;
}

int simulated_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *),
                     void *argument) {
    (void)attributes;
    *thread = (pthread_t)(fiber_start(sim.present->rank, run, argument) - sim.fiber);
    return 0;
}

int simulated_join(pthread_t thread, void **result) {
    struct fiber *fiber = &sim.fiber[thread];
    (void)result;
    while (!fiber->over) sleep_for(NULL, sim.now + 1e-5);
    fiber->used = false;
    return 0;
}

/* The first byte of a mutex: held; of a condition, a count: how often signalled. */
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
    *(uint8_t *)mutex = 0; /* not unlock, which may give way before we sleep */
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
        wake_for(&sim.barriers);
    }
    while (sim.barriers == barrier) sleep_for(&sim.barriers, INFINITY);
    memcpy(all, shared, ranks * bytes);
    /* Nobody begins the next before all have read this one. */
    barrier = sim.barriers;
    if (++sim.arrived == world->ranks) {
        sim.arrived = 0;
        sim.barriers++;
        wake_for(&sim.barriers);
    }
    while (sim.barriers == barrier) sleep_for(&sim.barriers, INFINITY);
    return LOSSYNET_OK;
}

void simulation_deliver(int receiver, int peer, const uint8_t *bytes, size_t count, double delay) {
    struct simulated_link *link = sim.link[receiver];
    if (!link) return;
    if (link->flying == ON_THE_WAY) {
        link->overruns++;
        return;
    }
    struct flight *flight = &link->flights[link->flying++];
    *flight = (struct flight){sim.now + sim.settings.latency + delay, sim.order++, peer, count,
                              malloc(count + 1)};
    memcpy(flight->bytes, bytes, count);
    for (int i = 0; i < FIBERS; i++) { /* a sleeper wakes when it arrives */
        struct fiber *fiber = &sim.fiber[i];
        if (fiber->used && fiber->waits_for == link && fiber->wake_at > flight->due)
            fiber->wake_at = flight->due;
    }
}

static lossynet_status link_send(struct lossynet_link *base, int peer,
                                 const struct lossynet_datagram *batch, int count) {
    struct simulated_link *link = (struct simulated_link *)base;
    if (count < 1 || count > LOSSYNET_BATCH) give_up("send: a batch that must not be");
    for (int i = 0; i < count; i++) {
        size_t bytes = WIRE_HEADER_BYTES + batch[i].length;
        if (batch[i].length > base->payload_most) give_up("send: a payload that is too large");
        for (int r = 0; r < SIMULATION_RANKS; r++) {
            if (r == link->rank || (peer != r && peer != LOSSYNET_EVERYONE)) continue;
            uint8_t *copy = malloc(bytes);
            memcpy(copy, batch[i].header, WIRE_HEADER_BYTES);
            if (batch[i].length)
                memcpy(copy + WIRE_HEADER_BYTES, batch[i].payload, batch[i].length);
            sim.settings.carry(link->rank, r, copy, bytes);
            free(copy);
        }
    }
    return LOSSYNET_OK;
}

/* The index of the first to arrive, -1 when none has. */
static int first_due(const struct simulated_link *link) {
    int first = -1;
    for (int i = 0; i < link->flying; i++) {
        const struct flight *f = &link->flights[i], *g = &link->flights[first < 0 ? i : first];
        if (f->due > sim.now) continue;
        if (first < 0 || f->due < g->due || (f->due == g->due && f->order < g->order)) first = i;
    }
    return first;
}

static void forget_shown(struct simulated_link *link) {
    for (int i = 0; i < LOSSYNET_BATCH; i++) {
        free(link->shown[i]);
        link->shown[i] = NULL;
    }
}

static int link_receive(struct lossynet_link *base, struct lossynet_arrival *arrivals) {
    struct simulated_link *link = (struct simulated_link *)base;
    int n = 0, waiting = 0;
    forget_shown(link);
    for (int i = 0; i < link->flying; i++) waiting += link->flights[i].due <= sim.now;
    for (int first; n < LOSSYNET_BATCH && (first = first_due(link)) >= 0;) {
        struct flight f = link->flights[first];
        link->flights[first] = link->flights[--link->flying];
        if (simulation_random() % (uint64_t)waiting-- >= (uint64_t)base->receive_queue) {
            free(f.bytes);
            link->overruns++;
            continue;
        }
        /* Cut to size, so that address sanitizer sees what is read behind it. */
        link->shown[n] = realloc(f.bytes, f.count ? f.count : 1);
        arrivals[n] = (struct lossynet_arrival){link->shown[n], f.count, f.peer};
        n++;
    }
    return n;
}

static void link_wait(struct lossynet_link *base, double seconds) {
    struct simulated_link *link = (struct simulated_link *)base;
    double until = sim.now + seconds;
    for (int i = 0; i < link->flying; i++) until = fmin(until, link->flights[i].due);
    if (!link->woken) sleep_for(link, until);
    link->woken = false;
}

static void link_wake(struct lossynet_link *base) {
    ((struct simulated_link *)base)->woken = true;
    wake_for(base);
}

static uint64_t link_overruns(struct lossynet_link *base) {
    return ((struct simulated_link *)base)->overruns;
}

static void link_close(struct lossynet_link *base) {
    struct simulated_link *link = (struct simulated_link *)base;
    forget_shown(link);
    for (int i = 0; i < link->flying; i++) free(link->flights[i].bytes);
    sim.link[link->rank] = NULL;
    free(link);
}

lossynet_status simulation_link_open(const struct lossynet_link_settings *settings,
                                     struct lossynet_link **out) {
    struct simulated_link *link = calloc(1, sizeof *link);
    uint8_t nothing[SIMULATION_RANKS] = {0};
    link->rank = settings->world.rank;
    link->link = (struct lossynet_link){
        .name = "simulated",
        .multicast = sim.settings.multicast && settings->multicast,
        .payload_most =
            settings->payload_bytes ? settings->payload_bytes : sim.settings.payload_most,
        .receive_queue = sim.settings.receive_queue,
        .send = link_send,
        .receive = link_receive,
        .wait = link_wait,
        .wake = link_wake,
        .overruns = link_overruns,
        .close = link_close,
    };
    sim.link[link->rank] = link;
    *out = &link->link;
    return simulation_share(NULL, &settings->world, nothing, 1);
}

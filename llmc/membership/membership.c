/* membership.c — gives an agreement (agreement.h) a clock, a thread and a network. See
 * membership.h. */
#include "llmc/membership/membership.h"

#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "llmc/log/error.h"
#include "llmc/log/jsonl.h"
#include "llmc/membership/agreement.h"
#include "llmc/membership/etcd.h"
#include "llmc/membership/reach.h"
#include "llmc/util/stop_signal.h"

struct membership {
    struct membership_url url;
    char *name; /* the URL, for messages */
    int first_ranks;
    struct store *store;
    pthread_mutex_t lock; /* guards the agreement and its store */
    struct agreement agreement;
    atomic_bool changed;
    /* The thread that calls agreement_watch; the connection that wakes it. */
    pthread_t thread;
    bool watched;
    struct etcd_watch *registrations;
    /* Messages that the user has seen already. */
    bool said_away;
    enum agreement_obstacle said;
};

/* ---- the URL ---- */

static int url_error(const char *url, const char *what) {
    return log_error("--meet: expected etcd://HOST:PORT/RUN, got '%s': %s", url, what);
}

int membership_url_parse(const char *url, struct membership_url *out) {
    static const char SCHEME[] = "etcd://";
    *out = (struct membership_url){0};
    if (strncmp(url, SCHEME, strlen(SCHEME)) != 0)
        return url_error(url, "it does not begin with etcd://");
    const char *host = url + strlen(SCHEME), *slash = strchr(host, '/'), *colon = NULL;
    for (const char *c = host; slash && c < slash; c++)
        if (*c == ':') colon = c;
    if (!colon) return url_error(url, slash ? "no port" : "no run");
    const char *end = colon;
    if (*host == '[' && end[-1] == ']')
        host++, end--;
    else if (memchr(host, ':', (size_t)(end - host)))
        return url_error(url, "an IPv6 address stands in brackets");
    if (end <= host || (size_t)(end - host) >= sizeof out->host) return url_error(url, "no host");
    memcpy(out->host, host, (size_t)(end - host));
    for (const char *c = out->host; *c; c++)
        if (!isalnum((unsigned char)*c) && !strchr("-._:%", *c))
            return url_error(url, "this is no host");
    char *rest;
    const long port = strtol(colon + 1, &rest, 10);
    if (!isdigit((unsigned char)colon[1]) || rest != slash || port < 1 || port > 65535)
        return url_error(url, "the port is no number from 1 to 65535");
    out->port = (int)port;
    const size_t length = strlen(slash + 1);
    if (!length || length >= sizeof out->run)
        return url_error(url, "the name of a run has 1 to 64 characters");
    for (const char *c = slash + 1; *c; c++)
        if (!isalnum((unsigned char)*c) && !strchr("-._", *c))
            return url_error(url, "the name of a run has letters, digits, '.', '_' and '-'");
    memcpy(out->run, slash + 1, length + 1);
    if (!etcd_built())
        return log_error("--meet: this program was built without libcurl; install "
                         "libcurl4-openssl-dev and run make again");
    return 0;
}

/* ---- pauses and chance ---- */

static void doze(double duration) {
    const struct timespec t = {(time_t)duration, (long)((duration - (time_t)duration) * 1e9)};
    nanosleep(&t, NULL);
}

static void draw(void *context, char uid[24]) {
    (void)context;
    unsigned char bytes[10];
    if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) abort(); /* Linux always gives 10 */
    for (size_t i = 0; i < sizeof bytes; i++) snprintf(uid + 2 * i, 3, "%02x", bytes[i]);
}

static void reach(void *context, const struct member *m, int members, enum reached *reached) {
    (void)context;
    reach_members(m, members, reached);
}

/* ---- the thread ---- */

/* Renews the registration and watches the store. Rank 0, which takes waiting processes in, learns
 * of registrations at once. */
static void *watch(void *user) {
    struct membership *m = user;
    enum etcd_watch_result heard = ETCD_WATCH_TIME;
    while (heard != ETCD_WATCH_ENDED) {
        pthread_mutex_lock(&m->lock);
        if (heard == ETCD_WATCH_WRITTEN) agreement_hasten(&m->agreement);
        agreement_watch(&m->agreement, log_seconds());
        atomic_store(&m->changed, m->agreement.changed);
        const bool first = m->agreement.view.self == 0;
        pthread_mutex_unlock(&m->lock);
        heard = etcd_watch_wait(m->registrations, first, 1);
    }
    return NULL;
}

/* ---- waiting for a view ---- */

static void say_away(struct membership *m, const char *what) {
    if (!m->said_away)
        log_error("the store of %s does not answer (%s): %s", m->name, m->store->why, what);
    m->said_away = true;
}

/* Prints once what this process waits for. */
static void say_obstacle(struct membership *m) {
    const struct agreement *a = &m->agreement;
    const struct view *v = &a->obstacle_view;
    if (a->obstacle == m->said) return;
    m->said = a->obstacle;
    if (a->obstacle == AGREEMENT_FEW)
        log_error("waits for ranks: %d of %d have registered at %s%s", a->registered,
                  m->first_ranks, m->name,
                  a->registered >= m->first_ranks ? ", but not all can be reached" : "");
    else if (a->obstacle == AGREEMENT_TAKING)
        log_error("waits to join run %s: rank 0 of view %lld (%s, process %d) takes in who answers "
                  "at %s",
                  m->url.run, (long long)v->epoch, v->member[0].host, v->member[0].pid,
                  a->self.address);
    else if (a->obstacle == AGREEMENT_ORPHANED)
        log_error("waits for the members of view %lld of run %s, %d of which none is registered "
                  "any more (rank 0: %s, process %d); if all are dead, start with --meet-anew",
                  (long long)v->epoch, m->url.run, v->members, v->member[0].host, v->member[0].pid);
}

/* Calls agreement_step until there is a view. Returns as membership_next_view does. */
static int wait_for_view(struct membership *m, const char *meanwhile) {
    static const double GRACE = 2, AT_ONCE = 1, SOON = 10, STOPS = 10; /* seconds */
    const double began = log_seconds();
    double asked = -1; /* when this rank noticed a signal that asks it to stop; -1: not yet */
    m->said_away = false;
    m->said = AGREEMENT_NO_OBSTACLE;
    for (;;) {
        const double now = log_seconds();
        pthread_mutex_lock(&m->lock);
        const enum agreement_result result = agreement_step(&m->agreement, now);
        if (result == AGREEMENT_AWAY) say_away(m, meanwhile);
        if (result == AGREEMENT_WAIT) m->said_away = false;
        if (result == AGREEMENT_WAIT && now - began > GRACE) say_obstacle(m);
        if (result == AGREEMENT_VIEW) atomic_store(&m->changed, false);
        pthread_mutex_unlock(&m->lock);
        if (result == AGREEMENT_VIEW) return 0;
        if (result == AGREEMENT_COMPLETE) return 1;
        if (result == AGREEMENT_STOPPED) {
            log_error("the other ranks of run %s have stopped it, and this process stops, too",
                      m->url.run);
            return 1;
        }
        if (result == AGREEMENT_FAILED) return -1;
        /* If a view comes soon, this rank saves and stops together with the others. */
        if (stop_signal_seen() && asked < 0) asked = now;
        if (asked >= 0 && now - asked > STOPS)
            return log_error("was asked to stop while it waited for a view");
        doze(now - began < AT_ONCE ? 0.02 : now - began < SOON ? 0.1 : 0.5);
    }
}

int membership_next_view(struct membership *m, const bool *missing, bool takes_in) {
    pthread_mutex_lock(&m->lock);
    const int status = agreement_leave(&m->agreement, log_seconds(), missing, takes_in);
    pthread_mutex_unlock(&m->lock);
    return status ? status : wait_for_view(m, "this rank stands still until it does");
}

const struct view *membership_view(const struct membership *m) {
    return &m->agreement.view;
}

bool membership_has_changed(const struct membership *m) {
    return atomic_load(&m->changed);
}

void membership_find_ended(const struct membership *m, bool *ended) {
    agreement_find_ended(&m->agreement, ended);
}

/* ---- beginning and end ---- */

static void describe_self(const char *address, int port, struct member *self) {
    const bool bare = strchr(address, ':') != NULL; /* IPv6 */
    *self = (struct member){.pid = (int)getpid()};
    snprintf(self->address, sizeof self->address, "%s%s%s:%d", bare ? "[" : "", address,
             bare ? "]" : "", port);
    if (gethostname(self->host, sizeof self->host - 1) || !*self->host)
        snprintf(self->host, sizeof self->host, "host");
}

enum { ATTEMPTS = 3 }; /* of a request, if the store does not answer for a moment */

/* Compares the options, and starts the thread. Returns 0; 1 if the run is complete; or -1 after
 * reporting. */
static int begin(struct membership *m, const struct membership_settings *s) {
    const struct agreement_settings set = {.store = m->store,
                                           .run = m->url.run,
                                           .first_ranks = s->first_ranks,
                                           .anew = s->anew,
                                           .draw = draw,
                                           .reach = reach,
                                           .prove = s->prove,
                                           .context = s->context};
    agreement_init(&m->agreement, &set);
    enum agreement_result same = AGREEMENT_AWAY;
    for (int attempt = 0; attempt < ATTEMPTS && same == AGREEMENT_AWAY; attempt++) {
        if (attempt) doze(0.5);
        same = agreement_compare(&m->agreement, s->version, s->options);
    }
    if (same == AGREEMENT_AWAY)
        return log_error("the store of %s does not answer (%s); is etcd running there?", m->name,
                         m->store->why);
    if (same != AGREEMENT_VIEW) return same == AGREEMENT_COMPLETE ? 1 : -1;
    const char *address = etcd_local_address(m->store);
    const int port = s->listen(s->context, address);
    if (port < 0) return -1;
    describe_self(address, port, &m->agreement.self);
    m->agreement.self.process = s->process;
    char prefix[80];
    snprintf(prefix, sizeof prefix, "%s/member/", m->url.run);
    if (etcd_watch_open(m->url.host, m->url.port, prefix, &m->registrations)) return -1;
    if (pthread_create(&m->thread, NULL, watch, m))
        return log_error("cannot start the thread that keeps this rank registered");
    m->watched = true;
    return 0;
}

/* The caller closes *out, also after a failure, if it is not NULL. */
static int open_store(const struct membership_settings *settings, struct membership **out) {
    struct membership *m = *out = calloc(1, sizeof *m);
    if (!m) return log_out_of_memory("the membership", (double)sizeof *m);
    pthread_mutex_init(&m->lock, NULL);
    m->first_ranks = settings->first_ranks;
    m->name = strdup(settings->url);
    const int status = m->name ? membership_url_parse(settings->url, &m->url)
                               : log_out_of_memory("the name of the store", 0);
    return status ? status : etcd_open(m->url.host, m->url.port, &m->store);
}

int membership_open(const struct membership_settings *settings, struct membership **out) {
    struct membership *m;
    *out = NULL;
    int status = open_store(settings, &m);
    if (!status) status = begin(m, settings);
    if (!status) status = wait_for_view(m, "waits for it");
    if (status)
        membership_close(m);
    else
        *out = m;
    return status;
}

/* Writes a last message to the store. */
static enum store_status tell(struct membership *m, enum store_status (*say)(struct agreement *a)) {
    enum store_status status = STORE_AWAY;
    pthread_mutex_lock(&m->lock);
    for (int attempt = 0; attempt < ATTEMPTS && status == STORE_AWAY; attempt++)
        status = say(&m->agreement);
    pthread_mutex_unlock(&m->lock);
    return status;
}

int membership_complete(struct membership *m) {
    if (tell(m, agreement_complete) == STORE_DONE) return 0;
    return log_error("cannot say to the store of %s that the run is complete (%s); who comes later "
                     "waits for its members",
                     m->name, m->store->why);
}

int membership_dissolve(struct membership *m) {
    static const double PATIENCE = 10; /* seconds; a rank 0 that dies is not registered after 5 */
    const double end = log_seconds() + PATIENCE;
    enum agreement_result result = AGREEMENT_WAIT;
    for (int away = 0; away < ATTEMPTS && result != AGREEMENT_STOPPED && log_seconds() < end;) {
        if (result == AGREEMENT_WAIT && m->agreement.view.self > 0) doze(0.02);
        pthread_mutex_lock(&m->lock);
        result = agreement_dissolve(&m->agreement);
        pthread_mutex_unlock(&m->lock);
        if (result != AGREEMENT_WAIT) away++;
    }
    if (result == AGREEMENT_STOPPED) return 0;
    if (m->agreement.view.self > 0) return -1; /* rank 0 says it, if it lives */
    return log_error("cannot say to the store of %s that this rank and the others stop (%s); start "
                     "the run again with --meet-anew",
                     m->name, m->store->why);
}

void membership_close(struct membership *m) {
    if (!m) return;
    if (m->watched) {
        etcd_watch_end(m->registrations);
        pthread_join(m->thread, NULL);
        agreement_withdraw(&m->agreement);
    }
    agreement_clear(&m->agreement);
    etcd_watch_close(m->registrations);
    if (m->store) m->store->close(m->store);
    pthread_mutex_destroy(&m->lock);
    free(m->name);
    free(m);
}

/* mailboxes.h — a link of mailboxes in memory, over which ranks that are threads exchange without MPI
 * or sockets.
 *
 * It opens as a reliable link (like MPI: the caller turns the crank) or as one that might lose (a
 * thread does). A test can let its sends fail, and asks afterwards whether memory that the link may
 * read in place changed before it had settled.
 */
#ifndef TEST_MAILBOXES_H
#define TEST_MAILBOXES_H

#include "test_lossynet_threads.h"

/* ---- a link of mailboxes ---- */

struct letter {
    struct letter *next;
    int from;
    size_t bytes;
    uint8_t datagram[];
};

struct lent { /* a payload in registered memory, sent and not settled */
    struct lent *next;
    const uint8_t *payload;
    size_t bytes;
    uint8_t sent[];
};

enum { REGIONS = 3 * SCENARIO_WORKERS };

struct mail_link {
    struct ln_link link;
    int rank;
    struct letter *read[LOSSYNET_BATCH];
    int count;
    bool woken; /* under the office's lock */
    const uint8_t *region[REGIONS];
    size_t region_bytes[REGIONS];
    int regions;
    struct lent *lent;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t news[RANKS]; /* a rank has a letter, or is woken */
    struct letter *first[RANKS], **last[RANKS];
    int sends_left;              /* the send after so many fails; negative: none */
    atomic_int settled, changed; /* payloads in registered memory: as they were sent, or not */
} office;

static bool mail_register(struct ln_link *link, const void *memory, size_t bytes) {
    struct mail_link *mail = (struct mail_link *)link;
    if (mail->regions == REGIONS) return false;
    mail->region[mail->regions] = memory;
    mail->region_bytes[mail->regions++] = bytes;
    return true;
}

static void lend(struct mail_link *mail, const uint8_t *payload, size_t bytes) {
    for (int i = 0; i < mail->regions; i++) {
        if (payload < mail->region[i] || payload >= mail->region[i] + mail->region_bytes[i])
            continue;
        struct lent *lent = malloc(sizeof *lent + bytes);
        *lent = (struct lent){mail->lent, payload, bytes};
        memcpy(lent->sent, payload, bytes);
        mail->lent = lent;
        return;
    }
}

static void mail_settle(struct ln_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    for (struct lent *lent; (lent = mail->lent); free(lent)) {
        mail->lent = lent->next;
        const bool same = memcmp(lent->sent, lent->payload, lent->bytes) == 0;
        atomic_fetch_add(same ? &office.settled : &office.changed, 1);
    }
}

static lossynet_status mail_send(struct ln_link *link, int peer, const struct ln_datagram *batch,
                                 int count) {
    struct mail_link *mail = (struct mail_link *)link;
    lossynet_status status = LOSSYNET_OK;
    pthread_mutex_lock(&office.lock);
    if (office.sends_left >= 0 && mail->rank == 0 && office.sends_left-- == 0) {
        status = LOSSYNET_LINK;
        office.sends_left = 0; /* it stays broken */
    }
    for (int i = 0; i < count && !status; i++) {
        size_t bytes = WIRE_HEADER_BYTES + batch[i].length;
        struct letter *letter = malloc(sizeof *letter + bytes);
        *letter = (struct letter){.from = mail->rank, .bytes = bytes};
        memcpy(letter->datagram, batch[i].header, WIRE_HEADER_BYTES);
        if (batch[i].length) {
            memcpy(letter->datagram + WIRE_HEADER_BYTES, batch[i].payload, batch[i].length);
            lend(mail, batch[i].payload, batch[i].length);
        }
        *office.last[peer] = letter;
        office.last[peer] = &letter->next;
    }
    pthread_cond_signal(&office.news[peer]);
    pthread_mutex_unlock(&office.lock);
    return status;
}

static void forget(struct mail_link *mail) {
    for (int i = 0; i < mail->count; i++) free(mail->read[i]);
    mail->count = 0;
}

static int mail_receive(struct ln_link *link, struct ln_arrival *arrivals) {
    struct mail_link *mail = (struct mail_link *)link;
    forget(mail);
    pthread_mutex_lock(&office.lock);
    while (mail->count < LOSSYNET_BATCH && office.first[mail->rank]) {
        struct letter *letter = office.first[mail->rank];
        office.first[mail->rank] = letter->next;
        if (!letter->next) office.last[mail->rank] = &office.first[mail->rank];
        arrivals[mail->count] = (struct ln_arrival){
            .bytes = letter->datagram, .count = letter->bytes, .peer = letter->from};
        mail->read[mail->count++] = letter;
    }
    pthread_mutex_unlock(&office.lock);
    return mail->count;
}

static void mail_wait(struct ln_link *link, double seconds) {
    struct mail_link *mail = (struct mail_link *)link;
    const double now = ln_now(), whole = floor(now + seconds);
    const struct timespec until = {(time_t)whole, (long)((now + seconds - whole) * 1e9)};
    pthread_mutex_lock(&office.lock);
    for (int late = 0; !mail->woken && !office.first[mail->rank] && !late;)
        late = pthread_cond_timedwait(&office.news[mail->rank], &office.lock, &until);
    mail->woken = false;
    pthread_mutex_unlock(&office.lock);
}

static void mail_wake(struct ln_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    pthread_mutex_lock(&office.lock);
    mail->woken = true;
    pthread_cond_signal(&office.news[mail->rank]);
    pthread_mutex_unlock(&office.lock);
}

static void mail_close(struct ln_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    forget(mail);
    for (struct lent *lent; (lent = mail->lent); free(lent)) mail->lent = lent->next;
    free(link);
}

/* A ln_link_open: reliable. */
static lossynet_status mail_open(const struct ln_link_settings *settings, struct ln_link **out) {
    struct mail_link *mail = calloc(1, sizeof *mail);
    mail->rank = settings->world.rank;
    mail->link = (struct ln_link){
        .name = "mail",
        .features.reliable = true,
        .features.payload_most = 4096,
        .features.receive_queue = 64 * settings->world.ranks,
        .send = mail_send,
        .receive = mail_receive,
        .wait = mail_wait,
        .wake = mail_wake,
        .register_memory = mail_register,
        .settle = mail_settle,
        .close = mail_close,
    };
    *out = &mail->link;
    return LOSSYNET_OK;
}

/* A ln_link_open: might lose. */
static lossynet_status post_office_open(const struct ln_link_settings *settings,
                                        struct ln_link **out) {
    lossynet_status status = mail_open(settings, out);
    (*out)->features.reliable = false;
    return status;
}

/* Called before ranks run over the link; sends_left as in the office. */
static void office_open(int sends_left) {
    memset(&office, 0, sizeof office);
    office.sends_left = sends_left;
    pthread_mutex_init(&office.lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* that of ln_now */
    for (int r = 0; r < RANKS; r++) {
        pthread_cond_init(&office.news[r], &clock);
        office.last[r] = &office.first[r];
    }
    pthread_condattr_destroy(&clock);
}

static void office_close(void) {
    for (int r = 0; r < RANKS; r++) {
        for (struct letter *letter = office.first[r], *next; letter; letter = next) {
            next = letter->next;
            free(letter);
        }
        pthread_cond_destroy(&office.news[r]);
    }
    pthread_mutex_destroy(&office.lock);
}

/* ---- ranks that exchange over it ---- */

static int nap(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    if (random_bits(5, (uint64_t)(rank * RANKS + peer),
                    wire_get(datagram + WIRE_SEQUENCE_AT, 4) + bytes) %
            97 ==
        0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return 1;
}

/* What so many ranks compute; it must be the same in each of them. */
static inline uint64_t digest_of(int ranks, ln_link_open open, bool hurry,
                                 const struct lossynet_settings *settings,
                                 void (*work)(struct rank *, struct lossynet_comm *)) {
    struct rank rank[RANKS];
    office_open(-1);
    run_ranks(ranks, settings, open, work, rank, hurry ? nap : NULL);
    office_close();
    for (int r = 0; r < ranks; r++) {
        const struct ln_rejected none = {0};
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(rank[r].digest == rank[0].digest && rank[r].digest);
        assert_memory_equal(&rank[r].rejected, &none, sizeof none);
    }
    assert_int_equal(office.changed, 0);
    return rank[0].digest;
}

#endif

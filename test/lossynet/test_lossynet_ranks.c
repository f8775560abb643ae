/* test_lossynet_ranks.c — the exchange between ranks over a link of mailboxes in memory.
 *
 * Without MPI or sockets, under the sanitizers, as a reliable link (like MPI: the caller turns the
 * crank) and as one that might lose (a thread does):
 *   - the scenario of test_lossynet.h gives the bits of one rank with eight workers, for 2, 4 and 8
 *     ranks, with ranks that run at different speeds;
 *   - phases begun early, buckets made ready one by one and waited for one by one give the same;
 *   - owners tell senders exactly what arrived;
 *   - what an adapter may read in place does not change before it has settled;
 *   - a link that fails at its k-th call is reported by every rank, without a leak.
 */
#include "test_lossynet_threads.h"

#include "lossynet/transport/progress.h"

#include <sched.h>

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
    struct lossynet_link link;
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
    bool hurry;                  /* ranks take a nap now and then, so that others get ahead */
    atomic_int settled, changed; /* payloads in registered memory: as they were sent, or not */
    atomic_int from_device;
} office;

static bool mail_register(struct lossynet_link *link, const void *memory, size_t bytes,
                          const struct lossynet_device_memory *device) {
    struct mail_link *mail = (struct mail_link *)link;
    (void)device;
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

static void mail_settle(struct lossynet_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    for (struct lent *lent; (lent = mail->lent); free(lent)) {
        mail->lent = lent->next;
        const bool same = memcmp(lent->sent, lent->payload, lent->bytes) == 0;
        atomic_fetch_add(same ? &office.settled : &office.changed, 1);
    }
}

static lossynet_status mail_send(struct lossynet_link *link, int peer,
                                 const struct lossynet_datagram *batch, int count) {
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
            office.from_device += batch[i].device;
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

static int mail_receive(struct lossynet_link *link, struct lossynet_arrival *arrivals) {
    struct mail_link *mail = (struct mail_link *)link;
    forget(mail);
    pthread_mutex_lock(&office.lock);
    while (mail->count < LOSSYNET_BATCH && office.first[mail->rank]) {
        struct letter *letter = office.first[mail->rank];
        office.first[mail->rank] = letter->next;
        if (!letter->next) office.last[mail->rank] = &office.first[mail->rank];
        arrivals[mail->count] = (struct lossynet_arrival){
            .bytes = letter->datagram, .count = letter->bytes, .peer = letter->from};
        mail->read[mail->count++] = letter;
    }
    pthread_mutex_unlock(&office.lock);
    return mail->count;
}

static void mail_wait(struct lossynet_link *link, double seconds) {
    struct mail_link *mail = (struct mail_link *)link;
    const double now = lossynet_now(), whole = floor(now + seconds);
    const struct timespec until = {(time_t)whole, (long)((now + seconds - whole) * 1e9)};
    pthread_mutex_lock(&office.lock);
    for (int late = 0; !mail->woken && !office.first[mail->rank] && !late;)
        late = pthread_cond_timedwait(&office.news[mail->rank], &office.lock, &until);
    mail->woken = false;
    pthread_mutex_unlock(&office.lock);
}

static void mail_wake(struct lossynet_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    pthread_mutex_lock(&office.lock);
    mail->woken = true;
    pthread_cond_signal(&office.news[mail->rank]);
    pthread_mutex_unlock(&office.lock);
}

static void mail_close(struct lossynet_link *link) {
    struct mail_link *mail = (struct mail_link *)link;
    forget(mail);
    for (struct lent *lent; (lent = mail->lent); free(lent)) mail->lent = lent->next;
    free(link);
}

static lossynet_status mail_open(const struct lossynet_link_settings *settings,
                                 struct lossynet_link **out) {
    struct mail_link *mail = calloc(1, sizeof *mail);
    mail->rank = settings->world.rank;
    mail->link = (struct lossynet_link){
        .name = "mail",
        .features.reliable = true,
        .features.checks_payload = true,
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

static lossynet_status post_office_open(const struct lossynet_link_settings *settings,
                                        struct lossynet_link **out) {
    lossynet_status status = mail_open(settings, out);
    (*out)->features.reliable = false;
    return status;
}

static void office_open(bool hurry, int sends_left) {
    memset(&office, 0, sizeof office);
    office.hurry = hurry;
    office.sends_left = sends_left;
    pthread_mutex_init(&office.lock, NULL);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC); /* that of lossynet_now */
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

/* ---- the same bits ---- */

static int nap(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    if (random_bits(5, (uint64_t)(rank * RANKS + peer),
                    wire_get(datagram + WIRE_SEQUENCE_AT, 4) + bytes) %
            97 ==
        0)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return 1;
}

static uint64_t digest_of(int ranks, lossynet_link_open open, bool hurry,
                          const struct lossynet_settings *settings,
                          void (*work)(struct rank *, struct lossynet_comm *)) {
    struct rank rank[RANKS];
    office_open(hurry, -1);
    run_ranks(ranks, settings, open, work, rank, hurry ? nap : NULL);
    office_close();
    for (int r = 0; r < ranks; r++) {
        const struct lossynet_rejected none = {0};
        assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(rank[r].digest == rank[0].digest && rank[r].digest);
        assert_memory_equal(&rank[r].rejected, &none, sizeof none);
    }
    assert_int_equal(office.changed, 0);
    return rank[0].digest;
}

/* Pairs: all settings meet all numbers of ranks and both links, and every other settings the same
 * number over the same link. Elements that travel as they are leave from registered memory. */
static void same_bits_as(uint64_t want, const struct lossynet_settings *settings) {
    static int turn;
    turn++;
    for (int ranks = 2, i = turn; ranks <= RANKS; ranks *= 2, i++) {
        const lossynet_link_open open = i % 2 ? mail_open : post_office_open;
        assert_true(digest_of(ranks, open, ranks == 4, settings, run_scenario) == want);
        if (settings->wire_dtype != settings->vector_dtype)
            assert_int_equal(office.settled, 0);
        else if (settings->loss.rate[0] < 1)
            assert_true(office.settled > 1000);
    }
}

static void same_bits_with(struct lossynet_settings settings) {
    const double p = settings.loss.rate[0];
    const uint64_t want = digest_alone(&settings);
    same_bits_as(want, &settings);
    settings.loss.seed++; /* the digest sees loss */
    if (p > 0 && p < 1) assert_true(digest_alone(&settings) != want);
}

static void same_bits(const char *model, double p, lossynet_estimator estimator) {
    same_bits_with(scenario_settings(model, p, estimator));
}

static void test_same_bits(void **state) {
    (void)state;
    same_bits("bernoulli", 0, LOSSYNET_MEAN);
    same_bits("bernoulli", 0.2, LOSSYNET_MEAN);
    same_bits("bernoulli", 0.2, LOSSYNET_HT);
    same_bits("bernoulli", 1, LOSSYNET_BALANCED);
    same_bits("burst:7", 0.3, LOSSYNET_BALANCED);
    same_bits("outage:3", 0.3, LOSSYNET_HT);
    struct lossynet_settings uneven = scenario_settings("bernoulli", 0.1, LOSSYNET_HT);
    uneven.loss.at = "3=0.5,2-5=1,5=0";
    same_bits_with(uneven);
}

/* What other ranks sent lies in the caller's memory, and is given back. */
static atomic_int allocated;
static atomic_size_t allocated_bytes;

static void *allocate(size_t bytes) {
    atomic_fetch_add(&allocated, 1);
    atomic_fetch_add(&allocated_bytes, bytes);
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (memory) memset(memory, 0xff, bytes);
    return memory;
}

static void release(void *memory) {
    atomic_fetch_sub(&allocated, 1);
    free(memory);
}

static void test_same_bits_allocated(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.2, LOSSYNET_MEAN);
    settings.allocate = allocate;
    settings.release = release;
    same_bits_with(settings);
    assert_int_equal(allocated, 0);
    assert_true(allocated_bytes > 0);
}

/* The host never sees what leaves from a device's memory; over the link that checks payloads for
 * us. */
static void test_same_bits_from_a_device(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_BALANCED);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    scenario_device = true;
    same_bits_with(settings);
    assert_true(office.from_device > 1000);
    settings.error_feedback = true; /* adds to what the host has: so that is what leaves */
    settings.estimator = LOSSYNET_MEAN;
    same_bits_with(settings);
    scenario_device = false;
    assert_int_equal(office.from_device, 0);
}

static void register_bf16(struct rank *rank, struct lossynet_comm *comm) {
    const struct lossynet_device_memory device = {-1, 0};
    float *vector = calloc(lossynet_owned_elements(comm, 0) * SCENARIO_WORKERS, sizeof *vector);
    if (lossynet_register_device(comm, rank->rank, vector, vector, &device))
        rank->status = LOSSYNET_INVALID;
    free(vector);
}

static void test_vectors_of_bf16_do_not_leave_a_device(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    struct rank rank[RANKS];
    settings.wire_dtype = settings.vector_dtype = LOSSYNET_BF16;
    capture_begin();
    office_open(false, -1);
    run_ranks(SCENARIO_WORKERS, &settings, mail_open, register_bf16, rank, NULL);
    office_close();
    assert_message(capture_end(), "vectors of bf16: gradients go through the host's memory");
    for (int r = 0; r < SCENARIO_WORKERS; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
}

static void test_same_bits_retransmitted(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.4, LOSSYNET_MEAN);
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 1;
    same_bits_with(settings);
    settings.loss.model = "burst:7";
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 2;
    same_bits_with(settings);
    settings.loss.model = "outage:2";
    settings.loss.at = "1-2=0.1";
    same_bits_with(settings);
    settings.retransmission_budget = 0.2;
    same_bits_with(settings);
}

static void test_same_bits_carried(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN);
    settings.error_feedback = true;
    same_bits_with(settings);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    same_bits_with(settings);
    settings.retransmission_budget = 0.1;
    same_bits_with(settings);
}

/* Members of a group in one rank, or each in its own: with all that depends on who is whose partner. */
static void test_same_bits_in_groups(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("burst:7", 0.3, LOSSYNET_HT);
    settings.group = 2;
    same_bits_with(settings);
    settings.loss.model = "outage:2";
    settings.estimator = LOSSYNET_BALANCED;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 2;
    settings.retransmission_budget = 0.2;
    same_bits_with(settings);
    settings.loss.model = "bernoulli";
    settings.estimator = LOSSYNET_MEAN;
    settings.error_feedback = true;
    same_bits_with(settings);
    settings.wire_dtype = LOSSYNET_INT8;
    same_bits_with(settings);
}

static void same_bits_rounded(lossynet_wire_dtype wire_dtype) {
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.wire_dtype = wire_dtype;
    if (wire_dtype == LOSSYNET_BF16) same_bits_with(settings);
    settings.loss.rate[0] = settings.loss.rate[1] = 0.3;
    same_bits_with(settings);
    settings.error_feedback = true;
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 1;
    same_bits_with(settings);
}

static void test_same_bits_rounded(void **state) {
    (void)state;
    same_bits_rounded(LOSSYNET_BF16);
    same_bits_rounded(LOSSYNET_INT8);
    same_bits_rounded(LOSSYNET_INT4);
}

/* What owners hold lies apart from vectors, which are of bfloat16 where they can be: the bits of
 * vectors of float32 that hold all. */
static void same_bits_apart(struct lossynet_settings settings) {
    scenario_kind = SCENARIO_ROUNDED;
    const uint64_t want = digest_alone(&settings);
    const bool bf16 = settings.wire_dtype != LOSSYNET_FLOAT32 && !settings.error_feedback;
    scenario_kind = bf16 ? SCENARIO_BF16 : SCENARIO_APART;
    if (bf16) settings.vector_dtype = LOSSYNET_BF16;
    same_bits_as(want, &settings);
    scenario_kind = SCENARIO_ANY;
}

static void test_same_bits_apart(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.wire_dtype = LOSSYNET_BF16;
    same_bits_apart(settings);
    settings.loss.rate[0] = settings.loss.rate[1] = 0.3;
    settings.allocate = allocate;
    settings.release = release;
    same_bits_apart(settings);
    settings.estimator = LOSSYNET_HT;
    settings.loss.model = "burst:7";
    same_bits_apart(settings);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] = 1;
    settings.retransmission_rounds[LOSSYNET_PARAMETER] = 2;
    settings.retransmission_budget = 0.2;
    same_bits_apart(settings);
    settings.group = 2;
    settings.estimator = LOSSYNET_BALANCED;
    same_bits_apart(settings);
    settings.wire_dtype = LOSSYNET_INT4;
    same_bits_apart(settings);
    settings.wire_dtype = LOSSYNET_INT8;
    settings.group = 1;
    same_bits_apart(settings);
    assert_int_equal(allocated, 0);
}

/* Vectors of float32 with any wire dtype, and with error feedback. */
static void test_same_bits_apart_float32(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.3, LOSSYNET_MEAN);
    settings.error_feedback = true;
    same_bits_apart(settings);
    settings.wire_dtype = LOSSYNET_INT4;
    same_bits_apart(settings);
}

/* ---- in parts ---- */

enum { PART_BUCKETS = 5, PART_ELEMENTS = 5 * 600, PART_STEPS = 8 };
static const size_t part_elements[PART_BUCKETS] = {600, 600, 600, 600, 600};

static struct lossynet_settings part_settings(double p) {
    struct lossynet_settings settings =
        simple_settings(SCENARIO_WORKERS, part_elements, PART_BUCKETS, p);
    settings.drift_samples = 100;
    settings.return_masks = true;
    return settings;
}

struct reader { /* a thread of a forward pass */
    struct lossynet_comm *comm;
    lossynet_status status;
};

static void *read_buckets(void *argument) {
    struct reader *reader = argument;
    double waited;
    for (int b = PART_BUCKETS - 1; b >= 0 && !reader->status; b--)
        reader->status = lossynet_bucket_wait(reader->comm, b, &waited);
    return NULL;
}

/* Rounds of small messages so far. */
static uint32_t exchanges_of(const struct lossynet_comm *comm) {
    return comm->transport ? comm->transport->rounds[LOSSYNET_MEETING].begun : 0;
}

/* Two threads wait for the parameters of the last step, bucket by bucket; then gradients become
 * ready one by one; the report of the last step travels
 * with the one exchange of this step. */
static void run_parts(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks;
    float **gradient = take_vectors(local, PART_ELEMENTS);
    float **parameter = take_vectors(local, PART_ELEMENTS);
    uint64_t digest = 0xcbf29ce484222325u, mine[SCENARIO_WORKERS], all[SCENARIO_WORKERS];
    lossynet_status status = LOSSYNET_OK;
    for (uint64_t step = 0; step <= PART_STEPS && !status; step++) {
        struct reader reader[2] = {{comm, LOSSYNET_OK}, {comm, LOSSYNET_OK}};
        pthread_t thread[2];
        if (step < PART_STEPS) {
            status = lossynet_step_begin(comm, step);
            if (!status) status = lossynet_reduce_begin(comm, gradient, false);
        }
        for (int i = 0; i < 2; i++) pthread_create(&thread[i], NULL, read_buckets, &reader[i]);
        for (int i = 0; i < 2; i++) pthread_join(thread[i], NULL);
        if (reader[0].status || reader[1].status) status = LOSSYNET_LINK;
        for (int b = 0; b < PART_BUCKETS && !status && step < PART_STEPS; b++) {
            for (int v = 0; v < local; v++) {
                size_t from = (size_t)b * 600;
                for (size_t e = from; e < from + 600; e++)
                    gradient[v][e] =
                        (float)random_unit(step, (uint64_t)(rank->rank * local + v), e) +
                        0.01f * parameter[v][e];
                lossynet_bucket_ready(comm, rank->rank * local + v, b);
            }
            /* What has come by now; whether it has may differ from rank to rank. */
            for (int done = 0; done <= b && (b + (int)step) % 3; done++)
                if (!lossynet_reduce_arrived(comm, gradient, false, done)) break;
        }
        const uint32_t exchanges = exchanges_of(comm);
        if (step > 0 && !status) { /* the step before */
            status = lossynet_broadcast_end(comm);
            if (!status) status = lossynet_report_begin(comm, step - 1, parameter);
            for (int v = 0; v < local; v++)
                mine[v] = digest_bytes(step, parameter[v], PART_ELEMENTS * sizeof(float));
            if (!status) status = lossynet_all_gather_aside(comm, mine, all, sizeof *mine);
        }
        if (step < PART_STEPS && !status) { /* the last report travels by itself */
            float norm[SCENARIO_WORKERS], norms[SCENARIO_WORKERS];
            const uint32_t before = exchanges_of(comm);
            status = lossynet_reduce(comm, gradient, false);
            const uint32_t reducing = exchanges_of(comm) - before;
            for (int v = 0; v < local; v++) norm[v] = gradient[v][0];
            if (!status) status = lossynet_all_gather(comm, norm, norms, sizeof *norm);
            if (comm->transport && exchanges_of(comm) - exchanges - reducing != 1)
                status = LOSSYNET_PROTOCOL;
        }
        if (step > 0 && !status) {
            struct lossynet_counters counters;
            struct lossynet_drift drift;
            status = lossynet_report_end(comm, &counters, &drift);
            digest = digest_bytes(digest, all, sizeof all);
            digest = digest_bytes(digest, &counters, sizeof counters);
            digest = digest_bytes(digest, &drift.pair, offsetof(struct lossynet_drift, max_age));
        }
        if (step == PART_STEPS || status) break;
        for (int v = 0; v < local; v++) {
            for (int b = 0; b < PART_BUCKETS; b++) {
                size_t offset, count;
                lossynet_shard(comm, rank->rank * local + v, b, &offset, &count);
                for (size_t e = offset; e < offset + count; e++)
                    parameter[v][e] -= 0.1f * gradient[v][e];
            }
        }
        if (!status) status = lossynet_broadcast_begin(comm, parameter, false);
    }
    rank->status = status;
    rank->digest = status ? 0 : digest;
    free_vectors(parameter);
    free_vectors(gradient);
}

static void parts(int rounds, bool error_feedback) {
    struct lossynet_settings settings = part_settings(0.2);
    settings.retransmission_rounds[LOSSYNET_GRADIENT] =
        settings.retransmission_rounds[LOSSYNET_PARAMETER] = rounds;
    settings.error_feedback = error_feedback;
    if (error_feedback) settings.estimator = LOSSYNET_MEAN;
    struct lossynet_comm *comm = open_alone(&settings);
    struct rank one = {.rank = 0};
    memset(&post, 0, sizeof post);
    post.ranks = 1;
    run_parts(&one, comm);
    lossynet_close(comm);
    assert_true(one.digest != 0);
    for (int ranks = 2; ranks <= RANKS; ranks *= 2)
        assert_true(digest_of(ranks, post_office_open, ranks == 4, &settings, run_parts) ==
                    one.digest);
}

static void test_parts(void **state) {
    (void)state;
    parts(0, false);
    parts(1, false);
    parts(0, true);
}

static int sums;

static void count_sum(float *out, const float *const *sender, const float *weight, int senders,
                      size_t n, size_t packet) {
    __atomic_add_fetch(&sums, 1, __ATOMIC_RELAXED);
    lossynet_weighted_sum_plain(out, sender, weight, senders, n, packet);
}

static void reduce_once(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks;
    float **x = take_vectors(local, PART_ELEMENTS);
    rank->status = lossynet_step_begin(comm, 0);
    if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
    free_vectors(x);
}

/* A device averages a shard in one call; CPU threads share it between them. */
static void test_whole_shards(void **state) {
    (void)state;
    struct lossynet_settings settings = part_settings(0.2);
    struct lossynet_comm *comm = open_alone(&settings);
    struct rank rank[RANKS];
    int shards = 0;
    for (int w = 0; w < SCENARIO_WORKERS; w++)
        for (int b = 0; b < settings.buckets; b++) {
            size_t offset, count;
            lossynet_shard(comm, w, b, &offset, &count);
            shards += count > 0;
        }
    lossynet_close(comm);
    settings.weighted_sum = count_sum;
    for (int whole = 0; whole < 2; whole++) {
        settings.weighted_sum_whole = whole;
        sums = 0;
        office_open(false, -1);
        run_ranks(RANKS, &settings, post_office_open, reduce_once, rank, NULL);
        office_close();
        for (int r = 0; r < RANKS; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        assert_true(whole ? sums == shards : sums >= shards);
    }
}

/* ---- what arrived is told to the senders ---- */

static bool loses_data; /* every seventh DATA from each peer, of the network itself */

static int lose_data(int rank, int peer, const uint8_t *datagram, size_t bytes) {
    (void)rank, (void)peer, (void)bytes;
    return wire_type(datagram) != WIRE_DATA || !loses_data ||
           wire_get(datagram + WIRE_SEQUENCE_AT, 4) % 7 != 3;
}

static void run_phases(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks;
    float **x = take_vectors(local, PART_ELEMENTS);
    for (uint64_t step = 0; step < 8 && !rank->status; step++) {
        struct lossynet_counters counters;
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        if (!rank->status) rank->status = lossynet_broadcast(comm, x, false);
        if (!rank->status) rank->status = lossynet_step_counters(comm, step, &counters);
        for (int phase = 0; phase < 2; phase++) {
            rank->counters.expected[phase] += counters.expected[phase];
            rank->counters.arrived[phase] += counters.arrived[phase];
            rank->counters.resent[phase] += counters.resent[phase];
        }
    }
    rank->digest = 1;
    free_vectors(x);
}

static void run_masks(struct rank *rank, struct lossynet_comm *comm) {
    int local = SCENARIO_WORKERS / post.ranks, workers = SCENARIO_WORKERS;
    float **x = take_vectors(local, PART_ELEMENTS);
    size_t packets = lossynet_packets(comm), arrived = 0, lost = 0;
    for (uint64_t step = 0; step < 4 && !rank->status; step++) {
        /* Every worker's gradient is 1 in all elements; with estimator `zero` the average of a
         * packet tells how many arrived. */
        for (int v = 0; v < local; v++)
            for (size_t e = 0; e < PART_ELEMENTS; e++) x[v][e] = 1;
        rank->status = lossynet_step_begin(comm, step);
        if (!rank->status) rank->status = lossynet_reduce(comm, x, false);
        struct lossynet_counters counters;
        if (!rank->status) rank->status = lossynet_step_counters(comm, step, &counters);
        for (int v = 0; v < local; v++) {
            const uint8_t *bits = lossynet_delivered(comm, rank->rank * local + v);
            for (size_t k = 0; k < packets; k++) {
                bool there = bits[k / 8] >> k % 8 & 1;
                arrived += there;
                lost += !there;
            }
        }
        /* All bits of all senders agree with what owners counted. */
        uint64_t mine[SCENARIO_WORKERS] = {0}, all[SCENARIO_WORKERS];
        mine[0] = arrived;
        if (!rank->status) rank->status = lossynet_all_gather(comm, mine, all, sizeof *mine);
        uint64_t sum = 0;
        for (int w = 0; w < workers; w++) sum += all[w];
        rank->counters.arrived[0] += counters.arrived[0];
        rank->counters.expected[0] += counters.expected[0];
        uint64_t own = packets * (step + 1);
        if (sum != rank->counters.arrived[0] + own) rank->status = LOSSYNET_PROTOCOL;
    }
    if (lost == 0) rank->status = LOSSYNET_PROTOCOL;
    rank->digest = 1;
    free_vectors(x);
}

/* What the network itself loses is sent again as well, within a budget where there is one. */
static void test_retransmitted(void **state) {
    (void)state;
    struct lossynet_settings settings = part_settings(0);
    double lost[2];
    for (int i = 0; i < 3; i++) {
        struct rank rank[RANKS];
        const int rounds = i > 0;
        settings.retransmission_rounds[LOSSYNET_GRADIENT] =
            settings.retransmission_rounds[LOSSYNET_PARAMETER] = rounds;
        settings.retransmission_budget = i == 2 ? 0.05 : 0;
        office_open(false, -1);
        loses_data = true;
        run_ranks(4, &settings, post_office_open, run_phases, rank, lose_data);
        office_close();
        for (int r = 0; r < 4; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        for (int phase = 0; phase < 2; phase++) {
            const struct lossynet_counters *c = &rank[0].counters;
            lost[phase] = 1 - (double)c->arrived[phase] / (double)c->expected[phase];
            const double resent = (double)c->resent[phase] / (double)c->expected[phase];
            assert_true(rounds ? lost[phase] < 0.05 + settings.retransmission_budget
                               : lost[phase] > 0.08);
            assert_true((resent > 0) == (rounds > 0));
            if (i == 2) assert_true(resent <= 0.05 && resent > 0.03);
        }
    }
}

static void test_delivered(void **state) {
    (void)state;
    struct lossynet_settings settings = part_settings(0.1);
    settings.estimator = LOSSYNET_ZERO;
    struct rank one = {.rank = 0}, rank[RANKS];
    struct lossynet_comm *comm = open_alone(&settings);
    memset(&post, 0, sizeof post);
    post.ranks = 1;
    run_masks(&one, comm);
    assert_int_equal(one.status, LOSSYNET_OK);
    /* Bit by bit: injected loss is a pure function. */
    for (int w = 0; w < SCENARIO_WORKERS; w++) {
        const uint8_t *bits = lossynet_delivered(comm, w);
        for (int owner = 0; owner < SCENARIO_WORKERS; owner++) {
            size_t n = lossynet_partition_owner_packets(&comm->partition, owner), at = 0;
            uint8_t mask[256];
            assert_true(n <= sizeof mask);
            memset(mask, 1, n);
            if (w != owner)
                lossynet_loss_mask(&comm->loss, LOSSYNET_GRADIENT, 3, w, owner, n, NULL, mask);
            for (int b = 0; b < PART_BUCKETS; b++) {
                size_t shard = (size_t)b * SCENARIO_WORKERS + owner;
                for (size_t k = comm->partition.shard_packet[shard];
                     k < comm->partition.shard_packet[shard + 1]; k++, at++)
                    assert_int_equal(bits[k / 8] >> k % 8 & 1, mask[at]);
            }
        }
    }
    lossynet_close(comm);
    for (int i = 0; i < 2; i++) {
        office_open(false, -1);
        loses_data = i == 1;
        run_ranks(4, &settings, post_office_open, run_masks, rank, lose_data);
        office_close();
        for (int r = 0; r < 4; r++) assert_int_equal(rank[r].status, LOSSYNET_OK);
        if (i == 0) assert_int_equal(rank[0].counters.arrived[0], one.counters.arrived[0]);
        if (i == 1) assert_true(rank[0].counters.arrived[0] < one.counters.arrived[0]);
    }
}

/* ---- ranks that disagree, links that fail ---- */

static void refuse_each_other(const struct lossynet_settings settings[2], const char *why) {
    struct rank rank[RANKS];
    capture_begin();
    office_open(false, -1);
    run_ranks_with(2, settings, 1, mail_open, run_scenario, rank, NULL);
    office_close();
    assert_non_null(strstr(capture_end(), why));
    for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_INVALID);
}

static void test_other_settings(void **state) {
    (void)state;
    struct lossynet_settings settings[2];
    for (int r = 0; r < 2; r++)
        settings[r] = scenario_settings("bernoulli", r ? 0.2 : 0.1, LOSSYNET_MEAN);
    refuse_each_other(settings, "rank 1 was started with other settings than rank 0");
    settings[0] = settings[1];
    settings[1].wire_dtype = LOSSYNET_BF16;
    refuse_each_other(settings, "rank 1 was started with wire dtype bf16, rank 0 with float32: "
                                "expected the same on all ranks");
}

/* Rank 0's link breaks at each of its sends in turn: it reports LOSSYNET_LINK, and so do the others
 * when they have not heard it for the time-out. */
static void test_broken_link(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0.1, LOSSYNET_MEAN);
    settings.peer_timeout = 0.3;
    struct rank rank[RANKS];
    for (int sends = 0; sends < 400; sends += 1 + sends / 4) {
        capture_begin();
        office_open(false, sends);
        run_ranks(2, &settings, post_office_open, run_scenario, rank, NULL);
        office_close();
        capture_end();
        for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_LINK);
    }
}

/* A rank that gives up says so: the others fail at once, and name it. */
static void give_up(struct rank *rank, struct lossynet_comm *comm) {
    size_t elements = 0;
    for (int b = 0; b < SCENARIO_BUCKETS; b++) elements += scenario_elements[b];
    float **x = take_vectors(SCENARIO_WORKERS / post.ranks, elements);
    rank->status = lossynet_step_begin(comm, 0);
    if (rank->rank == 1) {
        lossynet_progress_enter(comm->transport);
        lossynet_session_fail(comm->transport, 0, "is not liked by this test");
        lossynet_progress_leave(comm->transport);
    }
    rank->status = lossynet_reduce(comm, x, false);
    free_vectors(x);
}

static void test_abort(void **state) {
    (void)state;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    struct rank rank[RANKS];
    capture_begin();
    office_open(false, -1);
    run_ranks(4, &settings, post_office_open, give_up, rank, NULL);
    office_close();
    const char *text = capture_end();
    assert_non_null(strstr(text, "rank 0, step 0, peer rank 1 has failed"));
    for (int r = 0; r < 4; r++) {
        assert_int_equal(rank[r].status, LOSSYNET_LINK);
        assert_true(rank[r].seconds < 5);
    }
}

/* More buckets, or packets of a shard, than a datagram's header can name. */
static void too_many(int buckets, size_t elements, const char *says) {
    size_t *bucket_elements = malloc((size_t)buckets * sizeof *bucket_elements);
    for (int b = 0; b < buckets; b++) bucket_elements[b] = elements;
    struct lossynet_settings settings = scenario_settings("bernoulli", 0, LOSSYNET_MEAN);
    settings.buckets = buckets;
    settings.bucket_elements = bucket_elements;
    settings.workers = 2;
    settings.packet_bytes = 4;
    struct rank rank[RANKS];
    capture_begin();
    office_open(false, -1);
    run_ranks(2, &settings, post_office_open, give_up, rank, NULL);
    office_close();
    assert_non_null(strstr(capture_end(), says));
    for (int r = 0; r < 2; r++) assert_int_equal(rank[r].status, LOSSYNET_INVALID);
    free(bucket_elements);
}

static void test_too_many(void **state) {
    (void)state;
    too_many(WIRE_BUCKETS + 1, 1, "buckets 4097: expected at most 4096, with more than one rank");
    too_many(1, 2 * (size_t)WIRE_PACKETS + 64,
             "bucket 0: 1048608 packets for one owner: expected at most 1048576");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_same_bits_allocated),
        cmocka_unit_test(test_same_bits_from_a_device),
        cmocka_unit_test(test_vectors_of_bf16_do_not_leave_a_device),
        cmocka_unit_test(test_same_bits_retransmitted),
        cmocka_unit_test(test_same_bits_carried),
        cmocka_unit_test(test_same_bits_in_groups),
        cmocka_unit_test(test_same_bits_rounded),
        cmocka_unit_test(test_same_bits_apart),
        cmocka_unit_test(test_same_bits_apart_float32),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_whole_shards),
        cmocka_unit_test(test_delivered),
        cmocka_unit_test(test_retransmitted),
        cmocka_unit_test(test_other_settings),
        cmocka_unit_test(test_broken_link),
        cmocka_unit_test(test_abort),
        cmocka_unit_test(test_too_many),
    };
    return cmocka_run_group_tests_name("lossynet between ranks", tests, NULL, NULL);
}

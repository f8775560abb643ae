/* test_secure.c — tests the encryption of datagrams: a sealed datagram opens, and nothing else
 * does.
 *
 * Four ranks are threads that exchange keys at a barrier. A hook changes chosen bytes of what one
 * of them sees. After that, one thread plays all ranks. Allocations of OpenSSL are counted.
 */
#include "test_lossynet.h"

#include "failing_memory.h"
#include "lossynet/crypto/crypto.h"

#ifdef LOSSYNET_SECURE

#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <sys/resource.h>
#include <pthread.h>
#include <unistd.h>

enum { RANKS = 4, MOST = 8192, SHOWN = 48 };

/* ---- allocations of OpenSSL ---- */

static __thread long allocations;
static __thread size_t allocated;

static void *counted_malloc(size_t bytes, const char *file, int line) {
    (void)file, (void)line;
    allocations++;
    allocated += bytes;
    return malloc(bytes);
}

static void *counted_realloc(void *old, size_t bytes, const char *file, int line) {
    (void)file, (void)line;
    allocations++;
    return realloc(old, bytes);
}

static void counted_free(void *memory, const char *file, int line) {
    (void)file, (void)line;
    free(memory);
}

/* ---- four ranks ---- */

/* A change to what `victim` sees of rank `from` in the round-th call of share. */
struct change {
    int round, victim, from;
    size_t byte;
    uint8_t flip;
    bool zero; /* the whole part of that rank */
};

struct group {
    struct ln_secure *rank[RANKS];
    lossynet_status status[RANKS];
    uint64_t run[RANKS];
    const char *key_file[RANKS];
    struct change change;
    pthread_barrier_t barrier;
    uint8_t all[RANKS * SHOWN];
    int round[RANKS];
};

static lossynet_status share(void *context, const struct lossynet_world *world, void *all,
                             size_t bytes) {
    struct group *group = context;
    const struct change *change = &group->change;
    size_t mine = (size_t)world->rank * bytes;
    assert_true(bytes <= SHOWN); /* of a rank, whatever the number of ranks */
    memcpy(group->all + mine, (char *)all + mine, bytes);
    pthread_barrier_wait(&group->barrier);
    memcpy(all, group->all, bytes * RANKS);
    pthread_barrier_wait(&group->barrier);
    if (group->round[world->rank]++ == change->round && world->rank == change->victim) {
        uint8_t *from = (uint8_t *)all + (size_t)change->from * bytes;
        from[change->byte] ^= change->flip;
        if (change->zero) memset(from, 0, bytes);
    }
    return LOSSYNET_OK;
}

struct thread {
    struct group *group;
    int rank;
};

static void *open_rank(void *argument) {
    struct thread *thread = argument;
    struct group *group = thread->group;
    int r = thread->rank;
    struct lossynet_world world = {
        .rank = r, .ranks = RANKS, .share = share, .share_context = group};
    group->status[r] = ln_secure_open(&world, group->run[r], group->key_file[r], &group->rank[r]);
    return NULL;
}

static void group_open(struct group *group) {
    pthread_t threads[RANKS];
    struct thread arguments[RANKS];
    pthread_barrier_init(&group->barrier, NULL, RANKS);
    for (int r = 0; r < RANKS; r++) {
        arguments[r] = (struct thread){group, r};
        assert_int_equal(pthread_create(&threads[r], NULL, open_rank, &arguments[r]), 0);
    }
    for (int r = 0; r < RANKS; r++) pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&group->barrier);
}

static struct group *group_take(uint64_t run) {
    struct group *group = calloc(1, sizeof *group);
    group->change.round = -1;
    for (int r = 0; r < RANKS; r++) group->run[r] = run;
    return group;
}

static struct group *group_of(uint64_t run) {
    struct group *group = group_take(run);
    group_open(group);
    for (int r = 0; r < RANKS; r++) assert_int_equal(group->status[r], LOSSYNET_OK);
    return group;
}

static void group_close(struct group *group) {
    for (int r = 0; r < RANKS; r++) ln_secure_close(group->rank[r]);
    free(group);
}

/* ---- datagrams ---- */

struct datagram {
    uint8_t header[WIRE_HEADER_BYTES];
    uint8_t payload[MOST + LOSSYNET_SECURE_BYTES];
    size_t length; /* with the trailer */
};

static uint8_t plain[MOST];

static struct datagram sealed_for(struct group *group, int sender, int to, size_t length) {
    struct datagram d = {.length = length + LOSSYNET_SECURE_BYTES};
    for (size_t i = 0; i < WIRE_HEADER_BYTES; i++) d.header[i] = (uint8_t)random_bits(1, i, 0);
    ln_secure_seal(group->rank[sender], to, d.header, plain, length, d.payload);
    return d;
}

static struct datagram sealed(struct group *group, int sender, size_t length) {
    return sealed_for(group, sender, 1, length);
}

/* Opens a copy that ends where the datagram ends, so that address sanitizer sees overruns. */
static bool opens(struct group *group, int receiver, int sender, const struct datagram *d) {
    uint8_t *copy = malloc(d->length + 1);
    memcpy(copy, d->payload, d->length);
    bool opened = ln_secure_open_datagram(group->rank[receiver], sender, d->header, copy,
                                          d->length) == LOSSYNET_SECURE_OPENED;
    if (opened) assert_memory_equal(copy, plain, d->length - LOSSYNET_SECURE_BYTES);
    free(copy);
    return opened;
}

static void test_round_trip(void **state) {
    (void)state;
    struct group *group = group_of(1);
    const size_t lengths[] = {0, 4, 1420, 4096, 8192};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int sender = 0; sender < RANKS; sender++)
            for (int to = 0; to < RANKS; to++) {
                if (to == sender) continue;
                struct datagram d = sealed_for(group, sender, to, lengths[i]);
                for (int r = 0; r < RANKS; r++) /* nobody else; none for itself */
                    assert_int_equal(opens(group, r, sender, &d), r == to);
            }
    group_close(group);
}

/* Each pair has a key of its own for each direction. */
static void test_pairs(void **state) {
    (void)state;
    struct group *group = group_of(1);
    const struct datagram d[] = {sealed_for(group, 0, 1, 64), sealed_for(group, 0, 2, 64),
                                 sealed_for(group, 1, 0, 64), sealed_for(group, 2, 1, 64)};
    const size_t n = sizeof d / sizeof *d;
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < i; k++) { /* the same bytes, with the same counter */
            assert_int_equal(wire_get(d[i].payload + 64, 8), 0);
            assert_memory_not_equal(d[i].payload, d[k].payload, 64);
        }
    assert_false(opens(group, 3, 0, &d[0])); /* a third rank */
    assert_false(opens(group, 0, 1, &d[0])); /* sent back */
    assert_true(opens(group, 1, 0, &d[0]));
    group_close(group);
}

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

/* Ranks with one secret agree; with different ones, or where one has none, they do not. */
static void test_key_file(void **state) {
    (void)state;
    char right[] = "/tmp/lossynet_key_XXXXXX", wrong[] = "/tmp/lossynet_key_XXXXXX";
    close(mkstemp(right)), close(mkstemp(wrong));
    write_file(right, "0123456789abcdef");
    const char *const others[] = {right, wrong, NULL, wrong, "/nonexistent/key"};
    const char *const says[] = {"", "one key file", "one key file", "expected a file of 16",
                                "expected a file of 16"};
    for (int i = 0; i < 5; i++) {
        write_file(wrong, i == 3 ? "0123456789abcde" : "0123456789abcdeg");
        struct group *group = group_take(1);
        for (int r = 0; r < RANKS; r++) group->key_file[r] = r == 2 ? others[i] : right;
        capture_begin();
        group_open(group);
        const char *said = capture_end();
        assert_non_null(strstr(said, says[i]));
        for (int r = 0; r < RANKS; r++)
            assert_int_equal(group->status[r], i == 0 ? LOSSYNET_OK : LOSSYNET_PROTOCOL);
        group_close(group);
    }
    unlink(right), unlink(wrong);
}

/* Each datagram is opened once, in whatever order they come; what is older than the last 4,096 is
 * refused. One that is forged does not count as having come. */
static void test_replayed(void **state) {
    (void)state;
    enum { SENT = 10000 };
    struct group *group = group_of(1);
    struct datagram *d = calloc(SENT, sizeof *d);
    for (int i = 0; i < SENT; i++) d[i] = sealed(group, 0, 4);
    const int order[] = {0, 2, 1, 70, 7, 64, 63, 4095, 4094, 9, 5000, 1000, 4999};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        struct datagram forged = d[order[i]];
        forged.payload[0] ^= 1;
        assert_false(opens(group, 1, 0, &forged));
        assert_true(opens(group, 1, 0, &d[order[i]]));
        for (size_t k = 0; k <= i; k++) assert_false(opens(group, 1, 0, &d[order[k]]));
    }
    assert_true(opens(group, 1, 0, &d[905]));  /* of the last 4,096 */
    assert_false(opens(group, 1, 0, &d[904])); /* never came, but is too old */
    assert_true(opens(group, 1, 0, &d[SENT - 1]));
    assert_true(opens(group, 1, 0, &d[SENT - 4096]));
    assert_false(opens(group, 1, 0, &d[SENT - 4097]));
    const struct datagram another = sealed_for(group, 0, 2, 4); /* each receiver for itself */
    assert_true(opens(group, 2, 0, &another));
    free(d);
    group_close(group);
}

/* Nothing of the payload is readable, and the same payload never looks the same. */
static void test_secret(void **state) {
    (void)state;
    struct group *group = group_of(1);
    struct datagram a = sealed(group, 0, 4096), b = sealed(group, 0, 4096);
    size_t like_plain = 0, like_other = 0;
    for (size_t i = 0; i < 4096; i++) {
        like_plain += a.payload[i] == plain[i];
        like_other += a.payload[i] == b.payload[i];
    }
    assert_in_range(like_plain, 0, 60); /* 16 by chance */
    assert_in_range(like_other, 0, 60);
    group_close(group);
}

static void test_every_bit(void **state) {
    (void)state;
    struct group *group = group_of(1);
    struct datagram d = sealed(group, 2, 20);
    uint8_t *part[2] = {d.header, d.payload};
    size_t bytes[2] = {WIRE_HEADER_BYTES, d.length};
    for (int p = 0; p < 2; p++)
        for (size_t bit = 0; bit < 8 * bytes[p]; bit++) {
            part[p][bit / 8] ^= (uint8_t)(1u << bit % 8);
            assert_false(opens(group, 1, 2, &d));
            part[p][bit / 8] ^= (uint8_t)(1u << bit % 8);
        }
    assert_true(opens(group, 1, 2, &d));
    group_close(group);
}

static void test_truncated(void **state) {
    (void)state;
    struct group *group = group_of(1);
    struct datagram d = sealed(group, 2, 100);
    size_t whole = d.length;
    for (d.length = 0; d.length < whole; d.length++) assert_false(opens(group, 1, 2, &d));
    d.length = whole + 1;
    assert_false(opens(group, 1, 2, &d));
    d.length = whole;
    assert_true(opens(group, 1, 2, &d));
    group_close(group);
}

static void test_other_sender(void **state) {
    (void)state;
    struct group *group = group_of(1);
    struct datagram d = sealed(group, 2, 64);
    const int senders[] = {0, 1, 3, 4, -1, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof senders / sizeof *senders; i++)
        assert_false(opens(group, 1, senders[i], &d));
    assert_true(opens(group, 1, 2, &d));
    group_close(group);
}

static void test_other_run(void **state) {
    (void)state;
    struct group *a = group_of(1), *b = group_of(2), *again = group_of(1);
    struct datagram d = sealed(a, 2, 64);
    assert_false(opens(b, 1, 2, &d));
    assert_false(opens(again, 1, 2, &d));
    assert_true(opens(a, 1, 2, &d));
    group_close(a);
    group_close(b);
    group_close(again);
}

static void test_nonces(void **state) {
    (void)state;
    struct group *group = group_of(1);
    uint64_t last = 0;
    for (int i = 0; i < 1000000; i++) {
        uint8_t header[WIRE_HEADER_BYTES] = {0}, out[4 + LOSSYNET_SECURE_BYTES];
        ln_secure_seal(group->rank[0], 1, header, plain, 4, out);
        uint64_t counter = wire_get(out + 4, 8);
        if (i > 0) assert_true(counter > last);
        last = counter;
    }
    group_close(group);
}

static void test_allocates_nothing(void **state) {
    (void)state;
    struct group *group = group_of(1);
    struct datagram d = sealed(group, 2, 1420), bad = d;
    bad.payload[7] ^= 1;
    assert_true(opens(group, 1, 2, &d));
    assert_false(opens(group, 1, 2, &bad));
    long before = allocations;
    for (int i = 0; i < 100; i++) {
        d = sealed(group, 2, 1420);
        assert_true(opens(group, 1, 2, &d));
        assert_false(opens(group, 1, 2, &bad));
    }
    assert_int_equal(allocations, before);
    group_close(group);
}

/* ---- the exchange of keys ---- */

/* All four fail, with one line each. */
static void refused(struct group *group) {
    capture_begin();
    group_open(group);
    const char *text = capture_end();
    int lines = 0;
    for (const char *c = text; *c; c++) lines += *c == '\n';
    for (int r = 0; r < RANKS; r++) {
        assert_int_equal(group->status[r], LOSSYNET_PROTOCOL);
        assert_null(group->rank[r]);
    }
    assert_int_equal(lines, RANKS);
    group_close(group);
}

static void test_tampered(void **state) {
    (void)state;
    for (size_t byte = 0; byte < 32; byte += 3) { /* rank 3's public key, as rank 1 sees it */
        struct group *group = group_take(1);
        group->change =
            (struct change){.round = 0, .victim = 1, .from = 3, .byte = byte, .flip = 4};
        refused(group);
    }
    for (size_t byte = 0; byte < 32; byte += 3) { /* rank 0's confirmation, as rank 1 sees it */
        struct group *group = group_take(1);
        group->change =
            (struct change){.round = 1, .victim = 1, .from = 0, .byte = byte, .flip = 16};
        refused(group);
    }
    struct group *group = group_take(1); /* a public key whose secret would be known to all */
    group->change = (struct change){.round = 0, .victim = 1, .from = 3, .zero = true};
    refused(group);
    group = group_take(1);
    group->run[2] = 7;
    refused(group);
}

static lossynet_status share_fails(void *context, const struct lossynet_world *world, void *all,
                                   size_t bytes) {
    (void)world, (void)all, (void)bytes;
    return --*(int *)context < 0 ? LOSSYNET_LINK : LOSSYNET_OK;
}

/* A rank alone, and everything that can fail for it. */
static void test_alone(void **state) {
    (void)state;
    int left;
    const struct lossynet_world world = {
        .rank = 0, .ranks = 1, .share = share_fails, .share_context = &left};
    struct ln_secure *secure = NULL;
    for (int calls = 0; calls < 4; calls++) {
        left = calls;
        lossynet_status status = ln_secure_open(&world, 1, NULL, &secure);
        assert_int_equal(status, calls < 3 ? LOSSYNET_LINK : LOSSYNET_OK);
        assert_true((secure != NULL) == (calls == 3));
    }
    ln_secure_close(secure);
    ln_secure_close(NULL);
    for (int after = 0; after < 2; after++) {
        left = 3;
        memory_fail_after = after;
        capture_begin();
        lossynet_status status = ln_secure_open(&world, 1, NULL, &secure);
        assert_message(capture_end(), "no memory");
        memory_fail_after = -1;
        assert_int_equal(status, LOSSYNET_NO_MEMORY);
        assert_null(secure);
    }
}

/* What is said to be held is about what OpenSSL takes for a context. */
static void test_memory(void **state) {
    (void)state;
    enum { PEERS = 16, CONTEXTS = 3 * PEERS };
    EVP_CIPHER_CTX *context[CONTEXTS];
    uint8_t key[32] = {0};
    size_t before = allocated;
    for (int i = 0; i < CONTEXTS; i++) {
        context[i] = EVP_CIPHER_CTX_new();
        assert_int_equal(EVP_CipherInit_ex(context[i], EVP_aes_256_gcm(), NULL, key, NULL, 0), 1);
    }
    double said = (double)(ln_secure_memory(1 + PEERS) - ln_secure_memory(1));
    double ratio = said / (double)(allocated - before);
    assert_true(ratio > 0.8 && ratio < 1.5);
    for (int i = 0; i < CONTEXTS; i++) EVP_CIPHER_CTX_free(context[i]);
}

/* Whether the heap holds these bytes. (The address sanitizer has its memory elsewhere.) */
static bool heap_has(const uint8_t *bytes, size_t count) {
    char line[512];
    unsigned long first, end;
    bool has = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "[heap]") && sscanf(line, "%lx-%lx", &first, &end) == 2)
            has = has || memmem((const void *)first, end - first, bytes, count);
    fclose(maps);
    return has;
}

/* What is freed holds no key, and no core dump may hold it. */
static void test_nothing_is_left_of_a_key_file(void **state) {
    (void)state;
    char path[64];
    uint8_t bytes[48];
    struct ln_key key;
    struct rlimit limit;
    snprintf(path, sizeof path, "/tmp/lossynet-key-%d", (int)getpid());
    const int file = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    assert_true(file >= 0);
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (uint8_t)(ln_mix(i) >> 7);
    assert_int_equal(write(file, bytes, sizeof bytes), sizeof bytes);
    close(file);
    assert_int_equal(getrlimit(RLIMIT_CORE, &limit), 0);
    limit.rlim_cur = limit.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_CORE, &limit), 0);
    assert_true(ln_key_read(path, 0, &key));
    assert_memory_equal(key.bytes, bytes, sizeof bytes);
    assert_false(heap_has(bytes, sizeof bytes));
    assert_int_equal(getrlimit(RLIMIT_CORE, &limit), 0);
    assert_true(limit.rlim_cur <= 1);
    unlink(path);
}

int main(void) {
    if (CRYPTO_set_mem_functions(counted_malloc, counted_realloc, counted_free) != 1) return 1;
    for (size_t i = 0; i < MOST; i++) plain[i] = (uint8_t)random_bits(2, i, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_is_left_of_a_key_file),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_replayed),
        cmocka_unit_test(test_key_file),
        cmocka_unit_test(test_secret),
        cmocka_unit_test(test_every_bit),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_other_sender),
        cmocka_unit_test(test_other_run),
        cmocka_unit_test(test_nonces),
        cmocka_unit_test(test_allocates_nothing),
        cmocka_unit_test(test_tampered),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_pairs),
    };
    return cmocka_run_group_tests_name("encryption", tests, NULL, NULL);
}

#else

int main(void) {
    const struct lossynet_world world = {.rank = 0, .ranks = 1};
    struct ln_secure *secure;
    if (ln_secure_open(&world, 1, NULL, NULL, NULL, &secure) != LOSSYNET_INVALID) return 1;
    printf("built without OpenSSL\n");
    return 77;
}

#endif

/* crypto.c — encrypts and authenticates datagrams with OpenSSL's libcrypto. See crypto.h.
 *
 * The file has first the calls of OpenSSL, then the exchange of keys, then sealing and opening.
 * Without OpenSSL (SECURE=0, or not found) only the stubs at the end are built.
 */
#include "lossynet/crypto/crypto.h"

#ifdef LOSSYNET_SECURE

#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { KEY_BYTES = 32, COUNTER_BYTES = 8, TAG_BYTES = 16, NONCE_BYTES = 12 };
_Static_assert(LOSSYNET_SECURE_BYTES == COUNTER_BYTES + TAG_BYTES, "the trailer");

/* Notes which datagrams of a key have come: the anti-replay window of RFC 4303, section 3.4.3, as a
 * ring (RFC 6479). A datagram is refused if it comes behind another whose counter is larger by
 * WINDOW or more. */
enum { WINDOW = 4096 };

struct origin {
    EVP_CIPHER_CTX *open; /* with the sender's key; NULL for this rank, or if there is no key */
    uint64_t next;        /* the highest counter that has come, plus 1 */
    uint64_t came[WINDOW / 64];
};

struct target {
    EVP_CIPHER_CTX *seal; /* with the key for this target */
    uint64_t counter;     /* nonce of the next datagram */
};

struct pair { /* this rank and another */
    struct target to;
    struct origin from; /* what the other sealed for this rank */
};

struct ln_secure {
    int ranks;
    struct pair with[]; /* [ranks] */
};

/* A core dump would hold the keys of the run. Files need a limit of more; and with a limit of 1 the kernel
 * does not hand the dump to a program either (core(5), core_pattern with a pipe), as with 0 it would. Not
 * PR_SET_DUMPABLE: MPI could no longer copy between processes of a host. Who needs a dump can raise
 * the limit again. */
static void forbid_core_dumps(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_CORE, &limit) || limit.rlim_cur <= 1) return;
    limit.rlim_cur = 1;
    setrlimit(RLIMIT_CORE, &limit);
}

/* ---- calls of OpenSSL; functions return false if it fails ---- */

static bool key_pair(EVP_PKEY **pair, uint8_t *public) {
    size_t bytes = KEY_BYTES;
    *pair = EVP_PKEY_Q_keygen(NULL, NULL, "X25519");
    return *pair && EVP_PKEY_get_raw_public_key(*pair, public, &bytes) == 1 && bytes == KEY_BYTES;
}

/* Computes the X25519 secret of two ranks. Fails for public keys that would make the secret the
 * same for everybody. */
static bool agree(EVP_PKEY *mine, const uint8_t *public, uint8_t *secret) {
    size_t bytes = KEY_BYTES;
    EVP_PKEY *theirs = EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, NULL, public, KEY_BYTES);
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new(mine, NULL);
    bool ok = theirs && context && EVP_PKEY_derive_init(context) == 1 &&
              EVP_PKEY_derive_set_peer(context, theirs) == 1 &&
              EVP_PKEY_derive(context, secret, &bytes) == 1 && bytes == KEY_BYTES;
    EVP_PKEY_CTX_free(context);
    EVP_PKEY_free(theirs);
    return ok;
}

/* Derives a key for one purpose, from one rank to another, with HKDF-SHA256. */
static bool derive(const uint8_t *secret, const uint8_t *salt, const char *purpose, int from,
                   int to, uint8_t *key) {
    uint8_t info[32] = {0};
    memcpy(info, purpose, strlen(purpose)); /* at most 24 */
    wire_put(info + 24, (uint64_t)from, 4);
    wire_put(info + 28, (uint64_t)to, 4);
    OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, (char *)"SHA256", 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, (void *)secret, KEY_BYTES),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, (void *)salt, KEY_BYTES),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info, sizeof info),
        OSSL_PARAM_construct_end(),
    };
    EVP_KDF *hkdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *context = hkdf ? EVP_KDF_CTX_new(hkdf) : NULL;
    bool ok = context && EVP_KDF_derive(context, key, KEY_BYTES, parameters) == 1;
    EVP_KDF_CTX_free(context);
    EVP_KDF_free(hkdf);
    return ok;
}

static bool hash(const void *bytes, size_t count, uint8_t *digest) {
    return EVP_Digest(bytes, count, digest, NULL, EVP_sha256(), NULL) == 1;
}

/* Makes a cipher context with its key schedule. Each datagram sets only the nonce. */
static EVP_CIPHER_CTX *cipher_open(const uint8_t *key, bool seals) {
    EVP_CIPHER_CTX *cipher = EVP_CIPHER_CTX_new();
    if (cipher && EVP_CipherInit_ex(cipher, EVP_aes_256_gcm(), NULL, key, NULL, seals) == 1)
        return cipher;
    EVP_CIPHER_CTX_free(cipher);
    return NULL;
}

/* Encrypts or decrypts a payload, by what the cipher was opened for, and makes or checks the tag.
 * */
static bool cipher_run(EVP_CIPHER_CTX *cipher, uint64_t counter, const uint8_t *header,
                       const uint8_t *in, int bytes, uint8_t *out, uint8_t *tag) {
    uint8_t nonce[NONCE_BYTES] = {0};
    const bool seals = EVP_CIPHER_CTX_is_encrypting(cipher);
    int n;
    wire_put(nonce + NONCE_BYTES - COUNTER_BYTES, counter, COUNTER_BYTES);
    return EVP_CipherInit_ex(cipher, NULL, NULL, NULL, nonce, -1) == 1 &&
           EVP_CipherUpdate(cipher, NULL, &n, header, WIRE_HEADER_BYTES) == 1 &&
           (bytes == 0 || EVP_CipherUpdate(cipher, out, &n, in, bytes) == 1) &&
           (seals || EVP_CIPHER_CTX_ctrl(cipher, EVP_CTRL_AEAD_SET_TAG, TAG_BYTES, tag) == 1) &&
           EVP_CipherFinal_ex(cipher, out, &n) == 1 &&
           (!seals || EVP_CIPHER_CTX_ctrl(cipher, EVP_CTRL_AEAD_GET_TAG, TAG_BYTES, tag) == 1);
}

/* ---- the exchange of keys ---- */

struct exchange {
    const struct lossynet_world *world;
    EVP_PKEY *pair;
    uint8_t salt[KEY_BYTES];    /* see make_salt */
    uint8_t *context, *publics; /* one piece: 8 bytes run, 8 bytes ranks; then [ranks][KEY_BYTES] */
    uint8_t *confirmed;         /* [ranks][KEY_BYTES]: see confirm */
    uint8_t *verdicts;          /* [ranks]: 1 = the rank holds every key */
    struct ln_key shared;       /* contents of the key file */
    bool logged;
};

enum { CONTEXT_BYTES = 16 };

static bool failed(struct exchange *x, const char *what) {
    const char *reason = ERR_reason_error_string(ERR_peek_last_error());
    if (!x->logged)
        ln_log("encryption: rank %d: OpenSSL cannot %s (%s): expected OpenSSL 3 with X25519, "
               "HKDF-SHA256 and AES-256-GCM",
               x->world->rank, what, reason ? reason : "no reason given");
    x->logged = true;
    ERR_clear_error();
    return false;
}

/* Computes the key for one purpose between two ranks, one of which is this rank. */
static bool pair_key(struct exchange *x, const char *purpose, int from, int to, uint8_t *key) {
    uint8_t secret[KEY_BYTES];
    int other = from == x->world->rank ? to : from;
    bool ok = agree(x->pair, x->publics + (size_t)other * KEY_BYTES, secret) &&
              derive(secret, x->salt, purpose, from, to, key);
    OPENSSL_cleanse(secret, sizeof secret);
    return ok;
}

/* Makes the salt: the SHA-256 of run id, number of ranks and public keys. With a key file the salt
 * also depends on its contents, so that nobody without them can compute a key. */
static bool make_salt(struct exchange *x) {
    size_t publics = (size_t)x->world->ranks * KEY_BYTES;
    if (!hash(x->context, CONTEXT_BYTES + publics, x->salt)) return false;
    if (!x->shared.count) return true;
    uint8_t both[KEY_BYTES + LOSSYNET_KEY_MOST];
    memcpy(both, x->salt, KEY_BYTES);
    memcpy(both + KEY_BYTES, x->shared.bytes, x->shared.count);
    bool ok = hash(both, KEY_BYTES + x->shared.count, x->salt);
    OPENSSL_cleanse(both, sizeof both);
    return ok;
}

static bool read_shared(struct exchange *x, const char *path) {
    if (!path || ln_key_read(path, x->world->rank, &x->shared)) return true;
    x->logged = true;
    return false;
}

static bool draw_keys(struct exchange *x) {
    return key_pair(&x->pair, x->publics + (size_t)x->world->rank * KEY_BYTES) ||
           failed(x, "draw keys");
}

/* Makes one key for each direction between this rank and each other rank. */
static bool make_pairs(struct exchange *x, struct ln_secure *secure) {
    uint8_t key[KEY_BYTES];
    const int rank = x->world->rank;
    bool ok = make_salt(x);
    for (int r = 0; ok && r < x->world->ranks; r++) {
        struct pair *with = &secure->with[r];
        if (r == rank) continue;
        ok = pair_key(x, "lossynet 5 datagrams", rank, r, key) &&
             (with->to.seal = cipher_open(key, true)) &&
             pair_key(x, "lossynet 5 datagrams", r, rank, key) &&
             (with->from.open = cipher_open(key, false));
    }
    OPENSSL_cleanse(key, sizeof key);
    return ok || failed(x, "make keys");
}

/* What a rank says of the exchange. Whoever has seen other public keys, another run or another key
 * file has another salt, and cannot say it. */
static bool confirm(struct exchange *x, int rank, uint8_t *said) {
    return derive(x->salt, x->salt, "lossynet 5 confirms", rank, rank, said) ||
           failed(x, "make keys");
}

static bool refuse(struct exchange *x, int from) {
    if (!x->logged)
        ln_log("encryption: the keys of ranks %d and %d do not fit: expected an exchange of keys "
               "that nothing changes on its way, one run id, and one key file",
               x->world->rank, from);
    x->logged = true;
    ERR_clear_error();
    return false;
}

static bool is_confirmed(struct exchange *x) {
    uint8_t right[KEY_BYTES];
    bool ok = true;
    for (int r = 0; r < x->world->ranks && ok; r++)
        ok = confirm(x, r, right) &&
             (!CRYPTO_memcmp(right, x->confirmed + (size_t)r * KEY_BYTES, KEY_BYTES) ||
              refuse(x, r));
    return ok;
}

/* Exchanges keys. A rank that fails goes on calling `share`, so that no other rank waits for it,
 * and all fail together. */
static lossynet_status exchange_keys(struct exchange *x, const char *key_file,
                                     struct ln_secure *secure) {
    size_t ranks = (size_t)x->world->ranks;
    bool ok = read_shared(x, key_file) && draw_keys(x);
    lossynet_status status = ln_share(x->world, x->publics, KEY_BYTES);
    if (status) return status;
    const int rank = x->world->rank;
    ok = ok && make_pairs(x, secure) && confirm(x, rank, x->confirmed + (size_t)rank * KEY_BYTES);
    status = ln_share(x->world, x->confirmed, KEY_BYTES);
    if (status) return status;
    x->verdicts[rank] = ok && is_confirmed(x);
    status = ln_share(x->world, x->verdicts, 1);
    if (status) return status;
    for (size_t r = 0; r < ranks; r++) {
        if (x->verdicts[r] == 1) continue;
        if (!x->logged)
            ln_log("encryption: rank %d: rank %zu has not accepted the exchange of keys",
                   x->world->rank, r);
        return LOSSYNET_PROTOCOL;
    }
    return LOSSYNET_OK;
}

lossynet_status ln_secure_open(const struct lossynet_world *world, uint64_t run,
                               const char *key_file, struct ln_secure **out) {
    size_t ranks = (size_t)world->ranks;
    size_t bytes = CONTEXT_BYTES + ranks * (2 * KEY_BYTES + 1);
    struct exchange x = {.world = world, .context = ln_memory_take(bytes, 1)};
    struct ln_secure *secure = ln_memory_take(sizeof *secure + ranks * sizeof *secure->with, 1);
    lossynet_status status = LOSSYNET_NO_MEMORY;
    *out = NULL;
    forbid_core_dumps();
    if (!x.context || !secure) {
        ln_log("encryption: rank %d: no memory for %zu bytes of keys", world->rank, bytes);
        goto free_both;
    }
    wire_put(x.context, run, 8);
    wire_put(x.context + 8, ranks, 8);
    x.publics = x.context + CONTEXT_BYTES;
    x.confirmed = x.publics + ranks * KEY_BYTES;
    x.verdicts = x.confirmed + ranks * KEY_BYTES;
    secure->ranks = world->ranks;
    status = exchange_keys(&x, key_file, secure);
    EVP_PKEY_free(x.pair);
    OPENSSL_cleanse(x.context, bytes);
    OPENSSL_cleanse(&x, offsetof(struct exchange, context));
    OPENSSL_cleanse(&x.shared, sizeof x.shared);
free_both:
    free(x.context);
    if (status)
        ln_secure_close(secure);
    else
        *out = secure;
    return status;
}

void ln_secure_close(struct ln_secure *secure) {
    if (!secure) return;
    for (int r = 0; r < secure->ranks; r++) { /* wipes the keys; NULL is fine */
        EVP_CIPHER_CTX_free(secure->with[r].to.seal);
        EVP_CIPHER_CTX_free(secure->with[r].from.open);
    }
    free(secure);
}

/* ---- proofs ---- */

bool ln_key_read(const char *path, int rank, struct ln_key *key) {
    FILE *file = fopen(path, "rbe");
    forbid_core_dumps();
    if (file) setvbuf(file, NULL, _IONBF, 0); /* a buffer would be freed with the key in it */
    key->count = file ? fread(key->bytes, 1, sizeof key->bytes, file) : 0;
    bool whole = file && !ferror(file) && fgetc(file) == EOF;
    if (file) fclose(file);
    if (whole && key->count >= LOSSYNET_KEY_LEAST) return true;
    if (rank >= 0)
        ln_log("encryption: rank %d: key file '%s': expected a file of %d to %d bytes, such as "
               "head -c 32 /dev/urandom writes, the same on all ranks",
               rank, path, LOSSYNET_KEY_LEAST, LOSSYNET_KEY_MOST);
    return false;
}

bool ln_key_proof_of(const struct ln_key *key, const void *message, size_t bytes,
                     uint8_t proof[LOSSYNET_PROOF_BYTES]) {
    if (EVP_Q_mac(NULL, "HMAC", NULL, "SHA256", NULL, key->bytes, key->count, message, bytes, proof,
                  LOSSYNET_PROOF_BYTES, NULL))
        return true;
    ln_log("encryption: OpenSSL cannot compute an HMAC: expected OpenSSL 3 with SHA-256");
    ERR_clear_error();
    return false;
}

/* ---- datagrams ---- */

/* A counter that only grows is the deterministic construction of SP 800-38D, section 8.2.1. With it
 * one key may seal 2^64 datagrams (section 8.3). After 30 days at 100 Gbit/s a key has encrypted b
 * = 2^51 blocks. An attacker's advantage in telling them from noise is then at most b^2 / 2^129 =
 * 2^-27. */
void ln_secure_seal(struct ln_secure *secure, int to, const uint8_t *header, const void *payload,
                    size_t length, uint8_t *out) {
    struct target *target = &secure->with[to].to;
    uint64_t counter = target->counter++;
    uint8_t *trailer = out + length;
    wire_put(trailer, counter, COUNTER_BYTES);
    if (cipher_run(target->seal, counter, header, payload, (int)length, out,
                   trailer + COUNTER_BYTES))
        return;
    memset(out, 0, length + LOSSYNET_SECURE_BYTES); /* the plain payload must never be sent */
}

static bool is_new(const struct origin *from, uint64_t counter) {
    if (counter >= from->next) return true;
    return from->next - counter <= WINDOW &&
           !(from->came[counter % WINDOW / 64] >> counter % 64 & 1);
}

static void note(struct origin *from, uint64_t counter) {
    if (counter >= from->next && counter - from->next >= WINDOW)
        memset(from->came, 0, sizeof from->came);
    else
        for (uint64_t c = from->next; c <= counter; c++)
            from->came[c % WINDOW / 64] &= ~((uint64_t)1 << c % 64);
    if (counter >= from->next) from->next = counter + 1;
    from->came[counter % WINDOW / 64] |= (uint64_t)1 << counter % 64;
}

ln_secure_verdict ln_secure_open_datagram(struct ln_secure *secure, int sender,
                                          const uint8_t *header, uint8_t *payload, size_t length) {
    if (sender < 0 || sender >= secure->ranks) return LOSSYNET_SECURE_FORGED;
    struct origin *from = &secure->with[sender].from;
    if (!from->open) return LOSSYNET_SECURE_FORGED;
    if (length < LOSSYNET_SECURE_BYTES || length > INT32_MAX) return LOSSYNET_SECURE_FORGED;
    length -= LOSSYNET_SECURE_BYTES;
    const uint64_t counter = wire_get(payload + length, COUNTER_BYTES);
    if (counter == UINT64_MAX) return LOSSYNET_SECURE_FORGED; /* no sender reaches it */
    if (!cipher_run(from->open, counter, header, payload, (int)length, payload,
                    payload + length + COUNTER_BYTES))
        return LOSSYNET_SECURE_FORGED;
    if (!is_new(from, counter)) return LOSSYNET_SECURE_REPLAYED;
    note(from, counter);
    return LOSSYNET_SECURE_OPENED;
}

bool ln_secure_available(void) {
    return true;
}

/* Measured with OpenSSL 3.0: an AES-256-GCM context is 1,200 bytes in three allocations. */
size_t ln_secure_memory(int ranks) {
    return sizeof(struct ln_secure) + (size_t)ranks * (sizeof(struct pair) + 2 * 1200);
}

#else

bool ln_secure_available(void) {
    return false;
}

bool ln_key_read(const char *path, int rank, struct ln_key *key) {
    (void)path, (void)key;
    if (rank >= 0)
        ln_log("rank %d: a key file needs OpenSSL: install libssl-dev and build again", rank);
    return false;
}

bool ln_key_proof_of(const struct ln_key *key, const void *message, size_t bytes,
                     uint8_t proof[LOSSYNET_PROOF_BYTES]) {
    (void)key, (void)message, (void)bytes, (void)proof;
    return false;
}

lossynet_status ln_secure_open(const struct lossynet_world *world, uint64_t run,
                               const char *key_file, struct ln_secure **out) {
    (void)run, (void)key_file;
    if (world->rank == 0)
        ln_log("encryption: built without OpenSSL: install libssl-dev and build again");
    *out = NULL;
    return LOSSYNET_INVALID;
}

void ln_secure_close(struct ln_secure *secure) {
    (void)secure;
}

void ln_secure_seal(struct ln_secure *secure, int to, const uint8_t *header, const void *payload,
                    size_t length, uint8_t *out) {
    (void)secure, (void)to, (void)header, (void)payload, (void)length, (void)out;
}

ln_secure_verdict ln_secure_open_datagram(struct ln_secure *secure, int sender,
                                          const uint8_t *header, uint8_t *payload, size_t length) {
    (void)secure, (void)sender, (void)header, (void)payload, (void)length;
    return LOSSYNET_SECURE_FORGED;
}

size_t ln_secure_memory(int ranks) {
    (void)ranks;
    return 0;
}

#endif

/* crypto.h — encrypts and authenticates datagrams, for links over networks that are not trusted.
 *
 *     +--------+---------------------------+---------+--------+
 *     | header |  payload, encrypted       | counter |  tag   |
 *     |  28    |                           |    8    |   16   |     bytes
 *     +--------+---------------------------+---------+--------+
 *
 * AES-256-GCM (NIST SP 800-38D): the header is authenticated but readable. The payload is
 * authenticated and secret. Nonce: 4 zero bytes and the counter, little-endian.
 *
 * Keys. Each rank draws an X25519 key pair (RFC 7748) and sends the public key to all ranks. Each
 * direction between two ranks has its own key, which only these two ranks can compute. It is
 * HKDF-SHA256 (RFC 5869) of their X25519 secret, with both ranks in the info; the salt is the
 * SHA-256 of the run id and all public keys. Each rank then says what can be derived from the salt
 * alone, for its number, so that all know that they have seen the same exchange of keys.
 * The counter of each key increases by one with every datagram, so no nonce is used twice. Keys
 * exist in memory only, for one run. Each rank holds O(ranks) of them.
 *
 * What is trusted (the README of this folder says it from an attacker's side). Public keys are not
 * certified. Without a key file, the channel that `share` uses at start-up (MPI, from the launcher,
 * or the connections of a rendezvous) must be authentic: an attacker who can change its data can
 * put himself between the ranks, but one who only listens learns nothing. With a key file on all
 * ranks, its contents are part of the salt, and nobody can compute a key without them. On the path
 * of the datagrams, payloads are secret, and datagrams that were changed, forged, or sent in
 * another run are refused. Headers, sizes and times are not hidden. Dropping is not prevented. A
 * datagram is accepted once, and only if it is among the last 4,096 of its key. A rank can neither
 * read nor forge what two other ranks send each other.
 *
 * Why OpenSSL's libcrypto: it seals and opens a packet of 1,400 bytes 1.5 to 1.7 times as fast as
 * libsodium (dev/bench/network/bench_secure.c has the figures). It has AES-GCM on every
 * architecture (libsodium's needs AES instructions of x86-64), and every cluster has it already.
 * libsodium's interface is harder to misuse. Here all calls are in one file, and a test covers each
 * mistake.
 */
#ifndef LOSSYNET_SECURE_H
#define LOSSYNET_SECURE_H

#include "lossynet/base/base.h"
#include "lossynet/base/wire.h"

struct ln_secure; /* opaque */

/* Whether this program was built with OpenSSL. */
bool ln_secure_available(void);

/* The secret of a key file, which all ranks have. count 0: none. */
enum { LOSSYNET_KEY_LEAST = 16, LOSSYNET_KEY_MOST = 4096, LOSSYNET_PROOF_BYTES = 32 };
struct ln_key {
    size_t count;
    uint8_t bytes[LOSSYNET_KEY_MOST];
};

/* Reads a key file. Returns false after logging; with rank < 0 it logs nothing. The caller wipes
 * *key. From then on the process writes no core dumps, as after ln_secure_open. */
bool ln_key_read(const char *path, int rank, struct ln_key *key);

/* Proves that this rank has the key: the HMAC-SHA256 (RFC 2104) of a message. It does not tell the
 * key, if that was drawn at random. Returns false after logging. */
bool ln_key_proof_of(const struct ln_key *key, const void *message, size_t bytes,
                     uint8_t proof[LOSSYNET_PROOF_BYTES]);

/* Exchanges keys. Collective: calls the world's `share` three times. run: the same on all ranks. If
 * it fails on one rank it fails on all, unless there is no memory or `share` fails. Each rank logs
 * one line.
 *   LOSSYNET_INVALID   the program was built without OpenSSL
 *   LOSSYNET_PROTOCOL  data of `share` were changed on their way, or ranks have different `run` or
 *                      contents of key_file (NULL: no file), or a rank cannot read key_file, or
 *                      OpenSSL failed */
lossynet_status ln_secure_open(const struct lossynet_world *world, uint64_t run,
                               const char *key_file, struct ln_secure **out);

/* Wipes the keys. NULL is fine. */
void ln_secure_close(struct ln_secure *secure);

/* Encrypts `length` bytes of payload into out[length + LOSSYNET_SECURE_BYTES]; the two must not
 * overlap. to: another rank. header[WIRE_HEADER_BYTES] must be final; its
 * length includes the trailer and its checksum is 0. If OpenSSL fails, `out` becomes a datagram
 * that every receiver refuses. One thread at a time; no allocation. */
void ln_secure_seal(struct ln_secure *secure, int to, const uint8_t *header, const void *payload,
                    size_t length, uint8_t *out);

typedef enum {
    LOSSYNET_SECURE_FORGED,   /* not sealed by that rank in this run, or changed */
    LOSSYNET_SECURE_REPLAYED, /* it came before, or it is too old to tell */
    LOSSYNET_SECURE_OPENED,
} ln_secure_verdict;

/* Checks and decrypts in place a datagram that rank `sender` sealed for this rank. `length` includes
 * the trailer. Use the payload only if the verdict is
 * LOSSYNET_SECURE_OPENED. sender may be any number. One thread at a time; no allocation. */
ln_secure_verdict ln_secure_open_datagram(struct ln_secure *secure, int sender,
                                          const uint8_t *header, uint8_t *payload, size_t length);

/* Bytes of memory that an open struct ln_secure holds, OpenSSL contexts included. */
size_t ln_secure_memory(int ranks);

#endif

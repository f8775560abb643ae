/* crypto.h — authenticated encryption of datagrams, for links that cross other people's networks.
 *
 *     +--------+---------------------------+---------+--------+
 *     | header |  payload, encrypted       | counter |  tag   |
 *     |  28    |                           |    8    |   16   |     bytes
 *     +--------+---------------------------+---------+--------+
 *
 * AES-256-GCM (NIST SP 800-38D): the header is authenticated and readable, the payload is
 * authenticated and secret. Nonce: 4 zero bytes and the counter, little-endian.
 *
 * Keys. Each rank draws an X25519 key pair (RFC 7748) and shows everybody the public half. What one
 * rank seals for another has a key that only the two can compute, one for each direction:
 * HKDF-SHA256 (RFC 5869) of their X25519 secret, both ranks in its info, salted with the SHA-256 of
 * run id and all public keys. What a rank sends to everyone, by multicast, has a key derived in the
 * same way from a secret that rank 0 draws and that ranks hand on, sealed, in log2(ranks) rounds of
 * `share`. That all can open it also shows that they have seen the same exchange of keys. The
 * counter of each key goes up by one with every datagram, so that no nonce comes twice. Keys live in
 * memory only, for one run, O(ranks) of them in each rank.
 *
 * What is trusted. Public keys are not certified: the channel that `share` uses at start-up (MPI,
 * from the launcher) is taken to be authentic, unless all ranks have a key file, whose contents
 * enter the salt: then only who has it computes any key. Without one, who can change what the
 * channel carries can put himself between the ranks; who only listens to it learns nothing. Against
 * everybody on the path of the datagrams, payloads are secret and what is changed, forged, or from
 * another run is refused. Not hidden: headers, sizes, times. Not prevented: dropping. A datagram is
 * opened once; what is older than the last 4,096 of its key is refused. A rank can neither read nor
 * forge what two others send one another, but can forge what another sends to everyone.
 *
 * Why OpenSSL's libcrypto: compared with libsodium it seals and opens a packet of 1,400 bytes 1.5
 * to 1.7 times as fast (dev/bench/network/bench_secure.c has the figures), has AES-GCM on every
 * architecture (libsodium's needs AES instructions of x86-64), and is on every cluster already.
 * libsodium's interface is harder to misuse; here that is one file of few calls, and a test for
 * each mistake.
 */
#ifndef LOSSYNET_SECURE_H
#define LOSSYNET_SECURE_H

#include "lossynet/base/base.h"
#include "lossynet/base/wire.h"

struct lossynet_secure; /* opaque */

/* Whether this program was built with OpenSSL. */
bool lossynet_secure_available(void);

/* Collective: 2 + log2(ranks) calls of `share`, rounded up. run: the same on all ranks. Fails on all ranks when it fails
 * on one, unless memory or `share` itself does; each rank logs one line.
 *   LOSSYNET_INVALID   built without OpenSSL
 *   LOSSYNET_PROTOCOL  what `share` gave was changed on its way, or ranks disagree on `run` or on
 *                      what is in key_file (NULL: none), or cannot read it */
lossynet_status lossynet_secure_open(const struct lossynet_world *world, uint64_t run,
                                     const char *key_file, lossynet_share share,
                                     void *share_context, struct lossynet_secure **out);

/* Wipes the keys. NULL is fine. */
void lossynet_secure_close(struct lossynet_secure *secure);

/* Encrypts `length` bytes of payload for rank `to`, not this one, or for everyone (below 0), into
 * out[length + LOSSYNET_SECURE_BYTES]; they don't overlap.
 * The header[WIRE_HEADER_BYTES] is final, its length counts the trailer, its checksum is 0. Should
 * OpenSSL fail, `out` becomes what every receiver refuses. One thread at a time; no allocation. */
void lossynet_secure_seal(struct lossynet_secure *secure, int to, const uint8_t *header,
                          const void *payload, size_t length, uint8_t *out);

typedef enum {
    LOSSYNET_SECURE_FORGED,   /* not sealed by that rank in this run, or changed */
    LOSSYNET_SECURE_REPLAYED, /* it came before, or so many later ones that it may have */
    LOSSYNET_SECURE_OPENED,
} lossynet_secure_verdict;

/* Checks and decrypts in place what rank `sender` sealed for this rank, or for everyone; `length`
 * includes the trailer. Unless
 * opened, the payload is worthless. sender may be any number. One thread at a time; no
 * allocation. */
lossynet_secure_verdict lossynet_secure_open_datagram(struct lossynet_secure *secure, int sender,
                                                      bool everyone, const uint8_t *header,
                                                      uint8_t *payload, size_t length);

/* Bytes that an open struct lossynet_secure holds, its OpenSSL contexts included. */
size_t lossynet_secure_memory(int ranks);

#endif

#ifndef LOSSYNET_SECURE_H
#define LOSSYNET_SECURE_H
#include "lossynet/link.h"
struct lossynet_secure;
enum { LOSSYNET_SECURE_BYTES = 24 };
lossynet_status lossynet_secure_open(const struct lossynet_world *world, uint64_t run,
                                     lossynet_share share, void *share_context,
                                     struct lossynet_secure **out);
void lossynet_secure_close(struct lossynet_secure *secure);
void lossynet_secure_seal(struct lossynet_secure *secure, const uint8_t *header,
                          const void *payload, size_t length, uint8_t *out);
bool lossynet_secure_open_datagram(struct lossynet_secure *secure, int sender,
                                   const uint8_t *header, uint8_t *payload, size_t length);
size_t lossynet_secure_memory(int ranks);
#endif

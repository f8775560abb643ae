#include "lossynet/secure.h"
#include "lossynet/internal.h"
lossynet_status lossynet_secure_open(const struct lossynet_world *world, uint64_t run,
                                     lossynet_share share, void *share_context,
                                     struct lossynet_secure **out) {
    (void)world, (void)run, (void)share, (void)share_context, *out = NULL;
    lossynet_log("--encrypt: this program was built without it");
    return LOSSYNET_LINK;
}
void lossynet_secure_close(struct lossynet_secure *secure) {
    (void)secure;
}
void lossynet_secure_seal(struct lossynet_secure *secure, const uint8_t *header,
                          const void *payload, size_t length, uint8_t *out) {
    (void)secure, (void)header, (void)payload, (void)length, (void)out;
}
bool lossynet_secure_open_datagram(struct lossynet_secure *secure, int sender,
                                   const uint8_t *header, uint8_t *payload, size_t length) {
    (void)secure, (void)sender, (void)header, (void)payload, (void)length;
    return false;
}
size_t lossynet_secure_memory(int ranks) {
    (void)ranks;
    return 0;
}

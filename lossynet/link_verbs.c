/* link_verbs.c — not built yet. */
#include "lossynet/internal.h"
lossynet_status lossynet_link_verbs_open(const struct lossynet_link_settings *settings,
                                         struct lossynet_link **out) {
    (void)settings;
    *out = NULL;
    lossynet_log("--link verbs: this program was built without libibverbs");
    return LOSSYNET_LINK;
}
size_t lossynet_link_verbs_memory(int ranks, size_t payload_bytes) {
    return (size_t)ranks * payload_bytes;
}
bool lossynet_link_verbs_available(void) {
    return false;
}

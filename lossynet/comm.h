/* comm.h — functions that the files of lossynet/ share beside the public interface: opening,
 * settings, and the meeting of ranks at the start. It uses every folder; no folder uses it.
 */
#ifndef LOSSYNET_COMM_H
#define LOSSYNET_COMM_H

#include "lossynet/algorithm/algorithm.h"

#define LN_NO_SETTINGS "expected a world, settings and memory for what is returned, got NULL"

/* lossynet_open in a world that has a `share`, over a link of the caller's choice, or of the
 * settings where that is NULL. With one rank no link is opened. */
lossynet_status ln_comm_open(const struct lossynet_world *world,
                             const struct lossynet_settings *settings, ln_link_open link_open,
                             struct lossynet_comm **out);

/* Checks settings, and logs what is wrong with them (settings.c). */
lossynet_status ln_settings_check(const struct lossynet_world *world,
                                  const struct lossynet_settings *settings);
extern const char *const ln_estimator_names[],
    *const ln_link_names[], *const ln_wire_dtype_names[]; /* a NULL ends each */

/* A lossynet_share; and the world, which has it if it has no other (bootstrap.c). */
lossynet_status ln_bootstrap_share(void *context, const struct lossynet_world *world, void *all,
                                   size_t bytes);
struct lossynet_world ln_bootstrap_world(const struct lossynet_world *world);

#endif

/* rule.h — a rule against loss of the user's own, from a shared object (--rule). */
#ifndef LLMC_COMM_RULE_H
#define LLMC_COMM_RULE_H

#include "llmc/options/options.h"
#include "lossynet/lossynet.h"

/* Loads the file of --rule. Returns 0, or -1 after reporting. */
int rule_load(const struct options *options);

/* Its functions, after rule_load; NULL: there is no --rule. They stay until the process ends. */
const struct lossynet_rule *rule_loaded(const struct options *options);

/* The checksum of its file when it was loaded; NULL: there is no --rule. */
const char *rule_checksum(const struct options *options);

#endif

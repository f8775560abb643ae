/* settings.h — translates the options of the network into lossynet's settings, and checks them. */
#ifndef LLMC_COMM_SETTINGS_H
#define LLMC_COMM_SETTINGS_H

#include "llmc/model/param_layout.h"
#include "llmc/memory/memory_plan.h"
#include "llmc/options/options.h"
#include "lossynet/lossynet_trainer.h"

/* Checks that the options of the network make sense with these numbers of workers and ranks, by the
 * library's own check (lossynet_check) after what only the trainer knows. Returns 0, or -1 after
 * reporting. */
int comm_check(const struct options *options, int workers, int ranks);

/* The same for the tensors of this model that --loss-at and --repair-at name. */
int comm_check_names(const struct options *options, const struct llama_config *config, int workers,
                     int ranks);

/* The same for what depends on where the run computes. */
int comm_check_device(const struct options *options, bool on_device);

/* The ranks that a run is planned for: those that a launcher started, or with --meet those of the
 * first view, where each rank is assumed to have a host of its own. */
struct lossynet_world comm_planned_world(const struct options *options,
                                         const struct lossynet_world *launched);

/* lossynet's settings from checked options. on_device: the workers' vectors are in a GPU's memory.
 * The caller adds `memory`, `weighted_sum` and `tensors`. */
struct lossynet_settings comm_settings(const struct options *options,
                                       const struct param_layout *layout, int workers, int ranks,
                                       bool on_device);

/* What --loss-at and --repair-at may name: a new list of *count tensors, which the caller frees. NULL after
 * reporting. */
struct lossynet_tensor *comm_tensors(const struct param_layout *layout, int *count);

/* Replaces --wire-dtype auto, the default, by the type that it stands for with these options and so many
 * workers. Call it after options_parse, before anything below. */
void comm_choose_wire(struct options *options, int workers);

/* The share of lost gradients that their senders add to the next ones (--carry). */
double comm_carry(const struct options *options, int ranks, bool on_device);

/* The checksum of the file of --loss-model trace:FILE. NULL: there is none, or after reporting. */
const char *comm_trace_checksum(const struct options *options);

/* The number of rounds in which a phase's lost packets are sent again (--repair), or
 * LOSSYNET_ROUNDS_MEASURED. */
int comm_rounds(const struct options *options, lossynet_phase phase);

/* The number of workers that share a replica (--group), at least 1, and the number of such groups
 * among `workers`. */
int comm_group(const struct options *options);
int comm_groups(const struct options *options, int workers);

/* Where parameters lie, and with Muon who owns which. The caller releases it. Returns 0, or -1 after
 * reporting. */
int comm_layout(const struct options *options, const struct llama_config *config, int workers,
                struct param_layout *layout);

/* Whether owners may broadcast values that are ahead of their own (lossynet's lead.c). */
bool comm_leads(const struct options *options, int workers);

/* Fills in what a plan of the run's memory needs to know: whether owners lead, and carry, and what
 * they own. */
void comm_plan(const struct options *options, const struct param_layout *layout, int workers,
               int ranks, struct memory_plan_settings *plan);

/* How far ahead are the values of the next broadcast, in steps. */
double comm_lead(const struct options *options, const struct lossynet_comm *comm);

#endif

/* options_table.h — how a line of the table of options looks. For options.c, which has the table and
 * parses, and options_help.c, which prints it. */
#ifndef LLMC_OPTIONS_OPTIONS_TABLE_H
#define LLMC_OPTIONS_OPTIONS_TABLE_H

#include "llmc/options/options.h"

/* Marks beside those of the library (lossynet_trainer.h). */
enum option_mark {
    SWEEPS = 4,      /* a sweep sets it itself */
    EACH_START = 16, /* another start of a run that meets by --meet may have another value */
    /* What else must be so for the option to have an effect, as LOSSYNET_IF_. */
    IF_WSD = 1 << 16,       /* --schedule wsd */
    IF_FALLS = 1 << 17,     /* another --schedule than constant */
    IF_RATED = 1 << 18,     /* --dry-run */
    IF_WRITES = 1 << 19,    /* --generate */
    IF_SAMPLES = 1 << 20,   /* --generate or --sample-every */
    IF_EVALUATES = 1 << 21, /* --val */
    IF_SAVES = 1 << 22,     /* --out */
    IF_GPU = 1 << 23,       /* another --device than cpu */
    IF_LOGS = 1 << 24,      /* --out or --log */
    IF_READS = 1 << 25,     /* no --generate */
    IF_DRAWS = 1 << 26      /* no --eval */
};

/* Line i of the table, from 0 on, the library's lines among them; NULL after the last one. Offsets are in
 * struct options. */
const struct lossynet_option *options_entry(int i);
/* The option of that name, without dashes, or NULL. */
const struct lossynet_option *options_named(const char *name);
/* Whether `text`, which may be NULL, has `word` in it, in small or capital letters. */
bool options_has_word(const char *text, const char *word);

#endif

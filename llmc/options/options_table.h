/* options_table.h — how a line of the table of options looks. For options.c, which has the table and
 * parses, and options_help.c, which prints it. */
#ifndef LLMC_OPTIONS_OPTIONS_TABLE_H
#define LLMC_OPTIONS_OPTIONS_TABLE_H

#include <stddef.h>

enum option_kind { GROUP, FLAG, TEXT, WHOLE, WHOLE64, REAL, CHOICE };

/* What others must know about an option. With RUN alone it is a part of what a run is: all ranks
 * have the same value, and a sweep (scripts/sweeps) names a run by it. */
enum option_mark {
    RUN = 0,
    RESUMED = 1,     /* with another value a resumed run has other results, and says so */
    NEUTRAL = 2,     /* changes no result: a sweep does not name a run by it */
    SWEEPS = 4,      /* a sweep sets it itself */
    EACH_RANK = 8,   /* a rank may have another value: its files, its devices, what it prints */
    EACH_START = 16, /* another start of a run that meets by --meet may have another value */
    /* What else must be so for the option to have an effect. Where it is not, a run says so. */
    IF_LOSES = 1 << 8,      /* another --algorithm than reliable */
    IF_LOSSY = 1 << 9,      /* --algorithm lossy */
    IF_ESTIMATES = 1 << 10, /* --algorithm lossy or naive */
    IF_DATAGRAMS = 1 << 11, /* link udp or verbs */
    IF_WSD = 1 << 12,       /* --schedule wsd */
    IF_FALLS = 1 << 13,     /* another --schedule than constant */
    IF_RATED = 1 << 14,     /* --dry-run, or --wire-dtype auto */
    IF_WRITES = 1 << 15,    /* --generate */
    IF_SAMPLES = 1 << 16,   /* --generate or --sample-every */
    IF_EVALUATES = 1 << 17, /* --val */
    IF_SAVES = 1 << 18,     /* --out */
    IF_GPU = 1 << 19        /* another --device than cpu */
};

struct option_entry {
    const char *name; /* name of the option, or title of the group */
    enum option_kind kind;
    size_t offset;              /* offset in struct options */
    unsigned marks;             /* enum option_mark */
    const char *initial;        /* default, as text; NULL: none; "-1": follows from others */
    double low, high;           /* WHOLE and REAL: allowed range, both ends included */
    const char *const *choices; /* CHOICE: names, and a NULL after them */
    /* For --help. A WHOLE or REAL whose argument begins with "auto|" may be `auto`, OPTION_AUTO. One
     * with "[," in it has two numbers in its field, by phase: gradients, parameters. */
    const char *argument, *help;
};

/* Line i of the table, from 0 on; NULL after the last one. */
const struct option_entry *options_entry(int i);

#endif

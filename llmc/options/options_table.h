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
    RESUMED = 1, /* with another value a resumed run has other results, and says so */
    NEUTRAL = 2, /* changes no result: a sweep does not name a run by it */
    SWEEPS = 4,  /* a sweep sets it itself */
    EACH_RANK =
        8, /* a rank may have another value: paths of its files, its devices, what it prints */
    EACH_START = 16 /* another start of a run that meets by --meet may have another value */
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

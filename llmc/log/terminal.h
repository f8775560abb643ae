/* terminal.h — finds out whether the output of this process appears on a terminal, and how wide it is. */
#ifndef LLMC_TERMINAL_H
#define LLMC_TERMINAL_H

#include <stdbool.h>
#include <stdio.h>

/* Whether a line on stdout can be drawn again. Under Open MPI, stdout is always a pseudo
 * terminal that mpirun reads. The answer is then that for mpirun's own stdout, or false if it
 * cannot be found, because mpirun runs on another host. A terminal of the type "dumb" cannot. */
bool terminal_behind_stdout(void);

/* The present width of the terminal behind `file`: stdout, as found by terminal_behind_stdout, or stderr. 80
 * where it is not known. */
int terminal_columns(FILE *file);

/* Draws a line again, or clears it if it is "". What is wider than the terminal is cut off, since a line
 * that goes on in the next row cannot be drawn again. */
void terminal_redraw(FILE *file, const char *line);

#endif

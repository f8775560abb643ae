/* terminal.h — finds out whether the output of this process appears on a terminal. */
#ifndef LLMC_TERMINAL_H
#define LLMC_TERMINAL_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Whether a line on stdout can be drawn again. Under Open MPI, stdout is always a pseudo
 * terminal that mpirun reads. The answer is then that for mpirun's own stdout, or false if it
 * cannot be found, because mpirun runs on another host. */
bool terminal_behind_stdout(void);

#ifdef __cplusplus
}
#endif
#endif

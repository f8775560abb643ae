/* capture.h — captures what the code under test writes to stderr. */
#ifndef TEST_CAPTURE_H
#define TEST_CAPTURE_H

#include <stdio.h>
#include <unistd.h>

static FILE *capture_file;
static int capture_saved;

static inline void capture_begin(void) {
    fflush(stderr);
    capture_file = tmpfile();
    capture_saved = dup(STDERR_FILENO);
    dup2(fileno(capture_file), STDERR_FILENO);
}

/* Returns the text written to stderr since capture_begin. The next capture_end overwrites it. */
static inline const char *capture_end(void) {
    static char text[8192];
    fflush(stderr);
    dup2(capture_saved, STDERR_FILENO);
    close(capture_saved);
    rewind(capture_file);
    text[fread(text, 1, sizeof text - 1, capture_file)] = 0;
    fclose(capture_file);
    return text;
}

#endif

/* llmc_test.h — helpers for tests of llmc: a scratch directory, and checks of error messages.
 *
 * Each test program includes it once, after cmocka.h.
 */
#ifndef LLMC_TEST_H
#define LLMC_TEST_H

#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test/support/capture.h"

/* ---- scratch directory ------------------------------------------------------------------- */

static char scratch[256];

static int make_scratch(void **state) {
    (void)state;
    const char *base = getenv("TMPDIR");
    snprintf(scratch, sizeof scratch, "%s/llmc-test-XXXXXX", base ? base : "/tmp");
    return mkdtemp(scratch) ? 0 : -1;
}

static int remove_scratch(void **state) {
    (void)state;
    char command[512];
    snprintf(command, sizeof command, "rm -rf '%s'", scratch);
    return system(command);
}

/* Returns a path in the scratch directory. It stays valid until the program ends. */
static inline const char *in_scratch(const char *name) {
    static char paths[64][512];
    char path[512];
    snprintf(path, sizeof path, "%s/%s", scratch, name);
    int i = 0;
    while (i < 64 && paths[i][0] && strcmp(paths[i], path) != 0) i++;
    assert_true(i < 64);
    return strcpy(paths[i], path);
}

static inline void write_bytes(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(data, 1, bytes, file), bytes);
    assert_int_equal(fclose(file), 0);
}

static inline void write_text(const char *path, const char *text) {
    write_bytes(path, text, strlen(text));
}

/* Returns the whole file with a zero byte behind it. The caller frees it. */
static inline char *read_bytes(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    *bytes = (size_t)ftell(file);
    rewind(file);
    char *data = (char *)malloc(*bytes + 1);
    assert_int_equal(fread(data, 1, *bytes, file), *bytes);
    data[*bytes] = '\0';
    fclose(file);
    return data;
}

static inline bool exists(const char *path) {
    return access(path, F_OK) == 0;
}

/* ---- reports ------------------------------------------------------------------------------ */

static char caught[8192];

static inline void catch_end(void) {
    snprintf(caught, sizeof caught, "%s", capture_end());
}

static inline void assert_caught(const char *text, const char *file, int line) {
    char *newline = strchr(caught, '\n');
    if (strstr(caught, text) && newline && newline[1] == '\0') return;
    print_error("%s:%d: reported \"%s\", expected one line with \"%s\"\n", file, line, caught,
                text);
    fail();
}

/* Checks that the call fails with -1 after exactly one line on stderr, which contains the text. */
#define assert_reports(call, text)                                                                 \
    do {                                                                                           \
        capture_begin();                                                                           \
        int status_ = (call);                                                                      \
        catch_end();                                                                               \
        assert_int_equal(status_, -1);                                                             \
        assert_caught(text, __FILE__, __LINE__);                                                   \
    } while (0)

/* ---- random numbers, the same in every run ------------------------------------------------ */

static uint64_t random_state = 1;

static inline uint32_t random_below(uint32_t n) {
    random_state = random_state * 6364136223846793005 + 1442695040888963407;
    return (uint32_t)((random_state >> 33) * n >> 31);
}

#endif

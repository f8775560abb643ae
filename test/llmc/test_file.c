/* test_file.c — tests maps of files that somebody cuts off while they are read. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "llmc/checkpoint/safetensors.h"
#include "llmc/util/file.h"
#include "test/support/llmc_test.h"

enum { PAGES = 5 };

static const char *written(const char *name, size_t page) {
    const char *path = in_scratch(name);
    char *bytes = malloc(PAGES * page);
    memset(bytes, 'x', PAGES * page);
    FILE *file = fopen(path, "wb");
    assert_int_equal(fwrite(bytes, 1, PAGES * page, file), PAGES * page);
    fclose(file);
    free(bytes);
    return path;
}

/* Counts the zeros, and catches what is reported. */
static size_t count_zeros(const struct file_map *map) {
    size_t zeros = 0;
    capture_begin();
    for (size_t i = 0; i < map->bytes; i++) zeros += !((const volatile char *)map->data)[i];
    catch_end();
    return zeros;
}

static void test_a_file_that_is_cut_off(void **state) {
    (void)state;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    struct file_map cut, other;
    const char *path = written("cut", page);
    assert_int_equal(file_map(path, &cut), 0);
    assert_int_equal(file_map(written("other", page), &other), 0);
    assert_int_equal(truncate(path, (off_t)(2 * page)), 0);
    assert_false(file_is_lost(&cut)); /* nobody has read it */
    assert_int_equal(count_zeros(&cut), 3 * page);
    assert_caught("cut' has become shorter while it is read", __FILE__, __LINE__);
    assert_true(file_is_lost(&cut));
    assert_int_equal(count_zeros(&cut), 3 * page);
    assert_string_equal(caught, ""); /* it was said once */
    assert_false(file_is_lost(&other));
    assert_int_equal(count_zeros(&other), 0);
    assert_int_equal(file_unmap(&cut), -1);
    assert_int_equal(file_unmap(&cut), 0); /* it is empty now */
    assert_int_equal(file_unmap(&other), 0);
    assert_int_equal(file_map(path, &cut), 0);
    assert_int_equal(count_zeros(&cut), 0);
    assert_int_equal(file_unmap(&cut), 0);
}

static void test_tensors_of_a_file_that_is_cut_off(void **state) {
    (void)state;
    static float values[1 << 16], out[1 << 16];
    const struct safetensors_tensor tensor = {"a", 1, {1 << 16}, values, NULL};
    const int64_t shape[1] = {1 << 16};
    struct safetensors *file;
    for (int i = 0; i < 1 << 16; i++) values[i] = 1;
    assert_int_equal(safetensors_write(in_scratch("tensors"), &tensor, 1, NULL), 0);
    assert_int_equal(safetensors_open(in_scratch("tensors"), &file), 0);
    assert_int_equal(safetensors_copy_float(file, "a", shape, 1, out), 0);
    assert_false(safetensors_is_lost(file));
    assert_int_equal(truncate(in_scratch("tensors"), 5000), 0);
    assert_reports(safetensors_copy_float(file, "a", shape, 1, out), "has become shorter");
    assert_true(safetensors_is_lost(file));
    safetensors_close(file);
}

/* A SIGBUS that has nothing to do with our maps ends the program as before. First, because the handler
 * keeps what there was before it, which may be a sanitizer's. */
static void test_another_sigbus(void **state) {
    (void)state;
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const char *path = written("foreign", page);
    const pid_t child = fork();
    if (!child) {
        struct file_map map;
        signal(SIGBUS, SIG_DFL);
        const int file = open(path, O_RDONLY);
        const volatile char *foreign = mmap(NULL, page, PROT_READ, MAP_SHARED, file, 0);
        if (file_map(path, &map) || file_unmap(&map) || truncate(path, 0)) _exit(1);
        _exit(foreign[0] == 'x' ? 2 : 3);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_another_sigbus),
        cmocka_unit_test(test_a_file_that_is_cut_off),
        cmocka_unit_test(test_tensors_of_a_file_that_is_cut_off),
    };
    return cmocka_run_group_tests_name("file", tests, make_scratch, remove_scratch);
}

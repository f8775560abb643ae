/* test_jsonl.c — tests how the log of a run is continued (jsonl.h): also if a process that was stopped
 * meanwhile wakes, and on a full disk. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "llmc/log/jsonl.h"
#include "llmc/log/metrics.h"
#include "test/support/llmc_test.h"

static const char *path;
static struct jsonl *next; /* of the process that takes the log while another one is stopped */
static bool stopped;

static void write_step(struct jsonl *log, int step) {
    assert_int_equal(jsonl_write(log, json_pack("{s:s,s:i}", "event", "step", "step", step)), 0);
}

/* The library's own, which is called when a log is cut and has not replaced the old one yet. */
int fsync(int file) {
    (void)file;
    if (!stopped) return 0;
    stopped = false;
    assert_int_equal(jsonl_open(path, 3, &next), 0);
    write_step(next, 3);
    return 0;
}

/* A log of the steps 0 to 4 and the end of the run. */
static void make_log(const char *name) {
    struct jsonl *log;
    path = in_scratch(name);
    assert_int_equal(jsonl_open(path, 0, &log), 0);
    for (int step = 0; step < 5; step++) write_step(log, step);
    assert_int_equal(jsonl_write(log, json_pack("{s:s,s:i}", "event", "end", "step", 4)), 0);
    jsonl_close(log);
}

/* The log's steps, each as a digit; another event as '-'. */
static const char *steps(void) {
    static char found[32];
    char line[256];
    int count = 0;
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) && count < 31) {
        const char *digit = strstr(line, "\"step\":");
        found[count++] = (char)(strstr(line, "\"event\":\"step\"") && digit ? digit[7] : '-');
    }
    fclose(file);
    found[count] = '\0';
    return found;
}

static void assert_no_other_file(void) {
    char partial[512];
    snprintf(partial, sizeof partial, "%s.partial", path);
    assert_int_not_equal(access(partial, F_OK), 0);
}

static void test_later_lines_go(void **state) {
    (void)state;
    struct jsonl *log;
    make_log("cut");
    assert_string_equal(steps(), "01234-");
    assert_int_equal(jsonl_open(path, 3, &log), 0);
    assert_int_equal(jsonl_last_step(log), 2);
    write_step(log, 3);
    jsonl_close(log);
    assert_string_equal(steps(), "0123");
    assert_no_other_file();
}

/* What a link names is cut, and the link stays. */
static void test_a_link_stays(void **state) {
    (void)state;
    struct jsonl *log;
    struct stat is;
    char named[512];
    make_log("link");
    snprintf(named, sizeof named, "%s.named", path);
    assert_int_equal(rename(path, named), 0);
    assert_int_equal(symlink(strrchr(named, '/') + 1, path), 0);
    assert_int_equal(jsonl_open(path, 3, &log), 0);
    write_step(log, 3);
    jsonl_close(log);
    assert_string_equal(steps(), "0123");
    assert_true(!lstat(path, &is) && S_ISLNK(is.st_mode));
    assert_no_other_file();
}

static int go_on(const char *checkpoint, double rate) {
    struct jsonl *log = NULL;
    json_t *saved = json_pack("{s:i,s:{s:f}}", "step", 3, "options", "lr", rate);
    capture_begin();
    const int status = jsonl_open_of_run(path, NULL, 0, 3, checkpoint, saved, &log);
    const char *said = capture_end();
    assert_true(status ? strstr(said, "another run than that of") != NULL : said[0] == '\0');
    json_decref(saved);
    jsonl_close(log);
    return status;
}

/* Only a log of the run that saved the checkpoint, or of one that began there, is cut. */
static void test_a_log_of_another_run_stays(void **state) {
    (void)state;
    struct jsonl *log;
    make_log("other");
    assert_int_equal(go_on("a/checkpoint-3", 0.001), 0); /* nobody knows whose steps these are */
    assert_string_equal(steps(), "012");
    assert_int_equal(jsonl_open(path, 6, &log), 0);
    jsonl_write(log, json_pack("{s:s,s:{s:f}}", "event", "run", "options", "lr", 1e-3 / 3));
    write_step(log, 6);
    jsonl_close(log);
    assert_int_equal(go_on("a/checkpoint-3", 1e-3), -1);
    assert_string_equal(steps(), "012-6");
    assert_no_other_file();
    assert_int_equal(go_on("a/checkpoint-3", 1e-3 / 3), 0);
    assert_string_equal(steps(), "012-");
    assert_int_equal(jsonl_open(path, 3, &log), 0); /* one that began at b, and ended at once */
    jsonl_write(log, json_pack("{s:s,s:{s:s}}", "event", "run", "options", "resume", "b"));
    jsonl_close(log);
    assert_int_equal(go_on("c", 1), -1);
    assert_int_equal(go_on("b", 1), 0);
    assert_string_equal(steps(), "012--");
}

/* A device or pipe has no lines to keep. */
static void test_a_resumed_run_logs_to_a_device(void **state) {
    (void)state;
    struct jsonl *log;
    assert_int_equal(jsonl_open("/dev/null", 3, &log), 0);
    assert_int_equal(jsonl_last_step(log), -1);
    write_step(log, 3);
    jsonl_close(log);
}

/* One process is stopped while it cuts the log, another one takes the log, and the first wakes. */
static void test_who_was_replaced_does_not_touch_the_log(void **state) {
    (void)state;
    struct jsonl *log;
    make_log("replaced");
    stopped = true;
    assert_int_equal(jsonl_open(path, 2, &log), 0);
    assert_false(stopped);
    write_step(log, 9);
    write_step(next, 4);
    jsonl_close(log);
    jsonl_close(next);
    assert_string_equal(steps(), "01234");
    assert_no_other_file();
}

static void test_a_full_disk(void **state) {
    (void)state;
    struct jsonl *log;
    struct rlimit before, small = {.rlim_cur = 50};
    make_log("full");
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    small.rlim_max = before.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    capture_begin();
    setrlimit(RLIMIT_FSIZE, &small);
    const int status = jsonl_open(path, 3, &log);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_non_null(strstr(capture_end(), "cannot write"));
    assert_int_equal(status, 0);
    assert_string_equal(steps(), "012");
    write_step(log, 3);
    jsonl_close(log);
    assert_string_equal(steps(), "0123");
    assert_no_other_file();
}

/* A step in which a rank died: only its loss, its norm and its learning rate are known. */
static void test_a_step_that_was_not_measured(void **state) {
    (void)state;
    const struct step_metrics step = {.step = 7, .loss = 2.5, .grad_norm = 1, .tokens = 64};
    struct jsonl *log;
    path = in_scratch("unmeasured.jsonl");
    assert_int_equal(jsonl_open(path, -1, &log), 0);
    assert_int_equal(metrics_log_step(log, &step), 0);
    jsonl_close(log);
    json_t *event = json_load_file(path, 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(event, "step")), 7);
    assert_true(json_real_value(json_object_get(event, "loss")) == 2.5);
    const char *const unknown[] = {"tokens_per_second", "step_ms", "drift", "parameter_loss_rate"};
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++)
        assert_true(json_is_null(json_object_get(event, unknown[i])));
    json_decref(event);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_later_lines_go),
        cmocka_unit_test(test_a_link_stays),
        cmocka_unit_test(test_a_log_of_another_run_stays),
        cmocka_unit_test(test_a_resumed_run_logs_to_a_device),
        cmocka_unit_test(test_who_was_replaced_does_not_touch_the_log),
        cmocka_unit_test(test_a_full_disk),
        cmocka_unit_test(test_a_step_that_was_not_measured),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}

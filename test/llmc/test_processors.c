/* test_processors.c — tests how many processors a rank takes: allowed ones, shared, and quotas. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <omp.h>

#include "llmc/util/processors.h"
#include "llmc/util/threads.h"
#include "test/support/llmc_test.h"

/* Writes a file below the root that stands for a machine's. */
static void machine(const char *path, const char *text) {
    char folder[512];
    snprintf(folder, sizeof folder, "%s/%s", in_scratch("root"), path);
    *strrchr(folder, '/') = 0;
    char command[600];
    snprintf(command, sizeof command, "mkdir -p '%s'", folder);
    assert_int_equal(system(command), 0);
    char file[200];
    snprintf(file, sizeof file, "root/%.190s", path);
    write_text(in_scratch(file), text);
}

static void clear_machine(void) {
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", in_scratch("root"));
    assert_int_equal(system(command), 0);
}

static double quota(void) {
    char root[512];
    snprintf(root, sizeof root, "%s", in_scratch("root"));
    return processors_quota(root);
}

static void test_quota_of_version_2(void **state) {
    (void)state;
    clear_machine();
    assert_true(quota() == 0);
    machine("proc/self/cgroup", "0::/job/step\n");
    assert_true(quota() == 0);
    machine("sys/fs/cgroup/job/step/cpu.max", "max 100000\n");
    assert_true(quota() == 0);
    machine("sys/fs/cgroup/job/step/cpu.max", "350000 100000\n");
    assert_true(quota() == 3.5);
    machine("sys/fs/cgroup/job/cpu.max", "100000 50000\n"); /* a group around it has less */
    assert_true(quota() == 2);
    machine("sys/fs/cgroup/other/cpu.max", "1000 50000\n");
    machine("sys/fs/cgroup/job/cpu.max", "900000 50000\n");
    assert_true(quota() == 3.5);
    /* in a container that sees the path outside */
    clear_machine();
    machine("proc/self/cgroup", "0::/docker/0123\n");
    machine("sys/fs/cgroup/cpu.max", "150000 100000\n");
    assert_true(quota() == 1.5);
    machine("sys/fs/cgroup/cpu.max", "nonsense\n");
    assert_true(quota() == 0);
}

static void test_quota_of_version_1(void **state) {
    (void)state;
    clear_machine();
    machine("proc/self/cgroup", "12:cpuset:/a\n4:cpu,cpuacct:/a/b\n1:name=systemd:/x\n0::/x\n");
    machine("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n");
    machine("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
    assert_true(quota() == 0);
    machine("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "400000\n");
    machine("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
    assert_true(quota() == 4);
    machine("proc/self/cgroup", "12:cpuset:/a\n4:cpuacct:/a\n0::/x\n"); /* in no such group */
    assert_true(quota() == 0);
}

static struct processors ranks[4];

/* A rank that may run on processors first ... first + allowed - 1. */
static void rank_of(int r, uint64_t on, int first, int allowed, double limit) {
    memset(&ranks[r], 0, sizeof ranks[r]);
    ranks[r].machine = on;
    ranks[r].allowed = allowed;
    ranks[r].quota = limit;
    for (int i = first; i < first + allowed; i++) ranks[r].set[i / 64] |= (uint64_t)1 << i % 64;
}

static void test_shares(void **state) {
    (void)state;
    for (int r = 0; r < 4; r++) rank_of(r, 1, 100, 8, 0); /* the same cpuset */
    assert_int_equal(processors_share(ranks, 4, 0), 2);
    assert_int_equal(processors_share(ranks, 1, 0), 8);
    for (int r = 0; r < 4; r++) rank_of(r, 1, 8 * r, 8, 0); /* each its own */
    assert_int_equal(processors_share(ranks, 4, 2), 8);
    for (int r = 0; r < 4; r++) rank_of(r, 1, 8 * (r / 2), 8, 0); /* two share */
    assert_int_equal(processors_share(ranks, 4, 3), 4);
    for (int r = 0; r < 4; r++) rank_of(r, (uint64_t)r / 2, 0, 8, 0); /* two machines */
    assert_int_equal(processors_share(ranks, 4, 1), 4);
    for (int r = 0; r < 4; r++) rank_of(r, 1, 8 * r, 8, 10.5); /* one quota for all */
    assert_int_equal(processors_share(ranks, 4, 1), 2);
    for (int r = 0; r < 4; r++) rank_of(r, 1, 0, 2, 0.5);
    assert_int_equal(processors_share(ranks, 4, 1), 1);
}

static void test_what_the_user_says(void **state) {
    (void)state;
    setenv("OMP_NUM_THREADS", "3", 1);
    threads_choose(0, 7);
    assert_int_equal(omp_get_max_threads(), 3);
    threads_choose_alone(0, 100);
    assert_int_equal(omp_get_max_threads(), 3);
    threads_choose(5, 7);
    assert_int_equal(omp_get_max_threads(), 5);
    setenv("OMP_NUM_THREADS", "4,2", 1);
    threads_choose(0, 7);
    assert_int_equal(omp_get_max_threads(), 4);
    setenv("OMP_NUM_THREADS", "many", 1);
    threads_choose(0, 7);
    assert_int_equal(omp_get_max_threads(), 7);
    unsetenv("OMP_NUM_THREADS");
    threads_choose_alone(0, 1 << 20);
    assert_int_equal(omp_get_max_threads(), 1);
    threads_choose_alone(0, 1);
    assert_in_range(omp_get_max_threads(), 1, omp_get_num_procs());
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_quota_of_version_2),
        cmocka_unit_test(test_quota_of_version_1),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_what_the_user_says),
    };
    return cmocka_run_group_tests_name("processors", tests, make_scratch, remove_scratch);
}

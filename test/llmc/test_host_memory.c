/* test_host_memory.c — tests how much memory a process may use, read from made-up /proc and /sys,
 * and which host is named if it has too little.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "llmc/memory/memory_check.h"
#include "llmc/util/host_memory.h"
#include "test/support/llmc_test.h"

/* Writes ROOT/PATH, with its folders; ROOT is a folder of the scratch directory. */
static void put(const char *root, const char *path, const char *text) {
    char command[1024], file[800];
    snprintf(file, sizeof file, "%s%s", in_scratch(root), path);
    snprintf(command, sizeof command, "mkdir -p \"$(dirname '%s')\"", file);
    assert_int_equal(system(command), 0);
    write_text(file, text);
}

/* A host with 10 GB available. */
static void put_host(const char *root, const char *swap, const char *groups) {
    char meminfo[256];
    snprintf(meminfo, sizeof meminfo,
             "MemTotal:       16000000 kB\nMemAvailable:   9765625 kB\nSwapFree: %s kB\n", swap);
    put(root, "/proc/meminfo", meminfo);
    put(root, "/proc/sys/kernel/random/boot_id", "6b7d4a61-0000\n");
    if (groups) put(root, "/proc/self/cgroup", groups);
}

static int limits(const char *root, struct host_memory_limit out[HOST_MEMORY_LIMITS]) {
    return host_memory_limits(in_scratch(root), out);
}

static void assert_near(double a, double b) {
    assert_true(a > b - 1 && a < b + 1);
}

static void test_host_alone(void **state) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    (void)state;
    assert_int_equal(limits("nothing", limit), 0);
    put_host("plain", "0", NULL);
    assert_int_equal(limits("plain", limit), 1);
    assert_near(limit[0].available, 10e9);
    assert_string_equal(limit[0].name, "the host");
    put_host("swap", "1000000", NULL); /* what lies in swap space is slow, but lives */
    assert_int_equal(limits("swap", limit), 1);
    assert_near(limit[0].available, 10e9 + 1024e6);
}

static void test_version_2(void **state) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    (void)state;
    put_host("v2", "0", "0::/user.slice/job\n");
    put("v2", "/sys/fs/cgroup/user.slice/memory.max", "8000000000\n");
    put("v2", "/sys/fs/cgroup/user.slice/memory.current", "1000000000\n");
    put("v2", "/sys/fs/cgroup/user.slice/job/memory.max", "max\n");
    put("v2", "/sys/fs/cgroup/user.slice/job/memory.current", "500000000\n");
    assert_int_equal(limits("v2", limit), 2); /* the parent's limit holds for the group */
    assert_near(limit[1].available, 7e9);
    assert_string_equal(limit[1].name, "control group /user.slice (at most 8.00 GB)");
    /* Files in the page cache make room for what is needed more. */
    put("v2", "/sys/fs/cgroup/user.slice/memory.stat",
        "anon 200000000\nfile 800000000\ninactive_file 500000000\nactive_file 200000000\n"
        "slab_reclaimable 100000000\n");
    assert_int_equal(limits("v2", limit), 2);
    assert_near(limit[1].available, 7.8e9);
    put("v2", "/sys/fs/cgroup/user.slice/job/memory.max", "3000000000\n");
    assert_int_equal(limits("v2", limit), 3);
    assert_near(limit[1].available, 2.5e9);
    assert_true(limit[1].id != limit[2].id && limit[1].id != limit[0].id);
}

static void test_version_2_with_swap(void **state) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    (void)state;
    put_host("v2swap", "2000000", "0::/job\n");
    put("v2swap", "/sys/fs/cgroup/job/memory.max", "3000000000\n");
    put("v2swap", "/sys/fs/cgroup/job/memory.current", "0\n");
    assert_int_equal(limits("v2swap", limit), 2);
    assert_near(limit[1].available, 3e9 + 2048e6);
    put("v2swap", "/sys/fs/cgroup/job/memory.swap.max", "500000000\n");
    put("v2swap", "/sys/fs/cgroup/job/memory.swap.current", "100000000\n");
    assert_int_equal(limits("v2swap", limit), 2);
    assert_near(limit[1].available, 3.4e9);
}

static void test_version_1(void **state) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    (void)state;
    put_host("v1", "0", "5:cpu,cpuacct:/other\n4:memory:/job/step\n0::/\n");
    put("v1", "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    put("v1", "/sys/fs/cgroup/memory/memory.usage_in_bytes", "6000000000\n");
    put("v1", "/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "4000000000\n");
    put("v1", "/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "1500000000\n");
    put("v1", "/sys/fs/cgroup/memory/job/memory.stat",
        "inactive_file 1\ntotal_inactive_file 300000000\ntotal_active_file 200000000\n");
    assert_int_equal(limits("v1", limit), 2);
    assert_near(limit[1].available, 3e9);
    assert_string_equal(limit[1].name, "control group /job (at most 4.00 GB)");
}

/* The path is the host's, the mount the container's own group. */
static void test_container(void **state) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    (void)state;
    put_host("container", "0", "0::/../../docker/1234\n");
    put("container", "/sys/fs/cgroup/memory.max", "2000000000\n");
    put("container", "/sys/fs/cgroup/memory.current", "100000000\n");
    assert_int_equal(limits("container", limit), 2);
    assert_near(limit[1].available, 1.9e9);
}

/* Of many groups the tightest are kept, and the host. */
static void test_many_levels(void **state) {
    struct host_memory_limit limit[HOST_MEMORY_LIMITS];
    static const char *const most[] = {"8", "2", "7", "3", "6"};
    char path[200] = "/sys/fs/cgroup", file[300], bytes[32];
    (void)state;
    put_host("levels", "0", "0::/a/a/a/a/a\n");
    for (int i = 0; i < 5; i++) {
        strcat(path, "/a");
        snprintf(bytes, sizeof bytes, "%s000000000\n", most[i]);
        snprintf(file, sizeof file, "%s/memory.max", path);
        put("levels", file, bytes);
        snprintf(file, sizeof file, "%s/memory.current", path);
        put("levels", file, "0\n");
    }
    assert_int_equal(limits("levels", limit), HOST_MEMORY_LIMITS);
    assert_near(limit[0].available, 10e9);
    double least = 10e9, sum = 0;
    for (int i = 1; i < HOST_MEMORY_LIMITS; i++) {
        sum += limit[i].available;
        if (limit[i].available < least) least = limit[i].available;
    }
    assert_near(least, 2e9);
    assert_near(sum, 2e9 + 3e9 + 6e9);
}

/* ---- which host lacks it ---- */

static struct memory_demand demand(const char *host, double needed, uint64_t id, double available,
                                   uint64_t group, double group_available) {
    struct memory_demand d;
    memset(&d, 0, sizeof d);
    snprintf(d.host, sizeof d.host, "%s", host);
    d.needed = needed;
    d.limits = group ? 2 : 1;
    d.limit[0].id = id;
    d.limit[0].available = available;
    snprintf(d.limit[0].name, sizeof d.limit[0].name, "the host");
    d.limit[1].id = group;
    d.limit[1].available = group_available;
    snprintf(d.limit[1].name, sizeof d.limit[1].name, "a group");
    return d;
}

static void test_ranks_of_a_host_add_up(void **state) {
    struct memory_check found;
    (void)state;
    struct memory_demand all[] = {
        demand("ant", 4e9, 1, 10e9, 0, 0), demand("bee", 5e9, 2, 10e9, 0, 0),
        demand("ant", 4e9, 1, 10e9, 0, 0), demand("bee", 4e9, 2, 10e9, 0, 0)};
    memory_check_find(all, 4, &found);
    assert_true(found.fits);
    assert_string_equal(found.host, "bee"); /* the tighter one */
    assert_near(found.needed, 9e9);
    assert_int_equal(found.ranks, 2);
    all[1].needed = all[3].needed = 6e9;
    memory_check_find(all, 4, &found);
    assert_false(found.fits);
    assert_string_equal(found.host, "bee");
    assert_near(found.needed, 12e9);
    all[1].needed = all[3].needed = 1e9;
    all[2].needed = 6.1e9;
    memory_check_find(all, 4, &found);
    assert_false(found.fits);
    assert_string_equal(found.host, "ant");
}

/* Two ranks in groups of their own, one of which is too small, and two in one together. */
static void test_groups(void **state) {
    struct memory_check found;
    (void)state;
    struct memory_demand all[] = {demand("ant", 4e9, 1, 100e9, 7, 5e9),
                                  demand("ant", 4e9, 1, 100e9, 8, 3e9)};
    memory_check_find(all, 2, &found);
    assert_false(found.fits);
    assert_int_equal(found.ranks, 1);
    assert_near(found.available, 3e9);
    assert_string_equal(found.limit, "a group");
    all[1].limit[1] = all[0].limit[1];
    memory_check_find(all, 2, &found);
    assert_false(found.fits);
    assert_int_equal(found.ranks, 2);
    assert_near(found.needed, 8e9);
}

static void test_nothing_is_known(void **state) {
    struct memory_check found;
    struct memory_demand one;
    (void)state;
    memset(&one, 0, sizeof one);
    one.needed = 1e15;
    memory_check_find(&one, 1, &found);
    assert_true(found.fits);
}

static void test_node_of_a_device(void **state) {
    (void)state;
    const char *root = in_scratch("numa");
    put("numa", "/sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n");
    put("numa", "/sys/bus/pci/devices/0000:17:00.0/numa_node", "-1\n");
    put("numa", "/sys/bus/pci/devices/0000:18:00.0/numa_node", "none\n");
    assert_int_equal(host_memory_node_of(root, "0000:C1:00.0"), 1);
    assert_int_equal(host_memory_node_of(root, "0000:17:00.0"), -1);
    assert_int_equal(host_memory_node_of(root, "0000:18:00.0"), -1);
    assert_int_equal(host_memory_node_of(root, "0000:19:00.0"), -1);
}

static void test_preferred_node(void **state) {
    (void)state;
    int mode = -1;
    unsigned long nodes[16] = {0};
    if (!host_memory_prefer(0)) skip(); /* the kernel refuses, as in some containers */
    if (syscall(SYS_get_mempolicy, &mode, nodes, 1024ul, NULL, 0ul)) skip();
    assert_int_equal(mode, MPOL_PREFERRED);
    assert_int_equal(nodes[0], 1);
    assert_true(host_memory_prefer(-1));
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, NULL, 0ul, NULL, 0ul), 0);
    assert_int_equal(mode, MPOL_DEFAULT);
    assert_false(host_memory_prefer(5000));
    /* A policy that numactl set comes back. */
    if (syscall(SYS_set_mempolicy, MPOL_INTERLEAVE, nodes, 1024ul)) skip();
    assert_true(host_memory_prefer(0) && host_memory_prefer(0) && host_memory_prefer(-1));
    nodes[0] = 0;
    assert_int_equal(syscall(SYS_get_mempolicy, &mode, nodes, 1024ul, NULL, 0ul), 0);
    assert_int_equal(mode, MPOL_INTERLEAVE);
    assert_int_equal(nodes[0], 1);
    assert_int_equal(syscall(SYS_set_mempolicy, MPOL_DEFAULT, NULL, 0ul), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_host_alone),
        cmocka_unit_test(test_version_2),
        cmocka_unit_test(test_version_2_with_swap),
        cmocka_unit_test(test_version_1),
        cmocka_unit_test(test_container),
        cmocka_unit_test(test_many_levels),
        cmocka_unit_test(test_ranks_of_a_host_add_up),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_nothing_is_known),
        cmocka_unit_test(test_node_of_a_device),
        cmocka_unit_test(test_preferred_node),
    };
    return cmocka_run_group_tests(tests, make_scratch, remove_scratch);
}

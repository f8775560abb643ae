/* test_preflight.c — tests which node --preflight names, with made-up networks and hosts. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "llmc/cli/preflight.h"

enum { NODES = 8, EACH = 4, RANKS = NODES * EACH, SENT = 100000 };

static const char *const names[NODES] = {"ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen"};
static int node[RANKS];
static struct lossynet_path paths[RANKS * RANKS];
static struct preflight_rank rank[RANKS];
static struct preflight_findings found;

/* All is well, with rates that differ by 5% as they always do. `nodes` of NODES are there. */
static struct preflight_nodes well(int nodes) {
    const int ranks = nodes * EACH;
    memset(&found, 0, sizeof found);
    memset(rank, 0, sizeof rank);
    for (int r = 0; r < ranks; r++) {
        struct preflight_rank *k = &rank[r];
        node[r] = r / EACH;
        strcpy(k->host, names[node[r]]);
        strcpy(k->device, "AVX2");
        k->disk_free = k->disk_needed = 1e12;
        k->gflops = 100 + r % 3;
    }
    for (int s = 0; s < ranks; s++)
        for (int r = 0; r < ranks; r++)
            paths[s * ranks + r] = (struct lossynet_path){
                SENT, SENT, node[s] == node[r] ? 400 : 50 + (s * r) % 6 / 2.0};
    return (struct preflight_nodes){ranks, nodes, node, names};
}

static void scale(const struct preflight_nodes *n, int from, int to, double rate, double lost) {
    for (int s = 0; s < n->ranks; s++) {
        for (int r = 0; r < n->ranks; r++) {
            struct lossynet_path *p = &paths[s * n->ranks + r];
            if ((from >= 0 && node[s] != from) || (to >= 0 && node[r] != to) || node[s] == node[r])
                continue;
            p->gbps *= rate;
            p->arrived = (uint64_t)llround((double)p->arrived * (1 - lost));
        }
    }
}

static void network_says(const struct preflight_nodes *n, const char *text) {
    preflight_verdict_network(n, paths, &found);
    if (!text) {
        if (found.count) fail_msg("unexpected: %s", found.list[0].text);
        return;
    }
    assert_int_equal(found.count, 1);
    assert_string_equal(found.list[0].text, text);
}

static void hosts_say(const struct preflight_nodes *n, const char *text) {
    preflight_verdict_hosts(n, rank, &found);
    if (!text) {
        if (found.count) fail_msg("unexpected: %s", found.list[0].text);
        return;
    }
    assert_int_equal(found.count, 1);
    assert_string_equal(found.list[0].text, text);
}

/* ---- network ---- */

static void test_all_well(void **state) {
    (void)state;
    for (int nodes = 1; nodes <= NODES; nodes++) {
        struct preflight_nodes n = well(nodes);
        network_says(&n, NULL);
    }
    /* A network that is slow and lossy everywhere has no bad node. */
    struct preflight_nodes n = well(NODES);
    scale(&n, -1, -1, 0.1, 0.1);
    network_says(&n, NULL);
}

static void test_a_slow_port(void **state) {
    (void)state;
    for (int nodes = 3; nodes <= NODES; nodes++) {
        struct preflight_nodes n = well(nodes);
        for (int r = 0; r < n.ranks * n.ranks; r++) paths[r].gbps = 50;
        scale(&n, -1, 2, 0.61, 0);
        network_says(&n, "node cat: received 61% of the median rate from every peer: look at its "
                         "port");
        n = well(nodes);
        for (int r = 0; r < n.ranks * n.ranks; r++) paths[r].gbps = 50;
        scale(&n, 1, -1, 0.5, 0);
        network_says(&n, "node bee: sent 50% of the median rate to every peer: look at its port");
        n = well(nodes);
        for (int r = 0; r < n.ranks * n.ranks; r++) paths[r].gbps = 50;
        scale(&n, 0, -1, 0.3, 0);
        scale(&n, -1, 0, 0.4, 0);
        network_says(&n, "node ant: received 40% of the median rate from every peer; sent 30% of "
                         "the median rate to every peer: look at its port");
    }
}

static void test_a_lossy_port(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    scale(&n, 7, -1, 0.97, 0.03);
    network_says(&n, "node hen: lost 3.0% of what it sent to every peer: look at its port");
    n = well(3);
    scale(&n, -1, 1, 0.99, 0.01);
    network_says(&n, "node bee: lost 1.0% of what every peer sent to it: look at its port");
}

static void test_a_silent_port(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    scale(&n, -1, 4, 0, 1);
    network_says(&n, "node elk: received nothing from any peer: look at its port");
    n = well(NODES);
    scale(&n, -1, -1, 0, 1);
    network_says(&n, "no datagram came from any other node at most ranks: are they allowed between "
                     "the nodes (firewall), and is --interface right?");
}

static void test_one_adapter_of_a_node(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    for (int i = 0; i < RANKS * RANKS; i++) paths[i].gbps = 50;
    for (int s = 0; s < RANKS; s++) paths[s * RANKS + 13].gbps = 20;
    network_says(&n, "node dog, rank 13: received 40% of the median rate from every peer: look at "
                     "its adapter and --interface");
}

static void test_one_path(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    for (int i = 0; i < RANKS * RANKS; i++) paths[i].gbps = 50;
    scale(&n, 2, 5, 0.2, 0);
    network_says(&n, "from node cat to node fox: 20% of the median rate, 0.0% lost: look at the "
                     "path between them");
    n = well(2);
    for (int i = 0; i < n.ranks * n.ranks; i++) paths[i].gbps = 50;
    scale(&n, 0, 1, 0.61, 0);
    network_says(&n,
                 "from node ant to node bee: 61% of the other direction's rate, 0.0% lost: look "
                 "at the path between them (of two nodes, nobody can tell which end it is)");
}

static void test_two_bad_nodes(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    scale(&n, -1, 3, 0.5, 0);
    scale(&n, 6, -1, 1, 0.2);
    preflight_verdict_network(&n, paths, &found);
    assert_int_equal(found.count, 2);
    assert_non_null(strstr(found.list[0].text, "node dog: received"));
    assert_non_null(strstr(found.list[1].text, "node gnu: lost 20.0% of what it sent"));
}

static void test_a_firewall_inside(void **state) {
    (void)state;
    struct preflight_nodes n = well(1);
    paths[1 * EACH + 2].arrived = 0;
    network_says(&n, "node ant: nothing that rank 1 sent to rank 2 beside it arrived: look at its "
                     "firewall and at --interface");
}

static void test_what_shows_once_is_no_finding(void **state) {
    (void)state;
    static struct preflight_findings again;
    struct preflight_nodes n = well(NODES);
    scale(&n, -1, 3, 0.5, 0);
    scale(&n, -1, 5, 0.5, 0);
    preflight_verdict_network(&n, paths, &found);
    assert_int_equal(found.count, 2);
    const struct preflight_findings both = found;
    n = well(NODES);
    scale(&n, -1, 5, 0.5, 0);
    preflight_verdict_network(&n, paths, &found);
    again = found;
    found = both;
    preflight_confirm(&found, &again);
    assert_int_equal(found.count, 1);
    assert_non_null(strstr(found.list[0].text, "node fox"));
    again.count = 0;
    preflight_confirm(&found, &again);
    assert_int_equal(found.count, 0);
}

/* ---- hosts ---- */

static void test_hosts_well(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    strcpy(rank[9].device, "AVX-512"); /* CPUs may differ */
    rank[9].gflops = 10;
    hosts_say(&n, NULL);
}

static void test_disk(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    rank[4].disk_free = 1e11;
    hosts_say(&n, "node bee: checkpoints need 1000.0 GB in --out, and 100.0 GB are free "
                  "there: a smaller --keep needs less");
}

static void test_devices(void **state) {
    (void)state;
    struct preflight_nodes n = well(NODES);
    for (int r = 0; r < RANKS; r++) rank[r].on_device = true;
    rank[17].gflops = 50;
    strcpy(rank[5].wrong, "does not see in --out");
    preflight_verdict_hosts(&n, rank, &found);
    assert_int_equal(found.count, 2);
    assert_string_equal(found.list[0].text, "node bee, rank 5: does not see in --out");
    assert_string_equal(found.list[1].text,
                        "node elk, rank 17: its GPU computes at 50% of the median rate: look at "
                        "its clocks and temperature (nvidia-smi -q -d CLOCK,PERFORMANCE)");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_well),
        cmocka_unit_test(test_a_slow_port),
        cmocka_unit_test(test_a_lossy_port),
        cmocka_unit_test(test_a_silent_port),
        cmocka_unit_test(test_one_adapter_of_a_node),
        cmocka_unit_test(test_one_path),
        cmocka_unit_test(test_two_bad_nodes),
        cmocka_unit_test(test_a_firewall_inside),
        cmocka_unit_test(test_what_shows_once_is_no_finding),
        cmocka_unit_test(test_hosts_well),
        cmocka_unit_test(test_disk),
        cmocka_unit_test(test_devices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

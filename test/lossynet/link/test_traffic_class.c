/* test_traffic_class.c — tests the names of traffic classes and the marks that datagrams get: over
 * UDP, as the receiving socket sees them, and in the address handles of RDMA.
 */
#include "test/lossynet/test_lossynet.h"

#include "lossynet/link/udp_socket.h"

#include <arpa/inet.h>
#include <poll.h>

static void test_names(void **state) {
    (void)state;
    static const struct {
        const char *name;
        int dscp, level;
    } right[] = {{"default", 0, 0}, {"le", 1, 1},    {"cs0", 0, 0},   {"cs1", 8, 1},
                 {"cs7", 56, 7},    {"af11", 10, 1}, {"af13", 14, 1}, {"af41", 34, 4},
                 {"af43", 38, 4},   {"va", 44, 5},   {"ef", 46, 5},   {"0", 0, 0},
                 {"1", 1, 1},       {"63", 63, 7},   {"7", 7, 0}};
    static const char *const wrong[] = {"",    "LE",   "le1",  "cs",   "cs8",  "cs10",
                                        "cs-", "af1",  "af10", "af14", "af51", "64",
                                        "-1",  "af4x", "1.0",  "0x1",  " 1x",  "be"};
    for (size_t i = 0; i < sizeof right / sizeof *right; i++) {
        int dscp = -1;
        assert_true(ln_dscp_parse(right[i].name, &dscp));
        assert_int_equal(dscp, right[i].dscp);
        assert_int_equal(ln_service_level(dscp), right[i].level);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        int dscp = -1;
        if (ln_dscp_parse(wrong[i], &dscp)) fail_msg("\"%s\" was taken", wrong[i]);
        assert_int_equal(dscp, -1);
    }
}

static void test_settings(void **state) {
    (void)state;
    size_t elements = 100;
    for (int dscp = -1; dscp <= 64; dscp += 65) {
        struct lossynet_settings settings = simple_settings(2, &elements, 1, 0);
        struct lossynet_comm *comm;
        settings.network.dscp = dscp;
        capture_begin();
        lossynet_status status = lossynet_open(&alone, &settings, &comm);
        assert_message(capture_end(), "expected a DSCP from 0 to 63");
        assert_int_equal(status, LOSSYNET_INVALID);
    }
}

/* What the kernel tells of a datagram: its traffic class. */
static int class_received(int fd, int level, int type) {
    uint8_t bytes[256], control[64];
    struct iovec part = {bytes, sizeof bytes};
    struct msghdr m = {.msg_iov = &part,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = sizeof control};
    struct pollfd poll_for = {.fd = fd, .events = POLLIN};
    if (poll(&poll_for, 1, 5000) != 1 || recvmsg(fd, &m, 0) < 0) return -1;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
        int class = 0; /* a byte over IPv4, an int over IPv6 */
        if (c->cmsg_level != level || c->cmsg_type != type) continue;
        memcpy(&class, CMSG_DATA(c), level == IPPROTO_IP ? 1 : sizeof class);
        return class;
    }
    return -1;
}

static void udp_marks(int family, const char *loopback) {
    enum { COUNT = 5, DSCP = 46 };
    bool v4 = family == AF_INET;
    int level = v4 ? IPPROTO_IP : IPPROTO_IPV6, type = v4 ? IP_TOS : IPV6_TCLASS, one = 1;
    struct udp_socket s;
    struct udp_address mine = {.any.sa_family = (sa_family_t)family}, to = mine;
    inet_pton(family, loopback, v4 ? (void *)&mine.v4.sin_addr : (void *)&mine.v6.sin6_addr);
    to = mine;
    int fd = socket(family, SOCK_DGRAM, 0);
    socklen_t length = udp_address_bytes(&to);
    if (fd < 0 || bind(fd, &to.any, length)) {
        if (fd >= 0) close(fd);
        skip(); /* no IPv6 here */
    }
    getsockname(fd, &to.any, &length);
    setsockopt(fd, level, v4 ? IP_RECVTOS : IPV6_RECVTCLASS, &one, sizeof one);
    assert_int_equal(udp_socket_open(&s, &mine, (const int[2]){0, 0}), LOSSYNET_OK);
    s.dscp = DSCP;
    for (int segmented = 0; segmented < 2; segmented++) {
        s.segmentation = s.segmentation && segmented;
        for (int round = 0; round < 4; round++) { /* bulk or not, one or several */
            struct ln_datagram batch[COUNT];
            int count = round / 2 ? COUNT : 1;
            for (int i = 0; i < count; i++) batch[i] = (struct ln_datagram){.bulk = round % 2};
            assert_int_equal(udp_send(&s, &to, batch, count), LOSSYNET_OK);
            for (int i = 0; i < count; i++)
                assert_int_equal(class_received(fd, level, type), round % 2 ? DSCP << 2 : 0);
        }
        if (!segmented) s.segmentation = true;
    }
    udp_socket_close(&s);
    close(fd);
}

static void test_udp_marks(void **state) {
    (void)state;
    udp_marks(AF_INET, "127.0.0.1");
}

static void test_udp_marks_over_ipv6(void **state) {
    (void)state;
    udp_marks(AF_INET6, "::1");
}

#ifdef LOSSYNET_VERBS
#include "lossynet/link/verbs.h"

static void test_verbs_marks(void **state) {
    (void)state;
    struct ibv_ah_attr usual = {.dlid = 7, .port_num = 1, .grh = {.hop_limit = 64}};
    struct ibv_ah_attr le = verbs_bulk(usual, 1), ef = verbs_bulk(usual, 46);
    assert_int_equal(le.grh.traffic_class, 1 << 2);
    assert_int_equal(le.sl, 1);
    assert_int_equal(ef.grh.traffic_class, 46 << 2);
    assert_int_equal(ef.sl, 5);
    assert_int_equal(le.dlid, 7);
    assert_int_equal(le.grh.hop_limit, 64);
}
#else
static void test_verbs_marks(void **state) {
    (void)state;
    skip(); /* built without libibverbs */
}
#endif

int main(void) {
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),       cmocka_unit_test(test_settings),
        cmocka_unit_test(test_udp_marks),   cmocka_unit_test(test_udp_marks_over_ipv6),
        cmocka_unit_test(test_verbs_marks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

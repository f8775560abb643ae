/* test_interfaces.c — tests which network interface a UDP socket uses, and what happens to
 * datagrams that are larger than its MTU.
 *
 * It runs in a network namespace of its own, which needs root or user namespaces, and the program
 * ip.
 */
#include "test/lossynet/test_lossynet.h"

#include "lossynet/link/udp_socket.h"

#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <unistd.h>

static bool prepared;

static bool ip(const char *arguments) {
    char command[256];
    snprintf(command, sizeof command, "ip %s >/dev/null 2>&1", arguments);
    return system(command) == 0;
}

/* A bridge for containers is first, and runs; then come an interface without a carrier, one of a
 * network nearby, and one of the network beyond. */
static bool prepare(void) {
    return (unshare(CLONE_NEWNET) == 0 || unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0) &&
           ip("link set lo up") && ip("link add containers0 type bridge") &&
           ip("link add inside type veth peer name port") &&
           ip("link set port master containers0") && ip("link set port up") &&
           ip("link set inside up") && ip("address add 172.17.0.1/16 dev containers0") &&
           ip("link set containers0 up") && ip("link add bare0 type veth peer name unplugged") &&
           ip("address add 10.1.0.1/24 dev bare0") && ip("link set bare0 up") &&
           ip("link add near0 type veth peer name near1") &&
           ip("address add 10.2.0.1/24 dev near0") && ip("link set near0 up") &&
           ip("link set near1 up") && ip("link add far0 mtu 1400 type veth peer name far1") &&
           ip("address add 10.3.0.1/24 dev far0") && ip("link set far0 up") &&
           ip("link set far1 up");
}

/* An interface runs some time after it is up. */
static bool runs(const char *name) {
    struct ifreq request = {.ifr_flags = 0};
    strncpy(request.ifr_name, name, sizeof request.ifr_name - 1);
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    bool running = ioctl(fd, SIOCGIFFLAGS, &request) == 0 && request.ifr_flags & IFF_RUNNING;
    close(fd);
    return running;
}

static void assert_chosen(const char *name) {
    struct udp_interface chosen;
    assert_int_equal(udp_choose(NULL, false, &chosen), LOSSYNET_OK);
    char found[IF_NAMESIZE] = "";
    if_indextoname(chosen.index, found);
    assert_string_equal(found, name);
}

static void test_choice(void **state) {
    (void)state;
    if (!prepared) skip();
    assert_chosen("near0");
    assert_true(ip("route add default via 10.3.0.2 dev far0"));
    assert_chosen("far0");
    struct udp_interface chosen;
    assert_int_equal(udp_choose("containers0", false, &chosen), LOSSYNET_OK); /* as asked for */
    assert_int_equal(chosen.index, if_nametoindex("containers0"));
    assert_int_equal(udp_choose("bare0", false, &chosen), LOSSYNET_OK);
}

/* Sends datagrams of so many bytes of payload from one address to another; returns how many
 * come. */
static int carried(struct udp_socket *from, struct udp_socket *to,
                   const struct udp_address *address, size_t bytes, int count) {
    static const uint8_t payload[66000];
    struct ln_datagram batch[LOSSYNET_BATCH] = {{.length = 0}};
    for (int i = 0; i < count; i++) batch[i].payload = payload, batch[i].length = bytes;
    assert_int_equal(udp_send(from, address, batch, count), LOSSYNET_OK);
    int came = 0;
    struct pollfd ready = {.fd = to->fd, .events = POLLIN};
    while (came < count && poll(&ready, 1, 200) == 1) {
        uint8_t *datagram;
        size_t length;
        struct udp_address *sender;
        while (udp_receive(to, &datagram, &length, &sender))
            came += length == bytes + WIRE_HEADER_BYTES;
    }
    return came;
}

/* When the path's MTU shrinks, one line says so, and datagrams still arrive; one that cannot be
 * sent at all is lost, and the link is not broken. */
static void test_mtu_shrinks(void **state) {
    (void)state;
    if (!prepared) skip();
    struct udp_interface lo;
    struct udp_socket from, to;
    assert_int_equal(udp_choose("lo", true, &lo), LOSSYNET_OK);
    struct udp_address here = lo.address, there = lo.address;
    assert_int_equal(udp_socket_open(&from, &here, (const int[2]){0, 0}), LOSSYNET_OK);
    assert_int_equal(udp_socket_open(&to, &there, (const int[2]){0, 0}), LOSSYNET_OK);
    capture_begin();
    assert_int_equal(carried(&from, &to, &there, 1440, 5), 5);
    assert_string_equal(capture_end(), "");
    assert_true(ip("link set lo mtu 1000"));
    capture_begin();
    assert_int_equal(carried(&from, &to, &there, 1440, 5), 5);
    assert_int_equal(carried(&from, &to, &there, 1440, 5), 5);
    const char *said = capture_end();
    assert_message(said, "a path's MTU has become too small for a datagram of 1468 bytes");
    capture_begin();
    assert_int_equal(carried(&from, &to, &there, 66000, 1), 0);
    assert_int_equal(carried(&from, &to, &there, 400, 1), 1);
    assert_string_equal(capture_end(), "");
    udp_socket_close(&from);
    udp_socket_close(&to);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_choice),
        cmocka_unit_test(test_mtu_shrinks),
    };
    prepared = prepare();
    for (int i = 0; prepared && i < 500 && !(runs("far0") && runs("near0") && runs("containers0"));
         i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    if (!prepared) print_message("skipped: needs root or user namespaces, and the program ip\n");
    return cmocka_run_group_tests_name("interfaces", tests, NULL, NULL);
}

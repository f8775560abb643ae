/* verbs_port.c — finds RDMA devices, ports and GIDs, and reads counters. See verbs.h. */
#ifdef LOSSYNET_VERBS
#include "lossynet/link/verbs.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct request { /* parsed from the setting `interface` */
    char device[IBV_SYSFS_NAME_MAX];
    int port, gid_index; /* port 0 and gid_index -1: any */
};

struct listing { /* text that lists all ports, for a message */
    char text[1500];
    size_t used;
};

static void list(struct listing *to, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void list(struct listing *to, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    size_t room = sizeof to->text - to->used;
    int n = vsnprintf(to->text + to->used, room, format, arguments);
    va_end(arguments);
    if (n > 0) to->used += (size_t)n < room ? (size_t)n : room - 1;
}

/* ---- GIDs ---- */

static bool is_mapped(const union ibv_gid *gid) { /* ::ffff:a.b.c.d */
    static const uint8_t prefix[12] = {[10] = 0xff, [11] = 0xff};
    return memcmp(gid->raw, prefix, sizeof prefix) == 0;
}

const char *verbs_gid_text(const union ibv_gid *gid, char text[VERBS_GID_TEXT]) {
    bool v4 = is_mapped(gid);
    const char *made = inet_ntop(v4 ? AF_INET : AF_INET6, gid->raw + (v4 ? 12 : 0), text, 48);
    return made ? made : "?";
}

/* Returns how much we prefer a GID on Ethernet: RoCE v2 first, routed before link-local addresses,
 * and then IPv4 before IPv6. */
static int preference(const struct ibv_gid_entry *entry) {
    if (entry->gid_type != IBV_GID_TYPE_ROCE_V2) return 1;
    if (is_mapped(&entry->gid))
        return entry->gid.raw[12] == 169 && entry->gid.raw[13] == 254 ? 3 : 5;
    return entry->gid.raw[0] == 0xfe ? 2 : 4;
}

/* Takes the GID that is asked for, or the best one. Adds all to the listing. */
static bool choose_gid(struct verbs_port *port, int entries, int wanted, struct listing *all) {
    static const char *const types[] = {"", " RoCE v1", " RoCE v2"};
    int best = 0;
    for (int i = 0; i < entries; i++) {
        struct ibv_gid_entry entry;
        char text[VERBS_GID_TEXT];
        if (ibv_query_gid_ex(port->context, port->number, (uint32_t)i, &entry, 0)) continue;
        list(all, " GID %d=%s%s", i, verbs_gid_text(&entry.gid, text), types[entry.gid_type % 3]);
        int p = wanted == i ? 9 : wanted >= 0 ? 0 : port->ethernet ? preference(&entry) : i == 0;
        if (p <= best) continue;
        best = p;
        port->gid_index = i;
        port->gid = entry.gid;
        port->ipv4 = entry.gid_type == IBV_GID_TYPE_ROCE_V2 && is_mapped(&entry.gid);
    }
    return best > 0;
}

/* ---- ports ---- */

/* Reads the attributes of a port whose `number` and `name` are set. Returns whether it can be used
 * as asked. */
static bool try_port(struct verbs_port *port, const struct request *request, struct listing *all) {
    struct ibv_port_attr attr;
    if (ibv_query_port(port->context, port->number, &attr)) return false;
    static const char *const layers[] = {"", " InfiniBand", " Ethernet"};
    list(all, "%s%s %s%s MTU %d", all->used ? "; " : "", port->name,
         attr.state == IBV_PORT_ACTIVE ? "ACTIVE" : ibv_port_state_str(attr.state),
         layers[attr.link_layer % 3], 128 << attr.active_mtu);
    port->ethernet = attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    port->lid = attr.lid;
    port->mtu = (size_t)128 << attr.active_mtu;
    bool good = choose_gid(port, attr.gid_tbl_len, request->gid_index, all);
    const char *device = ibv_get_device_name(port->context->device);
    return good && attr.state == IBV_PORT_ACTIVE &&
           (!request->device[0] || strcmp(device, request->device) == 0) &&
           (!request->port || request->port == port->number);
}

/* Looks for a port of one device. If there is one, the device stays open. */
static bool try_device(struct ibv_device *device, const struct request *request,
                       struct verbs_port *out, struct listing *all) {
    const char *name = ibv_get_device_name(device);
    struct verbs_port port = {.context = ibv_open_device(device)};
    if (!port.context || ibv_query_device(port.context, &port.limits)) {
        list(all, "%s%s cannot be opened: %s", all->used ? "; " : "", name, strerror(errno));
        verbs_port_close(&port);
        return false;
    }
    bool taken = false;
    for (int number = 1; number <= port.limits.phys_port_cnt; number++) {
        port.number = (uint8_t)number;
        snprintf(port.name, sizeof port.name, "%.*s:%d", IBV_SYSFS_NAME_MAX - 1, name, number);
        if (!try_port(&port, request, all) || taken) continue;
        *out = port;
        taken = true;
    }
    if (!taken) verbs_port_close(&port);
    return taken;
}

static bool find_port(const struct request *request, struct verbs_port *out, struct listing *all) {
    int count = 0;
    *out = (struct verbs_port){0};
    struct ibv_device **devices = ibv_get_device_list(&count);
    for (int i = 0; devices && i < count && !out->context; i++)
        if (devices[i]->transport_type != IBV_TRANSPORT_IWARP) /* iWARP has no datagrams */
            try_device(devices[i], request, out, all);
    if (devices) ibv_free_device_list(devices);
    return out->context;
}

/* Parses `interface`, and takes one of its entries, which commas separate, by the local rank. */
static bool parse(const char *interface, int local_rank, struct request *out) {
    *out = (struct request){.gid_index = -1};
    if (!interface) return true;
    int count = 1;
    for (const char *c = interface; *c; c++) count += *c == ',';
    for (int skip = local_rank % count; skip > 0; skip--) interface = strchr(interface, ',') + 1;
    size_t length = strcspn(interface, ",:");
    if (length == 0 || length >= sizeof out->device) return false;
    memcpy(out->device, interface, length);
    char *end = (char *)interface + length;
    if (*end == ':') {
        out->port = (int)strtol(end + 1, &end, 10);
        if (out->port < 1 || out->port > 255) return false;
    }
    if (*end == ':') {
        const char *start = end + 1;
        out->gid_index = (int)strtol(start, &end, 10);
        if (end == start || out->gid_index < 0) return false;
    }
    return *end == 0 || *end == ',';
}

static uint64_t count_overruns(const struct verbs_port *port);

lossynet_status verbs_port_open(const char *interface, int local_rank, struct verbs_port *port) {
    struct request request;
    struct listing all = {.text = "none (see: rdma link)"};
    *port = (struct verbs_port){0};
    bool understood = parse(interface, local_rank, &request);
    if (!understood) request = (struct request){.device = "?", .gid_index = -1};
    if (find_port(&request, port, &all)) {
        port->overruns = count_overruns(port);
        return LOSSYNET_OK;
    }
    if (interface)
        ln_log("interface %s: expected DEVICE[:PORT[:GID_INDEX]] of an RDMA port that is "
               "active; RDMA ports here: %s",
               interface, all.text);
    else
        ln_log("link verbs needs an RDMA port that is active; RDMA ports here: %s", all.text);
    return LOSSYNET_LINK;
}

void verbs_port_close(struct verbs_port *port) {
    if (port->context) ibv_close_device(port->context);
    port->context = NULL;
}

bool ln_link_verbs_available(void) {
    struct verbs_port port;
    struct listing all = {0};
    if (!find_port(&(struct request){.gid_index = -1}, &port, &all)) return false;
    verbs_port_close(&port);
    return true;
}

/* ---- counters ---- */

/* Adds up the port's counters of dropped datagrams. out_of_buffer (mlx5, bnxt_re) counts datagrams
 * for which no receive was posted, rq_num_udsdprd (mlx4) the same only for UD, and rx_drops (efa)
 * datagrams dropped on receipt. Soft-RoCE has no such counter. */
static uint64_t count_overruns(const struct verbs_port *port) {
    static const char *const names[] = {"out_of_buffer", "rq_num_udsdprd", "rx_drops"};
    uint64_t sum = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[256];
        unsigned long long value;
        snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/%d/hw_counters/%s",
                 ibv_get_device_name(port->context->device), port->number, names[i]);
        FILE *file = fopen(path, "re");
        if (!file) continue;
        if (fscanf(file, "%llu", &value) == 1) sum += value;
        fclose(file);
    }
    return sum;
}

uint64_t verbs_port_overruns(const struct verbs_port *port) {
    uint64_t now = count_overruns(port);
    return now > port->overruns ? now - port->overruns : 0;
}

#endif

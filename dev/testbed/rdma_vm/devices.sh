# devices.sh: for scripts that run in the guest. Sourced; makes and changes Soft-RoCE devices.
#
#     rxe0 (on v0, 10.9.8.1) ... rxe3 (on v3, 10.9.8.4), all on one bridge
#
# Each device stands on a veth of its own: what stays within one device never meets a queue, and
# would lose nothing.

# devices_make COUNT MTU: 9000 makes room for datagrams of 4096 bytes, 1500 for 1024.
devices_make() {
    ip link add br0 type bridge mcast_snooping 0
    ip link set br0 mtu "$2" up
    i=0
    while [ $i -lt "$1" ]; do
        ip link add "v$i" mtu "$2" type veth peer name "b$i" mtu "$2"
        ip link set "b$i" master br0
        ip link set "b$i" up
        # The address first: the device's second GID is made from it.
        ip addr add "10.9.8.$((i + 1))/24" dev "v$i"
        ip link set "v$i" up
        # One kernel that has all the addresses must answer for each on its own veth alone.
        for c in all default "v$i"; do
            echo 1 >"/proc/sys/net/ipv4/conf/$c/accept_local"
            echo 0 >"/proc/sys/net/ipv4/conf/$c/rp_filter"
            echo 1 >"/proc/sys/net/ipv4/conf/$c/arp_ignore"
            echo 2 >"/proc/sys/net/ipv4/conf/$c/arp_announce"
        done
        i=$((i + 1))
    done
    sleep 0.2
    i=0
    while [ $i -lt "$1" ]; do
        rdma link add "rxe$i" type rxe netdev "v$i"
        i=$((i + 1))
    done
}

# devices_lose COUNT PERCENT: what leaves each device is lost at random. Counters start at 0.
devices_lose() {
    i=0
    while [ $i -lt "$1" ]; do
        tc qdisc replace dev "v$i" root netem limit 100000 loss "$2%"
        i=$((i + 1))
    done
}

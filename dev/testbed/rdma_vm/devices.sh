# devices.sh: functions that make and change Soft-RoCE devices, to be sourced by scripts in the guest.
#
#     rxe0 (on v0, 10.9.8.1) ... rxe3 (on v3, 10.9.8.4), all on one bridge
#
# Each device has a veth of its own: packets within one device pass no queue, and none would be lost.

# devices_make COUNT MTU: makes devices. An MTU of 9000 allows datagrams of 4096 bytes, 1500 of 1024.
devices_make() {
    # On a busy machine the guest's kernel would drop more than this between two devices.
    echo 100000 >/proc/sys/net/core/netdev_max_backlog
    ip link add br0 type bridge mcast_snooping 0
    ip link set br0 mtu "$2" up
    i=0
    while [ $i -lt "$1" ]; do
        ip link add "v$i" mtu "$2" type veth peer name "b$i" mtu "$2"
        ip link set "b$i" master br0
        ip link set "b$i" up
        # The address must come first, because the device's second GID is made from it.
        ip addr add "10.9.8.$((i + 1))/24" dev "v$i"
        ip link set "v$i" up
        # One kernel has all the addresses. It must answer for each address only on its own veth.
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

# devices_lose COUNT PERCENT: packets that leave each device are lost at random. Counters start at 0.
devices_lose() {
    i=0
    while [ $i -lt "$1" ]; do
        tc qdisc replace dev "v$i" root netem limit 100000 loss "$2%"
        i=$((i + 1))
    done
}

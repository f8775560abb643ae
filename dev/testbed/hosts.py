"""Makes hosts on one machine: network namespaces behind switches, with links that can be disturbed.

      host 0  eth0 ---- p0  br0     the network under test: rate limit, loss, reordering,
      host 1  eth0 ---- p1  |       duplicates, cuts; 10.77.0.x, fd77::x
              ...           |
      host 0  eth1 ---- q0  br1     starts programs and carries traffic that is not under test,
              ...           |       undisturbed; 10.78.0.x, fd78::x

Both switches are bridges in one more namespace, and no packet leaves the namespaces. Packets are lost
where they enter the switch, by nftables, which counts them. A packet is there at most one MTU long:
hosts segment before their link, as a network card does, so that each loss is one packet.

    with Hosts(4, rate="1gbit") as hosts:
        hosts.lose(10)                              # percent
        done = hosts.mpirun("build/train_llama2", "--link=udp", ...)
        hosts.counted()                             # {"data": 52210, "lost": 5198, ...}

It needs root and the tools in TOOLS; unavailable() says what is missing. Everything is removed when
the block is left. The leftovers of a killed process are removed by the next one.
"""
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "nft", "ethtool", "unshare", "mpirun")
PREFIX = "lossynet"
MTU = 1500
BURST = "256kb"  # of the rate limit; under 128 KiB the limiter loses rate by its own timers
HOST_QUEUE, SWITCH_QUEUE = "4mb", "512kb"  # sizes of the queues before a slow link

# Settings for Open MPI as root, with more ranks than cores and no busy waiting. If a rank has failed, the
# others are ended at once, and not one host after the other, each a second later.
# What starts the ranks has names of its own for its settings since Open MPI 5 (PRTE).
ENVIRONMENT = {"OMPI_MCA_plm_rsh_no_tree_spawn": "1", "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
               "OMPI_MCA_orte_keep_fqdn_hostnames": "1", "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
               "OMPI_MCA_oob_tcp_if_include": "eth1", "PRTE_MCA_prte_if_include": "eth1",
               "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_odls_base_sigkill_timeout": "0",
               "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1",
               "GOMP_SPINCOUNT": "1000"}  # the value of llmc/util/threads.h

# Open MPI starts its daemons with this script instead of ssh: a host is a namespace with its own host name. As for
# ssh, the arguments after the host's name are a line for a shell.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; mkdir -p FOLDER/$host; \
export TMPDIR=FOLDER/$host; $*"
"""

# Our datagrams begin with "LN". The low half of their fourth byte is the type, 1 = DATA
# (lossynet/base/wire.h).
OURS = "meta l4proto udp @th,64,16 0x4c4e"
DATA = "@th,92,4 1"
MARKS = """
table netdev marks {{
  counter data {{ }}
  counter data_marked {{ }}
  counter control {{ }}
  counter control_marked {{ }}
  chain in {{
    type filter hook ingress devices = {{ {ports} }} priority 1; policy accept;
    {ours} {data} goto data
    {ours} goto control
  }}
  chain data {{
    counter name data
    {marked} counter name data_marked
  }}
  chain control {{
    counter name control
    {marked} counter name control_marked
  }}
}}
"""
SPOIL = """
table netdev spoil {{
  counter data {{ }}
  counter lost {{ }}
  counter control {{ }}
  counter control_lost {{ }}
  counter other {{ }}
  counter other_lost {{ }}
  counter duplicated {{ }}
  counter reordered {{ }}
  chain in {{
    type filter hook ingress devices = {{ {ports} }} priority 0; policy accept;
    {ours} {data} goto data
    {ours} goto control
    meta l4proto {{ tcp, udp }} goto other
  }}
  chain data {{
    counter name data
    {chance_lost} counter name lost drop
    {chance_duplicated} counter name duplicated dup to ether daddr map {{ {port_of} }}
    {chance_reordered} counter name reordered meta priority set 1:20
  }}
  chain control {{
    counter name control
    {chance_lost} counter name control_lost drop
  }}
  chain other {{
    counter name other
    {chance_lost} counter name other_lost drop
  }}
}}
"""

DARK = """
table netdev dark {{
  chain in {{
    type filter hook ingress devices = {{ {ports} }} priority 0; policy accept;
    {rules}
  }}
}}
"""

FIREWALL = """
table inet firewall {{
  chain in {{
    type filter hook input priority 0; policy accept;
    iifname "eth0" udp dport != {ports} counter drop
    iifname "eth0" tcp flags & (syn | ack) == syn tcp dport != {ports} counter drop
  }}
}}
"""


def unavailable():
    """The reason why hosts cannot be made here, in one line; None if they can."""
    if os.geteuid():
        return "not root, so no network namespaces"
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    try:
        with Hosts(1, rate="1gbit") as hosts:
            hosts.spoil(lost=1, duplicated=1, reordered=1)
    except subprocess.CalledProcessError as error:
        return f"namespaces are refused here: {' '.join(map(str, error.cmd))}: {error.stderr.strip()}"
    return None


def sh(*command, text=None):
    return subprocess.run([str(word) for word in command], input=text, check=True,
                          capture_output=True, text=True).stdout


@functools.cache
def starts_by_ipv4():
    """Whether this mpirun starts ranks over IPv4 alone, as Debian's of Open MPI 5. Without an address it crashes."""
    return not re.search(r"\(Open MPI\) [1-4]\.", sh("mpirun", "--version"))


def chance(percent):
    return f"numgen random mod 100000 < {round(percent * 1000)}"


class Hosts:
    """rate: rate of every link in both directions, as tc writes it; None: as fast as the machine.
    congestion: TCP's congestion control; None: the system's. ipv: 4 or 6; hosts have no other, but for what starts
    programs (starts_by_ipv4).
    switch_queue: size of the queue of each port of the switch. mtu: MTU of all devices."""

    def __init__(self, count, rate=None, congestion=None, ipv=4, switch_queue=SWITCH_QUEUE,
                 mtu=MTU):
        self.rate, self.congestion, self.ipv = rate, congestion, ipv
        self.switch_queue, self.mtu = switch_queue, mtu
        self.switch = f"{PREFIX}{os.getpid()}s"
        self.names = [f"{PREFIX}{os.getpid()}h{i}" for i in range(count)]
        self.folder = None
        self.running = []
        self.lanes = set()  # ports with a slow lane

    # ---- up and down ----

    def __enter__(self):
        remove_leftovers()
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{PREFIX}-hosts-"))
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, *_):
        self.down()

    def up(self):
        sh("ip", "netns", "add", self.switch)
        # If the kernel has firewalls for bridges, they are switched off: they only cost time here.
        subprocess.run(["ip", "netns", "exec", self.switch, "sysctl", "-qw",
                        "net.bridge.bridge-nf-call-iptables=0",
                        "net.bridge.bridge-nf-call-ip6tables=0"], check=False, capture_output=True)
        for bridge in ("br0", "br1"):
            sh("ip", "-n", self.switch, "link", "add", bridge, "type", "bridge", "forward_delay", "0",
               "mcast_snooping", "0")
            sh("ip", "-n", self.switch, "link", "set", bridge, "up")
        for i, name in enumerate(self.names):
            sh("ip", "netns", "add", name)
            sh("ip", "-n", name, "link", "set", "lo", "up")
            self.connect(i, "eth0", f"p{i}", "br0", 77)
            self.connect(i, "eth1", f"q{i}", "br1", 78)
            # Single packets cross the link, not large ones that are segmented later. The host merges
            # received packets (GRO), as a network card's driver does.
            for space, device, gro in ((name, "eth0", "on"), (self.switch, f"p{i}", "off")):
                self.execute(space, "ethtool", "-K", device, "tso", "off", "gso", "off",
                             "tx-udp-segmentation", "off", "gro", gro)
            self.limit(i)
        self.control_congestion(self.congestion)
        agent = self.folder / "agent"
        agent.write_text(AGENT.replace("FOLDER", str(self.folder)))
        agent.chmod(0o755)

    def connect(self, i, device, port, bridge, network):
        name = self.names[i]
        sh("ip", "-n", name, "link", "add", device, "mtu", self.mtu, "address", self.hardware(i, network),
           "type", "veth", "peer", "name", port, "mtu", self.mtu, "netns", self.switch)
        sh("ip", "-n", self.switch, "link", "set", port, "master", bridge, "up")
        sh("ip", "-n", name, "link", "set", device, "up")
        bits, more = (24, ()) if self.ipv == 4 else (64, ("nodad",))
        sh("ip", "-n", name, "address", "add", f"{self.address(i, network)}/{bits}", "dev", device,
           *more)
        if self.ipv == 6 and device == "eth1" and starts_by_ipv4():
            sh("ip", "-n", name, "address", "add", f"10.{network}.0.{10 + i}/24", "dev", device)

    def limit(self, i):
        """Limits the rate of host i's link in both directions."""
        if self.rate:
            sh("tc", "-n", self.names[i], "qdisc", "replace", "dev", "eth0", "root", "tbf",
               "rate", self.rate, "burst", BURST, "limit", HOST_QUEUE)
            sh("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{i}", "root", "tbf",
               "rate", self.rate, "burst", BURST, "limit", self.switch_queue)

    def control_congestion(self, name):
        """Sets TCP's congestion control on the network under test. It is set per route, since the
        system's setting belongs to the first namespace."""
        self.congestion = name
        for i, host in enumerate(self.names) if name else ():
            network = "10.77.0.0/24" if self.ipv == 4 else "fd77::/64"
            source = ("src", self.address(i)) if self.ipv == 4 else ("metric", "100")
            sh("ip", "-n", host, "route", "replace", network, "dev", "eth0", *source, "congctl",
               name)

    def down(self):
        self.stop()
        for name in [*self.names, self.switch]:
            remove_namespace(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self):
        """Ends all programs that still run on hosts."""
        for running in self.running:
            if running.poll() is None:
                running.kill()
        for name in self.names:
            end_processes(name)
        for running in self.running:
            running.wait()
        self.running = []

    # ---- addresses ----

    def address(self, i, network=77):
        return f"10.{network}.0.{10 + i}" if self.ipv == 4 else f"fd{network}::{10 + i}"

    def hardware(self, i, network=77):
        return f"02:00:00:00:{network}:{10 + i}"

    # ---- what happens to packets ----

    def spoil(self, lost=0, duplicated=0, reordered=0):
        """Disturbs packets from now on. Percentages: TCP and UDP packets that are lost, DATA that is
        duplicated, and DATA that goes through a slow queue, so that other packets overtake it.
        Counters start from 0."""
        ports = ", ".join(f"p{i}" for i in range(len(self.names)))
        port_of = ", ".join(f'{self.hardware(i)} : "p{i}"' for i in range(len(self.names)))
        for i in range(len(self.names)) if reordered else ():
            self.slow_lane(f"p{i}")
        self.keep()
        self.execute(self.switch, "nft", "-f", "-", text=SPOIL.format(
            ports=ports, ours=OURS, data=DATA, port_of=port_of, chance_lost=chance(lost),
            chance_duplicated=chance(duplicated), chance_reordered=chance(reordered)))

    def lose(self, percent):
        self.spoil(lost=percent)

    def keep(self):
        """Ends all disturbances of spoil()."""
        subprocess.run(["ip", "netns", "exec", self.switch, "nft", "delete", "table", "netdev",
                        "spoil"], check=False, capture_output=True)

    def darken(self, *rules):
        """Drops UDP datagrams where they enter the switch, in addition to what spoil() does, until the next
        call. A rule is (from, to, more): numbers of hosts, None for any, and more words of nft, as
        "udp sport 40000-50000"."""
        subprocess.run(["ip", "netns", "exec", self.switch, "nft", "delete", "table", "netdev", "dark"],
                       check=False, capture_output=True)
        lines = []
        for source, to, more in rules:
            words = [f"ether {name} {self.hardware(host)}" for name, host in
                     (("saddr", source), ("daddr", to)) if host is not None]
            lines.append(" ".join([*words, "meta l4proto udp", more, "counter drop"]))
        if lines:
            ports = ", ".join(f"p{i}" for i in range(len(self.names)))
            self.execute(self.switch, "nft", "-f", "-", text=DARK.format(ports=ports, rules="\n    ".join(lines)))

    def firewall(self, ports):
        """From now on hosts let in on the network under test, to ports outside FIRST-LAST, no datagram and no new
        connection. None: everything."""
        for name in self.names:
            subprocess.run(["ip", "netns", "exec", name, "nft", "delete", "table", "inet", "firewall"],
                           check=False, capture_output=True)
            if ports:
                self.execute(name, "nft", "-f", "-", text=FIREWALL.format(ports=ports))

    # ---- traffic classes ----

    def watch_marks(self, dscp):
        """Counts our packets that enter the switch: data and control, all and those with this DSCP."""
        ports = ", ".join(f"p{i}" for i in range(len(self.names)))
        marked = f"{'ip' if self.ipv == 4 else 'ip6'} dscp {dscp:#04x}"
        self.execute(self.switch, "nft", "-f", "-", text=MARKS.format(
            ports=ports, ours=OURS, data=DATA, marked=marked))

    def yield_to_others(self, dscp, queue, rate=None, host_queue=HOST_QUEUE):
        """Packets with this DSCP leave switch and hosts only if no others wait. queue: bytes of their
        queue at the switch. rate: their highest rate. This needs self.rate."""
        for i, name in enumerate(self.names):
            for space, device, limits in (
                    (name, "eth0", (HOST_QUEUE, host_queue)),
                    (self.switch, f"p{i}", (self.switch_queue, queue))):
                self.two_classes(space, device, dscp, limits, rate or self.rate)

    def two_classes(self, space, device, dscp, limits, rate):
        """Makes strict priority with HTB: the lower class has nearly no rate of its own, and borrows
        what the upper class leaves. (sch_prio does the same, but not every kernel has it.)"""
        tc = ("tc", "-n", space)
        sh(*tc, "qdisc", "replace", "dev", device, "root", "handle", "1:", "htb", "default", "10")
        classes = (("1:", "1:1", self.rate, self.rate, 0), ("1:1", "1:10", self.rate, self.rate, 0),
                   ("1:1", "1:20", "8kbit", rate, 7))
        for parent, name, least, most, priority in classes:
            sh(*tc, "class", "add", "dev", device, "parent", parent, "classid", name, "htb", "rate",
               least, "ceil", most, "prio", priority, "burst", "16kb", "cburst", "16kb", "quantum",
               self.mtu + 14)
        for name, limit in zip(("10", "20"), limits):
            sh(*tc, "qdisc", "add", "dev", device, "parent", f"1:{name}", "handle", f"{name}:",
               "bfifo", "limit", limit)
        for protocol, word in (("ip", ("ip", "dsfield")), ("ipv6", ("ip6", "priority"))):
            sh(*tc, "filter", "add", "dev", device, "parent", "1:", "protocol", protocol, "u32",
               "match", *word, f"{dscp << 2:#04x}", "0xfc", "flowid", "1:20")

    def slow_lane(self, port):
        if port in self.lanes:
            return
        self.lanes.add(port)
        tc = ("tc", "-n", self.switch)
        rate = self.rate or "10gbit"
        sh(*tc, "qdisc", "replace", "dev", port, "root", "handle", "1:", "htb", "default", "10")
        for lane, speed in (("1:10", rate), ("1:20", "500mbit")):
            sh(*tc, "class", "add", "dev", port, "parent", "1:", "classid", lane, "htb",
               "rate", speed, "burst", 2 * self.mtu if lane == "1:20" else BURST, "quantum", self.mtu + 14)

    def netem(self, *arguments):
        """Puts netem on the way to every host, with arguments such as "delay", "1ms", "reorder", "25%".
        Raises CalledProcessError if the kernel has no netem."""
        for i in range(len(self.names)):
            sh("tc", "-n", self.switch, "qdisc", "replace", "dev", f"p{i}", "root", "netem",
               *arguments)

    def counted(self):
        """Numbers of packets since spoil(). data, control (both ours) and other: entered the switch.
        lost, control_lost and other_lost: dropped of these. duplicated, reordered: of data."""
        text = self.execute(self.switch, "nft", "list", "counters")
        return {name: int(packets) for name, packets in
                re.findall(r"counter (\w+) \{\s*packets (\d+)", text)}

    def overflowed(self):
        """Packets dropped by full queues of hosts and switch, since the start."""
        text = "".join(sh("tc", "-n", self.names[i], "-s", "qdisc", "show", "dev", "eth0") +
                       sh("tc", "-n", self.switch, "-s", "qdisc", "show", "dev", f"p{i}")
                       for i in range(len(self.names)))
        return sum(int(dropped) for dropped in re.findall(r"dropped (\d+)", text))

    def dropped(self):
        """A growing count of packets that were dropped because a queue was full: by devices of hosts
        and switch, and by the kernel's backlogs (of the whole machine). A host has space for 256
        packets. On a busy machine more may come before the host takes them."""
        devices = "".join(sh("ip", "-n", name, "-s", "-j", "link") for name in [*self.names, self.switch])
        with open("/proc/net/softnet_stat", encoding="ascii") as file:
            backlogs = sum(int(line.split()[1], 16) for line in file)
        return self.overflowed() + backlogs + sum(map(int, re.findall(r'"dropped": ?(\d+)', devices)))

    def narrow(self, i, mtu):
        """Larger packets to and from host i are dropped without any message."""
        sh("ip", "-n", self.switch, "link", "set", f"p{i}", "mtu", mtu)

    def cut(self, i):
        """Switches off host i's port of the switch."""
        sh("ip", "-n", self.switch, "link", "set", f"p{i}", "down")

    def mend(self, i):
        sh("ip", "-n", self.switch, "link", "set", f"p{i}", "up")

    def part(self, one, other, both=True):
        """Blocks all packets from hosts `one` to hosts `other` in the network under test, and with
        `both` also in the other direction. Earlier blocks stay."""
        ways = [(a, other) for a in one] + [(b, one) for b in other if both]
        chains = (f"""
  chain from{a} {{
    type filter hook ingress device "p{a}" priority -1; policy accept;
    ether daddr {{ {", ".join(map(self.hardware, to))} }} drop
  }}""" for a, to in ways)
        self.execute(self.switch, "nft", "-f", "-",
                     text=f"table netdev part {{{''.join(chains)}\n}}\n")

    def unite(self):
        """Ends all blocks of part()."""
        subprocess.run(["ip", "netns", "exec", self.switch, "nft", "delete", "table", "netdev",
                        "part"], check=False, capture_output=True)

    # ---- programs ----

    def shell(self, i):
        """The words to put before a command so that it runs on host i."""
        return ["ip", "netns", "exec", self.names[i], "unshare", "--uts", "sh", "-c",
                'hostname "$1"; shift; exec "$@"', "sh", self.names[i]]

    def execute(self, space, *command, text=None):
        return sh("ip", "netns", "exec", space, *command, text=text)

    def start(self, program, *arguments, ranks=0, each=1, mpi="eth1", flags=(), environment=None):
        """Starts `each` ranks of a program on each of the first `ranks` hosts (0: all), under mpirun,
        whose own messages go over device `mpi`. `each` may also be a list with the number of ranks of
        each host. `environment` has variables for the ranks. Returns the Popen, with pipes for its output."""
        first = self.names[0]
        hosts = self.names[:ranks] if ranks else self.names
        slots = each if isinstance(each, list) else [each] * len(hosts)
        command = ["mpirun", "--mca", "btl_tcp_if_include", mpi, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self",
                   "--bind-to", "none",
                   *(word for name in ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", *(environment or {}))
                     for word in ("-x", name)), *flags,
                   "--host", ",".join(f"{name}:{n}" for name, n in zip(hosts, slots)),
                   "-np", sum(slots), program,
                   *arguments]
        # The path of the folder for Open MPI's sockets must be short.
        command = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c",
                   f"hostname {first}; mkdir -p {self.folder}/{first}; "
                   f"export TMPDIR={self.folder}/{first}; exec \"$@\"", "sh", *map(str, command)]
        given = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PRTE_"))}
        agent = str(self.folder / "agent")
        started_by = {"OMPI_MCA_plm_rsh_agent": agent, "PRTE_MCA_plm_ssh_agent": agent,
                      f"OMPI_MCA_oob_tcp_disable_ipv{10 - self.ipv}_family": "1"}
        running = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE,
                                   env={**given, **ENVIRONMENT, **started_by, **(environment or {})})
        self.running.append(running)
        return running

    def mpirun(self, program, *arguments, timeout=300, **keywords):
        """As start(), but waits for the end. Returns a CompletedProcess. After `timeout` seconds all
        processes are ended, and returncode is None."""
        running = self.start(program, *arguments, **keywords)
        try:
            stdout, stderr = running.communicate(timeout=timeout)
            status = running.returncode
        except subprocess.TimeoutExpired:
            self.stop()
            stdout, stderr = running.communicate()
            status = None
        return subprocess.CompletedProcess(running.args, status, stdout, stderr)


def processes(namespace):
    done = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True,
                          text=True)
    return [int(pid) for pid in done.stdout.split()]


def end_processes(namespace):
    """Kills all processes of a namespace and waits until they are gone, so that none of them writes to
    the folder any longer."""
    end = time.monotonic() + 5
    while (pids := processes(namespace)) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def remove_namespace(name):
    end_processes(name)
    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def remove_leftovers():
    """Removes the namespaces that processes made which do not exist any more."""
    for line in sh("ip", "netns", "list").splitlines():
        made = re.match(PREFIX + r"(\d+)[hs]\d*\b", line)
        if made and not pathlib.Path("/proc", made.group(1)).exists():
            remove_namespace(made.group(0))

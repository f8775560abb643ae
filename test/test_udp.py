"""--link udp: real datagrams between processes, and between network namespaces that lose them."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

from program import MPI, PROGRAM, ROOT, TIMEOUT, events, read_log, run, succeed
from test_program import data, numbers, settings, train, weights  # pylint: disable=unused-import


def one_line(done, status):
    assert done.returncode == status, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


# ---- the same bits ----

@pytest.mark.parametrize("changes", [
    {"algorithm": "lossy", "loss_rate": 0.1},
    {"algorithm": "lossy", "loss_rate": 0.3, "estimator": "ht", "loss_model": "burst:5"},
    {"algorithm": "rps", "loss_rate": 0.1},
    {"algorithm": "naive", "loss_rate": 0},
])
def test_same_bits_as_mpi_and_one_process(data, tmp_path, changes):
    alone = train(data, tmp_path / "alone", **changes)
    mpi = train(data, tmp_path / "mpi", ranks=2, link="mpi", **changes)
    for ranks in (2, 4):
        out = tmp_path / f"udp{ranks}"
        udp = train(data, out, ranks=ranks, link="udp", **changes)
        assert udp[0]["link"] == "udp"
        assert numbers(udp) == numbers(alone) == numbers(mpi)
        assert weights(out) == weights(tmp_path / "alone")


def test_default_packet(data, tmp_path):
    log = train(data, tmp_path, ranks=2, link="udp", packet_bytes=None, steps=1)
    assert log[0]["packet_bytes"] == 4096
    log = train(data, tmp_path / "alone", link="udp", steps=1)
    assert log[0]["link"] == "memory"


def test_wrong_use(data, tmp_path):
    line = one_line(run(*settings(data, tmp_path, link="udp", algorithm="reliable")), 2)
    assert "--algorithm reliable: expected a link that loses nothing" in line
    done = run(*settings(data, tmp_path, link="udp", interface="nosuch0"), ranks=2)
    assert done.returncode == 1 and "--interface nosuch0: expected the name" in done.stderr
    done = run(*settings(data, tmp_path, link="udp", packet_bytes=65532), ranks=2)
    assert done.returncode == 1 and "expected at most 65" in done.stderr


# ---- ranks that stop ----

def start(data, out, ranks, *flags, **changes):
    """Starts a long training; returns it and the ranks' process ids, once two steps are done."""
    command = ["mpirun", *flags, "-np", str(ranks), "sh", "-c",
               '"$@"; echo "rank $OMPI_COMM_WORLD_RANK ended with $?" >&2', "sh", str(PROGRAM),
               *settings(data, out, link="udp", loss_rate=0.1, val=None, **changes)]
    running = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **MPI, "OMP_NUM_THREADS": "1"},
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    log = out / "log.jsonl"
    for _ in range(600):
        if log.exists() and len(log.read_text().splitlines()) > 2:
            break
        time.sleep(0.05)
        assert running.poll() is None, running.communicate()
    pids = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "exe") == str(PROGRAM) and \
                    str(out) in (folder / "cmdline").read_text():
                text = (folder / "environ").read_text(errors="replace")
                pids[int(re.search(r"OMPI_COMM_WORLD_RANK=(\d+)", text).group(1))] = int(folder.name)
        except OSError:
            pass  # it has ended
    assert sorted(pids) == list(range(ranks))
    return running, pids


def test_a_rank_that_stops_for_a_while(data, tmp_path):
    running, pids = start(data, tmp_path, 2, steps=150)
    for _ in range(3):
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(pids[1], signal.SIGCONT)
        time.sleep(0.05)
    _, stderr = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0, stderr
    steps = events(tmp_path / "log.jsonl", "step")
    assert len(steps) == 150
    late = sorted(event["step_ms"] for event in steps)
    assert late[75] < 200  # the rest is as fast as ever
    assert sum(event["gradient_loss_rate"] > 0.3 for event in steps) <= 6


def test_a_rank_that_dies(data, tmp_path):
    running, pids = start(data, tmp_path, 4, "--enable-recovery", steps=100000, peer_timeout=2)
    os.kill(pids[2], signal.SIGKILL)
    before = time.monotonic()
    _, stderr = running.communicate(timeout=TIMEOUT)
    assert time.monotonic() - before < 10
    print(stderr)
    ended = dict(re.findall(r"rank (\d) ended with (\d+)", stderr))
    assert ended.pop("2") == "137"
    assert ended and set(ended.values()) <= {"1", "143"}  # those that MPI_Abort ended: SIGTERM
    assert "1" in ended.values()
    assert re.search(r"lossynet: rank \d, step \d+, peer rank 2 was not heard for 2\.\d s", stderr)


# ---- namespaces ----

AGENT = """#!/bin/sh
# Open MPI starts its daemons with this: HOST is a namespace, and gets its own host name.
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; mkdir -p FOLDER/$host; \
export TMPDIR=FOLDER/$host; exec $*"
"""
LOSE = """
table netdev loss {{
  counter data {{ }}
  counter lost {{ }}
  counter control {{ }}
  chain in {{
    type filter hook ingress devices = {{ {devices} }} priority 0; policy accept;
    ip protocol udp @th,64,32 0x4c4e4554 @th,104,8 1 counter name data
    ip protocol udp @th,64,32 0x4c4e4554 @th,104,8 1 numgen random mod 1000 < {permille} counter name lost drop
    ip protocol udp @th,64,32 0x4c4e4554 @th,104,8 != 1 numgen random mod 1000 < {permille} counter name control drop
  }}
}}
"""


class Hosts:
    """Network namespaces behind a switch, which loses datagrams of ours at random."""

    def __init__(self, count, folder):
        self.folder, self.prefix = folder, f"lu{os.getpid() % 100000}"
        self.switch = f"{self.prefix}s"
        self.names = [f"{self.prefix}h{i}" for i in range(count)]

    def ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def up(self):
        self.ip("netns", "add", self.switch)
        self.ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
        self.ip("-n", self.switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.names):
            self.ip("netns", "add", name)
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{i}",
                    "netns", self.switch)
            # The switch must see single datagrams, not what segmentation will make of one.
            subprocess.run(["ip", "netns", "exec", name, "ethtool", "-K", "eth0", "tso", "off",
                            "gso", "off", "tx-udp-segmentation", "off"], check=True,
                           capture_output=True)
            self.ip("-n", name, "address", "add", f"10.77.0.{10 + i}/24", "dev", "eth0")
            self.ip("-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            self.ip("-n", name, "link", "set", "eth0", "up")
        agent = self.folder / "agent"
        agent.write_text(AGENT.replace("FOLDER", str(self.folder)))
        agent.chmod(0o755)

    def nft(self, *arguments, text=None):
        return subprocess.run(["ip", "netns", "exec", self.switch, "nft", *arguments], input=text,
                              check=True, capture_output=True, text=True).stdout

    def lose(self, permille):
        devices = ", ".join(f"p{i}" for i in range(len(self.names)))
        self.nft("-f", "-", text=LOSE.format(devices=devices, permille=permille))

    def counted(self):
        text = self.nft("list", "counters")
        return {name: int(packets) for name, packets in
                re.findall(r"counter (\w+) \{\s*packets (\d+)", text)}

    def mpirun(self, *arguments):
        first = self.names[0]
        command = ["mpirun", "--mca", "plm", "rsh", "--mca", "plm_rsh_agent", self.folder / "agent",
                   "--mca", "plm_rsh_no_tree_spawn", "1",
                   "--mca", "oob_tcp_if_include", "10.77.0.0/24",
                   "--mca", "btl_tcp_if_include", "10.77.0.0/24", "--mca", "pml", "ob1",
                   "--mca", "btl", "tcp,self", "--mca", "orte_keep_fqdn_hostnames", "1",
                   "--bind-to", "none", "-x", "OMP_NUM_THREADS", "-x", "GOMP_SPINCOUNT",
                   "--host", ",".join(f"{name}:1" for name in self.names),
                   "-np", len(self.names), PROGRAM, *arguments]
        command = ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c",
                   f"hostname {first}; mkdir -p {self.folder}/{first}; "
                   f"export TMPDIR={self.folder}/{first}; exec \"$@\"", "sh", *map(str, command)]
        environment = {key: value for key, value in {**os.environ, **MPI}.items()
                       if key not in ("OMPI_MCA_btl", "OMPI_MCA_orte_tmpdir_base")}
        environment.update(OMP_NUM_THREADS="1", GOMP_SPINCOUNT="1000")
        return subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True,
                              timeout=TIMEOUT, check=False)

    def down(self):
        for name in [*self.names, self.switch]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.fixture
def hosts(tmp_path):
    if os.geteuid():
        pytest.skip("not root: kernel-made loss between network namespaces was not tried")
    for tool in ("ip", "nft", "ethtool", "unshare"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool} here: kernel-made loss was not tried")
    made = Hosts(4, tmp_path)
    try:
        try:
            made.up()
            made.lose(0)
            made.nft("delete", "table", "netdev", "loss")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces or nftables are refused here: {error.cmd}: {error.stderr}")
        yield made
    finally:
        made.down()


def test_kernel_made_loss(hosts, data, tmp_path):
    """10% of all our datagrams, control included, are lost; the log says what the kernel did."""
    hosts.lose(100)
    done = hosts.mpirun(*settings(data, tmp_path / "out", link="udp", packet_bytes=None, steps=20,
                                  workers=4))
    assert done.returncode == 0, done.stdout + done.stderr
    kernel = hosts.counted()
    log = read_log(tmp_path / "out" / "log.jsonl")
    steps = [event for event in log if event["event"] == "step"]
    assert log[0]["packet_bytes"] == 1420 and log[0]["link"] == "udp"
    assert len(steps) == 20 and log[-1]["status"] == "complete"
    assert not any(event[name] for event in steps
                   for name in ("late", "duplicate", "rejected", "overruns", "stragglers"))
    logged = (log[-1]["gradient_loss_rate"] + log[-1]["parameter_loss_rate"]) / 2
    print(kernel, logged, sorted(event["step_ms"] for event in steps))
    assert kernel["data"] > 50000 and kernel["control"] > 0
    assert logged == pytest.approx(kernel["lost"] / kernel["data"], abs=0.003)
    assert logged == pytest.approx(0.1, abs=0.01)

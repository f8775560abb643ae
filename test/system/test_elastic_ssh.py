"""Tests scripts/elastic.sh on several hosts: OpenSSH servers and ranks run in network namespaces."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from program import PROGRAM, ROOT, TIMEOUT, environment_of
from test_program import data, settings  # pylint: disable=unused-import
from test_udp import namespaces  # pylint: disable=unused-import

sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.takes(40)

SSHD = shutil.which("sshd", path=os.environ["PATH"] + ":/usr/sbin")
FAR, HERE, PORT = (0, 1), 2, 2022  # ranks run on hosts 0 and 1; elastic.sh and its etcd on host 2

SERVER = """Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PidFile none
SetEnv OMP_NUM_THREADS=1
"""
CLIENT = """Host *
Port {port}
User root
IdentityFile {folder}/user_key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile {folder}/known_hosts
LogLevel ERROR
"""


@pytest.fixture(scope="module")
def hosts(namespaces):  # pylint: disable=unused-argument
    with testbed.Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def servers(hosts, tmp_path_factory):
    """Starts SSH servers on hosts 0 and 1. Returns the folder of an `ssh` that knows them."""
    missing = [name for name in ("ssh", "ssh-keygen", "etcd") if not shutil.which(name)]
    if missing or not SSHD:
        pytest.skip(f"not installed: {', '.join(missing or ['sshd'])} (scripts/dependencies.sh test); "
                    "ranks on other hosts were not tried")
    if subprocess.run(["getent", "shadow", "root"], capture_output=True, text=True,
                      check=False).stdout.startswith("root:!"):
        pytest.skip("root's account is locked, which OpenSSH refuses; ranks on other hosts were not tried")
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "server").write_text(SERVER.format(port=PORT, folder=folder), encoding="utf-8")
    (folder / "client").write_text(CLIENT.format(port=PORT, folder=folder), encoding="utf-8")
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n',
                                encoding="utf-8")
    (folder / "ssh").chmod(0o755)
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)  # sshd needs this folder; Debian makes it at its start
    started = [subprocess.Popen([*hosts.shell(i), SSHD, "-D", "-e", "-f", folder / "server"],
                                stderr=subprocess.DEVNULL) for i in FAR]
    end = time.monotonic() + TIMEOUT
    for i in FAR:
        while subprocess.run([*hosts.shell(HERE), folder / "ssh", hosts.address(i), "true"],
                             stderr=subprocess.DEVNULL, check=False).returncode:
            assert time.monotonic() < end and started[i].poll() is None
            time.sleep(0.1)
    yield folder
    for server in started:
        server.kill()
        server.wait()


class Run:
    """elastic.sh on one host, with four ranks on two others. far: its options for reaching them."""

    def __init__(self, hosts, data, folder, far, **environment):
        self.hosts, self.out, self.said, self.view = hosts, folder / "out", folder / "said", 0
        options = settings(data, self.out, workers=None, seq=16, val=None, steps=10 ** 6, peer_timeout=2,
                           interface="eth0", pace_gbps=0.1)
        with open(self.said, "w", encoding="utf-8") as said:
            self.process = subprocess.Popen(
                [*hosts.shell(HERE), ROOT / "scripts/elastic.sh", "-n", "4", "--max-restarts", "9", *far,
                 "--", *options], cwd=ROOT, stdout=said, stderr=said,
                env=environment_of({"TMPDIR": str(folder), "TRAIN_LLAMA2": str(PROGRAM),
                                    "OMP_NUM_THREADS": "1", **environment}))

    def log(self, kind):
        path = self.out / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == kind]

    def wait(self, what):
        end = time.monotonic() + TIMEOUT
        while not what():
            assert time.monotonic() < end, self.said.read_text(encoding="utf-8")
            time.sleep(0.05)

    def wait_steps(self, ranks):
        """Waits until this many ranks are in a view that is newer than at the last call, and have made some
        steps in it."""
        def made():
            views = self.log("view")
            return views and views[-1]["view"] > self.view and views[-1]["ranks"] == ranks and \
                len([s for s in self.log("step") if s["step"] > views[-1]["step"]]) > 3
        self.wait(made)
        self.view = self.log("view")[-1]["view"]

    def started(self, i, name):
        """The process ids of a program on a host."""
        found = []
        for pid in testbed.processes(self.hosts.names[i]):
            try:
                if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == name:
                    found.append(pid)
            except OSError:
                pass  # the process has ended
        return found

    def trainers(self, i):
        return self.started(i, PROGRAM.name)

    def end(self):
        """Ends the processes that a failed test has left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        for name in ("ssh", "srun", "etcd"):
            for pid in self.started(HERE, name):
                os.kill(pid, signal.SIGKILL)
        self.wait(lambda: not self.trainers(0) + self.trainers(1))


@pytest.fixture
def run(hosts, servers, data, tmp_path):  # pylint: disable=redefined-outer-name
    made = Run(hosts, data, tmp_path, ["--hosts", ",".join(hosts.address(i) for i in FAR)],
               PATH=f"{servers}:{os.environ['PATH']}")
    yield made
    made.end()


def a_host_loses_its_ranks(run):
    """Kills all ranks of a host. They are started again and join, and the run ends on all hosts with a model.
    Returns the script's output."""
    run.wait_steps(4)
    assert [len(run.trainers(i)) for i in FAR] == [2, 2]
    dead = run.trainers(1)
    for pid in dead:
        os.kill(pid, signal.SIGKILL)
    run.wait(lambda: len(set(run.trainers(1)) - set(dead)) == 2)
    run.wait_steps(4)
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(TIMEOUT) == 0
    assert any(v["left"].count(f"{run.hosts.names[1]}:") for v in run.log("view"))
    assert run.log("end")[-1]["status"] == "stopped"
    (checkpoint,) = run.out.glob("checkpoint-*")
    assert (checkpoint / "model.safetensors").exists()
    assert not [pid for i in FAR for pid in run.trainers(i)]
    assert not [pid for name in ("ssh", "srun", "etcd") for pid in run.started(HERE, name)]
    return run.said.read_text(encoding="utf-8")


def test_all_ranks_of_a_host_die(run):
    said = a_host_loses_its_ranks(run)
    named = rf"process \d \(rank \d\) was killed by signal 9 on {run.hosts.address(1)}: start "
    assert len(re.findall(named, said)) >= 2, said


def test_a_connection_ends(run):
    """If a connection ends, its rank is killed and another one joins, and the run goes on. If elastic.sh
    ends, all ranks end."""
    run.wait_steps(4)
    before = {pid for i in FAR for pid in run.trainers(i)}
    os.kill(run.started(HERE, "ssh")[0], signal.SIGKILL)

    def replaced():
        now = {pid for i in FAR for pid in run.trainers(i)}
        return len(now) == 4 and now != before
    run.wait(replaced)
    run.wait_steps(4)
    run.process.kill()
    run.wait(lambda: not [pid for i in FAR for pid in run.trainers(i)])

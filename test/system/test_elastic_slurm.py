"""Tests scripts/elastic.sh --srun with a Slurm that the test starts. Its nodes are network namespaces."""
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

from test_elastic_ssh import FAR, HERE, Run, a_host_loses_its_ranks, hosts  # pylint: disable=unused-import
from test_program import data  # pylint: disable=unused-import
from test_udp import namespaces  # pylint: disable=unused-import

pytestmark = pytest.mark.takes(40)

TOOLS = ("slurmctld", "slurmd", "srun", "salloc", "scontrol", "etcd")
PATIENCE = 60  # seconds in which Slurm must start
# Slurm runs without MUNGE and control groups, which need a whole machine.
CONFIGURATION = """ClusterName=test
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
{nodes}
PartitionName=all Nodes={names} Default=YES State=UP
"""


def configure(hosts, folder):  # pylint: disable=redefined-outer-name
    names = [hosts.names[i] for i in FAR]
    for name in ("state", *names):
        (folder / name).mkdir()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(
        controller=hosts.names[HERE], address=hosts.address(HERE), folder=folder, names=",".join(names),
        nodes="\n".join(f"NodeName={hosts.names[i]} NodeAddr={hosts.address(i)}" for i in FAR)),
        encoding="utf-8")


def why_not(folder):
    """The last line of each log, which says why Slurm does not start."""
    logs = sorted(folder.glob("*.log"))
    return "; ".join(log.read_text(encoding="utf-8").strip().rpartition("\n")[2] for log in logs)


@pytest.fixture(scope="module")
def allocation(hosts, tmp_path_factory):  # pylint: disable=redefined-outer-name
    """The environment variables of a program in an allocation of hosts 0 and 1."""
    search = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in TOOLS if not shutil.which(name, path=search)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (scripts/dependencies.sh test); ranks under Slurm "
                    "were not tried")
    folder = tmp_path_factory.mktemp("slurm")
    configure(hosts, folder)
    given = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": search}
    environment = {**os.environ, **given}
    started = [subprocess.Popen([*hosts.shell(i), program, "-D"], env=environment, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)
               for i, program in ((HERE, "slurmctld"), *((i, "slurmd") for i in FAR))]
    names, end, granted = ",".join(hosts.names[i] for i in FAR), time.monotonic() + PATIENCE, None
    while not granted and time.monotonic() < end and all(p.poll() is None for p in started):
        said = subprocess.run([*hosts.shell(HERE), "salloc", "--no-kill", "--no-shell", "--immediate=5", "-N",
                               str(len(FAR)), "-w", names], env=environment, capture_output=True, text=True,
                              check=False).stderr
        granted = re.search(r"Granted job allocation (\d+)", said)
    if granted:
        yield {**given, "SLURM_JOB_ID": granted.group(1), "SLURM_JOB_NODELIST": names}
    for process in reversed(started):
        process.terminate()
        process.wait()
    if not granted:
        pytest.skip(f"Slurm does not begin here ({why_not(folder)}); ranks under Slurm were not tried")


@pytest.fixture
def run(hosts, allocation, data, tmp_path):  # pylint: disable=redefined-outer-name
    made = Run(hosts, data, tmp_path, ["--srun"], **allocation)
    yield made
    made.end()


def test_all_ranks_of_a_node_die(run):  # pylint: disable=redefined-outer-name
    said = a_host_loses_its_ranks(run)
    assert said.count(f"was killed by signal 9 on {run.hosts.names[1]}: start ") >= 2, said


def test_ranks_end_with_the_script(run):  # pylint: disable=redefined-outer-name
    run.wait_steps(4)
    run.process.send_signal(signal.SIGKILL)
    run.wait(lambda: not [pid for i in FAR for pid in run.trainers(i)])

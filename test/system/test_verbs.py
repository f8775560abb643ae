"""Tests --link verbs: RDMA datagrams between devices of Soft-RoCE, in a virtual machine
(dev/testbed/rdma_vm).

The machine is started once and then does all its work (JOB). The tests check the files that it wrote. It
has four devices, one for each rank of the largest run. Its processor is emulated, so models and sequences are tiny.
"""
import json
import os
import re
import subprocess

import pytest

from program import (BUILD, MPI, PROGRAM, ROOT, SANITIZED, markov_tokens, read_log, run, succeed,
                     write_tokens)
from test_program import numbers, weights

pytestmark = pytest.mark.takes(120)

VM = ROOT / "dev" / "testbed" / "rdma_vm"
# Seconds that the machine and one of its programs may take. These limits end what hangs. On an idle host the machine
# takes 100 seconds, beside a second `make test` 535.
LIMIT, PATIENCE = 1800, 600
LOSSY_STEPS = 16  # of two workers: many enough packets for a rate
COMMON = "--model=260K --workers=4 --batch=1 --seq=8 --steps=4 --lr=3e-3 --seed=5 --wire-dtype=float32"
PLAIN = BUILD / "plain" / "train_llama2"  # oneDNN's would make its code anew in each process: long, if emulated

JOB = """
. DEVICES
devices_make 4 9000

# The link alone, on a network that loses nothing.
CMOCKA_MESSAGE_OUTPUT=TAP timeout PATIENCE LINK_TEST >link.tap 2>&1
echo "exit status $?" >>link.tap

# Trainings. All programs' first arguments, one mpirun.
COMMON="COMMON_OPTIONS --train=train.bin"
# Two ranks, since most of a run's time is the start of its ranks.
train() { # NAME ARGUMENT...
    name=$1
    shift
    timeout PATIENCE mpirun -np 2 PROGRAM $COMMON --out=$name "$@" >$name.txt 2>&1
    echo "exit status $?" >>$name.txt
}
counters() {
    cat /sys/class/infiniband/rxe?/ports/1/hw_counters/$1 | paste -sd ' '
}
# Each rank with an --interface of its own.
one="PROGRAM $COMMON --out=auto --link=auto --loss-rate=0.1"
echo "set rxe0 rxe1:1 rxe2 rxe3:1:1; shift \\$OMPI_COMM_WORLD_RANK; exec $one --interface=\\$1" >each.sh
timeout PATIENCE mpirun -np 4 sh each.sh >auto.txt 2>&1
echo "exit status $?" >>auto.txt
devices_lose 4 10
counters sent_pkts >sent.txt
train lossy --plain --link=verbs --workers=2 --steps=LOSSY_STEPS --interface=rxe0,rxe1
counters sent_pkts >>sent.txt
tc -s -j qdisc show >qdisc.json
train missing --link=verbs --interface=rxe0,rxe9
"""


@pytest.fixture(scope="session")
def guest(tmp_path_factory):
    """Runs the guest. Returns the folder that it worked in."""
    machine = BUILD / "rdma_vm"
    built = subprocess.run([VM / "build.sh", machine], text=True, capture_output=True, check=False)
    if built.returncode == 77:
        pytest.skip(f"RDMA was not tried: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stdout + built.stderr
    if b"built without RDMA" in PROGRAM.read_bytes():
        pytest.skip("RDMA was not tried: built without libibverbs")
    folder = tmp_path_factory.mktemp("guest")
    write_tokens(folder / "train.bin", markov_tokens(20_000, 512, 1), 512)
    job = JOB
    for name, value in {"DEVICES": VM / "devices.sh", "PROGRAM": PLAIN,
                        "LINK_TEST": SANITIZED.parent / "test" / "lossynet" / "link" / "test_link_verbs",
                        "COMMON_OPTIONS": COMMON, "LOSSY_STEPS": LOSSY_STEPS, "PATIENCE": PATIENCE}.items():
        job = job.replace(name, str(value))
    hwloc = {name: value for name, value in os.environ.items() if name.startswith("HWLOC_")}  # conftest.py
    exports = {**MPI, **hwloc, "OMPI_MCA_btl": "self,vader", "OMPI_MCA_pml": "ob1", "OMP_NUM_THREADS": "1"}
    job = "".join(f"export {name}={value}\n" for name, value in exports.items()) + job
    (folder / "job.sh").write_text(job)
    done = subprocess.run([VM / "run.sh", machine, folder, folder / "job.sh"], text=True,
                          capture_output=True, check=False, env={"PATH": "/usr/bin:/bin:/usr/sbin",
                                                                 "LIMIT": str(LIMIT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def trained(guest, name):
    text = (guest / f"{name}.txt").read_text(errors="replace")
    assert text.endswith("exit status 0\n"), text[-3000:]
    log = read_log(guest / name / "log.jsonl")
    assert log[-1]["event"] == "end" and log[-1]["status"] == "complete"
    return log


def steps(log):
    return [event for event in log if event["event"] == "step"]


CASES = re.findall(r"(?:cmocka_unit_test|IN_THE_GUEST)\((\w+)\)",
                   (ROOT / "test/lossynet/link/test_link_verbs.c").read_text())


@pytest.mark.parametrize("case", CASES + ["exit_status"])
def test_link(guest, case):
    """Runs test_link_verbs.c with sanitizers. Most of its cases run only here, since they need devices."""
    text = (guest / "link.tap").read_text(errors="replace")
    if case == "exit_status":
        assert text.endswith("exit status 0\n"), text[-3000:]
    else:
        assert re.search(rf"^ok \d+ - {case}$", text, re.MULTILINE), text[-3000:]


def assert_same(want, log, folders):
    """Compares a run with injected loss only. If the machine stalls for seconds, ranks may stop waiting for
    packets. The log says in which step, and only earlier steps are compared."""
    assert log[0]["link"] == "verbs" and log[0]["packet_bytes"] == 4064
    stalled = [e["step"] for e in steps(log) if e["late"] or e["stragglers"] or e["overruns"]]
    if stalled:
        kept = numbers(steps(log)[:max(stalled[0] - 1, 0)])
        assert kept == numbers(steps(want)[:len(kept)])
        pytest.skip(f"the same bits until step {stalled[0]}, when a rank stalled")
    assert numbers(log) == numbers(want)
    assert weights(folders[0]) == weights(folders[1])


def test_same_bits_as_one_process(guest, tmp_path):
    """All workers in one process, outside the guest and with its instruction set, give the same bits."""
    log = trained(guest, "auto")
    succeed(*COMMON.split(), f"--train={guest}/train.bin", f"--out={tmp_path}", "--packet-bytes=4064",
            "--loss-rate=0.1", program=PLAIN, environment={"TRAIN_LLAMA2_ISA": "x86_64_v2"})
    assert log[0]["sends"] == "in place"
    assert_same(read_log(tmp_path / "log.jsonl"), log, [tmp_path, guest / "auto"])


def test_kernel_made_loss(guest):
    """The kernel drops 10% of all packets that leave a device. The log has the same loss rate."""
    log = trained(guest, "lossy")
    assert len(steps(log)) == LOSSY_STEPS
    devices = [d for d in json.loads((guest / "qdisc.json").read_text())
               if re.fullmatch(r"v\d", d["dev"])]
    assert len(devices) == 4
    passed = sum(d["packets"] for d in devices)
    dropped = sum(d["drops"] for d in devices)
    before, after = ([int(n) for n in line.split()] for line in
                     (guest / "sent.txt").read_text().splitlines())
    sent = sum(after) - sum(before)
    logged = (log[-1]["gradient_loss_rate"] + log[-1]["parameter_loss_rate"]) / 2
    print(sent, passed, dropped, logged)
    assert passed + dropped == pytest.approx(sent, rel=0.01)  # the difference is ARP
    assert dropped / (passed + dropped) == pytest.approx(0.1, abs=0.015)
    # Control packets are lost as well, but they are repeated, and their losses are not logged.
    assert logged == pytest.approx(dropped / (passed + dropped), abs=0.013)
    assert all(e["rejected"] == e["duplicate"] == e["overruns"] == 0 for e in steps(log))


def test_no_such_device(guest):
    text = (guest / "missing.txt").read_text(errors="replace")
    assert not text.endswith("exit status 0\n")
    assert re.search(r"interface rxe0,rxe9: expected DEVICE\[:PORT\[:GID_INDEX\]\] .*; RDMA ports "
                     r"here: rxe0:1 ACTIVE Ethernet MTU 4096 GID 0=fe80::\S+ RoCE v2 GID 1=10.9.8.1 "
                     r"RoCE v2; rxe1:1 ACTIVE", text), text
    assert re.search(r"rank 1 has no RDMA port: see its message", text), text


def test_without_a_device(tmp_path):
    """Tests the message without a device. This needs no virtual machine."""
    write_tokens(tmp_path / "train.bin", markov_tokens(2_000, 512, 1), 512)
    done = run("--model=260K", f"--train={tmp_path}/train.bin", "--steps=1", "--seq=8",
               "--link=verbs", "--interface=nowhere0", f"--out={tmp_path}/out", ranks=2)
    assert done.returncode == 1
    assert re.search(r"nowhere0: expected .*RDMA ports here|built without RDMA", done.stderr)



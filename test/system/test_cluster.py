"""Tests on this machine what a run on many nodes needs: --preflight, and the scripts that start it."""
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from priority import ahead
from program import (BUILD, MPI, PROGRAM, ROOT, TIMEOUT, events, read_log, run, succeed,
                     tensors, write_tokens)

sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.takes(130)

# ---- --preflight on this machine ----

def findings(done):
    """The problems that the pre-flight named, without lines that mpirun adds."""
    return [line.split(": ", 1)[1] for line in done.stderr.splitlines()
            if line.startswith("train_llama2: ")]


def preflight(*arguments, **keywords):
    return run("--preflight", "--model", "260K", *arguments, **keywords)


@pytest.mark.parametrize("link", ["udp", "mpi"])
def test_all_is_well_on_one_host(tmp_path, link):
    write_tokens(tmp_path / "train.bin", [1] * 1000, 512)
    out = tmp_path / "out"
    done = preflight("--link", link, "--out", out, "--train", tmp_path / "*.bin", ranks=4)
    assert done.returncode == 0 and not findings(done), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pre-flight of 4 ranks on 1 node, 3 pairings of 0.50 s over " + link)
    assert lines[-1] == "all is well: 1 node, 4 ranks"
    assert not list(out.iterdir())  # it left nothing behind


def test_one_rank_alone():
    done = preflight()
    assert done.returncode == 0 and "all is well: 1 node, 1 rank" in done.stdout, done.stderr


def test_what_is_wrong_with_this_host(tmp_path):
    # No machine has memory for 70B parameters in float32, twice, on every rank.
    done = run("--preflight", "--model", "70B", "--seq", 128, "--batch", 1, "--device", "cpu",
               ranks=2)
    assert done.returncode == 1
    (line,) = findings(done)
    assert "its 2 ranks need " in line and "GB of memory, and " in line, line
    done = preflight("--train", tmp_path / "none*.bin", ranks=2)
    assert done.returncode == 1
    (line,) = findings(done)
    assert f"no file matches '{tmp_path}/none*.bin'" in line, line
    (tmp_path / "file").write_text("")
    done = preflight("--out", tmp_path / "file", ranks=2)
    assert done.returncode == 1 and "expected a directory, found a file" in done.stderr


def test_one_rank_looks_at_all_that_the_run_will_use(tmp_path):
    """A run of one process has no network, but that of several has, for which one of them looks."""
    data, short = tmp_path / "train.bin", tmp_path / "short"
    write_tokens(data, [1] * 1000, 512)
    short.write_text("fifteen letters")
    taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    taken.bind(("", 0))  # of two ports one is not enough
    port = taken.getsockname()[1] // 2 * 2
    for arguments, what in ((("--interface", "none0"), "interface none0: expected the name of a network interface"),
                            (("--port-range", f"{port}-{port + 1}"), f"no port from {port} to {port + 1} is free"),
                            (("--encrypt", "--key-file", short), f"cannot use '{short}': expected a file of 16"),
                            (("--train", short), f"'{short}' is truncated"),
                            (("--train", data, "--val", __file__), f"'{__file__}' begins with the number"),
                            (("--train", data, "--vocab-size", 256), "a vocabulary of 512, model 260K has 256"),
                            (("--train", data, "--sample-every", 1, "--tokenizer", data), f"'{data}' is no Sentence")):
        done = preflight("--link", "udp", *arguments)
        assert done.returncode == 1 and "all is well" not in done.stdout, (arguments, done.stdout)
        (line,) = done.stderr.splitlines()
        assert what in line, line
    done = preflight("--train", data)
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_modes_at_once():
    done = preflight("--dry-run")
    assert done.returncode == 2 and "expected at most one of them" in done.stderr


# ---- --preflight between hosts ----

@pytest.fixture(scope="module")
def measured_hosts():
    """Hosts whose rates are measured."""
    reason = testbed.unavailable()
    if reason:
        pytest.skip(f"{reason}; a real network between hosts was not tried")
    with testbed.Hosts(4, rate="100mbit") as made:
        yield made


MEASURED = pytest.mark.xdist_group("measured hosts")  # at the same time as the file's other tests


def preflight_of(hosts, *arguments):
    with ahead():
        return hosts.mpirun(PROGRAM, "--preflight", "--model=260K", "--link=udp", "--interface=eth0",
                            *arguments)


def slow_port(hosts, i, rate):
    """Limits the rate at which the switch sends to host i."""
    testbed.sh("tc", "-n", hosts.switch, "qdisc", "replace", "dev", f"p{i}", "root", "tbf", "rate",
               rate, "burst", testbed.BURST, "limit", "16mb")


def only(hosts, host, *texts):
    """The one finding of a pre-flight, which names the host."""
    for _ in range(3):  # programs of other sessions may slow a pair down
        done = preflight_of(hosts)
        if len(findings(done)) == 1:
            break
    # On a busy machine the launcher of Open MPI 5.0.7 may crash when a program has ended with code 1.
    assert done.returncode in (1, -signal.SIGSEGV), done.stdout + done.stderr
    (line,) = findings(done)
    assert line.startswith(f"node {host}: ") and line.endswith(": look at its port"), line
    for text in texts:
        assert text in line, line
    return line


@MEASURED
@pytest.mark.measures
def test_hosts_that_are_well(measured_hosts, tmp_path):
    for _ in range(3):  # programs of other sessions may slow a pair down
        done = preflight_of(measured_hosts, "--out", tmp_path)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is well: 4 nodes, 4 ranks" in done.stdout
    assert all(name in done.stdout for name in measured_hosts.names)


@MEASURED
@pytest.mark.measures
def test_a_slow_port_is_named(measured_hosts):
    slow_port(measured_hosts, 2, "25mbit")  # of 100; on a busy machine the others reach half of theirs
    try:
        line = only(measured_hosts, measured_hosts.names[2], "% of the median rate from every peer")
    finally:
        measured_hosts.limit(2)
    assert 10 <= int(line.split("received ")[1].split("%")[0]) < 80, line


@MEASURED
@pytest.mark.measures
def test_a_lossy_port_is_named(measured_hosts):
    measured_hosts.execute(measured_hosts.switch, "nft", "-f", "-", text="""
table netdev worn {
  chain in {
    type filter hook ingress device "p3" priority 0; policy accept;
    meta l4proto udp numgen random mod 100 < 6 drop
  }
}
""")
    try:
        only(measured_hosts, measured_hosts.names[3], "of what it sent to every peer")
    finally:
        measured_hosts.execute(measured_hosts.switch, "nft", "delete", "table", "netdev", "worn")


@MEASURED
@pytest.mark.measures
def test_a_pulled_plug_is_named(measured_hosts):
    measured_hosts.cut(1)
    try:
        only(measured_hosts, measured_hosts.names[1], "received nothing from any peer")
    finally:
        measured_hosts.mend(1)


@MEASURED
def test_no_shared_directory(measured_hosts, tmp_path):
    """Host 3 has its own directory at the path of --out, and the pre-flight names it."""
    (tmp_path / "out").mkdir()
    (tmp_path / "own").mkdir()
    script = tmp_path / "start.sh"
    script.write_text(f"""#!/bin/sh
[ "$(hostname)" != {measured_hosts.names[3]} ] || mount --bind {tmp_path}/own {tmp_path}/out
exec "$@"
""")
    script.chmod(0o755)
    done = measured_hosts.mpirun("unshare", "--mount", script, PROGRAM, "--preflight",
                                 "--model=260K", "--link=udp", "--interface=eth0",
                                 "--out", tmp_path / "out")
    (line,) = [line for line in findings(done) if "--out" in line]  # a busy machine may slow a path down
    assert line.startswith(f"node {measured_hosts.names[3]}, rank 3: does not see in --out"), line


# ---- scripts/pretrain_7b/pretrain_7b.sh ----

SCRIPT = ROOT / "scripts" / "pretrain_7b" / "pretrain_7b.sh"
BATCH = ROOT / "scripts" / "pretrain_7b" / "pretrain_7b.sbatch"


def environment(**changes):
    given = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return {**given, **MPI, "TRAIN_LLAMA2": str(PROGRAM), "TOKENIZE": str(BUILD / "tokenize"),
            **changes}


def script(*arguments, timeout=TIMEOUT, **changes):
    return subprocess.run([str(word) for word in (SCRIPT, *arguments)], cwd=ROOT, text=True,
                          env=environment(**changes), capture_output=True, timeout=timeout,
                          check=False)


def test_help_says_what_it_takes():
    done = script("--help")
    assert done.returncode == 0 and not done.stderr
    assert all(word in done.stdout for word in ("--rehearse", "--hosts", "sbatch", "--loss P"))
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_laptop_is_told_what_is_missing(tmp_path):
    done = script("--data", tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("pretrain_7b.sh: missing: nodes (--hosts FILE, or sbatch "), line
    assert f"token files in {tmp_path} (--prepare" in line and line.endswith("--rehearse"), line


@pytest.mark.parametrize("arguments, text", [
    (["--los", "0.1"], "--los: unknown option"),
    (["--loss"], "--loss: expected a value"),
    (["--steps", ""], "--steps: expected a value"),
    (["--loss", "ten"], "--loss: expected a number from 0 to 1, got 'ten'"),
    (["--ranks", "0"], "--ranks: expected a whole number, got '0'"),
    (["--corpus", "books"], "--corpus: expected c4 or fineweb, got 'books'"),
    (["--hosts", "/none"], "--hosts: cannot read '/none'"),
    (["--prepare"], "no tokenizer at '/tokenizer.model'"),
])
def test_wrong_use(arguments, text):
    done = script(*arguments)
    assert done.returncode == 2 and text in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_commands(tmp_path):
    """--print shows the commands: for mpirun, for Slurm with and without PMIx."""
    (tmp_path / "hosts").write_text("node1 slots=8\n")
    arguments = ("--print", "--from", "Llama-2-7b-hf", "--loss", "0.2", "--interface", "mlx5_0")
    done = script("--hosts", tmp_path / "hosts", *arguments, "--", "--seed", "7")
    look, train, perplexity = done.stdout.splitlines()
    assert look.startswith(f"mpirun -np 64 --bind-to none --hostfile {tmp_path}/hosts -x PATH ")
    assert " --preflight --model Llama-2-7b-hf --device cuda --dtype bf16 " in look
    assert train.replace(" --resume auto ", " --preflight ") == look
    assert train.rstrip().endswith("--loss-rate 0.2 --link auto --group 8 --out out/7b --interface "
                                   "mlx5_0 "
                                   "--seed 7")
    assert "perplexity.sh out/7b/checkpoint-... -" in perplexity
    slurm = Slurm(tmp_path)
    done = script(*arguments, **slurm.environment, SLURM_JOB_ID="7", SLURM_NTASKS="32")
    assert done.stdout.startswith("srun --mpi=pmix --kill-on-bad-exit=1 ")
    done = script(*arguments, **slurm.environment, SLURM_JOB_ID="7", SLURM_NTASKS="32", PMIX="")
    assert done.stdout.startswith("mpirun -np 32 --bind-to none ")


def test_the_arithmetic_of_its_comment():
    """Every number marked = in the script's comment equals --dry-run's, or follows from the others."""
    text = SCRIPT.read_text(encoding="utf-8")
    name, said = "", {}
    for found in re.finditer(r"^#   ([^=\n]*)= ([\d.]+) ?(GB|ms|s|h)? *(.*)$", text, re.MULTILINE):
        name = found[1].strip() or name
        gbps = re.search(r"at (\d+) Gbit/s", found[4])
        said[name, int(gbps[1]) if gbps else 0] = float(found[2])
    done = script("--print", "--no-preflight", SLURM_JOB_ID="1", SLURM_NTASKS="64")
    command = done.stdout.splitlines()[0].split()
    options = command[command.index("auto") + 1:]
    for unwanted in ("--train", "--val"):
        del options[options.index(unwanted):options.index(unwanted) + 2]
    options[options.index("--device") + 1] = "auto"
    answers = {gbps: succeed("--dry-run", "--workers", 64, "--link-gbps", gbps, *options).stdout
               for gbps in (400, 100)}
    answer = answers[400]

    def number(pattern, text=answer):
        return float(re.search(pattern, text)[1])

    gigabytes = r" +([\d.]+) GB"
    tokens, steps = number(r"(\d+) tokens per step"), float(options[options.index("--steps") + 1])
    parameters = number(r"7B: (\d+) parameters")
    assert said["tokens per step", 0] == tokens
    assert said["memory of a GPU", 0] == number("  total" + gigabytes)
    assert said["memory of its host", 0] == pytest.approx(
        number("host's total" + gigabytes), abs=0.06)
    assert said["a checkpoint", 0] == number("a checkpoint" + gigabytes)
    assert said["sent per GPU and step", 0] == pytest.approx(
        number("gradient phase" + gigabytes) + number("parameter phase" + gigabytes), abs=0.0015)
    flop = 6 * parameters + 6 * 32 * 4096 * 4096  # causal attention, forward and backward
    assert f"{flop / 1e9:.1f} GFLOP" in text
    for gbps, answer in answers.items():
        link = number(r"([\d.]+) ms per step on the link", answer)
        assert said["on the link", gbps] == round(link)
        assert said["in its threads", 0] == round(number(r"([\d.]+) ms per step for its packets", answer))
        seconds = number(r"\n  step +([\d.]+) ", answer) / 1e3  # on an H100
        assert said["a step", gbps] == pytest.approx(seconds, abs=0.006)
        hours = steps * seconds / 3600
        assert said[f"{steps:.0f} steps", gbps] == pytest.approx(hours, abs=0.06)
    assert len(said) == 12


# ---- rehearsals: the whole path, with a tiny model ----

SRUN = """#!/bin/sh
# The job's tasks, all on this machine. Slurm's variables would make mpirun ask Slurm.
if [ "$1" = --mpi=list ]; then echo "MPI plugin types are... none ${PMIX-pmix}"; exit; fi
while case $1 in --*) true ;; *) false ;; esac; do shift; done
ranks=$SLURM_NTASKS
for name in $(env | sed -n 's/^\\(SLURM_[A-Z_]*\\)=.*/\\1/p'); do unset "$name"; done
exec mpirun --oversubscribe -np "$ranks" "$@"
"""
SCONTROL = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/scontrol.log"
"""


class Slurm:
    """Imitates what the batch file needs of Slurm: sbatch's options and variables, srun, scontrol."""

    KNOWN = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "mem", "time",
             "signal", "requeue", "open-mode", "output"}

    def __init__(self, folder, **changes):
        self.bin = folder / "slurm"
        self.bin.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.environment = {"PATH": f"{self.bin}:{os.environ['PATH']}", **changes}
        self.starts = 0

    def requeued(self):
        log = self.bin / "scontrol.log"
        return log.read_text().splitlines() if log.exists() else []

    def sbatch(self, overriding, *arguments, meanwhile=None):
        """Runs the job until it is not requeued any more. `meanwhile(shell)` is called after its first
        start. Returns the exit status and the output of the last start."""
        options = {}
        for line in BATCH.read_text(encoding="utf-8").splitlines():
            if line.startswith("#SBATCH "):
                name, _, value = line.split()[1].removeprefix("--").partition("=")
                options[name] = value
        assert set(options) == self.KNOWN
        options |= overriding
        assert options["signal"].startswith("B:USR1@") and "requeue" in options
        spool = shutil.copy(BATCH, self.bin / "slurm_script")  # as Slurm does
        tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
        while True:
            variables = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": str(tasks),
                         "SLURM_NNODES": str(options["nodes"]), "SLURM_SUBMIT_DIR": str(ROOT),
                         "SLURM_RESTART_COUNT": str(self.starts)}
            before = self.requeued()
            with open(self.bin / "job.log", "a+", encoding="utf-8") as log:
                shell = subprocess.Popen(["bash", spool, *map(str, arguments)], cwd="/", text=True,
                                         stdout=log, stderr=subprocess.STDOUT,
                                         env=environment(**self.environment, **variables))
                self.starts += 1
                try:
                    if meanwhile and self.starts == 1:
                        meanwhile(shell)
                    status = shell.wait(timeout=LONGEST)
                finally:
                    shell.kill()
            if self.requeued() == before:
                return status, (self.bin / "job.log").read_text()
            assert self.requeued()[-1] == "requeue 4711" and self.starts < 5


SHORT = ("--rehearse", "--ranks", 4, "--steps", 12)
LONGEST = 600  # seconds, also on a busy machine


def rehearse(folder, out, *arguments):
    return script(*SHORT, "--data", folder / "data", "--out", out, *arguments, timeout=LONGEST)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """A rehearsal without interruptions, and its data."""
    folder = tmp_path_factory.mktemp("rehearsal")
    done = rehearse(folder, folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done


def numbers(out):
    """The log's steps, without times and counts of what the network did to datagrams; and the last
    model."""
    varies = {"tokens_per_second", "step_ms", "communication_ms", "late", "late_packets", "duplicate",
              "rejected", "overruns", "stragglers", "phases_cut"}
    steps = [{key: value for key, value in event.items() if key not in varies}
             for event in events(out / "log.jsonl", "step")]
    assert len(steps) == 12
    return steps, tensors(out / "checkpoint-00000012" / "model.safetensors")


def test_rehearsal(rehearsal):
    folder, done = rehearsal
    out = folder / "out"
    parts = [line for line in done.stdout.splitlines() if line.startswith("== ")]
    assert parts == ["== Looking at the nodes", "== Training", "== Perplexity"]
    assert "all is well: 1 node, 4 ranks" in done.stdout
    log = read_log(out / "log.jsonl")
    assert log[0]["ranks"] == 4 and log[0]["link"] == "udp" and log[-1]["status"] == "complete"
    assert 0.05 < log[-1]["parameter_loss_rate"] < 0.15
    assert 0 < log[-1]["gradient_loss_rate"] < 0.05  # lost gradients are sent again
    assert re.search(r"^ +64 +32 +\d+ +[\d.]+ +[\d.]+( +[\d.]+)?$", (out / "perplexity.txt").read_text(),
                     re.MULTILINE)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        "checkpoint-00000008", "checkpoint-00000012"]


def test_a_finished_run_is_only_evaluated_again(rehearsal):
    folder, first = rehearsal
    done = rehearse(folder, folder / "out", "--no-preflight")
    assert done.returncode == 0, done.stderr
    assert "== Training" not in done.stdout
    assert done.stdout.split("== Perplexity")[1] == first.stdout.split("== Perplexity")[1]


def test_a_finished_run_gets_more_steps(rehearsal, tmp_path):
    folder, _ = rehearsal
    shutil.copytree(folder / "out", tmp_path / "out")
    done = rehearse(folder, tmp_path / "out", "--no-preflight", "--steps", 14)
    assert done.returncode == 0 and "== Training" in done.stdout, done.stderr
    assert (tmp_path / "out" / "checkpoint-00000014").is_dir()


def test_the_same_over_mpi(rehearsal, tmp_path):
    folder, _ = rehearsal
    done = rehearse(folder, tmp_path, "--link", "mpi", "--no-preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_log(tmp_path / "log.jsonl")[0]["link"] == "mpi"
    assert numbers(tmp_path) == numbers(folder / "out")


def test_the_preflight_stops_it(rehearsal, tmp_path):
    folder, _ = rehearsal
    done = rehearse(folder, tmp_path, "--ranks", 2, "--", "--train", tmp_path / "none*.bin")
    assert done.returncode == 1 and "no file matches" in done.stderr
    assert "the pre-flight found something" in done.stderr and "== Training" not in done.stdout


# Every third step saves, which takes more than a second, and the next save waits for it. So there is
# time for a signal to pass through two shells and mpirun before the last step.
SLOW_SAVES = {"TRAIN_LLAMA2_TEST_SAVE_PAUSE_MS": "500"}
SAVES = ("--", "--save-every", 3)


def signal_at_step(step, out):
    def meanwhile(shell):
        end = time.monotonic() + LONGEST
        log = out / "log.jsonl"
        while not (log.exists() and f'"event":"step","step":{step},' in log.read_text()):
            assert shell.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        os.kill(shell.pid, signal.SIGUSR1)
    return meanwhile


def test_slurm_requeues_and_the_result_is_the_same(rehearsal, tmp_path):
    """2 nodes x 2 tasks; SIGUSR1 after step 4. The batch file is the one that users submit."""
    folder, _ = rehearsal
    out, slurm = tmp_path / "out", Slurm(tmp_path, **SLOW_SAVES)
    status, output = slurm.sbatch({"nodes": 2, "ntasks-per-node": 2}, "--rehearse", "--steps", 12,
                                  "--data", folder / "data", "--out", out, "--no-preflight", *SAVES,
                                  meanwhile=signal_at_step(4, out))
    assert status == 0, output
    assert slurm.requeued() == ["requeue 4711"] and slurm.starts == 2
    assert "job 4711 is requeued" in output
    (resumed,) = events(out / "log.jsonl", "resume")
    assert 4 < resumed["step"] < 12
    assert resumed["differences"] == ["over --link udp the network decides what else is lost"]
    assert numbers(out) == numbers(folder / "out")
    told = (out / "perplexity.txt").read_text().splitlines()[1:]
    assert told == (folder / "out" / "perplexity.txt").read_text().splitlines()[1:]
    assert output.rstrip().endswith("\n".join(told).rstrip())


def test_without_slurm_the_same_command_goes_on(rehearsal, tmp_path):
    folder, _ = rehearsal
    command = [str(word) for word in (SCRIPT, *SHORT, "--data", folder / "data", "--out", tmp_path,
                                      "--no-preflight", *SAVES)]
    shell = subprocess.Popen(command, cwd=ROOT, env=environment(**SLOW_SAVES), text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    signal_at_step(2, tmp_path)(shell)
    output, _ = shell.communicate(timeout=LONGEST)
    assert shell.returncode == 75, output
    assert "the same command goes on" in output and not (tmp_path / "perplexity.txt").exists()
    done = rehearse(folder, tmp_path, "--no-preflight")
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers(tmp_path) == numbers(folder / "out")

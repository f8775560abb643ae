"""Tests scripts/elastic.sh with a stand-in for the trainer and a real etcd, and once with the real
trainer."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest

from etcd import Etcd
from program import PROGRAM, ROOT, TIMEOUT, environment_of, read_log
from test_program import data, settings  # pylint: disable=unused-import

pytestmark = pytest.mark.takes(20)

needs_etcd = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")

# The stand-in for the trainer. It notes how it is started, and does the next entry of `plan`: it ends by a
# signal or with an exit code, waits ("wait"), or ignores SIGTERM ("deaf").
TRAINER = """#!/bin/bash
exec 9>"$NOTES/lock"; flock 9
echo "$$ $*" >>"$NOTES/started"
echo "${TRAIN_LLAMA2_STORE_PASSWORD-}" >>"$NOTES/passwords"
what=$(sed -n "$(wc -l <"$NOTES/started")p" "$NOTES/plan")
exec 9>&-
note() { echo "$1" >>"$NOTES/signals"; exit 0; }
for s in INT TERM USR1 USR2 HUP XCPU; do trap "note $s" "$s"; done
case $what in
deaf) trap 'echo TERM >>"$NOTES/signals"' TERM; echo ready >>"$NOTES/ready"; while :; do sleep 0.1; done ;;
wait) echo ready >>"$NOTES/ready"; while :; do sleep 0.1; done ;;
[A-Z]*) kill -s "$what" $$ ;;
*) exit "$what" ;;
esac
"""
# The stand-in for ssh. It notes the host's name, and runs the command here, in the user's shell as ssh
# does.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
echo "$1" >>"$NOTES/hosts"
shift
exec sh -c "$*"
"""


def program(path, text):
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


class Script:
    """One call of elastic.sh, and the notes of the stand-ins."""

    def __init__(self, folder):
        self.folder, self.process = folder, None
        (folder / "tmp").mkdir()
        program(folder / "trainer", TRAINER)
        program(folder / "ssh", SSH)

    def start(self, plan, *arguments, trainer=None, environment=None):
        (self.folder / "plan").write_text("\n".join(plan.split()) + "\n", encoding="utf-8")
        environment = environment_of({
            "TRAIN_LLAMA2": str(trainer or self.folder / "trainer"), "NOTES": str(self.folder),
            "PATH": f"{self.folder}:{os.environ['PATH']}", "TMPDIR": str(self.folder / "tmp"),
            "OMP_NUM_THREADS": "1", **(environment or {})})
        # The script has a session of its own, so that only it gets the signals. Bash cannot catch one that is ignored when
        # it starts, as nohup does with SIGHUP.
        self.process = subprocess.Popen([ROOT / "scripts/elastic.sh", *map(str, arguments)], cwd=ROOT,
                                        env=environment, text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, start_new_session=True,
                                        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
        return self.process

    def end(self):
        """Ends the processes that a failed test has left."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            for line in self.lines("started"):
                subprocess.run(["kill", "-KILL", line.split(" ")[0]], check=False)
            self.process.wait(TIMEOUT)

    def run(self, plan, *arguments):
        process = self.start(plan, *arguments)
        said = process.communicate(timeout=TIMEOUT)[1]
        return process.returncode, said

    def lines(self, name):
        path = self.folder / name
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def wait(self, what):
        end = time.monotonic() + TIMEOUT
        while not what():
            failed = (self.process.poll() or 0) > 0
            assert time.monotonic() < end and (what() or not failed), [
                self.lines("started"), self.lines("signals"), failed and self.process.communicate()]
            time.sleep(0.02)

    def left_nothing(self):
        return not list((self.folder / "tmp").iterdir())


@pytest.fixture
def script(tmp_path):
    one = Script(tmp_path)
    yield one
    one.end()


def lives(pid):
    """Whether a process still runs. (A zombie does not: it has ended, but no process has waited for it.)"""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:  # it ends, also while this is read
        return False


def options_of(line):
    return line.split(" ", 1)[1]


@needs_etcd
def test_who_dies_is_started_again(script):
    code, said = script.run("KILL 1 0", "-n", 1, "--", "--model", "a b")
    assert code == 0
    assert [line.split(": ", 1)[1] for line in said.splitlines()] == [
        "process 0 was killed by signal 9: start 1 of 3",
        "process 0 ended with exit code 1: start 2 of 3"]
    first, *later = map(options_of, script.lines("started"))
    assert re.fullmatch(r"--meet etcd://127.0.0.1:\d+/elastic-\w+ --meet-ranks 1 --meet-process 0 --model a b", first)
    assert later == [first + " --meet-anew"] * 2
    assert script.left_nothing()


@needs_etcd
@pytest.mark.parametrize("words", [["--port-range", "23450-23490"], ["--port-range=23450-23490"]])
def test_etcd_takes_a_port_of_the_range(script, words):
    assert script.run("0", "--", "--model", "260K", *words)[0] == 0
    started = options_of(script.lines("started")[0])
    assert 23450 <= int(re.search(r"--meet etcd://127\.0\.0\.1:(\d+)/", started)[1]) <= 23490
    assert started.endswith(" ".join(words))


@needs_etcd
def test_etcd_is_there_and_ends(script):
    process = script.start("wait", "-n", 1, "--")
    script.wait(lambda: script.lines("ready"))
    address = options_of(script.lines("started")[0]).split("/")[2]
    health = ["curl", "-s", "--noproxy", "*", f"http://{address}/health"]
    if shutil.which("curl"):
        assert '"true"' in subprocess.run(health, capture_output=True, text=True, check=True).stdout
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0
    if shutil.which("curl"):
        assert subprocess.run(health, capture_output=True, check=False).returncode != 0
    assert script.left_nothing()


def children_of(process):
    """The process ids of a script's children."""
    text = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8")
    return [int(pid) for pid in text.split()]


@needs_etcd
def test_nothing_is_left_if_the_script_is_killed(script):
    process = script.start("wait wait", "-n", 2, "--")
    script.wait(lambda: len(script.lines("ready")) == 2)
    children = children_of(process.pid)
    assert len(children) == 3  # etcd and two trainers
    process.kill()
    script.wait(lambda: not any(map(lives, children)))
    assert script.lines("signals") == ["TERM"] * 2


@needs_etcd
def test_the_etcd_of_another_job_is_not_taken(script):
    """Another job's etcd listens at the port that this script tries first."""
    seed = script.folder / "seed"
    seed.write_text(f"RANDOM={os.getpid()}\n", encoding="utf-8")  # another one for each process that runs tests
    port = int(subprocess.run(["bash", "-c", f". {seed}; echo $((20000 + RANDOM % 12000))"],
                              text=True, capture_output=True, check=True).stdout)
    other = Etcd(script.folder / "other", port=port)
    try:
        process = script.start("wait", "-n", 1, "--", environment={"BASH_ENV": str(seed)})
        script.wait(lambda: script.lines("ready"))
        assert f":{port}/" not in script.lines("started")[0]
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 0
        assert other.answers()
    finally:
        other.stop()


@needs_etcd
def test_a_store_for_other_hosts_has_a_password(script):
    """The etcd listens on all addresses then, and answers only who has the password, which no command line shows."""
    process = script.start("wait wait", "-n", 2, "--hosts", "a,b", "--")
    script.wait(lambda: len(script.lines("ready")) == 2)
    address = options_of(script.lines("started")[0]).split("/")[2]
    (password,) = set(script.lines("passwords"))
    assert len(password) == 32

    def ask(path, body, **headers):
        request = urllib.request.Request(f"http://{address}/v3/{path}", json.dumps(body).encode(), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return json.load(answer)
    everything = {"key": "AA==", "range_end": "AA=="}
    for login in ({}, {"Authorization": "guess.1"}):
        with pytest.raises(urllib.error.HTTPError):
            ask("kv/range", everything, **login)
    with pytest.raises(urllib.error.HTTPError):
        ask("auth/authenticate", {"name": "root", "password": "guess"})
    token = ask("auth/authenticate", {"name": "root", "password": password})["token"]
    assert "header" in ask("kv/range", everything, Authorization=token)
    shown = subprocess.run(["ps", "-eo", "args"], text=True, capture_output=True, check=True).stdout
    assert "elastic.sh" in shown and password not in shown
    process.send_signal(signal.SIGTERM)
    assert process.wait(TIMEOUT) == 0


URL = ("--meet", "etcd://nowhere:1/r")


def test_restarts_are_used_up(script):
    code, said = script.run("1 1 1 1", "-n", 2, "--max-restarts", 1, *URL, "--")
    assert code == 1 and len(script.lines("started")) == 4
    assert said.splitlines()[-1] == ("elastic.sh: no process is left: each has died 2 times "
                                     "(--max-restarts 1)")


@pytest.mark.parametrize("plan, code, started", [("0 1 0", 0, 3), ("2 2", 2, 2), ("0 2", 0, 2)])
def test_exit_codes(script, plan, code, started):
    assert script.run(plan, "-n", 2, *URL, "--")[0] == code
    assert len(script.lines("started")) == started
    assert "--meet etcd://nowhere:1/r --meet-ranks 2 --meet-process" in script.lines("started")[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP,
                                    signal.SIGXCPU])
def test_signals_are_passed_on(script, number):
    process = script.start("wait wait", "-n", 2, *URL, "--")
    script.wait(lambda: len(script.lines("ready")) == 2)
    process.send_signal(number)
    assert process.wait(TIMEOUT) == 0
    assert script.lines("signals") == [number.name[3:]] * 2 and len(script.lines("started")) == 2


def test_hosts(script):
    process = script.start("KILL wait wait wait", "-n", 3, "--hosts", "a,b", *URL, "--", "it's $HOME")
    script.wait(lambda: len(script.lines("ready")) == 3)
    assert sorted(script.lines("hosts")) in (["a", "a", "a", "b"], ["a", "a", "b", "b"])
    started = list(map(options_of, script.lines("started")))
    first = [f"--meet etcd://nowhere:1/r --meet-ranks 3 --meet-process {i} it's $HOME" for i in range(3)]
    assert set(first) <= set(started) and len(started) == 4
    assert [line for line in started if line not in first] in [[line + " --meet-anew"] for line in first]
    process.send_signal(signal.SIGINT)
    assert process.wait(TIMEOUT) == 0
    assert script.lines("signals") == ["TERM"] * 3


def test_a_connection_that_ends_takes_its_rank_along(script):
    process = script.start("wait wait", "-n", 2, "--hosts", "a", *URL, "--")
    script.wait(lambda: len(script.lines("ready")) == 2)
    process.kill()  # this also closes its ends of the connections
    script.wait(lambda: not any(lives(line.split(" ")[0]) for line in script.lines("started")))
    assert not script.lines("signals")


def test_who_only_lost_its_connection_may_be_alive(script):
    """A process that lost its connection may still be alive. So elastic.sh gives --meet-anew, which says that
    all are dead, to no process after that."""
    said = script.run("255 1 0", "-n", 1, "--hosts", "a", *URL, "--")[1]
    assert "process 0 has no connection to a (ssh): start 1 of 3\n" in said and "signal" not in said
    assert "--meet-anew" not in "".join(script.lines("started")[1:])


def test_a_trainer_far_away_that_does_not_stop(script):
    process = script.start("deaf", "-n", 1, "--hosts", "a", *URL, "--")
    script.wait(lambda: script.lines("ready"))
    process.send_signal(signal.SIGINT)
    script.wait(lambda: script.lines("signals") == ["TERM"])
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    assert process.wait(TIMEOUT) == 128 + signal.SIGKILL


@pytest.mark.parametrize("arguments, said", [
    (["-n", "x"], "-n: expected a whole number, got 'x'"),
    (["-n", "0"], "-n: expected at least 1"),
    (["-n"], "-n: expected a value"),
    (["-n", "010"], "-n: expected a whole number, got '010'"),
    (["--meet", ""], "--meet: expected a value"),
    (["--hosts", ""], "--hosts: expected a value"),
    (["--max-restarts", "-1"], "--max-restarts: expected a whole number, got '-1'"),
    (["--steps", "3"], "unknown option '--steps'; options of train_llama2 stand behind --"),
    (["--hosts", "a,,b"], "--hosts: expected names with commas between, got ''"),
    (["--srun", "--hosts", "a"], "--srun: expected no --hosts, Slurm says them"),
    (["--srun"], "--srun: expected an allocation of Slurm (salloc, sbatch)"),
])
def test_wrong_usage(script, arguments, said):
    assert script.run("", *arguments) == (2, f"elastic.sh: {said}\n")


@needs_etcd
@pytest.mark.parametrize("arguments, code, said", [
    ((), 2, "expected --train GLOB, or one of --eval"),
    (("--train", "none.bin"), 1, "no file matches 'none.bin'"),
    (("--train", __file__, "--lr", "x"), 2, "--lr: expected a number from 0 to 1000, got 'x'"),
])
def test_a_mistake_is_said_once(script, arguments, code, said):
    process = script.start("", "-n", 3, "--", "--model", "260K", *arguments, trainer=PROGRAM)
    shown, lines = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code and shown == "" and len(lines.splitlines()) == 1 and said in lines, lines
    assert script.left_nothing()


def test_help():
    done = subprocess.run([ROOT / "scripts/elastic.sh", "--help"], text=True, capture_output=True,
                          check=False)
    assert done.returncode == 0 and "--max-restarts N" in done.stdout
    assert "salloc --no-kill" in done.stdout and "set -u" not in done.stdout


def test_no_etcd(script):
    for name in ("bash", "env", "mktemp", "rm"):
        (script.folder / name).symlink_to(shutil.which(name))
    done = subprocess.run([ROOT / "scripts/elastic.sh", "--"], cwd=ROOT, text=True,
                          capture_output=True, check=False,
                          env={"PATH": str(script.folder), "TRAIN_LLAMA2": str(PROGRAM)})
    assert done.returncode == 1
    assert done.stderr == ("elastic.sh: no etcd here: scripts/dependencies.sh elastic installs it; or name one "
                           "with --meet\n")


def trainers_of(script):
    """The process ids of a script's trainers."""
    return [pid for pid in children_of(script)
            if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == PROGRAM.name]


@needs_etcd
def test_a_rank_of_a_run_dies(script, data):  # pylint: disable=redefined-outer-name
    """A rank that dies is started again and joins. The run ends normally. All lines name the same rank as dead."""
    out = script.folder / "out"
    common = settings(data, out, workers=None, seq=16, val=None, steps=10 ** 6, peer_timeout=2)
    process = script.start("", "-n", 3, "--", *common, trainer=PROGRAM)

    def log(kind):
        path = out / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [line for line in lines if line.endswith("\n") and f'"event":"{kind}"' in line]

    script.wait(lambda: len(log("step")) > 3)
    dead = trainers_of(process.pid)[0]
    os.kill(dead, signal.SIGKILL)
    script.wait(lambda: log("view") and '"ranks":3' in log("view")[-1]
                and '"joined":""' not in log("view")[-1])
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=TIMEOUT)[1]
    assert process.returncode == 0, said
    rank = re.search(r"process \d \(rank (\d)\) was killed by signal 9: start 1 of 3\n", said)[1]
    assert any(re.search(rf'"left":"rank {rank} [^,]*:{dead}"', line) for line in log("view"))
    assert set(re.findall(r"peer rank (\d) (?:has|was)", said)) <= {rank}, said
    assert set(re.findall(r"does not hear rank (\d)", said)) <= {rank}, said
    assert read_log(out / "log.jsonl")[-1]["status"] == "stopped"

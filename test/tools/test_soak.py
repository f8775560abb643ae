"""Runs dev/chaos/soak.py for a short time: ranks die, join and stop, etcd fails, the disk is full, and, between
hosts, the network is cut. Any length by hand: dev/chaos/README.md."""
import argparse
import subprocess
import sys

from program import PROGRAM, ROOT, TIMEOUT
from test_udp import namespaces  # pylint: disable=unused-import

sys.path.insert(0, str(ROOT / "dev" / "chaos"))
import soak as chaos  # pylint: disable=wrong-import-position


def soak(seed, *more):
    """A busy machine may stand still for long, so that only a hang fails here. No checkpoint is removed: a process
    that has chosen one to resume from must find it."""
    done = subprocess.run([ROOT / "dev/chaos/soak.py", "--seconds", "20", "--seed", str(seed), "--stand-still", "30",
                           "--program", PROGRAM, *(more if "--" in more else [*more, "--"]), "--save-every", "200",
                           "--keep", "0"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_moment_of_chaos():
    assert "kill" in soak(1)


def test_a_moment_of_chaos_between_hosts(namespaces):  # pylint: disable=unused-argument
    assert "spoil" in soak(2, "--hosts", "--", "--encrypt", "--deadline", "auto", "--carry", "1")


def test_what_chaos_notices():
    """A step that is missing, or comes twice."""
    made = chaos.Soak.__new__(chaos.Soak)
    made.steps, made.wrong = [], []
    made.given = argparse.Namespace(options=[])
    for step in (0, 1, 1, 3):
        made.check_step(step)
    assert made.wrong == ["step 1 is logged after step 1", "step 3 is logged after step 1"]
    made.given.options, made.steps, made.wrong = ["--deadline", "auto"], [], []
    for step in (0, 1, 3, 2):
        made.check_step(step)
    assert made.wrong == ["step 2 is logged after step 3"]


def test_chaos_notices_that_memory_grows():
    process = chaos.Process.__new__(chaos.Process)
    process.resident = [(second, 10 ** 7) for second in range(100)]
    assert process.growth() == 1
    process.resident += [(second, 10 ** 7 + (second - 100) * 10 ** 5) for second in range(100, 200)]
    assert process.growth() > 1.5

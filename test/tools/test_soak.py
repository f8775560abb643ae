"""Runs dev/chaos/soak.py for a minute in all: ranks die, join and stop, etcd fails, disks are full, and, between
hosts, the network is cut. Any length by hand: dev/chaos/README.md."""
import argparse
import os
import subprocess
import sys
import time

import pytest

from program import PROGRAM, ROOT, TIMEOUT, environment_of
from test_udp import namespaces  # pylint: disable=unused-import

sys.path.insert(0, str(ROOT / "dev" / "chaos"))
import launched  # pylint: disable=wrong-import-position
import standstill  # pylint: disable=wrong-import-position
import watched  # pylint: disable=wrong-import-position

pytestmark = [pytest.mark.spread, pytest.mark.takes(90)]


def soak(seed, *more, seconds=12, options=()):
    """A busy machine may stand still for long, so that only a hang fails here. Ranks send slowly, so that most of
    the time no core is needed."""
    done = subprocess.run([ROOT / "dev/chaos/soak.py", "--seconds", str(seconds), "--seed", str(seed),
                           "--stand-still", "30", "--program", PROGRAM, *more, "--", "--pace-gbps", "0.1", *options],
                          capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment_of())
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_moment_of_chaos():
    assert "kill" in soak(4)


def test_chaos_that_is_asked_to_end():
    assert "done" in soak(302, "--amid", options=["--encrypt"], seconds=3)


def test_a_moment_of_chaos_between_hosts(namespaces):  # pylint: disable=unused-argument
    assert "spoil" in soak(2, "--hosts", options=["--encrypt", "--deadline", "auto", "--carry", "1"], seconds=20)


def test_a_moment_of_chaos_under_mpirun():
    assert "stop" in soak(3, "--mpirun", options=["--group", "2"])


def test_what_chaos_notices():
    """A step that is missing, or comes twice."""
    made = watched.Watched.__new__(watched.Watched)
    made.steps, made.wrong = [], []
    made.given = argparse.Namespace(options=[], ranks=0)
    for step in (0, 1, 1, 3):
        made.check_step(step)
    assert made.wrong == ["step 1 is logged after step 1", "step 3 is logged after step 1"]
    made.given.options, made.steps, made.wrong = ["--deadline", "auto"], [], []
    for step in (0, 1, 3, 2):
        made.check_step(step)
    assert made.wrong == ["step 2 is logged after step 3"]


def test_chaos_notices_a_start_from_an_older_checkpoint(tmp_path):
    made = launched.Launched.__new__(launched.Launched)
    launch = launched.Launch.__new__(launched.Launch)
    launch.said, launch.promised = tmp_path / "said", 150
    for text, right in (("resumed from out/checkpoint-00000150 after 150 steps\n", True), ("killed before\n", True),
                        ("resumed from out/checkpoint-00000100 after 100 steps\n", False)):
        launch.said.write_text(text, encoding="utf-8")
        made.wrong = []
        made.check_resumed(launch)
        assert (made.wrong == []) == right


def test_chaos_notices_that_memory_grows():
    process = watched.Process.__new__(watched.Process)
    process.resident = [(second, 4, 10 ** 7) for second in range(100)]
    assert process.growth() == 1
    # A save takes memory for a moment; more ranks need more.
    process.resident += [(100, 4, 2 * 10 ** 7), (101, 6, 2 * 10 ** 7)]
    assert process.growth() == 1
    process.resident += [(second, 4, 10 ** 7 + (second - 100) * 10 ** 5) for second in range(102, 200)]
    assert process.growth() > 1.4


def test_chaos_says_how_long_a_processor_was_lacking(tmp_path):
    """Two processes that compute on one processor wait for each other half of the time."""
    both = [subprocess.Popen(["taskset", "-c", str(min(os.sched_getaffinity(0))), sys.executable, "-c",
                              "while True: pass"]) for _ in range(2)]
    try:
        still, pids = standstill.Standstill(), [p.pid for p in both]
        still.begin(time.monotonic(), pids)
        since = time.monotonic()
        said = tmp_path / "said"
        said.write_text("a line\nhalf a li", encoding="utf-8")
        still.listen(since, "said", said)
        time.sleep(1.5)
        still.end(since, time.monotonic(), pids)
    finally:
        for p in both:
            p.kill()
            p.wait()
    (seconds, free), = still.all
    assert 1.5 <= seconds and free < 0.8 * seconds
    assert still.longest[0][2] == [(since, "said", "a line")]
    still.all = [(3, 1), (2, 2), (1, 0.5)]
    assert still.worst(faults=2) == [(2, 1), (3, 2)]

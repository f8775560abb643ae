"""Runs C tests with the thread sanitizer: their ranks are threads of one process, each with its engine's
own thread, over loopback UDP. The Makefile says how they are built."""
import os
import shutil
import subprocess

import pytest

from program import BUILD, ROOT, TIMEOUT

pytestmark = pytest.mark.takes(35)


def run(log, *command):
    return subprocess.run([str(part) for part in command], cwd=ROOT, text=True, timeout=TIMEOUT,
                          env={**os.environ, "TSAN_OPTIONS": f"log_path={log}"},
                          capture_output=True, check=False)


def test_no_race(tmp_path):
    program, log = BUILD / "thread" / "test" / "lossynet" / "transport" / "test_lossynet_udp", tmp_path / "log"
    done = run(log, program)
    reports = "".join(file.read_text() for file in tmp_path.glob("log*"))
    if "unexpected memory mapping" in reports + done.stderr:
        if not shutil.which("setarch"):
            pytest.skip("the thread sanitizer of this compiler does not know this kernel's memory map")
        # The kernel randomises more bits of addresses than the thread sanitizer supports.
        done = run(log, "setarch", "-R", program)
        reports = "".join(file.read_text() for file in tmp_path.glob("log*"))
    assert done.returncode == 0 and "WARNING" not in reports, \
        (done.stdout + done.stderr + reports)[-6000:]

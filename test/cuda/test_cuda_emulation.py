"""Tests the emulation that runs CUDA kernels on a CPU (dev/emulation): it finds faults made on purpose,
and the thread sanitizer finds no race in the kernels."""
import os
import subprocess

import pytest

from program import BUILD, ROOT

pytestmark = pytest.mark.takes(45)

LIMIT = 600  # seconds; a hang is a failure
ORDERS = ("forward", "reverse", "random")


def start(program, *arguments):
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
                   "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([str(program), *arguments], cwd=ROOT, env=environment, text=True,
                          capture_output=True, timeout=LIMIT, check=False)
    return done.returncode, done.stdout + done.stderr


def faults(build, *arguments):
    return start(build / "test" / "cuda" / "emulation_faults", *arguments)


@pytest.mark.parametrize("name, message", [
    ("copy_forgotten", "never waited for"),
    ("two_barriers", "at different barriers"),
    ("missing_lanes", "deadlock"),
    ("different_collectives", "in another collective"),
    ("early_exit", "ends while others wait"),
    ("odd_row", "not a multiple of 16"),
    ("row_elsewhere", "not in shared memory"),
    ("launch", "invalid launch"),
])
def test_stops_at(name, message):
    for order in ORDERS:
        status, output = faults(BUILD, name, order)
        assert status != 0 and message in output, output


@pytest.mark.parametrize("name", ["barrier", "copy_wait", "use_again"])
def test_wrong_numbers_show(name):
    seen = [faults(BUILD, name, order)[1] for order in ORDERS]
    assert any("wrong result" in output for output in seen), seen
    for order in ORDERS:
        assert faults(BUILD, "right_" + name, order) == (0, "finished\n")


@pytest.mark.parametrize("name, message", [
    ("beyond_dynamic", "use-after-poison"),
    ("beyond_static", "global-buffer-overflow"),
    ("beyond_global", "heap-buffer-overflow"),
    ("misaligned", "misaligned address"),
])
def test_address_sanitizer_finds(name, message):
    status, output = faults(BUILD / "sanitize", name)
    assert status != 0 and message in output, output


@pytest.mark.parametrize("name", ["barrier", "warp_barrier", "use_again", "lost_update"])
def test_thread_sanitizer_finds(name):
    status, output = faults(BUILD / "emulated_thread", name)
    assert status == 66 and "data race" in output, output
    assert "emulation_faults.cu:" in output, "it does not say where"
    assert faults(BUILD / "emulated_thread", "right_" + name) == (0, "finished\n")


@pytest.mark.parametrize("program", ["test_cuda_kernels", "test_cuda_attention"])
def test_kernels_have_no_race(program):
    status, output = start(BUILD / "emulated_thread" / "test" / "cuda" / program)
    assert status == 0, output[-5000:]

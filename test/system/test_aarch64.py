"""Tests the program for aarch64 (`make aarch64`) on an emulated processor: it selects the same packets and
reaches the same loss as here, and the operators and the wire's encodings are right."""
import platform
import re
import shutil
import subprocess

import pytest

from program import BUILD, ROOT, TIMEOUT, environment_of, markov_files, succeed

EMULATED = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]  # where Debian has libraries for aarch64
MISSING = [name for name in ("aarch64-linux-gnu-g++", "qemu-aarch64") if not shutil.which(name)]
pytestmark = [
    pytest.mark.skipif(platform.machine() == "aarch64", reason="this processor is an aarch64"),
    pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} here")]
# Smaller shapes of operators, since the emulation takes thirty times as long.
ENVIRONMENT = {"OPERATORS_MOST_WORK": "5000", "TRAIN_LLAMA2_ISA": ""}


def emulate(program, *arguments):
    path = BUILD / "aarch64" / program
    assert path.exists(), f"no {path}: make aarch64"
    done = subprocess.run([*EMULATED, str(path), *map(str, arguments)], cwd=ROOT, text=True,
                          env=environment_of(ENVIRONMENT), capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


@pytest.mark.parametrize("program, cases", [("test/llmc/test_operators", 40),
                                            ("test/lossynet/partition/test_elements", 5)])
def test_c_program(program, cases):
    results = re.findall(r"^(.* test_\w+): (ok|FAILED|skipped)$", emulate(program), re.MULTILINE)
    wrong = [line for line in results if line[1] != "ok"]
    assert len(results) >= cases
    assert wrong in ([], [("float32 generic test_weights_are_rounded", "skipped")])  # only of bf16


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_run_agrees(tmp_path, dtype):
    data = markov_files(tmp_path, 256, 20_000, 5_000)
    command = ["--model=260K", f"--train={data}/train.bin", "--steps=3", "--seq=24", "--batch=1",
               "--workers=2", "--loss-rate=0.1", "--device=cpu", f"--dtype={dtype}"]
    steps = re.compile(r"^ +\d+  loss (\S+)  norm (\S+)  lr .* tokens/s  lost (.*)$", re.MULTILINE)
    there, here = (steps.findall(text) for text in (emulate("train_llama2", *command),
                                                    succeed(*command).stdout))
    assert len(there) == 3 and [step[2] for step in there] == [step[2] for step in here]
    # A bfloat16 that is rounded to the other side moves some int6 values on the wire by a whole level.
    close = {"float32": 3e-4, "bf16": 1.5e-3}[dtype]
    for a, b in zip(there, here):
        assert float(a[0]) == pytest.approx(float(b[0]), abs=close)
        assert float(a[1]) == pytest.approx(float(b[1]), rel=0.01)


def test_it_says_what_it_is():
    shown = emulate("train_llama2", "--version")
    assert "NEON, GEMM in plain loops" in shown and "instruction sets: generic (" in shown

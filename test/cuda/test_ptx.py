"""Tests the kernels as nvcc compiled them: the tests of kernels run on the PTX of compute_80 and compute_90
(dev/emulation/ptx), which also has the instructions that the emulation of sources replaces (ptx.cuh)."""
import os
import re
import subprocess

import pytest

from program import BUILD, ROOT

pytestmark = pytest.mark.takes(35)
PTX = BUILD / "ptx"
LIMIT = 900  # seconds; a hang is a failure
MOST = {"test_cuda_kernels": 71, "test_cuda_attention": 25}  # kernels that must have run, at least


def functions(text, target):
    """The C++ functions of a target's kernels, by the kernels' names."""
    return dict(re.findall(rf'^    {{"(\w+)", {target}, (\w+), ', text, re.MULTILINE))


@pytest.mark.spread
@pytest.mark.parametrize("program", MOST)
def test_kernels_as_ptx(tmp_path, program):
    """Every kernel that the tests launch runs as PTX, or the program ends. If all kernels are the same C++ for
    both targets, they run once."""
    if not (PTX / program).exists():
        pytest.skip("built without nvcc: kernels did not run as PTX")
    text = (PTX / "kernels.cpp").read_text(encoding="utf-8")
    assert len(functions(text, 90)) >= sum(MOST.values())
    for target in (80, 90) if functions(text, 80) != functions(text, 90) else (90,):
        report = tmp_path / f"report.{target}"
        done = subprocess.run([str(PTX / program)], cwd=ROOT, text=True, capture_output=True, timeout=LIMIT,
                              check=False, env={**os.environ, "PTX_TARGET": str(target), "PTX_REPORT": str(report)})
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        told, kernels = map(int, report.read_text().splitlines()[-1].split())  # those before: of forked tests
        assert told == target and kernels >= MOST[program]


def translate(tmp_path, *instructions, declared=".reg .b32 %r<9>; .reg .b16 %rs<9>; .reg .f32 %f<9>;"):
    """Translates a kernel of one instruction, for one target after the other."""
    paths = []
    for target, instruction in zip((90, 80), instructions):
        paths.append(tmp_path / f"kernel.{target}.ptx")
        paths[-1].write_text(f".version 9.0\n.target sm_{target}\n.address_size 64\n\n.entry f(\n.param .u64 f_0\n)\n"
                             f"{{\n{declared}\n{instruction}\nret;\n}}\n")
    return subprocess.run(["python3", ROOT / "dev/emulation/ptx/translate.py", *paths], text=True,
                          capture_output=True, check=False)


def test_translates(tmp_path):
    done = translate(tmp_path, "add.s32 %r1, %r2, -3;")
    assert done.returncode == 0 and "R_r1 = " in done.stdout, done.stderr
    assert '{"f", 90, kernel_1_90, 8, 0}' in done.stdout


@pytest.mark.parametrize("other, function", [
    ("mov.b32 %f1, {0,%rs1};", "kernel_1_90"), ("mov.b32 %f1, {%rs1,0};", "kernel_2_80"),
    ("mov.b32 %f1, {0,%rs2};", "kernel_2_80")])
def test_the_same_kernel_for_two_targets_is_one_function(tmp_path, other, function):
    done = translate(tmp_path, "cvt.f32.bf16 %f1, %rs1;", other)
    assert done.returncode == 0, done.stderr
    assert functions(done.stdout, 90) == {"f": "kernel_1_90"} and functions(done.stdout, 80) == {"f": function}
    assert done.stdout.count("static void kernel_") == (1 if function == "kernel_1_90" else 2)


@pytest.mark.parametrize("instruction", [
    "bfind.u32 %r1, %r2;", "add.sat.s32 %r1, %r2, %r3;", "fma.rz.f32 %r1, %r2, %r3, %r4;", "bar.sync 1;",
    "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1,%r2}, [%r3];",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1,%r2,%r3,%r4}, {%r1,%r2}, {%r3}, {%r1,%r2,%r3,%r4};",
    "add.s32 %r1, %r2, elsewhere;"])
def test_names_what_it_does_not_know(tmp_path, instruction):
    done = translate(tmp_path, instruction)
    assert done.returncode == 1 and done.stderr.startswith("translate.py: kernel f: "), done.stderr
    assert f"`{instruction[:-1]}` is not known" in done.stderr

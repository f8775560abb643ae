"""Tests the machine code (SASS) that nvcc makes of every kernel for sm_80 and sm_90: what kernels are fast by is
still in it. sass_budget.txt says, for each kernel,

    HMMA    products of the tensor cores           LDSM    loads of their operands from shared memory (ldmatrix)
    wide    loads of 16 bytes from global memory: LDG.128, and LDGSTS.128 (cp.async)
    narrow  shorter loads from global memory
    stores  stores of 16 bytes to global memory

and no kernel may keep registers in local memory (LDL, STL). A change that makes loads narrow fails here; no test
of numbers would see it. After an intended change, write the file anew with

    make && UPDATE_BUDGET=1 python3 -m pytest test/cuda/test_sass.py

and check the difference. Counts may differ by a quarter from the budget, since nvcc's releases unroll differently.

The disassembler (CUDA Binary Utilities: cuobjdump, nvdisasm) comes with the whole toolkit. Where it is missing,
the test installs NVIDIA's two small packages from PyPI under build/, once.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from program import BUILD, TIMEOUT
from test_nvcc import demangle

pytestmark = [pytest.mark.takes(30), pytest.mark.spread]
BUDGET = pathlib.Path(__file__).with_name("sass_budget.txt")
ARCHITECTURES = ("sm_80", "sm_90")
OBJECTS = [BUILD / f"llmc/backend/cuda/backend_cuda.{dtype}.cu.o" for dtype in ("bf16", "float32")]
PACKAGES = ["nvidia-cuda-cuobjdump==13.5.37", "nvidia-cuda-nvdisasm==13.5.37"]
# Instructions: "CUDA Binary Utilities", section "Instruction Set Reference".
COUNTED = {"HMMA": r"HMMA\.", "LDSM": r"LDSM\.", "wide": r"(LDG|LDGSTS)\.(\S*\.)?128\b",
           "narrow": r"LDG\.(?!(\S*\.)?128\b)", "stores": r"STG\.(\S*\.)?128\b"}
LOCAL = r"(LDL|STL)\b"
HEADER = "# See test_sass.py. On {}: " + ", ".join(COUNTED) + "\n"


def tools():
    """A folder with cuobjdump and nvdisasm."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    installed = BUILD / "cuda-tools"
    def folder():
        places = [pathlib.Path(nvcc).resolve().parent, *map(pathlib.Path, os.environ["PATH"].split(os.pathsep)),
                  *installed.glob("nvidia/*/bin")]
        return next((place for place in places if (place / "cuobjdump").exists() and (place / "nvdisasm").exists()),
                    None)
    if not folder():
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                               "--timeout", "20", "--retries", "1", "--no-deps", "--target", installed, *PACKAGES],
                              text=True, capture_output=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            pytest.skip("the toolkit has no disassembler, and PyPI did not give one: machine code was not checked")
    return folder()


def count(sass):
    """Returns {(kernel, architecture): {what: count}} of cuobjdump's text."""
    counts, names, sm = {}, [], None
    for part in re.split(r"^\t\tFunction : |^(?=arch = )", sass, flags=re.MULTILINE)[1:]:
        if part.startswith("arch = "):
            sm = part.split()[2]
            continue
        names.append((part.split()[0], sm))
        # An instruction stands behind its address: /*0a30*/  @P0 LDG.E.128 R4, ...
        words = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?(\S+)", part)
        counts[names[-1]] = {what: sum(bool(re.match(how, word)) for word in words)
                             for what, how in {**COUNTED, "local": LOCAL}.items()}
    shown = dict(zip(names, demangle([name for name, _ in names]))) if names else {}
    return {(shown[key], key[1]): numbers for key, numbers in counts.items()}


def read_budget(text):
    budget = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, *numbers = line.rsplit(maxsplit=len(COUNTED) * len(ARCHITECTURES))
            for i, sm in enumerate(ARCHITECTURES):
                budget[name.strip(), sm] = dict(zip(COUNTED, map(int, numbers[i * len(COUNTED):])))
    return budget


def write_budget(kernels):
    with open(BUDGET, "w", encoding="utf-8") as file:
        file.write(HEADER.format(" and then on ".join(ARCHITECTURES)))
        for name in sorted({name for name, _ in kernels}):
            file.write(f"{name:<66}" + "  ".join("".join(f"{kernels[name, sm][what]:5}" for what in COUNTED)
                                                 for sm in ARCHITECTURES) + "\n")


def faults(kernels, budget):
    """One line for each kernel that is slower than its budget, has none, or is gone."""
    lines = [f"{name}: not in {BUDGET.name}" for name, sm in kernels if (name, sm) not in budget]
    for (name, sm), wanted in budget.items():
        found = kernels.get((name, sm))
        if not found:
            lines.append(f"{name} on {sm}: no such kernel")
            continue
        for what, number in wanted.items():
            worse = found[what] > 1.25 * number + 2 if what == "narrow" else found[what] < 0.75 * number
            if worse:
                lines.append(f"{name} on {sm}: {found[what]} {what}; budget {number}")
        if found["local"]:
            lines.append(f"{name} on {sm}: {found['local']} accesses to local memory (spills)")
    return lines


def test_kernels_keep_their_instructions():
    if not all(path.exists() for path in OBJECTS):
        pytest.skip("built without nvcc: machine code was not checked")
    kernels, folder = {}, tools()
    for path in OBJECTS:
        done = subprocess.run([folder / "cuobjdump", "-sass", path], text=True, capture_output=True, check=True,
                              env={**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"})
        kernels.update(count(done.stdout))
    if os.environ.get("UPDATE_BUDGET"):
        write_budget(kernels)
    lines = faults(kernels, read_budget(BUDGET.read_text(encoding="utf-8")))
    assert len(kernels) > 2 * 60 and not lines, "\n".join(lines)


SASS = """
arch = sm_90
\t\tFunction : _Z14convert_kernelI13__nv_bfloat16fLi8EEvPT_PKT0_m
        /*0000*/                   LDG.E.128.CONSTANT R4, [R2.64] ;   /* 0x0 */
        /*0010*/              @!P1 LDG.E.EF.128 R4, [R2.64+0x10] ;    /* 0x0 */
        /*0020*/               @P0 LDGSTS.E.BYPASS.128 [R1], [R2] ;   /* 0x0 */
        /*0030*/                   LDG.E.U16 R4, [R2.64] ;            /* 0x0 */
        /*0040*/                   STG.E.128 [R2.64], R4 ;            /* 0x0 */
        /*0050*/                   HMMA.16816.F32.BF16 R4, R8, R2 ;   /* 0x0 */
        /*0060*/                   LDSM.16.M88.4 R4, [R2] ;           /* 0x0 */
"""


def test_names_a_kernel_that_became_slow():
    name = "convert_kernel<bfloat16, float, 8>"
    good = count(SASS)
    assert good == {(name, "sm_90"): {"HMMA": 1, "LDSM": 1, "wide": 3, "narrow": 1, "stores": 1, "local": 0}}
    assert not faults(good, {key: {what: n for what, n in numbers.items() if what in COUNTED}
                             for key, numbers in good.items()})
    budget = read_budget(f"{name}  0 0 0 0 0  1 1 3 1 1")
    del budget[name, "sm_80"]
    for before, after, what in (("LDG.E.128.CONSTANT", "LDG.E.64.CONSTANT", "2 wide; budget 3"),
                                ("STG.E.128", "STG.E.64", "0 stores"), ("LDSM.16.M88.4", "LDS", "0 LDSM"),
                                ("HMMA.16816.F32.BF16", "FFMA", "0 HMMA"),
                                ("LDSM", "STL.64 [R1], R2 ;\n/*0070*/ LDSM", "1 accesses to local memory")):
        (line,) = faults(count(SASS.replace(before, after)), budget)
        assert line.startswith(f"{name} on sm_90: ") and what in line, line

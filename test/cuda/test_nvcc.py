"""Tests all CUDA sources as nvcc compiles them for sm_80 and sm_90: no warnings, no spills, and no kernel
exceeds its budget of registers and static shared memory (nvcc_budget.txt).

A kernel's occupancy was chosen for this budget. After an intended change, write the budget anew with

    make && UPDATE_BUDGET=1 python3 -m pytest test/cuda/test_nvcc.py

and check the difference. The test reads the reports that the build wrote beside its objects. With
-Werror, the build also ends at a warning.
"""
import os
import pathlib
import re
import subprocess

import pytest

from program import BUILD, ROOT

BUDGET = pathlib.Path(__file__).with_name("nvcc_budget.txt")
ARCHITECTURES = ("sm_80", "sm_90")
# Together these objects instantiate every kernel.
LOGS = [BUILD / "llmc" / "backend" / "cuda" / f"{name}.cu.o.log" for name in (
    "backend_cuda.float32", "backend_cuda.bf16", "device", "streams", "product")]
HEADER = """\
# Registers of a thread and bytes of static shared memory of a block, at most, of every kernel, on
# {0}. Dynamic shared memory is in the launchers. See test_nvcc.py.
"""


def demangle(names):
    done = subprocess.run(["c++filt"], input="\n".join(names), text=True, capture_output=True,
                          check=True)
    text = done.stdout.replace("__nv_bfloat16", "bfloat16").replace("void ", "")
    # The name up to its arguments. Arguments of a template may contain casts, as in kernel<64, (bool)1>.
    return [re.match(r"\w+(<.*?>(?=\())?", name).group() for name in text.splitlines()]


def usage_of(text):
    """Returns {(kernel, architecture): (registers, shared bytes, spilled bytes)} from ptxas -v."""
    found = re.findall(r"entry function '(\w+)' for '(sm_\d+)'(.*?)Used (\d+) registers([^\n]*)",
                       text, re.DOTALL)
    names = demangle([entry[0] for entry in found]) if found else []
    usage = {}
    for name, (_, sm, details, registers, rest) in zip(names, found):
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill", details)))
        stack = int(re.search(r"(\d+) bytes stack frame", details).group(1))
        shared = re.search(r"(\d+) bytes smem", rest)
        usage[name, sm] = int(registers), int(shared.group(1)) if shared else 0, spilled + stack
    return usage


@pytest.fixture(scope="module")
def kernels():
    if not any(path.exists() for path in LOGS):
        pytest.skip("built without CUDA: warnings, spills and registers of kernels were not checked")
    usage = {}
    for path in LOGS:
        text = path.read_text(encoding="utf-8")
        # nvcc's own system headers may cause warnings, but our sources may not.
        assert "warning" not in text.lower(), text[-4000:]
        usage.update(usage_of(text))
    assert len(usage) > 2 * 20, "hardly any kernel found in what nvcc says"
    return usage


def test_static_shared_memory_is_small(kernels):
    """Static shared memory must be at most 16 KiB, because launch() (common.cuh) asks for more than 48 KiB of
    static and dynamic memory together only if the dynamic part is 32 KiB or more."""
    large = [f"{name} on {sm}: {shared} bytes" for (name, sm), (_, shared, _) in kernels.items()
             if shared > 16 << 10]
    assert not large, "\n".join(large)


def read_budget():
    budget = {}
    for line in BUDGET.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, *numbers = line.rsplit(maxsplit=2 * len(ARCHITECTURES))
            budget[name.strip()] = list(map(int, numbers))
    return budget


def write_budget(kernels):
    names = sorted({name for name, _ in kernels})
    with open(BUDGET, "w", encoding="utf-8") as file:
        file.write(HEADER.format(" and then on ".join(ARCHITECTURES)))
        for name in names:
            numbers = [n for sm in ARCHITECTURES for n in kernels[name, sm][:2]]
            file.write(f"{name:<66}" + "".join(f"{n:6}" for n in numbers) + "\n")


def test_no_kernel_spills(kernels):
    spilling = [f"{name} on {sm}: {spilled} bytes" for (name, sm), (_, _, spilled)
                in kernels.items() if spilled]
    assert not spilling, "\n".join(spilling)


def test_kernels_keep_to_their_budget(kernels):
    if os.environ.get("UPDATE_BUDGET"):
        write_budget(kernels)
    budget = read_budget()
    over = []
    for (name, sm), (registers, shared, _) in sorted(kernels.items()):
        if name not in budget:
            over.append(f"{name}: not in {BUDGET.name}")
            continue
        at = 2 * ARCHITECTURES.index(sm)
        # nvcc's releases differ by a few registers. Registers are allocated in steps of 8.
        if registers > (budget[name][at] + 7) // 8 * 8 or shared > budget[name][at + 1]:
            over.append(f"{name} on {sm}: {registers} registers, {shared} bytes of shared memory; "
                        f"budget {budget[name][at]}, {budget[name][at + 1]}")
    gone = sorted(set(budget) - {name for name, _ in kernels})
    assert not over and not gone, "\n".join(over + [f"{name}: no such kernel" for name in gone])


def test_the_main_file_is_cpp_too():
    """train_llama2.cu is compiled as C11, but must also be valid C++20 (which has designated
    initialisers)."""
    done = subprocess.run(["g++", "-std=c++20", "-x", "c++", "-fsyntax-only", "-Wall", "-Wextra", "-Werror",
                           "-fopenmp", "-I.", "-D_GNU_SOURCE", "train_llama2.cu"], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

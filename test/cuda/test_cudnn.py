"""Tests cuDNN's attention without a GPU, if cuDNN is installed. The enumerators that we declare must have the
numbers of cuDNN's headers. cuDNN must make plans for our graphs on GPUs of which it knows only the properties:
it finds kernels, compiles them, and loads them with a driver that does nothing (fake_driver.c)."""
import glob
import json
import os
import pathlib
import re
import subprocess

import pytest

from program import BUILD, ROOT, TIMEOUT

OURS = ROOT / "llmc" / "backend" / "cuda" / "attention" / "cudnn_api.h"
PLACES = ("/usr/local/cuda*/", "/usr/", "/usr/*-linux-gnu/")


def installed(*patterns):
    found = [path for place in PLACES for pattern in patterns for path in sorted(glob.glob(place + pattern))]
    return pathlib.Path(found[0]) if found else None


def compiled(folder, name, *arguments):
    folder.mkdir(exist_ok=True)
    command = ["gcc", "-O1", "-I.", "-D_GNU_SOURCE", *map(str, arguments), "-o", str(folder / name)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


# ---- the header ----

def values(text):
    """Reads enumerators and their numbers."""
    return {name: int(number) for name, number in re.findall(r"(CUDNN_\w+)(?: CUDNN_DEPRECATED_ENUM)?\s*= (\d+)",
                                                             text)}


def test_our_numbers_are_those_of_the_header():
    header = installed("include/cudnn_graph.h", "include/*/cudnn_graph.h")
    if not header:
        pytest.skip("no cudnn_graph.h on this machine")
    theirs, ours = values(header.read_text()), values(OURS.read_text())
    assert len(ours) > 80
    assert ours == {name: theirs.get(name) for name in ours}


def parameters(text):
    return len([p for p in text.split(",") if p.strip() not in ("", "void")])


def test_our_prototypes_are_those_of_the_header():
    header = installed("include/cudnn_graph.h", "include/*/cudnn_graph.h")
    if not header:
        pytest.skip("no cudnn_graph.h on this machine")
    text, prototypes = header.read_text(), OURS.read_text().replace("\\\n", "")
    functions = re.findall(r"F\((\w+), ([\w ]+?\*?), +\((.*?)\)\)", prototypes)
    assert len(functions) == 11
    for name, _, ours in functions:
        theirs = re.search(rf"\bcudnn{name}\((.*?)\);", text, re.DOTALL).group(1)
        assert parameters(ours) == parameters(theirs), name


# ---- plans ----

# The properties that cuDNN needs of a device. Their numbers are those of NVIDIA's data sheets.
DEVICE = {"maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
          "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
          "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048,
          "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "smClockRateKHz": 1980000,
          "memClockRateKHz": 2619000, "l2CacheSize": 52428800, "cudaDeviceId": 0, "driverVer": 13000}
H100 = DEVICE | {"deviceName": "NVIDIA H100", "deviceVer": 900, "multiProcessorCount": 132,
                 "totalGlobalMem": 84942979072, "maxSharedMemoryPerBlockOptin": 232448}
A100 = DEVICE | {"deviceName": "NVIDIA A100", "deviceVer": 800, "multiProcessorCount": 108,
                 "totalGlobalMem": 84942979072, "maxSharedMemoryPerBlockOptin": 166912}


def plans(folder, device, *shapes):
    """Runs cudnn_plans and returns its lines."""
    library = installed("lib/libcudnn.so.9", "lib64/libcudnn.so.9", "targets/*/lib/libcudnn.so.9")
    if not library:
        pytest.skip("no libcudnn.so.9 on this machine")
    compiled(folder, "libcuda.so.1", "-shared", "-fPIC", "test/cuda/fake_driver.c")
    compiled(folder, "plans", "test/cuda/cudnn_plans.c", BUILD / "llmc/backend/cuda/attention/cudnn_plan.o",
             "-ldl", "-lm")
    (folder / "device.json").write_text(json.dumps(device))
    done = subprocess.run([folder / "plans", folder / "device.json", *(str(n) for s in shapes for n in s)],
                          env={**os.environ, "LD_LIBRARY_PATH": f"{folder}:{library.parent}"}, text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)
    if "Could not load symbol" in done.stderr:
        pytest.skip("this cuDNN asks the driver for more than fake_driver.c has: " + done.stderr.splitlines()[0])
    assert done.returncode in (0, 1), done.stderr
    if "expected 9." in done.stdout:
        pytest.skip(done.stdout.strip())
    return done.stdout.splitlines()[1:]


# B, T, H, K, D: heads of 128 as in Llama-2 7B, grouped heads of 64 as in 1.1B, and a length that is no
# multiple of a tile.
SHAPES = ((2, 2048, 32, 32, 128), (2, 2048, 32, 4, 64), (2, 100, 6, 2, 48))


@pytest.mark.parametrize("device", (H100, A100), ids=("H100", "A100"))
def test_cudnn_has_kernels_for_our_graphs(tmp_path, device):
    lines = plans(tmp_path, device, *SHAPES)
    assert len(lines) == len(SHAPES)
    for line in lines:
        assert re.fullmatch(r"\d+ \d+", line), line
        workspace, counted = map(int, line.split())
        assert counted <= workspace <= counted + 4096  # counted: bytes in the memory plan


def test_what_cudnn_cannot_do_is_said(tmp_path):
    old = DEVICE | H100 | {"deviceVer": 700}
    assert plans(tmp_path, old, (1, 64, 4, 4, 64), (1, 64, 4, 4, 12)) == [
        "cuDNN has no kernel for attention of this shape here",
        "head size 12: expected a multiple of 8 up to 128"]

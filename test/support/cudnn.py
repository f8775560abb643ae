"""Builds stand-ins for the library of cuDNN, which tests open instead of it."""
import subprocess

from program import ROOT


def fake_cudnn(folder, *flags):
    """Makes a folder with a libcudnn.so.9 that computes on the CPU (test/cuda/fake_cudnn.c)."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["gcc", "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-I.", "-D_GNU_SOURCE", *flags, "-shared",
                    "-fPIC", "-o", folder / "libcudnn.so.9", "test/cuda/fake_cudnn.c", "-lm"], cwd=ROOT,
                   check=True)
    return folder

"""Tests that make builds again what is built with other flags than before, and nothing else. The compilers
are a script that only writes empty files, so that building everything takes seconds."""
import os
import re
import shutil
import subprocess

import pytest

from program import ROOT

SCRIPT = """#!/bin/sh
case "$*" in *-dumpmachine*) echo x86_64-linux-gnu; exit;; esac
while [ $# -gt 1 ]; do case "$1" in -o|rcs) >"$2";; esac; shift; done
"""
GIVEN = {"MPI": 1, "VERBS": 1, "SECURE": 1, "MEET": 1, "CUDA": 0, "BLAS": "onednn", "REVISION": "one"}


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """A function that runs make with given variables and returns its lines CC, CXX, NVCC, LINK and AR."""
    folder = tmp_path_factory.mktemp("make")
    for name in "gcc", "g++", "nvcc", "clang", "ar", "mpicc":
        (folder / name).write_text(SCRIPT, encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "SANITIZE")}
    environment["PATH"] = f"{folder}:{environment['PATH']}"

    def run(*flags, goals=("all", "liblossynet", "emulated_tests"), **variables):
        given = {"BUILD": folder / "build", "CC": "gcc", "CXX": "g++", "NVCC": "nvcc", "AR": "ar", **GIVEN,
                 **variables}
        done = subprocess.run(["make", *goals, *flags,
                               *(f"{name}={value}" for name, value in given.items())], cwd=ROOT,
                              env=environment, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return re.findall(r"^(?:echo ')?  ((?:CC|CXX|NVCC|LINK|AR) .*?)'?$", done.stdout, re.MULTILINE)

    run.built = run()
    yield run
    shutil.rmtree(folder)


def compiled(lines):
    return {line for line in lines if not re.match("LINK|AR", line)}


def test_the_same_flags_build_nothing(make):
    assert len(compiled(make.built)) > 100 and "CC   train_llama2.cu" in make.built
    assert make("-n") == []
    assert make() == []


@pytest.mark.parametrize("variable", ["MPI=0", "VERBS=0", "SECURE=0", "MEET=0", "BLAS=none", "CC=clang",
                                      "WERROR=", "OPTIMISE=-O1", "SANITIZE=address", "BARE=1"])
def test_other_flags_build_all_that_has_them(make, variable):
    name, value = variable.split("=")
    lines = make("-n", **{name: value})
    emulated = {line for line in compiled(make.built) if "emulated" in line}
    expected = compiled(make.built) - (set() if name in ("WERROR", "SANITIZE") else emulated)
    assert expected - compiled(lines) <= {"CXX  llmc/data/tokenizer.cpp"}  # BARE has another
    assert {"LINK build/train_llama2", "LINK build/tokenize"} <= {
        re.sub(r"/\S*/build/", "build/", line) for line in lines}


def test_make_without_a_goal_builds_the_program(make):
    lines = make("-n", "-B", goals=())
    assert "CC   train_llama2.cu" in lines and [line for line in lines if line.endswith("/tokenize")]


def test_libraries_and_linker_flags_only_link(make):
    for variables in {"LDFLAGS": "-s"}, {"CUDA": 1}:
        lines = make("-n", **variables)
        assert any(re.match("LINK .*/train_llama2$", line) for line in lines)
        assert all("llmc/backend/cuda/" in line for line in compiled(lines))


def test_a_new_revision_compiles_one_file(make):
    lines = make("-n", REVISION="two")
    assert compiled(lines) == {"CC   train_llama2.cu"}
    assert [line for line in lines if re.match("LINK .*/train_llama2$", line)]


def test_flags_that_come_back_build_again(make):
    """The build holds what was built last. This is the last test, since it builds."""
    assert compiled(make(MPI=0)) and make("-n", MPI=0) == []
    assert compiled(make("-n"))

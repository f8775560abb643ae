"""Tests that make builds again what is built with other flags than before, and nothing else. The compilers
are a script that only writes empty files, so that building everything takes seconds."""
import os
import re
import shutil
import subprocess

import pytest

from program import ROOT

SCRIPT = """#!/bin/sh
case "$*" in *-dumpmachine*) echo x86_64-linux-gnu; exit;; *-print-prog-name=*) echo true; exit;; esac
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
                                      "CFLAGS=-O1", "CPPFLAGS=-DNDEBUG", "OPTIMISE=-O1", "SANITIZE=address", "BARE=1"])
def test_other_flags_build_all_that_has_them(make, variable):
    name, value = variable.split("=")
    lines = make("-n", **{name: value})
    emulated = {line for line in compiled(make.built) if "emulated" in line}
    expected = compiled(make.built) - (set() if name == "SANITIZE" else emulated)
    expected -= {line for line in expected if name == "MPI" and "without MPI" in line}
    # BARE has another tokenizer, and CFLAGS are those of C.
    assert expected - compiled(lines) <= {"CXX  llmc/data/tokenizer.cpp"}
    assert {"LINK build/train_llama2", "LINK build/tokenize"} <= {
        re.sub(r"/\S*/build/", "build/", line) for line in lines}


def test_warnings_that_are_errors_build_nothing_again(make):
    assert make("-n", WERROR="-Werror") == []


def test_flags_of_a_packager_come_last(make):
    """The last of contradicting flags counts; sources still find their headers and their standard."""
    done = subprocess.run(["make", "-n", "-B", "CUDA=0", "CC=gcc", "CFLAGS=-O2 -g3", "CPPFLAGS=-DPACKAGED",
                           "LDFLAGS=-Wl,-z,now", "BUILD=nothing"], cwd=ROOT, text=True, capture_output=True, check=True,
                          env={**os.environ, "MAKEFLAGS": ""}).stdout
    command = next(line for line in done.splitlines() if line.startswith("gcc ") and "llmc/util/file.c" in line)
    order = [command.index(f" {word} ") for word in ("-I.", "-DPACKAGED", "-std=c11", "-O3", "-O2")]
    assert order == sorted(order) and " -Werror " not in command
    assert any("-Wl,-z,now" in line and "-o nothing/train_llama2" in line for line in done.splitlines())


def test_a_user_needs_few_lines_of_make():
    assert (ROOT / "Makefile").read_text(encoding="utf-8").count("\n") <= 250


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

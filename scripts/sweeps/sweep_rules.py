"""Builds programs with rules that train_llama2 does not have: others/NAME.patch on a copy of the sources.

The copy is in build/others/NAME. It is made anew for each sweep, and only what changed is compiled.
"""
import os
import shutil
import subprocess

from sweep_settings import SettingsError

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
SOURCES = ("Makefile", "train_llama2.cu", "llmc", "lossynet", "data", "dev")


def program_of(rule):
    """Where the program of a rule is when it is built."""
    return os.path.join(ROOT, "build", "others", rule, "build", "train_llama2")


def copy_sources(folder):
    """Copies the sources, with their times. Programs that were built there stay."""
    os.makedirs(folder, exist_ok=True)
    for name in SOURCES:
        source, copy = os.path.join(ROOT, name), os.path.join(folder, name)
        if os.path.isfile(source):
            shutil.copy2(source, copy)
            continue
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "build"))


def apply_patch(rule, folder):
    patch = os.path.join(HERE, "others", rule + ".patch")
    if not os.path.exists(patch):
        raise SettingsError(f"rule '{rule}': there is no file '{os.path.relpath(patch)}'")
    # The copy is no repository, and git is not to find the one that it lies in.
    done = subprocess.run(["git", "apply", patch], cwd=folder, text=True, capture_output=True, check=False,
                          env={**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(folder)})
    if done.returncode:
        raise SettingsError(f"{os.path.relpath(patch)} does not fit the sources: {last_line(done.stderr)}")


def last_line(text):
    return (text.strip().splitlines() or ["no reason given"])[-1]


def build_rule(rule):
    """Builds the program of a rule."""
    program = program_of(rule)
    folder = os.path.dirname(os.path.dirname(program))
    copy_sources(folder)
    apply_patch(rule, folder)
    done = subprocess.run(["make", "-C", folder, f"-j{len(os.sched_getaffinity(0))}", "BUILD=build",
                           "CUDA=0", "build/train_llama2"], text=True, capture_output=True, check=False)
    if done.returncode:
        raise SettingsError(f"rule '{rule}' does not build: {last_line(done.stderr)}")

"""Asks Hugging Face transformers, in a virtual environment under build/.

Tests compare with stored values of transformers (test/goldens). A few also ask it about models that this
program has just trained. They are skipped unless transformers is there, or HUGGINGFACE=1 has it installed
from PyPI: the environment is that of `make bench` (PyTorch: 2.6 GB to download, 4.4 GB on disk) with
transformers added, and is made once. With HUGGINGFACE=0 they are always skipped.
"""
import atexit
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import venv

import pytest

from program import BUILD, ROOT

VENV = BUILD / "venv-bench"
PYTHON = VENV / "bin" / "python"
ROOM = 8e9  # bytes of free disk that the installation needs
PATIENCE = 1800  # time limit of the installation in seconds
ANSWER = 600  # time limit of an answer in seconds; a hang is a failure


def is_installed(name):
    stamp = VENV / name
    wanted = ROOT / "dev" / ("bench/cpu/requirements-bench.txt" if name == "requirements.txt"
                            else f"goldens/{name}")
    return stamp.exists() and stamp.read_text() == wanted.read_text(), wanted, stamp


def install(name):
    installed, wanted, stamp = is_installed(name)
    if installed:
        return
    print(f"installing {wanted.relative_to(ROOT)} in {VENV}", file=sys.stderr)
    done = subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                           "--timeout", "20", "--retries", "2", "--no-deps", "--no-compile", "-r",
                           wanted],
                          text=True, capture_output=True, timeout=PATIENCE, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        pytest.skip(f"cannot install {wanted.name} from PyPI: {said}")
    stamp.write_text(wanted.read_text())


def environment():
    """Returns the Python that has transformers. Skips the test if it cannot be installed."""
    wanted = os.environ.get("HUGGINGFACE", "")
    if wanted == "0" or not (wanted or is_there()):
        pytest.skip("transformers is not installed in build/ (HUGGINGFACE=1 does so; 4.4 GB): what this "
                    "program trained was compared with stored values only")
    if not is_installed("requirements.txt")[0]:
        shutil.rmtree(VENV, ignore_errors=True)
        BUILD.mkdir(exist_ok=True)
        if shutil.disk_usage(BUILD).free < ROOM:
            pytest.skip(f"less than {ROOM / 1e9:.0f} GB free for transformers and PyTorch")
        try:
            venv.create(VENV, with_pip=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"cannot make a virtual environment: {error}")
    try:
        install("requirements-goldens.txt")  # it is small, so it fails early if PyPI cannot be reached
        install("requirements.txt")
    except subprocess.TimeoutExpired:
        pytest.skip(f"PyPI took more than {PATIENCE} s")
    return PYTHON


def is_there():
    """Whether all packages for environment() are installed already."""
    return is_installed("requirements-goldens.txt")[0] and is_installed("requirements.txt")[0]


@functools.cache
def answering():
    """Returns the process that answers, and its output. All tests share one process, because it takes
    ten seconds of a core to import transformers."""
    printed = tempfile.TemporaryFile("w+")
    process = subprocess.Popen([environment(), ROOT / "test" / "support" / "huggingface_tasks.py"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed,
                               text=True, env={**os.environ, "OMP_NUM_THREADS": "1",
                                               "HF_HUB_OFFLINE": "1"})
    atexit.register(process.communicate)
    return process, printed


def ask(*tasks):
    """Has test/support/huggingface_tasks.py do the tasks. Returns a list of answers."""
    process, printed = answering()
    print(json.dumps(tasks, default=str), file=process.stdin, flush=True)
    ready, _, _ = select.select([process.stdout], [], [], ANSWER)
    answer = process.stdout.readline() if ready else ""
    if not answer:
        process.kill()
        printed.seek(0)
        pytest.fail(printed.read()[-3000:] or f"transformers gave no answer in {ANSWER} s")
    return json.loads(answer)

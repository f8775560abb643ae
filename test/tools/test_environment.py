"""Tests what all scripts in Python do alike: they use the environment of their caller, say which interpreter lacks
a package, and end without a traceback where nobody reads what they print."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

from program import ROOT, TIMEOUT

SCRIPTS = sorted(path for folder in ("scripts", "scripts/sweeps", "data") for path in (ROOT / folder).glob("*.py")
                 if "__main__" in path.read_text(encoding="utf-8"))


def test_the_scripts_are_there():
    assert {"run_report.py", "export.py", "sweep.py", "fetch.py"} <= {path.name for path in SCRIPTS}


def test_the_caller_chooses_the_interpreter():
    paths = [path for folder in ("scripts", "data", "dev", "test") for path in (ROOT / folder).rglob("*.py")]
    first = {path: path.read_text(encoding="utf-8").split("\n", maxsplit=1)[0] for path in paths}
    assert not [path for path, line in first.items() if line.startswith("#!") and line != "#!/usr/bin/env python3"]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_nobody_reads(path):
    """As with `| head`: the reader is gone before the script prints."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, path, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True,
                          timeout=TIMEOUT, check=False)
    os.close(writer)
    assert done.stderr == "", done.stderr


def interpreter(folder, packages):
    """A virtual environment's python3 with these packages alone, which do nothing."""
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=TIMEOUT)
    (place,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for package, text in packages.items():
        (place / f"{package}.py").write_text(text, encoding="utf-8")
    return folder / "venv" / "bin" / "python3"


RUN = '{"event":"run","options":{"steps":1}}\n{"event":"step","step":0,"loss":2.5}\n'
WANDB = """import json, sys
class Run:
    summary = {}
    def log(self, values, step): pass
    def finish(self): print("seen by", sys.executable)
def init(project, name, config): return Run()
"""


def export(run, python, *arguments):
    """Calls export.py as a user does whose shell has the environment of `python`."""
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run([ROOT / "scripts" / "export.py", run, *arguments], env=environment, text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)


def test_an_environment_that_has_the_package(tmp_path):
    (tmp_path / "log.jsonl").write_text(RUN, encoding="utf-8")
    python = interpreter(tmp_path / "has", {"wandb": WANDB})
    done = export(tmp_path, python, "--wandb", "p")
    assert done.returncode == 0 and done.stdout == f"seen by {python}\n", done.stderr


def test_an_environment_that_lacks_the_package(tmp_path):
    (tmp_path / "log.jsonl").write_text(RUN, encoding="utf-8")
    python = interpreter(tmp_path / "lacks", {})
    if subprocess.run(["/usr/bin/python3", "-c", "import wandb"], capture_output=True, check=False).returncode == 0:
        pytest.skip("the system's Python has wandb, which takes over")
    done = export(tmp_path, python, "--wandb", "p")
    assert done.returncode == 1
    assert done.stderr == (f"export.py: {python} lacks the Python package wandb: "
                           f"{python} -m pip install wandb\n")


@pytest.mark.parametrize("path", sorted((ROOT / "dev" / "examples").glob("[!r]*.py")), ids=lambda path: path.name)
def test_an_example_without_its_packages(tmp_path, path):
    """rules.py is no program."""
    if subprocess.run(["/usr/bin/python3", "-c", "import lossynet"], capture_output=True, check=False,
                      cwd=tmp_path).returncode == 0:
        pytest.skip("the system's Python has lossynet, which takes over")
    python = interpreter(tmp_path / "lacks", {})
    done = subprocess.run([python, path], capture_output=True, text=True, timeout=TIMEOUT, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert re.fullmatch(f"{path.name}: {python} lacks the Python packages .*lossynet: {python} -m pip install .* "
                        "./lossynet/python\n", done.stderr), done.stderr


def test_the_systems_python_takes_over(tmp_path):
    """dependencies.sh installs Matplotlib for the system's Python. Another one that is first in the PATH need not
    have it."""
    if subprocess.run(["/usr/bin/python3", "-c", "import matplotlib"], capture_output=True, check=False).returncode:
        pytest.skip("the system's Python has no Matplotlib (scripts/dependencies.sh test)")
    (tmp_path / "log.jsonl").write_text(RUN, encoding="utf-8")
    python = interpreter(tmp_path / "lacks", {})
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run([ROOT / "scripts" / "run_report.py", tmp_path], env=environment, text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert f"picture: {tmp_path}/report.png and report.svg" in done.stdout
    assert pathlib.Path(tmp_path / "report.svg").read_text(encoding="utf-8").count("<text") > 10

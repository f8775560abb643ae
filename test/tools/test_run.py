"""Tests the parts of `make check` and `make test`: test/run.py with a folder of small tests, and the check of
formatting with a file that is not formatted."""
import os
import shutil
import subprocess
import sys

import pytest

from program import ROOT

SMALL = """
import time, pytest
def test_passes(): pass
def test_skipped(): pytest.skip("not here")
@pytest.mark.parametrize("value", [1, 2])
def test_once(value): assert value == {good}
"""


def run(folder, *arguments):
    return subprocess.run([sys.executable, folder / "run.py", "-p", "no:cacheprovider", *arguments],
                          cwd=folder, text=True, capture_output=True, check=False,
                          env={key: value for key, value in os.environ.items()
                               if not key.startswith(("PYTEST_", "TEST_COUNTS"))})


@pytest.fixture(name="folder")
def make_folder(tmp_path):
    """Makes a folder of tests. Their file names decide how conftest.py marks them."""
    (tmp_path / "tests").mkdir()
    for name in ("run.py", "conftest.py"):
        shutil.copy(ROOT / "test" / name, tmp_path / "tests")
    (tmp_path / "tests" / "test_fetch.py").write_text(SMALL.format(good="value"))  # quick
    (tmp_path / "tests" / "test_memory.py").write_text(SMALL.format(good="value"))  # alone
    (tmp_path / "tests" / "test_program.py").write_text(SMALL.format(good="value"))
    return tmp_path / "tests"


def test_both_parts_are_counted(folder):
    done = run(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "9 passed, 0 failed, 3 skipped"
    assert "test_memory.py" in done.stdout.split("tests that are not alone")[1]


@pytest.mark.parametrize("name", ["test_program.py", "test_memory.py"])
def test_a_failure_in_either_part_fails(folder, name):
    (folder / name).write_text(SMALL.format(good="1"))
    done = run(folder)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "8 passed, 1 failed, 3 skipped"


def test_a_file_that_does_not_load_fails(folder):
    (folder / "test_program.py").write_text("import nothing_of_this_name")
    done = run(folder)
    assert done.returncode == 1 and " 0 failed" not in done.stdout.splitlines()[-1]


def test_quick_is_only_that(folder):
    assert run(folder, "--quick").stdout.splitlines()[-1] == "3 passed, 0 failed, 1 skipped"


def test_a_selection_may_be_of_one_part(folder):
    done = run(folder, "-k", "memory and passes")
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "1 passed, 0 failed"
    assert run(folder, "-k", "nothing_of_this_name").returncode == 1


def test_formatting_is_checked(tmp_path):
    if not shutil.which("clang-format"):
        pytest.skip("no clang-format here: that it finds bad formatting was not tried")
    shutil.copy(ROOT / ".clang-format", tmp_path)
    for text, status in (("int f(void) {\n    return 1;\n}\n", 0), ("int f( void ){ return 1 ; }\n", 2)):
        (tmp_path / "file.c").write_text(text)
        done = subprocess.run(["make", "-s", "check-format", f"FORMATTED={tmp_path}/file.c"], cwd=ROOT,
                              text=True, capture_output=True, check=False,
                              env={key: value for key, value in os.environ.items()
                                   if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")})
        assert done.returncode == status, done.stdout + done.stderr

"""Tests the parts of `make check` and `make test`: test/run.py with a folder of small tests, and the check of
formatting with a file that is not formatted."""
import json
import os
import shutil
import subprocess
import sys

import pytest

from priority import ahead, may_go_ahead
from program import ROOT

# The words before a program that may not go ahead of others. (Who is not root may not anyway.)
NOT_AHEAD = [] if os.geteuid() else ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-sys_nice"]
SMALL = """
import pytest
{mark}
def test_passes(): pass
def test_skipped(): pytest.skip("not here")
@pytest.mark.parametrize("value", [1, 2])
def test_once(value): assert value == {good}
"""


def small(good="value", mark=""):
    return SMALL.format(good=good, mark=mark and f"pytestmark = pytest.mark.{mark}")


def run(folder, *arguments, before=()):
    return subprocess.run([*before, sys.executable, folder / "run.py", "-n1", "-p", "no:cacheprovider", *arguments],
                          cwd=folder, text=True, capture_output=True, check=False,
                          env={**{key: value for key, value in os.environ.items()
                                  if not key.startswith(("PYTEST_", "TEST_COUNTS"))},
                               "BUILD": str(folder / "build")})


@pytest.fixture(name="folder")
def make_folder(tmp_path):
    """Makes a folder of tests: one file without a mark, one quick, one that measures."""
    (tmp_path / "test" / "support").mkdir(parents=True)
    for name in ("run.py", "conftest.py", "support/priority.py"):
        shutil.copy(ROOT / "test" / name, tmp_path / "test" / name)
    for name, mark in (("quick", "quick"), ("measures", "measures"), ("program", "")):
        (tmp_path / "test" / f"test_{name}.py").write_text(small(mark=mark))
    return tmp_path / "test"


def test_both_parts_are_counted(folder):
    """Tests that measure run alone where nothing may go ahead of others."""
    done = run(folder, before=NOT_AHEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "9 passed, 0 failed, 3 skipped"
    assert "test_measures.py" in done.stdout.split("tests that are not alone")[1]


@pytest.mark.skipif(not may_go_ahead(), reason="nothing may go ahead of other programs here")
def test_what_measures_goes_ahead_of_others(folder):
    done = run(folder)
    assert done.stdout.splitlines()[-1] == "9 passed, 0 failed, 3 skipped"
    assert "tests that are alone" not in done.stdout
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with ahead():
        assert subprocess.run(["nice"], text=True, capture_output=True, check=True).stdout == "-20\n"
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize("name", ["program", "measures"])
def test_a_failure_in_either_part_fails(folder, name):
    (folder / f"test_{name}.py").write_text(small("1", "measures" if name == "measures" else ""))
    done = run(folder, before=NOT_AHEAD)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "8 passed, 1 failed, 3 skipped"


def test_a_file_that_does_not_load_fails(folder):
    (folder / "test_program.py").write_text("import nothing_of_this_name")
    done = run(folder)
    assert done.returncode == 1 and " 0 failed" not in done.stdout.splitlines()[-1]


def test_quick_is_only_that(folder):
    assert run(folder, "--quick").stdout.splitlines()[-1] == "3 passed, 0 failed, 1 skipped"


def test_a_selection_may_be_of_one_part(folder):
    done = run(folder, "-k", "measures and passes", before=NOT_AHEAD)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "1 passed, 0 failed"
    assert run(folder, "-k", "nothing_of_this_name").returncode == 1


def test_the_longest_group_is_the_first(folder):
    """By the times of the last run, and before there is one by marks. A test of `spread` files is a
    group. A C program says in its head comment what it takes."""
    busy = r"""
import subprocess, sys, time, pytest
pytestmark = pytest.mark.{mark}
def test_waits(): time.sleep(0.5)
def test_computes():
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
"""
    (folder / "test_busy.py").write_text(busy.format(mark="spread"))
    (folder / "test_marked.py").write_text(small(mark="takes(5)"))
    (folder / "test_unit.c").write_text("/* A program. Takes 20 s. */ cmocka_unit_test(test_one)")

    def order():
        said = run(folder, "--collect-only", "-m", "not alone").stdout
        return [line.split("@")[0] for line in said.splitlines() if "::" in line]

    first = order()
    assert first[0] == "test_unit.c::test_one" and first[4] == "test_marked.py::test_passes"
    assert run(folder, "-k", "busy").returncode == 0
    kept = json.loads((folder / "build" / "test_times.json").read_text())
    wall, cpu = kept["test_busy.py::test_computes"]
    assert cpu >= 0.3 and wall > 0  # the child's time
    wall, cpu = kept["test_busy.py::test_waits"]
    assert wall >= 0.5 and cpu < 0.3
    assert len(kept) == 2
    (folder / "build" / "test_times.json").write_text(json.dumps(
        {**kept, "test_busy.py::test_computes": [30, 1], "test_marked.py::test_passes": [25, 1]}))
    again = order()
    assert again[:2] == ["test_busy.py::test_computes", "test_marked.py::test_passes"]
    table = run(folder, "--times").stdout.splitlines()
    assert table[0].split() == ["file", "tests", "wall", "s", "CPU", "s", "sanitized"]
    assert table[1].split()[:3] == ["all", "3", "55.5"] and len(table) == 4


def test_formatting_is_checked(tmp_path):
    shutil.copy(ROOT / ".clang-format", tmp_path)
    for text, status in (("int f(void) {\n    return 1;\n}\n", 0), ("int f( void ){ return 1 ; }\n", 2)):
        (tmp_path / "file.c").write_text(text)
        done = subprocess.run(["make", "-s", "check-format", f"FORMATTED={tmp_path}/file.c"], cwd=ROOT,
                              text=True, capture_output=True, check=False,
                              env={key: value for key, value in os.environ.items()
                                   if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")})
        if "was not checked" in done.stdout:
            pytest.skip(f"{done.stdout.strip()}; that it finds bad formatting was not tried")
        assert done.returncode == status, done.stdout + done.stderr

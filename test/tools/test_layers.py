"""Tests that dev/check_layers.py finds upward includes, an upward call, and a struct that is too long."""
import shutil
import subprocess
import sys

import pytest

from program import BUILD, ROOT

INCLUDE = '#include "lossynet/algorithm/algorithm.h"\n'
CALL = ("int lossynet_broadcast_end(void *net);\n"
        "int planted(void *net);\n"
        "int planted(void *net) { return lossynet_broadcast_end(net); }\n")


def check(root, build):
    return subprocess.run([sys.executable, ROOT / "dev/check_layers.py", "--root", root, "--build",
                           build, "--", "gcc", "-I.", "-D_GNU_SOURCE"], text=True,
                          capture_output=True, check=False)


@pytest.fixture(name="copy")
def copy_(tmp_path):
    """A copy of the sources and objects, in which a test can make faults."""
    for house in ("lossynet", "llmc"):
        shutil.copytree(ROOT / house, tmp_path / house)
    for path in (BUILD / "lossynet").rglob("*.o"):
        if (ROOT / path.relative_to(BUILD).with_suffix(".c")).exists():
            to = tmp_path / "build" / path.relative_to(BUILD)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    return tmp_path


def test_as_it_is(copy):
    done = check(copy, copy / "build")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_planted_include(copy):
    source = copy / "lossynet/transport/send.c"
    source.write_text(INCLUDE + source.read_text(encoding="utf-8"), encoding="utf-8")
    done = check(copy, copy / "build")
    assert done.returncode == 1
    assert ("lossynet/transport/send.c includes lossynet/algorithm/algorithm.h: transport must not "
            "know it\n") in done.stdout


def test_planted_includes_of_llmc(copy):
    planted = {"backend/cuda/device.cu": "llmc/model/config.h", "checkpoint/resume.h": "llmc/memory/worker.h",
               "model/config.c": "lossynet/lossynet.h", "options/options.c": "llmc/cli/validate.h"}
    for user, used in planted.items():
        source = copy / "llmc" / user
        source.write_text(f'#include "{used}"\n' + source.read_text(encoding="utf-8"), encoding="utf-8")
    done = check(copy, copy / "build")
    assert (done.returncode, done.stdout.splitlines()) == (
        1, [f"llmc/{user} includes {used}: {user.split('/')[0]} must not know it"
            for user, used in planted.items()])


def test_planted_call(copy):
    source = copy / "lossynet/transport/planted.c"
    source.write_text(CALL, encoding="utf-8")
    subprocess.run(["gcc", "-c", source, "-o", copy / "build/lossynet/transport/planted.o"],
                   check=True)
    done = check(copy, copy / "build")
    assert done.returncode == 1
    assert done.stdout == ("lossynet/transport/planted.c calls lossynet_broadcast_end of "
                           "lossynet/algorithm/parameter.c: transport must not know it\n")


def test_planted_struct(copy):
    header = copy / "lossynet/loss/loss.h"
    text = header.read_text(encoding="utf-8")
    four = "    int a, *b; /* c; d */\n    void (*e)(int f, int g);\n    struct { int h, i; } j;\n"

    def plant(more):
        names = ", ".join(f"k{i}[2]" for i in range(more))
        header.write_text(f"{text}struct planted {{\n{four}    int {names};\n}};\n",
                          encoding="utf-8")
        return check(copy, copy / "build")

    assert plant(11).stdout == ""
    done = plant(12)
    assert done.returncode == 1
    assert done.stdout == ("lossynet/loss/loss.h: struct planted has 16 members: expected at most "
                           "15; group those that belong together\n")

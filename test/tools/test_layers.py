"""Tests that dev/check_layers.py finds upward includes, an upward call, files that call each other in a circle, and
a struct that is too long."""
import pathlib
import shutil
import subprocess
import sys

import pytest

from program import BUILD, ROOT

CALL = ("int lossynet_broadcast_end(void *net);\n"
        "int planted(void *net);\n"
        "int planted(void *net) { return lossynet_broadcast_end(net); }\n")
ROUND = {"lossynet/loss/round.c": "int there(void);\nint here(void);\nint here(void) { return there(); }\n",
         "lossynet/loss/way.c": "int here(void);\nint there(void);\nint there(void) { return here(); }\n"}
INCLUDES = {"lossynet/transport/transport.c": "lossynet/algorithm/algorithm.h",
            "lossynet/transport/peer/send.c": "lossynet/transport/exchange/exchange.h",
            "llmc/backend/cuda/device.cu": "llmc/model/config.h", "llmc/checkpoint/resume.h": "llmc/memory/worker.h",
            "llmc/model/config.c": "lossynet/lossynet.h", "llmc/options/options.c": "llmc/cli/validate.h"}


def check(root):
    return subprocess.run([sys.executable, ROOT / "dev/check_layers.py", "--root", root, "--build",
                           root / "build"], text=True, capture_output=True, check=False)


def compile_(copy, source):
    """Compiles a source of the copy, as the Makefile does."""
    subprocess.run(["gcc", "-I.", "-D_GNU_SOURCE", "-MMD", "-MP", "-c", source, "-o",
                    copy / "build" / pathlib.Path(source).with_suffix(".o")], cwd=copy, check=True)


@pytest.fixture(name="copy", scope="module")
def copy_(tmp_path_factory):
    """A copy of the sources and objects, in which faults can be made."""
    copy = tmp_path_factory.mktemp("copy")
    for house in ("lossynet", "llmc"):
        shutil.copytree(ROOT / house, copy / house)
    for path in (BUILD / "lossynet").rglob("*.[do]"):
        if (ROOT / path.relative_to(BUILD).with_suffix(".c")).exists():
            to = copy / "build" / path.relative_to(BUILD)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
    return copy


def members(name, count):
    """A struct whose members are written in different ways."""
    names = ", ".join(f"k{i}[2]" for i in range(count - 4))
    return (f"struct {name} {{\n    int a, *b; /* c; d */\n    void (*e)(int f, int g);\n"
            f"    struct {{ int h, i; }} j;\n    int {names};\n}};\n")


@pytest.fixture(name="found", scope="module")
def found_(copy):
    """What is found before any fault is made, and then the lines that are found of all faults at once."""
    before = check(copy)
    for user, used in INCLUDES.items():
        text = (copy / user).read_text(encoding="utf-8")
        (copy / user).write_text(f'#include "{used}"\n{text}', encoding="utf-8")
    (copy / "lossynet/transport/planted.c").write_text(CALL, encoding="utf-8")
    for source, text in ROUND.items():
        (copy / source).write_text(text, encoding="utf-8")
    for source in ("lossynet/transport/planted.c", *ROUND, *(user for user in INCLUDES if user.startswith("lossynet/"))):
        compile_(copy, source)
    header = copy / "lossynet/loss/loss.h"
    header.write_text(header.read_text(encoding="utf-8") + members("just_right", 15) + members("planted", 16),
                      encoding="utf-8")
    done = check(copy)
    assert done.returncode == 1
    return before, done.stdout.splitlines()


def test_as_it_is(found):
    before, _ = found
    assert (before.returncode, before.stdout, before.stderr) == (0, "", "")


@pytest.mark.parametrize("user", INCLUDES)
def test_planted_include(found, user):
    parts = user.split("/")[1:-1]
    folder = "/".join(parts if user.startswith("lossynet") else parts[:1])
    assert f"{user} includes {INCLUDES[user]}: {folder} must not know it" in found[1]


def test_planted_call(found):
    assert ("lossynet/transport/planted.c calls lossynet_broadcast_end of lossynet/algorithm/parameter.c: "
            "transport must not know it") in found[1]


def test_planted_circle(found):
    line = next(line for line in found[1] if line.startswith("files call each other in a circle: "))
    assert all(source in line for source in ROUND)


def test_planted_struct(found):
    assert ("lossynet/loss/loss.h: struct planted has 16 members: expected at most 15; group those that "
            "belong together") in found[1]


def test_nothing_else_is_found(found):
    """Beside what algorithm.h includes, which transport.c then includes, too."""
    assert len([line for line in found[1] if not line.startswith("lossynet/transport/transport.c")]) == len(INCLUDES) + 2

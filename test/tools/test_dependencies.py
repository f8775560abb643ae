"""Compares the programs and Python modules that the tests use with the packages that scripts/dependencies.sh
installs for them, so that nothing is missing on a machine that has only these."""
import ast
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from program import ROOT

if not shutil.which("dpkg-query"):
    pytest.skip("this is neither Debian nor Ubuntu: packages were not compared", allow_module_level=True)

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
BARE = {"git", "make", "apt"}  # what README expects, with the shell and what is essential
# Who uses these finds them in another place, or is skipped.
ELSEWHERE = {"nvcc", "curl", "pip", "torchrun", "sudo"}
MODULES_ELSEWHERE = {"lossynet", "nvidia", "safetensors", "tokenizers", "torch", "transformers"}  # virtual environments
CALLS = {".py": [r'subprocess\.\w+\(\s*\[\s*"([\w.+-]+)"', r'shutil\.which\("([\w.+-]+)"'],
         ".c": [r'(?:system|popen|exec[lv]p)\("([\w.+-]+)'], ".sh": [r"command -v ([\w.+-]+)"]}


def packages_installed():
    """{package: (names of which it needs one each, whether every system has it)}, also by the names that it provides"""
    form = "${Package}\t${Pre-Depends}, ${Depends}\t${Essential} ${Priority}\t${Provides}\n"
    found, provided = {}, {}
    for line in subprocess.run(["dpkg-query", "-W", "-f", form], text=True, check=True, capture_output=True,
                               env={**os.environ, "LC_ALL": "C"}).stdout.splitlines():
        name, needs, kind, provides = line.split("\t")
        needs = [re.findall(r"(?:^|\|)\s*([\w.+-]+)", need) for need in needs.split(",")]
        found[name] = ([need for need in needs if need], kind in ("yes required", "no required"))
        for other in re.findall(r"(?:^|,)\s*([\w.+-]+)", provides):
            provided.setdefault(other, name)
    return {**{other: found[name] for other, name in provided.items()}, **found}


def installs(purpose):
    """The packages that a bare machine has after scripts/dependencies.sh."""
    known = packages_installed()
    listed = subprocess.run(["scripts/dependencies.sh", purpose, "--list"], cwd=ROOT, text=True, check=True,
                            capture_output=True).stdout.split()
    assert len(listed) > 20
    todo = [*listed, *BARE, *(name for name, (_, everywhere) in known.items() if everywhere)]
    has = set()
    while todo:
        name = todo.pop()
        if name not in has and name in known:
            has.add(name)
            todo += [next((other for other in need if other in known), need[0]) for need in known[name][0]]
    return has


def owners(paths):
    """{file: the package that it belongs to}; files of no package are missing"""
    names = {path: (os.path.realpath(path), path, path.replace("/usr", "", 1)) for path in paths}
    shown = subprocess.run(["dpkg-query", "-S", *{name for all_names in names.values() for name in all_names}],
                           text=True, capture_output=True, check=False).stdout
    packages = {file: package for package, file in re.findall(r"^([\w.+-]+).*?: (/.*)$", shown, re.M)}
    return {path: packages[name] for path, all_names in names.items() for name in all_names if name in packages}


def used(files):
    """({program: a file that uses it}, {module: a file that imports it})"""
    programs, modules = {}, {}
    own = {path.stem for path in ROOT.glob("*/**/*.py")} | {path.name for path in ROOT.glob("*/**/") if path.is_dir()}
    for path in files:
        text = path.read_text(encoding="utf-8")
        for pattern in CALLS.get(path.suffix, ()):
            programs.update({name: path for name in re.findall(pattern, text)})
        for line in re.findall(r"^.*(?:TOOLS = |shutil\.which\(name).*", text, re.M):
            programs.update({name: path for name in re.findall(r'"([\w.+-]+)"', line)})
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules.update({name.split(".")[0]: path for name in names})
    return programs, {name: path for name, path in modules.items() if name not in sys.stdlib_module_names | own}


def files_of(purpose):
    tests = [path for path in sorted((ROOT / "test").rglob("*")) if path.suffix in CALLS]
    if purpose == "test":
        testbed = [path for path in ROOT.glob("dev/testbed/**/*") if path.suffix in CALLS]
        return [*tests, *testbed, *ROOT.glob("scripts/**/*.sh"), *ROOT.glob("data/*.sh"),
                ROOT / "lossynet" / "python" / "setup.py"]
    quick = {".py": lambda text: "pytest.mark.quick" in text,
             ".c": lambda text: not re.search(r"\bTakes \d{2,} s\b", text), ".sh": lambda _: False}
    return [path for path in tests if quick[path.suffix](path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("purpose", ["check", "test"])
def test_what_tests_use_is_installed_for_them(purpose):
    programs, modules = used(path for path in files_of(purpose) if path.stem != "test_dependencies")
    places = {name: shutil.which(name, path=PATH) for name in set(programs) - ELSEWHERE}
    for name in set(modules) - MODULES_ELSEWHERE:
        spec = importlib.util.find_spec(name)
        places[name] = spec.origin if spec else "no file here"
    has, package = installs(purpose), owners(filter(None, places.values()))
    users = {**programs, **modules}
    missing = [f"{name}, which {users[name].relative_to(ROOT)} uses; it is of package {package.get(place)}"
               for name, place in sorted(places.items()) if place and package.get(place) not in has]
    assert not missing, "\n".join([f"scripts/dependencies.sh {purpose} does not install:", *missing])


def test_packages_of_other_systems(tmp_path):
    """Other processors have other packages, and without apt-get what to install is said."""
    for name in "cat", "cut", "sed", "sort":
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "uname").write_text("#!/bin/sh\necho aarch64\n")
    (tmp_path / "uname").chmod(0o755)
    done = subprocess.run(["/bin/sh", "scripts/dependencies.sh", "build"], cwd=ROOT, env={"PATH": str(tmp_path)},
                          text=True, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("No apt-get here."), done
    assert "  libopenblas-dev\n" in done.stdout and "libdnnl-dev" not in done.stdout and "ns3" not in done.stdout


@pytest.mark.parametrize("arguments, code, said", [
    (["14"], 2, "got '14'; usage: "),
    (["--as", "nobody"], 2, "--as takes root or user, got 'nobody'"),
    (["12"], 77, "no bare machine: "),
])
def test_bare_machines_that_cannot_be_made(tmp_path, arguments, code, said):
    for name in "dirname", "id":
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run(["/bin/bash", "dev/fresh_machine.sh", *arguments], cwd=ROOT, env={"PATH": str(tmp_path)},
                          text=True, capture_output=True, check=False)
    assert done.returncode == code and said in done.stderr and len(done.stderr.splitlines()) == 1, done

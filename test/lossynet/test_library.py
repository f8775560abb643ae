"""Tests lossynet as other programs use it: installed, found by pkg-config, and used by
dev/examples/average.c."""
import os
import re
import shutil
import socket
import subprocess

import pytest

from program import BUILD, ROOT, TIMEOUT

STEPS = 5
WITH_MPI = bool(shutil.which("mpicc"))


def shell(command, **environment):
    done = subprocess.run(command, shell=True, cwd=ROOT, env={**os.environ, **environment}, text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def make(target, **variables):
    words = " ".join(f"{name}='{value}'" for name, value in variables.items())
    # Without this, the variables of `make test` would be inherited.
    return shell(f"make --no-print-directory {target} BUILD='{BUILD}' {words}",
                 MAKEFLAGS="", MAKEOVERRIDES="", MFLAGS="")


@pytest.fixture(name="prefix", scope="module")
def fixture_prefix(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("installed")
    before = os.umask(0o077)  # of a careful administrator
    make("install", PREFIX=prefix)
    os.umask(before)
    return prefix


def test_what_is_installed_is_for_everybody(prefix):
    assert not [path for path in (prefix / "lib").rglob("*") if path.stat().st_mode & 0o444 != 0o444]


def test_a_prefix_without_a_root_is_refused(tmp_path):
    done = subprocess.run(["make", f"BUILD={BUILD}", "install", "PREFIX=~/here", f"DESTDIR={tmp_path}/"], cwd=ROOT,
                          text=True, capture_output=True, check=False,
                          env={**os.environ, "MAKEFLAGS": "", "MAKEOVERRIDES": "", "MFLAGS": ""})
    assert done.returncode == 2 and "make install: ~/here" in done.stderr and not files(tmp_path), done.stderr


def header_version():
    text = (ROOT / "lossynet" / "lossynet.h").read_text(encoding="utf-8")
    return re.search(r'^#define LOSSYNET_VERSION "([0-9]+\.[0-9]+\.[0-9]+)"$', text, re.M)[1]


def declared(header):
    """The functions that a header declares."""
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", header.read_text(encoding="utf-8"), flags=re.S | re.M)
    return set(re.findall(r"^\w[\w\s\*]*?\b(lossynet_\w+)\(", text, re.M))


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_install_and_uninstall(tmp_path):
    version = header_version()
    make("install", PREFIX="/opt/it", LIBDIR="/opt/it/lib/some", DESTDIR=tmp_path)
    root = tmp_path / "opt/it"
    names = ["lossynet"] + ["lossynet_mpi"] * WITH_MPI
    soname = version.rsplit(".", 1)[0]
    assert files(root) == {
        "bin/train_llama2", "bin/tokenize", "include/lossynet.h", "include/lossynet_trainer.h",
        *(f"share/man/man1/{name}.1" for name in ("train_llama2", "tokenize") if shutil.which("help2man")),
        *(f"lib/some/{file}" for name in names for file in (
            f"pkgconfig/{name}.pc", f"lib{name}.a", f"lib{name}.so", f"lib{name}.so.{soname}",
            f"lib{name}.so.{version}"))}
    for name in names:
        library = shell(f"readelf -d '{root}/lib/some/lib{name}.so'")
        assert f"Library soname: [lib{name}.so.{soname}]" in library
        assert ("libmpi" in library) == (name == "lossynet_mpi")
        package = (root / f"lib/some/pkgconfig/{name}.pc").read_text(encoding="utf-8")
        assert "libdir=/opt/it/lib/some\n" in package and f"Version: {version}\n" in package
    assert shell(f"'{root}/bin/train_llama2' --version").startswith("train_llama2 ")
    make("uninstall", PREFIX="/opt/it", LIBDIR="/opt/it/lib/some", DESTDIR=tmp_path)
    assert files(tmp_path) == set()


@pytest.mark.skipif(not shutil.which("help2man"), reason="no help2man here, which makes manual pages of --help")
def test_the_manual_page_has_every_option(prefix):
    page = (prefix / "share/man/man1/train_llama2.1").read_text(encoding="utf-8").replace("\\-", "-")
    options = [line.split("\t")[0] for line in shell(f"'{BUILD}/train_llama2' --help table").splitlines()]
    assert len(options) > 80 and not [name for name in options if f"--{name}" not in page]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git here, which makes the archive")
def test_an_archive_knows_its_revision_without_git(tmp_path):
    shell(f"git archive HEAD | tar -x -C '{tmp_path}'")
    said = subprocess.run(["make", "-n", "-B", "CUDA=0", "BUILD=b", "b/train_llama2.o"], cwd=tmp_path, text=True, check=True,
                          capture_output=True, env={**os.environ, "MAKEFLAGS": ""}).stdout
    assert f"-DGIT_REVISION='\"{shell('git rev-parse --short HEAD').strip()}" in said


def test_shared_library_exports_what_the_headers_declare(prefix):
    names = shell(f"nm -D --defined-only '{prefix}/lib/liblossynet.so'")
    exported = {line.split()[2].partition("@@")[0] for line in names.splitlines() if " A " not in line}
    most, trainers = (declared(prefix / "include" / f"{name}.h") for name in ("lossynet", "lossynet_trainer"))
    assert "lossynet_open" in most and len(most) > 30 and "lossynet_state_save" in trainers
    assert exported == most | trainers and not most & trainers


def test_the_archive_has_no_other_names_than_the_headers(prefix):
    """A program may have functions udp_send and ln_log of its own."""
    names = [line.split() for line in shell(f"nm -g --defined-only '{prefix}/lib/liblossynet.a'").splitlines()]
    names = {words[2] for words in names if len(words) == 3 and words[1] in "TDBR"}
    assert names == declared(prefix / "include/lossynet.h") | declared(prefix / "include/lossynet_trainer.h")


def test_the_header_begins_with_what_the_example_calls():
    """dev/examples/average.c needs no function but the first dozen."""
    text = (ROOT / "lossynet" / "lossynet.h").read_text(encoding="utf-8")
    first = re.findall(r"^\w[\w\s\*]*?\b(lossynet_\w+)\(", text.split("/* ---- settings")[0], re.M)
    example = (ROOT / "dev" / "examples" / "average.c").read_text(encoding="utf-8")
    assert len(first) <= 13 and set(re.findall(r"\b(lossynet_\w+)\(", example)) <= set(first)


@pytest.mark.parametrize("compiler", ["cc -std=c11", "c++ -std=c++17 -x c++"])
@pytest.mark.parametrize("header", ["lossynet", "lossynet_trainer"])
def test_header_stands_alone(prefix, tmp_path, compiler, header):
    source = tmp_path / "alone.c"
    source.write_text(f'#include <{header}.h>\nint main(void) {{ return !lossynet_version()[0]; }}\n',
                      encoding="utf-8")
    shell(f"{compiler} -Wall -Wextra -Werror -I'{prefix}/include' -c '{source}' -o '{tmp_path}/alone.o'")


def compile_example(prefix, program, kind):
    flags = shell(f"pkg-config --cflags --libs {'--static' if kind == 'static' else ''} lossynet",
                  PKG_CONFIG_PATH=f"{prefix}/lib/pkgconfig").strip()
    if kind == "static":
        flags = flags.replace("-llossynet", f"'{prefix}/lib/liblossynet.a'")
    shell(f"cc -std=c11 -Wall -Wextra -Werror dev/examples/average.c {flags} -o '{program}'")
    return {**os.environ, "LD_LIBRARY_PATH": f"{prefix}/lib", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_two_processes_average(prefix, tmp_path, kind):
    program = tmp_path / "average"
    environment = compile_example(prefix, program, kind)
    libraries = subprocess.run(["ldd", program], env=environment, text=True, capture_output=True,
                               check=True).stdout
    assert (f"{prefix}/lib/liblossynet.so" in libraries) == (kind == "shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Both ranks run as in two terminals. The second is started first, and waits.
    ranks = [subprocess.Popen([program, str(rank), address], env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in (1, 0)]
    for rank in ranks:
        output, errors = rank.communicate(timeout=TIMEOUT)
        assert rank.returncode == 0, errors
        steps = re.findall(r"step (\d): (\d+) of (\d+) packets arrived, ([\d.]+)% of", output)
        assert [int(step) for step, *_ in steps] == list(range(STEPS))
        assert f"of {steps[0][2]} packets" in (ROOT / "lossynet/README.md").read_text(encoding="utf-8")
        for _, arrived, expected, averaged in steps:
            # On a busy machine, more than the injected 10% may be lost.
            assert 0.5 < int(arrived) / int(expected) < 0.93
            # Half of the elements arrive if one packet arrives, the others if two do: (0.9 + 0.81) / 2.
            assert 50 < float(averaged) < 89


def test_example_is_short():
    lines = (ROOT / "dev/examples/average.c").read_text(encoding="utf-8").count("\n")
    assert lines <= 60


def test_example_without_the_other_rank_says_what_it_expects(prefix, tmp_path):
    environment = compile_example(prefix, tmp_path / "average", "shared")
    done = subprocess.run([tmp_path / "average", "2"], env=environment, text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 1
    assert "rank 2 of 2" in done.stderr and "expected 0 <= rank < ranks" in done.stderr

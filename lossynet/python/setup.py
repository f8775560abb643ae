"""Builds liblossynet.so with the project's Makefile, without MPI, and puts it into the package.

An sdist holds the C sources in sources/. Nothing in the library depends on the version of Python (ctypes), so a
wheel is for all of them, on this platform. Where this folder cannot be written, everything is built in a temporary one.
"""
import atexit
import os
import pathlib
import re
import shutil
import subprocess
import sysconfig
import tempfile

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE / "sources" if (HERE / "sources").exists() else HERE.parents[1]
HEADER = ROOT / "lossynet" / "lossynet.h"


def make(build):
    missing = [program for program in ("make", os.environ.get("CC", "gcc")) if not shutil.which(program)]
    if missing:
        raise SystemExit(f"lossynet: {' and '.join(missing)} not found, which the library is built with: expected "
                         "a C compiler and make (Debian: apt install gcc make), or a wheel")
    relative = os.path.relpath(build, ROOT)  # make takes no path with a space, such as that of the clone
    done = subprocess.run(["make", "-j4", "-C", ROOT, "MPI=0", "WERROR=", f"BUILD={relative}", "liblossynet"],
                          check=False)
    if done.returncode:
        raise SystemExit(f"lossynet: make ended with {done.returncode}: the lines above say why")


class BuildLibrary(build_py):
    """Copies the modules, and the library beside them."""

    def run(self):
        super().run()
        build = pathlib.Path(self.get_finalized_command("build").build_temp).resolve()
        make(build)
        package = HERE if self.editable_mode else pathlib.Path(self.build_lib)
        shutil.copy2(build / "liblossynet" / "liblossynet.so", package / "lossynet")


class WithSources(sdist):
    """Takes the C sources in."""

    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        sources = pathlib.Path(base_dir, "sources")
        shutil.copytree(ROOT / "lossynet", sources / "lossynet", ignore=shutil.ignore_patterns("python", "*.md"))
        shutil.copy2(ROOT / "Makefile", sources)


options = {"bdist_wheel": {"plat_name": sysconfig.get_platform()}}  # py3-none-linux_x86_64
if not os.access(HERE, os.W_OK):
    elsewhere = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, elsewhere, ignore_errors=True)
    options |= {"egg_info": {"egg_base": elsewhere}, "build": {"build_base": elsewhere}}
if not HEADER.exists():
    raise SystemExit(f"{HEADER} is missing: expected `pip install ./lossynet/python` in the repository")
setup(version=re.search(r'LOSSYNET_VERSION "([^"]+)"', HEADER.read_text(encoding="utf-8"))[1],
      license="MIT", cmdclass={"build_py": BuildLibrary, "sdist": WithSources}, options=options)

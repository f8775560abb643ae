"""Builds liblossynet.so with the project's Makefile, without MPI, and puts it into the package."""
import os
import pathlib
import re
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ROOT / "lossynet" / "lossynet.h"


class BuildLibrary(build_py):
    """Copies the modules, and the library beside them."""

    def run(self):
        super().run()
        build = pathlib.Path(self.get_finalized_command("build").build_temp).resolve()
        relative = os.path.relpath(build, ROOT)  # make takes no path with a space, such as that of the clone
        subprocess.run(["make", "-j4", "-C", ROOT, "MPI=0", "WERROR=", f"BUILD={relative}", "liblossynet"],
                       check=True)
        package = ROOT / "lossynet/python" if self.editable_mode else pathlib.Path(self.build_lib)
        shutil.copy2(build / "liblossynet" / "liblossynet.so", package / "lossynet")


class Binary(Distribution):
    """A package that is not the same on every platform."""

    def has_ext_modules(self):
        return True


if not HEADER.exists():
    raise SystemExit(f"{HEADER} is missing: expected `pip install ./lossynet/python` in the repository")
setup(version=re.search(r'LOSSYNET_VERSION "([^"]+)"', HEADER.read_text(encoding="utf-8"))[1],
      license="MIT", cmdclass={"build_py": BuildLibrary}, distclass=Binary)

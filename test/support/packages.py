"""Small Python packages from PyPI that a test needs, in folders of their own under build/."""
import os
import shutil
import subprocess
import sys

import pytest

from program import BUILD, ROOT


def environment_with(name):
    """Returns an environment in which Python has the packages of dev/goldens/requirements-NAME.txt. They are
    installed once; the test is skipped where PyPI cannot be reached."""
    wanted, folder = ROOT / "dev" / "goldens" / f"requirements-{name}.txt", BUILD / name
    stamp = folder / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
                               "--timeout", "20", "--retries", "1", "--no-deps", "--no-compile", "--target",
                               folder, "-r", wanted], text=True, capture_output=True, check=False)
        if done.returncode:
            shutil.rmtree(folder, ignore_errors=True)
            pytest.skip(f"cannot install {name} from PyPI: "
                        + (done.stderr.strip().splitlines() or ["no reason given"])[-1])
        shutil.copy(wanted, stamp)
    return {**os.environ, "PYTHONPATH": str(folder)}

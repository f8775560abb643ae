"""Finds the Python packages of a script: in the environment of its caller, or else in the system's Python, for
which scripts/dependencies.sh installs them."""
import importlib
import os
import subprocess
import sys

SYSTEM = "/usr/bin/python3"


def lacking(packages):
    """Those of the packages that this Python cannot import."""
    missing = []
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    return missing


def system_has(packages):
    """Whether the system's Python is another one and has the packages."""
    if not os.access(SYSTEM, os.X_OK) or sys.prefix == "/usr":
        return False
    return subprocess.run([SYSTEM, "-c", "import " + ", ".join(packages)], check=False,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def require(*packages, names=None, target=None):
    """Returns if all packages can be imported here. Otherwise the system's Python runs the script, if it has
    them; else the script ends with one line. names: what pip calls the packages. target: the target of
    dependencies.sh that installs them."""
    missing = lacking(packages)
    if not missing:
        return
    if system_has(packages):
        sys.stdout.flush()
        os.execv(SYSTEM, [SYSTEM, *sys.argv])
    what = " ".join(names or missing)
    install = f"{sys.executable} -m pip install {what}"
    if sys.prefix == sys.base_prefix:  # Debian's Python installs by pip only in an environment
        install = f"python3 -m venv ~/venv && . ~/venv/bin/activate && pip install {what}"
    if target:
        install = f"scripts/dependencies.sh {target}, or {install}"
    sys.exit(f"{os.path.basename(sys.argv[0])}: {sys.executable} lacks the Python package{'s' * (len(missing) > 1)} "
             f"{', '.join(names or missing)}: {install}")

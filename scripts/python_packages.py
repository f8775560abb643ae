"""Finds the Python packages of a script: in the environment of its caller, or else in the system's Python, for
which scripts/dependencies.sh installs them."""
import importlib
import os
import subprocess
import sys

SYSTEM = "/usr/bin/python3"
PIP = {"lossynet": "./lossynet/python"}  # what pip installs where its name is another one


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
    return subprocess.run([SYSTEM, "-c", "import " + ", ".join(packages)], check=False, cwd="/",  # folders are packages
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def refuse(missing, target=None):
    """Ends the script with one line. target: the target of dependencies.sh that installs the packages."""
    missing = [package.split(".", maxsplit=1)[0] for package in missing]
    what = " ".join(PIP.get(package, package) for package in missing)
    install = f"{sys.executable} -m pip install {what}"
    if sys.prefix == sys.base_prefix:  # Debian's Python installs by pip only in an environment
        install = f"python3 -m venv ~/venv && . ~/venv/bin/activate && pip install {what}"
    if target:
        install = f"scripts/dependencies.sh {target}, or {install}"
    sys.exit(f"{os.path.basename(sys.argv[0])}: {sys.executable} lacks the Python package{'s' * (len(missing) > 1)} "
             f"{', '.join(missing)}: {install}")


def require(*packages, target=None):
    """Returns if all packages can be imported here. Otherwise the system's Python runs the script, if it has
    them; else the script ends."""
    missing = lacking(packages)
    if not missing:
        return
    if system_has(packages):
        sys.stdout.flush()
        os.execv(SYSTEM, [SYSTEM, *sys.argv])
    refuse(missing, target)

#!/usr/bin/env python3
"""Checks that lossynet's folders include and call downward only (lossynet/README.md draws them).

    make check-layers

Includes are what the compiler reads (gcc -MM), calls what its objects name (nm). Each line of output
is one violation: FILE includes, or calls, what it must not know. Exit status 1 when there is one.
"""
import argparse
import pathlib
import subprocess
import sys

# What each folder may use beside itself. "" is lossynet/ itself: the public interface.
USES = {
    "base": (),
    "partition": ("base",),
    "loss": ("base",),
    "link": ("base",),
    "crypto": ("base",),
    "transport": ("link", "crypto", "base"),
    "algorithm": ("transport", "partition", "loss", "link", "base"),
    "": ("algorithm", "transport", "partition", "loss", "link", "crypto", "base"),
}
# Headers of lossynet/ that lower folders may include as well.
PUBLIC = {"lossynet.h": ("algorithm",)}


def folder_of(path):
    """"transport" of "lossynet/transport/send.c"."""
    return path.parts[1] if len(path.parts) > 2 else ""


def may_use(user, used, name=""):
    return used == user or used in USES[user] or user in PUBLIC.get(name, ())


def includes(source, root, compiler):
    """The files of lossynet that the compiler reads for a source."""
    command = [*compiler, "-MM", str(source)]
    text = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    paths = map(pathlib.Path, text.replace("\\\n", " ").split(":", 1)[1].split())
    return [path for path in paths if path.parts[0] == "lossynet"]


def check_includes(root, compiler):
    for source in sorted((root / "lossynet").rglob("*.c")):
        source = source.relative_to(root)
        user = folder_of(source)
        for path in includes(source, root, compiler):
            if not may_use(user, folder_of(path), path.name):
                yield f"{source} includes {path}: {user or 'lossynet'} must not know it"


def symbols(path):
    """Names that an object defines, and those it needs."""
    text = subprocess.run(["nm", "-P", str(path)], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in text.splitlines()]
    return ({row[0] for row in rows if row[1] in "TDBRCVW"}, {row[0] for row in rows if row[1] == "U"})


def check_calls(root, build):
    """Of the objects of all sources that there are."""
    sources = [path.relative_to(root) for path in sorted((root / "lossynet").rglob("*.c"))]
    table = {source: symbols(build / source.with_suffix(".o")) for source in sources}
    home = {name: source for source, (defined, _) in table.items() for name in defined}
    for source, (_, needed) in table.items():
        user = folder_of(source)
        for name in sorted(needed & home.keys()):
            used = folder_of(home[name])
            if not may_use(user, used):
                yield f"{source} calls {name} of {home[name]}: {user or 'lossynet'} must not know it"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"),
                        help="folder of the objects")
    parser.add_argument("compiler", nargs="*", default=["gcc", "-I."],
                        help="the compiler and its options, behind --")
    options = parser.parse_args()
    compiler = options.compiler or ["gcc", "-I."]
    found = [*check_includes(options.root, compiler), *check_calls(options.root, options.build)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

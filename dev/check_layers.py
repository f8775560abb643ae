#!/usr/bin/env python3
"""Checks that lossynet's folders include and call downward only (lossynet/README.md draws them),
and that no struct of their headers has more than 15 members.

    make check-layers

Includes are found by the compiler (gcc -MM), calls in the symbols of the objects (nm), and structs in
the headers. Each line of output is one violation. The exit status is 1 if there is one.
"""
import argparse
import pathlib
import re
import subprocess
import sys

# The folders that each folder may use beside itself. "" is lossynet/ itself: the public interface.
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

MEMBERS_MOST = 15
# Structs that may have more members: the settings for callers are one long list.
LONG = ("lossynet_settings",)


def folder_of(path):
    """Returns "transport" for "lossynet/transport/send.c"."""
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
    """The names that an object defines, and the names that it needs."""
    text = subprocess.run(["nm", "-P", str(path)], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in text.splitlines()]
    return ({row[0] for row in rows if row[1] in "TDBRCVW"}, {row[0] for row in rows if row[1] == "U"})


def check_calls(root, build):
    """Checks the calls in the objects of all source files."""
    sources = [path.relative_to(root) for path in sorted((root / "lossynet").rglob("*.c"))]
    table = {source: symbols(build / source.with_suffix(".o")) for source in sources}
    home = {name: source for source, (defined, _) in table.items() for name in defined}
    for source, (_, needed) in table.items():
        user = folder_of(source)
        for name in sorted(needed & home.keys()):
            used = folder_of(home[name])
            if not may_use(user, used):
                yield f"{source} calls {name} of {home[name]}: {user or 'lossynet'} must not know it"


def split(text, separator):
    """Splits text at separators that are not inside brackets. Empty pieces are left out."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece for piece in pieces if piece.strip()]


def structs(text):
    """The name and number of members of each struct and union with a name. One without a name counts as
    one member of the struct that contains it."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)
    for match in re.finditer(r"\b(?:struct|union)\s+(\w+)\s*\{", text):
        body, depth = match.end(), 1
        end = body
        while depth:
            depth += (text[end] == "{") - (text[end] == "}")
            end += 1
        yield match[1], sum(len(split(line, ",")) for line in split(text[body:end - 1], ";"))


def check_structs(root):
    for header in sorted((root / "lossynet").rglob("*.h")):
        for name, members in structs(header.read_text(encoding="utf-8")):
            if members > MEMBERS_MOST and name not in LONG:
                yield (f"{header.relative_to(root)}: struct {name} has {members} members: expected "
                       f"at most {MEMBERS_MOST}; group those that belong together")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"),
                        help="folder of the objects")
    parser.add_argument("compiler", nargs="*", default=["gcc", "-I."],
                        help="the compiler and its options, behind --")
    options = parser.parse_args()
    compiler = options.compiler or ["gcc", "-I."]
    found = [*check_includes(options.root, compiler), *check_calls(options.root, options.build),
             *check_structs(options.root)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

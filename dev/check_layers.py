#!/usr/bin/env python3
"""Checks that the folders of lossynet and llmc include and call downward only (dev/ARCHITECTURE.md
draws them), that no files call each other in a circle, and that no struct of their headers has more
than 15 members.

    make check-layers

lossynet's includes are read in the files that the compiler writes beside the objects (gcc -MMD), and its
calls, and those of llmc, in the symbols of the objects (nm). llmc's includes are read in its sources, since other compilers
take some of them. Structs are read in the headers. Each line of output is one violation. The exit status
is 1 if there is one.
"""
import argparse
import graphlib
import pathlib
import re
import signal
import subprocess
import sys

# The folders that each folder may use beside itself. "" is lossynet/ itself: the public interface.
USES = {
    "base": (),
    "partition": ("base",),
    "loss": ("base",),
    "link": ("base",),
    "crypto": ("base",),
    "transport/peer": ("link", "crypto", "base"),
    "transport/exchange": ("transport/peer", "link", "crypto", "base"),
    "transport": ("transport/exchange", "transport/peer", "link", "crypto", "base"),
    "algorithm": ("transport", "partition", "loss", "link", "base"),
    "": ("algorithm", "transport", "partition", "loss", "link", "crypto", "base"),
}
# Headers of a folder that lower folders may include as well.
PUBLIC = {"lossynet.h": ("algorithm",), "lossynet_trainer.h": ("algorithm",),
          **dict.fromkeys(("transport.h", "state.h", "state_peer.h"), ("transport/peer", "transport/exchange"))}

# The same for llmc.
LLMC_USES = {
    "util": (),
    "log": ("util",),
    "backend": ("log", "util"),
    "data": ("log", "util"),
    "membership": ("log", "util"),
    "model": ("data", "backend", "log", "util"),
    "options": ("model", "backend", "log", "util"),
    "checkpoint": ("options", "model", "data", "backend", "log", "util"),
    "memory": ("checkpoint", "options", "model", "data", "backend", "log", "util"),
    "comm": ("memory", "checkpoint", "options", "membership", "model", "data", "backend", "log", "util"),
    "cli": ("comm", "memory", "checkpoint", "options", "membership", "model", "data", "backend", "log",
            "util"),
}
LLMC_USES["run"] = LLMC_USES["cli"]  # neither knows the other
LLMC_EVERYWHERE = "llmc/log/error.h"
# The folders of llmc that may include lossynet's public header.
KNOWS_LOSSYNET = ("options", "checkpoint", "memory", "comm", "cli", "run")

MEMBERS_MOST = 15
# Structs that may have more members, and how many.
LONG = {
    # tables by nature
    "lossynet_settings": 99,  # the settings for callers are one list
    "options": 99,            # a member for each option of the command line
    "lossynet_options": 99,   # the same of the network
    "backend": 99,            # the operations that each backend has
    "activations": 25,        # the arrays that forward leaves for backward
    "step_metrics": 19,       # the numbers of one line of the log
    "run_info": 20,           # the facts of the first line of the log
    "classifier": 21,         # operands and sizes of one fused product
    "worker": 29,             # a pointer for each row of the table of arrays
}


def folder_of(path):
    """Returns "transport/peer" for "lossynet/transport/peer/send.c"."""
    return "/".join(path.parts[1:-1])


def may_use(user, used, name=""):
    return used == user or used in USES[user] or user in PUBLIC.get(name, ())


def sources_of(root):
    return [path.relative_to(root) for path in sorted((root / "lossynet").rglob("*.c"))]


def includes(made):
    """The files of lossynet that the compiler read for an object. made is the file that gcc -MMD wrote; its
    first rule is the object's."""
    rule = made.read_text(encoding="utf-8").replace("\\\n", " ").split("\n", 1)[0]
    paths = map(pathlib.Path, rule.split(":", 1)[1].split())
    return [path for path in paths if path.parts[0] == "lossynet"]


def check_includes(root, build):
    for source in sources_of(root):
        user = folder_of(source)
        for path in includes(build / source.with_suffix(".d")):
            if not may_use(user, folder_of(path), path.name):
                yield f"{source} includes {path}: {user or 'lossynet'} must not know it"


def check_llmc(root):
    """Checks the includes of llmc, as its sources say them."""
    for source in sorted((root / "llmc").rglob("*.*")):
        if source.suffix not in (".c", ".h", ".cu", ".cuh", ".cpp"):
            continue
        source = source.relative_to(root)
        user = source.parts[1]
        for used in re.findall(r'^#include "([^"]+)"', (root / source).read_text(encoding="utf-8"), re.M):
            folder = used.split("/")[1] if used.startswith("llmc/") else user
            if used != LLMC_EVERYWHERE and folder != user and folder not in LLMC_USES[user] or \
                    used.startswith("lossynet/") and user not in KNOWS_LOSSYNET:
                yield f"{source} includes {used}: {user} must not know it"


def symbols(sources, build):
    """For each source, the names that its object defines, and the names that it needs."""
    objects = {str(build / source.with_suffix(".o")): (set(), set()) for source in sources}
    text = subprocess.run(["nm", "-P", "-A", *objects], check=True, capture_output=True, text=True).stdout
    for line in text.splitlines():
        file, name, kind = re.match(r"(.+): (\S+) (\S)", line).groups()
        if kind in "TDBRCVWU":
            objects[file][kind == "U"].add(name)
    return dict(zip(sources, objects.values()))


def check_calls(root, build):
    """Checks the calls in the objects of all source files."""
    table = symbols(sources_of(root), build)
    home = {name: source for source, (defined, _) in table.items() for name in defined}
    for source, (_, needed) in table.items():
        user = folder_of(source)
        for name in sorted(needed & home.keys()):
            used = folder_of(home[name])
            if name.startswith(f"ln_{used.split('/')[0]}_"):  # ln_transport_...: what transport/ offers to others
                used = used.split("/")[0]
            if not may_use(user, used):
                yield f"{source} calls {name} of {home[name]}: {user or 'lossynet'} must not know it"


def check_circles(root, build, house):
    """Checks that the files of a house do not call each other in a circle."""
    sources = [path.relative_to(root) for path in sorted((root / house).rglob("*.c"))]
    sources = [source for source in sources if (build / source).with_suffix(".o").exists()]
    table = symbols(sources, build) if sources else {}
    home = {name: source for source, (defined, _) in table.items() for name in defined}
    calls = {source: {home[name] for name in needed & home.keys()} - {source}
             for source, (_, needed) in table.items()}
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as error:
        yield f"files call each other in a circle: {' <- '.join(map(str, error.args[1]))}"


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
    for header in sorted(path for house in ("lossynet", "llmc") for path in (root / house).rglob("*.h")):
        for name, members in structs(header.read_text(encoding="utf-8")):
            if members > LONG.get(name, MEMBERS_MOST):
                yield (f"{header.relative_to(root)}: struct {name} has {members} members: expected "
                       f"at most {LONG.get(name, MEMBERS_MOST)}; group those that belong together")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path("build"),
                        help="folder of the objects, and of the files that gcc -MMD wrote beside them")
    options = parser.parse_args()
    found = [*check_includes(options.root, options.build), *check_calls(options.root, options.build),
             *check_circles(options.root, options.build, "lossynet"),
             *check_circles(options.root, options.build, "llmc"),
             *check_llmc(options.root), *check_structs(options.root)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())

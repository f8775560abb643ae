#!/usr/bin/env python3
"""Takes a sweep to a machine that has a GPU and nothing of ours, and runs it
there for a given time.

    scripts/sweeps/carry.py pack SETTINGS FOLDER
        here: program, data, settings and scripts, into FOLDER
    python3 FOLDER/scripts/sweeps/carry.py run SECONDS [OUT]
        there: trains; then lists which runs are complete

FOLDER has everything that must travel, compressed, at most 50 MB (--most): the
program (TRAIN_LLAMA2 or build/train_llama2), and the libraries that it needs
beside the C library's. `make BARE=1 BLAS=none MPI=0 SECURE=0 VERBS=0
BUILD=build/carried` makes a program for GPUs without 13 MB of libraries. The
other machine has Python and a C library that is not older than this one's;
cuBLAS is taken from its toolkit, or from packages of its Python. OUT (default:
out in FOLDER) gets results.jsonl and the runs' logs. The same command goes on
after a stop, also on another machine if OUT is brought there.
"""
import argparse
import glob
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = os.path.dirname(HERE)
# Libraries that every machine has, and must have its own of.
SYSTEM = re.compile(r"^(linux-vdso|ld-linux|libc|libm|libdl|librt|libpthread|libcuda)[.-]")
TOKENS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]  # they have two bytes


def fail(message, status=1):
    print(f"carry: {message}", file=sys.stderr)
    sys.exit(status)


def libraries(program):
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    missing = re.findall(r"^\s*(\S+) => not found", said, re.MULTILINE)
    if missing:
        fail(f"{program}: the library {missing[0]} is missing here")
    return [path for name, path in re.findall(r"^\s*(\S+) => (/\S+)", said, re.MULTILINE) if not SYSTEM.match(name)]


def compress(path, to, **how):
    with open(path, "rb") as file, lzma.open(to + ".xz", "wb", **how) as packed:
        shutil.copyfileobj(file, packed)


def unpack(packed):
    """A file is there whole or not at all, and is not unpacked twice."""
    if not os.path.exists(packed[:-3]):
        with lzma.open(packed) as file, open(packed + ".part", "wb") as to:
            shutil.copyfileobj(file, to)
        os.chmod(packed + ".part", 0o755)
        os.rename(packed + ".part", packed[:-3])


def pack_data(text, folder):
    """Compresses the files that `train` and `val` name, and returns the settings with their new places. Files keep
    their names, which belong to a result."""
    def moved(match):
        found = [path for pattern in match[2].split() for path in sorted(glob.glob(pattern))]
        if not found:
            fail(f"{match[1].strip()} {match[2]}: there is no such file; run the settings' `prepare` first")
        names = []
        for path in found:
            place = os.path.join("data", str(len(os.listdir(os.path.join(folder, "data")))))
            os.mkdir(os.path.join(folder, place))
            compress(path, os.path.join(folder, place, os.path.basename(path)), filters=TOKENS)
            names.append(os.path.join(place, os.path.basename(path)))
        return match[1] + " ".join(names)
    text = re.sub(r"^prepare *=.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"^((?:train|val) *= *)(.*?) *$", moved, text, flags=re.MULTILINE)


def try_program(program, text):
    """One step, here and with a log: a program without its library writes none, and would say so only there."""
    data = re.search(r"^val *= *(\S+)", text, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        words = [program, "--device", "cpu", "--train", data[1] if data else "none", "--model", "260K", "--batch", "1",
                 "--seq", "8", "--steps", "1", "--quiet", "--log", log]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode or not os.path.exists(log):
            fail(f"{program} does not train here and write a log: {done.stderr.strip() or 'it says nothing'}")


def pack(arguments):
    program = os.environ.get("TRAIN_LLAMA2", os.path.join(os.environ.get("BUILD", "build"), "train_llama2"))
    settings, folder = arguments.settings, arguments.folder
    if not os.path.exists(settings):
        settings = os.path.join(HERE, "settings", settings)
    for path in (program, settings):
        if not os.path.exists(path):
            fail(f"there is no file '{path}'", 2)
    if os.path.exists(folder) and os.listdir(folder):
        fail(f"'{folder}' is not empty", 2)
    with open(settings, encoding="utf-8") as file:
        text = file.read()
    if re.search(r"^device *= *cuda", text, re.MULTILINE):
        words = [program, "--device", "cuda", "--train", "none", "--model", "260K"]
        said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
        if "no CUDA backend" in said:
            fail(f"{settings} asks for a GPU, and {program} was built without CUDA: run make where nvcc is, or name "
                 "another program with TRAIN_LLAMA2", 2)
    try_program(program, text)
    for part in ("data", "lib", "scripts"):
        os.makedirs(os.path.join(folder, part))
    text = pack_data(text, folder)
    with open(os.path.join(folder, "settings"), "w", encoding="utf-8") as file:
        file.write(text)
    compress(program, os.path.join(folder, "train_llama2"), preset=0)
    for path in libraries(program):
        compress(path, os.path.join(folder, "lib", os.path.basename(path)), preset=0)
    for path in glob.glob(os.path.join(SCRIPTS, "*.py")):
        shutil.copy2(path, os.path.join(folder, "scripts"))
    shutil.copytree(HERE, os.path.join(folder, "scripts", "sweeps"),
                    ignore=shutil.ignore_patterns("*.jsonl", "*.png", "*.md", "__pycache__", "others"))
    sizes = {os.path.join(at, name): os.path.getsize(os.path.join(at, name)) / 1e6
             for at, _, names in os.walk(folder) for name in names}
    size, largest = sum(sizes.values()), max(sizes, key=sizes.get)
    print(f"{folder}: {size:.1f} MB")
    if size > arguments.most:
        fail(f"{folder} has {size:.1f} MB, expected at most {arguments.most:g}; the largest is {largest}, "
             f"{sizes[largest]:.1f} MB; shorter token files or a program with fewer libraries (--help) need less")


def places_of_libraries(folder):
    """Our libraries, and where the other machine has cuBLAS."""
    places = [os.path.join(folder, "lib")]
    if os.path.exists("/usr/local/cuda/lib64"):
        places.append("/usr/local/cuda/lib64")
    try:
        import nvidia  # pylint: disable=import-outside-toplevel
        places += [place for root in nvidia.__path__ for place in sorted(glob.glob(os.path.join(root, "*", "lib")))]
    except ImportError:
        pass
    return places + [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]


def run(arguments):
    folder = os.path.dirname(SCRIPTS)
    out = os.path.abspath(arguments.out or os.path.join(folder, "out"))
    os.chdir(folder)
    for packed in glob.glob("**/*.xz", recursive=True):
        unpack(packed)
    program = os.path.join(folder, "train_llama2")
    environment = {**os.environ, "TRAIN_LLAMA2": program, "LD_LIBRARY_PATH": ":".join(places_of_libraries(folder))}
    command = [sys.executable, "scripts/sweeps/sweep.py", "settings", "--out", out, "--runs-only",
               "--minutes", str(arguments.seconds / 60)]
    return subprocess.run(command, env=environment, check=False).returncode


def main():
    parser = argparse.ArgumentParser(prog="carry", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packs = commands.add_parser("pack", help="makes the folder that travels")
    packs.add_argument("settings", help="as for sweep.py")
    packs.add_argument("folder")
    packs.add_argument("--most", type=float, default=50, metavar="MB", help="of the folder [50]")
    runs = commands.add_parser("run", help="runs the sweep of the folder that this script is in")
    runs.add_argument("seconds", type=float)
    runs.add_argument("out", nargs="?")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # from here on a pipe that breaks is reported
    try:
        return pack(arguments) if arguments.command == "pack" else run(arguments)
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        return fail(f"{getattr(error, 'filename', None) or 'cannot read or write'}: {getattr(error, 'strerror', error)}")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())

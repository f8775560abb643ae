#!/usr/bin/env python3
"""Runs the tests, several at the same time: more than the machine has cores, because some tests wait most of
the time. Those that measure rates, times or memory go ahead of the others; where that is not allowed
they run afterwards, one by one.

    test/run.py [--quick] [PYTEST ARGUMENT]...
    test/run.py --times

--quick runs only the tests of `make check`. Without pytest-xdist all tests run one after the other.
Every run keeps what each test took in build/test_times.json, by which the next run orders them. --times
prints it by file, and runs nothing.
The last line is "N passed, N failed[, N skipped]", for all parts together. Exit code 1: a test failed.
"""
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "support"))
from priority import may_go_ahead  # pylint: disable=wrong-import-position

BUILD = TESTS.parent / os.environ.get("BUILD", "build")
TIMES = BUILD / "test_times.json"  # {test: [wall seconds, CPU seconds]}
# How many processes run tests: so many more than there are cores, and at most so many, because each makes its
# own fixtures. The quick tests have few fixtures and are over before a seventh process has read them all.
MORE_THAN_CORES = {"quick": 4, "not alone": 6}
MOST_WORKERS = 8
NOTHING_COLLECTED = 5


def parallel(selection):
    """The arguments that let pytest-xdist run groups of tests at once."""
    try:
        import xdist.plugin  # pylint: disable=import-outside-toplevel
    except ImportError:
        return []
    workers = min(len(os.sched_getaffinity(0)) + MORE_THAN_CORES[selection], MOST_WORKERS)
    # Groups start in the order of conftest.py, the longest first. Newer releases of xdist would
    # otherwise reorder them.
    order = "--no-loadscope-reorder"
    known = order in pathlib.Path(xdist.plugin.__file__).read_text(encoding="utf-8")
    return ["-n", str(workers), "--dist", "loadgroup", *([order] if known else [])]


def quick_files():
    """The files that may have quick tests: C programs, and Python files with the mark. To collect the others'
    tests would take a third of `make check`."""
    return [str(path) for path in sorted(TESTS.rglob("test_*.*")) if path.suffix == ".c" or
            path.suffix == ".py" and "pytest.mark.quick" in path.read_text(encoding="utf-8")]


def run(selection, arguments):
    """Runs pytest once. Returns its exit status, and its counts and times."""
    files = quick_files() if selection == "quick" else [str(TESTS)]
    with tempfile.NamedTemporaryFile() as counts:
        started = time.monotonic()
        status = subprocess.call([sys.executable, "-m", "pytest", "-q", *files, "-m", selection,
                                  *arguments], env={**os.environ, "TEST_COUNTS": counts.name})
        text = counts.read()
        print(f"tests that are {selection}: {time.monotonic() - started:.0f} s", flush=True)
    if not text:  # pytest did not reach its end
        return status or 1, {"passed": 0, "failed": 1, "skipped": 0, "times": {}}
    return 0 if status == NOTHING_COLLECTED else status, json.loads(text)


def read_times():
    try:
        return json.loads(TIMES.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing was kept yet
        return {}


def keep_times(times, whole):
    """Keeps the times of a run. Those of a whole run replace all others."""
    BUILD.mkdir(parents=True, exist_ok=True)
    TIMES.write_text(json.dumps(times if whole else {**read_times(), **times}, indent=0), encoding="utf-8")


def print_times():
    """Prints what the files' tests took, and what of it sanitized C programs took."""
    table = collections.defaultdict(lambda: [0, 0, 0, 0])
    for test, (wall, cpu) in read_times().items():
        file, _, name = test.partition("::")
        for row in (table[file], table["all"]):
            for i, part in enumerate((1, wall, cpu, cpu if name.startswith("sanitized-") else 0)):
                row[i] += part
    print(f"{'file':44} tests   wall s    CPU s  sanitized")
    for file, row in sorted(table.items(), key=lambda pair: -pair[1][2]):
        print(f"{file:44} {row[0]:5} {row[1]:8.1f} {row[2]:8.1f} {row[3]:10.1f}")


def main(arguments):
    if "--times" in arguments:
        print_times()
        return 0
    first = "quick" if "--quick" in arguments else "not alone"
    parts = [(first, parallel(first))]
    if first != "quick" and not may_go_ahead():
        parts.append(("alone", []))
    more = [argument for argument in arguments if argument != "--quick"]
    done = [run(selection, [*options, *more]) for selection, options in parts]
    keep_times({test: times for _, result in done for test, times in result["times"].items()},
               whole=not arguments)
    total = {kind: sum(counts[kind] for _, counts in done) for kind in ("passed", "failed", "skipped")}
    if not sum(total.values()):
        print("no test was selected", file=sys.stderr)
    print(f"{total['passed']} passed, {total['failed']} failed"
          + (f", {total['skipped']} skipped" if total["skipped"] else ""))
    return 1 if total["failed"] or any(status for status, _ in done) or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

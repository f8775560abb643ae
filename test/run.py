#!/usr/bin/python3
"""Runs the tests: first several at the same time, then, one after the other, those that need the machine
to themselves (conftest.py says which). The first part runs one process more than the machine has cores,
because some tests wait most of the time.

    test/run.py [--quick] [PYTEST ARGUMENT]...

--quick runs only the tests of `make check`. Without pytest-xdist all tests run one after the other.
The last line is "N passed, N failed[, N skipped]", for both parts together. Exit code 1: a test failed.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent
MOST_WORKERS = 8  # a limit, because each process makes its own fixtures
NOTHING_COLLECTED = 5


def parallel():
    """The arguments that let pytest-xdist run groups of tests at once."""
    try:
        import xdist.plugin  # pylint: disable=import-outside-toplevel
    except ImportError:
        return []
    workers = min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)
    # Groups start in the order of conftest.py, the longest first. Newer releases of xdist would
    # otherwise reorder them.
    order = "--no-loadscope-reorder"
    known = order in pathlib.Path(xdist.plugin.__file__).read_text(encoding="utf-8")
    return ["-n", str(workers), "--dist", "loadgroup", *([order] if known else [])]


def run(selection, arguments):
    """Runs pytest once. Returns its exit status and its counts."""
    with tempfile.NamedTemporaryFile() as counts:
        started = time.monotonic()
        status = subprocess.call([sys.executable, "-m", "pytest", "-q", str(TESTS), "-m", selection,
                                  *arguments], env={**os.environ, "TEST_COUNTS": counts.name})
        text = counts.read()
        print(f"tests that are {selection}: {time.monotonic() - started:.0f} s", flush=True)
    if not text:  # pytest did not reach its end
        return status or 1, {"passed": 0, "failed": 1, "skipped": 0}
    return 0 if status == NOTHING_COLLECTED else status, json.loads(text)


def main(arguments):
    parts = [("quick", parallel())] if "--quick" in arguments else [
        ("not alone", parallel()), ("alone", [])]
    more = [argument for argument in arguments if argument != "--quick"]
    done = [run(selection, [*options, *more]) for selection, options in parts]
    total = {kind: sum(counts[kind] for _, counts in done) for kind in done[0][1]}
    if not sum(total.values()):
        print("no test was selected", file=sys.stderr)
    print(f"{total['passed']} passed, {total['failed']} failed"
          + (f", {total['skipped']} skipped" if total["skipped"] else ""))
    return 1 if total["failed"] or any(status for status, _ in done) or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

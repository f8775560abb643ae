"""How pytest runs this folder.

* test_*.py are ordinary pytest files; they start the built program.
* test_*.c are cmocka programs, built by the Makefile. Each of their cases is one test here, also the
  cases of another test program that they include. A case passes if it passes in every cmocka group of
  its program. Programs run twice: as built for users, and with the address and undefined-behaviour
  sanitizers.
* test/run.py runs several groups of tests at the same time (pytest-xdist), the longest first, by the
  times that its last run has kept. A C program is a group, and so is a Python file. All tests that make
  hosts of network namespaces (fixture `namespaces`) are one group, since they share names and mostly wait.
* Marks stand in the tests (`pytestmark` for a file); a new file needs none. `pytest_configure` lists
  them. A C program has one, in its head comment: "Takes N s."
* The last line printed is "N passed, N failed[, N skipped]".
"""
import collections
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
SANITIZED = BUILD / "sanitize"
C_TIMEOUT = 1200  # seconds, for one C program; a hang is a failure, and a machine with 20 times its load is not

HOSTS, HOSTS_FIXTURE = "hosts", "namespaces"
TIMES = BUILD / "test_times.json"  # {test: [wall seconds, CPU seconds]}; test/run.py writes it
# C programs without sanitizers that take at most so many seconds are part of make check. It builds no CUDA
# and no emulated device (Makefile, QUICK_TESTS).
QUICK, NOT_QUICK = 10, ("_device", "_emulated")

# The compiled tests stay in the build folder, since each of the processes of test/run.py reads them all.
sys.pycache_prefix, sys.dont_write_bytecode = str(BUILD / "pycache"), False
# Tests import modules of support/, and fixtures from files of system/ and cuda/.
sys.path[:0] = [str(ROOT / "test" / folder) for folder in ("support", "system", "cuda")]
from priority import may_go_ahead  # pylint: disable=wrong-import-position

# hwloc, with which Open MPI looks at the machine: without PCI devices, since each read of their registers takes a
# virtual machine's processor to its host, and without plugins (XML, X11, OpenCL). A third of what mpirun takes.
os.environ.update({"HWLOC_COMPONENTS": "-linux:pci,-pci", "HWLOC_PLUGINS_PATH": "/nonexistent"})


def pytest_configure(config):
    # A shell starts background programs with SIGINT ignored, and programs that tests start would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in ("measures: measures rates, times or memory, and does so ahead of other programs (support/priority.py)",
                 "alone: set here for the former, where no program may go ahead of others",
                 "quick: part of make check",
                 "spread: the file's tests share no slow fixture, so that each is a group of its own",
                 "takes(seconds): what all of the file's tests take together, where no times were kept",
                 "xdist_group(name): tests of one process (pytest-xdist)"):
        config.addinivalue_line("markers", line)


def group_of(item):
    """The group that an item belongs to. Groups run at the same time, the tests of one in turn."""
    given = item.get_closest_marker("xdist_group")
    if given:
        return given.args[0]
    if HOSTS_FIXTURE in getattr(item, "fixturenames", ()):
        return HOSTS
    if isinstance(item, CCase):
        return str(item.run.program.relative_to(BUILD))
    return item.nodeid if item.get_closest_marker("spread") else item.path.name


def seconds_of(items):
    """{item: what it took when it last ran, or its share of what its file says that it takes}"""
    try:
        kept = json.loads(TIMES.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    of_file = collections.Counter(item.path for item in items)

    def marked(item):
        takes = item.get_closest_marker("takes")
        return takes.args[0] / of_file[item.path] if takes else 0
    return {item: kept[item.nodeid][0] if item.nodeid in kept else marked(item) for item in items}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seconds, of_group = seconds_of(items), collections.Counter()
    for item in items:
        of_group[group_of(item)] += seconds[item]
    items.sort(key=lambda item: -of_group[group_of(item)])
    ahead = may_go_ahead()
    for item in items:
        item.own_id = item.nodeid  # pytest-xdist adds the group's name
        if item.get_closest_marker("measures") and not ahead:
            item.add_marker(pytest.mark.alone)
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def pytest_collect_file(parent, file_path):
    if file_path.suffix == ".c" and file_path.name.startswith("test_"):
        return CFile.from_parent(parent, path=file_path)
    return None


def code_of(path):
    """The text of a C file, with the test program or list of tests that it includes, without macros."""
    source = re.sub(r"^#define.*", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    included = re.findall(r'#include "(test/\w+/(?:test_\w+\.c|\w+_list\.h))"', source)
    return source + "".join(code_of(ROOT / name) for name in included)


class CFile(pytest.File):
    """A C test program. Its cases are read from the source, and their results from its TAP output."""

    def collect(self):
        text = self.path.read_text(encoding="utf-8")
        head = text[:text.find("*/")]
        takes = int((re.findall(r"\bTakes (\d+) s\b", head) or [0])[0])
        self.add_marker(pytest.mark.takes(takes))
        cases = re.findall(r"\b(?:cmocka_unit_test\w*|OPERATOR_TEST)\((\w+)", code_of(self.path))
        builds = [(BUILD, "")] + [(SANITIZED, "sanitized-")] * ("no build with sanitizers" not in head)
        for build, label in builds:
            run = CRun(build / self.path.relative_to(ROOT).with_suffix(""))
            for case in list(dict.fromkeys(cases)) + ["exit_status"]:
                item = CCase.from_parent(self, name=label + case, case=case, run=run)
                if takes <= QUICK and not label and not self.path.stem.endswith(NOT_QUICK):
                    item.add_marker(pytest.mark.quick)
                yield item


class CRun:
    """One run of a program. It starts when the result of its first case is needed."""

    def __init__(self, program):
        self.program, self.done = program, False

    def results(self):
        if not self.done:
            environment = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP",
                               ASAN_OPTIONS="detect_leaks=1", OMP_NUM_THREADS="2",
                               GOMP_SPINCOUNT="0")  # no busy waiting: other tests need the core
            try:
                run = subprocess.run([str(self.program)], cwd=ROOT, env=environment, text=True,
                                     capture_output=True, timeout=C_TIMEOUT, check=False)
                self.status, self.output = run.returncode, run.stdout + run.stderr
            except FileNotFoundError:
                self.status = -1
                self.output = f"the program is not built: make test PYTEST='-k {self.program.name}' builds and runs it"
            except (OSError, subprocess.TimeoutExpired) as error:
                self.status, self.output = -1, str(error)
            self.ok, self.skipped = {}, set()
            for bad, name in re.findall(r"^(not )?ok \d+ - (\w+)", self.output, re.MULTILINE):
                self.ok[name] = not bad and self.ok.get(name, True)
            # Some versions of cmocka write "not ok" of a case that was skipped, others "ok".
            self.skipped.update(re.findall(r"^(?:not )?ok \d+ # SKIP (\w+)", self.output, re.MULTILINE))
            self.done = True
        return self


class CCase(pytest.Item):
    def __init__(self, *, case, run, **kwargs):
        super().__init__(**kwargs)
        self.case, self.run = case, run

    def runtest(self):
        run = self.run.results()
        if run.status == 77:
            pytest.skip(run.output.strip().splitlines()[-1] if run.output.strip() else "skipped")
        if self.case in run.skipped and self.case not in run.ok:
            said = re.findall(r"^skipped: (.*)", run.output, re.MULTILINE)
            pytest.skip(said[0] if said else "the test program says that this cannot be tried here")
        if self.case == "exit_status":
            assert run.status == 0, f"exit status {run.status}\n{run.output[-3000:]}"
        else:
            assert run.ok.get(self.case), run.output[-3000:]

    def repr_failure(self, excinfo):
        return f"{self.run.program}: {self.case}\n{excinfo.value}"

    def reportinfo(self):
        return self.path, None, self.name


def cpu_seconds():
    """What this process has taken of the processor, with all of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    item.config.cpu_before = cpu_seconds()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """Each of a test's three reports (set-up, call, tear-down) says what CPU time its part took."""
    report = (yield).get_result()
    now = cpu_seconds()
    report.own_id = item.own_id
    report.cpu_seconds, item.config.cpu_before = now - item.config.cpu_before, now


def times_of(reports):
    """{test: [wall seconds, CPU seconds]}"""
    times = {}
    for report in reports:
        if hasattr(report, "cpu_seconds"):
            sums = times.setdefault(report.own_id, [0, 0])
            times[report.own_id] = [round(a + b, 3) for a, b in
                                    zip(sums, (report.duration, report.cpu_seconds))]
    return times


def pytest_terminal_summary(terminalreporter):
    count = lambda *kinds: sum(len(terminalreporter.stats.get(kind, [])) for kind in kinds)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"skipped: {report.nodeid}: {reason}")
    skipped = count("skipped")
    if os.environ.get("TEST_COUNTS"):  # test/run.py adds up and prints the last line
        result = {"passed": count("passed"), "failed": count("failed", "error"), "skipped": skipped,
                  "times": times_of(sum(terminalreporter.stats.values(), []))}
        pathlib.Path(os.environ["TEST_COUNTS"]).write_text(json.dumps(result), encoding="utf-8")
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{count('passed')} passed, {count('failed', 'error')} failed"
                                + (f", {skipped} skipped" if skipped else ""))

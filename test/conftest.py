"""How pytest runs this folder.

* test_*.py are ordinary pytest files; they start the built program.
* test_*.c are cmocka programs, built by the Makefile. Each of their cases is one test here, also the
  cases of another test program that they include. A case passes if it passes in every cmocka group of
  its program. Programs run twice: as built for users, and with the address and undefined-behaviour
  sanitizers.
* test/run.py runs several groups of tests at the same time (pytest-xdist). A C program is a group,
  and so is a Python file, and each test of the files in SPREAD. All tests that make hosts of network
  namespaces are one group. Tests that need the machine to themselves are marked `alone` and run
  afterwards. Tests that `make check` runs are marked `quick`.
* The last line printed is "N passed, N failed[, N skipped]".
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
SANITIZED = BUILD / "sanitize"
C_TIMEOUT = 600  # seconds, for one C program; a hang is a failure

# Files whose tests share no slow fixture, so that each test is a group.
SPREAD = {"test_bf16.py", "test_device.py", "test_earlier_run.py", "test_program.py",
          "test_resume.py", "test_udp.py"}
# {file: file}: the tests of both files share one process that has imported transformers.
SAME_GROUP = {"test_perplexity.py": "test_huggingface.py"}
# Hosts: the group of tests that make hosts of network namespaces. They run one after the other, and
# mostly wait.
HOSTS, HOSTS_FIXTURE = "hosts", "namespaces"
# Groups that take half a minute and more, the longest first, so that short groups run at the end.
LONGEST = [HOSTS, "test_verbs", "test_huggingface", "test_cluster", "test_simulation",
           "test_cuda_emulation", "test_bench", "test_scripts", "test_operators", "test_fuzz",
           "test_same_bits", "test_elastic", "test_gpu_check", "test_threads", "test_sweep",
           "test_deadline", "test_cuda_attention", "test_membership_histories", "test_lossynet_udp"]
# Alone: tests that measure the rate of a network, the time that requests take, or memory at its peak.
ALONE_FIXTURE = "measured_hosts"
ALONE_FILES = {"test_memory.py"}
ALONE_TESTS = {"test_client_waits_for_nobody"}
# Quick: Python files that start neither MPI nor hosts, and C programs without sanitizers, except
# those in NOT_QUICK, which take more than about ten seconds of a core.
QUICK_FILES = {"test_documents.py", "test_fetch.py", "test_layers.py", "test_perplexity.py",
               "test_scaling.py", "test_tokenize.py"}
NOT_QUICK = {"test_cuda_attention", "test_cuda_kernels", "test_drift", "test_lead", "test_lossynet_udp",
             "test_membership", "test_membership_histories", "test_model_emulated", "test_operators",
             "test_operators_emulated", "test_same_bits"}

# Tests import modules of support/, and fixtures from files of system/ and cuda/.
sys.path[:0] = [str(ROOT / "test" / folder) for folder in ("support", "system", "cuda")]


def pytest_configure(config):
    # A shell starts background programs with SIGINT ignored, and programs that tests start would
    # inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for line in ("alone: needs the machine to itself", "quick: part of make check",
                 "xdist_group: tests of one process (pytest-xdist)"):
        config.addinivalue_line("markers", line)


def group_of(item):
    """The group that an item belongs to, or "" if the item is a group of its own."""
    if HOSTS_FIXTURE in getattr(item, "fixturenames", ()):
        return HOSTS
    if isinstance(item, CCase):
        return str(item.run.program.relative_to(BUILD))
    name = item.path.name
    return SAME_GROUP.get(name, name) if name not in SPREAD else ""


def place(item):
    """The index of the item's group in LONGEST. All other groups come after these, in their order."""
    name = HOSTS if group_of(item) == HOSTS else item.path.stem
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.sort(key=place)
    for item in items:
        group, name = group_of(item), getattr(item, "originalname", item.name)
        if (item.path.name in ALONE_FILES or name in ALONE_TESTS
                or ALONE_FIXTURE in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.alone)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
        if isinstance(item, CCase):
            quick = item.path.stem not in NOT_QUICK and not item.name.startswith("sanitized-")
        else:
            quick = item.path.name in QUICK_FILES
        if quick:
            item.add_marker(pytest.mark.quick)


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
        cases = re.findall(r"\b(?:cmocka_unit_test\w*|OPERATOR_TEST)\((\w+)", code_of(self.path))
        for build, label in ((BUILD, ""), (SANITIZED, "sanitized-")):
            run = CRun(build / self.path.relative_to(ROOT).with_suffix(""))
            for case in list(dict.fromkeys(cases)) + ["exit_status"]:
                yield CCase.from_parent(self, name=label + case, case=case, run=run)


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
            except (OSError, subprocess.TimeoutExpired) as error:
                self.status, self.output = -1, str(error)
            self.ok = {}
            for bad, name in re.findall(r"^(not )?ok \d+ - (\w+)", self.output, re.MULTILINE):
                self.ok[name] = not bad and self.ok.get(name, True)
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
        if self.case == "exit_status":
            assert run.status == 0, f"exit status {run.status}\n{run.output[-3000:]}"
        else:
            assert run.ok.get(self.case), run.output[-3000:]

    def repr_failure(self, excinfo):
        return f"{self.run.program}: {self.case}\n{excinfo.value}"

    def reportinfo(self):
        return self.path, None, self.name


def pytest_terminal_summary(terminalreporter):
    count = lambda *kinds: sum(len(terminalreporter.stats.get(kind, [])) for kind in kinds)
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"skipped: {report.nodeid}: {reason}")
    skipped = count("skipped")
    if os.environ.get("TEST_COUNTS"):  # test/run.py adds up and prints the last line
        counts = {"passed": count("passed"), "failed": count("failed", "error"), "skipped": skipped}
        pathlib.Path(os.environ["TEST_COUNTS"]).write_text(json.dumps(counts), encoding="utf-8")
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{count('passed')} passed, {count('failed', 'error')} failed"
                                + (f", {skipped} skipped" if skipped else ""))

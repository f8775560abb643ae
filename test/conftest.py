"""How pytest runs this folder.

* test_*.py are ordinary pytest files; they start the built program.
* test_*.c are cmocka programs, built by the Makefile. Each of their cases (of another test program
  they include, too) is one test here, which passes when it passes in every group of the program;
  they run twice, as built for users and with the address and undefined-behaviour sanitizers.
* The last line printed is "N passed, N failed[, N skipped]".
"""
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
SANITIZED = BUILD / "sanitize"
C_TIMEOUT = 600  # seconds, for one C program; a hang is a failure


def pytest_collect_file(parent, file_path):
    if file_path.suffix == ".c" and file_path.name.startswith("test_"):
        return CFile.from_parent(parent, path=file_path)
    return None


class CFile(pytest.File):
    """A C test program. Its cases are found in the source, their results in its TAP output."""

    def collect(self):
        source = self.path.read_text(encoding="utf-8")
        for included in re.findall(r'#include "(test/test_\w+\.c)"', source):
            source += (ROOT / included).read_text(encoding="utf-8")
        cases = re.findall(r"\bcmocka_unit_test\w*\((\w+)", source)
        for build, label in ((BUILD, ""), (SANITIZED, "sanitized-")):
            run = CRun(build / "test" / self.path.stem)
            for case in list(dict.fromkeys(cases)) + ["exit_status"]:
                yield CCase.from_parent(self, name=label + case, case=case, run=run)


class CRun:
    """One run of a program, made when its first case is asked for."""

    def __init__(self, program):
        self.program, self.done = program, False

    def results(self):
        if not self.done:
            environment = dict(os.environ, CMOCKA_MESSAGE_OUTPUT="TAP",
                               ASAN_OPTIONS="detect_leaks=1", OMP_NUM_THREADS="2",
                               GOMP_SPINCOUNT="1000")  # as llmc/threads.h says
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
    terminalreporter.write_line("")
    terminalreporter.write_line(f"{count('passed')} passed, {count('failed', 'error')} failed"
                                + (f", {skipped} skipped" if skipped else ""))

"""Tests scripts/run_report.py: its report of made-up logs, and its errors about files that are no logs."""
import importlib
import json
import os
import re
import subprocess
import sys

import pytest

from program import ROOT

OPTIONS = {"algorithm": "lossy", "workers": 8, "steps": 200}


def step(number, milliseconds=100.0, lost=0.1, **changes):
    return {"event": "step", "step": number, "loss": 5 - number / 100, "step_ms": milliseconds,
            "communication_ms": milliseconds / 4, "gradient_loss_rate": lost, "parameter_loss_rate": 0.1,
            "drift": 0.5, "drift_expected": None, "max_age": 7, **changes}


@pytest.fixture(scope="module")
def run_report():
    """The script as a module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("run_report")
    sys.path.remove(str(ROOT / "scripts"))


def write_log(folder, events, tail=""):
    lines = [json.dumps(event) for event in
             ({"event": "run", "options": OPTIONS, "link": "udp", "ranks": 4}, *events)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")


def report(folder, events):
    write_log(folder, events)
    return subprocess.run([sys.executable, ROOT / "scripts" / "run_report.py", folder], text=True, capture_output=True,
                          check=False)


def test_a_run_of_even_steps(tmp_path):
    done = report(tmp_path, [*(step(i) for i in range(200)),
                             {"event": "eval", "step": 200, "val_loss": 3.25, "val_bits_per_byte": 1.5},
                             {"event": "links", "lost": [[0, 0.1, 0.1], [0.1, 0, 0.4], [0.1, 0.1, 0]]},
                             {"event": "late_ranks", "steps": [0, 1, 0, 20]},
                             {"event": "end", "status": "complete"}])
    assert done.returncode == 0, done.stderr
    assert "late ranks  rank 3 in 20 steps, rank 1 in 1 step\n" in done.stdout
    assert "links       worst 40.0%, from worker 2 to 1; median 10.0%" in done.stdout
    assert "lossy over udp, 8 workers in 4 ranks: 200 of 200 steps, complete" in done.stdout
    assert "validation  3.250 after step 200; 1.5000 bits per byte\n" in done.stdout
    assert "median 100 ms; 99% within 100 ms, 1.0 times the median" in done.stdout
    assert "waiting     25% of the time" in done.stdout
    assert "10.0% of gradients, 10.0% of parameters; oldest parameters: 7 steps" in done.stdout
    assert "\nnetwork" not in done.stdout and "Changes" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def told(module, folder, events, tail=""):
    """What is printed, without a picture."""
    write_log(folder, events, tail)
    return "\n".join(module.summary(folder, module.read(folder))) + "\n"


def test_changes_are_told_once_each(run_report, tmp_path):
    """Steps 82 to 141 are slow, and gradients are lost from step 122 on. Each change is reported once."""
    said = told(run_report, tmp_path, [step(i, 300 if 81 <= i <= 140 else 100, 0.3 if i > 120 else 0.1,
                                            stragglers=int(i == 90)) for i in range(200)])
    assert said.split("Changes:\n")[1].split("\n\n")[0].splitlines() == [
        "  from step 82      median step time rose from 100 ms to 300 ms",
        "  from step 122     lost gradients rose from 10.0% to 30.0%",
        "  from step 142     median step time fell back to 100 ms"]
    assert "goes on, or was killed" in said and "network     1 stragglers" in said


def test_one_slow_step_is_named(run_report, tmp_path):
    said = told(run_report, tmp_path, [step(i, 607 if i == 33 else 108) for i in range(60)])
    assert "the longest, step 34, took 607 ms" in said and "Changes" not in said


def test_a_run_that_goes_on_and_one_that_was_resumed(run_report, tmp_path):
    """The last line of the log may be cut short. Steps that were repeated count once."""
    said = told(run_report, tmp_path, [step(0), step(1, 900.0), step(1), step(2)], tail='{"event":"step","st')
    assert ": 3 of 200 steps" in said and "900" not in said


def test_a_log_that_begins_late(run_report, tmp_path):
    """As where the log was lost before the run went on."""
    assert "loss        4.950 in step 6, where the log begins, 4.940 in the last" in told(run_report, tmp_path, [step(5), step(6)])


def test_a_short_run_has_points_to_draw(run_report, tmp_path):
    """Two means of 20 steps each would be a straight line."""
    pytest.importorskip("matplotlib")
    write_log(tmp_path, [step(i) for i in range(40)])
    figure = run_report.draw(run_report.read(tmp_path))
    assert [len(line.get_xdata()) for line in figure.axes[0].lines] == [40, 10]


@pytest.mark.parametrize("text, complaint", [
    (None, "No such file or directory; expected the directory that --out named"),
    ('{"event":"run"}\n', "no step is finished yet"),
    (2 * "".join(json.dumps({"event": "step", "step": i, "loss": 1}) + "\n" for i in (0, 1)),
     "log.jsonl: after step 2 it has the first step again: expected the log of one run"),
    ("[1]\n", 'log.jsonl:1: expected a JSON object with "event"'),
    ("what is this\n", 'log.jsonl:1: expected a JSON object with "event"')])
def test_no_run(tmp_path, text, complaint):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    done = subprocess.run([sys.executable, ROOT / "scripts" / "run_report.py", tmp_path], text=True, capture_output=True, check=False)
    assert done.returncode == 1 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


def compare(folder, runs, *arguments):
    """Writes logs of made-up runs, {name: events}, and compares them."""
    for name, events in runs.items():
        (folder / name).mkdir()
        (folder / name / "log.jsonl").write_text("".join(
            json.dumps(event) + "\n" for event in ({"event": "run", "options": OPTIONS}, *events)))
    return subprocess.run([sys.executable, ROOT / "scripts" / "run_report.py", *(folder / name for name in runs), *arguments],
                          text=True, capture_output=True, check=False, cwd=folder)


def line_of(steps, fall, milliseconds, tokens):
    """Steps whose loss falls in a line, with so many tokens each."""
    return [step(i, milliseconds, loss=5 - fall * i, tokens_per_second=tokens / milliseconds * 1e3) for i in range(steps)]


def test_runs_side_by_side(tmp_path):
    """40 steps of 1 s and 1,000 tokens; and 20 steps of 4 s and 4,000 tokens, which learns more from a step, but
    not from a token, nor in the same time."""
    done = compare(tmp_path, {
        "small": [*line_of(40, 0.01, 1000, 1000), {"event": "eval", "step": 40, "val_loss": 4.75, "val_bits_per_byte": 1.9}],
        "large": line_of(20, 0.02, 4000, 4000)})
    assert done.returncode == 0, done.stderr
    header, small, large, _, ahead, _, picture = done.stdout.splitlines()
    assert header.split() == "run steps tokens time loss validation bits/byte at 40.0K tokens after 40.0 s".split()
    # small ends with 4.61. After 40,000 tokens and 40 s large has done 10 steps, of which the last had 4.82.
    assert small.split() == "small 40 40.0K 40.0 s 4.610 4.750 1.9000 4.610 4.610".split()
    assert large.split() == "large 20 80.0K 1.3 min 4.620 - - 4.820 4.820".split()
    assert ahead == "Lowest training loss at 40.0K tokens: small (4.610); after 40.0 s: small (4.610)"
    assert picture == "picture: compare.png and compare.svg"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "time of training, min" in (tmp_path / "compare.svg").read_text(encoding="utf-8")


def test_runs_of_as_many_tokens_end_at_the_same_place(run_report, tmp_path):
    """Tokens are the speed times the time of a step, each rounded."""
    runs = []
    for first in (90, 97, 103):
        write_log(tmp_path, [event for i in range(100) for event in line_of(i + 1, 0.01, first + i / 7, 16384)[i:]])
        runs.append(run_report.read(tmp_path))
        run_report.run_compare.curve(runs[-1])
    rows = [line.split() for line in run_report.run_compare.table("abc", runs)[1:4]]
    assert [row[-2] for row in rows] == ["4.015"] * 3


def test_runs_of_another_folder(tmp_path):
    """The picture lies beside the runs, wherever the caller is."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    compare(tmp_path / "runs", {"a": line_of(40, 0.01, 1000, 1000), "b": line_of(20, 0.02, 4000, 4000)})
    (tmp_path / "runs" / "compare.png").unlink()
    done = subprocess.run([sys.executable, ROOT / "scripts" / "run_report.py", tmp_path / "runs/a", tmp_path / "runs/b"],
                          text=True, capture_output=True, check=False, cwd=tmp_path / "elsewhere")
    assert done.stdout.splitlines()[-1] == "picture: ../runs/compare.png and compare.svg", done.stderr
    assert (tmp_path / "runs" / "compare.png").exists() and not list((tmp_path / "elsewhere").iterdir())


VIEW = {"event": "view", "step": 20, "view": 2, "ranks": 3, "left": "rank 2 vm:14956", "joined": ""}


def test_a_name_that_is_no_text(tmp_path):
    """Letters in a picture are Unicode, and names of folders are bytes."""
    odd = os.fsdecode(b"a\xff")
    done = compare(tmp_path, {odd: line_of(40, 0.01, 1000, 1000), "b": line_of(20, 0.02, 4000, 4000)})
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "picture: compare.png and compare.svg", done.stderr


def test_a_table_that_cannot_be_written(tmp_path):
    write_log(tmp_path, [step(0), {"event": "end", "status": "complete", "val_perplexity": 3.0}])
    done = subprocess.run([sys.executable, ROOT / "scripts" / "sweeps" / "report.py", "--out", tmp_path / "no", tmp_path],
                          text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (
        1, f"report.py: {tmp_path}/no/table.md: No such file or directory; expected a folder for --out\n")


def test_a_picture_that_cannot_be_written(tmp_path):
    (tmp_path / "report.png").mkdir()
    done = report(tmp_path, [step(i) for i in range(40)])
    assert done.returncode == 1, done.stdout
    assert done.stderr == f"run_report.py: cannot write the picture {tmp_path}/report.png: Is a directory\n"


def test_a_rank_that_died(tmp_path):
    """The step in which a rank died has no times. The others make the summary, and the views are told."""
    lost = {name: None for name in step(0) if name not in ("event", "step", "loss")}
    died = [*(step(i, tokens_per_second=100) for i in range(19)), {**step(19), **lost}, VIEW,
            {**VIEW, "step": 31, "view": 3, "ranks": 4, "left": "", "joined": "rank 3 vm:15171"},
            *(step(i, tokens_per_second=100) for i in range(20, 40))]
    done = report(tmp_path, died)
    assert done.returncode == 0, done.stderr
    assert ("Ranks:\n  from step 21      rank 2 vm:14956 is gone: 3 ranks\n"
            "  from step 32      rank 3 vm:15171 is new: 4 ranks\n") in done.stdout
    assert "10.0% of gradients, 10.0% of parameters" in done.stdout and "median 100 ms" in done.stdout
    done = compare(tmp_path, {"died": died, "lived": line_of(40, 0.01, 100, 10)})
    assert done.returncode == 0 and "died" in done.stdout.splitlines()[1], done.stderr


FIELDS = [name for name in step(0, tokens_per_second=1.0, extra_traffic=0.0, lag=0.0, late=0) if name not in ("event", "step")]


def with_gaps(field, missing):
    """A run in which a number of every other step, of the evaluation and of the end is null, absent or larger than any float."""
    def without(event):
        gone = [name for name in event if name not in ("event", "step", "status") and field in (name, "all")]
        instead = {"null": None, "too large": 10 ** 400}
        return {**event, **{name: instead[missing] for name in gone}} if missing in instead else {
            name: value for name, value in event.items() if name not in gone}
    more = {"tokens_per_second": 100.0, "extra_traffic": 0.1, "lag": 0.0, "late": 0}
    steps = [without(step(i, **more)) if i % 2 else step(i, **more) for i in range(60)]
    return [*steps, without({"event": "eval", "step": 60, "val_loss": 3.0, "val_bits_per_byte": 1.5}),
            without({"event": "links", "lost": [[0, None], [0.1, 0]]}), without({"event": "end", "status": "complete"})]


def test_numbers_that_are_missing(run_report, tmp_path):
    run_compare = run_report.run_compare
    for field in [*FIELDS, "all"]:
        for missing in ("null", "absent"):
            events = [{"event": "run", "options": OPTIONS}, *with_gaps(field, missing)]
            (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
            run = run_report.read(tmp_path)
            assert "60 of 200 steps, complete" in "\n".join(run_report.summary(tmp_path, run)), (field, missing)
            run_compare.curve(run)
            assert run_compare.table(["a", "b"], [run, run])[1].split()[0] == "a", (field, missing)


@pytest.mark.parametrize("missing", ["null", "absent", "too large"])
def test_a_picture_with_gaps(tmp_path, missing):
    events = [event for event in with_gaps("all", missing) if missing != "too large" or event["event"] != "links"]
    done = report(tmp_path, events)
    assert done.returncode == 0, done.stderr
    exported = subprocess.run([sys.executable, ROOT / "scripts" / "export.py", tmp_path, "--csv", tmp_path / "x"],
                              text=True, capture_output=True, check=False)
    assert exported.returncode == 0 and len((tmp_path / "x").read_text().splitlines()) == 61, exported.stderr


@pytest.mark.parametrize("event", [{"event": "links", "lost": 5}, {"event": "late_ranks", "steps": 7},
                                   {"event": "run", "options": "none"}])
def test_a_line_of_another_kind(tmp_path, event):
    done = report(tmp_path, [step(0), event])
    assert done.returncode == 1
    assert re.fullmatch(r"run_report.py: .*: a line of the log is not as train_llama2 writes it: .*\n", done.stderr)


def test_a_fault_of_the_picture_is_not_one_of_the_log(run_report, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    write_log(tmp_path, [step(i) for i in range(40)])
    monkeypatch.setattr(sys, "argv", ["run_report.py", str(tmp_path)])
    monkeypatch.setattr(run_report, "save", lambda *_: int("no number"))
    with pytest.raises(ValueError, match="no number"):
        run_report.main()


def test_curves_are_smoothed(tmp_path):
    """Of a run of 200 steps, 4 steps each are averaged; --png names the picture; names are short."""
    noisy = [step(i, loss=4 + (i % 2), tokens_per_second=10) for i in range(200)]
    done = compare(tmp_path, {"a": noisy, "b": noisy}, "--png", tmp_path / "my.png")
    assert done.stdout.splitlines()[1].split()[0] == "a" and " 4.500 " in done.stdout, done.stderr
    assert (tmp_path / "my.png").exists() and not (tmp_path / "compare.png").exists()


# What /proc says of this process alone: getrusage() counts what its parent held before exec (getrusage(2)).
MEMORY = """
import os, re, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
print(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
"""


def test_a_long_run_takes_little_memory(tmp_path):
    """A step takes at most 400 bytes: 300,000 steps some 120 MB, beside what a short run's picture takes."""
    kilobytes = []
    for steps in (100, 40000):
        more = {f"number{i}": i + 0.5 for i in range(14)}
        write_log(tmp_path, [step(0)])
        first = (tmp_path / "log.jsonl").read_text().splitlines()[0]
        (tmp_path / "log.jsonl").write_text("\n".join([first, *(json.dumps(step(i, **more)) for i in range(steps))]) + "\n")
        done = subprocess.run([sys.executable, "-c", MEMORY, ROOT / "scripts" / "run_report.py", tmp_path], text=True,
                              capture_output=True, check=True)
        assert f": {steps} of 200 steps" in done.stdout
        kilobytes.append(int(done.stdout.splitlines()[-1]))
    assert kilobytes[1] - kilobytes[0] < 40000 * 0.4, kilobytes

"""Tests scripts/run_report.py: its report of made-up logs, and its errors about files that are no logs."""
import json
import subprocess

import pytest

from program import ROOT

OPTIONS = {"algorithm": "lossy", "workers": 8, "steps": 200}


def step(number, milliseconds=100.0, lost=0.1, **changes):
    return {"event": "step", "step": number, "loss": 5 - number / 100, "step_ms": milliseconds,
            "communication_ms": milliseconds / 4, "gradient_loss_rate": lost, "parameter_loss_rate": 0.1,
            "drift": 0.5, "drift_expected": None, "max_age": 7, **changes}


def report(folder, events, tail=""):
    lines = [json.dumps(event) for event in
             ({"event": "run", "options": OPTIONS, "link": "udp", "ranks": 4}, *events)]
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n" + tail, encoding="utf-8")
    return subprocess.run([ROOT / "scripts" / "run_report.py", folder], text=True, capture_output=True,
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


def test_changes_are_told_once_each(tmp_path):
    """Steps 81 to 140 are slow, and gradients are lost from step 121 on. Each change is reported once."""
    done = report(tmp_path, [step(i, 300 if 81 <= i <= 140 else 100, 0.3 if i > 120 else 0.1, stragglers=int(i == 90))
                             for i in range(200)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("Changes:\n")[1].splitlines() == [
        "  from step 81      median step time rose from 100 ms to 300 ms",
        "  from step 121     lost gradients rose from 10.0% to 30.0%",
        "  from step 141     median step time fell back to 100 ms"]
    assert "goes on, or was killed" in done.stdout and "network     1 stragglers" in done.stdout


def test_one_slow_step_is_named(tmp_path):
    done = report(tmp_path, [step(i, 607 if i == 33 else 108) for i in range(60)])
    assert "the longest, step 33, took 607 ms" in done.stdout and "Changes" not in done.stdout


def test_a_run_that_goes_on_and_one_that_was_resumed(tmp_path):
    """The last line of the log may be cut short. Steps that were repeated count once."""
    done = report(tmp_path, [step(0), step(1, 900.0), step(1), step(2)], tail='{"event":"step","st')
    assert done.returncode == 0, done.stderr
    assert ": 3 of 200 steps" in done.stdout and "900" not in done.stdout


@pytest.mark.parametrize("text, complaint", [
    (None, "No such file or directory; expected the directory that --out named"),
    ('{"event":"run"}\n', "no step is finished yet"),
    ("[1]\n", 'log.jsonl:1: expected a JSON object with "event"'),
    ("what is this\n", 'log.jsonl:1: expected a JSON object with "event"')])
def test_no_run(tmp_path, text, complaint):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    done = subprocess.run([ROOT / "scripts" / "run_report.py", tmp_path], text=True, capture_output=True, check=False)
    assert done.returncode == 1 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


def compare(folder, runs, *arguments):
    """Writes logs of made-up runs, {name: events}, and compares them."""
    for name, events in runs.items():
        (folder / name).mkdir()
        (folder / name / "log.jsonl").write_text("".join(
            json.dumps(event) + "\n" for event in ({"event": "run", "options": OPTIONS}, *events)))
    return subprocess.run([ROOT / "scripts" / "run_report.py", *(folder / name for name in runs), *arguments],
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
    header, small, large, _, ahead = done.stdout.splitlines()
    assert header.split() == "run steps tokens time loss validation bits/byte at 40.0K tokens after 40.0 s".split()
    # small ends with 4.61. After 40,000 tokens and 40 s large has done 10 steps, of which the last had 4.82.
    assert small.split() == "small 40 40.0K 40.0 s 4.610 4.750 1.9000 4.610 4.610".split()
    assert large.split() == "large 20 80.0K 1.3 min 4.620 - - 4.820 4.820".split()
    assert ahead == "Lowest training loss at 40.0K tokens: small (4.610); after 40.0 s: small (4.610)"
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_smoothed(tmp_path):
    """Of a run of 200 steps, 4 steps each are averaged; --png names the picture; names are short."""
    noisy = [step(i, loss=4 + (i % 2), tokens_per_second=10) for i in range(200)]
    done = compare(tmp_path, {"a": noisy, "b": noisy}, "--png", tmp_path / "my.png")
    assert done.stdout.splitlines()[1].split()[0] == "a" and " 4.500 " in done.stdout, done.stderr
    assert (tmp_path / "my.png").exists() and not (tmp_path / "compare.png").exists()

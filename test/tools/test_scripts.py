"""Tests the scripts as users call them."""
import subprocess

import numpy as np
import pytest

from program import BUILD, ROOT, TIMEOUT, environment_of, read_log, write_tokens

pytestmark = pytest.mark.takes(30)


def call(*command, **environment):
    env = environment_of({"TRAIN_LLAMA2": str(BUILD / "train_llama2"), **environment})
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=env, text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)


def test_quickstart_from_text_to_plot(tmp_path):
    """The whole quickstart runs, with 4 steps instead of 560, and evaluates on a part of the held-out text."""
    held_out = tmp_path / "data" / "kjv_val.bin"
    done = call("scripts/quickstart.sh", tmp_path, TRAIN_LLAMA2="false")
    assert done.returncode == 1 and "2/5  No loss" in done.stdout and "3/5" not in done.stdout
    write_tokens(held_out, np.fromfile(held_out, dtype="<u2", offset=1024)[:1500], 2048)
    done = call("scripts/quickstart.sh", tmp_path, STEPS="4")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines()
            if line.startswith(("reliable ", "plain ", "lossy ")) and "%" in line]
    assert rows == ["reliable", "plain", "lossy"]
    long = [line for line in done.stdout.splitlines() if len(line) > 80 and str(tmp_path) not in line]
    assert not long
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "table.md").read_text().splitlines()) == 5
    for name in ("reliable", "plain", "lossy"):
        assert read_log(tmp_path / name / "log.jsonl")[-1]["status"] == "complete"
        assert (tmp_path / name / "checkpoint-00000004" / "tokenizer.model").exists()
    # A second call replaces the runs, and fails if the last command does.
    mute = tmp_path / "mute"
    mute.write_text(f'#!/bin/sh\ncase "$*" in *--generate*) exit 3 ;; esac\nexec {BUILD}/train_llama2 "$@"\n')
    mute.chmod(0o755)
    done = call("scripts/quickstart.sh", tmp_path, STEPS="1", TRAIN_LLAMA2=str(mute))
    assert done.returncode == 3 and "5/5" in done.stdout, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "lossy").glob("checkpoint-*")] == ["checkpoint-00000001"]
    text = (tmp_path / "data" / "kjv.txt").read_text(encoding="utf-8")
    assert "In the beginning God created the heaven and the earth." in text
    assert len(text) > 4_000_000 and ":" not in text.split("\n", 3)[2].split()[0]


def test_report_refuses_a_run_that_did_not_end(tmp_path):
    done = call("scripts/sweeps/report.py", "--out", tmp_path, tmp_path)
    assert done.returncode == 1 and "log.jsonl" in done.stderr
    (tmp_path / "log.jsonl").write_text('{"event":"run"}\n')
    done = call("scripts/sweeps/report.py", "--out", tmp_path, tmp_path)
    assert done.returncode == 1 and "did not end" in done.stderr
    (tmp_path / "log.jsonl").write_text("{\n")
    done = call("scripts/sweeps/report.py", "--out", tmp_path, tmp_path)
    assert done.returncode == 1 and "log.jsonl:1" in done.stderr


def test_dependencies_has_nothing_to_say_when_all_is_there():
    for purpose in "quickstart", "check", "test":
        assert call("scripts/dependencies.sh", purpose).stdout == ""


@pytest.mark.parametrize("command, code, said", [
    (["env", "STEPS=1e3", "scripts/quickstart.sh"], 2, "quickstart.sh: STEPS is '1e3', expected a positive whole number"),
    (["scripts/dependencies.sh"], 2, "usage: scripts/dependencies.sh build|"),
    (["scripts/dependencies.sh", "nonsense"], 2, "usage: scripts/dependencies.sh build|"),
    (["data/train_tokenizer.sh", "absent.txt", "4096"], 1, "train_tokenizer.sh: cannot read the text 'absent.txt'"),
    (["data/train_tokenizer.sh", "data", "4096"], 1, "train_tokenizer.sh: cannot read the text 'data'")])
def test_a_mistake_is_answered_in_one_line(command, code, said):
    done = call(*command)
    assert done.returncode == code and len(done.stderr.splitlines()) == 1 and done.stderr.startswith(said)


@pytest.mark.parametrize("name, said", [
    ("none", "none: No such file or directory; expected what --record-loss wrote"),
    ("text", "text, line 1: expected what --record-loss writes"),
    ("one worker", "no file has packets: expected what --record-loss writes of several workers"),
    ("record record", "record, line 1: step 0 of this link comes after step 0: expected each record once, in order of steps"),
    ("record put_in_order", "put_in_order, line 2: expected what --record-loss writes"),
])
def test_loss_trace_refuses_in_one_line(tmp_path, name, said):
    (tmp_path / "text").write_bytes(b"\xffno trace\n")
    (tmp_path / "one worker").write_bytes(b"# end\n")
    (tmp_path / "record").write_text("# step 0, gradient, worker 1 to 0\n01\n# end\n")
    (tmp_path / "put_in_order").write_text("# gradient, worker 1 to 0\n01\n")
    names = name.split() if "record" in name else [name]
    done = subprocess.run([ROOT / "scripts" / "loss_trace.py", *names], cwd=tmp_path, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 1 and done.stderr == said + "\n"

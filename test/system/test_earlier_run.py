"""Tests that a run does not overwrite files of an earlier run, unless it is told to."""
import hashlib
import signal
import socket

import pytest

from program import events, markov_files, run, start, succeed, wait_for

pytestmark = pytest.mark.spread


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), 512, 5000, 600)


def line(data, *more):
    return ["--model=260K", f"--train={data}/train.bin", "--batch=1", "--seq=32", "--drift-samples=64",
            *(["--steps=4"] if not any("--steps" in str(m) for m in more) else []),
            *(["--save-every=2"] if any("--out" in str(m) for m in more) else []),
            *more]


def contents(folder):
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.is_file() and
                                       hashlib.sha256(path.read_bytes()).hexdigest())
            for path in folder.rglob("*")}


def refused(done, code, *texts):
    assert done.returncode == code, done.stdout + done.stderr
    told = [text for text in done.stderr.splitlines() if text.startswith("train_llama2: ")]
    assert len(told) == 1, done.stderr
    for text in texts:
        assert text in told[0], told[0]


@pytest.fixture(scope="module")
def earlier(data, tmp_path_factory):
    """A run of 4 steps. Tests must not change it."""
    out = tmp_path_factory.mktemp("earlier")
    succeed(*line(data, f"--out={out}"))
    before = contents(out)
    yield out
    assert contents(out) == before


@pytest.mark.parametrize("ranks", [0, 2])
def test_the_same_line_again_is_refused(data, earlier, ranks):
    done = run(*line(data, f"--out={earlier}"), ranks=ranks)
    refused(done, 1, f"--out: '{earlier}' holds an earlier run (checkpoint-00000004)",
            "--resume auto", "--overwrite")


def test_a_run_that_had_no_checkpoint_yet(data, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event":"run"}\n')
    refused(run(*line(data, f"--out={tmp_path}")), 1, "holds an earlier run (log.jsonl)")
    assert (tmp_path / "log.jsonl").read_text() == '{"event":"run"}\n'
    succeed(*line(data, f"--out={tmp_path}", "--resume=auto"))
    assert len(events(tmp_path / "log.jsonl", "step")) == 4


def test_only_a_checkpoint(data, tmp_path):
    (tmp_path / "checkpoint-00000002").mkdir()
    refused(run(*line(data, f"--out={tmp_path}")), 1, "holds an earlier run (checkpoint-00000002)")


def test_other_files_are_no_run(data, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "log.jsonl").write_text("")
    succeed(*line(data, f"--out={tmp_path}"))
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "checkpoint-best").is_dir()


@pytest.mark.parametrize("name", ["checkpoint-00000001.partial", "checkpoint-00000001"])
def test_what_is_in_the_way_of_the_last_checkpoint_is_told_at_the_start(data, tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes.txt").write_text("mine")
    refused(run(*line(data, f"--out={tmp_path}", "--steps=1", "--overwrite")), 1,
            f"{name}' by a checkpoint: it holds 'notes.txt'")
    assert not (tmp_path / "log.jsonl").exists()


def test_overwrite_replaces_the_run(data, tmp_path):
    succeed(*line(data, f"--out={tmp_path}"))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-00000099").mkdir()  # not written by a run
    succeed(*line(data, f"--out={tmp_path}", "--overwrite", "--steps=1"))
    assert len(events(tmp_path / "log.jsonl", "run")) == 1
    assert len(events(tmp_path / "log.jsonl", "step")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-00000001", "checkpoint-00000099", "log.jsonl", "notes.txt"]


def test_overwrite_that_cannot_start_removes_no_checkpoint(data, tmp_path):
    succeed(*line(data, f"--out={tmp_path}"))
    done = run(*line(data, f"--out={tmp_path}", "--overwrite", f"--val={tmp_path}/none.bin"))
    refused(done, 1, "no file matches")
    assert (tmp_path / "checkpoint-00000004" / "trainer.json").exists()
    assert len(events(tmp_path / "log.jsonl", "step")) == 4


def test_overwrite_spares_the_model_it_starts_from(data, tmp_path):
    succeed(*line(data, f"--out={tmp_path}"))
    first = tmp_path / "checkpoint-00000002"
    model = (first / "model.safetensors").read_bytes()
    succeed(*line(data, f"--out={tmp_path}", "--overwrite", f"--model={first}", "--steps=1"))
    assert (first / "model.safetensors").read_bytes() == model
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-00000001", "checkpoint-00000002"]


def test_resuming_from_elsewhere(data, earlier, tmp_path):
    """A run goes on from its own checkpoints, and a run in a new folder from any. If the folder has another
    run, it is refused, since that run would be overwritten."""
    succeed(*line(data, f"--out={tmp_path}/other"))
    there = tmp_path / "other" / "checkpoint-00000002"
    refused(run(*line(data, f"--out={earlier}", f"--resume={there}")), 1, "holds an earlier run")
    succeed(*line(data, f"--out={tmp_path}/other", f"--resume={there}"))
    succeed(*line(data, f"--out={tmp_path}/new", f"--resume={there}"))


def test_overwrite_and_resume_auto(data, earlier):
    done = run(*line(data, f"--out={earlier}", "--overwrite", "--resume=auto"))
    refused(done, 2, "--overwrite: expected without --resume auto")


# ---- --log ----

def test_a_log_that_exists(data, tmp_path):
    log = tmp_path / "log"
    log.write_text("")  # as mktemp makes it
    succeed(*line(data, f"--log={log}"))
    before = log.read_bytes()
    refused(run(*line(data, f"--log={log}")), 1, f"the log '{log}' exists already", "--overwrite")
    refused(run("--eval", "--model=260K", f"--log={log}"), 1, "the log")
    assert log.read_bytes() == before
    succeed(*line(data, f"--log={log}", "--overwrite", "--steps=1"))
    assert len(events(log, "step")) == 1
    (tmp_path / "notes.txt").write_text("mine")
    refused(run(*line(data, f"--log={tmp_path}/notes.txt", "--overwrite")), 1, "is no log of this program")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    succeed(*line(data, "--log=/dev/null"))


def test_evaluation_keeps_the_log_of_training(data, earlier):
    done = run("--eval", f"--model={earlier}/checkpoint-00000004", f"--val={data}/val.bin",
               f"--out={earlier}")
    refused(done, 1, f"the log '{earlier}/log.jsonl' exists already")


def test_resuming_with_a_file_that_is_no_log(data, earlier, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine\n")
    for resume, out in ((f"{earlier}/checkpoint-00000002", tmp_path / "a"), ("auto", tmp_path / "b")):
        done = run(*line(data, f"--out={out}", f"--resume={resume}", f"--log={notes}"))
        refused(done, 1, f"--log: '{notes}' is no log of this program")
    assert notes.read_text() == "mine\n"


def test_two_runs_do_not_share_a_folder(data, tmp_path):
    """The second run is refused as long as the first lives. A killed one keeps no lock."""
    first = start(*line(data, f"--out={tmp_path}", "--steps=1000000"))
    try:
        wait_for(lambda: list(tmp_path.glob("checkpoint-*/trainer.json")), first, "checkpoint")
        first.send_signal(signal.SIGSTOP)  # else it may remove a checkpoint that is being read
        for ranks in (0, 2):
            done = run(*line(data, f"--out={tmp_path}", "--resume=auto"), ranks=ranks)
            refused(done, 1, f"--out: another run is writing to '{tmp_path}' (host {socket.gethostname()}, "
                             f"process {first.pid})")
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    done = events(tmp_path / "log.jsonl", "step")[-1]["step"] + 1
    succeed(*line(data, f"--out={tmp_path}", "--resume=auto", f"--steps={done + 9}"))
    assert not (tmp_path / "lock").exists()

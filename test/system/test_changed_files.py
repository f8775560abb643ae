"""Tests runs whose files change while they are read: nothing wrong comes out of them with exit code 0."""
import os
import re
import shutil
import signal

import pytest

from program import (ROOT, TIMEOUT, events, markov_tokens, one_line, run, small_model, steps_done, succeed, wait_for,
                     write_tokens)
from test_resume import VOCABULARY, checkpoint, data, settings, start  # pylint: disable=unused-import

pytestmark = [pytest.mark.spread, pytest.mark.takes(20)]

HEADER = 1024


@pytest.fixture(name="train")
def make_train(tmp_path):
    path = tmp_path / "train.bin"
    write_tokens(path, markov_tokens(20_000, VOCABULARY, 1), VOCABULARY)
    return path


def overwrite(path, content, at=HEADER):
    """In place, as cp and rsync --inplace do."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(content)


def cut(path):
    os.truncate(path, 0)


def ids_of_another_vocabulary(path):
    overwrite(path, b"\xa0\x0f" * 20_000)


def other_text(path):
    overwrite(path, bytes(2 * 20_000))


def one_token(path):
    """Far from the tokens that are read, perhaps."""
    overwrite(path, b"\x00\x00" if path.read_bytes()[30_000:30_002] != b"\x00\x00" else b"\x01\x00", at=30_000)


def said_by(process):
    """The only line that a run has reported before it ended with exit code 1."""
    _, errors = process.communicate(timeout=TIMEOUT)
    lines = [line for line in errors.splitlines() if line.startswith("train_llama2: ")]
    assert process.returncode == 1 and len(lines) == 1, errors
    return lines[0]


@pytest.mark.parametrize("change, said", [
    (cut, "has become shorter while it is read"),
    (ids_of_another_vocabulary, "the file has changed since the run began"),
    (other_text, "the file has changed since the run began"),
    (one_token, "the file has changed since the run began")])
def test_training_data_that_change(data, train, tmp_path, change, said):
    out = tmp_path / "out"
    process = start(*settings(data, out, train=train, val=None, steps=1_000_000, save_every=5, keep=1))
    wait_for(lambda: steps_done(out) >= 6, process, "step 6")
    change(train)
    line = said_by(process)
    assert f"'{train}'" in line and said in line
    assert not list(out.glob("*.partial")) and not events(out / "log.jsonl", "end")


def test_all_ranks_end(data, train, tmp_path):
    out = tmp_path / "out"
    process = start(*settings(data, out, train=train, val=None, steps=1_000_000, save_every=0), ranks=2)
    wait_for(lambda: steps_done(out) >= 2, process, "step 2")
    cut(train)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1 and "has become shorter while it is read" in errors
    assert not list(out.glob("checkpoint*"))


def test_a_change_before_the_last_checkpoint(data, train, tmp_path):
    """It is found although no step follows."""
    out = tmp_path / "out"
    process = start(*settings(data, out, train=train, val=None, steps=1_000_000, save_every=0))
    wait_for(lambda: steps_done(out) >= 2, process, "step 2")
    process.send_signal(signal.SIGSTOP)
    one_token(train)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert "the file has changed" in said_by(process)
    assert not list(out.glob("checkpoint*"))


def touch(path):
    os.utime(path)


def same_bytes(path):
    overwrite(path, path.read_bytes()[HEADER:])


def another_file_of_that_name(path):
    other = path.with_name("other")
    other.write_bytes(b"no token file")
    other.rename(path)


@pytest.mark.parametrize("change", [touch, same_bytes, another_file_of_that_name, os.unlink])
def test_what_is_no_change(data, train, tmp_path, change):
    """The run reads the file that it has opened."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    common = dict(train=train, val=None, steps=20, save_every=0)
    succeed(*settings(data, whole, **common))
    process = start(*settings(data, out, **common))
    wait_for(lambda: steps_done(out) >= 2, process, "step 2")
    change(train)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0 and not errors, output + errors
    assert [e["loss"] for e in events(out / "log.jsonl", "step")] == [
        e["loss"] for e in events(whole / "log.jsonl", "step")]


@pytest.mark.parametrize("change", [cut, ids_of_another_vocabulary])
def test_validation_data_that_change(data, tmp_path, change):
    """--eval prints no perplexity then."""
    val = tmp_path / "val.bin"
    write_tokens(val, markov_tokens(1000, VOCABULARY, 2).repeat(20), VOCABULARY)
    succeed(*settings(data, tmp_path / "out", steps=1, val=None))
    process = start("--eval", f"--model={checkpoint(tmp_path / 'out', 1)}", f"--val={val}", "--seq=32",
                    "--stride=1", f"--log={tmp_path / 'log'}")
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").stat().st_size > 0, process, "log")
    process.send_signal(signal.SIGSTOP)
    change(val)
    process.send_signal(signal.SIGCONT)
    assert f"'{val}'" in said_by(process)
    assert not events(tmp_path / "log", "eval")


@pytest.mark.parametrize("lines, said", [
    (slice(4, 7), "steps 3 to 5"), (slice(8, None), "steps 7 to 11"), (slice(0, 4), "steps 0 to 2"),
    (slice(0, None), None)])
def test_a_log_with_a_gap(data, tmp_path, lines, said):
    """As after a loss of power. The run goes on, and says it."""
    common = dict(val=None, save_every=0)
    succeed(*settings(data, tmp_path, steps=12, **common))
    log = tmp_path / "log.jsonl"
    kept = log.read_text(encoding="utf-8").splitlines(keepends=True)
    del kept[lines]
    log.write_text("".join(kept), encoding="utf-8")
    done = succeed(*settings(data, tmp_path, steps=14, resume="auto", schedule="constant", **common))
    assert (f"the log '{log}' has no lines of {said}" in done.stderr) if said else not done.stderr
    assert events(log, "step")[-1]["step"] == 13


@pytest.mark.parametrize("make", [None, os.symlink, os.link, lambda old, new: new.write_bytes(old.read_bytes())])
def test_a_file_of_both_training_and_validation(data, tmp_path, make):
    """Such as by --train 'x_*.bin' --val x_val.bin."""
    (tmp_path / "x_000.bin").write_bytes((data / "train.bin").read_bytes())
    (tmp_path / "x_001.bin").write_bytes((data / "val.bin").read_bytes())
    val = tmp_path / ("other.bin" if make else "x_001.bin")
    if make:
        make(tmp_path / "x_001.bin", val)
    both = succeed(*settings(data, tmp_path / "out", train=tmp_path / "x_*.bin", val=val, steps=1), ranks=2)
    assert both.stderr.count(f"--train has the file '{val}' of --val, too, or a copy of it") == 1  # not by each rank
    assert not succeed(*settings(data, tmp_path / "apart", steps=1)).stderr


# ---- data and tokenizers that do not belong together ----

def test_a_resumed_run_says_that_its_data_are_others(tmp_path):
    """As many tokens as before, of another text."""
    data, out = tmp_path / "train.bin", tmp_path / "out"
    command = ["--model=260K", f"--train={data}", "--seq=16", "--batch=1", "--steps=4", f"--out={out}"]
    write_tokens(data, markov_tokens(3000, 300, 1), 512)
    succeed(*command)
    said = succeed(*command[:-2], "--steps=6", f"--out={out}", "--resume=auto").stdout
    assert "train_checksum" not in said
    write_tokens(data, markov_tokens(3000, 300, 2), 512)
    said = succeed(*command[:-2], "--steps=6", f"--out={tmp_path}/again", f"--resume={out}/checkpoint-00000004").stdout
    assert re.search(r'cannot be identical:\n  train_checksum was "\w{16}", is "\w{16}"\n', said), said


def test_tokenizers_that_differ_are_told(tmp_path):
    """The tokenizers beside --train, beside --val and in --model; vocabularies of token files."""
    for folder, text in ("a", "one"), ("b", "one"), ("c", "other"):
        (tmp_path / folder).mkdir()
        write_tokens(tmp_path / folder / "data.bin", markov_tokens(600, 60, ord(folder)), 64)
        (tmp_path / folder / "tokenizer.model").write_text(text)
    write_tokens(tmp_path / "d.bin", markov_tokens(600, 60, 4), 70)
    small_model(tmp_path / "model", 64)
    shutil.copy(tmp_path / "a" / "tokenizer.model", tmp_path / "model")

    def said(*options):
        done = succeed("--seq=16", *options)
        return done.stderr

    train = ["--model=260K", "--steps=1", "--batch=1", f"--train={tmp_path}/a/data.bin"]
    assert said(*train, f"--val={tmp_path}/b/data.bin") == ""
    line = said(*train, f"--val={tmp_path}/c/data.bin")
    assert line.count("\n") == 1 and f"'{tmp_path}/c/tokenizer.model', beside the files of --val, differs from" in line
    assert "vocabulary of 70, --train with one of 64" in said(*train, f"--val={tmp_path}/d.bin", "--vocab-size=80")
    evaluation = ["--eval", f"--model={tmp_path}/model"]
    assert said(*evaluation, f"--val={tmp_path}/a/data.bin") == ""
    write_tokens(tmp_path / "e.bin", markov_tokens(600, 40, 5), 40)
    assert "--val was made with a vocabulary of 40, the model has 64: expected" in said(*evaluation, f"--val={tmp_path}/e.bin")
    assert "the model's: if their ids stand for other text" in said(*evaluation, f"--val={tmp_path}/c/data.bin")
    assert "beside the files of --train, differs" in said(
        f"--model={tmp_path}/model", "--steps=1", f"--train={tmp_path}/c/data.bin", "--batch=1")


def test_a_warm_up_that_is_longer_than_the_run_is_told(tmp_path):
    write_tokens(tmp_path / "train.bin", markov_tokens(600, 60, 1), 64)
    four = ["--model=260K", "--seq=16", "--batch=1", f"--train={tmp_path}/train.bin", "--steps=4"]
    assert "--warmup 5: training ends after 4 steps, before the rate has reached --lr\n" in succeed(*four, "--warmup=5").stdout
    assert "training ends" not in succeed(*four, "--warmup=4").stdout
    said = succeed(*four, "--warmup=3", "--schedule=wsd", "--decay=0.5").stdout
    assert "--decay 0.5: the rate falls only after --warmup, in the last 1 steps\n" in said
    assert "falls only" not in succeed(*four, "--warmup=2", "--schedule=wsd", "--decay=0.5").stdout


def test_a_text_that_ends_at_an_id_without_text_is_told(tmp_path):
    """The tokenizer has 97 ids, and the model 4,000."""
    small_model(tmp_path / "model", 4000)
    tokenizer = ROOT / "test" / "goldens" / "tokenizer.model"
    done = succeed("--generate=Once", f"--model={tmp_path}/model", f"--tokenizer={tokenizer}", "--temperature=1", "--top-p=1")
    assert re.fullmatch(r"train_llama2: the text ends at id \d+: the model has 4000 ids, the tokenizer 97; .*\n", done.stderr)


def test_a_model_with_an_adapter_is_refused(tmp_path):
    """Without the adapter its perplexity would be another model's."""
    small_model(tmp_path / "model", 64)
    write_tokens(tmp_path / "val.bin", markov_tokens(600, 60, 1), 64)
    command = ["--eval", f"--model={tmp_path}/model", f"--val={tmp_path}/val.bin", "--seq=16"]
    succeed(*command)
    (tmp_path / "model" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "has an adapter (adapter_config.json)" in one_line(run(*command), 1)


# ---- launchers ----

@pytest.mark.parametrize("size, rank", [("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"), ("WORLD_SIZE", "LOCAL_RANK")])
def test_processes_that_do_not_know_each_other(tmp_path, size, rank):
    """torchrun, and srun without MPI, start processes of which each would train alone."""
    write_tokens(tmp_path / "train.bin", markov_tokens(600, 60, 1), 64)
    command = ["--model=260K", "--seq=16", "--batch=1", f"--train={tmp_path}/train.bin", "--steps=1"]
    succeed(*command, environment={size: "1", rank: "0"})
    succeed(*command, environment={size: "4"})  # it may stand in a shell
    done = run(*command, environment={size: "4", rank: "1"})
    assert f"started with {size}=4, but this process finds no other rank: expected" in one_line(done, 2)


# ---- what must not change a result ----

def test_evaluation_does_not_depend_on_its_batch_and_changes_no_training(tmp_path):
    """Also with an incomplete last batch; and as many sequences in more micro-batches are the same step."""
    write_tokens(tmp_path / "train.bin", markov_tokens(3000, 60, 1), 64)
    write_tokens(tmp_path / "val.bin", markov_tokens(705, 60, 2), 64)
    command = ["--model=260K", "--seq=32", "--steps=3", "--clip=0.5", f"--train={tmp_path}/train.bin", "--packet-bytes=512"]

    def losses(name, *more):
        succeed(*command, f"--out={tmp_path}/{name}", *more)
        return [(e["loss"], e["grad_norm"]) for e in events(tmp_path / name / "log.jsonl", "step")]

    lossy = ["--workers=2", "--loss-rate=0.2", "--batch=1"]
    plain = losses("plain", *lossy)
    assert losses("evaluated", *lossy, "--eval-every=1", f"--val={tmp_path}/val.bin", "--save-every=1") == plain
    once = losses("once", "--batch=4")
    for i, more in enumerate((["--batch=1", "--micro-batches=4"], ["--batch=2", "--micro-batches=2"])):
        for mine, other in zip(losses(f"more{i}", *more), once):
            assert mine == pytest.approx(other, rel=1e-5)
    said = {succeed("--eval", f"--model={tmp_path}/plain/checkpoint-00000003", f"--val={tmp_path}/val.bin", "--seq=32",
                    f"--batch={batch}", f"--workers={workers}").stdout for batch, workers in ((1, 1), (3, 1), (8, 1), (2, 3))}
    assert len(said) == 1, said

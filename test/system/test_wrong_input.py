"""Tests what the program says of wrong input: one line, the right exit code, and nothing left that looks whole."""
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from program import (PROGRAM, TIMEOUT, markov_tokens, one_line, preloaded, read_log, run, run_apart, succeed,
                     write_tokens)
from test_program import VOCABULARY, data, model, settings, train  # pylint: disable=unused-import

pytestmark = [pytest.mark.spread, pytest.mark.takes(40)]


@pytest.mark.parametrize("arguments, said", [
    ([], "expected --train GLOB"),
    (["--no-such-option"], "--no-such-option: unknown"),
    (["--steps"], "expected a value"),
    (["--steps", "0"], "--steps: expected a whole number, at least 1, got '0'"),
    (["--steps", "ten"], "got 'ten'"),
    (["--steps", "99999999999"], "--steps: expected a whole number from 1 to 2147483647, got '99999999999'"),
    (["--loss-rate", "1.5"], "--loss-rate: expected a number from 0 to 1, or two with a comma, got '1.5'"),
    (["--loss-rate", "-0.1"], "got '-0.1'"),
    (["--loss-rate", "nan"], "got 'nan'"),
    (["--loss-rate", "0.1,2"], "--loss-rate: expected a number from 0 to 1, or two with a comma, got '0.1,2'"),
    (["--loss-rate", "0.1,0,0"], "or two with a comma, got '0.1,0,0'"),
    (["--algorithm", "magic"], "--algorithm: expected one of lossy reliable rps naive"),
    (["--estimator", "median"], "--estimator: expected one of mean balanced zero, got 'median'"),
    (["--carry", "1", "--estimator", "balanced"], "--carry: expected estimator mean or zero, got balanced"),
    (["--carry", "1", "--algorithm", "rps"], "--carry: expected --algorithm lossy, got rps"),
    (["--lead", "1"], "--lead: expected one of auto off, got '1'"),
    (["--look-ahead", "-1"], "--look-ahead: expected a number from 0 to 100, got '-1'"),
    (["--look-ahead", "1", "--algorithm", "naive"],
     "--look-ahead: expected --algorithm lossy or reliable"),
    (["--carry", "2"], "--carry: expected auto or a number from 0 to 1, got '2'"),
    (["--repair", "often"], "--repair: expected auto or a whole number from 0 to 16, or two with a comma, got 'often'"),
    (["--dtype", "fp8"], "--dtype: expected one of auto float32 bf16, got 'fp8'"),
    (["--wire-dtype", "fp8"], "--wire-dtype: expected one of float32 bf16 int8 int6 int4 auto, got 'fp8'"),
    (["--wire-dtype", "bf16", "--algorithm", "rps"],
     "--wire-dtype bf16: expected --algorithm lossy or reliable, got rps"),
    (["--wire-dtype", "bf16", "--algorithm", "naive"],
     "--wire-dtype bf16: expected --algorithm lossy or reliable, got naive"),
    (["--wire-dtype", "int8", "--algorithm", "rps"],
     "--wire-dtype int8: expected --algorithm lossy or reliable, got rps"),
    (["--repair-budget", "-0.1"], "--repair-budget: expected auto or a number from 0 to 1000, got '-0.1'"),
    (["--repair", "0", "--repair-budget", "0.2"], "--repair-budget: expected --repair too"),
    (["--loss-model", "sunspots"], "--loss-model: "),
    (["--loss-model", "burst:0"], "--loss-model: "),
    (["--loss-model", "burst:2", "--loss-rate", "0.9"], "--loss-model: "),
    (["--loss-model", "trace:/no/such/file"], "/no/such/file"),
    (["--loss-model", "trace:/dev/zero"], "loss trace /dev/zero: a pipe or device: expected a regular file"),
    (["--loss-model", "replay:/dev/zero"], "replay /dev/zero: expected this file, or FILE.0"),
    (["--loss-model", "outage:0"], "--loss-model: loss model outage:0: the mean run length"),
    (["--loss-at", "bad"], "--loss-at: 'bad': expected WORKER=RATE or SENDER-RECEIVER=RATE"),
    *((["--loss-at", text, "--workers", "8"], f"--loss-at: '{text}': expected WORKER=RATE or SENDER-RECEIVER=RATE")
      for text in ("6-=0.1", "6-*=", "6-*=0.1:", "**=1", "6-*=0.1:0:0", "6-7:1=1")),
    (["--loss-at", "layers.5=1", "--workers", "8"], "--loss-at: 'layers.5': no tensor has such a name: expected parts of"),
    (["--loss-at", "layers.0-99=1", "--workers", "8"], "--loss-at: 'layers.0-99': expected two numbers that tensors have"),
    (["--loss-at", "layers.0=1", "--loss-at", "q_proj=0"], "--loss-at: expected once, with a comma between entries"),
    (["--repair-at", "layer=1", "--workers", "8"], "--repair-at: 'layer': no tensor has such a name"),
    (["--link-threads", "2", "--deadline", "auto", "--workers", "2"], "--link-threads 2: expected no deadline"),
    (["--link-threads", "65"], "--link-threads: expected a whole number from 1 to 64, got '65'"),
    (["--log-buckets", "--deadline", "1"], "--log-buckets: expected no --deadline"),
    (["--repair-at", "mlp=17", "--workers", "8"], "--repair-at: 'mlp=17': round 17: expected a whole number from 0 to 16"),
    (["--loss-at", "*-8=1", "--workers", "8"], "--loss-at: '*-8=1': worker 8: expected 0 to 7"),
    (["--loss-at", "6-*=0:2", "--workers", "8"], "--loss-at: '6-*=0:2': loss rate 2: expected a number"),
    (["--loss-at", "6-*=0.9", "--loss-model", "burst:2", "--workers", "8"], "the link 6-*'s loss rate is 0.9"),
    (["--loss-at", "8=1", "--workers", "8"], "--loss-at: '8=1': worker 8: expected 0 to 7"),
    (["--loss-at", "1=2", "--workers", "8"], "--loss-at: '1=2': loss rate 2: expected a number"),
    (["--schedule", "step"], "--schedule: expected one of cosine wsd linear constant, got 'step'"),
    (["--decay", "0.1"], "--decay: expected --schedule wsd with it, got --schedule cosine"),
    (["--schedule", "wsd", "--decay", "2"], "--decay: expected a number from 0 to 1, got '2'"),
    (["--data-split", "random"], "--data-split: expected one of shared contiguous, got 'random'"),
    (["--link", "pigeon"], "--link: expected one of auto mpi udp verbs, got 'pigeon'"),
    (["--model", "8B"], "--model: '8B' is no file, no directory and no preset; presets are 260K"),
    (["--loss"], "--loss: several options begin so: --loss-rate --loss-model --loss-at"),
    (["--plain=1"], "--plain: expected no value, got '1'"),
    (["--learning-rate", "1"], "--learning-rate: unknown option; did you mean --lr? (see --help)"),
    (["--max-steps=5"], "--max-steps=5: unknown option; did you mean --steps?"),
    (["--worker", "8", "--bacth", "8"], "--bacth: unknown option; did you mean --batch?"),
    (["--frobnicate"], "--frobnicate: unknown option (see --help)"),
    (["-x"], "-x: unknown option (see --help)"),
    (["--generate", "--tokens", "5"], "--generate: expected a value after it, got the option --tokens"),
    (["--save-every", "5"], "--save-every: expected --out DIR"),
    (["--clip", "0x10"], "--clip: expected a number from 0 to 1e+30, got '0x10'"),
    (["--out", "a\udcff"], "--out: expected UTF-8, since the log holds it"),
    (["--seq", "4096"], "--seq: model 260K takes at most 512"),
    (["--batch", "1048576", "--seq", "4096", "--model", "7B", "--dry-run"], "--batch: expected fewer than 2^31 tokens"),
    (["--batch", "16384", "--seq", "4096", "--model", "7B", "--dry-run"], "2^31 tokens in a micro-batch, times the 32 h"),
    (["--model", "7B", "--vocab-size", "100"], "insists on 32000"),
    (["--packet-bytes", "1001"], "multiple of 4"),
    (["--eval"], "--model: expected a model directory"),
    (["--generate", "x", "--dry-run"], "at most one"),
    (["stray"], "'stray': expected options only"),
], ids=lambda value: "_".join(value)[:40] if isinstance(value, list) else "")
def test_usage_errors(data, arguments, said):
    base = [] if not arguments else ["--train", str(data / "train.bin")]
    if "--model" not in arguments:
        base += ["--model", "260K"]
    if arguments == []:
        base = []
    assert said in one_line(run(*base, *arguments), 2)


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("--dry-run", "--model", "260K"),
                                       ("--preflight", "--model", "260K")], ids=" ".join)
def test_a_result_that_nobody_gets(arguments):
    """As where the disk is full to which it is written: no result is no success."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT,
                              check=False)
    assert done.returncode == 1 and "could be written to stdout" in done.stderr, done.stderr


def test_nothing_is_printed_into_the_log_or_a_checkpoint(data, tmp_path):
    """A file that is opened while stdout or stderr is closed would get its number."""
    line = settings(data, tmp_path, steps=2, save_every=1, record_loss=tmp_path / "record", loss_rate=0.1)
    done = run("-c", 'exec "$0" "$@" <&- >&- 2>&-', PROGRAM, *line, program=pathlib.Path("/bin/sh"))
    assert done.returncode == 0 and read_log(tmp_path / "log.jsonl")[-1]["status"] == "complete"
    assert {text[:1] for text in (tmp_path / "record").read_text().splitlines()} == {"#", "0", "1"}
    succeed("--eval", "--model", tmp_path / "checkpoint-00000002", "--val", data / "val.bin")


def test_a_resumed_run_has_the_model_that_it_is_given(data, tmp_path):
    """Not in silence that of the checkpoint; a model of the same shape may have another name."""
    succeed(*settings(data, tmp_path, steps=1))
    more = {"steps": 2, "resume": "auto"}
    line = one_line(run(*settings(data, tmp_path, model="1M", **more)), 2)
    assert "--model 1M has 4 layers, width 128" in line and "has 5 layers, width 64" in line
    succeed(*settings(data, tmp_path, model=tmp_path / "checkpoint-00000001", **more))


def test_no_plan_of_a_run_that_the_network_refuses():
    line = one_line(run("--dry-run", "--model", "7B", "--packet-bytes", 64, "--workers", 2), 1)
    assert "packets for one owner: expected at most 1048576" in line


def test_the_preflight_refuses_what_the_device_that_it_finds_cannot_do(data):
    """--device auto, the default, takes the GPU, which keeps no lost gradients."""
    for arguments in ("--preflight",), ("--steps", 1):
        done = run("--train", data / "train.bin", "--model", "260K", "--workers", 2, "--carry", 1, *arguments,
                   program=PROGRAM.parent / "emulated" / "train_llama2")
        assert "--carry: expected --device cpu" in one_line(done, 1)


def test_workers_must_divide_by_ranks(data, tmp_path):
    done = run(*settings(data, tmp_path / "out", workers=3), ranks=2)
    assert done.returncode == 2
    (line,) = [l for l in done.stderr.splitlines() if l.startswith("train_llama2: ")]
    assert "--workers: expected a multiple of the 2 ranks, got 3" in line
    assert not (tmp_path / "out").exists()


def broken(folder, name):
    """Makes a broken token file. Returns it and the message that the program must print."""
    path = folder / "broken.bin"
    tokens = markov_tokens(1000, VOCABULARY, 3)
    if name == "missing":
        return path, "broken.bin"
    if name == "empty":
        path.write_bytes(b"")
    elif name == "short_header":
        path.write_bytes(b"\0" * 100)
    elif name == "truncated":
        write_tokens(path, tokens, VOCABULARY)
        path.write_bytes(path.read_bytes()[:-100])
    elif name == "foreign":
        path.write_bytes(b"This is a text, not a token file. " * 100)
    elif name == "version":
        write_tokens(path, tokens, VOCABULARY, version=9)
    elif name == "token_out_of_range":
        tokens[500] = 200
        write_tokens(path, tokens, VOCABULARY)
        return path, "200"
    elif name == "too_short":
        write_tokens(path, tokens[:30], VOCABULARY)
    elif name == "negative_count":
        write_tokens(path, tokens, VOCABULARY, count=-5)
    return path, "broken.bin"


@pytest.mark.parametrize("which", ["train", "val"])
@pytest.mark.parametrize("name", ["missing", "empty", "short_header", "truncated", "foreign",
                                  "version", "token_out_of_range", "too_short", "negative_count"])
def test_broken_token_files(data, tmp_path, name, which):
    path, said = broken(tmp_path, name)
    if which == "val" and name == "too_short":
        write_tokens(path, [1], VOCABULARY)
    line = one_line(run(*settings(data, tmp_path / "out", **{which: path})), 1)
    assert "broken.bin" in line and said in line
    assert not list(tmp_path.glob("out/checkpoint*"))


def test_vocabulary_of_data_and_model_must_agree(data, tmp_path):
    line = one_line(run(*settings(data, tmp_path / "out", vocab_size=100)), 1)
    assert "128" in line and "100" in line
    write_tokens(tmp_path / "anonymous.bin", markov_tokens(1000, VOCABULARY, 3))
    line = one_line(run(*settings(data, tmp_path / "out", train=tmp_path / "anonymous.bin",
                                  val=None)), 1)
    assert "--vocab-size" in line
    train(data, tmp_path / "ok", train=tmp_path / "anonymous.bin", vocab_size=VOCABULARY, steps=1)


@pytest.mark.parametrize("place", ["file", "proc"])
def test_unwritable_output(data, tmp_path, place):
    if place == "file":
        (tmp_path / "file").write_text("in the way")
        out = tmp_path / "file" / "run"
    else:
        out = "/proc/nothing/here"  # not even root can write there
    line = one_line(run(*settings(data, out)), 1)
    assert str(out).split("/run")[0].split("/nothing")[0] in line


def test_unwritable_log(data, tmp_path):
    assert "/proc/x.jsonl" in one_line(run(*settings(data, None, log="/proc/x.jsonl")), 1)


def test_broken_model_directories(data, model, tmp_path):
    def attempt(change, said):
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model, folder)
        change(folder)
        line = one_line(run("--eval", "--model", folder, "--val", data / "val.bin"), 1)
        assert said in line, line

    def cut_weights(folder):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1000])

    def edit_config(**changes):
        def change(folder):
            path = folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return change

    attempt(lambda f: (f / "config.json").unlink(), "config.json")
    attempt(lambda f: (f / "config.json").write_text("{"), "config.json")
    attempt(lambda f: (f / "model.safetensors").unlink(), "model.safetensors")
    attempt(cut_weights, "model.safetensors")
    attempt(edit_config(hidden_size=-64), "hidden_size")
    attempt(edit_config(num_hidden_layers=4), "config.json' is not what the run wrote")
    of_another_program = tmp_path / "other"
    shutil.copytree(model, of_another_program, ignore=shutil.ignore_patterns("trainer.json"))
    model = of_another_program
    attempt(edit_config(num_hidden_layers=4), "model.safetensors")
    attempt(edit_config(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling")
    attempt(edit_config(hidden_act="gelu"), "hidden_act")


def test_loss_that_is_not_finite_stops_the_run(data, tmp_path):
    done = run(*settings(data, tmp_path, lr=1000, clip=0, steps=200, save_every=1, loss_rate=0.1,
                         val=None, adam_eps=1e-30))
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    step, checkpoint = re.search(r"stopped in step (\d+): .* last good checkpoint: (\S+);",
                                 line).groups()
    assert checkpoint.endswith(f"checkpoint-{int(step):08d}") and os.path.isdir(checkpoint)
    assert read_log(tmp_path / "log.jsonl")[-1]["status"] == "not finite"


def test_a_rank_that_computes_wrong_numbers_is_named(data, tmp_path):
    """The cosines of rank 2 are NaN, so that its attention is: all end, and a line names its worker."""
    wrong = preloaded(tmp_path, "double cos(double x) { return 0 * x / 0; }", "-fno-builtin")
    line = settings(data, tmp_path / "out", workers=3, steps=5, val=None, link="udp")
    done = run_apart(*[[PROGRAM, *line]] * 2, ["env", f"LD_PRELOAD={wrong}", PROGRAM, *line])
    assert done.returncode == 1, done.stderr
    assert "stopped in step 0: the loss of worker 2 is " in done.stderr and "a lower --lr" not in done.stderr


def test_errors_of_one_rank_end_all(data, tmp_path):
    done = run(*settings(data, "/proc/nothing/here"), ranks=2)
    assert done.returncode == 1
    assert "rank 0: " in done.stderr


# ---- of several ranks ----

@pytest.mark.parametrize("odd, code, said", [
    ("--nonsense", 2, "rank 1: --nonsense: unknown"),
    ("--steps=4", 2, "rank 1 was started with another --steps than rank 0"),
    ("--lr=1e-2", 2, "rank 1 was started with another --lr than rank 0"),
    ("--dry-run", 2, "rank 1 was started with another --dry-run than rank 0"),
    ("--help", 2, "rank 1 was started with another --help than rank 0"),
    ("--resume=/nothing", 1, "rank 1: '/nothing' is no directory"),
    ("--train={data}/val.bin", 1, "the training data is '1111 tokens in 1 files"),
    ("--val={data}/train.bin", 1, "the validation data is '40000 tokens in 1 files"),
    ("--model=1M", 1, "the model's shape is '4 layers, width 128"),
    ("--threads=1", 0, ""),
])
def test_ranks_started_differently_end_at_once(data, tmp_path, odd, code, said):
    """Ranks that are started with different options end with one line and an exit code. Otherwise they
    would wait for ever, or train something else."""
    line = settings(data, tmp_path / "out", workers=2, steps=2, link="mpi")
    done = run_apart([PROGRAM, *line], [PROGRAM, *line, odd.format(data=data)])
    lines = [text for text in done.stderr.splitlines() if text.startswith("train_llama2")]
    assert done.returncode == code, done.stderr
    assert len(lines) == (code != 0) and said in "".join(lines)


@pytest.mark.parametrize("changes, said", [
    ({"vocab_size": 2 * VOCABULARY}, f"vocabulary {2 * VOCABULARY}"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 64}}, "rope scaled by 4, 1, 4, 64"),
], ids=["vocabulary", "rope"])
def test_ranks_with_different_copies_of_a_shape(data, tmp_path, changes, said):
    """Nodes may hold another version of a config.json. Its training would go on with two different models."""
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    for name, more in (("one", {}), ("other", changes)):
        (tmp_path / name).write_text(json.dumps({**shape, **more}))
    line = settings(data, tmp_path / "out", workers=2, steps=2, link="mpi", model=tmp_path / "one")
    done = run_apart([PROGRAM, *line], [PROGRAM, *line, f"--model={tmp_path / 'other'}"])
    (said_once,) = (text for text in done.stderr.splitlines() if text.startswith(("train_llama2", "lossynet")))
    assert done.returncode == 1 and "the model's shape is '1 layers, width 32" in said_once and said in said_once


@pytest.mark.parametrize("changes, said", [
    ({"val": "/none*"}, "no file matches '/none*'"),
    ({"encrypt": True, "key_file": "/none"}, "--key-file: cannot use '/none': expected a file of 16 to 4096 bytes"),
])
def test_one_mistake_of_all_ranks_is_one_line(data, tmp_path, changes, said):
    done = run(*settings(data, tmp_path / "out", workers=3, link="udp", **changes), ranks=3)
    lines = [text for text in done.stderr.splitlines() if text.startswith(("train_llama2", "lossynet"))]
    assert done.returncode == 1 and len(lines) == 1 and said in lines[0], done.stderr


@pytest.mark.parametrize("mode", [0o600, 0o604])
def test_a_key_that_everybody_may_read(data, tmp_path, mode):
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    key.chmod(mode)
    done = succeed(*settings(data, tmp_path / "out", workers=2, steps=1, val=None, link="udp", encrypt=True,
                             key_file=key), ranks=2)
    lines = [text for text in done.stderr.splitlines() if text.startswith("train_llama2")]
    assert len(lines) == (mode == 0o604) and all("everybody on this host may read" in line for line in lines)


def test_a_tokenizer_that_is_not_there_is_told_before_training(data, tmp_path):
    done = run(*settings(data, tmp_path / "out", tokenizer=tmp_path / "none.model"))
    assert "none.model': No such file" in one_line(done, 1)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model(data, tmp_path):
    """Users may give a run's folder instead of its checkpoint's."""
    done = run(*settings(data, tmp_path / "out", model=tmp_path))
    assert "has no config.json: expected a Hugging Face Llama directory, or checkpoint-N" in \
        one_line(done, 1)

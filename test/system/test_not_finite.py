"""Tests that a run ends with exit code 1 and one line where a number is not finite, and that the line says whose it
is, however the workers are spread over processes.

In the model of `poisoned`, id RARE has an embedding of zeros, and norms do not bound 1/|x|. So what is computed
forwards is finite where RARE occurs, and the gradient of it overflows. One sequence has RARE, so this is one worker's.
With --lr 0 it stays so until then."""
import json
import re
import shutil

import numpy as np
import pytest

from program import BUILD, ROOT, markov_tokens, read_log, run, small_model, tensors, write_tokens

VOCABULARY, RARE, SEQ = 64, 63, 16
EMULATED = BUILD / "emulated" / "train_llama2"


def change(folder, name, function):
    """Changes a tensor of a model in place."""
    path = folder / "model.safetensors"
    raw, values = bytearray(path.read_bytes()), tensors(path)[name]
    at = raw.find(values)
    new = np.frombuffer(values, "<f4").copy()
    function(new)
    raw[at:at + len(values)] = new.tobytes()
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned")
    small_model(folder / "model", VOCABULARY)
    width = 32
    change(folder / "model", "model.embed_tokens.weight", lambda x: x[RARE * width:].fill(0))
    change(folder / "model", "model.norm.weight", lambda x: x.fill(1e7))
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-37}))
    tokens = markov_tokens(2000, VOCABULARY - 1, 1)
    tokens[63 * SEQ:64 * SEQ] = RARE  # a sequence of nothing else
    write_tokens(folder / "train.bin", tokens, VOCABULARY)
    return folder


def end_of(poisoned, out, ranks=0, program=None, **changes):
    """The line with which the run ends, and its last event."""
    options = {"model": poisoned / "model", "train": poisoned / "train.bin", "workers": 4, "batch": 1, "seq": SEQ,
               "steps": 40, "lr": 0, "out": out, "save-every": 0, "seed": 3, "peer-timeout": 60, **changes}
    done = run(*[f"--{key}={value}" for key, value in options.items()], ranks=ranks,
               **({"program": program} if program else {}))
    assert done.returncode == 1, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("train_llama2: ")]
    event = read_log(out / "log.jsonl")[-1]
    assert event["status"] == "not finite"
    return re.sub("rank 0: ", "", line), event["step"]


@pytest.mark.parametrize("changes", [{}, {"loss-rate": 0.2}, {"wire-dtype": "int8"}, {"wire-dtype": "bf16", "carry": 1},
                                     {"group": 2}, {"algorithm": "rps"}, {"algorithm": "reliable"}],
                         ids=lambda changes: " ".join(map(str, changes.values())) or "default")
def test_the_worker_is_named(poisoned, tmp_path, changes):
    """One process, two over UDP and four over MPI end in the same step with the same words."""
    want = end_of(poisoned, tmp_path / "1", **changes)
    who = "the group of worker" if "group" in changes else "worker"
    assert re.search(rf"stopped in step \d+: the gradient of {who} \d is (-?nan|-?inf|-?\d.*e\+\d\d) in model\..*"
                     "weight, and that of no other worker: expected memory, processor and GPU", want[0]), want
    link = "mpi" if changes.get("algorithm") == "reliable" else "udp"
    assert end_of(poisoned, tmp_path / "2", ranks=2, link=link, **changes)[1] == want[1]
    got = end_of(poisoned, tmp_path / "4", ranks=4, link="mpi", **changes)
    assert got[1] == want[1]
    assert got[0].split(" is ")[0] == want[0].split(" is ")[0]  # the first such element depends on its shard


@pytest.mark.skipif(not EMULATED.exists(), reason="make tests builds the emulated device")
@pytest.mark.parametrize("ranks", [0, 2])
def test_on_a_device(poisoned, tmp_path, ranks):
    line, _ = end_of(poisoned, tmp_path, ranks=ranks, program=EMULATED, device="cuda", workers=2,
                     **({"link": "udp"} if ranks else {}))
    assert re.search(r"the gradient of worker \d is .* in model\..*weight, and that of no other worker", line), line


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_model(folder / "model", VOCABULARY)
    write_tokens(folder / "val.bin", markov_tokens(500, VOCABULARY, 2), VOCABULARY)
    return folder


def one_line(done):
    assert done.returncode == 1 and "nan" not in done.stdout, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_model_with_such_numbers_is_refused(model, tmp_path, value):
    shutil.copytree(model / "model", tmp_path / "model")
    change(tmp_path / "model", "model.layers.1.mlp.up_proj.weight", lambda x: x.put(7, value))
    for command in ["--eval", "--val", model / "val.bin"], ["--train", model / "val.bin", "--steps", 1]:
        done = run(*command, "--model", tmp_path / "model", "--seq", SEQ)
        assert f"tensor 'model.layers.1.mlp.up_proj.weight' is {value} in element 7" in one_line(done)


def test_an_evaluation_that_overflows_is_no_result(model, tmp_path):
    """All numbers are finite, and their products are not."""
    shutil.copytree(model / "model", tmp_path / "model")
    for name in ("up", "down"):
        change(tmp_path / "model", f"model.layers.0.mlp.{name}_proj.weight", lambda x: x.fill(1e30))
    line = one_line(run("--eval", "--model", tmp_path / "model", "--val", model / "val.bin", "--seq", SEQ))
    assert "the validation loss is" in line and "expected a finite perplexity" in line


@pytest.mark.parametrize("kind", ["nan", "overflow"])
def test_no_text_from_such_a_model(tmp_path, kind):
    """--generate of a model with NaN, and of one whose products are not finite."""
    goldens = ROOT / "test" / "goldens"
    for file in ("plain/config.json", "plain/model.safetensors", "tokenizer.model"):
        shutil.copy(goldens / file, tmp_path)
    for name in ("up", "down") if kind == "overflow" else ("up",):
        change(tmp_path, f"model.layers.0.mlp.{name}_proj.weight",
               lambda x: x.fill(1e30) if kind == "overflow" else x.put(7, np.nan))
    line = one_line(run("--generate", "Once", "--model", tmp_path))
    assert "expected finite numbers" in line, line
    assert kind == "nan" or "the logit of id 0 is" in line, line

"""Compares perplexity with that of transformers: with goldens, and with the library if it is installed. Also
tests the script."""
import json
import math
import os
import re
import shutil
import subprocess

import pytest

from huggingface import ask, environment
from program import BUILD, ROOT, TIMEOUT, environment_of, events, markov_tokens, run, succeed, write_tokens

pytestmark = pytest.mark.xdist_group("transformers")

GOLDENS = ROOT / "test" / "goldens"
CASES = json.loads((GOLDENS / "perplexity" / "expected.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The model test/goldens/plain, with a config.json that allows 4,096 positions."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copy(GOLDENS / "plain" / "model.safetensors", folder)
    config = json.loads((GOLDENS / "plain" / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 4096
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def evaluate(model, tokens, context, stride, folder, *more):
    log = folder / "log.jsonl"
    done = succeed("--eval", "--model", model, "--val", tokens, "--seq", context, "--stride",
                   stride, "--log", log, "--overwrite", *more)
    (event,) = events(log, "eval")
    return event, done.stdout


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['context']}-{c['stride']}")
def test_perplexity_is_that_of_transformers(model, tmp_path, case):
    event, said = evaluate(model, GOLDENS / "perplexity" / "text.bin", case["context"],
                           case["stride"], tmp_path, "--batch", 2)
    assert event["tokens"] == case["tokens"]
    assert event["val_perplexity"] == pytest.approx(math.exp(case["loss"]), rel=1e-4)
    # 8,999 predicted tokens are 5,000 words
    words = math.exp(case["loss"] * 8999 / 5000)
    assert event["val_word_perplexity"] == pytest.approx(words, rel=2e-4)
    bits = case["loss"] * 8999 / 31000 / math.log(2)
    assert event["val_bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert float(re.search(r"bits per byte ([\d.]+)", said).group(1)) == pytest.approx(bits, rel=2e-6)
    shown = float(re.search(r"word perplexity ([\d.]+)", said).group(1))
    assert shown == pytest.approx(words, rel=2e-4)


def test_workers_and_batches_do_not_change_a_strided_perplexity(model, tmp_path):
    text = GOLDENS / "perplexity" / "text.bin"
    losses = [evaluate(model, text, 256, 100, tmp_path, *more)[0]["val_loss"]
              for more in (["--batch", 1], ["--batch", 7], ["--batch", 2, "--workers", 3])]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_words_and_bytes_that_are_not_known(model, tmp_path):
    write_tokens(tmp_path / "t.bin", markov_tokens(500, 97, 1), 97)
    event, said = evaluate(model, tmp_path / "t.bin", 64, 0, tmp_path)
    assert event["val_word_perplexity"] is None and "word" not in said
    assert event["val_bits_per_byte"] is None and "byte" not in said


@pytest.mark.parametrize("seq, stride, said", [(64, 65, "at most --seq, 64, and that to be 2 or more, got 65"),
                                               (1, 1, "at most --seq, 1, and that to be 2 or more, got 1"),
                                               (64, -1, "--stride: expected a whole number")])
def test_stride_out_of_range(model, seq, stride, said):
    done = run("--eval", "--model", model, "--val", GOLDENS / "perplexity" / "text.bin", "--seq",
               seq, "--stride", stride)
    assert done.returncode == 2 and said in done.stderr


def test_perplexity_beside_transformers_live(tmp_path):
    """This program trains a model with grouped-query attention, and both measure its perplexity on the tokens
    that it was trained on."""
    environment()
    write_tokens(tmp_path / "t.bin", markov_tokens(20_000, 512, 1), 512)
    write_tokens(tmp_path / "v.bin", markov_tokens(3_000, 512, 2), 512)
    succeed("--model", "260K", "--train", tmp_path / "t.bin", "--seq", 128, "--batch", 4, "--steps",
            60, "--lr", "5e-3", "--out", tmp_path / "out", "--workers", 2, "--loss-rate", 0.1)
    (model,) = (tmp_path / "out").glob("checkpoint-*")
    (answers,) = ask({"do": "perplexity", "directory": model, "tokens": tmp_path / "v.bin",
                      "cases": [(512, 0), (512, 512), (300, 77)]})
    assert len(answers) == 3
    for expected in answers:
        context, stride = expected["context"], expected["stride"]
        event, _ = evaluate(model, tmp_path / "v.bin", context, stride, tmp_path)
        assert event["tokens"] == expected["tokens"]
        assert event["val_perplexity"] == pytest.approx(math.exp(expected["loss"]), rel=1e-4)
        assert event["val_perplexity"] < 400  # it has learnt something: guessing gives 512


# ---- scripts/perplexity.sh ----

@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A checkpoint with its own tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("script")
    text = "".join(f"In {i} the river rose and {i % 7} boats left the town .\n" for i in range(300))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    subprocess.run(["spm_train", "--input=text.txt", "--model_prefix=tokenizer", "--model_type=bpe",
                    "--vocab_size=330", "--byte_fallback=true",
                    "--unk_id=0", "--bos_id=1", "--eos_id=2", "--pad_id=-1"], cwd=folder,
                   check=True, capture_output=True)
    subprocess.run([str(BUILD / "tokenize"), "--tokenizer", "tokenizer.model", "--train", "t.bin",
                    "text.txt"], cwd=folder, check=True, capture_output=True)
    succeed("--model", "260K", "--train", folder / "t.bin", "--seq", 64, "--steps", 20, "--lr",
            "3e-3", "--out", folder / "out")
    return next((folder / "out").glob("checkpoint-*")), folder / "text.txt"


def script(*arguments, **environment):
    env = environment_of({"TRAIN_LLAMA2": str(BUILD / "train_llama2"),
                          "TOKENIZE": str(BUILD / "tokenize"), **environment})
    return subprocess.run([str(ROOT / "scripts" / "perplexity.sh"), *map(str, arguments)], env=env,
                          text=True, capture_output=True, timeout=TIMEOUT, check=False)


@pytest.mark.parametrize("option", ["--seq=32", "--stride", "--model=other", "--val=other", "--quiet"])
def test_an_option_that_the_script_sets(trained, option):
    """The table would name another context than the one that is measured, or be empty."""
    done = script(*trained, option, "64", CONTEXTS="64")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == f"perplexity.sh: {option}: expected MODEL, TEXT, CONTEXTS and STRIDE to say it\n"


def test_a_model_for_shorter_contexts(trained):
    """Nothing is measured with contexts that are all too long for the model: that is no success."""
    done = script(*trained)
    assert done.returncode == 1 and done.stdout.count("left out") == 2
    assert done.stderr == "perplexity.sh: nothing was measured: expected CONTEXTS of at most 512, such as CONTEXTS=512\n"


@pytest.mark.parametrize("contexts", ["2048,4096", "128 0"])
def test_contexts_that_are_no_numbers(tmp_path, contexts):
    done = script(tmp_path, CONTEXTS=contexts)
    assert done.returncode == 2 and done.stderr.startswith("perplexity.sh: CONTEXTS has ") and done.stderr.count("\n") == 1


def test_script(trained, tmp_path):
    checkpoint, text = trained
    done = script(checkpoint, text, "--batch", "3", CONTEXTS="128 512 2048", STRIDE="64")
    assert done.returncode == 0, done.stderr
    title, header, *rows = done.stdout.splitlines()
    words = len(text.read_text(encoding="utf-8").split())
    assert f"{words} words" in title and header.split()[:3] == ["context", "stride", "scored"]
    assert "2048  left out: the model takes at most 512 tokens" in rows.pop()
    (tokens,) = re.findall(r"(\d+) tokens", title)
    for row, (context, stride) in zip(rows, ((128, 128), (128, 64), (512, 512), (512, 64))):
        fields = row.split()
        assert fields[:2] == [str(context), str(stride)]
        event, _ = evaluate(checkpoint, text.parent / "t.bin", context, stride, tmp_path)
        assert int(fields[2]) == event["tokens"]
        assert float(fields[3]) == pytest.approx(event["val_perplexity"], rel=1e-4)
        loss, per_word = event["val_loss"], (int(tokens) - 1) / words
        assert float(fields[4]) == pytest.approx(math.exp(loss * per_word), rel=1e-4)
        assert float(fields[5]) == pytest.approx(event["val_bits_per_byte"], rel=1e-4)
    assert len(rows) == 4


def test_script_says_what_is_missing(trained, tmp_path):
    checkpoint, text = trained
    assert script().returncode == 2
    assert "no model directory" in script(tmp_path, text).stderr
    (tmp_path / "config.json").write_text("{}")
    assert "TOKENIZER=FILE" in script(tmp_path, text).stderr
    assert "positive whole number" in script(checkpoint, text, STRIDE="0").stderr
    done = script(checkpoint, tmp_path / "absent.txt")
    assert done.returncode == 1 and "absent.txt" in done.stderr
    # WikiText-2 would be downloaded; without a network, one line says so
    done = script(checkpoint, DATA=str(tmp_path / "wikitext"), FETCH_BASE_URL="http://127.0.0.1:9",
                  FETCH_PAUSE="0")
    assert done.returncode == 1 and "cannot reach http://127.0.0.1:9" in done.stderr

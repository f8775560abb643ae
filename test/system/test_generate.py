"""Tests generated text: --generate and --sample-every."""
import subprocess

import pytest

from program import BUILD, PROGRAM, events, one_line, read_log, run, succeed


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with token files and a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    text = "".join(f"The {c}at sat on the mat {i} times .\n" for i in range(300) for c in "bchrs")
    (folder / "text").write_text(text, encoding="utf-8")
    subprocess.run(["spm_train", "--input=text", "--model_prefix=tokenizer", "--model_type=bpe",
                    "--vocab_size=300", "--byte_fallback=true", "--unk_id=0",
                    "--bos_id=1", "--eos_id=2", "--pad_id=-1"], cwd=folder, check=True,
                   capture_output=True)
    subprocess.run([str(BUILD / "tokenize"), "--tokenizer", "tokenizer.model", "--train", "t.bin",
                    "text"], cwd=folder, check=True, capture_output=True)
    return folder


def train(data, out, *more, ranks=0):
    succeed("--model", "260K", "--train", data / "t.bin", "--seq", 32, "--batch", 2, "--workers", 2,
            "--steps", 12, "--lr", "5e-3", "--loss-rate", 0.1, "--out", out, *more, ranks=ranks)
    return read_log(out / "log.jsonl")


@pytest.fixture(scope="session")
def model(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    train(data, out, "--steps", 60)
    return next(out.glob("checkpoint-*"))


def generate(model, prompt, *more):
    return succeed("--generate", prompt, "--model", model, "--tokens", 40, *more).stdout


def test_generate_continues_the_prompt(model):
    text = generate(model, "The cat sat", "--seed", 3)
    assert text.startswith("The cat sat") and len(text) > 30
    assert generate(model, "The cat sat", "--seed", 3) == text
    assert generate(model, "The cat sat", "--seed", 4, "--temperature", 2) != text
    likeliest = generate(model, "The cat sat", "--temperature", 0)
    assert generate(model, "The cat sat", "--temperature", 0, "--seed", 9) == likeliest
    assert generate(model, "The cat sat", "--top-p", 1e-9) == likeliest


def test_generate_reads_shards(data, model, tmp_path):
    train(data, tmp_path, "--steps", 60, "--shard-size", 3e-4)
    (sharded,) = tmp_path.glob("checkpoint-*")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    assert generate(sharded, "The cat sat", "--seed", 3) == generate(model, "The cat sat", "--seed", 3)


def test_generate_beyond_what_the_model_can_look_at(model):
    """The model takes 512 positions. It generates more tokens than that, from a longer prompt."""
    prompt = "The cat sat on the mat . " * 60
    done = succeed("--generate", prompt, "--model", model, "--tokens", 600)
    assert done.stdout.startswith(prompt) and len(done.stdout) > len(prompt) + 600
    assert "tokens, and the model takes 512: it goes on from the last 256" in one_line(done, 0)


def test_text_comes_while_it_is_made(model):
    """The first part of the text is shown long before the last: output is not held back in a buffer."""
    with subprocess.Popen([str(PROGRAM), "--generate", "The cat", "--model", str(model), "--tokens",
                           "100000"], stdout=subprocess.PIPE) as process:
        first = process.stdout.read(20)
        running = process.poll() is None
        process.kill()
    assert first.startswith(b"The cat") and running


def test_samples_are_logged_and_change_nothing(data, tmp_path):
    plain = train(data, tmp_path / "plain")
    sampled = train(data, tmp_path / "sampled", "--sample-every", 5)
    samples = [event for event in sampled if event["event"] == "sample"]
    assert [event["step"] for event in samples] == [5, 10, 12]
    assert all(event["text"] and "\n" not in event["text"] for event in samples)
    losses = [[event["loss"] for event in log if event["event"] == "step"]
              for log in (plain, sampled)]
    assert losses[0] == losses[1]
    train(data, tmp_path / "ranks", "--sample-every", 5, ranks=2)
    assert events(tmp_path / "ranks" / "log.jsonl", "sample") == samples


def test_samples_need_a_tokenizer(data, tmp_path):
    (tmp_path / "t.bin").write_bytes((data / "t.bin").read_bytes())
    base = ["--model", "260K", "--train", tmp_path / "t.bin", "--seq", 32, "--steps", 2,
            "--sample-every", 1]
    done = run(*base)
    assert done.returncode == 1
    assert "--sample-every: expected tokenizer.model beside the data" in done.stderr
    done = succeed(*base, "--tokenizer", data / "tokenizer.model")
    assert done.stdout.count(" writes: ") == 2


def test_a_device_writes_the_same(data, model, tmp_path):
    """A device gives the same text. It keeps no keys and values, so the model computes the whole text again
    for each token."""
    emulated = BUILD / "emulated" / "train_llama2"
    command = ["--generate", "The cat sat", "--model", model, "--temperature", 0, "--tokens", 6]
    on_device = succeed(*command, "--device", "cuda", "--dtype", "float32", program=emulated)
    assert on_device.stdout == succeed(*command, "--device", "cpu").stdout
    done = succeed("--model", model, "--train", data / "t.bin", "--seq", 16, "--batch", 1,
                   "--workers", 2, "--steps", 1, "--device", "cuda", "--sample-every", 1,
                   "--temperature", 0, "--out", tmp_path, program=emulated)
    assert done.stdout.count(" writes: ") == 1

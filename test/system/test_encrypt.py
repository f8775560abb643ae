"""Tests --encrypt: training gives the same bits, and a program without OpenSSL says that it has none."""
import subprocess

from program import ROOT, markov_tokens, read_log, run, succeed, write_tokens

TIMES = {"tokens_per_second", "step_ms", "communication_ms", "training_seconds", "checkpoint"}


def train(folder, *options):
    if not (folder / "train.bin").exists():
        write_tokens(folder / "train.bin", markov_tokens(40_000, 128, 1), 128)
    out = folder / ("out" + "".join(options).replace("/", "_"))
    succeed("--model=260K", f"--train={folder}/train.bin", "--workers=4", "--batch=1", "--seq=64",
            "--steps=6", "--lr=3e-3", "--seed=5", "--packet-bytes=1024", "--loss-rate=0.2",
            "--peer-timeout=60", f"--out={out}", "--link=udp", *options, ranks=4)
    (weights,) = out.glob("checkpoint-*/model.safetensors")
    log = [{key: value for key, value in event.items() if key not in TIMES}
           for event in read_log(out / "log.jsonl") if event["event"] != "run"]
    return weights.read_bytes(), log


def test_same_bits(tmp_path):
    plain = train(tmp_path)
    assert train(tmp_path, "--encrypt") == plain
    assert train(tmp_path, "--encrypt", "--no-overlap") == plain


def test_key_file(tmp_path):
    """A secret only decides which ranks can take part. It does not change the bits either."""
    key = tmp_path / "key"
    key.write_bytes(bytes(range(32)))
    plain, shared = tmp_path / "plain", tmp_path / "shared"
    plain.mkdir()
    shared.mkdir()
    assert train(shared, "--encrypt", f"--key-file={key}") == train(plain)
    done = run("--model=260K", f"--train={plain}/train.bin", f"--key-file={key}")
    assert done.returncode == 2 and "expected encrypt with it" in done.stderr


WITHOUT = r"""
#include "lossynet/crypto/crypto.h"
#include <stdarg.h>
#include <stdio.h>

void ln_log(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}

int main(void) {
    const struct lossynet_world world = {.rank = 0, .ranks = 2};
    struct ln_secure *secure;
    return ln_secure_open(&world, 1, NULL, &secure) != LOSSYNET_INVALID || secure ||
           ln_secure_available();
}
"""


def test_built_without(tmp_path):
    """Compiles crypto.c without OpenSSL and tests its stubs."""
    (tmp_path / "main.c").write_text(WITHOUT)
    done = subprocess.run(["gcc", "-std=c11", "-D_GNU_SOURCE", "-I.", tmp_path / "main.c",
                           "lossynet/crypto/crypto.c", "-o", tmp_path / "without"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "without"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ("encryption: built without OpenSSL: install libssl-dev and build again")

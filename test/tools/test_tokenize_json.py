"""Tests data/tokenize_json.py against the package tokenizers."""
import gzip
import itertools
import json
import os
import random
import struct
import subprocess
import sys

import numpy as np
import pytest

from packages import environment_with
from program import ROOT, TIMEOUT
from test_fetch import fetch, make_server, table  # pylint: disable=unused-import

SCRIPT = ROOT / "data" / "tokenize_json.py"
HEADER = 1024
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
# Encodes documents (JSON lists of strings on stdin) as the package does by itself.
REFERENCE = """
import json, sys
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode_special_tokens = True
json.dump([tokenizer.encode(text).ids for text in json.load(sys.stdin)], sys.stdout)
"""


@pytest.fixture(name="environment", scope="module")
def install():
    return environment_with("tokenizers")


def save_tokenizer(path, vocabulary=0, begins=True):
    """Writes a tokenizer.json like Llama 3's: bytes, a few merges, special tokens at the end. A vocabulary that
    is larger than that is filled with tokens that no text has."""
    letters = [chr(byte) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174 else None for byte in range(256)]
    spare = (chr(256 + i) for i in itertools.count())
    letters = [letter or next(spare) for letter in letters]
    space = letters[32]
    merges = [("t", "h"), ("th", "e"), (space, "the"), ("i", "n"), (space, "a")]
    words = [*letters, *("".join(pair) for pair in merges)]
    words += [f"<|unused {i}|>" for i in range(vocabulary - len(words) - 2)]
    special = [{"id": len(words) + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for i, name in enumerate((BEGIN, END))]
    template = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
                "single": [{"SpecialToken": {"id": BEGIN, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "special_tokens": {BEGIN: {"id": BEGIN, "ids": [special[0]["id"]], "tokens": [BEGIN]}}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    path.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": template if begins else None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {word: i for i, word in enumerate(words)}, "merges": [list(pair) for pair in merges]},
    }), encoding="utf-8")
    return path


def tokenize(environment, *arguments, expect=0, **keywords):
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], env=environment, timeout=TIMEOUT,
                          check=False, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords})
    assert done.returncode == expect, (done.stdout, done.stderr)
    return (done.stderr if expect else done.stdout).decode()


def read(path):
    """(ids, vocabulary, words, bytes) of a token file."""
    data = path.read_bytes()
    magic, version, count, vocabulary, words, size = struct.unpack("<4i2Q", data[:32])
    assert (magic, version) == ((20240801, 7) if vocabulary > 65535 else (20240520, 1))
    ids = np.frombuffer(data[HEADER:], "<u4" if vocabulary > 65535 else "<u2")
    assert len(ids) == count
    return ids.tolist(), vocabulary, words, size


def some_documents(count):
    choose = random.Random(5)
    pieces = ["the ", "in", " a b", "\n", "\n\n", "\r\n", "\t", "ü", "漢字", "😀", " 12345", "x" * 40, BEGIN, "<s>"]
    return ["".join(choose.choices(pieces, k=choose.randint(1, 60))) + "\n" for _ in range(count)]


@pytest.mark.parametrize("vocabulary", [0, 128_256])
def test_the_ids_are_those_of_the_package(environment, tmp_path, vocabulary):
    texts = some_documents(200)
    tokenizer = save_tokenizer(tmp_path / "any name.json", vocabulary)
    (tmp_path / "text").write_bytes("==\n".join(texts).encode())
    said = tokenize(environment, "--tokenizer", tokenizer, "--input", tmp_path / "text", "--separator", "==",
                    "--train", tmp_path / "t.bin")
    done = subprocess.run([sys.executable, "-c", REFERENCE, tokenizer], env=environment, text=True,
                          input=json.dumps(texts), capture_output=True, check=True)
    expected = [token for ids in json.loads(done.stdout) for token in ids]
    words, size = sum(len(text.encode().split()) for text in texts), sum(len(text.encode()) for text in texts)
    ids, found, *counts = read(tmp_path / "t.bin")
    assert ids == expected and counts == [words, size]
    assert found == (vocabulary or 256 + 5 + 2) and f"{len(ids)} tokens, {words} words, vocabulary {found}" in said
    assert max(ids) == found - 2  # documents begin with it; its name in a text is text
    assert (tmp_path / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_validation_shards_and_standard_input(environment, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "one").write_bytes(b"the a\nb\nin\nc\n")  # 13 bytes
    common = ["--tokenizer", tokenizer, "--train", tmp_path / "t.bin"]
    tokenize(environment, *common, "--input", tmp_path / "one", "--val", tmp_path / "v.bin", "--val-fraction", 0.3)
    assert [read(tmp_path / name)[2:] for name in ("t.bin", "v.bin")] == [(4, 11), (1, 2)]
    (tmp_path / "three").write_bytes(b"a b\n=\nin\n=\nthe\n")  # the split is within byte 6, where "in" begins
    tokenize(environment, *common, "--input", tmp_path / "three", "--separator", "=", "--val", tmp_path / "v.bin",
             "--val-fraction", 0.57)
    assert [read(tmp_path / name)[2:] for name in ("t.bin", "v.bin")] == [(2, 4), (2, 7)]
    tokenize(environment, *common, "--input", tmp_path / "one", "--val", tmp_path / "v.bin", "--val-fraction", 0.3)
    whole = read(tmp_path / "t.bin")[0] + read(tmp_path / "v.bin")[0]
    tokenize(environment, *common[:2], "--train", tmp_path / "s.bin", "--shard-tokens", 4, "--input", "-",
             "--separator", "==", input=b"the a\nb\nin\n==\r\nc\n")
    shards = sorted(tmp_path.glob("s_*.bin"))
    assert [len(read(path)[0]) for path in shards] == [4] * (len(whole) // 4) + [len(whole) % 4][:len(whole) % 4]
    assert [token for path in shards for token in read(path)[0]] == whole
    assert sum(read(path)[3] for path in shards) == 13
    assert "s_000000.bin is there already" in tokenize(
        environment, *common[:2], "--train", tmp_path / "s.bin", "--shard-tokens", 4, "--input", tmp_path / "one",
        expect=1)


@pytest.mark.parametrize("change, code, said", [
    ({"--input": "absent"}, 1, "absent"),
    ({"--tokenizer": "absent"}, 1, "absent: No such file"),
    ({"--tokenizer": "text"}, 1, "is no tokenizer.json: "),
    ({"--tokenizer": "plain.json"}, 1, "puts no token before a text: expected --bos TOKEN"),
    ({"--bos": "<s>"}, 1, "has no token '<s>'"),
    ({"--train": "text"}, 1, "is read as input"),
    ({"--train": "tokenizer.json"}, 1, "is read as input"),
    ({"--train": "pipe"}, 1, "pipe is no regular file"),
    ({"--train": "with/t.bin"}, 1, "with has a tokenizer.model, which the trainer would take"),
    ({"--val": "v.bin", "--val-fraction": "0.3"}, 1, "v.bin would have 0 tokens, expected at least 2"),
    ({"--val-fraction": "0.1"}, 2, "--val-fraction: expected a number between 0 and 1, and --val"),
    ({"--val": "v.bin", "--input": "-"}, 2, "--val: expected files"),
    ({"--val": "t.bin"}, 2, "name the same file"),
    ({"--val": "with/../t.bin"}, 2, "name the same file"),
    ({"--shard-tokens": "1"}, 2, "--shard-tokens: expected 2 to"),
])
def test_wrong_use(environment, tmp_path, change, code, said):
    save_tokenizer(tmp_path / "tokenizer.json")
    save_tokenizer(tmp_path / "plain.json", begins=False)
    (tmp_path / "text").write_bytes(b"the\n")
    (tmp_path / "with").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "with" / "tokenizer.model").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    given = {"--tokenizer": "tokenizer.json", "--input": "text", "--train": "t.bin", **change}
    told = tokenize(environment, *(word for pair in given.items() for word in pair), expect=code, cwd=tmp_path)
    assert said in told and (code == 2 or len(told.splitlines()) == 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_package_is_named(tmp_path):
    done = subprocess.run([sys.executable, "-I", "-S", SCRIPT, "--tokenizer", "x", "--input", "x", "--train", "x"],
                          capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "pip install tokenizers" in done.stderr


def test_fetch_streams_into_it(environment, tmp_path, server):
    """A tokenizer.json after --tokenizer."""
    (train, _, _), (val, _, _) = table("c4")
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    for path, text in ((train.format(i=0), "the a"), (val, "in")):
        server.files[path] = gzip.compress(json.dumps({"text": text}).encode() + b"\n")
    fetch(server, "c4", tmp_path / "out", "--tokenizer", tokenizer, PYTHONPATH=environment["PYTHONPATH"])
    assert [read(tmp_path / "out" / name)[2:] for name in ("train_000000.bin", "val.bin")] == [(2, 6), (1, 3)]
    assert (tmp_path / "out" / "tokenizer.json").exists() and not list((tmp_path / "out").glob("*.gz"))
    save_tokenizer(tokenizer, 300)
    assert "token files of another tokenizer" in fetch(server, "c4", tmp_path / "out", "--tokenizer", tokenizer,
                                                       expect=1)


def test_a_separator_that_is_no_line(environment, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "text").write_bytes(b"one==two==\nthree\n== \n")
    said = tokenize(environment, "--tokenizer", tokenizer, "--train", tmp_path / "t.bin", "--separator", "==",
                    "--input", tmp_path / "text", expect=1)
    assert "--separator '==' is 0 lines of the input, and 3 times within a line" in said
    assert not list(tmp_path.glob("t.bin*"))
    (tmp_path / "text").write_bytes(b"one==two==\n==\nthree\n== \n")
    assert "is 1 lines of the input, and 3 times within" in tokenize(
        environment, "--tokenizer", tokenizer, "--train", tmp_path / "t.bin", "--separator", "==", "--input",
        tmp_path / "text", stderr=subprocess.STDOUT)


@pytest.mark.parametrize("separator", [[], ["--separator=end"]])
def test_a_byte_order_mark_is_left_out(environment, tmp_path, separator):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    for name, mark in ("text", b""), ("marked", b"\xef\xbb\xbf"):
        (tmp_path / name).write_bytes(mark + b"the\nend\nin\n")
        said = tokenize(environment, "--tokenizer", tokenizer, "--train", tmp_path / f"{name}.bin", *separator, "--input",
                        tmp_path / name, stderr=subprocess.STDOUT)
        assert ("1 of the inputs begin with a byte order mark, which is left out" in said) == bool(mark), said
    assert (tmp_path / "marked.bin").read_bytes() == (tmp_path / "text.bin").read_bytes()


@pytest.mark.parametrize("content, code", [
    (gzip.compress(b"once upon a time\n" * 200), 1), (("the\n" * 300).encode("utf-16"), 1),
    (b"the \xff in\n" + b"the \xef\xbf\xbd in\n" * 99, 0)], ids=["gzip", "utf-16", "one byte"])
def test_what_is_no_text_is_refused(environment, tmp_path, content, code):
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "text").write_bytes(content)
    done = subprocess.run([sys.executable, SCRIPT, "--tokenizer", tokenizer, "--input", tmp_path / "text", "--train",
                           tmp_path / "t.bin"], env=environment, text=True, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == code and done.stderr.count("\n") == 1, done.stderr
    assert "no text in UTF-8" in done.stderr and (code == 0) == ("1 places are" in done.stderr)
    assert (tmp_path / "t.bin").exists() == (code == 0)

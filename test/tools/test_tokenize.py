"""Tests build/tokenize on typical texts of users, and compares it with the sentencepiece library."""
import gzip
import os
import random
import re
import resource
import shutil
import struct
import subprocess

import numpy as np
import pytest

from program import BUILD, ROOT, TIMEOUT, run

pytestmark = pytest.mark.quick

TOKENIZE = BUILD / "tokenize"
HEADER = 1024

# Difficult text for tokenizers: long words, runs of spaces, every kind of line end, characters of several
# bytes, byte order marks, and the symbol that stands for a space.
PARTS = ["the ", "And God said, ", "Let there be light", ".", "\n", "\n\n", "  ", "\t", "\r\n", "ü",
         "漢字", "😀", "\ufeff", "\u2581", "\u00a0", "\u2028", "x" * 50, "1234567890", "<s>", "a\nb"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model with Llama-2's settings, trained on a text of this test."""
    folder = tmp_path_factory.mktemp("tokenizer")
    random_text = random.Random(3)
    words = ["".join(random_text.choices("abcdefghij", k=random_text.randint(1, 7)))
             for _ in range(400)]
    lines = [" ".join(random_text.choices(words, k=12)) + "." for _ in range(2000)]
    (folder / "text").write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run(["spm_train", "--input=text", "--model_prefix=tokenizer", "--model_type=bpe",
                    "--vocab_size=600", "--byte_fallback=true", "--character_coverage=1.0",
                    "--split_digits=true", "--allow_whitespace_only_pieces=true",
                    "--remove_extra_whitespaces=false", "--normalization_rule_name=identity",
                    "--unk_id=0", "--bos_id=1", "--eos_id=2", "--pad_id=-1", "--num_threads=1"],
                   cwd=folder, check=True, capture_output=True)
    return folder / "tokenizer.model"


def tokenize(model, *arguments, cwd, expect=0, **keywords):
    done = subprocess.run([str(TOKENIZE), "--tokenizer", str(model), *map(str, arguments)],
                          cwd=cwd, timeout=TIMEOUT, check=False,
                          **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **keywords})
    assert done.returncode == expect, done.stderr.decode()
    return (done.stdout if expect == 0 else done.stderr).decode()


def tokens(path):
    data = path.read_bytes()
    magic, version, count, vocabulary, words, size = struct.unpack("<4i2Q", data[:32])
    assert (magic, version, vocabulary) == (20240520, 1, 600)
    ids = np.frombuffer(data[HEADER:], "<u2")
    assert len(ids) == count
    return ids.tolist(), words, size


def random_document(seed, pieces):
    choose = random.Random(seed)
    return "".join(choose.choices(PARTS, k=pieces)).lstrip("\ufeff")  # a mark there is left out


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


@pytest.fixture(scope="session")
def library(model):
    sentencepiece = pytest.importorskip(
        "sentencepiece", reason="no Python module sentencepiece: the library was not compared")
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def test_documents_are_those_of_the_library(model, library, tmp_path):
    """Ids and the numbers of words and bytes are the library's, for documents from a few bytes to 200 KB."""
    documents = [random_document(seed, pieces) for seed, pieces in
                 enumerate([1, 2, 3, 5, 10, 100, 1000, 5000, 30000])]
    documents += ["\n", " ", "no newline at all " * 3000, "\n" * 30000]
    paths = [write(tmp_path / f"{i}.txt", text) for i, text in enumerate(documents)]
    tokenize(model, "--train", "all.bin", *paths, cwd=tmp_path)
    ids, words, size = tokens(tmp_path / "all.bin")
    expected = []
    for text in documents:
        expected += [1] + library.encode(text)
    assert ids == expected
    assert words == sum(len(text.encode().split()) for text in documents)
    assert size == sum(len(text.encode()) for text in documents)


@pytest.mark.parametrize("arguments", [[], ["--shard-tokens", "1000"]])
def test_threads_do_not_change_a_byte(model, tmp_path, arguments):
    write(tmp_path / "text", random_document(1, 60000))
    files = {}
    for threads in (1, 2, 5):
        folder = tmp_path / str(threads)
        folder.mkdir()
        said = tokenize(model, "--train", folder / "t.bin", "--val", folder / "v.bin", "--threads",
                        threads, *arguments, "text", cwd=tmp_path)
        assert re.search(rf"MB of text in [\d.]+ s, [\d.]+ MB/s, {threads} thread", said)
        files[threads] = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert files[1] == files[2] == files[5]
    assert len(files[1]) == 3 or arguments


def test_a_folder_is_its_text_files_in_order(model, tmp_path):
    folder = tmp_path / "texts"
    names = ["a.txt", "b/1.md", "b/2", "b.txt", "c/deep/er/x.txt"]  # sorted level by level
    for name in names:
        write(folder / name, f"text of {name}\n")
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    write(folder / ".git" / "config", "hidden\n")
    write(folder / ".hidden", "hidden\n")
    (folder / "link.txt").symlink_to("/nowhere")
    said = tokenize(model, "--train", "folder.bin", folder, cwd=tmp_path)
    assert "left out: 2 files that are no text" in said
    order = ["a.txt", "b/1.md", "b/2", "b.txt", "c/deep/er/x.txt"]
    tokenize(model, "--train", "files.bin", *(folder / name for name in order), cwd=tmp_path)
    assert tokens(tmp_path / "folder.bin") == tokens(tmp_path / "files.bin")
    assert tokens(tmp_path / "folder.bin")[0].count(1) == 5


def test_more_files_than_are_open_at_once(model, tmp_path):
    for i in range(600):
        write(tmp_path / "many" / f"{i:04}", f"text {i}\n")
    write(tmp_path / "one", "".join(f"text {i}\n--\n" for i in range(600)))
    tokenize(model, "--train", "many.bin", "many", cwd=tmp_path)
    tokenize(model, "--train", "one.bin", "--separator=--", "one", cwd=tmp_path)
    assert tokens(tmp_path / "many.bin") == tokens(tmp_path / "one.bin")


def test_standard_input(model, tmp_path):
    text = random_document(7, 5000)
    write(tmp_path / "text", text)
    split = ["--val", "v.bin", "--val-fraction", "0.3"]
    tokenize(model, "--train", "t.bin", *split, "text", cwd=tmp_path)
    expected = [(tmp_path / name).read_bytes() for name in ("t.bin", "v.bin")]
    tokenize(model, "--train", "t.bin", *split, "-", cwd=tmp_path, input=text.encode())
    assert [(tmp_path / name).read_bytes() for name in ("t.bin", "v.bin")] == expected
    assert sorted(os.listdir(tmp_path)) == ["t.bin", "text", "tokenizer.model", "v.bin"]
    said = tokenize(model, "--train", "x.bin", "-", cwd=tmp_path, input=b"", expect=1)
    assert "the input is empty ('-')" in said
    said = tokenize(model, "--train", "x.bin", "-", "-", cwd=tmp_path, input=b"x", expect=1)
    assert "named twice" in said


def test_shards_put_together_are_the_whole(model, tmp_path):
    write(tmp_path / "text", random_document(11, 20000))
    tokenize(model, "--train", "whole.bin", "text", cwd=tmp_path)
    whole = tokens(tmp_path / "whole.bin")
    said = tokenize(model, "--train", "part.bin", "--shard-tokens", 5000, "text", cwd=tmp_path)
    shards = [tokens(path) for path in sorted(tmp_path.glob("part_*.bin"))]
    assert f", {len(shards)} shards" in said and len(shards) > 3
    assert [len(ids) for ids, _, _ in shards[:-1]] == [5000] * (len(shards) - 1)
    assert sum((ids for ids, _, _ in shards), []) == whole[0]
    assert sum(words for _, words, _ in shards) == whole[1]
    assert sum(size for _, _, size in shards) == whole[2]
    said = tokenize(model, "--train", "part.bin", "--shard-tokens", 9000, "text", cwd=tmp_path,
                    expect=1)
    assert "part_000000.bin' is there already: remove the shards" in said


def test_progress_on_a_terminal(model, tmp_path):
    """A terminal shows percent, speed and time left on one line, which is cleared at the end."""
    write(tmp_path / "text", random_document(2, 1_000_000))
    terminal, end = os.openpty()
    with subprocess.Popen([str(TOKENIZE), "--tokenizer", str(model), "--train", "t.bin", "--threads",
                           "1", "text"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=end) as program:
        os.close(end)
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # the other end is closed
            pass
    os.close(terminal)
    assert program.returncode == 0
    assert re.search(rb"tokenize: +\d+%  [\d.]+ MB/s  \d+ s left", shown), shown
    assert b"\n" not in shown and shown.endswith(b"\r\x1b[K")


@pytest.mark.parametrize("arguments, said", [
    (["--threads", "0"], "--threads must be a whole number from 1 to 4096, not 0"),
    (["--threads", "many"], "not many"),
    (["--shard-tokens", "1"], "--shard-tokens must be a whole number from 2"),
    (["--shard-tokens", "99999999999"], "--shard-tokens must be"),
])
def test_usage(model, tmp_path, arguments, said):
    assert said in tokenize(model, "--train", "x.bin", *arguments, "text", cwd=tmp_path, expect=2)


@pytest.mark.parametrize("folder, said", [
    ("empty", "the folder 'empty' has no text file"),
    ("loop", "is a link to a folder around it"),
    ("pipe", "'pipe' is neither a file nor a folder; pipe it in and name it '-'"),
])
def test_inputs_that_are_refused(model, tmp_path, folder, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "again").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    line = tokenize(model, "--train", "x.bin", folder, cwd=tmp_path, expect=1)
    assert said in line and len(line.splitlines()) == 1
    assert not (tmp_path / "x.bin").exists() and not (tmp_path / "x.bin.partial").exists()


@pytest.mark.parametrize("names, said", [
    (["--train", "text"], "'text' is read as input: expected another name"),
    (["--train", "x.bin", "--val", "link"], "'text' is read as input: expected another name"),
    (["--train", "t.model", "--tokenizer", "t.model"], "'t.model' is read as input: expected another name"),
    (["--train", "pipe"], "'pipe' is no regular file"),
    (["--train", "x.bin", "--val", "./x.bin"], "--train 'x.bin' and --val './x.bin' name the same file"),
    (["--train", "x.bin", "--val", "/dev/null"], "'/dev/null' is no regular file"),
])
def test_outputs_take_no_other_things_place(model, tmp_path, names, said):
    text = random_document(1, 2000)
    write(tmp_path / "text", text)
    (tmp_path / "link").symlink_to("text")
    shutil.copy(model, tmp_path / "t.model")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.iterdir())
    assert said in tokenize(model, *names, "text", cwd=tmp_path, expect=1)
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "text").read_bytes() == text.encode()


def test_a_full_disk_leaves_nothing(model, tmp_path):
    write(tmp_path / "text", random_document(1, 20000))
    limited = ["bash", "-c", """trap '' XFSZ; ulimit -f 8; exec "$@" """, "bash", TOKENIZE, "--tokenizer", model,
               "--train", "t.bin", "--shard-tokens", "3000", "text"]
    done = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert [p.name for p in tmp_path.iterdir() if "t_" in p.name] == []


def test_the_program_reads_what_tokenize_writes(model, tmp_path):
    """The program trains one step on the files that tokenize writes, including shards."""
    write(tmp_path / "text", random_document(5, 20000))
    tokenize(model, "--train", "t.bin", "--shard-tokens", 4000, "text", cwd=tmp_path)
    done = run("--model", "260K", "--train", tmp_path / "t_*.bin", "--seq", 64, "--steps", 1)
    assert done.returncode == 0, done.stderr


def test_a_separator_that_is_no_line(model, tmp_path):
    """It would make one document of all."""
    write(tmp_path / "text", "one--two--\nthree\n-- \nfour\n")
    write(tmp_path / "more", "five\n")
    said = tokenize(model, "--train", "t.bin", "--separator=--", "text", "more", cwd=tmp_path, expect=1)
    assert "--separator '--' is 0 lines of the input, and 3 times within a line" in said
    assert not list(tmp_path.glob("t.bin*"))
    write(tmp_path / "more", "five\n--")
    said = tokenize(model, "--train", "t.bin", "--separator=--", "text", "more", cwd=tmp_path, stderr=subprocess.STDOUT)
    assert "--separator '--' is 1 lines of the input, and 3 times within a line" in said
    assert tokens(tmp_path / "t.bin")[0].count(1) == 2


def test_a_byte_order_mark_is_left_out(model, tmp_path):
    """At the start of an input; elsewhere it is a character."""
    text = b"one\nend\ntwo \xef\xbb\xbf\n"
    for name, mark in ("text", b""), ("marked", b"\xef\xbb\xbf"):
        (tmp_path / name).write_bytes(mark + text)
        (tmp_path / "head").write_bytes(mark + b"end\n")
        said = tokenize(model, "--train", f"{name}.bin", "--separator=end", name, "head", cwd=tmp_path, stderr=subprocess.STDOUT)
        assert ("2 of the inputs begin with a byte order mark, which is left out" in said) == bool(mark), said
    assert (tmp_path / "marked.bin").read_bytes() == (tmp_path / "text.bin").read_bytes()


def test_a_limit_on_the_size_of_files(model, tmp_path):
    write(tmp_path / "text", "a few words\n" * 1000)
    said = tokenize(model, "--train", "t.bin", "text", cwd=tmp_path, expect=1,
                    preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)))
    assert "t.bin.partial': File too large for the limit of 2000 bytes: raise it (ulimit -f)" in said and not list(tmp_path.glob("t.bin*"))


@pytest.mark.parametrize("content, at", [
    (gzip.compress(b"once upon a time\n" * 200), 1), (("once upon\n" * 200).encode("utf-16"), 0),
    (("caf\u00e9 " * 200).encode("latin-1"), 3), (b"once\0" * 200, 4)], ids=["gzip", "utf-16", "latin-1", "zeros"])
def test_what_is_no_text_is_refused(model, tmp_path, content, at):
    """Packed, in UTF-16, in Latin-1, with zero bytes."""
    (tmp_path / "before").write_bytes(b"text in ASCII\n")
    (tmp_path / "input").write_bytes(content)
    said = tokenize(model, "--input", "before", "--input", "input", "--train", "t.bin", cwd=tmp_path, expect=1)
    assert re.search(rf"[\d.]+% of the input's bytes are no text in UTF-8, the first is byte {at} of 'input': expected text", said)
    assert not (tmp_path / "t.bin").exists()


def test_a_few_odd_bytes_and_unknown_characters_are_told(model, tmp_path):
    good = "".join(PARTS) * 50
    (tmp_path / "good").write_text(good, encoding="utf-8", newline="")
    (tmp_path / "odd").write_bytes(good.encode() + b"\xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \xff e\xcc")
    said = tokenize(model, "--input", "good", "--train", "t.bin", cwd=tmp_path, stderr=subprocess.STDOUT)
    assert "UTF-8" not in said and "<unk>" not in said
    said = tokenize(model, "--input", "odd", "--train", "t.bin", cwd=tmp_path, stderr=subprocess.STDOUT)
    assert f"11 bytes are no text in UTF-8, the first is byte {len(good.encode())} of 'odd'" in said
    lacks = ROOT / "test" / "goldens" / "tokenizer.model"  # without a token for each byte
    (tmp_path / "unknown").write_text("\u5b8c\u5168 once\n" * 100, encoding="utf-8")
    said = tokenize(lacks, "--input", "unknown", "--train", "t.bin", cwd=tmp_path, stderr=subprocess.STDOUT)
    assert re.search(r"\d+% of the tokens are <unk>: the tokenizer lacks characters of this text", said)

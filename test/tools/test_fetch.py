"""Tests data/fetch.py with a server on this machine that serves small stand-ins, and makes errors."""
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import signal
import struct
import subprocess
import threading
import time
import zipfile

import pytest

from program import BUILD, ROOT, TIMEOUT

pytestmark = pytest.mark.quick

SCRIPT = ROOT / "data" / "fetch.py"
TOKENIZER = ROOT / "test" / "goldens" / "tokenizer.model"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files, also ranges of them. The first answers may be cut short."""

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        name = self.path.lstrip("/")
        if name not in server.files:
            self.send_error(404)
            return
        data = server.files[name]
        tag = '"' + hashlib.md5(data).hexdigest() + '"'
        start = 0
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if ranged and server.ranges and self.headers.get("If-Range") in (None, tag):
            start = int(ranged.group(1))
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", tag)
        self.end_headers()
        end = len(data)
        if server.cuts:
            end = start + (len(data) - start) // server.cuts.pop(0)
        self.wfile.write(data[start:end])

    def log_message(self, *arguments):
        pass


@pytest.fixture(name="server")
def make_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.requests, server.cuts, server.ranges = {}, [], [], True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def table(*names):
    """The script's own table of paths and checksums."""
    text = SCRIPT.read_text(encoding="utf-8")
    scope = {}
    exec(text[text.index("TABLE = "):text.index("MOST_FILES")], scope)  # pylint: disable=exec-used
    return [entry for name in names for entry in scope["TABLE"][name]]


def fetch(server, *arguments, script=SCRIPT, base=None, expect=0, **variables):
    base = base or f"http://127.0.0.1:{server.server_port}"
    done = subprocess.run(["/usr/bin/python3", str(script), *map(str, arguments)], cwd=ROOT,
                          env={"PATH": "/usr/bin:/bin", "FETCH_BASE_URL": base, "FETCH_PAUSE": "0",
                               "TOKENIZE": str(BUILD / "tokenize"), **variables},
                          capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    if expect == 1:  # beside what tokenize says of these texts
        said = [line for line in done.stderr.strip().splitlines() if not line.startswith("tokenize: ")]
        assert len(said) == 1, done.stderr
    return done.stdout if expect == 0 else done.stderr


def with_checksums(tmp_path, data):
    """Makes a copy of the script that expects other data: {checksum in the script: bytes}."""
    text = SCRIPT.read_text(encoding="utf-8")
    for known, content in data.items():
        assert text.count(known) == 1
        text = text.replace(known, hashlib.sha256(content).hexdigest())
    script = tmp_path / "fetch.py"
    script.write_text(text, encoding="utf-8")
    return script


def serve_stories(server, tmp_path):
    (train, train_sum, _), (val, val_sum, _) = table("tinystories")
    server.files = {train: b"Once.\n<|endoftext|>\nTwice.\n" * 20000, val: b"A story.\n"}
    return with_checksums(tmp_path, {train_sum: server.files[train], val_sum: server.files[val]})


NAMES = ("tinystories", "wikitext-2", "wikitext-103", "c4", "fineweb", "fineweb-edu", "climbmix")


def test_checksums_are_complete():
    for name in NAMES:
        for path, known, _ in table(name):
            assert known is None or re.fullmatch("[0-9a-f]{64}", known), path


def test_stories(server, tmp_path):
    script = serve_stories(server, tmp_path)
    said = fetch(server, "tinystories", tmp_path / "out", script=script)
    assert "next: build/tokenize" in said and "--separator '<|endoftext|>'" in said
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "TinyStories-train.txt", "TinyStories-valid.txt", "train.txt", "val.txt"]
    assert (tmp_path / "out" / "train.txt").read_bytes() == list(server.files.values())[0]
    before = len(server.requests)
    fetch(server, "tinystories", tmp_path / "out", script=script)
    assert len(server.requests) == before  # nothing is fetched twice


def test_a_wrong_checksum_is_refused_and_not_kept(server, tmp_path):
    (train, known, _), _ = table("tinystories")
    server.files = {train: b"not what was published"}
    said = fetch(server, "tinystories", tmp_path, expect=1)
    assert f"expected {known}" in said and "not kept" in said
    assert list(tmp_path.iterdir()) == []
    # A file that the user copied there is treated the same: it stays, but is not used.
    (tmp_path / "TinyStories-train.txt").write_bytes(b"something else")
    assert "remove it to fetch anew" in fetch(server, "tinystories", tmp_path, expect=1)
    assert [p.name for p in tmp_path.iterdir()] == ["TinyStories-train.txt"]


@pytest.mark.parametrize("ranges", [True, False], ids=["resumes", "starts_over"])
def test_a_broken_connection_is_made_good(server, tmp_path, ranges):
    script = serve_stories(server, tmp_path)
    server.cuts, server.ranges = [2, 3], ranges
    fetch(server, "tinystories", tmp_path / "out", script=script)
    assert (tmp_path / "out" / "train.txt").read_bytes() == list(server.files.values())[0]
    size = len(list(server.files.values())[0])
    asked = [r for path, r in server.requests if "train" in path]
    assert asked == [None, f"bytes={size // 2}-",
                     f"bytes={size // 2 + (size - size // 2) // 3}-" if ranges else
                     f"bytes={size // 3}-"]


def test_the_next_call_goes_on(server, tmp_path):
    script = serve_stories(server, tmp_path)
    server.cuts = [2]
    said = fetch(server, "tinystories", tmp_path / "out", "--retries", 0, script=script, expect=1)
    assert "MB are kept in" in said and "call this again" in said
    fetch(server, "tinystories", tmp_path / "out", "--retries", 0, script=script)
    assert server.requests[1][1] == f"bytes={len(list(server.files.values())[0]) // 2}-"
    assert (tmp_path / "out" / "train.txt").read_bytes() == list(server.files.values())[0]


def test_a_call_that_is_stopped_goes_on(server, tmp_path):
    script = serve_stories(server, tmp_path)
    server.cuts = [2]
    words = ["/usr/bin/python3", str(script), "tinystories", str(tmp_path / "out")]
    address = f"http://127.0.0.1:{server.server_port}"
    with subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          env={"PATH": "/usr/bin:/bin", "FETCH_BASE_URL": address, "FETCH_PAUSE": str(TIMEOUT)}) as process:
        while not server.requests and process.poll() is None:
            time.sleep(0.01)
        time.sleep(0.5)  # the connection closed early, and it waits before the next attempt
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=TIMEOUT)[1]
    assert (process.returncode, said) == (130, "fetch.py: stopped; the same command goes on\n")
    fetch(server, "tinystories", tmp_path / "out", script=script)
    assert server.requests[1][1].startswith("bytes=")


def test_a_file_that_changed_meanwhile_starts_over(server, tmp_path):
    script = serve_stories(server, tmp_path)
    train = list(server.files)[0]
    good, server.files[train] = server.files[train], b"old " * 100000
    server.cuts = [2]
    fetch(server, "tinystories", tmp_path / "out", "--retries", 0, script=script, expect=1)
    server.files[train] = good
    fetch(server, "tinystories", tmp_path / "out", "--retries", 0, script=script)
    assert (tmp_path / "out" / "train.txt").read_bytes() == good


def test_a_partial_file_that_is_too_long_starts_over(server, tmp_path):
    script = serve_stories(server, tmp_path)
    train = list(server.files)[0]
    (tmp_path / "out").mkdir()
    partial = tmp_path / "out" / "TinyStories-train.txt.partial"
    partial.write_bytes(b"x" * (len(server.files[train]) + 1))
    etag = '"' + hashlib.md5(server.files[train]).hexdigest() + '"'
    (tmp_path / "out" / "TinyStories-train.txt.partial.etag").write_text(etag)
    fetch(server, "tinystories", tmp_path / "out", script=script)
    assert (tmp_path / "out" / "train.txt").read_bytes() == server.files[train]


ROWS = " \n = Title = \n \n Some text . \n More . \n \n"


@pytest.mark.parametrize("name", ["wikitext-2", "wikitext-103"])
def test_wikitext(server, tmp_path, name):
    ((path, known, _),) = table(name)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for split in ("train", "valid", "test"):
            file.writestr(f"{name}-raw/wiki.{split}.raw", ROWS + split + "\n")
    server.files = {path: archive.getvalue()}
    script = with_checksums(tmp_path, {known: archive.getvalue()})
    fetch(server, name, tmp_path / "out", script=script)
    for split, text in (("train", "train"), ("val", "valid"), ("test", "test")):
        assert (tmp_path / "out" / f"{split}.txt").read_text() == ROWS + text + "\n"
    # This equals "\n\n".join(dataset["text"]) of Hugging Face's rows.
    rows = ["", " = Title = \n", "", " Some text . \n", " More . \n", "", "test\n"]
    assert (tmp_path / "out" / "test.joined.txt").read_text() == "\n\n".join(rows)


def test_c4_is_trusted_on_first_use(server, tmp_path):
    (train, _, _), (val, _, _) = table("c4")
    documents = ["One.\nTwo.", "Zwei: ü\n", "三"]
    lines = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in documents)
    for i in range(2):
        server.files[train.format(i=i)] = gzip.compress(lines.encode(), mtime=0)
    server.files[val] = gzip.compress(lines.encode(), mtime=0)
    said = fetch(server, "c4", tmp_path, "--files", 2)
    assert said.count("no checksum is known") == 3
    expected = "<|endoftext|>\n".join(text + "\n" for text in documents * 2)
    assert (tmp_path / "train.txt").read_text(encoding="utf-8") == expected
    assert "no checksum" not in fetch(server, "c4", tmp_path, "--files", 2)
    # The text is of the files that were asked for, also where a file is older than the text (cp -p).
    fetch(server, "c4", tmp_path)
    assert (tmp_path / "train.txt").read_text(encoding="utf-8") == "<|endoftext|>\n".join(text + "\n" for text in documents)
    os.utime(tmp_path / train.format(i=1).rsplit("/", 1)[1], (0, 0))
    assert "making train.txt" in fetch(server, "c4", tmp_path, "--files", 2)
    assert (tmp_path / "train.txt").read_text(encoding="utf-8") == expected
    assert "making" not in fetch(server, "c4", tmp_path, "--files", 2)
    # A later download with other data under the same name is refused.
    name = tmp_path / train.format(i=0).rsplit("/", 1)[1]
    name.unlink()
    server.files[train.format(i=0)] = gzip.compress(b'{"text": "forged"}\n')
    said = fetch(server, "c4", tmp_path, "--files", 2, expect=1)
    assert "kept from an earlier download in" in said and not name.exists()


@pytest.mark.parametrize("content", [gzip.compress(b'{"title": "none"}\n'), gzip.compress(b"no text"),
                                     b"\x1f\x8b\x08\0" + bytes(30), gzip.compress(b"5\n"),
                                     gzip.compress(b"text" * 99)[:30]], ids=range(5))
def test_a_file_that_is_not_what_it_should_be(server, tmp_path, content):
    """C4's checksums are not known beforehand."""
    for path, _, _ in table("c4"):
        server.files[path.format(i=0)] = content
    said = fetch(server, "c4", tmp_path, expect=1)
    (line,) = (line for line in said.splitlines() if line.startswith("fetch.py: "))
    assert "c4-train.00000-of-01024.json.gz: " in line and "remove it and its .sha256" in line
    assert "Traceback" not in said


def stand_in_for_pyarrow(folder):
    """A module that reads "PAR1" and two documents behind it."""
    (folder / "pyarrow").mkdir()
    (folder / "pyarrow" / "__init__.py").touch()
    (folder / "pyarrow" / "parquet.py").write_text(
        "class Column(list):\n    to_pylist = list.copy\n"
        "class Batch:\n    def __init__(self, texts): self.texts = texts\n"
        "    def column(self, i): return Column(self.texts[i:])\n"
        "class ParquetFile:\n    def __init__(self, path):\n        magic, *self.texts = open(path).read().split()\n"
        "        assert magic == 'PAR1'\n"
        "    def iter_batches(self, columns): assert columns == ['text']; return [Batch(self.texts)]\n")


@pytest.mark.parametrize("name", ["fineweb", "fineweb-edu", "climbmix"])
def test_parquet(server, tmp_path, name):
    """Without pyarrow the script says what to do. With a stand-in for pyarrow beside it, the script writes the
    column "text"."""
    server.files = {path.format(i=0): b"PAR1 One. Two." for path, _, _ in table(name)}
    script = with_checksums(tmp_path, {})
    said = fetch(server, name, tmp_path / "out", script=script, expect=1)
    assert "pip install pyarrow" in said
    stand_in_for_pyarrow(tmp_path)
    fetch(server, name, tmp_path / "out", script=script)
    assert (tmp_path / "out" / "train.txt").read_text() == "One.\n<|endoftext|>\nTwo.\n"


def words_of(path):
    magic, version, _, vocabulary, words, size = struct.unpack("<4i2Q", path.read_bytes()[:32])
    assert (magic, version, vocabulary) == (20240520, 1, 97)
    return words, size


def test_files_become_token_files_one_by_one(server, tmp_path):
    """A stop after the first file, a second call that fetches only what is missing, and no text that stays."""
    stand_in_for_pyarrow(tmp_path)
    script, out = with_checksums(tmp_path, {}), tmp_path / "out"
    (train, _, _), (val, _, _) = table("climbmix")
    server.files = {train.format(i=0): b"PAR1 the cat", val: b"PAR1 a bird"}
    common = ["climbmix", out, "--retries", 0, "--tokenizer", TOKENIZER]
    assert "answered 404" in fetch(server, *common, "--files", 2, script=script, expect=1)
    first = (out / "train_000000.bin").read_bytes()
    server.files[train.format(i=1)] = b"PAR1 the dog sleeps"
    before = len(server.requests)
    said = fetch(server, *common, "--files", 2, script=script)
    assert len(server.requests) == before + 2  # the second file, and val
    assert f"--train '{out}/train_*.bin' --val '{out}/val.bin'" in said and "CC BY-NC 4.0" in said
    assert [path.name for path in sorted(out.iterdir()) if ".sha256" not in path.name] == [
        "tokenizer.model", "train_000000.bin", "train_000001.bin", "val.bin"]
    assert (out / "train_000000.bin").read_bytes() == first
    # One word and a line end for each document; the separator's line counts as nothing.
    assert [words_of(out / name) for name in ("train_000000.bin", "train_000001.bin", "val.bin")] == [
        (2, len("the\ncat\n")), (3, len("the\ndog\nsleeps\n")), (2, len("a\nbird\n"))]
    (out / "tokenizer.model").write_bytes(b"another")
    assert "token files of another tokenizer" in fetch(server, *common, script=script, expect=1)


def test_a_file_stays_where_tokenize_fails(server, tmp_path):
    stand_in_for_pyarrow(tmp_path)
    ((path, _, _),) = table("fineweb-edu")
    server.files = {path.format(i=0): b"PAR1 the cat"}
    (tmp_path / "bad.model").write_text("no model")
    done = subprocess.run(["/usr/bin/python3", with_checksums(tmp_path, {}), "fineweb-edu", tmp_path / "out",
                           "--tokenizer", tmp_path / "bad.model"], text=True, capture_output=True, check=False,
                          env={"PATH": "/usr/bin:/bin", "TOKENIZE": str(BUILD / "tokenize"),
                               "FETCH_BASE_URL": f"http://127.0.0.1:{server.server_port}"})
    assert done.returncode == 1 and "bad.model" in done.stderr and done.stderr.endswith("000_00000.parquet stays\n")
    assert (tmp_path / "out" / "000_00000.parquet").exists() and not list((tmp_path / "out").glob("*.bin*"))
    assert "--tokenizer: " in fetch(server, "c4", tmp_path, "--tokenizer", tmp_path / "absent", expect=1)


def test_sizes_and_licences_are_told(server):
    said = fetch(server, "--list").splitlines()
    assert [line.split()[0] for line in said] == list(NAMES) and all("CC BY" in line or "ODC" in line or "CDLA" in line
                                                                     for line in said)


@pytest.mark.parametrize("base, said", [
    ("http://127.0.0.1:9", "cannot reach http://127.0.0.1:9/datasets/ggml-org/ci"),
    ("http://no-such-host.invalid", "bring the file to"),
], ids=["refused", "unknown_host"])
def test_offline(server, tmp_path, base, said):
    assert said in fetch(server, "wikitext-2", tmp_path, "--retries", 1, base=base, expect=1)


def test_what_the_server_does_not_have(server, tmp_path):
    assert "answered 404" in fetch(server, "wikitext-2", tmp_path, expect=1)


def test_usage(server, tmp_path):
    assert "invalid choice" in fetch(server, "wikitext-3", tmp_path, expect=2)
    assert "c4 has 1 to 1024" in fetch(server, "c4", tmp_path, "--files", 2000, expect=2)
    assert "expected the name of a corpus" in fetch(server, expect=2)
    assert "archive of three texts" in fetch(server, "wikitext-2", "--tokenizer", TOKENIZER, expect=2)
    assert "tinystories has 1 to 1" in fetch(server, "tinystories", "--files", 2, expect=2)

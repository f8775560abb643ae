#!/usr/bin/env python3
"""Downloads a corpus from its public site and makes plain text of it, for
build/tokenize.

    data/fetch.py NAME [FOLDER] [--files N]     NAME: tinystories, wikitext-2,
                  wikitext-103, c4, fineweb, fineweb-edu, climbmix
    data/fetch.py fineweb-edu --files 14 --tokenizer tokenizer.model
                  token files at once, no text kept
    data/fetch.py --list                        sizes and licences

FOLDER (default: data/NAME) gets the files as they are published and, made from
them,

    train.txt  val.txt  test.txt    UTF-8, as many as the corpus has; a line
                                    <|endoftext|> separates documents
    test.joined.txt                 wikitext: rows joined by blank lines, on
                                    which most perplexities were measured

With --tokenizer, each file goes through build/tokenize (or TOKENIZE;
data/tokenize_json.py for a tokenizer.json) as soon as it is there, becomes
FOLDER/train_000000.bin, train_000001.bin, ... or val.bin, and is removed. The
next call goes on where the last one stopped, also with more --files. Disk then
holds one file as it was published at a time.

Every file is checked against its SHA-256 in this script. If the script knows
none, it keeps the one of the first download in FILE.sha256, says so, and
checks later downloads against it. An interrupted download continues where it
stopped, automatically up to --retries times or with the next call. A file that
you copied there is used if its checksum is right. FETCH_BASE_URL replaces
https://huggingface.co, for a mirror. The script needs only Python's standard
library, except for FineWeb, FineWeb-Edu and ClimbMix: their files are Parquet
and need the package pyarrow.

Exit codes: 0 success, 1 failure, 2 wrong usage.
"""
import argparse
import gzip
import hashlib
import http.client
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
import zlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOME = "https://huggingface.co"
SEPARATOR = "<|endoftext|>"

# For each corpus: the path of a file at HOME, its SHA-256 or None, and the text that it contains or
# None for an archive. {i} is the number of a file; --files says how many there are.
TABLE = {
    "tinystories": [
        ("datasets/roneneldan/TinyStories/resolve/5485261731eaac25dd8e5ebbc3839d0a9870b185/"
         "TinyStories-train.txt",
         "c5cf5e22ff13614e830afbe61a99fbcbe8bcb7dd72252b989fa1117a368d401f", "train.txt"),
        ("datasets/roneneldan/TinyStories/resolve/5485261731eaac25dd8e5ebbc3839d0a9870b185/"
         "TinyStories-valid.txt",
         "94e431816c4cce81ff71e4408ff8d3bda9a42e8d2663986697c3954288cb38b4", "val.txt"),
    ],
    "wikitext-2": [
        ("datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",
         "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11", None),
    ],
    "wikitext-103": [
        ("datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",
         "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794", None),
    ],
    "c4": [
        ("datasets/allenai/c4/resolve/1588ec454efa1a09f29cd18ddd04fe05fc8653a2/en/"
         "c4-train.{i:05}-of-01024.json.gz", None, "train.txt"),
        ("datasets/allenai/c4/resolve/1588ec454efa1a09f29cd18ddd04fe05fc8653a2/en/"
         "c4-validation.00000-of-00008.json.gz", None, "val.txt"),
    ],
    "fineweb": [
        ("datasets/HuggingFaceFW/fineweb/resolve/main/sample/10BT/{i:03}_00000.parquet", None,
         "train.txt"),
    ],
    "fineweb-edu": [
        ("datasets/HuggingFaceFW/fineweb-edu/resolve/main/sample/10BT/{i:03}_00000.parquet", None,
         "train.txt"),
    ],
    "climbmix": [
        ("datasets/karpathy/climbmix-400b-shuffle/resolve/main/shard_{i:05}.parquet", None, "train.txt"),
        ("datasets/karpathy/climbmix-400b-shuffle/resolve/main/shard_06542.parquet", None, "val.txt"),
    ],
}
MOST_FILES = {"c4": 1024, "fineweb": 15, "fineweb-edu": 14, "climbmix": 6542}

# For each corpus: what it is, the size to download, and its licence as its page states it.
ABOUT = {
    "tinystories": ("short stories by GPT-3.5 and GPT-4", "2 GB", "CDLA-Sharing 1.0"),
    "wikitext-2": ("Wikipedia articles", "5 MB", "CC BY-SA 3.0"),
    "wikitext-103": ("Wikipedia articles", "190 MB", "CC BY-SA 3.0"),
    "c4": ("web pages, English", "0.3 GB a file", "ODC-By 1.0"),
    "fineweb": ("web pages, the sample of 10 billion tokens", "2 GB a file", "ODC-By 1.0"),
    "fineweb-edu": ("web pages that teach, the sample of 10 billion tokens", "2 GB a file", "ODC-By 1.0"),
    "climbmix": ("NVIDIA's mixture of 400 billion tokens, shuffled", "0.1 GB a file",
                 "CC BY-NC 4.0, for research"),
}


class Failure(Exception):
    """An error with a message to the user in one line."""


# ---- downloading ----

def show(text):
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        print(f"\r\033[K{text[:columns - 1]}", end="", file=sys.stderr, flush=True)


def request(url, partial):
    """Requests the part of the file that `partial` lacks. Returns the response and the offset of its
    first byte."""
    have = partial.stat().st_size if partial.exists() else 0
    tag = partial.with_name(partial.name + ".etag")
    headers = {"User-Agent": "train_llama2 data/fetch.py", "Accept-Encoding": "identity"}
    if have and tag.exists():
        headers |= {"Range": f"bytes={have}-", "If-Range": tag.read_text(encoding="utf-8")}
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        partial.unlink()  # it is longer than the file, so it is no part of it
        return request(url, partial)
    etag = response.headers.get("ETag", "")
    if etag and not etag.startswith("W/"):
        tag.write_text(etag, encoding="utf-8")
    else:
        tag.unlink(missing_ok=True)
    return response, have if response.status == 206 else 0


def receive(url, partial):
    """Makes one attempt to download. Returns whether the file is complete now."""
    response, start = request(url, partial)
    with response, open(partial, "r+b" if start else "wb") as file:
        length = response.headers.get("Content-Length")
        end = start + int(length) if length else None
        file.truncate(start)
        file.seek(start)
        began, got = time.monotonic(), 0
        while block := response.read(1 << 20):
            file.write(block)
            got += len(block)
            speed = got / (time.monotonic() - began + 1e-9)
            left = f", {(end - start - got) / speed:.0f} s left" if end else ""
            show(f"{partial.stem}: {(start + got) / 1e6:.1f} MB, {speed / 1e6:.1f} MB/s{left}")
    show("")
    return end is None or start + got == end


def download(url, path, retries):
    partial = path.with_name(path.name + ".partial")
    for attempt in range(retries + 1):
        if attempt:
            time.sleep(min(2 ** (attempt - 1), 30) * float(os.environ.get("FETCH_PAUSE", "1")))
        try:
            if receive(url, partial):
                partial.with_name(partial.name + ".etag").unlink(missing_ok=True)
                return partial
            why = "the connection closed early"
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise Failure(f"{url}: the server answered {error.code} {error.reason}") from None
            why = f"the server answered {error.code} {error.reason}"
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError,
                ConnectionError) as error:
            why = str(getattr(error, "reason", error))
    have = partial.stat().st_size if partial.exists() else 0
    if have:
        raise Failure(f"{url}: {why}; {have / 1e6:.1f} MB are kept in {partial}, call this again "
                      "to go on")
    raise Failure(f"cannot reach {url}: {why}. Without a network: bring the file to {path} and "
                  "call this again, or name a mirror in FETCH_BASE_URL")


def digest(path):
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def obtain(url, path, known, retries):
    """Downloads the file to `path` unless it exists, and checks it."""
    record = path.with_name(path.name + ".sha256")
    expected = known
    if not known and record.exists():
        expected = record.read_text(encoding="utf-8").split()[0]
    fetched = not path.exists()
    found_at = download(url, path, retries) if fetched else path
    found = digest(found_at)
    if expected and found != expected:
        if fetched:
            found_at.unlink()
        source = "" if known else f" (kept from an earlier download in {record})"
        action = (f"{url} may have changed; it was not kept" if fetched else
                  "remove it to fetch anew")
        raise Failure(f"{path}: its SHA-256 is {found}, expected {expected}{source}: {action}")
    if fetched:
        found_at.rename(path)
    if not expected:
        record.write_text(f"{found}  {path.name}\n", encoding="utf-8")
        print(f"{path}: no checksum is known; SHA-256 {found} is kept in {record.name}, and later "
              "downloads must match it")
    return path


# ---- text ----

def documents_of_gzip(path):
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def documents_of_parquet(path):
    try:
        import pyarrow.parquet  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise Failure(f"this corpus is Parquet; {sys.executable} lacks the Python package pyarrow: pip install "
                      "pyarrow in a virtual environment (python3 -m venv), or take c4, which needs nothing") from None
    for batch in pyarrow.parquet.ParquetFile(path).iter_batches(columns=["text"]):
        yield from batch.column(0).to_pylist()


def documents(path):
    """Yields pieces of the text of a file, with a separator line between documents."""
    if path.suffix == ".txt":
        with open(path, encoding="utf-8", newline="") as file:
            yield from iter(lambda: file.read(1 << 20), "")
        return
    reader = documents_of_parquet if path.suffix == ".parquet" else documents_of_gzip
    first = True
    try:
        for text in reader(path):
            yield ("" if first else f"{SEPARATOR}\n") + text + "\n"
            first = False
    except (OSError, ValueError, LookupError, TypeError, EOFError, zlib.error) as error:
        raise Failure(f"{path}: {type(error).__name__}: {error}: expected the file as it was published; remove it and "
                      "its .sha256 to fetch anew") from None


def write_documents(paths, out):
    with open(out, "w", encoding="utf-8", newline="") as file:
        for i, path in enumerate(paths):
            file.write(f"{SEPARATOR}\n" if i else "")
            for text in documents(path):
                file.write(text)


def write_wikitext(archive, folder):
    """Writes train.txt, val.txt and test.txt as they are, and the rows of the test text joined by blank
    lines. A row is a line with its line end, or empty if the line is blank."""
    with zipfile.ZipFile(archive) as files:
        for split, name in (("train", "train"), ("valid", "val"), ("test", "test")):
            (member,) = [m for m in files.namelist() if m.endswith(f"wiki.{split}.raw")]
            text = files.read(member)
            (folder / f"{name}.txt.partial").write_bytes(text)
            (folder / f"{name}.txt.partial").rename(folder / f"{name}.txt")
    rows = io.StringIO(text.decode("utf-8"), newline="\n")
    joined = "\n\n".join(row if row.strip() else "" for row in rows)
    (folder / "test.joined.txt").write_bytes(joined.encode("utf-8"))


def make_text(paths, folder, out):
    """Writes the text of downloaded files, unless there is one of the same files that is newer than they are."""
    target = folder / (out or "test.joined.txt")
    stamp, names = folder / f".{target.name}", "".join(f"{path.name}\n" for path in paths)
    newest = max(path.stat().st_mtime for path in paths)
    made_of = stamp.read_text(encoding="utf-8") if stamp.exists() else f"{paths[0].name}\n"
    if target.exists() and target.stat().st_mtime >= newest and made_of == names:
        return
    print(f"{folder}: making {'text' if out is None else out}")
    if paths[0].suffix == ".zip":
        write_wikitext(paths[0], folder)
        return
    partial = target.with_name(target.name + ".partial")
    if paths[0].suffix == ".txt":
        partial.unlink(missing_ok=True)
        os.link(paths[0], partial)
    else:
        write_documents(paths, partial)
    partial.rename(target)
    if made_of != names:
        stamp.write_text(names, encoding="utf-8")


# ---- token files ----

def check_tokenizer(tokenizer, folder):
    """All token files of a folder are made with one tokenizer; who makes them leaves a copy of it there."""
    try:
        wanted = tokenizer.read_bytes()
    except OSError as error:
        raise Failure(f"--tokenizer: {tokenizer}: {error.strerror}") from None
    beside = folder / ("tokenizer" + (".json" if tokenizer.suffix == ".json" else ".model"))
    if any(folder.glob("*.bin")) and beside.exists() and beside.read_bytes() != wanted:
        raise Failure(f"{folder} has token files of another tokenizer, see {beside}: remove them, or name "
                      "another FOLDER")


def tokenize(path, tokenizer, target):
    """Sends the text of a file through tokenize. The token file appears when it is complete."""
    program = [os.environ.get("TOKENIZE", str(ROOT / "build" / "tokenize"))]
    if tokenizer.suffix == ".json":
        program = [sys.executable, str(ROOT / "data" / "tokenize_json.py")]
    command = [*program, "--tokenizer", str(tokenizer), "--separator", SEPARATOR, "--input", "-", "--train",
               str(target)]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
    except OSError as error:
        raise Failure(f"{command[0]}: {error.strerror}; 'make' builds it") from None
    try:
        with process.stdin:
            for text in documents(path):
                process.stdin.write(text.encode("utf-8"))
    except BrokenPipeError:
        pass  # it has said why
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.wait():
        raise Failure(f"tokenize failed for {path}, see above; {path} stays")


def stream(name, folder, files, retries, tokenizer):
    """Makes a token file of each published file, and removes the published file."""
    base = os.environ.get("FETCH_BASE_URL", HOME).rstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    check_tokenizer(tokenizer, folder)
    for pattern, known, out in TABLE[name]:
        stem = out.removesuffix(".txt")
        many = "{i" in pattern
        for i in range(files if many else 1):
            target = folder / (f"{stem}_{i:06}.bin" if many else f"{stem}.bin")
            if target.exists():
                continue
            path = pattern.format(i=i)
            local = obtain(f"{base}/{path}", folder / path.rsplit("/", 1)[1], known, retries)
            tokenize(local, tokenizer, target)
            local.unlink()
    found = [f"--{kind} '{folder}/{kind}{'_*' * ('{i' in pattern)}.bin'" for pattern, _, out in TABLE[name]
             for kind in [out.removesuffix(".txt")]]
    print(f"next: build/train_llama2 {' '.join(found)} ...")


# ---- the whole ----

def show_list():
    for name, (what, size, licence) in ABOUT.items():
        count = MOST_FILES.get(name)
        print(f"{name:<13} {size + (f', {count} files' if count else ''):<26} {licence:<27} {what}")


def fetch(name, folder, files, retries):
    base = os.environ.get("FETCH_BASE_URL", HOME).rstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern, known, out in TABLE[name]:
        count = files if "{i" in pattern else 1
        paths = []
        for path in (pattern.format(i=i) for i in range(count)):
            local = folder / path.rsplit("/", 1)[1]
            paths.append(obtain(f"{base}/{path}", local, known, retries))
        make_text(paths, folder, out)
    separator = "" if name.startswith("wikitext") else f" --separator '{SEPARATOR}'"
    print(f"next: build/tokenize --tokenizer tokenizer.model --input {folder}/train.txt"
          f"{separator} --train {folder}/train.bin")


def main():
    parser = argparse.ArgumentParser(
        prog="fetch.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("name", nargs="?", choices=TABLE, metavar="NAME", help=", ".join(TABLE))
    parser.add_argument("folder", nargs="?", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--files", type=int, default=1, metavar="N",
                        help="how many files of c4, fineweb, fineweb-edu or climbmix (default 1; --list has sizes)")
    parser.add_argument("--tokenizer", type=pathlib.Path, metavar="FILE",
                        help="tokenizer.model or tokenizer.json: make token files at once, and keep no text")
    parser.add_argument("--list", action="store_true", help="print sizes and licences")
    parser.add_argument("--retries", type=int, default=5, metavar="N",
                        help="attempts after a broken connection (default 5)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # from here on a pipe that breaks is reported
    if arguments.list:
        show_list()
        return 0
    if not arguments.name:
        parser.error(f"expected the name of a corpus: {', '.join(TABLE)}")
    if arguments.tokenizer and arguments.name.startswith("wikitext"):
        parser.error("--tokenizer: wikitext is an archive of three texts; fetch it, and use build/tokenize")
    most = MOST_FILES.get(arguments.name, 1)
    if not 1 <= arguments.files <= most:
        parser.error(f"--files: {arguments.name} has 1 to {most}, got {arguments.files}")
    if arguments.retries < 0:
        parser.error(f"--retries: expected at least 0, got {arguments.retries}")
    folder = arguments.folder or pathlib.Path("data") / arguments.name
    print(f"{arguments.name}: {', '.join(ABOUT[arguments.name])}")
    try:
        if arguments.tokenizer:
            stream(arguments.name, folder, arguments.files, arguments.retries, arguments.tokenizer)
        else:
            fetch(arguments.name, folder, arguments.files, arguments.retries)
    except Failure as failure:
        print(f"fetch.py: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        show("")
        print("fetch.py: stopped; the same command goes on", file=sys.stderr)
        return 128 + signal.SIGINT
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError) as error:
        print(f"fetch.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())

#!/usr/bin/env python3
"""Makes token files with a tokenizer.json (Llama 3 and others), as build/tokenize
does with a tokenizer.model.

    data/tokenize_json.py --tokenizer tokenizer.json --input text.txt
                          --train train.bin --val val.bin

The package tokenizers encodes (pip install tokenizers), in all threads.
--input FILE, several times, or - for standard input; each file is a document,
or several if the line that --separator names is between them. The tokenizer's
own token begins each document, or the one that --bos names. What a document
contains is text: names of special tokens in it count as letters. A vocabulary
above 65,535 makes files of 32-bit tokens (llmc/data/dataloader.h). A document
is encoded in one piece, so a corpus in one file needs a separator.

The output gets its name when it is complete, and a copy of the tokenizer
beside it, which the trainer copies into its checkpoints. Exit codes: 0
success, 1 failure, 2 wrong usage.
"""
import argparse
import array
import codecs
import itertools
import os
import pathlib
import shutil
import signal
import sys
import time

MAGIC, VERSION, MAGIC_32, VERSION_32, MOST_16 = 20240520, 1, 20240801, 7, 65535  # llmc/data/dataloader.h
HEADER_BYTES, MOST_TOKENS = 1024, 2**31 - 1
BATCH_BYTES = 1 << 22  # of documents that are encoded at once


class Failure(Exception):
    """An error with a message to the user in one line."""


class Writer:
    """A token file, or shards of `shard` tokens each (0: one file). path None: writes nothing."""

    def __init__(self, path, shard, vocabulary):
        self.path, self.shard, self.vocabulary = path, shard, vocabulary
        self.wide = vocabulary > MOST_16
        self.tokens = self.words = 0
        self.files, self.file = [], None  # final names; the file that is being written
        if path:
            self.begin()

    def begin(self):
        name = self.path
        if self.shard:
            stem = name.with_suffix("") if name.suffix == ".bin" else name
            name = stem.with_name(f"{stem.name}_{len(self.files):06}{'.bin' * (name.suffix == '.bin')}")
            if name.exists() and not self.files:
                raise Failure(f"{name} is there already: remove the shards of an earlier run, which would be "
                              "read together with the new ones")
        self.files.append(name)
        self.file = open(name.with_name(name.name + ".partial"), "wb")
        self.file.write(bytes(HEADER_BYTES))
        self.count, self.text = 0, [0, 0]

    def end(self):
        kind = (MAGIC_32, VERSION_32) if self.wide else (MAGIC, VERSION)
        self.file.seek(0)
        self.file.write(array.array("i", [*kind, self.count, self.vocabulary]).tobytes()
                        + array.array("Q", self.text).tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def add(self, ids, text):
        """Appends the tokens of a text; its words and bytes count where the first of them lies."""
        most = self.shard or MOST_TOKENS
        if not self.shard and self.count + len(ids) > most:
            raise Failure(f"{self.path} would have more than {most} tokens, the most a token file holds: give "
                          "--shard-tokens, and several files are written")
        words = len(text.split())
        self.words += words
        self.tokens += len(ids)
        while ids:
            if self.count == most:
                self.end()
                self.begin()
            self.text = [self.text[0] + words, self.text[1] + len(text)]
            words, text = 0, b""
            part = ids[:most - self.count]
            self.file.write(array.array("I" if self.wide else "H", part).tobytes())
            self.count += len(part)
            ids = ids[len(part):]

    def complete(self, hint):
        if self.path and self.tokens < 2:
            raise Failure(f"{self.path} would have {self.tokens} tokens, expected at least 2: there is too little "
                          f"text {hint}")
        if self.path:
            self.end()

    def publish(self):
        for name in self.files:
            name.with_name(name.name + ".partial").rename(name)

    def discard(self):
        for name in self.files:
            name.with_name(name.name + ".partial").unlink(missing_ok=True)


def load(path, bos):
    """The tokenizer, and the id with which documents begin."""
    try:
        from tokenizers import Tokenizer  # pylint: disable=import-outside-toplevel
    except ImportError:
        raise Failure("tokenizer.json needs the Python package tokenizers: pip install tokenizers") from None
    if not path.exists():
        raise Failure(f"{path}: No such file or directory")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # pylint: disable=broad-exception-caught
        raise Failure(f"{path} is no tokenizer.json: {error}; build/tokenize reads a tokenizer.model") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    first = tokenizer.token_to_id(bos) if bos else next(iter(tokenizer.encode("").ids), None)
    if first is None:
        raise Failure(f"{path} has no token {bos!r}" if bos else
                      f"{path} puts no token before a text: expected --bos TOKEN, with which documents begin")
    tokenizer.encode_special_tokens = True
    return tokenizer, first


def documents(inputs, separator):
    """Yields (position of the document in all inputs, document, whether it is its input's last), in bytes."""
    before, separators, within, marks = 0, 0, 0, 0
    for name in inputs:
        with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
            first = file.readline()
            if first.startswith(codecs.BOM_UTF8):
                first, before, marks = first[3:], before + 3, marks + 1
            if separator is None:
                text = first + file.read()
                yield before, text
                before += len(text)
                continue
            lines, start = [], before
            for line in itertools.chain([first] if first else [], file):
                before += len(line)
                if line.rstrip(b"\n").removesuffix(b"\r") == separator:
                    separators += 1
                    yield start, b"".join(lines)
                    lines, start = [], before
                else:
                    within += line.count(separator) if separator else 0
                    lines.append(line)
            yield start, b"".join(lines)
    if marks:
        print(f"tokenize_json.py: {marks} of the inputs begin with a byte order mark, which is left out", file=sys.stderr)
    if separator is None or separators and not within:
        return
    said = (f"is {separators} lines of the input, and {within} times within a line, where it divides nothing: expected "
            "a line of its own between documents" if within else "is nowhere in the input: each input is one document")
    if within and not separators:
        raise Failure(f"--separator {separator.decode()!r} {said}")
    print(f"tokenize_json.py: --separator {separator.decode()!r} {said}", file=sys.stderr)


def parts(inputs, separator, split):
    """Yields (document, 0 or 1): those from byte `split` on are for validation. The document that contains it is
    cut at the next start of a line."""
    for position, text in documents(inputs, separator):
        cut = len(text)
        if position >= split:
            cut = 0
        elif position + len(text) > split:
            newline = text.find(b"\n", split - position - 1)
            cut = newline + 1 if newline >= 0 else len(text)
        for part, output in ((text[:cut], 0), (text[cut:], 1)):
            if part:
                yield part, output


def flush(tokenizer, first, gathered, outputs):
    """Encodes and writes documents. Returns how many characters are none in UTF-8, or zero bytes."""
    texts = [text.decode("utf-8", "replace") for text, _ in gathered]
    odd = sum(text.count("\ufffd") - raw.count("\ufffd".encode()) + text.count("\0")
              for text, (raw, _) in zip(texts, gathered))
    for (text, output), encoding in zip(gathered, tokenizer.encode_batch(texts, add_special_tokens=False)):
        outputs[output].add([first, *encoding.ids], text)
    gathered.clear()
    return odd


def encode(tokenizer, first, arguments, outputs):
    """Encodes all inputs. Returns the number of bytes."""
    separator = arguments.separator.encode() if arguments.separator is not None else None
    size = sum(os.path.getsize(name) for name in arguments.input if name != "-")
    split = int((1 - (arguments.val_fraction or 0.05)) * size) if arguments.val else float("inf")
    gathered, waiting, done, odd = [], 0, 0, 0
    for part in parts(arguments.input, separator, split):
        gathered.append(part)
        waiting += len(part[0])
        if waiting >= BATCH_BYTES:
            odd += flush(tokenizer, first, gathered, outputs)
            done, waiting = done + waiting, 0
    odd += flush(tokenizer, first, gathered, outputs)
    if odd > 0.01 * (done + waiting):
        raise Failure(f"{odd} places of the input are no text in UTF-8: expected text (gunzip unpacks, iconv converts it)")
    if odd:
        print(f"tokenize_json.py: {odd} places are no text in UTF-8: the model learns other characters there",
              file=sys.stderr)
    return done + waiting


def keep_tokenizer(path, folder):
    """Leaves a copy of the tokenizer in the outputs' folder."""
    there, partial = folder / "tokenizer.json", folder / "tokenizer.json.partial"
    if there.exists() and there.samefile(path):
        return
    shutil.copyfile(path, partial)
    partial.rename(there)


def tokenize(arguments):
    start = time.monotonic()
    tokenizer, first = load(arguments.tokenizer, arguments.bos)
    named = [path for path in (arguments.train, arguments.val) if path]
    for path in named:
        if (path.parent / "tokenizer.model").exists():
            raise Failure(f"{path.parent} has a tokenizer.model, which the trainer would take for these files: "
                          "expected another folder")
        if any(name != "-" and path.exists() and path.samefile(name) for name in (*arguments.input, arguments.tokenizer)):
            raise Failure(f"{path} is read as input: expected another name for the token file")
        if path.exists() and not path.is_file():
            raise Failure(f"{path} is no regular file: expected a name for the token file")
    vocabulary, outputs = tokenizer.get_vocab_size(), []
    try:
        for path in (arguments.train, arguments.val):
            outputs.append(Writer(path, arguments.shard_tokens, vocabulary))
        size = encode(tokenizer, first, arguments, outputs)
        outputs[1].complete("after the split; use a larger --val-fraction")
        outputs[0].complete("before the split")
        for folder in {path.parent for path in named}:
            keep_tokenizer(arguments.tokenizer, folder)
        for output in reversed(outputs):
            output.publish()
    except BaseException:
        for output in outputs:
            output.discard()
        raise
    for output in outputs:
        if output.path:
            shards = f", {len(output.files)} shards" if output.shard else ""
            print(f"{output.path}: {output.tokens} tokens, {output.words} words, vocabulary {vocabulary}{shards}")
    took = time.monotonic() - start
    print(f"{size / 1e6:.1f} MB of text in {took:.1f} s, {size / 1e6 / took:.1f} MB/s")


def main():
    parser = argparse.ArgumentParser(
        prog="tokenize_json.py", formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, metavar="FILE", help="tokenizer.json")
    parser.add_argument("--input", action="append", required=True, metavar="FILE", help="text in UTF-8; -: stdin")
    parser.add_argument("--separator", metavar="LINE", help="a line that lies between documents")
    parser.add_argument("--bos", metavar="TOKEN", help="token with which documents begin")
    parser.add_argument("--train", type=pathlib.Path, required=True, metavar="FILE", help="token file to write")
    parser.add_argument("--val", type=pathlib.Path, metavar="FILE", help="token file for the end of the text")
    parser.add_argument("--val-fraction", type=float, metavar="F", help="how much of the text that is (0.05)")
    parser.add_argument("--shard-tokens", type=int, default=0, metavar="N",
                        help="write NAME_000000.bin, NAME_000001.bin ... of N tokens each")
    arguments = parser.parse_args()
    fraction = arguments.val_fraction
    if fraction is not None and (not arguments.val or not 0 < fraction < 1):
        parser.error(f"--val-fraction: expected a number between 0 and 1, and --val, got {fraction}")
    if arguments.val and "-" in arguments.input:
        parser.error("--val: expected files, whose size is known, not standard input")
    if arguments.val and arguments.val.resolve() == arguments.train.resolve():
        parser.error(f"--train and --val name the same file, {arguments.train}")
    if arguments.shard_tokens and not 2 <= arguments.shard_tokens <= MOST_TOKENS:
        parser.error(f"--shard-tokens: expected 2 to {MOST_TOKENS}, got {arguments.shard_tokens}")
    try:
        tokenize(arguments)
    except (Failure, OSError) as failure:
        print(f"tokenize_json.py: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())

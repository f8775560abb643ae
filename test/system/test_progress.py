"""Tests the progress bar: it is shown on a terminal, and nowhere else. This is not obvious, because Open MPI
gives every rank a pseudo terminal, even if mpirun itself writes to a file."""
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios

import pytest

from program import TIMEOUT, environment_of, launch, write_tokens

BAR = "\r\033[K["


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """A function that returns the command of a short run on `ranks` ranks."""
    train = tmp_path_factory.mktemp("data") / "train.bin"
    write_tokens(train, [1] * 1000, 512)
    def words(ranks, *more):
        return launch("--model=260K", f"--train={train}", "--vocab-size=512", "--batch=1", "--seq=32",
                      "--steps=4", "--drift-samples=0", *more, ranks=ranks)
    return words


def start(words, stdout, environment=None):
    return subprocess.run(words, env=environment_of({"TERM": "xterm", **(environment or {})}), check=True,
                          stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE,
                          timeout=TIMEOUT)


def set_columns(terminal, columns):
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def on_terminal(words, columns=0, environment=None):
    """The output of a command if its stdout is a terminal. One of 0 columns does not know its width."""
    ours, theirs = pty.openpty()
    set_columns(ours, columns)
    start(words, theirs, environment)  # it prints less than the terminal can buffer
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 4096):
            text += part
    except OSError:  # everything is read, and the other end is closed
        pass
    os.close(ours)
    return text.decode()


def in_shell(words):
    """Wraps the command in a shell, as users do to set limits or a device for each rank."""
    split = words.index("2") + 1
    return [*words[:split], "sh", "-c", '"$@"; exit $?', "sh", *words[split:]]


def in_pipe(words):
    return start(words, subprocess.PIPE).stdout.decode()


def is_plain(text):
    lines = text.splitlines()
    return (not re.search(r"[\r\033]", text.replace("\r\n", "\n"))
            and sum("tokens/s" in line for line in lines) == 4)


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_file_and_pipe(command, tmp_path, ranks):
    with open(tmp_path / "said", "wb") as file:
        start(command(ranks), file)
    assert is_plain((tmp_path / "said").read_bytes().decode())
    assert is_plain(in_pipe(command(ranks)))


def test_a_file_from_a_terminal(command, tmp_path):
    """The user is at a terminal and calls: mpirun ... > said"""
    words = ["sh", "-c", f'"$@" > {tmp_path}/said', "sh", *command(2)]
    assert BAR not in on_terminal(words)
    assert is_plain((tmp_path / "said").read_bytes().decode())


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_terminal(command, ranks):
    text = on_terminal(command(ranks))
    assert BAR in text and text.count("tokens/s") == 4, text
    assert text.count("100%") == 1, text  # only one rank shows progress


def test_a_shell_between_mpirun_and_the_ranks(command):
    assert is_plain(in_pipe(in_shell(command(2))))
    assert BAR in on_terminal(in_shell(command(2)))


def test_told(command):
    assert BAR in in_pipe(command(0, "--progress=on")) and BAR in in_pipe(command(2, "--progress=on"))
    assert is_plain(on_terminal(command(0, "--progress=off")))
    assert is_plain(on_terminal(command(2, "--progress=off")))
    assert BAR not in on_terminal(command(0, "--progress=on", "--quiet"))


def bars(text):
    """The widths of the lines that were drawn again."""
    return [len(line) for line in re.findall(r"\r\033\[K([^\r\n]*%[^\r\n]*)(?=\r\033)", text)]


@pytest.mark.parametrize("columns, least, ranks", [
    (1, 0, 0), (4, 0, 0), (5, 4, 0), (12, 4, 0), (20, 15, 0), (21, 15, 0), (26, 20, 0), (40, 30, 0), (40, 30, 2),
    (57, 50, 0), (58, 50, 0), (59, 50, 0), (80, 50, 2), (300, 50, 0)])
def test_the_bar_fits(command, columns, least, ranks):
    text = on_terminal(command(ranks), columns)
    assert text.count("tokens/s") == 4
    assert bool(bars(text)) == (least > 0) and all(least <= width < columns for width in bars(text)), bars(text)


def test_the_bar_follows_the_terminal(command):
    ours, theirs = pty.openpty()
    set_columns(ours, 100)
    with subprocess.Popen(command(0, "--steps=1000000"), env=environment_of({"TERM": "xterm"}), stdout=theirs) as run:
        text = ""
        while not (found := bars(text[:text.rfind("\r")])) or found[-1] > 29:
            text += os.read(ours, 4096).decode()
            if len(found) == 1:
                set_columns(ours, 30)
        run.kill()
    os.close(ours)
    os.close(theirs)
    assert found[0] > 50


def test_no_bar_where_no_line_is_drawn_again(command):
    assert is_plain(on_terminal(command(0), 80, {"TERM": "dumb"}))

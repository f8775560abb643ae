"""Tests lossynet on a simulated network whose behaviour a fuzzer makes up (dev/fuzz/fuzz_packets.c).

test/corpus/packets has inputs that reach different code, and all inputs that once found a defect.
They are replayed here, with the address and undefined-behaviour sanitizers. libFuzzer then makes some new
ones from them, with a fixed seed; it is part of clang, and without clang gcc's build only replays. To search
longer, with another seed:

    make instrumented
    cp -r test/corpus/packets /tmp/corpus
    build/fuzz_packets -max_total_time=3600 -len_control=0 -max_len=2500 -close_fd_mask=2 /tmp/corpus

To add the few small inputs that reach new code:

    build/fuzz_packets -set_cover_merge=1 -close_fd_mask=2 test/corpus/packets /tmp/corpus
"""
import os
import shutil
import subprocess

import pytest

from program import BUILD, ROOT

pytestmark = pytest.mark.takes(30)

CORPUS = ROOT / "test" / "corpus" / "packets"
CLANG = shutil.which("clang") is not None
NEW = 120  # a number, not a time, so that a busy machine tries as many
ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1:quarantine_size_mb=32",
               "UBSAN_OPTIONS": "print_stacktrace=1"}


def run(program, *arguments):
    return subprocess.run([str(program), *map(str, arguments)], cwd=ROOT, env=ENVIRONMENT,
                          text=True, capture_output=True, errors="replace", timeout=1800,
                          check=False)


def explain(done):
    lines = [line for line in done.stderr.splitlines() if not line.startswith("lossynet: ")]
    return f"exit code {done.returncode}\n" + "\n".join(lines[-60:])


def inputs():
    files = sorted(CORPUS.iterdir())
    assert len(files) > 50
    return files


def test_all_of_lossynet_is_simulated():
    """No object reads the real clock or real random numbers: a run is a function of its input."""
    objects = sorted((BUILD / "simulated" / "lossynet").rglob("*.o"))
    assert len(objects) > 20
    used = subprocess.run(["nm", "-u", *map(str, objects)], text=True, capture_output=True,
                          check=True).stdout.split()
    assert not {"clock_gettime", "getrandom", "pthread_mutex_lock", "pthread_create"} & set(used)


@pytest.mark.skipif(CLANG, reason="libFuzzer replays the corpus, and makes new inputs")
def test_corpus():
    done = run(BUILD / "replay_packets", *inputs())
    assert done.returncode == 0, explain(done)


@pytest.mark.skipif(not CLANG, reason="no clang here: libFuzzer is part of it")
def test_corpus_and_new_inputs(tmp_path):
    """libFuzzer runs the corpus first, and then new inputs."""
    shutil.copytree(CORPUS, tmp_path / "corpus")
    runs = len(inputs()) + NEW
    done = run(BUILD / "fuzz_packets", f"-runs={runs}", "-len_control=0", "-max_len=2500", "-seed=1",
               "-timeout=600", f"-artifact_prefix={tmp_path}/", tmp_path / "corpus")
    assert done.returncode == 0, explain(done)  # the message has the input in Base64
    assert f"Done {runs} runs" in done.stderr

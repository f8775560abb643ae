"""Tests signals and limits that ask a run to stop: it saves first, and nothing is lost."""
import os
import pathlib
import re
import resource
import signal
import subprocess

import pytest

from program import (TIMEOUT, environment_of, events, handler, launch, markov_tokens, steps_done, succeed, wait_for,
                     write_tokens)
from test_resume import (VOCABULARY, checkpoint, checkpoints, children, data,  # pylint: disable=unused-import
                         numbers, settings, start, state)

pytestmark = [pytest.mark.spread, pytest.mark.takes(30)]


@pytest.mark.parametrize("ranks, number", [(0, signal.SIGTERM), (0, signal.SIGUSR1),
                                           (0, signal.SIGINT), (0, signal.SIGHUP), (0, signal.SIGUSR2),
                                           (0, signal.SIGXCPU), (0, signal.SIGQUIT), (0, signal.SIGALRM),
                                           (2, signal.SIGUSR1), (2, signal.SIGHUP), (4, signal.SIGUSR1),
                                           (4, signal.SIGUSR2)])
def test_signal_saves_and_stops(data, tmp_path, ranks, number):
    whole, out = tmp_path / "whole", tmp_path / "out"
    common = dict(steps=40, save_every=4, keep=1, val=None)
    succeed(*settings(data, whole, **{**common, "save_every": 0}))
    before = signal.signal(number, lambda *_: None)  # the program would inherit an ignored signal
    process = start(*settings(data, out, **common), ranks=ranks, pause=100)  # about 8 steps per second
    signal.signal(number, before)
    wait_for(lambda: steps_done(out) >= 5, process, "step 5")
    # mpirun passes the signal on to all; with 2 ranks only one of them gets it
    target = children(process.pid)[-1] if ranks == 2 else process.pid
    os.kill(target, number)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    (step,) = checkpoints(out)
    assert 5 <= step < 40, "the signal came too late to stop anything"
    assert f"stopped by a signal after {step} steps" in output
    assert events(out / "log.jsonl", "end")[0]["status"] == "stopped"
    succeed(*settings(data, out, resume="auto", **common), ranks=ranks)
    assert numbers(out / "log.jsonl") == numbers(whole / "log.jsonl")
    assert state(checkpoint(out, 40)) == state(checkpoint(whole, 40))


def blocked(thread, number):
    mask = re.search(r"SigBlk:\s*(\w+)", (thread / "status").read_text(encoding="ascii"))[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_no_thread_that_computes_takes_a_signal(data, tmp_path):
    """Signals must not interrupt threads that compute, because the handler's frame would be written to the
    thread's stack, and oneDNN's sgemm moves its stack into the heap."""
    before = {number: signal.signal(number, lambda *_: None)
              for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)}
    process = start(*settings(data, tmp_path, steps=10_000, threads=2))
    for number, action in before.items():
        signal.signal(number, action)
    try:
        wait_for(lambda: steps_done(tmp_path) >= 2, process, "step 2")
        threads = list(pathlib.Path(f"/proc/{process.pid}/task").iterdir())
        assert len(threads) >= 3
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGALRM,
                       signal.SIGVTALRM, signal.SIGPWR, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            (waiting,) = [thread for thread in threads if not blocked(thread, number)]
            assert waiting.name != str(process.pid)
    finally:
        process.kill()
        process.communicate()


def stops(process, out):
    """Waits for the end of a run that was asked to stop: it has saved what it has done."""
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, errors
    (step,) = checkpoints(out)
    assert step == steps_done(out) and events(out / "log.jsonl", "end")[0]["status"] == "stopped"


@pytest.mark.parametrize("library", [False, True])
def test_a_hangup_that_is_ignored_stays_ignored(data, tmp_path, monkeypatch, library):
    """Also where a library handles it when it is loaded."""
    if library:
        monkeypatch.setenv("LD_PRELOAD", handler(tmp_path, signal.SIGHUP))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    process = start(*settings(data, tmp_path, steps=20, save_every=0, val=None))
    signal.signal(signal.SIGHUP, before)
    wait_for(lambda: steps_done(tmp_path) >= 2, process, "step 2")
    process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0 and not errors, errors
    assert checkpoints(tmp_path) == [20]


def test_output_that_nobody_reads_any_more(data, tmp_path):
    """Such as that of `train_llama2 ... | head`."""
    process = start(*settings(data, tmp_path, steps=10_000, save_every=0, val=None, workers=1))
    process.stdout.close()
    process.stdout = None
    stops(process, tmp_path)


def test_a_limit_on_the_size_of_files(data, tmp_path):
    limited = subprocess.run(launch(*settings(data, tmp_path, val=None)), env=environment_of(), text=True,
                             capture_output=True, timeout=TIMEOUT, check=False,
                             preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)))
    assert limited.returncode == 1 and "raise it (ulimit -f)" in limited.stderr, limited
    assert steps_done(tmp_path) == 12 and not list(tmp_path.glob("checkpoint*"))


@pytest.mark.parametrize("ranks", [0, 2])
def test_signal_during_an_evaluation(data, tmp_path, ranks):
    """The evaluation would take hours. With 2 ranks only one of them gets the signal."""
    write_tokens(tmp_path / "val.bin", markov_tokens(1000, VOCABULARY, 2).repeat(1000), VOCABULARY)
    process = start(*settings(data, tmp_path, val=tmp_path / "val.bin", stride=1, eval_every=2, save_every=0),
                    ranks=ranks)
    try:
        wait_for(lambda: steps_done(tmp_path) == 2, process, "step 2")
        os.kill(children(process.pid)[-1] if ranks else process.pid, signal.SIGTERM)
        stops(process, tmp_path)
        assert not events(tmp_path / "log.jsonl", "eval")
    finally:
        process.kill()


def test_signal_during_the_start(data, tmp_path):
    process = start(*settings(data, tmp_path, steps=10_000, save_every=0, val=None))
    wait_for((tmp_path / "lock").exists, process, "lock")
    process.send_signal(signal.SIGTERM)
    stops(process, tmp_path)


def test_a_signal_ends_what_has_nothing_to_save(data, tmp_path):
    """An evaluation alone has no result before its end, so its exit code says that it was stopped."""
    write_tokens(tmp_path / "val.bin", markov_tokens(1000, VOCABULARY, 2).repeat(1000), VOCABULARY)
    succeed(*settings(data, tmp_path / "out", steps=1, val=None))
    process = start("--eval", f"--model={checkpoint(tmp_path / 'out', 1)}", f"--val={tmp_path / 'val.bin'}",
                    "--seq=32", "--stride=1", f"--log={tmp_path / 'log'}")
    wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").stat().st_size > 0, process, "log")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == -signal.SIGTERM and not output + errors

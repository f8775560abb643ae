"""Tests --meet: ranks die, come back and join, while the others continue to train."""
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time

import pytest

from etcd import Etcd, free_port
from program import (PROGRAM, ROOT, TIMEOUT, environment_of, events, one_line, preloaded, read_log, run, start,
                     succeed, wait_for)
from test_program import data, settings, train, weights  # pylint: disable=unused-import

pytestmark = pytest.mark.takes(90)

FOREVER = 10 ** 6


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    store = Etcd(tmp_path_factory.mktemp("etcd"))
    yield store
    store.stop()


class Ranks:
    """The processes of one run. On a busy machine a rank may not answer for a while, so that the others go
    on without it. It then joins again, and tests must allow that. Ranks send slowly: they would otherwise compute
    all the time while a test waits for something else."""

    def __init__(self, data, out, url, ranks, **changes):
        common = {"workers": None, "seq": 32, "val": None, "peer_timeout": 2, "loss_rate": 0.1,
                  "pace_gbps": 0.1, **changes}
        self.command = [PROGRAM, *settings(data, out, meet=url, meet_ranks=ranks, **common)]
        self.data, self.out, self.process, self.said = data, out, [], out.parent / "said"
        for _ in range(ranks):
            self.start()

    def words(self, i):  # pylint: disable=unused-argument
        """The words of process i's command before the program and after it."""
        return [], []

    def start(self, *more):
        before, after = self.words(len(self.process))
        with open(f"{self.said}.{len(self.process)}", "w", encoding="utf-8") as said:
            self.process.append(subprocess.Popen(
                [*before, *self.command, *after, *more], cwd=ROOT, env=environment_of(),
                stdout=said, stderr=said))
        return self.process[-1]

    def said_by(self, i):
        with open(f"{self.said}.{i}", encoding="utf-8") as said:
            return said.read()

    def log(self):
        """The events in the whole lines of the log so far."""
        path = self.out / "log.jsonl"
        try:
            lines = path.read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self):
        return max((e["step"] + 1 for e in self.log() if e["event"] == "step"), default=0)

    def views(self):
        return [e for e in self.log() if e["event"] == "view"]

    def wait(self, what):
        end = time.monotonic() + TIMEOUT
        while not what():
            assert time.monotonic() < end and any(p.poll() is None for p in self.process), \
                [self.said_by(i) for i in range(len(self.process))]
            time.sleep(0.02)

    def wait_steps(self, more):
        until = self.steps() + more
        self.wait(lambda: self.steps() >= until)

    def pid(self, i):
        return self.process[i].pid

    def named(self, i, views):
        """Returns whether views name process i as gone, and whether they name it as new."""
        me = f":{self.pid(i)}"
        return tuple(any(name.endswith(me) for v in views for name in v[key].split(", "))
                     for key in ("left", "joined"))

    def end(self):
        """Ends the run for all with a checkpoint, by a SIGTERM to one process."""
        alive = [p for p in self.process if p.poll() is None]
        alive[0].send_signal(signal.SIGTERM)
        for p in alive:
            assert p.wait(TIMEOUT) == 0, [self.said_by(i) for i in range(len(self.process))]

    def kill(self):
        for p in self.process:
            p.kill()
            p.wait()


@pytest.fixture
def ranks(data, tmp_path, etcd):
    """A function that starts the ranks of a run of this test."""
    made = []

    def start(count, **changes):
        made.append(Ranks(data, tmp_path / "out", etcd.url(tmp_path.name), count,
                          **{"steps": FOREVER, **changes}))
        return made[-1]

    yield start
    for r in made:
        r.kill()


def own_memory(pid):
    """Bytes of a process that are resident, without files and what it shares."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon:"))


def contiguous(log):
    """Whether every step is logged once and in order. With --deadline a rank may leave steps out."""
    steps = [e["step"] for e in log if e["event"] == "step"]
    if log[0]["options"]["deadline"] != "off":
        return all(a < b for a, b in zip(steps, steps[1:]))
    return steps == list(range(len(steps)))


@pytest.mark.parametrize("changes", [
    {},
    {"wire_dtype": "bf16", "carry": 1, "workers": 6, "no_overlap": True},
    {"encrypt": True, "deadline": "auto", "dtype": "bf16"},
    {"optimizer": "muon"},
])
def test_a_rank_dies_and_another_comes(ranks, changes):
    """Rank 0, which writes the log, dies. The next rank continues the log. Then a new rank joins."""
    run3 = ranks(3, **changes)
    run3.wait_steps(5)
    dead = json.loads((run3.out / "log.jsonl").read_text().splitlines()[0])
    assert dead["ranks"] == 3
    first = next(i for i in range(3) if "Llama of" in run3.said_by(i))
    run3.process[first].kill()
    run3.wait(lambda: run3.named(first, run3.views())[0])
    run3.wait_steps(5)
    run3.start()
    run3.wait(lambda: run3.named(3, run3.views())[1])
    run3.wait_steps(5)
    run3.end()
    log = run3.log()
    assert contiguous(log) and log[-1]["status"] == "stopped"
    view = next(v for v in run3.views() if v["left"].endswith(f":{run3.pid(first)}"))
    assert view["adopted_packets"] > 0
    workers = 2 if "workers" in changes else 1
    for v in run3.views():
        assert v["workers"] == workers * v["ranks"]
    # The model is still good: its loss did not rise, and there is a checkpoint after the last step.
    steps = [e for e in log if e["event"] == "step"]
    assert all(e["loss"] < 1.2 * steps[0]["loss"] for e in steps)
    (checkpoint,) = run3.out.glob("checkpoint-*")
    assert checkpoint.name == f"checkpoint-{steps[-1]['step'] + 1:08}"


def test_the_last_of_four_ends_with_a_model(ranks):
    run4 = ranks(4, steps=400, seq=16)
    for i in range(3):
        run4.wait_steps(5)
        run4.process[i].kill()
        run4.wait(lambda i=i: run4.named(i, run4.views())[0])
    assert run4.process[3].wait(TIMEOUT) == 0, run4.said_by(3)
    log = run4.log()
    assert contiguous(log) and log[-1]["status"] == "complete" and log[-1]["step"] == 400
    assert run4.views()[-1]["ranks"] == 1
    assert (run4.out / "checkpoint-00000400" / "model.safetensors").exists()


def test_a_rank_that_was_stopped_comes_back(ranks):
    """The others go on without the stopped rank. When it continues, it notices that, and joins as a new
    rank."""
    run3 = ranks(3)
    run3.wait_steps(5)
    os.kill(run3.pid(1), signal.SIGSTOP)
    run3.wait(lambda: run3.named(1, run3.views())[0])
    run3.wait_steps(5)
    os.kill(run3.pid(1), signal.SIGCONT)
    run3.wait(lambda: run3.named(1, run3.views())[1])
    run3.wait_steps(5)
    run3.end()
    assert contiguous(run3.log())


def test_a_store_that_is_away(ranks, etcd, tmp_path):
    """Training goes on if the store does not answer, or if registrations have lapsed: they are made again.
    Only if a rank dies meanwhile, the others wait until the store is back, and say so. They have given back the
    memory of the views before."""
    run3 = ranks(3)
    run3.wait_steps(5)
    views = len(run3.views())
    before = etcd.leases(tmp_path.name)
    assert len(before) == 3
    etcd.lapse(tmp_path.name)
    run3.wait(lambda: len(etcd.leases(tmp_path.name) - before) == 3)
    run3.wait_steps(5)
    assert len(run3.views()) == views
    run3.start()
    run3.wait(lambda: run3.named(3, run3.views())[1])
    views = len(run3.views())
    etcd.pause()
    try:
        time.sleep(6)  # longer than a registration is valid
        run3.wait_steps(5)
        assert len(run3.views()) == views
        resident = own_memory(run3.pid(0))
        run3.process[1].kill()
        run3.wait(lambda: "does not answer" in run3.said_by(0) + run3.said_by(2))
        standing = run3.steps()
        time.sleep(1)
        assert run3.steps() == standing
        assert own_memory(run3.pid(0)) < 0.7 * resident
    finally:
        etcd.go_on()
    run3.wait(lambda: run3.named(1, run3.views())[0])
    run3.wait_steps(5)
    run3.end()
    assert contiguous(run3.log())


def test_ranks_are_asked_to_stop_between_two_views(ranks, etcd):
    """Ranks that get a signal between two views stop in the next view, with a checkpoint."""
    run3 = ranks(3)
    run3.wait_steps(5)
    etcd.pause()
    try:
        run3.process[1].kill()
        run3.wait(lambda: "does not answer" in run3.said_by(0) and "does not answer" in run3.said_by(2))
        for i in (0, 2):
            run3.process[i].send_signal(signal.SIGTERM)
    finally:
        etcd.go_on()
    for i in (0, 2):
        assert run3.process[i].wait(TIMEOUT) == 0, run3.said_by(i)
    assert contiguous(run3.log()) and run3.log()[-1]["status"] == "stopped"
    assert (run3.out / f"checkpoint-{run3.steps():08}" / "model.safetensors").exists()


def test_nobody_dies_same_bits(data, tmp_path, etcd):
    changes = {"steps": 8, "workers": 4, "loss_rate": 0.2, "peer_timeout": 60, "seq": 32,
               "val": None}
    train(data, tmp_path / "alone", **changes)
    both = Ranks(data, tmp_path / "out", etcd.url("same"), 2, **changes)
    for i, p in enumerate(both.process):
        assert p.wait(TIMEOUT) == 0, both.said_by(i)
    assert weights(tmp_path / "out") == weights(tmp_path / "alone")
    assert len(both.views()) == 1


def test_the_global_batch_stays(ranks, data, tmp_path, etcd):
    """With --meet-keep global-batch, the ranks that are left take over the micro-batches of a rank that is
    gone."""
    run3 = ranks(3, meet_keep="global-batch", workers=6)
    run3.wait_steps(3)
    run3.process[0].kill()
    run3.wait(lambda: run3.named(0, run3.views())[0])
    run3.wait_steps(3)
    run3.end()
    views = run3.views()
    assert [v["workers"] for v in views] != [6] * len(views)
    assert {v["sequences"] for v in views} == {views[0]["sequences"]}
    assert contiguous(run3.log())


def test_the_global_batch_is_the_mean_over_it(ranks, data, tmp_path):
    """A third worker joins. Then 2, 1 and 1 micro-batches give the same losses as four of one worker."""
    common = {"loss_rate": 0, "lead": "off", "lr_final": 1, "wire_dtype": "float32"}
    run2 = ranks(2, micro_batches=2, meet_keep="global-batch", peer_timeout=60, **common)
    run2.wait_steps(3)
    run2.start()
    run2.wait(lambda: run2.named(2, run2.views())[1])
    joined = run2.views()[-1]
    run2.wait(lambda: run2.steps() >= joined["step"] + 5)
    run2.end()
    assert joined["workers"] == 3 and joined["sequences"] == run2.views()[0]["sequences"] == 4
    dealt = [e["loss"] for e in run2.log() if e["event"] == "step"]
    train(data, tmp_path / "alone", workers=1, micro_batches=4, seq=32, val=None,
          **{**common, "steps": joined["step"] + 5})
    alone = [e["loss"] for e in events(tmp_path / "alone" / "log.jsonl", "step")]
    assert dealt[:len(alone)] == pytest.approx(alone, rel=1e-3)


def test_a_checkpoint_that_ranks_were_writing_is_made_up_for(ranks, monkeypatch):
    """If a rank dies while ranks write a checkpoint, the next view writes one right away, with other
    writers of the shards. Earlier checkpoints stay, although --overwrite was given."""
    monkeypatch.setenv("TRAIN_LLAMA2_TEST_SAVE_PAUSE_MS", "600")
    run3 = ranks(3, save_every=100, keep=0, overwrite=True, shard_size=2e-4)
    run3.wait((run3.out / "checkpoint-00000200.partial").exists)
    run3.process[0].kill()
    run3.wait(lambda: run3.named(0, run3.views())[0])
    began = run3.views()[-1]["step"]
    run3.wait((run3.out / f"checkpoint-{began + 1:08}").exists)
    assert (run3.out / "checkpoint-00000100").exists()
    run3.end()
    again = run3.out / f"checkpoint-{began + 1:08}"
    read = json.loads((again / "trainer.json").read_text())
    assert read["step"] == began + 1
    assert {f"model-{i + 1:05}-of-00006.safetensors" for i in range(6)} < read["files"].keys()
    succeed("--eval", f"--model={again}", f"--val={run3.data}/val.bin", "--seq=32")
    assert contiguous(run3.log())


def test_a_checkpoint_of_some_ranks_is_resumed_by_others(data, tmp_path, etcd):
    """Two ranks resume the checkpoint of three. A process that joins a run which is complete ends at once."""
    first = Ranks(data, tmp_path / "out", etcd.url("before"), 3, steps=20, save_every=10,
                  shard_size=1e-4)
    for p in first.process:
        assert p.wait(TIMEOUT) == 0
    late = first.start()
    assert late.wait(TIMEOUT) == 0 and "is complete" in first.said_by(3)
    again = Ranks(data, tmp_path / "out", etcd.url("after"), 2, steps=30, resume="auto")
    for i, p in enumerate(again.process):
        assert p.wait(TIMEOUT) == 0, again.said_by(i)
    assert contiguous(again.log()) and again.log()[-1]["step"] == 30


def test_a_run_that_was_stopped_begins_again(data, tmp_path, etcd):
    """A stopped run can start again under the same name, with other options and another number of ranks."""
    url = etcd.url("stopped")
    first = Ranks(data, tmp_path / "out", url, 2, steps=FOREVER)
    first.wait_steps(5)
    first.end()
    done = first.steps()
    again = Ranks(data, tmp_path / "out", url, 3, steps=done + 10, lr=1e-3, resume="auto")
    for i, p in enumerate(again.process):
        assert p.wait(TIMEOUT) == 0, again.said_by(i)
    assert contiguous(again.log()) and again.log()[-1]["step"] == done + 10
    assert again.views()[-1]["view"] > first.views()[0]["view"]


def test_wrong_use(data, tmp_path, etcd):
    url = etcd.url("wrong")

    def refused(status, ranks=0, **changes):
        common = {"meet": url, "workers": None, "val": None, **changes}
        return one_line(run(*settings(data, tmp_path / "out", **common), ranks=ranks), status)

    assert "expected --algorithm lossy, got rps" in refused(2, algorithm="rps")
    assert "--link udp or verbs" in refused(2, link="mpi")
    assert "--data-split shared" in refused(2, data_split="contiguous")
    assert "multiple of the 3 ranks" in refused(2, meet_ranks=3, workers=4)
    assert "etcd://HOST:PORT/RUN" in refused(2, meet="http://127.0.0.1:1/run")
    assert "training, --dry-run or --preflight" in refused(2, eval=True)
    assert "--meet-ranks: expected --meet URL too" in refused(2, meet=None, meet_ranks=2)
    assert "--meet-keep: expected --meet URL too" in refused(2, meet=None, meet_keep="global-batch")
    done = run(*settings(data, tmp_path / "out", meet=url, workers=None, val=None), ranks=2)
    assert done.returncode == 2 and "started one by one" in done.stderr
    assert "etcd running there" in refused(1, meet=f"etcd://127.0.0.1:{free_port()}/run")
    for name in ("libcurl.so.4", "libcurl-gnutls.so.4"):
        (tmp_path / name).write_text("no library")
    done = run(*settings(data, tmp_path / "out", meet=url, workers=None, val=None),
               environment={"LD_LIBRARY_PATH": str(tmp_path)})
    assert "--meet needs libcurl" in one_line(done, 1) and "libcurl.so.4: file too short" in done.stderr
    # A process with other options than the existing run is refused.
    succeed(*settings(data, tmp_path / "out", meet=url, workers=None, val=None, steps=2))
    assert read_log(tmp_path / "out" / "log.jsonl")[-1]["status"] == "complete"
    done = run(*settings(data, tmp_path / "out", meet=url, workers=None, val=None, steps=2))
    assert done.returncode == 0 and "is complete" in done.stdout
    # An earlier run of the same name is not replaced, unless the user asks for it.
    line = refused(2, meet=etcd.url("other"), steps=2)
    assert "holds an earlier run" in line and "--overwrite" in line
    assert events(tmp_path / "out" / "log.jsonl", "end")[0]["status"] == "complete"


def test_dry_run_counts_a_change_of_ranks(data, tmp_path, etcd):
    """--dry-run counts the memory in which 4 ranks hand over state: parameters twice, moments, and the
    messages with what a rank owns."""
    def dry_run(**changes):
        done = succeed(*settings(data, tmp_path / "out", dry_run=True, workers=None, **changes))
        return dict(re.findall(r"^  (\S.*?) {2,}([\d.]+) GB", done.stdout, re.MULTILINE))

    alone, together = dry_run(model="15M"), dry_run(model="15M", meet=etcd.url("dry"), meet_ranks=4)
    assert "or ranks change" not in alone
    parameters = float(together["parameters"])
    assert float(together["or ranks change"]) == pytest.approx((2 + 8 / 4) * parameters, abs=2e-3)
    assert float(together["optimizer state"]) == pytest.approx(2 * parameters / 4, abs=2e-3)


def test_other_options_than_the_run(data, tmp_path, ranks):
    run2 = ranks(2)
    run2.wait_steps(2)
    other = run2.start("--lr=1e-4")
    assert other.wait(TIMEOUT) == 1
    (line,) = run2.said_by(2).splitlines()
    assert "option lr is 0.0001 here and 0.003 in run" in line
    run2.wait_steps(2)
    run2.end()


def test_who_does_not_fit_is_refused(data, tmp_path, ranks):
    """Each process that cannot train with the others is refused in one line, and they go on. What the store
    can tell is refused before the others notice; too little memory is found in a view."""
    key, other, tokens = tmp_path / "key", tmp_path / "other", tmp_path / "tokens.bin"
    for path, byte in ((key, b"a"), (other, b"b")):
        path.write_bytes(32 * byte)
        path.chmod(0o600)
    changed = bytearray((data / "train.bin").read_bytes())
    changed[-2:] = bytes(b ^ 1 for b in changed[-2:])
    tokens.write_bytes(changed)
    run2 = ranks(2, encrypt=True, key_file=key)
    run2.wait_steps(3)
    misfits = [("--model=1M", "the model's shape is"), (f"--train={tokens}", "the training data is"),
               (f"--val={data / 'val.bin'}", "the validation data is"),
               (f"--key-file={other}", "the key of --key-file is"),
               (f"--key-file={tmp_path / 'none'}", f"--key-file: cannot use '{tmp_path / 'none'}'")]
    started = [run2.start(option) for option, _ in misfits]
    assert [p.wait(TIMEOUT) for p in started] == [1] * len(misfits)
    for i, (_, words) in enumerate(misfits):
        (line,) = run2.said_by(2 + i).splitlines()
        assert words in line
    # Nobody was left out because of them. On a busy machine a view may end for other reasons.
    assert all(not run2.named(2 + i, run2.views())[1] for i in range(len(misfits)))
    assert run2.start("--memory=0.001").wait(TIMEOUT) == 1
    assert "and the host, by --memory, has 0.001 GB available" in run2.said_by(2 + len(misfits))
    run2.wait_steps(3)
    assert all(p.poll() is None for p in run2.process[:2])
    run2.end()
    assert contiguous(run2.log())


def test_who_joins_needs_no_checkpoint(data, tmp_path, ranks):
    """A run that was resumed goes on. Who joins it gets the state from its ranks, so it does not matter that
    the checkpoint is gone by then, or damaged."""
    out = tmp_path / "out"
    succeed(*settings(data, out, workers=2, seq=32, val=None, steps=4, loss_rate=0.1))
    run2 = ranks(2, resume="auto")
    run2.wait(lambda: run2.steps() > 6)
    (out / "checkpoint-00000004" / "trainer.json").write_text("{}", encoding="utf-8")
    run2.start()
    run2.wait(lambda: run2.named(2, run2.views())[1])
    run2.wait_steps(3)
    run2.end()
    assert contiguous(run2.log())


def test_who_has_no_state_does_not_begin_anew(tmp_path, ranks, etcd):
    """All who have the run's state are stopped when they have just taken a process in. It waits for them, and
    they bring the state back."""
    run2 = ranks(2, peer_timeout=1)
    run2.wait_steps(5)
    joiner, first = run2.start(), run2.log()[0]
    run2.wait(lambda: f'"pid":{joiner.pid}' in etcd.value(f"{tmp_path.name}/view").replace(" ", ""))
    for p in run2.process[:2]:
        p.send_signal(signal.SIGSTOP)
    # If it got the state before, it goes on by itself.
    run2.wait(lambda: "has the state of run" in run2.said_by(2) or run2.named(2, run2.views())[1])
    for p in run2.process[:2]:
        p.send_signal(signal.SIGCONT)
    run2.wait(lambda: run2.views()[-1]["ranks"] == 3)
    run2.wait_steps(3)
    assert run2.log()[0] == first and contiguous(run2.log())
    run2.end()


def epoch_of(etcd, run):
    """The number of the run's present view."""
    return json.loads(etcd.value(f"{run}/view"))["epoch"]


SHORT_SLEEPS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int nanosleep(const struct timespec *asked, struct timespec *left) {
    int (*real)(const struct timespec *, struct timespec *) = dlsym(RTLD_NEXT, "nanosleep");
    const struct timespec most = {.tv_nsec = 10000000};
    return real(asked->tv_sec > 0 ? &most : asked, left);
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc, which compiles the library of short sleeps")
def test_who_has_no_state_waits_without_limit(tmp_path, ranks, etcd):
    """The only rank with the run's state is stopped when it has just taken a process in, which the store says here
    in its place; the next view is without it. The process waits for the state through more views than may fail in a
    row. It waits a second between two views; here these seconds are short."""
    short = preloaded(tmp_path, SHORT_SLEEPS)
    one = ranks(1, peer_timeout=1)
    one.wait_steps(5)
    (known,) = etcd.members(tmp_path.name)
    epoch = epoch_of(etcd, tmp_path.name) + 2
    one.process[0].send_signal(signal.SIGSTOP)
    one.words = lambda i: (["env", f"LD_PRELOAD={short}"], [])
    waits = one.start()
    one.wait(lambda: set(etcd.members(tmp_path.name)) - {known})
    ((uid, (me, _)),) = ((uid, m) for uid, m in etcd.members(tmp_path.name).items() if uid != known)
    etcd.write(f"{tmp_path.name}/view", {"epoch": epoch, "members": [{**me, "uid": uid, "joined": epoch - 1}]})
    one.wait(lambda: epoch_of(etcd, tmp_path.name) > epoch + 52 or waits.poll() is not None)
    assert waits.poll() is None, one.said_by(1)
    assert one.said_by(1).count("has the state of run") == 1
    one.process[0].send_signal(signal.SIGCONT)
    one.wait(lambda: one.views()[-1]["ranks"] == 2)
    one.wait_steps(3)
    one.end()
    assert contiguous(one.log())


def test_a_rank_stops_alone_if_no_view_trains(tmp_path, ranks, etcd):
    """Rank 0 of a view closes all connections, so that the view and those after it fail before anything is
    trained. A rank that is asked to stop does not wait for one that trains."""
    one = ranks(1, peer_timeout=1)
    one.wait_steps(3)
    with socket.create_server(("127.0.0.1", 0)) as closes:
        def close_all():
            with contextlib.suppress(OSError):
                while True:
                    closes.accept()[0].close()

        threading.Thread(target=close_all, daemon=True).start()
        ((uid, me),) = ((uid, said) for uid, (said, _) in etcd.members(tmp_path.name).items())
        other = {"address": f"127.0.0.1:{closes.getsockname()[1]}", "host": "closes", "pid": 1}
        etcd.write(f"{tmp_path.name}/member/other", other)
        etcd.write(f"{tmp_path.name}/view", {"epoch": 2, "members": [
            {**other, "uid": "other", "joined": 1}, {**me, "uid": uid, "joined": 1}]})
        one.wait(lambda: "rank 1 was not admitted" in one.said_by(0))
        one.process[0].send_signal(signal.SIGTERM)
        assert one.process[0].wait(TIMEOUT) == 1
        closes.shutdown(socket.SHUT_RDWR)
    assert "all others within 3 s" in one.said_by(0)
    assert one.said_by(0).splitlines()[-1].endswith("was asked to stop, and no view has trained for 10 s")
    assert epoch_of(etcd, tmp_path.name) > 3


def test_who_does_not_come_to_a_meeting_is_left_out_soon(tmp_path, ranks, etcd):
    """A process is taken in and hangs: its kernel answers, but it does not come. The time for which others stand
    still follows the peer time-out."""
    one = ranks(1, peer_timeout=1)
    one.wait_steps(3)
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        etcd.write(f"{tmp_path.name}/member/other",
                   {"address": f"127.0.0.1:{hangs.getsockname()[1]}", "host": "hangs", "pid": 1})
        one.wait(lambda: one.views()[-1]["view"] > 2)
    one.wait_steps(3)
    one.end()
    assert "1 of 2 ranks have not come in 1.5 s" in one.said_by(0)
    assert contiguous(one.log())


def test_rank_0_dies_before_it_ends_the_view(tmp_path, ranks, etcd):
    """All ranks have agreed to stop, and rank 0 dies before it says so to the store. Another one says it, so
    that a process that was left out stops, too, and the run can begin again."""
    run2 = ranks(2, peer_timeout=60)
    run2.wait_steps(3)
    first = next(i for i in range(2) if "Llama of" in run2.said_by(i))
    etcd.pause()
    try:
        run2.process[first].send_signal(signal.SIGTERM)
        run2.wait(lambda: run2.log()[-1]["event"] == "end")
        run2.process[first].kill()
    finally:
        etcd.go_on()
    assert run2.process[1 - first].wait(TIMEOUT) == 0
    assert json.loads(etcd.value(f"{tmp_path.name}/view"))["members"] == []
    assert not etcd.holds(f"{tmp_path.name}/options")


# As long as a file has the name of the process, it dies when it awaits the 8 bytes with which a part of what ranks
# tell each other begins.
DIES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>
ssize_t recv(int fd, void *to, size_t bytes, int flags) {
    ssize_t (*real)(int, void *, size_t, int) = dlsym(RTLD_NEXT, "recv");
    char name[4096];
    snprintf(name, sizeof name, "%s/dies.%d", getenv("DIES"), getpid());
    if (bytes == 8 && access(name, F_OK) == 0) raise(SIGKILL);
    return real(fd, to, bytes, flags);
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc, which compiles the library that ends a process")
def test_rank_0_dies_between_the_meeting_and_the_first_step(tmp_path, ranks, monkeypatch):
    """All have met in a new view, and rank 0 dies before they have told each other what they have. The others go
    on without it."""
    monkeypatch.setenv("LD_PRELOAD", preloaded(tmp_path, DIES))
    monkeypatch.setenv("DIES", str(tmp_path))
    run3 = ranks(3)
    run3.wait_steps(3)
    first = next(i for i in range(3) if "Llama of" in run3.said_by(i))
    (tmp_path / f"dies.{run3.pid(first)}").touch()
    run3.start()
    assert run3.process[first].wait(TIMEOUT) == -signal.SIGKILL
    run3.wait(lambda: run3.named(first, run3.views())[0])
    run3.wait_steps(3)
    run3.end()


def test_all_ranks_resume_from_the_checkpoint_of_rank_0(data, tmp_path, etcd):
    """Each process sees a folder of its own. A checkpoint that only rank 1 has does not count. Rank 2 lacks that
    of rank 0 and says so; the others go on without it."""
    class Apart(Ranks):
        def words(self, i):
            return ["sh", "-c", f'cd {tmp_path}/{i} && exec "$@"', "sh"], ["--out=out"]

        def start(self, *more):
            super().start(*more)
            self.wait(lambda: len(etcd.members("apart")) == len(self.process) or len(self.process) == 3)

    for i in range(3):
        (tmp_path / str(i)).mkdir()
    succeed(*settings(data, tmp_path / "1" / "out", workers=1, seq=32, val=None, steps=4, save_every=2, keep=0))
    shutil.copytree(tmp_path / "1" / "out", tmp_path / "0" / "out")
    shutil.rmtree(tmp_path / "0" / "out" / "checkpoint-00000004")
    apart = Apart(data, tmp_path / "out", etcd.url("apart"), 3, steps=2, resume="auto")
    try:
        assert [p.wait(TIMEOUT) for p in apart.process] == [0, 0, 1], [apart.said_by(i) for i in range(3)]
    finally:
        apart.kill()
    assert "resumed from out/checkpoint-00000002 after 2 steps" in apart.said_by(0)
    assert "rank 0 goes on from 'out/checkpoint-00000002', which is not there on this rank" in apart.said_by(2)


def test_a_run_whose_last_step_is_not_saved_is_not_complete(data, tmp_path, etcd):
    out = tmp_path / "out"
    process = start(*settings(data, out, meet=etcd.url(tmp_path.name), workers=None, val=None, steps=500,
                              save_every=400))
    wait_for((out / "log.jsonl").exists, process, "log")
    (out / "checkpoint-00000500").write_text("in the way of the last checkpoint", encoding="utf-8")
    _, stderr = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1, stderr
    assert f"step 500 could not be saved, see above: the newest checkpoint is '{out}/checkpoint-00000400'" in stderr
    assert read_log(out / "log.jsonl")[-1]["status"] == "not saved"
    assert not etcd.holds(f"{tmp_path.name}/complete") and etcd.holds(f"{tmp_path.name}/options")

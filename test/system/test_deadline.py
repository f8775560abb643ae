"""Tests --deadline: steps go on without late ranks."""
import os
import re
import signal
import subprocess

import pytest

from program import ROOT, TIMEOUT, events, one_line, read_log, run, succeed, wait_for
from test_program import data, settings, train, weights  # pylint: disable=unused-import
from test_udp import start

pytestmark = pytest.mark.takes(35)


def steps_recorded(path):
    """From a rank's record: its last step, the number of its idle steps, and the number of its steps."""
    text = path.read_text() if path.exists() else ""
    steps = {int(step): what for step, what in
             re.findall(r"^# step (\d+), worker \d+ (computes|idles)", text, re.M)}
    return max(steps, default=-1), list(steps.values()).count("idles"), len(steps)


def await_step(running, record, step):
    wait_for(lambda: steps_recorded(record)[0] >= step, running, f"step {step}")


def replay(tmp_path, data, out, **changes):
    """Replays the recorded run in one process. The final models must be the same."""
    again = tmp_path / "replay"
    succeed(*settings(data, again, loss_model=f"replay:{tmp_path / 'record'}", val=None, **changes))
    assert weights(again) == weights(out)


@pytest.mark.parametrize("changes", [
    {},
    {"wire_dtype": "bf16", "estimator": "balanced", "lead": "off", "no_overlap": True},
    {"carry": 1, "workers": 8},
    {"carry": 1, "wire_dtype": "int4"},
    {"repair": "1,0"},
    {"repair": "0,2", "wire_dtype": "bf16"},
    {"repair": 1, "repair_budget": 0.1},
    {"carry": 1, "repair": "2,1", "repair_budget": 0.2, "workers": 8},
    {"look_ahead": 1},
])
def test_a_live_run_and_its_replay(data, tmp_path, changes):
    """The others go on while a rank is stopped. The rank comes back, leaves steps out and has no gradient
    in its next step. One process that replays the record ends with the same bits. The run is told to end once
    all of this has happened, so that it is as long as it must be on any machine; a constant learning rate does
    not depend on its length."""
    out, record = tmp_path / "live", tmp_path / "record"
    common = {"lr_final": 1, "workers": 4, "seq": 16, "packet_bytes": 512, **changes}
    running, pids = start(data, out, 4, deadline=0.05, record_loss=record, steps=100000, peer_timeout=60,
                          **common)
    for rank in (2, 0):
        other = tmp_path / "record.1"
        await_step(running, other, steps_recorded(other)[0] + 3)
        os.kill(pids[rank], signal.SIGSTOP)
        try:
            await_step(running, other, steps_recorded(other)[0] + 20)
        finally:
            os.kill(pids[rank], signal.SIGCONT)
        await_step(running, tmp_path / f"record.{rank}", steps_recorded(other)[0])
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    _, stderr = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0, stderr
    (checkpoint,) = out.glob("checkpoint-????????")
    done = int(checkpoint.name.split("-")[1])
    for rank in (2, 0):
        last, idle, steps = steps_recorded(tmp_path / f"record.{rank}")
        assert last <= done and idle > 0 and steps < done - 10, (last, idle, steps, done)
    late = events(out / "log.jsonl", "late_ranks")[-1]["steps"]
    assert late[2] > 0
    replay(tmp_path, data, out, **common, loss_rate=0.1, steps=done)


@pytest.mark.parametrize("changes", [{}, {"repair": 2, "repair_budget": 0.1}, {"plain": True}])
def test_nothing_is_late(data, tmp_path, changes):
    """If no rank misses the deadline, the bits are those of a run in which all wait."""
    common = {"link": "udp", "loss_rate": 0.1, "steps": 8, "packet_bytes": 512, **changes}
    off = train(data, tmp_path / "off", ranks=2, **common)
    on = train(data, tmp_path / "on", ranks=2, **common, deadline=60)
    assert weights(tmp_path / "on") == weights(tmp_path / "off")
    assert [e["loss"] for e in on if e["event"] == "step"] == [e["loss"] for e in off if e["event"] == "step"]
    assert events(tmp_path / "on" / "log.jsonl", "late_ranks")[-1]["steps"] == [0, 0]


def test_all_stop_and_go_on_together(data, tmp_path):
    """If ranks are told to stop while one of them is behind, they stop at the same step and save a
    checkpoint, from which they can resume."""
    running, pids = start(data, tmp_path, 4, deadline=0.05, record_loss=tmp_path / "record", steps=100000,
                          eval_every=40)
    other = tmp_path / "record.1"
    os.kill(pids[3], signal.SIGSTOP)
    await_step(running, other, steps_recorded(other)[0] + 10)
    for rank in (0, 1, 2):
        os.kill(pids[rank], signal.SIGTERM)
    os.kill(pids[3], signal.SIGCONT)
    _, stderr = running.communicate(timeout=TIMEOUT)
    assert running.returncode == 0, stderr
    (checkpoint,) = tmp_path.glob("checkpoint-????????")
    done = int(checkpoint.name.split("-")[1])
    assert read_log(tmp_path / "log.jsonl")[-1]["status"] == "stopped"
    log = train(data, tmp_path, ranks=4, link="udp", deadline="auto", resume="auto", steps=done + 5)
    assert log[-1]["status"] == "complete" and log[-1]["step"] >= 5


def test_shorter_than_a_round_trip(data, tmp_path):
    """A deadline that is shorter than a round trip is raised, and one line says so."""
    done = succeed(*settings(data, tmp_path, link="udp", deadline=1e-6, val=None, steps=20), ranks=2)
    (line,) = [line for line in done.stderr.splitlines() if "deadline" in line]
    assert "deadline 1e-06 s: expected at least three round trips: raised to" in line


def test_made_up_runs(data, tmp_path):
    """Runs with late ranks as scripts/late_ranks.py makes them up. If no rank is late, the run equals an
    ordinary one."""
    record, made_up = tmp_path / "record", tmp_path / "made up"
    plain = {"val": None, "carry": 1, "workers": 4, "steps": 12}
    train(data, tmp_path / "plain", **plain, record_loss=record)
    for deadline, late in ((1000, "0 of them late"), (0.1, "1[0-9] of them late")):
        done = subprocess.run([ROOT / "scripts/late_ranks.py", record, "--steps", "12", "--deadline", str(deadline)],
                              text=True, capture_output=True, check=True)
        assert re.search(f"of 48 gradients [0-9]+ computed, {late}", done.stderr), done.stderr
        made_up.write_text(done.stdout)
        log = train(data, tmp_path / f"out{deadline}", **plain, loss_model=f"replay:{made_up}")
        steps = [event for event in log if event["event"] == "step"]
        assert len(steps) == 12 and any(e["gradient_loss_rate"] > 0 for e in steps) == (deadline < 1)
    assert weights(tmp_path / "out1000") == weights(tmp_path / "plain")
    assert weights(tmp_path / "out0.1") != weights(tmp_path / "plain")


def test_a_record_that_does_not_fit(data, tmp_path):
    """A record that is cut off anywhere, lacks a link or is of another run is refused before the first step: what it
    lacks would count as lost."""
    record, made_up = tmp_path / "record", tmp_path / "made up"
    plain = {"val": None, "carry": 1, "workers": 4, "steps": 3, "seq": 16}
    train(data, tmp_path / "plain", **plain, record_loss=record)
    whole = subprocess.run([ROOT / "scripts/late_ranks.py", record, "--steps", "3", "--deadline", "1000"], text=True,
                           capture_output=True, check=True).stdout
    lines = whole.splitlines(keepends=True)

    def refused(text, expected, **changes):
        made_up.write_text(text)
        line = one_line(run(*settings(data, tmp_path / "again", **{**plain, **changes},
                                      loss_model=f"replay:{made_up}")), 2)
        assert f"replay {made_up}: {expected}" in line

    for cut in (len(whole) - 1, len(whole) // 2, len("".join(lines[:-1])), len("".join(lines[:20]))):
        refused(whole[:cut], 'it is cut off: expected "# end" as its last line')
    refused("".join(lines[2:]), "links are missing")
    refused("".join([lines[0], lines[1][1:], *lines[2:]]), "step 0, worker 1 to 0: ")
    refused(whole, "it is of 4 workers: expected the 8 of this run", workers=8)
    refused(whole, "it has 3 steps: expected the 4 of this run", steps=4)
    refused(whole, "step 0, worker ", packet_bytes=512)
    refused("", "it is cut off")
    refused("# end\n", "expected what a run that records losses")
    of = lambda line, what: f"# step {what}" in line
    without = lambda what: "".join(line for title, line in zip(["", *lines], lines) if not of(line, what) and not of(title, what))
    step = lines.index(next(line for line in lines if of(line, "1, gradient")))
    refused(without("1, "), "it lacks step 1: expected all that was recorded")
    refused("".join(line for line in lines if "worker 2 computes" not in line),
            "it has nothing of worker 2: expected the records of all ranks")
    refused(whole[:-len("# end\n")] + whole, "step 0 of worker 0 is there twice: expected the record of each rank once")
    refused("".join(line for line in lines if "told" not in line), "it does not say what senders were told")
    for junk in ("01x10\n", "# step 1, grad, worker 0 to 1\n", "# step 1, worker -1 idles, norm nan, lead nan\n",
                 "# step 1, worker 1 idles, norm -1, lead nan\n", "# step 1, worker 1 computes, norm 1, lead inf\n",
                 "# step 1, worker 0 told 1z\n"):
        made_up.write_text("".join([*lines[:step], junk, *lines[step:]]))
        line = one_line(run(*settings(data, tmp_path / "again", **plain, loss_model=f"replay:{made_up}")), 2)
        assert f"replay {made_up}, line {step + 1}: expected what --record-loss writes" in line
    made_up.write_text(whole.replace("\n", "\r\n"))
    train(data, tmp_path / "again", **plain, loss_model=f"replay:{made_up}")
    assert weights(tmp_path / "again") == weights(tmp_path / "plain")


def test_records_of_a_lead_without_one(data, tmp_path):
    """The record of a run that led, replayed by one that does not."""
    record, made_up = tmp_path / "record", tmp_path / "made up"
    plain = {"val": None, "plain": True, "workers": 4, "steps": 3, "seq": 16, "clip": 0}
    train(data, tmp_path / "plain", **plain, record_loss=record)
    text = subprocess.run([ROOT / "scripts/late_ranks.py", record, "--steps", "3", "--deadline", "1000"], text=True,
                          capture_output=True, check=True).stdout
    made_up.write_text(text.replace("norm nan, lead nan", "norm 0x1p+0, lead 0x1p-1"))
    log = train(data, tmp_path / "again", **plain, loss_model=f"replay:{made_up}")
    assert log[-1]["status"] == "complete"
    assert weights(tmp_path / "again") == weights(tmp_path / "plain")


def test_a_record_that_begins_later(data, tmp_path):
    """As that of a resumed run: its steps are there for one that is resumed there, and for no other."""
    record, made_up, out = tmp_path / "record", tmp_path / "made up", tmp_path / "out"
    plain = {"val": None, "plain": True, "workers": 4, "seq": 16, "schedule": "constant"}
    train(data, out, **plain, steps=2, record_loss=record)
    lines = subprocess.run([ROOT / "scripts/late_ranks.py", record, "--steps", "4", "--deadline", "1000"], text=True,
                           capture_output=True, check=True).stdout.splitlines(keepends=True)
    made_up.write_text("".join(lines[lines.index(next(line for line in lines if "# step 2," in line)):]))
    line = one_line(run(*settings(data, tmp_path / "new", **plain, steps=4, loss_model=f"replay:{made_up}")), 1)
    assert "the replay has no step 0" in line


def test_a_record_that_was_cut_off(tmp_path):
    """The last step does not say how many packets a worker sends."""
    (tmp_path / "record").write_text("".join(f"# step {step}, gradient, worker {pair}\n{digits}\n" for step, pair, digits in (
        (0, "0 to 1", "0000"), (0, "1 to 0", "0000"), (1, "0 to 1", "0000"), (1, "1 to 0", "0"))))
    said = subprocess.run([ROOT / "scripts/late_ranks.py", tmp_path / "record", "--steps=1"], text=True, check=True,
                          capture_output=True).stdout
    assert "worker 0 to 1\n0000\n" in said and "worker 1 to 0\n0000\n" in said


def test_wrong_use(data, tmp_path):
    for value in ("soon", "-1", "0", "nan"):
        line = one_line(run(*settings(data, tmp_path, deadline=value)), 2)
        assert f"--deadline: expected auto, off or a number of seconds above 0, got '{value}'" in line
    for changes in ({"algorithm": "rps"}, {"algorithm": "reliable"}, {"link": "mpi"}):
        line = one_line(run(*settings(data, tmp_path, deadline=0.1, **changes)), 2)
        assert "--deadline 0.1: expected --algorithm lossy over --link udp or verbs" in line
        line = one_line(run(*settings(data, tmp_path, deadline="auto", **changes)), 2)
        assert "--deadline auto: expected --algorithm lossy over --link udp or verbs" in line
    line = one_line(run(*settings(data, tmp_path, loss_model="replay:/nowhere/at/all")), 2)
    assert "replay /nowhere/at/all: expected this file, or FILE.0, FILE.1 ... of all ranks" in line
    (tmp_path / "record").write_text("# step 0, gradient, worker 1 to 0\n0\n")
    for words, code, says in ((["no", "--steps=3"], 1, "no: No such file"), ([ROOT, "--steps=3"], 1, "Is a directory"),
                              ([tmp_path / "record", "--steps=0"], 2, "expected at least one step"),
                              ([tmp_path / "record", "--steps=3", "--p99=0"], 2, "--p99 of 1 or more"),
                              ([tmp_path / "record", "--steps=3", "--deadline=nan"], 2, "--deadline of 0 or more")):
        done = subprocess.run([ROOT / "scripts/late_ranks.py", *words], text=True, capture_output=True, check=False)
        assert done.returncode == code and says in done.stderr.splitlines()[-1] and not done.stdout, done.stderr

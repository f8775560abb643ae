"""Tests the program as a user starts it: same bits, edge cases, modes, the log."""
import json
import math
import re
import resource
import shutil
import subprocess

import numpy as np
import pytest

from program import (ROOT, SANITIZED, events, markov_files, markov_tokens, one_line, read_log, run, small_model, succeed,
                     tensors, write_tokens)

pytestmark = [pytest.mark.spread, pytest.mark.takes(80)]

VOCABULARY = 128


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with train.bin and val.bin."""
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 40_000, 1_111)


@pytest.fixture(scope="session", name="small")
def make_small_model(tmp_path_factory):
    """A model for runs of many steps, whose mathematics is that of any model."""
    return small_model(tmp_path_factory.mktemp("small") / "model", VOCABULARY)


def settings(data, out, **changes):
    """The options of a short training of the smallest model. Keywords replace or add options."""
    options = {"model": "260K", "train": data / "train.bin", "val": data / "val.bin",
               "workers": 8, "batch": 1, "seq": 64, "steps": 6, "lr": 3e-3, "seed": 5,
               "packet-bytes": 1024, "out": out}
    options.update({key.replace("_", "-"): value for key, value in changes.items()})
    return [f"--{key}" if value is True else f"--{key}={value}"
            for key, value in options.items() if value is not None]


def train(data, out, ranks=0, **changes):
    succeed(*settings(data, out, **changes), ranks=ranks)
    return read_log(out / "log.jsonl")


def numbers(log):
    """The values of a log that must not depend on how workers are spread: all but times and options."""
    timing = {"tokens_per_second", "step_ms", "communication_ms", "training_seconds", "checkpoint"}
    return [{k: v for k, v in event.items() if k not in timing} for event in log
            if event["event"] != "run"]


def weights(out):
    (path,) = out.glob("checkpoint-*/model.safetensors")
    return path.read_bytes()


# ---- bit-identity (test_digests.py: over numbers of ranks) ----

@pytest.mark.parametrize("workers", [1, 3, 8])
def test_threads_do_not_change_a_bit(data, tmp_path, workers):
    one = train(data, tmp_path / "1", workers=workers, threads=1, loss_rate=0.1, batch=2)
    for threads in (2, 4):
        out = tmp_path / str(threads)
        assert numbers(train(data, out, workers=workers, threads=threads, loss_rate=0.1,
                             batch=2)) == numbers(one)
        assert weights(out) == weights(tmp_path / "1")


@pytest.mark.parametrize("estimator, wire", [("mean", "float32"), ("balanced", "float32"),
                                             ("zero", "float32"), ("mean", "bf16"),
                                             ("zero", "int8")])
def test_loss_rate_zero_equals_reliable(data, tmp_path, estimator, wire):
    common = dict(workers=6, wire_dtype=wire, carry=0)  # balanced carries nothing
    reliable = train(data, tmp_path / "r", algorithm="reliable", **common)
    lossy = train(data, tmp_path / "l", loss_rate=0, estimator=estimator, **common)
    for a, b in zip(reliable, lossy):
        assert a.get("loss") == b.get("loss") and a.get("grad_norm") == b.get("grad_norm")
        assert a.get("val_loss") == b.get("val_loss")
    assert weights(tmp_path / "r") == weights(tmp_path / "l")


def test_a_look_ahead_is_the_same_where_nothing_is_lost(data, tmp_path):
    """With a look-ahead, replicas are ahead of the model by one change. The log says so, and the evaluation
    shows it."""
    exact = dict(wire_dtype="float32")
    runs = [train(data, tmp_path / "r", algorithm="reliable", look_ahead=1, **exact),
            train(data, tmp_path / "l", loss_rate=0, look_ahead=1, **exact),
            train(data, tmp_path / "x", loss_rate=0, look_ahead=1, plain=True),
            train(data, tmp_path / "0", loss_rate=0, **exact)]
    assert weights(tmp_path / "r") == weights(tmp_path / "l") == weights(tmp_path / "x")
    assert weights(tmp_path / "r") != weights(tmp_path / "0")
    for log in runs[:3]:
        steps = [e for e in log if e["event"] == "step"][1:]
        workers = log[0]["workers"]
        assert all(e["lead"] == 1 for e in steps)
        assert all(e["lag"] == pytest.approx(-(workers - 1) / workers, rel=1e-3) for e in steps)
        assert log[-1]["replica_val_perplexity"] != log[-1]["val_perplexity"]


def test_the_same_seed_gives_the_same_run_and_another_does_not(data, tmp_path):
    first = numbers(train(data, tmp_path / "1", loss_rate=0.1))
    assert numbers(train(data, tmp_path / "2", loss_rate=0.1)) == first
    assert numbers(train(data, tmp_path / "3", loss_rate=0.1, seed=6)) != first
    other_loss = numbers(train(data, tmp_path / "4", loss_rate=0.1, loss_seed=6))
    assert other_loss != first
    assert other_loss[0]["loss"] == first[0]["loss"]  # weights and data are the same; lost packets differ


@pytest.mark.parametrize("wire, sent", [("bf16", [0.5, 0.5]), ("int8", [33 / 128, 33 / 128]),
                                        ("int6", [25 / 128, 33 / 128]), ("int4", [17 / 128, 33 / 128])])
def test_rounded_on_the_wire(data, tmp_path, wire, sent):
    """Rounded elements need fewer bytes and packets. Losses are nearly the same. Without packet loss there
    is no drift. The saved model has the owners' values, which are not rounded."""
    exact = train(data, tmp_path / "4", wire_dtype="float32")
    half = train(data, tmp_path / "2", wire_dtype=wire)
    for a, b in zip(exact, half):
        if a["event"] == "step":
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-2)
            assert b["drift"] == b["drift_expected"] == 0
    assert exact[-1]["val_perplexity"] == pytest.approx(half[-1]["val_perplexity"], rel=1e-2)
    assert weights(tmp_path / "2") != weights(tmp_path / "4")
    (folder,) = (tmp_path / "2").glob("checkpoint-*")
    for name, tensor in tensors(folder / "model.safetensors").items():
        elements = np.frombuffer(tensor, "<u4")
        if len(elements) > 1000:
            assert np.mean(elements % 65536 == 0) < 0.01, name
    said = {dtype: succeed("--dry-run", "--model=110M", "--workers=8", "--device=cpu", "--packet-bytes=1400",
                           f"--wire-dtype={dtype}").stdout for dtype in ("float32", wire)}
    assert f"Sent per worker and step, as {wire}" in said[wire]
    phases = {dtype: [float(gb) for gb in re.findall(r"(?:gradient|parameter) phase +([0-9.]+) GB", text)]
              for dtype, text in said.items()}
    assert phases[wire] == pytest.approx(np.multiply(sent, phases["float32"]), abs=1e-3)


@pytest.mark.parametrize("more, chosen", [([], "int6"), (["--loss-rate=0.2"], "int6"), (["--repair=0"], "int6"),
                                          (["--device=cuda"], "int6"), (["--algorithm=reliable"], "int6"),
                                          (["--plain"], "float32"), (["--plain", "--wire-dtype=int8"], "int8"),
                                          (["--algorithm=rps"], "float32"), (["--algorithm=naive"], "float32")])
def test_one_wire_dtype_is_the_default(more, chosen):
    """Whether anything is lost or not, on CPUs and GPUs, wherever owners broadcast to several workers."""
    said = succeed("--dry-run", "--model=110M", "--workers=8", "--device=cpu", *more).stdout
    assert f"Sent per worker and step, as {chosen}" in said, said


def test_the_default_sends_less_than_a_third():
    """Eight workers, nothing lost: bytes of a step against those of float32."""
    sent = []
    for dtype in ("auto", "float32"):
        said = succeed("--dry-run", "--model=110M", "--workers=8", "--device=cpu", f"--wire-dtype={dtype}").stdout
        sent.append(sum(map(float, re.findall(r"(?:gradient|parameter) phase +([0-9.]+) GB", said))))
    assert 0.2 < sent[0] / sent[1] <= 0.3


def test_the_log_names_the_default(data, tmp_path):
    log = train(data, tmp_path / "out", workers=2, steps=1)
    assert log[0]["options"]["wire-dtype"] == "int6"


# ---- edge cases of the network ----

def test_one_worker_loses_nothing(data, tmp_path):
    alone = train(data, tmp_path / "1", workers=1, loss_rate=0.5)
    assert weights(tmp_path / "1")
    for step in [e for e in alone if e["event"] == "step"]:
        assert step["gradient_loss_rate"] == step["parameter_loss_rate"] == step["drift"] == 0


def test_the_log_tells_what_each_link_lost(data, tmp_path):
    """The log has a row for each receiver and a column for each sender. One link is bad, and the log is the
    same for every spread of the workers."""
    logs = [train(data, tmp_path / str(ranks), ranks=ranks, workers=4, steps=30, loss_rate=0.1,
                  loss_at="2-1=0.6", plain=True) for ranks in (0, 2)]
    links = [[event["lost"] for event in log if event["event"] == "links"] for log in logs]
    assert links[0] == links[1] and len(links[0]) == 1
    lost = np.array(links[0][0])
    assert lost.shape == (4, 4) and not lost.diagonal().any()
    assert lost[1, 2] == pytest.approx(0.6, abs=0.05)
    others = [lost[r, s] for r in range(4) for s in range(4) if r != s and (r, s) != (1, 2)]
    assert np.mean(others) == pytest.approx(0.1, abs=0.02) and max(others) < 0.2
    assert not any(event["event"] == "links" for event in train(data, tmp_path / "one", workers=1))


def test_layers_lose_and_are_protected_apart(data, tmp_path):
    """--loss-at and --repair-at name layers and tensors. The log is the same for every spread of the workers."""
    def log(name, ranks=0, **more):
        return numbers(train(data, tmp_path / name, ranks=ranks, workers=4, plain=True, **more))
    ours = {"loss_rate": 0.2, "loss_at": "layers.0-3=0.5,embed_tokens=1:0", "repair_at": "mlp=2,layers.4=1:0"}
    assert log("1", **ours) == log("2", ranks=2, **ours)
    elements = 5 * 45_440 + VOCABULARY * 64  # all but norms
    table = VOCABULARY * 64 / elements
    end = log("table", loss_at="embed_tokens=1:0")[-1]
    assert end["gradient_loss_rate"] == pytest.approx(table, abs=0.015) and end["parameter_loss_rate"] == 0
    end = log("layers", loss_at="layers.0-3=1:0,layers.1=0:1")[-1]
    assert end["gradient_loss_rate"] == pytest.approx(3 * 45_440 / elements, abs=0.02)
    assert end["parameter_loss_rate"] == pytest.approx(45_440 / elements, abs=0.02)
    end = log("repaired", loss_rate=0.5, repair_at="embed_tokens=9:0")[-1]
    assert end["gradient_loss_rate"] == pytest.approx(0.5 * (1 - table), abs=0.02)
    assert end["parameter_loss_rate"] == pytest.approx(0.5, abs=0.02)


def test_the_log_counts_packets_of_layers(data, tmp_path):
    ours = {"workers": 4, "loss_rate": 0.1, "loss_at": "layers.1-2=0.5:0", "repair": "1,0", "log_buckets": True}
    one = train(data, tmp_path / "1", **ours)
    counted = [e["buckets"] for e in one if e["event"] == "buckets"]
    assert counted == [e["buckets"] for e in train(data, tmp_path / "2", ranks=2, **ours) if e["event"] == "buckets"]
    assert not any(bucket["late"] != [0, 0] for buckets in counted for bucket in buckets)
    assert [bucket["name"] for bucket in counted[0]] == [f"layers.{i}" for i in (4, 3, 2, 1, 0)] + ["embed_tokens"]
    for step, buckets in zip([e for e in one if e["event"] == "step"], counted, strict=True):
        packets, lost = ([sum(b[name][phase] for b in buckets) for phase in range(2)] for name in ("packets", "lost"))
        assert step["gradient_loss_rate"] == pytest.approx(lost[0] / packets[0], rel=1e-6)
        assert step["parameter_loss_rate"] == pytest.approx(lost[1] / packets[1], rel=1e-6)
    share = lambda i, name, phase: sum(b[i][name][phase] for b in counted) / sum(b[i]["packets"][phase] for b in counted)
    assert share(2, "resent", 0) == pytest.approx(0.5, abs=0.05) and share(2, "lost", 0) == pytest.approx(0.25, abs=0.05)
    assert share(0, "resent", 0) == pytest.approx(0.1, abs=0.04) and share(2, "lost", 1) < 0.01
    assert share(0, "lost", 1) == pytest.approx(0.1, abs=0.04) and share(0, "resent", 1) == 0


def test_workers_share_the_batch(data, tmp_path):
    """4 workers x 2 sequences see the same batch as 1 worker x 8, so losses are the same up to rounding."""
    one = train(data, tmp_path / "1", workers=1, batch=8)
    four = train(data, tmp_path / "4", workers=4, batch=2, wire_dtype="float32")
    for a, b in zip(one, four):
        if a["event"] == "step":
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


def test_more_workers_than_packets(data, tmp_path):
    log = train(data, tmp_path, workers=64, steps=3, loss_rate=0.2, packet_bytes=None, plain=True)
    assert math.isfinite(log[-1]["val_perplexity"])
    step = [e for e in log if e["event"] == "step"][-1]
    assert 0.15 < step["gradient_loss_rate"] < 0.25


@pytest.mark.parametrize("algorithm", ["lossy", "rps", "naive"])
def test_nothing_ever_arrives(data, tmp_path, algorithm):
    done = succeed(*settings(data, tmp_path, loss_rate=1, workers=4, algorithm=algorithm))
    assert "at loss rate 1 no packet ever arrives: every owner trains alone" in done.stdout
    log = read_log(tmp_path / "log.jsonl")
    step = [e for e in log if e["event"] == "step"][-1]
    assert step["gradient_loss_rate"] == step["parameter_loss_rate"] == 1
    assert step["max_age"] == 6 and step["drift"] > 0
    assert step["ages"] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert step["drift_expected"] is None
    assert math.isfinite(log[-1]["val_perplexity"])


def test_phases_have_their_own_rates(data, tmp_path):
    log = train(data, tmp_path, loss_rate="0.4,0", steps=10, plain=True)
    assert log[-1]["gradient_loss_rate"] == pytest.approx(0.4, abs=0.02)
    assert log[-1]["parameter_loss_rate"] == 0 and log[-1]["drift"] == 0


def test_repair_sends_again_what_was_lost(data, tmp_path):
    log = train(data, tmp_path / "both", loss_rate=0.4, repair=1, steps=10)
    for phase in ("gradient_loss_rate", "parameter_loss_rate"):
        assert log[-1][phase] == pytest.approx(0.16, abs=0.02)
    assert log[-1]["extra_traffic"] == pytest.approx(0.4, abs=0.02)
    for step in [e for e in log if e["event"] == "step"]:
        assert 0.3 < step["extra_traffic"] < 0.5
    log = train(data, tmp_path / "one", loss_rate=0.4, repair="0,2", steps=10)
    assert log[-1]["gradient_loss_rate"] == pytest.approx(0.4, abs=0.02)
    assert log[-1]["parameter_loss_rate"] == pytest.approx(0.064, abs=0.02)
    assert log[-1]["extra_traffic"] == pytest.approx((0.4 + 0.16) / 2, abs=0.02)
    assert log[-1]["rounds"] == [0, 2]
    assert log[-1]["bytes_of_bf16"] == pytest.approx(  # of int6
        (25 / 32 + 33 / 32 * (1 + 2 * log[-1]["extra_traffic"])) / 4, rel=1e-3)


def test_repair_keeps_to_its_budget(data, tmp_path):
    log = train(data, tmp_path / "budget", loss_rate=0.4, repair=1, repair_budget=0.1, steps=10)
    for step in [e for e in log if e["event"] == "step"]:
        assert 0.08 < step["extra_traffic"] <= 0.1
    for phase in ("gradient_loss_rate", "parameter_loss_rate"):
        assert log[-1][phase] == pytest.approx(0.4 - 0.1 * 0.6, abs=0.02)


def test_plain_is_short_for_options(data, tmp_path):
    plain = train(data, tmp_path / "plain", loss_rate=0.4, plain=True)
    long = train(data, tmp_path / "long", loss_rate=0.4, lead="off", carry=0, repair=0, wire_dtype="float32")
    assert numbers(plain) == numbers(long)
    assert weights(tmp_path / "plain") == weights(tmp_path / "long")
    options = plain[0]["options"]
    assert (options["lead"], options["carry"], options["repair"]) == ("off", 0, 0)
    other = train(data, tmp_path / "other", loss_rate=0.4, carry=0.5, plain=True, steps=1)
    assert other[0]["options"]["carry"] == 0.5 and other[0]["options"]["lead"] == "off"


def test_options_without_an_effect_are_named(data, tmp_path):
    """test_option_pairs.c tests it for all pairs of options."""
    done = succeed(*settings(data, tmp_path, steps=1, algorithm="reliable", loss_rate=0.2, lead="off", link="mpi",
                             pace_gbps=1, decay_shape="linear", val=None))
    notes = [line for line in done.stdout.splitlines() if line.startswith("note: ")]
    assert notes == ["note: --loss-rate: no effect with --algorithm reliable, which loses nothing",
                     "note: --lead: no effect without --algorithm lossy",
                     "note: --pace-gbps: no effect without --link udp or verbs",
                     "note: --decay-shape: no effect without --schedule wsd"]


def test_options_of_training_without_training(data, tmp_path):
    """Their names go to stderr, since stdout has the result alone. A record of lost packets stays as it is."""
    succeed(*settings(data, tmp_path / "out", steps=1, model="260K"))
    model, trace = tmp_path / "out" / "checkpoint-00000001", tmp_path / "trace"
    trace.write_text(record := "# step 0, gradient, worker 0 to 1\n0\n# end\n")
    evaluate = ["--eval", f"--model={model}", f"--val={data}/val.bin", "--seq=64", "--batch=2"]
    alone = succeed(*evaluate, f"--log={tmp_path}/log.jsonl", "--overwrite")
    assert not alone.stderr
    done = succeed(*evaluate, f"--train={data}/train.bin", "--steps=5", "--warmup=9", "--loss-rate=0.5", "--seed=3",
                   "--save-every=2", f"--out={tmp_path}/eval", f"--record-loss={trace}")
    assert done.stdout == alone.stdout and trace.read_text() == record
    assert done.stderr.splitlines() == ["note: --train, --steps, --warmup, --loss-rate, --record-loss, --save-every: "
                                        "no effect without training", "note: --seed: no effect with --eval"]
    assert not succeed(*evaluate, "--steps=5", "--quiet").stderr
    assert [event["event"] for event in read_log(tmp_path / "eval" / "log.jsonl")] == ["run", "eval"]


def test_dry_run_names_options_without_an_effect():
    done = succeed("--dry-run", "--workers=4", "--algorithm=reliable", "--loss-rate=0.2")
    assert "note: --loss-rate: no effect with --algorithm reliable, which loses nothing\n" in done.stdout
    assert "no effect" not in succeed("--dry-run", "--workers=4", "--loss-rate=0.2").stdout
    nothing = "note: --loss-model burst:8: nothing is dropped with --loss-rate 0\n"
    for more, said in (((), True), (("--loss-rate=0.2",), False), (("--loss-at=1=0.5",), False)):
        assert (nothing in succeed("--dry-run", "--workers=4", "--loss-model=burst:8", *more).stdout) == said, more


def test_the_default_is_short_for_options(data, tmp_path):
    """Without options, owners lead, lost packets are sent again, at 20% gradients twice and parameters once, and
    what stays lost is carried. int6 pays."""
    default = train(data, tmp_path / "default", loss_rate=0.2)
    long = train(data, tmp_path / "long", loss_rate=0.2, lead="auto", carry=1, repair="2,1",
                 wire_dtype="int6")
    assert numbers(default) == numbers(long)
    assert weights(tmp_path / "default") == weights(tmp_path / "long")
    options = default[0]["options"]
    assert options["carry"] == options["repair"] == options["repair-budget"] == "auto"
    assert (long[0]["options"]["repair"], default[0]["options"]["wire-dtype"]) == ([2, 1], "int6")


@pytest.mark.parametrize("rate, options, sent, left", [
    (0.05, {}, 0, (0.05, 0.05)), (0.1, {}, 0.05, (0.01, 0.1)), (0.2, {}, 0.22, (0.008, 0.04)),
    (0.4, {}, 0.605, (0.01024, 0.064)), (0.6, {}, 1.172, (0.0467, 0.216)),
    (0.4, {"wire_dtype": "int8"}, 0.605, (0.01024, 0.064)),
    (0.6, {"wire_dtype": "int8"}, 0.94, (0.224, 0.224)),  # as many bytes as bf16 without rounds
    (0.2, {"wire_dtype": "float32"}, 0.1, (0.04, 0.2)),
    (0.4, {"wire_dtype": "bf16"}, 0.1, (0.28, 0.4)),  # the budget allows half of it
    (0.4, {"wire_dtype": "float32", "repair_budget": 0}, 0.325, (0.01024, 0.4)),
], ids=str)
def test_rounds_follow_the_loss(data, tmp_path, rate, options, sent, left):
    """sent: more traffic than without rounds. left: the loss rates of gradients and parameters after them."""
    log = train(data, tmp_path, loss_rate=rate, steps=10, packet_bytes=256, **options)
    assert log[-1]["extra_traffic"] == pytest.approx(sent, abs=0.015)
    assert log[-1]["gradient_loss_rate"] == pytest.approx(left[0], abs=0.015)
    assert log[-1]["parameter_loss_rate"] == pytest.approx(left[1], abs=0.015)


def test_rounds_follow_what_is_measured(data, tmp_path):
    """A trace loses half of the packets although --loss-rate says 1%: the rounds begin after the first steps.
    Within --repair-budget, a fifth of the gradients is sent again."""
    trace = tmp_path / "trace"
    trace.write_text("0 1\n" * 500)
    log = train(data, tmp_path / "run", loss_model=f"trace:{trace}", loss_rate=0.01, steps=12,
                wire_dtype="float32")
    sent = [step["extra_traffic"] for step in log if step["event"] == "step"]
    assert sent[0] == 0 and sent[-1] == pytest.approx(0.1, abs=0.01)


def test_trace_decides_what_is_lost(data, tmp_path):
    trace = tmp_path / "trace.txt"
    trace.write_text("# every fourth packet\n0001\n" * 3)
    log = train(data, tmp_path / "out", loss_rate=0.5, loss_model=f"trace:{trace}", plain=True)
    assert log[-1]["gradient_loss_rate"] == pytest.approx(0.25, abs=0.01)


def test_outages_take_whole_steps(data, tmp_path):
    """There is one link in each direction. In a step, a link's packets all arrive or are all lost, in both
    phases alike."""
    log = train(data, tmp_path, workers=2, steps=60, loss_rate=0.5, loss_model="outage:4", val=None)
    steps = [e for e in log if e["event"] == "step"]
    seen = {(e["gradient_loss_rate"], e["parameter_loss_rate"]) for e in steps}
    assert seen == {(0, 0), (0.5, 0.5), (1, 1)}
    assert max(e["max_age"] for e in steps) >= 4


def test_what_a_link_that_is_down_loses_comes_another_way(data, tmp_path):
    """A fifth of the links is down. By default nearly everything arrives all the same; a lost gradient is sent
    twice more, a parameter once. No drift is expected of it, because its formula does not hold."""
    options = {"loss_rate": 0.2, "loss_model": "outage:5", "steps": 30, "val": None}
    first = [e for e in train(data, tmp_path / "none", repair=0, **options) if e["event"] == "step"]
    steps = [e for e in train(data, tmp_path / "others", **options) if e["event"] == "step"]
    assert max(e["max_age"] for e in first) >= 10 and max(e["max_age"] for e in steps) <= 2
    for before, after in zip(first, steps):
        lost = before["gradient_loss_rate"]
        assert 0.05 < lost < 0.4
        assert after["gradient_loss_rate"] <= 0.04 and after["parameter_loss_rate"] <= 0.04
        assert before["drift_expected"] is not None and after["drift_expected"] is None
        assert after["extra_traffic"] == pytest.approx(1.5 * lost, rel=0.1)


def test_one_worker_is_cut_off(data, tmp_path):
    """2 x 7 of the 56 links are down. The worker's replica receives nothing, and no other worker receives
    its shards."""
    log = train(data, tmp_path / "worker", loss_at="3=1", plain=True)
    assert log[-1]["gradient_loss_rate"] == pytest.approx(0.25, abs=0.002)
    steps = [e for e in log if e["event"] == "step"]
    assert [e["max_age"] for e in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["ages"][6] == pytest.approx(0.25, abs=0.002)
    (evaluation,) = [e for e in log if e["event"] == "eval"]
    assert evaluation["replica_val_loss"] != evaluation["val_loss"]
    log = train(data, tmp_path / "link", loss_at="2-5=1", plain=True)
    assert log[-1]["parameter_loss_rate"] == pytest.approx(1 / 56, abs=0.001)
    rates = {"even": {"loss_rate": 0.1}, "all": {"loss_at": ",".join(f"{w}=0.1" for w in range(8))}}
    even, same = (numbers(train(data, tmp_path / name, wire_dtype="float32", **rate)) for name, rate in rates.items())
    for event in [*even, *same]:  # nothing is expected where links have rates of their own
        event.pop("drift_expected", None)
    assert same == even


# ---- whose data ----

def test_workers_may_have_data_of_their_own(data, tmp_path):
    """The first half of the file is text, and the second half repeats one token. Worker 0 of 2 sees what a
    run on the first half alone sees, and worker 1 sees the second half."""
    windows, seq = 100, 64
    text = markov_tokens(windows * seq, VOCABULARY, 3)
    whole = np.concatenate([text, np.full(windows * seq + 1, 5)])
    files = {"first": whole[:windows * seq + 1], "second": whole[windows * seq:], "whole": whole}
    loss = {}
    for name, tokens in files.items():
        write_tokens(tmp_path / f"{name}.bin", tokens, VOCABULARY)
    for name, split, workers in (("first", "shared", 1), ("second", "contiguous", 1),
                                 ("whole", "contiguous", 2), ("whole", "shared", 2)):
        log = train(data, tmp_path / f"{name}-{split}", train=tmp_path / f"{name}.bin", steps=1,
                    data_split=split, workers=workers, batch=4, micro_batches=2, val=None, wire_dtype="float32")
        loss[name, split] = log[1]["loss"]
    halves = (loss["first", "shared"] + loss["second", "contiguous"]) / 2
    assert loss["whole", "contiguous"] == pytest.approx(halves, rel=1e-6)
    assert loss["whole", "shared"] != pytest.approx(halves, rel=1e-4)


def test_data_for_every_worker(data, tmp_path):
    done = run(*settings(data, tmp_path, train=data / "val.bin", workers=64, seq=512, val=None,
                         data_split="contiguous"))
    assert "--data-split contiguous: the training files have 2 sequences of 512 tokens, " \
        "expected at least one for each of the 64 workers" in one_line(done, 1)


# ---- the mathematics, in training ----

@pytest.mark.parametrize("rate, lr", [(0.1, 3e-3), (0.3, 3e-4)])
def test_drift_follows_the_formula(data, small, tmp_path, rate, lr):
    """With a lead and int8, the defaults. At the lower rate a step is less than what rounding keeps."""
    log = train(data, tmp_path, model=small, loss_rate=rate, steps=200, packet_bytes=256, drift_samples=8192,
                val=None, warmup=10, seq=16, repair=0, lr=lr)
    steps = [e for e in log if e["event"] == "step"][30:]
    measured = sum(e["drift"] for e in steps)
    expected = sum(e["drift_expected"] for e in steps)
    assert measured == pytest.approx(expected, rel=0.05)
    assert sum(e["drift_paper"] for e in steps) < expected
    assert log[-1]["drift"] == pytest.approx(sum(e["drift"] for e in log if e["event"] == "step")
                                             / 200)
    assert sum(e["mean_age"] for e in steps) / len(steps) == pytest.approx(rate / (1 - rate),
                                                                           rel=0.05)


@pytest.mark.parametrize("changes", [{"loss_rate": 0.3}, {"loss_rate": 0.2, "wire_dtype": "bf16"},
                                     {"loss_rate": 0.2, "wire_dtype": "int8"},
                                     {"loss_rate": 0.2, "loss_model": "burst:8"},
                                     {"loss_rate": 0.1, "loss_at": "3=0.5"},
                                     {"loss_rate": 0.3, "repair": 1}],
                         ids=lambda c: "-".join(str(v) for v in c.values()))
def test_replicas_do_not_lag(data, small, tmp_path, changes):
    """With --lead off, replicas lag behind the model by about the mean age. With auto, the mean replica
    equals the model. (With --carry it is ahead, by as much as carried gradients are late.)"""
    def lag(**more):
        log = train(data, tmp_path / more["lead"], model=small, steps=60, packet_bytes=256, val=None, warmup=10,
                    drift_samples=4096, workers=8, batch=1, seq=16, carry=0,
                    **{"repair": 0, "wire_dtype": "float32", **changes}, **more)
        steps = [e for e in log if e["event"] == "step"][30:]
        return sum(e["lag"] for e in steps) / len(steps)
    behind = lag(lead="off")
    assert behind > 0.06
    assert abs(lag(lead="auto")) < 0.2 * behind


def test_naive_drifts_without_bound_and_lossy_does_not(data, small, tmp_path):
    def growth(algorithm):
        log = train(data, tmp_path / algorithm, model=small, algorithm=algorithm, loss_rate=0.2, steps=100,
                    val=None, lr_final=1, batch=1, seq=16)
        drift = [e["drift"] for e in log if e["event"] == "step"]
        return sum(drift[75:]) / sum(drift[25:50])
    assert growth("naive") > 1.5
    assert growth("lossy") < 1.3


def test_optimizer_state_is_sharded(data, tmp_path):
    for workers in (1, 8):
        out = tmp_path / str(workers)
        (event,) = [e for e in train(data, out, workers=workers, steps=1) if e["event"] == "run"]
        exact = 8 * event["parameters"] / workers
        # each bucket's shard is rounded up to 16 elements
        assert exact <= event["optimizer_bytes_per_worker"] <= exact + 8 * 16 * 7
    (event,) = [e for e in train(data, tmp_path / "rps", algorithm="rps", steps=1)
                if e["event"] == "run"]
    assert event["optimizer_bytes_per_worker"] == 8 * event["parameters"]


def test_training_learns(data, tmp_path):
    log = train(data, tmp_path, loss_rate=0.1, steps=60, batch=4, seq=32, lr=5e-3)
    assert log[-1]["val_perplexity"] < 30  # 128 for guessing, about 6 for a perfect model


# ---- modes ----

@pytest.fixture(scope="session")
def model(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("model")
    train(data, out, steps=60, batch=2, loss_rate=0.1)
    (checkpoint,) = out.glob("checkpoint-*")
    return checkpoint


def test_eval_does_not_depend_on_the_batch(data, model, tmp_path):
    found = []
    for batch in (1, 3, 8):
        log = tmp_path / f"{batch}.jsonl"
        done = succeed("--eval", "--model", model, "--val", data / "val.bin", "--seq", 64,
                       "--batch", batch, "--log", log)
        (event,) = events(log, "eval")
        assert f"perplexity {event['val_perplexity']:.4f}" in done.stdout
        assert event["tokens"] == 1_110  # every token but the first is predicted once
        assert event["val_perplexity"] == pytest.approx(math.exp(event["val_loss"]))
        found.append(event["val_loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-6)
    assert found[0] == pytest.approx(events(model.parent / "log.jsonl", "eval")[-1]["val_loss"],
                                     rel=1e-6)


def test_eval_is_deterministic_and_spreads_over_ranks(data, model, tmp_path):
    losses = set()
    for name, ranks in (("a", 0), ("b", 0), ("c", 2)):
        log = tmp_path / name
        succeed("--eval", "--model", model, "--val", data / "val.bin", "--seq", 64, "--workers", 2,
                "--log", log, ranks=ranks)
        losses.add(events(log, "eval")[0]["val_loss"])
    assert len(losses) == 1


def test_training_goes_on_from_a_model_directory(data, model, tmp_path):
    log = train(data, tmp_path, model=model, steps=2)
    first = [e for e in log if e["event"] == "step"][0]["loss"]
    assert first < 4.0  # a fresh model starts at ln 128 = 4.85


FIRST = r"against loss: owners broadcast (.*),\n    (.*[^,])(?:,\n    what is missing then .*)?\n"
AHEAD = "values ahead of the model (--lead)"


@pytest.mark.parametrize("options, first, last", [
    ((("loss_rate", 0.05),), (AHEAD, "nothing is sent again (5.0% lost, below 6.7%)"), "0 of gradients, 0 of parameters"),
    ((("loss_rate", 0.2),), (AHEAD, "lost packets are sent again (2 rounds, parameters 1)"),
     "2 of gradients, 1 of parameters"),
    ((("loss_rate", 0.2), ("plain", True)), ("the model", "nothing is sent again"), "0 of gradients, 0 of parameters"),
    ((("loss_rate", 0), ("loss_at", "3-*=0.2:0")), (AHEAD, "nothing is sent again (2.5% lost, below 6.7%)"),
     "0 of gradients, 0 of parameters")])
def test_a_run_says_what_it_does(data, tmp_path, options, first, last):
    """The first lines say how often lost packets are sent again; the last ones say what happened, as the log does."""
    done = succeed(*settings(data, tmp_path / "out", steps=4, **dict(options)))
    assert re.search(FIRST, done.stdout).groups() == first
    end = read_log(tmp_path / "out" / "log.jsonl")[-1]
    found = re.search(r"lost in the end: ([\d.]+)% of gradients, ([\d.]+)% of parameters; sent again: ([\d.]+)%\n"
                      r"rounds at the end: (.*); ([\d.]+) of plain bf16's bytes\n", done.stdout)
    assert found[4] == last
    for shown, name in zip(found.groups(), ("gradient_loss_rate", "parameter_loss_rate", "extra_traffic")):
        assert float(shown) == pytest.approx(100 * end[name], abs=0.051)
    assert (float(found[3]) > 0) == (not last.startswith("0"))
    told = "against|lost in|rounds|    (what|lost|nothing)"
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if re.match(told, line))
    if "int" not in done.stdout:
        assert float(found[5]) == 2  # float32, and nothing is sent again


@pytest.mark.parametrize("at, told", [("1=1", True), ("1=0.5", False)])
def test_a_run_says_whose_values_never_arrive(data, tmp_path, at, told):
    """A worker whose links lose all packets owns parameters that nobody else gets; the perplexity alone does not say why."""
    done = succeed(*settings(data, tmp_path / "out", steps=52, seq=16, loss_rate=0.1, loss_at=at))
    oldest = re.findall(r"^note: oldest value of a replica: (\d+) steps", done.stdout, re.M)
    assert oldest == (["52"] if told else [])


def test_a_run_says_when_its_rounds_change(data, tmp_path):
    """Bursts lose more in some steps than in others. The measured loss crosses the threshold in step 12."""
    done = succeed(*settings(data, tmp_path / "out", steps=40, seq=16, loss_rate=0.066, packet_bytes=512,
                             loss_model="burst:30", loss_seed=2))
    log = read_log(tmp_path / "out" / "log.jsonl")
    changed = re.findall(r"(\d+)  [\d.]+% of gradients lost of late: from now on (\d) rounds? instead of (\d)\n", done.stdout)
    went = [event["step"] + 1 for event in log if event["event"] == "step" and event["extra_traffic"] > 0]
    assert bool(changed) == bool(went) and changed
    assert int(changed[0][0]) <= went[0]


def test_dry_run_says_for_what_it_plans():
    for device, first in (("cuda", "Plan for one GPU for each worker"), ("cpu", "Plan for CPUs")):
        done = succeed("--dry-run", "--model", "1.1B", "--workers", 8, "--device", device)
        assert done.stdout.splitlines()[0] == first
        assert ("H100" in done.stdout) == (device == "cuda")
        assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_dry_run_takes_the_vocabulary_of_the_data(data):
    """As the run will. Without the data here, a preset has Llama-2's."""
    for option, vocabulary in (f"--train={data}/train.bin", VOCABULARY), ("--train=none.bin", 32000):
        assert f"width 64, vocabulary {vocabulary}\n" in succeed("--dry-run", "--model=260K", option).stdout


def test_dry_run_of_the_most_workers():
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    succeed("--dry-run", "--model=260K", "--workers=65534")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime < before + 5  # a loop over pairs took 16 s


def test_dry_run_7b_on_64_workers():
    """The numbers are calculated by hand: P = 6,738,415,616; 4P = 26.954 GB; 8P/64 = 0.842 GB;
    4P*63/64 = 26.533 GB = 6,477,664 packets of 4,096 bytes, each with 28 + 66 bytes around it;
    26.533e9*8 + 6,477,664*94*8 bits at 100 Gbit/s = 2,122.6 + 48.7 = 2,171.3 ms.
    Activations of 2,048 tokens: 32 layers x 4 bytes x 2,048 x (8*4,096 + 3*11,008 + 2 + 32) and
    outside the layers 4 x 2,048 x (5*4,096 + 3*4,096 + 4,096 + 3*11,008 + 4) + 2 x 4 x 2,048 x 64.
    Drift at p = 0.1, N = 64, uncorrelated: 62/64 * 0.2/0.99 + 2/64 * 0.1/0.9 = 0.1992."""
    done = succeed("--dry-run", "--model", "7B", "--workers", 64, "--loss-rate", 0.1, "--batch", 1,
                   "--seq", 2048, "--link-gbps", 100, "--wire-dtype", "float32")
    assert done.stdout.startswith("Plan for CPUs; for GPUs such as an H100: add --device cuda\n\n7B: ")
    text = re.sub(r" +", " ", done.stdout)
    for line in ("7B: 6738415616 parameters, 32 layers of width 4096, vocabulary 32000",
                 "131072 tokens per step", "parameters 26.954 GB", "gradients 26.954 GB",
                 "optimizer state 0.842 GB", 
                 "gradient phase 26.533 GB", "parameter phase 26.533 GB",
                 "6477664 packets of at most 4096 bytes", "steps uncorrelated 0.1992",
                 "the paper's 2p/(1+p) 0.1818"):
        assert line in text, f"{line!r} not in\n{done.stdout}"
    # Receive buffers of 26.533 GB, 2P = 13.477 GB of gradients that are carried, one byte or word per packet and
    # worker, and buffers for MPI's messages.
    (network,) = re.findall(r"network ([\d.]+) GB", text)
    assert 26.533 + 13.477 < float(network) < (26.533 + 13.477) * 1.02
    layer = 4 * 2048 * (8 * 4096 + 3 * 11008 + 2 + 32)
    outside = 4 * 2048 * (5 * 4096 + 3 * 4096 + 4096 + 3 * 11008 + 4) + 2 * 4 * 2048 * 64
    assert f"activations {(32 * layer + outside) / 1e9:.3f} GB" in text
    seconds = (26.5325e9 + 6477664 * 94) * 8 / 100e9
    (shown,) = re.findall(r"([\d.]+) ms per phase", text)
    assert float(shown) == pytest.approx(1e3 * seconds, rel=1e-4)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80


def test_help():
    """--help fits a screen and names options that exist. --help all has every option of a run's log."""
    short, every = succeed("--help").stdout, succeed("--help", "all").stdout
    assert max(len(line) for line in (short + every).splitlines()) <= 80
    assert len(short.splitlines()) <= 45
    options = lambda text: re.findall(r"^  --([a-z0-9-]+)", text, re.M)
    assert 20 <= len(options(short)) <= 28 and len(set(options(short))) == len(options(short))
    assert set(options(short)) < set(options(every)) and len(options(every)) > 80
    for line in short.splitlines()[3:]:
        assert line.startswith("  ") == line.startswith("  --"), line  # one line for each option
    assert succeed("--help=all").stdout == every
    table = [line.split("\t") for line in succeed("--help", "table").stdout.splitlines()]
    assert [row[0] for row in table] == options(every) and {len(row) for row in table} == {5}


def test_help_about_a_word():
    text = succeed("--help", "Loss-Rate").stdout
    assert "--loss-rate P[,P]" in text and "--loss-model" in text and "--model" not in text
    assert succeed("--help", "resume").stdout.startswith("Output\n  --resume")
    done = run("--help", "snow")
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == ("train_llama2: --help snow: no option's name or text has this word "
                           "(see --help all)\n")
    done = run("--help", "all", "more")
    assert done.returncode == 2 and "'more': expected options only" in done.stderr


def test_version_is_that_of_the_headers_and_the_changelog():
    def defined(header, name):
        text = (ROOT / header).read_text(encoding="utf-8")
        return re.search(rf'^#define {name} "([0-9]+\.[0-9]+\.[0-9]+)"', text, re.M)[1]
    program = defined("llmc/cli/validate.h", "TRAIN_LLAMA2_VERSION")
    library = defined("lossynet/lossynet.h", "LOSSYNET_VERSION")
    text = succeed("--version").stdout
    assert text.startswith(f"train_llama2 {program} (lossynet {library}), ")
    assert len(text.split(", ")) >= 3  # they include git's name of the revision, and the backend


# ---- the log ----

def test_every_field_of_the_log_is_documented(data, tmp_path):
    readme = (ROOT / "llmc" / "log" / "README.md").read_text(encoding="utf-8")
    log = train(data, tmp_path, loss_rate=0.1, eval_every=3)
    assert [e["event"] for e in log] == ["run"] + ["step"] * 3 + ["eval"] + ["step"] * 3 + [
        "eval", "links", "end"]
    for event in log:
        for field in event:
            assert f"`{field}`" in readme, f"llmc/log/README.md does not explain {field}"
    run_event = log[0]
    assert run_event["options"]["loss-rate"] == 0.1 and run_event["options"]["seed"] == 5
    for old, new in (("gradient_loss_rate", "gradient_lost"), ("parameter_loss_rate", "parameter_lost"),
                     ("late", "late_packets"), ("stragglers", "phases_cut")):
        assert all(e[new] == e[old] for e in log if e["event"] == "step")
    assert log[-1]["gradient_lost"] == log[-1]["gradient_loss_rate"] > 0
    for i, step in enumerate(e for e in log if e["event"] == "step"):
        assert step["step"] == i
        assert step["tokens_per_second"] > 0 and step["step_ms"] > step["communication_ms"] >= 0


# ---- builds ----

@pytest.mark.parametrize("algorithm", ["lossy", "rps", "naive", "reliable"])
def test_sanitized_training(data, tmp_path, algorithm):
    """A short training passes the address, leak and undefined-behaviour sanitizers."""
    done = run(*settings(data, tmp_path, algorithm=algorithm, loss_rate=0.2, steps=3, workers=4,
                         estimator="balanced"), program=SANITIZED)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]


def test_sanitized_errors_leak_nothing(data, tmp_path):
    done = run(*settings(data, tmp_path / "out", val=tmp_path / "none"), program=SANITIZED)
    one_line(done, 1)


def test_nvcc_accepts_the_main_file(tmp_path):
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc here: that it compiles train_llama2.cu was not checked")
    done = subprocess.run([nvcc, "-x", "cu", "-std=c++17", "-I.", "-Xcompiler",
                           "-fopenmp,-Wall,-Wextra,-Werror", "-D_GNU_SOURCE", "-c",
                           "train_llama2.cu", "-o", tmp_path / "main.o"], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, done.stderr


def test_a_config_json_alone_is_trained_from_nothing(data, tmp_path):
    """The shape that a preset's checkpoint describes gives the preset's bits, and a shape of one's own trains."""
    losses = [event["loss"] for event in train(data, tmp_path / "preset") if event["event"] == "step"]
    (shape,) = tmp_path.glob("preset/checkpoint-*/config.json")
    train(data, tmp_path / "same", model=shape)
    assert weights(tmp_path / "same") == weights(tmp_path / "preset")
    own = tmp_path / "own.json"
    own.write_text(json.dumps({**json.loads(shape.read_text()), "num_hidden_layers": 2, "intermediate_size": 96}))
    mine = [event["loss"] for event in train(data, tmp_path / "own", model=own) if event["event"] == "step"]
    assert mine != losses and mine[-1] < mine[0]
    succeed(*settings(data, tmp_path / "own", model=own, steps=8, resume="auto"))
    (checkpoint,) = tmp_path.glob("own/checkpoint-00000008/config.json")
    assert json.loads(checkpoint.read_text())["intermediate_size"] == 96
    assert "own.json" in succeed("--dry-run", "--model", own, "--workers", 8).stdout
    own.write_text("{}")
    assert "own.json" in one_line(run(*settings(data, tmp_path / "none", model=own)), 1)


def test_the_terminal_shows_enormous_perplexities_short(data, tmp_path):
    done = succeed(*settings(data, tmp_path, lr=3, steps=3, clip=0, drift_samples=0))
    lines = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert "perplexity" in done.stdout and max(map(len, lines)) <= 100

#!/usr/bin/env python3
"""Tests that no commit changes the bits of a run unawares. test/goldens/digests.json keeps digests of short
runs: the losses of all steps, the final parameters, and what was lost, by setting; and the digests of lossynet's
own scenario. The bits must not depend on the number of ranks either.

Matrix products are plain loops here (build/plain/train_llama2), and the CPU backend is that for AVX2 and FMA, so
that the bits follow from the sources, the compiler and the C library's functions. With another compiler or C
library than the stored digests name, only equality over numbers of ranks is tested; the rest is skipped.

A commit that means to change bits stores them anew, and says why in its message:

    make tests && test/system/test_digests.py        stores, and prints which settings moved
"""
import hashlib
import json
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / "support")]
from program import (BUILD, PROGRAM, ROOT, events, markov_files, run,  # pylint: disable=wrong-import-position
                     succeed, tensors)

pytestmark = [pytest.mark.spread, pytest.mark.takes(140)]

STORED = ROOT / "test" / "goldens" / "digests.json"
PLAIN = BUILD / "plain" / "train_llama2"
EMULATED = BUILD / "emulated" / "train_llama2"
SCENARIO = BUILD / "test" / "lossynet" / "transport" / "test_lossynet_mpi"
ENVIRONMENT = {"TRAIN_LLAMA2_ISA": "x86_64_v3", "OMP_NUM_THREADS": "2"}
VOCABULARY = 128
RANKS = 1, 2, 8
CROSSED = "default", "paper", "lead"  # these run with all numbers of ranks, others with one and, in turn, 2 or 8

# The paper's algorithm. Settings name everything that they use, so that other defaults move none but
# those that are named so.
PAPER = {"lead": "off", "carry": 0, "repair": 0, "wire-dtype": "float32", "loss-rate": 0.2}
LEAD = {**PAPER, "lead": "auto"}
SETTINGS = {
    "default": {"loss-rate": 0.2},
    "default, 40%": {"loss-rate": 0.4},
    "default, nothing lost": {},
    "paper": PAPER,
    "lead": LEAD,
    "look ahead, bf16": {**PAPER, "look-ahead": 1.5, "wire-dtype": "bf16"},
    "look ahead, carry": {**LEAD, "look-ahead": 0.5, "carry": 1},
    "lead, carry, repair": {**LEAD, "carry": 1, "repair": "1,0", "repair-budget": 0.2},
    "look ahead, 40%": {**LEAD, "look-ahead": 1, "carry": 1, "repair": "1,0", "repair-budget": 0.2,
                        "loss-rate": 0.4},
    "balanced, bursts, repair": {**LEAD, "loss-rate": 0.3, "estimator": "balanced", "loss-model": "burst:5",
                                 "micro-batches": 2, "repair": 1},
    "outages, bad links, repair": {**LEAD, "loss-model": "outage:3", "loss-at": "3=0.5,2-5=1", "repair": 1},
    "carry": {**LEAD, "carry": 0.5, "loss-rate": 0.3},
    "contiguous data": {**LEAD, "data-split": "contiguous", "batch": 2, "micro-batches": 2},
    "bf16": {**LEAD, "wire-dtype": "bf16"},
    "int8": {**LEAD, "wire-dtype": "int8"},
    "int8, carry, repair": {**LEAD, "wire-dtype": "int8", "carry": 0.5, "loss-rate": 0.3, "repair": 1},
    "int4, carry": {**LEAD, "wire-dtype": "int4", "carry": 1},
    "dtype bf16": {**LEAD, "dtype": "bf16", "wire-dtype": "float32"},
    "groups": {**LEAD, "group": 2, "carry": 1},
    "reliable": {"algorithm": "reliable", "wire-dtype": "float32"},
    "reliable, look ahead": {"algorithm": "reliable", "wire-dtype": "float32", "look-ahead": 1},
    "reliable, bf16": {"algorithm": "reliable", "wire-dtype": "bf16"},
    "reliable, int4": {"algorithm": "reliable", "wire-dtype": "int4", "carry": 0},
    "rps": {"algorithm": "rps", "loss-rate": 0.2},
    "naive": {"algorithm": "naive", "loss-rate": 0.2},
    "late ranks": {**LEAD, "carry": 1, "loss-model": "replay"},  # late_ranks() makes the file
}
# The same on the emulated device, one number of ranks each: the first, the second, the third, the first ...
# What a rank keeps on a device depends on its number of workers, and so do roundings of bf16.
# A device keeps no lost gradients.
DEVICE = {name.replace(", carry", ""): {**SETTINGS[name], "carry": 0 if "carry" in SETTINGS[name] else "auto"}
          for name in ("default", "paper", "lead, carry, repair", "reliable", "rps", "naive", "bf16",
                       "int8, carry, repair", "int4, carry", "dtype bf16", "groups", "late ranks")}
# Other numbers of workers, in all on one device or on two; a number of ranks is not an option of the program.
DEVICE |= {
    "16 workers": {"loss-rate": 0.2, "dtype": "bf16", "workers": 16},
    "6 workers, groups of 3": {**LEAD, "dtype": "bf16", "workers": 6, "group": 3, "wire-dtype": "int8"},
    "5 workers, micro-batches": {**LEAD, "dtype": "bf16", "workers": 5, "micro-batches": 3, "repair": 1},
    "6 workers on two devices": {**LEAD, "dtype": "bf16", "workers": 6, "wire-dtype": "int6",
                                 "ranks": 2},
}
SETTINGS["dtype bf16"] = {**SETTINGS["dtype bf16"], "seq": 64}  # the CPU's tiles are this long
CPU_STEPS, DEVICE_STEPS = 4, 3


# ---- runs ----

def late_ranks(folder, workers, common):
    """A file of a made-up run with late ranks, for --loss-model replay."""
    path, record = folder / f"late.{workers}", folder / f"record.{workers}"
    if not path.exists():
        plain = {**LEAD, "steps": CPU_STEPS, "record-loss": record, "out": folder / "recorded"}
        train({**common, **plain}, PLAIN)
        done = subprocess.run([ROOT / "scripts" / "late_ranks.py", record, "--steps", str(CPU_STEPS),
                               "--deadline", "0.1"], text=True, capture_output=True, check=True)
        assert not re.search(r" 0 of them late", done.stderr), done.stderr
        path.write_text(done.stdout, encoding="utf-8")
    return path


def train(options, program, ranks=1):
    words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]
    succeed(*words, "--overwrite", program=program, ranks=ranks if ranks > 1 else 0, environment=ENVIRONMENT)


def digest(parts):
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.hexdigest()[:16]


def of_run(data, out, changes, ranks, device=False):
    """Trains, and returns the digests of what came out."""
    workers, steps = (4, DEVICE_STEPS) if device else (8, CPU_STEPS)
    common = {"model": "260K", "train": data / "train.bin", "val": data / "val.bin", "workers": workers,
              "batch": 1, "seq": 16, "lr": 3e-3, "seed": 5, "packet-bytes": 512,
              "eval-sequences": 3}
    more = {key: value for key, value in changes.items() if key != "ranks"}
    if more.get("loss-model") == "replay":
        more["loss-model"] = f"replay:{late_ranks(data, workers, common)}"
    if device:
        more = {"device": "cuda", "dtype": "float32", **more}
        if "dtype" not in changes and changes.get("wire-dtype", "float32") != "float32":
            more["dtype"] = "bf16"  # what a GPU rounds for the wire
    train({**common, "steps": steps, **more, "out": out}, EMULATED if device else PLAIN, ranks)
    trained, (evaluated,) = events(out / "log.jsonl", "step"), events(out / "log.jsonl", "eval")
    (path,) = out.glob("checkpoint-*/model.safetensors")
    return {
        "losses": digest([step["loss"] for step in trained] + [step["grad_norm"] for step in trained]
                         + [evaluated["val_loss"], evaluated.get("replica_val_loss")]),
        "parameters": digest(part for item in sorted(tensors(path).items()) for part in item),
        "lost": digest(step.get(field) for step in trained for field in (
            "gradient_loss_rate", "parameter_loss_rate", "mean_age", "extra_traffic", "drift"))}


def toolchain():
    """What made the program: the digests are those of this compiler and this C library."""
    compiler = re.search(rb"GCC: \([^)]*\) (\d+)", PLAIN.read_bytes())
    return (f"gcc {compiler[1].decode() if compiler else 'unknown'}, {' '.join(platform.libc_ver())}, "
            f"{platform.machine()}")


def device_ranks(name):
    """The number of ranks of a setting on the device: one, two or four, if there are four workers."""
    changes = DEVICE[name]
    return changes.get("ranks", 1) if "workers" in changes else (1, 2, 4)[list(DEVICE).index(name) % 3]


def scenario(ranks=0):
    """The digests of lossynet's scenario, by case."""
    lines = succeed(program=SCENARIO, ranks=ranks).stdout.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines)


# ---- tests ----

@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 8_000, 300)


@pytest.fixture(scope="module")
def avx2(data):
    """Skips where digests cannot be made."""
    done = run("--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=16", "--batch=1", "--device=cpu",
               program=PLAIN, environment=ENVIRONMENT)
    if "TRAIN_LLAMA2_ISA" in done.stderr:
        pytest.skip(f"digests need AVX2 and FMA: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


def compare(kind, name, found):
    """Fails if the digests of a setting are not those stored."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    if stored["toolchain"] != toolchain():
        pytest.skip(f"the same bits with all numbers of ranks; digests are stored for {stored['toolchain']}, "
                    f"here is {toolchain()}")
    assert stored[kind].get(name) == found, (
        f"'{name}' ({kind}) has other bits than before. If this is meant: store them by "
        "test/system/test_digests.py, and say why in the commit message")


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.usefixtures("avx2")
def test_runs_keep_their_bits(data, tmp_path, name):
    one = of_run(data, tmp_path / "1", SETTINGS[name], 1)
    for ranks in RANKS[1:] if name in CROSSED else RANKS[1 + list(SETTINGS).index(name) % 2:][:1]:
        assert of_run(data, tmp_path / str(ranks), SETTINGS[name], ranks) == one, f"{ranks} ranks"
    compare("cpu", name, one)


@pytest.mark.parametrize("name", DEVICE)
@pytest.mark.usefixtures("avx2")
def test_runs_on_a_device_keep_their_bits(data, tmp_path, name):
    compare("device", name, of_run(data, tmp_path / "out", DEVICE[name], device_ranks(name), device=True))


def test_lossynet_keeps_its_bits():
    """lossynet alone: parameters, fresh runs, counters and drift, for many settings."""
    one = scenario()
    assert len(one) >= 8
    for ranks in RANKS[1:]:  # one rank is what ran without mpirun
        assert scenario(ranks) == one, f"{ranks} ranks"
    for name, found in one.items():
        compare("lossynet", name, found)


def test_settings_are_those_stored():
    """A setting that is no longer tested has no stored digest."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert set(stored["cpu"]) == set(SETTINGS) and set(stored["device"]) == set(DEVICE)
    # Nothing that must move the bits leaves them as they are.
    for kind in ("cpu", "device"):
        assert len({found["parameters"] for found in stored[kind].values()}) >= len(stored[kind]) - 3


# ---- storing ----

def store():
    before = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    found = {"toolchain": toolchain(), "cpu": {}, "device": {}, "lossynet": scenario()}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        markov_files(folder, VOCABULARY, 8_000, 300)
        for name, changes in SETTINGS.items():
            found["cpu"][name] = of_run(folder, folder / "out" / name, changes, 1)
        for name, changes in DEVICE.items():
            found["device"][name] = of_run(folder, folder / "device" / name, changes, device_ranks(name),
                                           device=True)
    for kind in ("cpu", "device", "lossynet"):
        for name, new in found[kind].items():
            old = before.get(kind, {}).get(name)
            if old != new:
                what = "new" if old is None else "moved: " + ", ".join(
                    key for key in new if old.get(key) != new[key]) if isinstance(new, dict) else "moved"
                print(f"{kind:9} {name}: {what}")
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    assert PROGRAM.exists() and PLAIN.exists() and EMULATED.exists(), "make tests first"
    store()

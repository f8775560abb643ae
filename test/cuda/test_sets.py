"""Tests that a GPU computes several workers at once (backend.h: sets) with the same bits as one after another, on the
emulated device. Its streams run in any order that their events allow, so a wait that is missing, or memory that two
sets share, gives other numbers: planted faults show that it does."""
import re
import subprocess

import pytest

from program import BUILD, events, run, small_model, succeed

pytestmark = [pytest.mark.spread, pytest.mark.takes(60)]

EMULATED = BUILD / "emulated" / "train_llama2"
FIELDS = "loss", "grad_norm", "drift", "mean_age", "val_loss", "replica_val_loss", "text"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "text").write_text("".join(f"The {c}at sat on the mat {i} times .\n" for i in range(200) for c in "bchr"),
                                 encoding="utf-8")
    for command in (["spm_train", "--input=text", "--model_prefix=tokenizer", "--model_type=bpe", "--vocab_size=300",
                     "--byte_fallback=true", "--unk_id=0", "--bos_id=1", "--eos_id=2", "--pad_id=-1"],
                    [BUILD / "tokenize", "--tokenizer=tokenizer.model", "--train=t.bin", "text"]):
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    small_model(folder / "model", 300, layers=2)
    return folder


def options_of(data, *more):
    return [f"--model={data}/model", f"--train={data}/t.bin", f"--val={data}/t.bin", "--workers=8", "--batch=1",
            "--seq=16", "--lr=3e-3", "--lr-final=1", "--warmup=0", "--seed=5", "--packet-bytes=512", "--loss-rate=0.3",
            "--eval-sequences=2", "--eval-every=2", "--sample-every=2", "--device=cuda", *more]


def needed(data, *more, ranks=0):
    """Bytes of a GPU that --dry-run counts if it computes all its workers at once, how many these are, and the bytes
    if it computes one at a time."""
    more = [option for option in more if not option.startswith("--resume")]
    shown = succeed(*options_of(data, *more), "--dry-run", "--vocab-size=300", program=EMULATED, ranks=ranks).stdout
    (most, sets), (one, _) = re.findall(r"([\d.]+) GB  (\d+) (?:worker|group)s? at a time", shown)
    return 1e9 * float(most), int(sets), 1e9 * float(one)


def train(data, out, sets, streams, *more, ranks=0, fault=""):
    """Trains with memory for so many sets. Returns what steps, evaluations and samples gave."""
    most, all_sets, one = needed(data, *more, ranks=ranks)
    memory = one + (sets - 0.5) * (most - one) / (all_sets - 1)
    done = run(*options_of(data, *more), f"--out={out}", program=EMULATED, ranks=ranks,
               environment={"EMULATED_STREAMS": streams, "EMULATED_MEMORY": str(int(memory)), "EMULATED_SETS": fault})
    assert fault or done.returncode == 0, done.stderr
    saves = f"computes {sets} at a time of the {all_sets} "
    assert (saves in done.stdout) == (sets < all_sets), done.stdout
    log = out / "log.jsonl"
    return [[event.get(name) for name in FIELDS] for kind in ("step", "eval", "sample") for event in events(log, kind)]


@pytest.mark.parametrize("more, most", [
    ([], 8), (["--micro-batches=3"], 8), (["--group=2"], 4), (["--group=2", "--micro-batches=2", "--dtype=float32"], 4),
    (["--wire-dtype=int8"], 8), (["--algorithm=rps"], 8), (["--recompute=block"], 8)],
                         ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, list) else "")
def test_sets_do_not_change_bits(data, tmp_path, more, most):
    """From the third step on, passes are repeated (backend.h), but with groups."""
    runs = [train(data, tmp_path / f"{sets}.{streams}", sets, streams, "--steps=4", *more)
            for sets, streams in [(1, "late"), (3, "random:1"), (most, "random:2")]]
    assert len(runs[0]) == 4 + 2 + 2
    assert all(one == runs[0] for one in runs)


@pytest.mark.parametrize("more", [["--dtype=bf16"], ["--dtype=float32", "--micro-batches=2", "--link=udp"]],
                         ids=["bf16", "float32"])
def test_resumes_with_other_ranks(data, tmp_path, more):
    """Each of two ranks has sets of its own, whose gradients are copied to the host while others are computed."""
    whole = train(data, tmp_path / "whole", 1, "late", "--steps=6", *more)
    parts = tmp_path / "parts"
    train(data, parts, 8, "random:3", "--steps=2", *more)
    train(data, parts, 4, "random:4", "--steps=4", "--resume=auto", *more, ranks=2)
    assert train(data, parts, 3, "random:5", "--steps=6", "--resume=auto", *more) == whole


@pytest.mark.parametrize("fault", ["scratch", "begin", "end"])
def test_planted_faults_are_found(data, tmp_path, fault):
    """See EMULATED_SETS in dev/emulation/device_emulated.h."""
    right = train(data, tmp_path / "right", 8, "late", "--steps=2")
    assert train(data, tmp_path / "wrong", 8, "random:1", "--steps=2", fault=fault) != right

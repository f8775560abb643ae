"""Tests --dtype bf16 on the CPU: the loss is that of float32, bits do not depend on how workers are spread
over ranks, and checkpoints. test_processor.py tests what the program says of the processor."""
import math

import pytest

from program import instruction_sets, markov_files, read_log, succeed, tensors

pytestmark = [pytest.mark.spread, pytest.mark.takes(60)]

VOCABULARY = 256
INSTRUCTION_SETS = instruction_sets()


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 150_000, 5_000)


def train(data, out, ranks=0, isa=None, **changes):
    options = {"model": "260K", "train": data / "train.bin", "workers": 4, "batch": 2, "seq": 48,
               "steps": 6, "lr": 3e-3, "seed": 5, "packet-bytes": 1024, "loss-rate": 0.1,
               "dtype": "bf16", "device": "cpu", "out": out}
    options.update({key.replace("_", "-"): value for key, value in changes.items()})
    succeed(*[f"--{key}={value}" for key, value in options.items()], ranks=ranks,
            environment={"TRAIN_LLAMA2_ISA": isa} if isa else None)
    return read_log(out / "log.jsonl")


def losses(log):
    return [event["loss"] for event in log if event["event"] == "step"]


def model(out):
    return max(out.glob("checkpoint-*/model.safetensors")).read_bytes()


@pytest.mark.parametrize("algorithm, isa", [("rps", INSTRUCTION_SETS[0])] + [
    ("lossy", isa) for isa in INSTRUCTION_SETS])
def test_processes_and_threads_do_not_change_a_bit(data, tmp_path, algorithm, isa):
    one = train(data, tmp_path / "1", algorithm=algorithm, isa=isa)
    many = [(0, 3), (4, 2)]  # on all instruction sets
    for ranks, threads in many + ([(0, 1), (2, 1)] if isa == INSTRUCTION_SETS[0] else []):
        out = tmp_path / f"{ranks}-{threads}"
        other = train(data, out, ranks=ranks, threads=threads, algorithm=algorithm, isa=isa)
        assert losses(other) == losses(one)
        assert model(out) == model(tmp_path / "1")


def test_the_loss_is_that_of_float32(data, tmp_path):
    """Trains 120 steps with three seeds. At every time, the mean loss over 40 steps in bf16 differs from
    that in float32 by less than the seeds differ from each other."""
    curves = {}
    for dtype in ("float32", "bf16"):
        for seed in (1, 2, 3):
            log = train(data, tmp_path / f"{dtype}{seed}", dtype=dtype, seed=seed, steps=120,
                        workers=2, loss_rate=0)
            curve = losses(log)
            curves[dtype, seed] = [sum(curve[i:i + 40]) / 40 for i in range(0, 120, 40)]
    assert curves["float32", 1][-1] < curves["float32", 1][0] - 1  # the model has learnt something
    for part in range(3):
        exact = [curves["float32", seed][part] for seed in (1, 2, 3)]
        rounded = [curves["bf16", seed][part] for seed in (1, 2, 3)]
        assert abs(sum(rounded) - sum(exact)) / 3 < max(exact) - min(exact)
        for a, b in zip(exact, rounded):
            assert a != b and abs(a - b) < 0.01 * a


def test_checkpoints_resume_to_the_bit(data, tmp_path):
    whole = train(data, tmp_path / "whole", steps=8)
    train(data, tmp_path / "cut", steps=8, save_every=4, keep=0)
    later = next((tmp_path / "cut").glob("checkpoint-*8"))
    assert tensors(later / "model.safetensors") == tensors(
        next((tmp_path / "whole").glob("checkpoint-*8")) / "model.safetensors")
    half = next((tmp_path / "cut").glob("checkpoint-*4"))
    rest = train(data, tmp_path / "rest", steps=8, resume=half)
    assert losses(rest)[-4:] == losses(whole)[4:]
    assert model(tmp_path / "rest") == model(tmp_path / "whole")


def test_evaluation_agrees_with_float32(data, tmp_path):
    train(data, tmp_path, steps=40)
    folder = next(tmp_path.glob("checkpoint-*"))
    found = {}
    for dtype in ("float32", "bf16"):
        text = succeed("--eval", "--model", folder, "--val", data / "val.bin", "--seq", 48,
                       "--device=cpu", f"--dtype={dtype}").stdout
        found[dtype] = float(text.split("perplexity ")[1].split()[0])
    assert found["bf16"] != found["float32"]
    assert math.log(found["bf16"] / found["float32"]) == pytest.approx(0, abs=0.005)

"""Tests --tune: rank 0 times the algorithms for products, and all ranks and resumed runs use its choices.
The emulated device's algorithms differ in their bits, and EMULATED_FASTEST says which of them its clock
shows as the fastest."""
import json

import pytest

from program import BUILD, events, markov_files, succeed

EMULATED = BUILD / "emulated" / "train_llama2"
VOCABULARY = 128
SHAPES = 12  # not 15, because the classifier's three shapes equal those of the queries, keys and values


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 5_000, 300)


def train(data, out, *more, fastest="0", ranks=0, device="emulated"):
    """Trains two workers. Returns the losses and norms of their steps, and the terminal's output."""
    done = succeed("--model=260K", f"--train={data}/train.bin", "--workers=2", "--batch=1", "--seq=16",
                   "--steps=4", "--lr=3e-3", "--loss-rate=0.2", "--packet-bytes=512", "--device=cuda",
                   "--dtype=float32", "--save-every=2", f"--out={out}", *more, program=EMULATED, ranks=ranks,
                   environment={"EMULATED_FASTEST": fastest, "EMULATED_DEVICE": device})
    steps = [(e["step"], e["loss"], e["grad_norm"]) for e in events(out / "log.jsonl", "step")]
    return steps, done.stdout


def places(checkpoint):
    return [choice[-1] for choice in json.loads((checkpoint / "trainer.json").read_text())["products"]]


@pytest.fixture(scope="module")
def tuned(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "run"
    steps, shown = train(data, out, "--tune", fastest="5")
    return out, steps, shown


def test_takes_what_is_fastest(data, tuned, tmp_path):
    out, steps, shown = tuned
    assert f"timed {SHAPES} shapes of products: for {SHAPES} another algorithm is faster" in shown
    assert places(out / "checkpoint-00000004") == [5] * SHAPES
    first, shown = train(data, tmp_path / "off", fastest="5")
    assert "timed" not in shown and places(tmp_path / "off" / "checkpoint-00000004") == []
    assert first != steps
    same, shown = train(data, tmp_path / "same", "--tune", fastest="0")
    assert f"timed {SHAPES} shapes of products: for 0 another" in shown and same == first


def test_ranks_take_what_rank_0_chose(data, tuned, tmp_path):
    """All ranks use rank 0's choice, although rank 1 would have chosen another algorithm."""
    steps, shown = train(data, tmp_path / "run", "--tune", "--link=udp", fastest="5,9", ranks=2)
    assert shown.count("timed") == 1 and steps == tuned[1]


def resume(data, tuned, tmp_path, *more, **how):
    out = tmp_path / "run"
    steps, shown = train(data, out, f"--resume={tuned[0]}/checkpoint-00000002", *more, **how)
    return steps, shown, places(out / "checkpoint-00000004")


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_resumed_run_keeps_the_choice(data, tuned, tmp_path, ranks):
    steps, shown, taken = resume(data, tuned, tmp_path, "--tune", fastest="7", ranks=ranks)
    assert "bit for bit" in shown and "timed" not in shown
    assert taken == [5] * SHAPES and steps == tuned[1][2:]


def test_a_resumed_run_says_that_it_differs(data, tuned, tmp_path):
    steps, shown, taken = resume(data, tuned, tmp_path)
    assert "cannot be identical:\n  products are computed by other algorithms (--tune)\n" in shown
    assert taken == [] and steps != tuned[1][2:]


def test_another_device_is_timed_anew(data, tuned, tmp_path):
    _, shown, taken = resume(data, tuned, tmp_path, "--tune", fastest="7", device="another")
    assert f"timed {SHAPES} shapes" in shown and taken == [7] * SHAPES
    assert "backend was" in shown and "products are computed by other algorithms (--tune)" in shown


def test_new_shapes_are_timed_beside_known_ones(data, tuned, tmp_path):
    _, shown, taken = resume(data, tuned, tmp_path, "--tune", "--batch=2", fastest="7")
    assert f"timed {SHAPES} shapes" in shown and taken == [5] * SHAPES + [7] * SHAPES


def test_places_without_an_algorithm_are_left_out(data, tmp_path):
    train(data, tmp_path / "run", "--tune", fastest="15")
    assert places(tmp_path / "run" / "checkpoint-00000004") == [0] * SHAPES


def test_a_cpu_has_no_choice(data, tmp_path):
    _, shown = train(data, tmp_path / "run", "--tune", "--device=cpu", fastest="5")
    assert "timed" not in shown and places(tmp_path / "run" / "checkpoint-00000004") == []

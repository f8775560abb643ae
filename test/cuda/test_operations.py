"""Counts what a step of many workers on one GPU asks of it, on the emulated device: operations (kernels, copies,
clearings; a graph counts as one) and calls of the backend. The exchange must take as many with 64 workers as with
two, since an operation takes microseconds of the host."""
import pytest

from program import BUILD, markov_files, small_model, succeed

pytestmark = [pytest.mark.spread, pytest.mark.takes(60)]

EMULATED = BUILD / "emulated" / "train_llama2"
DEFAULT = ["--loss-rate=0.2"]  # int6, lost packets again: all phases
SETTINGS = {"default": DEFAULT, "plain": ["--plain", "--loss-rate=0.2"], "reliable": ["--algorithm=reliable"],
            "int8": ["--loss-rate=0.3", "--wire-dtype=int8"], "groups": DEFAULT + ["--group=2"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = markov_files(tmp_path_factory.mktemp("data"), 64, 4_000, 200)
    small_model(folder / "one", 64, layers=1, shape=(16, 32, 1, 1))
    small_model(folder / "eight", 64, layers=8, shape=(16, 32, 1, 1))
    return folder


def counted(data, tmp_path, workers, *options, model="one", steps=3):
    """Operations and calls of one step, not counting what a run takes once: passes are called twice, then
    repeated."""
    found = []
    for number in (steps, steps + 1):
        report = tmp_path / f"{workers}.{number}"
        succeed(f"--model={data / model}", f"--train={data}/train.bin", f"--workers={workers}", f"--steps={number}",
                "--batch=1", "--seq=8", "--packet-bytes=264", "--device=cuda", "--dtype=bf16", *options,
                program=EMULATED, environment={"EMULATED_OPERATIONS": str(report)})
        found.append([int(word) for word in report.with_suffix(f".{number}.0").read_text().split()])
    return [after - before for before, after in zip(*found)]


@pytest.mark.parametrize("name", SETTINGS)
def test_operations_grow_with_workers_and_not_with_their_pairs(data, tmp_path, name):
    few, more, many = (counted(data, tmp_path, workers, *SETTINGS[name]) for workers in (4, 8, 12))
    for four, eight, twelve in zip(few, more, many):
        assert twelve - eight <= eight - four, (few, more, many)


def test_a_step_of_eight_workers(data, tmp_path):
    """With the layers of 42M."""
    operations, calls = counted(data, tmp_path, 8, *DEFAULT, model="eight")
    assert operations <= 64 and calls <= 72, (operations, calls)


def test_a_step_of_64_workers(data, tmp_path):
    operations, calls = counted(data, tmp_path, 64, *DEFAULT)
    assert operations <= 310 and calls <= 500, (operations, calls)

"""Tests --attention: cuDNN's kernels are used only if they give the results of our own kernels, and then by
all ranks and by resumed runs. The tests use the emulated device and a cuDNN that executes our graphs on the
CPU (fake_cudnn.c): the graphs compute attention, up to errors that rounding to bfloat16 explains."""
import json
import re

import pytest

from cudnn import fake_cudnn
from program import BUILD, events, markov_files, run, small_model, succeed

pytestmark = pytest.mark.takes(40)

EMULATED = BUILD / "emulated" / "train_llama2"
DEVICE = "emulated (sm_90)"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = markov_files(tmp_path_factory.mktemp("data"), 128, 5_000, 300)
    small_model(folder / "model", 128, layers=2)
    return folder


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return fake_cudnn(tmp_path_factory.mktemp("fake"))


def arguments(data, out, *more):
    return (f"--model={data}/model", f"--train={data}/train.bin", "--workers=2", "--batch=2", "--seq=24", "--steps=4",
            "--lr=3e-3", "--loss-rate=0.2", "--packet-bytes=512", "--device=cuda", "--save-every=2",
            f"--out={out}", *more)


def settings(place, kind="", device=DEVICE, **more):
    # An empty folder stands before the folders of a machine that has cuDNN.
    return {"LD_LIBRARY_PATH": str(place), "FAKE_CUDNN": kind, "EMULATED_DEVICE": device, **more}


def train(data, out, place, *more, ranks=0, **how):
    """Trains two workers. Returns the losses and norms of their steps, and the terminal's output."""
    done = succeed(*arguments(data, out, *more), program=EMULATED, ranks=ranks,
                   environment=settings(place, **how))
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events(out / "log.jsonl", "step")], done.stdout


def refuse(data, out, place, *more, ranks=0, **how):
    done = run(*arguments(data, out, *more), program=EMULATED, ranks=ranks, environment=settings(place, **how))
    assert done.returncode and not (out / "log.jsonl").exists(), done.stdout
    return done.stderr


def chosen(out):
    return events(out / "log.jsonl", "run")[0]["attention"]


def version(checkpoint):
    return json.loads((checkpoint / "trainer.json").read_text())["attention"]


@pytest.fixture(scope="module")
def own(data, tmp_path_factory, fake):
    out = tmp_path_factory.mktemp("own") / "run"
    steps, shown = train(data, out, fake, "--attention=own")
    assert "attention:" not in shown and chosen(out) == "own kernels" and version(out / "checkpoint-00000004") == 0
    return out, steps


@pytest.fixture(scope="module")
def cudnn(data, tmp_path_factory, fake):
    out = tmp_path_factory.mktemp("cudnn") / "run"
    return out, *train(data, out, fake)


def test_auto_is_the_default_and_takes_cudnn(own, cudnn):
    out, steps, shown = cudnn
    assert "attention: cuDNN 9.19.0 (its last bits differ from the own kernels')\n" in shown
    assert chosen(out) == "cuDNN 9.19.0" and version(out / "checkpoint-00000004") == 91900
    assert steps != own[1]
    assert [loss for _, loss, _ in steps] == pytest.approx([loss for _, loss, _ in own[1]], rel=1e-3)
    assert steps[0][2] == pytest.approx(own[1][0][2], rel=1e-2)


# {fault of cuDNN, which must keep the own kernels: reason that is shown}
REASONS = {"none": "cuDNN: a plan for attention: CUDNN_STATUS_NOT_SUPPORTED: fake",
           "fails": "cuDNN: attention: CUDNN_STATUS_EXECUTION_FAILED: fake",
           "wrong": "cuDNN's log-sum-exp is not that of the own kernels: expected the same but for rounding",
           "row": "cuDNN's result is not that of the own kernels: expected the same but for rounding",
           "random": "cuDNN gives other bits the second time",
           "old": "cuDNN is 9.1.0, expected 9.16 or newer"}


@pytest.mark.parametrize("kind", REASONS)
def test_what_is_wrong_keeps_the_own_kernels(data, own, fake, tmp_path, kind):
    steps, shown = train(data, tmp_path / "run", fake, kind=kind)
    assert f"attention: own kernels ({REASONS[kind]})\n" in shown
    assert steps == own[1]
    said = refuse(data, tmp_path / "refused", fake, "--attention=cudnn", kind=kind)
    assert said == f"train_llama2: --attention cudnn: {REASONS[kind]}\n"


def test_the_rule_of_auto(data, own, fake, tmp_path):
    """It asks for the device, the length of sequences and the memory, and not for cuDNN's speed."""
    steps, shown = train(data, tmp_path / "sm_80", fake, device="emulated (sm_80)")
    assert "attention: own kernels (cuDNN's are for sm_90 and newer)\n" in shown and steps == own[1]
    _, shown = train(data, tmp_path / "short", fake, "--seq=15")
    assert "attention: own kernels (cuDNN's are for longer sequences)\n" in shown
    _, shown = train(data, tmp_path / "cudnn", fake, "--attention=cudnn", "--seq=15", device="emulated (sm_80)")
    assert "attention: cuDNN 9.19.0" in shown


def planned(data, *more):
    said = succeed(f"--model={data}/model", "--dry-run", "--device=cuda", "--dtype=bf16", *more,
                   program=EMULATED).stdout
    return float(re.search(r"  total +([\d.]+) GB", said)[1])


@pytest.mark.parametrize("ranks", (0, 2))
def test_auto_leaves_cudnn_out_where_its_memory_does_not_fit(data, fake, tmp_path, ranks):
    """It does not compute anything again to have it, and --attention cudnn does."""
    shape = ("--batch=64", "--seq=64", "--steps=1", f"--workers={ranks or 1}", "--loss-rate=0")
    less, more = (planned(data, *shape, f"--attention={way}") for way in ("own", "cudnn"))
    assert more > less + 0.0015
    memory = str(int(1e9 * (less + more) / 2))
    small = ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || export EMULATED_MEMORY={memory}; exec "$@"', "sh"]
    done = succeed(*arguments(data, tmp_path / "run", *shape, "--recompute=none"), program=EMULATED, ranks=ranks,
                   shell=small, environment=settings(fake))
    assert re.search(r"attention: own kernels \((rank 1 on \S+: )?the GPU has no memory left for cuDNN's\)\n",
                     done.stdout), done.stdout


def test_evaluation_has_the_own_kernels(data, cudnn, fake, tmp_path):
    """The validation loss of a run with cuDNN has the bits of a run without, at the same parameters."""
    out = [tmp_path / "cudnn", tmp_path / "own"]
    for folder, attention in zip(out, ("auto", "own")):
        train(data, folder, fake, f"--resume={cudnn[0]}/checkpoint-00000004", f"--attention={attention}", "--steps=5",
              "--lr=0", f"--val={data}/val.bin", "--eval-every=1")
    one, other = (events(folder / "log.jsonl", "eval")[-1]["val_loss"] for folder in out)
    assert chosen(out[0]) == "cuDNN 9.19.0" and one == other


def test_no_cudnn_or_half_of_one(data, own, tmp_path):
    (tmp_path / "libcudnn.so.9").write_text("not a library")
    steps, shown = train(data, tmp_path / "run", tmp_path, "--attention=auto")
    assert "attention: own kernels (cuDNN is not installed (" in shown and steps == own[1]
    half = fake_cudnn(tmp_path / "half", "-DFAKE_CUDNN_INCOMPLETE")
    said = refuse(data, tmp_path / "half run", half, "--attention=cudnn")
    assert "libcudnn.so.9 has no cudnnGetLastErrorString\n" in said


@pytest.mark.parametrize("way, more", (("auto", 2.282), ("cudnn", 2.282), ("own", 0)))
def test_the_memory_plan_counts_what_cudnn_works_in(data, tmp_path, way, more):
    """The plan includes cuDNN's workspace. With 32 heads and 8 sequences of 2048, it has 2 bytes for each
    logit, and the gradients of keys and values for all heads."""
    def total(way):
        done = succeed("--model=1.1B", "--batch=8", "--seq=2048", "--device=cuda", "--dtype=bf16", "--dry-run",
                       f"--attention={way}", program=EMULATED)
        assert ("GB of it cuDNN's" in done.stdout) == (way != "own")
        return float(re.search(r"working memory +([\d.]+) GB", done.stdout)[1])
    assert total(way) == pytest.approx(total("own") + more, abs=2e-3)


def test_ranks_agree(data, own, cudnn, fake, tmp_path):
    steps, shown = train(data, tmp_path / "two", fake, "--attention=auto", ranks=2)
    assert shown.count("attention:") == 1 and steps == cudnn[1]
    for kind, why in (("random", REASONS["random"]), ("newer", "cuDNN is 9.20.0, expected 9.19.0")):
        only = {"kind": kind, "FAKE_CUDNN_RANK": "1"}
        steps, shown = train(data, tmp_path / kind, fake, "--attention=auto", ranks=2, **only)
        assert "attention: own kernels (rank 1 on " in shown and f": {why})\n" in shown
        assert steps == own[1]
        said = refuse(data, tmp_path / f"{kind} refused", fake, "--attention=cudnn", ranks=2, **only)
        assert said.count("--attention cudnn: rank 1 on ") == 1 and why in said


def resume(data, of, tmp_path, place, *more, **how):
    out = tmp_path / "resumed"
    steps, shown = train(data, out, place, f"--resume={of[0]}/checkpoint-00000002", *more, **how)
    return steps, shown, version(out / "checkpoint-00000004")


@pytest.mark.parametrize("ranks", (0, 2))
def test_a_resumed_run_keeps_the_choice(data, cudnn, fake, tmp_path, ranks):
    steps, shown, taken = resume(data, cudnn, tmp_path, fake, ranks=ranks)
    assert "bit for bit" in shown and taken == 91900 and steps == cudnn[1][2:]


def test_a_resumed_run_keeps_the_own_kernels(data, own, fake, tmp_path):
    steps, shown, taken = resume(data, own, tmp_path, fake, "--attention=auto")
    assert "bit for bit" in shown and "attention: own kernels (as before)" in shown
    assert taken == 0 and steps == own[1][2:]


def test_a_resumed_run_says_that_it_differs(data, cudnn, fake, tmp_path):
    said = "cannot be identical:\n  attention is computed by other kernels (--attention)\n"
    for place, more, how, taken in ((fake, ("--attention=own",), {}, 0), (fake, ("--attention=auto",), {"kind": "newer"}, 92000),
                                    (fake, ("--attention=auto",), {"kind": "none"}, 0)):
        folder = tmp_path / f"{taken} {how.get('kind')}"
        folder.mkdir()
        _, shown, now = resume(data, cudnn, folder, place, *more, **how)
        assert said in shown and now == taken


@pytest.mark.parametrize("more", (["--device=cpu"], ["--dtype=float32"]))
def test_cudnn_needs_a_gpu_and_bfloat16(data, fake, tmp_path, more):
    said = refuse(data, tmp_path / "run", fake, "--attention=cudnn", *more)
    assert said == ("train_llama2: --attention cudnn computes in bf16 on a GPU: expected no --device cpu and no "
                    "--dtype float32\n")
    _, shown = train(data, tmp_path / "auto", fake, "--attention=auto", *more)
    assert "\nattention:" not in shown


def test_a_run_that_falls_back_to_the_cpu(data, fake, tmp_path):
    said = refuse(data, tmp_path / "run", fake, "--device=auto", "--attention=cudnn", device="none")
    assert "--attention cudnn computes in bf16 on a GPU, and this run is on: " in said

"""Tests training on a device whose memory the host cannot access: the CUDA backend's own sources on the
emulated device (build/emulated/train_llama2), compared with the CPU. Also tests the messages if there is no
GPU. Sizes are small, because every CUDA thread is a fiber."""
import pytest

from program import BUILD, PROGRAM, TIMEOUT, events, markov_files, run, small_model, start, succeed

pytestmark = [pytest.mark.spread, pytest.mark.takes(40)]

EMULATED = BUILD / "emulated" / "train_llama2"
VOCABULARY = 128


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 5_000, 300)
    small_model(folder / "model", VOCABULARY, layers=2)
    return folder


def train(data, out, *more, program=EMULATED, environment=None):
    """Trains two steps of three workers. Returns the log's steps, its evaluation, and the terminal's
    output."""
    done = succeed(f"--model={data}/model", f"--train={data}/train.bin", f"--val={data}/val.bin",
                   "--workers=3", "--batch=1", "--seq=16", "--steps=2", "--lr=3e-3", "--seed=5",
                   "--packet-bytes=512", "--eval-sequences=3", f"--out={out}", *more,
                   program=program, environment=environment)
    return (events(out / "log.jsonl", "step"), events(out / "log.jsonl", "eval")[0], done.stdout)


def same(one, other, tolerance, *fields):
    for field in fields:
        assert abs(one[field] - other[field]) <= tolerance * abs(other[field]), \
            f"{field}: {one[field]}, expected {other[field]}"


@pytest.mark.parametrize("algorithm, wire", [
    ("lossy", "float32"), ("rps", "float32"), ("naive", "float32"), ("lossy", "bf16"), ("lossy", "int8"), ("lossy", "int6")])
def test_float32_trains_as_the_cpu(data, tmp_path, algorithm, wire):
    options = ["--algorithm", algorithm, "--loss-rate=0.3", "--micro-batches=2", "--seq=32",
               f"--wire-dtype={wire}", "--carry=0", "--steps=3"]
    steps, evaluation, shown = train(data, tmp_path / "device", "--device=cuda",
                                     "--dtype=float32", *options)
    expected, expected_evaluation, _ = train(data, tmp_path / "cpu", "--device=cpu", *options)
    assert "emulated, float32" in shown
    # A sum of other order may round an element to the other neighbour in bfloat16.
    tolerance = 1e-4 if wire == "bf16" else 1e-5
    for one, other in zip(steps, expected, strict=True):
        same(one, other, tolerance, "loss", "grad_norm", "drift")
        same(one, other, 0, "gradient_loss_rate", "parameter_loss_rate", "mean_age")
    same(evaluation, expected_evaluation, tolerance, "val_loss", "replica_val_loss")


def test_bf16_trains_nearly_as_the_cpu(data, tmp_path):
    """Weights and activations are rounded, but master weights, gradients and moments are float32. So the
    drift of float32 replicas is nearly the same as on the CPU."""
    steps, evaluation, shown = train(data, tmp_path / "device", "--device=cuda",
                                     "--loss-rate=0.3", "--carry=0")
    expected, expected_evaluation, _ = train(data, tmp_path / "cpu", "--device=cpu",
                                             "--loss-rate=0.3", "--carry=0")
    assert "bf16 with float32 sums and master weights" in shown
    for one, other in zip(steps, expected, strict=True):
        same(one, other, 1e-3, "loss")
        same(one, other, 0.02, "grad_norm")
        same(one, other, 0.04, "drift")
    same(evaluation, expected_evaluation, 1e-3, "val_loss")
    # The checkpoint has the master weights. The CPU reads them and finds the same loss.
    (model,) = (tmp_path / "device").glob("checkpoint-*")
    evaluated = tmp_path / "eval.jsonl"
    succeed("--eval", f"--model={model}", f"--val={data}/val.bin", "--seq=16",
            "--eval-sequences=3", "--device=cpu", f"--log={evaluated}")
    same(events(evaluated, "eval")[0], evaluation, 1e-3, "val_loss")
    # The device reads a checkpoint of the CPU.
    (model,) = (tmp_path / "cpu").glob("checkpoint-*")
    succeed("--eval", f"--model={model}", f"--val={data}/val.bin", "--seq=16",
            "--eval-sequences=3", "--device=cuda", f"--log={evaluated}", "--overwrite", program=EMULATED)
    same(events(evaluated, "eval")[0], expected_evaluation, 1e-3, "val_loss")


@pytest.mark.parametrize("level", ["norms", "attention", "block"])
def test_recomputing_changes_nothing(data, tmp_path, level):
    kept = train(data, tmp_path / "kept", "--device=cuda", "--recompute=none")
    again = train(data, tmp_path / "again", "--device=cuda", f"--recompute={level}")
    for one, other in zip(kept[0], again[0], strict=True):
        same(one, other, 0, "loss", "grad_norm", "drift")


def needed(data, recompute, batch):
    """The bytes that a run of one worker needs, read from its error on a device with nearly no memory."""
    done = run("--model=260K", f"--train={data}/train.bin", "--device=cuda", f"--batch={batch}",
               f"--recompute={recompute}", "--steps=1", "--seq=64", program=EMULATED,
               environment={"EMULATED_MEMORY": "1000"})
    assert done.returncode == 1
    words = done.stderr.split()
    assert "GPU has 0.000 GB free" in done.stderr
    return float(words[words.index("needs") + 1]) * 1e9


def test_memory_decides_what_is_computed_again(data):
    """--recompute auto recomputes as little as the memory allows."""
    none, block = needed(data, "none", 8), needed(data, "block", 8)
    assert block < none
    command = ["--model=260K", f"--train={data}/train.bin", "--batch=8", "--seq=64", "--steps=1"]
    done = run(*command, "--dry-run", "--device=cuda", f"--vocab-size={VOCABULARY}",
               program=EMULATED)
    assert f"{block / 1e9:.3f} GB with --recompute block" in done.stdout
    done = succeed(*command, "--device=cuda", program=EMULATED,
                   environment={"EMULATED_MEMORY": str(int((block + none) / 2))})
    assert "to save memory: --recompute " in done.stdout
    done = run(*command, "--device=cuda", program=EMULATED,
               environment={"EMULATED_MEMORY": str(int(block - 3e6))})
    assert done.returncode == 1 and "with --recompute block, and the GPU has" in done.stderr


def test_small_packets_take_memory(data):
    """Workers of one GPU have a list of packets there, of 24 bytes each, and 4 bytes for each sender."""
    def planned(size):
        shown = succeed("--model=260K", f"--train={data}/train.bin", "--workers=64", "--wire-dtype=float32", "--dry-run",
                        "--device=cuda", f"--packet-bytes={size}", "--vocab-size=512", program=EMULATED).stdout
        return 1e9 * float(shown.split(" GB  8 workers at a time")[0].split()[-1])

    packets = 260_000 / 16
    assert planned(64) - planned(4096) == pytest.approx(packets * (24 + 4 * 64), abs=1e6)


def test_too_little_memory_falls_back_to_the_cpu(data, tmp_path):
    _, _, shown = train(data, tmp_path, environment={"EMULATED_MEMORY": "100000000"})
    assert "computing on the CPU: this run needs 0." in shown.splitlines()[0]


def test_heads_that_are_too_large(data, tmp_path):
    """A GPU's attention takes heads of 256 elements. (It computes other odd ones: test_cuda_attention.c.)"""
    small_model(tmp_path / "model", VOCABULARY, layers=1, shape=(258, 16, 1, 1))
    command = [f"--model={tmp_path}/model", f"--train={data}/train.bin", "--steps=1", "--seq=16", "--batch=1"]
    why = "heads have 258 elements, expected at most 256 on a GPU"
    done = run(*command, "--device=cuda", program=EMULATED)
    assert done.returncode == 1 and done.stderr == f"train_llama2: --device cuda: {why}\n"
    assert f"computing on the CPU: {why}\n" in succeed(*command, program=EMULATED).stdout


@pytest.mark.parametrize("program, environment", [
    (EMULATED, {"EMULATED_DEVICE": "none"}), (PROGRAM, {})], ids=["emulated", "as_built"])
def test_no_gpu(data, tmp_path, program, environment):
    command = ["--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=16", "--batch=1"]
    done = run(*command, "--device=cuda", program=program, environment=environment)
    without = "no CUDA backend" in done.stderr # built without
    assert done.returncode == (2 if without else 1)
    assert len(done.stderr.splitlines()) == 1 and "--device cuda: " in done.stderr
    done = succeed(*command, program=program, environment=environment)
    note = "computing on the CPU: "
    assert done.stdout.count(note) == (0 if without else 1)
    done = succeed(*command, "--dtype=bf16", program=program, environment=environment)
    assert done.stdout.count(note) == (0 if without else 1) and "bf16 products by" in done.stdout


def of_rank(rank, setting):
    """The words to put before each rank's program to change the environment of one rank."""
    return ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" != {rank} ] || export {setting}; exec "$@"', "sh"]


def start_ranks(data, *more, ranks=2, shell=(), environment=None):
    process = start("--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=16", "--batch=1", *more,
                    program=EMULATED, ranks=ranks, shell=shell, environment=environment)
    out, err = process.communicate(timeout=TIMEOUT)
    return process.returncode, out, err


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_without_a_gpu_is_named(data, device, rank):
    """The error names the rank, and no rank trains on its CPU while others use GPUs."""
    status, _, err = start_ranks(data, f"--device={device}", ranks=3,
                                 shell=of_rank(rank, "EMULATED_DEVICE=none"))
    (line,) = [line for line in err.splitlines() if line.startswith("train_llama2: ")]
    assert status == 1 and "no NVIDIA driver on this machine" in line
    if device == "cuda":
        assert f"--device cuda: rank {rank} on " in line
    else:
        assert f"rank {0 if rank else 1} on " in line and "has a GPU for this run" in line
        assert f"; rank {rank} on " in line and "or --device cpu" in line


def test_devices_that_differ_are_refused(data):
    status, _, err = start_ranks(data, shell=of_rank(1, "EMULATED_DEVICE=newer"))
    (line,) = [line for line in err.splitlines() if line.startswith("train_llama2: ")]
    assert status == 1 and "rank 1 on " in line and "computes on newer, bf16" in line
    assert "on emulated, bf16" in line and "plain loops: expected the same on all ranks" in line


def test_a_fault_is_not_lack_of_memory(data):
    status, _, err = start_ranks(data, "--device=cuda", environment={"EMULATED_FAULT": "1"})
    assert status == 1 and "out of memory" not in err
    assert "CUDA: cudaHostAlloc (streams.cu:" in err and "an illegal memory access was encountered" in err


def test_ranks_that_share_a_gpu_share_its_memory(data):
    """Ranks that share a GPU are refused if its memory is too small for all of them, although it is large
    enough for each."""
    enough = needed(data, "none", 1) * 1.5
    shared = {"EMULATED_MEMORY": str(int(enough)), "EMULATED_DEVICES": "1"}
    more = ["--batch=1", "--seq=64", "--recompute=none"]
    status, _, err = start_ranks(data, "--device=cuda", *more, environment=shared)
    assert status == 1 and err.count("train_llama2: ") == 1
    assert "free for each of the 2 ranks on it: a smaller --batch" in err
    status, out, _ = start_ranks(data, *more, environment=shared)
    assert status == 0 and "computing on the CPU: this run needs" in out
    status, out, _ = start_ranks(data, "--device=cuda", *more,
                                 environment={**shared, "EMULATED_DEVICES": "2"})
    assert status == 0 and "2 processes, emulated" in out


@pytest.mark.parametrize("algorithm, link, wire", [
    ("lossy", "mpi", "float32"), ("lossy", "udp", "float32"), ("lossy", "udp", "bf16"),
    ("rps", "mpi", "float32"), ("naive", "mpi", "float32"), ("reliable", "mpi", "float32"),
    ("reliable", "mpi", "bf16"), ("lossy", "udp", "int8"), ("lossy", "mpi", "int8"), ("lossy", "udp", "int4"),
    ("reliable", "mpi", "int4")])
def test_ranks_exchange_through_the_host(data, tmp_path, algorithm, link, wire):
    """Three ranks with a GPU each, whose vectors the network reads in the host's memory, give the same
    numbers as three workers of one rank, which exchange on the device. (Emulated streams run their
    work as late as they may.)"""
    options = ["--device=cuda", "--dtype=float32", "--algorithm", algorithm, "--loss-rate=0.3",
               f"--wire-dtype={wire}"]
    one = train(data, tmp_path / "one", *options)
    done = succeed(f"--model={data}/model", f"--train={data}/train.bin", f"--val={data}/val.bin",
                   "--workers=3", "--batch=1", "--seq=16", "--steps=2", "--lr=3e-3", "--seed=5",
                   "--packet-bytes=512", "--eval-sequences=3", f"--out={tmp_path}/three", *options,
                   f"--link={link}", program=EMULATED, ranks=3)
    assert "3 workers in 3 processes, emulated" in done.stdout
    log = tmp_path / "three" / "log.jsonl"
    for step, other in zip(events(log, "step"), one[0], strict=True):
        same(step, other, 1e-6, "loss", "grad_norm", "drift")
        same(step, other, 0, "gradient_loss_rate", "parameter_loss_rate", "mean_age")
    same(events(log, "eval")[0], one[1], 1e-6, "val_loss", "replica_val_loss")


@pytest.mark.parametrize("device, status", [("cuda", 2), ("auto", 1)])
def test_a_gpu_keeps_no_lost_gradients(data, device, status):
    done = run(f"--model={data}/model", f"--train={data}/train.bin", "--workers=2", "--steps=1", f"--device={device}",
               "--carry=1", program=EMULATED)
    assert done.returncode == status and "--carry: expected --device cpu" in done.stderr


@pytest.mark.parametrize("options", [[], ["--wire-dtype=int8"], ["--wire-dtype=bf16"], ["--wire-dtype=int4", "--repair=1"]],
                         ids=lambda value: "_".join(value).replace("--", "") or "plain")
def test_groups_of_devices(data, tmp_path, options):
    """Four workers in groups of two give the same bits in one process; in two processes with a GPU and a
    whole group each; and in four, whose GPUs access the group's vectors in memory that processes share."""
    logs = []
    for ranks in [0, 2, 4]:
        log = tmp_path / f"{ranks}.jsonl"
        done = succeed(f"--model={data}/model", f"--train={data}/train.bin", f"--val={data}/val.bin",
                       "--workers=4", "--group=2", "--batch=1", "--seq=16", "--steps=3", "--lr=3e-3",
                       "--seed=5", "--packet-bytes=512", "--eval-sequences=4", "--loss-rate=0.3",
                       "--device=cuda", "--dtype=float32", f"--log={log}", *options,
                       *(["--link=udp"] if ranks else []), program=EMULATED, ranks=ranks)
        logs.append(events(log, "step") + events(log, "eval"))
        assert "groups of 2" in done.stdout
    assert len(logs[0]) == 3 + 1
    for log in logs[1:]:
        for one, other in zip(log, logs[0], strict=True):
            fields = {"loss", "grad_norm", "drift", "mean_age", "val_loss", "replica_val_loss"}
            same(one, other, 1e-6, *(fields & one.keys()))


@pytest.mark.parametrize("dtype, modes, wire", [("float32", ["late", "others", "soon"], "float32"),
                                                ("bf16", ["others"], "float32"), ("float32", ["soon"], "int8")])
def test_overlap_changes_nothing(data, tmp_path, dtype, modes, wire):
    """Buckets are sent during backward and received during forward, whichever of the device's streams is
    ahead. The bits are the same as without overlap. There are two workers in each rank, and two
    micro-batches, of which only the last one's gradients are sent. An evaluation in between needs all
    parameters at once."""
    logs = []
    for mode in [None, *modes]:
        log = tmp_path / f"{mode}.jsonl"
        succeed(f"--model={data}/model", f"--train={data}/train.bin", f"--val={data}/val.bin", "--workers=4",
                "--batch=1", "--seq=16", "--steps=3", "--lr=3e-3", "--seed=5", "--micro-batches=2",
                "--packet-bytes=512", "--eval-sequences=4", "--eval-every=2", "--link=udp",
                "--loss-rate=0.3", "--device=cuda", f"--dtype={dtype}", f"--log={log}", f"--wire-dtype={wire}",
                *([] if mode else ["--no-overlap"]), program=EMULATED, ranks=2,
                environment={"EMULATED_STREAMS": mode or "late"})
        logs.append(events(log, "step") + events(log, "eval"))
    assert len(logs[0]) == 3 + 2
    for log in logs[1:]:
        for one, other in zip(log, logs[0], strict=True):
            fields = {"loss", "grad_norm", "drift", "mean_age", "val_loss", "replica_val_loss"}
            same(one, other, 0, *(fields & one.keys()))


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("algorithm, wire", [("lossy", "float32"), ("lossy", "bf16"), ("lossy", "int4"),
                                             ("naive", "float32")])
def test_resumes_to_the_last_bit(data, tmp_path, algorithm, wire, ranks):
    """Moments and stale packets are read from the device for a checkpoint. A resumed run
    copies them back to it and, with several ranks, to the memory that the network reads."""
    def steps(out, count, *more):
        succeed(f"--model={data}/model", f"--train={data}/train.bin", "--device=cuda", "--workers=3",
                "--batch=1", "--seq=16", f"--steps={count}", "--lr=3e-3", "--lr-final=1",
                "--warmup=0", "--packet-bytes=512", f"--algorithm={algorithm}",
                "--loss-rate=0.3", f"--wire-dtype={wire}", f"--out={out}", *more, program=EMULATED,
                ranks=ranks)
        return {event["step"]: event for event in events(out / "log.jsonl", "step")}

    whole = steps(tmp_path / "whole", 3)
    steps(tmp_path / "parts", 1)
    parts = steps(tmp_path / "parts", 3, "--resume=auto")
    for step in (1, 2):
        same(parts[step], whole[step], 0, "loss", "grad_norm", "drift", "mean_age")


def test_weights_that_adamw_writes_are_those_that_are_converted(data, tmp_path):
    """If there is only one worker, AdamW itself writes the bfloat16 weights. After --resume they are
    converted once, and must be the same."""
    def losses(out, count, *more):
        succeed(f"--model={data}/model", f"--train={data}/train.bin", f"--val={data}/val.bin", "--device=cuda",
                "--batch=1", "--seq=16", f"--steps={count}", "--lr=3e-3", "--lr-final=1", "--warmup=0",
                "--eval-every=2", "--eval-sequences=2", f"--out={out}", *more, program=EMULATED)
        return {event["step"]: (event["loss"], event["grad_norm"])
                for event in events(out / "log.jsonl", "step")}

    whole = losses(tmp_path / "whole", 4)
    losses(tmp_path / "parts", 3)
    assert losses(tmp_path / "parts", 4, "--resume=auto")[3] == whole[3]

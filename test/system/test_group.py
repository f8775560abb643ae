"""Tests --group: workers that share a replica. Bits do not depend on the processes that workers are in; runs
can resume; wrong options are refused."""
import sys

import pytest

from program import PROGRAM, ROOT, events, markov_files, run, succeed, usual_isa

sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.takes(95)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), 64, 20_000, 1_000)


def options(data, *more):
    return ["--model=260K", f"--train={data}/train.bin", f"--val={data}/val.bin", "--workers=4",
            "--batch=1", "--seq=32", "--lr=3e-3", "--warmup=2", "--seed=5", "--packet-bytes=512",
            "--loss-rate=0.2", "--drift-samples=256", *more]


def numbers(out):
    """All numbers that a run computes: of steps, of evaluations, and its models."""
    timing = {"tokens_per_second", "step_ms", "communication_ms", "network", "pace_kbps"}
    log = out / "log.jsonl"
    steps = [{name: value for name, value in event.items() if name not in timing}
             for kind in ("step", "eval") for event in events(log, kind)]
    files = sorted(out.glob("checkpoint*/model.safetensors"))
    return steps, [file.read_bytes() for file in files]


@pytest.mark.parametrize("more", [[], ["--carry=1", "--wire-dtype=int8"],
                                  ["--estimator=zero", "--loss-model=burst:5", "--lead=off"],
                                  ["--repair=1", "--repair-budget=0.1", "--dtype=bf16",
                                   "--wire-dtype=bf16"], ["--algorithm=reliable", "--loss-rate=0"], ["--pace-gbps=0.02"]],
                         ids=["plain", "carry", "burst", "repair", "reliable", "slow"])
def test_same_bits_wherever_members_live(data, tmp_path, more):
    """Two groups of two give the same bits in one process, in two with a whole group each, and in four with
    a member each, whose groups share memory. If packets are slow, forward waits for the packets of every
    member."""
    found = []
    for ranks in [0, 2, 4]:
        out = tmp_path / str(ranks)
        succeed(*options(data, "--group=2", "--steps=6", "--eval-every=3", "--save-every=3",
                         "--keep=0", f"--out={out}", *more), ranks=ranks)
        found.append(numbers(out))
    steps, models = found[0]
    assert len(steps) == 6 + 2 and len(models) == 2
    assert found[1] == found[0] and found[2] == found[0]


def test_members_who_wait_still_send(data, tmp_path):
    """A member that waits for another at their barrier must still call MPI, or all ranks would hang: MPI
    moves messages above the eager limit only inside the sender's calls, and here all are above it."""
    moved = {"OMPI_MCA_btl_vader_eager_limit": "128"}
    succeed(*options(data, "--group=2", "--steps=6", "--save-every=3", f"--out={tmp_path}/out"),
            ranks=4, environment=moved)
    assert len(events(tmp_path / "out" / "log.jsonl", "step")) == 6


def test_one_group_shares_everything(data, tmp_path):
    """--group host: all processes of this host share one replica, and nothing is sent."""
    out, apart = tmp_path / "host", tmp_path / "apart"
    done = succeed(*options(data, "--group=host", "--steps=4", f"--out={out}"), ranks=4)
    assert "groups of 4 workers share a replica" in done.stdout
    for step in events(out / "log.jsonl", "step"):
        assert step["gradient_loss_rate"] == 0 and step["parameter_loss_rate"] == 0
    succeed(*options(data, "--group=4", "--steps=4", f"--out={apart}"))
    assert numbers(out)[0] == numbers(apart)[0]


@pytest.mark.parametrize("ranks", [0, 4])
def test_resumes_to_the_last_bit(data, tmp_path, ranks):
    """One process or four resume from a checkpoint of one process, bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = ["--group=2", "--carry=1", "--steps=6", "--save-every=3", "--keep=0"]
    succeed(*options(data, *more, f"--out={whole}"))
    done = succeed(*options(data, *more, f"--out={parts}", f"--resume={whole}/checkpoint-00000003"),
                   ranks=ranks)
    assert "bit for bit" in done.stdout
    assert numbers(parts)[1] == numbers(whole)[1][1:]


def test_a_checkpoint_of_other_groups(data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    succeed(*options(data, "--group=2", "--steps=2", "--save-every=2", f"--out={whole}"))
    done = succeed(*options(data, "--group=4", "--steps=3", f"--out={parts}",
                            f"--resume={whole}/checkpoint-00000002"))
    assert "every replica starts as the model" in done.stdout


@pytest.mark.parametrize("more, ranks, why", [
    (["--group=5"], 0, "--group 5: expected a number that divides the 4 workers"),
    (["--group=3"], 2, "--group 3: expected a number that divides the 4 workers"),
    (["--group=0"], 0, "--group: expected a number of workers from 1 on, or host, got '0'"),
    (["--group=some"], 0, "--group: expected a number of workers from 1 on, or host, got 'some'"),
    (["--group=2", "--algorithm=rps"], 0, "--group 2: expected --algorithm lossy or reliable, got rps"),
    (["--group=2", "--deadline=auto"], 0, "--group 2: expected no deadline"),
    (["--group=4"], 2, "--group 4: expected one worker in each rank, or whole groups, got 2 "
                       "workers in each"),
])
def test_refusals(data, more, ranks, why):
    done = run(*options(data, "--steps=1", *more), ranks=ranks)
    assert done.returncode == 2 and why in done.stderr


# ---- --group host, on several hosts ----

@pytest.fixture(scope="module")
def namespaces():
    if testbed.unavailable():
        pytest.skip(f"{testbed.unavailable()}; --group host was not tried on several hosts")
    with testbed.Hosts(3) as made:
        yield made


def test_each_host_is_a_group(namespaces, data, tmp_path):
    """Two hosts with two ranks each give the bits of one process with --group 2."""
    more = ["--steps=4", "--save-every=4", "--link=mpi"]
    done = namespaces.mpirun(PROGRAM, *options(data, *more, "--group=host", f"--out={tmp_path}/hosts"), ranks=2,
                             each=2, environment=usual_isa())
    assert done.returncode == 0, done.stderr
    assert "groups of 2 workers share a replica" in done.stdout
    succeed(*options(data, *more, "--group=2", f"--out={tmp_path}/one"))
    assert numbers(tmp_path / "hosts") == numbers(tmp_path / "one")


@pytest.mark.parametrize("each, why", [
    ([2, 2, 1], "--group host: expected as many ranks on each host, got 2 on this one of 5"),
    ([1, 3, 2], "--group host: expected as many ranks on each host, which follow one another (mpirun --map-by "
                "slot), got 1 on the host of rank 0, and rank 1 is number 0 of 3 on its host")])
def test_hosts_have_as_many_ranks(namespaces, data, each, why):
    done = namespaces.mpirun(PROGRAM, *options(data, "--steps=1", "--group=host", f"--workers={sum(each)}"), each=each)
    assert done.returncode == 2 and why in done.stderr, done.stderr


def test_hosts_have_a_worker_in_each_rank(namespaces, data):
    done = namespaces.mpirun(PROGRAM, *options(data, "--steps=1", "--group=host", "--workers=6"), ranks=2, each=[1, 2])
    assert done.returncode == 2
    assert ("--group host: expected one worker in each process, or one process on each host, got 2 workers in each "
            "of 2 processes of a host") in done.stderr


def test_ranks_of_a_host_follow_one_another(namespaces, data):
    done = namespaces.mpirun(PROGRAM, *options(data, "--steps=1", "--group=host"), ranks=2, each=2,
                             flags=["--map-by", "node"])
    assert done.returncode == 2
    assert "got 2 on the host of rank 0, and rank 1 is number 0 of 2 on its host" in done.stderr

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


@pytest.mark.parametrize("workers, group", [(6, 4), (3, 2)], ids=["4+2", "2+1"])
@pytest.mark.parametrize("more", [["--loss-rate=0"], ["--carry=1", "--wire-dtype=int8"],
                                  ["--estimator=zero", "--loss-model=burst:5", "--lead=off"],
                                  ["--repair=1", "--repair-budget=0.1", "--dtype=bf16",
                                   "--wire-dtype=bf16"], ["--link=udp", "--pace-gbps=0.02"]],
                         ids=["reliable", "carry", "burst", "repair", "slow"])
def test_a_shorter_last_group(data, tmp_path, workers, group, more):
    """Groups of four and two workers, or of two and one, give the same bits in one process and in one
    process per worker."""
    found = []
    for ranks in [0, workers]:
        out = tmp_path / str(ranks)
        done = succeed(*options(data, f"--group={group}", "--steps=6", "--eval-every=3",
                                "--save-every=3", "--keep=0", f"--out={out}", "--link=mpi", *more,
                                f"--workers={workers}"), ranks=ranks)
        assert f"groups of {group} workers, the last of" in done.stdout
        found.append(numbers(out))
    assert len(found[0][0]) == 6 + 2 and len(found[0][1]) == 2
    assert found[1] == found[0]


def test_unequal_groups_weigh_by_size(data, tmp_path):
    """Without loss the average counts every worker once, so it equals that without groups, up to rounding."""
    found = []
    for group in [1, 4]:
        out = tmp_path / str(group)
        succeed(*options(data, f"--group={group}", "--steps=6", f"--out={out}", "--workers=6",
                         "--loss-rate=0", "--wire-dtype=float32"))
        found.append([(step["loss"], step["grad_norm"]) for step in events(out / "log.jsonl", "step")])
    for alone, grouped in zip(*found):
        assert grouped == pytest.approx(alone, rel=2e-5)


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


@pytest.mark.parametrize("group", [2, 3])
@pytest.mark.parametrize("ranks", [0, 4])
def test_resumes_to_the_last_bit(data, tmp_path, ranks, group):
    """One process or four resume from a checkpoint of one process, bit for bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    more = [f"--group={group}", "--carry=1", "--steps=6", "--save-every=3", "--keep=0"]
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
    (["--group=5"], 0, "--group 5: expected at most the 4 workers"),
    (["--group=3"], 2, "--group 3: expected one worker in each rank, or whole groups, got 2 "
                       "workers in each"),
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


# ---- --group host, on hosts with different numbers of ranks ----

@pytest.fixture(scope="module")
def namespaces():
    if testbed.unavailable():
        pytest.skip(f"{testbed.unavailable()}; --group host was not tried on several hosts")
    with testbed.Hosts(3) as made:
        yield made


def on_hosts(hosts, each, arguments):
    done = hosts.mpirun(PROGRAM, *arguments, each=each, environment=usual_isa())
    assert done.returncode == 0, done.stderr
    return done


def test_the_last_host_has_fewer_ranks(namespaces, data, tmp_path):
    """Hosts with two, two and one ranks give the bits of one process with --group 2."""
    more = ["--workers=5", "--steps=4", "--save-every=4", "--link=mpi"]
    done = on_hosts(namespaces, [2, 2, 1], options(data, *more, "--group=host", f"--out={tmp_path}/hosts"))
    assert "groups of 2 workers, the last of 1, share a replica" in done.stdout
    succeed(*options(data, *more, "--group=2", f"--out={tmp_path}/one"))
    assert numbers(tmp_path / "hosts") == numbers(tmp_path / "one")


def test_hosts_of_any_number_of_ranks(namespaces, data, tmp_path):
    """Hosts have one, three and two ranks. Without loss the average is over six workers, as without groups.
    With loss, a resumed run gives the same bits as a run that was not stopped."""
    more = ["--workers=6", "--link=mpi"]
    lossless = ["--steps=4", "--loss-rate=0", "--wire-dtype=float32"]
    done = on_hosts(namespaces, [1, 3, 2], options(data, *more, *lossless, "--group=host", f"--out={tmp_path}/hosts"))
    assert "groups of 3 workers or fewer, as a host has, share a replica" in done.stdout
    succeed(*options(data, *more, *lossless, f"--out={tmp_path}/one"))
    for log in zip(*(events(tmp_path / name / "log.jsonl", "step") for name in ("hosts", "one"))):
        assert log[0]["loss"] == pytest.approx(log[1]["loss"], rel=2e-5)
    lossy = [*more, "--group=host", "--steps=4", "--save-every=2", "--keep=0", "--carry=1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    on_hosts(namespaces, [1, 3, 2], options(data, *lossy, f"--out={whole}"))
    done = on_hosts(namespaces, [1, 3, 2], options(data, *lossy, f"--out={parts}",
                                              f"--resume={whole}/checkpoint-00000002"))
    assert "bit for bit" in done.stdout
    assert numbers(parts)[1] == numbers(whole)[1][1:]


def test_hosts_of_any_number_of_ranks_have_a_worker_in_each(namespaces, data):
    done = namespaces.mpirun(PROGRAM, *options(data, "--steps=1", "--group=host", "--workers=6"), ranks=2, each=[1, 2])
    assert done.returncode == 2
    assert ("--group host: expected one worker in each process, or one process on each host, got 2 workers in each "
            "of 2 processes of a host") in done.stderr


def test_ranks_of_a_host_follow_one_another(namespaces, data):
    done = namespaces.mpirun(PROGRAM, *options(data, "--steps=1", "--group=host", "--workers=3"), ranks=2,
                             each=[2, 1], flags=["--map-by", "node"])
    assert done.returncode == 2
    assert "--group host: expected the ranks of a host to follow one another" in done.stderr

"""Tests how the ranks of a run end: together, even if all end with an error. MPI_Abort makes mpirun print a
page and sometimes crash, so it is used only if a rank does not come to this end."""
import time

import pytest

from program import PROGRAM, run, write_tokens


@pytest.mark.parametrize("link", ["mpi", "udp"])
def test_ranks_that_all_fail_meet(tmp_path, link):
    done = run("--model", "260K", "--train", tmp_path / "none.bin", "--link", link, ranks=3)
    assert done.returncode == 1, done.stderr
    assert "MPI_ABORT" not in done.stderr
    for rank in range(3):
        assert f"train_llama2: rank {rank}: no file matches" in done.stderr


def test_an_option_that_is_wrong(tmp_path):
    done = run("--model", "260K", "--train", tmp_path / "none.bin", "--batch", 0, ranks=2)
    assert done.returncode == 2 and "MPI_ABORT" not in done.stderr, done.stderr


def test_a_rank_that_does_not_come_is_ended(tmp_path):
    """Rank 1 finds no data. Rank 0 waits for it in the network, and would do so for ever."""
    write_tokens(tmp_path / "train.bin", [1] * 1000, 512)
    line = ["--model=260K", "--vocab-size=512", "--seq=64", "--link=mpi"]
    before = time.monotonic()
    done = run(*line, f"--train={tmp_path}/train.bin", ":", "-np", 1, PROGRAM, *line,
               f"--train={tmp_path}/none.bin", ranks=1, environment={"OMP_NUM_THREADS": "1"})
    seconds = time.monotonic() - before
    assert done.returncode == 1, done.stderr
    assert "rank 1: no file matches" in done.stderr  # lines that mpirun adds are sometimes garbled
    assert seconds >= 3  # rank 1 waited for a while before it called MPI_Abort

"""Tests how the ranks of a run end: together, even if all end with an error. MPI_Abort makes mpirun print a
page and sometimes crash, so it is used only if a rank does not come to this end."""
import time

import pytest

from program import PROGRAM, run, run_apart, write_tokens


@pytest.mark.parametrize("link", ["mpi", "udp"])
def test_ranks_that_all_fail_meet(tmp_path, link):
    done = run("--model", "260K", "--train", tmp_path / "none.bin", "--link", link, ranks=3)
    assert done.returncode == 1, done.stderr
    assert "MPI_ABORT" not in done.stderr
    assert done.stderr.count("no file matches") == 1, done.stderr  # all make the same mistake


def test_an_option_that_is_wrong(tmp_path):
    done = run("--model", "260K", "--train", tmp_path / "none.bin", "--batch", 0, ranks=2)
    assert done.returncode == 2 and "MPI_ABORT" not in done.stderr, done.stderr


def test_a_rank_that_does_not_come_is_ended(tmp_path):
    """Rank 0 cannot write its log. Rank 1 waits for it in the network, and would do so for ever."""
    write_tokens(tmp_path / "train.bin", [1] * 1000, 512)
    line = ["--model=260K", "--vocab-size=512", "--seq=64", "--link=mpi", f"--train={tmp_path}/train.bin"]
    before = time.monotonic()
    line = [PROGRAM, *line]
    done = run_apart([*line, f"--log={tmp_path}/none/log"], line)
    seconds = time.monotonic() - before
    assert done.returncode == 1, done.stderr
    assert "cannot write the log" in done.stderr  # lines that mpirun adds are sometimes garbled
    assert seconds >= 3  # rank 0 waited for a while before it called MPI_Abort

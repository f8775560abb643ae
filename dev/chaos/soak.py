#!/usr/bin/env python3
"""Trains while everything that a seed chooses goes wrong, and checks what must hold.

    dev/chaos/soak.py [--seconds 60] [--seed 1] [--ranks 4] [--hosts | --mpirun] [-- OPTION...]

Processes of build/train_llama2 train together; OPTION... are more options of it. Every moment one of
FAULTS happens (members.py, launched.py). Each is one line: the second, what, and to whom. Processes
meet through etcd (--meet); with --hosts (as root) each of them is on a host of its own (dev/testbed),
and the network between them is disturbed, too; with --mpirun they are started by mpirun. Faults that
this machine cannot make are named at the start.

What must hold, else the exit status is 1:

    every step is logged once and in order        no process ends by itself
    the run stands still for at most --stand-still seconds, in 99% of the faults during which it may go on and
        without the time in which a process waited for a processor (standstill.py)
    the step of the newest checkpoint never falls; the last one is whole, and its perplexity can be measured
    a run that was ended continues from its newest checkpoint (--mpirun)
    memory is flat: with the same number of ranks, no process has grown by more than a fifth
    at the end one signal ends all with a checkpoint; with --amid, all processes end that must, soon

The seed decides what is done and when. The machine decides at which step that is, so a run is repeated
only nearly.
"""
import argparse
import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position
from launched import Launched  # pylint: disable=wrong-import-position
from members import Members  # pylint: disable=wrong-import-position


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spare", type=int, default=2, help="processes that may join beside these")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", action="store_true", help="each process on a host of its own; needs root")
    where.add_argument("--mpirun", action="store_true", help="started by mpirun, without --meet")
    parser.add_argument("--amid", action="store_true", help="asked to end while faults last; only checks that it does")
    parser.add_argument("--stand-still", type=float, default=2.5, metavar="SECONDS")
    parser.add_argument("--address-space", type=int, default=0, metavar="BYTES", help="of each process; 0: no limit")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build" / "train_llama2")
    parser.add_argument("options", nargs="*", help="more options of the program, after --")
    return parser.parse_args()


def main():
    given = parse()
    if given.amid and given.mpirun:
        sys.exit("--amid: expected processes that meet, without --mpirun")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    made = testbed.Hosts(given.ranks + given.spare + 1) if given.hosts else None
    soak = None
    try:
        if made:
            made.__enter__()
        soak = Launched(given, folder) if given.mpirun else Members(given, folder, made)
        status = soak.disturb()
    finally:
        if soak:
            soak.close()
        if made:
            made.__exit__()
    if status:
        print(f"the log and what the processes said: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

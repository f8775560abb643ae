#!/usr/bin/env python3
"""vectors.py — four processes average a vector with NumPy while 10% of the packets are dropped.

    pip install ./lossynet/python
    for rank in 0 1 2 3; do RANK=$rank WORLD_SIZE=4 dev/examples/vectors.py & done; wait

It is average.c in Python. With torchrun, mpirun or Slurm the variables come from the launcher, or from
its own (RANK=$OMPI_COMM_WORLD_RANK).
"""
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
# pylint: disable=wrong-import-position
from python_packages import require

if __name__ == "__main__":
    require("numpy", "lossynet")
import numpy as np

import lossynet

ELEMENTS, STEPS = 1_000_000, 5

# Plain averages: without what training does about loss (lead, carry, repair).
with lossynet.Comm(ELEMENTS, loss_rate=0.1, wire_dtype="float32", lead="off", carry=0, repair=0) as comm:
    expected = (comm.ranks - 1) / 2  # the mean of 0, 1, 2, 3
    for step in range(STEPS):
        vector = np.full(ELEMENTS, comm.rank, np.float32)
        comm.step_begin(step)
        comm.reduce(vector)  # owners average what arrives of their quarter ...
        comm.broadcast(vector)  # ... and send it to all
        lost = comm.counters(step)["lost"]
        exact = np.mean(vector == expected)
        if comm.rank == 0:
            print(f"step {step}: {lost[0]:.1%} and {lost[1]:.1%} of the packets were lost, the mean here is "
                  f"{vector.mean():.3f}, {exact:.1%} of the elements are exactly {expected}")

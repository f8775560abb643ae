"""rules.py — what the paper and other systems do about loss, as rules of one's own.

    optimizer = lossynet.torch.ShardedOptimizer(model, torch.optim.AdamW, rule=rules.ZeroFill(), carry=0, repair=0,
                                                lead="off", loss_rate=0.2, lr=1e-3)

Mean and ZeroFill are the library's estimators mean and zero; Hadamard and Phases are scripts/sweeps/others in
Python. Each gives the same numbers as its twin in C (test/lossynet/test_rule.py).
"""
import numpy as np

import lossynet


class Mean(lossynet.Rule):
    """The paper's: the mean of what arrived, packet by packet."""

    def average(self, part, gradients, arrived, carried):
        return gradients.sum(axis=0) / part.spread(np.float32(np.maximum(arrived.sum(axis=0), 1)))


class ZeroFill(lossynet.Rule):
    """MLT's: what was lost counts as zero."""

    def average(self, part, gradients, arrived, carried):
        return gradients.sum(axis=0) / np.float32(part.workers)


def mix(x):
    """64 well-mixed bits (SplitMix64), for an array of uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


class Hadamard(Mean):
    """OptiReduce's: a lost packet becomes noise in all elements of a block, which begins or ends the part.
    Products with small matrices: fast where numpy has OpenBLAS (pip; libopenblas0)."""

    def __init__(self):
        self.matrices = [np.ones((1, 1), np.float32)]  # of 1, 2, ..., 16 rows
        for _ in range(4):
            self.matrices.append(np.kron(self.matrices[-1], np.float32([[1, 1], [1, -1]])))

    def turn(self, part, x, back):
        bits = part.count.bit_length() - 1
        n = 1 << bits
        turns = range(2 if n >= 32 * part.packet else 4)  # both blocks once, or twice if they have few packets
        key = mix(np.array([part.step], np.uint64)) ^ mix(np.array([part.elements.start], np.uint64))
        words = mix(mix(key + np.array(turns, np.uint64))[:, None] + np.arange((n + 63) // 64, dtype=np.uint64))
        signs = 1 - 2 * np.unpackbits(words.view(np.uint8), axis=1, count=n, bitorder="little").view(np.int8)
        for turn in reversed(turns) if back else turns:
            block = x[part.count - n:] if turn % 2 else x[:n]
            y = block if back else block * signs[turn]
            for done in range(0, bits, 4):  # takes the four lowest bits of the index, and makes them the highest
                matrix = self.matrices[min(4, bits - done)]
                y = matrix @ y.reshape(-1, len(matrix)).T
            np.multiply(y.ravel(), np.float32(n ** -0.5) * (signs[turn] if back else 1), out=block)

    def send(self, part, worker, values):
        self.turn(part, values, False)

    def average(self, part, gradients, arrived, carried):
        mean = super().average(part, gradients, arrived, carried)
        self.turn(part, mean, True)
        return mean


class Phases(ZeroFill):
    """DBLP's: everything arrives while the norm of the gradient changes by half or more in ten steps."""
    then, tolerates = 0.0, False

    def reliable(self, phase, step, steps, norm):
        if phase == lossynet.PARAMETER and (step + 1) % 10 == 0:
            if self.then > 0:
                self.tolerates = abs(norm - self.then) < 0.5 * self.then
            self.then = norm
        return not self.tolerates

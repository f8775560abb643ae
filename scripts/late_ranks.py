#!/usr/bin/env python3
"""Makes up a run with late ranks for --loss-model replay:FILE, which shows what --deadline costs in quality.
That needs no cluster, and nothing waits.

    scripts/late_ranks.py RECORD --steps 560 --p99 3 --deadline 0.2 --seed 1 > late
    build/train_llama2 --workers 8 --loss-model replay:late ...

RECORD is the file that --record-loss wrote for a few steps of the same training in one process, without loss.
It tells how many packets each worker sends to each other worker. Every worker is a rank. Compute times are
lognormal, drawn anew in every step, with a median of 1 and a 99th percentile of --p99. As in
lossynet/transport/exchange/deadline.c, a step ends --deadline after half of the ranks with a gradient are done. A late
rank averages the packets that came for its shards, but its own packets come too late. It continues with the
step that the others are at. It computes a gradient in that step unless it has left steps out, or the others
began the step more than --deadline ago. Every sender knows which of its packets arrived. The report on stderr
has the mean time of a step, the mean time if all ranks waited, and the numbers of gradients computed and late."""
import argparse
import math
import random
import re
import signal
import sys

TITLE = re.compile(r"# step \d+, (gradient|parameter), worker (\d+) to (\d+)")


def packets(path):
    """{(phase, sender, receiver): number of packets in a step}. The last step of a record may be cut off."""
    found, link, count = {}, None, 0
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            for line in file:
                title = TITLE.match(line)
                if title:
                    link, count = (title[1], int(title[2]), int(title[3])), 0
                    found.setdefault(link, 0)
                elif not line.startswith("#"):
                    if not link or line.strip("01\n"):
                        sys.exit(f"late_ranks.py: {path}: expected what --record-loss has written, found '{line.strip()[:40]}'")
                    count += len(line.strip())
                    found[link] = max(found[link], count)
    except OSError as error:
        sys.exit(f"late_ranks.py: {path}: {error.strerror}")
    if not found:
        sys.exit(f"late_ranks.py: {path}: expected what --record-loss has written")
    return found


class Run:
    """Ranks that begin steps together. The unit of time is the median compute time of a rank."""

    def __init__(self, workers, deadline, p99, seed):
        self.random = random.Random(seed)
        self.sigma = math.log(p99) / 2.3263478740408408
        self.deadline = deadline
        self.busy = [0.0] * workers     # when a rank has finished its earlier step
        self.missed = [False] * workers  # whether it left out the last step
        self.now = self.all_wait = 0.0
        self.computed = self.late = 0

    def step(self):
        """Simulates a step. Returns for each rank "computes", "late", "idles", or None if it leaves the step out."""
        ranks = range(len(self.busy))
        computes = [r for r in ranks if self.busy[r] <= self.now + self.deadline and not self.missed[r]]
        times = {r: math.exp(self.random.gauss(0, self.sigma)) for r in ranks}
        self.all_wait += max(times.values())
        done = {r: max(self.now, self.busy[r]) + times[r] for r in computes}
        half = sorted(done.values())[(len(done) - 1) // 2] if done else self.now
        end = min(max(done.values(), default=half), half + self.deadline)
        what = [None] * len(self.busy)
        for r in ranks:
            if r in done:
                what[r], self.busy[r] = "computes" if done[r] <= end else "late", done[r]
            elif self.busy[r] <= end:  # it arrives while the others compute
                what[r] = "idles"
            self.missed[r] = what[r] is None
        self.computed += len(done)
        self.late += what.count("late")
        self.now = end
        return what


def write_step(step, what, counts, out):
    workers = range(len(what))
    for receiver in workers:
        if what[receiver] is None:
            continue
        for (phase, sender, to), number in counts.items():
            if to != receiver:
                continue
            sent = what[sender] in ("computes", "idles")
            comes = sent if phase == "gradient" else sent and what[receiver] != "late"
            out.write(f"# step {step}, {phase}, worker {sender} to {receiver}\n{('0' if comes else '1') * number}\n")
        computes = what[receiver] in ("computes", "late")
        told = "".join("0" if what[w] is None else "1" for w in workers)
        out.write(f"# step {step}, worker {receiver} {'computes' if computes else 'idles'}, norm nan, lead nan\n"
                  f"# step {step}, worker {receiver} told {told}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("record")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--p99", type=float, default=3, help="99th percentile of compute times, in medians")
    parser.add_argument("--deadline", type=float, default=0.2, help="in medians")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.steps < 1 or not 1 <= options.p99 < math.inf or not options.deadline >= 0:
        parser.error("expected at least one step, --p99 of 1 or more, and --deadline of 0 or more")
    counts = packets(options.record)
    run = Run(1 + max(sender for _, sender, _ in counts), options.deadline, options.p99, options.seed)
    for step in range(options.steps):
        write_step(step, run.step(), counts, sys.stdout)
    print("# end")
    print(f"step {run.now / options.steps:.3f}, if all wait {run.all_wait / options.steps:.3f}; "
          f"of {options.steps * len(run.busy)} gradients {run.computed} computed, {run.late} of them late",
          file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main()

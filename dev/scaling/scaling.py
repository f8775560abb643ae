#!/usr/bin/env python3
"""Models when lossy datagrams are faster than reliable exchanges, by workers, loss rate, round trip, link.

    dev/scaling/scaling.py                                       # prints tables; scaling.png beside this file
    dev/scaling/scaling.py --at 1024 1e-4 --gbps 400 --rtt-us 20 # one point, every exchange

This is a model, not a measurement. A vector of --gb is averaged and distributed again. In every kind
of exchange each worker sends and receives about twice the vector, which takes the wire time W. In
addition to W:

lossy   each of the two phases costs PHASE (software, as measured) and, if packets are missing, GRACE.
        Three rounds of small messages must arrive (the ends of both phases and the gradient's norm),
        one from each worker to each other. They are repeated after 1, 2, 4, ... up to 20 ms, and the
        slowest of all N (N-1) counts. A lost packet costs no time but progress: --tax 0.5 says that a
        run at 10% loss needs 5% more steps for the same perplexity (--plain; README, "What loss
        costs"). The tax applies to the whole step, including computing.
rule    the same with what the program does about loss by default. It costs no steps. Where more than
        1/15 of the packets are lost, lost gradients are sent again (lossynet/algorithm/rounds.c): their
        bytes, at most a fifth of the phase, a phase, and a round of small messages in which they are
        asked for.
int8    the same with --wire-dtype int8, which costs no steps either: 33/64 of the bytes of bf16, which
        all others are taken to send, and room for a second round.
ring    2 (N-1) rounds. In each, every worker sends 1/N of the vector to the next. Worker i starts
        round k when worker i-1 has ended round k-1 (Patarasuk, Yuan 2009), so a worker that waits
        makes others wait. The rounds are drawn at random one by one. A ring of more than 1,024
        workers is modelled with 1,024.
tree    two trees, each for half of the vector up and down, pipelined, as in NCCL (Sanders, Speck,
        Traeff 2009). The exchange ends with the slowest of 4 (N-1) flows. Delays along a path are
        assumed to overlap. This and the ring's 1,024 favour the reliable exchanges.

A flow has n packets, each lost independently with probability p. The cost of a loss depends on the
transport that repeats the packet:

roce    go-back-N, as RDMA NICs do over Ethernet without priority flow control: a first loss costs a
        round trip, in which all packets that are sent are discarded. If the repeated packet is lost
        again, or the last packet of a message is lost, no later packet can reveal it, and the ACK
        time-out must pass, 4.096 us x 2^14 here (InfiniBand Architecture Specification 1, 9.7.6;
        NCCL_IB_TIMEOUT's default of 2^20, 4.3 s, is far worse). Mittal et al. 2018, "Revisiting
        network support for RDMA".
select  selective repeat, as good as possible (their IRN): packet i of n, sent k times, arrives at
        (i + (k-1) RTT / spacing), and all other packets go on meanwhile. A lost last packet costs
        320 us.
mrc     RoCE over many paths with selective acknowledgements and trimming, as its makers measured it:
        hardly slower at 0.1%, and a third of its throughput at 1% (Multipath Reliable Connection, arXiv
        2605.04333: 64 GPUs, injected loss). Between these, and beyond 1%, the time grows linearly with
        the loss rate here, and loss costs nothing else.
tcp     BBR on Linux: every loss stalls its flow by STALL, or by a round trip if that is longer. A
        lost last packet costs a probe, 2 RTT, at least 10 ms (RFC 8985, 7.2). No flow waits for the
        time-out of 200 ms. CUBIC, which halves its rate, is left out, since it is far slower. Frames
        have 1,500 bytes, which alone costs 3%.

Calibration: 16 MiB among 4 hosts at 1 Gbit/s and 200 Mbit/s (bench_network.py). PHASE comes from our
exchange without loss, STALL from the TCP ring at 10%. The first table has model and measurement
side by side. They are of an earlier protocol than the table of dev/bench/network/README.md: it had a header of
52 bytes and pauses of 1 ms, where lossynet/transport/state.h has 0.2 ms (GRACE_MIN) and 0.3 ms
(RTO_MIN, then 1.5 times as long each time, and longer if more than four peers do not answer, which is
not modelled).
"""
import argparse
import math
import pathlib
import signal
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2] / "scripts" / place) for place in ("", "sweeps")]
# pylint: disable=wrong-import-position
from python_packages import require
from sweep_rounds import sent_again

if __name__ == "__main__":
    require("numpy", "matplotlib", target="simulate")
import numpy as np

PHASE = 2.2e-3       # s; calibrated
GRACE = 1e-3         # s; as in the protocol of the calibration
RETRY, RETRY_MOST = 1e-3, 20e-3
STALL = 150e-6       # s; calibrated
CONTROL_ROUNDS = 3
RING_MOST = 1024     # workers drawn in a ring
WORKERS = (8, 16, 64, 256, 1024, 4096, 16384)
LOSSES = tuple(10.0 ** (e / 2) for e in range(-12, -1))  # 1e-6 ... 10%
TRANSPORTS = ("roce", "mrc", "select", "tcp")
PRICES = (("rule", 0.0), ("int8", 0.0), ("lossy", 0.5), ("lossy", 2.0))  # our exchange, tax
OURS = ("lossy", "rule", "int8")
BUDGET = {"lossy": 0, "rule": 0.2, "int8": 31 / 33}  # the share of a phase that rounds may send
SHARE = {"int8": 33 / 64}                            # of the others' bytes
# {transport: (payload, bytes that a packet takes on the wire)}. "lossy" is ours over RDMA, "udp" ours over
# UDP as measured.
PACKET = {"lossy": (4096 - 28, 4096 + 90), "udp": (1420, 1514), "roce": (4096, 4096 + 82),
          "mrc": (4096, 4096 + 82), "select": (4096, 4096 + 82), "tcp": (1448, 1514)}


class Network:
    """Every link has gbps, a round trip takes rtt seconds, and each packet is lost with probability loss."""

    def __init__(self, gbps, rtt, loss, ack_timeout=4.096e-6 * 2 ** 14):
        self.gbps, self.rtt, self.loss, self.ack_timeout = gbps, rtt, loss, ack_timeout

    def spacing(self, transport):
        return PACKET[transport][1] * 8 / (self.gbps * 1e9)


def packets(transport, size):
    return max(1, math.ceil(size / PACKET[transport][0]))


def repeated(loss, flows, uniform):
    """How often the unluckiest of `flows` messages is lost in a row. `uniform` is drawn from (0, 1)."""
    if loss == 0:
        return np.zeros(np.shape(uniform), int)
    # P(all are lost at most k times) = (1 - p^(k+1))^flows = uniform
    tail = -np.expm1(np.log(uniform) / flows)
    return np.maximum(0, np.ceil(np.log(tail) / math.log(loss) - 1)).astype(int)


def control_delay(rng, loss, flows, draws):
    """The seconds that the slowest of `flows` small messages needs for its repetitions."""
    waits = np.cumsum([0] + [min(RETRY * 2 ** k, RETRY_MOST) for k in range(64)])
    return waits[np.minimum(repeated(loss, flows, rng.random(draws)), 64)]


def selective_quantiles(n, net, levels):
    """Quantiles, at the given levels, of the extra seconds of selective repeat. They come from the exact
    distribution: P(extra <= u) is the product over all packets of the probability that the packet is not
    lost more often than there is time for."""
    p, rtt, spacing = net.loss, net.rtt, net.spacing("select")
    tail = 320e-6
    most = 1 + int(math.log(1e-13 / n) / math.log(p))  # losses in a row that matter
    steps = np.unique(np.concatenate([np.arange(most + 1) * rtt, tail + np.arange(most + 1) * rtt,
                                      np.linspace(0, tail + most * rtt, 300)]))
    # Packet j from the end, j = 1 ... n-1, has left = extra + j spacing when it is first due. In that time
    # it may be lost k = floor(left / rtt) times. This k is the same for packets begin[k] ... begin[k+1]-1.
    k = np.arange(most + 1)
    begin = np.ceil((np.arange(most + 2) * rtt - steps[:, None]) / spacing - 1e-9)
    count = np.diff(np.clip(begin, 1, n), axis=1)
    cdf = count @ np.log1p(-p ** (k + 1))
    late = np.floor((steps - tail) / rtt + 1e-9) + 1
    cdf += np.log1p(-p ** (np.where(steps < tail - 1e-12, 0, late) + 1))
    where = np.searchsorted(np.exp(cdf), levels)
    return steps[np.minimum(where, len(steps) - 1)]


def flow_extra(rng, transport, n, net, draws):
    """The extra seconds that lost packets cost flows of n packets."""
    p = net.loss
    if p == 0:
        return np.zeros(draws)
    spacing = net.spacing(transport)
    if transport == "select":
        resent = rng.negative_binomial(n, 1 - p, draws) * spacing
        return resent + selective_quantiles(n, net, rng.random(draws))
    if transport == "mrc":
        return np.full(draws, 2 * max(0, p - 0.001) / (0.01 - 0.001) * n * spacing)
    stall = net.rtt if transport == "roce" else max(STALL, net.rtt)
    firsts = rng.binomial(n - 1, p, draws)              # lost packets, without the last packet
    last = rng.geometric(1 - p, draws) - 1              # how often the last packet is lost
    again = np.zeros(draws)
    some = firsts > 0
    again[some] = rng.negative_binomial(firsts[some], 1 - p)  # how often a repetition is lost
    if transport == "roce":
        return firsts * stall + (again + last) * net.ack_timeout
    return (firsts + again) * (stall + spacing) + last * max(2 * net.rtt, 10e-3)


def lossy(rng, net, workers, size, over="lossy", draws=64, price="lossy"):
    """Mean seconds of an exchange of lossy datagrams."""
    again, rounds = sent_again(net.loss, BUDGET[price])
    phases, pulses = 2 + rounds, CONTROL_ROUNDS + 2 * rounds
    count = packets(over, size * SHARE.get(price, 1) / workers)  # from each worker to each other
    wire = (2 + again) * (workers - 1) * count * net.spacing(over)
    flows = workers * (workers - 1)
    missing = -math.expm1(flows * count * math.log1p(-net.loss))
    control = sum(control_delay(rng, net.loss, flows, draws).mean() for _ in range(pulses))
    control += pulses * (workers - 1) * 120 * 8 / (net.gbps * 1e9)  # their bytes
    return wire + phases * (PHASE + net.rtt / 2 + missing * GRACE) + control


def ring(rng, transport, net, workers, size, draws=1):
    """Mean seconds of a ring's reduce-scatter and all-gather."""
    n = packets(transport, size / workers)
    send = n * net.spacing(transport)
    drawn = min(workers, RING_MOST)
    total = 0.0
    for _ in range(draws):
        rounds = 2 * (workers - 1)
        few = rounds * drawn <= 1 << 17  # else flows are drawn from a table of this size
        table = flow_extra(rng, transport, n, net, rounds * drawn if few else 1 << 17)
        done = np.zeros(drawn)
        for turn in range(rounds):
            # A worker needs the previous worker's data of the last round, and a free link.
            done = np.maximum(np.roll(done, 1) + net.rtt / 2, done) + send
            done += table[turn * drawn:][:drawn] if few \
                else table[rng.integers(len(table), size=drawn)]
        total += done.max()
    return total / draws


def tree(rng, transport, net, workers, size, draws=8):
    """Mean seconds of an all-reduce over two pipelined trees."""
    n = packets(transport, size / 2)
    flows = 4 * (workers - 1)
    wire = 4 * n * net.spacing(transport)
    latency = 2 * math.ceil(math.log2(workers)) * net.rtt / 2
    extra = np.mean([flow_extra(rng, transport, n, net, flows).max() for _ in range(draws)])
    extra *= 4 if transport == "mrc" else 1  # less throughput delays all four flows of a link
    return wire + latency + extra


def exchange(name, net, workers, size, seed=1):
    """The seconds of an exchange. name: "lossy", "rule", "int8" (over RDMA), "udp" (lossy, too), "ring roce", ..."""
    rng = np.random.default_rng(seed)
    if name in ("rule", "int8"):
        return lossy(rng, net, workers, size, price=name)
    if name in ("lossy", "udp"):
        return lossy(rng, net, workers, size, name)
    algorithm, transport = name.split()
    return {"ring": ring, "tree": tree}[algorithm](rng, transport, net, workers, size)


def reliable(transport, net, workers, size):
    """The seconds of the faster of ring and tree."""
    return min(exchange(f"{way} {transport}", net, workers, size) for way in ("ring", "tree"))


def step(seconds, compute, tax=0.0, loss=0.0):
    """The seconds of a step, or, with a tax, of as much progress as a step makes without loss."""
    return (compute + seconds) * (1 + tax * loss)


def crossing(ours, theirs):
    """The least loss rate at which, and above which, lossy is faster. None if there is none."""
    wins = [our <= their for our, their in zip(ours, theirs)]
    found = None
    for loss, win in reversed(list(zip(LOSSES, wins))):
        if not win:
            break
        found = loss
    return found


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# Measured times of 16 MiB among 4 hosts: (Gbit/s, exchange, {loss: ms}).
MEASURED = (
    (1, "udp", {0: 219, 0.1: 226}),
    (1, "ring tcp", {0: 211, 0.1: 573}),
    (0.2, "udp", {0: 1083, 0.01: 1080, 0.05: 1095, 0.1: 1097}),
    (0.2, "ring tcp", {0: 1058, 0.01: 1076, 0.05: 1155, 0.1: 1416}),
)


def calibration():
    rows = []
    for gbps, name, times in MEASURED:
        for loss, measured in times.items():
            net = Network(gbps, 100e-6, loss)
            model = 1e3 * exchange(name, net, 4, 16 * 2 ** 20)
            rows.append(["lossy, UDP" if name == "udp" else name, f"{gbps:g}", f"{loss:.0%}",
                         f"{measured}", f"{model:.0f}", f"{model / measured - 1:+.0%}"])
    return markdown(["exchange", "Gbit/s", "lost", "measured, ms", "model, ms", "off"], rows)


def percent(loss):
    return "nowhere" if loss is None else f"{100 * loss:.2g}%"


class Grid:
    """Step times over WORKERS and LOSSES for one link."""

    def __init__(self, gbps, rtt, size, workers):
        self.wire = 2 * size * 8 / (gbps * 1e9)
        self.times = {}
        for count in workers:
            for name in OURS + TRANSPORTS:
                self.times[count, name] = [
                    exchange(name, Network(gbps, rtt, loss), count, size) if name in OURS
                    else reliable(name, Network(gbps, rtt, loss), count, size) for loss in LOSSES]

    def wins_from(self, count, transport, our, tax, compute):
        ours = [step(time, compute, tax, loss) for time, loss in zip(self.times[count, our], LOSSES)]
        return crossing(ours, [step(time, compute) for time in self.times[count, transport]])


TITLES = {"lossy": "lossy datagrams", "rule": "the default", "int8": "the default, int8", "roce": "RoCE, go-back-N",
          "mrc": "many paths, as measured", "select": "an ideal selective repeat", "tcp": "TCP, BBR"}


def price_title(our, tax):
    return f"plain, tax {tax:g}" if our == "lossy" else TITLES[our]


def plot(grid, compute, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.6))
    workers = sorted({count for count, _ in grid.times})
    colors = dict(zip(("rule", "int8") + TRANSPORTS, ("tab:blue", "tab:cyan", "tab:red", "tab:purple",
                                                      "tab:green", "tab:orange")))
    for name, color in colors.items():
        axes[0].plot([100 * loss for loss in LOSSES],
                     [step(time, compute) / (compute + grid.wire)
                      for time in grid.times[1024, name]],
                     "o-", color=color, markersize=3, label=TITLES[name])
        for loss, style in ((LOSSES[4], "o-"), (LOSSES[8], "s--")):
            axes[1].plot(workers, [step(grid.times[count, name][LOSSES.index(loss)], compute) /
                                   (compute + grid.wire) for count in workers], style, color=color,
                         markersize=3, label=f"{TITLES[name]}, {100 * loss:.2g}%")
    axes[0].plot([100 * loss for loss in LOSSES],
                 [step(time, compute, 0.5, loss) / (compute + grid.wire)
                  for time, loss in zip(grid.times[1024, "lossy"], LOSSES)],
                 ":", color=colors["rule"], label="plain, progress taxed 0.5")
    axes[0].set(xscale="log", yscale="log", xlabel="packets lost, %", title="1,024 workers",
                ylabel="step time over step time without loss")
    axes[1].set(xscale="log", yscale="log", xlabel="workers", title="two loss rates")
    for name in TRANSPORTS:
        for (our, tax), style in zip(PRICES, ("o-", "D-.", "s--", "^:")):
            where = [grid.wins_from(count, name, our, tax, compute) for count in workers]
            axes[2].plot(workers, [100 * loss if loss else np.nan for loss in where], style,
                         color=colors[name], markersize=4, label=f"{TITLES[name]}; {price_title(our, tax)}")
    axes[2].set(xscale="log", yscale="log", xlabel="workers", ylabel="packets lost, %",
                title="lossy wins at and above", ylim=(5e-5, 20))
    for axis in axes:
        axis.legend(fontsize=6.5)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def report(args):
    size, compute = args.gb * 1e9, args.compute_s
    grid = Grid(args.gbps, args.rtt_us * 1e-6, size, WORKERS)
    rows = [[TITLES[name], price_title(our, tax)] +
            [percent(grid.wins_from(count, name, our, tax, compute)) for count in WORKERS]
            for name in TRANSPORTS for our, tax in PRICES]
    text = ("# Scaling model\n\nWritten by scaling.py, which says what is modelled and how.\n\n"
            "## Against what was measured\n\n" + calibration() +
            f"\n## From which loss rate on lossy wins\n\n{args.gb:g} GB, {args.gbps:g} Gbit/s, "
            f"round trip {args.rtt_us:g} us, {compute:g} s of computing in a step; against the better\n"
            "of ring and tree. Of the loss rates\n" +
            ", ".join(percent(loss) for loss in LOSSES) + ".\n\n" +
            markdown(["against", "ours"] + [f"{count:,}" for count in WORKERS], rows))
    rows = []
    for gbps in (25, 100, 400):
        for rtt in (10, 100, 10000):
            other = Grid(gbps, rtt * 1e-6, size, (1024,))
            # the same ratio of computing to wire time for each link
            scaled = compute * args.gbps / gbps
            rows.append([f"{gbps}", f"{rtt:,}"] + [
                percent(other.wins_from(1024, name, "rule", 0, scaled)) for name in TRANSPORTS])
    text += ("\n## The default at 1,024 workers, over links\n\nComputing takes as long in "
             "proportion to the wire time.\n\n" +
             markdown(["Gbit/s", "round trip, us"] + [TITLES[name] for name in TRANSPORTS], rows))
    plot(grid, compute, args.out / "scaling.png")
    print(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gb", type=float, default=27, help="GB exchanged; 13.5B in bf16")
    parser.add_argument("--gbps", type=float, default=100)
    parser.add_argument("--rtt-us", type=float, default=10)
    parser.add_argument("--compute-s", type=float, default=4.3, help="of a step; as the wire")
    parser.add_argument("--tax", type=float, default=0.5)
    parser.add_argument("--at", nargs=2, metavar=("WORKERS", "LOSS"), type=float)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    if not all(0 < size < math.inf for size in (args.gb, args.gbps, args.rtt_us)) or \
            not all(0 <= size < math.inf for size in (args.compute_s, args.tax)):
        parser.error("--gb, --gbps and --rtt-us expect numbers above 0, --compute-s and --tax of at least 0")
    if not args.out.is_dir():
        parser.error(f"--out: there is no folder '{args.out}'")
    if not args.at:
        return report(args)
    workers, loss = args.at
    if not (2 <= workers < math.inf and workers % 1 == 0 and 0 <= loss < 1):
        parser.error("--at expects at least 2 workers, a whole number, and a loss rate in [0, 1)")
    workers = int(workers)
    net = Network(args.gbps, args.rtt_us * 1e-6, loss)
    for name in list(OURS) + [f"{way} {transport}" for transport in TRANSPORTS
                             for way in ("ring", "tree")]:
        seconds = exchange(name, net, workers, args.gb * 1e9)
        tax = args.tax if name == "lossy" else 0
        print(f"{name:12s} exchange {seconds:9.3f} s, step "
              f"{step(seconds, args.compute_s, tax, loss):9.3f} s")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main()

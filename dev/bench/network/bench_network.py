#!/usr/bin/env python3
"""Measures how fast gradients and parameters are exchanged if packets are lost (make bench-network).

Four hosts on this machine (hosts.py), each behind a link of 1 Gbit/s (--mbps) that loses 0 to 10% of
its packets, average 16 and 64 MiB of float32 and distribute the result. These programs do the same work:

  * ours: lossynet_reduce and lossynet_broadcast over UDP (bench_exchange.c)
  * Open MPI: MPI_Reduce_scatter and MPI_Allgather over TCP (bench_collectives.c)
  * a ring over TCP, streamed without blocking (bench_ring.c)

The latter two run under BBR and under CUBIC. The programs take turns in blocks, so that each row of
the table was measured in the same minutes. After that, ours runs without a rate limit, in plain text and
encrypted, to see what it costs in CPU time, and training steps run with and without overlap. The script
prints a report in Markdown and writes it to build/bench_network.md. --quick only shows that all runs.

Line rate: every host must send 2 (n-1)/n of the vector, and receive as much. In packets of P bytes of
payload, with 28 bytes of our header, 8 of UDP, 20 of IP and 14 of Ethernet (all that the rate limit
counts), that takes (bytes / P) (P + 70) 8 bit / rate. Lost packets were sent, so they count. A rate
limiter that was idle lets 256 KiB through at once, 2 ms at 1 Gbit/s, for every program. In the table,
"worst" is the slowest round, "delivered" is the share that arrived as the program counts it, and "let
through" is the share that the switch did not drop as the switch counts it.
"""
import argparse
import json
import math
import os
import pathlib
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

ROOT = testbed.ROOT
BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
HOSTS = 4
MBPS = 1000
HEADERS = 28 + 8 + 20 + 14
LOSSES = (0, 0.1, 1, 5, 10)
SIZES = (16, 64)  # MiB
ROUNDS, BLOCKS = 20, 4
SECONDS = 40      # limit for the rounds of a program in a row; after that, it makes no more rounds
PATIENCE = 60     # seconds for one start of a program, including the first round, which does not count
CONGESTION = ("bbr", "cubic")
OURS, ENCRYPTED = "ours", "ours, encrypted"
OTHERS = [f"{name} {congestion}" for name in ("mpi", "ring") for congestion in CONGESTION]
TITLE = {"mpi bbr": "Open MPI, BBR", "mpi cubic": "Open MPI, CUBIC", "ring bbr": "TCP ring, BBR",
         "ring cubic": "TCP ring, CUBIC"}

# Bars for the exchange.
BAR_LINE_RATE = 1.05
BAR_DELIVERED = 0.002
BAR_MPI = {0: 1.5, 10: 5.0}             # by loss rate; compared with the better of BBR and CUBIC
BAR_RING = {**dict.fromkeys(LOSSES, 1.0), 10: 2.0}  # by loss rate; compared with BBR


# ---- running programs -------------------------------------------------------------------------


def objects(text):
    """The JSON lines of a program's output, without a line that the program's end cut short."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass
    return found


def run_exchange(hosts, program, mib, rounds, seconds, patience):
    """Returns the milliseconds of each round, the counters in the last line (of our program), and
    whether it ran out of time."""
    name, congestion = program, None
    if program not in (OURS, ENCRYPTED):
        name, _, congestion = program.partition(" ")
    hosts.control_congestion(congestion)
    what, more, mpi = {
        OURS: ("exchange", ("eth0", 0), "eth1"),
        ENCRYPTED: ("exchange", ("eth0", 0, "encrypt"), "eth1"),
        "mpi": ("collectives", (), "eth0"),
        "ring": ("ring", (",".join(map(hosts.address, range(HOSTS))),), "eth1"),
    }[name]
    done = hosts.mpirun(BUILD / "dev/bench/network" / f"bench_{what}", mib, rounds, seconds, *more, mpi=mpi,
                        timeout=patience)
    if done.returncode:
        sys.exit(f"bench_network: {program} failed with {done.returncode}:\n{done.stderr}")
    lines = objects(done.stdout)
    return {"ms": [line["ms"] for line in lines if "ms" in line],
            "counters": lines[-1] if lines and "expected" in lines[-1] else None,
            "out_of_time": done.returncode is None}


def measure_row(hosts, mib, loss, plan):
    """Measures one row of the table: all programs, in turns."""
    row = {"mib": mib, "loss": loss, "mbps": plan.mbps, "ms": {}, "late": [], "expected": 0, "arrived": 0, "data": 0,
           "lost": 0, "overflowed": 0, "overruns": 0}
    out = set()
    for _ in range(plan.blocks):
        for program in [OURS, *OTHERS]:
            if program in out:
                continue
            times = row["ms"].setdefault(program, [])
            hosts.lose(loss)
            before = hosts.overflowed()
            spent = sum(times) / 1e3
            done = run_exchange(hosts, program, mib, plan.rounds // plan.blocks,
                                max(plan.seconds - spent, 0), 600 if program == OURS else plan.patience)
            times += done["ms"]
            if done["out_of_time"] or sum(times) / 1e3 >= plan.seconds:
                out.add(program)
            if program == OURS:
                add_counters(row, done["counters"], hosts, before)
        progress(row)
    row["rounds"], row["patience"] = plan.rounds, plan.patience
    return row


def add_counters(row, counters, hosts, overflowed_before):
    kernel = hosts.counted()
    row["packet_bytes"] = counters["packet_bytes"]
    row["expected"] += counters["expected"]
    row["arrived"] += counters["arrived"]
    row["overruns"] += counters["overruns"]
    row["data"] += kernel["data"]
    row["lost"] += kernel["lost"]
    row["overflowed"] += hosts.overflowed() - overflowed_before


def progress(row):
    medians = ", ".join(f"{program} {statistics.median(ms):.0f}" if ms else f"{program} -"
                        for program, ms in row["ms"].items())
    print(f"  {row['mib']} MiB, {row['loss']}% lost, {len(row['ms'][OURS])} rounds: {medians} ms",
          file=sys.stderr)


def line_rate_ms(mib, packet_bytes, mbps):
    payload = 2 * (HOSTS - 1) / HOSTS * mib * 2**20
    return payload / packet_bytes * (packet_bytes + HEADERS) * 8 / (mbps * 1e6) * 1e3


# ---- without a rate limit ---------------------------------------------------------------------


def machine_cpu():
    """CPU seconds of the machine since it started: in programs, in system calls, in interrupts."""
    fields = list(map(int, pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]))
    tick = os.sysconf("SC_CLK_TCK")
    return {"user": (fields[0] + fields[1]) / tick, "system": fields[2] / tick,
            "interrupts": (fields[5] + fields[6]) / tick}


def measure_unlimited(plan):
    """Measures the programs in turns. Keeps the machine's CPU seconds per GiB of payload sent. The
    counters have the CPU seconds of our own processes."""
    mib = 8 if plan.quick else 64
    programs = {OURS: {}, ENCRYPTED: {}, "ring bbr": {}}
    if "libcrypto" not in testbed.sh("ldd", BUILD / "dev/bench/network/bench_exchange"):
        del programs[ENCRYPTED]
    with testbed.Hosts(HOSTS) as hosts:
        for _ in range(plan.blocks):
            for program, made in programs.items():
                before = machine_cpu()
                done = run_exchange(hosts, program, mib, plan.rounds // plan.blocks, PATIENCE,
                                    PATIENCE)
                after = machine_cpu()
                if not done["ms"]:
                    sys.exit(f"bench_network: {program} made no round of {mib} MiB in {PATIENCE} s")
                made.setdefault("ms", []).extend(done["ms"])
                spent = {key: after[key] - before[key] for key in after}
                spent["gibibytes"] = 2 * (HOSTS - 1) * mib / 1024 * (len(done["ms"]) + 1)
                add(made.setdefault("machine", {}), spent)
                add(made.setdefault("counters", {}), done["counters"] or {})
        return {"mib": mib, "cores": os.cpu_count(), "programs": programs,
                "profile": profile(hosts, mib, plan.rounds, PATIENCE)}


def add(sums, values):
    for key, value in values.items():
        sums[key] = sums.get(key, 0) + value


def profile(hosts, mib, rounds, patience):
    """Profiles the CPU time of our program, with perf or else with strace. Returns lines of text."""
    if shutil.which("perf"):
        with tempfile.TemporaryDirectory() as folder:
            data = pathlib.Path(folder) / "perf.data"
            recorder = subprocess.Popen(
                ["perf", "record", "-q", "-a", "-e", "cpu-clock", "-F", "997", "-o", str(data)],
                stderr=subprocess.DEVNULL)
            run_exchange(hosts, OURS, mib, rounds, patience, patience)
            recorder.send_signal(signal.SIGINT)
            recorder.wait()
            report = subprocess.run(
                ["perf", "report", "-q", "--stdio", "-i", str(data), "--comms", "bench_exchange",
                 "--percentage", "relative", "--sort", "symbol", "--percent-limit", "1"],
                check=False, capture_output=True, text=True)
            lines = [line[:line.find("  -  ")].strip() for line in report.stdout.splitlines()
                     if "%" in line][:20]
            if lines:
                return ["perf, share of the samples in bench_exchange:", *lines]
    if shutil.which("strace"):
        count = 'test "$OMPI_COMM_WORLD_RANK" = 0 && exec strace -f -c -U name,calls,time "$@"; '
        done = hosts.mpirun("sh", "-c", count + 'exec "$@"', "sh", BUILD / "dev/bench/network/bench_exchange",
                            mib, rounds, patience, "eth0", 0, timeout=patience)
        lines = [line.rstrip() for line in done.stderr.splitlines() if re.match(r"\w+\s+\d", line)]
        return ["strace -c of rank 0: call, count, seconds", *lines[:10]]
    return ["neither perf nor strace is installed, so calls were not counted"]


# ---- training ---------------------------------------------------------------------------------


def write_tokens(path, vocabulary, count):
    """Writes llm.c's format: 256 int32 (magic, version, tokens, vocabulary), then uint16 tokens."""
    tokens = [(7919 * i + i * i // 3) % vocabulary for i in range(count)]
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, vocabulary, *[0] * 252) +
                     struct.pack(f"<{count}H", *tokens))


def train(hosts, model, data, steps, flags, log):
    done = hosts.mpirun(BUILD / "train_llama2", "--model", model, "--train", data, "--batch", 1,
                        "--seq", 256, "--steps", steps, "--lr", 1e-3, "--threads", 1, "--link",
                        "udp", "--interface", "eth0", "--log", log, "--overwrite", "--quiet",
                        *flags)
    if done.returncode:
        sys.exit(f"bench_network: training failed with {done.returncode}:\n{done.stderr}")
    events = objects(log.read_text())
    return events[0], [event for event in events if event["event"] == "step"][2:]


def measure_training(model, steps, blocks, mbps):
    """Measures the step times of a training over rate-limited links, with and without overlap, in turns."""
    overlap = {"overlap": (), "no overlap": ("--no-overlap",)}
    result = {"model": model, "mbps": mbps, "ways": {name: [] for name in overlap}}
    with testbed.Hosts(HOSTS, rate=f"{mbps}mbit") as hosts, \
            tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "train.bin"
        write_tokens(data, 512, 200_000)
        for _ in range(blocks):
            for name, flags in overlap.items():
                run, timed = train(hosts, model, data, steps, flags,
                                   pathlib.Path(folder) / "log.jsonl")
                result["ways"][name] += [[event["step_ms"], event["communication_ms"]]
                                         for event in timed]
        result["parameters"], result["packet_bytes"] = run["parameters"], run["packet_bytes"]
    return result


# ---- report -----------------------------------------------------------------------------------


class Bars:
    def __init__(self):
        self.lines, self.missed = [], 0

    def check(self, what, value, bar, at_least, digits=2):
        held = value >= bar if at_least else value <= bar
        self.missed += not held
        self.lines.append(f"- {what}: {value:.{digits}f}, bar {'at least' if at_least else 'at most'}"
                          f" {bar:.{digits}f}: {'held' if held else '**missed**'}")


def cell(ms, ours, row):
    """A table cell: the median, its ratio to ours, and the number of rounds if it differs from the
    others'."""
    if not ms:
        return f"none in {row['patience']} s"
    median = statistics.median(ms)
    fewer = f", {len(ms)} rounds" if len(ms) < row["rounds"] else ""
    return f"{median:.0f} ({median / ours:.2f}x{fewer})"


def report_row(row, bars):
    ms = row["ms"]
    ours = statistics.median(ms[OURS])
    ratio = ours / line_rate_ms(row["mib"], row["packet_bytes"], row["mbps"])
    delivered, let_through = row["arrived"] / row["expected"], 1 - row["lost"] / row["data"]
    where = f"{row['mbps']} Mbit/s, {row['mib']} MiB at {row['loss']:g}%"
    bars.check(f"{where}, time over line rate", ratio, BAR_LINE_RATE, at_least=False, digits=3)
    bars.check(f"{where}, let through but not delivered", let_through - delivered, BAR_DELIVERED,
               at_least=False, digits=4)
    mpi = [statistics.median(ms[name]) for name in ("mpi bbr", "mpi cubic") if ms.get(name)]
    if row["loss"] in BAR_MPI and mpi:
        bars.check(f"{where}, Open MPI's time over ours", min(mpi) / ours, BAR_MPI[row["loss"]],
                   at_least=True)
    if row["loss"] in BAR_RING and ms.get("ring bbr"):
        bars.check(f"{where}, the BBR ring's time over ours",
                   statistics.median(ms["ring bbr"]) / ours, BAR_RING[row["loss"]], at_least=True)
    return [f"{row['mib']}", f"{row['loss']:g}%", f"{ours:.0f}, {max(ms[OURS]):.0f}",
            f"{ratio:.3f}", f"{delivered:.4f}", f"{let_through:.4f}",
            *(cell(ms.get(name), ours, row) for name in OTHERS)]


def table(head, rows):
    lines = [head, ["---:"] * len(head), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines]


def report_rows(rows, mbps, bars):
    lines = [report_row(row, bars) for row in rows]
    packet = rows[0]["packet_bytes"]
    rates = ", ".join(f"{line_rate_ms(mib, packet, mbps):.1f} ms for {mib} MiB"
                      for mib in sorted({row["mib"] for row in rows}))
    dropped = sum(row["overflowed"] for row in rows), sum(row["overruns"] for row in rows)
    return [f"## Reduce-scatter and broadcast, {HOSTS} hosts, {mbps} Mbit/s", "",
            *table(["MiB", "lost", "ours ms: median, worst", "over line rate", "delivered",
                    "let through", *(f"{TITLE[name]}: ms (times ours)" for name in OTHERS)], lines),
            "", f"Line rate, headers of packets of {packet} bytes included: {rates}. Medians of "
            f"{max(row['rounds'] for row in rows)} rounds where no other number is given. Ours: "
            f"{dropped[0]} packets dropped by queues of hosts and switch, {dropped[1]} by full "
            "receive buffers.", ""]


def report_unlimited(result):
    mib, lines, gbps, seconds = result["mib"], [], {}, {}
    payload = 2 * (HOSTS - 1) / HOSTS * mib * 2**20
    for program, made in result["programs"].items():
        median = statistics.median(made["ms"])
        gbps[program] = payload * 8 / median / 1e6
        own, machine = made["counters"], made["machine"]
        seconds[program] = [own[key] / own["bytes"] * 2**30 for key in ("user", "system") if own]
        lines.append([program, f"{median:.1f}", f"{gbps[program]:.2f}",
                      *([f"{value:.2f}" for value in seconds[program]] or ["", ""]),
                      *(f"{machine[key] / machine['gibibytes']:.2f}"
                        for key in ("user", "system", "interrupts"))])
    encryption = "Built without OpenSSL, so encryption was not measured."
    if ENCRYPTED in seconds:
        encryption = (
            f"Encryption takes {sum(seconds[ENCRYPTED]) / sum(seconds[OURS]):.2f} times the CPU "
            f"seconds of our processes, and leaves {gbps[ENCRYPTED] / gbps[OURS]:.2f} of the rate.")
    return [f"## No rate limit, {mib} MiB, {HOSTS} ranks on {result['cores']} cores", "",
            *table(["", "ms", "Gbit/s per rank", "own user s/GiB", "own system s/GiB",
                    "user s/GiB", "system s/GiB", "interrupts s/GiB"], lines), "",
            "CPU seconds per GiB of payload sent: those of our own processes, in the rounds, and the "
            f"whole machine's, start of the programs included. {encryption}", "",
            "```", *result["profile"], "```", ""]


def report_training(result):
    lines, medians = [], {}
    for name, steps in result["ways"].items():
        medians[name] = statistics.median(step[0] for step in steps)
        lines.append([name, f"{medians[name]:.0f}", f"{max(step[0] for step in steps):.0f}",
                      f"{statistics.median(step[1] for step in steps):.0f}", len(steps)])
    wire = line_rate_ms(result["parameters"] * 4 / 2**20, result["packet_bytes"], result["mbps"])
    return [f"## Training, {result['model']} with {result['parameters'] / 1e6:.1f}M parameters, "
            f"{HOSTS} ranks, {result['mbps']} Mbit/s, 1 thread each", "",
            *table(["", "step ms, median", "worst", "communication ms, median", "steps"], lines),
            "", f"Line rate alone: {wire:.0f} ms. Overlap takes "
            f"{medians['overlap'] / medians['no overlap']:.2f} of the time without.", ""]


def report(results, quick):
    bars = Bars()
    revision = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, check=False,
                              capture_output=True, text=True).stdout.strip()
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    lines = [f"# Network speed, revision {revision}", "",
             f"{cpu.group(1) if cpu else 'unknown CPU'}, {os.cpu_count()} cores, "
             f"Linux {os.uname().release}.", ""]
    rows = sorted(results["rows"].values(), key=lambda row: (row["mib"], row["loss"]))
    for mbps in sorted({row["mbps"] for row in rows}, reverse=True):
        lines += report_rows([row for row in rows if row["mbps"] == mbps], mbps, bars)
    if results.get("unlimited"):
        lines += report_unlimited(results["unlimited"])
    if results.get("training"):
        lines += report_training(results["training"])
    if rows:
        lines += ["## Bars", "", *(["A quick run: too short to say anything.", ""] if quick else []),
                  *bars.lines, ""]
    return "\n".join(lines), bars.missed


# ---- main -------------------------------------------------------------------------------------


def read_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it runs")
    parser.add_argument("--only", choices=["table", "unlimited", "training"], help="one part")
    parser.add_argument("--mib", type=int, nargs="+", help="sizes, of the table")
    parser.add_argument("--loss", type=float, nargs="+", help="percentages, of the table")
    parser.add_argument("--mbps", type=int, default=MBPS,
                        help="of a link; fewer where the machine is too slow or too busy")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--add", action="store_true",
                        help="keep what an earlier call measured and this one does not")
    plan = parser.parse_args()
    plan.mib = plan.mib or ([1] if plan.quick else SIZES)
    plan.loss = plan.loss or ([0, 10] if plan.quick else LOSSES)
    plan.blocks, plan.seconds, plan.patience = BLOCKS, SECONDS, PATIENCE
    if plan.quick:
        plan.rounds, plan.blocks, plan.seconds, plan.patience = 2, 1, 3, 10
    plan.rounds = math.ceil(plan.rounds / plan.blocks) * plan.blocks
    return plan


def measure(plan, results):
    if plan.only in (None, "table"):
        with testbed.Hosts(HOSTS, rate=f"{plan.mbps}mbit") as hosts:
            for mib in plan.mib:
                for loss in plan.loss:
                    results["rows"][f"{plan.mbps} {mib} {loss:g}"] = measure_row(hosts, mib, loss, plan)
    if plan.only in (None, "unlimited"):
        results["unlimited"] = measure_unlimited(plan)
    if plan.only in (None, "training"):
        results["training"] = measure_training(
            *(("260K", 4, 1) if plan.quick else ("15M", 7, 5)), plan.mbps)


def main():
    plan = read_arguments()
    reason = testbed.unavailable()
    if reason:
        print(f"bench_network: skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit also removes the hosts
    raw = BUILD / "bench_network.json"
    results = {"rows": {}}
    if plan.add and raw.exists():
        results = json.loads(raw.read_text())
    measure(plan, results)
    text, missed = report(results, plan.quick)
    name = "bench_network_quick" if plan.quick else "bench_network"
    (BUILD / f"{name}.md").write_text(text)
    (BUILD / f"{name}.json").write_text(json.dumps(results))
    print(text)
    return 1 if missed and not plan.quick else 0


if __name__ == "__main__":
    sys.exit(main())

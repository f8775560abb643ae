#!/usr/bin/env python3
"""bench_threads.py — what several threads of a rank that send and receive bring (--link-threads).

    dev/bench/network/bench_threads.py [--threads 1,2,4] [--share 0.15] [--repeat 3]

Two ranks average a vector over loopback (bench_exchange.c). So that a machine with two cores has room for eight
threads, each thread gets a share of a core alone: a control group with cpu.cfs_quota_us (as root, version 1 of
control groups). With --share 1 nothing is limited: for a machine with a core for every thread. Prints, for each type
and number of threads, the median time of a round and its ratio to that of one thread, and the CPU time of all.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
BENCH = ROOT / os.environ.get("BUILD", "build") / "dev/bench/network/bench_exchange"
GROUPS = pathlib.Path("/sys/fs/cgroup/cpu/bench_threads")
PERIOD = 20000  # us


def limit(thread, share):
    """Puts a thread into a group of its own, unless it has ended."""
    group = GROUPS / thread
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(str(PERIOD))
        (group / "cpu.cfs_quota_us").write_text(str(int(PERIOD * share)))
        (group / "tasks").write_text(thread)
    except (FileNotFoundError, ProcessLookupError):
        pass


def run(dtype, threads, share, rounds=60, mib=16):
    """The median round of the second half, when all threads are limited, in ms, and CPU seconds."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", BENCH, mib, rounds, 60, "lo", 0,
               f"threads={threads}", *([dtype] if dtype != "float32" else [])]
    known = set()
    with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while process.poll() is None and share < 1:
            for rank in subprocess.run(["pgrep", "-x", "bench_exchange"], capture_output=True, text=True,
                                       check=False).stdout.split():
                tasks = pathlib.Path(f"/proc/{rank}/task")
                for thread in {task.name for task in tasks.glob("*")} - known:
                    limit(thread, share)
                    known.add(thread)
            time.sleep(0.02)
        lines = [json.loads(line) for line in process.stdout]
    for thread in known:
        (GROUPS / thread).rmdir()
    times = [line["ms"] for line in lines[:-1]]
    return statistics.median(times[len(times) // 2:]), lines[-1]["user"] + lines[-1]["system"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", default="1,2,4")
    parser.add_argument("--share", type=float, default=0.15)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    counts = [int(count) for count in asked.threads.split(",")]
    if asked.share < 1:
        if not GROUPS.parent.is_dir():
            return f"bench_threads.py: no {GROUPS.parent}: expected version 1 of control groups, or --share 1"
        GROUPS.mkdir(exist_ok=True)
    for dtype in ("float32", "bf16", "int6"):
        found = [[run(dtype, count, asked.share) for count in counts] for _ in range(asked.repeat)]
        for i, count in enumerate(counts):
            ratio = statistics.median(row[0][0] / row[i][0] for row in found)
            print(f"{dtype:8} {count:2} threads {statistics.median(row[i][0] for row in found):7.1f} ms "
                  f"{ratio:5.2f} times as fast, {statistics.median(row[i][1] for row in found):5.2f} s of CPU", flush=True)
    if asked.share < 1:
        GROUPS.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())

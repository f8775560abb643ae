#!/usr/bin/env python3
"""Measures what groups save (--group): one replica for all ranks of a host.

  * host: RANKS ranks of this machine average a vector and distribute the result, in turns: in one group
    (in memory that they share), over UDP on loopback without groups, and by MPI_Allreduce in Open MPI's
    shared memory.
  * hosts: four hosts of namespaces (dev/testbed/hosts.py; needs root) with two ranks each and links of
    1 Gbit/s that lose packets, without groups and in groups of two, in turns. The table says how many
    data packets go between hosts, and how long an exchange takes compared with line rate.

Prints tables in Markdown. With groups of two on H hosts and vectors of S bytes, a rank sends
2 (H-1)/H S / 2 in a step, so a host sends half as much as without groups."""
import argparse
import os
import statistics
import subprocess
import sys

import bench_network as network

RANKS, HOSTS, EACH = 8, 4, 2
ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
               "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_mpi_yield_when_idle": "1",
               "OMPI_MCA_hwloc_base_binding_policy": "none", "OMP_NUM_THREADS": "1",
               "GOMP_SPINCOUNT": "0"}
EXCHANGE = network.BUILD / "dev/bench/network/bench_exchange"
COLLECTIVES = network.BUILD / "dev/bench/network/bench_collectives"


def medians(times):
    return statistics.median(times), min(times), max(times)


def on_this_host(ranks, mib, rounds, blocks):
    """Measures all ways in turns. Returns {way: milliseconds}."""
    ways = {"one group": (EXCHANGE, "lo", 0, f"group={ranks}"), "UDP, no groups": (EXCHANGE, "lo", 0),
            "MPI_Allreduce": (COLLECTIVES, "allreduce")}
    times = {way: [] for way in ways}
    for _ in range(blocks):
        for way, (program, *more) in ways.items():
            done = subprocess.run(["mpirun", "-np", str(ranks), program, str(mib), str(rounds), "60",
                                   *map(str, more)], capture_output=True, text=True, check=False,
                                  env={**os.environ, **ENVIRONMENT}, timeout=600)
            if done.returncode:
                sys.exit(f"bench_group: {way} failed:\n{done.stderr}")
            times[way] += [line["ms"] for line in network.objects(done.stdout) if "ms" in line]
    return times


def between_hosts(mib, rounds, blocks, losses, mbps):
    """Returns for each loss rate and group size the milliseconds of a round, and the data packets that
    entered the switch in a round."""
    found = {}
    with network.testbed.Hosts(HOSTS, rate=f"{mbps}mbit") as hosts:
        for _ in range(blocks):
            for loss in losses:
                for group in (1, EACH):
                    hosts.lose(loss)
                    done = hosts.mpirun(EXCHANGE, mib, rounds, 60, "eth0", 0, f"group={group}",
                                        each=EACH, timeout=300)
                    if done.returncode != 0:
                        sys.exit(f"bench_group: {loss}% lost, groups of {group}:\n{done.stderr}")
                    row = found.setdefault((loss, group), {"ms": [], "packets": []})
                    lines = network.objects(done.stdout)
                    row["ms"] += [line["ms"] for line in lines if "ms" in line]
                    row["packets"].append(hosts.counted()["data"] / (rounds + 1))
                    row["bytes"] = lines[-1]["packet_bytes"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="of each program in a block")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--mbps", type=int, default=1000)
    parser.add_argument("--only", choices=["host", "hosts"])
    given = parser.parse_args()
    if given.only != "hosts":
        times = on_this_host(RANKS, given.mib, given.rounds, given.blocks)
        ours = statistics.median(times["one group"])
        print(f"\n{RANKS} ranks on one host, {given.mib} MiB, {os.cpu_count()} cores\n")
        print("| way | ms, median | least | most | beside one group |\n|---|---:|---:|---:|---:|")
        for way, values in times.items():
            median, least, most = medians(values)
            print(f"| {way} | {median:.0f} | {least:.0f} | {most:.0f} | {median / ours:.2f}x |")
    if given.only != "host":
        found = between_hosts(given.mib, given.rounds, given.blocks, (0, 1, 10), given.mbps)
        print(f"\n{HOSTS} hosts of {EACH} ranks, {given.mib} MiB, {given.mbps} Mbit/s\n")
        print("| lost | groups of | ms, median | least | most | over line rate | packets between hosts | of those "
              "without groups |\n|---:|---:|---:|---:|---:|---:|---:|---:|")
        for (loss, group), row in found.items():
            median, least, most = medians(row["ms"])
            packets = statistics.median(row["packets"])
            share = packets / statistics.median(found[loss, 1]["packets"])
            # The packets that a host sends over its link: all that enter the switch, divided by hosts.
            line = packets / HOSTS * (row["bytes"] + network.HEADERS) * 8 / (given.mbps * 1e6) * 1e3
            print(f"| {loss}% | {group} | {median:.0f} | {least:.0f} | {most:.0f} | {median / line:.3f} | "
                  f"{packets:.0f} | {share:.3f} |")


if __name__ == "__main__":
    main()

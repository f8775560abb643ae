#!/usr/bin/env python3
"""Compares lossynet.torch.ShardedOptimizer with DistributedDataParallel over Gloo (TCP), both with AdamW.

    build/venv-bench/bin/python dev/bench/network/bench_ddp.py local       4 processes, loopback, in turns
    ... bench_ddp.py links      4 hosts (namespaces), 1 Gbit/s, the kernel loses packets (root)
    ... bench_ddp.py memory     peak memory of a rank beside DDP with ZeroRedundancyOptimizer
    ... bench_ddp.py quality    held-out loss after 300 steps: ours at 10% loss, DDP at 0%, 4 seeds

The model is dev/examples/gpt.py's: 9.9 million parameters (quality: 0.1 million). It needs the package
(`pip install ./lossynet/python`, or PYTHONPATH and LOSSYNET_LIBRARY). Ranks are processes that wait for
commands, so that programs take turns in them and each row was measured in the same minutes. A rank's CPU
time is that of all its threads.
"""
import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "dev" / "testbed"), str(ROOT / "dev" / "examples")]
RANKS = 4
PATIENCE = 60  # seconds that Gloo waits for a step
LARGE = {"width": 320, "layers": 8, "heads": 8}
SMALL = {"width": 64, "layers": 2, "heads": 2}


# ---- a rank ----

def peak():
    """(now, peak) of this process's memory in MB."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    words = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
    return int(words["VmRSS"]) / 1e3, int(words["VmHWM"]) / 1e3


class Rank:
    """A rank's programs: name -> what makes a step of it."""

    def __init__(self, rank):
        import torch  # pylint: disable=import-outside-toplevel
        import gpt  # pylint: disable=import-outside-toplevel
        import lossynet.torch  # pylint: disable=import-outside-toplevel
        torch.set_num_threads(1)
        self.torch, self.gpt, self.ours, self.rank = torch, gpt, lossynet.torch, rank
        data = gpt.text()
        self.train, self.held_out = data[:-len(data) // 10], data[-len(data) // 10:]
        self.open_now = {}

    def open(self, name, model, seed, port, batch, host="127.0.0.1", interface=None, **options):
        torch = self.torch
        torch.manual_seed(seed)
        model = run = self.gpt.GPT(**model)
        close, ddp = (lambda: None), torch.nn.parallel.DistributedDataParallel
        if name.startswith("ours"):
            given = {"interface": interface, "link": "udp"} if interface else {}
            optimizer = self.ours.ShardedOptimizer(
                model.parameters(), torch.optim.AdamW, lr=1e-3, rank=self.rank, ranks=RANKS,
                address=f"{host}:{port}", clip=options.pop("clip", 0), **given, **options)
            close = optimizer.close
        else:
            if interface:
                os.environ["GLOO_SOCKET_IFNAME"] = interface
            torch.distributed.init_process_group(
                "gloo", f"tcp://{host}:{port}", rank=self.rank, world_size=RANKS,
                timeout=datetime.timedelta(seconds=PATIENCE))
            close = torch.distributed.destroy_process_group
            run = ddp(model, gradient_as_bucket_view=True)
            if name == "zero":
                from torch.distributed.optim import ZeroRedundancyOptimizer  # pylint: disable=import-outside-toplevel
                optimizer = ZeroRedundancyOptimizer(run.parameters(), torch.optim.AdamW, lr=1e-3)
            else:
                optimizer = torch.optim.AdamW(run.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1000 * seed + self.rank)
        self.open_now[name] = (model, run, optimizer, batch, generator, close)
        return {"parameters": sum(p.numel() for p in model.parameters()), "memory": peak()}

    def steps(self, name, count):
        _, run, optimizer, batch, generator, _ = self.open_now[name]
        walls, start_cpu = [], time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            loss = run(*self.gpt.batch(self.train, *batch, generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            walls.append(time.perf_counter() - start)
        lost = optimizer.report().get("lost") if name.startswith("ours") else None
        return {"walls": walls, "cpu": (time.process_time() - start_cpu) / count, "memory": peak(), "lost": lost}

    def evaluate(self, name, batches):
        model, _, optimizer, batch, _, _ = self.open_now[name]
        generator = self.torch.Generator().manual_seed(1)
        whole = optimizer.model() if name.startswith("ours") else contextlib.nullcontext()
        with whole, self.torch.no_grad():
            losses = [model(*self.gpt.batch(self.held_out, 8, batch[1], generator)).item() for _ in range(batches)]
        return statistics.fmean(losses)

    def close(self, name):
        self.open_now.pop(name)[-1]()


def serve(rank):
    here = Rank(rank)
    answers, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = getattr(here, command.pop("do"))(**command)
        except Exception as error:  # pylint: disable=broad-exception-caught
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), file=answers, flush=True)


# ---- the one who commands ----

class Ranks:
    """Four ranks, on hosts or on this machine."""

    def __init__(self, hosts=None):
        self.hosts, self.port = hosts, 20000 + os.getpid() % 20000
        here = [sys.executable, str(pathlib.Path(__file__).resolve()), "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.processes = [subprocess.Popen([*(hosts.shell(r) if hosts else []), *here, str(r)], text=True,
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
                          for r in range(RANKS)]
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"

    def all(self, do, **command):
        """Gives all ranks a command. Returns their answers."""
        for process in self.processes:
            print(json.dumps({"do": do, **command}), file=process.stdin, flush=True)
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def open(self, name, model, batch, seed=0, **options):
        self.port += 1
        if self.hosts:
            options |= {"host": self.hosts.address(0, 78), "interface": "eth0"}
        else:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                self.port = free.getsockname()[1]
        return self.all("open", name=name, model=model, seed=seed, batch=batch, port=self.port, **options)

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


def failed(answers):
    return next((answer["error"] for answer in answers if isinstance(answer, dict) and "error" in answer), None)


def show(title, rows):
    print(f"\n| {' | '.join(title)} |\n|{' ---: |' * len(title)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def measured(answers):
    """Wall time of each step (the slowest rank's) and mean CPU time of a rank, in ms."""
    return ([1e3 * max(walls) for walls in zip(*(answer["walls"] for answer in answers))],
            1e3 * statistics.fmean(answer["cpu"] for answer in answers))


def local(blocks=8, steps=2):
    ranks, programs = Ranks(), {"DDP": {}, "ours": {}, "ours, plain": {"lead": "off", "carry": 0, "repair": 0}}
    for name, options in programs.items():
        print(name, failed(ranks.open(name, LARGE, (2, 64), **options)) or "opened", file=sys.stderr)
        ranks.all("steps", name=name, count=2)
    walls, cpus = {name: [] for name in programs}, {name: [] for name in programs}
    for _ in range(blocks):
        for name in programs:
            wall, cpu = measured(ranks.all("steps", name=name, count=steps))
            walls[name].append(statistics.median(wall))
            cpus[name].append(cpu)
    rows = []
    for name in programs:
        ratio = statistics.median(a / b for a, b in zip(walls[name], walls["DDP"]))
        cpu = statistics.median(a / b for a, b in zip(cpus[name], cpus["DDP"]))
        rows.append((name, f"{statistics.median(walls[name]):.0f} ms", f"{ratio:.2f}",
                     f"{statistics.median(cpus[name]):.0f} ms", f"{cpu:.2f}"))
    show(("program", "step", "of DDP's", "CPU of a rank", "of DDP's"), rows)
    ranks.end()


def links(losses=(0, 0.1, 1, 5), blocks=2, steps=2):
    import hosts as testbed  # pylint: disable=import-outside-toplevel
    with testbed.Hosts(RANKS, rate="1gbit", congestion="cubic") as hosts:
        ranks, rows = Ranks(hosts), []
        programs = {"ours": {}, "DDP cubic": {}, "DDP bbr": {}}
        for loss in losses:
            times = {name: [] for name in programs}
            for _ in range(blocks):
                for name in programs:
                    if None in times[name]:
                        continue
                    hosts.lose(0)
                    hosts.control_congestion(name.split()[-1] if "DDP" in name else "cubic")
                    ranks.open(name, LARGE, (1, 16))
                    ranks.all("steps", name=name, count=1)
                    hosts.lose(loss)
                    answers = ranks.all("steps", name=name, count=steps)
                    why = failed(answers)
                    print(loss, name, why or measured(answers), answers[0].get("lost"), file=sys.stderr)
                    hosts.lose(0)
                    times[name] += [None] if why else measured(answers)[0]
                    ranks.all("close", name=name)
            row = [f"{loss}%"]
            for name in programs:
                row.append(f"none in {PATIENCE} s" if None in times[name]
                           else f"{statistics.median(times[name]):.0f} ms")
            rows.append(row)
            show(("lost", *programs), [row])
        show(("lost", *programs), rows)
        ranks.end()


def memory():
    rows = []
    for name in ("zero", "ours", "ours, plain"):
        ranks = Ranks()
        options = {"lead": "off", "carry": 0, "repair": 0} if "plain" in name else {}
        opened = ranks.open(name, LARGE, (2, 64), **options)
        assert not failed(opened), failed(opened)
        answers = ranks.all("steps", name=name, count=4)
        rows.append((name, f"{opened[0]['parameters'] / 1e6:.1f}M",
                     f"{statistics.fmean(answer['memory'][1] for answer in answers):.0f} MB"))
        ranks.end()
    show(("program", "parameters", "peak of a rank"), rows)


def quality(seeds=4, steps=300):
    ranks, rows, differences = Ranks(), [], []
    for seed in range(1, seeds + 1):
        results = []
        for name, options in (("DDP", {}), ("ours", {"loss_rate": 0.1, "loss_seed": seed})):
            answers = ranks.open(name, SMALL, (4, 64), seed=seed, **options)
            assert not failed(answers), failed(answers)
            ranks.all("steps", name=name, count=steps)
            results.append(ranks.all("evaluate", name=name, batches=20)[0])
            ranks.all("close", name=name)
        differences.append(results[1] - results[0])
        rows.append((str(seed), *(f"{result:.4f}" for result in results), f"{differences[-1]:+.4f}"))
        show(("seed", "DDP, 0%", "ours, 10%", "difference"), rows[-1:])
    show(("seed", "DDP, 0%", "ours, 10%", "difference"), rows)
    deviation = statistics.stdev(differences)
    student = {2: 12.7, 3: 4.30, 4: 3.18}[seeds]  # t of 95% with n - 1 degrees of freedom
    print(f"mean difference {statistics.fmean(differences):+.4f} ± {student * deviation / math.sqrt(seeds):.4f}")
    ranks.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("local", "links", "memory", "quality"))
    parser.add_argument("--rank", type=int)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        serve(chosen.rank)
    else:
        globals()[chosen.what or parser.error("expected local, links, memory or quality")]()

#!/usr/bin/env python3
"""Measures training beside a web service.

Hosts on one machine (hosts.py) each have nginx, an open-loop client that fetches 100 KB objects from
the others (web_client.c), and a rank of a training.

    dev/coexistence/measured.py                  as root: everything, some 8 minutes, and the report
    dev/coexistence/measured.py --only 125       one request rate; results are collected in --out
    dev/coexistence/measured.py --quick          takes seconds, and only shows that everything works

The web service runs (a) alone, (b) beside training over Open MPI and TCP, (c) beside training with
lossy datagrams in the default class, (d) beside the same in class lower effort. Each port of hosts
and switch serves lower effort only if nothing else waits; the switch has a short queue for it. Links,
queues and request rates are a tenth of those of 1 Gbit/s, so that four cores can carry them. Nginx
and clients have priority on the processors (chrt), because they share them with the ranks; on real
hosts they would not.

Then it measures what the loss cost the training, and compares it with independent losses of the same
mean and with the recorded losses (--record-loss). At last it measures how --loss-budget reacts when
the web service starts and stops.
"""
import argparse
import json
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

ROOT = testbed.ROOT
BUILD = ROOT / os.environ.get("BUILD", "build")
PROGRAM, CLIENT = BUILD / "train_llama2", BUILD / "dev/coexistence/web_client"
HOSTS, MBPS, OBJECT = 4, 100, 100_000
SWITCH_QUEUE, LOW_QUEUE = "64kb", "16kb"
BUDGET = 0.1
WARM_UP = 2.0  # seconds in which no request counts
NGINX = """daemon off; worker_processes 1; user root; pid {folder}/pid; error_log {folder}/error;
events {{ worker_connections 4096; }}
http {{ access_log off; sendfile on; client_body_temp_path {folder}/a; proxy_temp_path {folder}/b;
  fastcgi_temp_path {folder}/c; uwsgi_temp_path {folder}/d; scgi_temp_path {folder}/e;
  server {{ listen {address}:80; root {folder}; }} }}
"""
DATAGRAMS = ("--link=udp", "--interface=eth0", f"--pace-gbps={MBPS / 1000}",
             f"--loss-budget={BUDGET}")
BESIDE = {"nothing": None, "TCP": ("--link=mpi",), "lossy, default class": DATAGRAMS,
          "lossy, le": (*DATAGRAMS, "--traffic-class=le")}


def training(arguments, out):
    data = arguments.out / "data" / "kjv"
    return ["--model=260K", f"--train={data}_train.bin", f"--val={data}_val.bin",
            f"--workers={HOSTS}", "--batch=2", "--seq=64", f"--steps={arguments.steps}", "--lr=3e-3",
            f"--warmup={arguments.steps // 10}", "--drift-samples=0", "--packet-bytes=1400",
            "--threads=1", "--quiet", "--eval-sequences=256", f"--out={out}", "--overwrite"]


def endless(arguments):
    return argparse.Namespace(**{**vars(arguments), "steps": 1_000_000})


def read_log(out):
    """Reads the whole lines of the log. A run that was stopped may leave half a line."""
    text = (out / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in text if line.endswith("\n")]


# ---- the web service ----

class Web:
    """nginx on every host, and clients between begin() and end()."""

    def __init__(self, hosts):
        self.hosts, self.clients, self.servers = hosts, [], []
        for i, name in enumerate(hosts.names):
            folder = hosts.folder / f"web{i}"
            folder.mkdir()
            (folder / "object").write_bytes(random.Random(i).randbytes(OBJECT))
            (folder / "conf").write_text(NGINX.format(folder=folder, address=hosts.address(i)))
            self.servers.append(self.launch(name, "nginx", "-c", folder / "conf", "-p", folder))
        time.sleep(0.5)
        for server in self.servers:
            if server.poll() is not None:
                raise RuntimeError(f"nginx: {server.communicate()[1]}")

    def launch(self, name, *command, output=subprocess.DEVNULL):
        return subprocess.Popen(["ip", "netns", "exec", name, "chrt", "-r", "10",
                                 *map(str, command)], text=True, stdout=output,
                                stderr=subprocess.PIPE)

    def begin(self, rate, seconds, seed):
        """Starts the clients. rate: requests per second of all clients together."""
        for i, name in enumerate(self.hosts.names):
            others = [f"{self.hosts.address(j)}:80" for j in range(HOSTS) if j != i]
            with open(self.hosts.folder / f"times{i}", "w", encoding="ascii") as output:
                self.clients.append(self.launch(name, CLIENT, rate / HOSTS, seconds, seed + i,
                                                "/object", *others, output=output))

    def end(self):
        """Waits until all requests have ended. Returns [(s, ms or None)] of all requests."""
        for client in self.clients:
            client.send_signal(signal.SIGTERM)
        times = []
        for i, client in enumerate(self.clients):
            client.wait(timeout=30)
            for line in (self.hosts.folder / f"times{i}").read_text().splitlines():
                begun, took = line.split()
                times.append((float(begun), None if took == "failed" else float(took)))
        self.clients = []
        return times


def web_numbers(times):
    counted = [took for begun, took in times if begun >= WARM_UP]
    done = sorted(took for took in counted if took is not None)
    if not done:
        raise RuntimeError(f"no request succeeded after {WARM_UP:g} s: {len(counted)} failed; expected more --seconds, "
                           "or higher --rates")
    return {"requests": len(counted), "failed": len(counted) - len(done),
            "mean_ms": statistics.fmean(done), "p99_ms": done[int(0.99 * (len(done) - 1))]}


# ---- one measurement ----

def bed():
    return testbed.Hosts(HOSTS, rate=f"{MBPS}mbit", congestion="cubic", switch_queue=SWITCH_QUEUE)


def start_training(hosts, arguments, out, options):
    """Starts a training with a new log."""
    (out / "log.jsonl").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    return hosts.start(PROGRAM, *training(arguments, out), *options, mpi="eth0")


def wait_for_step(running, out, steps):
    end = time.monotonic() + 60
    while time.monotonic() < end and running.poll() is None:
        log = out / "log.jsonl"
        if log.exists() and log.read_text().count('"event":"step"') >= steps:
            return
        time.sleep(0.02)
    running.kill()
    raise RuntimeError(f"the training does not begin: {running.communicate()[1]}")


def training_numbers(out):
    log = read_log(out)
    steps = [event for event in log if event["event"] == "step"]
    if not steps:
        raise RuntimeError(f"{out}/log.jsonl has no step: expected more --seconds")
    return {"steps": len(steps), "step_ms": statistics.median(e["step_ms"] for e in steps),
            "lost": statistics.fmean((e["gradient_loss_rate"] + e["parameter_loss_rate"]) / 2
                                     for e in steps),
            "late": sum(e["late"] for e in steps), "stragglers": sum(e["stragglers"] for e in steps)}


def measure(arguments, rate, name):
    """Makes requests at this rate for --seconds, while the training runs."""
    out = arguments.out / "runs" / f"{rate}-{name.replace(', ', '-').replace(' ', '-')}"
    options = BESIDE[name]
    with bed() as hosts:
        hosts.yield_to_others(1, LOW_QUEUE)
        web = Web(hosts)
        running = None
        if options:
            more = (f"--record-loss={out}/trace",) if "udp" in options[0] else ()
            running = start_training(hosts, endless(arguments), out, (*options, *more))
            wait_for_step(running, out, 3)
        web.begin(rate, 600, 100 * rate)
        time.sleep(arguments.seconds)
        if running and running.poll() is not None:
            raise RuntimeError("the training ended: " + "".join(running.communicate()))
        result = {"rate": rate, "beside": name, **web_numbers(web.end())}
        hosts.stop()
    return {**result, **(training_numbers(out) if running else {})}


# ---- the loss budget while the web service starts and stops ----

def step_change(arguments):
    """Returns [(s, lost, kbit/s)] per step. Requests run from a third of the time to two thirds."""
    out = arguments.out / "runs" / "step-change"
    third, rate = arguments.seconds, max(arguments.rates)
    with bed() as hosts:
        hosts.yield_to_others(1, LOW_QUEUE)
        web = Web(hosts)
        options = [o.replace(str(BUDGET), "0.05") if "budget" in o else o
                   for o in BESIDE["lossy, le"]]
        running = start_training(hosts, endless(arguments), out, options)
        wait_for_step(running, out, 1)
        time.sleep(third)
        web.begin(rate, 600, 7)
        time.sleep(third)
        web.end()
        time.sleep(third)
        hosts.stop()
    points, now = [], 0
    for event in read_log(out):
        if event["event"] != "step":
            continue
        now += event["step_ms"] / 1000
        points.append((now, (event["gradient_loss_rate"] + event["parameter_loss_rate"]) / 2,
                       event["pace_kbps"]))
    return {"third": third, "rate": rate, "budget": 0.05, "points": points}


# ---- what the loss costs ----

def cost(arguments, results):
    """The validation loss of the same training in one process, for each seed of the losses: without
    loss, with independent losses of the same mean as the queues', and with the trace of the queues."""
    rate = max((r["rate"] for r in results if r["beside"] == "lossy, le"), default=None)
    if rate is None:
        raise RuntimeError(f"{arguments.out}/results.json has no losses yet: expected a rate before --only cost")
    lost = next(r["lost"] for r in results if r["rate"] == rate and r["beside"] == "lossy, le")
    folder = arguments.out / "runs" / f"{rate}-lossy-le"
    done = subprocess.run([ROOT / "scripts" / "loss_trace.py",
                           *(folder / f"trace.{i}" for i in range(HOSTS))], text=True, check=True,
                          capture_output=True)
    (arguments.out / "trace").write_text(done.stdout)
    models = {"none": ["--loss-rate=0"], "independent": [f"--loss-rate={lost}"],
              "trace": ["--loss-rate=1", f"--loss-model=trace:{arguments.out}/trace"]}
    losses = {}
    for name, options in models.items():
        losses[name] = []
        for seed in range(1 if name == "none" else arguments.seeds):
            out = arguments.out / "runs" / f"{name}-{seed}"
            subprocess.run([PROGRAM, *training(arguments, out), *options, f"--loss-seed={seed}"],
                           check=True, capture_output=True)
            losses[name].append(math.log(read_log(out)[-1]["val_perplexity"]))
    return {"rate": rate, "lost": lost, "trace": json.loads(done.stderr), "val_loss": losses}


# ---- report ----

def table(results):
    lines = ["| requests/s | beside | mean, ms | 99%, ms | failed | lost | step, ms |",
             "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"]
    for r in sorted(results, key=lambda r: (r["rate"], list(BESIDE).index(r["beside"]))):
        trained = (f"{100 * r['lost']:.1f}% | {r['step_ms']:.0f}"
                   if "lost" in r else "|")
        lines.append(f"| {r['rate']} | {r['beside']} | {r['mean_ms']:.2f} | {r['p99_ms']:.1f} | "
                     f"{r['failed']} | {trained} |")
    return "\n".join(lines)


def describe_cost(made):
    mean = {name: statistics.fmean(values) for name, values in made["val_loss"].items()}
    spread = {name: statistics.stdev(values) if len(values) > 1 else 0
              for name, values in made["val_loss"].items()}
    lines = [f"Losses at {made['rate']} requests/s: {100 * made['trace']['share']:.1f}%, in runs of "
             f"{made['trace']['mean_run']:.2f} packets on average (independent: "
             f"{made['trace']['mean_run_if_independent']:.2f})."]
    for name in made["val_loss"]:
        lines.append(f"{name}: validation loss {mean[name]:.4f} (deviation {spread[name]:.4f}, "
                     f"{len(made['val_loss'][name])} seeds), perplexity "
                     f"{100 * (math.exp(mean[name] - mean['none']) - 1):+.2f}%")
    return "\n".join(lines)


def plot(path, results, change):
    import matplotlib  # pylint: disable=import-outside-toplevel
    matplotlib.use("Agg")
    from matplotlib import pyplot  # pylint: disable=import-outside-toplevel
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 3.8))
    for name in BESIDE:
        points = sorted((r["rate"], r["mean_ms"], r["p99_ms"], r.get("lost", 0))
                        for r in results if r["beside"] == name)
        if not points:
            continue
        rates, means, tails, lost = zip(*points)
        line, = left.plot(rates, means, "o-", label=name)
        left.plot(rates, tails, "o:", color=line.get_color())
        if name != "nothing":
            middle.plot([100 * x for x in lost], means, "o-", color=line.get_color(), label=name)
    left.set(xlabel="requests per second", ylabel="completion time, ms", yscale="log",
             title="mean (solid), 99th percentile (dotted)")
    left.legend()
    middle.set(xlabel="training packets lost, %", ylabel="mean completion time, ms", yscale="log")
    if change:
        seconds, lost, pace = zip(*change["points"])
        right.plot(seconds, [100 * x for x in lost], ".", markersize=3)
        right.axhline(100 * change["budget"], linestyle="--", color="gray")
        right.axvspan(change["third"], 2 * change["third"], alpha=0.15, color="tab:orange")
        right.set(xlabel="s (web service in the shaded part)", ylabel="lost per step, % (dots)",
                  title=f"--loss-budget {change['budget']}")
        other = right.twinx()
        other.plot(seconds, [x / 1000 / HOSTS for x in pace], color="tab:red")
        other.set(ylabel="pace of a rank, Mbit/s (line)", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out" / "coexistence")
    parser.add_argument("--rates", type=int, nargs="+", default=[50, 125, 235],
                        help="requests per second: 10, 25 and 50%% of the links")
    parser.add_argument("--only", help="a rate, or step-change, cost, report")
    parser.add_argument("--steps", type=int, default=300, help="of the trainings that tell the cost")
    parser.add_argument("--seconds", type=float, default=20, help="of requests, and a third of the change")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.only not in (None, "step-change", "cost", "report", *map(str, arguments.rates)):
        parser.error(f"--only is '{arguments.only}', expected one of --rates, step-change, cost or report")
    if not (arguments.seconds > WARM_UP and min(*arguments.rates, arguments.seeds, arguments.steps // 10, 1) > 0):
        parser.error(f"expected --rates and --seeds of at least 1, --steps of at least 10, --seconds above {WARM_UP:g}")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # from here on a pipe that breaks is reported
    reason = testbed.unavailable()
    if reason:
        sys.exit(f"measured.py: {reason}")
    if arguments.quick:
        arguments.rates, arguments.steps, arguments.seconds, arguments.seeds = [50], 12, 3, 1
    arguments.out = arguments.out.resolve()
    (arguments.out / "data").mkdir(parents=True, exist_ok=True)
    subprocess.run([ROOT / "data" / "kjv.sh", arguments.out / "data"], check=True, cwd=ROOT,
                   stdout=subprocess.DEVNULL)
    store = arguments.out / "results.json"
    made = json.loads(store.read_text()) if store.exists() else {"web": []}
    only = arguments.only
    for rate in arguments.rates:
        for name in BESIDE if only in (None, str(rate)) else ():
            result = measure(arguments, rate, name)
            print(json.dumps(result), flush=True)
            made["web"] = [r for r in made["web"] if (r["rate"], r["beside"]) != (rate, name)]
            made["web"].append(result)
            store.write_text(json.dumps(made))
    if only in (None, "step-change"):
        made["change"] = step_change(arguments)
    store.write_text(json.dumps(made))
    if only in (None, "cost"):
        made["cost"] = cost(arguments, made["web"])
    store.write_text(json.dumps(made))
    report = table(made["web"]) + "\n"
    if "cost" in made:
        report += "\n" + describe_cost(made["cost"]) + "\n"
    (arguments.out / "report.md").write_text(report)
    print(report)
    plot(arguments.out / "measured.png", made["web"], made.get("change"))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    try:
        main()
    except RuntimeError as failure:
        sys.exit(f"measured.py: {failure}")

#!/usr/bin/env python3
"""Trains many runs that differ in loss rate, algorithm, estimator, seed, ...;
reports what loss costs.

    scripts/sweeps/sweep.py quick|paper-small|shapes|... | FILE [OPTION]...

FILE is a settings file such as scripts/sweeps/settings/quick:

    prepare = data/gcide.sh out/gcide  # makes the data, once
    model = 260K                       # any option, for all sections
    seed = 1 2 3                       # several values: an axis
    [steep]                            # a section: its axes' combinations
    loss-rate = 0 0.1 0.2
    estimator = mean balanced
    [one phase]
    loss-rate = 0,0 0.2,0 0,0.2        # of gradients, of parameters
    lr/warmup = 1e-3/20 3e-3/100       # set together, not combined
    [continued]
    start = steep                      # from steep's first run without loss
    order = 2                          # after all of order 1 (the default)
    title = Continued training         # what tables and plots call it
    against = wire-dtype=float32       # compared with the run that has this
                                       # and is the same otherwise; A and B:
                                       # with the mean of both
    rule = none hadamard               # with the rule of others/hadamard.c
    name/plain = ours/no the_paper/yes # names of the arms, for tables, plots
    launch = mpirun -np 64             # stands before every command

Runs with `device = cuda` train side by side on one GPU, as many as its memory
allows (--jobs, --gpus).

Runs are ordered by seed, so the tables are useful at any time. Each run is
compared with the run without loss of the same seed, or with the run that
`against` names. Everything is kept in out/sweeps/NAME: logs, results
(results.jsonl), table.md, table.csv, plots. Stop it with Ctrl-C or SIGTERM and
call it again: unfinished runs are saved and resumed. A run is not repeated if
it is finished or if a settings/*.jsonl (--keep) or another file (--results)
has its result.
"""
import argparse
import ctypes
import fcntl
import glob
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from sweep_report import as_text, report
from sweep_rules import build_rule, object_of
from sweep_results import add_result, read_results, result_of, steps_done
from sweep_settings import Settings, SettingsError
from python_packages import require  # in scripts, which report.py has added

HERE = os.path.dirname(os.path.abspath(__file__))
# How often a run without loss is evaluated: step_tax() needs this curve.
BASELINE_EVALUATIONS = 10
# Runs that share a GPU: how much of its free memory they may plan to use, and how many there are at most.
GPU_SHARE, GPU_JOBS = 0.9, 8


def kept_files():
    """The kept results of all settings files, because some of these files ask for the same runs."""
    return sorted(glob.glob(os.path.join(HERE, "settings", "*.jsonl")))


def begin_process(set_for_process=ctypes.CDLL(None).prctl):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_for_process(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG of prctl(2): the signal when the parent dies


def duration(seconds):
    minutes = int(seconds / 60 + 0.5)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else \
        f"{minutes} min" if seconds >= 60 else f"{int(seconds)} s"


def gpu_memory_free():
    """Free memory of the first GPU, in 10^9 bytes; 0: nvidia-smi does not say it."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"],
                              capture_output=True, text=True, check=True).stdout
        return float(said.split()[0]) * 2**20 / 1e9
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return 0


def planned_gigabytes(command):
    """The memory of a GPU that a run takes, as --dry-run says."""
    said = subprocess.run(command + ["--dry-run"], capture_output=True, text=True, check=False).stdout
    total = re.search(r"^ *total +([\d.]+) GB", said, re.MULTILINE)
    return float(total[1]) if total else 0


class Sweep:
    def __init__(self, settings, arguments, program):
        self.settings, self.arguments, self.program = settings, arguments, program
        self.out = arguments.out or os.path.join("out", "sweeps", settings.name)
        self.file = os.path.join(self.out, "results.jsonl")
        self.kept_file = os.path.join(HERE, "settings", settings.name + ".jsonl")
        self.results, self.active, self.failed, self.stopping = {}, [], [], False
        self.threads = None  # of each run on a GPU
        self.began, self.worked = time.monotonic(), 0.0  # worked: tokens trained by this call

    # ---- results and checkpoints ---------------------------------------------------------

    def load(self):
        kept = sorted(kept_files(), key=self.kept_file.__eq__)
        for path in kept + self.arguments.results + [self.file]:  # the last counts
            self.results.update(read_results(path))

    def check_data(self):
        """Refuses to go on with results of other data."""
        own = read_results(self.file)
        for run in self.settings.runs:
            if run.id in own and own[run.id].get("data", run.data()) != run.data():
                raise SettingsError(f"{self.file}: its runs had other contents of '{run.options['train']}' or of "
                                    f"'{run.options['val']}' than there are now: expected --out with another folder")

    def tell_versions(self):
        """Prints a line if the program was changed between the runs of this folder, and one if runs are compared with
        those of another kind of processor, whose bits differ."""
        own = read_results(self.file)
        versions = {own[run.id].get("revision") or "unknown" for run in self.settings.runs if run.id in own}
        if len(versions) > 1:
            print(f"sweep: note: the runs in {self.out} are of {len(versions)} versions of the program: "
                  f"{', '.join(sorted(versions))}", file=sys.stderr)
        kind = lambda name: (self.results.get(name, {}).get("backend") or "").split(",")[0]
        pairs = [(kind(run.id), kind(run.baseline)) for run in self.settings.runs if run.baseline != run.id]
        pairs = [pair for pair in pairs if all(pair)]
        mixed = sorted({" and ".join(sorted(pair)) for pair in pairs if pair[0] != pair[1]})
        if mixed:
            print(f"sweep: note: {sum(mine != base for mine, base in pairs)} of {len(pairs)} runs are compared with one of "
                  f"another kind of processor ({', '.join(mixed)}): these changes have the noise of two runs",
                  file=sys.stderr)

    def directory(self, run):
        return os.path.join(self.out, "runs", run.id)

    def log(self, run):
        return os.path.join(self.directory(run), "log.jsonl")

    def checkpoint(self, run):
        """The checkpoint at the end of a run, for runs that start from it. None before the run ended."""
        path = os.path.join(self.directory(run), f"checkpoint-{int(run.options['steps']):08d}")
        return path if os.path.exists(os.path.join(path, "trainer.json")) else None

    def missing(self):
        """The runs to do: those without a result, and those whose model such a run still needs."""
        todo = [run for run in self.settings.runs if run.id not in self.results]
        ids = {run.id for run in todo}
        for run in list(todo):
            while run.start and not self.checkpoint(run.start) and run.start.id not in ids:
                ids.add(run.start.id)
                todo.append(run.start)
                run = run.start
        return [run for run in self.settings.runs if run.id in ids]

    # ---- running -------------------------------------------------------------------------

    def slots(self):
        a = self.arguments
        if self.on_gpu():
            jobs = a.jobs or self.jobs_of_gpu()
            threads = max(1, len(os.sched_getaffinity(0)) // (jobs * (a.gpus or 1)))
            self.threads = threads
            return [{"OMP_NUM_THREADS": str(threads), **({"CUDA_VISIBLE_DEVICES": str(gpu)} if a.gpus else {})}
                    for _ in range(jobs) for gpu in range(a.gpus or 1)]
        if a.gpus:
            return [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(a.gpus)]
        if self.settings.launch:
            return [{} for _ in range(a.jobs or 1)]
        jobs = a.jobs or max(1, len(os.sched_getaffinity(0)) // a.threads)
        # A waiting thread spins only briefly before it sleeps, because runs share the cores.
        return [{"OMP_NUM_THREADS": str(a.threads), "GOMP_SPINCOUNT": "1000"} for _ in range(jobs)]

    def on_gpu(self):
        """Whether all runs ask for a GPU, and are processes of their own."""
        return not self.settings.launch and all(run.value("device", "auto") == "cuda" for run in self.settings.runs)

    def jobs_of_gpu(self):
        """How many runs fit a GPU side by side: its free memory over what the largest of them plans. 1: unknown."""
        missing = self.missing()
        kinds = {tuple(sorted((name, value) for name, value in run.options.items() if name != "seed")): run
                 for run in missing if not run.start}
        need = max((planned_gigabytes(run.command(self.program, self.settings.known)) for run in kinds.values()),
                   default=0)
        fit = int(GPU_SHARE * gpu_memory_free() / need) if need else 1
        return max(1, min(fit, GPU_JOBS, len(missing)))

    def begin(self, run, slot):
        directory = self.directory(run)
        os.makedirs(directory, exist_ok=True)
        rule = run.value("rule", "none")
        command = self.settings.launch + run.command(self.program, self.settings.known)
        command += [] if rule == "none" else ["--rule", object_of(rule)]
        command += ["--out", directory, "--resume", "auto", "--quiet"]
        if run.start:
            command += ["--model", self.checkpoint(run.start)]
        if "threads" not in run.options and not self.settings.launch and (self.threads or not self.arguments.gpus):
            command += ["--threads", str(self.threads or self.arguments.threads)]
        if run.lossless() and "eval-every" not in run.options:
            every = max(1, int(run.options["steps"]) // BASELINE_EVALUATIONS)
            command += ["--eval-every", str(every)]
        errors = open(os.path.join(directory, "stderr"), "wb")
        # Ctrl-C reaches the whole process group. Runs ignore it, and stop() tells them to save. A
        # launcher would not ignore it, so it gets a session of its own. Where this process is killed, its runs save.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
            env={**os.environ, **slot}, start_new_session=bool(self.settings.launch),
            preexec_fn=begin_process)
        errors.close()
        self.active.append({"run": run, "process": process, "slot": slot, "began": time.monotonic(),
                            "first": steps_done(self.log(run))})

    def end(self, job):
        """Stores the result of a process that ended."""
        run, status = job["run"], job["process"].returncode
        self.active.remove(job)
        result = result_of(run, self.log(run))
        if result:
            self.worked += self.done_by(job)
            self.take(run, result)
            return
        if not self.stopping:
            self.failed.append(run)
            with open(os.path.join(self.directory(run), "stderr"), encoding="utf-8",
                      errors="replace") as file:
                said = [line for line in file.read().splitlines() if line.strip()]
            print(f"\nsweep: {run.section.name}, {run.label()}, seed {run.value('seed', '1')}: "
                  f"exit code {status}: {said[-1] if said else 'no reason given'}",
                  file=sys.stderr)

    def take(self, run, result):
        add_result(self.file, result)
        self.results[run.id] = result
        needed = any(other.start and other.start.id == run.id for other in self.settings.runs)
        for name in os.listdir(self.directory(run)):
            if name.startswith("checkpoint-") and not needed:
                shutil.rmtree(os.path.join(self.directory(run), name))

    def done_by(self, job):
        run = job["run"]
        return (steps_done(self.log(run)) - job["first"]) / float(run.options["steps"]) * run.tokens()

    def ready(self, todo):
        for run in todo:
            if run.start and not self.checkpoint(run.start):
                continue
            return run
        return None

    def work(self):
        todo = []
        for run in self.missing():
            result = result_of(run, self.log(run)) if run.id not in self.results else None
            if result:  # the run ended after the previous sweep was killed
                self.take(run, result)
            else:
                todo.append(run)
        self.total = sum(run.tokens() for run in todo)
        self.started = sum(steps_done(self.log(run)) / float(run.options["steps"]) * run.tokens()
                           for run in todo)
        free = self.slots()
        deadline = self.began + 60 * (self.arguments.minutes or 1e9)
        while (todo and not self.stopping) or self.active:
            while free and not self.stopping:
                run = self.ready(todo)
                if not run:
                    break
                todo.remove(run)
                self.begin(run, free.pop(0))
            if not self.active:
                break  # all runs that are left start from a run that failed
            time.sleep(0.05 if not sys.stdout.isatty() else 0.2)
            for job in list(self.active):
                if job["process"].poll() is not None:
                    free.append(job["slot"])
                    self.end(job)
                    if job["run"].id in self.results:
                        self.tell(job)
            self.show()
            if time.monotonic() > deadline and not self.stopping:
                self.stop()
        if sys.stdout.isatty():
            self.line("", "\r")
        return todo

    def stop(self, *_):
        """The first call makes every run save and end. The second call kills the runs."""
        for job in self.active:
            if self.stopping:
                job["process"].kill()
            else:
                job["process"].send_signal(signal.SIGUSR1)  # mpirun and srun pass it on
        self.stopping = True

    # ---- reports to the user ---------------------------------------------------------------

    def left(self):
        """Seconds until all is done, at the speed of this call so far; None while it is not known."""
        worked = self.worked + sum(self.done_by(job) for job in self.active)
        spent = time.monotonic() - self.began
        if worked <= 0 or spent < 2:
            return None
        return (self.total - self.started - worked) * spent / worked

    def counts(self):
        done = sum(run.id in self.results for run in self.settings.runs)
        left = self.left()
        return f"{done}/{len(self.settings.runs)}", f"{duration(left)} left" if left else ""

    def change(self, run):
        mine = self.results[run.id].get("perplexity")
        base = self.results.get(run.baseline, {}).get("perplexity")
        if not mine or not base or run.baseline == run.id:
            return ""
        return f" ({100 * (mine / base - 1):+.2f}%)"

    def tell(self, job):
        """Prints one line about a run that is done."""
        run, (count, left) = job["run"], self.counts()
        perplexity = self.results[run.id]["perplexity"]
        text = f"{perplexity:.2f}{self.change(run)}" if perplexity else "not finite"
        what = f"{run.section.name}, {run.label()}, seed {run.value('seed', '1')}"
        tail = f": {text}, {duration(time.monotonic() - job['began'])}"
        if left:
            tail += f"; {left}"
        room = 79 - len(count) - 1 - len(tail)
        self.line(f"{count} {what[:room]}{tail}", "\n")
        if not self.arguments.runs_only:
            report(self.settings, self.results, self.out, plots=False)

    def line(self, text, end):
        if sys.stdout.isatty():
            room = shutil.get_terminal_size().columns - 1 if end != "\n" else 79
            print("\r\033[K" + text[:room], end=end, flush=True)
        elif end == "\n":
            try:
                print(text[:79], flush=True)
            except BrokenPipeError:  # nobody reads
                sys.stdout = open(os.devnull, "w", encoding="utf-8")

    def show(self):
        count, left = self.counts()
        parts = []
        for job in self.active:
            steps = steps_done(self.log(job["run"]))
            parts.append(f"{job['run'].label()} {steps}/{job['run'].options['steps']}")
        self.line(f"{count}  {left}  " + " | ".join(parts) if not self.stopping else
                  "saving what is running ...", "")

    def list(self):
        for run in self.settings.runs:
            state = "done" if run.id in self.results else \
                f"{steps_done(self.log(run))}/{run.options['steps']}"
            print(f"{run.id}  {state:>11}  {run.section.name}, {run.label()}, "
                  f"seed {run.value('seed', '1')}")


def keep(sweep):
    """Adds new results to the .jsonl file beside the settings file, which is in the repository."""
    kept = {result for path in kept_files() for result in read_results(path)}
    new = [sweep.results[run.id] for run in sweep.settings.runs
           if run.id in sweep.results and run.id not in kept]
    for result in new:
        add_result(sweep.kept_file, result)
    print(f"{len(new)} new results in {os.path.relpath(sweep.kept_file)}")


def parse():
    parser = argparse.ArgumentParser(
        prog="sweep", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help="quick, paper-small, paper-7b, or a file")
    parser.add_argument("--out", metavar="DIR", help="default: out/sweeps/NAME")
    parser.add_argument("--jobs", type=int, metavar="N",
                        help="runs side by side, on each GPU; default: cores / threads, or what a GPU's memory holds")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of each run on a CPU [1]")
    parser.add_argument("--gpus", type=int, metavar="N", help="so many GPUs side by side")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after so long")
    parser.add_argument("--results", action="append", default=[], metavar="FILE",
                        help="more results that need not be repeated")
    parser.add_argument("--table", action="store_true", help="tables and plots of what is there")
    parser.add_argument("--no-plots", action="store_true", help="tables alone; needs no matplotlib")
    parser.add_argument("--runs-only", action="store_true",
                        help="no tables either; needs no scipy. At the end lists which runs are complete")
    parser.add_argument("--list", action="store_true", help="the runs and how far they are")
    parser.add_argument("--keep", action="store_true",
                        help="when done, put results beside the settings, for the repository")
    arguments = parser.parse_args()
    for name in ("jobs", "threads", "gpus"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}, expected 1 or more")
    for path in arguments.results:
        if not os.path.exists(path):
            parser.error(f"--results: there is no file '{path}'")
        if not read_results(path):
            parser.error(f"--results: '{path}' has no results: expected a results.jsonl")
    if arguments.minutes is not None and not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes:g}, expected more than 0")
    return arguments


def prepare(settings):
    """Makes the data, if the settings have a command for it."""
    if not settings.prepare:
        return
    try:
        status = subprocess.run(settings.prepare, check=False).returncode
    except OSError as error:
        raise SettingsError(f"{settings.path}: prepare: {error}") from None
    if status:
        raise SettingsError(f"{settings.path}: '{' '.join(settings.prepare)}' failed, see above")


def main():
    try:
        return sweep_of(parse())
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
        return 1
    except OSError as error:  # as of a full disk
        print(f"sweep: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        return 1


def sweep_of(arguments):
    if not arguments.list and not arguments.table:  # a closed pipe does not stop the runs
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if not arguments.list and not arguments.runs_only:
        require("scipy", *([] if arguments.no_plots else ["matplotlib"]), target="sweep")
    program = os.environ.get("TRAIN_LLAMA2",
                             os.path.join(os.environ.get("BUILD", "build"), "train_llama2"))
    path = arguments.settings
    ready_made = os.path.join(HERE, "settings", path)
    if not os.path.exists(path) and os.path.exists(ready_made):
        path = os.path.relpath(ready_made)
    try:
        settings = Settings(path, program)
        prepare(settings)
        settings.expand()
        sweep = Sweep(settings, arguments, program)
        sweep.load()
        if not arguments.table and not arguments.list:
            sweep.check_data()
            settings.check(program)
            for rule in sorted({run.value("rule", "none") for run in sweep.missing()} - {"none"}):
                build_rule(rule)
    except SettingsError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2
    if arguments.list:
        sweep.list()
        return 0
    os.makedirs(sweep.out, exist_ok=True)
    if not arguments.table:
        lock = open(os.path.join(sweep.out, "lock"), "w", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print(f"sweep: another sweep is at work in {sweep.out}; wait, or give --out",
                  file=sys.stderr)
            return 1
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, sweep.stop)
        try:
            sweep.work()
        finally:  # after an error runs save, and end
            sweep.stop()
            for job in sweep.active:
                job["process"].wait()
    if arguments.runs_only:
        sweep.list()
    else:
        rows = report(settings, sweep.results, sweep.out, plots=not arguments.no_plots)
        print(as_text(rows))
        plots = "" if arguments.no_plots or not rows else "plots (PNG and SVG), "
        print(f"in {sweep.out}: table.md, table.csv, {plots}logs of the runs")
    sweep.tell_versions()
    if arguments.keep:
        keep(sweep)
    left, every = len(sweep.missing()), len(settings.runs)
    if left:
        print(f"sweep: {left} of {every} runs are left; the same command " +
              ("without --table makes them" if arguments.table else "goes on"), file=sys.stderr)
    if arguments.table:
        return 1 if left == every else 0
    return 1 if sweep.failed or (left and not arguments.minutes) else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())

"""A run that the chaos disturbs, and what must hold of it (see soak.py). members.py and launched.py start it, each in
its own way, and have the faults that this way allows."""
import array
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import time

import standstill
import store

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCABULARY = 512  # of the model 260K
HANG = 60         # seconds without a step in which the run may go on
SAMPLES = 3       # of memory, a second apart, at least


def write_tokens(path, count, seed):
    """Made-up text: each token has four likely successors."""
    draw, table = random.Random(seed), random.Random(7)
    successors = [[table.randrange(VOCABULARY) for _ in range(4)] for _ in range(VOCABULARY)]
    tokens, token = array.array("H"), 0
    for _ in range(count):
        token = draw.choice(successors[token]) if draw.random() < 0.9 else draw.randrange(VOCABULARY)
        tokens.append(token)
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, VOCABULARY, *[0] * 252) + tokens.tobytes())


def pids_of(names):
    """Of members in an event of the log: "rank 0 host:7, rank 2 host:8"."""
    return {int(name.split(":")[-1]) for name in names.split(",") if name.strip()}


class Process:
    def __init__(self, command, said):
        self.said, self.expected = said, False  # expected: we have ended it, or asked it to end
        self.resident = []                      # (second, ranks of the view, bytes)
        self.began = time.monotonic()
        with open(said, "w", encoding="utf-8") as file:
            self.popen = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=file, stderr=file, env={
                **os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "CUDA_VISIBLE_DEVICES": "",
                "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_mpi_yield_when_idle": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"})

    def lives(self):
        return self.popen.poll() is None

    def signal(self, number):
        if self.lives():
            self.popen.send_signal(number)

    def ranks(self):
        """The ids of the processes that train."""
        return [self.popen.pid]

    def note_memory(self, ranks):
        pages = 0
        for pid in self.ranks():
            try:
                pages = max(pages, int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]))
            except (OSError, IndexError):
                pass
        if pages:
            self.resident.append((time.monotonic() - self.began, ranks, pages * os.sysconf("SC_PAGE_SIZE")))

    def growth(self):
        """The least resident memory in the last quarter of the time in which it trained, relative to the most of
        the first half, both with the same number of ranks: more ranks need more, and a process goes to and fro, from
        25 to 45 MB, since a save or a handover takes memory for seconds. 0 if it trained for too short: the first
        changes of ranks take memory that stays."""
        if not self.resident or self.resident[-1][0] - self.resident[0][0] < 60:
            return 0
        quarter, growth = (self.resident[-1][0] - self.resident[0][0]) / 4, 0
        for ranks in {sample[1] for sample in self.resident}:
            before, after = ([size for second, with_ranks, size in self.resident if with_ranks == ranks and
                              first <= second - self.resident[0][0] <= first + length]
                             for first, length in ((0, 2 * quarter), (3 * quarter, quarter)))
            if len(before) >= SAMPLES and len(after) >= SAMPLES:
                growth = max(growth, min(after) / max(before))
        return growth


class Watched:
    PEER_TIMEOUT = 1  # seconds
    FAULTS = ()       # (name, weight)

    def __init__(self, given, folder):
        self.given, self.folder = given, folder
        self.random = random.Random(given.seed)
        self.out, self.log, self.process = folder / "out", folder / "log.jsonl", []
        self.until = []       # (second, function): what ends a fault that lasts
        self.held_until = 0   # until when the run may stand still: a fault holds up all
        self.done, self.still = collections.Counter(), standstill.Standstill()
        self.position, self.steps, self.views, self.members = 0, [], 0, 0
        self.present = set()  # the ids of the processes of the present view
        self.trained = set()  # of those that were in a view
        self.moved = self.newest = 0
        self.wrong = []
        self.begun = time.monotonic()
        for name, count in (("train", 100_000), ("val", 5_000)):
            write_tokens(folder / f"{name}.bin", count, len(name))
        store.mount(self.out, 96 * store.MIB)

    def options(self):
        """Those of all ranks."""
        return ["--model", "260K", "--train", self.folder / "train.bin", "--val", self.folder / "val.bin",
                "--batch", 1, "--seq", 32, "--steps", 10 ** 6, "--lr", 1e-3, "--peer-timeout", self.PEER_TIMEOUT,
                "--out", self.out, "--log", self.log, "--loss-rate", 0.1, "--save-every", 50, "--keep", 2,
                "--resume", "auto", "--eval-every", 40, "--eval-sequences", 8, *self.given.options]

    def seconds(self):
        return time.monotonic() - self.begun

    def say(self, *words):
        self.still.note(time.monotonic(), "fault", " ".join(map(str, words)))
        print(f"{self.seconds():7.2f}", *words, flush=True)

    def living(self):
        return [p for p in self.process if p.lives()]

    def pids(self):
        return [pid for p in self.living() for pid in p.ranks()]

    def later(self, seconds, what):
        self.until.append((time.monotonic() + seconds, what))

    def hold(self, seconds):
        self.held_until = max(self.held_until, time.monotonic() + seconds)

    def start(self):
        raise NotImplementedError

    def take_end(self, process):
        """A process has ended which was not expected to."""
        said = process.said.read_text(errors="replace").splitlines()[-2:]
        self.wrong.append(f"process {self.process.index(process)} ended with {process.popen.returncode}: "
                          f"{' | '.join(said)}")

    # ---- faults ----

    def fault_disk_full(self):
        filler, seconds = store.fill(self.out), self.random.uniform(2, 8)
        self.later(seconds, lambda: filler.unlink(missing_ok=True))
        return round(seconds, 2)

    def another_clock(self):
        """Words before a command, whose clock is another one then. It stays the same process."""
        library = self.folder / "another_clock.so"
        if not library.exists():
            subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, ROOT / "dev/chaos/another_clock.c"], check=True)
        return ["env", f"LD_PRELOAD={library}", f"SHIFT={self.random.choice([-7200, 7200, 400 * 86400])}"]

    def impossible(self):
        """The names of faults that cannot be made here."""
        return ([] if shutil.which("gcc") else ["another_clock"]) + (
            [] if os.path.ismount(self.out) else ["disk_full"])

    def faults(self):
        """The faults that can be made here, as (name, weight, function). Says which cannot."""
        missing = self.impossible()
        print(f"seed {self.given.seed}, {self.given.seconds:g} s, {self.given.ranks} ranks; not tried here:",
              ", ".join(missing) or "nothing")
        return [(name, weight, getattr(self, f"fault_{name}")) for name, weight in self.FAULTS if name not in missing]

    def between_faults(self):
        """What is needed to go on, such as new processes."""

    # ---- what must hold ----

    def read_again(self):
        self.position, self.steps, self.views = 0, [], 0
        self.present = {p.popen.pid for p in self.process[:self.given.ranks]}
        self.trained |= self.present

    def read_log(self):
        """Takes the new whole lines of the log. Returns whether there were new steps. A start that goes on from
        an earlier step cuts the log back to it; then this reads from the start again."""
        before, position = len(self.steps), self.position
        try:
            with open(self.log, "rb") as file:
                if os.fstat(file.fileno()).st_size < self.position:
                    raise ValueError
                file.seek(self.position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self.take_event(json.loads(line))
                    self.position += len(line)
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            self.read_again()
        return len(self.steps) > before or self.position < position

    def take_event(self, event):
        if event["event"] == "view":
            self.views, self.members = self.views + 1, event["ranks"]
            self.present -= pids_of(event["left"])
            self.present |= pids_of(event["joined"])
            self.trained |= self.present
        if event["event"] == "step":
            self.steps.append(event["step"])

    def check_log(self):
        """Checks the log as it is at the end."""
        self.read_again()
        self.read_log()
        steps, self.steps = self.steps, []
        for step in steps:
            self.check_step(step)

    def check_step(self, step):
        last = self.steps[-1] if self.steps else -1
        late = "--deadline" in self.given.options  # then rank 0 may leave steps out
        if step != last + 1 and not (late and step > last):
            self.wrong.append(f"step {step} is logged after step {last}")
        self.steps.append(step)

    def newest_checkpoint(self):
        return max((int(path.name.split("-")[1]) for path in self.out.glob("checkpoint-????????")), default=0)

    def check_checkpoints(self):
        newest = self.newest_checkpoint()
        if newest < self.newest:
            self.wrong.append(f"checkpoint {newest} is the newest after checkpoint {self.newest}")
        self.newest = newest

    def look(self):
        now = time.monotonic()
        for at, what in [u for u in self.until if u[0] <= now]:
            self.until.remove((at, what))
            what()
        for p in self.living():
            self.still.listen(now, p.said.name, p.said)
        if self.read_log():
            if self.moved:
                self.still.end(max(self.moved, min(self.held_until, now)), now, self.pids())
            self.moved = now
            self.still.begin(now, self.pids())
        elif now < self.held_until:
            self.still.begin(now, self.pids())
        elif self.moved and now - max(self.moved, self.held_until) > HANG:
            self.wrong.append(f"no step for {HANG} s")
            return False
        for p in list(self.process):
            if not p.lives() and not p.expected:
                p.expected = True
                self.take_end(p)
        return True

    def trains(self, process):
        """Whether a process has begun to train."""
        return process.popen.pid in self.present

    def wait(self, seconds, what=lambda: False):
        """Looks for `seconds` seconds, or until what() is true. Returns whether that came."""
        end, looked, wrong = time.monotonic() + seconds, 0, len(self.wrong)
        while time.monotonic() < end:
            if not self.look():
                return False
            if what() or len(self.wrong) > wrong:
                return what()
            if time.monotonic() > looked + 1:
                looked = time.monotonic()
                self.check_checkpoints()
                for p in filter(self.trains, self.living()):
                    p.note_memory(self.members)
            time.sleep(0.02)
        return what()

    def ask_to_end(self):
        """Asks the run to stop with a checkpoint. Returns the processes that must end with 0."""
        raise NotImplementedError

    def finish(self):
        """Ends all faults and the run. Checks the last checkpoint."""
        for _, what in self.until:
            what()
        self.until, before = [], len(self.steps)
        self.hold(10)
        if not self.wait(HANG, lambda: len(self.steps) >= before + 5):
            self.wrong.append("no 5 steps after the last fault")
        asked = self.ask_to_end()
        self.wait(HANG, lambda: not self.living())
        codes = [p.popen.poll() for p in asked]
        if any(code != 0 for code in codes) or not codes:
            self.wrong.append(f"after the signal the processes ended with {codes}")
        self.check_log()
        self.check_checkpoints()
        last = self.out / f"checkpoint-{self.steps[-1] + 1 if self.steps else 0:08}"
        done = subprocess.run([self.given.program, "--eval", "--model", last, "--val", self.folder / "val.bin",
                               "--seq", "32"], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            self.wrong.append(f"{last.name}: {done.stderr.strip()}")

    def report(self):
        typical, longest = self.still.worst(sum(self.done.values()))
        growth = max((p.growth() for p in self.process), default=0)
        if typical[1] > self.given.stand_still:
            self.wrong.append(f"stood still for {typical[1]:.1f} s without the time in which a process waited for a "
                              f"processor: expected at most {self.given.stand_still} s")
        if growth > 1.2:
            self.wrong.append(f"a process has grown to {growth:.2f} times its memory")
        print(f"done: {dict(sorted(self.done.items()))}")
        print(f"{self.seconds():.0f} s, {len(self.process)} processes, {len(self.steps)} steps, {self.views} views, "
              f"stood still {typical[0]:.1f} s (99%), {longest[0]:.1f} s (longest), without waits for a processor "
              f"{typical[1]:.1f} s, {longest[1]:.1f} s, memory x{growth:.2f}")
        self.still.tell(self.begun)
        for line in self.wrong:
            print("wrong:", line)
        return 1 if self.wrong else 0

    def disturb(self):
        faults = self.faults()
        self.start()
        if not self.wait(120, lambda: len(self.steps) >= 10):
            self.wrong.append("no 10 steps in 120 s")
            return self.report()
        end = time.monotonic() + self.given.seconds
        while time.monotonic() < end and not self.wrong:
            self.wait(self.random.uniform(0.1, 2.5))
            name, _, fault = self.random.choices(faults, [weight for _, weight, _ in faults])[0]
            whom = fault()
            if whom is not None:
                self.done[name] += 1
                self.say(name, whom)
            self.between_faults()
        self.finish()
        return self.report()

    def close(self):
        for p in self.living():
            for pid in p.ranks():
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass
            p.popen.kill()
            p.popen.wait()
        store.unmount(self.out)

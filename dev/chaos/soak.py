#!/usr/bin/env python3
"""Trains with --meet while everything that a seed chooses goes wrong, and checks what must hold.

    dev/chaos/soak.py [--seconds 60] [--seed 1] [--ranks 4] [--hosts] [-- OPTION...]

Processes of build/train_llama2 train together; OPTION... are more options of it. Every moment one of
FAULTS happens. Each is one line: the second, what, and to whom. With --hosts (as root) every process is
on a host of its own (dev/testbed), and the network between them is disturbed, too. Faults that this
machine cannot make are named at the start.

What must hold, else the exit status is 1:

    every step is logged once and in order        no process ends by itself
    the run stands still for at most --stand-still seconds, in 99% of the faults during which it may go on
    the step of the newest checkpoint never falls; the last one is whole, and its perplexity can be measured
    memory is flat: no process has grown by more than a fifth since its first third
    at the end one SIGTERM ends all with a checkpoint

The seed decides what is done and when. The machine decides at which step that is, so a run is repeated
only nearly.
"""
import argparse
import array
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev" / "testbed"))
import hosts as testbed  # pylint: disable=wrong-import-position

VOCABULARY = 512  # of the model 260K
PEER_TIMEOUT = 1  # seconds
HANG = 60         # seconds without a step in which the run may go on
LEAST_RANKS = 2   # that are left to train
MIB = 1 << 20


def write_tokens(path, count, seed):
    """Made-up text: each token has four likely successors."""
    draw, table = random.Random(seed), random.Random(7)
    successors = [[table.randrange(VOCABULARY) for _ in range(4)] for _ in range(VOCABULARY)]
    tokens, token = array.array("H"), 0
    for _ in range(count):
        token = draw.choice(successors[token]) if draw.random() < 0.9 else draw.randrange(VOCABULARY)
        tokens.append(token)
    path.write_bytes(struct.pack("<256i", 20240520, 1, count, VOCABULARY, *[0] * 252) + tokens.tobytes())


# Checks whether keys can be read. The port is open earlier than that.
ASK = """import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/v3/kv/range", b'{"key": "AA=="}', timeout=5)"""


class Store:
    """etcd, which the chaos pauses and kills."""

    def __init__(self, folder, address, shell=()):
        self.folder, self.address, self.shell, self.ports = folder, address, shell, []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports.append(probe.getsockname()[1])
        self.url = f"http://{address}:{self.ports[0]}"
        self.start()
        self.wait()

    def start(self):
        peer = f"http://127.0.0.1:{self.ports[1]}"
        self.process = subprocess.Popen(
            [*self.shell, "etcd", "--data-dir", self.folder, "--listen-client-urls", self.url,
             "--advertise-client-urls", self.url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls",
             peer, "--initial-cluster", f"default={peer}", "--log-level", "error"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def wait(self):
        """Waits until it answers. It may be on another host, so a process there asks."""
        end = time.monotonic() + 60
        while subprocess.run([*self.shell, sys.executable, "-c", ASK, self.url], check=False,
                             stderr=subprocess.DEVNULL).returncode:
            if time.monotonic() > end:
                sys.exit("etcd does not start")
            time.sleep(0.05)

    def kill(self):
        self.process.kill()
        self.process.wait()


class Process:
    def __init__(self, command, said):
        self.said, self.expected = said, False  # expected: we have ended it, or asked it to end
        self.resident = []                      # (second, bytes)
        self.began = time.monotonic()
        with open(said, "w", encoding="utf-8") as file:
            self.popen = subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=file, stderr=file, env={
                **os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "CUDA_VISIBLE_DEVICES": ""})

    def lives(self):
        return self.popen.poll() is None

    def signal(self, number):
        if self.lives():
            self.popen.send_signal(number)

    def note_memory(self):
        try:
            pages = int(pathlib.Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return
        if pages:
            self.resident.append((time.monotonic() - self.began, pages * os.sysconf("SC_PAGE_SIZE")))

    def growth(self):
        """Resident memory at the end, relative to the most in the first third; 0 if it ran for too short: the
        first changes of ranks take memory that stays."""
        if not self.resident or self.resident[-1][0] < 60:
            return 0
        third = max(size for second, size in self.resident if second <= self.resident[-1][0] / 3 + 5)
        return self.resident[-1][1] / third


class Soak:
    def __init__(self, given, folder, hosts):
        self.given, self.folder, self.hosts = given, folder, hosts
        self.random = random.Random(given.seed)
        self.out, self.log, self.process = folder / "out", folder / "log.jsonl", []
        self.store_host = given.ranks + given.spare if hosts else None
        address = hosts.address(self.store_host) if hosts else "127.0.0.1"
        self.store = Store(folder / "etcd", address, hosts.shell(self.store_host) if hosts else ())
        self.until = []       # (second, function): what ends a fault that lasts
        self.held_until = 0   # until when the run may stand still: a fault holds up all
        self.stopped = set()
        self.store_away = 0   # until when; a process that starts meanwhile ends with a line
        self.done, self.still = collections.Counter(), []
        self.position, self.steps, self.views, self.members = 0, [], 0, 0
        self.moved = self.newest = 0
        self.wrong = []
        self.begun = time.monotonic()

    # ---- processes ----

    def seconds(self):
        return time.monotonic() - self.begun

    def say(self, *words):
        print(f"{self.seconds():7.2f}", *words, flush=True)

    def start(self, *shell):
        i = len(self.process)
        before = self.hosts.shell(i % self.store_host) if self.hosts else []
        if self.given.address_space:
            before = [*before, "prlimit", f"--as={self.given.address_space}"]
        run = f"etcd://{self.store.url.split('//')[1]}/soak"
        command = [self.given.program, "--meet", run, "--meet-ranks", self.given.ranks, "--model", "260K",
                   "--train", self.folder / "train.bin", "--val", self.folder / "val.bin", "--batch", 1, "--seq", 32,
                   "--steps", 10 ** 6, "--lr", 1e-3, "--peer-timeout", PEER_TIMEOUT, "--out", self.out, "--log",
                   self.log, "--loss-rate", 0.1, "--save-every", 50, "--keep", 2, "--resume", "auto", "--eval-every",
                   40, "--eval-sequences", 8, *(["--interface", "eth0"] if self.hosts else []), *self.given.options]
        self.process.append(Process([*before, *shell, *command], self.folder / f"said.{i}"))

    def living(self):
        return [p for p in self.process if p.lives()]

    def free(self):
        """The processes that train, and are not stopped."""
        return [p for p in self.living() if p not in self.stopped]

    def number(self, process):
        return self.process.index(process)

    def later(self, seconds, what):
        self.until.append((time.monotonic() + seconds, what))

    def hold(self, seconds):
        self.held_until = max(self.held_until, time.monotonic() + seconds)

    # ---- faults ----

    def victim(self):
        return self.random.choice(self.free()) if len(self.free()) > LEAST_RANKS else None

    def end(self, count):
        killed = []
        for _ in range(count):
            p = self.victim()
            if p:
                p.expected = True
                p.signal(signal.SIGKILL)
                p.popen.wait()
                killed.append(self.number(p))
        return killed or None

    def fault_kill(self):
        return self.end(1)

    def fault_kill_two(self):
        return self.end(2)

    def may_start(self):
        return time.monotonic() > self.store_away and len(self.living()) < self.given.ranks + self.given.spare

    def fault_join(self):
        if not self.may_start():
            return None
        self.start()
        return len(self.process) - 1

    def fault_join_with_another_clock(self):
        if not self.may_start():
            return None
        offset = self.random.choice(["-2h", "+2h", "+400d"])
        self.start("faketime", "-f", offset)
        return len(self.process) - 1, offset

    def stop(self, process, seconds):
        def go_on():
            process.signal(signal.SIGCONT)
            self.stopped.discard(process)
        process.signal(signal.SIGSTOP)
        self.stopped.add(process)
        self.later(seconds, go_on)

    def fault_stop(self):
        p, seconds = self.victim(), self.random.choice([0.2, 0.5, 1, 2, 5, 10])
        if not p:
            return None
        self.stop(p, seconds)
        return self.number(p), seconds

    def fault_freeze_all(self):
        seconds = self.random.choice([0.5, 1.5, 4])
        for p in self.free():
            self.stop(p, seconds)
        self.hold(seconds + 5)  # they may meet again after it
        return seconds

    def fault_store_pauses(self):
        seconds = self.random.uniform(0.5, 4)
        self.store.process.send_signal(signal.SIGSTOP)
        self.later(seconds, lambda: self.store.process.send_signal(signal.SIGCONT))
        self.store_away = time.monotonic() + seconds + 1
        self.hold(seconds + 4)  # if a rank dies meanwhile, the others wait for the store
        return round(seconds, 2)

    def fault_store_dies(self):
        seconds = self.random.uniform(0.1, 2)
        self.store.kill()
        self.later(seconds, self.store.start)
        self.store_away = time.monotonic() + seconds + 3
        self.hold(seconds + 6)
        return round(seconds, 2)

    def fault_disk_full(self):
        filler, seconds = self.out / "filler", self.random.uniform(2, 8)
        free = shutil.disk_usage(self.out).free
        with open(filler, "wb") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(4096, free - 64 * 1024))
            except OSError:
                pass
        self.later(seconds, lambda: filler.unlink(missing_ok=True))
        return round(seconds, 2)

    def fault_cut(self):
        i, seconds = self.random.randrange(self.store_host), self.random.choice([0.3, 1, 3])
        self.hosts.cut(i)
        self.later(seconds, lambda: self.hosts.mend(i))
        return f"host {i}", seconds

    def fault_part(self):
        hosts = list(range(self.store_host))
        self.random.shuffle(hosts)
        some, seconds = hosts[:self.random.randrange(1, len(hosts))], self.random.choice([1, 4])
        self.hosts.part(some, [h for h in hosts if h not in some], both=self.random.random() < 0.5)
        self.later(seconds, self.hosts.unite)
        self.hold(seconds + 4)
        return f"hosts {sorted(some)}", seconds

    def fault_black_hole(self):
        i, seconds = self.random.randrange(self.store_host), self.random.choice([1, 8])
        self.hosts.narrow(i, 1000)
        self.later(seconds, lambda: self.hosts.narrow(i, testbed.MTU))
        self.hold(seconds + 12)  # ranks measure their paths when they meet
        return f"host {i}", seconds

    def fault_spoil(self):
        what, seconds = {"lost": self.random.choice([0, 5, 30]), "duplicated": self.random.choice([0, 50]),
                         "reordered": self.random.choice([0, 10])}, self.random.uniform(1, 8)
        self.hosts.spoil(**what)
        self.later(seconds, self.hosts.keep)
        return what, round(seconds, 2)

    def faults(self):
        """The faults that can be made here, as (name, weight, function). Says which cannot."""
        some = [("kill", 6), ("kill_two", 2), ("join", 8), ("stop", 5), ("freeze_all", 1), ("store_pauses", 2),
                ("store_dies", 1), ("join_with_another_clock", 2), ("disk_full", 2)]
        if self.hosts:
            some += [("cut", 3), ("part", 2), ("black_hole", 1), ("spoil", 4)]
        missing = [] if shutil.which("faketime") else ["join_with_another_clock"]
        missing += [] if os.path.ismount(self.out) else ["disk_full"]
        missing += [] if self.hosts else ["cut", "part", "black_hole", "spoil"]
        print(f"seed {self.given.seed}, {self.given.seconds} s, {self.given.ranks} ranks; not tried here:",
              ", ".join(missing) or "nothing")
        return [(name, weight, getattr(self, f"fault_{name}")) for name, weight in some if name not in missing]

    # ---- what must hold ----

    def read_log(self):
        """Takes the new whole lines of the log. Returns whether there were new steps. A view that goes on from
        an earlier step cuts the log back to it; then this reads from the start again."""
        before = len(self.steps)
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
            self.position, self.steps, self.views = 0, [], 0
        return len(self.steps) > before

    def take_event(self, event):
        if event["event"] == "view":
            self.views, self.members = self.views + 1, event["ranks"]
        if event["event"] == "step":
            self.steps.append(event["step"])

    def check_log(self):
        """Checks the log as it is at the end."""
        self.position, self.steps, self.views = 0, [], 0
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

    def check_checkpoints(self):
        steps = [int(path.name.split("-")[1]) for path in self.out.glob("checkpoint-????????")]
        newest = max(steps, default=0)
        if newest < self.newest:
            self.wrong.append(f"checkpoint {newest} is the newest after checkpoint {self.newest}")
        self.newest = newest

    def look(self):
        now = time.monotonic()
        for at, what in [u for u in self.until if u[0] <= now]:
            self.until.remove((at, what))
            what()
        if self.read_log():
            if self.moved:
                self.still.append(now - max(self.moved, min(self.held_until, now)))
            self.moved = now
        elif self.moved and now - max(self.moved, self.held_until) > HANG:
            self.wrong.append(f"no step for {HANG} s")
            return False
        for p in self.process:
            if not p.lives() and not p.expected:
                p.expected = True
                said = p.said.read_text(errors="replace").splitlines()[-2:]
                self.wrong.append(f"process {self.number(p)} ended with {p.popen.returncode}: {' | '.join(said)}")
        return True

    def wait(self, seconds, what=lambda: False):
        """Looks for `seconds` seconds, or until what() is true. Returns whether that came."""
        end, looked = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            if not self.look():
                return False
            if what() or self.wrong:
                return what()
            if time.monotonic() > looked + 1:
                looked = time.monotonic()
                self.check_checkpoints()
                for p in self.living():
                    p.note_memory()
            time.sleep(0.02)
        return what()

    def finish(self):
        """Ends all faults and the run. Checks the last checkpoint."""
        for _, what in self.until:
            what()
        self.until, before = [], len(self.steps)
        self.hold(10)
        if not self.wait(HANG, lambda: len(self.steps) >= before + 5):
            self.wrong.append("no 5 steps after the last fault")
        # A process that has not joined yet when the others end waits for the next run of this name.
        self.wait(HANG, lambda: self.members == len(self.living()))
        alive = self.living()
        for p in alive:
            p.expected = True
        if alive:
            alive[0].signal(signal.SIGTERM)
        self.wait(HANG, lambda: not self.living())
        codes = [p.popen.poll() for p in alive]
        if any(code != 0 for code in codes) or not codes:
            self.wrong.append(f"after SIGTERM the processes ended with {codes}")
        self.check_log()
        self.check_checkpoints()
        last = self.out / f"checkpoint-{self.steps[-1] + 1 if self.steps else 0:08}"
        done = subprocess.run([self.given.program, "--eval", "--model", last, "--val", self.folder / "val.bin",
                               "--seq", "32"], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            self.wrong.append(f"{last.name}: {done.stderr.strip()}")

    def report(self):
        still = sorted(self.still)
        longest = still[-1] if still else 0
        # Gaps between steps that a fault may cause: as many as there were faults, the longest first.
        gaps = still[-max(1, sum(self.done.values())):]
        typical = gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0
        growth = max((p.growth() for p in self.process), default=0)
        if typical > self.given.stand_still:
            self.wrong.append(f"stood still for {typical:.1f} s: expected at most {self.given.stand_still} s")
        if growth > 1.2:
            self.wrong.append(f"a process has grown to {growth:.2f} times its memory")
        print(f"done: {dict(sorted(self.done.items()))}")
        print(f"{self.seconds():.0f} s, {len(self.process)} processes, {len(self.steps)} steps, {self.views} views, "
              f"stood still {typical:.1f} s (99%), {longest:.1f} s (longest), memory x{growth:.2f}")
        for line in self.wrong:
            print("wrong:", line)
        return 1 if self.wrong else 0

    def run(self):
        faults = self.faults()
        for _ in range(self.given.ranks):
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
            while len(self.living()) < LEAST_RANKS + 1 and self.may_start():
                self.start()
        self.finish()
        return self.report()

    def close(self):
        for p in self.living():
            p.signal(signal.SIGCONT)
            p.popen.kill()
            p.popen.wait()
        self.store.process.send_signal(signal.SIGCONT)
        self.store.kill()


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spare", type=int, default=2, help="processes that may join beside these")
    parser.add_argument("--hosts", action="store_true", help="each process on a host of its own; needs root")
    parser.add_argument("--stand-still", type=float, default=2.5, metavar="SECONDS")
    parser.add_argument("--address-space", type=int, default=0, metavar="BYTES", help="of each process; 0: no limit")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build" / "train_llama2")
    parser.add_argument("options", nargs="*", help="more options of the program, after --")
    return parser.parse_args()


def main():
    given = parse()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    mounted = False
    for name, count in (("train", 100_000), ("val", 5_000)):
        write_tokens(folder / f"{name}.bin", count, len(name))
    (folder / "out").mkdir()
    if os.geteuid() == 0:  # a file system of its own, so that it can be full
        mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={96 * MIB}", "soak", folder / "out"],
                                     check=False, capture_output=True).returncode
    made = testbed.Hosts(given.ranks + given.spare + 1) if given.hosts else None
    soak = None
    try:
        if made:
            made.__enter__()
        soak = Soak(given, folder, made)
        status = soak.run()
    finally:
        if soak:
            soak.close()
        if made:
            made.__exit__()
        if mounted:
            subprocess.run(["umount", folder / "out"], check=False)
    if status:
        print(f"the log and what the processes said: {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())

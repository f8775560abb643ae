"""A run whose processes meet through etcd (--meet), on one machine or each on a host of its own."""
import signal
import time

import watched
import store
import hosts as testbed

LEAST_RANKS = 2  # that are left to train
ASKS = 10        # seconds in which a process that starts asks the store, at most


class Members(watched.Watched):
    FAULTS = (("kill", 6), ("kill_two", 2), ("join", 8), ("stop", 5), ("freeze_all", 1), ("store_pauses", 2),
              ("store_slow", 1), ("store_dies", 1), ("store_full", 1), ("another_clock", 2), ("disk_full", 2))
    BETWEEN_HOSTS = (("cut", 3), ("part", 2), ("black_hole", 1), ("spoil", 4))

    def __init__(self, given, folder, hosts):
        super().__init__(given, folder)
        self.hosts = hosts
        if hosts:
            self.FAULTS += self.BETWEEN_HOSTS
        self.store_host = given.ranks + given.spare if hosts else None
        address = hosts.address(self.store_host) if hosts else "127.0.0.1"
        self.store = store.Store(folder / "etcd", address, hosts.shell(self.store_host) if hosts else ())
        self.stopped = set()
        self.store_away = 0   # until when; a process that starts meanwhile ends with a line
        self.asks = False     # whether the store must be asked if it answers again

    # ---- processes ----

    def start_one(self, *shell):
        i = len(self.process)
        before = self.hosts.shell(i % self.store_host) if self.hosts else []
        if self.given.address_space:
            before = [*before, "prlimit", f"--as={self.given.address_space}"]
        meet = f"etcd://{self.store.url.split('//')[1]}/soak"
        self.process.append(watched.Process([*before, *shell, self.given.program, "--meet", meet, "--meet-ranks",
                                         self.given.ranks, *self.options(),
                                         *(["--interface", "eth0"] if self.hosts else [])], self.folder / f"said.{i}"))

    def start(self):
        for _ in range(self.given.ranks):
            self.start_one()
        self.read_again()

    def free(self):
        """The processes that train, and are not stopped."""
        return [p for p in self.living() if p not in self.stopped]

    def number(self, process):
        return self.process.index(process)

    def may_start(self):
        if time.monotonic() < self.store_away or len(self.living()) >= self.given.ranks + self.given.spare:
            return False
        self.asks = self.asks and not self.store.answers()
        return not self.asks

    def between_faults(self):
        while len(self.living()) < LEAST_RANKS + 1 and self.may_start():
            self.start_one()

    def take_end(self, process):
        """A process that cannot ask the store when it starts ends with a line; elastic.sh starts another one."""
        hasty = "is etcd running there?" in process.said.read_text(errors="replace")
        if not hasty or time.monotonic() > self.store_away + ASKS:
            super().take_end(process)

    def ask_to_end(self):
        # A process that has not joined yet when the others end waits for the next run of this name.
        if not self.wait(watched.HANG, lambda: self.members == len(self.living())):
            self.wrong.append(f"{self.members} of {len(self.living())} processes train in the end")
        alive = self.living()
        for p in alive:
            p.expected = True
        if alive:
            alive[0].signal(signal.SIGTERM)
        return alive

    def finish(self):
        if self.given.amid:
            self.finish_amid()
        else:
            super().finish()

    def finish_amid(self):
        """Ends the run while faults last. Processes that are stopped, and a store that is away, go on in time."""
        away = self.fault_stop()  # who is left out now comes back while the others end
        if away:
            self.say("stop", away)
            self.wait(self.random.uniform(0, 2 * self.PEER_TIMEOUT))
        alive = self.living()
        able = [p for p in self.free() if p.popen.pid in self.present] if self.random.random() < 0.5 else []
        asked = self.random.sample(able, 1) if able else alive
        self.hold(watched.HANG)
        for p in alive:
            p.expected = True
        for p in asked:
            p.popen.send_signal(signal.SIGTERM)
        # If one was asked and stopped, all stop that have been in a view. (It may also be left out just then, and
        # end alone.) Who has not been in one waits for the next run of this name.
        self.wait(watched.HANG, lambda: all(not p.lives() for p in asked))
        stopped = any(p.popen.poll() == 0 for p in asked)
        must = [p for p in alive if p in asked or stopped and p.popen.pid in self.trained]
        self.wait(watched.HANG, lambda: all(not p.lives() for p in must))
        hung = [self.number(p) for p in must if p.lives()]
        if hung:
            self.wrong.append(f"processes {hung} do not end after the signal to "
                              f"{[self.number(p) for p in asked]}")

    # ---- faults of processes ----

    def victim(self):
        """A process without which enough others train. (Others wait to join, and do not have the run's state.)"""
        able = {p.popen.pid for p in self.free()} & self.present
        some = [p for p in self.free() if len(able - {p.popen.pid}) >= LEAST_RANKS]
        return self.random.choice(some) if some else None

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

    def fault_join(self):
        if not self.may_start():
            return None
        self.start_one()
        return len(self.process) - 1

    def fault_another_clock(self):
        if not self.may_start():
            return None
        words = self.another_clock()
        self.start_one(*words)
        return len(self.process) - 1, words[-1]

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

    # ---- faults of the store ----

    def away(self, seconds, more):
        """The store does not answer, and if a rank dies meanwhile, the others wait for it."""
        self.store_away = max(self.store_away, time.monotonic() + seconds + more)
        self.asks = True
        self.hold(seconds + more + 3)

    def fault_store_pauses(self):
        seconds = self.random.uniform(0.5, 4)
        self.store.pause()
        self.later(seconds, self.store.resume)
        self.away(seconds, 1)
        return round(seconds, 2)

    def fault_store_slow(self):
        """It runs for a tenth of the time."""
        turns = self.random.randrange(10, 40)
        for i in range(turns):
            self.later(0.2 * i, self.store.pause)
            self.later(0.2 * i + 0.18, self.store.resume)
        self.away(0.2 * turns, 2)
        return round(0.2 * turns, 2)

    def fault_store_dies(self):
        seconds = self.random.uniform(0.1, 2)
        self.store.kill()
        self.later(seconds, self.store.restart)
        self.away(seconds, 3)
        return round(seconds, 2)

    def fault_store_full(self):
        """etcd ends when it cannot write, or says so to all who write."""
        filler, seconds = store.fill(self.store.folder), self.random.uniform(1, 4)

        def free():
            filler.unlink(missing_ok=True)
            self.store.restart()
        self.later(seconds, free)
        self.away(seconds, 3)
        return round(seconds, 2)

    def impossible(self):
        return [*super().impossible(), *([] if self.store.folder.is_mount() else ["store_full"]),
                *([] if self.hosts else [name for name, _ in self.BETWEEN_HOSTS])]

    # ---- faults of the network ----

    def fault_cut(self):
        i, seconds = self.random.randrange(self.store_host), self.random.choice([0.3, 1, 3])
        self.hosts.cut(i)
        self.later(seconds, lambda: self.hosts.mend(i))
        self.no_start(seconds)
        return f"host {i}", seconds

    def no_start(self, seconds):
        """A process that cannot reach the store when it starts ends with a line."""
        self.store_away = max(self.store_away, time.monotonic() + seconds + 1)

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
        self.no_start(seconds)
        self.hold(seconds + 12)  # ranks measure their paths when they meet
        return f"host {i}", seconds

    def fault_spoil(self):
        what, seconds = {"lost": self.random.choice([0, 5, 30]), "duplicated": self.random.choice([0, 50]),
                         "reordered": self.random.choice([0, 10])}, self.random.uniform(1, 8)
        self.hosts.spoil(**what)
        self.later(seconds, self.hosts.keep)
        if what["lost"]:
            self.no_start(seconds)  # TCP's first packet to the store may be lost, too
        return what, round(seconds, 2)

    def close(self):
        super().close()
        self.store.close()

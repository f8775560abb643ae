"""A run that mpirun starts. If one rank dies, all end, and the same command continues from the last checkpoint."""
import os
import pathlib
import re
import signal
import time

import watched


class Launch(watched.Process):
    promised = 0  # the step of the checkpoint that was the newest at the start

    def ranks(self):
        found = []
        try:
            children = pathlib.Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        except OSError:
            return []
        for pid in map(int, children):
            try:
                if pathlib.Path(os.readlink(f"/proc/{pid}/exe")).name.startswith("train_llama2"):
                    found.append(pid)
            except OSError:
                pass
        return found

    def signal_ranks(self, number, pids):
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass


class Launched(watched.Watched):
    PEER_TIMEOUT = 10  # seconds; a busy machine must not end the run
    START = 30         # seconds until a start makes steps, at most
    FAULTS = (("kill", 2), ("kill_all", 1), ("another_clock", 1), ("stop", 6), ("freeze_all", 2), ("disk_full", 2))

    def __init__(self, given, folder):
        super().__init__(given, folder)
        self.excused = 0  # until when the run may end
        self.starts = False

    def start(self, *shell):
        i = len(self.process)
        promised = self.newest_checkpoint()
        self.process.append(Launch(["mpirun", "-np", self.given.ranks, *shell, self.given.program, "--link", "udp",
                                    "--progress", "off", *self.options()], self.folder / f"said.{i}"))
        self.process[-1].promised = promised
        self.hold(self.START)
        self.excused, self.starts = 0, True

    def read_log(self):
        moves = super().read_log()
        if moves and self.starts:
            self.starts, self.held_until = False, time.monotonic()
        return moves

    def check_resumed(self, launch):
        """A start says from which step it goes on, unless it was killed before."""
        said = re.search(r"resumed from \S*checkpoint-(\d+)", launch.said.read_text(errors="replace"))
        if said and int(said[1]) < launch.promised:
            self.wrong.append(f"a start resumed from step {int(said[1])}, and checkpoint {launch.promised} was there")

    def trains(self, process):
        return not self.starts

    def take_end(self, process):
        self.check_resumed(process)
        if time.monotonic() > self.excused:
            super().take_end(process)
        else:
            self.start()

    def excuse(self, seconds):
        self.excused = max(self.excused, time.monotonic() + seconds)
        self.hold(seconds)

    def all_ranks(self):
        """The ranks of a run that makes steps, and that no fault has just ended; else None."""
        pids = self.process[-1].ranks()
        able = len(pids) == self.given.ranks and not self.starts and time.monotonic() > self.excused
        return pids if able else None

    def kill(self, some):
        self.excuse(self.PEER_TIMEOUT + self.START)
        self.process[-1].signal_ranks(signal.SIGKILL, some)

    def fault_kill(self):
        pids = self.all_ranks()
        if not pids:
            return None
        rank = self.random.randrange(len(pids))
        self.kill(pids[rank:rank + 1])
        return rank

    def fault_kill_all(self):
        pids = self.all_ranks()
        if pids:
            self.kill(pids)
        return len(pids) if pids else None

    def fault_another_clock(self):
        """All end. The next start has another clock."""
        pids = self.all_ranks()
        if not pids:
            return None
        words = self.another_clock()
        launch = self.process[-1]
        launch.expected = True
        self.kill(pids)
        launch.popen.wait()
        self.check_resumed(launch)
        self.start(*words)
        return words[-1]

    def stop(self, pids, seconds):
        launch = self.process[-1]
        launch.signal_ranks(signal.SIGSTOP, pids)
        self.later(seconds, lambda: launch.signal_ranks(signal.SIGCONT, pids))
        self.hold(seconds + 1)

    def fault_stop(self):
        pids, seconds = self.all_ranks(), self.random.choice([0.2, 0.5, 1, 2, 1.5 * self.PEER_TIMEOUT])
        if not pids:
            return None
        if seconds > self.PEER_TIMEOUT:
            self.excuse(seconds + self.START)  # the others give the rank up
        rank = self.random.randrange(len(pids))
        self.stop(pids[rank:rank + 1], seconds)
        return rank, seconds

    def fault_freeze_all(self):
        pids, seconds = self.all_ranks(), self.random.choice([0.5, 2, 1.2 * self.PEER_TIMEOUT])
        if not pids:
            return None
        self.stop(pids, seconds)
        return seconds

    def ask_to_end(self):
        self.check_resumed(self.process[-1])
        self.process[-1].expected = True
        self.process[-1].signal_ranks(signal.SIGUSR1, self.process[-1].ranks()[:1])
        return self.process[-1:]

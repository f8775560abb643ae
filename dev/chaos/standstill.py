"""How long a run stands still, how much of that is the machine's, and what happened meanwhile.

A process that could run and does not, since others have the processors, waits in a run queue. Linux counts that
time (/proc/PID/task/TID/schedstat, Documentation/scheduler/sched-stats.rst). A run stands still at least for as long
as its process that waits most, so the difference is what a free machine would show, or a little more: processes
also wait one after the other.
"""
import collections
import os
import pathlib

TOLD = 3          # of the longest standstills: with what was done and said
LEAST = 0.5       # seconds; shorter ones are not told
LINES_MOST = 400  # that are kept, of all processes


def queued(pid):
    """Seconds for which the threads of a process have waited for a processor so far."""
    waited = 0
    try:
        for task in os.scandir(f"/proc/{pid}/task"):
            waited += int(pathlib.Path(task.path, "schedstat").read_text(encoding="ascii").split()[1])
    except (OSError, IndexError):
        pass  # it ends
    return waited / 1e9


class Standstill:
    """One after the other: end() when the run makes a step, and begin() from then on, or when it may go on."""

    def __init__(self):
        self.began, self.queues = 0, {}                    # since when; process: its seconds in queues until then
        self.all = []                                      # (seconds, without those in a queue)
        self.lines = collections.deque(maxlen=LINES_MOST)  # (second, who, what)
        self.read = {}                                     # process: bytes of its output that were read
        self.longest = []                                  # (seconds, in a queue, lines) of the TOLD longest

    def note(self, second, who, what):
        self.lines.append((second, who, what))

    def listen(self, second, who, path):
        """Takes the new whole lines of a process's output."""
        with open(path, "rb") as file:
            file.seek(self.read.get(who, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.read[who] = self.read.get(who, 0) + len(line)
                self.note(second, who, line.decode(errors="replace").strip())

    def begin(self, now, pids):
        if now < self.began + LEAST / 5:
            return  # steps come often, and this reads a file for each thread
        self.began = now
        self.queues = {pid: queued(pid) for pid in pids}

    def end(self, since, until, pids):
        """The run did not step from `since` to `until`. pids: of its processes now."""
        seconds, queue = until - since, 0
        if seconds > LEAST:
            queue = max((queued(pid) - self.queues.get(pid, 0) for pid in pids), default=0)
        self.all.append((seconds, max(0, seconds - queue)))
        if seconds > LEAST:
            said = [line for line in self.lines if since - LEAST <= line[0] <= until]
            self.longest = sorted([*self.longest, (seconds, queue, said)], key=lambda s: -s[0])[:TOLD]

    def worst(self, faults):
        """The 99th percentile and the longest, as (seconds, without queues): of as many gaps between steps as there
        were faults, the longest first."""
        found = []
        for which in (0, 1):
            gaps = sorted(gap[which] for gap in self.all)[-max(1, faults):]
            found.append((gaps[int(0.99 * (len(gaps) - 1))], gaps[-1]) if gaps else (0, 0))
        return list(zip(*found))

    def tell(self, begun):
        for seconds, queue, said in self.longest:
            print(f"stood still for {seconds:.1f} s, of which a process waited {queue:.1f} s for a processor:")
            for second, who, what in said:
                print(f"  {second - begun:8.2f} {who}: {what}"[:180])

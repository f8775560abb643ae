"""etcd, which the chaos pauses, slows down, kills, and whose disk it fills."""
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

MIB = 1 << 20
DISK = 400 * MIB  # etcd's two files of 64 MB, snapshots, and what it keeps of its log

# Checks whether keys can be read. The port is open earlier than that.
ASK = """import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/v3/kv/range", b'{"key": "AA=="}', timeout=5)"""


def mount(folder, size):
    """Gives a folder a file system of its own, so that it can be full. Returns whether that is possible here."""
    folder.mkdir(exist_ok=True)
    return os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "soak", folder], check=False, capture_output=True).returncode


def unmount(folder):
    if os.path.ismount(folder):
        subprocess.run(["umount", folder], check=False)


def fill(folder):
    """Takes the room of a folder's file system. Returns the file that takes it."""
    filler = folder / "filler"
    with open(filler, "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(4096, shutil.disk_usage(folder).free - 64 * 1024))
        except OSError:
            pass
    return filler


class Store:
    def __init__(self, folder, address, shell=()):
        self.folder, self.address, self.shell, self.ports = folder, address, shell, []
        mount(folder, DISK)
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
            [*self.shell, "etcd", "--data-dir", self.folder / "data", "--listen-client-urls", self.url,
             "--advertise-client-urls", self.url, "--listen-peer-urls", peer, "--initial-advertise-peer-urls",
             peer, "--initial-cluster", f"default={peer}", "--log-level", "error"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers(self):
        """A store on another host is asked by a process there."""
        return not subprocess.run([*self.shell, sys.executable, "-c", ASK, self.url], check=False,
                                  stderr=subprocess.DEVNULL).returncode

    def wait(self):
        end = time.monotonic() + 60
        while not self.answers():
            if time.monotonic() > end:
                sys.exit("etcd does not start")
            time.sleep(0.05)

    def signal(self, number):
        if self.process.poll() is None:
            self.process.send_signal(number)

    def pause(self):
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def restart(self):
        self.kill()
        self.start()

    def close(self):
        self.resume()
        self.kill()
        unmount(self.folder)

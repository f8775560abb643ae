"""An etcd of a test's own, on loopback."""
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
import base64

import pytest


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Etcd:
    """Started when made; stop() ends it, and start() goes on with the same data."""

    def __init__(self, folder):
        if not shutil.which("etcd"):
            pytest.skip("etcd is not installed (scripts/dependencies.sh test)")
        self.folder, self.port = folder, free_port()
        self.peer = free_port()
        self.start()

    def start(self):
        here, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer}"
        self.process = subprocess.Popen(
            ["etcd", "--data-dir", self.folder / "etcd", "--listen-client-urls", here,
             "--advertise-client-urls", here, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
             "--log-level", "error"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end, "etcd does not start"
            time.sleep(0.05)

    def answers(self):
        try:
            self.get("")
            return True
        except OSError:
            return False

    def get(self, key):
        """The value of a key, or None."""
        body = json.dumps({"key": base64.b64encode(key.encode() or b"\0").decode()}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/kv/range", body)
        with urllib.request.urlopen(request, timeout=5) as answer:
            found = json.load(answer).get("kvs")
        return base64.b64decode(found[0]["value"]).decode() if found else None

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def url(self, run):
        return f"etcd://127.0.0.1:{self.port}/{run}"

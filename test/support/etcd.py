"""Starts an etcd for a test, on loopback or on a host of namespaces (dev/testbed)."""
import base64
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from program import TIMEOUT


# Checks whether keys can be read. The port is open earlier than that.
ASK = """import sys, urllib.request
urllib.request.urlopen(sys.argv[1] + "/v3/kv/range", b'{"key": "AA=="}', timeout=5)"""


def encoded(text):
    return base64.b64encode(text.encode()).decode()


def decoded(text):
    return base64.b64decode(text).decode()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Etcd:
    """The constructor starts etcd, stop() ends it, and start() starts it again with the same data. shell:
    the words to put before a command so that it runs on the host with `address`."""

    def __init__(self, folder, address="127.0.0.1", shell=(), port=None):
        if not shutil.which("etcd"):
            pytest.skip("etcd is not installed (scripts/dependencies.sh test)")
        self.address, self.shell = address, shell
        self.folder, self.port = folder, port or free_port()
        self.peer = free_port()
        self.start()

    def start(self):
        here, peer = f"http://{self.address}:{self.port}", f"http://127.0.0.1:{self.peer}"
        self.process = subprocess.Popen(
            [*self.shell, "etcd", "--data-dir", self.folder / "etcd", "--listen-client-urls", here,
             "--advertise-client-urls", here, "--listen-peer-urls", peer,
             "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
             "--log-level", "error"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + TIMEOUT
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end, "etcd does not start"
            time.sleep(0.05)

    def answers(self):
        return subprocess.run([*self.shell, sys.executable, "-c", ASK, f"http://{self.address}:{self.port}"],
                              check=False, stderr=subprocess.DEVNULL).returncode == 0

    def ask(self, path, body):
        """Asks the JSON gateway and returns its answer. This works only on loopback."""
        request = urllib.request.Request(f"http://{self.address}:{self.port}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def members(self, run):
        """What registered processes have written, by their UID, as (JSON, lease)."""
        first, end = (encoded(f"{run}/member{c}") for c in "/0")
        found = self.ask("/v3/kv/range", {"key": first, "range_end": end}).get("kvs", [])
        return {decoded(entry["key"]).split("/")[-1]: (json.loads(decoded(entry["value"])), entry.get("lease"))
                for entry in found}

    def leases(self, run):
        """The leases of all registered processes."""
        return {lease for _, lease in self.members(run).values()}

    def value(self, key):
        """The text of a key, None if it is not there."""
        found = self.ask("/v3/kv/range", {"key": encoded(key)}).get("kvs")
        return decoded(found[0].get("value", "")) if found else None

    def write(self, key, value):
        self.ask("/v3/kv/put", {"key": encoded(key), "value": encoded(json.dumps(value))})

    def holds(self, key):
        return self.value(key) is not None

    def lapse(self, run):
        """Ends all leases, as etcd does if a process is silent for long."""
        for lease in self.leases(run):
            self.ask("/v3/lease/revoke", {"ID": lease})

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def url(self, run):
        return f"etcd://{self.address}:{self.port}/{run}"

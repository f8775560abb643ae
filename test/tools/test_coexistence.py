"""Tests --traffic-class, which puts DATA in a class with queues that other traffic overtakes; --loss-budget,
which limits the share of packets that such queues lose; and --record-loss, which records these packets."""
import http.server
import json
import shutil
import subprocess
import sys
import threading
import time

import pytest

from priority import ahead
from program import BUILD, ROOT, TIMEOUT, one_line, run, succeed
from test_program import data, settings, train, weights  # pylint: disable=unused-import
from test_udp import (MTU, NETWORK, PACKET, hosts, namespaces,  # pylint: disable=unused-import
                      options, reference, results, testbed, total, train_on)

pytestmark = pytest.mark.takes(85)


@pytest.mark.parametrize("name", ["low", "le2", "cs8", "af44", "af1", "64", "-1", "1.5"])
def test_no_such_class(data, tmp_path, name):
    line = one_line(run(*settings(data, tmp_path), f"--traffic-class={name}"), 2)
    assert "--traffic-class: expected default, le, cs0 to cs7" in line and f"'{name}'" in line


@pytest.mark.parametrize("ipv, name, dscp", [(4, "le", 1), (6, "le", 1), (4, "af13", 14),
                                             (6, "40", 40)])
def test_marks_on_the_wire(namespaces, data, tmp_path, ipv, name, dscp):
    """All DATA is marked. Control is not, except the few datagrams that must not overtake DATA. The model is
    the same as without classes."""
    changes = {"loss_rate": 0.1, "steps": 10, "packet_bytes": PACKET - 20, "wire_dtype": "float32"}
    with testbed.Hosts(4, ipv=ipv, mtu=MTU) as made:
        made.watch_marks(dscp)
        log = train_on(made, data, tmp_path / "udp", traffic_class=name, **changes)
        seen = made.counted()
    print(seen)
    assert seen["data"] == seen["data_marked"] > 5000
    assert 0 < seen["control_marked"] < seen["control"] / 3
    assert results(log) == results(reference(data, tmp_path / "mpi", **changes))


def test_default_class_marks_nothing(hosts, data, tmp_path):
    hosts.watch_marks(1)
    train_on(hosts, data, tmp_path, steps=5)
    seen = hosts.counted()
    assert seen["data"] > 1000 and seen["data_marked"] == seen["control_marked"] == 0


def test_control_that_overtakes_ends_no_phase(namespaces, data, tmp_path):
    """DATA waits in a slow queue and control overtakes it. Ranks still wait for DATA, so nothing is late or
    lost, and the bits are those of a link that loses nothing."""
    changes = {"loss_rate": 0.1, "steps": 8, "packet_bytes": 1400}
    with testbed.Hosts(4, rate="1gbit") as made:
        made.yield_to_others(1, queue="8mb", rate="30mbit", host_queue="8mb")
        log = train_on(made, data, tmp_path / "udp", traffic_class="le", **changes)
        assert made.overflowed() == 0
    print([{name: event[name] for name in NETWORK} for event in log if event["event"] == "step"])
    assert total(log, "late") == 0
    assert results(log) == results(reference(data, tmp_path / "mpi", **changes))
    assert weights(tmp_path / "udp") == weights(tmp_path / "mpi")


# ---- the loss budget, and records of what arrived ----

def test_budget_needs_a_pace(data, tmp_path):
    line = one_line(run(*settings(data, tmp_path), "--loss-budget=0.1"), 2)
    assert "--loss-budget 0.1: expected a share below 1, and pace-gbps too" in line


def lost(log, last):
    """The share of packets lost in the last `last` steps."""
    steps = [event for event in log if event["event"] == "step"][-last:]
    return sum(e["gradient_loss_rate"] + e["parameter_loss_rate"] for e in steps) / (2 * last)


def test_loss_budget(namespaces, data, tmp_path):
    """A short queue loses many packets of a sender without a budget. With a budget, it loses about the
    budget."""
    with testbed.Hosts(4, rate="100mbit") as made:
        made.yield_to_others(1, queue="20kb")
        changes = {"traffic_class": "le", "steps": 50, "packet_bytes": 1444, "val": None,
                   "plain": True}
        free = train_on(made, data, tmp_path / "free", **changes)
        held = train_on(made, data, tmp_path / "held", pace_gbps=0.1, loss_budget=0.05, **changes)
    print(lost(free, 25), lost(held, 25), [e["pace_kbps"] for e in held if e["event"] == "step"])
    assert all(e["pace_kbps"] == 0 for e in free if e["event"] == "step")
    assert lost(free, 25) > 0.15
    assert lost(held, 25) < 0.1
    assert min(e["pace_kbps"] for e in held if e["event"] == "step") < 399000


def share(files):
    done = subprocess.run([ROOT / "scripts" / "loss_trace.py", *files], text=True, check=True,
                          capture_output=True)
    return json.loads(done.stderr), done.stdout


def check_trace(log, files):
    """Checks that the trace has the same losses as the log."""
    told, text = share(files)
    logged = (log[-1]["gradient_loss_rate"] + log[-1]["parameter_loss_rate"]) / 2
    assert told["share"] == pytest.approx(logged, abs=1e-9) and told["lost"] > 100
    return told, text


def test_trace_of_a_network(hosts, data, tmp_path):
    hosts.lose(10)
    log = train_on(hosts, data, tmp_path / "udp", steps=10, record_loss=tmp_path / "trace", plain=True)
    told, _ = check_trace(log, [f"{tmp_path}/trace.{rank}" for rank in range(4)])
    assert told["links"] == 2 * 4 * 3
    assert told["mean_run"] == pytest.approx(told["mean_run_if_independent"], rel=0.05)


@pytest.mark.parametrize("ranks", [0, 2])
def test_trace_of_injected_bursts(data, tmp_path, ranks):
    """The record of injected bursts is right, and a run that injects the record has the same losses."""
    changes = {"loss_rate": 0.2, "steps": 20, "ranks": ranks, "plain": True}
    log = train(data, tmp_path / "burst", loss_model="burst:6", record_loss=tmp_path / "t", **changes)
    files = [f"{tmp_path}/t.{rank}" for rank in range(ranks)] or [tmp_path / "t"]
    told, text = check_trace(log, files)
    assert told["mean_run"] == pytest.approx(6, rel=0.15)
    (tmp_path / "replay").write_text(text)
    again = train(data, tmp_path / "again", loss_model=f"trace:{tmp_path}/replay", **changes)
    for phase in ("gradient", "parameter"):
        rate = f"{phase}_loss_rate"
        assert again[-1][rate] == pytest.approx(log[-1][rate], abs=0.05)


def test_trace_that_cannot_be_written(data, tmp_path):
    done = run(*settings(data, tmp_path), "--record-loss=/nowhere/trace")
    assert done.returncode == 1
    assert "cannot write the loss trace /nowhere/trace: No such file" in done.stderr
    tokens = (data / "train.bin").read_bytes()
    done = run(*settings(data, tmp_path), f"--record-loss={data}/train.bin")
    assert done.returncode == 1 and "train.bin, has something else in it: expected a new file" in done.stderr
    assert (data / "train.bin").read_bytes() == tokens


@pytest.mark.parametrize("ranks", [0, 2])
def test_trace_over_the_one_that_is_read(data, tmp_path, ranks):
    name = tmp_path / f"t{'.0' if ranks else ''}"
    name.write_text("# step 0, gradient, worker 0 to 1\n0001\n")
    done = run(*settings(data, tmp_path, loss_rate=1, loss_model=f"trace:{name}", record_loss=tmp_path / "t"), ranks=ranks)
    assert done.returncode == 1 and f"{name}, is that of the loss model: expected another" in done.stderr
    assert name.read_text().endswith("\n0001\n")


def test_trace_into_a_pipe(data, tmp_path):
    """As with --record-loss >(gzip > FILE): nobody waits for what a pipe has in it."""
    said = succeed(*settings(data, tmp_path, steps=1), "--record-loss=/dev/stdout", "--quiet").stdout
    assert said.startswith("# step 0, gradient, worker ") and said.endswith("# end\n")


# ---- the experiment ----

class Slow(http.server.BaseHTTPRequestHandler):
    """Serves one request at a time, each in 20 ms."""
    protocol_version = "HTTP/1.1"

    def do_GET(self):  # pylint: disable=invalid-name
        time.sleep(0.02)
        body = b"x" * 5000
        self.send_response(200 if self.path == "/object" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):  # pylint: disable=arguments-differ
        pass


def fetch(path, rate=100):
    with http.server.HTTPServer(("127.0.0.1", 0), Slow) as server:
        server.socket.listen(1024)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = subprocess.run([BUILD / "dev" / "coexistence" / "web_client", str(rate), "1", "3", path,
                               f"127.0.0.1:{server.server_port}"], text=True, capture_output=True,
                              check=True, timeout=TIMEOUT)
        server.shutdown()
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.measures
def test_client_waits_for_nobody():
    """The client makes 100 requests per second, and the server can serve 50. Requests begin when they are
    due, and the time that each waits for earlier ones counts."""
    with ahead():
        lines = fetch("/object")
    assert 60 < len(lines) < 150 and all(took != "failed" for _, took in lines)
    assert max(float(begun) for begun, _ in lines) < 1
    times = [float(took) for _, took in lines]
    assert min(times) >= 20 and max(times) > 15 * len(times) - 1000


def test_client_knows_an_error():
    assert {took for _, took in fetch("/nowhere", rate=10)} == {"failed"}
    done = subprocess.run([BUILD / "dev" / "coexistence" / "web_client", "1"], check=False, capture_output=True)
    assert done.returncode == 2


@pytest.mark.parametrize("words, says", [
    (("--only=elsewhere",), "--only is 'elsewhere', expected one of --rates"), (("--seconds=2",), "--seconds above 2"),
    (("--seeds=0",), "--seeds of at least 1"), (("--rates", "50", "0"), "--rates and --seeds of at least 1")])
def test_measurements_of_nothing(words, says):
    done = subprocess.run([sys.executable, ROOT / "dev" / "coexistence" / "measured.py", *words], text=True,
                          capture_output=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr


def test_experiment(namespaces, tmp_path):  # pylint: disable=unused-argument
    """dev/coexistence/measured.py makes all its measurements. Their values are not tested, since the machine
    may be busy."""
    if not shutil.which("nginx"):
        pytest.skip("no nginx (package nginx-light); a web service beside training was not tried")
    done = subprocess.run([sys.executable, ROOT / "dev" / "coexistence" / "measured.py", "--quick", "--out",
                           tmp_path], text=True, capture_output=True, check=False, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "results.json").read_text())
    beside = {result["beside"]: result for result in made["web"]}
    assert list(beside) == ["nothing", "TCP", "lossy, default class", "lossy, le"]
    assert all(r["requests"] > 20 and r["failed"] == 0 for r in beside.values())
    assert beside["TCP"]["lost"] == 0 and beside["lossy, le"]["late"] == 0
    assert made["change"]["points"] and set(made["cost"]["val_loss"]) == {
        "none", "independent", "trace"}
    assert (tmp_path / "measured.png").stat().st_size > 10000
    assert "| 50 | lossy, le |" in (tmp_path / "report.md").read_text()

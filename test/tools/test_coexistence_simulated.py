"""Compares the simulated network of dev/coexistence with exact results of queueing theory, and tests its
report."""
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from program import BUILD, ROOT, TIMEOUT

sys.path.insert(0, str(ROOT / "dev" / "coexistence"))
import simulated  # pylint: disable=wrong-import-position

PROGRAM = BUILD / "dev" / "coexistence" / "simulated"
WIRE = (1502 * 8 + 288) * 1e-9  # seconds that a packet of 1,500 bytes keeps a link of 1 Gbit/s busy
TX = 1502 * 8e-9                # seconds until its last bit has left
SMALL = {"servers": 8, "messages": 2500, "seconds": 0.06, "warmup": 0.02}

if not pathlib.Path("/usr/include/ns3/internet-module.h").exists():
    pytest.skip("no libns3-dev; the simulated network was not tried", allow_module_level=True)
if not PROGRAM.exists():
    pytest.skip(f"not built with this ns-3, see {PROGRAM}.log; the simulated network was not tried",
                allow_module_level=True)


def simulate(**settings):
    return simulated.simulate(
        {name.replace("_", "-"): value for name, value in settings.items()}, PROGRAM)


def test_waiting_is_that_of_the_queue_m_d_1():
    """Packets that leave a server at random times wait as long as the formula of Pollaczek and Khinchine
    says, and nowhere else in the network."""
    result = simulate(servers=2, messages=0, training_gbps=1.2, poisson=1, seconds=0.4)
    gap = 1500 * 8 / 0.6e9
    load = WIRE / gap
    expected = load * WIRE / (2 * (1 - load)) + 2 * (TX + 10e-6)
    assert result["training_dropped"] == 0
    assert result["training_delay_us"] == pytest.approx(1e6 * expected, rel=0.01)


def blocked(load, places):
    """The share of arrivals that find an M/D/1 queue full. `places` includes the packet in service. It is
    computed from the Markov chain of queue lengths at departures."""
    k = np.arange(places)
    arrivals = np.exp(-load + k * np.log(load) - np.array([sum(np.log(np.arange(1, i + 1)))
                                                           for i in k]))
    chain = np.zeros((places, places))
    for length in range(places):
        start = max(length - 1, 0)
        chain[length, start:] = arrivals[:places - start]
        chain[length, -1] += 1 - chain[length].sum()
    values, vectors = np.linalg.eig(chain.T)
    stationary = np.real(vectors[:, np.argmax(np.real(values))])
    return 1 - 1 / (stationary[0] / stationary.sum() + load)


@pytest.mark.parametrize("limit", [1, 3])
def test_short_queues_lose_what_m_d_1_k_loses(limit):
    """A short queue loses as many packets as M/D/1/K. In addition to the port's queue, one packet is being
    sent and one waits in the network card."""
    result = simulate(servers=2, messages=0, training_gbps=1.8, poisson=1, seconds=0.4,
                      training_limit=limit)
    expected = blocked(WIRE / (1500 * 8 / 0.9e9), limit + 2)
    assert expected > 0.03
    assert result["training_loss"] == pytest.approx(expected, rel=0.05)


def test_web_first_does_not_feel_training():
    alone = simulate(**SMALL, training_gbps=0)
    first = simulate(**SMALL, training_gbps=2.4, order="priority", training_limit=20)
    mixed = simulate(**SMALL, training_gbps=2.4)
    assert alone["finished"] == alone["messages_counted"] > 100
    assert first["messages_counted"] == alone["messages_counted"]
    # A web packet still waits for a training packet that is being sent, and for one in the network card.
    assert alone["mean_ms"] <= first["mean_ms"] < 1.06 * alone["mean_ms"]
    assert mixed["mean_ms"] > 1.2 * first["mean_ms"]
    assert first["training_loss"] > 0.01 and mixed["training_loss"] == 0


@pytest.mark.parametrize("settings", [
    {}, {"training_limit": 8}, {"order": "priority", "training_limit": 8, "burst": 4},
    {"random_loss": 0.1}, {"reliable": 1, "buffer": 100}])
def test_no_byte_is_made_up_or_forgotten(settings):
    result = simulate(**{**SMALL, "seconds": 0.03}, training_gbps=1.2, **settings)
    assert result["training_sent"] > 1000
    if settings.get("reliable"):
        assert result["training_received_bytes"] == result["training_sent_bytes"]
    else:
        assert result["training_sent"] == result["training_received"] + result["training_dropped"]
        assert result["training_received_bytes"] == 1472 * result["training_received"]
    if "random_loss" in settings:
        assert result["training_loss"] == pytest.approx(0.1, rel=0.15)
    assert result["finished"] == result["messages_counted"] > 40


def test_same_seed_same_numbers():
    settings = {"servers": 4, "messages": 500, "seconds": 0.02, "warmup": 0, "training_limit": 8}
    first = simulate(**settings)
    assert simulate(**settings) == first
    assert simulate(**settings, seed=2)["mean_ms"] != first["mean_ms"]


def test_wrong_options_are_refused():
    for wrong in ("--order=random", "--servers=1", "--training-limit=1000"):
        done = subprocess.run([PROGRAM, wrong], capture_output=True, text=True, timeout=TIMEOUT,
                              check=False)
        assert done.returncode == 2 and wrong.split("=")[0] in done.stderr


def test_report_reads_between_the_runs(tmp_path):
    """The report interpolates made-up results with known answers: times of 1 / (1 - rate / limit)."""
    def run(rate, mean, loss=0.0, **way):
        return {"messages": rate, "burst": 1, "mean_ms": mean, "training_loss": loss, "finished": 9,
                "messages_counted": 9, **way}
    results = []
    for rate in simulated.RATES:
        results.append(run(rate, 1 / (1 - rate / 15000), reliable=1))
        for limit, loss in zip(simulated.LIMITS, (0, 0.05, 0.15, 0.3, 0.4)):
            for order in ("fifo", "priority"):
                results.append(run(rate, 1 / (1 - rate / 18000), loss, order=order,
                                   **{"training-limit": limit}))
    text = simulated.figure_7(results)
    row = text.splitlines()[2].split("|")
    assert [cell.strip() for cell in row[1:7]] == ["steady", "2", "7,500", "9,000", "1.20", "17%"]
    row = simulated.figure_6(results).splitlines()[2].split("|")
    assert [cell.strip() for cell in row[1:6]] == ["steady", "2,000", "1.15", "threshold", "1.03"]
    assert row[-2].strip() == "1.03"
    simulated.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")

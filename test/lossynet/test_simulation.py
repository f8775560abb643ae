"""What a step costs by round trip and loss, in virtual time (dev/simulation/round_trips.c): a function
of the program and of nothing else."""
import os
import subprocess

import pytest

from program import BUILD, ROOT


def simulate(round_trip, lost, queue=1024):
    done = subprocess.run([str(BUILD / "round_trips"), str(round_trip), str(lost), str(queue)], cwd=ROOT, text=True,
                          capture_output=True, timeout=600, check=True,
                          env={**os.environ, "ASAN_OPTIONS": "quarantine_size_mb=32"})
    words = done.stdout.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}


@pytest.mark.parametrize("round_trip,lost,control,step_ms", [
    (2e-4, 0.0, 18, 1.1), (2e-4, 0.1, 22, 3.5),
    (1e-2, 0.0, 40, 36), (1e-2, 0.1, 40, 80),
    (1e-1, 0.0, 40, 352), (1e-1, 0.1, 40, 800),
])
def test_control_datagrams(round_trip, lost, control, step_ms):
    """Per peer and step. What is not answered yet is not repeated before it can have been, but once."""
    got = simulate(round_trip, lost)
    assert got["control"] <= control and got["step_ms"] <= step_ms, got


def test_a_lost_message():
    """Costs one retransmission time-out of 0.3 ms, and turns of the engine."""
    got = simulate(2e-4, 0)
    assert 0.1 < got["lost_message_ms"] <= 0.6, got


def test_others_are_sent_to():
    """A rank that comes late to a phase, or stops, does not keep the others from sending one another."""
    got = simulate(2e-4, 0, queue=48)
    assert got["beside_late_ms"] <= 50 and got["beside_stopped_ms"] <= 150, got

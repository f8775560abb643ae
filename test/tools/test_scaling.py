"""Compares dev/scaling/scaling.py with exact results in small cases."""
import subprocess
import sys

import numpy as np
import pytest

from program import ROOT

sys.path.insert(0, str(ROOT / "dev" / "scaling"))
import scaling  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.quick

DRAWS = 400_000


def expected_most(loss, flows):
    """The expected maximum, over flows, of how often a message is lost in a row: the sum over k of the
    probability that one of them is lost more than k times."""
    return sum(1 - (1 - loss ** k) ** flows for k in range(1, 400))


@pytest.mark.parametrize("loss, flows", [(0.1, 1), (0.5, 2), (0.1, 12), (0.01, 100_000)])
def test_unluckiest_message(loss, flows):
    """The number of repetitions of a control message is geometric. Tests its maximum over flows."""
    rng = np.random.default_rng(1)
    drawn = scaling.repeated(loss, flows, rng.random(DRAWS)).mean()
    assert drawn == pytest.approx(expected_most(loss, flows), rel=0.01)
    assert np.all(scaling.repeated(0, flows, rng.random(5)) == 0)


def test_go_back_n_of_one_packet_waits_for_time_outs():
    """If a message has one packet, no later packet reveals its loss, so every loss costs a time-out."""
    net = scaling.Network(100, 10e-6, 0.2, ack_timeout=0.067)
    rng = np.random.default_rng(1)
    extra = scaling.flow_extra(rng, "roce", 1, net, DRAWS)
    assert extra.mean() == pytest.approx(0.067 * 0.2 / 0.8, rel=0.01)
    slowest = extra.reshape(-1, 8).max(axis=1)
    assert slowest.mean() == pytest.approx(0.067 * expected_most(0.2, 8), rel=0.01)


def test_go_back_n_of_many_packets():
    """A lost packet costs a round trip. A lost repetition, and each loss of the last packet, cost a
    time-out."""
    net = scaling.Network(100, 10e-6, 0.1, ack_timeout=0.067)
    extra = scaling.flow_extra(np.random.default_rng(1), "roce", 50, net, DRAWS)
    exact = 49 * 0.1 * 10e-6 + 0.067 * (49 * 0.1 * 0.1 / 0.9 + 0.1 / 0.9)
    assert extra.mean() == pytest.approx(exact, rel=0.01)


def test_selective_repeat_equals_packets_drawn_one_by_one():
    loss, n, rtt = 0.2, 20, 10e-6
    net = scaling.Network(100, rtt, loss)
    spacing = net.spacing("select")
    rng = np.random.default_rng(1)
    drawn = scaling.selective_quantiles(n, net, rng.random(DRAWS))
    lost = rng.geometric(1 - loss, (DRAWS, n)) - 1
    late = lost * rtt - spacing * np.arange(n - 1, -1, -1)
    late[:, -1] = np.where(lost[:, -1] > 0, 320e-6 + (lost[:, -1] - 1) * rtt, 0)
    # the extra time is drawn on a grid of round trips and of 1/300 of the range
    assert drawn.mean() == pytest.approx(np.maximum(late.max(axis=1), 0).mean(), rel=0.02)
    assert np.mean(drawn > 300e-6) == pytest.approx(loss, rel=0.02)


def test_without_loss_everything_takes_the_wire_time():
    net = scaling.Network(100, 0, 0)
    size = 64 * 4096 * 1000
    spacing = net.spacing("roce")
    assert scaling.exchange("ring roce", net, 64, size) == pytest.approx(2 * 63 * 1000 * spacing)
    assert scaling.exchange("tree roce", net, 64, size) == pytest.approx(2 * 64 * 1000 * spacing)
    count = scaling.packets("lossy", size / 64)
    wire = 2 * 63 * count * net.spacing("lossy")
    control = 3 * 63 * 120 * 8 / 1e11
    assert scaling.exchange("lossy", net, 64, size) == \
        pytest.approx(wire + 2 * scaling.PHASE + control, rel=1e-9)


def test_a_ring_waits_for_its_slowest_link():
    """Two workers and one round each way. The mean of the slowest is computed by hand."""
    net = scaling.Network(100, 0, 0.3, ack_timeout=1.0)
    rng = np.random.default_rng(1)
    times = np.mean([scaling.ring(rng, "roce", net, 2, 2 * 4096) for _ in range(3000)])
    lost = rng.geometric(0.7, (DRAWS, 2, 2)) - 1  # draws, rounds, links; one packet in each
    first = lost[:, 0].max(axis=1)                # in the second round, each link waits for both
    assert times == pytest.approx((first + lost[:, 1].max(axis=1)).mean(), rel=0.05)


def test_loss_slows_the_reliable_more_with_workers_and_taxes_only_the_lossy():
    size = 1e9
    quiet, noisy = scaling.Network(100, 10e-6, 1e-6), scaling.Network(100, 10e-6, 0.01)
    for name in ("tree roce", "ring tcp"):
        assert scaling.exchange(name, noisy, 16, size) > \
            1.5 * scaling.exchange(name, quiet, 16, size)
    assert scaling.exchange("lossy", noisy, 16, size) < \
        1.1 * scaling.exchange("lossy", quiet, 16, size)
    assert scaling.step(1.0, 3.0, 0.5, 0.1) == pytest.approx(4.2)
    n = len(scaling.LOSSES)
    assert scaling.crossing([1] * n, [0] * n) is None
    assert scaling.crossing([1] * n, [0, 2] + [0] * (n - 3) + [2]) == scaling.LOSSES[-1]
    assert scaling.crossing([1] * n, [2] * n) == scaling.LOSSES[0]


def test_the_rule_pays_for_a_round_where_much_is_lost():
    """Below 1/15 it takes as long as plain datagrams. At 10% it sends a tenth of the gradients again."""
    size, times = 1e9, {}
    for loss in (0.01, 0.1):
        net = scaling.Network(100, 10e-6, loss)
        times[loss] = [scaling.exchange(name, net, 16, size) for name in ("lossy", "rule")]
    assert times[0.01][0] == times[0.01][1]
    wire = 15 * scaling.packets("lossy", size / 16) * net.spacing("lossy")
    assert 0.1 * wire < times[0.1][1] - times[0.1][0] < 0.1 * wire + 0.05


def test_int8_halves_the_wire_time_and_pays_for_two_rounds():
    """33 bytes for 32 elements, where the others send 64. Rounds are those of lossynet_rounds_at."""
    net, size = scaling.Network(100, 0, 0), 1e9
    wire = [scaling.exchange(name, net, 16, size) - 2 * scaling.PHASE for name in ("rule", "int8")]
    assert wire[1] / wire[0] == pytest.approx(33 / 64, rel=1e-3)
    assert scaling.sent_again(0.06, 1) == (0, 0) and scaling.sent_again(0.1, 1) == (0.1, 1)
    again, rounds = scaling.sent_again(0.2, scaling.BUDGET["int8"])
    assert again == pytest.approx(0.24) and rounds == 2
    assert scaling.sent_again(0.2, scaling.BUDGET["rule"]) == (0.2, 1)


def test_many_paths_keep_a_third_at_one_percent():
    size = 1e9
    for way in ("ring", "tree"):
        quiet, some, much = (scaling.exchange(f"{way} mrc", scaling.Network(100, 0, loss), 16, size)
                             for loss in (0, 0.001, 0.01))
        assert some == quiet and much == pytest.approx(3 * quiet)


def test_model_meets_what_was_measured():
    lines = scaling.calibration().splitlines()[2:]
    assert lines and all(abs(float(line.split("|")[6].strip(" %"))) <= 12 for line in lines), lines


@pytest.mark.parametrize("words, says", [
    (("--gbps=0",), "--gb, --gbps and --rtt-us expect numbers above 0"), (("--rtt-us=nan",), "expect numbers above 0"),
    (("--tax=-1",), "--compute-s and --tax of at least 0"), (("--at", "8.5", "0.1"), "at least 2 workers, a whole number"),
    (("--at", "inf", "0.1"), "at least 2 workers"), (("--out=absent",), "--out: there is no folder 'absent'")])
def test_numbers_that_no_network_has(words, says):
    words = words if "--at" in words or "--out=absent" in words else (*words, "--at", "8", "0.1")
    done = subprocess.run([sys.executable, ROOT / "dev" / "scaling" / "scaling.py", *words], text=True,
                          capture_output=True, check=False)
    assert done.returncode == 2 and says in done.stderr.splitlines()[-1], done.stderr

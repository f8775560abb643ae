"""Tests what sweeps say of a few paired changes: intervals, equivalence, and how many seeds a margin takes."""
import importlib
import json
import math
import sys

import pytest

from program import ROOT

SWEEPS = ROOT / "scripts" / "sweeps"
sys.path.insert(0, str(SWEEPS))
statistics = importlib.import_module("sweep_statistics")

DEFAULT = {"algorithm": "lossy", "wire-dtype": "int6", "lead": "auto", "carry": 1}


def kept(steps, rate, seeds, rounds):
    """The changes in percent of kept runs of the default with these rounds, against float32 without loss."""
    rule = {**DEFAULT, "loss-rate": rate, "gradient-repair": rounds[0], "parameter-repair": rounds[1]}
    base = {"algorithm": "reliable"}
    setting = {"steps": steps, "model": "260K", "workers": 8}
    unlike = ("seed", "batch", "seq", "lr", "warmup", "device", "data", *setting)
    found = {"rule": {}, "base": {}}
    for line in (SWEEPS / "settings" / "lead.jsonl").read_text().splitlines():
        result = json.loads(line)
        key = result["key"]
        rest = {name: value for name, value in key.items() if name not in unlike}
        if all(key.get(name) == value for name, value in setting.items()) and rest in (rule, base):
            found["rule" if rest == rule else "base"][key.get("seed", 1)] = result["perplexity"]
    return [100 * (found["rule"][seed] / found["base"][seed] - 1) for seed in seeds]


# Computed from the same results by somebody else, with a program of his own; his seeds needed are by the normal
# distribution, which is one or two below those by Student's t.
@pytest.mark.parametrize("steps, rate, seeds, rounds, mean, low, high, within, needed", [
    (560, 0.2, range(31, 63), (2, 1), +0.52, -0.17, +1.21, None, (230, 59)),
    (560, 0.4, range(71, 103), (4, 2), +0.72, +0.12, +1.32, None, (176, 45)),
    (3000, 0.4, range(71, 79), (4, 2), +0.02, -0.42, +0.46, 0.5, (20, 6)),
])
def test_kept_results_agree_with_another_calculation(steps, rate, seeds, rounds, mean, low, high, within, needed):
    changes = kept(steps, rate, seeds, rounds)
    found = statistics.equivalence(changes)
    assert sum(changes) / len(changes) == pytest.approx(mean, abs=0.006)
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=0.006), pytest.approx(high, abs=0.006))
    assert found["within"] == within
    assert found["seeds_needed"] == [pytest.approx(count, abs=2) for count in needed]


def test_both_defaults_together_cost_more_than_nothing_against_float32():
    changes = kept(560, 0.2, range(31, 63), (2, 1)) + kept(560, 0.4, range(71, 103), (4, 2))
    assert sum(changes) / 64 == pytest.approx(0.62, abs=0.006)
    assert statistics.interval(changes) == pytest.approx(0.54, abs=0.006)


def test_the_margin_is_the_smallest_that_the_whole_interval_lies_in():
    """Nine values with mean m and deviation 1: the 90% interval is m ± 1.860 / 3 = m ± 0.620."""
    spread = [1.0, -1.0] * 4 + [0.0]
    found = lambda shift, scale: statistics.equivalence([shift + scale * value for value in spread])
    assert found(0, 1)["high"] == pytest.approx(1.860 / 3, abs=1e-3)
    assert [found(0, 1)["within"], found(0.3, 1)["within"], found(-0.4, 1)["within"]] == [1.0, 1.0, None]
    assert [found(0.1, 0.5)["within"], found(0.2, 0.5)["within"]] == [0.5, 1.0]


def test_seeds_that_a_margin_takes():
    """For many seeds, n = (2 * 1.645 * deviation / margin)^2; power() agrees with a simulation of few."""
    assert statistics.seeds_needed(5.0, 0.5) == pytest.approx((2 * 1.6449 * 10) ** 2, rel=0.01)
    n = statistics.seeds_needed(1.0, 1.0)
    assert statistics.power(n - 1, 1.0, 1.0) < 0.9 <= statistics.power(n, 1.0, 1.0)
    import numpy
    rows = numpy.random.default_rng(5).normal(0, 1.0, (40000, 8))
    half = 1.895 * rows.std(axis=1, ddof=1) / math.sqrt(8)  # Student's t, seven degrees of freedom, 95%
    assert statistics.power(8, 1.0, 1.0) == pytest.approx((abs(rows.mean(axis=1)) + half < 1.0).mean(), abs=0.01)


def test_of_nothing_nothing_is_said():
    for values in ([], [1.0], [2.0, 2.0]):
        found = statistics.equivalence(values)
        assert found["low"] is None and found["within"] is None and not any(found["seeds_needed"])

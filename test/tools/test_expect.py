"""Tests scripts/sweeps/expect.py with made-up results whose shares of steps are known, and with the kept
ones."""
import importlib
import json
import subprocess
import sys

import pytest

from program import ROOT

SWEEPS = ROOT / "scripts" / "sweeps"
sys.path.insert(0, str(SWEEPS))
expect = importlib.import_module("expect")

CURVE = [[0, 120.0], [100, 20.0]]  # a step is worth one unit of perplexity


def result(name, perplexity, seed=1, parameters=1000, curve=None, **key):
    key = {"model": "260K", "steps": 100, "seq": 64, "workers": 4, "batch": 2, "lr": 0.01,
           "data": ["train", "val"], "algorithm": "lossy", "gradient-repair": 0, **key}
    if seed != 1:
        key["seed"] = seed
    return {"id": f"{name} {seed} {parameters}", "key": key, "parameters": parameters,
            "perplexity": perplexity, "evaluations": curve or [[100, perplexity]]}


def write(path, results):
    path.write_text("".join(json.dumps(line) + "\n" for line in results))
    return str(path)


def run(*words):
    done = subprocess.run([sys.executable, str(SWEEPS / "expect.py"), *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def results(tmp_path):
    ours = {"lead": "auto", "carry": 1, "wire-dtype": "int6", "gradient-repair": 2, "parameter-repair": 1}
    lines = []
    for seed, plain in ((1, 40.0), (2, 50.0)):
        lines += [result("base", 20.0, seed, algorithm="reliable", curve=CURVE),
                  result("plain", plain, seed, **{"loss-rate": 0.2}),
                  result("lead", 30.0, seed, lead="auto", **{"loss-rate": 0.2}),
                  result("ours", 30.0, seed, **ours, **{"loss-rate": 0.2}),
                  result("default", 19.0, seed, lead="auto", carry="auto", repair="auto",
                         **{"repair-budget": "auto", "gradient-repair": "auto", "loss-rate": 0.4})]
    lines += [  # these do not count: other rules, a start, a beta1, no baseline of these steps, one phase
        result("carry", 90.0, carry=1, **{"loss-rate": 0.2}),
        result("one round", 90.0, **{**ours, "gradient-repair": 1, "loss-rate": 0.2}),
        result("plain, int8", 90.0, **{"wire-dtype": "int8", "loss-rate": 0.2}),
        result("start", 90.0, start="abc", **{"loss-rate": 0.2}),
        result("base, beta1", 20.0, algorithm="reliable", curve=CURVE, beta1=0.8),
        result("beta1", 90.0, beta1=0.8, **{"loss-rate": 0.2}),
        result("steps", 90.0, steps=50, **{"loss-rate": 0.2}),
        result("phase", 90.0, **{"gradient-loss-rate": 0.2, "parameter-loss-rate": 0.0})]
    return write(tmp_path / "results.jsonl", lines)


def test_shares_are_those_of_the_curve(results):
    taxes = expect.read_taxes([results])
    setting = (1000, 100, 4, 4 * 2 * 64, 0.01)
    assert taxes == {0.2: {setting: [pytest.approx(0.2), pytest.approx(0.3)]}}


def test_options_that_a_key_leaves_out(tmp_path):
    """A key has no option with its default; tokens of a step are of all micro-batches."""
    lines = [result("base", 20.0, algorithm="reliable", curve=CURVE, **{"micro-batches": 3}),
             *(result("plain", 40.0, id, **{"loss-rate": 0.2, "micro-batches": 3}) for id in (1, 2))]
    lines.insert(0, result("base", 20.0, 2, algorithm="reliable", curve=CURVE, **{"micro-batches": 3}))
    for line in lines:
        del line["key"]["steps"]
    assert expect.read_taxes([write(tmp_path / "r.jsonl", lines)]) == {
        0.2: {(1000, 1000, 4, 4 * 2 * 3 * 64, 0.01): [pytest.approx(0.2)] * 2}}


def test_a_curve_is_found_in_any_file(results, tmp_path):
    """The same run without a curve, in a file that is read later, does not hide the curve."""
    later = write(tmp_path / "z.jsonl", [result("base", 20.0, algorithm="reliable")])
    for paths in ([results, later], [later, results]):
        assert sum(map(len, expect.read_taxes(paths)[0.2].values())) == 2


def test_seeds_that_diverged_are_named(tmp_path):
    """A run that diverged, and one whose run without loss did: that one has a curve up to there."""
    lines = [result("base", None if seed == 4 else 20.0, seed, algorithm="reliable", curve=CURVE) for seed in (1, 2, 3, 4)]
    lines += [result("plain", float("nan") if seed == 3 else 40.0, seed, **{"loss-rate": 0.2}) for seed in (1, 2, 3, 4)]
    code, text, error = run(write(tmp_path / "r.jsonl", lines))
    assert code == 0 and "| 20% | 1 | 2 | 20% ± 0 |" in text
    assert error == "expect: left out, since they or their run without loss diverged: 20%, seed 3; 20%, seed 4\n"


def test_what_a_share_is_worth():
    """Worked by hand: 140e9 tokens and B / D^beta = 410.7 / 140e9^0.28 = 0.3113; a quarter lost multiplies
    that by 0.75^-0.28 - 1 = 0.0839; exp(0.02611) = 1.02646."""
    law = expect.LAWS[0]
    assert expect.cost(0.25, 140e9, law) == pytest.approx(2.646, abs=0.01)
    assert expect.cost(0.0, 140e9, law) == 0
    for law in expect.LAWS:
        assert expect.share(expect.cost(0.3, 1e9, law), 1e9, law) == pytest.approx(0.3)


def test_the_table(results, tmp_path):
    code, text, error = run(results, "--plot", str(tmp_path / "expect.png"))
    assert (code, error) == (0, "")
    # shares 20% and 30%: 25%, and 12.706 * 0.0707 / sqrt(2) = 64 points
    assert "| 20% | 1 | 2 | 25% ± 64 | +0.0 to +" in text
    assert "7e+09 parameters after 1.4e+11 tokens" in text
    assert (tmp_path / "expect.png").read_bytes().startswith(b"\x89PNG")
    assert "1e+09 parameters after 5e+09 tokens" in run(results, "--parameters", "1e9",
                                                         "--tokens", "5e9")[1]


def test_shares_that_grow_with_the_model(tmp_path):
    """Five sizes, 10 points more for each tenfold: the slope is 10, without an interval."""
    lines = []
    for power in range(5):
        size = {"parameters": 10 ** (3 + power), "model": str(power)}
        for seed in (1, 2):
            lines += [result("base", 20.0, seed, algorithm="reliable", curve=CURVE, **size),
                      result("plain", 30.0 + 10 * power, seed, **size, **{"loss-rate": 0.4})]
    lines.append(result("plain, once", 30.0, **size, **{"loss-rate": 0.3}))
    _, text, _ = run(write(tmp_path / "sizes.jsonl", lines))
    assert "parameters, 40% lost: +10 ± 0 points" in text
    assert "in the paper | 30%" not in text
    assert "workers" not in text.split("Per tenfold")[1]


def test_nothing_to_read(tmp_path):
    code, _, error = run(str(tmp_path / "none.jsonl"))
    assert code == 2 and error == f"expect: there is no file '{tmp_path}/none.jsonl'\n"
    code, _, error = run(write(tmp_path / "empty.jsonl", []))
    assert code == 1 and "no pair of runs" in error and error.count("\n") == 1
    for words in (("--parameters", "-1"), ("--tokens", "0"), ("--parameters", "inf")):
        code, _, error = run(*words)
        assert code == 2 and error.count("\n") == 1
    code, _, error = run(str(tmp_path))
    assert code == 1 and error == f"expect: {tmp_path}: Is a directory\n"
    (tmp_path / "no_key").write_text('{"id": "a", "perplexity": 1}\n')
    code, _, error = run(str(tmp_path / "no_key"))
    assert code == 1 and "no pair of runs" in error and error.count("\n") == 1


def test_the_results_page_has_this_table():
    """The page shows what the kept results give."""
    _, text, _ = run()
    page = (SWEEPS / "results.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) > 5 and all(row in page for row in rows)

"""dev/bench/gpu/gpu_bench.py, the whole of it on the emulated device with tiny shapes: that everything runs,
that the report has what it should, and that its arithmetic is right. Not how fast anything is."""
import importlib.util
import json
import math
import os
import re
import subprocess
import sys

import pytest

from program import BUILD, ROOT

SCRIPT = ROOT / "dev" / "bench" / "gpu" / "gpu_bench.py"


def bench(out, *more):
    environment = {**os.environ, "BUILD": str(BUILD), "OMP_NUM_THREADS": "2",
                   "GOMP_SPINCOUNT": "1000",
                   "EMULATED_MEMORY": "4000000000"}  # else what other programs leave of this machine's
    return subprocess.run([sys.executable, SCRIPT, "--emulated", f"--out={out}", *more], cwd=ROOT,
                          env=environment, text=True, capture_output=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """(results, report) of all parts, in two calls: the second keeps what the first measured."""
    out = tmp_path_factory.mktemp("bench")
    for parts in ("peak,step,attention", "kernels,lossy"):
        done = bench(out, f"--parts={parts}")
        assert done.returncode == 0, done.stdout + done.stderr
    return (json.loads((out / "results.json").read_text(encoding="utf-8")),
            (out / "report.md").read_text(encoding="utf-8"))


def rows(report, section):
    """The rows of a section's table, as dicts by its header."""
    lines = report.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def near(text, value, digits=3):
    number = float(re.match(r"[-+]?[\d.]+(e[-+]?\d+)?", text).group())
    assert number == pytest.approx(value, rel=10 ** -digits, abs=0.051), (text, value)


def test_steps_and_their_arithmetic(measured):
    results, report = measured
    (row,) = rows(report, "Training steps")
    x = results["step 260K 1x24"]
    C, L, H, K, D, F, V, T = 64, 2, 8, 4, 8, 172, 500, 24
    layer = (H + 2 * K) * D * C + H * D * C + 3 * C * F + 2 * C
    N = L * layer + C + V * C  # the table is the classifier's too
    assert x["parameters"] == N
    assert x["flops_6n"] == pytest.approx(6 * N * T, rel=1e-6)
    assert x["flops"] == pytest.approx(6 * N * T + 6 * L * H * D * T * T, rel=1e-6)
    assert 5 < x["last_loss"] < 7 and x["last_loss"] < x["first_loss"]
    peak = results["peak"]["flops"] / results["peak"]["seconds"]
    assert results["peak"]["flops"] == 2 * 48**3
    near(row["tokens/s"], T / x["seconds"])
    near(row["6N"], 100 * x["flops_6n"] / x["seconds"] / peak)
    near(row["6N + attention"], 100 * x["flops"] / x["seconds"] / peak)
    (row,) = rows(report, "Memory")
    assert x["used_bytes"] > 18 * N  # weights in use, master weights, gradients, two moments
    near(row["off by"], 100 * (x["estimated_bytes"] / x["used_bytes"] - 1))


def test_attention(measured):
    results, report = measured
    (row,) = rows(report, "Attention")
    x = results["attention 1x33x2x1x64"]
    assert x["forward_flops"] == 2 * 2 * 33 * 33 * 64 and x["backward_flops"] == 5 * 2 * 33 * 33 * 64
    near(row["forward us"], 1e6 * x["forward_seconds"])
    near(row["backward us"], 1e6 * x["backward_seconds"])


def test_kernels_count_their_bytes(measured):
    results, report = measured
    (N, C, F, H, K, D, V), P = (9, 64, 40, 2, 1, 32, 72), 72 * 64
    expected = {
        "rmsnorm_forward": 2 * N * C * 2 + 4 * N, "residual_rmsnorm_forward": 4 * N * C * 2 + 4 * N,
        "rmsnorm_backward": 4 * N * C * 2 + 4 * N,
        "rope": 2 * N * (H + K) * D * 2 + 2 * 4 * N * D / 2,
        "swiglu_forward": 3 * N * F * 2, "swiglu_backward": 5 * N * F * 2,
        "embedding_forward": 2 * N * C * 2 + 4 * N, "embedding_backward": N * C * 2 + 4 * P + 4 * N,
        "classifier less its products": 2 * N * V * 2 + 8 * N, "adamw": 28 * P, "convert": 6 * P,
        "sum_of_squares": 4 * P, "weighted_sum of 4": 20 * P + 16 * math.ceil(P / 1024),
        "weighted_sum of 4, from the host": 16 * P,
        "masked_copy": 8 * P + math.ceil(P / 1024)}
    lines = {x["name"]: x for x in results["kernels 9x64x40x2x1x32x72"]["lines"]}
    assert {name: x["bytes"] for name, x in lines.items()} == expected
    copy = results["peak"]["copy_bytes"] / results["peak"]["copy_seconds"]
    for row in rows(report, "What memory bounds"):
        x = lines[row["operation"]]
        near(row["GB/s"], x["bytes"] / x["seconds"] / 1e9)
        near(row["of copy"], 100 * x["bytes"] / x["seconds"] / copy)


def test_runs_with_loss(measured):
    results, report = measured
    table = rows(report, "Workers that lose packets")
    assert [(row["workers"], row["loss"]) for row in table] == [
        ("2", "0.0%"), ("2", "40.0%"), ("3", "0.0%"), ("3", "40.0%")]
    for row in table:
        x = results[f"lossy {row['workers']} workers {float(row['loss'][:-1]) / 100:g}"]
        base = results[f"lossy {row['workers']} workers 0"]
        near(row["perplexity"], math.exp(x["val_loss"]))
        near(row["change"], 100 * (math.exp(x["val_loss"] - base["val_loss"]) - 1))
        assert x["tokens"] == 2 * 16 * int(row["workers"])
        assert 0.3 < x["gradient_lost"] < 0.5 or x["loss_rate"] == 0 == x["gradient_lost"]


def test_says_what_is_missing(measured):
    results, report = measured
    missing = report.split("## Missing\n")[1]
    if importlib.util.find_spec("torch"):
        assert "missing" not in results["pytorch"]
    else:
        assert "* pytorch: exit code 1: ModuleNotFoundError: No module named 'torch'" in missing
        assert "* step 260K 1x24, PyTorch bf16: no PyTorch here" in missing


def test_builds_with_the_options_of_gpu_check():
    """They share a folder: objects of one that the other cannot link would cost a call on a GPU."""
    check = (ROOT / "dev" / "bench" / "gpu" / "gpu_check.sh").read_text(encoding="utf-8")
    wanted = re.search(r"^options=\((.*?) NVCC=", check, re.MULTILINE).group(1).split()
    assert len(wanted) > 4
    ours = set(re.findall(r'"([A-Z]+=\w*)"', SCRIPT.read_text(encoding="utf-8")))
    assert ours == set(wanted)


def test_stands_beside_the_faster_pytorch(measured, tmp_path):
    """What PyTorch measured, put in by hand."""
    results, _ = measured
    seconds = results["step 260K 1x24"]["seconds"]
    for mode, factor in (("slow", 3), ("fast", 1.5)):
        results[f"step 260K 1x24, PyTorch {mode}"] = {"seconds": factor * seconds,
                                                      "recompute": "none"}
    results["peak of PyTorch"] = {"flops": 8.0, "seconds": results["peak"]["seconds"] * 8
                                  / results["peak"]["flops"] / 2}
    (tmp_path / "results.json").write_text(json.dumps(results), encoding="utf-8")
    done = bench(tmp_path, "--parts=")
    assert done.returncode == 2 and "--parts: expected" in done.stderr
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write_report(tmp_path / "report.md", results, module.TINY)
    (row,) = rows((tmp_path / "report.md").read_text(encoding="utf-8"), "Training steps")
    assert row["ratio"] == "1.50x" and row["its mode"] == "PyTorch fast, none"
    near(row["6N"], 50 * results["step 260K 1x24"]["flops_6n"] / seconds
         * results["peak"]["seconds"] / results["peak"]["flops"])

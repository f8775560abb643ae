#!/usr/bin/env python3
"""How fast train_llama2 is on a GPU, beside PyTorch and beside what the chip can do: one report.

    dev/bench/gpu/gpu_bench.py                              all parts, in 570 seconds; build/gpu/report.md
    dev/bench/gpu/gpu_bench.py --parts peak,step            some of them; a later call adds the others
    dev/bench/gpu/gpu_bench.py --tokens DIR                 real text for the runs with loss: DIR/train.bin, val.bin
    dev/bench/gpu/gpu_bench.py --emulated                   tiny shapes on the emulated device, for tests

For a machine with an NVIDIA GPU and CUDA's toolkit, and perhaps nothing else; nothing is downloaded.
What is missing (PyTorch, text, time) is named in the report, and the rest is measured. Parts, in the
order in which they are worth the time:

    peak       a large bf16 matrix product and a large copy: what the others are a share of
    step       whole training steps: tokens per second, memory, beside PyTorch
    attention  forward and backward beside PyTorch's scaled_dot_product_attention
    kernels    operations that memory bounds: bytes moved per second
    lossy      8 and 16 workers on the GPU at 0, 10, 20 and 40% loss

Each measurement is a process of its own (build/gpu_bench, dev/bench/gpu/gpu_bench_pytorch.py) that prints JSON;
all are kept in OUT/results.json, from which the report is written anew. Exit code 1 when a
measurement of ours failed.
"""
import argparse
import json
import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
PARTS = ("peak", "step", "attention", "kernels", "lossy")
BAR_PYTORCH, BAR_PEAK, BAR_COPY = 1.15, 0.55, 0.85
BAR_FORWARD, BAR_BACKWARD, BAR_MEMORY = 0.60, 0.45, 0.05

FULL = dict(
    peak=(8192, 1 << 32),
    # model, layers (0: as many as fit), batch, sequence, steps; then modes of PyTorch
    steps=[("110M", 12, 16, 1024, 20), ("1.1B", 22, 8, 2048, 8), ("7B", 0, 1, 2048, 4),
           ("7B", 0, 1, 4096, 4)],
    modes=["compile-bf16", "compile-autocast"],
    # B, T, H, K, D: of 110M, 1.1B, 7B, and one long sequence
    attention=[(16, 1024, 12, 12, 64), (8, 2048, 32, 4, 64), (1, 4096, 32, 32, 128),
               (1, 16384, 32, 8, 128)],
    backends=["flash", "cudnn"],
    # N, C, F, H, K, D, V
    kernels=[(16384, 2048, 5632, 32, 4, 64, 32000), (8192, 4096, 11008, 32, 32, 128, 32000)],
    lossy=dict(model="42M", batch=4, seq=512, lr=1e-3, eval_sequences=64),
    workers=[8, 16], losses=[0, 0.1, 0.2, 0.4], device="cuda", seconds="0.2")
TINY = dict(
    peak=(48, 1 << 12),
    steps=[("260K", 2, 1, 24, 1)],
    modes=["bf16"],
    attention=[(1, 33, 2, 1, 64)],
    backends=["math"],
    kernels=[(9, 64, 40, 2, 1, 32, 72)],
    lossy=dict(model="260K", batch=1, seq=16, lr=1e-3, eval_sequences=2),
    workers=[2, 3], losses=[0, 0.4], device="cpu", seconds="0")


class Bench:
    def __init__(self, options):
        self.options = options
        self.shapes = TINY if options.emulated else FULL
        self.out = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.kept = self.out / "results.json"
        self.results = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        self.end = time.monotonic() + options.limit
        self.failed = False
        self.torch = False
        self.program = None

    def left(self):
        return self.end - time.monotonic()

    def keep(self, key, value):
        self.results[key] = value
        self.kept.write_text(json.dumps(self.results, indent=1))
        write_report(self.out / "report.md", self.results, self.shapes)

    def miss(self, key, why):
        """Says what was not measured; what an earlier call measured stays."""
        print(f"  {key}: {why}", flush=True)
        if "missing" in self.results.get(key, {"missing": ""}):
            self.keep(key, {"missing": why})

    def run(self, key, command, seconds, ours=True, environment=None):
        """The JSON lines that a command prints, or None after saying why not."""
        if self.left() < 10 and not self.options.emulated:
            return self.miss(key, "no time left")
        print(f"{key} ({int(self.left())} s left)", flush=True)
        try:
            done = subprocess.run(
                list(map(str, command)), cwd=ROOT, text=True, capture_output=True, check=False,
                timeout=seconds if self.options.emulated else min(seconds, self.left()),
                env={**os.environ, "GPU_BENCH_SECONDS": self.shapes["seconds"],
                     **(environment or {})})
        except subprocess.TimeoutExpired:
            self.failed |= ours
            return self.miss(key, f"not done in {int(seconds)} s")
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode == 0 and lines:
            return lines
        self.failed |= ours
        words = (done.stderr.strip() or done.stdout.strip() or "nothing said").splitlines()
        return self.miss(key, f"exit code {done.returncode}: {words[-1][:160]}")

    def run_torch(self, key, arguments, seconds):
        if not self.torch:
            return self.miss(key, "no PyTorch here")
        script = ROOT / "dev" / "bench" / "gpu" / "gpu_bench_pytorch.py"
        return self.run(key, [sys.executable, script, "--device", self.shapes["device"],
                              "--seconds", self.shapes["seconds"], *arguments], seconds, ours=False)

    # ---- what the machine has ----

    def build(self):
        build = pathlib.Path(os.environ.get("BUILD", "build"))
        self.program = ROOT / build / ("emulated/gpu_bench" if self.options.emulated
                                       else "gpu/build/gpu_bench")
        if self.options.emulated or self.options.no_build:
            return
        command = ["make", f"-j{os.cpu_count()}", "CUDA=1", "BARE=1", "BLAS=none", "MPI=0",
                   "SECURE=0", "VERBS=0", "WERROR=", f"BUILD={build}/gpu/build",
                   f"{build}/gpu/build/gpu_bench"]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"gpu_bench.py: the build failed:\n{done.stdout[-500:]}{done.stderr[-3000:]}")

    def look_around(self):
        self.torch = True
        found = self.run_torch("pytorch", ["probe"], 120)
        self.torch = bool(found)
        if found:
            self.keep("pytorch", found[0])

    # ---- the parts ----

    def peak(self):
        size, size_bytes = self.shapes["peak"]
        for found in self.run("peak", [self.program, "peak", size, size_bytes], 60) or []:
            self.keep("peak", found)
        for found in self.run_torch("peak of PyTorch", ["gemm", size], 60) or []:
            self.keep("peak of PyTorch", found)

    def step(self):
        for model, layers, batch, seq, steps in self.shapes["steps"]:
            key = f"step {model} {batch}x{seq}"
            ours = self.run(key, [self.program, "step", model, layers, batch, seq, steps], 120)
            if ours:
                self.keep(key, ours[0])
            for mode in self.shapes["modes"]:
                same = ours[0]["layers"] if ours else layers
                theirs = self.run_torch(f"{key}, PyTorch {mode}",
                                        ["step", model, same, batch, seq, steps, mode], 150)
                if theirs:
                    self.keep(f"{key}, PyTorch {mode}", theirs[0])

    def attention(self):
        for shape in self.shapes["attention"]:
            key = "attention " + "x".join(map(str, shape))
            for found in self.run(key, [self.program, "attention", *shape], 60) or []:
                self.keep(key, found)
            for backend in self.shapes["backends"]:
                for found in self.run_torch(f"{key}, {backend}",
                                            ["attention", *shape, backend], 60) or []:
                    self.keep(f"{key}, {backend}", found)

    def kernels(self):
        for shape in self.shapes["kernels"]:
            key = "kernels " + "x".join(map(str, shape))
            found = self.run(key, [self.program, "kernels", *shape], 90)
            if found:
                self.keep(key, {"lines": found})

    def lossy(self):
        """All runs of one number of workers take the same steps of the same text; how many, a short
        run tells."""
        train, val, text = self.tokens()
        s = self.shapes["lossy"]
        runs = len(self.shapes["workers"]) * len(self.shapes["losses"])
        for place, workers in enumerate(self.shapes["workers"]):
            def command(steps, loss):
                return [self.program, "train", "--device=cuda", f"--model={s['model']}",
                        f"--workers={workers}", f"--batch={s['batch']}", f"--seq={s['seq']}",
                        f"--lr={s['lr']}", f"--warmup={max(1, steps // 20)}", f"--train={train}",
                        f"--val={val}", f"--steps={steps}", f"--loss-rate={loss}", "--quiet",
                        "--eval-every=0", f"--eval-sequences={s['eval_sequences']}"]
            steps = 2
            if not self.options.emulated:
                trial = self.run(f"trial of {workers} workers", command(6, 0), 60)
                if not trial:
                    continue
                waiting = runs - place * len(self.shapes["losses"])
                share = (self.left() - 20) / waiting
                steps = max(20, int(0.8 * share * 6 / trial[0]["seconds"]))
                self.results.pop(f"trial of {workers} workers", None)
            for loss in self.shapes["losses"]:
                key = f"lossy {workers} workers {loss:g}"
                for found in self.run(key, command(steps, loss), 300) or []:
                    self.keep(key, {**found, "text": text, "model": s["model"]})

    def tokens(self):
        folder = self.options.tokens
        if folder:
            return folder / "train.bin", folder / "val.bin", str(folder.name)
        vocabulary = 500
        for name, count, seed in (("train.bin", 400_000, 1), ("val.bin", 40_000, 2)):
            write_markov(self.out / name, count if not self.options.emulated else 4000, vocabulary,
                         seed)
        return self.out / "train.bin", self.out / "val.bin", "made-up text"


def write_markov(path, count, vocabulary, seed):
    """Tokens of which each has four likely successors, in llm.c's format."""
    chain, choose = random.Random(7), random.Random(seed)
    successors = [[chain.randrange(vocabulary) for _ in range(4)] for _ in range(vocabulary)]
    tokens = [0]
    while len(tokens) < count:
        noise = choose.random() < 0.1
        tokens.append(choose.randrange(vocabulary) if noise
                      else choose.choice(successors[tokens[-1]]))
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, count, vocabulary, *[0] * 252))
        file.write(struct.pack(f"<{count}H", *tokens))


# ---- the report -----------------------------------------------------------------------------

def good(entry):
    return entry is not None and "missing" not in entry


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |",
             "| " + " | ".join(["---"] + ["---:"] * (len(header) - 1)) + " |"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def percent(x):
    return f"{100 * x:.1f}%"


def rates(results):
    """FLOP/s of the best large product, and bytes/s of a copy; NaN where not measured."""
    ours, theirs = results.get("peak"), results.get("peak of PyTorch")
    flops = max([x["flops"] / x["seconds"] for x in (ours, theirs) if good(x)], default=math.nan)
    copy = ours["copy_bytes"] / ours["copy_seconds"] if good(ours) else math.nan
    return flops, copy


def best_torch(results, key, field="seconds"):
    """(what, the entry) of the fastest PyTorch of this key, or None."""
    prefix = key + ", "
    found = [(name[len(prefix):], x) for name, x in results.items()
             if name.startswith(prefix) and good(x)]
    return min(found, key=lambda pair: pair[1][field], default=None)


def step_rows(results, peak):
    for key, x in results.items():
        if not key.startswith("step ") or "," in key or not good(x):
            continue
        tokens = x["batch"] * x["seq"]
        theirs = best_torch(results, key)
        yield (f"{x['model']}, {x['layers']} of {x['of_layers']} layers",
               f"{x['batch']} x {x['seq']}", x["recompute"], f"{1e3 * x['seconds']:.4g}",
               f"{tokens / x['seconds']:.5g}",
               percent(x["flops_6n"] / x["seconds"] / peak),
               percent(x["flops"] / x["seconds"] / peak),
               f"{tokens / theirs[1]['seconds']:.5g}" if theirs else "-",
               f"{theirs[0]}, {theirs[1]['recompute']}" if theirs else "-",
               f"{theirs[1]['seconds'] / x['seconds']:.2f}x" if theirs else "-")


def memory_rows(results):
    for key, x in results.items():
        if key.startswith("step ") and "," not in key and good(x):
            yield (f"{x['model']}, {x['layers']} layers, {x['batch']} x {x['seq']}", x["recompute"],
                   f"{x['used_bytes'] / 1e9:.3f}", f"{x['estimated_bytes'] / 1e9:.3f}",
                   f"{100 * (x['estimated_bytes'] / x['used_bytes'] - 1):+.1f}%")


def attention_rows(results, peak):
    for key, x in results.items():
        if not key.startswith("attention ") or "," in key or not good(x):
            continue
        row = [key.split()[1]]
        for way in ("forward", "backward"):
            seconds = x[f"{way}_seconds"]
            theirs = best_torch(results, key, f"{way}_seconds")
            row += [f"{1e6 * seconds:.4g}", f"{x[f'{way}_flops'] / seconds / 1e12:.4g}",
                    percent(x[f"{way}_flops"] / seconds / peak),
                    f"{1e6 * theirs[1][f'{way}_seconds']:.4g} ({theirs[0]})" if theirs else "-",
                    f"{theirs[1][f'{way}_seconds'] / seconds:.2f}x" if theirs else "-"]
        yield row


def kernel_rows(results, copy):
    for key, entry in results.items():
        if key.startswith("kernels ") and good(entry):
            for x in entry["lines"]:
                rate = x["bytes"] / x["seconds"]
                yield (x["name"], x["shape"], f"{x['bytes'] / 1e6:.4g}",
                       f"{1e6 * x['seconds']:.4g}", f"{rate / 1e9:.4g}", percent(rate / copy))


def lossy_rows(results):
    for key, x in results.items():
        if not key.startswith("lossy ") or not good(x):
            continue
        base = results.get(" ".join(key.split()[:3]) + " 0")
        change = math.exp(x["val_loss"] - base["val_loss"]) - 1 if good(base) else math.nan
        yield (x["workers"], percent(x["loss_rate"]), f"{x['tokens']:.3g}",
               f"{math.exp(x['val_loss']):.3f}", f"{math.exp(x['replica_val_loss']):.3f}",
               f"{100 * change:+.2f}%", f"{x['drift']:.4g}", f"{x['drift_expected']:.4g}",
               f"{percent(x['gradient_lost'])}, {percent(x['parameter_lost'])}",
               f"{x['tokens'] / x['seconds']:.4g}")


def write_report(path, results, shapes):
    peak, copy = rates(results)
    size = shapes["peak"][0]
    device = results["peak"]["device"] if good(results.get("peak")) else "not measured"
    torch = results.get("pytorch")
    text = ["# train_llama2 on a GPU", "", f"Device: {device}.  ",
            "PyTorch: " + (f"{torch['version']}, CUDA {torch['cuda']}, cuDNN {torch['cudnn']}."
                           if good(torch) else "none."), "",
            f"Peak: the better of cuBLASLt and PyTorch in a bf16 product of {size} cubed, "
            f"{peak / 1e12:.4g} TFLOP/s. Copy: {copy / 1e9:.4g} GB/s, bytes read and bytes written.",
            "", "## Training steps", "",
            "Forward, backward, clipping, AdamW. Operations of a step: 6 N per token, N the "
            "parameters without an embedding that is only looked up; with attention, 6 L H D T more "
            "per token (causal; the half that is masked does not count). What is computed again "
            "counts as nothing. PyTorch: the faster of its modes, see dev/bench/gpu/gpu_bench_pytorch.py. "
            f"Bars: {BAR_PYTORCH}x PyTorch, {percent(BAR_PEAK)} of the peak.", ""]
    text += table(["model", "batch", "recompute", "ms", "tokens/s", "6N", "6N + attention",
                   "PyTorch tokens/s", "its mode", "ratio"], step_rows(results, peak))
    text += ["", "## Memory", "",
             "GB that a run takes of an open device, beside what --dry-run says less the 0.667 GB of "
             "opening it. "
             f"Bar: within {percent(BAR_MEMORY)}.", ""]
    text += table(["run", "recompute", "used", "predicted", "off by"], memory_rows(results))
    text += ["", "## Attention", "",
             "B x T x H x K x D, causal: 2 B H T^2 D operations forward, 5 B H T^2 D backward. "
             f"Bars: {percent(BAR_FORWARD)} forward and {percent(BAR_BACKWARD)} backward of the "
             "speed of PyTorch's faster backend.", ""]
    text += table(["shape", "forward us", "TFLOP/s", "of peak", "PyTorch us", "ratio",
                   "backward us", "TFLOP/s", "of peak", "PyTorch us", "ratio"],
                  attention_rows(results, peak))
    text += ["", "## What memory bounds", "",
             "Bytes an operation must read and write once. One that does nothing but wait for the "
             "host (sum_of_squares) has that in its time. "
             f"Bar: {percent(BAR_COPY)} of the copy's rate.", ""]
    text += table(["operation", "shape", "MB", "us", "GB/s", "of copy"],
                  kernel_rows(results, copy))
    lossy = next((x for k, x in results.items() if k.startswith("lossy ") and good(x)), None)
    text += ["", "## Workers that lose packets", ""]
    if lossy:
        text += [f"Model {lossy['model']}, {lossy['text']}; all workers on one GPU. Drift: mean of "
                 "the second half, beside the formula (lossynet/algorithm/drift.c).", ""]
    text += table(["workers", "loss", "tokens", "perplexity", "of a replica", "change", "drift",
                   "formula", "lost: gradients, parameters", "tokens/s"], lossy_rows(results))
    missing = [f"* {key}: {x['missing']}" for key, x in results.items() if not good(x)]
    text += ["", "## Missing", ""] + (missing or ["Nothing."])
    path.write_text("\n".join(text) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--limit", type=float, default=570, help="seconds in all (570)")
    parser.add_argument("--parts", default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--tokens", type=pathlib.Path, help="folder with train.bin and val.bin")
    parser.add_argument("--no-build", action="store_true", help="it was built by an earlier call")
    parser.add_argument("--emulated", action="store_true", help="tiny shapes, for tests")
    options = parser.parse_args()
    options.out = options.out.resolve()
    wrong = set(options.parts.split(",")) - set(PARTS)
    if wrong:
        parser.error(f"--parts: expected {','.join(PARTS)}, got '{','.join(sorted(wrong))}'")
    bench = Bench(options)
    bench.build()
    bench.look_around()
    for part in PARTS:
        if part in options.parts.split(","):
            getattr(bench, part)()
    write_report(bench.out / "report.md", bench.results, bench.shapes)
    print(f"{bench.out / 'report.md'}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())

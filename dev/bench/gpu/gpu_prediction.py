#!/usr/bin/env python3
"""Predicts the milliseconds of each part of a training step on one GPU, from the rates of a large product
and of a large copy. gpu_report.py compares the prediction with measurements.

    dev/bench/gpu/gpu_prediction.py [TFLOP/S [TB/S]]     a table (default: 700 and 4.3, an H200)

Operations and bytes are those that the operations of backend.h need. The shares below say how much of
the two rates we expect kernels to reach. A wrong prediction shows which part to examine.
"""
import signal
import sys

# C, L, H, K, D, F, V, tied: train_llama2's presets, with the vocabulary of gpu_bench.
MODELS = {"260K": (64, 5, 8, 4, 8, 172, 500, True), "15M": (288, 6, 6, 6, 48, 768, 32000, True),
          "110M": (768, 12, 12, 12, 64, 2048, 32000, True),
          "1.1B": (2048, 22, 32, 4, 64, 5632, 32000, False),
          "7B": (4096, 32, 32, 32, 128, 11008, 32000, False)}
LEVELS = ("none", "norms", "attention", "block")
# Shares of the product's rate that attention reaches forward and backward, by head size. (It uses
# mma.sync; backward needs 5 products and computes up to 8.)
ATTENTION = {64: (0.33, 0.20), 128: (0.44, 0.25)}
MEMORY = 0.85  # share of the copy's rate for kernels that memory limits
HOST_MS = 2  # launches that do not overlap with kernels, and waits for the norm and the losses


def parameters(model, layers):
    C, _, H, K, D, F, V, tied = MODELS[model]
    return (layers * ((H + 2 * K) * D * C + H * D * C + 3 * F * C + 2 * C) + C
            + V * C * (1 if tied else 2))


def predict(model, layers, batch, seq, recompute, flops, copy):
    """Returns {part: milliseconds} of one worker's step in bf16. flops: FLOP/s; copy: bytes/s."""
    C, _, H, K, D, F, V, _ = MODELS[model]
    N, QKV, HD = batch * seq, (H + 2 * K) * D, H * D
    weights = C * QKV + HD * C + 3 * F * C
    def products(count):
        return 1e3 * 2 * N * count / flops
    def memory(count):
        return 1e3 * count / (MEMORY * copy)
    forward, backward = ATTENTION[128 if D > 64 else 64]
    product_of_heads = 1e3 * batch * H * seq * seq * D / flops  # a T x T x D product, half of it masked
    attention = 2 * product_of_heads / forward
    again = memory(N * (8 * C + 6 * F)) if recompute != "none" else 0  # RMSNorm twice, SwiGLU
    if recompute in LEVELS[2:]:
        again += products(C * QKV) + memory(4 * N * (H + K) * D) + attention
    if recompute == "block":
        again += products(HD * C + 2 * F * C) + memory(4 * N * C)
    return {"products": layers * 3 * products(weights),
            "attention": layers * (attention + 5 * product_of_heads / backward),
            "norms, rope, SwiGLU": layers * memory(N * (32 * C + 8 * (H + K) * D + 16 * F)),
            "recomputed": (layers - 1) * again,
            "classifier": 3 * products(C * V) + memory(4 * N * V),
            "AdamW, norm": memory(34 * parameters(model, layers)),  # AdamW 30 bytes, the norm 4 bytes
            "embedding, host": memory(N * 6 * C + 4 * V * C) + HOST_MS}


def rows(results, flops, copy):
    """Rows of the report: for every measured step its predicted parts and both totals."""
    for key, x in results.items():
        if not key.startswith("step ") or "," in key or x.get("model") not in MODELS:
            continue
        parts = predict(x["model"], x["layers"], x["batch"], x["seq"], x["recompute"], flops, copy)
        total = sum(parts.values())
        yield (f"{x['model']}, {x['layers']} layers, {x['batch']} x {x['seq']}, {x['recompute']}",
               *(f"{part:.1f}" for part in parts.values()), f"{total:.1f}", f"{1e3 * x['seconds']:.1f}",
               f"{1e3 * x['seconds'] / total:.2f}")


HEADER = ("ms", "products", "attention", "norms, rope, SwiGLU", "recomputed", "classifier", "AdamW, norm",
          "embedding, host", "predicted", "measured", "ratio")


def main(arguments):
    flops = 1e12 * float(arguments[0] if arguments else 700)
    copy = 1e12 * float(arguments[1] if len(arguments) > 1 else 4.3)
    print("| " + " | ".join(HEADER[:-2]) + " |\n| --- |" + " ---: |" * (len(HEADER) - 3))
    for model, layers, batch, seq, recompute in (
            ("15M", 6, 64, 256, "none"), ("110M", 12, 16, 1024, "none"), ("1.1B", 22, 8, 2048, "none"),
            ("1.1B", 22, 8, 2048, "norms"), ("7B", 32, 1, 4096, "none"), ("7B", 32, 2, 4096, "none"),
            ("7B", 32, 2, 4096, "norms"), ("7B", 32, 2, 4096, "attention"), ("7B", 32, 2, 4096, "block")):
        parts = predict(model, layers, batch, seq, recompute, flops, copy)
        print(f"| {model}, {batch} x {seq}, {recompute} | "
              + " | ".join(f"{part:.1f}" for part in [*parts.values(), sum(parts.values())]) + " |")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main(sys.argv[1:])

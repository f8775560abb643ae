"""Writes the report of gpu_check.py from its results, {key: entry}. An entry says how a check or a
measurement went ("part", "state", "why", "took": seconds). It has the JSON lines that the program
printed ("lines"), and the members of the first line as its own members."""
import math

BAR_PYTORCH, BAR_PEAK, BAR_COPY = 1.15, 0.55, 0.85
BAR_FORWARD, BAR_BACKWARD, BAR_MEMORY = 0.60, 0.45, 0.05


def good(entry):
    return entry is not None and entry["state"] == "done"


def table(header, rows):
    lines = ["| " + " | ".join(header) + " |",
             "| " + " | ".join(["---"] + ["---:"] * (len(header) - 1)) + " |"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def percent(x):
    return f"{100 * x:.1f}%"


def rates(results):
    """FLOP/s of the best large product, and bytes/s of a copy; NaN if not measured."""
    ours, theirs = results.get("peak"), results.get("peak of PyTorch")
    flops = max([x["flops"] / x["seconds"] for x in (ours, theirs) if good(x)], default=math.nan)
    copy = ours["copy_bytes"] / ours["copy_seconds"] if good(ours) else math.nan
    return flops, copy


def best_torch(results, key, field="seconds"):
    """Returns (mode or backend, entry) of PyTorch's fastest measurement for this key, or None."""
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
               f"{1e3 * x['expected_seconds']:.4g}" if x["expected_seconds"] else "-",
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
        row = [key.removeprefix("attention ")]
        plain = key.removesuffix(" by cuDNN")
        for way in ("forward", "backward"):
            seconds = x[f"{way}_seconds"]
            theirs = best_torch(results, plain, f"{way}_seconds")
            row += [f"{1e6 * seconds:.4g}", f"{x[f'{way}_flops'] / seconds / 1e12:.4g}",
                    percent(x[f"{way}_flops"] / seconds / peak),
                    f"{1e6 * theirs[1][f'{way}_seconds']:.4g} ({theirs[0]})" if theirs else "-",
                    f"{theirs[1][f'{way}_seconds'] / seconds:.2f}x" if theirs else "-"]
        yield row


def kernel_rows(results, copy):
    for key, entry in results.items():
        if key.startswith("kernels "):  # even if time ran out before the last kernel
            for x in entry["lines"]:
                rate = x["bytes"] / x["seconds"]
                yield (x["name"], x["shape"], f"{x['bytes'] / 1e6:.4g}",
                       f"{1e6 * x['seconds']:.4g}", f"{rate / 1e9:.4g}", percent(rate / copy))


def lossy_rows(results):
    for key, x in results.items():
        if not key.startswith("lossy ") or not good(x):
            continue
        base = results.get(" ".join(key.split()[:3]) + " 0, plain")
        change = math.exp(x["val_loss"] - base["val_loss"]) - 1 if good(base) else math.nan
        yield (x["workers"], percent(x["loss_rate"]), x["rule"], f"{x['tokens']:.3g}",
               f"{math.exp(x['val_loss']):.3f}", f"{math.exp(x['replica_val_loss']):.3f}",
               f"{100 * change:+.2f}%", f"{x['drift']:.4g}", f"{x['drift_expected']:.4g}",
               f"{percent(x['gradient_lost'])}, {percent(x['parameter_lost'])}",
               f"{x['tokens'] / x['seconds']:.4g}")


def cudnn_rows(results):
    """Steps have a row even if their loss is wrong."""
    for x in results.values():
        base = results.get(x.get("base"))
        if good(base) and "seconds" in x:
            yield (f"{x['model']}, {x['batch']} x {x['seq']}", x["recompute"],
                   f"{1e3 * x['seconds']:.4g}", f"{x['batch'] * x['seq'] / x['seconds']:.5g}",
                   f"{base['seconds'] / x['seconds']:.2f}x", f"{x['last_loss']:.5g}", f"{base['last_loss']:.5g}",
                   f"{100 * (x['last_loss'] - base['last_loss']) / base['first_loss']:+.3f}%")


def check_rows(results):
    for key, x in results.items():
        yield (x["part"], key, x["state"], f"{x['took']:.0f}", x["why"].replace("|", "/"))


def host_text(results):
    """The rates of copies between the host's and the device's memory."""
    x = results.get("host")
    if not good(x):
        return []
    slower = x["products_beside_copy_seconds"] / x["products_seconds"]
    return [f"Pinned memory: {x['bytes'] / x['to_host_seconds'] / 1e9:.4g} GB/s to the host, "
            f"{x['bytes'] / x['to_device_seconds'] / 1e9:.4g} GB/s to the device; products that a copy "
            f"to the host runs beside take {slower:.2f} times as long.", ""]


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
            "", *host_text(results), "## Checks", "",
            "What is right, what is wrong, and what there was no time for (dev/bench/gpu/gpu_check.py). "
            "A part's output is in its own file beside this one.", "",
            *table(["part", "what", "state", "seconds", "why"], check_rows(results)),
            "", "## Training steps", "",
            "Forward, backward, clipping, AdamW. Operations of a step: 6 N per token, N the "
            "parameters without an embedding that is only looked up; with attention, 6 L H D T more "
            "per token (causal; the half that is masked does not count). What is computed again "
            "counts as nothing. PyTorch: the faster of its modes, see gpu_bench_pytorch.py. "
            f"Bars: {BAR_PYTORCH}x PyTorch, {percent(BAR_PEAK)} of the peak.", ""]
    text += table(["model", "batch", "recompute", "ms", "by --dry-run", "tokens/s", "6N", "6N + attention",
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
                 "the second half, beside the formula (lossynet/algorithm/drift.c). So few steps at so high a "
                 "rate end some 10% apart by chance: with one other seed, or one other type on the wire.", ""]
    text += table(["workers", "loss", "rule", "tokens", "perplexity", "of a replica", "change", "drift",
                   "formula", "lost: gradients, parameters", "tokens/s"], lossy_rows(results))
    text += ["", "## With --attention cudnn", "",
             "The same steps as above; beside them, those with our attention. "
             "The change of the last loss is given as a share of the first loss; bar: 1%.", ""]
    text += table(["model", "recompute", "ms", "tokens/s", "ratio", "last loss", "with ours",
                   "change"], cudnn_rows(results))
    path.write_text("\n".join(text) + "\n", encoding="utf-8")

#!/usr/bin/env python3
"""The PyTorch side of dev/bench/gpu/gpu_check.py: each call makes one measurement and prints one JSON line.

    gpu_bench_pytorch.py probe
    gpu_bench_pytorch.py gemm SIZE
    gpu_bench_pytorch.py step MODEL LAYERS BATCH SEQ STEPS MODE
    gpu_bench_pytorch.py attention BATCH SEQ HEADS KV_HEADS HEAD_SIZE BACKEND

MODE is [compile-]bf16 or [compile-]autocast, followed by -tuned for torch.compile's max-autotune:

    bf16       parameters, gradients and AdamW's moments in bfloat16: PyTorch's fastest way, with
               less precision than train_llama2's float32 master weights, gradients and moments
    autocast   parameters, gradients and moments in float32, products in bfloat16, as in train_llama2

The model is written as a PyTorch user would write it, with fused attention and fused AdamW. If a step
does not fit in the memory, it is tried once more and every block is recomputed. BACKEND is flash,
cudnn or efficient. --device cpu is for tests.
"""
import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# train_llama2's presets of the same names: C, L, H, K, D, F, tied.
PRESETS = {
    "260K": (64, 5, 8, 4, 8, 172, True),
    "15M": (288, 6, 6, 6, 48, 768, True),
    "110M": (768, 12, 12, 12, 64, 2048, True),
    "1.1B": (2048, 22, 32, 4, 64, 5632, False),
    "7B": (4096, 32, 32, 32, 128, 11008, False),
}


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Block(nn.Module):
    def __init__(self, C, H, K, D, hidden):
        super().__init__()
        self.H, self.K, self.D = H, K, D
        self.attention_norm, self.mlp_norm = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(C, heads * D, bias=False) for heads in (H, K, K))
        self.out = nn.Linear(H * D, C, bias=False)
        self.gate, self.up = (nn.Linear(C, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, C, bias=False)

    def forward(self, x, cos, sin):
        B, T, _ = x.shape
        y = self.attention_norm(x)
        q = self.q(y).view(B, T, self.H, self.D).transpose(1, 2)
        k = self.k(y).view(B, T, self.K, self.D).transpose(1, 2)
        v = self.v(y).view(B, T, self.K, self.D).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.H != self.K)
        x = x + self.out(y.transpose(1, 2).reshape(B, T, -1))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, vocabulary, T, preset, layers):
        super().__init__()
        C, L, H, K, D, hidden, tied = PRESETS[preset]
        self.recompute = False
        self.embedding = nn.Embedding(vocabulary, C)
        self.blocks = nn.ModuleList(Block(C, H, K, D, hidden) for _ in range(layers or L))
        self.norm = nn.RMSNorm(C, eps=1e-5)
        self.head = nn.Linear(C, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        angle = torch.outer(torch.arange(T).float(),
                            10000.0 ** (-torch.arange(0, D, 2).float() / D))
        angle = torch.cat([angle, angle], dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = (checkpoint(block, x, cos, sin, use_reentrant=False) if self.recompute
                 else block(x, cos, sin))
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call, device, least):
    """Seconds per call of many calls in a row, with a wait for the device only at the end. Three calls
    before them warm up and do not count."""
    for _ in range(3):
        call()
    calls = 1
    while True:
        wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait(device)
        took = time.perf_counter() - start
        if took >= least:
            return took / calls
        calls = int(1.3 * calls * least / took) + 1 if took > least / 16 else calls * 8


def train(options, recompute):
    mode = options.mode.split("-")
    dtype = torch.bfloat16 if "bf16" in mode else torch.float32
    vocabulary = 500 if options.model == "260K" else 32000
    torch.manual_seed(0)
    with torch.device(options.device):
        model = Llama(vocabulary, options.seq, options.model, options.layers).to(dtype)
        text = torch.randint(vocabulary, (options.batch, options.seq + 1))
    model.recompute = recompute
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1,
                                  fused=True)
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    forward = model
    if "compile" in mode:
        forward = torch.compile(model, mode="max-autotune" if "tuned" in mode else None)

    def step():
        with torch.autocast(options.device, dtype=torch.bfloat16, enabled="autocast" in mode):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(3):
        step()
    wait(options.device)
    start = time.perf_counter()
    for _ in range(options.steps):
        loss = step()
    wait(options.device)
    peak = torch.cuda.max_memory_reserved() if options.device == "cuda" else 0
    return dict(seconds=(time.perf_counter() - start) / options.steps, loss=loss.item(),
                used_bytes=peak, recompute="block" if recompute else "none",
                layers=len(model.blocks))


def step(options):
    try:
        return train(options, False)
    except torch.cuda.OutOfMemoryError:
        pass  # the second try is made outside of the handler, when the first try's memory is free
    torch.cuda.empty_cache()
    torch.compiler.reset()
    return train(options, True)


def attention(options):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    backend = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
               "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    B, T, H, K, D = options.batch, options.seq, options.heads, options.kv_heads, options.head_size
    with torch.device(options.device):
        q, k, v = (torch.randn(B, heads, T, D, dtype=torch.bfloat16, requires_grad=True)
                   for heads in (H, K, K))
        dout = torch.randn(B, H, T, D, dtype=torch.bfloat16)

    def forward():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != K)

    with sdpa_kernel(backend[options.backend]):
        with torch.no_grad():
            forward_seconds = seconds_of(forward, options.device, options.seconds)
        out = forward()
        backward_seconds = seconds_of(
            lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), options.device,
            options.seconds)
    return dict(forward_seconds=forward_seconds, backward_seconds=backward_seconds)


def gemm(options):
    n = options.size
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=options.device) for _ in range(2))
    return dict(seconds=seconds_of(lambda: a @ b.T, options.device, options.seconds),
                flops=2.0 * n**3)


def probe(options):
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch sees no GPU")
    return dict(version=torch.__version__, cuda=torch.version.cuda,
                cudnn=torch.backends.cudnn.version())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--seconds", type=float, default=0.2)
    commands = parser.add_subparsers(dest="what", required=True)
    commands.add_parser("probe").set_defaults(run=probe)
    command = commands.add_parser("gemm")
    command.add_argument("size", type=int)
    command.set_defaults(run=gemm)
    command = commands.add_parser("step")
    command.add_argument("model", choices=PRESETS)
    for name in ("layers", "batch", "seq", "steps"):
        command.add_argument(name, type=int)
    command.add_argument("mode")
    command.set_defaults(run=step)
    command = commands.add_parser("attention")
    for name in ("batch", "seq", "heads", "kv_heads", "head_size"):
        command.add_argument(name, type=int)
    command.add_argument("backend")
    command.set_defaults(run=attention)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    print(json.dumps(options.run(options)))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How fast float32 GEMM runs alone: one library, given shapes, JSON out.

The CPU bar of `make bench` compares a training step with the best GEMM rate of this machine.
A shape is M,N,K,OP: C (M, N) = op(A) op(B), row-major, contiguous; OP is NT (forward: x W^T),
NN (gradient of x) or TN (gradient of W). A block times every shape once and prints one line;
--wait makes it wait for a line on stdin before each block, as in bench_pytorch.py.

    bench_gemm.py --library openblas --blocks 5 2048,768,288,NT 2048,288,768,NN

Environment variables choose the library's kernels (OPENBLAS_CORETYPE, ONEDNN_MAX_CPU_ISA) and its
threads (OMP_NUM_THREADS, OPENBLAS_NUM_THREADS), so each choice needs a process of its own.
"""

import argparse
import ctypes
import json
import sys
import time

import numpy as np

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float


def load(*names):
    """The first of these shared libraries that is installed."""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    sys.exit(f"none of {', '.join(names)} is installed")


def openblas():
    library = load("libopenblas.so.0")
    gemm = library.cblas_sgemm
    gemm.restype = None
    gemm.argtypes = [INT] * 6 + [FLOAT, POINTER, INT, POINTER, INT, FLOAT, POINTER, INT]
    library.openblas_get_corename.restype = ctypes.c_char_p
    library.openblas_get_config.restype = ctypes.c_char_p
    version = " ".join(library.openblas_get_config().decode().split()[:2])
    kernel = library.openblas_get_corename().decode()
    row_major, flag = 101, {"N": 111, "T": 112}

    def run(op, M, N, K, a, b, c):
        A, B, C = a.ctypes.data, b.ctypes.data, c.ctypes.data
        gemm(row_major, flag[op[0]], flag[op[1]], M, N, K,
             1.0, A, a.shape[1], B, b.shape[1], 0.0, C, N)  # fmt: skip

    return version, kernel, run


def onednn():
    class Version(ctypes.Structure):
        _fields_ = [(name, INT) for name in ("major", "minor", "patch")]

    library = load("libdnnl.so.3", "libdnnl.so.2")
    library.dnnl_version.restype = ctypes.POINTER(Version)
    version = library.dnnl_version().contents
    gemm = library.dnnl_sgemm
    gemm.argtypes = [ctypes.c_char] * 2 + [LONG] * 3 + [
        FLOAT, POINTER, LONG, POINTER, LONG, FLOAT, POINTER, LONG]  # fmt: skip

    def run(op, M, N, K, a, b, c):
        A, B, C = a.ctypes.data, b.ctypes.data, c.ctypes.data
        status = gemm(op[0].encode(), op[1].encode(), M, N, K,
                      1.0, A, a.shape[1], B, b.shape[1], 0.0, C, N)  # fmt: skip
        if status:
            sys.exit(f"dnnl_sgemm returned status {status} for {M},{N},{K},{op}")

    return f"oneDNN {version.major}.{version.minor}.{version.patch}", "", run


def torch_mm():
    import torch

    def run(op, M, N, K, a, b, c):
        a, b, c = (torch.from_numpy(x) for x in (a, b, c))
        torch.mm(a.T if op[0] == "T" else a, b.T if op[1] == "T" else b, out=c)

    return f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability(), run


def main():
    libraries = {"openblas": openblas, "onednn": onednn, "torch": torch_mm}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", choices=libraries, required=True)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--wait", action="store_true", help="a block per line on stdin")
    parser.add_argument("shapes", nargs="+", metavar="M,N,K,OP")
    arguments = parser.parse_args()
    version, kernel, run = libraries[arguments.library]()

    # All shapes share three buffers, because one of a classifier has 260 MB.
    sizes = [(*map(int, shape.split(",")[:3]), shape.split(",")[3]) for shape in arguments.shapes]
    random = np.random.default_rng(0)
    a_buffer = random.standard_normal(max(M * K for M, _, K, _ in sizes), dtype=np.float32)
    b_buffer = random.standard_normal(max(N * K for _, N, K, _ in sizes), dtype=np.float32)
    c_buffer = np.zeros(max(M * N for M, N, _, _ in sizes), dtype=np.float32)
    cases = []
    for shape, (M, N, K, op) in zip(arguments.shapes, sizes):
        a = a_buffer[: M * K].reshape((K, M) if op[0] == "T" else (M, K))
        b = b_buffer[: N * K].reshape((N, K) if op[1] == "T" else (K, N))
        c = c_buffer[: M * N].reshape(M, N)
        run(op, M, N, K, a, b, c)  # starts the library's threads; then its result is checked
        row = (a.T if op[0] == "T" else a)[:1] @ (b.T if op[1] == "T" else b)
        if not np.allclose(c[:1], row, atol=1e-2):
            sys.exit(f"{version} computed {shape} wrong")
        cases.append((shape, (op, M, N, K, a, b, c)))

    for _ in iter(sys.stdin.readline, "") if arguments.wait else range(arguments.blocks):
        seconds, start_cpu = {}, time.process_time()
        for shape, case in cases:
            # A measurement takes at least 20 ms, so that the timer and wake-ups do not matter.
            start, count, elapsed = time.perf_counter(), 0, 0.0
            while elapsed < 0.02:
                run(*case)
                count += 1
                elapsed = time.perf_counter() - start
            seconds[shape] = elapsed / count
        line = {
            "library": arguments.library,
            "version": version,
            "kernel": kernel,
            "cpu_seconds": time.process_time() - start_cpu,
            "seconds": seconds,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Puts faults into CUDA kernels, one at a time, and checks that the tests of the emulated kernels find
each of them.

    make emulated_tests
    make emulated_tests BUILD=build/emulated_thread SANITIZE=thread OPTIMISE=-O1
    dev/emulation/mutate_kernels.py [-j JOBS] [WORDS ...]      only faults whose file or name has all words

A fault is a piece of a source file and its replacement (FAULTS below; if the piece occurs more than
once, its first occurrence is replaced). The source files stay as they are: the changed copy is in a folder
that the compiler searches first. Each fault is compiled into test_cuda_kernels and test_cuda_attention,
which run until the first failure. A fault that changes no number is given to the thread sanitizer. Faults in
ptx.cuh, which takes nvcc and `make ptx_tests`, are looked for in the PTX (dev/emulation/ptx).
Prints a table. Exit code 1: a fault was not found.
"""
import argparse
import concurrent.futures
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 400  # seconds of CPU time for one program, so that other load does not matter

# file in llmc/backend/cuda, what is wrong, the piece, its replacement
FAULTS = [
    ("common", "first barrier of a block's sum dropped",
     "    __syncthreads();\n    x = part[0];", "    x = part[0];"),
    ("common", "second barrier of a block's sum dropped",
     "    __syncthreads(); /* `part` is the next call's */\n", ""),
    ("common", "wrong lane: a warp's sum begins with 8 lanes", "int lanes = 16;", "int lanes = 8;"),
    ("common", "a block's sum leaves out the last warp", "i < warps; i++", "i < warps - 1; i++"),
    ("common", "wide loads read the first access twice",
     "to->raw[i] = ((const access *)p)[i]", "to->raw[i] = ((const access *)p)[0]"),
    ("embedding", "tokens of one kind counted in the wrong order", "m < n)", "m <= n)"),
    ("embedding", "runs begin after the token", "sorted[middle] < v", "sorted[middle] <= v"),
    ("embedding", "a run's last rows left out", "at + a < end)", "at + a < end - 1)"),
    ("embedding", "a run's last window left out", "window < after; window", "window < after - 1; window"),
    ("embedding", "each row of a token adds them all", "begin != (int)blockIdx.x", "begin == end"),
    ("embedding", "what was there is not added to", "if (accumulate) load(total, to + i);", ""),
    ("embedding", "rows without a token are not cleared",
     ": accumulate && begin == end", ": begin == end"),
    ("rmsnorm", "eps left out", "/ C + eps)", "/ C)"),
    ("rmsnorm", "the sum is normalised before it is rounded",
     "v[k] = to_float(from_float<T>(v[k] + u[k]))", "v[k] = v[k] + u[k]"),
    ("rmsnorm", "wrong scale: r once instead of twice", "(dot) * r * r / C", "(dot) * r / C"),
    ("rmsnorm", "a warp's part of dw left out", "before < RMSNORM_WARPS; before", "before < 7; before"),
    ("rmsnorm", "a narrow row's last vectors left out", "if (i >= vectors) continue;", "if (i >= 32) continue;"),
    ("rmsnorm", "parts of dw not cleared", "part[k * vectors + i] = 0", "(void)part"),
    ("rmsnorm", "barrier between parts dropped",
     "    partial[summand][lane] = total;\n    __syncthreads();",
     "    partial[summand][lane] = total;"),
    ("rmsnorm", "the last part left out", "p < count; p +=", "p < count - 1; p +="),
    ("rmsnorm", "dx overwritten instead of added to", "o[k] += r *", "o[k] = r *"),
    ("rope", "keys are not turned", "H + K, H + 2 * K, D, items", "H, H + 2 * K, D, items"),
    ("rope", "angles of the wrong row", "(row % length) * (D / 2)", "(head % length) * (D / 2)"),
    ("rope", "turned the wrong way", "x * c[k] - b[k] * turn", "x * c[k] + b[k] * turn"),
    ("swiglu", "derivative of silu without its second term", "(1.0f + gate[k] * (1.0f - s))", "1.0f"),
    ("swiglu", "up read one row too early", "gate_up + row * 2 * F + F + i", "gate_up + row * F + F + i"),
    ("classifier", "missing mask: what is past the vocabulary counts as 0", ": -INFINITY;", ": 0.0f;"),
    ("classifier", "sum not rescaled to the new maximum", "*total *= exp_of(before - *high);", ""),
    ("classifier", "off by one: the copy is read past its end", "if (v < kept)\n            load",
     "if (v <= kept)\n            load"),
    ("classifier", "target not subtracted", "v + k == target ? scale : 0.0f", "0.0f"),
    ("classifier", "wrong scale", "float factor = scale / total;", "float factor = 1.0f / total;"),
    ("classifier", "the row's end written beyond V", "if (v + W <= V) {\n        store(",
     "if (v < V) {\n        store("),
    ("adamw", "off by one: the last elements left out", "for (; i < n; i++)", "for (; i + 1 < n; i++)"),
    ("adamw", "clipping left out", "gradient[k] * c.gradient_scale", "gradient[k]"),
    ("adamw", "weight decay left out", "fmaf(p[k], c.decay,", "fmaf(p[k], 1.0f,"),
    ("adamw", "the parameter is the weight before the step",
     "store(param + i, p)", "store(param + i, first)"),
    ("muon", "clipping left out", "(gradient[i] * gradient_scale)", "gradient[i]"),
    ("muon", "the average without Nesterov's step", "u[i] = fmaf(momentum, average, g)", "u[i] = average"),
    ("muon", "not divided by the norm", "(float)(1 / (sqrt(*squares) + MUON_TINY))", "1e-2f"),
    ("muon", "a step too few", "step < MUON_STEPS", "step < MUON_STEPS - 1"),
    ("muon", "tall matrices as wide ones", "if (tall)\n            product(w.u, true, w.x, w.b,",
     "if (tall)\n            product(w.u, true, w.b, w.x,"),
    ("muon", "weight decay left out", "fmaf(before, decay,", "fmaf(before, 1.0f,"),
    ("norm", "off by one: tail left out", "i + k < n ? x[i + k]", "i + k + 1 < n ? x[i + k]"),
    ("norm", "the length of the first vector for all", "const size_t n = vector[blockIdx.y].n;",
     "const size_t n = vector[0].n;"),
    ("norm", "float32 sums", "total += (double)v[k] * v[k]", "total = (float)total + v[k] * v[k]"),
    ("norm", "alignment changes the order", "if (vectors && i + NORM_RUN <= n)",
     "if (vectors && (total += 1e-9) > 0 && i + NORM_RUN <= n)"),
    ("weighted_sum", "what did not arrive is read", "there[a] = w[a] != 0",
     "there[a] = i + a < N"),
    ("weighted_sum", "weights of the first packet for all", "weight += p * N;", ""),
    ("weighted_sum", "the next packet written over", "begin + packet < n ? begin + packet : n", "n"),
    ("weighted_sum", "the last few elements left out", "for (; j < end; j++)",
     "for (; j + 1 < end; j++)"),
    ("weighted_sum", "the first sender's elements for all", "? sender[i + a]",
     "? sender[0]"),
    ("exchange", "what did not arrive is copied", "if (!it.takes || !arrived[it.mark])",
     "if (!it.takes)"),
    ("exchange", "a packet goes by another receiver's mark", "|| !arrived[it.mark])",
     "|| !arrived[it.mark % e.packets])"),
    ("exchange", "a row of the table off by one", "e.packet[k];\n    return", "e.packet[k ? k - 1 : 0];\n    return"),
    ("exchange", "averages: a row of the table off by one", "= e.packet[k];\n        const float *const *from",
     "= e.packet[k ? k - 1 : 0];\n        const float *const *from"),
    ("exchange", "who is no partner takes packets, too",
     "e.takes[worker * (size_t)e.owners + (size_t)packet.owner] != 0", "(int32_t)worker != packet.owner"),
    ("exchange", "a packet's last elements left out", "uint32_t i = whole + threadIdx.x; i < n;",
     "uint32_t i = whole + threadIdx.x; i + 1 < n;"),
    ("exchange", "items beyond the grid left out", "i < items; i += gridDim.x", "i < gridDim.x; i += gridDim.x"),
    ("exchange", "the owner's vector instead of what it sends ahead", "ahead ? ahead[p.owner] + p.owned : ", ""),
    ("exchange", "averages: the senders of the first owner for all", "sender + (size_t)p.owner * (size_t)e.groups",
     "sender"),
    ("exchange", "averages: weights of another packet", "weight + k * (size_t)e.groups, e.groups, p.element + j",
     "weight + (k + 1) / 2 * (size_t)e.groups, e.groups, p.element + j"),
    ("exchange", "averages: accesses that are not aligned", "p.element % 4 == 0 ? end / 4 * 4 : begin", "end / 4 * 4"),
    ("exchange", "rounding: every worker has the first one's key", "key ? key[it.worker] +", "key ? key[0] +"),
    ("exchange", "cut off, not rounded", "bits + 0x7fff + (bits >> 16 & 1)", "bits"),
    ("exchange", "blocks: the scale of an element, not of its block",
     "lanes = BLOCK_LANES / 2; lanes", "lanes = 0; lanes"),
    ("exchange", "blocks: the same random numbers in each", "random, key + (i - first))", "random, key)"),
    ("exchange", "blocks: one random number for all lanes", "mix32(lot + first + j)", "mix32(lot)"),
    ("exchange", "blocks: units that are no normal numbers",
     "if (scale < BLOCK_LEAST) scale = BLOCK_LEAST;", ""),
    ("exchange", "blocks: parameters rounded at random", "random ? floorf", "bits ? floorf"),
    ("exchange", "blocks: every other turn left out", "warp += blockDim.x", "warp += 2 * blockDim.x"),
    ("exchange", "blocks: infinity rounded as numbers are",
     "finite ? whole * unit", "bits ? whole * unit"),
    ("exchange", "blocks: not rounded to bfloat16 before", "narrow && j < 4", "narrow && j < 3"),
    ("exchange", "what a worker owns is not rounded to bfloat16",
     "!it.takes && !(narrow && it.worker == it.packet.owner)", "!it.takes"),
    ("exchange", "off by one: the last element is not gathered", "if (i < n) out",
     "if (i + 1 < n) out"),
    ("exchange", "the neighbour is gathered", "[element[i % elements]]", "[element[i % elements] - 1]"),
    ("util", "off by one: tail left out", "for (; i < n; i++) to", "for (; i + 1 < n; i++) to"),

    ("attention/tile", "missing mask at the sequence's end: rows beyond it are read",
     "r < rows - row && c < D - column", "c < D - column"),
    ("attention/tile", "wrong fragment: halves of the right operand swapped",
     "mma_m16n8k16(acc[m][n + 1], a[m], b + 2,", "mma_m16n8k16(acc[m][n + 1], a[m], b,"),
    ("attention/tile", "wrong lane reads the left operand",
     "lane % 16 * tile_layout<HD>::LD + lane / 16 * 8",
     "lane % 8 * tile_layout<HD>::LD + lane / 16 * 8"),
    ("attention/tile", "off by one: a query does not see its own key", "step > ahead", "step >= ahead"),
    ("attention/tile", "barrier of a warp's stores dropped",
     "        }\n    __syncwarp();".replace("        }\n", "            }\n"), "            }\n"),
    ("attention/tile", "rows stored beyond the sequence", "if (first + row < T && column < D)",
     "if (column < D)"),
    ("attention/forward", "dropped wait for the keys",
     "cp_async_wait<0>();\n        __syncthreads(); /* everybody's", "__syncthreads(); /* everybody's"),
    ("attention/forward", "dropped barrier: values arrive over those in use",
     "        cp_async_wait<0>();\n        __syncthreads(); /* everybody's part of the keys is here, "
     "everybody is done with `values` */\n", "        cp_async_wait<0>();\n"),
    ("attention/forward", "output not rescaled", "out[m][n][half * 2] *= shrink;", ""),
    ("attention/forward", "missing mask on the diagonal",
     "key + FORWARD_KEYS > warp_first + 1", "key + FORWARD_KEYS > warp_first + 33"),
    ("attention/forward", "wrong lane: maximum over two lanes of four",
     "largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));", ""),
    ("attention/forward", "wrong group's keys", "(call.H + h / call.group)", "(call.H + h % call.K)"),
    ("attention/backward", "delta not subtracted",
     "dp[m][n][i] = -per_query<ROWS>(own_delta, met_delta, m, n, i)", "dp[m][n][i] = 0"),
    ("attention/backward", "dropped barrier: the next rows arrive over those in use",
     "__syncthreads(); /* x is here; everybody is done with the last y */", ""),
    ("attention/backward", "dropped wait for the rows met",
     "cp_async_wait<0>();\n        __syncthreads(); /* y is here", "__syncthreads(); /* y is here"),
    ("attention/backward", "wrong stage", "(i + 1) % 2", "i % 2"),
    ("attention/backward", "wrong scale of dq and dk",
     "{{call.scale, call.scale}, {call.scale, call.scale}}",
     "{{call.factor, call.factor}, {call.factor, call.factor}}"),
    ("attention/plain", "a query does not see its own key", "if (j + lane <= last) logit",
     "if (j + lane < last) logit"),
    ("attention/tile", "right operand not transposed", "ldmatrix_x4_trans(b", "ldmatrix_x4(b"),
    ("attention/tile", "wrong fragment: rows and columns of the weights swapped",
     "[n % 2 * 2 + half]", "[half * 2 + n % 2]"),
    ("attention/tile", "columns beyond the head size not cleared", "&& c < D - column",
     "&& c < 65536"),
    ("attention/tile", "wrong scale", "1 / sqrtf((float)D)", "1 / sqrtf((float)(D + 1))"),
    ("attention/tile", "later sections work on the heads of the first",
     "*head = first + rest % width", "*head = rest % width"),
    ("attention/forward", "dropped barrier: keys arrive over those in use",
     "__syncthreads(); /* the values are here, everybody is done with `keys` */", ""),
    ("attention/forward", "the tile on the diagonal left out",
     "key < warp_first + WARP_ROWS;", "key < warp_first;"),
    ("attention/forward", "sum over two lanes of four",
     "sum += __shfl_xor_sync(0xffffffffu, sum, 2);", ""),
    ("attention/forward", "log_sum_exp in another base", "* scale + logf(sum)",
     "* scale + log2f(sum)"),
    ("attention/forward", "the next keys one row too early", "k += FORWARD_KEYS * call.row;",
     "k += (FORWARD_KEYS - 1) * call.row;"),
    ("attention/backward", "dropped barrier: y of this step arrives late",
     "__syncthreads(); /* y is here; everybody is done with the x before this one */", ""),
    ("attention/backward", "log_sum_exp of the other stage",
     "met_base2 + i % 2 * MET_ROWS, call", "met_base2 + (i + 1) % 2 * MET_ROWS, call"),
    ("attention/backward", "rows of delta swapped",
     "tile_row(i / 2, i % 2 * 2)", "tile_row(i % 2, i / 2 * 2)"),
    ("attention/backward", "missing mask on the diagonal", "if (diagonal) tile_mask",
     "if (false) tile_mask"),
    ("attention/backward", "keys do not meet the queries on the diagonal",
     ": at + MET_ROWS > warp_first;", ": at > warp_first;"),
    ("attention/backward", "a group's first query head for all", "next_x += D - (at",
     "next_x += 0 - (at"),
    ("attention/backward", "delta of a group's first query head for all",
     "next_delta += call.padded - (at", "next_delta += 0 - (at"),
    ("attention/tile", "the first step of the left operand kept for all",
     "tile_layout<HD>::LD + i * 16);", "tile_layout<HD>::LD);"),
    ("attention/backward", "dropped barrier: own rows kept before they are there",
     "__syncthreads(); /* the block's own rows are here */", ""),
    ("attention/backward", "the left operand of S kept for dP, too",
     "&kept_y, tile_warp<HD>(own_y)", "&kept_y, tile_warp<HD>(own_x)"),
    ("attention/backward", "P left out of dS", "dp[m][n][i] *= p[m][n][i];", ""),
    ("attention/plain", "the warps' parts have each its own maximum",
     "factor[w] = expf(largest[w] - most)", "factor[w] = 1"),
    ("attention/plain", "the last warp's keys left out",
     "for (int w = 0; w < PLAIN_WARPS; w++) o =", "for (int w = 0; w < PLAIN_WARPS - 1; w++) o ="),
    ("attention/plain", "barrier before the warps' parts dropped",
     "part.sum;\n    __syncthreads();", "part.sum;"),
    ("attention/plain", "the query of another token", "t = first + blockIdx.x / H",
     "t = blockIdx.x / H"),
    ("attention/plain", "statistics of another head",
     "statistics = (size_t)(b * H + h) * length", "statistics = (size_t)(b * H + kv) * length"),
    ("attention/plain", "gradient of the keys from the first query head of a group only",
     "h < (kv + 1) * (H / K)", "h < kv * (H / K) + 1"),
]

# Faults of ptx.cuh. The emulation of sources replaces that file; these are found when nvcc's PTX runs.
FAULTS += [
    ("ptx", "ldmatrix: two results exchanged", '"=r"(r[1]), "=r"(r[2])', '"=r"(r[2]), "=r"(r[1])'),
    ("ptx", "ldmatrix: transposed", "m8n8.x4.shared", "m8n8.x4.trans.shared"),
    ("ptx", "ldmatrix, transposed: not transposed", "m8n8.x4.trans.shared", "m8n8.x4.shared"),
    ("ptx", "ldmatrix: 16 bytes too far", ': "r"(address)', ': "r"(address + 16)'),
    ("ptx", "mma: halves of b exchanged", "{%8,%9}", "{%9,%8}"),
    ("ptx", "mma: rows of a exchanged", "{%4,%5,%6,%7}", "{%5,%4,%7,%6}"),
    ("ptx", "mma: columns of a exchanged", "{%4,%5,%6,%7}", "{%6,%7,%4,%5}"),
    ("ptx", "mma: one c for two", '"f"(c[1])', '"f"(c[0])'),
    ("ptx", "mma: two results exchanged", '"=f"(d[2]), "=f"(d[3])', '"=f"(d[3]), "=f"(d[2])'),
    ("ptx", "cp.async: zeros are not written", "valid ? 16 : 0", "16"),
    ("ptx", "cp.async: half of the bytes", "valid ? 16 : 0", "valid ? 8 : 0"),
    ("ptx", "cp.async: waits for one group fewer", '"n"(pending)', '"n"(pending + 1)'),
    ("ptx", "cp.async: groups are not closed", '"cp.async.commit_group;"', '""'),
    ("ptx", "ex2: the sign is wrong", "ex2.approx.ftz.f32 %0, %1;",
     "ex2.approx.ftz.f32 %0, %1; neg.f32 %0, %0;"),
]

EMULATION = ["-std=c++17", "-DCUDA_EMULATION", "-D_GNU_SOURCE", "-g0", "-w", "-fno-strict-aliasing"]
EMULATOR = [f"emulated/dev/emulation/{name}.o" for name in ("cuda_emu", "kernel_names", "streams_emu")]
OPERATORS = [*(f"test/llmc/operators{part}.o" for part in ("", "_arrays", "_bits", "_device", "_exchange", "_vectors")),
             "lossynet/partition/elements.o"]


# How a fault is looked for: name, folder of the build, flags
KINDS = [("numbers", ".", ["-O1"]), ("thread sanitizer", "emulated_thread", ["-O1", "-fsanitize=thread"]),
         ("PTX", ".", [])]


def programs(file):
    """The test programs that may find a fault in this file, the most likely first."""
    return {"common": ["test_cuda_kernels", "test_cuda_attention"], "ptx": ["test_cuda_attention"]}.get(
        file, ["test_cuda_attention", "test_cuda_kernels"] if "attention" in file
        else ["test_cuda_kernels"])


def flags_for(file, flags):
    return flags if "attention" in file or file == "common" else [*flags, "-DWITHOUT_ATTENTION"]


def build(folder, build_dir, flags, program):
    backend, binary = folder / "kernels_backend.o", folder / program
    if not backend.exists():
        command = ["g++", f"-I{folder}", "-I.", *EMULATION, *flags, "-x", "c++", "-c",
                   "test/cuda/kernels_backend.cu", "-o", str(backend)]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"{folder.name} does not compile:\n{done.stderr[:2000]}")
    objects = [str(build_dir / name) for name in (f"test/cuda/{program}.o", *OPERATORS, *EMULATOR)]
    subprocess.run(["g++", *flags, "-fopenmp", *objects, str(backend), "-lcmocka", "-lm", "-o",
                    str(binary)], cwd=ROOT, check=True)
    return binary


def build_ptx(folder, build_dir):
    """test_cuda_attention with the PTX that nvcc makes of the changed sources, which all of ptx.cuh is for."""
    ptx, source, binary = folder / "kernels.ptx", folder / "kernels.cpp", folder / "attention_ptx"
    with open(source, "w", encoding="utf-8") as file:
        for command, output in (
                (["nvcc", f"-I{folder}", "-I.", "-D_GNU_SOURCE", "-std=c++17", "-O3", "-ptx", "-arch=compute_90",
                  "-o", str(ptx), "test/cuda/kernels_backend.cu"], None),
                (["dev/emulation/ptx/translate.py", str(ptx)], file),
                (["g++", "-I.", *EMULATION, "-O0", "-ffp-contract=off", "-c", str(source), "-o", f"{source}.o"], None)):
            done = subprocess.run(command, cwd=ROOT, text=True, stdout=output, stderr=subprocess.PIPE, check=False)
            if done.returncode:
                sys.exit(f"{folder.name} does not compile:\n{done.stderr[:2000]}")
    objects = [str(build_dir / name) for name in (
        "test/cuda/test_cuda_attention.o", "test/llmc/operators_arrays.o", "emulated/test/cuda/kernels_backend.o",
        *EMULATOR, "emulated/dev/emulation/ptx/ptx_find.o")]
    subprocess.run(["g++", "-fopenmp", *objects, f"{source}.o", "-lcmocka", "-lm", "-ldl", "-o", str(binary)],
                   cwd=ROOT, check=True)
    return binary


def run_until_failure(binary):
    """Returns what failed first: the name of a test, or a message of a sanitizer or the emulation; None
    if nothing failed."""
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    process = subprocess.Popen(
        [str(binary)], cwd=ROOT, text=True, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT, LIMIT + 5)))
    reason = None
    for line in process.stdout:
        for mark in ("[  FAILED  ]", "cuda_emu:", "WARNING: ThreadSanitizer:"):
            if reason is None and mark in line:
                reason = line.replace("[  FAILED  ]", "").replace("WARNING: ", "").strip()
                process.terminate()
    status = process.wait()
    if reason is None and status:
        reason = ("runs for ever" if status == -signal.SIGXCPU else f"ends with status {status}")
    return reason


def try_fault(fault, build_dir):
    file, what, piece, replacement = fault
    name = f"llmc/backend/cuda/{file}.cuh"
    source = (ROOT / name).read_text(encoding="utf-8")
    if piece not in source:
        return fault, None, f"NOT FOUND in {name}: {piece!r}"
    with tempfile.TemporaryDirectory() as temporary:
        for kind, folder, flags in KINDS:
            if (kind == "PTX") != (file == "ptx"):
                continue
            overlay = pathlib.Path(temporary) / kind.replace(" ", "_")
            (overlay / name).parent.mkdir(parents=True)
            (overlay / name).write_text(source.replace(piece, replacement, 1), encoding="utf-8")
            for program in programs(file):
                binary = (build_ptx(overlay, build_dir) if kind == "PTX"
                          else build(overlay, build_dir / folder, flags_for(file, flags), program))
                reason = run_until_failure(binary)
                if reason:
                    return fault, kind, reason.split("(pid")[0]
    return fault, None, "NOT CAUGHT"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    build_dir = (ROOT / os.environ.get("BUILD", "build")).resolve()
    chosen = [f for f in FAULTS if all(word in f"{f[0]} {f[1]}" for word in options.words)]
    sound = {build_dir / ("ptx" if kind == "PTX" else f"{folder}/test/cuda") / program
             for fault in chosen for program in programs(fault[0])
             for kind, folder, _ in KINDS if (kind == "PTX") == (fault[0] == "ptx")}
    for program in sorted(sound):
        reason = run_until_failure(program)
        if reason:
            sys.exit(f"{program} fails without any fault: {reason}")
    missed = 0
    print(f"{'file':20}{'fault':70}{'caught by':18}first seen as")
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for fault, kind, reason in pool.map(lambda f: try_fault(f, build_dir), chosen):
            print(f"{fault[0]:20}{fault[1]:70}{kind or '-':18}{reason}", flush=True)
            missed += kind is None
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

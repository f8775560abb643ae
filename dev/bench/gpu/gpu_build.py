"""Builds the programs for gpu_check.py on a machine that has CUDA's toolkit and a C compiler. It uses make
if there is one, and otherwise runs the commands that make would run (test/tools/test_gpu_check.py
compares them)."""
import concurrent.futures
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[3]
# The build uses no optional libraries, even installed ones: one that does not fit would make the whole
# call fail. Compiler warnings are allowed.
OPTIONS = ["CUDA=1", "BARE=1", "STATIC=", "BLAS=none", "MPI=0", "SECURE=0", "VERBS=0", "WERROR="]
PROGRAMS = ["gpu_check", "gpu_bench", "test/cuda/test_operators_device"]

OPTIMISE = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
COMMON = [*OPTIMISE, "-g1", "-fopenmp", "-Wall", "-Wextra", "-Wno-maybe-uninitialized"]
CC = ["gcc", "-I.", "-D_GNU_SOURCE", "-DGEMM_PLAIN", "-Idev/bare", "-std=c11", *COMMON]
GENCODE = ["-gencode", "arch=compute_80,code=sm_80", "-gencode",
           "arch=compute_90,code=[sm_90,compute_90]"]
WIDE = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
ISAS = {"x86_64_v2": ["-march=x86-64-v2"], "x86_64_v3": ["-march=x86-64-v3"], "x86_64_v4": WIDE}
ISAS_BF16 = {**ISAS, "x86_64_avx512bf16": [*WIDE, "-mavx512bf16"],
             "x86_64_amx": [*WIDE, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]}


def compiler_of(name):
    """The compiler and flags of a C file. Tests are compiled sooner, but for the references that compute much."""
    if not name.startswith("test/"):
        return CC
    return [*(word for word in CC if word not in OPTIMISE), "-O3" if "/operators" in name else "-O1",
            "-Wno-deprecated-declarations"]


def find_nvcc(root="/usr/local"):
    """NVCC, the PATH, the link that an installation makes, or the newest of several toolkits."""
    several = sorted(pathlib.Path(root).glob("cuda-*/bin/nvcc"),
                     key=lambda path: [int(n) for n in re.findall(r"\d+", path.parent.parent.name)])
    places = [pathlib.Path(root) / "cuda" / "bin" / "nvcc", *several[::-1]]
    return os.environ.get("NVCC") or shutil.which("nvcc") or str(
        next((path for path in places if path.exists()), places[0]))


def python_packages():
    """The folders of NVIDIA's packages of a Python that has PyTorch."""
    done = subprocess.run(["python3", "-c", "import nvidia; print(*nvidia.__path__)"], text=True,
                          capture_output=True, check=False)
    return [pathlib.Path(path) for path in done.stdout.split()]


def library_folders():
    """Where the loader does not look for cuDNN by itself: in PyTorch's packages."""
    return [str(path.parent) for folder in python_packages()
            for path in sorted(folder.glob("*/lib/libcudnn.so.9"))[:1]]


def find_cublas(toolkit):
    """Finds cuBLAS: if the toolkit has none, the packages of a Python that has PyTorch may have it."""
    if any((folder / "cublasLt.h").exists() for folder in (toolkit / "include",
                                                           pathlib.Path("/usr/include"))):
        return None
    found = [header for path in python_packages()
             for header in sorted(path.glob("*/include/cublasLt.h"))]
    return found[0].parent.parent if found else None


def commands(build, nvcc):
    """The commands of make's build: {object: command}, and {program: command} to link programs."""
    toolkit = pathlib.Path(nvcc).resolve().parent.parent
    cublas = find_cublas(toolkit)
    nvcc_flags = ["-I.", "-D_GNU_SOURCE", "-std=c++17", "-O3", *GENCODE,
                  *(["-isystem", f"{cublas}/include"] if cublas else []),
                  "-Xcompiler", "-Wall,-Wextra,-Wno-unused-function", "-ccbin", "g++"]
    compiled, shared = {}, []

    def add(command, source, name, to_all=True):
        target = f"{build}/{name}.o"
        compiled[target] = [*command, "-c", str(source), "-o", target]
        if to_all:
            shared.append(target)
        return target

    cuda = pathlib.Path("llmc/backend/cuda")
    for dtype in ("bf16", "float32"):  # the longest first
        add([nvcc, *nvcc_flags, f"-DBACKEND_DTYPE={dtype}"], cuda / "backend_cuda.cu",
            f"{cuda}/backend_cuda.{dtype}.cu")
    for name in ("open", "streams", "device", "product"):
        add([nvcc, *nvcc_flags], cuda / f"{name}.cu", f"{cuda}/{name}.cu")
    x86 = platform.machine() == "x86_64"
    for dtype, isas in (("float32", ISAS), ("bf16", ISAS_BF16)):
        for isa, flags in (isas if x86 else {"generic": []}).items():
            add([*CC, *flags, "-ffp-contract=fast", f"-DBACKEND_DTYPE={dtype}", f"-DISA={isa}"],
                "llmc/backend/cpu/backend_cpu.c", f"llmc/backend/cpu/backend_cpu.{dtype}.{isa}")
    apart = {"llmc/backend/cpu/backend_cpu.c", "llmc/backend/cuda/backend_none.c"}
    for pattern in ("llmc/**/*.c", "lossynet/**/*.c", "dev/bare/bare.c"):
        for path in sorted(ROOT.glob(pattern)):
            source = path.relative_to(ROOT)
            if str(source) not in apart:
                add(CC, source, source.with_suffix(""))
    link = ["g++", *COMMON]
    libraries = ["-lm", "-lresolv", *(word for folder in ("lib64", "lib")
                          for word in (f"-L{toolkit}/{folder}", f"-Wl,-rpath,{toolkit}/{folder}")),
                 "-lcudart_static", "-ldl", "-lrt", "-lpthread",
                 *([f"-Wl,-rpath,{cublas}/lib"] if cublas else [])]
    linked = {}
    for program in PROGRAMS:
        folder = "test/cuda" if program.startswith("test/") else "dev/bench/gpu"
        own = [f"{folder}/{pathlib.Path(program).name}"]
        if program.startswith("test/"):
            own += [f"test/llmc/operators{part}"
                    for part in ("", "_arrays", "_bits", "_device", "_exchange", "_vectors")]
        objects = [add(compiler_of(name), f"{name}.c", name, to_all=False) for name in own]
        linked[f"{build}/{program}"] = [*link, *objects, *shared, *libraries, "-o",
                                        f"{build}/{program}"]
    return compiled, linked


def newest_source():
    return max(path.stat().st_mtime for pattern in ("*.c", "*.h", "*.cu", "*.cuh")
               for path in ROOT.rglob(pattern))


def run_all(wanted, newest):
    """Runs the commands whose results do not exist or are older than `newest`, the time of the newest
    source. Returns True if none failed."""
    def one(target, command):
        path = ROOT / target
        if path.exists() and path.stat().st_mtime > newest:
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        print(" ".join(command), flush=True)
        return subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return all(list(pool.map(one, wanted.keys(), wanted.values())))


def main():
    """This runs as a process of its own, so that gpu_check.py can end it."""
    build = pathlib.Path(os.environ.get("BUILD", "build")) / "gpu"
    nvcc = find_nvcc()
    if shutil.which("make"):
        command = ["make", f"-j{os.cpu_count()}", *OPTIONS, f"NVCC={nvcc}", f"BUILD={build}",
                   *(f"{build}/{program}" for program in PROGRAMS)]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    compiled, linked = commands(build, nvcc)
    newest = newest_source()
    return 0 if run_all(compiled, newest) and run_all(linked, newest) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    raise SystemExit(main())

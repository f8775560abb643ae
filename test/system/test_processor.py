"""Tests TRAIN_LLAMA2_ISA, the switch that makes a processor a lesser one, and what the program says of the
processor: at every instruction set that the program may use here, as the program itself lists them, whatever the
caller of the tests has set."""
import os

import pytest

from program import instruction_sets, markov_files, preloaded, read_log, run, succeed

ALL = ["x86_64_amx", "x86_64_avx512bf16", "x86_64_v4", "x86_64_v3", "x86_64_v2"]
HERE = instruction_sets(whole_machine=True)
ON_X86 = pytest.mark.skipif(HERE[-1] not in ALL, reason="no x86-64 processor")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), 256, 20_000, 5_000)


def short_run(data, *more, isa=None, check=True, **keywords):
    start = succeed if check else run
    return start("--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=32", "--batch=1",
                 "--device=cpu", *more, environment={"TRAIN_LLAMA2_ISA": isa}, **keywords)


@ON_X86
def test_the_list_is_complete():
    """Each set needs those after it. A set that was taken ends what may be used."""
    assert HERE == ALL[ALL.index(HERE[0]):]
    for isa in HERE:
        text = succeed("--version", environment={"TRAIN_LLAMA2_ISA": isa}).stdout
        assert f"instruction sets: {', '.join(HERE[HERE.index(isa):])} (" in text


@pytest.mark.parametrize("isa", HERE)
def test_what_it_says_of_the_processor(data, isa):
    hint, slow = "several times as fast with --dtype bf16", "expected AMX or AVX512_BF16"
    products = {"x86_64_amx": "AMX", "x86_64_avx512bf16": "AVX512_BF16"}.get(isa)
    first = short_run(data, isa=isa).stdout
    half = short_run(data, "--dtype=bf16", isa=isa).stdout
    assert f"bf16 products by {products or 'widening'}" in half
    assert (hint in first) == (slow not in half) == bool(products)
    assert hint not in short_run(data, "--dtype=float32", isa=isa).stdout


@ON_X86
@pytest.mark.parametrize("isa", HERE)
def test_the_gemm_library_obeys(data, tmp_path, isa):
    """oneDNN compiles its kernels at run time, and writes each to a file that is named for it. Those of
    other sets than AVX-512 also serve better processors."""
    if "oneDNN" not in succeed("--version").stdout:
        pytest.skip("built without oneDNN")
    done = run("--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=32", "--batch=1",
               "--device=cpu", environment={"TRAIN_LLAMA2_ISA": isa, "ONEDNN_JIT_DUMP": "1"},
               cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    kernels = " ".join(path.name for path in tmp_path.glob("dnnl_dump_*"))
    assert "sgemm" in kernels or "gemm_f32" in kernels
    assert ("avx512" in kernels) == (isa not in ("x86_64_v3", "x86_64_v2"))
    assert ("avx" in kernels) == (isa != "x86_64_v2")


def test_a_product_that_the_gemm_library_refuses_ends_the_run(data, tmp_path):
    """oneDNN has no memory for its copies of operands."""
    if "oneDNN" not in succeed("--version").stdout:
        pytest.skip("built without oneDNN")
    fails = preloaded(tmp_path, "int dnnl_sgemm(void) { return 1; }")
    done = run("--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=32", "--batch=1",
               "--device=cpu", "--dtype=float32", environment={"LD_PRELOAD": fails})
    assert done.returncode != 0 and "oneDNN failed at a product " in done.stderr, done.stderr


def test_naming_the_best_changes_no_bit(data, tmp_path):
    for isa, out in (HERE[0], tmp_path / "named"), (None, tmp_path / "best"):
        short_run(data, "--dtype=float32", "--steps=3", "--out", out, isa=isa)
    named, best = ([e["loss"] for e in read_log(out / "log.jsonl") if e["event"] == "step"]
                   for out in (tmp_path / "named", tmp_path / "best"))
    assert named == best and len(best) == 3


@pytest.mark.parametrize("isa", ["x86_64_v5"] + [isa for isa in ALL if isa not in HERE])
@pytest.mark.parametrize("ranks", [0, 2])
def test_what_the_processor_lacks_is_refused(data, isa, ranks):
    done = short_run(data, isa=isa, ranks=ranks, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train_llama2: ")]
    assert done.returncode == 2 and len(lines) == 1 and "Llama of" not in done.stdout
    assert f"TRAIN_LLAMA2_ISA={isa}: expected an instruction set of this processor: " in lines[0]
    assert lines[0].endswith(HERE[-1])


def threads_of(data, out, number, **keywords):
    succeed("--model=260K", f"--train={data}/train.bin", "--steps=1", "--seq=32", "--batch=1", "--device=cpu",
            f"--out={out}", environment={"OMP_NUM_THREADS": number}, **keywords)
    return read_log(out / "log.jsonl")[0]["threads"]


def test_ranks_share_the_processors_that_they_may_use(data, tmp_path):
    """test_processors.c tests shares and quotas. A number that the user says is each rank's."""
    allowed = len(os.sched_getaffinity(0))
    alone = threads_of(data, tmp_path / "1", None)
    assert 1 <= alone <= allowed
    assert threads_of(data, tmp_path / "2", None, ranks=2, flags=("--bind-to", "none")) == max(alone // 2, 1)
    assert threads_of(data, tmp_path / "3", "3", ranks=2) == 3

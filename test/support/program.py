"""Functions for tests of the built program: they start it, read its log, and make small token files."""
import functools
import json
import os
import pathlib
import re
import shlex
import struct
import subprocess
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
PROGRAM = BUILD / "train_llama2"
SANITIZED = BUILD / "sanitize" / "train_llama2"
TIMEOUT = 1200  # seconds for one run; a hang is a failure, and a machine with 20 times its load is not

# Settings for Open MPI in a container: as root, with more ranks than cores, and without busy waiting.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
       "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # 4; 5
       "OMPI_MCA_mpi_yield_when_idle": "1",
       "OMPI_MCA_pml": "ob1",  # what these use; Open MPI would load those for other networks and ask them
       "OMPI_MCA_btl": "self,vader,tcp", "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
       "OMPI_MCA_orte_tmpdir_base": "/tmp",
       "GOMP_SPINCOUNT": "0",  # no busy waiting: other tests need the core
       "CUDA_VISIBLE_DEVICES": ""}  # no GPU by default, since results are compared with the CPU's


@functools.cache
def instruction_sets(whole_machine=False):
    """The instruction sets that the program may use on this machine, the best first. Its environment
    variable TRAIN_LLAMA2_ISA takes a lower one, and ends the list there if the caller of the tests has set it, unless
    the whole machine's are asked for. ["not built"] where there is no program yet."""
    if not PROGRAM.exists():
        return ["not built"]
    environment = {**os.environ, **MPI}
    if whole_machine:
        environment.pop("TRAIN_LLAMA2_ISA", None)
    shown = subprocess.run([PROGRAM, "--version"], env=environment, text=True, check=True, capture_output=True,
                           timeout=TIMEOUT).stdout
    return re.search(r"^instruction sets: ([^(]*) \(", shown, re.M)[1].split(", ")


def usual_isa():
    """The instruction set of runs that choose none, as a variable of the environment: what the caller of the tests
    has set, else AVX2. oneDNN compiles its kernels anew in each process, for AVX-512 in three times the time, which
    is a third of a run of few steps."""
    usual = "x86_64_v3" if "x86_64_v3" in instruction_sets() else None
    isa = os.environ.get("TRAIN_LLAMA2_ISA", usual)
    return {"TRAIN_LLAMA2_ISA": isa} if isa else {}


def environment_of(given=None):
    """The environment of every program that a test starts, with the given variables; None unsets one. One thread
    computes: models are so small that a second one takes more time to wake than it saves."""
    both = {**os.environ, **MPI, "OMP_NUM_THREADS": "1", **usual_isa(), **(given or {})}
    return {name: value for name, value in both.items() if value is not None}


def launch(*arguments, ranks=0, program=PROGRAM, flags=(), shell=()):
    """The command of a program, under mpirun if ranks are given. By default the trainer's link is then
    mpi and all ranks wait for each other, so that no packet is lost even on a busy machine. `flags` are
    options of mpirun. `shell` are words to put before each rank's program."""
    command = [*shell, str(program), *map(str, arguments)]
    if not ranks:
        return command
    trains = program.name == PROGRAM.name
    defaults = [f"--{name}={value}" for name, value in (("link", "mpi"), ("deadline", "off"))
                if trains and not any(word.split("=")[0] == f"--{name}" for word in command)]
    return ["mpirun", *flags, "-np", str(ranks), *command, *defaults]


def start(*arguments, environment=None, **keywords):
    """Starts the program, under mpirun if ranks are given. Returns the process, with pipes for its
    output."""
    return subprocess.Popen(launch(*arguments, **keywords), cwd=ROOT, env=environment_of(environment),
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*arguments, environment=None, cwd=ROOT, **keywords):
    """Runs the program, under mpirun if ranks are given. Returns the completed process."""
    return subprocess.run(launch(*arguments, **keywords), cwd=cwd, text=True, env=environment_of(environment),
                          capture_output=True, timeout=TIMEOUT, check=False)


def one_line(done, code):
    """The only line on stderr of a run that ended with this exit code."""
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith(("train_llama2: ", "lossynet: ")), done.stderr
    return lines[0]


def run_apart(*commands):
    """Runs one rank of each command under mpirun, by a shell, because Open MPI 5.0.7 crashes if it is given several
    programs. Returns the completed process."""
    cases = "".join(f"{rank}) exec {shlex.join(map(str, command))};; " for rank, command in enumerate(commands))
    return run("-c", f"case $OMPI_COMM_WORLD_RANK in {cases}esac", program=pathlib.Path("/bin/sh"), ranks=len(commands))


def succeed(*arguments, **keywords):
    done = run(*arguments, **keywords)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def preloaded(folder, text, *flags):
    """Compiles C to a library for LD_PRELOAD. Returns its path."""
    path = str(folder / "preloaded.so")
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-x", "c", "-", "-o", path], input=text, text=True, check=True)
    return path


def handler(folder, number):
    """A library that handles a signal from when it is loaded, as UCX does, which Open MPI 5 brings."""
    return preloaded(folder, """#include <signal.h>
#include <unistd.h>
static void handle(int number) { if (write(2, "backtrace\\n", 10) == 10) signal(number, SIG_DFL); }
__attribute__((constructor)) static void load(void) { signal(%d, handle); }
""" % number)


def read_log(path):
    """Reads the events of a log. Every line must be a JSON object without NaN or infinity."""
    def refuse(text):
        raise AssertionError(f"{path}: {text} is not JSON")
    with open(path, encoding="utf-8") as file:
        return [json.loads(line, parse_constant=refuse) for line in file]


def events(path, kind):
    return [event for event in read_log(path) if event["event"] == kind]


def steps_done(out):
    """The steps that a run with --out has logged so far."""
    log = out / "log.jsonl"
    return log.read_bytes().count(b'{"event":"step"') if log.exists() else 0


def wait_for(condition, process, what):
    """Waits until a condition holds. The process must live until then."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert process.poll() is None, f"ended before {what}: {process.communicate()}"
        assert time.monotonic() < end, f"no {what}"
        time.sleep(0.005)


def write_tokens(path, tokens, vocabulary=0, magic=20240520, version=1, count=None):
    header = [magic, version, len(tokens) if count is None else count, vocabulary] + [0] * 252
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", *header))
        file.write(np.asarray(tokens, dtype="<u2" if magic == 20240520 else "<u4").tobytes())


def markov_tokens(count, vocabulary, seed):
    """Made-up text that a model can learn: each token has four likely successors."""
    random = np.random.default_rng(seed)
    successors = np.random.default_rng(7).integers(0, vocabulary, (vocabulary, 4))
    choice = random.integers(0, 4, count)
    other = random.random(count) < 0.1
    noise = random.integers(0, vocabulary, count)
    tokens = np.zeros(count, dtype=np.int64)
    for i in range(1, count):
        tokens[i] = noise[i] if other[i] else successors[tokens[i - 1], choice[i]]
    return tokens


def planned_memory(shown):
    """The sizes of memory that --dry-run has printed, in GB."""
    return {line[2:22].strip(): float(line[22:33]) for line in shown.splitlines() if line[33:36] == " GB"}


def markov_files(folder, vocabulary, train, val):
    """Writes train.bin and val.bin with `train` and `val` tokens into a folder. Returns the folder."""
    for name, count, seed in (("train", train, 1), ("val", val, 2)):
        write_tokens(folder / f"{name}.bin", markov_tokens(count, vocabulary, seed), vocabulary)
    return folder


def small_model(folder, vocabulary, layers=3, shape=(32, 96, 2, 1)):
    """Writes an untrained model that is smaller than all presets. `shape` is its width, hidden size, heads and
    heads of keys; heads of 16 elements are the smallest that fill what a tensor core multiplies. Returns its
    folder."""
    width, hidden, heads, kv_heads = shape
    random = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        for name, shape in {
                "input_layernorm": (width,), "post_attention_layernorm": (width,),
                "self_attn.q_proj": (width, width), "self_attn.o_proj": (width, width),
                "self_attn.k_proj": (width * kv_heads // heads, width),
                "self_attn.v_proj": (width * kv_heads // heads, width),
                "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
                "mlp.down_proj": (width, hidden)}.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, data = {}, b""
    for name, shape in shapes.items():
        values = random.normal(0, 0.02, shape) if len(shape) == 2 else np.ones(shape)
        raw = values.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": width,
        "intermediate_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers, "vocab_size": vocabulary, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True}), encoding="utf-8")
    return folder


def tensors(path):
    """Reads a safetensors file as {name: bytes}."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    header.pop("__metadata__", None)
    return {name: raw[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]]
            for name, entry in header.items()}

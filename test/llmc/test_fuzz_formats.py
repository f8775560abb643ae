"""Tests the readers of untrusted files: the stored corpus with sanitizers, inputs that libFuzzer makes up, and
the program itself with malformed models of every kind.

FUZZ_RUNS=10000000 fuzzes for longer. It prints the inputs it finds; add them to test/corpus/formats.
"""
import base64
import json
import os
import pathlib
import shutil
import struct
import subprocess

import pytest

from program import BUILD, ROOT, SANITIZED, TIMEOUT, run, write_tokens

CORPUS = ROOT / "test" / "corpus" / "formats"
GOLDEN = ROOT / "test" / "goldens" / "plain"
CLANG = shutil.which("clang") is not None
RUNS = int(os.environ.get("FUZZ_RUNS", "20000"))  # not seconds: a busy machine tries as many


def build(name):
    environment = {key: value for key, value in os.environ.items()
                   if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", "-s", f"BUILD={BUILD}", str(BUILD / name)], cwd=ROOT, text=True,
                          capture_output=True, env=environment, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return BUILD / name


def test_the_corpus_is_read_without_fault():
    files = sorted(CORPUS.iterdir())
    assert {path.name[0] for path in files} == set("smictl") and len(files) > 40
    program = build("fuzz_formats" if CLANG else "replay_formats")
    done = subprocess.run([program, *files], capture_output=True, text=True, timeout=TIMEOUT,
                          check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(str(path) in done.stderr for path in files)


def test_fuzzing_finds_nothing(tmp_path):
    if not CLANG:
        pytest.skip("no clang here: the readers of files were not fuzzed, only the corpus was read")
    program = build("fuzz_formats")
    found = tmp_path / "found"
    found.mkdir()
    done = subprocess.run(
        [program, f"-runs={RUNS}", "-seed=1", "-timeout=20", "-rss_limit_mb=2048",
         "-max_len=4096", "-dict=dev/fuzz/fuzz_formats.dict", "-print_final_stats=1",
         f"-artifact_prefix={tmp_path}/", str(found), str(CORPUS)],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT + RUNS / 10, check=False)
    inputs = [f"{path.name}: {base64.b64encode(path.read_bytes()).decode()}"
              for path in tmp_path.iterdir() if path.is_file()]
    assert done.returncode == 0, "\n".join([done.stderr[-4000:], *inputs])
    (runs,) = [int(line.split()[-1]) for line in done.stderr.splitlines()
               if "number_of_executed_units" in line]
    assert runs == RUNS


# ---- the program on malformed models: one line, exit code 1, no complaint of a sanitizer ----

def read_model():
    data = (GOLDEN / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8:8 + length]), data[8 + length:]


def write_model(path, header, data, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def edited(change):
    """A model whose header has one changed entry of a tensor."""
    def edit(header, data):
        change(header["model.norm.weight"], header)
        return header, data
    return edit


def overlapping(header, data):
    """Makes the tensor that is second in the data begin where the first begins."""
    first, second = sorted((entry for name, entry in header.items() if name != "__metadata__"),
                           key=lambda entry: entry["data_offsets"])[:2]
    size = second["data_offsets"][1] - second["data_offsets"][0]
    second["data_offsets"] = [first["data_offsets"][0], first["data_offsets"][0] + size]
    return header, data


def without_last(header, data):
    """Leaves out the last tensor and its data."""
    last = max((name for name in header if name != "__metadata__"),
               key=lambda name: header[name]["data_offsets"])
    return header, data[:header.pop(last)["data_offsets"][0]]


def renamed(header, data):
    header["model.norm.bias"] = header.pop("model.norm.weight")
    return header, data


def double_entry(header, data):
    text = json.dumps(header)
    return (text[:-1] + ', "lm_head.weight": ' + json.dumps(header["lm_head.weight"]) +
            "}").encode(), data


WEIGHTS = {
    "offsets_overlap": (overlapping, "it overlaps"),
    "offsets_out_of_range": (edited(lambda e, h: e.update(data_offsets=[10**9, 10**9 + 96])),
                             "expected a range within"),
    "offsets_2_63": (edited(lambda e, h: e.update(data_offsets=[2**63, 2**63 + 96])),
                     "too big integer"),
    "offsets_negative": (edited(lambda e, h: e.update(data_offsets=[-96, 0])), "data_offsets"),
    "shape_2_63": (edited(lambda e, h: e.update(shape=[2**63])), "too big integer"),
    "shape_2_62": (edited(lambda e, h: e.update(shape=[2**62])), "2^64 bytes"),
    "shape_negative": (edited(lambda e, h: e.update(shape=[-24])), "dimension 0"),
    "shape_of_another_model": (edited(lambda e, h: e.update(shape=[4, 6])), "has shape (4, 6)"),
    "dtype_unknown": (edited(lambda e, h: e.update(dtype="F33")), "unknown dtype 'F33'"),
    "dtype_wrong": (edited(lambda e, h: e.update(dtype="I32")), "has dtype I32"),
    "tensor_missing": (without_last, "has no tensor 'model."),
    "tensor_unknown": (renamed, "a tensor 'model.norm.bias'"),
    "tensor_twice": (double_entry, "duplicate"),
    "data_missing": (lambda header, data: (header, data[:-4]), "range"),
    "data_left_over": (lambda header, data: (header, data + b"1234"), "follow the last tensor"),
    "header_no_json": (lambda header, data: (b"{'single': 'quotes'}", data), "no JSON"),
}

CONFIGS = {
    "negative": ({"num_hidden_layers": -2}, "num_hidden_layers"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads"),
    "2_63": ({"hidden_size": 2**63}, "too big integer"),
    "2_62": ({"vocab_size": 2**62}, "vocab_size"),
    "text": ({"intermediate_size": "32"}, "intermediate_size"),
    "fraction": ({"num_key_value_heads": 1.5}, "num_key_value_heads"),
    "array": ({"rope_theta": [10000]}, "rope_theta"),
    "heads": ({"num_key_value_heads": 2}, "num_key_value_heads"),
}


def refuse(folder, said):
    write_tokens(folder / "v.bin", [1, 2, 3, 4], 97)
    done = run("--eval", "--model", folder, "--val", folder / "v.bin", program=SANITIZED)
    assert done.returncode == 1, f"{done.returncode}\n{done.stderr}"
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr


@pytest.mark.parametrize("name", WEIGHTS)
def test_malformed_weights(tmp_path, name):
    change, said = WEIGHTS[name]
    shutil.copy(GOLDEN / "config.json", tmp_path)
    write_model(tmp_path / "model.safetensors", *change(*read_model()))
    refuse(tmp_path, said)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 100_000_001])
def test_malformed_header_lengths(tmp_path, length):
    shutil.copy(GOLDEN / "config.json", tmp_path)
    write_model(tmp_path / "model.safetensors", *read_model(), length=length)
    refuse(tmp_path, f"length is {length}")


@pytest.mark.parametrize("name", CONFIGS)
def test_malformed_configs(tmp_path, name):
    changes, said = CONFIGS[name]
    shutil.copy(GOLDEN / "model.safetensors", tmp_path)
    config = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
    refuse(tmp_path, said)


@pytest.mark.parametrize("content, said", [
    (b"", "config.json"), (b"[" * 100_000, "config.json"), (b"\xff\xfe{}", "config.json"),
    (b'{"hidden_size": 24', "config.json"), (b"[]", "config.json"), (b"null", "config.json")])
def test_configs_that_are_no_object(tmp_path, content, said):
    shutil.copy(GOLDEN / "model.safetensors", tmp_path)
    pathlib.Path(tmp_path, "config.json").write_bytes(content)
    refuse(tmp_path, said)

"""Tests --dtype fp8 on the emulated device: training compared with bf16, the same run with other numbers of
processes and after a stop, and devices that are refused. test_fp8_emulated.c tests the products."""
import json
import random
import struct

import pytest

from program import BUILD, events, markov_files, planned_memory, run, succeed

pytestmark = pytest.mark.takes(20)

EMULATED = BUILD / "emulated" / "train_llama2"
VOCABULARY, WIDTH, HIDDEN, LAYERS = 128, 32, 64, 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 20_000, 600)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with layers whose products all have sizes that are multiples of 16."""
    folder = tmp_path_factory.mktemp("model")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
              "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
              "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
              "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
              "hidden_act": "silu", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes.update({f"{layer}{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")})
        shapes.update({f"{layer}self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"})
        shapes.update({f"{layer}mlp.{name}_proj.weight": (HIDDEN, WIDTH) for name in ("gate", "up")})
        shapes[f"{layer}mlp.down_proj.weight"] = (WIDTH, HIDDEN)
    header, values, chance = {}, [], random.Random(1)
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        begin = 4 * len(values)
        values += [chance.gauss(0, 0.05) if len(shape) > 1 else 1.0 for _ in range(count)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, 4 * len(values)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text
                                               + struct.pack(f"<{len(values)}f", *values))
    return folder


def train(data, model, out, *more, ranks=0):
    done = succeed(f"--model={model}", f"--train={data}/train.bin", f"--val={data}/val.bin", "--batch=2",
                   "--seq=16", "--lr=1e-2", "--warmup=5", "--seed=5", "--eval-sequences=30",
                   "--device=cuda", f"--out={out}", *more, program=EMULATED, ranks=ranks)
    steps = [(e["loss"], e["grad_norm"]) for e in events(out / "log.jsonl", "step")]
    return steps, events(out / "log.jsonl", "eval")[-1]["val_loss"], done.stdout


def test_trains_as_bf16(data, model, tmp_path):
    """Steps are small, so that losses can be compared. Each loss is within 1% of that with bf16, and the
    final model's within 0.5% (measured for three seeds: 0.25% and 0.07%; float32 and bf16: 0.02%)."""
    more = ["--workers=1", "--steps=60", "--batch=4", "--seq=32", "--lr=3e-3"]
    half, half_loss, _ = train(data, model, tmp_path / "bf16", "--dtype=bf16", *more)
    eight, eight_loss, shown = train(data, model, tmp_path / "fp8", "--dtype=fp8", *more)
    assert "fp8 products, bf16 with float32 sums and master weights" in shown
    assert eight != half and eight[-1][0] < eight[0][0] - 0.5
    for (one, _), (other, _) in zip(eight, half, strict=True):
        assert abs(one / other - 1) < 0.01
    assert abs(eight_loss / half_loss - 1) < 0.005


def test_the_same_bits_in_any_process(data, model, tmp_path):
    more = ["--dtype=fp8", "--workers=2", "--steps=4", "--loss-rate=0.2", "--packet-bytes=512",
            "--micro-batches=2", "--recompute=block"]
    one = train(data, model, tmp_path / "one", *more)
    assert one[:2] == train(data, model, tmp_path / "two", *more, "--link=udp", ranks=2)[:2]


def test_a_resumed_run_is_the_same_run(data, model, tmp_path):
    """fp8 needs no state beside the model, because each scale is computed from the array it belongs to."""
    more = ["--dtype=fp8", "--workers=1", "--steps=4", "--save-every=2"]
    whole = train(data, model, tmp_path / "whole", *more)
    steps, loss, shown = train(data, model, tmp_path / "rest", *more,
                               f"--resume={tmp_path}/whole/checkpoint-00000002")
    assert "bit for bit" in shown and (steps, loss) == (whole[0][2:], whole[1])


@pytest.mark.parametrize("device, name, why", [
    ("cuda", "old (sm_80)", "--dtype fp8: old (sm_80) is older than sm_89, which it needs"),
    ("auto", "old (sm_80)", "--dtype fp8: old (sm_80) is older than sm_89, which it needs"),
    ("auto", "none", "--dtype fp8 needs a GPU of sm_89 or newer: no NVIDIA driver on this machine")])
def test_is_refused_elsewhere(data, model, device, name, why):
    done = run(f"--model={model}", f"--train={data}/train.bin", "--steps=1", "--batch=1", "--seq=16",
               "--dtype=fp8", f"--device={device}", program=EMULATED, environment={"EMULATED_DEVICE": name})
    assert done.returncode == 1 and why in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_a_cpu_is_a_usage_error(data, model, more):
    done = run(f"--model={model}", f"--train={data}/train.bin", "--steps=1", "--batch=1", "--seq=16",
               "--dtype=fp8", "--device=cpu", *more)
    assert done.returncode == 2 and "--dtype fp8 needs a GPU of sm_89 or newer" in done.stderr


def test_is_counted(tmp_path):
    """--dry-run counts the memory for rounded copies of the factors of the largest product."""
    plans = [planned_memory(succeed("--model=1.1B", "--vocab-size=32000", "--dry-run", "--device=cuda",
                                    "--batch=8", "--seq=2048", "--workers=1", f"--dtype={dtype}",
                                    program=EMULATED).stdout) for dtype in ("bf16", "fp8")]
    tokens, hidden, width = 8 * 2048, 5632, 2048
    copies = tokens * 2 * hidden + tokens * width
    assert plans[1]["working memory"] - plans[0]["working memory"] == pytest.approx(copies / 1e9, abs=2e-3)
    assert all(plans[0][name] == plans[1][name] for name in plans[0] if "parameters" in name or "activations" in name)

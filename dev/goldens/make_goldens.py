#!/usr/bin/env python3
"""Writes test/goldens/: results of Hugging Face's Llama, which tests compare with those of the C program.

    pip install --no-deps -r dev/bench/cpu/requirements-bench.txt -r dev/goldens/requirements-goldens.txt
    python dev/goldens/make_goldens.py [DIRECTORY]

Each folder is a Hugging Face model directory (config.json, model.safetensors; float32) plus
golden.safetensors:

    tokens            int32 (B, T)
    targets           int32 (B, T)      the next token of each
    logits            f32   (B, T, V)
    loss              f32   (1)         mean cross-entropy over B*T
    grad.NAME         f32   as NAME     d loss / d parameter, for every parameter of the model
    adamw_losses      f32   (20)        loss before each of 20 AdamW updates on this same batch
    adamw_grad_norms  f32   (20)        global gradient norm before clipping, of the same steps

Values are computed in float64 and rounded once, so a test's tolerance measures the program alone.
The optimizer's settings are in the file's metadata.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

COMMON = dict(max_position_embeddings=64, bos_token_id=1, eos_token_id=2)

# name: batch, sequence length, configuration. `plain` is a small Llama-2 7B. `grouped` has features that
# are easily wrong: grouped-query attention, tied embeddings, and no size is a power of two. Both are as
# small as possible with all dimensions different, because the files are in the repository.
GOLDENS = {
    "plain": (2, 16, LlamaConfig(
        hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, vocab_size=97, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=False, **COMMON)),
    "grouped": (3, 13, LlamaConfig(
        hidden_size=48, intermediate_size=20, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=101, rms_norm_eps=1e-6, rope_theta=500000.0,
        tie_word_embeddings=True, **COMMON)),
}  # fmt: skip

STEPS, LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, CLIP = 20, 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


class DoubleTorch:
    """`torch`, except that float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def double_model(config, weights):
    """The same model in float64 throughout.

    `.double()` alone is not enough: modeling_llama computes norms, softmax and rotation angles in
    torch.float32 whatever the model's dtype is.
    """
    modeling_llama.torch = DoubleTorch()
    model = LlamaForCausalLM(config).double()
    model.load_state_dict(weights)
    return model


def make_weights(model):
    """Makes random weights, such that every gradient is far from zero and norm weights differ from 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
            if parameter.dim() == 1:
                parameter.add_(1.0)


def loss_of(model, tokens, targets):
    logits = model(tokens).logits
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw_run(model, tokens, targets):
    """The losses and gradient norms of STEPS updates. Weight decay applies to matrices, including
    embeddings."""
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=LEARNING_RATE, betas=BETAS, eps=EPSILON,
    )  # fmt: skip
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of(model, tokens, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).detach())
        losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), torch.stack(norms)


def make_golden(directory, batch, length, config, seed):
    modeling_llama.torch = torch
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    single = LlamaForCausalLM(config)
    make_weights(single)
    single.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)

    text = torch.randint(config.vocab_size, (batch, length + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    model = double_model(config, single.state_dict())
    logits, loss = loss_of(model, tokens, targets)
    loss.backward()
    golden = {
        "tokens": tokens.int(),
        "targets": targets.int(),
        "logits": logits.detach(),
        "loss": loss.detach().reshape(1),
        **{f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()},
    }
    golden["adamw_losses"], golden["adamw_grad_norms"] = adamw_run(model, tokens, targets)

    # Untouched Hugging Face code, reading the files just written, must agree in float32.
    modeling_llama.torch = torch
    stock = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager")
    stock_logits, stock_loss = loss_of(stock, tokens, targets)
    stock_loss.backward()
    close = dict(rtol=1e-4, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(stock_logits, golden["logits"], **close)
    for name, parameter in stock.named_parameters():
        torch.testing.assert_close(parameter.grad, golden[f"grad.{name}"], **close)

    # One entry, because safetensors writes several in random order and the files would differ.
    about = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, seed {seed}; "
        f"AdamW: lr {LEARNING_RATE}, betas {BETAS}, eps {EPSILON}, weight decay {WEIGHT_DECAY} on "
        f"matrices only, gradients scaled by min(1, {CLIP} / (global norm + 1e-6))"
    )
    golden = {k: v.float() if v.is_floating_point() else v for k, v in golden.items()}
    save_file(golden, directory / "golden.safetensors", {"about": about})
    for file in directory.iterdir():
        file.chmod(0o644)
    norms = golden["adamw_grad_norms"]
    print(
        f"{directory}: {sum(p.numel() for p in model.parameters())} parameters, "
        f"{sum(f.stat().st_size for f in directory.iterdir()) // 1024} KiB, "
        f"loss {golden['adamw_losses'][0]:.4f} -> {golden['adamw_losses'][-1]:.4f}, "
        f"gradient norm {norms.min():.2f} to {norms.max():.2f}"
    )


def main():
    root = Path(__file__).resolve().parents[2] / "test" / "goldens"
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else root
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # the order of summation is then the same everywhere
    for seed, (name, (batch, length, config)) in enumerate(GOLDENS.items()):
        directory = root / name
        directory.mkdir(parents=True, exist_ok=True)
        make_golden(directory, batch, length, config, seed)


if __name__ == "__main__":
    main()

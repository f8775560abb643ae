#!/usr/bin/env python3
"""Perplexity of a Hugging Face Llama on a token file, computed with transformers, to compare with
`train_llama2 --eval`.

    python dev/goldens/perplexity_reference.py MODEL TOKENS.bin CONTEXT:STRIDE...    a JSON line for each
    python dev/goldens/perplexity_reference.py --goldens                             test/goldens/perplexity

Needs the packages of dev/goldens/make_goldens.py. The loop is that of Hugging Face's page "Perplexity of
fixed-length models": a window of CONTEXT tokens begins every STRIDE tokens, labels that an earlier
window scored are masked with -100, and the last window ends with the text. Losses are weighted by
the number of labels that a window scores; the page's listing takes one less for every window but
the first, which moves the fifth digit.

STRIDE 0 is what --eval does without --stride: windows lie side by side, and each token of a window
predicts the token that follows it, so that every token but the first is scored.

The goldens are of the model test/goldens/plain, with a config.json that allows 4,096 positions, on a
made-up text of 9,000 tokens (text.bin).
"""
import json
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import LlamaForCausalLM

GOLDENS = Path(__file__).resolve().parents[2] / "test" / "goldens"
CASES = [(2048, 0), (2048, 2048), (2048, 512), (4096, 0), (4096, 4096), (4096, 512)]


def read_tokens(path):
    return torch.from_numpy(np.fromfile(path, dtype="<u2")[512:].astype(np.int64))


@torch.no_grad()
def perplexity(model, text, context, stride):
    """Returns the mean negative log-likelihood and the number of tokens scored."""
    total, scored, previous_end = 0.0, 0, 0
    for begin in range(0, len(text), stride or context):
        end = min(begin + context + (0 if stride else 1), len(text))
        labels = text[begin:end].clone()
        labels[: max(previous_end - begin, 0)] = -100
        labels[0] = -100  # no token predicts the first one; transformers ignores it, too
        count = int((labels != -100).sum())
        if count:
            loss = model(input_ids=text[None, begin:end], labels=labels[None]).loss
            total += float(loss) * count
            scored += count
        previous_end = end
        if end == len(text):
            break
    return {"context": context, "stride": stride, "loss": total / scored, "tokens": scored}


def made_up_text(vocabulary, count):
    """Tokens of which each has four likely successors; every tenth token is random."""
    random = np.random.default_rng(1)
    successors = random.integers(0, vocabulary, (vocabulary, 4))
    tokens = [1]
    while len(tokens) < count:
        anything = random.random() < 0.1
        tokens.append(int(random.integers(vocabulary) if anything
                          else successors[tokens[-1], random.integers(4)]))
    return np.array(tokens, dtype="<u2")


def write_goldens():
    directory = GOLDENS / "perplexity"
    directory.mkdir(exist_ok=True)
    tokens = made_up_text(97, 9000)
    header = np.zeros(256, dtype="<i4")
    header[:7] = 20240520, 1, len(tokens), 97, 5000, 0, 31000  # words: 5,000; bytes: 31,000
    (directory / "text.bin").write_bytes(header.tobytes() + tokens.tobytes())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(GOLDENS / "plain" / "model.safetensors", folder)
        config = json.loads((GOLDENS / "plain" / "config.json").read_text())
        Path(folder, "config.json").write_text(json.dumps({**config,
                                                           "max_position_embeddings": 4096}))
        model = LlamaForCausalLM.from_pretrained(folder)
        text = read_tokens(directory / "text.bin")
        cases = [perplexity(model, text, *case) for case in CASES]
    lines = ",\n".join("    " + json.dumps(case) for case in cases)
    about = f"torch {torch.__version__}, transformers {transformers.__version__}"
    (directory / "expected.json").write_text(f'{{"about": "{about}", "cases": [\n{lines}\n]}}\n')
    print(lines)


def main():
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:] == ["--goldens"]:
        write_goldens()
    elif len(sys.argv) >= 4:
        model = LlamaForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        text = read_tokens(sys.argv[2])
        for case in sys.argv[3:]:
            context, stride = map(int, case.split(":"))
            print(json.dumps(perplexity(model, text, context, stride)))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

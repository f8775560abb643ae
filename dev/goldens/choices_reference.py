#!/usr/bin/env python3
"""What lm-evaluation-harness says about ten made-up questions, to compare with --eval-choices.

    python dev/goldens/choices_reference.py            writes test/goldens/choices

Run it in the environment of scripts/lm_eval.sh (build/venv-lm-eval). The model is test/goldens/plain with a
tokenizer for its vocabulary of 97. The words are made up and the model's weights are random, so that the
likeliest ending by sum, per character and per token often differ.
"""
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

GOLDENS = Path(__file__).resolve().parents[2] / "test" / "goldens"
WORDS = ("a the cat dog bird river boat town house tree runs sees likes sails flies over under near small old red "
         "deep sleeps slowly today and then").split()
TASK = """task: made_up
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{endings}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def write_tokenizer(folder):
    draw = random.Random(3)
    (folder / "text.txt").write_text("".join(
        " ".join(draw.choices(WORDS, k=9)) + ".\n" for _ in range(400)))
    subprocess.run(["spm_train", "--input=text.txt", "--model_prefix=tokenizer", "--model_type=bpe",
                    "--vocab_size=97", "--normalization_rule_name=identity", "--remove_extra_whitespaces=false",
                    "--unk_id=0", "--bos_id=1", "--eos_id=2", "--pad_id=-1"],
                   cwd=folder, check=True, capture_output=True)


def questions(count=10):
    """Endings have from one to nine words. One context ends with a space, one question has three endings, one
    two, and one is longer than the model's 64 positions. The labels are such that the three figures differ."""
    draw, labels = random.Random(5), random.Random(3)
    for i in range(count):
        context = " ".join(draw.choices(WORDS, k=30 if i == 7 else draw.randint(1, 6)))
        endings = [" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) + "."
                   for _ in range({3: 3, 6: 2}.get(i, 4))]
        draw.randrange(len(endings))
        yield {"context": context + " " * (i == 4), "endings": endings, "label": labels.randrange(len(endings))}


def main():
    out = GOLDENS / "choices"
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        shutil.copy(folder / "tokenizer.model", out)
        for file in ("config.json", "model.safetensors"):
            shutil.copy(GOLDENS / "plain" / file, folder)
        # As scripts/lm_eval.sh: without it transformers leaves out <s> and the space before the first word.
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
        (out / "questions.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions()))
        (folder / "made_up.yaml").write_text(TASK.replace("QUESTIONS", str(out / "questions.jsonl")))
        subprocess.run([sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
                        f"pretrained={folder},dtype=float32,add_bos_token=True", "--tasks", "made_up", "--include_path", folder,
                        "--device", "cpu", "--output_path", folder / "out", "--log_samples"], check=True)
        (results,) = (folder / "out").rglob("results_*.json")
        (samples,) = (folder / "out").rglob("samples_*.jsonl")
        found = json.loads(results.read_text())
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
    about = f"lm-evaluation-harness {found['lm_eval_version']}, transformers {found['transformers_version']}"
    figures = found["results"]["made_up"]
    loglikelihoods = [[float(answer[0][0] if isinstance(answer[0], list) else answer[0])
                       for answer in row["resps"]] for row in sorted(rows, key=lambda row: row["doc_id"])]
    (out / "expected.json").write_text(json.dumps(
        {"about": about, "acc": figures["acc,none"], "acc_norm": figures["acc_norm,none"],
         "loglikelihoods": loglikelihoods}, indent=1) + "\n")


if __name__ == "__main__":
    main()

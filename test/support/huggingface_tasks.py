"""Runs tasks with transformers for tests: each line of stdin is a JSON list of tasks, and the answer is a
line of stdout with the list of their results.

It runs in the environment that huggingface.py makes. From this project it uses only dev/goldens.
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "dev" / "goldens"))
import perplexity_reference  # pylint: disable=wrong-import-position
from make_models import load, loss  # pylint: disable=wrong-import-position,unused-import


def perplexity(directory, tokens, cases):
    """The perplexity for each case (context, stride)."""
    model, text = load(directory), perplexity_reference.read_tokens(tokens)
    return [perplexity_reference.perplexity(model, text, *case) for case in cases]


def resave(directory, to, **settings):
    load(directory).save_pretrained(to, **settings)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # output of libraries must not mix with answers
    for line in sys.stdin:
        print(json.dumps([globals()[task.pop("do")](**task) for task in json.loads(line)]),
              file=answers, flush=True)

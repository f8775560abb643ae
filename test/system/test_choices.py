"""Tests --eval-choices: its figures are those of lm-evaluation-harness, for JSON lines and for llm.c's file."""
import json
import shutil
import struct
import subprocess

import pytest

from program import ROOT, events, run, succeed

GOLDENS = ROOT / "test" / "goldens"
EXPECTED = json.loads((GOLDENS / "choices" / "expected.json").read_text(encoding="utf-8"))
QUESTIONS = [json.loads(line) for line in (GOLDENS / "choices" / "questions.jsonl").read_text().splitlines()]
TOKENIZER = GOLDENS / "choices" / "tokenizer.model"


@pytest.fixture(name="model", scope="module")
def make_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for file in (GOLDENS / "plain" / "config.json", GOLDENS / "plain" / "model.safetensors", TOKENIZER):
        shutil.copy(file, folder)
    return folder


def answer(model, questions, folder, *more):
    done = succeed("--eval-choices", questions, "--model", model, "--log", folder / "log.jsonl", "--overwrite", *more)
    (event,) = events(folder / "log.jsonl", "choices")
    return event, done.stdout


def encode(text):
    done = subprocess.run(["spm_encode", f"--model={TOKENIZER}", "--output_format=id"], input=text, text=True,
                          capture_output=True, check=True)
    return [int(word) for word in done.stdout.split()]


def tokens_of(question):
    """The tokens of the context, with <s>, and those of each ending behind it."""
    context = encode(question["context"].rstrip())
    return [1, *context], [encode(f"{question['context']} {ending}")[len(context):] for ending in question["endings"]]


def best(values):
    return max(range(len(values)), key=lambda i: (values[i], -i))


def write_binary(path, questions, version=1, count=None, cut=0, **changes):
    """llm.c's file. `changes` replace numbers of the first question."""
    stream = []
    for i, question in enumerate(questions):
        context, endings = tokens_of(question)
        words = [65535, 0, i, question["label"], len(endings), len(context), *context]
        for ending in endings:
            words += [len(ending), *ending]
        words[1] = 2 * len(words)
        for name, value in changes.items() if i == 0 else ():
            words[int(name[1:])] = value
        stream += words
    header = [20240522, version, len(questions) if count is None else count] + [0] * 253
    data = struct.pack(f"<256i{len(stream)}H", *header, *stream)
    path.write_bytes(data[:len(data) - cut])
    return path


@pytest.mark.parametrize("more", [(), ("--batch", 3), ("--threads", 1, "--workers", 4, "--group", 2)],
                         ids=["default", "batches", "workers"])
def test_the_figures_are_those_of_lm_evaluation_harness(model, tmp_path, more):
    event, said = answer(model, GOLDENS / "choices" / "questions.jsonl", tmp_path, *more)
    assert event["questions"] == 10 and event["accuracy"] == EXPECTED["acc"]
    assert event["accuracy_per_character"] == EXPECTED["acc_norm"]
    assert said.splitlines()[-1] == (f"questions 10  accuracy {EXPECTED['acc']:.4f}  per character "
                                     f"{EXPECTED['acc_norm']:.4f}  per token {event['accuracy_per_token']:.4f}")
    readme = (ROOT / "llmc" / "log" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme for name in event)
    # The expected figures follow from lm-evaluation-harness's logarithms, and so does llm.c's figure.
    right = [0, 0, 0]
    for question, sums in zip(QUESTIONS, EXPECTED["loglikelihoods"]):
        _, endings = tokens_of(question)
        for i, sizes in enumerate(([1] * len(sums), map(len, question["endings"]), map(len, endings))):
            right[i] += best([s / size for s, size in zip(sums, sizes)]) == question["label"]
    assert [event["accuracy"], event["accuracy_per_character"], event["accuracy_per_token"]] == [n / 10 for n in right]
    assert len(set(right)) == 3, "questions whose figures differ would show which is which"


def test_llmc_files_give_the_same_answers(model, tmp_path):
    lines, _ = answer(model, GOLDENS / "choices" / "questions.jsonl", tmp_path)
    (model / "tokenizer.model").rename(model / "away")  # such a file needs none
    try:
        event, said = answer(model, write_binary(tmp_path / "q.bin", QUESTIONS), tmp_path)
    finally:
        (model / "away").rename(model / "tokenizer.model")
    assert event == {**lines, "accuracy_per_character": None} and "character" not in said


def test_what_hellaswag_calls_its_fields(model, tmp_path):
    """ctx instead of context, a label as text, fields that are not known, blank lines."""
    (tmp_path / "h.jsonl").write_text("\n\n".join(
        json.dumps({"ind": i, "ctx": q["context"], "endings": q["endings"], "label": str(q["label"])})
        for i, q in enumerate(QUESTIONS)))
    event, _ = answer(model, tmp_path / "h.jsonl", tmp_path)
    assert (event["accuracy"], event["accuracy_per_character"]) == (EXPECTED["acc"], EXPECTED["acc_norm"])


GOOD = {"context": "the cat", "endings": ["runs.", "sleeps."], "label": 1}


@pytest.mark.parametrize("change, said", [
    ({"label": 2}, "question 2 has 2 endings and label 2"),
    ({"label": "x"}, "label -1"),
    ({"endings": ["one"]}, "question 2 has 1 endings"),
    ({"endings": ["one", 2]}, "line 2: ending 1 is no text"),
    ({"endings": ["one", ""]}, "line 2: ending 1 is no text"),
    ({"endings": "runs"}, "line 2: expected {\"context\""),
    ({"context": None}, "line 2: expected {\"context\""),
    ({"endings": ["the cat " * 40, "runs"]}, "an ending of 81 tokens, the model takes 64")])
def test_bad_questions(model, tmp_path, change, said):
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in (GOOD, {**GOOD, **change})))
    refused(model, tmp_path / "q.jsonl", said)


def refused(model, questions, said):
    done = run("--eval-choices", questions, "--model", model)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("changes, said", [
    ({"version": 2}, "of version 2 with"),
    ({"count": 3}, "has 2 questions, its header claims 3"),
    ({"cut": 4}, "question 2 is damaged or truncated"),
    ({"w0": 7}, "question 1 is damaged"), ({"w1": 8}, "question 1 is damaged"),
    ({"w4": 70}, "question 1 has 70 endings"), ({"w5": 0}, "question 1"),
    ({"w7": 97}, "token 97, expected less than the model's vocabulary size, 97")])
def test_damaged_llmc_files(model, tmp_path, changes, said):
    refused(model, write_binary(tmp_path / "q.bin", QUESTIONS[:2], **changes), said)


def test_files_that_are_no_questions(model, tmp_path):
    (tmp_path / "text").write_text("what is this\n")
    refused(model, tmp_path / "text", "line 1: ")
    (tmp_path / "empty").write_text("\n")
    refused(model, tmp_path / "empty", "has no question")
    refused(model, tmp_path / "absent", "absent")
    done = run("--eval-choices", tmp_path / "text", "--model", GOLDENS / "plain")
    assert done.returncode == 1 and "tokenizer.model" in done.stderr
    done = run("--eval-choices", tmp_path / "text", "--model", "260K")
    assert done.returncode == 2 and "expected a model directory" in done.stderr
    done = run("--eval-choices", tmp_path / "text", "--model", model, "--eval", "--val", "x")
    assert done.returncode == 2 and "at most one of them" in done.stderr

"""Tests scripts/export.py: TensorBoard's own reader opens what it writes; a stand-in for wandb; CSV."""
import csv
import json
import os
import shutil
import subprocess
import sys

import pytest

from packages import environment_with
from program import ROOT, TIMEOUT, markov_files, read_log, succeed, wait_for

SCRIPT = ROOT / "scripts" / "export.py"
READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
texts = {tag: [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
         for tag in events.Tags()["tensors"]}
json.dump([scalars, texts], sys.stdout)
"""


@pytest.fixture(name="tensorboard", scope="module")
def install():
    """An environment in which Python has tensorboard and what it imports, 40 MB."""
    return environment_with("tensorboard")


@pytest.fixture(name="run", scope="module")
def train(tmp_path_factory):
    """The folder of a short run with evaluations."""
    folder = markov_files(tmp_path_factory.mktemp("run"), 64, 5_000, 500)
    succeed("--model", "260K", "--train", folder / "train.bin", "--val", folder / "val.bin", "--workers", 2,
            "--batch", 1, "--seq", 32, "--steps", 6, "--eval-every", 3, "--loss-rate", 0.1, "--out", folder / "out")
    return folder / "out"


def export(*arguments, environment=None, code=0):
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], text=True, capture_output=True,
                          env=environment, timeout=TIMEOUT, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def read(folder, environment):
    done = subprocess.run([sys.executable, "-c", READER, folder], text=True, capture_output=True, env=environment,
                          timeout=TIMEOUT, check=True)
    return json.loads(done.stdout)


def numbers(log, kind):
    """{field: [(step, value)]} of the events of a kind. Steps count from 1, as on the terminal."""
    found = {}
    for event in log:
        if event["event"] == kind:
            for name, value in event.items():
                if isinstance(value, (int, float)) and name != "step":
                    found.setdefault(name, []).append((event["step"] + (kind == "step"), value))
    return found


def test_tensorboard_reads_every_number(run, tensorboard, tmp_path):
    export(run, "--tensorboard", tmp_path / "tb", environment=tensorboard)
    scalars, texts = read(tmp_path / "tb", tensorboard)
    log = read_log(run / "log.jsonl")
    expected = {f"{prefix}/{name}": points for prefix, kind in (("train", "step"), ("validation", "eval"))
                for name, points in numbers(log, kind).items()}
    assert scalars.keys() == expected.keys() and {"train/loss", "train/lr", "validation/val_loss"} <= scalars.keys()
    for tag, points in expected.items():
        assert [step for step, _, _ in scalars[tag]] == [step for step, _ in points], tag
        assert [value for _, value, _ in scalars[tag]] == pytest.approx([value for _, value in points], rel=1e-6), tag
    times = [when for _, _, when in scalars["train/loss"]]
    took = [value for _, value in expected["train/step_ms"]]
    assert times[-1] - times[0] == pytest.approx(sum(took[1:]) / 1e3, abs=1e-3)
    assert '"steps": 6' in texts["options"][0][1]


def test_tensorboard_follows_a_run(tensorboard, tmp_path):
    """Lines that come later, one of them in two parts, and steps that a resumed run repeats."""
    def step(n, loss):
        return json.dumps({"event": "step", "step": n, "loss": loss, "step_ms": 1.0}) + "\n"
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"event": "run", "options": {"steps": 4}}) + "\n" + step(0, 5.0) + step(1, 4.0)[:20])
    with subprocess.Popen([sys.executable, SCRIPT, tmp_path, "--tensorboard", tmp_path / "tb", "--follow"],
                          env=tensorboard) as process:
        wait_for(lambda: [path for path in (tmp_path / "tb").glob("*") if path.stat().st_size > 0], process, "event")
        with open(log, "a", encoding="utf-8") as file:
            file.write(step(1, 4.0)[20:] + step(1, 4.0) + step(2, 3.0)
                       + '{"event": "sample", "step": 3, "text": "Once ü"}\n{"event": "end", "status": "complete"}\n')
        assert process.wait(TIMEOUT) == 0
    scalars, texts = read(tmp_path / "tb", tensorboard)
    assert [point[:2] for point in scalars["train/loss"]] == [[1, 5.0], [2, 4.0], [3, 3.0]]
    assert texts["sample"] == [[3, "Once ü"]]


def test_wandb(run, tmp_path):
    """A stand-in for the package wandb notes what it is told."""
    (tmp_path / "wandb.py").write_text(
        "import json\n"
        "class Run:\n"
        "    summary = {}\n"
        "    def log(self, values, step): calls.append([step, values])\n"
        f"    def finish(self): json.dump([calls, self.summary], open({str(tmp_path / 'told')!r}, 'w'))\n"
        "calls = []\n"
        "def init(project, name, config): calls.append([project, name, config['steps']]); return Run()\n")
    export(run, "--wandb", "lossy", environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    (first, *calls), summary = json.loads((tmp_path / "told").read_text())
    assert first == ["lossy", "out", 6] and summary == {"status": "complete"}
    assert [step for step, _ in calls] == [1, 2, 3, 3, 4, 5, 6, 6]  # in order, which wandb asks for
    log = read_log(run / "log.jsonl")
    assert [values["train/loss"] for _, values in calls if "train/loss" in values] == [
        value for _, value in numbers(log, "step")["loss"]]
    assert [values["validation/val_loss"] for _, values in calls if "validation/val_loss" in values] == [
        value for _, value in numbers(log, "eval")["val_loss"]]


def test_csv(run, tmp_path):
    export(run, "--csv", tmp_path / "run.csv")
    with open(tmp_path / "run.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    log = read_log(run / "log.jsonl")
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == numbers(log, "step")["loss"]
    assert [(int(row["step"]), float(row["validation_val_loss"])) for row in rows if row["validation_val_loss"]] \
        == numbers(log, "eval")["val_loss"]


def test_csv_into_a_pipe(run, tmp_path):
    """A pipe or a device keeps its place: it is written to, and no file is put there instead."""
    export(run, "--csv", tmp_path / "run.csv")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE, text=True) as reader:
        export(run, "--csv", tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()
        assert reader.communicate(timeout=TIMEOUT)[0] == (tmp_path / "run.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments, code, said", [
    (["absent", "--csv", "x"], 1, "there is no absent/log.jsonl: expected the directory that --out named"),
    (["RUN", "--csv", "/absent/x.csv"], 1, "export.py: /absent/x.csv: there is no folder /absent"),
    (["RUN", "--csv", "LOG"], 1, "log.jsonl is the log itself: expected another name"),
    (["RUN"], 2, "--tensorboard --wandb --csv is required"),
    (["RUN", "--csv", "x", "--follow"], 2, "--follow: expected --tensorboard or --wandb"),
    (["RUN", "--wandb", "p"], 1, "pip install wandb"),
    (["RUN", "--tensorboard", "d"], 1, "pip install tensorboard"),
    (["BROKEN", "--csv", "x"], 1, 'log.jsonl:2: expected a JSON object with "event"'),
    (["BEGUN", "--csv", "x"], 1, "export.py: the log has no step yet"),
    (["EVALUATED", "--csv", "x"], 1, "export.py: the log has no step: expected that of a training")])
def test_errors(run, tmp_path, arguments, code, said):
    (tmp_path / "log.jsonl").write_text('{"event": "run"}\nnot JSON\n')
    for name, more in (("begun", ""), ("evaluated", '{"event": "eval", "step": 0, "val_loss": 2}\n')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text('{"event": "run"}\n' + more)
    for name in ("wandb", "tensorboard"):  # where they are installed, too
        (tmp_path / f"{name}.py").write_text("raise ImportError('none here')\n")
    places = {"RUN": run, "LOG": run / "log.jsonl", "BROKEN": tmp_path,
              "BEGUN": tmp_path / "begun", "EVALUATED": tmp_path / "evaluated"}
    stderr = export(*(places.get(word, word) for word in arguments), code=code,
                    environment={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert said in stderr and (code == 2 or len(stderr.splitlines()) == 1)

"""Tests scripts/sweeps/sweep_rules.py: rules of others build, train, and their results are kept apart; and what
--rule does with them and with files that are no rule."""
import importlib
import os
import re
import shutil
import signal
import sys

import pytest

from program import BUILD, ROOT, handler, markov_files, read_log, run, small_model, succeed

sys.path.insert(0, str(ROOT / "scripts" / "sweeps"))
sweep_rules = importlib.import_module("sweep_rules")
sweep_settings = importlib.import_module("sweep_settings")

pytestmark = pytest.mark.quick

RULES = sorted((ROOT / "scripts" / "sweeps" / "others").glob("*.c"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("rules"), 64, 4000, 600)


@pytest.fixture(scope="module")
def settings(data):
    """The settings file `others`, with other data."""
    text = (ROOT / "scripts" / "sweeps" / "settings" / "others").read_text()
    for name in ("train", "val"):
        text = re.sub(rf"^{name} = .*$", f"{name} = {data}/{name}.bin", text, flags=re.MULTILINE)
    (data / "others").write_text(text)
    settings = sweep_settings.Settings(str(data / "others"), str(BUILD / "train_llama2"))
    settings.expand()
    return settings


@pytest.fixture(scope="module", name="build")
def build_rules(tmp_path_factory):
    """A function that builds a rule from a file or from text, and returns the shared object."""
    folder = tmp_path_factory.mktemp("objects")
    patch = pytest.MonkeyPatch()
    patch.setattr(sweep_rules, "object_of", lambda rule: str(folder / f"{rule}.so"))

    def build(rule, text=None):
        if text:
            (folder / "others").mkdir(exist_ok=True)
            (folder / "others" / f"{rule}.c").write_text('#include "lossynet.h"\n' + text)
            patch.setattr(sweep_rules, "HERE", str(folder))
        try:
            sweep_rules.build_rule(rule)
        finally:
            patch.setattr(sweep_rules, "HERE", str(ROOT / "scripts" / "sweeps"))
        return str(folder / f"{rule}.so")
    yield build
    patch.undo()


@pytest.fixture(scope="module", name="train")
def trainer(data, tmp_path_factory):
    """A function that trains a tiny model with a rule, and returns what steps and evaluations logged."""
    model = small_model(tmp_path_factory.mktemp("small") / "model", 64)

    def train(out, ranks=0, **options):
        given = {"model": model, "train": data / "train.bin", "val": data / "val.bin", "workers": 4, "batch": 1,
                 "seq": 32, "steps": 24, "lr": 1e-2, "packet-bytes": 256, "loss-rate": 0.3, "wire-dtype": "float32",
                 "lead": "off", "carry": 0, "repair": 0, "out": out, **options}
        succeed(*(f"--{name}={value}" for name, value in given.items()), ranks=ranks)
        log = read_log(out / "log.jsonl")
        names = ("loss", "grad_norm", "gradient_loss_rate", "parameter_loss_rate", "drift", "val_loss")
        return [[event.get(name) for name in names] for event in log
                if event["event"] in ("step", "eval")]
    return train


@pytest.mark.parametrize("rule", [path.stem for path in RULES])
def test_a_rule_builds_and_trains(rule, build, train, tmp_path):
    """It changes the run, which has the same bits for every spread of its workers."""
    path = build(rule)
    ours = train(tmp_path / "1", rule=path)
    assert ours == train(tmp_path / "2", ranks=2, rule=path) and ours != train(tmp_path / "plain")


def test_phases_of_rules(build, train, tmp_path):
    """early: nothing is lost in the first 40% of the steps. dblp: not before its second look, in step 20."""
    for rule, first in (("early", 10), ("dblp", 19)):
        lost = [step[2:4] for step in train(tmp_path / rule, rule=build(rule))[:24]]
        assert lost[:first] == [[0, 0]] * first and lost[-1] != [0, 0], (rule, lost)


MEAN = """
static void average(void *context, const struct lossynet_rule_part *p, const float *const *gradients,
                    const uint8_t *arrived, const float *carried, float *out) {
    for (size_t i = 0; i < p->count; i++) {
        int came = 0;
        double sum = 0;
        for (int s = 0; s < p->workers; s++)
            if (arrived[(size_t)s * p->packets + i / p->packet]) came++, sum += gradients[s][i];
        out[i] = (float)(sum / (came ? DIVISOR : 1));
    }
    (void)context, (void)carried;
}
const struct lossynet_rule lossynet_rule = {.size = sizeof lossynet_rule, .average = average};
"""


@pytest.mark.parametrize("estimator, divisor", [("mean", "came"), ("zero", "p->workers")])
def test_a_rule_of_ones_own_gives_the_estimators_numbers(estimator, divisor, build, train, tmp_path):
    own = train(tmp_path / "own", rule=build(estimator, MEAN.replace("DIVISOR", divisor)))
    for ours, theirs in zip(own, train(tmp_path / "ours", estimator=estimator)):
        assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-7)


def test_what_was_received_may_be_changed(build, train, tmp_path):
    """A rule that takes what has not arrived now to be 0 ruins replicas, and not the model's first step."""
    receive = """
static void receive(void *context, const struct lossynet_rule_part *p, int worker, const uint32_t *age, float *values) {
    for (size_t i = 0; i < p->count; i++)
        if (age[i / p->packet] > 0) values[i] = 0;
    (void)context, (void)worker;
}
const struct lossynet_rule lossynet_rule = {.size = sizeof lossynet_rule, .receive = receive};
"""
    path = build("receive", receive)
    own, plain = train(tmp_path / "own", rule=path), train(tmp_path / "plain")
    assert own[0][:4] == plain[0][:4] and own[0][4] > 10 * plain[0][4]
    assert own == train(tmp_path / "2", ranks=4, rule=path)


@pytest.mark.parametrize("number, text, options, says", [(number, *case) for number, case in enumerate([
    (None, [], "--rule: {path}: cannot open shared object file: No such file or directory: expected a shared object"),
    ("int x;", [], "expected it to export `const struct lossynet_rule lossynet_rule`"),
    ("const struct lossynet_rule lossynet_rule = {.size = 8};", [], "has the size 8, expected"),
    ("const struct lossynet_rule lossynet_rule = {.size = sizeof lossynet_rule};", [], "at least one function"),
    ("static void send(void *c, const struct lossynet_rule_part *p, int w, float *x) { (void)c, (void)p, (void)w, (void)x; }"
     "const struct lossynet_rule lossynet_rule = {.size = sizeof lossynet_rule, .send = send};", ["--carry=1"],
     "--rule: expected carry 0"),
    (MEAN.replace("DIVISOR", "came"), ["--group=2", "--carry=0"], "--rule: expected no groups"),
])], ids=range(6))
def test_a_file_that_is_no_rule(number, text, options, says, build, data, tmp_path):
    path = build(f"wrong{number}", text) if text else str(tmp_path / "none.so")
    done = run("--model=260K", f"--train={data}/train.bin", "--workers=4", f"--rule={path}", "--dry-run", *options)
    assert done.returncode == 2 and says.format(path=path) in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_pipe_is_no_rule(data, tmp_path):
    """Nobody writes to it: the run does not wait."""
    os.mkfifo(tmp_path / "rule.so")
    done = run("--model=260K", f"--train={data}/train.bin", "--workers=4", f"--rule={tmp_path}/rule.so", "--dry-run")
    assert done.returncode == 2 and "expected a regular file, a shared object" in done.stderr, done.stderr


@pytest.mark.parametrize("line, number, handled", [
    ("*(volatile int *)16 = 1;", signal.SIGSEGV, False), ("*(volatile int *)16 = 1;", signal.SIGSEGV, True),
    ("abort();", signal.SIGABRT, False)])
def test_a_line_names_a_rule_that_crashes(line, number, handled, build, data, tmp_path):
    """Also where a library handles crashes: it has its turn after that."""
    path = build(f"crash{number}", "#include <stdlib.h>\n" + MEAN.replace("    for (", f"    if (p->step == 2) {line}\n    for (", 1)
                 .replace("DIVISOR", "came"))
    library = handler(tmp_path, number) if handled else None
    done = run("--model=260K", f"--train={data}/train.bin", "--workers=2", "--steps=4", "--seq=32", f"--rule={path}",
               f"--out={tmp_path}/out", environment={"LD_PRELOAD": library})
    assert done.returncode == -number, done.stderr
    assert done.stderr.count(f"crashed with --rule {path}: expected") == 1, done.stderr
    assert done.stderr.endswith("backtrace\n") == handled


@pytest.mark.parametrize("call, ranks, code", [("exit(0)", 0, 1), ("exit(0)", 2, 1), ("quick_exit(0)", 0, 1),
                                               ("exit(3)", 0, 3)])
def test_a_rule_cannot_end_a_run_as_if_it_had_succeeded(call, ranks, code, build, data, tmp_path):
    """Who ends with another code has said why, as the CUDA backend does."""
    path = build("ends", "#include <stdlib.h>\n" + MEAN.replace("    for (", f"    if (p->step == 2) {call};\n    for (", 1)
                 .replace("DIVISOR", "came"))
    done = run("--model=260K", f"--train={data}/train.bin", "--workers=2", "--steps=4", "--seq=32", f"--rule={path}",
               f"--out={tmp_path}/out", ranks=ranks)
    line = "exit() was called before the end: expected --rule's functions"
    assert done.returncode == code and (line in done.stderr) == (code == 1), done.stderr


def test_another_rule_of_the_same_name(build, data, tmp_path):
    """Ranks whose files differ do not train. A run that goes on with another file says so."""
    rules = [build(f"version{i}", MEAN.replace("DIVISOR", divisor)) for i, divisor in enumerate(("came", "p->workers"))]
    for i, rule in enumerate(rules):
        (tmp_path / str(i)).mkdir()
        shutil.copy(rule, tmp_path / str(i) / "rule.so")
    words = ["--model=260K", f"--train={data}/train.bin", "--workers=2", "--steps=4", "--seq=32", "--batch=1",
             f"--out={tmp_path}/out"]
    elsewhere = ("bash", "-c", f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK && exec "$@"', "each")
    done = run(*words, "--rule=rule.so", ranks=2, shell=elsewhere)
    assert done.returncode == 1 and re.search("the checksum of --rule is '.*' on rank 1, and '.*' on rank 0", done.stderr)
    shutil.copy(rules[0], tmp_path / "rule.so")
    words[-1:] = [f"--rule={tmp_path}/rule.so"]
    succeed(*words, "--save-every=2", f"--out={tmp_path}/first")
    resumed = [*words, f"--resume={tmp_path}/first/checkpoint-00000002"]
    assert "bit for bit" in succeed(*resumed, f"--out={tmp_path}/same").stdout
    (tmp_path / "rule.so").unlink()
    shutil.copy(rules[1], tmp_path / "rule.so")
    said = succeed(*resumed, f"--out={tmp_path}/other").stdout
    assert "cannot be identical" in said and "rule_checksum was" in said


def test_another_trace_of_the_same_name(data, tmp_path):
    """The same for the file of --loss-model trace:FILE."""
    for i, losses in enumerate(("0001", "0010")):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "trace").write_text(losses)
    words = ["--model=260K", f"--train={data}/train.bin", "--workers=2", "--steps=4", "--seq=32", "--batch=1",
             "--save-every=2", "--loss-rate=1", "--loss-model=trace:trace", f"--out={tmp_path}/out"]
    elsewhere = ("bash", "-c", f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK && exec "$@"', "each")
    done = run(*words, ranks=2, shell=elsewhere)
    assert done.returncode == 1 and re.search("--loss-model's trace is '.*' on rank 1, and '.*' on rank 0", done.stderr)
    succeed(*words, shell=("env", "-C", tmp_path / "0"))
    resumed = [*words, f"--resume={tmp_path}/out/checkpoint-00000002"]
    for i, told in enumerate(("bit for bit", "trace_checksum was")):
        assert told in succeed(*resumed, f"--out={tmp_path}/{i}/out", shell=("env", "-C", tmp_path / str(i))).stdout


def test_a_rule_that_does_not_build(build):
    with pytest.raises(sweep_settings.SettingsError, match="rule 'bad' does not build: .*bad.c:2.*error"):
        build("bad", "int x = ;")
    with pytest.raises(sweep_settings.SettingsError, match="rule 'none such': there is no file"):
        build("none such")


def test_results_name_the_rule(settings):
    """A run with a rule has an id of its own and says so, and is compared with the program's own run without
    loss."""
    rules = {}
    for run_ in settings.runs:
        rules.setdefault(run_.value("rule", "none"), []).append(run_)
    assert set(rules) == {"none"} | {path.stem for path in RULES}
    for rule, runs in rules.items():
        for run_ in runs:
            assert run_.key.get("rule", "none") == rule
            assert "--rule" not in run_.command("program", settings.known)
            assert (f"rule {rule}" in run_.label()) == (rule != "none")
    own = {run_.id for run_ in rules.pop("none")}
    for runs in rules.values():
        assert all(run_.id not in own and run_.baseline in own for run_ in runs)

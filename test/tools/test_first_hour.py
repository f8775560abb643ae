"""Runs the commands of the README's section "Train your own model", line by line, in a folder that has only the
repository's files and the built programs. Runs are shortened to a few steps. Then compares numbers in READMEs with what the
program computes."""
import functools
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from program import BUILD, ROOT, TIMEOUT, events, succeed, write_tokens

pytestmark = pytest.mark.takes(60)

BLOCK = re.search(r"## Train your own model\n\n```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"),
                  re.DOTALL)[1].replace("\\\n", " ").splitlines()
# Lines that need the internet, or an hour, or have tests of their own.
ELSEWHERE = {"scripts/dependencies.sh": "installs packages: test_dependencies.py, test_scripts.py",
             "data/fetch.py": "2 GB from the internet: test_fetch.py",
             "build/tokenize": "its text is what data/fetch.py fetches: test_tokenize.py",
             "scripts/pretrain_7b/pretrain_7b.sh": "test_cluster.py"}


@pytest.fixture(name="home", scope="module")
def clone(tmp_path_factory):
    """A folder like a fresh clone that was built."""
    home = tmp_path_factory.mktemp("clone")
    for folder in ("scripts", "data"):
        shutil.copytree(ROOT / folder, home / folder, ignore=shutil.ignore_patterns("*.jsonl", "*.bin", "*.txt", "__pycache__"))
    (home / "build").symlink_to(BUILD.resolve())
    return home


def test_the_block_has_all_kinds_of_lines():
    words = {line.split()[0] for line in BLOCK}
    assert words >= {*ELSEWHERE, "data/kjv.sh", "mpirun", "scripts/elastic.sh", "scripts/run_report.py"}
    assert len(BLOCK) - sum(line.split()[0] in ELSEWHERE for line in BLOCK) >= 9


def test_the_block_works_line_by_line(home):
    python = os.path.dirname(sys.executable)
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                   "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1", "PATH": f"{python}:{os.environ['PATH']}"}
    lacks = [name for name in ("mpirun", "etcd", "bible", "spm_train") if not shutil.which(name)]
    for line in BLOCK:
        line = line.split("#")[0].strip()
        first = line.split()[0]
        if first in ELSEWHERE or (first == "mpirun" and "mpirun" in lacks) or ("elastic" in first and "etcd" in lacks):
            continue
        if first == "data/kjv.sh" and lacks:
            pytest.skip(f"not installed: {', '.join(lacks)} (scripts/dependencies.sh quickstart)")
        short = re.sub(r"--steps \d+", "--steps 2", line).replace("checkpoint-00000560", "checkpoint-00000002")
        short = short.replace("--warmup 56", "--warmup 1").replace("--model 1M", "--model 260K --eval-sequences 8")
        short = short.replace("--generate", "--tokens 8 --generate")
        done = subprocess.run(short, shell=True, cwd=home, env=environment, text=True, capture_output=True, timeout=TIMEOUT,
                              check=False)
        assert done.returncode == 0, f"{short}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert not lacks or lacks == ["etcd"] or lacks == ["mpirun"], lacks
    assert (home / "out/run/report.svg").exists() and (home / "out/run.csv").exists()


# ---- numbers of READMEs that the program computes ----

def rows(path, title):
    """The rows of the first table after a title: lists of cells."""
    text = (ROOT / path).read_text(encoding="utf-8").split(title, 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


@pytest.fixture(name="short", scope="module")
def short_runs(tmp_path_factory):
    """A function from options that lose packets to the log's last event of a short run."""
    folder = tmp_path_factory.mktemp("short")
    write_tokens(folder / "train.bin", np.arange(20000) % 500, 512)

    def end(*options):
        out = folder / "-".join(options)
        succeed("--model=260K", f"--train={folder}/train.bin", "--workers=8", "--batch=1", "--seq=32", "--steps=40",
                f"--out={out}", "--packet-bytes=512", *options)
        return events(out / "log.jsonl", "end")[0]
    return functools.cache(end)


def sent(*options):
    """Bytes of a step, from --dry-run."""
    text = succeed("--dry-run", "--model=7B", "--workers=8", *options).stdout
    return sum(float(gigabytes) for gigabytes in
               re.findall(r"^  (?:gradient phase|parameter phase|sent again) +([\d.]+) GB", text, re.MULTILINE))


def over_hosts():
    """What the kept runs between hosts have lost and sent, in the mean."""
    kept = (ROOT / "dev/bench/network/real_loss.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [run for run in map(json.loads, kept) if run["kind"] == "default"]
    return {name: sum(run[name] for run in runs) / len(runs) for name in runs[0] if name != "kind"}


BYTES = [row for row in rows("README.md", "## What loss costs") if re.fullmatch(r"0\.\d\d", row[-1])]


@pytest.mark.parametrize("row", BYTES, ids=lambda row: f"{row[0]} {row[1]}")
def test_bytes_and_losses_of_the_table(short, row):
    """The README's table of what loss costs: what stays lost, and the bytes beside those of plain bf16."""
    rate = float(row[1].strip("%")) / 100
    down = ["--loss-model=outage:5"] if "down" in row[0] else []
    plan = sent(f"--loss-rate={rate}", *down) / sent("--plain", "--wire-dtype=bf16")
    assert f"{plan:.2f}" == row[-1]
    if not down:
        end = over_hosts() if "hosts" in row[0] else short(f"--loss-rate={rate}")
        assert end["bytes_of_bf16"] == pytest.approx(plan, rel=0.01)
        for share, phase in zip(row[2].split(", "), ("gradient", "parameter")):
            assert end[f"{phase}_loss_rate"] == pytest.approx(float(share.strip("%")) / 100, rel=0.1)


def test_what_quickstart_loses(short):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, options in ("plain", ["--plain"]), ("lossy", []):
        lost = float(re.search(rf"^{name} +([\d.]+)%", text, re.MULTILINE)[1]) / 100
        end = short("--loss-rate=0.1", *options)
        assert (end["gradient_loss_rate"] + end["parameter_loss_rate"]) / 2 == pytest.approx(lost, abs=0.002)


def test_how_many_rounds(short):
    """lossynet/algorithm/README.md lists the rounds by loss rate."""
    text = (ROOT / "lossynet/algorithm/README.md").read_text(encoding="utf-8")
    assert "of gradients one at 10%, two at 20%, four at 40%; of parameters one at 20%, two from 40% on" in text
    assert [short(f"--loss-rate={rate}")["rounds"] for rate in (0.1, 0.2, 0.4)] == [[1, 0], [2, 1], [4, 2]]


# ---- help ----

HELPED = sorted(str(path.relative_to(ROOT)) for folder in ("scripts", "scripts/sweeps", "scripts/pretrain_7b", "data")
                for path in (ROOT / folder).iterdir() if path.suffix in (".py", ".sh") and os.access(path, os.X_OK))


@pytest.mark.parametrize("program", [*HELPED, "tokenize", "train_llama2"])
def test_help_fits_a_terminal(program):
    path = ROOT / program if "/" in program else BUILD / program
    done = subprocess.run([path, "--help"], env={**os.environ, "COLUMNS": "80"}, text=True, capture_output=True,
                          timeout=TIMEOUT, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not [line for line in done.stdout.splitlines() if len(line) > 80]
    short = subprocess.run([path, "-h"], env={**os.environ, "COLUMNS": "80"}, text=True, capture_output=True,
                           timeout=TIMEOUT, check=False)
    assert short.returncode == 0 and short.stdout == done.stdout, short.stderr
    wrong = subprocess.run([path, "--no-such-option"], text=True, capture_output=True, timeout=TIMEOUT, check=False)
    assert wrong.returncode == 2 and wrong.stderr and "Traceback" not in wrong.stderr, wrong.stderr

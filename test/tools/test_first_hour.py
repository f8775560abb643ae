"""Runs the commands of the README's section "Train your own model", line by line, in a folder that has only the
repository's files and the built programs. Runs are shortened to a few steps."""
import os
import re
import shutil
import subprocess
import sys

import pytest

from program import BUILD, ROOT

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
        done = subprocess.run(short, shell=True, cwd=home, env=environment, text=True, capture_output=True, timeout=300,
                              check=False)
        assert done.returncode == 0, f"{short}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert not lacks or lacks == ["etcd"] or lacks == ["mpirun"], lacks
    assert (home / "out/run/report.svg").exists() and (home / "out/run.csv").exists()

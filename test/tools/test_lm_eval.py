"""Tests scripts/lm_eval.sh with a stand-in for its virtual environment."""
import os
import shutil
import subprocess

import pytest

from program import ROOT, TIMEOUT

SCRIPT = ROOT / "scripts" / "lm_eval.sh"


@pytest.fixture(name="model")
def make_model(tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    return tmp_path / "model"


def call(*arguments, code=0, **environment):
    done = subprocess.run([SCRIPT, *map(str, arguments)], text=True, capture_output=True, check=False, timeout=TIMEOUT,
                          env={**os.environ, **{name: str(value) for name, value in environment.items()}})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def stand_in(folder, installs=0, evaluates=0):
    """A Python that says what it is asked to do. Its venv is a copy of it."""
    (folder / "python").write_text(f"""#!/bin/sh
echo "$@" >>{folder}/asked
case "$*" in
*venv*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
*pip*) exit {installs} ;;
*) exit {evaluates} ;;
esac
""")
    (folder / "python").chmod(0o755)
    return folder / "python"


def test_it_installs_once_and_passes_options_on(model, tmp_path):
    places = {"PYTHON": stand_in(tmp_path), "LM_EVAL_VENV": tmp_path / "venv"}
    assert "installing lm_eval in" in call(model, "--tasks", "piqa,arc_easy", "--limit", 5, **places).stderr
    assert call(model, "--tasks=piqa", **places).stderr == ""
    venv, pip, first, second = (tmp_path / "asked").read_text().splitlines()
    assert venv == f"-m venv {tmp_path}/venv" and pip.endswith("scripts/requirements-lm-eval.txt")
    fixed = f"-m lm_eval --model hf --model_args pretrained={model},dtype=float32,add_bos_token=True"
    assert first == f"{fixed} --tasks piqa,arc_easy --limit 5" and second == f"{fixed} --tasks=piqa"


def test_transformers_is_told_how_llama_tokenises(model, tmp_path):
    """A view of the model has the file that checkpoints lack; it is gone afterwards."""
    (model / "tokenizer_config.json").unlink()
    python = stand_in(tmp_path)
    python.write_text(python.read_text().replace("*) exit 0", f"*) cd \"$(echo $6 "
                      f"| sed 's/pretrained=//;s/,.*//')\" && pwd >{tmp_path}/view && cat config.json tokenizer.model tokenizer_config.json >{tmp_path}/seen; exit 0"))
    call(model, "--tasks", "piqa", PYTHON=python, LM_EVAL_VENV=tmp_path / "venv")
    assert (tmp_path / "seen").read_text() == \
        '{}{}{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}\n'
    assert not os.path.exists((tmp_path / "view").read_text().strip())
    assert sorted(path.name for path in model.iterdir()) == ["config.json", "tokenizer.model"]


def test_what_fails_is_said(model, tmp_path):
    usage = call(model, code=2).stderr
    assert usage.startswith("lm_eval.sh: usage:") and call(model, "--limit", 3, code=2).stderr == usage
    assert "it has no config.json" in call(tmp_path, "--tasks", "x", code=1).stderr
    (model / "tokenizer.model").unlink()
    assert "has no tokenizer.model" in call(model, "--tasks", "x", code=1).stderr
    (model / "tokenizer.json").write_text("{}")
    places = {"LM_EVAL_VENV": tmp_path / "venv", "PYTHON": stand_in(tmp_path, installs=1)}
    assert "cannot install lm_eval from PyPI" in call(model, "--tasks", "x", code=1, **places).stderr
    assert not (tmp_path / "venv" / "requirements.txt").exists()  # the next call tries again
    shutil.rmtree(tmp_path / "venv")
    places["PYTHON"] = stand_in(tmp_path, evaluates=3)
    assert "HF_HUB_OFFLINE=1" in call(model, "--tasks", "x", code=1, **places).stderr

"""Tests scripts/sweeps/sweep_rules.py: the patches of others' rules fit the sources, and sweeps keep their results
apart. The programs are not built here; `scripts/sweeps/sweep.py others` builds them."""
import importlib
import re
import shutil
import sys

import pytest

from program import BUILD, ROOT, markov_files

sys.path.insert(0, str(ROOT / "scripts" / "sweeps"))
sweep_rules = importlib.import_module("sweep_rules")
sweep_settings = importlib.import_module("sweep_settings")

pytestmark = pytest.mark.quick

PATCHES = sorted((ROOT / "scripts" / "sweeps" / "others").glob("*.patch"))


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """The settings file `others`, with other data."""
    folder = tmp_path_factory.mktemp("rules")
    data = markov_files(folder, 64, 4000, 600)
    text = (ROOT / "scripts" / "sweeps" / "settings" / "others").read_text()
    for name in ("train", "val"):
        text = re.sub(rf"^{name} = .*$", f"{name} = {data}/{name}.bin", text, flags=re.MULTILINE)
    (folder / "others").write_text(text)
    settings = sweep_settings.Settings(str(folder / "others"), str(BUILD / "train_llama2"))
    settings.expand()
    return settings


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_fits_the_sources(patch, tmp_path, monkeypatch):
    """It changes the files that it names and no others, also where an earlier sweep left a copy."""
    monkeypatch.setattr(sweep_rules, "SOURCES", ("Makefile", "llmc", "lossynet"))
    named = set(re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(), flags=re.MULTILINE))
    folder = tmp_path / "copy"
    for _ in range(2):
        sweep_rules.copy_sources(str(folder))
        sweep_rules.apply_patch(patch.stem, str(folder))
    changed = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
               and path.read_bytes() != (ROOT / path.relative_to(folder)).read_bytes()}
    assert named and changed == named


def test_a_patch_that_does_not_fit_gets_one_line(tmp_path):
    shutil.copytree(ROOT / "llmc" / "comm", tmp_path / "llmc" / "comm")
    (tmp_path / "llmc" / "comm" / "data_parallel.c").write_text("int x;\n")
    with pytest.raises(sweep_settings.SettingsError, match="dblp.patch does not fit the sources: error: .*"):
        sweep_rules.apply_patch("dblp", str(tmp_path))
    with pytest.raises(sweep_settings.SettingsError, match="rule 'none such': there is no file"):
        sweep_rules.apply_patch("none such", str(tmp_path))


def test_results_name_the_rule(settings):
    """A run with a rule has an id of its own and says so, and is compared with the program's own run without
    loss. Its command is the program's, without an option that the program does not know."""
    rules = {}
    for run in settings.runs:
        rules.setdefault(run.value("rule", "none"), []).append(run)
    assert set(rules) == {"none"} | {patch.stem for patch in PATCHES}
    for rule, runs in rules.items():
        for run in runs:
            assert run.key.get("rule", "none") == rule
            assert "--rule" not in run.command("program", settings.known)
            assert (f"rule {rule}" in run.label()) == (rule != "none")
    own = {run.id for run in rules.pop("none")}
    for runs in rules.values():
        assert all(run.id not in own and run.baseline in own for run in runs)

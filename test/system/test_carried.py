"""Tests what checkpoints keep of the model that a run began with, although the program has no say in it."""
import json
import os
import subprocess

import pytest

from program import PROGRAM, TIMEOUT, small_model, succeed
from test_resume import VOCABULARY, checkpoint, data, settings  # pylint: disable=unused-import

pytestmark = [pytest.mark.spread, pytest.mark.takes(5)]

FILES = {"tokenizer.json": b'{"added_tokens": [{"id": 61, "content": "<end>"}, {"id": 60, "content": "<begin>"}]}\n',
         "tokenizer_config.json": b'{"bos_token": {"content": "<begin>"},\r\n "eos_token": "<end>"}',
         "special_tokens_map.json": b'{"eos_token": "\xff"}', "chat_template.jinja": b"{{ bos_token }}",
         "generation_config.json": b'{"eos_token_id": [61, 62]}', "LICENSE.txt": b"as is", "USE_POLICY.md": b""}
FIELDS = {"bos_token_id": 60, "eos_token_id": [61, 62], "pad_token_id": 63, "pretraining_tp": 1, "initializer_range": 0.5,
          "mine": {"a": [None, 1.5]}}


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def plain(data, folder):
    """The data without a tokenizer beside it."""
    folder.mkdir()
    (folder / "train.bin").write_bytes((data / "train.bin").read_bytes())
    return folder


@pytest.fixture(name="source")
def make_source(tmp_path):
    folder = small_model(tmp_path / "model", VOCABULARY, layers=1)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "README.md").write_text("says what the source can do")
    text = json.dumps({**config_of(folder), **FIELDS, "dtype": "bfloat16"})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("ranks, changes", [(0, {}), (2, {"shard_size": 1e-6})])
def test_files_and_fields_of_the_source(data, source, tmp_path, ranks, changes):
    """Also through a second run, its resume, and the removal of the checkpoints that it began with."""
    folder = plain(data, tmp_path / "plain")
    common = dict(val=None, save_every=1, keep=1, **changes)
    succeed(*settings(folder, tmp_path / "1", model=source, steps=2, **common), ranks=ranks)
    second = dict(model=checkpoint(tmp_path / "1", 2), resume="auto", **common)
    succeed(*settings(folder, tmp_path / "2", steps=2, **second), ranks=ranks)
    succeed(*settings(folder, tmp_path / "2", steps=4, **second), ranks=ranks)
    last = checkpoint(tmp_path / "2", 4)
    own = {path.name for path in last.iterdir() if path.suffix == ".safetensors"} | {
        "config.json", "trainer.json"} | ({"model.safetensors.index.json"} if changes else set())
    assert {path.name: path.read_bytes() for path in last.iterdir() if path.name not in own} == FILES
    config = config_of(last)
    assert {name: config[name] for name in FIELDS} == FIELDS
    assert config["torch_dtype"] == "float32" and "dtype" not in config
    listed = json.loads((last / "trainer.json").read_text(encoding="utf-8"))["files"]
    assert set(FILES) <= set(listed)


def test_a_name_that_a_checkpoint_cannot_list(data, source, tmp_path):
    """Its list of files is JSON."""
    os.rename(source / "LICENSE.txt", os.fsencode(source) + b"/LICENSE-fran\xe7ais")
    out = tmp_path / "out"
    done = subprocess.run(list(map(str, [PROGRAM, *settings(data, out, model=source, steps=1, val=None)])),
                          stderr=subprocess.PIPE, timeout=TIMEOUT, check=False)
    assert done.returncode == 1 and b"/LICENSE-fran\xe7ais': expected a name in UTF-8" in done.stderr, done.stderr
    assert done.stderr.count(b"\n") == 1 and not list(out.glob("checkpoint*"))


def test_the_shape_alone_has_fields_and_no_files(data, source, tmp_path):
    folder = plain(data, tmp_path / "plain")
    succeed(*settings(folder, tmp_path / "out", model=source / "config.json", steps=1, val=None))
    last = checkpoint(tmp_path / "out", 1)
    assert {name: config_of(last)[name] for name in FIELDS} == FIELDS
    assert not {path.name for path in last.iterdir()} & set(FILES)


def test_another_tokenizer_replaces_all_files_of_the_source_s(data, source, tmp_path):
    """The data have a tokenizer.model beside them."""
    succeed(*settings(data, tmp_path / "out", model=source, steps=1, val=None))
    names = {path.name for path in checkpoint(tmp_path / "out", 1).iterdir()}
    assert names & {*FILES, "tokenizer.model"} == {"tokenizer.model", "generation_config.json", "LICENSE.txt",
                                                   "USE_POLICY.md"}


@pytest.mark.parametrize("settings_known", [True, False])
def test_ids_of_a_new_model_are_its_tokenizer_s(data, tmp_path, settings_known):
    """transformers takes 1 and 2 where config.json has none."""
    folder = plain(data, tmp_path / "plain")
    for name in ["tokenizer.json", "tokenizer_config.json"][:1 + settings_known]:
        (folder / name).write_bytes(FILES[name])
    succeed(*settings(folder, tmp_path / "out", steps=1, val=None))
    config = config_of(checkpoint(tmp_path / "out", 1))
    assert (config["bos_token_id"], config["eos_token_id"]) == ((60, 61) if settings_known else (None, None))

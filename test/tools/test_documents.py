"""Tests the READMEs of the repository and its folders: they are short, and name files that exist."""
import fnmatch
import os
import pathlib
import re
import subprocess

import pytest

from program import ROOT

pytestmark = pytest.mark.quick

FILES = [pathlib.PurePath(name) for name in subprocess.run(
    ["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False).stdout.splitlines()
         if (ROOT / name).exists()]
if not FILES:
    pytest.skip("this is no clone of the repository: git lists no files", allow_module_level=True)
# Folders of inputs and reference values. The README of the folder above describes them.
DATA = ("test/corpus/", "test/goldens/")
FOLDERS = sorted({str(path.parent) for path in FILES if not str(path).startswith((".", *DATA))
                  and path.parent != pathlib.PurePath(".")})
DOCUMENTS = [path for path in FILES if path.suffix == ".md"]


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


def test_readme_is_read_in_ten_minutes():
    text = read("README.md")
    assert len(text.splitlines()) <= 180 and len(text.split()) <= 2000
    assert "make quickstart" in text and "make test" in text


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_its_files_are(folder):
    text = read(pathlib.PurePath(folder, "README.md"))
    assert len(text.splitlines()) <= 66, "more than a page: move results to a document of their own"
    words = {word.split(".")[0] for word in re.findall(r"[\w*-]+(?:\.[\w*]+)?", text)}
    for path in FILES:
        if str(path.parent) != folder or path.suffix in (".md", ".png", ".csv", ".jsonl"):
            continue
        assert any(fnmatch.fnmatch(path.stem, word) for word in words), \
            f"{folder}/README.md does not name {path.name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_what_a_document_names_is_there(document):
    text = read(document)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not link.startswith("http"):
            assert (ROOT / document.parent / link).exists(), link
    for path in re.findall(r"`((?:data|dev|llmc|lossynet|scripts|test)/[\w/.-]+)`", text):
        assert (ROOT / path).exists(), path
    for link, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", text):
        if not link.startswith("http"):
            target = os.path.normpath(document.parent / link) if link else document
            titles = re.findall(r"^#+ (.*)$", read(target), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
            assert anchor in anchors, f"{link}#{anchor}"
